"""DECODE with DraftInput on the device. Twin of fa_ref.planning.draft, which explains it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.decode import plan_decode
from fa_fast.planning.speculative import prefix_pass, within_kind
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


def plan_draft(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int
) -> tuple[AttentionPass | TreePass, ...]:
    """Step `step` (from 0) of draft decoding; query rows are [request, branch]."""
    draft = batch.spec_info
    assert isinstance(draft, DraftInput)
    if draft.topk <= 1:
        return plan_decode(batch.grown(step + 1), config, kind)
    depth = torch.full((batch.batch_size, 1), step, dtype=batch.seq_lens.dtype, device=batch.seq_lens.device)
    return prefix_pass(batch, config, kind, draft.topk, depth), branch_pass(batch, config, kind, step)


def branch_pass(batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int) -> TreePass:
    """Each branch over its own step + 1 draft tokens."""
    draft = batch.spec_info
    assert isinstance(draft, DraftInput)
    if batch.out_cache_loc is None:
        raise BadBatch("draft decoding with topk > 1 needs out_cache_loc [request, branch, step], which is None")
    topk, device = draft.topk, batch.seq_lens.device
    slots = batch.out_cache_loc.view(batch.batch_size, topk, draft.num_steps)[:, :, : step + 1].flatten(1)
    pool = pool_of(kind, config)
    if pool == "swa":
        kv_pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
        slots = kv_pool.full_to_swa_index_mapping[slots.long()]
    mask = branch_mask(topk, step + 1, device).expand(batch.batch_size, -1, -1)
    start, steps = batch.seq_lens[:, None], torch.arange(step + 1, device=device).repeat(topk)
    allowed = within_kind(kind, config, (start + step).expand(-1, topk), start + steps)
    return TreePass(
        slots=slots.to(torch.int32),
        mask=mask if allowed is None else mask & allowed,
        pool=pool,
        cut_to_window=window_left(config) if kind is LayerKind.SLIDING else -1,
    )


def branch_mask(topk: int, steps: int, device: torch.device) -> Tensor:
    """bool [topk, topk * steps]: query b sees the steps of branch b."""
    branch = torch.arange(topk, device=device)
    owner = torch.arange(topk * steps, device=device) // steps
    return branch[:, None] == owner


def plan_draft_steps(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, steps: int
) -> list[tuple[AttentionPass | TreePass, ...]]:
    """plan_draft of steps 0 .. steps - 1, sharing the page table of the prefix wherever it is the same for all."""
    first = plan_draft(batch, config, kind, 0)
    plans = [first]
    for step in range(1, steps):
        if kind is not LayerKind.FULL:  # windows and chunks are cut anew at every step
            plans.append(plan_draft(batch, config, kind, step))
        elif len(first) == 1:
            assert isinstance(first[0], AttentionPass)
            plans.append((longer(first[0], step),))
        else:
            plans.append((first[0], branch_pass(batch, config, kind, step)))
    return plans


def longer(step: AttentionPass, tokens: int) -> AttentionPass:
    """The same pass over the same table with `tokens` more keys a request."""
    return replace(step, cache_seqlens=step.cache_seqlens + tokens, max_seqlen_k=step.max_seqlen_k + tokens)
