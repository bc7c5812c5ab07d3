"""A mask is a question about two logical positions: may the query at q look at the key at k?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor

Predicate = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mask:
    """A predicate on (query position, key position); True means "may attend".

    Masks are values: combine them with & (both allow), | (one allows) and ~.

    >>> import torch
    >>> from fa_ref.masks import causal, sliding_window
    >>> (causal & sliding_window(1)).dense(torch.arange(3), torch.arange(3)).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    predicate: Predicate
    name: str

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Elementwise answer for positions of broadcastable shapes."""
        return self.predicate(q_pos, k_pos)

    def __and__(self, other: Mask) -> Mask:
        return Mask(lambda q, k: self(q, k) & other(q, k), f"{self.name} & {other.name}")

    def __or__(self, other: Mask) -> Mask:
        return Mask(lambda q, k: self(q, k) | other(q, k), f"({self.name} | {other.name})")

    def __invert__(self) -> Mask:
        return Mask(lambda q, k: ~self(q, k), f"~{self.name}")

    def dense(self, q_pos: Int[Tensor, " queries"], k_pos: Int[Tensor, " keys"]) -> Bool[Tensor, "queries keys"]:
        """The whole mask: row i is query q_pos[i], column j is key k_pos[j]."""
        rows, columns = rearrange(q_pos, "q -> q 1"), rearrange(k_pos, "k -> 1 k")
        return self(rows, columns).expand(len(q_pos), len(k_pos))

    def __repr__(self) -> str:
        return f"Mask({self.name})"
