"""What every planner does before and after its own work: take a server's batch, and say what the plan is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fa_ref.api.batch import DraftInput, ForwardBatch, VerifyInput
from fa_ref.api.checks import (
    check_locs,
    check_step,
    device_checks_enabled,
    draft_steps,
    new_tokens,
    reads_values,
    req_to_token,
    verify_input,
)
from fa_ref.api.config import BackendConfig
from fa_ref.api.encoder import checked_text
from fa_ref.api.errors import BadBatch
from fa_ref.api.modes import LayerKind
from fa_ref.api.plan import AttentionPass, AttentionPlan, TreePass
from fa_ref.api.support import layer_kinds


def read_batch(batch: Any, config: BackendConfig, topk: int = 0, num_steps: int = 0) -> ForwardBatch:
    """A server's batch as a ForwardBatch. topk, num_steps: of the drafts that a backend was built for; 0: not said.

    What a DraftInput leaves out is taken from there, or the topk from the config. Raises BadBatch for another draft.
    """
    batch = ForwardBatch.of(batch)
    info = batch.spec_info
    if not batch.forward_mode.is_decode() or not isinstance(info, DraftInput):
        return batch
    built = {"topk": topk, "num_steps": num_steps}
    if any(value and getattr(info, name) not in (None, value) for name, value in built.items()):
        plans = ", ".join(f"{name}={value}" for name, value in built.items() if value)
        raise BadBatch(f"spec_info is {info!r}; this backend plans DraftInput({plans}): build one for this draft")
    known = built | {"topk": topk or config.topk}
    missing = {name: value for name, value in known.items() if value and getattr(info, name) is None}
    return replace(batch, spec_info=replace(info, **missing)) if missing else batch


def checked_batch(
    batch: Any, config: BackendConfig, step: int
) -> tuple[ForwardBatch, tuple[ForwardBatch, BackendConfig]]:
    """A server's batch, and what layers of its text are planned from: in a decoder-only model batch and config.

    Raises BadBatch or BadPageTable.
    """
    batch = read_batch(batch, config)
    _check_spec_info(batch)
    text = checked_text(batch, config)
    check_step(batch, step)
    return batch, text


def _check_spec_info(batch: ForwardBatch) -> None:
    mode, info = batch.forward_mode, batch.spec_info
    if mode.is_target_verify():
        verify_input(batch)
    if mode.is_decode() and isinstance(info, VerifyInput):
        raise BadBatch(
            "DECODE with spec_info=VerifyInput(...); draft decoding takes DraftInput, verifying TARGET_VERIFY"
        )


def plan_of(
    batch: ForwardBatch,
    config: BackendConfig,
    passes: Mapping[LayerKind, tuple[AttentionPass | TreePass, ...]],
    **more: Any,
) -> AttentionPlan:
    """The plan of a batch with these passes; `more` are further fields of AttentionPlan."""
    return AttentionPlan(
        forward_mode=batch.forward_mode,
        num_tokens=new_tokens(batch),
        passes=passes,
        refused=layer_kinds(config)[1],
        batch_size=batch.batch_size,
        drafts=_drafts(batch),
        values=_values(batch, config),
        **more,
    )


def check_planned(plan: AttentionPlan, batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadBatch unless `batch` is the one that was planned."""
    check_locs(batch, config)
    req_to_token(batch, config)
    mode, size, loc, drafts = batch.forward_mode, batch.batch_size, batch.out_cache_loc, _drafts(batch)
    if mode is not plan.forward_mode or plan.batch_size not in (None, size):
        raise BadBatch(
            f"a {mode.name} batch of {size} requests, but {plan.forward_mode.name} of {plan.batch_size} is planned; "
            "call init_forward_metadata with every new batch"
        )
    if drafts != plan.drafts:
        raise BadBatch(
            f"the batch has {drafts or 'no drafts'}, the planned batch {plan.drafts or 'no drafts'}; call "
            "init_forward_metadata with every new batch"
        )
    steps = draft_steps(batch) or 1  # of a draft the slots of all steps, or those of this step alone
    if loc is not None and loc.shape[0] not in (plan.num_tokens, plan.num_tokens * steps):
        also = f" of {steps} steps" if steps > 1 else ""
        raise BadBatch(f"out_cache_loc has {loc.shape[0]} slots, the planned batch {plan.num_tokens} new tokens{also}")
    for name, planned in (plan.values or {}).items():
        value = getattr(batch, name)
        found = value.tolist() if isinstance(value, Tensor) and not value.is_meta else value
        if found != planned:
            raise BadBatch(f"{name} is {found}, the planned batch has {planned}; plan every new batch")


def _drafts(batch: ForwardBatch) -> str:
    """What a plan depends on of the batch's spec_info, in words."""
    info = batch.spec_info
    if batch.forward_mode.is_decode() and isinstance(info, DraftInput):
        return f"drafts to make, topk={info.topk}, num_steps={info.num_steps}"
    if batch.forward_mode.is_target_verify() and isinstance(info, VerifyInput):
        tree = "a chain" if info.custom_mask is None else "a tree"
        return f"drafts to verify, {tree} of draft_token_num={info.draft_token_num}, topk={info.topk}"
    return ""


def _values(batch: ForwardBatch, config: BackendConfig) -> dict[str, list[int]] | None:
    """What a planned batch and the batch given to forward must share, where it may be read; slots with FA_CHECK=1."""
    if not reads_values(config) or batch.forward_mode.is_idle():
        return None
    names = ["req_pool_indices", "seq_lens", "encoder_lens"]
    if batch.forward_mode.is_extend_or_draft_extend_or_mixed():
        names.append("extend_seq_lens")
    if device_checks_enabled() and not isinstance(batch.spec_info, DraftInput):  # a server may pass one step's slots
        names.append("out_cache_loc")
    found = {name: getattr(batch, name) for name in names}
    return {name: value.tolist() for name, value in found.items() if value is not None}
