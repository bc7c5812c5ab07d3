"""DECODE on the device: one pass a layer kind, no host round trip."""

from __future__ import annotations

from fa_fast.planning.page_table import paged_view
from fa_fast.planning.ragged import equal_starts
from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, window_left
from fa_ref.api.bounds import decode_reach, longest_request, pool_of


def plan_decode(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """Twin of fa_ref.planning.decode.plan_decode."""
    pool, reach = pool_of(kind, config), decode_reach(kind, config)
    longest = longest_request(batch, config)
    table, row_index, lens = paged_view(
        batch,
        config,
        pool,
        left=window_left(config) if kind is LayerKind.SLIDING else -1,
        chunk=config.attention_chunk_size or 0 if kind is LayerKind.LOCAL else 0,
        width=-(-(reach or 0) // config.page_size),
    )
    return (
        AttentionPass(
            page_table=table,
            row_index=row_index,
            cache_seqlens=lens,
            cu_seqlens_q=equal_starts(batch, batch.batch_size, 1),
            max_seqlen_q=1,
            max_seqlen_k=longest if reach is None else min(longest, reach),
            causal=True,
            page_size=config.page_size,
            pool=pool,
            uses_window=kind is LayerKind.SLIDING,
        ),
    )
