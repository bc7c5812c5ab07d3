"""Numerics and graphs on an Intel GPU, for those who own one: `make test-xpu`.

The providers were written against a record of the kernels and never run on the hardware by this project. The report
that these tests write (device, versions, verdicts of the probe, every case) is what an issue should bring.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from tests.hardware import report
from tests.hardware.report import Ask, Report

pytestmark = pytest.mark.hardware
DEVICE = "xpu"
PROVIDERS = ("sgl_xpu", "vllm_xpu")


@pytest.fixture
def machine(reports: Report) -> Report:
    """The report on a machine with an Intel GPU; elsewhere it says what is missing."""
    if (missing := report.no_device()) is not None:
        without_device(reports, missing)
    return reports


def without_device(reports: Report, missing: str) -> NoReturn:
    """A skip, and where a report is asked for, a failure, which the report holds too."""
    if reports.path is None:
        pytest.skip(missing)
    if not reports.entries:
        reports.add(report.machine() | dict(device=None, error=missing))
    pytest.fail(missing, pytrace=False)


@pytest.fixture(params=PROVIDERS)
def entry(request: pytest.FixtureRequest, machine: Report) -> dict[str, Any]:
    """The entry of a provider that can attend, which a test adds its cases to."""
    return able(machine.entry_of(DEVICE, request.param))


def able(entry: dict[str, Any]) -> dict[str, Any]:
    if "missing" in entry:
        pytest.skip(entry["missing"])
    if "error" in entry:
        pytest.fail(entry["error"], pytrace=False)
    return entry


def judge(reports: Report, entry: dict[str, Any], asks: list[Ask]) -> None:
    cases = reports.run(entry, asks)
    failed = [case for case in cases if case["result"] not in ("right", "refused")]
    assert not failed, f"{len(failed)} of {len(cases)} cases: {failed[:5]}"
    assert any(case["result"] == "right" for case in cases), "every case was refused"


def test_the_kernels_of_a_provider_are_installed(machine):
    installed(machine, DEVICE)


def installed(reports: Report, device: str) -> None:
    missing = [entry.get("missing") for entry in (reports.entry_of(device, name) for name in PROVIDERS)]
    assert not all(missing), f"no kernels for an Intel GPU: {' | '.join(map(str, missing))}"


def test_every_layer_is_right_or_refused(machine, entry):
    judge(machine, entry, report.all_numerics(DEVICE, entry["provider"]))


def test_every_graph_replays_what_an_eager_step_computes(machine, entry):
    judge(machine, entry, report.all_graphs(DEVICE, entry["provider"]))
