"""The kernel interface every serving engine speaks, readable: what each argument of FlashAttention means.

`flash_attn_with_kvcache` reads keys and values through a page table; `flash_attn_varlen_func` reads them as
given. Both loop over sequences and compute each with `fa_ref.attention` in fp32. The production twins with the
same names are in fa_fast; notebooks 02, 03 and 06 explain the arguments.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from fa_ref.api.arguments import (
    check_kvcache_call,
    check_lengths,
    check_longest,
    check_merge_call,
    check_page_ids,
    check_rows,
    check_varlen_call,
    refuse,
    result_dtype,
    starts,
)
from fa_ref.attention import AttentionState, attend, merge, scores, wide
from fa_ref.attention import softcap as apply_softcap
from fa_ref.masks import Mask, everything, local_chunk, sliding_window
from fa_ref.masks import causal as causal_mask
from fa_ref.planning.ragged import spans


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Int32[Tensor, " sequences"] | int | None = None,
    cache_batch_idx: Int32[Tensor, " sequences"] | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Int32[Tensor, "rows pages"] | None = None,
    cu_seqlens_q: Int32[Tensor, " sequences_plus_1"] | None = None,
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
    sinks: Float[Tensor, " heads"] | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over a paged (or dense) cache.

    Shapes: q [tokens, heads, dim] with `cu_seqlens_q`, or [batch, seqlen, heads, dim] without; caches
    [pages, page_size, kv_heads, dim] with `page_table`, else [rows, seqlen, kv_heads, dim]. Sequence i reads row
    `cache_batch_idx[i]` (default i) of the table or the dense cache, its first `cache_seqlens[i]` tokens.

    causal is bottom-right aligned: query i of L over S keys sits at position i + S - L. window_size (left,
    right) counts keys around that position, both ends inclusive, -1 unlimited. attention_chunk keeps keys of the
    query's own chunk. softcap acts on scaled logits before masking. sinks are logits [heads] that join the
    denominator (and the LSE). qv adds qv . v to the logits (absorbed MLA); the default scale is
    (dim + qv dim) ** -0.5. Descales [sequences, kv_heads] multiply stored fp8 values.
    num_splits, pack_gqa, sm_margin and scheduler_metadata steer how a GPU divides the work and change nothing here.

    Returns out, or (out, lse) with lse fp32 natural log, (tokens, heads). A row with no key is 0 and -inf.
    Raises BadBatch, BadPageTable; UnsupportedByProvider for cache append and rotary arguments, which a serving
    backend does in steps of its own.

    >>> cache = torch.zeros(2, 4, 1, 8)  # two pages of four tokens
    >>> table = torch.tensor([[1, 0]], dtype=torch.int32)
    >>> out, lse = flash_attn_with_kvcache(torch.zeros(1, 1, 2, 8), cache, cache, page_table=table,
    ...                                    cache_seqlens=5, return_softmax_lse=True)
    >>> out.shape, round(lse[0, 0, 0].exp().item())  # five equal keys
    (torch.Size([1, 1, 2, 8]), 5)
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
    packed, bounds = _packed(q), _bounds(q, cu_seqlens_q)
    check_longest(max_seqlen_q, starts("cu_seqlens_q", bounds, len(packed)))
    lens = cache_seqlens.tolist()
    cache_rows = list(range(len(lens))) if cache_batch_idx is None else cache_batch_idx.tolist()
    _check_rows_and_lengths(k_cache, page_table, cache_rows, lens)
    read = _paged_reader(page_table) if page_table is not None else _dense_reader()
    packed_qv = None if qv is None else _packed(qv)

    out_rows, lse_rows = _empty_result(packed, v_cache.shape[-1])
    for i, (rows, row, length) in enumerate(zip(spans(bounds), cache_rows, lens, strict=True)):
        keys, values = read(k_cache, row, length), read(v_cache, row, length)
        state = _one_sequence(
            _descaled(packed[rows], q_descale, i),
            _descaled(keys, k_descale, i),
            _descaled(values, v_descale, i),
            None if packed_qv is None else wide(packed_qv[rows]),
            _mask(packed[rows], keys, causal, window_size, attention_chunk or 0),
            softmax_scale=softmax_scale,
            cap=softcap,
            sinks=sinks,
        )
        out_rows[rows], lse_rows[rows] = state.out.to(out_rows.dtype), state.lse
    result, lse = out_rows.view(*q.shape[:-1], v_cache.shape[-1]), lse_rows.view(q.shape[:-1])
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_softmax_lse else result


def flash_attn_varlen_func(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
    v: Float[Tensor, "keys kv_heads v_dim"],
    cu_seqlens_q: Int32[Tensor, " sequences_plus_1"],
    cu_seqlens_k: Int32[Tensor, " sequences_plus_1"],
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
    sinks: Float[Tensor, " heads"] | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over ragged keys that lie one sequence after another.

    Sequence i has queries cu_seqlens_q[i] .. cu_seqlens_q[i + 1] and keys cu_seqlens_k[i] .. cu_seqlens_k[i + 1].
    Other arguments, results and errors are those of `flash_attn_with_kvcache`; a page table is refused, since
    kernels accept it here and drop it.

    >>> cu = torch.tensor([0, 2, 3], dtype=torch.int32)  # a request of two tokens and one of one
    >>> x = torch.zeros(3, 1, 4)
    >>> _, lse = flash_attn_varlen_func(x, x, x, cu, cu, causal=True, return_softmax_lse=True)
    >>> [round(n) for n in lse.exp().flatten().tolist()]  # keys seen by each query
    [1, 2, 1]
    """
    refuse(page_table=page_table)
    check_varlen_call(
        q=q, k=k, v=v, qv=qv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, window_size=window_size, attention_chunk=attention_chunk, out=out,
    )  # fmt: skip
    check_longest(max_seqlen_q, starts("cu_seqlens_q", cu_seqlens_q, len(q)))
    starts("cu_seqlens_k", cu_seqlens_k, len(k))
    out_rows, lse = _empty_result(q, v.shape[-1])
    for i, (rows, keys) in enumerate(zip(spans(cu_seqlens_q), spans(cu_seqlens_k), strict=True)):
        state = _one_sequence(
            _descaled(q[rows], q_descale, i),
            _descaled(k[keys], k_descale, i),
            _descaled(v[keys], v_descale, i),
            None if qv is None else wide(qv[rows]),
            _mask(q[rows], k[keys], causal, window_size, attention_chunk or 0),
            softmax_scale=softmax_scale,
            cap=softcap,
            sinks=sinks,
        )
        out_rows[rows], lse[rows] = state.out.to(out_rows.dtype), state.lse
    result = out_rows if out is None else out.copy_(out_rows)
    return (result, lse) if return_softmax_lse else result


def merge_state(
    out_a: Float[Tensor, "tokens heads v_dim"],
    lse_a: Float[Tensor, "tokens heads"],
    out_b: Float[Tensor, "tokens heads v_dim"],
    lse_b: Float[Tensor, "tokens heads"],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each; lse is the natural log.

    An empty side (lse -inf) returns the other bitwise; two empty sides give (0, -inf), never NaN.
    """
    check_merge_call(out_a, lse_a, out_b, lse_b, out)
    state = merge(AttentionState(wide(out_a), lse_a), AttentionState(wide(out_b), lse_b))
    merged = state.out.to(out_a.dtype)
    return (merged if out is None else out.copy_(merged)), state.lse


def _one_sequence(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
    v: Float[Tensor, "keys kv_heads v_dim"],
    qv: Float[Tensor, "queries heads v_dim"] | None,
    mask: Bool[Tensor, "queries keys"],
    *,
    softmax_scale: float | None,
    cap: float,
    sinks: Float[Tensor, " heads"] | None,
) -> AttentionState:
    logits, width = scores(q, k), q.shape[-1]
    if qv is not None:
        logits, width = logits + scores(qv, v), width + qv.shape[-1]
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    return attend(apply_softcap(logits * scale, cap), v, mask, sinks)


def _mask(
    q: Tensor, k: Tensor, is_causal: bool, window_size: tuple[int, int], chunk: int
) -> Bool[Tensor, "queries keys"]:
    """The mask of one sequence. Queries sit at the end of the keys: positions keys - queries .. keys - 1."""
    left, right = window_size
    mask: Mask = causal_mask if is_causal else everything
    if left >= 0:
        mask = mask & sliding_window(left)
    if right >= 0:
        mask = mask & Mask(lambda q_pos, k_pos: k_pos <= q_pos + right, f"window(right={right})")
    if chunk > 0:
        mask = mask & local_chunk(chunk)
    queries, keys = torch.arange(len(q), device=q.device), torch.arange(len(k), device=q.device)
    return mask.dense(queries + len(k) - len(q), keys)


def _paged_reader(page_table: Tensor):
    def read(cache: Tensor, row: int, length: int) -> Float[Tensor, "keys kv_heads dim"]:
        pages = page_table[row, : -(-length // cache.shape[1])].long()
        return rearrange(cache[pages], "pages size h d -> (pages size) h d")[:length]

    return read


def _dense_reader():
    def read(cache: Tensor, row: int, length: int) -> Float[Tensor, "keys kv_heads dim"]:
        return cache[row, :length]

    return read


def _check_rows_and_lengths(cache: Tensor, page_table: Tensor | None, rows: list[int], lens: list[int]) -> None:
    pages, page_size = cache.shape[:2]
    if page_table is None:
        check_rows(rows, pages)
        check_lengths(lens, page_size)
        return
    check_rows(rows, page_table.shape[0])
    check_lengths(lens, page_table.shape[1] * page_size)
    check_page_ids(page_table=page_table, row_index=rows, lengths=lens, page_size=page_size, pages=pages)


def _descaled(values: Tensor, descale: Tensor | None, sequence: int) -> Tensor:
    """Stored values as fp32: times the [sequences, kv_heads] descale of this sequence, if there is one."""
    if descale is None:
        return wide(values)
    per_head = descale[sequence]  # one factor a key head; query heads share it in groups
    per_head = per_head.repeat_interleave(values.shape[1] // per_head.shape[0])
    return wide(values) * rearrange(per_head, "h -> h 1")


def _packed(q: Tensor) -> Float[Tensor, "tokens heads dim"]:
    return q if q.dim() == 3 else rearrange(q, "b s h d -> (b s) h d")


def _bounds(q: Tensor, cu_seqlens_q: Tensor | None) -> Int32[Tensor, " sequences_plus_1"]:
    """Where each sequence's queries start: as given, or one row of a batch after another."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q
    return torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q.shape[1]


def _empty_result(q: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Rows that no sequence covers (graph padding) stay (0, -inf)."""
    rows = torch.zeros(*q.shape[:-1], v_dim, dtype=result_dtype(q), device=q.device)
    return rows, torch.full(q.shape[:-1], -torch.inf, device=q.device)
