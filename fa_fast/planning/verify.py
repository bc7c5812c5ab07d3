"""TARGET_VERIFY on the device. Twin of fa_ref.planning.verify, which explains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.extend import chain_as_extend, plan_extend
from fa_fast.planning.speculative import prefix_pass, within_kind
from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, TreePass, VerifyInput, window_left
from fa_ref.api.bounds import pool_of
from fa_ref.api.checks import req_to_token


def plan_verify(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass | TreePass, ...]:
    """Without a custom_mask the drafts are a chain; with one, a tree. Query rows are request-major."""
    verify = batch.spec_info
    assert isinstance(verify, VerifyInput)
    if verify.custom_mask is None:
        return plan_extend(chain_as_extend(batch), config, kind)
    kv_pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
    pool = pool_of(kind, config)
    ancestors, depth, slots = tree_tables(
        verify.custom_mask,
        batch.seq_lens,
        req_to_token(batch, config),
        batch.req_pool_indices,
        drafts=verify.draft_token_num,
        mapping=kv_pool.full_to_swa_index_mapping if pool == "swa" else None,
    )
    allowed = within_kind(kind, config, batch, depth, depth)
    tree = TreePass(
        slots=slots,
        mask=ancestors if allowed is None else ancestors & allowed,
        pool=pool,
        cut_to_window=window_left(config) if kind is LayerKind.SLIDING else -1,
    )
    return prefix_pass(batch, config, kind, verify.draft_token_num, depth), tree


def tree_tables(
    custom_mask: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    rows: Tensor,
    *,
    drafts: int,
    mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(ancestors bool [requests, drafts, drafts], depth int32 [requests, drafts], slots int32 [requests, drafts]).

    custom_mask is flat: for each request `drafts` rows of seq_len + drafts columns. One Triton kernel on CUDA;
    `tree_tables_torch` is its definition.
    """
    if slots.is_cuda:
        from fa_fast.triton_ops.tree_tables import tree_tables as launch

        return launch(custom_mask, seq_lens, slots, rows, drafts, mapping)
    return tree_tables_torch(custom_mask, seq_lens, slots, rows, drafts, mapping)


def tree_tables_torch(
    custom_mask: Tensor, seq_lens: Tensor, slots: Tensor, rows: Tensor, drafts: int, mapping: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """slots int32 [rows, positions], rows int [requests], mapping int [full slots] or None."""
    row_len = seq_lens.long() + drafts
    start = torch.cumsum(row_len * drafts, dim=0) - row_len * drafts
    draft = torch.arange(drafts, device=custom_mask.device)
    first = start[:, None] + row_len[:, None] * draft + seq_lens[:, None]  # of each row's draft columns
    ancestors = custom_mask[first[:, :, None] + draft].bool()
    columns = (seq_lens[:, None] + draft).clamp(max=slots.shape[1] - 1)
    picked = slots[rows.long()[:, None], columns]
    if mapping is not None:
        picked = mapping[picked.long()]
    return ancestors, (ancestors.sum(dim=-1) - 1).to(torch.int32), picked.to(torch.int32)
