"""FlashAttention's functions, dispatched by device: the kernels of this package without the backend around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa_fast.kernels.select import Provider, provider_for
from fa_ref.api.arguments import check_kvcache_call, check_merge_call, check_varlen_call, refuse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over a paged (or dense) cache, on the kernels of q's device.

    Shapes: q [tokens, heads, dim] with `cu_seqlens_q`, or [batch, seqlen, heads, dim] without; caches
    [pages, page_size, kv_heads, dim] with `page_table`, else [rows, seqlen, kv_heads, dim]. Lengths, indices and
    tables are int32. Returns out, or (out, lse) with lse fp32 natural log, (tokens, heads). A row with no key is 0
    and -inf. The readable twin in fa_ref explains every argument.

    Raises BadBatch and BadPageTable for arguments that contradict each other, UnsupportedByProvider for what the
    device's kernels cannot do and for cache append and rotary arguments, ProviderNotInstalled.
    """
    refuse(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
        cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new,
    )  # fmt: skip
    cache_seqlens = check_kvcache_call(
        q=q, k_cache=k_cache, v_cache=v_cache, qv=qv, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        page_table=page_table, cu_seqlens_q=cu_seqlens_q, sinks=sinks, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, out=out,
    )  # fmt: skip
    provider = _provider(
        q, k_cache, v_cache, softcap=softcap != 0, sinks=sinks is not None, lse=return_softmax_lse,
        qv=qv is not None, window=tuple(window_size) != (-1, -1), attention_chunk=bool(attention_chunk),
        page_size=None if page_table is None else k_cache.shape[1],
    )  # fmt: skip
    return provider.flash_attn_with_kvcache(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        qv=qv,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q if max_seqlen_q is not None else _longest(q, cu_seqlens_q),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk or 0,
        softcap=softcap,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        sinks=sinks,
        out=out,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over ragged keys that lie one sequence after another, on q's device.

    q [tokens, heads, dim], k [keys, kv_heads, dim], v [keys, kv_heads, v_dim]; cu_seqlens int32 [sequences + 1].
    Results and errors are those of `flash_attn_with_kvcache`; a page table is refused.
    """
    refuse(page_table=page_table)
    check_varlen_call(
        q=q, k=k, v=v, qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, out=out,
    )  # fmt: skip
    provider = _provider(
        q, k, v, softcap=softcap != 0, sinks=sinks is not None, lse=return_softmax_lse, qv=qv is not None,
        window=tuple(window_size) != (-1, -1), attention_chunk=bool(attention_chunk),
    )  # fmt: skip
    return provider.flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q if max_seqlen_q is not None else _longest(q, cu_seqlens_q),
        max_seqlen_k=max_seqlen_k if max_seqlen_k is not None else k.shape[0],
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk or 0,
        softcap=softcap,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        sinks=sinks,
        out=out,
    )


def merge_state(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each; lse (tokens, heads), natural log.

    An empty side (lse -inf) returns the other bitwise; two empty sides give (0, -inf), never NaN.
    """
    check_merge_call(out_a, lse_a, out_b, lse_b, out)
    return provider_for(out_a.device).merge_state(out_a, lse_a, out_b, lse_b, out)


def _provider(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Provider:
    """The kernels of q's device, or an error if they cannot run this call."""
    provider = provider_for(q.device)
    provider.CAPABILITY.require(
        dtype=q.dtype, kv_dtype=k.dtype, head_dim=q.shape[-1], v_head_dim=v.shape[-1], **asked
    )  # fmt: skip
    return provider


def _longest(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """A bound on the queries of one sequence that needs no synchronisation."""
    return q.shape[0] if cu_seqlens_q is not None else q.shape[1]


__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "merge_state"]
