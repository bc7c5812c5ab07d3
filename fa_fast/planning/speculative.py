"""The shared prefix of drafts on the device. Twin of fa_ref.planning.speculative, which explains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.page_table import paged_view
from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, window_left
from fa_ref.api.bounds import longest_request, pool_of
from fa_ref.api.checks import req_to_token


def prefix_pass(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, queries: int, depth: Tensor
) -> AttentionPass:
    """depth: int [requests, depths], one column if all queries of a request are equally deep."""
    end = batch.seq_lens[:, None]
    pool, page_size, cut = pool_of(kind, config), config.page_size, -1
    if kind is LayerKind.SLIDING:
        cut = window_left(config)
        table, page_size, longest = newest_first(batch, config, pool, max(cut, 1)), 1, cut
        lens = torch.minimum((cut - depth).clamp(min=0), end)
        row_index = None
    elif kind is LayerKind.LOCAL:
        chunk = longest = config.attention_chunk_size or 0
        table, row_index, _ = paged_view(batch, config, pool, chunk=chunk, width=chunk // page_size)
        lens = torch.where((end + depth) // chunk == end // chunk, end % chunk, 0)
    else:
        table, row_index, lens = paged_view(batch, config, pool)
        lens, longest = lens[:, None], longest_request(batch, config)
    requests, depths = lens.shape
    if depths > 1:
        row_index = torch.arange(requests, dtype=torch.int32, device=table.device).repeat_interleave(
            depths, output_size=requests * depths
        )
    each = queries // depths
    return AttentionPass(
        page_table=table,
        row_index=row_index,
        cache_seqlens=lens.flatten().to(torch.int32),
        cu_seqlens_q=torch.arange(0, requests * queries + 1, each, dtype=torch.int32, device=table.device),
        max_seqlen_q=each,
        max_seqlen_k=longest,
        causal=False,
        page_size=page_size,
        pool=pool,
        takes_sinks=False,
        cut_to_window=cut,
    )


def newest_first(batch: ForwardBatch, config: BackendConfig, pool: str, width: int) -> Tensor:
    """int32 [requests, width]: slots of the newest `width` cached tokens of each request, newest first.

    Entries before a request's first token repeat its first slot; lengths keep them unread.
    """
    slots = req_to_token(batch, config)
    kv_pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
    newest = batch.seq_lens[:, None] - 1 - torch.arange(width, device=slots.device)
    picked = slots[batch.req_pool_indices.long()[:, None], newest.clamp(min=0)]
    if pool == "swa":
        picked = kv_pool.full_to_swa_index_mapping[picked.long()].to(torch.int32)
    return picked


def within_kind(kind: LayerKind, config: BackendConfig, q_pos: Tensor, k_pos: Tensor) -> Tensor | None:
    """What the layer kind allows between logical positions [requests, queries] and [requests, keys]; None: all."""
    rows, columns = q_pos[:, :, None], k_pos[:, None, :]
    if kind is LayerKind.SLIDING:
        return columns >= rows - window_left(config)
    if kind is LayerKind.LOCAL:
        chunk = config.attention_chunk_size or 1
        return columns // chunk == rows // chunk
    return None
