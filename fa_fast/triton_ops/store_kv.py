"""New keys and values to their slots, quantised if the cache is fp8, in one launch.

Definition: the pools' set_kv_buffer in fa_ref.api.pools.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_ref.api.checks import check_loc
from fa_ref.api.pools import FP8


@triton.jit
def _copy_row(
    source, target, scale, stride, to_stride, width, dim, token, slot,
    QUANTIZE: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for base in range(0, width, BLOCK):
        offset = base + tl.arange(0, BLOCK)
        inside = offset < width
        value = tl.load(source + token * stride + offset, mask=inside, other=0.0)
        if QUANTIZE:
            head = offset // dim if PER_HEAD else offset * 0
            factor = tl.load(scale + head, mask=inside, other=1.0)
            value = tl.div_rn(value.to(tl.float32), factor)
            value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(target + slot * to_stride + offset, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _kernel(
    k, v, k_cache, v_cache, loc, mapping, k_scale, v_scale,
    k_stride, v_stride, k_slot, v_slot, k_width, v_width, k_dim, v_dim,
    MAPPED: tl.constexpr, QUANTIZE: tl.constexpr, K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + token).to(tl.int64)
    if MAPPED:
        slot = tl.load(mapping + slot).to(tl.int64)
    _copy_row(k, k_cache, k_scale, k_stride, k_slot, k_width, k_dim, token, slot, QUANTIZE, K_PER_HEAD, BLOCK)
    _copy_row(v, v_cache, v_scale, v_stride, v_slot, v_width, v_dim, token, slot, QUANTIZE, V_PER_HEAD, BLOCK)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    *,
    mapping: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """k [tokens, kv_heads, dim], v [tokens, kv_heads, v_dim] into caches [slots, kv_heads, dim] at `loc` [tokens].

    A cache may be a slice of wider rows, as a latent and its rope part are.
    mapping translates `loc` to another pool's slots. Scales: fp32 with 1 or kv_heads elements, fp8 caches only.
    """
    if k.shape[0] == 0:
        return
    check_loc(loc, k.shape[0])  # the kernel reads one slot a token
    k, v, loc = _rows(k), _rows(v), loc.contiguous()
    quantize = k_cache.dtype == FP8
    one = k_cache  # any pointer: not read
    _kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, loc, loc if mapping is None else mapping.contiguous(),
        _scale(k_scale, k) if quantize else one, _scale(v_scale, v) if quantize else one,
        k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0),
        k.shape[1] * k.shape[2], v.shape[1] * v.shape[2], k.shape[2], v.shape[2],
        MAPPED=mapping is not None, QUANTIZE=quantize,
        K_PER_HEAD=k_scale is not None and k_scale.numel() > 1,
        V_PER_HEAD=v_scale is not None and v_scale.numel() > 1,
        BLOCK=min(1024, triton.next_power_of_2(k.shape[1] * k.shape[2])),
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """x with each token's heads contiguous; tokens may be strided (a slice of a fused qkv projection)."""
    packed = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if packed else x.contiguous()


def _scale(scale: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones(1, device=like.device) if scale is None else scale.contiguous()
