"""Attention of the rows of one call, block by block, on top of PyTorch's fused CPU kernel.

A part is (out, lse) over some of a row's keys; parts merge by their LSE. Shapes inside this file:
q (batch, heads, rows, dim), k and v (batch, kv_heads, keys, dim), out like q, lse (batch, heads, rows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_fast.kernels._cpu_keys import PagedKeys, RaggedKeys
from fa_fast.kernels._cpu_visible import Visible

Part = tuple[Tensor, Tensor]

DECODE_BLOCK = 1024  # keys gathered at a time for few rows: still in cache when the kernel reads them
PREFILL_BLOCK = 8192  # many rows reuse each key, so the gather is cheap and merges are what to avoid
FEW_ROWS = 64  # per KV head: the border between the two
HEADS_APART = 2**20  # query rows of a KV head times keys from where a copy of the keys, head by head, pays
PACKED_QUERIES = 128  # up to here the heads of a group are packed into the rows of one tile
WINDOW_TILE = 128  # queries per tile under a window or chunk: bounds the keys touched in vain
SOFTCAP_TILE = 64
CAUSAL_TILE = 4096
SHORT = 512  # sequences of at most this many keys share one kernel call,
SHORT_BUDGET = 2048  # up to this many keys in total
SMALL_PAGE = 256  # what several sequences side by side read of a page at a time
LONG_GROUP = 8  # longer ones share the calls of their blocks, whose keys in total are the same
MAX_PARTS = 32

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows of a call have in common."""

    q: Tensor  # (tokens, heads, dim) in the compute dtype; qv in front of it when keys are joint
    out: Tensor  # (tokens, heads, v_dim)
    lse: Tensor  # (tokens, heads) fp32
    query_starts: list[int]  # [sequences + 1]
    keys: PagedKeys | RaggedKeys
    kv_heads: int
    visible: Visible
    scale: float
    softcap: float
    sinks: Tensor | None  # [heads] fp32
    q_scale: Tensor | None  # [sequences, heads, dim or 1] fp32: descales of q times those of what it meets
    v_scale: Tensor | None  # [sequences, heads] fp32
    alone: bool  # every sequence in calls of its own: results do not depend on the rest of the batch


def run(rows: Rows) -> None:
    """Fill rows.out and rows.lse. Rows without a key, padding rows included, get 0 and -inf."""
    rows.out.zero_()
    rows.lse.fill_(-math.inf)
    decodes = [] if rows.alone or rows.softcap else _decodes(rows)
    short = [item for item in decodes if item[2] <= SHORT]
    for group in _groups(short):
        _attend_short(rows, group)
    long = _long(rows, decodes)
    for at in range(0, len(long), LONG_GROUP):
        _attend_long(rows, long[at : at + LONG_GROUP])
    done = {sequence for sequence, _, _ in short + long}
    for sequence in range(len(rows.keys.lengths)):
        if sequence not in done:
            _attend_sequence(rows, sequence)
    if rows.sinks is not None:  # a row without keys still has its sink, a padding row has nothing
        lse = rows.lse[: rows.query_starts[-1]]
        lse.copy_(torch.where(lse.isneginf(), rows.sinks, lse))


def _attend_sequence(rows: Rows, sequence: int) -> None:
    start, stop = rows.query_starts[sequence : sequence + 2]
    queries, keys = stop - start, rows.keys.lengths[sequence]
    group = rows.q.shape[1] // rows.kv_heads
    visible, offset = rows.visible, keys - queries  # position of query 0
    unwindowed = visible.only_causal or visible.everything
    tile = SOFTCAP_TILE if rows.softcap else CAUSAL_TILE if unwindowed else WINDOW_TILE
    for at in range(visible.first_row(queries, keys), queries, tile):
        end = min(at + tile, queries)
        packed = bool(rows.softcap) or (end - at <= PACKED_QUERIES and group > 1)
        head_rows = (end - at) * group
        few = head_rows <= FEW_ROWS
        size = _block_size(rows.keys.page_size) if few or rows.softcap else PREFILL_BLOCK
        q = _scaled(rows.q[start + at : start + end], rows.q_scale, [sequence])
        parts: list[Part] = []
        for first, last, cut in visible.blocks(
            at + offset, end + offset, keys, size, visible.only_causal and not packed
        ):
            k, v = rows.keys.block(sequence, first, last, near=few)
            mask = None
            if cut == "masked":
                mask = visible.mask(at + offset, end - at, keys, first, last, q.dtype)
            k, v = _heads_first(k, v, apart=head_rows * (last - first) >= HEADS_APART)
            parts.append(_attend(rows, q, k, v, mask, cut == "causal", packed))
            if len(parts) == MAX_PARTS:
                parts = [_merge(parts)]
        _store(rows, slice(start + at, start + end), _merge(parts), [sequence])


def _block_size(page_size: int) -> int:
    """Blocks of large pages end with the page, so that no second page is copied for a few of its keys."""
    return min(page_size, DECODE_BLOCK) if page_size >= DECODE_BLOCK // 2 else DECODE_BLOCK


def _decodes(rows: Rows) -> list[tuple[int, int, int]]:
    """(sequence, first key, key count) of the one-query sequences that see a key, by count."""
    found = []
    if not rows.keys.can_pick:
        return found
    for sequence, keys in enumerate(rows.keys.lengths):
        if rows.query_starts[sequence + 1] - rows.query_starts[sequence] != 1 or keys == 0:
            continue
        first, last = rows.visible.keys(keys - 1, keys)
        found.append((sequence, first, last - first + 1))
    return sorted(found, key=lambda item: item[2])


def _long(rows: Rows, decodes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those that share their blocks: keys in small pages, copied anyhow, for few rows. Others may be read in place."""
    copied = isinstance(rows.keys, PagedKeys) and rows.keys.page_size <= SMALL_PAGE and rows.kv_heads > 1
    if not copied or rows.q.shape[1] // rows.kv_heads > FEW_ROWS:
        return []
    return [item for item in decodes if item[1] == 0 and item[2] > SHORT]


def _groups(short: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    groups: list[list[tuple[int, int, int]]] = []
    for item in short:
        if groups and (len(groups[-1]) + 1) * item[2] <= SHORT_BUDGET and item[2] <= 2 * groups[-1][0][2] + 16:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _attend_short(rows: Rows, group: list[tuple[int, int, int]]) -> None:
    """One kernel call for several one-query sequences; shorter ones repeat their last key under a mask."""
    sequences = [sequence for sequence, _, _ in group]
    first = torch.tensor([first for _, first, _ in group])[:, None]
    count = torch.tensor([count for _, _, count in group])[:, None]
    key = torch.arange(group[-1][2])
    k, v = rows.keys.pick(sequences, first + torch.minimum(key, count - 1))
    mask = None
    if group[0][2] != group[-1][2]:
        mask = torch.zeros(len(group), 1, 1, len(key), dtype=rows.q.dtype)
        mask.masked_fill_((key >= count)[:, None, None], -math.inf)
    tokens = torch.tensor([rows.query_starts[sequence] for sequence in sequences])
    q = _scaled(rows.q[tokens], rows.q_scale, sequences)
    part = _attend(rows, q[:, None], k.transpose(1, 2), v.transpose(1, 2), mask, False, True)
    _store(rows, tokens, part, sequences)


def _attend_long(rows: Rows, group: list[tuple[int, int, int]]) -> None:
    """One-query sequences that see all keys, side by side, block by block; one leaves after its last key.

    Measured 1.1 to 1.2x faster than one after the other: fewer calls, and a thread copies the keys that it reads.
    """
    sequences, counts = [sequence for sequence, _, _ in group], [count for _, _, count in group]
    tokens = torch.tensor([rows.query_starts[sequence] for sequence in sequences])
    q = _scaled(rows.q[tokens], rows.q_scale, sequences)[:, None]
    assert isinstance(rows.keys, PagedKeys)
    parts: list[Part] = []
    at = left = 0
    while left < len(group):
        stop = min(at + min(DECODE_BLOCK, SHORT_BUDGET // (len(group) - left)), counts[left])
        k, v = rows.keys.side_by_side(sequences[left:], at, stop)
        parts.append(_attend(rows, q[left:], k.transpose(1, 2), v.transpose(1, 2), None, False, True))
        at, leave = stop, left + counts[left:].count(stop)
        if leave > left or len(parts) == MAX_PARTS:
            out, lse = _merge(parts)
            go, stay = slice(0, leave - left), slice(leave - left, None)
            _store(rows, tokens[left:leave], (out[go], lse[go]), sequences[left:leave])
            parts, left = [(out[stay], lse[stay])], leave


def _heads_first(k: Tensor, v: Tensor, *, apart: bool) -> Part:
    """(keys, kv_heads, dim) -> (1, kv_heads, keys, dim), with `apart` each head's keys in one piece.

    The kernel walks a head's keys once per block of query rows. Keys that lie kv_heads * dim apart were measured
    1.06x slower at 2048 keys and 1.3 to 1.4x slower at 8192, copies included.
    """
    same, k, v = k is v, k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if not apart:
        return k, v
    k = k.contiguous()
    return k, k if same else v.contiguous()


def _scaled(q: Tensor, scale: Tensor | None, sequences: list[int]) -> Tensor:
    return q if scale is None else (q * scale[sequences]).to(q.dtype)


def _attend(rows: Rows, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, packed: bool) -> Part:
    """One part. q: (queries, heads, dim) of one sequence, or (sequences, 1, heads, dim)."""
    q = (q[None] if q.dim() == 3 else q).transpose(1, 2)
    batch, heads, queries, _ = q.shape
    if k.dtype == torch.float8_e4m3fn:
        k, v = _decoded(k, q.dtype), _decoded(v, q.dtype)
    unseen = mask.isneginf().all(-1) if mask is not None else None  # [queries] or [batch, 1, 1]
    if packed:  # heads of a group share their keys: (batch, kv_heads, group * queries, dim)
        q = q.reshape(batch, rows.kv_heads, -1, q.shape[-1])
        if mask is not None and mask.dim() == 2:
            mask = mask.repeat(heads // rows.kv_heads, 1)
    elif k.is_contiguous():
        q = q.contiguous()  # it is walked once per block of keys
    if rows.softcap:
        out, lse = _softcapped(q, k, v, mask, rows.scale, rows.softcap)
    else:
        out, lse = _fused(q, k, v, mask, causal, rows.scale)
    out = out[..., : rows.out.shape[-1]].reshape(batch, heads, queries, -1)
    lse = lse.reshape(batch, heads, queries)
    if unseen is not None and not rows.softcap:  # the fused kernel gives lse 0 to a row without keys
        lse = lse.masked_fill(unseen, -math.inf)
    return out, lse


def _decoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 to a wider dtype, exact. PyTorch's own cast goes element by element; these steps are vectorised.

    s eeee mmm moved into s eeeee mmmmmmmmmm is the same number with an exponent bias of 15 for 7: 2^-8 of it.
    The one pattern that is not a number, all ones, would arrive as 480.
    """
    raw = x.view(torch.int8)
    bits = raw.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)  # 0xBF80: the 8 bits in place
    wide = bits.view(torch.float16).float().mul_(256)  # fp16 to bf16 directly is slow
    magnitude = raw & 0x7F
    if magnitude.numel() and int(magnitude.amax()) == 0x7F:
        wide.masked_fill_(magnitude == 0x7F, math.nan)
    return wide.to(dtype)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Part:
    """The kernel takes one head dim for all three, so the narrower side is padded with zeros."""
    k_dim, v_dim = k.shape[-1], v.shape[-1]
    if k_dim < v_dim:
        q, k = F.pad(q, (0, v_dim - k_dim)), F.pad(k, (0, v_dim - k_dim))
    elif v_dim < k_dim:
        v = F.pad(v, (0, k_dim - v_dim))
    return _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Part:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp_()
    return weights @ v.to(wide), lse


def _merge(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0.0)).exp_()
    out = parts[0][0] * weights[0][..., None]  # fp32 weights: the sum is at least fp32
    for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), weight[..., None])
    return out, lse


def _store(rows: Rows, tokens: slice | Tensor, part: Part, sequences: list[int]) -> None:
    """Apply value scale and sink, then write (batch, heads, queries, dim) to token rows."""
    out, lse = part
    out = out.transpose(1, 2).flatten(0, 1)  # (tokens, heads, dim)
    lse = lse.transpose(1, 2).flatten(0, 1)
    if rows.v_scale is not None:
        out = out * rows.v_scale[sequences][..., None]
    if rows.sinks is not None:
        out = out * torch.sigmoid(lse - rows.sinks)[..., None]  # every stored row has a key: lse is finite
        lse = torch.logaddexp(lse, rows.sinks.to(lse.dtype))
    rows.out[tokens] = out.to(rows.out.dtype)
    rows.lse[tokens] = lse.to(rows.lse.dtype)
