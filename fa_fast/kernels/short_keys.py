"""Attention over the few keys of a window or of a tree of drafts, merged with what came before: the definition.

The kernel is triton_ops.short_keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_ref.api.pools import FP8, head_scale


def short_key_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    queries: int,
    softmax_scale: float,
    page_table: Tensor | None = None,
    row_index: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_size: int = 1,
    window_left: int = -1,
    causal: bool = False,
    slots: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_out: Tensor | None = None,
    prefix_lse: Tensor | None = None,
) -> Tensor:
    """Each request's `queries` rows over its cached keys, then over its drafts, joined with the state of a prefix.

    q [requests * queries, heads, dim]; caches [slots, kv_heads, dim]. Returns [tokens, heads, v_dim] in q's dtype.
    Cached keys, if page_table is given: int32 pages [rows, width], row_index int32 [requests] or None, cache_seqlens
    int32 [requests * depths], each for queries // depths rows. causal: one length a request, and query i of n sees the
    first length - n + i + 1 keys. window_left >= 0: of these, the newest window_left + 1.
    Drafts, if slots are given: int32 [requests, drafts] with mask bool [requests, queries, drafts].
    Prefix: prefix_out [tokens, heads, v_dim] with fp32 prefix_lse (tokens, heads), any strides.
    Scales: fp32 with 1 or kv_heads elements, fp8 caches only.

    A key that a query does not see changes none of its bits, whatever it holds. A NaN or infinity in a value reaches
    the queries that see it, in the heads that share it: here all of their output is NaN, the kernel may keep numbers
    of dims beside it where every query sees every key.
    """
    requests, kv_heads = q.shape[0] // queries, k_cache.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, seen = [], []
    if page_table is not None and cache_seqlens is not None:
        cached, sees = _cached(page_table, row_index, cache_seqlens, requests, queries, page_size, window_left, causal)
        keys.append(cached)
        seen.append(sees)
    if slots is not None and mask is not None:
        keys.append(slots)
        seen.append(mask)
    slots, mask = torch.cat(keys, dim=1), torch.cat(seen, dim=2)
    grouped = q.view(requests, queries, kv_heads, -1, q.shape[-1]).to(wide)
    k, v = (_gathered(cache, slots, scale, wide) for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)))
    scores = torch.einsum("rqhgd,rkhd->rhgqk", grouped, k) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    stray = (v * 0).sum(dim=-1).mT[:, :, None, None]  # 0, or NaN where a key's value is not finite
    scores = (scores + stray).masked_fill(~mask[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [requests, kv_heads, group, queries]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide).view(1, kv_heads, -1, 1))
    lse = lse.permute(0, 3, 1, 2).reshape(q.shape[:2])  # (tokens, heads), as a prefix brings it
    whole = lse if prefix_lse is None else torch.logaddexp(lse, prefix_lse.to(wide))
    shift = whole.masked_fill(whole.isneginf(), 0)
    by_head = shift.view(requests, queries, kv_heads, -1).permute(0, 2, 3, 1)
    weights = torch.exp(scores - by_head[..., None])
    finite = v.masked_fill(~v.isfinite(), 0)  # hidden keys weigh 0, and 0 x NaN is NaN
    out = torch.einsum("rhgqk,rkhd->rqhgd", weights, finite).reshape(q.shape[0], q.shape[1], -1)
    if prefix_out is not None and prefix_lse is not None:
        share = torch.exp(prefix_lse.to(wide) - shift)[..., None]
        out = out + torch.where(share == 0, 0, prefix_out.to(wide)) * share  # an empty prefix is not read
    return out.to(q.dtype)


def _cached(
    page_table: Tensor,
    row_index: Tensor | None,
    cache_seqlens: Tensor,
    requests: int,
    queries: int,
    page_size: int,
    window_left: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Slots [requests, keys] of the page table, and bool [requests, queries, keys] which of them a query sees."""
    table = page_table if row_index is None else page_table[row_index.long()]
    key = torch.arange(int(cache_seqlens.max()) if requests else 0, device=table.device)
    slots = table[:, key // page_size] * page_size + key % page_size
    end = cache_seqlens.view(requests, -1).repeat_interleave(queries * requests // cache_seqlens.shape[0], dim=1)
    if causal:
        end = end - queries + 1 + torch.arange(queries, device=table.device)
    seen = key < end[..., None]
    if window_left >= 0:
        seen &= key >= end[..., None] - window_left - 1
    return slots, seen


def _gathered(cache: Tensor, slots: Tensor, scale: Tensor | None, wide: torch.dtype) -> Tensor:
    picked = cache.view(torch.uint8)[slots.long()].view(FP8) if cache.dtype == FP8 else cache[slots.long()]
    values = picked.to(wide)
    return values * head_scale(scale, values.device) if cache.dtype == FP8 else values


def is_faster(*, requests: int, queries: int, keys: int, kv_heads: int, dim: int, tree: bool) -> bool:
    """Whether the Triton kernel beats FA3 over `keys` keys a request, by estimates in microseconds.

    tree: against FA3 over the window's keys once a query, another pass over the drafts, and a merge. The constants fit
    measurements on an H200: a program walks its keys in turn, FA3 divides long walks but costs more to start.
    """
    megabytes = requests * keys * kv_heads * dim * 4 / 1e6
    walk = keys * dim * (0.0002 if queries == 1 else 0.0004)
    ours = 2 + math.hypot(walk, megabytes / (3.5 if queries == 1 else 2))
    if tree:
        return ours < 15 + queries * megabytes / 4
    return 1.15 * ours < (7 if queries == 1 else 8) + megabytes / 3
