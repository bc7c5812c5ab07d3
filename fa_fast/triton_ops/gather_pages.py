"""Page tables, cut to what the last token sees, in one launch. Definition: planning.page_table.gather_pages_torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ref.api.errors import BadBatch


@triton.jit
def _kernel(
    slots, rows, seq_lens, mapping, table, lens,
    slots_stride, positions, width, page_size, left, chunk,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    seq_len = tl.minimum(tl.load(seq_lens + request), positions).to(tl.int32)  # never into the next row
    last = tl.maximum(seq_len - 1, 0)
    first = tl.where(left >= 0, tl.maximum(last - left, 0), 0)
    first = tl.where(chunk > 0, last // tl.maximum(chunk, 1) * chunk, first)
    first_page = first // page_size
    if tl.program_id(1) == 0:
        tl.store(lens + request, seq_len - first_page * page_size)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    pages = (positions + page_size - 1) // page_size
    position = tl.minimum(first_page + column, pages - 1) * page_size
    row = tl.load(rows + request).to(tl.int64)  # rows times width can pass 2**31
    slot = tl.load(slots + row * slots_stride + position, mask=inside, other=0)
    if MAPPED:
        slot = tl.load(mapping + slot, mask=inside, other=0).to(tl.int32)
    tl.store(table + request.to(tl.int64) * width + column, slot // page_size, mask=inside)


def gather_pages(
    slots: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    page_size: int,
    width: int,
    left: int,
    chunk: int,
    mapping: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """page_table int32 [requests, width] and cache_seqlens int32 [requests]."""
    if slots.shape[1] > 1 and slots.stride(1) != 1:
        raise BadBatch(
            f"req_to_token has stride {slots.stride(1)} along a row, whose positions must be contiguous; call "
            ".contiguous()"
        )
    requests = seq_lens.shape[0]
    table = torch.empty(requests, width, dtype=torch.int32, device=slots.device)
    lens = torch.empty(requests, dtype=torch.int32, device=slots.device)
    if requests == 0:
        return table, lens
    block = min(1024, triton.next_power_of_2(max(width, 1)))
    _kernel[(requests, max(1, triton.cdiv(width, block)))](
        slots, rows.contiguous(), seq_lens.contiguous(),
        slots if mapping is None else mapping.contiguous(), table, lens,
        slots.stride(0), slots.shape[1], width, page_size, left, chunk,
        MAPPED=mapping is not None, BLOCK=block,
    )  # fmt: skip
    return table, lens
