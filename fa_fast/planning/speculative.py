"""The shared prefix of drafts on the device. Twin of fa_ref.planning.speculative, which explains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.fixed import constant, count_up
from fa_fast.planning.page_table import paged_view
from fa_fast.planning.ragged import equal_starts
from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, window_left
from fa_ref.api.bounds import longest_request, pool_of
from fa_ref.api.checks import req_to_token


def prefix_pass(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, queries: int, depth: Tensor | int
) -> AttentionPass:
    """depth: int [requests, depths], or a number if all queries are equally deep."""
    pool, page_size, cut = pool_of(kind, config), config.page_size, -1
    if kind is LayerKind.SLIDING:
        cut = longest = window_left(config)
        table, row_index, page_size = newest_first(batch, config, pool, max(cut, 1)), None, 1
        lens = cut_lens(batch, config, kind, depth)
    elif kind is LayerKind.LOCAL:
        chunk = longest = config.attention_chunk_size or 0
        table, row_index, _ = paged_view(batch, config, pool, chunk=chunk, width=chunk // page_size)
        lens = cut_lens(batch, config, kind, depth)
    else:
        table, row_index, lens = paged_view(batch, config, pool)
        lens, longest = lens[:, None], longest_request(batch, config)
    requests, depths = lens.shape
    if depths > 1:
        row_index = constant(batch, _each_repeated, requests, depths)
    each = queries // depths
    return AttentionPass(
        page_table=table,
        row_index=row_index,
        cache_seqlens=lens.flatten().to(torch.int32),
        cu_seqlens_q=equal_starts(batch, requests * depths, each),
        max_seqlen_q=each,
        max_seqlen_k=longest,
        causal=False,
        page_size=page_size,
        pool=pool,
        takes_sinks=False,
        cut_to_window=cut,
    )


def cut_lens(batch: ForwardBatch, config: BackendConfig, kind: LayerKind, depth: Tensor | int) -> Tensor:
    """How many keys of the prefix a query so deep behind it sees through its window or in its chunk."""
    end = batch.seq_lens[:, None]
    if kind is LayerKind.LOCAL:
        chunk = config.attention_chunk_size or 1
        return torch.where((end + depth) // chunk == end // chunk, end % chunk, 0)
    cut = window_left(config)
    if isinstance(depth, int):
        return end.clamp(max=max(cut - depth, 0))
    return torch.minimum((cut - depth).clamp(min=0), end)


def newest_first(batch: ForwardBatch, config: BackendConfig, pool: str, width: int) -> Tensor:
    """int32 [requests, width]: slots of the newest `width` cached tokens of each request, newest first.

    Entries before a request's first token repeat its first slot; lengths keep them unread.
    """
    slots = req_to_token(batch, config)
    kv_pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
    newest = batch.seq_lens[:, None] - constant(batch, _from_one, width)
    picked = slots[batch.req_pool_indices.long()[:, None], newest.clamp(min=0)]
    if pool == "swa":
        picked = kv_pool.full_to_swa_index_mapping[picked.long()].to(torch.int32)
    return picked


def within_kind(
    kind: LayerKind, config: BackendConfig, batch: ForwardBatch, q_depth: Tensor, k_depth: Tensor
) -> Tensor | None:
    """What the layer kind allows between tokens so deep behind seq_lens: bool [requests, queries, keys]; None: all.

    Depths [requests or 1, queries] and [requests or 1, keys].
    """
    if kind is LayerKind.SLIDING:
        return k_depth[:, None, :] >= q_depth[:, :, None] - window_left(config)
    if kind is LayerKind.LOCAL:
        chunk, start = config.attention_chunk_size or 1, batch.seq_lens[:, None]
        return ((start + k_depth) // chunk)[:, None, :] == ((start + q_depth) // chunk)[:, :, None]
    return None


def _each_repeated(count: int, times: int, device: torch.device) -> Tensor:
    return count_up(count, device).repeat_interleave(times, output_size=count * times)


def _from_one(count: int, device: torch.device) -> Tensor:
    return count_up(count, device) + 1
