"""What a backend holds so that a layer's call makes nothing anew: layers as the kernels see them, and steps in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_fast.write import Write, writer
from fa_ref.api import AttentionLayer, AttentionPlan, BackendConfig, BadBatch, ForwardBatch, LayerKind
from fa_ref.api.bounds import key_rows, slots_to_write
from fa_ref.api.checks import check_cut
from fa_ref.api.encoder import check_encoder_writes
from fa_ref.api.planned import PlannedBatch, Snapshot
from fa_ref.api.pools import FP8, head_scale

_LAYER_FIELDS = (*(f.name for f in fields(AttentionLayer)), "attn_type")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What the kernels need to know of a layer; layers that share it share the prepared calls of a step."""

    kind: LayerKind
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window_left: int
    softcap: float
    latents: bool  # a cached row is [latent | rope], and the latent is the value


class KnownLayer:
    """A server's layer, checked against its pool, with its buffers as the kernels take them."""

    def __init__(self, given: Any, layer: AttentionLayer, geometry: Geometry, pool: Any, sinks: bool) -> None:
        self.layer, self.geometry, self.scaling = layer, geometry, float(layer.scaling)
        self._given, self._pool, self._sinks = given, pool, sinks
        self._frozen, self._fields = isinstance(given, AttentionLayer), Snapshot(given, _LAYER_FIELDS)
        self._read = pool.get_kv_buffer
        if geometry.latents and hasattr(pool, "get_key_buffer"):  # the latents are cut from the keys here, once
            self._read = lambda layer_id: (pool.get_key_buffer(layer_id),)
        self._buffers: tuple[Tensor, ...] = ()

    def is_for(self, given: Any, pool: Any, sinks: bool) -> bool:
        """Whether these are the layer and pool that were checked. A server may change its layer object in place."""
        same = (given is self._given and self._frozen) or self._fields.holds(given)
        return same and pool is self._pool and sinks == self._sinks

    def refresh(self) -> None:
        """Ask the pool for the layer's buffers: it may wait there until they are loaded, or have others by now."""
        found: Any = self._read(self.layer.layer_id)
        if self._buffers and all(map(is_, found, self._buffers)):
            return
        self.keys = found[0]
        latent = self.geometry.v_head_dim
        self.values = self.keys[..., :latent] if self.geometry.latents else found[1]
        self.fp8 = self.keys.dtype == FP8
        self._paged: dict[int, tuple[Tensor, Tensor]] = {}
        self._scales: dict[str, Tensor] = {}
        self.write: Write = writer(self._pool, self._given, self.keys, self.values, self.scale)
        self._buffers = tuple(found)

    def paged(self, page_size: int) -> tuple[Tensor, Tensor]:
        """The caches [pages, page_size, kv_heads, dim] of keys and values; of latents the rope and the latent part."""
        if page_size not in self._paged:
            of = self.geometry
            keys = self.keys.view(-1, page_size, of.kv_heads, of.head_dim)
            if of.latents:
                self._paged[page_size] = keys[..., of.v_head_dim :], keys[..., : of.v_head_dim]
            else:
                self._paged[page_size] = keys, self.values.view(-1, page_size, of.kv_heads, of.v_head_dim)
        return self._paged[page_size]

    def scale(self, name: str) -> Tensor:
        """k_scale or v_scale in fp32 [heads, 1]. Kept, unless it is a copy of a tensor that may change in place."""
        if name in self._scales:
            return self._scales[name]
        scale: Any = getattr(self.layer, name)
        found = head_scale(scale, self.keys.device)
        own = not isinstance(scale, Tensor) or found.data_ptr() == scale.data_ptr()
        if own and not capturing(self.keys):  # a graph's memory holds nothing until it is replayed
            self._scales[name] = found
        return found


def capturing(x: Tensor) -> bool:
    """Whether what is launched now is recorded in a graph."""
    if x.is_cuda:
        return torch.cuda.is_current_stream_capturing()
    return x.is_xpu and getattr(torch.xpu, "is_current_stream_capturing", bool)()  # torch < 2.11 has no XPU graphs


class Operands(NamedTuple):
    """What the passes of one layer share."""

    q: Tensor  # [tokens, heads, head_dim]; absorbed MLA: its rope part
    qv: Tensor | None  # absorbed MLA: [tokens, heads, latent], what meets the latent
    k: Tensor | None  # new keys [tokens, kv_heads, head_dim], for a pass whose keys are all new; absorbed MLA: None
    v: Tensor | None  # new values
    sinks: Tensor | None
    known: KnownLayer

    def rows(self, index: Tensor) -> Operands:
        """The operands of some query rows; what is new in the cache is then read from there."""
        return self._replace(q=self.q[index], qv=None if self.qv is None else self.qv[index], k=None, v=None)


class Shared:
    """What the layers of one geometry share in a step, checked at the first of them."""

    def __init__(self, step: Step, known: KnownLayer) -> None:
        self._step, self.kind = step, known.geometry.kind
        self.passes = step.plan.for_kind(self.kind)
        for one in self.passes:
            check_cut(one, known.layer)
        self.merges = len(self.passes) > 1 and self.passes[0].token_index is None
        self.one_query = any(getattr(one, "max_seqlen_q", 0) == 1 for one in self.passes)
        plain = step.config.dtype == step.config.kv_cache_dtype and not known.geometry.latents
        self.attends_to_new = plain and any(getattr(one, "keys_are_new", False) for one in self.passes)
        self.key_rows = key_rows(step.batch, self.kind, step.plan.num_tokens)
        self.accepted: list[Any] | None = None  # `looks` of the inputs that were checked
        self._slots: Tensor | None = None

    def slots(self, draft_step: int) -> Tensor:
        """Where new keys go, of the full pool."""
        if self._slots is None:
            step = self._step
            if self.kind is LayerKind.CROSS:
                check_encoder_writes(step.batch, step.config)
            self._slots = slots_to_write(step.batch, step.config, draft_step, step.plan.num_tokens, self.kind)
        return self._slots


class Step(PlannedBatch):
    """A plan in use: the batch that layers bring with it, and the kernel calls that they have prepared."""

    def __init__(self, plan: AttentionPlan, config: BackendConfig, read: Callable[[Any], ForwardBatch]) -> None:
        super().__init__(plan, config, read)
        self.calls: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._shared: dict[int, Shared] = {}
        self._only: Any = None

    def only_for(self, given: Any) -> None:
        """Take no other object for the planned batch: its values are on the device, and cannot be compared."""
        self._only = given

    def of(self, given: Any) -> ForwardBatch:
        if self._only is not None and given is not self._only:
            raise BadBatch(
                "the current plan is that of a graph, for its own batch; call init_forward_metadata(forward_batch) "
                "before forward"
            )
        return super().of(given)

    def remember(self, given: Any, batch: ForwardBatch) -> None:
        super().remember(given, batch)
        self.pool = batch.token_to_kv_pool or self.config.token_to_kv_pool
        self._shared.clear()

    def shared(self, known: KnownLayer) -> Shared:
        key = id(known.geometry)  # a backend has one object of each geometry
        if key not in self._shared:
            self._shared[key] = Shared(self, known)
        return self._shared[key]


def looks(*inputs: Any) -> list[Any]:
    """All that the checks of a layer's inputs look at: inputs that look like others that passed need no checks."""
    try:
        return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    except AttributeError:  # of what is no tensor, and looks like nothing else
        return [object()]
