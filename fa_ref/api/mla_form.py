"""What `mla_attention` is called with, checked before anything is written, and which form of MLA a batch runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fa_ref.api.batch import ForwardBatch, host_lengths
from fa_ref.api.checks import check_layer_pool
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadConfig
from fa_ref.api.layer import AttentionLayer, layer_kind
from fa_ref.api.mla import MLAProjections, check_absorbed, check_mha_kind, model_inputs
from fa_ref.api.mla_cost import cheaper_form, mla_costs
from fa_ref.api.modes import LayerKind
from fa_ref.api.plan import AttentionPlan
from fa_ref.api.planned import check_planned

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
) -> MLACall:
    """The form to run, and a server's batch and layer as ours. Reads no value of the device.

    Raises BadBatch for operands of other shapes than the layer's, a batch that is not the planned one, an unknown form
    or one the batch cannot run; BadConfig for a layer without latents; UnsupportedByProvider for a layer with a window
    or a chunk in the MHA form.
    """
    if form not in FORMS or type(workspace_tokens) is not int or workspace_tokens < 1:
        raise BadBatch(
            f"form {form!r}, workspace_tokens {workspace_tokens!r}; supported: {', '.join(FORMS)}, an int of at least 1"
        )
    config = getattr(backend, "config", None)
    if config is None or not config.use_mla:
        raise BadConfig(
            f"mla_attention on {backend!r}, which is no backend of an MLA model; pass a FlashAttentionBackend whose "
            "config has use_mla=True"
        )
    plan, batch = backend.forward_metadata, ForwardBatch.of(batch)
    check_planned(plan, batch, config)
    layer = AttentionLayer.of(layer)
    check_absorbed(layer)
    check_layer_pool(layer, config, batch.token_to_kv_pool or config.token_to_kv_pool)
    if not isinstance(projections, MLAProjections):
        raise BadBatch(f"layer {layer.layer_id}: projections is {projections!r}; pass an MLAProjections")
    for name, value in dict(q_nope=q_nope, q_rope=q_rope, latent=latent, k_rope=k_rope).items():
        if value is None:
            raise BadBatch(f"layer {layer.layer_id}: {name} is None; it must be a tensor")
    form = _form(form, plan, batch, layer, projections, workspace_tokens, config)
    inputs = model_inputs(q_nope, q_rope, latent, k_rope, layer, projections, form, plan.num_tokens, config)
    return MLACall(form, batch, layer, inputs)


def _form(
    form: str,
    plan: AttentionPlan,
    batch: ForwardBatch,
    layer: AttentionLayer,
    projections: MLAProjections,
    workspace_tokens: int,
    config: BackendConfig,
) -> str:
    mode = batch.forward_mode
    extends = mode.is_extend_or_draft_extend_or_mixed() and not mode.is_draft_extend()
    missing = [name for name in NEEDED if getattr(batch, name) is None]
    full = layer_kind(layer, config.attention_chunk_size) is LayerKind.FULL
    if form == "absorbed" or (form == "auto" and not (extends and not missing and full)):
        return "absorbed"
    if not extends or missing:
        raise BadBatch(
            f"form {form!r} in {mode.name}{' without ' if missing else ''}{', '.join(missing)}; the MHA form is for "
            f"EXTEND, MIXED and SPLIT_PREFILL, and needs {', '.join(NEEDED)}: use 'absorbed' or 'auto'"
        )
    check_mha_kind(layer, config)
    new, cached = _lengths(batch, plan)
    if form != "auto":
        return form
    heads, nope, latent = projections.w_uk.shape
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


def _lengths(batch: ForwardBatch, plan: AttentionPlan) -> tuple[list[int], list[int]]:
    """New and cached tokens of each request. Raises BadBatch if they are not those that were planned."""
    total, new = (host_lengths(name, getattr(batch, name)) for name in ("seq_lens_cpu", "extend_seq_lens_cpu"))
    keys = None if plan.given is None else plan.given.keys
    counts = (len(total), len(new), sum(new), sum(total))
    planned = (batch.batch_size, batch.batch_size, plan.num_tokens, sum(total) if keys is None else keys)
    if counts != planned or any(n > whole for n, whole in zip(new, total, strict=True)):
        raise BadBatch(
            f"seq_lens_cpu {total} and extend_seq_lens_cpu {new} are not of the planned batch of {plan.num_tokens} new "
            f"tokens and {keys} keys; call init_forward_metadata with every new batch"
        )
    return new, [whole - n for n, whole in zip(new, total, strict=True)]


def prefix_lens(batch: ForwardBatch) -> list[int]:
    """Cached tokens of each request, from the host copies of the other lengths."""
    assert batch.seq_lens_cpu is not None and batch.extend_seq_lens_cpu is not None
    return [int(n) - int(new) for n, new in zip(batch.seq_lens_cpu, batch.extend_seq_lens_cpu, strict=True)]
