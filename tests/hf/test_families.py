"""Our attention is that of transformers, in every layer of the families it serves: code that nobody here wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.hf.ours import SCHEDULES, verdicts
from tests.hf.theirs import Recorded, assert_only_rounding, record, tiny
from tests.support import ROUTES

ROOT = Path(__file__).parent.parent.parent
CHUNK, WINDOW = 16, 6


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model of transformers, and what its layers must turn out to use: the table cannot quietly test less."""

    model: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)
    kinds: str  # of its layers: F full, S sliding, L local
    chunk: int | None = None
    uses: set[str] = field(default_factory=set)


FAMILIES = {
    "llama4": Family(
        model="Llama4ForCausalLM",
        config="Llama4TextConfig",
        sizes=dict(
            num_hidden_layers=4, attention_chunk_size=CHUNK, floor_scale=8, intermediate_size_mlp=32,
            num_local_experts=2,
        ),
        kinds="LLLF",
        chunk=CHUNK,
    ),
    "gemma2": Family(
        model="Gemma2ForCausalLM",
        config="Gemma2Config",
        sizes=dict(num_hidden_layers=4, sliding_window=WINDOW, query_pre_attn_scalar=40),
        kinds="SFSF",
        uses={"softcap", "own scale"},
    ),
    "gemma3": Family(
        model="Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        sizes=dict(num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=3, query_pre_attn_scalar=40),
        kinds="SSFS",
        uses={"own scale"},
    ),
    "gpt-oss": Family(
        model="GptOssForCausalLM",
        config="GptOssConfig",
        sizes=dict(num_hidden_layers=4, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
        kinds="SFSF",
        uses={"sinks"},
    ),
    "mistral": Family(
        model="MistralForCausalLM",
        config="MistralConfig",
        sizes=dict(num_hidden_layers=2, sliding_window=WINDOW),
        kinds="SS",
    ),
}  # fmt: skip
TWO_POOLS = [name for name, family in FAMILIES.items() if len(set(family.kinds)) > 1]  # full layers, and others


@cache
def recorded(name: str) -> list[Recorded]:
    family = FAMILIES[name]
    return record(tiny(family.model, family.config, **family.sizes))


def compare(name: str, layers: list[Recorded] | None = None, **arguments: Any) -> list[bool]:
    """Layer by layer, whether our output is theirs."""
    arguments = dict(schedule="at_once", chunk=FAMILIES[name].chunk) | arguments
    return [verdict.ok for verdict in verdicts(layers or recorded(name), **arguments)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_models_have_the_layers_and_features_they_are_here_for(name):
    family, layers = FAMILIES[name], recorded(name)
    found = ["L" if x.layer.use_irope else "S" if (x.layer.sliding_window_size or 0) > 0 else "F" for x in layers]
    assert "".join(found) == family.kinds
    assert all((x.layer.logit_cap > 0) == ("softcap" in family.uses) for x in layers)
    assert all((x.sinks is not None) == ("sinks" in family.uses) for x in layers)
    assert all((x.layer.scaling != x.layer.head_dim**-0.5) == ("own scale" in family.uses) for x in layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_their_fp32_is_their_fp64_but_for_rounding(name):
    """The budget is derived from their difference: were it large, anything would pass."""
    for layer in recorded(name):
        assert_only_rounding(layer)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_gives_what_transformers_gives(name, page_size, schedule, route):
    assert all(compare(name, page_size=page_size, schedule=schedule, route=route))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", TWO_POOLS)
def test_every_layer_gives_the_same_from_two_pools(name, route):
    assert all(compare(name, schedule="one_after_another", route=route, two_pools=True))


# ---- a comparison that lets a mistake pass would be worth nothing ------------------------------------------------


def layer_with(**changes: Any) -> Callable[[Recorded], Recorded]:
    return lambda recorded: replace(recorded, layer=replace(recorded.layer, **changes))


def windows_by(tokens: int) -> Callable[[Recorded], Recorded]:
    def change(recorded: Recorded) -> Recorded:
        left = recorded.layer.sliding_window_size or 0
        return layer_with(sliding_window_size=left + tokens)(recorded) if left > 0 else recorded

    return change


def sinks_of_other_heads(recorded: Recorded) -> Recorded:
    assert recorded.sinks is not None
    return replace(recorded, sinks=recorded.sinks.roll(1))


def head_dim_scale(recorded: Recorded) -> Recorded:
    return layer_with(scaling=recorded.layer.head_dim**-0.5)(recorded)


MISTAKES: dict[str, tuple[str, Callable[[Recorded], Recorded], str, dict[str, Any]]] = {
    # name: family, what is done to its layers, kinds of the layers that must differ, what is done to the config
    "llama4-no-chunk": ("llama4", layer_with(use_irope=False), "L", {}),
    "llama4-chunk-doubled": ("llama4", lambda x: x, "L", {"chunk": 2 * CHUNK}),
    "llama4-chunk-in-every-layer": ("llama4", layer_with(use_irope=True), "F", {}),
    "llama4-no-scale": ("llama4", layer_with(scaling=1.0), "LF", {}),
    "gemma2-no-softcap": ("gemma2", layer_with(logit_cap=0.0), "SF", {}),
    "gemma2-scale-from-the-head-dim": ("gemma2", head_dim_scale, "SF", {}),
    "gemma2-no-window": ("gemma2", layer_with(sliding_window_size=-1), "S", {}),
    "gemma3-scale-from-the-head-dim": ("gemma3", head_dim_scale, "SF", {}),
    "gemma3-window-in-every-layer": ("gemma3", layer_with(sliding_window_size=WINDOW - 1), "F", {}),
    "gpt-oss-no-sinks": ("gpt-oss", lambda x: replace(x, sinks=None), "SF", {}),
    "gpt-oss-sinks-of-other-heads": ("gpt-oss", sinks_of_other_heads, "SF", {}),
    "gpt-oss-no-window": ("gpt-oss", layer_with(sliding_window_size=-1), "S", {}),
    "mistral-window-one-wider": ("mistral", windows_by(1), "S", {}),
    "mistral-window-one-narrower": ("mistral", windows_by(-1), "S", {}),
    "mistral-no-scale": ("mistral", layer_with(scaling=1.0), "S", {}),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed_in_the_layers_that_have_it_and_in_no_other(mistake, route):
    name, change, kinds, config = MISTAKES[mistake]
    found = compare(name, [change(layer) for layer in recorded(name)], route=route, **config)
    assert found == [kind not in kinds for kind in FAMILIES[name].kinds]


# ---- what is said about it --------------------------------------------------------------------------------------


def test_the_page_names_every_family_and_the_version_of_ci():
    page = (ROOT / "docs" / "transformers.md").read_text()
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"version {pinned[1]} in CI" in page
    rows = re.findall(r"^\| ([\w .-]+?) \|", page, re.MULTILINE)
    assert [row.lower().replace(" ", "") for row in rows if row != "family"] == [*FAMILIES, "whisper", "deepseek-v3"]
