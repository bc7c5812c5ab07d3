"""Softmax attention that keeps its log-sum-exp, and the merge of two such states.

The whole of paged serving rests on one fact: attention over a set of keys can be computed in pieces, if each
piece returns its output together with the log of its softmax denominator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor


class AttentionState(NamedTuple):
    """Attention over some set of keys: the output and the natural log of its denominator.

    A row with no key is (0, -inf), the identity of `merge`.
    """

    out: Float[Tensor, "queries heads v_dim"]
    lse: Float[Tensor, "queries heads"]


def scores(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
) -> Float[Tensor, "heads queries keys"]:
    """Dot products of every query head with its key head; query heads share key heads in groups.

    >>> scores(torch.ones(1, 4, 8), torch.ones(3, 2, 8)).shape  # heads 0, 1 use key head 0
    torch.Size([4, 1, 3])
    """
    grouped = rearrange(q, "q (kv group) d -> q kv group d", kv=k.shape[1])
    products = einsum(grouped, k, "q kv group d, k kv d -> kv group q k")
    return rearrange(products, "kv group q k -> (kv group) q k")


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap): near the identity for small logits, never beyond +-cap. 0 means off."""
    return logits if cap == 0 else cap * torch.tanh(logits / cap)


def attend(
    logits: Float[Tensor, "heads queries keys"],
    v: Float[Tensor, "keys kv_heads v_dim"],
    mask: Bool[Tensor, "queries keys"],
    sinks: Float[Tensor, " heads"] | None = None,
) -> AttentionState:
    """Masked softmax over the keys, and what it weighs: the last steps of every attention here.

    A sink is one more logit a head that joins the denominator and carries no value.
    A value that a query may not see does not reach it, not even NaN or an infinity, whoever else sees it.
    The softmax runs in fp32 or wider, whatever the dtype of the products.
    """
    masked = wide(logits).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(masked, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, rearrange(sinks.to(lse), "h -> h 1"))
    weights = torch.exp(masked - rearrange(lse, "h q -> h q 1"))
    weights = weights.masked_fill(~mask, 0.0)  # also where lse is -inf: exp(-inf + inf) is NaN
    values = repeat(v, "k kv d -> k (kv group) d", group=logits.shape[0] // v.shape[1])
    finite = values.isfinite()
    out = einsum(weights.to(v.dtype), torch.where(finite, values, 0), "h q k, k h d -> q h d")
    for key in torch.nonzero(~finite.flatten(1).all(dim=1)).flatten().tolist():
        out[mask[:, key]] += torch.where(finite[key], 0, values[key])  # NaN and +-inf, to the queries that see them
    return AttentionState(out, rearrange(lse, "h q -> q h"))


def wide(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 if they already are."""
    return values if values.dtype == torch.float64 else values.float()


def attention(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
    v: Float[Tensor, "keys kv_heads v_dim"],
    mask: Bool[Tensor, "queries keys"],
    *,
    softmax_scale: float,
    logit_cap: float = 0.0,
    sinks: Float[Tensor, " heads"] | None = None,
) -> AttentionState:
    """Attention of one request, in the dtype of its inputs: scale, cap, mask, softmax, weigh.

    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> state = attention(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.ones(2, 1, 4), mask, softmax_scale=1.0)
    >>> state.lse.flatten().tolist()  # log 2, and a row that sees nothing
    [0.6931471824645996, -inf]
    """
    return attend(softcap(scores(q, k) * softmax_scale, logit_cap), v, mask, sinks)


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over the union of two disjoint sets of keys. Associative; (0, -inf) is its identity.

    Whatever an empty side holds beside its lse of -inf, NaN included, is not read.

    >>> empty = AttentionState(torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf))
    >>> merge(empty, empty).lse.item()
    -inf
    """
    lse = torch.logaddexp(a.lse, b.lse)
    weight_a, weight_b = _share(a.lse, lse), _share(b.lse, lse)
    both = a.out * weight_a + b.out * weight_b
    nothing_a, nothing_b = (rearrange(state.lse == -torch.inf, "q h -> q h 1") for state in (a, b))
    out = torch.where(nothing_b, a.out, torch.where(nothing_a, b.out, both))  # the other side, bit for bit
    return AttentionState(out.masked_fill(nothing_a & nothing_b, 0.0), lse)


def _share(part: Float[Tensor, "queries heads"], whole: Float[Tensor, "queries heads"]) -> Tensor:
    """exp(part - whole): the part's share of the denominator; 0 for an empty part."""
    share = torch.where(part == -torch.inf, 0.0, torch.exp(part - whole))
    return rearrange(share, "q h -> q h 1")
