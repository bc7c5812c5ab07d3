"""The KV write of a layer: the pool's own method, or on CUDA one kernel that translates, quantises and stores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa_ref.api import MHAKVPool, MLAKVPool, SWAKVPool
from fa_ref.api.checks import check_loc
from fa_ref.api.pools import FP8, head_scale


def write_kv(pool: Any, layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
    """k [tokens, kv_heads, dim], v [tokens, kv_heads, v_dim] to slots `loc` of the full pool. Inputs stay as they are.

    To a pool of latents: k [tokens, 1, latent] and v [tokens, 1, rope], side by side in one row.

    A pool class of the server's own is written through its `set_kv_buffer` or `set_mla_kv_buffer`.
    """
    if k.shape[0] == 0:
        return
    k_scale, v_scale = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
    check_loc(loc, k.shape[0])
    if not (k.is_cuda and isinstance(pool, MHAKVPool | SWAKVPool | MLAKVPool)):
        if hasattr(pool, "set_mla_kv_buffer"):
            pool.set_mla_kv_buffer(layer, loc.long(), k, v)
        else:
            pool.set_kv_buffer(layer, loc.long(), k, v, k_scale, v_scale)
        return
    from fa_fast.triton_ops.store_kv import store_kv

    fp8 = pool.dtype == FP8
    k_cache, v_cache = pool.get_kv_buffer(layer.layer_id)
    if isinstance(pool, MLAKVPool):
        latent = pool.kv_lora_rank
        k_cache, v_cache, v_scale = k_cache[..., :latent], k_cache[..., latent:], k_scale
    swa = isinstance(pool, SWAKVPool) and pool.in_swa_pool(layer.layer_id)
    store_kv(
        k,
        v,
        k_cache,
        v_cache,
        loc,
        mapping=pool.full_to_swa_index_mapping if swa else None,  # type: ignore[union-attr]
        k_scale=head_scale(k_scale, k.device) if fp8 else None,
        v_scale=head_scale(v_scale, k.device) if fp8 else None,
    )
