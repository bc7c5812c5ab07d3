"""Attention over the few keys of a window or of a tree of drafts, joined with a prefix's state, in one kernel.

One program holds a block of a request's query rows of one key head (all query heads of the group, query by query). It
walks the request's keys in the cache, then its drafts, and folds a prefix's (out, lse) in before the only store. The
LSE is read in the layout its kernel wrote it. Definition: kernels.short_keys.short_key_attention_torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ref.api.pools import FP8


@triton.jit
def _fold(
    queries, k_cache, v_cache, slot, there, seen, factor, softcap, k_slot, v_slot, d, dv, dim, v_dim, top, total, acc,
    SOFTCAP: tl.constexpr, ISOLATE: tl.constexpr,
):  # fmt: skip
    """One block of keys folded into the running (top, total, acc)."""
    # Both loads before the first product: the kernel waits for memory, not for arithmetic.
    k_at = k_cache + slot[None, :] * k_slot + d[:, None]
    v_at = v_cache + slot[:, None] * v_slot + dv[None, :]
    k = tl.load(k_at, mask=there[None, :] & (d < dim)[:, None], other=0.0).to(queries.dtype)
    v = tl.load(v_at, mask=there[:, None] & (dv < v_dim)[None, :], other=0.0).to(queries.dtype)
    scores = tl.dot(queries, k, input_precision="ieee") * factor
    if SOFTCAP:
        scaled = scores / softcap  # tanh from exp of a number that cannot overflow, or where that cancels its series
        size = tl.abs(scaled)
        e, square = tl.exp(-2.0 * size), size * size
        series = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        tanh = tl.where(size < 0.15, series, (1.0 - e) / (1.0 + e))
        scores = softcap * tl.where(scaled < 0, -tanh, tanh)
    if ISOLATE:
        # A value that is not finite is NaN in the scores of its key, which hidden keys lose, and 0 in the product,
        # where hidden keys weigh 0 and 0 x NaN is NaN.
        stray = v * 0.0
        v = tl.where(stray == 0.0, v, 0.0)
        scores += tl.sum(stray, 1)[None, :]
    scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp(scores - shift[:, None])
    decay = tl.exp(top - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _kernel(
    q, k_cache, v_cache, table, row_index, lens, slots, mask, sinks, k_scale, v_scale, prefix_out, prefix_lse, out,
    queries, each, left, page_size, drafts, kv_heads, group, dim, v_dim, softmax_scale, softcap,
    q_token, k_slot, k_head, v_slot, v_head, table_row, mask_request, mask_query,
    p_token, p_head, l_token, l_head, o_token,
    CACHED: tl.constexpr, INDEXED: tl.constexpr, CAUSAL: tl.constexpr, DRAFTS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PREFIX: tl.constexpr, QUANTIZED: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, ISOLATE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DRAFT_KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    # The heads of a request are neighbours: a slot's keys of all heads lie side by side.
    request, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # query * group + head in the group
    valid = row < queries * group
    query, head = row // group, kv_head * group + row % group
    token = request * queries + query
    d, dv = tl.arange(0, DIM), tl.arange(0, V_DIM)
    q_at = q + token[:, None] * q_token + head[:, None] * dim + d[None, :]
    queries_block = tl.load(q_at, mask=valid[:, None] & (d < dim)[None, :], other=0.0)
    k_cache += kv_head * k_head
    v_cache += kv_head * v_head
    if QUANTIZED:  # e4m3 fits bf16 exactly; descales join the logits and the output
        factor = softmax_scale * tl.load(k_scale + kv_head * K_PER_HEAD)
    else:
        factor = softmax_scale

    if PREFIX:  # asked for first: it arrives while the keys are read
        lse = tl.load(prefix_lse + token * l_token + head * l_head, mask=valid, other=-float("inf"))
        p_at = prefix_out + token[:, None] * p_token + head[:, None] * p_head + dv[None, :]
        before = tl.load(p_at, mask=valid[:, None] & (dv < v_dim)[None, :], other=0.0)

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_DIM), tl.float32)

    if CACHED:  # keys first .. end of each query, out of the page table
        if CAUSAL:
            end = tl.load(lens + request) - queries + query + 1
        else:
            end = tl.load(lens + request * (queries // each) + query // each, mask=valid, other=0)
        first = tl.where(left >= 0, tl.maximum(end - left - 1, 0), 0)
        stop = tl.max(tl.where(valid, end, 0), 0)
        start = tl.min(tl.where(valid, first, stop), 0)
        at = request
        if INDEXED:
            at = tl.load(row_index + request).to(tl.int64)
        pages = table + at * table_row
        for base in range(start, stop, KEYS):
            key = base + tl.arange(0, KEYS)
            there = key < stop
            slot = tl.load(pages + key // page_size, mask=there, other=0).to(tl.int64) * page_size + key % page_size
            seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
            top, total, acc = _fold(
                queries_block, k_cache, v_cache, slot, there, seen, factor, softcap, k_slot, v_slot, d, dv, dim, v_dim,
                top, total, acc, SOFTCAP, ISOLATE,
            )  # fmt: skip

    if DRAFTS:
        for base in range(0, drafts, DRAFT_KEYS):
            key = base + tl.arange(0, DRAFT_KEYS)
            there = key < drafts
            slot = tl.load(slots + request * drafts + key, mask=there, other=0).to(tl.int64)
            seen_at = mask + request * mask_request + query[:, None] * mask_query + key[None, :]
            seen = tl.load(seen_at, mask=valid[:, None] & there[None, :], other=0) != 0
            top, total, acc = _fold(
                queries_block, k_cache, v_cache, slot, there, seen, factor, softcap, k_slot, v_slot, d, dv, dim, v_dim,
                top, total, acc, SOFTCAP, ISOLATE,
            )  # fmt: skip

    if QUANTIZED:
        acc = acc * tl.load(v_scale + kv_head * V_PER_HEAD)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        decay = tl.exp(top - new_top)
        total, acc, top = total * decay + tl.exp(sink - new_top), acc * decay[:, None], new_top
    if PREFIX:
        new_top = tl.maximum(top, lse)
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        decay, share = tl.exp(top - shift), tl.exp(lse - shift)
        joined = tl.where((share == 0.0)[:, None], 0.0, before.to(tl.float32) * share[:, None])
        total, acc = total * decay + share, acc * decay[:, None] + joined
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = out + token[:, None] * o_token + head[:, None] * v_dim + dv[None, :]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=valid[:, None] & (dv < v_dim)[None, :])


def short_key_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    queries: int,
    softmax_scale: float,
    page_table: Tensor | None = None,
    row_index: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_size: int = 1,
    window_left: int = -1,
    causal: bool = False,
    slots: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_out: Tensor | None = None,
    prefix_lse: Tensor | None = None,
) -> Tensor:
    """Arguments and result of kernels.short_keys.short_key_attention_torch."""
    tokens, heads, dim = q.shape
    kv_heads, v_dim = k_cache.shape[1], v_cache.shape[2]
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    requests, group = tokens // queries, heads // kv_heads
    q = q if q.stride(2) == 1 and q.stride(1) == dim else q.contiguous()
    cached = page_table is not None and cache_seqlens is not None
    depths = cache_seqlens.shape[0] // requests if cached else 1
    drafts, mask_strides = 0, (0, 0)
    if slots is not None and mask is not None:
        drafts, slots = slots.shape[1], slots.contiguous()
        mask = (mask if mask.stride(2) == 1 else mask.contiguous()).view(torch.uint8)
        mask_strides = mask.stride()[:2]
    prefix = prefix_out is not None and prefix_lse is not None
    before, lse = (prefix_out, prefix_lse) if prefix else (out, out)
    optional = (page_table, row_index, cache_seqlens, slots, mask, sinks, k_scale, v_scale)
    dims = triton.next_power_of_2(dim), triton.next_power_of_2(v_dim)
    tiles = _tiles(requests * kv_heads, queries * group, drafts, max(dims))
    _kernel[(requests * kv_heads, triton.cdiv(queries * group, tiles["ROWS"]))](
        q, k_cache, v_cache, *(out if one is None else one for one in optional), before, lse, out,
        queries, queries // depths, window_left, page_size, drafts, kv_heads, group, dim, v_dim, softmax_scale, softcap,
        q.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        page_table.stride(0) if cached else 0, *mask_strides,
        before.stride(0), before.stride(1), lse.stride(0), lse.stride(1), out.stride(0),
        CACHED=cached, INDEXED=row_index is not None, CAUSAL=causal, DRAFTS=drafts > 0,
        SOFTCAP=softcap != 0, SINKS=sinks is not None, PREFIX=prefix, QUANTIZED=k_cache.dtype == FP8,
        K_PER_HEAD=0 if k_scale is None or k_scale.numel() == 1 else 1,
        V_PER_HEAD=0 if v_scale is None or v_scale.numel() == 1 else 1,
        ISOLATE=queries > 1 or drafts > 0,  # one query sees every key that is read
        DIM=dims[0], V_DIM=dims[1], **tiles,
    )  # fmt: skip
    return out


def _tiles(programs: int, rows: int, drafts: int, dim: int) -> dict[str, int]:
    """Sizes of a program's blocks, as measured on an H200: large ones for latency, small ones once it is full."""
    if programs * dim <= 48 * 1024:
        keys, warps, stages = (128, 4, 1) if dim <= 128 else (64, 4, 3)
    else:
        keys, warps, stages = (64, 2, 2) if dim <= 128 else (32, 2, 4)
    if rows > 16 or drafts:
        warps, stages = 4, min(stages, 2)
    return dict(
        ROWS=max(16, min(64, triton.next_power_of_2(rows))),
        KEYS=keys,
        DRAFT_KEYS=max(16, min(64, triton.next_power_of_2(max(drafts, 1)))),
        num_warps=warps,
        num_stages=stages,
    )
