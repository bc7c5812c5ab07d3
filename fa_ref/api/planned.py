"""What every planner does before and after its own work: take a server's batch, and say what the plan is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from fa_ref.api.batch import DraftInput, ForwardBatch, VerifyInput
from fa_ref.api.checks import (
    check_batch_size,
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
    recorded: bool = False,
    **more: Any,
) -> AttentionPlan:
    """The plan of a batch with these passes; `more` are further fields of AttentionPlan.

    recorded: as part of a graph, whose replays change the values; none is read then.
    """
    return AttentionPlan(
        forward_mode=batch.forward_mode,
        num_tokens=new_tokens(batch),
        passes=passes,
        refused=layer_kinds(config)[1],
        batch_size=batch.batch_size,
        drafts=_drafts(batch),
        values=None if recorded else _values(batch, config),
        **more,
    )


def check_planned(plan: AttentionPlan, batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadBatch unless `batch` is the one that was planned."""
    check_batch_size(batch)
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


class Snapshot:
    """The fields of a server's object as they are now, to see whether they still are: the very same objects."""

    def __init__(self, of: Any, names: Sequence[str]) -> None:
        present = [name for name in names if hasattr(of, name)]
        self._absent = [name for name in names if name not in present]
        self._read = attrgetter("__class__", "__class__", *present)  # with two names or more it makes a tuple
        self._values = self._read(of)

    def holds(self, of: Any) -> bool:
        try:
            return all(map(is_, self._read(of), self._values)) and not any(hasattr(of, name) for name in self._absent)
        except AttributeError:
            return False


class PlannedBatch:
    """A plan, and the batch that layers bring with it: read and compared with the plan once, not at every layer.

    A server may change its own batch object in place. It is taken as the same while every field is the very object that
    it was and, where values may be read, no tensor of it was written. With FA_CHECK=1 every layer's batch is compared.
    """

    batch: ForwardBatch  # as the layers last brought it; set by the first of them

    def __init__(self, plan: AttentionPlan, config: BackendConfig, read: Callable[[Any], ForwardBatch]) -> None:
        self.plan, self.config, self._read = plan, config, read
        self._every_time = device_checks_enabled()
        self._given: Any = None
        self._fields: list[tuple[Any, Snapshot]] = []
        self._written: list[tuple[Tensor, int]] = []

    def of(self, given: Any) -> ForwardBatch:
        """A layer's batch as a ForwardBatch. Raises BadBatch unless it is the planned one."""
        if not self._is_known(given):
            batch = self._read(given)
            check_planned(self.plan, batch, self.config)
            self.remember(given, batch)
        return self.batch

    def remember(self, given: Any, batch: ForwardBatch) -> None:
        """Take `given`, which reads as `batch`, for the planned one: layers that bring it are not asked again."""
        self.batch, self._given = batch, given
        info = getattr(given, "spec_info", None)
        owned = ((given, _FIELDS), (info, _INFO))  # what is not frozen, and so may change
        frozen = (ForwardBatch, DraftInput, VerifyInput, type(None))
        self._fields = [(of, Snapshot(of, names)) for of, names in owned if not isinstance(of, frozen)]
        read = [getattr(batch, name) for name in _VALUES] if reads_values(self.config) else []
        tensors = [x for x in read if isinstance(x, Tensor) and not x.is_inference()]  # these count no writes
        self._written = [(x, x._version) for x in tensors]

    def _is_known(self, given: Any) -> bool:
        if self._given is None or self._every_time:
            return False
        if given is self._given:
            for of, fields_then in self._fields:
                if not fields_then.holds(of):
                    return False
        elif given is not self.batch:
            return False
        return all(x._version == then for x, then in self._written)


_FIELDS = tuple(f.name for f in fields(ForwardBatch))
_INFO = tuple({f.name: None for info in (DraftInput, VerifyInput) for f in fields(info)})
_VALUES = ("req_pool_indices", "seq_lens", "extend_seq_lens", "encoder_lens", "out_cache_loc", "encoder_out_cache_loc")


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
