"""Prefix sums of ragged lengths, on the device the lengths are on."""

from __future__ import annotations

import torch
from torch import Tensor


def cu_seqlens(lens: Tensor) -> Tensor:
    """int32 [sequences + 1]: where each sequence starts, and the end of the last."""
    cu = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, dim=0, dtype=torch.int32, out=cu[1:])
    return cu
