"""Which keys a query sees, as a closed range of logical positions, and the blocks of keys worth touching."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Cut = Literal["full", "causal", "masked"]  # how the rows of a tile see the keys of a block
Block = tuple[int, int, Cut]  # keys [start, stop)


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The keys a query at a logical position sees. Causal, windows and chunks all give one closed range.

    `left`, `right`: window ends, both inclusive, -1 unlimited. `chunk`: 0, or the size of a chunk no query
    looks out of. Both range ends never decrease with the position, which is what `blocks` relies on.
    """

    left: int
    right: int
    chunk: int

    @classmethod
    def of(cls, causal: bool, window_size: tuple[int, int], attention_chunk: int) -> Visible:
        left, right = (max(int(end), -1) for end in window_size)
        return cls(left=left, right=0 if causal else right, chunk=int(attention_chunk))

    @property
    def only_causal(self) -> bool:
        return self.left < 0 and self.right == 0 and self.chunk == 0

    @property
    def everything(self) -> bool:
        return self.left < 0 and self.right < 0 and self.chunk == 0

    def keys(self, pos: int, keys: int) -> tuple[int, int]:
        """First and last visible key of the query at `pos` among `keys`; last < first when there is none."""
        first, last = 0, keys - 1
        if self.left >= 0:
            first = max(first, pos - self.left)
        if self.right >= 0:
            last = min(last, pos + self.right)
        if self.chunk:
            start = pos // self.chunk * self.chunk
            first, last = max(first, start), min(last, start + self.chunk - 1)
        return first, last

    def first_row(self, queries: int, keys: int) -> int:
        """Rows before it see nothing: with more queries than keys, the first ones sit before key 0."""
        if keys == 0:
            return queries
        if self.chunk:  # a negative position is in no chunk that holds keys
            return max(0, queries - keys)
        return 0 if self.right < 0 else max(0, queries - keys - self.right)

    def blocks(self, start_pos: int, stop_pos: int, keys: int, size: int, diagonal: bool) -> Iterator[Block]:
        """Blocks of at most `size` keys that the queries at [start_pos, stop_pos) look at, in order.

        `diagonal`: a causal edge may be one square block, for a kernel that has a causal flag.
        """
        first, shared_last = self.keys(start_pos, keys)
        shared_first, last = self.keys(stop_pos - 1, keys)
        stop = last + 1
        if diagonal:
            stop = shared_last
        for at in range(first, stop, size):
            end = min(at + size, stop)
            yield at, end, "full" if shared_first <= at and end - 1 <= shared_last else "masked"
        if diagonal:
            yield shared_last, last + 1, "causal"

    def mask(self, start_pos: int, rows: int, keys: int, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows, stop - start]: 0 where the query sees the key, -inf elsewhere."""
        pos = torch.arange(start_pos, start_pos + rows)[:, None]
        key = torch.arange(start, min(stop, keys))[None]
        seen = torch.ones(rows, stop - start, dtype=torch.bool)
        if self.left >= 0:
            seen &= key >= pos - self.left
        if self.right >= 0:
            seen &= key <= pos + self.right
        if self.chunk:
            seen &= key // self.chunk == pos.div(self.chunk, rounding_mode="floor")
        return torch.zeros(rows, stop - start, dtype=dtype).masked_fill_(~seen, -math.inf)
