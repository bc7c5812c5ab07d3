"""DECODE with DraftInput: a draft model guesses ahead, step by step, on one branch a request or on several.

At step s every branch has s tokens behind it and writes its next. One branch is plain decoding over
seq_lens + s + 1 keys: its draft slots follow the prefix in req_to_token. Several branches share the prefix and
nothing else, so each request becomes one prefix pass for all its branches and one small tree of disjoint paths.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange, repeat

from fa_ref.api import (
    AttentionPass,
    BackendConfig,
    BadBatch,
    DraftInput,
    ForwardBatch,
    LayerKind,
    TreePass,
    window_left,
)
from fa_ref.api.bounds import pool_of
from fa_ref.planning.decode import plan_decode
from fa_ref.planning.page_table import swa_slots
from fa_ref.planning.speculative import kind_mask, prefix_pass


def plan_draft(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int
) -> tuple[AttentionPass | TreePass, ...]:
    """Step `step` (from 0) of draft decoding. With topk > 1, query rows are request-major: [request, branch]."""
    draft = batch.spec_info
    assert isinstance(draft, DraftInput)
    if draft.topk <= 1:
        return plan_decode(batch.grown(step + 1), config, kind)
    if batch.out_cache_loc is None:
        raise BadBatch("draft decoding with topk > 1 needs out_cache_loc [request, branch, step], which is None")
    depth = batch.seq_lens.new_full((batch.batch_size, 1), step)
    return prefix_pass(batch, config, kind, draft.topk, depth), branch_pass(batch, config, kind, step)


def branch_pass(batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int) -> TreePass:
    """Each branch over its own step + 1 draft tokens; other branches are hidden by the mask."""
    draft = batch.spec_info
    assert isinstance(draft, DraftInput) and batch.out_cache_loc is not None
    topk = draft.topk
    slots = rearrange(batch.out_cache_loc, "(r b s) -> r b s", b=topk, s=draft.num_steps)[..., : step + 1]
    slots = rearrange(slots, "r b s -> r (b s)").to(torch.int32)
    pool = pool_of(kind, config)
    if pool == "swa":
        slots = swa_slots(batch.token_to_kv_pool or config.token_to_kv_pool, slots)

    branch, steps = torch.arange(topk, device=slots.device), torch.arange(step + 1, device=slots.device)
    same_branch = rearrange(branch, "q -> q 1") == repeat(branch, "b -> 1 (b s)", s=step + 1)
    start = rearrange(batch.seq_lens, "r -> r 1")
    q_pos = start + torch.full_like(branch, step)
    k_pos = start + repeat(steps, "s -> (b s)", b=topk)
    return TreePass(
        slots=slots,
        mask=same_branch & kind_mask(kind, config, q_pos, k_pos),
        pool=pool,
        cut_to_window=window_left(config) if kind is LayerKind.SLIDING else -1,
    )


def plan_draft_steps(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, steps: int
) -> list[tuple[AttentionPass | TreePass, ...]]:
    """The plans of steps 0 .. steps - 1. Steps of full layers share one page table; only lengths and branches grow."""
    plans = [plan_draft(batch, config, kind, step) for step in range(steps)]
    if kind is not LayerKind.FULL or not plans:  # windows and chunks are cut anew at every step
        return plans
    first = plans[0][0]
    assert isinstance(first, AttentionPass)
    return [(replace(prefix, page_table=first.page_table), *rest) for prefix, *rest in plans]  # type: ignore[arg-type]
