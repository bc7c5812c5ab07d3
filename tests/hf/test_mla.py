"""DeepSeek-V3: latents cached once for all heads give what transformers computes from keys and values of every head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_ref.api import MLAProjections, chunk_prefix
from fa_ref.numerics import Verdict, judge
from tests.hf.ours import SCHEDULES, batch_of, in_pieces, paged, verdicts
from tests.hf.theirs import PROMPTS, Recorded, assert_only_rounding, record, tiny
from tests.support import ROUTES

LATENT, ROPE, NOPE, V_DIM, HEADS = 24, 8, 16, 12, 4


@cache
def recorded() -> tuple[list[Recorded], list[Recorded]]:
    """Every layer as their code runs it, and in the absorbed form."""
    model = tiny(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=20,
        kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=V_DIM, num_key_value_heads=HEADS,
        head_dim=ROPE,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
        ), max_position_embeddings=64,
    )  # fmt: skip
    latents: dict[int, list[Tensor]] = defaultdict(list)  # of all requests, one after the other
    layers = [layer.self_attn for layer in model.model.layers]
    for module in layers:
        keep = latents[module.layer_idx].append
        module.kv_a_layernorm.register_forward_hook(lambda module, args, out, keep=keep: keep(out[0]))

    def expanded(module: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Their keys and values from the latents, by kv_b_proj in fp64."""
        latent = torch.cat(latents[module.layer_idx])[-k.shape[2] :].double()
        by_head = (latent @ module.kv_b_proj.weight.double().T).unflatten(1, (HEADS, -1)).transpose(0, 1)[None]
        return torch.cat([by_head[..., :NOPE], k[..., NOPE:].double()], dim=-1), by_head[..., NOPE:]

    found = record(model, finer=expanded)
    weights = [MLAProjections.of_kv_b_proj(m.kv_b_proj.weight.detach(), heads=HEADS, nope=NOPE) for m in layers]
    totals = [len(q) for q in found[0].q]
    return found, [
        absorbed(layer, split, torch.cat(latents[layer.layer.layer_id]).split(totals))
        for layer, split in zip(found, weights, strict=True)
    ]


def absorbed(recorded: Recorded, weights: MLAProjections, latents: tuple[Tensor, ...]) -> Recorded:
    """The same layer with one key head, whose rows are [latent | rope] and whose values are the latent."""
    q = [torch.cat([torch.einsum("thn,hnc->thc", q[..., :NOPE], weights.w_uk), q[..., NOPE:]], -1) for q in recorded.q]
    k = [torch.cat([latent[:, None], k[:, :1, NOPE:]], -1) for latent, k in zip(latents, recorded.k, strict=True)]
    layer = replace(recorded.layer, tp_k_head_num=1, tp_v_head_num=1, head_dim=LATENT + ROPE, v_head_dim=LATENT)
    return replace(recorded, layer=layer, q=q, k=k, v=[x[:, None] for x in latents], w_uv=weights.w_uv)


def compare(change: Callable[[Recorded], Recorded] = lambda x: x, **arguments: Any) -> list[bool]:
    layers = [change(layer) for layer in recorded()[1]]
    return [verdict.ok for verdict in verdicts(layers, **dict(schedule="at_once") | arguments)]


def test_their_fp32_is_their_fp64_but_for_rounding():
    for layer in recorded()[0]:
        assert_only_rounding(layer)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("page_size", [4, 16])
def test_absorbed_layers_give_what_transformers_gives(page_size, schedule, route):
    assert compare(page_size=page_size, schedule=schedule, route=route) == [True, True]


def mha_form(layer: Recorded, route: str, *, left_out: int = 0, piece: int = 11, workspace: int = 13) -> list[Tensor]:
    """The prompts in pieces, each in the MHA form: its own tokens, then its prefix in chunks, merged."""
    package, provider = ROUTES[route]
    config = paged(recorded()[1], [len(q) for q in layer.q], page_size=4)
    backend = package.FlashAttentionBackend(config, provider=provider)
    found: list[list[Tensor]] = [[] for _ in PROMPTS]
    done = [0] * len(PROMPTS)
    for mode, new in in_pieces(piece):
        if mode.is_decode():  # decodes are absorbed
            break
        present = [r for r, tokens in enumerate(new) if tokens]
        own = [(r, done[r], done[r] + new[r]) for r in present]
        batch = replace(batch_of(config, mode, present, done, new), attn_attend_prefix_cache=False, mha_return_lse=True)
        chunks = chunk_prefix([done[r] for r in present], workspace)
        backend.init_forward_metadata(batch)
        state: Any = None
        for chunk in range(-1, max(0, len(chunks) - left_out)):
            keys = own
            if chunk >= 0:
                batch = chunks.batch(batch, chunk)
                ends = (chunks.starts[chunk] + chunks.seq_lens[chunk]).tolist()
                keys = list(zip(present, chunks.starts[chunk].tolist(), ends, strict=True))
            q, k, v = (rows(x, at) for x, at in ((layer.q, own), (layer.k, keys), (layer.v, keys)))
            part = backend.forward(q, k, v, layer.layer, batch, save_kv_cache=False)
            state = part if state is None else package.merge_state(*state, *part)
        for r, out in zip(present, state[0].split([new[r] for r in present]), strict=True):
            found[r].append(out)
        done = [a + b for a, b in zip(done, new, strict=True)]
    return [torch.cat(steps) for steps in found]


def rows(per_request: list[Tensor], spans: list[tuple[int, int, int]]) -> Tensor:
    return torch.cat([per_request[r][start:end] for r, start, end in spans]).flatten(1)


def prompts_of(per_request: list[Tensor]) -> Tensor:
    return torch.cat([x[:prompt] for x, prompt in zip(per_request, PROMPTS, strict=True)])


def mha_verdict(layer: Recorded, route: str, left_out: int = 0) -> Verdict:
    found = mha_form(layer, route, left_out=left_out)
    return judge(torch.cat(found), prompts_of(layer.fine), prompts_of(layer.out))


@pytest.mark.parametrize("route", ROUTES)
def test_prompts_in_the_mha_form_give_what_transformers_gives(route):
    assert all(mha_verdict(layer, route).ok for layer in recorded()[0])


# ---- a comparison that lets a mistake pass would be worth nothing ------------------------------------------------

MISTAKES: dict[str, Callable[[Recorded], Recorded]] = {
    "scale-without-yarn": lambda x: replace(x, layer=replace(x.layer, scaling=(NOPE + ROPE) ** -0.5)),
    "scale-from-the-cached-width": lambda x: replace(x, layer=replace(x.layer, scaling=(LATENT + ROPE) ** -0.5)),
    "keys-without-rope": lambda x: replace(x, k=[torch.cat([v, torch.zeros(len(v), 1, ROPE)], -1) for v in x.v]),
    "values-of-other-heads": lambda x: replace(x, w_uv=x.w_uv.roll(1, 0)),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_absorbed_layer_is_noticed(mistake, route):
    assert compare(MISTAKES[mistake], route=route) == [False, False]


@pytest.mark.parametrize("route", ROUTES)
def test_a_prefix_chunk_left_out_is_noticed(route):
    assert not any(mha_verdict(layer, route, left_out=1).ok for layer in recorded()[0])
