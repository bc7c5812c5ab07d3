"""Ragged batches: sequences of different lengths, one after another in one tensor."""

from __future__ import annotations

import torch
from jaxtyping import Int, Int32
from torch import Tensor


def cu_seqlens(lens: Int[Tensor, " sequences"]) -> Int32[Tensor, " sequences_plus_1"]:
    """Where each sequence starts, and the end of the last: the prefix sums of the lengths, as int32.

    >>> cu_seqlens(torch.tensor([4, 10, 5])).tolist()
    [0, 4, 14, 19]
    """
    ends = torch.cumsum(lens, dim=0, dtype=torch.int32)
    return torch.cat([ends.new_zeros(1), ends])


def spans(cu: Int[Tensor, " sequences_plus_1"]) -> list[slice]:
    """The rows of each sequence, as slices.

    >>> spans(torch.tensor([0, 4, 14]))
    [slice(0, 4, None), slice(4, 14, None)]
    """
    bounds = cu.tolist()
    return [slice(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
