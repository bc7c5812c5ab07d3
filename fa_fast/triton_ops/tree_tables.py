"""Tree mask, depths and draft slots of a verify batch in one launch. Definition: planning.verify.tree_tables_torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    custom_mask, seq_lens, slots, rows, mapping, ancestors, depth, draft_slots,
    slots_stride, positions, drafts,
    MAPPED: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, draft = tl.program_id(0), tl.program_id(1)
    start = tl.zeros((), tl.int64)  # of this request's part of the flat mask
    for base in range(0, request, REQUESTS):
        r = base + tl.arange(0, REQUESTS)
        before = r < request
        lens = tl.load(seq_lens + r, mask=before, other=0).to(tl.int64)
        start += tl.sum(tl.where(before, (lens + drafts) * drafts, 0), 0)
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < drafts
    source = start + draft * (seq_len + drafts) + seq_len + column
    visible = tl.load(custom_mask + source, mask=inside, other=0) != 0
    out = request.to(tl.int64) * drafts + draft
    tl.store(ancestors + out * drafts + column, visible, mask=inside)
    tl.store(depth + out, tl.sum(visible.to(tl.int32), 0) - 1)
    row = tl.load(rows + request).to(tl.int64)
    slot = tl.load(slots + row * slots_stride + tl.minimum(seq_len + draft, positions - 1))
    if MAPPED:
        slot = tl.load(mapping + slot).to(tl.int32)
    tl.store(draft_slots + out, slot)


def tree_tables(
    custom_mask: Tensor, seq_lens: Tensor, slots: Tensor, rows: Tensor, drafts: int, mapping: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """ancestors bool [requests, drafts, drafts], depth int32 [requests, drafts], slots int32 [requests, drafts]."""
    requests, device = seq_lens.shape[0], slots.device
    ancestors = torch.empty(requests, drafts, drafts, dtype=torch.bool, device=device)
    depth = torch.empty(requests, drafts, dtype=torch.int32, device=device)
    draft_slots = torch.empty(requests, drafts, dtype=torch.int32, device=device)
    if requests:
        _kernel[(requests, drafts)](
            custom_mask.view(torch.uint8) if custom_mask.dtype == torch.bool else custom_mask,
            seq_lens, slots, rows, slots if mapping is None else mapping,
            ancestors.view(torch.uint8), depth, draft_slots,
            slots.stride(0), slots.shape[1], drafts,
            MAPPED=mapping is not None, REQUESTS=min(1024, triton.next_power_of_2(requests)),
            BLOCK=triton.next_power_of_2(drafts),
        )  # fmt: skip
    return ancestors, depth, draft_slots
