"""DECODE with DraftInput on the device. Twin of fa_ref.planning.draft, which explains it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.decode import plan_decode
from fa_fast.planning.fixed import constant, count_up
from fa_fast.planning.speculative import cut_lens, prefix_pass, within_kind
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
    (branches,) = branch_passes(batch, config, kind, [step])
    return prefix_pass(batch, config, kind, draft.topk, step), branches


def plan_draft_steps(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, steps: int
) -> list[tuple[AttentionPass | TreePass, ...]]:
    """plan_draft of steps 0 .. steps - 1, sharing what is the same for all."""
    draft = batch.spec_info
    assert isinstance(draft, DraftInput)
    if draft.topk <= 1 and kind is not LayerKind.FULL:  # windows and chunks are cut anew at every step
        return [plan_draft(batch, config, kind, step) for step in range(steps)]
    if draft.topk <= 1:
        (first,) = plan_decode(batch.grown(1), config, kind)
        return [(step,) for step in _longer(first, batch, steps)]
    prefixes = [prefix_pass(batch, config, kind, draft.topk, 0)] * steps
    if kind is not LayerKind.FULL:  # what is left of the prefix shrinks from step to step, its table does not change
        lens = [cut_lens(batch, config, kind, step).flatten().to(torch.int32) for step in range(steps)]
        prefixes = [replace(one, cache_seqlens=left) for one, left in zip(prefixes, lens, strict=True)]
    return list(zip(prefixes, branch_passes(batch, config, kind, list(range(steps))), strict=True))


def branch_passes(batch: ForwardBatch, config: BackendConfig, kind: LayerKind, steps: list[int]) -> list[TreePass]:
    """At each of these steps, each branch over its own step + 1 draft tokens."""
    draft = batch.spec_info
    assert isinstance(draft, DraftInput)
    if batch.out_cache_loc is None:
        raise BadBatch("draft decoding with topk > 1 needs out_cache_loc [request, branch, step], which is None")
    requests, topk, pool = batch.batch_size, draft.topk, pool_of(kind, config)
    slots = batch.out_cache_loc[constant(batch, _places, requests, topk, draft.num_steps, *steps)]
    if pool == "swa":
        kv_pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
        slots = kv_pool.full_to_swa_index_mapping[slots.long()]
    parts = slots.to(torch.int32).split([requests * topk * (step + 1) for step in steps])
    window = window_left(config) if kind is LayerKind.SLIDING else -1
    return [
        TreePass(
            slots=part.view(requests, topk * (step + 1)),
            mask=_visible(batch, config, kind, step, window),
            pool=pool,
            cut_to_window=window,
        )
        for step, part in zip(steps, parts, strict=True)
    ]


def _visible(batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int, window: int) -> Tensor:
    """bool [requests, branches, branches * (step + 1)]: what the branches see of the drafts up to `step`."""
    assert isinstance(batch.spec_info, DraftInput)
    topk = batch.spec_info.topk
    mask = constant(batch, branch_mask, topk, step + 1, window).expand(batch.batch_size, -1, -1)
    if kind is not LayerKind.LOCAL:
        return mask
    depth = constant(batch, _depths, topk, step + 1)
    chunk = within_kind(kind, config, batch, depth[:, step :: step + 1], depth)
    return mask if chunk is None else mask & chunk


def branch_mask(topk: int, steps: int, window: int, device: torch.device) -> Tensor:
    """bool [topk, topk * steps]: query b, at the last step, sees the steps of branch b within its window; -1: all."""
    owner = torch.arange(topk * steps, device=device) // steps
    own = torch.arange(topk, device=device)[:, None] == owner
    return own if window < 0 else own & (_depths(topk, steps, device) >= steps - 1 - window)


def _depths(topk: int, steps: int, device: torch.device) -> Tensor:
    """int32 [1, topk * steps]: how far behind seq_lens the drafts of all branches are."""
    return count_up(steps, device).repeat(topk)[None]


def _places(requests: int, topk: int, num_steps: int, *rest: Any) -> Tensor:
    """Where in out_cache_loc [request, branch, step] the slots up to each of some steps are, one step after another."""
    *steps, device = rest
    whole = torch.arange(requests * topk * num_steps, device=device).view(requests, topk, num_steps)
    return torch.cat([whole[:, :, : step + 1].flatten() for step in steps])


def _longer(first: AttentionPass, batch: ForwardBatch, steps: int) -> list[AttentionPass]:
    """`first`, and the same pass over the same table with one more key a request at every further step."""
    lens = first.cache_seqlens + constant(batch, count_up, steps)[:, None]
    if batch.seq_lens_cpu is None:
        lens = lens.clamp(max=first.page_table.shape[1] * first.page_size)
    return [replace(first, cache_seqlens=own, max_seqlen_k=first.max_seqlen_k + step) for step, own in enumerate(lens)]
