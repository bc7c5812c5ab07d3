"""Planned and run on a device that has no values: shapes, dtypes, devices are right, and nothing waits for the host."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_fast.graphs import StaticBatch
from fa_fast.planning import plan_batch, plan_unchecked
from tests.xpu.fake_device import DEVICE, fake_xpu, moved
from tests.xpu.forms import pairs, problem

every_pair = pytest.mark.parametrize("form,kind", pairs())
REPLAYED = ("decode", "draft-chain", "draft-branches", "verify-chain", "verify-tree", "draft-extend")
replayed = pytest.mark.parametrize("form,kind", [pair for pair in pairs() if pair[0] in REPLAYED])


def tensors(given: Any) -> list[Tensor]:
    """Every tensor of a plan."""
    if isinstance(given, Tensor):
        return [given]
    if is_dataclass(given):
        return [t for f in fields(given) for t in tensors(getattr(given, f.name))]
    if isinstance(given, dict | list | tuple):
        return [t for one in (given.values() if isinstance(given, dict) else given) for t in tensors(one)]
    return []


def looks_of(plan: Any) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.dtype) for t in tensors(plan.passes)]


@pytest.mark.parametrize("host_lengths", [True, False], ids=["host-lengths", "device-lengths"])
@pytest.mark.parametrize("page_size", [1, 64])
@every_pair
def test_a_plan_is_on_the_device_and_reads_no_value(form, kind, page_size, host_lengths):
    case = problem(form, kind, page_size=page_size, host_lengths=host_lengths)
    wanted = plan_batch(case.batch, case.config, case.step)
    with fake_xpu():
        there = moved(case)
        plan = plan_batch(there.batch, there.config, there.step)
    assert {t.device for t in tensors(plan.passes)} <= {DEVICE}
    assert looks_of(plan) == looks_of(wanted)


def static(case: Any) -> Any:
    """The batch as a graph reads it, for two requests."""
    drafts = 3 if case.batch.forward_mode.is_draft_extend() else 0
    return StaticBatch(case.config, case.batch.forward_mode, 3, case.batch.spec_info, drafts).view(2)


@pytest.mark.parametrize("page_size", [1, 64])
@replayed
def test_a_graph_s_plan_is_on_the_device_and_reads_no_value(form, kind, page_size):
    case = problem(form, kind, page_size=page_size)
    wanted = plan_unchecked(static(case), case.config, case.step)
    with fake_xpu():
        there = moved(case)
        plan = plan_unchecked(static(there), there.config, there.step)
    assert {t.device for t in tensors(plan.passes)} == {DEVICE}
    assert looks_of(plan) == looks_of(wanted)


@pytest.mark.parametrize("ask", [Tensor.tolist, lambda x: x.max().item(), lambda x: int(x[0]), bool], ids=str)
def test_asking_the_fake_device_for_a_value_raises(ask):
    with fake_xpu():
        asked = torch.ones(1, dtype=torch.int32, device="xpu")
        with pytest.raises(RuntimeError, match=r"."):
            ask(asked)
