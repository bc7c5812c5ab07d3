"""The CPU provider: every feature of the kernel seam in PyTorch, arranged around what a CPU is good at.

Where its speed comes from: the heads of a group become query rows of one small matrix product, so each key is
read once, not once per query head; few-query attention copies one or two thousand keys at a time, so that they
are still in cache when used, and merges the blocks by LSE; decodes share kernel calls; many queries get the keys
laid out head by head; a causal prefill is a rectangle over the prefix and one square with the kernel's causal
flag; windows and chunks touch only the
blocks they reach. `num_splits=1` keeps every sequence in kernel calls of its own, which makes its result
independent of the rest of the batch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa_fast.kernels._cpu_attend import Rows, run
from fa_fast.kernels._cpu_keys import PagedKeys, RaggedKeys
from fa_fast.kernels._cpu_visible import Visible
from fa_fast.kernels.capability import Capability
from fa_fast.kernels.short_keys import short_key_attention_torch
from fa_ref.api.arguments import check_lengths, check_longest, check_page_ids, check_rows, result_dtype, starts
from fa_ref.api.checks import device_checks_enabled

_FP8 = torch.float8_e4m3fn
_WIDE = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

CAPABILITY = Capability(
    provider="torch_cpu",
    device="cpu",
    head_dims=None,
    page_sizes=None,
    dtypes=_WIDE | {_FP8},  # an fp8 q gives a bf16 output
    kv_dtypes=_WIDE | {_FP8},
    softcap=True,
    sinks=True,
    lse=True,
    qv_dims=None,
    qv_dtypes=_WIDE | {_FP8},
    qv_trees=True,
    window=True,
    out=True,
    attention_chunk=True,
    scheduler_metadata=False,
    remedy="Convert the tensors, or move them to a device whose provider can.",
)


def load(device: torch.device | None = None) -> None:
    """Nothing to load: PyTorch is there."""


def prepared(function: str, **arguments: Any) -> Callable[..., Any]:
    """flash_attn_with_kvcache or flash_attn_varlen_func with some of its arguments given."""
    return partial(globals()[function], **arguments)


__all__ = [
    "CAPABILITY",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "load",
    "merge_state",
    "prepared",
    "short_key_attention",
]

prefers_short_keys = None  # the paths here are as fast for few keys
get_scheduler_metadata = None  # there is no tile scheduler here: work is planned inside each call


@torch.no_grad()
def flash_attn_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    scheduler_metadata: Tensor | None = None,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over a cache, paged or one row per sequence.

    q: (tokens, heads, dim) split at cu_seqlens_q, int32 [sequences + 1]; or (sequences, queries, heads, dim).
    k_cache, v_cache: (pages, page_size, kv_heads, dim) with page_table, int32 [rows, pages]; without a table
    (rows, slots, kv_heads, dim). cache_batch_idx, int32 [sequences]: the row of each sequence. cache_seqlens:
    int32 [sequences], keys of each sequence; None means all a row can hold.
    Descales: fp32 [sequences, kv_heads]. sinks: [heads]. num_splits=1: batch-invariant.

    Returns out like q, and with return_softmax_lse (out, lse): lse fp32 (tokens, heads), or (sequences,
    queries, heads) for batched q. A row without a visible key gives 0 and -inf.
    Raises BadBatch, BadPageTable, UnsupportedByProvider. Twin: fa_ref.kernels.flash_attn_with_kvcache.
    """
    if scheduler_metadata is not None:
        raise CAPABILITY.refuse("a call with scheduler_metadata", "calls without it (pass None)")
    batch_shape = q.shape[:-2]
    if cu_seqlens_q is None:
        sequences, queries = batch_shape
        query_starts = [queries * sequence for sequence in range(sequences + 1)]
        q, qv = q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
    else:
        query_starts = starts("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    keys = _paged_keys(
        k_cache, v_cache, page_table, cache_batch_idx, cache_seqlens, len(query_starts) - 1, qv is not None
    )
    check_longest(max_seqlen_q, query_starts)
    return _attention(
        q=q,
        qv=qv,
        v=v_cache,
        kv_heads=k_cache.shape[-2],
        keys=keys,
        query_starts=query_starts,
        batch_shape=batch_shape,
        descales=(q_descale, k_descale, v_descale),
        softmax_scale=softmax_scale,
        visible=Visible.of(causal, window_size, attention_chunk),
        softcap=softcap,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        sinks=sinks,
        out=out,
    )


@torch.no_grad()
def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over ragged keys that lie one sequence after the other.

    q: (tokens, heads, dim), k: (keys, kv_heads, dim), v: (keys, kv_heads, v_dim), split at cu_seqlens_q and
    cu_seqlens_k, int32 [sequences + 1]. Everything else as in flash_attn_with_kvcache.
    Twin: fa_ref.kernels.flash_attn_varlen_func.
    """
    query_starts = starts("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    key_starts = starts("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    check_longest(max_seqlen_q, query_starts)
    keys = RaggedKeys(k=k, v=v, starts=key_starts, joint=qv is not None)
    return _attention(
        q=q,
        qv=qv,
        v=v,
        kv_heads=k.shape[-2],
        keys=keys,
        query_starts=query_starts,
        batch_shape=q.shape[:-2],
        descales=(q_descale, k_descale, v_descale),
        softmax_scale=softmax_scale,
        visible=Visible.of(causal, window_size, attention_chunk),
        softcap=softcap,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        sinks=sinks,
        out=out,
    )


@torch.no_grad()
def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint key sets from attention over each. (0, -inf) is the identity, bit for bit.

    out_*: (tokens, heads, dim), lse_*: fp32 (tokens, heads); out: optional buffer, may be one of the inputs.

        >>> one = torch.ones(1, 1, 2)
        >>> merge_state(one, torch.zeros(1, 1), 3 * one, torch.zeros(1, 1))[0]
        tensor([[[2., 2.]]])
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_b = torch.sigmoid(lse_b - lse_a)[..., None]
    merged = torch.lerp(out_a.to(weight_b.dtype), out_b.to(weight_b.dtype), weight_b).to(out_a.dtype)
    empty_a, empty_b = lse_a.isneginf()[..., None], lse_b.isneginf()[..., None]
    merged = torch.where(empty_b, out_a, torch.where(empty_a, out_b, merged))
    merged = merged.masked_fill_(empty_a & empty_b, 0.0)
    return (merged if out is None else out.copy_(merged)), lse


def _paged_keys(
    k: Tensor,
    v: Tensor,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_seqlens: Tensor | int | None,
    sequences: int,
    joint: bool,
) -> PagedKeys:
    """An unpaged cache is a cache with one page per row."""
    if page_table is None:
        page_table = torch.arange(k.shape[0], dtype=torch.int32)[:, None]
    row_index = list(range(sequences)) if cache_batch_idx is None else cache_batch_idx.tolist()
    check_rows(row_index, page_table.shape[0])
    page_size, room = k.shape[1], page_table.shape[1] * k.shape[1]
    if isinstance(cache_seqlens, Tensor):
        lengths = cache_seqlens.tolist()
    else:
        lengths = [room if cache_seqlens is None else cache_seqlens] * sequences
    check_lengths(lengths, room)
    if device_checks_enabled():
        check_page_ids(
            page_table=page_table, row_index=row_index, lengths=lengths, page_size=page_size, pages=k.shape[0]
        )
    return PagedKeys(k=k, v=v, page_table=page_table, row_index=row_index, lengths=lengths, joint=joint)


def _attention(
    *,
    q: Tensor,
    qv: Tensor | None,
    v: Tensor,
    kv_heads: int,
    keys: PagedKeys | RaggedKeys,
    query_starts: list[int],
    batch_shape: torch.Size,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    softmax_scale: float | None,
    visible: Visible,
    softcap: float,
    num_splits: int,
    return_softmax_lse: bool,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    compute = _compute_dtype(q.dtype, v.dtype)
    ragged = out is not None and out.dim() == 3
    rows = out if ragged else q.new_empty(tokens, heads, v.shape[-1], dtype=result_dtype(q))
    assert rows is not None
    lse = torch.empty(tokens, heads)
    q_scale, v_scale = _fold(descales, len(query_starts) - 1, heads, kv_heads, q, qv)
    joined = q if qv is None else torch.cat([qv.to(compute), q.to(compute)], -1)
    run(
        Rows(
            q=joined.to(compute),
            out=rows,
            lse=lse,
            query_starts=query_starts,
            keys=keys,
            kv_heads=kv_heads,
            visible=visible,
            scale=joined.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
            softcap=float(softcap),
            sinks=None if sinks is None else sinks.float(),
            q_scale=q_scale,
            v_scale=v_scale,
            alone=num_splits == 1,
        )
    )
    result = rows.view(*batch_shape, heads, v.shape[-1])
    result = result if out is None or ragged else out.copy_(result)
    return (result, lse.view(*batch_shape, heads)) if return_softmax_lse else result


def _compute_dtype(q: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """e4m3 fits bf16 exactly; descales may leave fp16's range, so there an fp8 cache is read in fp32."""
    if q == _FP8:
        return torch.bfloat16
    return torch.float32 if kv == _FP8 and q == torch.float16 else q


def _fold(
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    sequences: int,
    heads: int,
    kv_heads: int,
    q: Tensor,
    qv: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Descales are per sequence and head, so those of q and k scale the query and v's scales the output."""
    if all(descale is None for descale in descales):
        return None, None
    q_descale, k_descale, v_descale = (
        torch.ones(sequences, heads) if descale is None else descale.repeat_interleave(heads // kv_heads, 1)
        for descale in descales
    )
    q_scale = (q_descale * k_descale)[..., None]
    if qv is not None:
        qv_scale = (q_descale * v_descale)[..., None].expand(-1, -1, qv.shape[-1])
        q_scale = torch.cat([qv_scale, q_scale.expand(-1, -1, q.shape[-1])], -1)
    return q_scale, v_descale


def short_key_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, num_splits: int = 0, **named: Any) -> Tensor:
    """Arguments of kernels.short_keys' definition. num_splits=1: every request in a call of its own.

    What a vectorised exp gives a number depends on where in the tensor it stands, so also on the other requests.
    """
    if num_splits != 1:
        return short_key_attention_torch(q, k_cache, v_cache, **named)
    requests, names = q.shape[0] // named["queries"], [*_OF_REQUESTS]
    if named.get("row_index") is None:
        names.append("page_table")
    out = q.new_empty(*q.shape[:2], v_cache.shape[2])
    for request in range(requests):
        own: dict[str, Any] = {name: _part(named.get(name), requests, request) for name in names}
        here = slice(request * named["queries"], (request + 1) * named["queries"])
        out[here] = short_key_attention_torch(q[here], k_cache, v_cache, **named | own)
    return out


_OF_REQUESTS: tuple[str, ...] = ("row_index", "cache_seqlens", "slots", "mask", "prefix_out", "prefix_lse")


def _part(value: Tensor | None, requests: int, request: int) -> Tensor | None:
    """The rows of one request, of a tensor that has as many for each."""
    return None if value is None else value.unflatten(0, (requests, -1))[request]
