"""The oracle: attention by definition, with no planning. Gather the keys, build the mask, take the softmax.

Everything else in both packages is measured against this page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fa_ref.api import (
    AttentionLayer,
    BackendConfig,
    BadBatch,
    DraftInput,
    ForwardBatch,
    LayerKind,
    VerifyInput,
    layer_kind,
    window_left,
)
from fa_ref.api.bounds import pool_of
from fa_ref.api.checks import req_to_token
from fa_ref.api.mla import latent_layer
from fa_ref.api.pools import FP8, head_scale
from fa_ref.attention import AttentionState, attention
from fa_ref.masks import Mask, causal, everything, local_chunk, sliding_window, tree
from fa_ref.masks import prefix as prefix_mask


class Question(NamedTuple):
    """Some query rows of one request, and everything needed to answer them by definition."""

    rows: slice  # of the batch's query rows
    q_pos: Int[Tensor, " queries"]  # logical position of each query
    slots: Int[Tensor, " keys"]  # where each key is (full pool)
    k_pos: Int[Tensor, " keys"]  # logical position of each key
    allowed: Bool[Tensor, "queries keys"] | None  # a tree's own mask, besides causality and layer kind


def masked_attention(
    q: Float[Tensor, "tokens heads dim"],
    batch: ForwardBatch,
    layer: Any,
    config: BackendConfig,
    *,
    sinks: Float[Tensor, " heads"] | None = None,
    step: int = 0,
    compute_dtype: torch.dtype = torch.float32,
) -> AttentionState:
    """Attention of every new token of the batch over what its mode and layer allow, request by request.

    The keys must be in the cache already. step: of draft decoding. compute_dtype is that of the products: fp32 or
    fp64 for an oracle, the model's own for the plain low-precision run that tolerances are derived from.
    """
    layer = AttentionLayer.of(layer)
    if config.use_mla:  # absorbed: one key head, whose keys are cached rows and whose values are their latents
        layer = latent_layer(layer)
    kind = layer_kind(layer, config.attention_chunk_size)
    outs = [q.new_zeros(0, layer.tp_q_head_num, layer.v_head_dim, dtype=compute_dtype)]
    lses = [torch.zeros(0, layer.tp_q_head_num, device=q.device)]
    for question in questions(batch, config, step, kind):
        mask = mask_of(kind, layer, config).dense(question.q_pos, question.k_pos)
        keys, values = cached(batch, layer, config, question.slots)
        state = attention(
            q[question.rows].to(compute_dtype),
            keys.to(compute_dtype),
            values.to(compute_dtype),
            mask if question.allowed is None else mask & question.allowed,
            softmax_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=sinks,
        )
        outs.append(state.out)
        lses.append(state.lse)
    return AttentionState(torch.cat(outs), torch.cat(lses))


def questions(
    batch: ForwardBatch, config: BackendConfig, step: int = 0, kind: LayerKind = LayerKind.FULL
) -> Iterator[Question]:
    """The batch, one request (or one branch of a draft) at a time, in the order of its query rows.

    A request's row holds its encoder tokens first; a CROSS layer's keys are those, every other layer's what follows.
    """
    table, info = req_to_token(batch, config), batch.spec_info
    start = 0
    for request in range(0 if batch.forward_mode.is_idle() else batch.batch_size):
        row, length = table[int(batch.req_pool_indices[request])].long(), int(batch.seq_lens[request])
        encoder, row = row.tensor_split([0 if batch.encoder_lens is None else int(batch.encoder_lens[request])])
        if isinstance(info, DraftInput) and batch.forward_mode.is_decode():
            found = list(_draft(batch, info, row, request, length, step, start))
        elif isinstance(info, VerifyInput) and batch.forward_mode.is_target_verify():
            found = [_verify(batch, info, row, request, length, start)]
        else:
            new = 1 if batch.forward_mode.is_decode() else int(batch.extend_seq_lens[request])  # type: ignore[index]
            found = [_plain(row, length, new, start)]
        if kind is LayerKind.CROSS:
            position = torch.arange(len(encoder), device=row.device)
            found = [question._replace(slots=encoder, k_pos=position, allowed=None) for question in found]
        yield from found
        start = found[-1].rows.stop


def _plain(row: Tensor, total: int, new: int, start: int) -> Question:
    position = torch.arange(total, device=row.device)
    return Question(slice(start, start + new), position[total - new :], row[:total], position, None)


def _draft(
    batch: ForwardBatch, info: DraftInput, row: Tensor, request: int, prefix: int, step: int, start: int
) -> Iterator[Question]:
    """A branch's query sees the prefix and the draft tokens on its own path."""
    if info.topk <= 1:
        yield _plain(row, prefix + step + 1, 1, start)
        return
    assert batch.out_cache_loc is not None
    if batch.out_cache_loc.shape[0] != batch.batch_size * info.topk * info.num_steps:
        raise BadBatch(
            f"out_cache_loc has {batch.out_cache_loc.shape[0]} slots; the masks of branches need those of all steps, "
            f"[{batch.batch_size} requests, {info.topk} branches, {info.num_steps} steps]"
        )
    paths = rearrange(batch.out_cache_loc, "(r b s) -> r b s", b=info.topk, s=info.num_steps)
    for branch, path in enumerate(paths[request].long()):
        slots = torch.cat([row[:prefix], path[: step + 1]])
        yield _plain(slots, prefix + step + 1, 1, start + branch)


def _verify(batch: ForwardBatch, info: VerifyInput, row: Tensor, request: int, prefix: int, start: int) -> Question:
    """A draft sees the prefix and its ancestors. Its logical position is its depth, not its place in the row."""
    drafts = info.draft_token_num
    if info.custom_mask is None:
        return _plain(row, prefix + drafts, drafts, start)
    skip = sum((int(n) + drafts) * drafts for n in batch.seq_lens[:request])
    part = info.custom_mask[skip : skip + (prefix + drafts) * drafts]
    ancestors = rearrange(part, "(draft key) -> draft key", draft=drafts)[:, prefix:].bool()
    q_pos = prefix + ancestors.sum(dim=1) - 1
    stored = torch.arange(prefix + drafts, device=row.device)
    allowed = (prefix_mask(prefix) | tree(ancestors, start=prefix)).dense(stored[prefix:], stored)
    return Question(
        slice(start, start + drafts), q_pos, row[: prefix + drafts], torch.cat([stored[:prefix], q_pos]), allowed
    )


def mask_of(kind: LayerKind, layer: Any, config: BackendConfig) -> Mask:
    """What a layer of this kind may see, as a mask over logical positions; a CROSS layer's keys are the encoder's."""
    if kind is LayerKind.CROSS:
        return everything
    if kind is LayerKind.SLIDING:
        return causal & sliding_window(window_left(layer))
    if kind is LayerKind.LOCAL:
        assert config.attention_chunk_size is not None
        return causal & local_chunk(config.attention_chunk_size)
    assert kind is LayerKind.FULL, kind
    return causal


def cached(
    batch: ForwardBatch, layer: Any, config: BackendConfig, slots: Int[Tensor, " keys"]
) -> tuple[Float[Tensor, "keys kv_heads dim"], Float[Tensor, "keys kv_heads v_dim"]]:
    """The keys and values in some slots (of the full pool), descaled if the cache is fp8."""
    pool = batch.token_to_kv_pool or config.token_to_kv_pool
    if pool_of(layer_kind(layer, config.attention_chunk_size), config) == "swa":
        slots = pool.full_to_swa_index_mapping[slots].long()
    keys, values = (buffer[slots] for buffer in pool.get_kv_buffer(layer.layer_id))
    if keys.dtype == FP8:
        keys = keys.float() * head_scale(getattr(layer, "k_scale", None), keys.device)
        values = values.float() * head_scale(getattr(layer, "v_scale", None), values.device)
    return keys, values
