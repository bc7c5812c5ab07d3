"""Checks of a kernel call's arguments, the same for both packages.

The `check_*_call` functions look at shapes, dtypes, strides and devices only, so no device is asked. The rest looks at
values: free on a CPU, a wait on a GPU.
"""

from __future__ import annotations

from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from fa_ref.api.errors import BadBatch, BadPageTable, UnsupportedByProvider
from fa_ref.api.pools import FP8


def refuse(**arguments: object) -> None:
    """Raise UnsupportedByProvider if any of the named arguments was given."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UnsupportedByProvider(
            f"{', '.join(given)} given; this interface attends to a cache that is already written. Write keys with "
            "the pool's set_kv_buffer and rotate before the call; for paged keys use flash_attn_with_kvcache"
        )


def check_kvcache_call(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    **shared: Any,
) -> Tensor:
    """Raise unless the call is well formed; returns cache_seqlens as int32 [sequences]. `shared`: see `_check_call`."""
    _check_rank("q", q, "tokens heads dim" if cu_seqlens_q is not None else "batch seqlen heads dim")
    layout = "pages page_size kv_heads dim" if page_table is not None else "rows seqlen kv_heads dim"
    _check_rank("k_cache", k_cache, layout)
    _check_rank("v_cache", v_cache, layout)
    sequences = q.shape[0] if cu_seqlens_q is None else _check_starts_shape("cu_seqlens_q", cu_seqlens_q)
    if page_table is not None:
        _check_int32("page_table", page_table, 2)
    room = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = room if cache_seqlens is None else cache_seqlens
        check_lengths([length], room)
        cache_seqlens = torch.full((sequences,), length, dtype=torch.int32, device=q.device)
    for name, tensor in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx)):
        if tensor is None:
            continue
        _check_int32(name, tensor, 1)
        if tensor.shape[0] != sequences:
            raise BadBatch(f"{name} has {tensor.shape[0]} entries for {sequences} sequences; pass one a sequence")
    operands = dict(q=q, k_cache=k_cache, v_cache=v_cache)
    indices = dict(cu_seqlens_q=cu_seqlens_q, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx)
    _check_call(operands, indices | dict(page_table=page_table), sequences, **shared)
    return cache_seqlens


def check_varlen_call(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **shared: Any
) -> None:
    """Raise unless the call is well formed. `shared`: see `_check_call`."""
    _check_rank("q", q, "tokens heads dim")
    _check_rank("k", k, "keys kv_heads dim")
    _check_rank("v", v, "keys kv_heads v_dim")
    sequences = _check_starts_shape("cu_seqlens_q", cu_seqlens_q)
    if _check_starts_shape("cu_seqlens_k", cu_seqlens_k) != sequences:
        raise BadBatch(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, cu_seqlens_k {cu_seqlens_k.shape[0]}; both have one a "
            "sequence and one more"
        )
    _check_call(dict(q=q, k=k, v=v), dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k), sequences, **shared)


def check_merge_call(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None) -> None:
    """Raise BadBatch unless both states are [tokens, heads, v_dim] with fp32 [tokens, heads], and out like them."""
    _check_rank("out_a", out_a, "tokens heads v_dim")
    shape = tuple(out_a.shape)
    for name, state in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        _check_shape(name, state, shape, "both outputs and out are alike", out_a.dtype)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_shape(name, lse, shape[:2], "an LSE is (tokens, heads), a kernel's (heads, tokens) transposed",
                     torch.float32)  # fmt: skip
    operands = dict(out_a=out_a, out_b=out_b, out=out)
    _check_strides(operands)
    _check_device(out_a.device, operands | dict(lse_a=lse_a, lse_b=lse_b))


def result_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the output: q's, or bf16 for an fp8 q."""
    return torch.bfloat16 if q.dtype == FP8 else q.dtype


def _check_call(
    operands: dict[str, Tensor],
    indices: dict[str, Tensor | None],
    sequences: int,
    *,
    qv: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    window_size: tuple[int, int],
    attention_chunk: int | None,
    out: Tensor | None,
) -> None:
    """What both calls have in common. operands: q, k and v under the names that the call gives them."""
    q, k, v = operands.values()
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise BadBatch(f"q has {heads} heads and k has {kv_heads}; the query heads must be a multiple of the KV heads")
    if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype:
        raise BadBatch(
            f"k is {_described(k)} and v is {_described(v)}; they must agree in dtype and in all but the last dim"
        )
    if q.shape[-1] != k.shape[-1]:
        raise BadBatch(f"q has head dim {q.shape[-1]} and k has {k.shape[-1]}; they must be equal")
    if not q.is_floating_point() or not k.is_floating_point():
        raise BadBatch(f"q is {q.dtype} and k {k.dtype}; attention takes floating point dtypes")
    result = (*q.shape[:-1], v.shape[-1])
    _check_shape("qv", qv, result, "it meets the values", q.dtype)
    _check_shape("out", out, result, "the result is written to it", result_dtype(q))
    _check_shape("sinks", sinks, (heads,), "one logit a query head")
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    for name, descale in descales.items():
        meaning = "one factor a (sequence, key head); expand the layer's scale to this call's own number of sequences"
        _check_shape(name, descale, (sequences, kv_heads), meaning, torch.float32)
    _check_strides(operands | dict(qv=qv, out=out))
    _check_device(q.device, operands | indices | descales | dict(qv=qv, sinks=sinks, out=out))
    _check_window(window_size, attention_chunk)
    _check_out_is_apart(out, operands | dict(qv=qv, sinks=sinks))


def _check_rank(name: str, x: object, axes: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != len(axes.split()):
        raise BadBatch(f"{name} is {_described(x)}; it must be ({', '.join(axes.split())})")


def _check_shape(name: str, x: object, shape: tuple[int, ...], meaning: str, dtype: torch.dtype | None = None) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or tuple(x.shape) != shape or x.dtype != (dtype or x.dtype):
        raise BadBatch(f"{name} is {_described(x)}; it must be {f'{dtype} ' if dtype else ''}{shape}: {meaning}")


def _check_int32(name: str, x: object, rank: int) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != rank:
        raise BadBatch(f"{name} is {_described(x)}; it must be an int32 tensor of rank {rank}. Use .to(torch.int32)")


def _check_starts_shape(name: str, x: Tensor) -> int:
    """The number of sequences that a cu_seqlens tensor divides."""
    _check_int32(name, x, 1)
    if x.shape[0] == 0:
        raise BadBatch(f"{name} is empty; it holds a 0 and then the end of every sequence")
    return x.shape[0] - 1


def _check_strides(tensors: dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise BadBatch(
                f"{name} of shape {tuple(x.shape)} has stride {x.stride(-1)} in its last dim, which must be "
                "contiguous; call .contiguous(), or slice the tensor another way"
            )


def _check_device(device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and x.device != device:
            raise BadBatch(f"{name} is on {x.device}; this call runs on {device}. Move it there")


def _check_window(window_size: Any, attention_chunk: int | None) -> None:
    try:
        two_ints = len([index(end) for end in window_size]) == 2
    except TypeError:
        two_ints = False
    if not two_ints:
        raise BadBatch(
            f"window_size is {window_size!r}; it must be two ints (left, right), keys before and after the query, and "
            "-1 for no limit"
        )
    if attention_chunk is not None and not (isinstance(attention_chunk, int) and attention_chunk >= 0):
        raise BadBatch(f"attention_chunk is {attention_chunk!r}; it must be a number of keys, or 0 or None for off")


def _check_out_is_apart(out: Tensor | None, read: dict[str, Tensor | None]) -> None:
    """The result is written while the operands are still read."""
    if out is None or out.numel() == 0:
        return
    for name, x in read.items():
        if x is not None and x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            raise BadBatch(f"out shares its storage with {name}, which is still read when out is written; pass another")


def _described(x: object) -> str:
    return f"a {x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


# ---- values -------------------------------------------------------------------------------------------------------


def starts(name: str, x: Tensor, tokens: int) -> list[int]:
    """A cu_seqlens tensor on the host: starts at 0, never decreases, ends within the tokens."""
    found = x.tolist()
    if not found or found[0] != 0 or any(b < a for a, b in pairwise(found)) or found[-1] > tokens:
        raise BadBatch(
            f"{name} is {_short(found)} for {tokens} tokens; it must start at 0, never decrease and end at "
            f"most at {tokens}. Build it as a cumulative sum of the lengths with a leading 0"
        )
    return found


def check_longest(max_seqlen_q: int | None, query_starts: list[int]) -> None:
    """max_seqlen_q is an upper bound, or None."""
    longest = max((b - a for a, b in pairwise(query_starts)), default=0)
    if max_seqlen_q is not None and longest > max_seqlen_q:
        raise BadBatch(
            f"max_seqlen_q is {max_seqlen_q}, but cu_seqlens_q holds a sequence of {longest} queries; pass an "
            "upper bound"
        )


def check_lengths(lengths: list[int], room: int) -> None:
    """Every length lies within a row of the table, which holds `room` tokens."""
    if any(length < 0 for length in lengths):
        raise BadBatch(f"cache_seqlens holds {min(lengths)}; lengths are 0 or more")
    if any(length > room for length in lengths):
        raise BadPageTable(
            f"cache_seqlens reach {max(lengths)}; a row of the table holds {room} tokens. Widen the table, or pass "
            "shorter lengths"
        )


def check_rows(row_index: list[int], rows: int) -> None:
    """Every sequence's row exists."""
    if any(not 0 <= row < rows for row in row_index):
        raise BadPageTable(
            f"the rows of the sequences are {_short(row_index)}, but there are {rows} rows; cache_batch_idx, or the "
            f"number of sequences without it, must stay within [0, {rows})"
        )


def check_page_ids(*, page_table: Tensor, row_index: list[int], lengths: list[int], page_size: int, pages: int) -> None:
    """Every page id that will be read exists."""
    for row, length in zip(row_index, lengths, strict=True):
        ids = page_table[row, : -(-length // page_size)]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < pages:
            raise BadPageTable(
                f"row {row} of the page table holds page ids {int(ids.min())}..{int(ids.max())}; the cache has pages "
                f"0..{pages - 1} of {page_size}. Divide slots by the page size of this view"
            )


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:10]))}, ... {values[-1]}]"
