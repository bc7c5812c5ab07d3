"""Batches that a graph records: their tensors stay where they are, and what depends on sizes alone is made once.

A launch that a graph need not hold costs every replay about a microsecond, however small it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa_ref.api import ForwardBatch


@dataclass(frozen=True, kw_only=True)
class FixedBatch(ForwardBatch):
    """A batch over static tensors. Its plans refer to them as they are, and to its constants."""

    constants: dict[Any, Tensor] = field(default_factory=dict)  # shared by all sizes of one set of static tensors


def constant(batch: ForwardBatch, make: Callable[..., Tensor], *sizes: int) -> Tensor:
    """make(*sizes, device): a tensor that depends on nothing else, and that nobody writes."""
    device = batch.seq_lens.device
    if not isinstance(batch, FixedBatch):
        return make(*sizes, device)
    key = (make, sizes, device)
    if key not in batch.constants:
        batch.constants[key] = make(*sizes, device)
    return batch.constants[key]


def count_up(count: int, device: torch.device) -> Tensor:
    """int32 [count]: 0, 1, 2, ... A `make` of `constant`."""
    return torch.arange(count, dtype=torch.int32, device=device)


def as_int32(batch: ForwardBatch, value: Tensor) -> Tensor:
    """A tensor of the batch as a plan keeps it: a copy, for others may write theirs before the layers have run."""
    return value.to(torch.int32, copy=not isinstance(batch, FixedBatch))
