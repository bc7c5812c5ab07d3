"""A prefix that all requests share, read once: notebook 07."""

from __future__ import annotations

from dataclasses import replace

import torch

from fa_ref.api import AttentionPass


def cascade(whole: AttentionPass, tokens: int, queries: int) -> tuple[AttentionPass, AttentionPass]:
    """One pass over the first `tokens` keys for the queries of all requests, and a pass over each request's rest.

    The shared keys are all in the past, so the first pass is not causal and treats all queries as one sequence; the
    second is what the whole pass was, with its tables and lengths cut at the front. tokens: a multiple of the page
    size; queries: of the whole batch.
    """
    pages = tokens // whole.page_size
    first = whole.cu_seqlens_q[:1]  # 0
    shared = replace(
        whole,
        row_index=torch.zeros_like(first) if whole.row_index is None else whole.row_index[:1],
        cache_seqlens=torch.full_like(first, tokens),
        cu_seqlens_q=torch.cat([first, whole.cu_seqlens_q[-1:]]),
        max_seqlen_q=queries,
        max_seqlen_k=tokens,
        causal=False,
        takes_sinks=False,  # the rest has a key in every row: a sink always has something to join
        keys_are_new=False,
    )
    rest = replace(
        whole,
        page_table=whole.page_table[:, pages:],
        cache_seqlens=whole.cache_seqlens - tokens,
        max_seqlen_k=whole.max_seqlen_k - tokens,
        keys_are_new=False,
    )
    return shared, rest
