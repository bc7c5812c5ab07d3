"""What draft decoding and tree verification share: a prefix that all queries of a request see, then a small tree.

A *cascade*: one pass over the cached prefix, read once for all queries of a request, and a TreePass over the draft
tokens under an explicit mask; the backend merges the two by LSE. Windows and chunks go by logical position, which
for a draft token is seq_lens plus its depth, not its place in memory.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, window_left
from fa_ref.api.bounds import longest_request, pool_of
from fa_ref.masks import everything, local_chunk, sliding_window
from fa_ref.planning.page_table import pages_of, shifted, slot_table


def prefix_pass(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, depth: Int[Tensor, "requests queries"]
) -> AttentionPass:
    """Every query over the part of its request's cached prefix that `kind` lets it see. Not causal: all of it is past.

    depth: of each query in its tree, so that its logical position is seq_lens + depth.
    """
    if kind is LayerKind.SLIDING:
        return _window_prefix(batch, config, depth)
    if kind is LayerKind.LOCAL:
        return _chunk_prefix(batch, config, depth)
    requests, queries = depth.shape
    table = pages_of(slot_table(batch, config, "full"), config.page_size)
    return AttentionPass(
        page_table=table,
        cache_seqlens=batch.seq_lens.to(torch.int32),
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device=table.device) * queries,
        max_seqlen_q=queries,
        max_seqlen_k=longest_request(batch, config),
        causal=False,
        page_size=config.page_size,
    )


def _window_prefix(
    batch: ForwardBatch, config: BackendConfig, depth: Int[Tensor, "requests queries"]
) -> AttentionPass:
    """A window layer's prefix: the deeper a query, the fewer prefix keys remain in its window.

    Listed newest first, the keys of every query are the front of one shared row: a query at depth d sees the
    newest left - d of them. Order does not matter to attention, so one short table serves all depths.
    """
    left, pool = window_left(config), pool_of(LayerKind.SLIDING, config)
    slots = slot_table(batch, config, pool)
    newest = rearrange(batch.seq_lens, "r -> r 1") - 1 - torch.arange(left, device=slots.device)
    lens = torch.minimum((left - depth).clamp(min=0), rearrange(batch.seq_lens, "r -> r 1"))
    return _a_sequence_a_query(
        slots.gather(1, newest.clamp(min=0).long()), lens, page_size=1, pool=pool, longest=left, cut_to_window=left
    )


def _chunk_prefix(
    batch: ForwardBatch, config: BackendConfig, depth: Int[Tensor, "requests queries"]
) -> AttentionPass:
    """A chunked layer's prefix: from the chunk's start on, or nothing for queries already in the next chunk."""
    chunk, pool = config.attention_chunk_size, pool_of(LayerKind.LOCAL, config)
    assert chunk is not None
    table = pages_of(slot_table(batch, config, pool), config.page_size)
    first = batch.seq_lens // chunk * chunk  # of the chunk that the first draft token is in
    width = min(chunk // config.page_size, table.shape[1])
    position = rearrange(batch.seq_lens, "r -> r 1") + depth
    same_chunk = position // chunk == rearrange(batch.seq_lens // chunk, "r -> r 1")
    lens = torch.where(same_chunk, rearrange(batch.seq_lens - first, "r -> r 1"), 0)
    rows = shifted(table, first // config.page_size, width)
    return _a_sequence_a_query(rows, lens, page_size=config.page_size, pool=pool, longest=chunk)


def _a_sequence_a_query(
    table: Int32[Tensor, "requests pages"],
    lens: Int[Tensor, "requests queries"],
    *,
    page_size: int,
    pool: str,
    longest: int,
    cut_to_window: int = -1,
) -> AttentionPass:
    requests, queries = lens.shape
    request = repeat(torch.arange(requests, dtype=torch.int32, device=table.device), "r -> (r q)", q=queries)
    return AttentionPass(
        page_table=table,
        row_index=request,
        cache_seqlens=rearrange(lens, "r q -> (r q)").to(torch.int32),
        cu_seqlens_q=torch.arange(requests * queries + 1, dtype=torch.int32, device=table.device),
        max_seqlen_q=1,
        max_seqlen_k=longest,
        causal=False,
        page_size=page_size,
        pool=pool,
        cut_to_window=cut_to_window,
    )


def kind_mask(
    kind: LayerKind,
    config: BackendConfig,
    q_pos: Int[Tensor, "requests queries"],
    k_pos: Int[Tensor, "requests keys"],
) -> Bool[Tensor, "requests queries keys"]:
    """What the layer kind allows between logical positions, besides the tree."""
    rows, columns = rearrange(q_pos, "r q -> r q 1"), rearrange(k_pos, "r k -> r 1 k")
    if kind is LayerKind.SLIDING:
        return sliding_window(window_left(config))(rows, columns)
    if kind is LayerKind.LOCAL:
        assert config.attention_chunk_size is not None
        return local_chunk(config.attention_chunk_size)(rows, columns)
    return everything(rows, columns)
