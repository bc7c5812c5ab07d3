"""Chunked local attention without a special kernel: each chunk of each request becomes a sequence.

A query of chunk c sees only keys of chunk c, so the pieces are independent. Call them *virtual batches*, hand
them to an ordinary causal kernel, and the chunk mask is done: bottom-right alignment inside a piece is exact,
because a piece's last query is its last key.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fa_ref.api import AttentionPass, BadConfig


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: np.ndarray,
    seq_lens_np: np.ndarray,
    block_table: Tensor,
    page_size: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Split requests into virtual batches, one for each chunk that a request's new tokens touch.

    attn_chunk_size: C, logical positions, a multiple of page_size. query_start_loc_np: cu_seqlens_q
    [requests + 1]. seq_lens_np: total lengths [requests]. block_table: int32 page ids [requests, pages].

    Returns int32 (seqlens_q_local, cu_seqlens_q_local, seqlens_k_local) and block_table_local
    [virtual batches, min(C // page_size, pages)]. A table entry past a row's keys repeats a real page and is
    never read. C is never shrunk: a chunk longer than the table is one virtual batch, plain causal.

    >>> table = torch.arange(30, dtype=torch.int32).reshape(3, 10)
    >>> q, cu, k, pages = make_local_attention_virtual_batches(
    ...     4, np.array([0, 4, 14, 19]), np.array([6, 17, 9]), table, page_size=2)
    >>> q.tolist(), k.tolist()
    ([2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1])
    >>> pages[:3].tolist()
    [[0, 1], [2, 3], [12, 13]]

    Explained in notebook 09. Raises BadConfig if C is not a multiple of page_size.
    """
    chunk = attn_chunk_size
    if chunk < 1 or page_size < 1 or chunk % page_size:
        raise BadConfig(
            f"attn_chunk_size {chunk} with page_size {page_size}; a chunk must be a positive multiple of the "
            "page size, so that every chunk starts on a page"
        )
    new = np.diff(query_start_loc_np)
    end = np.asarray(seq_lens_np)
    start = end - new  # logical position of each request's first query
    first_chunk = start // chunk
    chunks = np.where(new > 0, (end - 1) // chunk - first_chunk + 1, 0)  # touched by the new tokens

    request = np.repeat(np.arange(len(new)), chunks)  # of each virtual batch
    nth = np.arange(len(request)) - np.repeat(np.cumsum(chunks) - chunks, chunks)  # its number in the request
    chunk_start = (first_chunk[request] + nth) * chunk  # first key
    chunk_end = np.minimum(chunk_start + chunk, end[request])  # one past the last key
    seqlens_q = chunk_end - np.maximum(chunk_start, start[request])
    seqlens_k = chunk_end - chunk_start

    width = min(chunk // page_size, block_table.shape[1])
    columns = (chunk_start // page_size)[:, None] + np.arange(width)
    columns = np.minimum(columns, block_table.shape[1] - 1)
    device = block_table.device
    rows = torch.from_numpy(request[:, None]).to(device)
    local_table = block_table[rows, torch.from_numpy(columns).to(device)]
    cu_seqlens_q = np.concatenate([[0], np.cumsum(seqlens_q)])
    return _int32(seqlens_q), _int32(cu_seqlens_q), _int32(seqlens_k), local_table


def make_local_attention_virtual_batches_slow(
    attn_chunk_size: int,
    query_start_loc_np: np.ndarray,
    seq_lens_np: np.ndarray,
    block_table: Tensor,
    page_size: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """The definition of `make_local_attention_virtual_batches`: walk every request, query by query."""
    seqlens_q, seqlens_k, tables = [], [], []
    width, last = min(attn_chunk_size // page_size, block_table.shape[1]), block_table.shape[1] - 1
    for request, total in enumerate(seq_lens_np.tolist()):
        new = int(query_start_loc_np[request + 1] - query_start_loc_np[request])
        current = -1
        for position in range(total - new, total):
            chunk = position // attn_chunk_size
            if chunk != current:  # a query enters a new chunk: open a virtual batch
                current, first = chunk, chunk * attn_chunk_size // page_size
                tables.append([int(block_table[request, min(first + i, last)]) for i in range(width)])
                seqlens_q.append(0)
                seqlens_k.append(0)
            seqlens_q[-1] += 1
            seqlens_k[-1] = position - chunk * attn_chunk_size + 1
    table = torch.tensor(tables, dtype=block_table.dtype).reshape(len(tables), width)
    return (
        _int32(np.array(seqlens_q)),
        _int32(np.cumsum([0, *seqlens_q])),
        _int32(np.array(seqlens_k)),
        table,
    )


def _int32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32)


def local_pass(whole: AttentionPass, chunk: int) -> AttentionPass:
    """The pass over whole requests, cut into virtual batches of one chunk each."""
    _, cu_seqlens_q, seqlens_k, table = make_local_attention_virtual_batches(
        chunk,
        whole.cu_seqlens_q.cpu().numpy(),
        whole.cache_seqlens.cpu().numpy(),
        whole.page_table,
        whole.page_size,
    )
    device = whole.page_table.device
    return replace(
        whole,
        page_table=table,
        cache_seqlens=torch.from_numpy(seqlens_k).to(device),
        cu_seqlens_q=torch.from_numpy(cu_seqlens_q).to(device),
        max_seqlen_q=min(chunk, whole.max_seqlen_q),
        max_seqlen_k=min(chunk, whole.max_seqlen_k),
    )
