"""From slots to pages: the page table a kernel reads."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int, Int32
from torch import Tensor

from fa_ref.api import BackendConfig, ForwardBatch
from fa_ref.api.checks import req_to_token


def slot_table(batch: ForwardBatch, config: BackendConfig, pool: str) -> Int32[Tensor, "requests positions"]:
    """The slot of every logical position of every request, in the pool's own numbering."""
    slots = req_to_token(batch, config)[batch.req_pool_indices.long()]
    if pool == "full":
        return slots
    return swa_slots(batch.token_to_kv_pool or config.token_to_kv_pool, slots)


def swa_slots(kv_pool: Any, slots: Int32[Tensor, "requests positions"]) -> Int32[Tensor, "requests positions"]:
    """Slots of the full pool as slots of the window pool; 0, the padding slot, where a token was freed."""
    return kv_pool.full_to_swa_index_mapping[slots.long()].to(torch.int32)


def pages_of(slots: Int32[Tensor, "requests positions"], page_size: int) -> Int32[Tensor, "requests pages"]:
    """Every page_size-th slot, divided by page_size: the page that holds each run of positions.

    A page holds consecutive positions of one request, so its first slot tells it all. Translate slots to
    another pool before this, never after: pages of two pools do not correspond by number.

    >>> pages_of(torch.tensor([[8, 9, 10, 11, 4, 5]], dtype=torch.int32), page_size=4).tolist()
    [[2, 1]]
    """
    return slots[:, ::page_size] // page_size


def shifted(
    table: Int32[Tensor, "requests pages"], first_page: Int[Tensor, " requests"], width: int
) -> Int32[Tensor, "requests width"]:
    """Each row from its own first page on, `width` pages. Past the end the last column repeats, unread.

    >>> shifted(torch.tensor([[5, 6, 7], [8, 9, 10]], dtype=torch.int32), torch.tensor([1, 0]), 2).tolist()
    [[6, 7], [8, 9]]
    """
    columns = rearrange(first_page, "r -> r 1") + torch.arange(width, device=table.device)
    return table.gather(1, columns.clamp(max=table.shape[1] - 1).long())
