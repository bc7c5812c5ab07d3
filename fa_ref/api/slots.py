"""Checks of where a batch's tokens are and of what its drafts may see, value by value: what FA_CHECK=1 adds.

Every function raises BadBatch or BadPageTable, naming the request. They read values, which synchronises.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadPageTable
from fa_ref.api.layer import window_left


def check_slots(owner: str, slots: Tensor, available: int) -> None:
    """Slots must lie in a pool of `available` slots."""
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < available:
        raise BadPageTable(
            f"{owner}: slots span {int(slots.min())}..{int(slots.max())}, the pool holds 0..{available - 1}"
        )


def check_pages(request: int, slots: Tensor, page_size: int, start: int = 0) -> None:
    """Within a page, consecutive positions (from `start`) must lie in consecutive slots, from its first slot on."""
    offset = torch.arange(slots.shape[0], device=slots.device) % page_size
    wrong = torch.nonzero(slots % page_size != offset)
    first = slots[torch.arange(slots.shape[0], device=slots.device) - offset]
    wrong = torch.cat([wrong, torch.nonzero(slots - first != offset)])
    if wrong.numel():
        position = int(wrong[0])
        raise BadPageTable(
            f"request {request}: position {start + position} is in slot {int(slots[position])}, which is not offset "
            f"{position % page_size} of its page of {page_size}; allocate whole pages to a request"
        )


def check_written(loc: Tensor, rows: list[Tensor], new: list[int]) -> None:
    """New tokens are written at the end of their own rows, each to a slot of its own."""
    ends = list(accumulate(new))
    for request, (row, count, end) in enumerate(zip(rows, new, ends, strict=True)):
        mine = loc[end - count : end].tolist()
        if mine != row[len(row) - count :].tolist():
            raise BadBatch(
                f"request {request}: out_cache_loc has slots {mine} for its new tokens, its row of req_to_token "
                f"{row[len(row) - count :].tolist()} at the same positions; write both from one allocation"
            )
    _check_written_once(loc)
    # A prefix that another request of this batch writes may be read in the same step, at the same positions.
    top = max((int(s.max()) for s in (loc, *rows) if len(s)), default=0)
    written = torch.full((top + 1,), -1, device=loc.device)
    for row, count in zip(rows, new, strict=True):
        position = torch.arange(len(row), device=loc.device)
        written[row[len(row) - count :].long()] = position[len(row) - count :]
    for request, row in enumerate(rows):
        at, position = written[row.long()], torch.arange(len(row), device=loc.device)
        wrong = torch.nonzero((at >= 0) & (at != position) & (row > 0))
        if wrong.numel():
            first = int(wrong[0])
            raise BadPageTable(
                f"request {request}: slot {int(row[first])} of its position {first} is written in this step, for "
                f"position {int(at[first])}; a slot holds one token"
            )


def check_branches(loc: Tensor, prefixes: list[Tensor], is_padding: list[bool]) -> None:
    """Branches write slots of their own: no padding, none twice, none of any request's prefix.

    loc: [requests, branches * steps]. is_padding: the requests of row 0, which may write slot 0.
    """
    for request, (own, padding) in enumerate(zip(loc, is_padding, strict=True)):
        if not padding and bool((own <= 0).any()):
            raise BadPageTable(
                f"request {request}: its branches write slot {int(own.min())}, which is padding; allocate a slot of "
                "its own for every branch and step"
            )
    _check_written_once(loc)
    read = torch.cat(prefixes)
    for request, own in enumerate(loc):
        shared = own[torch.isin(own, read) & (own > 0)]
        if shared.numel():
            raise BadPageTable(
                f"request {request}: its branches write slots {shared.tolist()}, which hold cached tokens of the "
                "batch; allocate slots of their own"
            )


def _check_written_once(loc: Tensor) -> None:
    slots, writers = loc[loc > 0].unique(return_counts=True)  # slot 0 is padding, which any number of rows may write
    if (writers > 1).any():
        raise BadPageTable(f"slots {slots[writers > 1].tolist()} are written by two requests of the batch, or twice")


def check_window_slots(
    pool: Any, config: BackendConfig, request: int, row: Tensor, query: int, drafts: Tensor | None
) -> None:
    """What window and chunk layers can read from position `query` on must be in the window pool.

    row: slots of the request's keys, which are read by the page. drafts: the slots of a tree or of branches, which
    come after them and are read one by one, as are then the keys before them in a window.
    """
    mapping, window, chunk = pool.full_to_swa_index_mapping, window_left(config), config.attention_chunk_size
    reads = []
    if window >= 0:
        reads.append((max(0, query - window), config.page_size if drafts is None else 1))
    if chunk is not None:
        reads.append((query // chunk * chunk, config.page_size))
    for first, page_size in reads:
        start = first // page_size * page_size
        slots = mapping[row[start:].long()]
        gone = torch.nonzero((slots < config.page_size) & (row[start:] >= config.page_size))
        if gone.numel():
            raise BadPageTable(
                f"request {request}: position {start + int(gone[0])} is not in the window pool, and a window layer "
                f"reads its page; evict a page of {config.page_size} only when all its tokens left the window"
            )
        check_pages(request, slots, page_size, start)
    if reads and drafts is not None:
        gone = drafts[(mapping[drafts.long()] < config.page_size) & (drafts >= config.page_size)]
        if gone.numel():
            raise BadPageTable(
                f"request {request}: the slots {gone.tolist()} of its drafts are not in the window pool, where window "
                "layers read them; map the slots of drafts when they are allocated"
            )


def check_tree(mask: Tensor, lens: list[int], drafts: int) -> None:
    """A flat tree mask shows every draft the whole prefix, itself, and none of the drafts that come after it."""
    start = 0
    for request, length in enumerate(lens):
        rows = mask[start : start + drafts * (length + drafts)].view(drafts, length + drafts)
        start += rows.numel()
        tree = rows[:, length:]
        for wrong, says in (
            (~rows[:, :length].all(dim=1), f"does not see all {length} cached tokens; every draft sees the prefix"),
            (~tree.diagonal(), "does not see itself; set the diagonal"),
            (tree.triu(1).any(dim=1), "sees a draft that comes after it; order drafts so that ancestors come first"),
        ):
            if bool(wrong.any()):
                raise BadBatch(f"custom_mask of request {request}: draft {int(wrong.nonzero()[0])} {says}")
