"""Checks of a kernel call's arguments that look at shapes, dtypes and strides only: no device is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_fast.kernels.capability import Capability
from fa_fast.kernels.checks import check_dtypes, check_heads, check_int32, check_operands, check_rank
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
    check_rank("q", q, "tokens heads dim" if cu_seqlens_q is not None else "batch seqlen heads dim")
    layout = "pages page_size kv_heads dim" if page_table is not None else "rows seqlen kv_heads dim"
    check_rank("k_cache", k_cache, layout)
    check_rank("v_cache", v_cache, layout)
    operands = dict(q=q, k_cache=k_cache, v_cache=v_cache, qv=qv, sinks=sinks, page_table=page_table)
    lengths = dict(cu_seqlens_q=cu_seqlens_q, cache_batch_idx=cache_batch_idx, cache_seqlens=cache_seqlens)
    check_operands(q.device, operands | lengths)
    check_heads(q=q, k=k_cache, v=v_cache, qv=qv, sinks=sinks)
    check_dtypes(q=q, k=k_cache, v=v_cache, qv=qv)
    _require(capability, q, k_cache, v_cache, qv, softcap, sinks, window_size, attention_chunk, return_softmax_lse,
             page_size=None if page_table is None else k_cache.shape[1])  # fmt: skip
    if page_table is not None:
        check_int32("page_table", page_table, 2)
    if cu_seqlens_q is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q, 1)
    if cache_batch_idx is not None:
        check_int32("cache_batch_idx", cache_batch_idx, 1)
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
        check_int32("cache_seqlens", lens, 1)
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
    check_rank("q", q, "tokens heads dim")
    check_rank("k", k, "keys kv_heads dim")
    check_rank("v", v, "keys kv_heads v_dim")
    check_operands(
        q.device, dict(q=q, k=k, v=v, qv=qv, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    )
    check_heads(q=q, k=k, v=v, qv=qv, sinks=sinks)
    check_dtypes(q=q, k=k, v=v, qv=qv)
    _require(capability, q, k, v, qv, softcap, sinks, window_size, attention_chunk, return_softmax_lse)
    check_int32("cu_seqlens_q", cu_seqlens_q, 1)
    check_int32("cu_seqlens_k", cu_seqlens_k, 1)
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
