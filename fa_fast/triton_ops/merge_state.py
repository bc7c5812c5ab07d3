"""Merge of two attention states, reading each LSE in whatever layout its kernel wrote it.

Definition: kernels.torch_cpu.merge_state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    out_a, lse_a, out_b, lse_b, out, lse,
    tokens, v_dim, a_token, a_head, b_token, b_head, la_token, la_head, lb_token, lb_head, o_token, o_head, heads,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    valid = token < tokens
    a = tl.load(lse_a + token * la_token + head * la_head, mask=valid, other=0.0)
    b = tl.load(lse_b + token * lb_token + head * lb_head, mask=valid, other=0.0)
    top = tl.maximum(a, b)
    empty = top == -float("inf")
    shift = tl.where(empty, 0.0, top)
    weight_a, weight_b = tl.exp(a - shift), tl.exp(b - shift)
    total = weight_a + weight_b
    merged = tl.where(empty, -float("inf"), shift + tl.log(tl.where(empty, 1.0, total)))
    # One empty side must return the other bitwise, logarithm included.
    merged = tl.where(weight_b == 0.0, tl.where(empty, merged, a), tl.where(weight_a == 0.0, b, merged))
    tl.store(lse + token * heads + head, merged, mask=valid)

    column = tl.arange(0, DIM)
    inside = valid[:, None] & (column < v_dim)[None, :]
    value_a = tl.load(out_a + token[:, None] * a_token + head * a_head + column[None, :], mask=inside, other=0.0)
    value_b = tl.load(out_b + token[:, None] * b_token + head * b_head + column[None, :], mask=inside, other=0.0)
    # Whatever an empty side holds, NaN included, is not read; the other side keeps its bits, the sign of a zero too.
    empty_a, empty_b = (a == -float("inf"))[:, None], (b == -float("inf"))[:, None]
    value_a, value_b = tl.where(empty_a, 0.0, value_a.to(tl.float32)), tl.where(empty_b, 0.0, value_b.to(tl.float32))
    whole = tl.where(empty, 1.0, total)
    value = value_a * (weight_a / whole)[:, None] + value_b * (weight_b / whole)[:, None]
    value = tl.where(empty_b, value_a, tl.where(empty_a, value_b, value))
    target = out + token[:, None] * o_token + head * o_head + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out_*: [tokens, heads, v_dim], last dims contiguous; lse_*: fp32 (tokens, heads), natural log, any strides."""
    tokens, heads, v_dim = out_a.shape
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out_a.device)
    if tokens == 0:
        return out, lse
    dim = triton.next_power_of_2(v_dim)
    rows = max(1, min(16, 2048 // dim))
    _kernel[(triton.cdiv(tokens, rows), heads)](
        out_a, lse_a, out_b, lse_b, out, lse,
        tokens, v_dim, out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1),
        lse_a.stride(0), lse_a.stride(1), lse_b.stride(0), lse_b.stride(1), out.stride(0), out.stride(1), heads,
        ROWS=rows, DIM=dim,
    )  # fmt: skip
    return out, lse
