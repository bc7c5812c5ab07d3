"""Checks of a kernel call's arguments, one a function.

The first few look at shapes, dtypes and strides, for every device. Those that look at values are the CPU provider's:
there a look costs next to nothing.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch
from torch import Tensor

from fa_ref.api.errors import BadBatch, BadPageTable


def check_operands(device: torch.device, tensors: dict[str, Tensor | int | None]) -> None:
    """One device, and unit stride along the last dim."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            continue
        if x.device != device:
            raise BadBatch(f"{name} is on {x.device}; this call runs on {device}. Move it there.")
        if name in ("q", "k", "v", "qv", "k_cache", "v_cache") and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise BadBatch(
                f"{name} of shape {tuple(x.shape)} has stride {x.stride(-1)} along its last dim; that dim "
                "must be contiguous. Call .contiguous(), or slice the tensor another way."
            )


def check_rank(name: str, x: Tensor, axes: str) -> None:
    if x.dim() != len(axes.split()):
        raise BadBatch(f"{name} has shape {tuple(x.shape)}; it must be ({', '.join(axes.split())}).")


def check_heads(*, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, sinks: Tensor | None) -> None:
    """q (tokens, heads, dim); k and v (..., kv_heads, dim); qv (tokens, heads, v_dim); sinks (heads,)."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise BadBatch(f"q has {heads} heads and k has {kv_heads}; the query heads must be a multiple of the KV heads.")
    if k.shape[:-1] != v.shape[:-1]:
        raise BadBatch(f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in all but the last dim.")
    if q.shape[-1] != k.shape[-1]:
        raise BadBatch(f"q has head dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal.")
    if qv is not None and tuple(qv.shape) != (*q.shape[:-1], v.shape[-1]):
        raise BadBatch(
            f"qv has shape {tuple(qv.shape)}; it meets the values, so it must be {(*q.shape[:-1], v.shape[-1])}."
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise BadBatch(f"sinks has shape {tuple(sinks.shape)}; it must hold one logit per query head: ({heads},).")


def check_dtypes(*, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> None:
    fp8 = torch.float8_e4m3fn
    if k.dtype != v.dtype:
        raise BadBatch(f"k is {k.dtype} and v is {v.dtype}; both caches must have one dtype.")
    if k.dtype not in (q.dtype, fp8):
        raise BadBatch(
            f"q is {q.dtype} and the keys are {k.dtype}; keys must have q's dtype, or be {fp8}. Convert q, "
            "or build the cache in q's dtype."
        )
    if qv is not None and qv.dtype != q.dtype:
        raise BadBatch(f"qv is {qv.dtype} and q is {q.dtype}; they must have one dtype.")


def check_int32(name: str, x: Tensor, rank: int) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != rank:
        what = f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise BadBatch(f"{name} is {what}; it must be an int32 tensor of rank {rank}. Use .to(torch.int32).")


def host_ints(name: str, x: Tensor) -> list[int]:
    """A rank-1 int32 tensor as Python ints."""
    check_int32(name, x, 1)
    return x.tolist()


def starts(name: str, x: Tensor, tokens: int) -> list[int]:
    """A cu_seqlens tensor: starts at 0, never decreases, ends within the tokens."""
    found = host_ints(name, x)
    if not found or found[0] != 0 or any(b < a for a, b in pairwise(found)) or found[-1] > tokens:
        raise BadBatch(
            f"{name} is {_short(found)} for {tokens} tokens; it must start at 0, never decrease and end at "
            f"most at {tokens}. Build it as a cumulative sum of the lengths with a leading 0."
        )
    return found


def check_longest(max_seqlen_q: int | None, query_starts: list[int]) -> None:
    longest = max((b - a for a, b in pairwise(query_starts)), default=0)
    if max_seqlen_q is not None and longest > max_seqlen_q:
        raise BadBatch(
            f"max_seqlen_q is {max_seqlen_q}, but cu_seqlens_q holds a sequence of {longest} queries; pass an "
            "upper bound."
        )


def check_count(name: str, found: list[int], sequences: int) -> None:
    if len(found) != sequences:
        raise BadBatch(
            f"{name} has {len(found)} entries for {sequences} sequences; it must have one per sequence "
            "(cu_seqlens_q has one more)."
        )


def check_table(page_table: Tensor) -> None:
    if page_table.dtype != torch.int32 or page_table.dim() != 2:
        raise BadPageTable(
            f"page_table is {page_table.dtype} of shape {tuple(page_table.shape)}; it must be int32 (rows, pages)."
            " Use .to(torch.int32)."
        )


def check_lengths(lengths: list[int], *, width: int, page_size: int) -> None:
    limit = width * page_size
    if any(length < 0 for length in lengths):
        raise BadBatch(f"cache_seqlens holds {min(lengths)}; lengths are 0 or more.")
    if any(length > limit for length in lengths):
        raise BadPageTable(
            f"cache_seqlens holds {max(lengths)}, but a page table {width} pages wide with pages of "
            f"{page_size} addresses {limit} keys. Widen the table, or pass shorter lengths."
        )


def check_rows(row_index: list[int], rows: int) -> None:
    if any(not 0 <= row < rows for row in row_index):
        raise BadPageTable(
            f"cache_batch_idx is {_short(row_index)}, but there are {rows} rows; entries must lie in [0, {rows})."
        )


def check_page_ids(*, page_table: Tensor, row_index: list[int], lengths: list[int], page_size: int, pages: int) -> None:
    """Every page id that will be read exists. Off by default: set FA_CHECK=1."""
    if os.environ.get("FA_CHECK") != "1":
        return
    for row, length in zip(row_index, lengths, strict=True):
        ids = page_table[row, : -(-length // page_size)]
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or high >= max(pages, 1):
            raise BadPageTable(
                f"row {row} of the page table holds ids from {low} to {high} for {length} keys, but the "
                f"cache has {pages} pages of {page_size}. Divide slots by the page size of this view."
            )


def descale(name: str, x: Tensor, sequences: int, kv_heads: int) -> Tensor:
    try:
        return x.float().expand(sequences, kv_heads)
    except RuntimeError:
        raise BadBatch(
            f"{name} has shape {tuple(x.shape)}; it must broadcast to (sequences, kv_heads) = "
            f"({sequences}, {kv_heads}) of this call."
        ) from None


def check_out(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype):
        raise BadBatch(
            f"out is {out.dtype} of shape {tuple(out.shape)}; this call writes {dtype} of shape {shape}. Pass "
            "a buffer of that kind, or none."
        )


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:10]))}, ... {values[-1]}]"
