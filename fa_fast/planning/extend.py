"""EXTEND, SPLIT_PREFILL and MIXED on the device: one pass a layer kind, no host round trip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fa_fast.planning.fixed import constant, count_up
from fa_fast.planning.local import local_pass
from fa_fast.planning.page_table import paged_view
from fa_fast.planning.ragged import cu_seqlens, query_starts
from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, ForwardMode, GivenKeys, LayerKind, VerifyInput
from fa_ref.api.bounds import longest_extend, longest_request, no_prefix, pool_of


def plan_extend(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """Twin of fa_ref.planning.extend.plan_extend."""
    if not config.deterministic:
        return (_one_pass(batch, config, kind),)
    bound = config.context_len
    if kind is LayerKind.LOCAL:
        bound = min(bound, config.attention_chunk_size or bound)
    return singles_apart(batch, bound, lambda part: _one_pass(part, config, kind))


def chain_as_extend(batch: ForwardBatch) -> ForwardBatch:
    """ForwardBatch.as_extend of a chain of drafts, without the lengths on the device: all are equal."""
    assert isinstance(batch.spec_info, VerifyInput)
    drafts, host = batch.spec_info.draft_token_num, batch.seq_lens_cpu
    return replace(
        batch.grown(drafts),
        forward_mode=ForwardMode.EXTEND,
        extend_seq_lens=None,
        extend_seq_lens_cpu=[drafts] * batch.batch_size,
        extend_prefix_lens_cpu=None if host is None else host.tolist(),
    )


def singles_apart(
    batch: ForwardBatch, bound: int, one_pass: Callable[[ForwardBatch], AttentionPass]
) -> tuple[AttentionPass, ...]:
    """Single-token requests and longer ones in passes of their own, with bounds that no neighbour changes."""
    lens = batch.extend_seq_lens_cpu
    assert lens is not None  # check_batch refuses it
    passes = []
    for requests, most in (
        ([i for i, n in enumerate(lens) if n == 1], 1),
        ([i for i, n in enumerate(lens) if n > 1], bound),
    ):
        if requests:
            whole = len(requests) == batch.batch_size  # then nothing is picked, which would copy an index from the host
            step = one_pass(batch if whole else batch.subset(requests))
            rows = constant(batch, count_up, sum(lens)) if whole else batch.token_rows(requests)
            passes.append(replace(step, token_index=rows, max_seqlen_q=most, keys_are_new=False))
    return tuple(passes)


def _one_pass(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> AttentionPass:
    pool = pool_of(kind, config)
    table, row_index, lens = paged_view(batch, config, pool)
    whole = AttentionPass(
        page_table=table,
        row_index=row_index,
        cache_seqlens=lens,
        cu_seqlens_q=query_starts(batch),
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
    return local_pass(whole, batch, config.attention_chunk_size)


def given_keys(batch: ForwardBatch, config: BackendConfig) -> GivenKeys:
    """Twin of fa_ref.planning.extend.given_keys."""
    return GivenKeys(
        cu_seqlens_q=query_starts(batch),
        cu_seqlens_k=cu_seqlens(batch.seq_lens),
        max_seqlen_q=longest_extend(batch),
        max_seqlen_k=longest_request(batch, config),
        keys=None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum()),
    )
