"""Queries to e4m3 with one scale a (sequence, key head), as FA3 wants them beside an fp8 cache.

The scale is taken from the data, so that a query of any size keeps its precision, and from one sequence alone, so
that a neighbour cannot change it. A NaN stays NaN and does not enter the scale. Definition: `quantize_q_torch`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ref.api.pools import FP8, FP8_MAX


@triton.jit
def _kernel(
    q, cu_seqlens_q, quantized, descale, token_stride, kv_heads, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens_q + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_q + sequence + 1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    largest = tl.zeros((), tl.float32)
    for base in range(start, end, ROWS):
        row = base + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < width)[None, :]
        source = q + row[:, None] * token_stride + kv_head * width + column[None, :]
        block = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        size = tl.where(block == block, tl.abs(block), 0.0)  # a NaN stays one below and leaves the scale alone
        largest = tl.maximum(largest, tl.max(tl.max(size, 1), 0))
    factor = tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0)
    tl.store(descale + sequence * kv_heads + kv_head, factor)
    for base in range(start, end, ROWS):
        row = base + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < width)[None, :]
        source = q + row[:, None] * token_stride + kv_head * width + column[None, :]
        block = tl.div_rn(tl.load(source, mask=inside, other=0.0).to(tl.float32), factor)
        block = tl.clamp(block, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        target = quantized + row[:, None] * (kv_heads * width) + kv_head * width + column[None, :]
        tl.store(target, block.to(quantized.dtype.element_ty), mask=inside)


def quantize_q(q: Tensor, cu_seqlens_q: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """(q as e4m3 [tokens, heads, dim], q_descale fp32 [sequences, kv_heads]). Rows of no sequence are undefined."""
    tokens, heads, dim = q.shape
    sequences, width = cu_seqlens_q.shape[0] - 1, heads // kv_heads * dim
    cu_seqlens_q = cu_seqlens_q.contiguous()
    q = q if q.stride(2) == 1 and q.stride(1) == dim else q.contiguous()
    quantized = torch.empty(tokens, heads, dim, dtype=FP8, device=q.device)
    descale = torch.empty(sequences, kv_heads, dtype=torch.float32, device=q.device)
    if sequences:
        block = triton.next_power_of_2(width)
        _kernel[(sequences, kv_heads)](
            q, cu_seqlens_q, quantized, descale, q.stride(0), kv_heads, width,
            ROWS=max(1, 4096 // block), WIDTH=block,
        )  # fmt: skip
    return quantized, descale


def quantize_q_torch(q: Tensor, cu_seqlens_q: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The same, a sequence at a time."""
    bounds = cu_seqlens_q.tolist()
    quantized = torch.zeros(q.shape, dtype=FP8, device=q.device)
    descale = torch.ones(len(bounds) - 1, kv_heads, device=q.device)
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if start == end:
            continue
        grouped = q[start:end].float().unflatten(1, (kv_heads, -1))
        largest = grouped.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=(0, 2, 3))
        descale[i] = torch.where(largest > 0, largest / torch.full_like(largest, FP8_MAX), 1.0)
        scaled = grouped / descale[i].reshape(1, kv_heads, 1, 1)
        quantized[start:end] = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(1, 2)
    return quantized, descale
