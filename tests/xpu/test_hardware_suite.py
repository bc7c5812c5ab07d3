"""The suite for owners of the hardware, rehearsed on the emulated builds: it tells right, refused and wrong apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.hardware import report
from tests.hardware.test_xpu import judged
from tests.xpu.conftest import BUILDS
from tests.xpu.emulated_sgl import Build, modules
from tests.xpu.forms import MERGED

every_build = pytest.mark.parametrize("build", BUILDS)


@every_build
def test_a_report_says_what_the_probe_found_and_is_json(build, provider):
    header = report.header("cpu", provider(build))
    assert header["verdicts"]["softcap"] is (build != "2026-08") and header["versions"]["torch"]
    assert json.loads(json.dumps(header)) == header


@pytest.mark.parametrize("form,kind", report.all_graphs())
@every_build
def test_replays_are_eager_steps_on_every_build(build, form, kind, provider):
    told = report.graph("cpu", provider(build), form, kind)
    refused = (kind == "mla" and (build == "vllm" or form in MERGED)) or (build == "2026-08" and form in MERGED)
    assert told["result"] == ("refused" if refused else "right"), told


def test_the_report_tells_right_from_refused_from_wrong_from_an_error(provider, install, monkeypatch):
    name = provider("2026-08")
    assert report.numerics("cpu", name, "extend", "full", "plain")["result"] == "right"
    refused = report.numerics("cpu", name, "extend", "full", "softcap")
    assert refused["result"] == "refused" and "softcap" in refused["says"]
    module: Any = install("sgl_xpu", modules(Build(softcap=False)), "2026-10")
    monkeypatch.setattr(module, "narrowed", lambda table, verdicts: table)
    wrong = report.numerics("cpu", "sgl_xpu", "extend", "full", "softcap")
    assert wrong["result"] == "wrong" and wrong["error"] > wrong["budget"]
    install("sgl_xpu", modules(Build(lse="empty")), "2026-10")
    monkeypatch.setattr(module, "narrowed", lambda table, verdicts: table)
    told = report.numerics("cpu", "sgl_xpu", "verify-tree", "full", "plain")
    assert told["result"] == "error" and told["says"].startswith("IndexError")
    assert report.summary([refused, wrong, wrong]) == {"refused": 1, "wrong": 2}


@pytest.mark.parametrize("bad", ["wrong", "error"])
def test_one_bad_case_fails_the_suite_and_stays_in_the_report(bad):
    found: dict[str, Any] = dict(cases=[])
    judged(found, [dict(case="a", result="right"), dict(case="b", result="refused")])
    with pytest.raises(AssertionError, match="1 of 2 cases"):
        judged(found, [dict(case="c", result="right"), dict(case="d", result=bad)])
    assert found["summary"] == {bad: 1, "refused": 1, "right": 2}
    with pytest.raises(AssertionError, match="every case was refused"):
        judged(found, [dict(case="e", result="refused")])
