"""Planned and run on a device that has no values: shapes, dtypes, devices are right, and nothing waits for the host."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_fast.calls import capturing
from fa_fast.graphs import StaticBatch
from fa_fast.kernels import select
from fa_fast.kernels.xpu_generations import GENERATIONS as GENERATION_TABLES
from fa_fast.planning import plan_batch, plan_unchecked
from fa_fast.xpu import XPUAttentionBackend
from fa_ref import UnsupportedByProvider
from tests.support import FP8
from tests.xpu.fake_device import DEVICE, fake_xpu, moved
from tests.xpu.forms import MERGED, pairs, problem
from tests.xpu.signatures import GENERATIONS
from tests.xpu.traced import Operator, modules

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # of all it is the same
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


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=GENERATIONS)
def operator(request, install, monkeypatch) -> Operator:
    """The device's own provider over an operator without values; the probe has nothing to look at, and is left out."""
    operator = Operator(request.param)
    provider = install("sgl_xpu", modules(operator), request.param)
    monkeypatch.setitem(select.PROVIDERS, "sgl_xpu", "xpu")
    monkeypatch.setattr(provider, "CAPABILITY", GENERATION_TABLES[request.param])
    monkeypatch.setattr(provider, "load", lambda device: None)
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: False, raising=False)
    return operator


def refused(generation: str, form: str, kind: str) -> bool:
    """What merges needs an LSE: the older generation writes none, and latents have none."""
    return form in MERGED and (kind == "mla" or generation == "2026-08")


@pytest.mark.parametrize("page_size", [16, 64])
@every_pair
def test_a_layer_runs_on_the_device_and_reads_no_value(form, kind, page_size, operator):
    case = problem(form, kind, page_size=page_size)
    with fake_xpu():
        there = moved(case)
        backend = XPUAttentionBackend(there.config, speculative_step_id=there.step)
        backend.init_forward_metadata(there.batch)
        if refused(operator.generation, form, kind):
            with pytest.raises(UnsupportedByProvider):
                backend.forward(there.q, there.k, there.v, there.layer, there.batch)
            return
        out = backend.forward(there.q, there.k, there.v, there.layer, there.batch)
    layer = case.layer
    assert (out.shape, out.dtype) == ((case.q.shape[0], layer.tp_q_head_num * layer.v_head_dim), case.q.dtype)
    assert out.device == DEVICE
    assert operator.calls > 0 or form == "idle"


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.5),
    "sinks": dict(sinks=True),
}
IN_GRAPHS = [
    (form, kind, feature)
    for form, kind in pairs()
    for feature in FEATURES
    if form in REPLAYED and (kind != "mla" or feature == "plain")
]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("form,kind,feature", IN_GRAPHS)
def test_a_graph_s_layer_runs_on_the_device_and_reads_no_value(form, kind, feature, page_size, operator):
    case = problem(form, kind, page_size=page_size, encode=False, **FEATURES[feature])
    with fake_xpu():
        there = moved(case)
        backend = XPUAttentionBackend(there.config, speculative_step_id=there.step)
        batch = static(there)
        tokens = 2 * (there.q.shape[0] // 3 if not batch.forward_mode.is_draft_extend() else 3)
        q, k, v = (None if x is None else x.new_empty(tokens, x.shape[1]) for x in (there.q, there.k, there.v))
        backend.init_forward_metadata_in_graph(batch)
        if refused(operator.generation, form, kind):
            with pytest.raises(UnsupportedByProvider):
                backend.forward(q, k, v, there.layer, batch, sinks=there.sinks)
            return
        out = backend.forward(q, k, v, there.layer, batch, sinks=there.sinks)
    assert (out.shape[0], out.dtype, out.device) == (tokens, case.q.dtype, DEVICE)
    assert operator.calls > 0


@pytest.mark.parametrize("recording", [True, False])
def test_a_capture_on_the_device_is_seen(recording, monkeypatch):
    """What is made while a graph is recorded holds nothing yet, and is not kept for the next step."""
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: recording, raising=False)
    with fake_xpu():
        assert capturing(torch.empty(1, device=DEVICE)) is recording
        assert capturing(torch.empty(1)) is False


@pytest.mark.parametrize(
    "ask", [Tensor.tolist, lambda x: x.max().item(), lambda x: int(x[0]), bool], ids=["tolist", "item", "int", "bool"]
)
def test_asking_the_fake_device_for_a_value_raises(ask):
    with fake_xpu():
        asked = torch.ones(1, dtype=torch.int32, device="xpu")
        with pytest.raises(RuntimeError, match=r"."):
            ask(asked)
