"""What planning knows of a batch without asking the device: bounds from host copies, or from shapes; cascades."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ref.api.batch import ForwardBatch
from fa_ref.api.checks import draft_steps, kv_slots, new_tokens, reads_values, req_to_token
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch
from fa_ref.api.layer import window_left
from fa_ref.api.modes import LayerKind
from fa_ref.api.plan import AttentionPass
from fa_ref.api.slots import check_slots


def longest_request(batch: ForwardBatch, config: BackendConfig) -> int:
    """The longest seq_lens: from the host copy, or without one the width of the table."""
    if batch.seq_lens_cpu is None:
        return req_to_token(batch, config).shape[1]
    return int(batch.seq_lens_cpu.max()) if batch.batch_size else 0


def longest_extend(batch: ForwardBatch) -> int:
    """The most new tokens of one request, or a bound that needs no synchronisation: all of the batch's."""
    if batch.extend_seq_lens_cpu is None:
        return new_tokens(batch)
    return max((int(n) for n in batch.extend_seq_lens_cpu), default=0)


def no_prefix(batch: ForwardBatch) -> bool:
    """True if no request has cached tokens, so that a layer's k and v are all the keys there are."""
    prefix = batch.extend_prefix_lens_cpu
    return prefix is not None and not any(int(n) for n in prefix)


def pool_of(kind: LayerKind, config: BackendConfig) -> str:
    """Which pool layers of this kind read: with hybrid windows, SLIDING and LOCAL have a pool of their own."""
    windowed = kind in (LayerKind.SLIDING, LayerKind.LOCAL)
    return "swa" if config.is_hybrid_swa and windowed else "full"


def decode_reach(kind: LayerKind, config: BackendConfig) -> int | None:
    """Most keys a decode of this kind reads, counted from the page its first visible key lies in; None: all.

    A window of left + 1 keys can start at the last token of a page, page_size - 1 tokens into it.
    """
    if kind is LayerKind.SLIDING:
        return window_left(config) + config.page_size
    return config.attention_chunk_size if kind is LayerKind.LOCAL else None


def longest_encoder(batch: ForwardBatch, config: BackendConfig) -> int:
    """The most encoder keys of one request: from the host copy, or without one the width of the table."""
    if batch.encoder_lens_cpu is None:
        return req_to_token(batch, config).shape[1]
    return max((int(n) for n in batch.encoder_lens_cpu), default=0)


def page_size_of(kind: LayerKind, config: BackendConfig) -> int:
    """Tokens a page of the view that layers of this kind read: text that follows an encoder starts mid-page."""
    return 1 if config.is_encoder_decoder and kind is not LayerKind.CROSS else config.page_size


def key_rows(batch: ForwardBatch, kind: LayerKind, tokens: int) -> tuple[int, ...]:
    """How many rows a layer's k may have: one a new token; a CROSS layer's one a new encoder token, or none at all."""
    if kind is not LayerKind.CROSS:
        return (tokens,)
    loc = batch.encoder_out_cache_loc
    return (0,) if loc is None else (0, loc.shape[0])


def slots_to_write(
    batch: ForwardBatch, config: BackendConfig, step: int, tokens: int, kind: LayerKind = LayerKind.FULL
) -> Tensor:
    """The slot of each new key: out_cache_loc, or its entries of one step when it is [request, branch, step].

    Those of a CROSS layer are the encoder's, encoder_out_cache_loc. Raises BadBatch if there are none, and where values
    may be read BadPageTable for a slot outside the pool.
    """
    name = "encoder_out_cache_loc" if kind is LayerKind.CROSS else "out_cache_loc"
    loc, steps = getattr(batch, name), draft_steps(batch)
    if loc is None:
        raise BadBatch(f"{name} is None, so new keys have no slots; pass it, or save_kv_cache=False")
    if reads_values(config):
        check_slots(name, loc, kv_slots(batch.token_to_kv_pool or config.token_to_kv_pool))
    if kind is LayerKind.CROSS or steps == 0 or loc.shape[0] == tokens:
        return loc
    return loc.view(tokens, steps)[:, step]


QUERY_TILE = 64  # query tokens that share one read of the keys, about what kernels do


class SharedPrefix(NamedTuple):
    """What reading a shared prefix once is worth, counted on the host."""

    tokens: int  # of the prefix, whole pages
    plain_bytes: int  # K and V read by one layer without the cascade
    cascade_bytes: int


def shared_prefix(batch: ForwardBatch, config: BackendConfig) -> SharedPrefix | None:
    """The prefix to read once for all requests, or None if there is none or reading it once saves nothing.

    Counts the reads of keys by tiles of QUERY_TILE query tokens: a long prefill reads the prefix once a tile anyway.
    Raises BadBatch if a request is no longer than the prefix it is said to share.
    """
    tokens = batch.shared_prefix_len // config.page_size * config.page_size
    speculative = batch.spec_info is not None or config.deterministic
    if not config.cascade_prefix or tokens == 0 or batch.batch_size < 2 or speculative or batch.seq_lens_cpu is None:
        return None
    lens = [int(n) for n in batch.seq_lens_cpu]
    new = [1] * len(lens) if batch.forward_mode.is_decode() else [int(n) for n in batch.extend_seq_lens_cpu or []]
    for request, (total, added) in enumerate(zip(lens, new, strict=True)):
        if total - added < batch.shared_prefix_len:
            raise BadBatch(
                f"request {request} has {total - added} cached tokens, shared_prefix_len is {batch.shared_prefix_len}; "
                "every request must hold the whole shared prefix in its cache"
            )
    tiles = [-(-added // QUERY_TILE) for added in new]
    plain = sum(t * total for t, total in zip(tiles, lens, strict=True))
    cascade = -(-sum(new) // QUERY_TILE) * tokens + plain - sum(tiles) * tokens
    if cascade >= plain:
        return None
    k, v = (batch.token_to_kv_pool or config.token_to_kv_pool).get_kv_buffer(0)
    per_key = k[0].numel() * k.element_size()
    if not config.use_mla:  # its values are part of its keys
        per_key += v[0].numel() * v.element_size()
    return SharedPrefix(tokens, plain * per_key, cascade * per_key)


def cascade(whole: AttentionPass, tokens: int, queries: int) -> tuple[AttentionPass, AttentionPass]:
    """One pass over the first `tokens` keys for the queries of all requests, and a pass over each request's rest.

    Tables are cut as views. Notebook 07 explains it.

    The shared keys are all in the past, so the first pass is not causal and treats all queries as one sequence; the
    second is what the whole pass was, with its tables and lengths cut at the front.
    tokens: a multiple of the page size. queries: of the whole batch.
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
