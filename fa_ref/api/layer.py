"""One attention layer as a backend sees it: head geometry, scaling, and what it may look at."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch

from fa_ref.api.errors import BadConfig, UnsupportedByProvider
from fa_ref.api.modes import LayerKind

_TYPES: list[tuple[str, Any, str]] = [
    ("layer_id tp_q_head_num tp_k_head_num tp_v_head_num head_dim v_head_dim", Integral, "an int"),
    ("scaling logit_cap", Real, "a number"),
    ("sliding_window_size", Integral | None, "an int or None"),
    ("use_irope is_cross_attention", Integral, "True or False"),
    ("k_scale v_scale", Real | torch.Tensor | None, "a number, a tensor or None"),
]


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """Geometry and mask of one attention layer; a server's own layer object with these names works too.

    >>> layer = AttentionLayer(layer_id=0, tp_q_head_num=8, tp_k_head_num=2, head_dim=64, scaling=0.125)
    >>> layer.v_head_dim, layer_kind(layer).name
    (64, 'FULL')
    """

    layer_id: int  # which buffer of the pool
    tp_q_head_num: int  # query heads on this rank
    tp_k_head_num: int  # key heads on this rank; divides tp_q_head_num; absorbed MLA: 1
    tp_v_head_num: int = 0  # 0: as many as key heads
    head_dim: int  # of q and k; absorbed MLA: latent + rope
    v_head_dim: int = 0  # of v and the output; 0: head_dim; absorbed MLA: latent
    scaling: float  # softmax scale; MLA: (nope + rope) ** -0.5 in every form
    logit_cap: float = 0.0  # softcap; 0 none
    sliding_window_size: int | None = -1  # keys before the query that stay visible, W - 1; -1 or None: none
    use_irope: bool = False  # chunked local attention, where the config has a chunk size
    is_cross_attention: bool = False  # keys are the encoder's
    k_scale: torch.Tensor | float | None = None  # stored key = key / k_scale, fp8 caches only
    v_scale: torch.Tensor | float | None = None  # stored value = value / v_scale, fp8 caches only

    def __post_init__(self) -> None:
        object.__setattr__(self, "tp_v_head_num", self.tp_k_head_num if self.tp_v_head_num == 0 else self.tp_v_head_num)
        object.__setattr__(self, "v_head_dim", self.head_dim if self.v_head_dim == 0 else self.v_head_dim)
        for names, kinds, meaning in _TYPES:
            for name in names.split():
                if not isinstance(getattr(self, name), kinds):
                    raise BadConfig(f"layer {self.layer_id}: {name} is {getattr(self, name)!r}; it must be {meaning}")
        for name in ("tp_q_head_num", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise BadConfig(f"layer {self.layer_id}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.tp_k_head_num < 1 or self.tp_q_head_num % self.tp_k_head_num:
            raise BadConfig(
                f"layer {self.layer_id}: {self.tp_q_head_num} query heads over {self.tp_k_head_num} key "
                "heads; the number of query heads must be a multiple of the number of key heads"
            )
        if self.tp_v_head_num != self.tp_k_head_num:
            raise BadConfig(
                f"layer {self.layer_id}: {self.tp_k_head_num} key heads but {self.tp_v_head_num} value heads; "
                "they must be equal"
            )
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if isinstance(scale, torch.Tensor) and scale.numel() not in (1, self.tp_k_head_num):
                raise BadConfig(
                    f"layer {self.layer_id}: {name} has {scale.numel()} entries for {self.tp_k_head_num} key heads; "
                    "pass one factor, or one a key head"
                )
        layer_kind(self)

    @classmethod
    def of(cls, layer: Any) -> AttentionLayer:
        """This layer as an AttentionLayer; fields that a server's object lacks, or has as None, keep their defaults."""
        if isinstance(layer, cls):
            return layer
        found = ((f.name, getattr(layer, f.name, None)) for f in fields(cls))
        given = {name: value for name, value in found if value is not None}
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in given]
        if missing:
            raise BadConfig(f"a {type(layer).__name__} without {', '.join(missing)}; a layer needs these fields")
        kind = getattr(layer, "attn_type", None)
        if kind is not None and str(getattr(kind, "name", kind)).upper() != "DECODER":
            raise UnsupportedByProvider(
                f"layer {layer.layer_id} has attn_type {kind}; supported: DECODER, whose queries see no later key"
            )
        return cls(**given)


def window_left(layer: Any) -> int:
    """Keys before the query that stay visible (both ends inclusive, FA's `window_size[0]`); -1 for all."""
    size = getattr(layer, "sliding_window_size", None)
    return -1 if size is None or size < 0 else int(size)


def layer_kind(layer: Any, attention_chunk_size: int | None = None) -> LayerKind:
    """The LayerKind of a layer; LOCAL needs both `use_irope` and a chunk size.

    Raises BadConfig for a window on a cross-attention layer or on a chunked local layer.
    """
    windowed = window_left(layer) >= 0
    local = bool(getattr(layer, "use_irope", False)) and attention_chunk_size is not None
    cross = bool(getattr(layer, "is_cross_attention", False))
    if windowed and cross:
        raise BadConfig(
            f"layer {layer.layer_id} asks for a sliding window of {window_left(layer)} on cross attention; "
            "encoder keys have no distance to a text query: set sliding_window_size=-1"
        )
    if windowed and local:
        raise BadConfig(
            f"layer {layer.layer_id} asks for a sliding window and chunked local attention at once; "
            "set sliding_window_size=-1 or use_irope=False"
        )
    if cross:
        return LayerKind.CROSS
    if local:
        return LayerKind.LOCAL
    return LayerKind.SLIDING if windowed else LayerKind.FULL


def window_of_tokens(tokens: int) -> int:
    """`sliding_window_size` of a window of W tokens that counts the query itself: W - 1.

    >>> window_of_tokens(4)  # query 10 sees keys 7, 8, 9, 10
    3
    """
    if tokens < 1:
        raise BadConfig(f"a window of {tokens} tokens sees nothing; it must hold at least the query itself")
    return tokens - 1
