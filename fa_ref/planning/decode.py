"""DECODE: one new token a request. Extend of one, with tables cut to what the layer can see.

Cutting matters: a window or chunk layer then costs the same at any context length.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, window_left
from fa_ref.planning.page_table import pages_of, pool_of, shifted, slot_table


def plan_decode(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """One pass: query i, at position seq_lens[i] - 1, over the keys of its request that `kind` can see."""
    first_key, longest = visible_from(batch, config, kind)
    pool = pool_of(kind, config)
    table = pages_of(slot_table(batch, config, pool), config.page_size)
    first_page = first_key // config.page_size
    width = min(-(-longest // config.page_size), table.shape[1])
    lens = batch.seq_lens - first_page * config.page_size
    return (
        AttentionPass(
            page_table=shifted(table, first_page, width),
            cache_seqlens=lens.to(torch.int32),
            cu_seqlens_q=torch.arange(batch.batch_size + 1, dtype=torch.int32, device=table.device),
            max_seqlen_q=1,
            max_seqlen_k=longest,
            causal=True,
            page_size=config.page_size,
            pool=pool,
            uses_window=kind is LayerKind.SLIDING,
        ),
    )


def visible_from(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind
) -> tuple[Int[Tensor, " requests"], int]:
    """First visible logical position of each request's last token, and a bound on the keys to read from there.

    The bound counts from the start of the page that the first visible key lies in.
    """
    last = batch.seq_lens - 1
    longest = longest_request(batch, config)
    if kind is LayerKind.SLIDING:
        left = window_left(config)
        return (last - left).clamp(min=0), min(longest, left + config.page_size)
    if kind is LayerKind.LOCAL:
        chunk = config.attention_chunk_size
        assert chunk is not None
        return last.clamp(min=0) // chunk * chunk, min(longest, chunk)
    return torch.zeros_like(last), longest


def longest_request(batch: ForwardBatch, config: BackendConfig) -> int:
    """The longest seq_lens: from the host copy, or without one the width of the table."""
    if batch.seq_lens_cpu is None:
        pool = batch.req_to_token_pool or config.req_to_token_pool
        return pool.req_to_token.shape[1]
    return int(batch.seq_lens_cpu.max()) if batch.batch_size else 0
