"""Checks of a kernel call's arguments that look at shapes, dtypes and strides only: no device is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_fast.kernels.capability import Capability
from fa_ref.api.errors import BadBatch, BadPageTable, UnsupportedByProvider


def refuse(**arguments: object) -> None:
    """Raise UnsupportedByProvider if any of the named arguments was given."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UnsupportedByProvider(
            f"{', '.join(given)} given; this interface attends to a cache that is already written. Write keys with "
            "the pool's set_kv_buffer and rotate before the call; for paged keys use flash_attn_with_kvcache"
        )


def check_kvcache_call(
    capability: Capability,
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    window_size: tuple[int, int],
    attention_chunk: int,
    return_softmax_lse: bool,
) -> Tensor:
    """Raise unless the call is well formed and the provider runs it; returns cache_seqlens as int32 [sequences]."""
    check_rank("q", q, "[tokens, heads, dim]" if cu_seqlens_q is not None else "[batch, seqlen, heads, dim]")
    layout = "[pages, page_size, kv_heads, dim]" if page_table is not None else "[rows, seqlen, kv_heads, dim]"
    check_rank("k_cache", k_cache, layout)
    check_rank("v_cache", v_cache, layout)
    check_operands(q, k_cache, v_cache, qv, sinks)
    _require(capability, q, k_cache, v_cache, qv, softcap, sinks, window_size, attention_chunk, return_softmax_lse,
             page_size=None if page_table is None else k_cache.shape[1])  # fmt: skip
    if page_table is not None:
        check_int32("page_table", page_table, 2, q.device)
    if cu_seqlens_q is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q, 1, q.device)
    if cache_batch_idx is not None:
        check_int32("cache_batch_idx", cache_batch_idx, 1, q.device)
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    room = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        if cache_seqlens is not None and not 0 <= cache_seqlens <= room:
            raise BadPageTable(f"cache_seqlens is {cache_seqlens}; a row holds {room} tokens. Pass 0 .. {room}")
        lens = torch.full(
            (sequences,), room if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=q.device
        )
    else:
        lens = cache_seqlens
        check_int32("cache_seqlens", lens, 1, q.device)
    for name, tensor in (("cache_seqlens", lens), ("cache_batch_idx", cache_batch_idx)):
        if tensor is not None and tensor.shape[0] != sequences:
            raise BadBatch(f"{name} has {tensor.shape[0]} entries for {sequences} sequences; pass one a sequence")
    return lens


def check_varlen_call(
    capability: Capability,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softcap: float,
    sinks: Tensor | None,
    window_size: tuple[int, int],
    attention_chunk: int,
    return_softmax_lse: bool,
) -> None:
    """Raise unless the call is well formed and the provider runs it."""
    check_rank("q", q, "[tokens, heads, dim]")
    check_rank("k", k, "[keys, kv_heads, dim]")
    check_rank("v", v, "[keys, kv_heads, v_dim]")
    check_operands(q, k, v, qv, sinks)
    _require(capability, q, k, v, qv, softcap, sinks, window_size, attention_chunk, return_softmax_lse)
    check_int32("cu_seqlens_q", cu_seqlens_q, 1, q.device)
    check_int32("cu_seqlens_k", cu_seqlens_k, 1, q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise BadBatch(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_k {cu_seqlens_k.shape[0]}; both have one "
            "a sequence and one more"
        )


def check_merge_call(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Raise BadBatch unless both states are [tokens, heads, v_dim] with fp32 [tokens, heads]."""
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if out.dim() != 3 or out.shape != out_a.shape or out.dtype != out_a.dtype:
            raise BadBatch(
                f"out_{name} is {out.dtype} of shape {tuple(out.shape)}; both must be [tokens, heads, v_dim], alike"
            )
        if lse.shape != out.shape[:2] or lse.dtype != torch.float32:
            raise BadBatch(
                f"lse_{name} is {lse.dtype} of shape {tuple(lse.shape)}; it must be fp32 (tokens, heads) "
                f"{tuple(out.shape[:2])}: transpose a kernel's (heads, tokens)"
            )


def _require(
    capability: Capability,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    window_size: tuple[int, int],
    attention_chunk: int,
    lse: bool,
    page_size: int | None = None,
) -> None:
    capability.require(
        dtype=q.dtype,
        kv_dtype=k.dtype,
        head_dim=q.shape[-1],
        v_head_dim=v.shape[-1],
        page_size=page_size,
        softcap=softcap != 0,
        sinks=sinks is not None,
        lse=lse,
        qv=qv is not None,
        window=tuple(window_size) != (-1, -1),
        attention_chunk=attention_chunk > 0,
    )


def check_rank(name: str, x: Tensor, layout: str) -> None:
    if x.dim() != layout.count(",") + 1:
        raise BadBatch(f"{name} has shape {tuple(x.shape)}; it must be {layout}")


def check_operands(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, sinks: Tensor | None) -> None:
    """One device, contiguous last dims, heads in groups, matching dims and dtypes."""
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv), ("sinks", sinks)):
        if x is None:
            continue
        if x.device != q.device:
            raise BadBatch(f"{name} is on {x.device}, q on {q.device}; move them to one device")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise BadBatch(
                f"{name} of shape {tuple(x.shape)} has stride {x.stride(-1)} in its last dim, which must be "
                "contiguous; call .contiguous()"
            )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if q.shape[-1] != k.shape[-1] or kv_heads == 0 or heads % kv_heads or k.shape[:-1] != v.shape[:-1]:
        raise BadBatch(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: q and k must share their last dim, k and v "
            "all but the last, and the query heads must be a multiple of the key heads"
        )
    if k.dtype != v.dtype or k.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise BadBatch(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; k and v must have one dtype, q's own or float8_e4m3fn"
        )
    if qv is not None and (qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1] or qv.dtype != q.dtype):
        raise BadBatch(f"qv is {qv.dtype} {tuple(qv.shape)}; it must be {q.dtype} {(*q.shape[:-1], v.shape[-1])}")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise BadBatch(f"sinks has shape {tuple(sinks.shape)}; it must hold one logit a query head: ({heads},)")


def check_int32(name: str, x: Tensor, rank: int, device: torch.device) -> None:
    if x.dtype != torch.int32 or x.dim() != rank:
        raise BadBatch(
            f"{name} is {x.dtype} of rank {x.dim()}; kernels read int32 of rank {rank}: use .to(torch.int32)"
        )
    if x.device != device:
        raise BadBatch(f"{name} is on {x.device}, q on {device}; move it there")
