"""CROSS layers: every query of a request over all its encoder keys, whatever the mode. Notebook 12.

The encoder's slots are the first encoder_lens[r] columns of the request's row, so the table is cut at the front of
req_to_token and pages are whole. Nothing is causal: encoder tokens stand before or after no text token.
"""

from __future__ import annotations

import torch

from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch
from fa_ref.api.bounds import longest_encoder, longest_extend
from fa_ref.planning.extend import singles_apart
from fa_ref.planning.page_table import pages_of, slot_table
from fa_ref.planning.ragged import cu_seqlens


def plan_cross(batch: ForwardBatch, config: BackendConfig) -> tuple[AttentionPass, ...]:
    """One pass over all requests; in deterministic mode, where requests bring several queries, as in plan_extend.

    Drafts see the same encoder keys whichever branch they are on: a tree is no more than its number of queries.
    """
    if batch.forward_mode.is_target_verify():
        batch = batch.as_extend()
    if config.deterministic and not batch.forward_mode.is_decode():
        return singles_apart(batch, config.context_len, lambda part: _one_pass(part, config))
    return (_one_pass(batch, config),)


def _one_pass(batch: ForwardBatch, config: BackendConfig) -> AttentionPass:
    assert batch.encoder_lens is not None
    if batch.forward_mode.is_decode():
        each = max(1, getattr(batch.spec_info, "topk", 1))  # branches of a draft
        queries, most = torch.full_like(batch.seq_lens, each), each
    else:
        assert batch.extend_seq_lens is not None
        queries, most = batch.extend_seq_lens, longest_extend(batch)
    return AttentionPass(
        page_table=pages_of(slot_table(batch, config, "full"), config.page_size),
        cache_seqlens=batch.encoder_lens.to(torch.int32, copy=True),
        cu_seqlens_q=cu_seqlens(queries),
        max_seqlen_q=most,
        max_seqlen_k=longest_encoder(batch, config),
        causal=False,
        page_size=config.page_size,
    )
