"""The oracle: attention by definition, with no planning. Gather the keys, build the mask, take the softmax.

Everything else in both packages is measured against this page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fa_ref.api import AttentionLayer, BackendConfig, ForwardBatch, LayerKind, layer_kind, window_left
from fa_ref.api.bounds import pool_of
from fa_ref.api.checks import req_to_token
from fa_ref.api.pools import FP8, head_scale
from fa_ref.attention import AttentionState, attention
from fa_ref.masks import Mask, causal, local_chunk, sliding_window


def masked_attention(
    q: Float[Tensor, "tokens heads dim"],
    batch: ForwardBatch,
    layer: Any,
    config: BackendConfig,
    *,
    sinks: Float[Tensor, " heads"] | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> AttentionState:
    """Attention of every new token of the batch over what its mode and layer allow, request by request.

    The keys must be in the cache already. compute_dtype is that of the products: fp32 or fp64 for an oracle,
    the model's own for the plain low-precision run that tolerances are derived from.
    """
    layer = AttentionLayer.of(layer)
    kind = layer_kind(layer, config.attention_chunk_size)
    outs, lses = [q.new_zeros(0, layer.tp_q_head_num, layer.v_head_dim, dtype=compute_dtype)], []
    lses.append(torch.zeros(0, layer.tp_q_head_num, device=q.device))
    for request, queries, q_pos, k_pos in requests(batch, q.device):
        keys, values = cached(batch, layer, config, request, len(k_pos))
        state = attention(
            q[queries].to(compute_dtype),
            keys.to(compute_dtype),
            values.to(compute_dtype),
            mask_of(kind, layer, config).dense(q_pos, k_pos),
            softmax_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=sinks,
        )
        outs.append(state.out)
        lses.append(state.lse)
    return AttentionState(torch.cat(outs), torch.cat(lses))


def requests(
    batch: ForwardBatch, device: torch.device
) -> Iterator[tuple[int, slice, Int[Tensor, " queries"], Int[Tensor, " keys"]]]:
    """For each request: its number, its query rows, and the logical positions of its queries and keys."""
    if batch.forward_mode.is_idle():
        return
    decode = batch.forward_mode.is_decode()
    new = [1] * batch.batch_size if decode else batch.extend_seq_lens.tolist()  # type: ignore[union-attr]
    start = 0
    for request, (count, total) in enumerate(zip(new, batch.seq_lens.tolist(), strict=True)):
        yield (
            request,
            slice(start, start + count),
            torch.arange(total - count, total, device=device),
            torch.arange(total, device=device),
        )
        start += count


def mask_of(kind: LayerKind, layer: Any, config: BackendConfig) -> Mask:
    """What a layer of this kind may see, as a mask over logical positions."""
    if kind is LayerKind.SLIDING:
        return causal & sliding_window(window_left(layer))
    if kind is LayerKind.LOCAL:
        assert config.attention_chunk_size is not None
        return causal & local_chunk(config.attention_chunk_size)
    assert kind is LayerKind.FULL, kind
    return causal


def cached(
    batch: ForwardBatch, layer: Any, config: BackendConfig, request: int, length: int
) -> tuple[Float[Tensor, "keys kv_heads dim"], Float[Tensor, "keys kv_heads v_dim"]]:
    """A request's first `length` keys and values, gathered slot by slot and descaled if the cache is fp8."""
    pool = batch.token_to_kv_pool or config.token_to_kv_pool
    row = int(batch.req_pool_indices[request])
    slots = req_to_token(batch, config)[row, :length].long()
    if pool_of(layer_kind(layer, config.attention_chunk_size), config) == "swa":
        slots = pool.full_to_swa_index_mapping[slots].long()
    keys, values = (buffer[slots] for buffer in pool.get_kv_buffer(layer.layer_id))
    if keys.dtype == FP8:
        keys = keys.float() * head_scale(getattr(layer, "k_scale", None), keys.device)
        values = values.float() * head_scale(getattr(layer, "v_scale", None), values.device)
    return keys, values
