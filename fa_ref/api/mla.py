"""Multi-head latent attention: what its layers are given, its two forms, and the chunks of a long prefix.

A token is cached once for all heads, as [latent | rope]. The *absorbed* form attends to these rows as they are: one
key head, whose values are the latent. The *MHA form* expands latents to keys and values of every head first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from fa_ref.api.arguments import starts
from fa_ref.api.batch import ForwardBatch, host_lengths
from fa_ref.api.checks import check_sinks, check_value, reads_values
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadConfig, UnsupportedByProvider
from fa_ref.api.layer import AttentionLayer, layer_kind
from fa_ref.api.modes import LayerKind
from fa_ref.api.plan import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class MLAProjections:
    """The two halves of `kv_b_proj`, from a latent to each head's key (without rope) and value."""

    w_uk: Float[Tensor, "heads nope latent"]  # k_nope = latent @ w_uk[head].T
    w_uv: Float[Tensor, "heads v_dim latent"]  # v = latent @ w_uv[head].T

    def __post_init__(self) -> None:
        shapes = [tuple(w.shape) for w in (self.w_uk, self.w_uv)]
        if any(len(s) != 3 for s in shapes) or shapes[0][::2] != shapes[1][::2]:
            raise BadConfig(
                f"w_uk has shape {shapes[0]}, w_uv {shapes[1]}; they must be [heads, nope, latent] and "
                "[heads, v_dim, latent]"
            )

    @classmethod
    def of_kv_b_proj(cls, weight: Float[Tensor, "rows latent"], heads: int, nope: int) -> MLAProjections:
        """From a checkpoint's kv_b_proj.weight, whose rows are [nope | v_dim] of head after head.

        >>> import torch
        >>> split = MLAProjections.of_kv_b_proj(torch.zeros(2 * (8 + 4), 16), heads=2, nope=8)
        >>> split.w_uk.shape, split.w_uv.shape
        (torch.Size([2, 8, 16]), torch.Size([2, 4, 16]))
        """
        if weight.dim() != 2 or weight.shape[0] % heads or weight.shape[0] // heads <= nope:
            raise BadConfig(
                f"kv_b_proj.weight has shape {tuple(weight.shape)}; for {heads} heads it must be "
                f"[{heads} * ({nope} + v_dim), latent]"
            )
        by_head = weight.view(heads, -1, weight.shape[1])
        return cls(w_uk=by_head[:, :nope].contiguous(), w_uv=by_head[:, nope:].contiguous())

    def mha_layer(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer in the MHA form: as many key heads as query heads, keys of nope + rope."""
        rope = layer.head_dim - layer.v_head_dim
        heads, nope, _ = self.w_uk.shape
        v_dim = self.w_uv.shape[1]
        return replace(layer, tp_k_head_num=heads, tp_v_head_num=heads, head_dim=nope + rope, v_head_dim=v_dim)


def latent_layer(layer: AttentionLayer) -> AttentionLayer:
    """An absorbed layer, whose one scale is k_scale: its values are the front of its keys.

    Raises BadConfig if it is not one: other than one key head, no rope part, or a v_scale of its own.
    """
    check_absorbed(layer)
    v_scale = layer.v_scale
    if v_scale is not None and float(v_scale) != float(1.0 if layer.k_scale is None else layer.k_scale):
        raise BadConfig(
            f"layer {layer.layer_id} has k_scale {layer.k_scale} and v_scale {v_scale}; a cached latent is key and "
            "value at once and has one scale: set k_scale, and v_scale to the same or None"
        )
    return replace(layer, v_scale=layer.k_scale)


def check_absorbed(layer: AttentionLayer) -> None:
    """Raise BadConfig for a layer with other than one key head, or without a rope part behind the latent."""
    if layer.tp_k_head_num != 1 or layer.head_dim <= layer.v_head_dim:
        raise BadConfig(
            f"layer {layer.layer_id} has {layer.tp_k_head_num} key heads of {layer.head_dim} with values of "
            f"{layer.v_head_dim}; an absorbed MLA layer has one key head, of latent + rope, whose values are the "
            "latent (tp_k_head_num=1, head_dim=latent + rope, v_head_dim=latent). A layer of the MHA form, as "
            "MLAProjections.mha_layer makes it, is for forward of a batch with attn_attend_prefix_cache"
        )


class LatentInputs(NamedTuple):
    """A layer's q and k in the absorbed form, split into latent and rope; views of what was passed."""

    q_nope: Float[Tensor, "tokens heads latent"]
    q_rope: Float[Tensor, "tokens heads rope"]
    latent: Float[Tensor, "tokens 1 latent"] | None  # None: the cache holds the new tokens already
    k_rope: Float[Tensor, "tokens 1 rope"] | None


def latent_inputs(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q_rope: Tensor | None,
    k_rope: Tensor | None,
    layer: AttentionLayer,
    tokens: int,
    config: BackendConfig,
    sinks: Tensor | None = None,
) -> LatentInputs:
    """Check what an absorbed layer is given, and split it. Raises BadBatch: see check_latent_inputs."""
    check_latent_inputs(q, k, v, q_rope, k_rope, layer, tokens, config, sinks)
    new = (None, None) if k is None else latent_and_rope(k, k_rope, 1, layer)
    return LatentInputs(*latent_and_rope(q, q_rope, layer.tp_q_head_num, layer), *new)


def check_latent_inputs(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    q_rope: Tensor | None,
    k_rope: Tensor | None,
    layer: AttentionLayer,
    tokens: int,
    config: BackendConfig,
    sinks: Tensor | None = None,
) -> None:
    """Raise BadBatch, before anything is written, unless an absorbed layer can take these.

    q is packed [tokens, heads * (latent + rope)], or q [tokens, heads * latent] with q_rope. k likewise, with one head.
    v is the latent once more, as servers pass it, or None: it is not read.
    """
    latent, rope = layer.v_head_dim, layer.head_dim - layer.v_head_dim
    check_sinks(sinks, layer, config)
    for name, value, part, head_count in (("q", q, q_rope, layer.tp_q_head_num), ("k", k, k_rope, 1)):
        if value is None and name == "k":
            continue
        width = layer.head_dim if part is None else latent
        check_value(layer, name, value, tokens, head_count * width, config)
        if part is not None:
            check_value(layer, f"{name}_rope", part, tokens, head_count * rope, config)
    if k is None and (k_rope is not None or v is not None):
        raise BadBatch(f"layer {layer.layer_id}: k_rope or v without k; pass the latent as k, or none of them")
    if v is not None:
        check_value(layer, "v", v, tokens, latent, config)


def latent_and_rope(packed: Tensor, part: Tensor | None, heads: int, layer: Any) -> tuple[Tensor, Tensor]:
    """q or k of an absorbed layer as [tokens, heads, latent] and [tokens, heads, rope]; views. part: its rope part.

    layer: of a head_dim of latent + rope and a v_head_dim of latent.
    """
    latent, rope = layer.v_head_dim, layer.head_dim - layer.v_head_dim
    if part is not None:
        return packed.reshape(-1, heads, latent), part.reshape(-1, heads, rope)
    nope, rotated = packed.reshape(-1, heads, latent + rope).split_with_sizes((latent, rope), -1)
    return nope, rotated


def model_inputs(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    layer: AttentionLayer,
    projections: MLAProjections,
    form: str,
    tokens: int,
    config: BackendConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What mla_attention is given, in the shapes of its docstring; queries may be flat, rows may have a head axis.

    layer: the absorbed one, checked before. Raises BadConfig for projections of another layer or dtype; BadBatch for
    the inputs, before anything is written. In the absorbed form all but q_nope are left to `forward`, which checks them
    and takes either shape.
    """
    heads, nope, latent_dim = projections.w_uk.shape
    rope = layer.head_dim - layer.v_head_dim
    if (heads, latent_dim) != (layer.tp_q_head_num, layer.v_head_dim):
        raise BadConfig(
            f"layer {layer.layer_id} has {layer.tp_q_head_num} query heads and a latent of {layer.v_head_dim}, its "
            f"projections {heads} and {latent_dim}; make both for the heads of this rank, head_dim=latent + rope and "
            "v_head_dim=latent"
        )
    for name, weight in (("w_uk", projections.w_uk), ("w_uv", projections.w_uv)):
        if weight.dtype != config.dtype or weight.device.type != torch.device(config.device).type:
            raise BadConfig(
                f"layer {layer.layer_id}: {name} is {weight.dtype} on {weight.device}; this backend runs "
                f"{config.dtype} on {config.device}: convert the projections once, when they are made"
            )
    check_value(layer, "q_nope", q_nope, tokens, heads * nope, config)
    q_nope = q_nope.reshape(tokens, heads, nope)
    if form == "absorbed":
        return q_nope, q_rope, latent, k_rope
    check_value(layer, "q_rope", q_rope, tokens, heads * rope, config)
    check_value(layer, "latent", latent, tokens, latent_dim, config)
    check_value(layer, "k_rope", k_rope, tokens, rope, config)
    q_rope = q_rope.reshape(tokens, heads, rope)
    return q_nope, q_rope, latent.reshape(tokens, latent_dim), k_rope.reshape(tokens, rope)


def refuse_rope(q_rope: object, k_rope: object) -> None:
    """Raise BadBatch if a layer that attends to no latents was given rope parts."""
    if q_rope is not None or k_rope is not None:
        raise BadBatch(
            "q_rope or k_rope without use_mla, or in the MHA form; they are parts of an absorbed MLA layer: rotate q "
            "and k, and pass them whole"
        )


# ---- the MHA form ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefixChunks:
    """Cached prefixes cut into chunks of at most `workspace_tokens` keys, for the MHA form. Made by `chunk_prefix`."""

    starts: Int32[Tensor, "chunks requests"]  # first logical position of each request's part of a chunk
    seq_lens: Int32[Tensor, "chunks requests"]  # its keys; 0 where a request has none in this chunk
    cu_seq_lens: Int32[Tensor, "chunks requests_plus_1"]  # their running sum
    max_seq_lens: tuple[int, ...]  # the longest part of each chunk
    num_tokens: tuple[int, ...]  # keys of each chunk

    def __len__(self) -> int:
        return len(self.num_tokens)

    def batch(self, batch: ForwardBatch, chunk: int) -> ForwardBatch:
        """The batch that attends to one chunk, given that chunk's expanded keys and values."""
        return replace(
            batch,
            attn_attend_prefix_cache=True,
            mha_return_lse=True,
            prefix_chunk_idx=chunk,
            prefix_chunk_cu_seq_lens=self.cu_seq_lens,
            prefix_chunk_max_seq_lens=self.max_seq_lens,
            prefix_chunk_num_tokens=self.num_tokens,
        )


def chunk_prefix(prefix_lens: Sequence[int], workspace_tokens: int, device: torch.device | str = "cpu") -> PrefixChunks:
    """Cut the requests' prefixes, laid end to end, every `workspace_tokens` keys.

    Layers of one batch share the result: read it only.
    Every chunk but the last is full, so there are as few as the workspace allows; a request may have no key in one.

    >>> chunks = chunk_prefix([3, 0, 6], workspace_tokens=4)
    >>> chunks.seq_lens.tolist()
    [[3, 0, 1], [0, 0, 4], [0, 0, 1]]
    >>> chunks.starts.tolist()
    [[0, 0, 0], [3, 0, 1], [3, 0, 5]]
    """
    return _chunks(tuple(int(n) for n in prefix_lens), workspace_tokens, torch.device(device))


@functools.lru_cache(maxsize=8)  # the layers of a batch ask for the same, and the copy to a device waits for it
def _chunks(prefix_lens: tuple[int, ...], workspace_tokens: int, device: torch.device) -> PrefixChunks:
    if workspace_tokens < 1 or any(n < 0 for n in prefix_lens):
        raise BadBatch(
            f"workspace_tokens is {workspace_tokens}, prefix_lens {list(prefix_lens)}; a chunk holds at least one key, "
            "a prefix at least 0"
        )
    lens = torch.tensor(prefix_lens, dtype=torch.int64)
    ends = torch.cumsum(lens, dim=0)
    total = int(ends[-1]) if len(lens) else 0
    cuts = torch.arange(-(-total // workspace_tokens) + 1)[:, None] * workspace_tokens
    reached = torch.minimum((cuts - (ends - lens)).clamp(min=0), lens)  # of each request, at each cut
    seq_lens = reached.diff(dim=0)
    cu = torch.nn.functional.pad(torch.cumsum(seq_lens, dim=1), (1, 0))
    return PrefixChunks(
        starts=reached[:-1].to(device, torch.int32),
        seq_lens=seq_lens.to(device, torch.int32),
        cu_seq_lens=cu.to(device, torch.int32),
        max_seq_lens=tuple(row.max().item() for row in seq_lens),  # type: ignore[arg-type]
        num_tokens=tuple(cu[:, -1].tolist()),
    )


def check_mha_kind(layer: AttentionLayer, config: BackendConfig) -> None:
    """Raise UnsupportedByProvider for a layer that does not see all keys: chunks do not say where a key is."""
    kind = layer_kind(layer, config.attention_chunk_size)
    if kind is not LayerKind.FULL:
        raise UnsupportedByProvider(
            f"layer {layer.layer_id} is {kind.name}; the MHA form of MLA is for FULL layers: use the absorbed form, "
            "with attn_attend_prefix_cache=None"
        )


def is_mha_form(batch: ForwardBatch, plan: AttentionPlan) -> bool:
    """Whether a layer of this batch brings expanded keys and values. Drafts are always absorbed.

    Raises BadBatch if it does not, but asks for the LSE: only the MHA form has a caller who merges.
    """
    attend = batch.attn_attend_prefix_cache
    mha = attend is not None and not (plan.forward_mode.is_target_verify() or plan.forward_mode.is_draft_extend())
    if not mha and batch.mha_return_lse:
        raise BadBatch(
            f"mha_return_lse=True in {plan.forward_mode.name} with attn_attend_prefix_cache={attend}; only the MHA "
            "form of MLA returns its LSE: set attn_attend_prefix_cache there, or mha_return_lse to False"
        )
    return mha


def mha_call(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: AttentionLayer,
    batch: ForwardBatch,
    plan: AttentionPlan,
    config: BackendConfig,
    sinks: Tensor | None,
    save_kv_cache: bool,
) -> dict[str, Any]:
    """Arguments of flash_attn_varlen_func for a layer in the MHA form: what the batch says its keys are.

    attn_attend_prefix_cache False: the new tokens, causal; with mha_one_shot all keys of the requests, causal. True:
    the chunk `prefix_chunk_idx` of their prefixes, not causal.
    Raises BadBatch for a batch that does not say, or keys of another number.
    """
    if plan.given is None:
        raise BadBatch(
            f"attn_attend_prefix_cache={batch.attn_attend_prefix_cache} in {plan.forward_mode.name} with use_mla="
            f"{config.use_mla}; the MHA form is for extend modes of an MLA model: leave the field None"
        )
    if k is None or v is None or save_kv_cache:
        raise BadBatch(
            f"layer {layer.layer_id} in the MHA form needs expanded k and v, and save_kv_cache=False: the cache holds "
            "latents, which set_mla_kv_buffer of the pool writes"
        )
    check_mha_kind(layer, config)
    given = plan.given
    check_sinks(sinks, layer, config)
    check_value(layer, "q", q, plan.num_tokens, layer.tp_q_head_num * layer.head_dim, config)
    keys: int | None = plan.num_tokens
    cu_seqlens_k, max_seqlen_k = given.cu_seqlens_q, given.max_seqlen_q
    if batch.attn_attend_prefix_cache:
        cu_seqlens_k, max_seqlen_k, keys = _chunk(batch, config)
    elif batch.mha_one_shot:
        cu_seqlens_k, max_seqlen_k, keys = given.cu_seqlens_k, given.max_seqlen_k, given.keys
    keys = k.shape[:1].numel() if keys is None and isinstance(k, Tensor) else keys or 0
    check_value(layer, "k", k, keys, layer.tp_k_head_num * layer.head_dim, config, "keys here")
    check_value(layer, "v", v, keys, layer.tp_v_head_num * layer.v_head_dim, config, "keys here")
    if reads_values(config):
        _check_ends(cu_seqlens_k, max_seqlen_k, keys)
    return dict(
        q=q.reshape(-1, layer.tp_q_head_num, layer.head_dim),
        k=k.reshape(-1, layer.tp_k_head_num, layer.head_dim),
        v=v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim),
        cu_seqlens_q=given.cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=given.max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=not batch.attn_attend_prefix_cache,
        softmax_scale=layer.scaling,
        softcap=layer.logit_cap,
        sinks=None if batch.attn_attend_prefix_cache else sinks,  # of several calls that are merged, one takes them
    )


def _chunk(batch: ForwardBatch, config: BackendConfig) -> tuple[Tensor, int, int | None]:
    """cu_seqlens_k, max_seqlen_k and the number of keys, where the batch says it, of its current chunk."""
    index, cu = batch.prefix_chunk_idx, batch.prefix_chunk_cu_seq_lens
    if not isinstance(cu, Tensor) or cu.dim() != 2 or not isinstance(index, int) or not 0 <= index < len(cu):
        raise BadBatch(
            f"attn_attend_prefix_cache=True with prefix_chunk_idx {index!r} and prefix_chunk_cu_seq_lens "
            f"{tuple(cu.shape) if isinstance(cu, Tensor) else repr(cu)}; pass prefix_chunk_idx, "
            "prefix_chunk_cu_seq_lens [chunks, requests + 1] and prefix_chunk_max_seq_lens, as chunk_prefix makes them"
        )
    device = torch.device(config.device).type
    if cu.shape[1] != batch.batch_size + 1 or cu.dtype != torch.int32 or cu.device.type != device:
        raise BadBatch(
            f"prefix_chunk_cu_seq_lens is {cu.dtype} of shape {tuple(cu.shape)} on {cu.device}; it must be int32 of "
            f"shape ({len(cu)}, {batch.batch_size + 1}) on {device}"
        )
    longest, counts = batch.prefix_chunk_max_seq_lens, batch.prefix_chunk_num_tokens
    for name, numbers in (("prefix_chunk_max_seq_lens", longest), ("prefix_chunk_num_tokens", counts)):
        if numbers is None and numbers is counts:
            continue
        if len(host_lengths(name, numbers)) != len(cu):
            raise BadBatch(f"{name} is {numbers}; it must hold a number for each of the {len(cu)} chunks")
    return cu[index].contiguous(), int(longest[index]), None if counts is None else int(counts[index])  # type: ignore[index]


def _check_ends(cu_seqlens_k: Tensor, max_seqlen_k: int, keys: int) -> None:
    """Raise BadBatch unless the requests' keys are those given, and none has more than max_seqlen_k. Reads values."""
    ends = starts("cu_seqlens_k", cu_seqlens_k, keys)
    longest = max((b - a for a, b in pairwise(ends)), default=0)
    if ends[-1] != keys or longest > max_seqlen_k:
        raise BadBatch(
            f"{keys} keys are given, the requests have {ends[-1]} (cu_seqlens_k {ends}), at most {max_seqlen_k} each; "
            "pass every request's keys, one after another, and the longest in prefix_chunk_max_seq_lens"
        )
