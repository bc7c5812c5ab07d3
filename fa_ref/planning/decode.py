"""DECODE: one new token a request. Extend of one, with tables cut to what the layer can see.

Cutting matters: a window or chunk layer then costs the same at any context length.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, window_left
from fa_ref.api.bounds import decode_reach, longest_request, pool_of
from fa_ref.planning.page_table import pages_of, shifted, slot_table


def plan_decode(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """One pass: query i, at position seq_lens[i] - 1, over the keys of its request that `kind` can see."""
    pool = pool_of(kind, config)
    table = pages_of(slot_table(batch, config, pool), config.page_size)
    longest, reach = longest_request(batch, config), decode_reach(kind, config)
    if reach is None:
        reach = table.shape[1] * config.page_size
    first_page = first_visible(batch, config, kind) // config.page_size
    return (
        AttentionPass(
            page_table=shifted(table, first_page, min(-(-reach // config.page_size), table.shape[1])),
            cache_seqlens=(batch.seq_lens - first_page * config.page_size).to(torch.int32),
            cu_seqlens_q=torch.arange(batch.batch_size + 1, dtype=torch.int32, device=table.device),
            max_seqlen_q=1,
            max_seqlen_k=min(longest, reach),
            causal=True,
            page_size=config.page_size,
            pool=pool,
            uses_window=kind is LayerKind.SLIDING,
        ),
    )


def first_visible(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> Int[Tensor, " requests"]:
    """The first logical position that each request's last token can see."""
    last = (batch.seq_lens - 1).clamp(min=0)
    if kind is LayerKind.SLIDING:
        return (last - window_left(config)).clamp(min=0)
    if kind is LayerKind.LOCAL:
        assert config.attention_chunk_size is not None
        return last // config.attention_chunk_size * config.attention_chunk_size
    return torch.zeros_like(last)
