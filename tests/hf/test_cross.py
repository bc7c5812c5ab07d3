"""Whisper's decoder: text and encoder keys in one row of the cache give what transformers gives from two caches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.hf.ours import SCHEDULES, verdicts
from tests.hf.theirs import Recorded, assert_only_rounding, record, tiny
from tests.support import ROUTES

ENCODER_LENS = (11, 3, 16)  # two of them end inside a page, where the text goes on


@cache
def recorded() -> list[Recorded]:
    model = tiny(
        "WhisperForConditionalGeneration", "WhisperConfig", d_model=32, hidden_size=32, encoder_layers=1,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, num_attention_heads=4,
        num_key_value_heads=4, decoder_ffn_dim=32, encoder_ffn_dim=32, max_target_positions=64, max_source_positions=16,
        num_mel_bins=4, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    return record(model, encoder_lens=ENCODER_LENS)


def compare(layers: list[Recorded] | None = None, **arguments: Any) -> list[bool]:
    found = verdicts(layers or recorded(), **dict(schedule="at_once") | arguments)
    return [verdict.ok for verdict in found]


def test_every_second_layer_attends_to_the_encoder():
    assert [layer.layer.is_cross_attention for layer in recorded()] == [False, True, False, True]
    assert [len(k) for k in recorded()[1].k] == list(ENCODER_LENS)


def test_their_fp32_is_their_fp64_but_for_rounding():
    for layer in recorded():
        assert_only_rounding(layer)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("page_size", [4, 16])
def test_text_and_cross_layers_give_what_transformers_gives(page_size, schedule, route):
    assert all(compare(page_size=page_size, schedule=schedule, route=route))


# ---- a comparison that lets a mistake pass would be worth nothing ------------------------------------------------


def one_token_short(layer: Recorded) -> Recorded:
    return replace(layer, k=[x[:-1] for x in layer.k], v=[x[:-1] for x in layer.v])


def of_another_request(layer: Recorded) -> Recorded:
    return replace(layer, k=layer.k[1:] + layer.k[:1], v=layer.v[1:] + layer.v[:1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mistake", [one_token_short, of_another_request], ids=lambda mistake: mistake.__name__)
def test_other_encoder_keys_are_noticed_in_cross_layers_and_in_no_other(mistake, route):
    layers = [mistake(layer) if layer.layer.is_cross_attention else layer for layer in recorded()]
    assert compare(layers, route=route) == [True, False, True, False]


@pytest.mark.parametrize("route", ROUTES)
def test_scaling_queries_that_are_scaled_already_is_noticed(route):
    """Whisper scales its queries itself and passes a scale of 1."""
    assert all(layer.layer.scaling == 1 for layer in recorded())
    scaled = [replace(x, layer=replace(x.layer, scaling=x.layer.head_dim**-0.5)) for x in recorded()]
    assert not any(compare(scaled, route=route))
