"""CROSS layers on the device: every query of a request over all its encoder keys, one pass in any mode."""

from __future__ import annotations

from dataclasses import replace

from fa_fast.planning.extend import chain_as_extend, singles_apart
from fa_fast.planning.page_table import paged_view
from fa_fast.planning.ragged import equal_starts, query_starts
from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch
from fa_ref.api.bounds import longest_encoder, longest_extend


def plan_cross(batch: ForwardBatch, config: BackendConfig) -> tuple[AttentionPass, ...]:
    """Twin of fa_ref.planning.cross.plan_cross, which explains it."""
    if batch.forward_mode.is_target_verify():
        batch = chain_as_extend(batch)
    if config.deterministic and not batch.forward_mode.is_decode():
        return singles_apart(batch, config.context_len, lambda part: _one_pass(part, config))
    return (_one_pass(batch, config),)


def _one_pass(batch: ForwardBatch, config: BackendConfig) -> AttentionPass:
    assert batch.encoder_lens is not None
    if batch.forward_mode.is_decode():
        each = most = max(1, getattr(batch.spec_info, "topk", 1))
        cu = equal_starts(batch, batch.batch_size, each)
    else:
        cu, most = query_starts(batch), longest_extend(batch)
    # A row's first columns are the encoder's: its table is that of a request of encoder_lens tokens.
    encoder = replace(batch, seq_lens=batch.encoder_lens, seq_lens_cpu=batch.encoder_lens_cpu)
    table, row_index, lens = paged_view(encoder, config, "full")
    return AttentionPass(
        page_table=table,
        row_index=row_index,
        cache_seqlens=lens,
        cu_seqlens_q=cu,
        max_seqlen_q=most,
        max_seqlen_k=longest_encoder(batch, config),
        causal=False,
        page_size=config.page_size,
    )
