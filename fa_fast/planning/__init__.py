"""Planning on the device: the same plans as fa_ref.planning, from a few small kernels and no host round trip."""

from __future__ import annotations

from typing import Any

from fa_fast.planning.cascade import cascade
from fa_fast.planning.decode import plan_decode
from fa_fast.planning.draft import plan_draft, plan_draft_steps
from fa_fast.planning.extend import given_keys, plan_extend
from fa_fast.planning.verify import plan_verify
from fa_ref.api import AttentionPass, AttentionPlan, BackendConfig, ForwardBatch, LayerKind, TreePass
from fa_ref.api.bounds import shared_prefix
from fa_ref.api.checks import check_batch, check_step, new_tokens, values_to_compare
from fa_ref.api.support import layer_kinds, refuse_unplanned


def plan_batch(batch: Any, config: BackendConfig, step: int = 0) -> AttentionPlan:
    """The kernel calls of a batch, for every kind of layer that `config` has; `step` of draft decoding, from 0.

    Reads host copies of lengths where the batch has them and static bounds where not; never synchronises, unless
    FA_CHECK=1. Errors are those of the twin in fa_ref, which explains the plan.
    """
    batch = ForwardBatch.of(batch)
    refuse_unplanned(batch)
    check_batch(batch, config)
    check_step(batch, step)
    kinds, refused = layer_kinds(config)
    passes = {kind: _plan_kind(batch, config, kind, step) for kind in kinds}
    saving, extends = shared_prefix(batch, config), batch.forward_mode.is_extend_or_draft_extend_or_mixed()
    if saving is not None:  # full layers only: windows and chunks never look that far back
        (whole,) = passes[LayerKind.FULL]
        assert isinstance(whole, AttentionPass)
        passes[LayerKind.FULL] = cascade(whole, saving.tokens, new_tokens(batch))
    return AttentionPlan(
        forward_mode=batch.forward_mode,
        num_tokens=new_tokens(batch),
        passes=passes,
        refused=refused,
        shared_prefix=saving,
        given=given_keys(batch, config) if config.use_mla and extends else None,
        batch_size=batch.batch_size,
        values=values_to_compare(batch),
    )


def plan_steps(batch: Any, config: BackendConfig, steps: int) -> list[AttentionPlan]:
    """The plans of the first `steps` steps of draft decoding, made together so that they share page tables."""
    batch = ForwardBatch.of(batch)
    refuse_unplanned(batch)
    check_batch(batch, config)
    check_step(batch, steps - 1)
    kinds, refused = layer_kinds(config)
    by_kind = {kind: plan_draft_steps(batch, config, kind, steps) for kind in kinds}
    return [
        AttentionPlan(
            forward_mode=batch.forward_mode,
            num_tokens=new_tokens(batch),
            passes={kind: plans[step] for kind, plans in by_kind.items()},
            refused=refused,
            batch_size=batch.batch_size,
            values=values_to_compare(batch),
        )
        for step in range(steps)
    ]


def _plan_kind(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int
) -> tuple[AttentionPass | TreePass, ...]:
    mode = batch.forward_mode
    if mode.is_idle():
        return ()
    if mode.is_target_verify():
        return plan_verify(batch, config, kind)
    if mode.is_decode():
        return plan_decode(batch, config, kind) if batch.spec_info is None else plan_draft(batch, config, kind, step)
    return plan_extend(batch, config, kind)


__all__ = ["plan_batch", "plan_steps"]
