"""What `mla_attention` is called with, checked before anything is written, and which form of MLA a batch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fa_ref.api.batch import ForwardBatch, host_lengths
from fa_ref.api.checks import check_layer_pool
from fa_ref.api.errors import BadBatch, BadConfig, UnsupportedByProvider
from fa_ref.api.layer import AttentionLayer, layer_kind
from fa_ref.api.mla import MLAProjections, check_absorbed, check_mha_kind, model_inputs
from fa_ref.api.mla_cost import cheaper_form, mla_costs
from fa_ref.api.modes import LayerKind
from fa_ref.api.plan import AttentionPlan

NEEDED = ("extend_seq_lens_cpu", "seq_lens_cpu", "out_cache_loc")  # by the MHA form: the host cuts its chunks
FORMS = ("auto", "absorbed", "chunked", "one_shot")


class MLACall(NamedTuple):
    """A call of `mla_attention` that can run."""

    form: str  # "absorbed", "chunked" or "one_shot"
    batch: ForwardBatch  # the planned one
    layer: AttentionLayer  # the absorbed one
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # q_nope, q_rope, latent, k_rope in the shapes of the docstring


def mla_call(
    backend: Any,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    layer: Any,
    batch: Any,
    projections: MLAProjections,
    form: str,
    workspace_tokens: int,
    require: Callable[[str, AttentionLayer], None] = lambda form, layer: None,
) -> MLACall:
    """The form to run, and a server's batch and layer as ours. Reads no value of the device.

    require: raises UnsupportedByProvider for an MHA form, and the layer in it, that the kernels cannot run; "auto" is
    the absorbed form then.

    Raises BadBatch for operands of other shapes than the layer's, a batch that is not the planned one, an unknown form
    or one the batch cannot run; BadConfig for a layer without latents; UnsupportedByProvider for a layer with a window
    or a chunk in the MHA form.
    """
    config = getattr(backend, "config", None)
    if config is None or not config.use_mla:
        raise BadConfig(
            f"mla_attention on {backend!r}, which is no backend of an MLA model; pass a FlashAttentionBackend whose "
            "config has use_mla=True"
        )
    plan, batch = backend.forward_metadata, backend.planned_batch(batch)
    layer = AttentionLayer.of(layer)
    check_absorbed(layer)
    check_layer_pool(layer, config, batch.token_to_kv_pool or config.token_to_kv_pool)
    if not isinstance(projections, MLAProjections):
        raise BadBatch(f"layer {layer.layer_id}: projections is {projections!r}; pass an MLAProjections")
    for name, value in dict(q_nope=q_nope, q_rope=q_rope, latent=latent, k_rope=k_rope).items():
        if value is None:
            raise BadBatch(f"layer {layer.layer_id}: {name} is None; it must be a tensor")
    full = layer_kind(layer, config.attention_chunk_size) is LayerKind.FULL
    asked = "absorbed" if form == "auto" and not full else form
    form = mla_form(asked, batch, layer, projections, workspace_tokens)
    if form != "absorbed":
        check_mha_kind(layer, config)
        _check_lengths(batch, plan)
    inputs = model_inputs(q_nope, q_rope, latent, k_rope, layer, projections, form, plan.num_tokens, config)
    try:
        if form != "absorbed":
            require(form, projections.mha_layer(layer))
    except UnsupportedByProvider:
        if asked != "auto":
            raise
        form = "absorbed"
    return MLACall(form, batch, layer, inputs)


def mla_form(
    form: str, batch: ForwardBatch, layer: AttentionLayer, projections: MLAProjections, workspace_tokens: int
) -> str:
    """One of "absorbed", "chunked", "one_shot". Raises BadBatch for an unknown name or a form the batch cannot run."""
    if form not in FORMS or type(workspace_tokens) is not int or workspace_tokens < 1:
        raise BadBatch(
            f"form {form!r}, workspace_tokens {workspace_tokens!r}; supported: {', '.join(FORMS)}, an int of at least 1"
        )
    mode = batch.forward_mode
    extends = mode.is_extend_or_draft_extend_or_mixed() and not mode.is_draft_extend()
    missing = [name for name in NEEDED if getattr(batch, name) is None]
    if form == "absorbed" or (form == "auto" and (not extends or missing)):
        return "absorbed"
    if not extends or missing:
        raise BadBatch(
            f"form {form!r} in {mode.name}{' without ' if missing else ''}{', '.join(missing)}; the MHA form is for "
            f"EXTEND, MIXED and SPLIT_PREFILL, and needs {', '.join(NEEDED)}: use 'absorbed' or 'auto'"
        )
    cached = prefix_lens(batch)
    if form != "auto":
        return form
    heads, nope, latent = projections.w_uk.shape
    new = [int(n) for n in batch.extend_seq_lens_cpu or ()]
    costs = mla_costs(
        new,
        cached,
        heads=heads,
        nope=nope,
        rope=layer.head_dim - layer.v_head_dim,
        latent=latent,
        v_dim=projections.w_uv.shape[1],
        itemsize=projections.w_uk.element_size(),
    )
    if cheaper_form(costs) == "absorbed":
        return "absorbed"
    return "one_shot" if any(cached) and sum(new) + sum(cached) <= workspace_tokens else "chunked"


def prefix_lens(batch: ForwardBatch) -> list[int]:
    """Cached tokens of each request, from the host copies of the other lengths; BadBatch if these contradict."""
    total, new = (host_lengths(name, getattr(batch, name)) for name in ("seq_lens_cpu", "extend_seq_lens_cpu"))
    if len(total) != len(new) or any(n > whole for n, whole in zip(new, total, strict=True)):
        raise BadBatch(
            f"extend_seq_lens_cpu is {new}, seq_lens_cpu {total}; of each request one, and no more new tokens than all"
        )
    return [whole - n for n, whole in zip(new, total, strict=True)]


def _check_lengths(batch: ForwardBatch, plan: AttentionPlan) -> None:
    """Raise BadBatch unless the host lengths, which chunks are cut by, are those that were planned."""
    total, new = (host_lengths(name, getattr(batch, name)) for name in ("seq_lens_cpu", "extend_seq_lens_cpu"))
    keys = None if plan.given is None else plan.given.keys
    if len(total) != batch.batch_size or sum(new) != plan.num_tokens or keys not in (None, sum(total)):
        raise BadBatch(
            f"seq_lens_cpu {total} and extend_seq_lens_cpu {new} are not of the planned batch of {batch.batch_size} "
            f"requests, {plan.num_tokens} new tokens and {keys} keys; call init_forward_metadata with every new batch"
        )
