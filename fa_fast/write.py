"""The KV write of a layer: the pool's own method, or on CUDA one kernel that translates, quantises and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa_ref.api import MHAKVPool, MLAKVPool, SWAKVPool
from fa_ref.api.checks import check_loc
from fa_ref.api.pools import FP8, head_scale

Write = Callable[[Tensor, Tensor, Tensor], None]


def write_kv(pool: Any, layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
    """k [tokens, kv_heads, dim], v [tokens, kv_heads, v_dim] to slots `loc` of the full pool. Inputs stay as they are.

    To a pool of latents: k [tokens, 1, latent] and v [tokens, 1, rope], side by side in one row.

    A pool class of the server's own is written through its `set_kv_buffer` or `set_mla_kv_buffer`.
    """
    keys, values = pool.get_kv_buffer(layer.layer_id)
    writer(pool, layer, keys, values, lambda name: head_scale(getattr(layer, name, None), keys.device))(loc, k, v)


def writer(pool: Any, layer: Any, keys: Tensor, values: Tensor, scale: Callable[[str], Tensor]) -> Write:
    """write_kv with pool and layer given. keys, values: the layer's buffers. scale: k_scale or v_scale, if fp8."""
    put = _by_kernel if keys.is_cuda and isinstance(pool, MHAKVPool | SWAKVPool | MLAKVPool) else _by_pool
    store = put(pool, layer, keys, values, scale)

    def write(loc: Tensor, k: Tensor, v: Tensor) -> None:
        if k.shape[0]:
            check_loc(loc, k.shape[0])
            store(loc, k, v)

    return write


def _by_pool(pool: Any, layer: Any, *unused: Any) -> Write:
    if hasattr(pool, "set_mla_kv_buffer"):
        return lambda loc, k, v: pool.set_mla_kv_buffer(layer, loc.long(), k, v)
    k_scale, v_scale = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
    return lambda loc, k, v: pool.set_kv_buffer(layer, loc.long(), k, v, k_scale, v_scale)


def _by_kernel(pool: Any, layer: Any, keys: Tensor, values: Tensor, scale: Callable[[str], Tensor]) -> Write:
    from fa_fast.triton_ops.store_kv import store_kv

    fp8, latents = pool.dtype == FP8, isinstance(pool, MLAKVPool)
    if latents:
        keys, values = keys[..., : pool.kv_lora_rank], keys[..., pool.kv_lora_rank :]
    two_pools = isinstance(pool, SWAKVPool) and pool.in_swa_pool(layer.layer_id)

    def store(loc: Tensor, k: Tensor, v: Tensor) -> None:
        store_kv(
            k,
            v,
            keys,
            values,
            loc,
            mapping=pool.full_to_swa_index_mapping if two_pools else None,
            k_scale=scale("k_scale") if fp8 else None,
            v_scale=scale("k_scale" if latents else "v_scale") if fp8 else None,
        )

    return store
