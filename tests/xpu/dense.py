"""Attention as the emulated kernels compute it: one sequence at a time, dense, in fp32, from positions alone."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


class KernelError(RuntimeError):
    """What a kernel says of a call that it was not built for."""


def need(holds: bool, says: str) -> None:
    if not holds:
        raise KernelError(says)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [queries, heads, dim] over k [keys, kv_heads, dim], v [keys, kv_heads, v_dim]; all to fp32.

    Returns out [queries, heads, v_dim] and lse [queries, heads]. A query that sees none of its keys has 0 and -inf,
    sink or none. What the kernels leave in the rows of a sequence without keys is in no source: here it is NaN.
    """
    queries, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if not keys:
        return q.new_full((*q.shape[:2], v.shape[-1]), torch.nan).float(), q.new_full(q.shape[:2], torch.nan).float()
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    at = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    left, right = window
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= key <= at
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.where(seen.any(-1), torch.logaddexp(lse, sinks.float()[:, None]), -torch.inf)
    weights = torch.exp(logits - lse.masked_fill(lse.isneginf(), 0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def read_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` rows of a sequence: cache [pages, page_size, ...], pages [width]."""
    used = pages[: -(-length // cache.shape[1])].long()
    raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    rows = raw[used].flatten(0, 1)[:length]
    return rows.view(FP8) if cache.dtype == FP8 else rows


def descaled(x: Tensor, descale: Tensor | None) -> Tensor:
    """fp8 rows times the one factor that such a kernel reads; other rows as they are."""
    if x.dtype != FP8:
        return x
    return x.float() * (1.0 if descale is None else descale.flatten()[0].float())


def spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(start, end) of every sequence's rows."""
    ends = cu_seqlens.tolist()
    return list(zip(ends[:-1], ends[1:], strict=True))


def is_int32(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        need(tensor is None or tensor.dtype == torch.int32, "lengths and page tables must be int32")
