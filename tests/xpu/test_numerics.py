"""Every form, layer and feature on each emulated build: right within the budget, or refused with an alternative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa_fast
from fa_ref import UnsupportedByProvider
from fa_ref.cases import Case
from tests.support import FP8
from tests.xpu.conftest import BUILDS
from tests.xpu.forms import FORMS, MERGED, TREE, pairs, problem

every_build = pytest.mark.parametrize("build", BUILDS)
BF16, FP16 = torch.bfloat16, torch.float16
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "page-1": dict(page_size=1),
    "page-3": dict(page_size=3),
    "page-16": dict(page_size=16),
    "page-128": dict(page_size=128),
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
    """What became of it: right, wrong by how much, or refused; fails on a refusal that offers nothing."""
    try:
        found = case.run(fa_fast, name)
    except UnsupportedByProvider as error:
        said = str(error)
        assert "cannot run" in said and "It supports" in said and "provider torch_cpu" in said, said
        return "refused"
    verdict = case.judge(found)
    return "right" if verdict.ok else f"wrong: error {verdict.error:.2e}, budget {verdict.budget:.2e}"


def rows() -> list[tuple[str, str, str]]:
    """(form, kind, feature) of all that there is: an idle batch is the same with every feature."""
    return [
        (form, kind, feature)
        for form, kind in pairs()
        for feature in FEATURES
        if not (kind == "mla" and feature in NOT_OF_MLA)
        and (form != "idle" or feature == "plain")
        and (form == "verify-tree" or feature != "expanded-trees")
    ]


def expected(build: str, form: str, kind: str, feature: str) -> str:
    """What the record says of the build, written apart from its capability."""
    wanted, old, vllm = FEATURES[feature], build == "2026-08", build == "vllm"
    if feature in ("fp32", "fp8-fp16-queries", "fp8-head-scales"):
        return "refused"
    if kind == "mla":  # no LSE, one dtype, and vllm-xpu-kernels has none of it
        plain = not wanted.keys() & {"kv_dtype", "softcap", "sinks"}
        return "right" if plain and not vllm and form not in MERGED else "refused"
    if old and ("softcap" in wanted or form in MERGED):
        return "refused"
    if "sinks" in wanted and wanted.get("head_dim", 64) != 64 and not vllm:
        return "refused"
    one_query = form in ("decode", "draft-chain") or (form == "verify-tree" and kind in ("sliding", "local"))
    return "refused" if feature == "group-17" and one_query and not vllm else "right"


@pytest.mark.parametrize("form,kind", pairs())
@every_build
def test_a_layer_with_every_feature_is_right_or_refused(build, form, kind, provider):
    name, features = provider(build), [row[2] for row in rows() if row[:2] == (form, kind)]
    found = {feature: outcome(problem(form, kind, **FEATURES[feature]), name) for feature in features}
    assert found == {feature: expected(build, form, kind, feature) for feature in features}


LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@every_build
def test_a_random_ragged_batch_is_right_or_refused(build, data, provider):
    form, kind = data.draw(st.sampled_from([pair for pair in pairs() if pair[0] != "idle"]))
    count = data.draw(st.integers(1, 5))
    past = data.draw(st.lists(LENGTHS, min_size=count, max_size=count))
    ragged: dict[str, Any] = dict(prefix_lens=past, seed=data.draw(st.integers(0, 999)))
    if "new_lens" in FORMS[form]:
        ragged["new_lens"] = data.draw(st.lists(LENGTHS, min_size=count, max_size=count))
    if form == "verify-tree":
        ragged["trees"] = [TREE] * count
    if kind == "cross":
        ragged["encoder_lens"] = data.draw(st.lists(LENGTHS, min_size=count, max_size=count))
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (4, 2), (3, 3), (16, 1), (17, 1)]))
    ragged |= dict(
        page_size=data.draw(st.sampled_from([1, 5, 16, 32, 64, 128, 192])),
        host_lengths=data.draw(st.booleans()), heads=heads, kv_heads=kv_heads,
        softcap=data.draw(st.sampled_from([0.0, 0.5])), sinks=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([0, 3, 63, 64, 100])),
    )  # fmt: skip
    if data.draw(st.booleans()):
        ragged |= dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.25)
    case = problem(form, kind, **ragged)
    found = outcome(case, provider(build))
    must_run = build != "2026-08" and kind != "mla" and heads // kv_heads <= 16
    assert found == "right" or (found == "refused" and not must_run)


@every_build
@pytest.mark.parametrize("form", ["decode", "extend"])
def test_a_scaling_of_zero_is_one(build, form, provider):
    """All keys weigh the same; it is not the default, which a missing scale stands for."""
    case = problem(form, "full")
    case = replace(case, layer=replace(case.layer, scaling=0.0))
    assert outcome(case, provider(build)) == "right"
