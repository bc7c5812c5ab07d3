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
    batch: ForwardBatch,
    config: BackendConfig,
    kind: LayerKind,
    queries: int,
    depth: Int[Tensor, "requests depths"],
) -> AttentionPass:
    """Every query over the part of its request's cached prefix that `kind` lets it see. Not causal: all of it is past.

    queries: per request. depth: of each query in its tree, so that its logical position is seq_lens + depth; one
    column if all queries of a request are equally deep. The sinks go to the tree pass, whose rows always have a key.
    """
    if kind is LayerKind.SLIDING:
        return _window_prefix(batch, config, queries, depth)
    if kind is LayerKind.LOCAL:
        return _chunk_prefix(batch, config, queries, depth)
    table = pages_of(slot_table(batch, config, "full"), config.page_size)
    lens = rearrange(batch.seq_lens, "r -> r 1")
    return _pass(table, lens, queries, page_size=config.page_size, pool="full", longest=longest_request(batch, config))


def _window_prefix(
    batch: ForwardBatch, config: BackendConfig, queries: int, depth: Int[Tensor, "requests depths"]
) -> AttentionPass:
    """A window layer's prefix: the deeper a query, the fewer prefix keys remain in its window.

    Listed newest first, the keys of every query are the front of one shared row: a query at depth d sees the
    newest left - d of them. Order does not matter to attention, so one short table serves all depths.
    """
    left, pool = window_left(config), pool_of(LayerKind.SLIDING, config)
    slots = slot_table(batch, config, pool)
    end = rearrange(batch.seq_lens, "r -> r 1")
    newest = end - 1 - torch.arange(max(left, 1), device=slots.device)
    lens = torch.minimum((left - depth).clamp(min=0), end)
    table = slots.gather(1, newest.clamp(min=0).long())
    return _pass(table, lens, queries, page_size=1, pool=pool, longest=left, cut_to_window=left)


def _chunk_prefix(
    batch: ForwardBatch, config: BackendConfig, queries: int, depth: Int[Tensor, "requests depths"]
) -> AttentionPass:
    """A chunked layer's prefix: from the chunk's start on, or nothing for queries already in the next chunk."""
    chunk, pool = config.attention_chunk_size, pool_of(LayerKind.LOCAL, config)
    assert chunk is not None
    table = pages_of(slot_table(batch, config, pool), config.page_size)
    end = rearrange(batch.seq_lens, "r -> r 1")
    same_chunk = (end + depth) // chunk == end // chunk
    lens = torch.where(same_chunk, end % chunk, 0)
    first_page = batch.seq_lens // chunk * chunk // config.page_size
    rows = shifted(table, first_page, min(chunk // config.page_size, table.shape[1]))
    return _pass(rows, lens, queries, page_size=config.page_size, pool=pool, longest=chunk)


def _pass(
    table: Int32[Tensor, "requests pages"],
    lens: Int[Tensor, "requests depths"],
    queries: int,
    *,
    page_size: int,
    pool: str,
    longest: int,
    cut_to_window: int = -1,
) -> AttentionPass:
    """A sequence for every request and depth; those of one request share its row of the table."""
    requests, depths = lens.shape
    device, each = table.device, queries // depths
    row = repeat(torch.arange(requests, dtype=torch.int32, device=device), "r -> (r d)", d=depths)
    return AttentionPass(
        page_table=table,
        row_index=None if depths == 1 else row,
        cache_seqlens=rearrange(lens, "r d -> (r d)").to(torch.int32),
        cu_seqlens_q=torch.arange(requests * depths + 1, dtype=torch.int32, device=device) * each,
        max_seqlen_q=each,
        max_seqlen_k=longest,
        causal=False,
        page_size=page_size,
        pool=pool,
        takes_sinks=False,
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
