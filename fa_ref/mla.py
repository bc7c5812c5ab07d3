"""Multi-head latent attention around a backend: projections in, attention in one of two forms, projections out.

A cached row is [latent | rope]. Each head's key is (w_uk @ latent, rope) and its value w_uv @ latent, so a score is
q_nope . (w_uk @ latent) = (q_nope @ w_uk) . latent: the projection can be moved to the query (*absorbed*: one key
head, read as it is cached) or applied to the keys (*MHA*: a key and a value for every head, fewer products a pair).
Notebooks 13 and 14; DeepSeek-V2, https://arxiv.org/abs/2405.04434.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from fa_ref.api import AttentionLayer, BackendConfig, ForwardBatch, MLAProjections, PrefixChunks, chunk_prefix
from fa_ref.api.bounds import slots_to_write
from fa_ref.api.checks import req_to_token
from fa_ref.api.mla_form import mla_call, prefix_lens
from fa_ref.api.pools import FP8, head_scale
from fa_ref.kernels import merge_state


def mla_attention(
    backend: Any,
    q_nope: Float[Tensor, "tokens heads nope"],
    q_rope: Float[Tensor, "tokens heads rope"],
    latent: Float[Tensor, "tokens latent"],
    k_rope: Float[Tensor, "tokens rope"],
    layer: AttentionLayer,
    batch: ForwardBatch,
    projections: MLAProjections,
    *,
    form: str = "auto",
    workspace_tokens: int = 16384,
) -> Float[Tensor, "tokens heads_v_dim"]:
    """One MLA layer of a planned batch: writes [latent | k_rope] to the cache and returns every head's values.

    q_rope and k_rope are rotated, latent is normalised, as a model has them before attention. layer: the absorbed
    one (one key head, head_dim latent + rope, v_head_dim latent), whose scaling is that of nope + rope.

    form: "absorbed"; "chunked", the MHA form with the cached prefix in chunks of `workspace_tokens` keys, which bounds
    what is expanded at a time; "one_shot", the MHA form over all keys at once; "auto", the cheaper one by counted
    operations and bytes. Only extend modes have the MHA form. Raises BadBatch where a form cannot run,
    and for inputs of other shapes; BadConfig for a layer and projections that do not fit. Nothing is written then.
    """
    server_layer = layer
    form, batch, layer, inputs = mla_call(
        backend, q_nope, q_rope, latent, k_rope, layer, batch, projections, form, workspace_tokens
    )
    q_nope, q_rope, latent, k_rope = inputs
    config = backend.config
    if form == "absorbed":
        query = einsum(q_nope, projections.w_uk, "t h nope, h nope latent -> t h latent")
        out = backend.forward(query, latent, None, layer, batch, q_rope=q_rope, k_rope=k_rope)
        out = rearrange(out, "t (h latent) -> t h latent", h=layer.tp_q_head_num)
        values = einsum(out, projections.w_uv, "t h latent, h v latent -> t h v")
        return rearrange(values, "t h v -> t (h v)")

    mha_layer = projections.mha_layer(layer)
    pool = batch.token_to_kv_pool or config.token_to_kv_pool
    loc = slots_to_write(batch, config, 0, latent.shape[0])
    pool.set_mla_kv_buffer(server_layer, loc.long(), *(rearrange(part, "t d -> t 1 d") for part in (latent, k_rope)))
    query = torch.cat([q_nope, q_rope], dim=-1)

    def attend(keys: Tensor, values: Tensor, to: ForwardBatch) -> Any:
        return backend.forward(query, keys, values, mha_layer, to, save_kv_cache=False)

    if form == "one_shot":
        lens = [int(n) for n in batch.seq_lens_cpu]  # type: ignore[union-attr]
        whole = chunk_prefix(lens, max(1, sum(lens)), batch.seq_lens.device)
        every = expand(*cached_rows(whole, 0, layer, batch, config), projections) if len(whole) else None
        keys, values = every if every is not None else expand(latent, k_rope, projections)
        return attend(keys, values, replace(batch, attn_attend_prefix_cache=False, mha_one_shot=True))

    new = replace(batch, attn_attend_prefix_cache=False, mha_return_lse=True)
    out, lse = attend(*expand(latent, k_rope, projections), new)
    chunks = chunk_prefix(prefix_lens(batch), workspace_tokens, batch.seq_lens.device)
    for chunk in range(len(chunks)):
        keys, values = expand(*cached_rows(chunks, chunk, layer, batch, config), projections)
        out, lse = merge_state(out, lse, *attend(keys, values, chunks.batch(batch, chunk)))
    return rearrange(out, "t h v -> t (h v)")


def expand(
    latent: Float[Tensor, "keys latent"], rope: Float[Tensor, "keys rope"], projections: MLAProjections
) -> tuple[Float[Tensor, "keys heads nope_plus_rope"], Float[Tensor, "keys heads v_dim"]]:
    """The keys and values of every head from cached rows; the rope part is the same for all heads."""
    nope = einsum(latent, projections.w_uk, "k latent, h nope latent -> k h nope")
    values = einsum(latent, projections.w_uv, "k latent, h v latent -> k h v")
    return torch.cat([nope, repeat(rope, "k d -> k h d", h=nope.shape[1])], dim=-1), values


def cached_rows(
    chunks: PrefixChunks, chunk: int, layer: AttentionLayer, batch: ForwardBatch, config: BackendConfig
) -> tuple[Float[Tensor, "keys latent"], Float[Tensor, "keys rope"]]:
    """The cached latents and rope parts of one chunk, request after request, in the model's dtype."""
    pool = batch.token_to_kv_pool or config.token_to_kv_pool
    table = req_to_token(batch, config)
    starts, lens = chunks.starts[chunk].tolist(), chunks.seq_lens[chunk].tolist()
    spans = zip(batch.req_pool_indices.tolist(), starts, lens, strict=True)
    slots: Int[Tensor, " keys"] = torch.cat([table[row, start : start + length] for row, start, length in spans]).long()
    rows = pool.get_key_buffer(layer.layer_id)[slots]
    if rows.dtype == FP8:
        rows = rows.float() * head_scale(layer.k_scale, rows.device)
    rows = rearrange(rows.to(config.dtype), "k 1 d -> k d")
    return rows[:, : layer.v_head_dim], rows[:, layer.v_head_dim :]


__all__ = ["mla_attention"]
