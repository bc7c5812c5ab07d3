"""FlashMLA from sgl-kernel: absorbed MLA over pages of 64, where every sequence has as many queries.

It reads a query and a cached row whole, [latent | rope], where FA3 takes the two parts apart.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_fast.kernels._cpu_keys import joint_view

PAGE_SIZE = 64


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


def is_faster(*, sequences: int, queries: int, heads: int, page_size: int, longest: int) -> bool:
    """Whether FlashMLA runs this call, and was measured to run it faster than FA3 (docs/performance.md).

    queries: of all sequences; longest: the most of one, or a bound.
    """
    even = sequences > 0 and queries == sequences * longest
    return page_size == PAGE_SIZE and even and sequences >= 32 and _functions() is not None


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
    out: Tensor | None,
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
