"""Where the keys and values of a call lie: in pages behind a table, or one sequence after the other."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch
from torch import Tensor

from fa_fast.kernels.joint import joint_view
from fa_ref.api.errors import BadPageTable

KEPT_BYTES = 2**24  # of copies of keys and as many of values that stay allocated, in each thread
_kept = threading.local()


class _Cache:
    """One cache (pages, page_size, kv_heads, dim) that hands out runs of pages, copied only if it must.

    side: "first" or "second" of a call; each has a scratch of its own.
    """

    def __init__(self, cache: Tensor, side: str):
        self.side = side
        self.scratch: Tensor | None = None  # bytes
        self.shape = cache.shape
        if cache.dtype == torch.float8_e4m3fn:
            cache = cache.view(torch.uint8)  # index_select has no fp8 kernel
        self.is_fp8 = cache.dtype == torch.uint8
        self.cache = cache
        whole_pages = cache.shape[0] > 0 and cache[0].is_contiguous()
        self.rows = cache.flatten(1) if whole_pages else cache  # one copy per page instead of a strided walk
        self.in_line = cache.stride(0) == cache.stride(1) * cache.shape[1]  # slots at one distance throughout
        if self.in_line:
            slots = cache.flatten(0, 1)
            self.slot_rows = slots.flatten(1) if cache.stride(2) == cache.shape[3] else slots

    def typed(self, x: Tensor) -> Tensor:
        return x.view(torch.float8_e4m3fn) if self.is_fp8 else x

    def run(self, first: int, pages: int, cut: slice, near: bool) -> Tensor:
        """The slots `cut` of pages [first, first + pages): (keys, kv_heads, dim), a view or a near copy."""
        part = self.cache[first : first + pages]
        part = (part[0] if pages == 1 else part.flatten(0, 1))[cut]
        if near and self.shape[2] > 1 and not self.is_fp8:  # one head is a straight walk; fp8 is converted later
            part = self._scratch(part.numel()).view(part.shape).copy_(part)
        return self.typed(part)

    def gather(self, pages: Tensor) -> Tensor:
        """The listed pages, copied: (keys, kv_heads, dim)."""
        return self._copied(self.rows, pages).view(pages.shape[0] * self.shape[1], *self.shape[2:])

    def pick(self, slots: Tensor) -> Tensor:
        """(sequences, keys) slots -> (sequences, keys, kv_heads, dim), copied."""
        return self._copied(self.slot_rows, slots.flatten()).view(*slots.shape, *self.shape[2:])

    def _copied(self, rows: Tensor, index: Tensor) -> Tensor:
        into = self._scratch(index.shape[0] * rows[0].numel()).view(index.shape[0], *rows.shape[1:])
        try:
            return self.typed(torch.index_select(rows, 0, index, out=into))
        except IndexError:  # index_select looks anyway; the range is only taken for the message
            raise BadPageTable(
                f"the page table leads to rows {int(index.min())}..{int(index.max())} of a cache of {rows.shape[0]} "
                f"rows ({self.shape[0]} pages of {self.shape[1]}). Divide slots by the page size"
            ) from None

    def _scratch(self, need: int) -> Tensor:
        """Every copy overwrites the last one, so that the scratch stays in cache.

        It outlives the call: fresh memory is zeroed page by page when touched, a tenth of a decode step's time.
        """
        size = need * self.cache.element_size()
        scratch: Tensor | None = self.scratch if self.scratch is not None else getattr(_kept, self.side, None)
        if scratch is None or len(scratch) < size:
            scratch = torch.empty(size, dtype=torch.uint8)
            if size <= KEPT_BYTES:
                setattr(_kept, self.side, scratch)
        self.scratch = scratch
        return scratch[:size].view(self.cache.dtype)


class PagedKeys:
    """Keys behind a page table; an unpaged cache is one page per row.

    page_table: int32 [rows, pages]; row_index: the table row of each sequence; lengths: keys of each one.
    """

    def __init__(
        self,
        *,
        k: Tensor,
        v: Tensor,
        page_table: Tensor,
        row_index: list[int],
        lengths: list[int],
        joint: bool,
    ):
        both = joint_view(v, k) if joint else None
        caches = [both] if both is not None else [v, k] if joint else [k, v]
        self.caches = [_Cache(cache, side) for cache, side in zip(caches, ("first", "second"), strict=False)]
        self.joint = joint
        self.page_size, self.pages = k.shape[1], k.shape[0]
        self.page_table, self.row_index, self.lengths = page_table, row_index, lengths
        self.can_pick = all(cache.in_line for cache in self.caches)

    def block(self, sequence: int, start: int, stop: int, near: bool) -> tuple[Tensor, Tensor]:
        """k and v of logical positions [start, stop): (keys, kv_heads, dim), valid until the next call.

        `near`: copy consecutive pages too. The kernel walks the keys once per head; for few rows, one straight
        copy into the cache and walks there were measured 1.25x faster than strided walks through memory.
        """
        head, size = start // self.page_size, self.page_size
        pages = self.page_table[self.row_index[sequence], head : (stop - 1) // size + 1]
        first = self._consecutive(pages)
        cut = slice(start - head * size, stop - head * size)
        parts = [
            cache.gather(pages)[cut] if first is None else cache.run(first, len(pages), cut, near)
            for cache in self.caches
        ]
        return _pair(parts, self.joint)

    def _consecutive(self, pages: Tensor) -> int | None:
        first, last, count = int(pages[0]), int(pages[-1]), len(pages)
        if not (0 <= first < self.pages and 0 <= last < self.pages):
            raise BadPageTable(
                f"the page table holds page ids {first} and {last}, the cache has {self.pages} pages of "
                f"{self.page_size}; ids must lie in [0, {self.pages}). Divide slots by the page size."
            )
        if last - first != count - 1 or (count > 1 and not self.can_pick):
            return None
        in_line = count <= 2 or bool((pages[1:] - pages[:-1] == 1).all())
        return first if in_line else None

    def pick(self, sequences: list[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        """k and v at logical positions [sequences, keys]: (sequences, keys, kv_heads, dim)."""
        rows = torch.tensor([self.row_index[sequence] for sequence in sequences])[:, None]
        pages = self.page_table[rows, positions // self.page_size].long()  # a slot can pass 2**31
        slots = pages * self.page_size + positions % self.page_size
        return _pair([cache.pick(slots) for cache in self.caches], self.joint)

    def side_by_side(self, sequences: list[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """`pick` of positions [start, stop) of every sequence, in whole pages: measured 1.25x faster."""
        head, tail = start // self.page_size, (stop - 1) // self.page_size + 1
        pages = self.page_table[[self.row_index[sequence] for sequence in sequences], head:tail]
        cut = slice(start - head * self.page_size, stop - head * self.page_size)
        parts = [cache.gather(pages.flatten()).unflatten(0, (len(sequences), -1))[:, cut] for cache in self.caches]
        return _pair(parts, self.joint)


class RaggedKeys:
    """Keys of all sequences one after the other: (tokens, kv_heads, dim), split at starts."""

    can_pick = True

    def __init__(self, *, k: Tensor, v: Tensor, starts: list[int], joint: bool):
        both = joint_view(v, k) if joint else None
        self.parts = [both] if both is not None else [v, k] if joint else [k, v]
        self.joint = joint
        self.starts = starts
        self.lengths = [stop - start for start, stop in pairwise(starts)]
        self.page_size = 1

    def block(self, sequence: int, start: int, stop: int, near: bool) -> tuple[Tensor, Tensor]:
        """As PagedKeys.block, always in place."""
        at = self.starts[sequence]
        return _pair([part[at + start : at + stop] for part in self.parts], self.joint)

    def pick(self, sequences: list[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        slots = torch.tensor([self.starts[sequence] for sequence in sequences])[:, None] + positions
        return _pair([part[slots] for part in self.parts], self.joint)


def _pair(parts: list[Tensor], joint: bool) -> tuple[Tensor, Tensor]:
    """(k, v). Joint: the same [v | k] twice, so that values are the leading columns of the keys."""
    if not joint:
        return parts[0], parts[1]
    both = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return both, both
