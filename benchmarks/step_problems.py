"""Attention of whole steps as problems: a batch, some layers with caches of their own, and queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa_ref import AttentionLayer, BackendConfig, ForwardBatch, ForwardMode, MHAKVPool
from fa_ref.cases import make_case

LAYERS = 32
CACHES = 256 << 20  # bytes of keys and values between two reads of the same: five times the L2 of an H200


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """Layers of one batch over a cache that holds all their keys: nothing is written in a step."""

    config: BackendConfig
    batch: ForwardBatch
    layers: list[AttentionLayer]
    q: Tensor  # [tokens, heads * head_dim], the same for all layers
    cached: str  # a remark where the caches of all layers fit the L2


def problem(
    mode: ForwardMode,
    requests: int,
    context: int,
    *,
    layers: int = LAYERS,
    device: str = "cuda",
    head_dim: int = 128,
    heads: int = 32,
    kv_heads: int = 8,
    **settings: Any,
) -> StepProblem:
    """`requests` of `context` cached tokens (DECODE: the new one counts). Rows hold twice as many.

    Random keys and values in every slot. Layers share caches only as far as these are too large for the L2.
    """
    past = context - 1 if mode.is_decode() and not settings.get("topk") else context
    case = make_case(
        mode, prefix_lens=[past] * requests, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16,
        device=device, poison=False, context_len=2 * context, **dict(page_size=1) | settings,
    )  # fmt: skip
    used = requests * context * kv_heads * head_dim * 2 * 2
    count = min(layers, -(-CACHES // used)) if device == "cuda" else min(layers, 2)
    pool = MHAKVPool(
        size=case.config.token_to_kv_pool.size, page_size=case.config.page_size, dtype=torch.bfloat16,
        head_num=kv_heads, head_dim=head_dim, layer_num=count, device=device,
    )  # fmt: skip
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    return StepProblem(
        config=replace(case.config, token_to_kv_pool=pool),
        batch=case.batch,
        layers=[replace(case.layer, layer_id=i % count) for i in range(layers)],
        q=case.q,
        cached="" if count * used >= CACHES // 2 else "the caches of all layers fit the L2, on both sides",
    )


def binary_trees(requests: int, drafts: int) -> list[list[int]]:
    """Parents of the drafts of every request: each has up to two children."""
    return [[-1, *((i - 1) // 2 for i in range(1, drafts))]] * requests
