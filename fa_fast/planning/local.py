"""Virtual batches of chunked local attention, built on the device without asking it anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fa_ref.api import AttentionPass, BadConfig, ForwardBatch
from fa_ref.api.checks import new_tokens


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: np.ndarray,
    seq_lens_np: np.ndarray,
    block_table: Tensor,
    page_size: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Split requests into virtual batches, one for each chunk that a request's new tokens touch.

    Arguments, results and errors are those of the twin in fa_ref, which explains them; this one runs the device
    path that the planner uses.

    >>> table = torch.arange(30, dtype=torch.int32).reshape(3, 10)
    >>> q, cu, k, pages = make_local_attention_virtual_batches(
    ...     4, np.array([0, 4, 14, 19]), np.array([6, 17, 9]), table, page_size=2)
    >>> cu.tolist()
    [0, 2, 4, 5, 9, 13, 14, 18, 19]
    """
    if attn_chunk_size < 1 or page_size < 1 or attn_chunk_size % page_size:
        raise BadConfig(
            f"attn_chunk_size {attn_chunk_size} with page_size {page_size}; a chunk must be a positive multiple of "
            "the page size, so that every chunk starts on a page"
        )
    device = block_table.device
    cu, lens = (torch.from_numpy(np.asarray(x, dtype=np.int32)).to(device) for x in (query_start_loc_np, seq_lens_np))
    count = virtual_batch_count(np.diff(query_start_loc_np).tolist(), np.asarray(seq_lens_np).tolist(), attn_chunk_size)
    cu_local, k_local, table = virtual_batches(
        cu, lens, block_table, None, count=count, chunk=attn_chunk_size, page_size=page_size
    )
    cu_np = cu_local.cpu().numpy()
    return np.diff(cu_np), cu_np, k_local.cpu().numpy(), table


def virtual_batch_count(new_lens: list[int], seq_lens: list[int], chunk: int) -> int:
    """How many virtual batches a batch has, from host copies of its lengths."""
    return sum(
        (total - 1) // chunk - (total - new) // chunk + 1
        for new, total in zip(new_lens, seq_lens, strict=True)
        if new > 0
    )


def virtual_batch_bound(requests: int, tokens: int, chunk: int) -> int:
    """The most virtual batches that `tokens` new tokens of `requests` requests can make."""
    return min(tokens, 2 * requests + max(0, tokens - 2 * requests) // chunk)  # two partial chunks a request


def local_pass(whole: AttentionPass, batch: ForwardBatch, chunk: int) -> AttentionPass:
    """The pass over whole requests, cut into virtual batches. Without host lengths some of them are empty."""
    if batch.extend_seq_lens_cpu is not None and batch.seq_lens_cpu is not None:
        new_lens = [int(n) for n in batch.extend_seq_lens_cpu]
        count = virtual_batch_count(new_lens, batch.seq_lens_cpu.tolist(), chunk)
    else:
        count = virtual_batch_bound(batch.batch_size, new_tokens(batch), chunk)
    cu_seqlens_q, cache_seqlens, table = virtual_batches(
        whole.cu_seqlens_q,
        whole.cache_seqlens,
        whole.page_table,
        whole.row_index,
        count=count,
        chunk=chunk,
        page_size=whole.page_size,
    )
    return replace(
        whole,
        page_table=table,
        row_index=None,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=min(chunk, whole.max_seqlen_q),
        max_seqlen_k=min(chunk, whole.max_seqlen_k),
    )


def virtual_batches(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    *,
    count: int,
    chunk: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(cu_seqlens_q [count + 1], cache_seqlens [count], page_table [count, pages]) of the virtual batches.

    `count` may exceed the real number: the rest is empty (no query, no key, table entries of request 0's row).
    One Triton kernel on CUDA; `virtual_batches_torch` is its definition.
    """
    if page_table.is_cuda:
        from fa_fast.triton_ops.virtual_batches import virtual_batches as launch

        return launch(cu_seqlens_q, seq_lens, page_table, row_index, count, chunk, page_size)
    return virtual_batches_torch(cu_seqlens_q, seq_lens, page_table, row_index, count, chunk, page_size)


def virtual_batches_torch(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    count: int,
    chunk: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """All int32; page_table [rows, pages] with row_index [requests] (or its own rows)."""
    new = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    start = seq_lens - new
    first_chunk = start // chunk
    chunks = torch.where(new > 0, (seq_lens - 1) // chunk - first_chunk + 1, 0)
    ends = torch.cumsum(chunks, dim=0)

    nth = torch.arange(count, device=seq_lens.device)
    request = torch.searchsorted(ends, nth, right=True)
    real = request < len(new)
    request = request.clamp(max=max(len(new) - 1, 0))
    chunk_start = (first_chunk[request] + nth - (ends - chunks)[request]) * chunk
    chunk_end = torch.minimum(chunk_start + chunk, seq_lens[request])
    lens = torch.where(real, chunk_end - chunk_start, 0).to(torch.int32)
    last_query = torch.where(real, cu_seqlens_q[request] + chunk_end - start[request], cu_seqlens_q[-1])
    cu = torch.cat([cu_seqlens_q[:1], last_query.to(torch.int32)])

    pages = page_table.shape[1]
    width = min(chunk // page_size, pages)
    first_page = torch.where(real, chunk_start // page_size, 0)
    columns = (first_page[:, None] + torch.arange(width, device=seq_lens.device)).clamp(max=pages - 1)
    owner = torch.where(real, request, 0)
    row = owner if row_index is None else row_index[owner]
    return cu, lens, page_table[row.long()[:, None], columns.long()]
