"""Planning on the device: the same plans as fa_ref.planning, from a few small kernels and no host round trip."""

from __future__ import annotations

from typing import Any

from fa_fast.planning.cross import plan_cross
from fa_fast.planning.decode import plan_decode
from fa_fast.planning.draft import plan_draft, plan_draft_steps
from fa_fast.planning.extend import given_keys, plan_extend
from fa_fast.planning.verify import plan_verify
from fa_ref.api import AttentionPass, AttentionPlan, BackendConfig, ForwardBatch, LayerKind, TreePass
from fa_ref.api.bounds import cascade, shared_prefix
from fa_ref.api.checks import new_tokens
from fa_ref.api.encoder import after_encoder
from fa_ref.api.planned import checked_batch, plan_of
from fa_ref.api.support import layer_kinds


def plan_batch(batch: Any, config: BackendConfig, step: int = 0) -> AttentionPlan:
    """The kernel calls of a batch, for every kind of layer that `config` has; `step` of draft decoding, from 0.

    Reads host copies of lengths where the batch has them and static bounds where not; never synchronises, unless
    FA_CHECK=1. Errors are those of the twin in fa_ref, which explains the plan.
    """
    batch, text = checked_batch(batch, config, step)
    return _planned(batch, text, config, step)


def plan_unchecked(batch: ForwardBatch, config: BackendConfig, step: int = 0) -> AttentionPlan:
    """plan_batch of a batch that was checked before it came here: device work only, so that a graph can record it."""
    return _planned(batch, _text(batch, config), config, step, recorded=True)


def _text(batch: ForwardBatch, config: BackendConfig) -> tuple[ForwardBatch, BackendConfig]:
    return after_encoder(batch, config) if config.is_encoder_decoder else (batch, config)


def _planned(
    batch: ForwardBatch,
    text: tuple[ForwardBatch, BackendConfig],
    config: BackendConfig,
    step: int,
    recorded: bool = False,
) -> AttentionPlan:
    passes = {
        kind: _plan_kind(*((batch, config) if kind is LayerKind.CROSS else text), kind, step)
        for kind in layer_kinds(config)[0]
    }
    saving = shared_prefix(*text)
    if saving is not None:  # full layers only: windows and chunks never look that far back
        (whole,) = passes[LayerKind.FULL]
        assert isinstance(whole, AttentionPass)
        passes[LayerKind.FULL] = cascade(whole, saving.tokens, new_tokens(batch))
    extends = config.use_mla and batch.forward_mode.is_extend_or_draft_extend_or_mixed()
    given = given_keys(batch, config) if extends and not recorded else None  # recorded modes are never in the MHA form
    return plan_of(batch, config, passes, recorded, shared_prefix=saving, given=given)


def plan_steps(batch: Any, config: BackendConfig, steps: int) -> list[AttentionPlan]:
    """The plans of the first `steps` steps of draft decoding, made together so that they share page tables."""
    batch, text = checked_batch(batch, config, steps - 1)
    return _planned_steps(batch, text, config, steps)


def plan_steps_unchecked(batch: ForwardBatch, config: BackendConfig, steps: int) -> list[AttentionPlan]:
    """plan_steps of a batch that was checked before it came here."""
    return _planned_steps(batch, _text(batch, config), config, steps, recorded=True)


def _planned_steps(
    batch: ForwardBatch,
    text: tuple[ForwardBatch, BackendConfig],
    config: BackendConfig,
    steps: int,
    recorded: bool = False,
) -> list[AttentionPlan]:
    by_kind: dict[LayerKind, list[tuple[AttentionPass | TreePass, ...]]] = {
        kind: plan_draft_steps(*text, kind, steps) for kind in layer_kinds(config)[0] if kind is not LayerKind.CROSS
    }
    if config.is_encoder_decoder:
        by_kind[LayerKind.CROSS] = [plan_cross(batch, config)] * steps  # the same encoder keys at every step
    passes = [{kind: plans[step] for kind, plans in by_kind.items()} for step in range(steps)]
    return [plan_of(batch, config, found, recorded) for found in passes]


def _plan_kind(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int
) -> tuple[AttentionPass | TreePass, ...]:
    mode = batch.forward_mode
    if mode.is_idle():
        return ()
    if kind is LayerKind.CROSS:
        return plan_cross(batch, config)
    if mode.is_target_verify():
        return plan_verify(batch, config, kind)
    if mode.is_decode():
        return plan_decode(batch, config, kind) if batch.spec_info is None else plan_draft(batch, config, kind, step)
    return plan_extend(batch, config, kind)


__all__ = ["plan_batch", "plan_steps", "plan_steps_unchecked", "plan_unchecked"]
