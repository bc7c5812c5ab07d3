"""Page tables on the device. At page size 1 req_to_token itself is the table, and nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.fixed import as_int32
from fa_ref.api import BackendConfig, ForwardBatch
from fa_ref.api.checks import req_to_token


def paged_view(
    batch: ForwardBatch, config: BackendConfig, pool: str, *, left: int = -1, chunk: int = 0, width: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(page_table int32 [rows, pages], row_index int32 [requests] or None, cache_seqlens int32 [requests]).

    left >= 0 cuts each row to what the request's last token sees through a window of left + 1 keys, chunk > 0 to
    the last token's chunk; `width` is then the number of pages to keep. Otherwise the rows are whole.
    """
    slots = req_to_token(batch, config)
    whole = left < 0 and chunk == 0
    if whole and pool == "full" and config.page_size == 1:
        lens = batch.seq_lens if batch.seq_lens_cpu is not None else batch.seq_lens.clamp(max=slots.shape[1])
        return slots, as_int32(batch, batch.req_pool_indices), as_int32(batch, lens)
    pages = -(-slots.shape[1] // config.page_size)
    kv_pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
    table, lens = gather_pages(
        slots,
        batch.req_pool_indices,
        batch.seq_lens,
        page_size=config.page_size,
        width=pages if whole else min(width, pages),
        left=left,
        chunk=chunk,
        mapping=kv_pool.full_to_swa_index_mapping if pool == "swa" else None,
    )
    return table, None, lens


def gather_pages(
    slots: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    width: int,
    left: int = -1,
    chunk: int = 0,
    mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Page ids [requests, width] from each request's first visible page on, and the keys from there [requests].

    One Triton kernel on CUDA; `gather_pages_torch` is its definition.
    """
    if slots.is_cuda:
        from fa_fast.triton_ops.gather_pages import gather_pages as launch

        return launch(slots, rows, seq_lens, page_size, width, left, chunk, mapping)
    return gather_pages_torch(slots, rows, seq_lens, page_size, width, left, chunk, mapping)


def gather_pages_torch(
    slots: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    page_size: int,
    width: int,
    left: int,
    chunk: int,
    mapping: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """slots int32 [rows, positions]; left, chunk as in `paged_view`; mapping int [full slots] or None."""
    seq_lens = seq_lens.clamp(max=slots.shape[1])  # a length beyond the row must not reach the next one
    last = (seq_lens - 1).clamp(min=0)
    first = torch.zeros_like(last)
    if left >= 0:
        first = (last - left).clamp(min=0)
    elif chunk > 0:
        first = last // chunk * chunk
    first_page = first // page_size
    pages = -(-slots.shape[1] // page_size)
    columns = first_page[:, None] + torch.arange(width, device=slots.device)
    picked = slots[rows.long()[:, None], columns.clamp(max=pages - 1) * page_size]
    if mapping is not None:
        picked = mapping[picked.long()]
    return (picked // page_size).to(torch.int32), (seq_lens - first_page * page_size).to(torch.int32)
