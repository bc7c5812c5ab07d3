"""Suffix and merge of a cascade in one kernel: draft tokens under their tree mask, joined with the prefix's state.

One program holds a block of a request's query rows of one key head (all query heads of the group, query by query),
walks its draft slots, and folds the prefix's (out, lse) in before the only store. The LSE is read in the layout its
kernel wrote it. Definition: kernels.tree.tree_attention_torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ref.api.pools import FP8


@triton.jit
def _kernel(
    q, k_cache, v_cache, slots, mask, sinks, k_scale, v_scale, prefix_out, prefix_lse, out,
    queries, drafts, group, dim, v_dim, softmax_scale, softcap,
    q_token, k_slot, k_head, v_slot, v_head, mask_request, mask_query,
    p_token, p_head, l_token, l_head, o_token,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PREFIX: tl.constexpr, QUANTIZED: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    request, kv_head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)  # query * group + head in the group
    valid = row < queries * group
    query, head = row // group, kv_head * group + row % group
    token = request * queries + query
    d, dv = tl.arange(0, DIM), tl.arange(0, V_DIM)
    q_at = q + token[:, None] * q_token + head[:, None] * dim + d[None, :]
    queries_block = tl.load(q_at, mask=valid[:, None] & (d < dim)[None, :], other=0.0)
    if QUANTIZED:  # e4m3 fits bf16 exactly; descales join the logits and the output
        factor = softmax_scale * tl.load(k_scale + kv_head * K_PER_HEAD)
    else:
        factor = softmax_scale

    if PREFIX:  # asked for first: it arrives while the drafts are read
        lse = tl.load(prefix_lse + token * l_token + head * l_head, mask=valid, other=-float("inf"))
        p_at = prefix_out + token[:, None] * p_token + head[:, None] * p_head + dv[None, :]
        before = tl.load(p_at, mask=valid[:, None] & (dv < v_dim)[None, :], other=0.0)

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_DIM), tl.float32)
    for base in range(0, drafts, KEYS):
        key = base + tl.arange(0, KEYS)
        there = key < drafts
        slot = tl.load(slots + request * drafts + key, mask=there, other=0).to(tl.int64)
        k_at = k_cache + slot[None, :] * k_slot + kv_head * k_head + d[:, None]
        v_at = v_cache + slot[:, None] * v_slot + kv_head * v_head + dv[None, :]
        seen_at = mask + request * mask_request + query[:, None] * mask_query + key[None, :]
        # All loads before the first product: the kernel waits for memory, not for arithmetic.
        k = tl.load(k_at, mask=there[None, :] & (d < dim)[:, None], other=0.0).to(queries_block.dtype)
        v = tl.load(v_at, mask=there[:, None] & (dv < v_dim)[None, :], other=0.0).to(queries_block.dtype)
        seen = tl.load(seen_at, mask=valid[:, None] & there[None, :], other=0) != 0
        scores = tl.dot(queries_block, k, input_precision="ieee") * factor
        if SOFTCAP:
            scaled = scores / softcap  # tanh from exp2 of a number that cannot overflow
            e = tl.exp(-2.0 * tl.abs(scaled))
            tanh = (1.0 - e) / (1.0 + e)
            scores = softcap * tl.where(scaled < 0, -tanh, tanh)
        # A value that is not finite is NaN in the scores of its key, which hidden keys lose, and 0 in the product,
        # where hidden keys weigh 0 and 0 x NaN is NaN.
        stray = v * 0.0
        v = tl.where(stray == 0.0, v, 0.0)
        scores = tl.where(seen, scores + tl.sum(stray, 1)[None, :], -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

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


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    mask: Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_out: Tensor | None = None,
    prefix_lse: Tensor | None = None,
) -> Tensor:
    """Arguments and result of kernels.tree.tree_attention_torch."""
    tokens, heads, dim = q.shape
    requests, queries, drafts = mask.shape
    kv_heads, v_dim = k_cache.shape[1], v_cache.shape[2]
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    q = q if q.stride(2) == 1 and q.stride(1) == dim else q.contiguous()
    mask = mask if mask.stride(2) == 1 else mask.contiguous()
    prefix = prefix_out is not None and prefix_lse is not None
    before, lse = (prefix_out, prefix_lse) if prefix else (out, out)
    group = heads // kv_heads
    rows = max(16, min(64, triton.next_power_of_2(queries * group)))
    keys = max(16, min(64, triton.next_power_of_2(drafts)))
    grid = (requests, kv_heads, triton.cdiv(queries * group, rows))
    any_pointer = slots
    _kernel[grid](
        q, k_cache, v_cache, slots.contiguous(), mask.view(torch.uint8),
        any_pointer if sinks is None else sinks,
        any_pointer if k_scale is None else k_scale, any_pointer if v_scale is None else v_scale,
        before, lse, out,
        queries, drafts, group, dim, v_dim, softmax_scale, softcap,
        q.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        mask.stride(0), mask.stride(1),
        before.stride(0), before.stride(1), lse.stride(0), lse.stride(1), out.stride(0),
        SOFTCAP=softcap != 0, SINKS=sinks is not None, PREFIX=prefix, QUANTIZED=k_cache.dtype == FP8,
        K_PER_HEAD=0 if k_scale is None or k_scale.numel() == 1 else 1,
        V_PER_HEAD=0 if v_scale is None or v_scale.numel() == 1 else 1,
        ROWS=rows, KEYS=keys, DIM=triton.next_power_of_2(dim), V_DIM=triton.next_power_of_2(v_dim),
        num_warps=4,
    )  # fmt: skip
    return out
