"""Layers with a small window run in the kernel of short keys where it is the faster one, and give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_fast.kernels import torch_cpu
from fa_fast.kernels.short_keys import is_faster
from fa_ref import ForwardMode, LayerKind
from tests.support import FP8, case_on, run

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
FORMS: dict[str, dict[str, Any]] = {
    "decode": dict(mode=DECODE),
    "draft-chain": dict(mode=DECODE, topk=1, num_steps=3, step=2),
    "draft-branches": dict(mode=DECODE, topk=3, num_steps=3, step=2),
    "verify-chain": dict(mode=VERIFY, draft_token_num=5),
    "verify-tree": dict(mode=VERIFY, trees=[[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]]),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks-softcap": dict(sinks=True, softcap=8.0),
    "hybrid": dict(hybrid=True),
    "fp8": dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.25, dtype=torch.bfloat16),
}
every_form = pytest.mark.parametrize("form", FORMS)


def problem(form: str, kind: LayerKind = LayerKind.SLIDING, **settings: Any) -> Any:
    return case_on(
        "cpu", **dict(kind=kind, window=6, prefix_lens=[3, 0, 33], heads=4, kv_heads=2, page_size=4) | settings
        | FORMS[form],
    )  # fmt: skip


@pytest.fixture(params=["definition", "kernel"])
def routed(request, monkeypatch):
    """Windows go to the kernel of short keys; the names of the arguments of each call."""
    attend = torch_cpu.short_key_attention
    if request.param == "kernel":
        triton = pytest.importorskip("triton")
        if not triton.knobs.runtime.interpret:
            pytest.skip("Triton's interpreter is off")
        from fa_fast.kernels.sgl_cuda import short_key_attention as attend
    calls: list[set[str]] = []

    def spy(*arguments: Any, **named: Any) -> Any:
        calls.append({name for name, value in named.items() if value is not None})
        return attend(*arguments, **named)

    monkeypatch.setattr(torch_cpu, "short_key_attention", spy)
    monkeypatch.setattr(torch_cpu, "prefers_short_keys", lambda **shape: True)
    return calls


@every_form
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_call_serves_a_window(page_size, feature, form, routed, request):
    if feature == "fp8" and request.node.callspec.params["routed"] == "kernel":
        pytest.skip("the interpreter's dot does not know bf16")
    case = problem(form, page_size=page_size, **FEATURES[feature])
    verdict = case.judge(run(case, "fast"))
    assert verdict.ok, verdict
    assert len(routed) == 1
    assert {"page_table", "cache_seqlens"} <= routed[0]
    assert not {"prefix_out", "prefix_lse"} & routed[0]
    assert ("slots" in routed[0]) is (form in ("draft-branches", "verify-tree"))


@every_form
@pytest.mark.parametrize("window", [0, 1, 40])
def test_a_window_of_any_size(window, form, routed):
    case = problem(form, window=window)
    verdict = case.judge(run(case, "fast"))
    assert verdict.ok, verdict
    assert len(routed) == 1


@every_form
def test_a_window_one_key_short_is_noticed(form, routed, monkeypatch):
    """The comparison fails if the kernel is told of one key less."""
    attend = torch_cpu.short_key_attention

    def short(*arguments: Any, **named: Any) -> Any:
        return attend(*arguments, **named | dict(cache_seqlens=(named["cache_seqlens"] - 1).clamp(min=0)))

    monkeypatch.setattr(torch_cpu, "short_key_attention", short)
    case = problem(form)
    assert not case.judge(run(case, "fast")).ok


@every_form
@pytest.mark.parametrize("kind", [LayerKind.FULL, LayerKind.LOCAL])
def test_other_layers_are_not_routed(kind, form, routed):
    case = problem(form, kind, chunk=16)
    assert case.judge(run(case, "fast")).ok
    assert all("page_table" not in call for call in routed)  # drafts behind a prefix alone


@pytest.mark.parametrize("settings", [dict(deterministic=True), dict(tree_attention="expand")], ids=str)
def test_what_was_asked_for_by_name_is_not_routed(settings, routed):
    """A deterministic row must not depend on how many neighbours it has, and "expand" names the way to run a tree."""
    case = problem("verify-tree" if "tree_attention" in settings else "decode", **settings)
    assert case.judge(run(case, "fast")).ok
    assert routed == []


def test_ragged_extends_are_not_routed(routed):
    case = case_on("cpu", ForwardMode.EXTEND, kind=LayerKind.SLIDING, window=6, prefix_lens=[3, 9], new_lens=[2, 5])
    assert case.judge(run(case, "fast")).ok
    assert routed == []


@pytest.mark.parametrize(
    ("faster", "shape"),
    [
        (True, dict(requests=1, queries=1, keys=128, kv_heads=8, dim=64, tree=False)),
        (True, dict(requests=64, queries=1, keys=128, kv_heads=8, dim=64, tree=False)),
        (True, dict(requests=256, queries=1, keys=1024, kv_heads=8, dim=64, tree=False)),
        (False, dict(requests=1, queries=1, keys=1024, kv_heads=8, dim=64, tree=False)),
        (False, dict(requests=16, queries=1, keys=4096, kv_heads=8, dim=128, tree=False)),
        (False, dict(requests=64, queries=4, keys=1024, kv_heads=8, dim=128, tree=False)),
        (True, dict(requests=16, queries=16, keys=1039, kv_heads=8, dim=128, tree=True)),
        (False, dict(requests=1, queries=16, keys=8192, kv_heads=8, dim=128, tree=True)),
        (False, dict(requests=1, queries=16384, keys=20000, kv_heads=8, dim=128, tree=False)),
    ],
    ids=str,
)
def test_the_choice_is_the_measured_one(faster, shape):
    assert is_faster(**shape) is faster
