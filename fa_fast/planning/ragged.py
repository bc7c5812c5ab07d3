"""Prefix sums of ragged lengths, on the device the lengths are on."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_fast.planning.fixed import constant
from fa_ref.api import ForwardBatch


def cu_seqlens(lens: Tensor) -> Tensor:
    """int32 [sequences + 1]: where each sequence starts, and the end of the last."""
    cu = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, dim=0, dtype=torch.int32, out=cu[1:])
    return cu


def equal_starts(batch: ForwardBatch, sequences: int, each: int) -> Tensor:
    """cu_seqlens of `sequences` lengths of `each`, which ask the device nothing."""
    return constant(batch, _multiples, sequences, each)


def query_starts(batch: ForwardBatch) -> Tensor:
    """cu_seqlens of the new tokens of an extend; without adding them up where the host knows that all are equal."""
    host = batch.extend_seq_lens_cpu
    if host is not None and len(widths := {int(n) for n in host}) == 1:
        return equal_starts(batch, batch.batch_size, widths.pop())
    assert batch.extend_seq_lens is not None
    return cu_seqlens(batch.extend_seq_lens)


def _multiples(count: int, step: int, device: torch.device) -> Tensor:
    if step == 0:
        return torch.zeros(count + 1, dtype=torch.int32, device=device)
    return torch.arange(0, count * step + 1, step, dtype=torch.int32, device=device)
