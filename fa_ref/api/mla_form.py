"""Which form of MLA a batch runs: by name, or the cheaper one by what both cost."""

from __future__ import annotations

from fa_ref.api.batch import ForwardBatch
from fa_ref.api.errors import BadBatch
from fa_ref.api.layer import AttentionLayer
from fa_ref.api.mla import MLAProjections
from fa_ref.api.mla_cost import cheaper_form, mla_costs

NEEDED = ("extend_seq_lens_cpu", "seq_lens_cpu", "out_cache_loc")  # by the MHA form: the host cuts its chunks
FORMS = ("auto", "absorbed", "chunked", "one_shot")


def mla_form(
    form: str, batch: ForwardBatch, layer: AttentionLayer, projections: MLAProjections, workspace_tokens: int
) -> str:
    """One of "absorbed", "chunked", "one_shot". Raises BadBatch for an unknown name or a form the batch cannot run."""
    if form not in FORMS or workspace_tokens < 1:
        raise BadBatch(f"form {form!r}, workspace_tokens {workspace_tokens}; supported: {', '.join(FORMS)}, 1 or more")
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
    if form != "auto":
        return form
    heads, nope, latent = projections.w_uk.shape
    new, cached = [int(n) for n in batch.extend_seq_lens_cpu or ()], prefix_lens(batch)
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
    """Cached tokens of each request, from the host copies of the other lengths."""
    assert batch.seq_lens_cpu is not None and batch.extend_seq_lens_cpu is not None
    return [int(n) - int(new) for n, new in zip(batch.seq_lens_cpu, batch.extend_seq_lens_cpu, strict=True)]
