"""Multi-head latent attention around a backend, on the device. The readable twin, with the algebra, is fa_ref.mla."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_fast.write import write_kv
from fa_ref.api import (
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    MLAProjections,
    PrefixChunks,
    UnsupportedByProvider,
    chunk_prefix,
)
from fa_ref.api.bounds import slots_to_write
from fa_ref.api.checks import req_to_token
from fa_ref.api.mla_form import mla_call, prefix_lens
from fa_ref.api.pools import FP8, head_scale


def mla_attention(
    backend: Any,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    layer: AttentionLayer,
    batch: ForwardBatch,
    projections: MLAProjections,
    *,
    form: str = "auto",
    workspace_tokens: int = 16384,
) -> Tensor:
    """One MLA layer of a planned batch: writes [latent | k_rope] to the cache and returns every head's values.

    q_nope [tokens, heads, nope], q_rope [tokens, heads, rope] rotated, latent [tokens, latent] normalised, k_rope
    [tokens, rope] rotated; returns [tokens, heads * v_dim]. layer: the absorbed one, in every form (tp_k_head_num 1,
    head_dim latent + rope, v_head_dim latent), whose scaling is that of nope + rope.

    form: "absorbed"; "chunked", the MHA form with the cached prefix in chunks of `workspace_tokens` keys; "one_shot",
    the MHA form over all keys at once; "auto", the cheaper one by counted operations and bytes, and "absorbed" where
    the provider cannot run that. Raises BadBatch where a form cannot run in a batch, and for inputs of other shapes;
    UnsupportedByProvider where the kernels cannot run it; BadConfig for a layer and projections that do not fit. Only
    the first layer of a batch in an MHA form waits for the device, to copy lengths.
    """
    server_layer = layer
    form, batch, layer, inputs = mla_call(
        backend, q_nope, q_rope, latent, k_rope, layer, batch, projections, form, workspace_tokens,
        require=partial(_require, backend),
    )  # fmt: skip
    q_nope, q_rope, latent, k_rope = inputs
    config = backend.config
    if form == "absorbed":
        query = torch.bmm(q_nope.transpose(0, 1), projections.w_uk).transpose(0, 1)
        out = backend.forward(query, latent, None, layer, batch, q_rope=q_rope, k_rope=k_rope)
        out = out.view(-1, layer.tp_q_head_num, layer.v_head_dim).transpose(0, 1)
        return torch.bmm(out, projections.w_uv.transpose(1, 2)).transpose(0, 1).flatten(1)

    mha_layer = projections.mha_layer(layer)
    pool = batch.token_to_kv_pool or config.token_to_kv_pool
    write_kv(pool, server_layer, slots_to_write(batch, config, 0, latent.shape[0]), latent[:, None], k_rope[:, None])
    query = torch.cat([q_nope, q_rope], dim=-1)

    def attend(keys: Tensor, values: Tensor, to: ForwardBatch) -> Any:
        return backend.forward(query, keys, values, mha_layer, to, save_kv_cache=False)

    if form == "one_shot":
        lens = [int(n) for n in batch.seq_lens_cpu]  # type: ignore[union-attr]
        whole = chunk_prefix(lens, max(1, sum(lens)), batch.seq_lens.device)
        if len(whole):
            latent, k_rope = _cached_rows(whole, 0, layer, batch, config)
        new = replace(batch, attn_attend_prefix_cache=False, mha_one_shot=True)
        return attend(*_expand(latent, k_rope, projections), new)

    new = replace(batch, attn_attend_prefix_cache=False, mha_return_lse=True)
    out, lse = attend(*_expand(latent, k_rope, projections), new)
    chunks = chunk_prefix(prefix_lens(batch), workspace_tokens, batch.seq_lens.device)
    for chunk in range(len(chunks)):
        keys, values = _expand(*_cached_rows(chunks, chunk, layer, batch, config), projections)
        out, lse = backend.kernels.merge_state(out, lse, *attend(keys, values, chunks.batch(batch, chunk)))
    return out.flatten(1)


def _require(backend: Any, form: str, layer: AttentionLayer) -> None:
    """Raise UnsupportedByProvider unless the backend's kernels run the MHA form. layer: the one in that form."""
    capability = backend.kernels.CAPABILITY
    try:
        capability.require_mha_form(layer, backend.config.dtype, lse=form == "chunked")
    except UnsupportedByProvider as error:
        other = " Or pass form='absorbed', which this provider has" if capability.qv_dims != frozenset() else ""
        raise UnsupportedByProvider(f"layer {layer.layer_id}, form {form!r}: {error}{other}") from None


def _expand(latent: Tensor, rope: Tensor, projections: MLAProjections) -> tuple[Tensor, Tensor]:
    """Keys [keys, heads, nope + rope] and values [keys, heads, v_dim] of every head, one matrix product each."""
    heads, nope, _ = projections.w_uk.shape
    keys = latent.new_empty(latent.shape[0], heads, nope + rope.shape[1])
    keys[..., :nope] = F.linear(latent, projections.w_uk.flatten(0, 1)).view(-1, heads, nope)
    keys[..., nope:] = rope[:, None]
    values = F.linear(latent, projections.w_uv.flatten(0, 1)).view(-1, heads, projections.w_uv.shape[1])
    return keys, values


def _cached_rows(
    chunks: PrefixChunks, chunk: int, layer: AttentionLayer, batch: ForwardBatch, config: BackendConfig
) -> tuple[Tensor, Tensor]:
    """Cached latents [keys, latent] and rope parts [keys, rope] of one chunk, request after request."""
    table, rows = req_to_token(batch, config), batch.req_pool_indices
    lens, keys = chunks.seq_lens[chunk], chunks.num_tokens[chunk]
    request = torch.arange(lens.shape[0], device=lens.device).repeat_interleave(lens, output_size=keys)
    first = chunks.starts[chunk] - chunks.cu_seq_lens[chunk, :-1]
    slots = table[rows[request].long(), first[request] + torch.arange(keys, device=lens.device)].long()
    pool = batch.token_to_kv_pool or config.token_to_kv_pool
    buffer = pool.get_key_buffer(layer.layer_id)
    if buffer.dtype == FP8:
        found = buffer.view(torch.uint8)[slots].view(FP8).float() * head_scale(layer.k_scale, slots.device)
    else:
        found = buffer[slots]
    found = found.to(config.dtype).flatten(1)
    return found[:, : layer.v_head_dim], found[:, layer.v_head_dim :]


__all__ = ["mla_attention"]
