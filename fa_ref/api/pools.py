"""The two pools: which slots a request owns, and what the slots hold.

Three index spaces meet here. A *logical* position counts tokens in a request; `req_to_token[row, logical]`
gives the *slot*, the address of a token in a KV pool; `slot // page_size` is its *page*.
Page 0 is the padding page of every pool and row 0 the padding row: padded rows of a captured graph point
there, so both stay finite and are never handed to a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from fa_ref.api.errors import BadBatch, BadConfig

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value


class ReqToTokenPool:
    """`req_to_token` int32 [size + 1, context_len + extra_tokens]: the slot of every logical position.

    `extra_tokens` columns past the context limit hold draft tokens of speculative decoding.
    A request's encoder tokens are in its row too: with an encoder, context_len is that of encoder and text together.

    >>> pool = ReqToTokenPool(size=2, context_len=8)
    >>> pool.alloc(2), pool.req_to_token.shape
    ([1, 2], torch.Size([3, 8]))
    """

    def __init__(self, size: int, context_len: int, extra_tokens: int = 0, device: torch.device | str = "cpu") -> None:
        self.size, self.context_len = size, context_len
        self.req_to_token = torch.zeros(size + 1, context_len + extra_tokens, dtype=torch.int32, device=device)
        self._free = list(range(1, size + 1))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """`count` rows for new requests. Raises BadBatch when fewer are free; nothing is taken then."""
        if count > len(self._free):
            raise BadBatch(f"{count} request rows asked for, {len(self._free)} of {self.size} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, rows: Iterable[int]) -> None:
        """Give rows back. Raises BadBatch, and frees none, if one is free already or was never handed out."""
        rows = list(rows)
        wrong = [row for i, row in enumerate(rows) if not 1 <= row <= self.size or row in self._free or row in rows[:i]]
        if wrong:
            raise BadBatch(f"rows {wrong} cannot be freed: only rows 1..{self.size} that alloc gave out, and once each")
        self._free.extend(rows)


class MHAKVPool:
    """Keys and values of `layer_num` layers; `size` slots for requests, after the padding page.

    A size that is no multiple of the page size is rounded up to whole pages.
    Buffers are [slots, head_num, head_dim], zero at the start, so unused slots are finite: a kernel that
    multiplies a masked-out value by zero stays clean.
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        v_head_dim: int | None = None,
        layer_num: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.slots = slots = page_size + -(-size // page_size) * page_size
        self.device = torch.device(device)
        k_shape, v_shape = (slots, head_num, head_dim), (slots, head_num, v_head_dim or head_dim)
        self.k_buffer = [torch.zeros(k_shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(v_shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int) -> Float[Tensor, "slots kv_heads dim"]:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Float[Tensor, "slots kv_heads v_dim"]:
        return self.v_buffer[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def write_slots(self, layer: Any, loc: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """The slots of this layer's buffers that `loc` addresses: `loc` itself, with one pool."""
        return loc

    @torch.no_grad()
    def set_kv_buffer(
        self,
        layer: Any,
        loc: Int[Tensor, " tokens"],
        cache_k: Float[Tensor, "tokens kv_heads dim"],
        cache_v: Float[Tensor, "tokens kv_heads v_dim"],
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        """Write tokens to their slots, quantised when the pool is fp8. The inputs stay as they are."""
        self.k_buffer[layer.layer_id][loc] = stored(cache_k, self.dtype, k_scale)
        self.v_buffer[layer.layer_id][loc] = stored(cache_v, self.dtype, v_scale)


class MLAKVPool:
    """Latent cache of multi-head latent attention: one [kv_lora_rank | qk_rope_head_dim] row a token."""

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        slots = page_size + -(-size // page_size) * page_size
        shape = (slots, 1, kv_lora_rank + qk_rope_head_dim)
        self.kv_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int) -> Float[Tensor, "slots 1 latent_plus_rope"]:
        return self.kv_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Float[Tensor, "slots 1 latent"]:
        return self.kv_buffer[layer_id][..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def write_slots(self, layer: Any, loc: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """The slots of this layer's buffer that `loc` addresses: `loc` itself."""
        return loc

    @torch.no_grad()
    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc: Int[Tensor, " tokens"],
        cache_k_nope: Float[Tensor, "tokens 1 latent"],
        cache_k_rope: Float[Tensor, "tokens 1 rope"],
    ) -> None:
        """Write [latent | rope] of new tokens to their slots; an fp8 pool divides the whole row by layer.k_scale."""
        row = torch.cat([cache_k_nope, cache_k_rope], dim=-1)
        self.kv_buffer[layer.layer_id][loc] = stored(row, self.dtype, getattr(layer, "k_scale", None))


class SWAKVPool:
    """Two pools behind one: full layers keep every token, window layers only recent ones.

    A request's row holds slots of the full pool. `full_to_swa_index_mapping[full slot]` is the slot of the
    same token in the window pool, or 0 (padding) once the token left the window and was freed there.
    Both pools have the same page size, and a page maps to a page: translate the slot, then divide. So eviction is by
    whole pages: a page of the window pool is freed, and its slots mapped to 0, once all its tokens left the window.
    A model whose layers all have windows has a full pool of layer_num=0, which numbers slots and holds nothing.
    """

    def __init__(
        self,
        *,
        full_pool: MHAKVPool,
        swa_pool: MHAKVPool,
        full_layer_ids: Sequence[int],
        swa_layer_ids: Sequence[int],
    ) -> None:
        if full_pool.page_size != swa_pool.page_size:
            raise BadConfig(
                f"full pool with page size {full_pool.page_size}, window pool with {swa_pool.page_size}; "
                "a page of one must map to a page of the other: use one page size"
            )
        self.full_kv_pool, self.swa_kv_pool = full_pool, swa_pool
        self.size, self.page_size, self.dtype = full_pool.size, full_pool.page_size, full_pool.dtype
        self._place = {layer_id: (full_pool, i) for i, layer_id in enumerate(full_layer_ids)}
        self._place |= {layer_id: (swa_pool, i) for i, layer_id in enumerate(swa_layer_ids)}
        self.full_to_swa_index_mapping: Int32[Tensor, " full_slots"] = torch.zeros(
            full_pool.slots, dtype=torch.int32, device=full_pool.device
        )

    def in_swa_pool(self, layer_id: int) -> bool:
        return self._place[layer_id][0] is self.swa_kv_pool

    def get_key_buffer(self, layer_id: int) -> Float[Tensor, "slots kv_heads dim"]:
        pool, index = self._place[layer_id]
        return pool.k_buffer[index]

    def get_value_buffer(self, layer_id: int) -> Float[Tensor, "slots kv_heads v_dim"]:
        pool, index = self._place[layer_id]
        return pool.v_buffer[index]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def write_slots(self, layer: Any, loc: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """`loc` (slots of the full pool) as slots of the pool this layer lives in."""
        return self.full_to_swa_index_mapping[loc].long() if self.in_swa_pool(layer.layer_id) else loc

    @torch.no_grad()
    def set_kv_buffer(
        self,
        layer: Any,
        loc: Int[Tensor, " tokens"],
        cache_k: Float[Tensor, "tokens kv_heads dim"],
        cache_v: Float[Tensor, "tokens kv_heads v_dim"],
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        """Write tokens to the layer's own pool; `loc` holds slots of the full pool."""
        slots = self.write_slots(layer, loc)
        k_buffer, v_buffer = self.get_kv_buffer(layer.layer_id)
        k_buffer[slots] = stored(cache_k, self.dtype, k_scale)
        v_buffer[slots] = stored(cache_v, self.dtype, v_scale)


def stored(values: Tensor, dtype: torch.dtype, scale: Tensor | float | None) -> Tensor:
    """`values` [tokens, kv_heads, dim] as a pool of `dtype` keeps them: value / scale, clamped, when fp8.

    scale: one factor, or one a key head. A wider cache stores the values unscaled: a checkpoint's k_scale
    belongs to an fp8 cache only.
    """
    if dtype != FP8:
        return values.to(dtype)
    scaled = values.float() / head_scale(scale, values.device)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def head_scale(scale: Tensor | float | None, device: torch.device) -> Float[Tensor, "heads 1"]:
    """A layer's scale (none, one factor, or one a key head) as fp32 that broadcasts over [..., heads, dim]."""
    if isinstance(scale, Tensor):
        return scale.to(device, torch.float32).reshape(-1, 1)
    return torch.full((1, 1), 1.0 if scale is None else scale, device=device)  # filled there: nothing is copied
