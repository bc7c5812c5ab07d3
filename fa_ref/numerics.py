"""How wrong a fast path may be: a budget derived from the inputs, the same one everywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """The error of a result against the oracle, and the budget it must stay within."""

    error: float  # largest absolute difference from the oracle
    budget: float  # twice the error of a plain low-precision run, plus a rounding floor

    @property
    def ok(self) -> bool:
        return self.error <= self.budget


def judge(
    result: Tensor, oracle: Tensor, plain: Tensor, dtype: torch.dtype | None = None, merged_lse: Tensor | None = None
) -> Verdict:
    """Compare a result with the fp32 oracle, allowing twice what a plain run in the inputs' dtype loses.

    result, oracle, plain: the same shape. plain: the same computation by ordinary torch in low precision
    (`fa_ref.oracle.masked_attention(..., compute_dtype=q.dtype)`). The floor is two units in the last place of
    `dtype` (default: result's) at the oracle's largest value. A NaN anywhere in result is an infinite error.

    merged_lse: the oracle's LSE, if result is two states merged, which the plain run is not. With u = eps / 2 of fp32,
    an LSE's dtype whatever the states', a merge rounds each part's out (u) and its product with the weight (u). A
    weight exp(part - lse) is off by what both logarithms were rounded by: |lse| u each. Together (1 + |lse|) eps of the
    oracle's largest value. Beside a floor in bf16 that is nothing; beside one in fp32 it is the larger part.

    >>> oracle = torch.tensor([1.0, 2.0])
    >>> judge(oracle.bfloat16(), oracle, oracle).ok, judge(oracle + 0.1, oracle, oracle).ok
    (True, False)
    """
    if oracle.numel() == 0:
        return Verdict(0.0, 0.0)
    wide = torch.float64
    error = (result.to(wide) - oracle.to(wide)).abs().max().item()
    plain_error = (plain.to(wide) - oracle.to(wide)).abs().max().item()
    floor = 2 * torch.finfo(dtype or result.dtype).eps * max(1e-3, oracle.to(wide).abs().max().item())
    if merged_lse is not None:
        largest = merged_lse[merged_lse.isfinite()].abs().max().item() if merged_lse.isfinite().any() else 0.0
        floor += (1 + largest) * torch.finfo(torch.float32).eps * oracle.to(wide).abs().max().item()
    return Verdict(error if error == error else float("inf"), 2 * plain_error + floor)
