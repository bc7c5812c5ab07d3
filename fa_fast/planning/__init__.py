"""Planning on the device: the same plans as fa_ref.planning, from a few small kernels and no host round trip."""

from __future__ import annotations

from typing import Any

from fa_fast.planning.decode import plan_decode
from fa_fast.planning.extend import plan_extend
from fa_ref.api import AttentionPlan, BackendConfig, ForwardBatch
from fa_ref.api.checks import check_batch, new_tokens, values_to_compare
from fa_ref.api.support import layer_kinds, refuse_unplanned


def plan_batch(batch: Any, config: BackendConfig) -> AttentionPlan:
    """The kernel calls of a batch, for every kind of layer that `config` has.

    Reads host copies of lengths where the batch has them and static bounds where not; never synchronises, unless
    FA_CHECK=1. Errors are those of the twin in fa_ref, which explains the plan.
    """
    batch = ForwardBatch.of(batch)
    refuse_unplanned(batch)
    check_batch(batch, config)
    mode = batch.forward_mode
    kinds, refused = layer_kinds(config)
    if mode.is_idle():
        passes = dict.fromkeys(kinds, ())
    else:
        planner = plan_decode if mode.is_decode() else plan_extend
        passes = {kind: planner(batch, config, kind) for kind in kinds}
    return AttentionPlan(
        forward_mode=mode,
        num_tokens=new_tokens(batch),
        passes=passes,
        refused=refused,
        batch_size=batch.batch_size,
        values=values_to_compare(batch),
    )


__all__ = ["plan_batch"]
