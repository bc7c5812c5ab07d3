"""What planning knows of a batch without asking the device: bounds from host copies, or from shapes."""

from __future__ import annotations

from torch import Tensor

from fa_ref.api.batch import ForwardBatch
from fa_ref.api.checks import draft_steps, new_tokens, req_to_token
from fa_ref.api.config import BackendConfig
from fa_ref.api.layer import window_left
from fa_ref.api.modes import LayerKind


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


def write_slots(batch: ForwardBatch, step: int, tokens: int) -> Tensor | None:
    """The slot of each query token: out_cache_loc, or its entries of one step when it is [request, branch, step]."""
    loc, steps = batch.out_cache_loc, draft_steps(batch)
    if loc is None or steps == 0 or loc.shape[0] == tokens:
        return loc
    return loc.view(tokens, steps)[:, step]
