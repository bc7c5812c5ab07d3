"""Numerics and graphs on an Intel GPU, for those who own one: `make test-xpu`. Elsewhere it is skipped.

The providers were written against a record of the kernels and never run on the hardware by this project. The report
that these tests print (device, versions, verdicts of the probe, every case) is what an issue should bring.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_ref import ProviderNotInstalled
from tests.hardware import report

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.xpu.is_available(), reason="needs an Intel GPU and a build of torch for it"),
]
DEVICE = "xpu"


@pytest.fixture(params=["sgl_xpu", "vllm_xpu"])
def found(request: pytest.FixtureRequest, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of a provider, which a test adds its cases to."""
    known = [one for one in reports if one["provider"] == request.param]
    if known:
        return known[0]
    try:
        reports.append(report.header(DEVICE, request.param) | dict(cases=[]))
    except ProviderNotInstalled as error:
        pytest.skip(str(error))
    return reports[-1]


def judged(found: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    found["cases"] += cases
    found["summary"] = report.summary(found["cases"])
    failed = [case for case in cases if case["result"] not in ("right", "refused")]
    assert not failed, f"{len(failed)} of {len(cases)} cases: {failed[:5]}"
    assert any(case["result"] == "right" for case in cases), "every case was refused"


def test_every_layer_is_right_or_refused(found):
    judged(found, [report.numerics(DEVICE, found["provider"], *row) for row in report.all_numerics()])


def test_every_graph_replays_what_an_eager_step_computes(found):
    judged(found, [report.graph(DEVICE, found["provider"], *pair) for pair in report.all_graphs()])
