"""FlashMLA from sgl-kernel: absorbed MLA over pages of 64, where every sequence has as many queries.

It reads a query and a cached row whole, [latent | rope], where FA3 takes the two parts apart.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_fast.kernels.joint import joint_view

DIMS = (64, 512)  # rope, latent
PAGE_SIZE = 64
TILE_ROWS = 64  # query rows of one sequence that a block of the kernel takes


class FlashMLASchedule(NamedTuple):
    """What FlashMLA's own scheduler says of a step's lengths; it holds for every layer of the step."""

    tiles: Tensor
    num_splits: Tensor


@functools.cache
def _functions() -> Any:
    """sgl_kernel.flash_mla, or None where the installed build has none."""
    try:
        module = import_module("sgl_kernel.flash_mla")
    except ImportError:
        return None
    return None if getattr(module, "_flashmla_import_error", None) is not None else module


def is_faster(
    *, sequences: int, queries: int, heads: int, page_size: int, longest_q: int, longest_k: int, packed: bool
) -> bool:
    """Whether FlashMLA runs this call, and was measured to run it faster than FA3: see docs/performance.md.

    queries: of all sequences. longest_q, longest_k: bounds of one sequence. packed: a query's latent and rope parts lie
    side by side; otherwise FlashMLA needs a copy of them.
    """
    even = sequences > 0 and queries == sequences * longest_q
    if page_size != PAGE_SIZE or not even or _functions() is None:
        return False
    rows = longest_q * heads
    if not packed and (rows < TILE_ROWS or sequences < 16):  # the copy costs 2 us, more than these can win
        return False
    pages, splits = split_among(_processors(), sequences=sequences, rows=rows, pages=-(-longest_k // PAGE_SIZE))
    return splits <= (16 if rows < TILE_ROWS else 26) or pages >= 16


def split_among(processors: int, *, sequences: int, rows: int, pages: int) -> tuple[int, int]:
    """(pages that one thread block reads, blocks that share a sequence), by FlashMLA's own scheduler.

    It cuts the pages of all sequences into equal parts and counts five pages for starting a sequence. Merging what the
    blocks of one sequence found is what FlashMLA is slow at: FA3 wins where many share a short one.
    """
    parts = max(1, processors // -(-rows // TILE_ROWS))
    each = max(1, -(-sequences * (pages + 5) // parts))
    return each, -(-pages // each)


@functools.cache
def _processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def schedule(cache_seqlens: Tensor, rows: int) -> FlashMLASchedule:
    """rows: query rows of one sequence, all heads counted."""
    return FlashMLASchedule(*_functions().get_mla_metadata(cache_seqlens, rows, 1))


def attend(
    *,
    q: Tensor,
    qv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: FlashMLASchedule,
    return_softmax_lse: bool,
    out: Tensor | None = None,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The arguments of flash_attn_with_kvcache; q and k_cache are rope parts, qv and v_cache latents."""
    whole = joint_view(qv, q)
    whole = torch.cat([qv, q], dim=-1) if whole is None else whole
    rows = joint_view(v_cache, k_cache)
    sequences, (tokens, heads, width) = cache_seqlens.shape[0], whole.shape
    answer, lse = _functions().flash_mla_with_kvcache(
        q=whole.view(sequences, tokens // sequences, heads, width),
        k_cache=rows,
        block_table=page_table,
        cache_seqlens=cache_seqlens,
        head_dim_v=qv.shape[-1],
        tile_scheduler_metadata=schedule.tiles,
        num_splits=schedule.num_splits,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    answer = answer.view(tokens, heads, -1)
    answer = answer if out is None else out.copy_(answer)
    if not return_softmax_lse:
        return answer
    lse = lse.masked_fill(lse.isposinf(), -torch.inf)  # of a row without keys
    return answer, lse.transpose(1, 2).reshape(tokens, heads)
