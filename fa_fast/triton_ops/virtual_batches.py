"""Virtual batches of chunked local attention in one launch. Definition: planning.local.virtual_batches_torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ref.api.errors import BadBatch


@triton.jit
def _kernel(
    cu_q, seq_lens, page_table, row_index, cu_local, k_local, table_local,
    requests, table_stride, pages, width, chunk, page_size,
    INDEXED: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    nth = tl.program_id(0)
    # Walk the requests in blocks until the one that virtual batch `nth` belongs to: no cross-program sum is needed.
    before = tl.zeros((), tl.int32)  # virtual batches of the requests already passed
    request = tl.full((), -1, tl.int32)
    within = tl.zeros((), tl.int32)  # number of virtual batch nth among its request's
    for base in range(0, requests, REQUESTS):
        r = base + tl.arange(0, REQUESTS)
        valid = r < requests
        new = tl.load(cu_q + r + 1, mask=valid, other=0) - tl.load(cu_q + r, mask=valid, other=0)
        end = tl.load(seq_lens + r, mask=valid, other=0)
        chunks = tl.where(valid & (new > 0), (end - 1) // chunk - (end - new) // chunk + 1, 0)
        ends = before + tl.cumsum(chunks, 0)
        hit = (ends > nth) & (ends - chunks <= nth)
        request = tl.maximum(request, tl.max(tl.where(hit, r, -1), 0))
        within += tl.sum(tl.where(hit, nth - (ends - chunks), 0), 0)
        before += tl.sum(chunks, 0)

    real = request >= 0
    owner = tl.maximum(request, 0)
    cu_start = tl.load(cu_q + owner)
    end = tl.load(seq_lens + owner)
    start = end - (tl.load(cu_q + owner + 1) - cu_start)
    chunk_start = tl.where(real, (start // chunk + within) * chunk, 0)
    chunk_end = tl.minimum(chunk_start + chunk, end)
    if tl.program_id(1) == 0:
        total = tl.load(cu_q + requests)
        tl.store(cu_local + nth + 1, tl.where(real, cu_start + chunk_end - start, total))
        tl.store(k_local + nth, tl.where(real, chunk_end - chunk_start, 0))
        if nth == 0:
            tl.store(cu_local, 0)

    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.minimum(chunk_start // page_size + column, pages - 1)
    row = owner.to(tl.int64)
    if INDEXED:
        row = tl.load(row_index + owner).to(tl.int64)
    page = tl.load(page_table + row * table_stride + source, mask=inside, other=0)
    tl.store(table_local + nth.to(tl.int64) * width + column, page, mask=inside)


def virtual_batches(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    count: int,
    chunk: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """cu_seqlens_q [count + 1], cache_seqlens [count], page_table [count, pages of a chunk], all int32."""
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise BadBatch(
            f"the page table has stride {page_table.stride(1)} along a row, whose pages must be contiguous; call "
            ".contiguous()"
        )
    requests, pages = seq_lens.shape[0], page_table.shape[1]
    width = min(chunk // page_size, pages)
    device = page_table.device
    cu_local = torch.zeros(count + 1, dtype=torch.int32, device=device)
    k_local = torch.empty(count, dtype=torch.int32, device=device)
    table_local = torch.empty(count, width, dtype=torch.int32, device=device)
    if count == 0:
        return cu_local, k_local, table_local
    block = min(1024, triton.next_power_of_2(width))
    _kernel[(count, triton.cdiv(width, block))](
        cu_seqlens_q.contiguous(), seq_lens.contiguous(), page_table,
        page_table if row_index is None else row_index.contiguous(),
        cu_local, k_local, table_local,
        requests, page_table.stride(0), pages, width, chunk, page_size,
        INDEXED=row_index is not None,
        REQUESTS=min(1024, triton.next_power_of_2(requests)), BLOCK=block,
    )  # fmt: skip
    return cu_local, k_local, table_local
