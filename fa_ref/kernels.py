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

from fa_ref.api.errors import BadBatch, BadPageTable, UnsupportedByProvider
from fa_ref.api.pools import FP8
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
    _refuse(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
        cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new,
    )  # fmt: skip
    packed, cu_seqlens_q, unpack = _pack(q, cu_seqlens_q)
    sequences = len(cu_seqlens_q) - 1
    lens = _seqlens(cache_seqlens, sequences, k_cache, page_table)
    _check_heads(packed, k_cache, v_cache)
    read = _paged_reader(page_table) if page_table is not None else _dense_reader()
    packed_qv = None if qv is None else _pack(qv, None if qv.dim() == 4 else cu_seqlens_q)[0]

    out_rows, lse_rows = _empty_result(packed, v_cache.shape[-1], out)
    for i, rows in enumerate(spans(cu_seqlens_q)):
        row = i if cache_batch_idx is None else int(cache_batch_idx[i])
        keys, values = read(k_cache, row, int(lens[i])), read(v_cache, row, int(lens[i]))
        state = _one_sequence(
            _descaled(packed[rows], q_descale, i, sequences),
            _descaled(keys, k_descale, i, sequences),
            _descaled(values, v_descale, i, sequences),
            None if packed_qv is None else wide(packed_qv[rows]),
            _mask(packed[rows], keys, causal, window_size, attention_chunk or 0),
            softmax_scale=softmax_scale,
            cap=softcap,
            sinks=sinks,
        )
        out_rows[rows], lse_rows[rows] = state.out.to(out_rows.dtype), state.lse
    return (unpack(out_rows), unpack(lse_rows)) if return_softmax_lse else unpack(out_rows)


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
    _refuse(page_table=page_table)
    _check_int32(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise BadBatch(f"cu_seqlens_q has {len(cu_seqlens_q)} entries, cu_seqlens_k {len(cu_seqlens_k)}")
    _check_heads(q, k, v)
    sequences = len(cu_seqlens_q) - 1
    out_rows, lse_rows = _empty_result(q, v.shape[-1], out)
    for i, (rows, keys) in enumerate(zip(spans(cu_seqlens_q), spans(cu_seqlens_k), strict=True)):
        state = _one_sequence(
            _descaled(q[rows], q_descale, i, sequences),
            _descaled(k[keys], k_descale, i, sequences),
            _descaled(v[keys], v_descale, i, sequences),
            None if qv is None else wide(qv[rows]),
            _mask(q[rows], k[keys], causal, window_size, attention_chunk),
            softmax_scale=softmax_scale,
            cap=softcap,
            sinks=sinks,
        )
        out_rows[rows], lse_rows[rows] = state.out.to(out_rows.dtype), state.lse
    return (out_rows, lse_rows) if return_softmax_lse else out_rows


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
    state = merge(AttentionState(out_a.float(), lse_a), AttentionState(out_b.float(), lse_b))
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
        page_size = cache.shape[1]
        pages = page_table[row, : -(-length // page_size)].long()
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < cache.shape[0]:
            raise BadPageTable(
                f"row {row} of the page table holds page ids {int(pages.min())}..{int(pages.max())}; the cache "
                f"has pages 0..{cache.shape[0] - 1}"
            )
        return rearrange(cache[pages], "pages size h d -> (pages size) h d")[:length]

    return read


def _dense_reader():
    def read(cache: Tensor, row: int, length: int) -> Float[Tensor, "keys kv_heads dim"]:
        return cache[row, :length]

    return read


def _descaled(values: Tensor, descale: Tensor | None, sequence: int, sequences: int) -> Tensor:
    """Stored values as fp32: times the [sequences, kv_heads] descale of this sequence, if there is one."""
    if descale is None:
        return wide(values)
    _check_descale(descale, sequences, values.shape[1])
    per_head = descale[sequence].float()  # one factor a key head; query heads share it in groups
    per_head = per_head.repeat_interleave(values.shape[1] // per_head.shape[0])
    return wide(values) * rearrange(per_head, "h -> h 1")


def _check_descale(descale: Tensor, sequences: int, heads: int) -> None:
    if descale.dim() != 2 or descale.shape[0] != sequences or heads % descale.shape[1]:
        raise BadBatch(
            f"a descale has shape {tuple(descale.shape)}; this call has {sequences} sequences and wants one factor a "
            "(sequence, key head): expand the layer's scale to the call's own number of sequences"
        )


def _pack(q: Tensor, cu_seqlens_q: Tensor | None):
    """q as [tokens, heads, dim] with its cu_seqlens, and how to undo that."""
    if cu_seqlens_q is not None:
        _check_int32(cu_seqlens_q=cu_seqlens_q)
        if q.dim() != 3:
            raise BadBatch(f"q has shape {tuple(q.shape)}; with cu_seqlens_q it must be [tokens, heads, dim]")
        return q, cu_seqlens_q, lambda rows: rows
    if q.dim() != 4:
        raise BadBatch(f"q has shape {tuple(q.shape)}; without cu_seqlens_q it must be [batch, seqlen, heads, dim]")
    batch, seqlen = q.shape[:2]
    cu = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    packed = rearrange(q, "b s h d -> (b s) h d")
    return packed, cu, lambda rows: rows.reshape(batch, seqlen, *rows.shape[1:])


def _seqlens(lens: Tensor | int | None, sequences: int, cache: Tensor, page_table: Tensor | None) -> Tensor:
    room = cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if lens is None or isinstance(lens, int):
        lens = torch.full((sequences,), room if lens is None else lens, dtype=torch.int32, device=cache.device)
    _check_int32(cache_seqlens=lens)
    if page_table is not None:
        _check_int32(page_table=page_table)
    if len(lens) != sequences:
        raise BadBatch(f"cache_seqlens has {len(lens)} entries for {sequences} sequences of cu_seqlens_q")
    if len(lens) and int(lens.max()) > room:
        raise BadPageTable(f"cache_seqlens reach {int(lens.max())}; a row of the table holds {room} tokens")
    return lens


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2] or k.shape[-2] != v.shape[-2]:
        raise BadBatch(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: q and k must share their last dim, k "
            "and v their heads, and the query heads must be a multiple of the key heads"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise BadBatch(
                f"{name} of shape {tuple(x.shape)} has stride {x.stride(-1)} in its last dim, which must be "
                "contiguous; call .contiguous()"
            )


def _check_int32(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise BadBatch(f"{name} is {tensor.dtype}; kernels read int32: use {name}.to(torch.int32)")


def _refuse(**arguments: object) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UnsupportedByProvider(
            f"{', '.join(given)} given; this interface attends to a cache that is already written. Write keys "
            "with the pool's set_kv_buffer and rotate before the call; for paged keys use flash_attn_with_kvcache"
        )


def _empty_result(q: Tensor, v_dim: int, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows that no sequence covers (graph padding) stay (0, -inf)."""
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    shape = (*q.shape[:-1], v_dim)
    rows = torch.zeros(shape, dtype=dtype, device=q.device) if out is None else out.zero_().view(shape)
    return rows, torch.full(q.shape[:-1], -torch.inf, device=q.device)
