"""EXTEND, SPLIT_PREFILL and MIXED: L new tokens a request behind a cached prefix, in one ragged batch.

MIXED is not a case of its own: a decoding request is one that extends by a single token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from fa_ref.api import AttentionPass, BackendConfig, BadBatch, ForwardBatch, LayerKind
from fa_ref.api.checks import new_tokens
from fa_ref.planning.decode import longest_request
from fa_ref.planning.local import local_pass
from fa_ref.planning.page_table import pages_of, pool_of, slot_table
from fa_ref.planning.ragged import cu_seqlens, spans


def plan_extend(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """One pass over all requests; in deterministic mode one for single tokens and one for the rest."""
    if config.deterministic:
        return _plan_apart(batch, config, kind)
    return (_one_pass(batch, config, kind),)


def _one_pass(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> AttentionPass:
    assert batch.extend_seq_lens is not None
    pool = pool_of(kind, config)
    whole = AttentionPass(
        page_table=pages_of(slot_table(batch, config, pool), config.page_size),
        cache_seqlens=batch.seq_lens.to(torch.int32),
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


def longest_extend(batch: ForwardBatch) -> int:
    """The most new tokens of one request, or a bound that needs no synchronisation: all of the batch's."""
    if batch.extend_seq_lens_cpu is None:
        return new_tokens(batch)
    return max((int(n) for n in batch.extend_seq_lens_cpu), default=0)


def no_prefix(batch: ForwardBatch) -> bool:
    """True if no request has cached tokens, so that a layer's k and v are all the keys there are."""
    prefix = batch.extend_prefix_lens_cpu
    return prefix is not None and not any(int(n) for n in prefix)


def _plan_apart(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass, ...]:
    """Single-token requests and longer ones in passes of their own, with bounds that no neighbour changes.

    A kernel picks its tiles by max_seqlen_q, so a decode row that shares a call with a prefill is rounded
    differently than in a call of decodes. Here it never shares one.
    """
    lens = batch.extend_seq_lens_cpu
    if lens is None:
        raise BadBatch(
            "deterministic mode plans single-token requests apart and needs extend_seq_lens_cpu, which is None"
        )
    single = [i for i, n in enumerate(lens) if n == 1]
    longer = [i for i, n in enumerate(lens) if n > 1]
    passes = []
    for requests, bound in ((single, 1), (longer, config.context_len)):
        if requests:
            part = subset(batch, requests)
            rows = token_rows(batch, requests)
            step = _one_pass(part, config, kind)
            bound = min(bound, config.attention_chunk_size or bound) if kind is LayerKind.LOCAL else bound
            passes.append(replace(step, token_index=rows, max_seqlen_q=bound, keys_are_new=False))
    return tuple(passes)


def subset(batch: ForwardBatch, requests: list[int]) -> ForwardBatch:
    """The batch of some of its requests; lengths and rows only, since planning needs no more."""
    index = torch.tensor(requests, device=batch.seq_lens.device)
    assert batch.extend_seq_lens is not None and batch.extend_seq_lens_cpu is not None
    prefix = batch.extend_prefix_lens_cpu
    return replace(
        batch,
        batch_size=len(requests),
        req_pool_indices=batch.req_pool_indices[index],
        seq_lens=batch.seq_lens[index],
        seq_lens_cpu=None if batch.seq_lens_cpu is None else batch.seq_lens_cpu[index.cpu()],
        extend_seq_lens=batch.extend_seq_lens[index],
        extend_seq_lens_cpu=[batch.extend_seq_lens_cpu[i] for i in requests],
        extend_prefix_lens_cpu=None if prefix is None else [prefix[i] for i in requests],
        out_cache_loc=None,
    )


def token_rows(batch: ForwardBatch, requests: list[int]) -> Int[Tensor, " tokens"]:
    """The query rows of some requests, in order, as int32."""
    assert batch.extend_seq_lens_cpu is not None
    rows = spans(cu_seqlens(torch.tensor(batch.extend_seq_lens_cpu)))
    picked = [torch.arange(rows[i].start, rows[i].stop, dtype=torch.int32) for i in requests]
    return torch.cat(picked).to(batch.seq_lens.device)
