"""EXTEND, SPLIT_PREFILL and MIXED: L new tokens a request behind a cached prefix, in one ragged batch.

MIXED is not a case of its own: a decoding request is one that extends by a single token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, GivenKeys, LayerKind
from fa_ref.api.bounds import longest_extend, longest_request, no_prefix, pool_of
from fa_ref.planning.local import local_pass
from fa_ref.planning.page_table import pages_of, slot_table
from fa_ref.planning.ragged import cu_seqlens


def plan_extend(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """One pass over all requests; in deterministic mode one for single tokens and one for the rest."""
    if not config.deterministic:
        return (_one_pass(batch, config, kind),)
    bound = config.context_len
    if kind is LayerKind.LOCAL:
        bound = min(bound, config.attention_chunk_size or bound)
    return singles_apart(batch, bound, lambda part: _one_pass(part, config, kind))


def _one_pass(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> AttentionPass:
    assert batch.extend_seq_lens is not None
    pool = pool_of(kind, config)
    whole = AttentionPass(
        page_table=pages_of(slot_table(batch, config, pool), config.page_size),
        cache_seqlens=batch.seq_lens.to(torch.int32, copy=True),
        cu_seqlens_q=cu_seqlens(batch.extend_seq_lens),
        max_seqlen_q=longest_extend(batch),
        max_seqlen_k=longest_request(batch, config),
        causal=True,
        page_size=config.page_size,
        pool=pool,
        uses_window=kind is LayerKind.SLIDING,
        keys_are_new=no_prefix(batch),
    )
    if kind is not LayerKind.LOCAL:
        return whole
    assert config.attention_chunk_size is not None
    return local_pass(whole, config.attention_chunk_size)


def singles_apart(
    batch: ForwardBatch, bound: int, one_pass: Callable[[ForwardBatch], AttentionPass]
) -> tuple[AttentionPass, ...]:
    """Single-token requests and longer ones in passes of their own, with bounds that no neighbour changes.

    bound: the most query tokens of any request, ever. one_pass: plans a part of the batch.

    A kernel picks its tiles by max_seqlen_q, so a decode row that shares a call with a prefill is rounded
    differently than in a call of decodes. Here it never shares one.
    """
    lens = batch.extend_seq_lens_cpu
    assert lens is not None  # check_batch refuses it
    single = [i for i, n in enumerate(lens) if n == 1]
    longer = [i for i, n in enumerate(lens) if n > 1]
    passes = []
    for requests, most in ((single, 1), (longer, bound)):
        if requests:
            step, rows = one_pass(batch.subset(requests)), batch.token_rows(requests)
            passes.append(replace(step, token_index=rows, max_seqlen_q=most, keys_are_new=False))
    return tuple(passes)


def given_keys(batch: ForwardBatch, config: BackendConfig) -> GivenKeys:
    """The new tokens of an MLA model's extend, for layers that bring expanded keys of their own: notebook 14."""
    assert batch.extend_seq_lens is not None
    return GivenKeys(
        cu_seqlens_q=cu_seqlens(batch.extend_seq_lens),
        cu_seqlens_k=cu_seqlens(batch.seq_lens),
        max_seqlen_q=longest_extend(batch),
        max_seqlen_k=longest_request(batch, config),
        keys=None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum()),
    )
