"""Attention over a small tree of draft tokens, merged with what came before it: the definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ref.api.pools import FP8, head_scale


def tree_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    mask: Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_out: Tensor | None = None,
    prefix_lse: Tensor | None = None,
) -> Tensor:
    """Each request's queries over its drafts, joined with the state (prefix_out, prefix_lse) of their prefix.

    q [requests * queries, heads, dim]; caches [slots, kv_heads, dim]; slots int32 [requests, drafts]; mask bool
    [requests, queries, drafts]; prefix_out [tokens, heads, v_dim] with fp32 prefix_lse (tokens, heads), any strides.
    Scales: fp32 with 1 or kv_heads elements, fp8 caches only. Returns [tokens, heads, v_dim] in q's dtype.
    A draft that a query does not see changes none of its bits, whatever it holds. A NaN or infinity in a value makes
    the whole output NaN for the queries that see it, in the heads that share it.
    """
    requests, queries, _ = mask.shape
    kv_heads = k_cache.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.view(requests, queries, kv_heads, -1, q.shape[-1]).to(wide)
    k, v = (_gathered(cache, slots, scale, wide) for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)))
    scores = torch.einsum("rqhgd,rkhd->rhgqk", grouped, k) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    stray = (v * 0).sum(dim=-1).mT[:, :, None, None]  # 0, or NaN where a draft's value is not finite
    scores = (scores + stray).masked_fill(~mask[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [requests, kv_heads, group, queries]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide).view(1, kv_heads, -1, 1))
    lse = lse.permute(0, 3, 1, 2).reshape(q.shape[:2])  # (tokens, heads), as a prefix brings it
    whole = lse if prefix_lse is None else torch.logaddexp(lse, prefix_lse.to(wide))
    shift = whole.masked_fill(whole.isneginf(), 0)
    by_head = shift.view(requests, queries, kv_heads, -1).permute(0, 2, 3, 1)
    weights = torch.exp(scores - by_head[..., None])
    finite = v.masked_fill(~v.isfinite(), 0)  # hidden drafts weigh 0, and 0 x NaN is NaN
    out = torch.einsum("rhgqk,rkhd->rqhgd", weights, finite).reshape(q.shape[0], q.shape[1], -1)
    if prefix_out is not None and prefix_lse is not None:
        share = torch.exp(prefix_lse.to(wide) - shift)[..., None]
        out = out + torch.where(share == 0, 0, prefix_out.to(wide)) * share  # an empty prefix is not read
    return out.to(q.dtype)


def _gathered(cache: Tensor, slots: Tensor, scale: Tensor | None, wide: torch.dtype) -> Tensor:
    picked = cache.view(torch.uint8)[slots.long()].view(FP8) if cache.dtype == FP8 else cache[slots.long()]
    values = picked.to(wide)
    return values * head_scale(scale, values.device) if cache.dtype == FP8 else values
