"""Every form, layer and feature on each emulated build: right within the budget, or refused with an alternative."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_fast
from fa_ref import FaError, UnsupportedByProvider
from fa_ref.cases import Case
from tests.support import FP8
from tests.xpu.conftest import BUILDS
from tests.xpu.forms import MERGED, pairs, problem

every_build = pytest.mark.parametrize("build", BUILDS)
every_pair = pytest.mark.parametrize("form,kind", pairs())
BF16, FP16 = torch.bfloat16, torch.float16
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "page-1": dict(page_size=1),
    "page-3": dict(page_size=3),
    "page-16": dict(page_size=16),
    "page-32": dict(page_size=32),
    "page-128": dict(page_size=128),
    "page-256": dict(page_size=256),
    "page-192": dict(page_size=192),
    "fp16": dict(dtype=FP16),
    "dim-128": dict(head_dim=128),
    "fp8": dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.25),
    "fp8-page-16": dict(kv_dtype=FP8, k_scale=0.05, v_scale=2.0, page_size=16),
    "fp8-head-scales": dict(kv_dtype=FP8, k_scale=torch.tensor([0.5, 0.25]), v_scale=torch.tensor([1.0, 2.0])),
    "fp8-fp16-queries": dict(dtype=FP16, kv_dtype=FP8, k_scale=0.5, v_scale=0.25),
    "softcap": dict(softcap=0.5),
    "sinks": dict(sinks=True),
    "sinks-dim-128": dict(sinks=True, head_dim=128),
    "sinks-softcap": dict(sinks=True, softcap=0.5),
    "group-16": dict(heads=32, kv_heads=2),
    "group-17": dict(heads=34, kv_heads=2),
    "device-lengths": dict(host_lengths=False),
    "hybrid": dict(hybrid=True),
    "deterministic": dict(deterministic=True),
    "expanded-trees": dict(tree_attention="expand"),
    "few-keys": dict(prefix_lens=(1, 0, 2)),
    "fp32": dict(dtype=torch.float32),
}
NOT_OF_MLA = {"dim-128", "fp8-head-scales", "sinks-dim-128", "group-16", "group-17", "hybrid"}


def outcome(case: Case, name: str) -> str:
    """ "right" or "refused"; fails on a wrong answer, on another error, and on a refusal that offers nothing."""
    try:
        found = case.run(fa_fast, name)
    except UnsupportedByProvider as error:
        said = str(error)
        assert "cannot run" in said and "It supports" in said and "provider torch_cpu" in said, said
        return "refused"
    verdict = case.judge(found)
    assert verdict.ok, f"wrong: {verdict}"
    return "right"


def expected(build: str, form: str, kind: str, feature: str) -> str:
    """What the record says of the build: the literal twin of its capability, kept apart from it."""
    given = FEATURES[feature]
    if form == "idle":
        return "refused" if feature in ("fp32", "fp8-fp16-queries") else "any"
    old, vllm, merged = build == "2026-08", build == "vllm", form in MERGED
    decodes = form in ("decode", "draft-chain", "draft-branches")
    if feature in ("fp32", "fp8-fp16-queries") or (feature == "fp8-head-scales"):
        return "refused"
    if kind == "mla":
        one_dtype = given.get("kv_dtype") is None
        plain = not given.get("softcap") and not given.get("sinks")
        return "right" if not vllm and one_dtype and plain and not merged else "refused"
    if old and (given.get("softcap") or merged):
        return "refused"
    if given.get("sinks") and given.get("head_dim", 64) != 64 and not vllm:
        return "refused"
    if feature == "group-17" and not vllm and (decodes or (form == "verify-tree")):
        return "any" if form == "verify-tree" else "refused"
    return "right"


@pytest.mark.parametrize("feature", FEATURES)
@every_pair
@every_build
def test_a_layer_is_right_or_refused(build, form, kind, feature, provider):
    if (kind == "mla" and feature in NOT_OF_MLA) or (kind == "local" and feature == "hybrid" and form == "verify-tree"):
        pytest.skip("no such layer")
    try:
        case = problem(form, kind, **FEATURES[feature])
    except FaError:
        pytest.skip("no such layer")
    found, wanted = outcome(case, provider(build)), expected(build, form, kind, feature)
    assert wanted in (found, "any"), found
