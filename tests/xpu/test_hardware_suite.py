"""The suite for owners of the hardware, rehearsed on the emulated builds: it tells right, refused and wrong apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_fast.kernels import select
from tests.hardware import report, test_xpu
from tests.hardware.report import Report
from tests.xpu.conftest import BUILDS
from tests.xpu.emulated_sgl import Build, modules
from tests.xpu.forms import MERGED
from tests.xpu.signatures import with_signature

ROOT = Path(__file__).parents[2]
every_build = pytest.mark.parametrize("build", BUILDS)


def told(ask: Any, *names: str) -> dict[str, Any]:
    (case,) = Report().run(dict(cases=[]), [("-".join(names[1:]), lambda: ask("cpu", *names))])
    return case


def answers(**results: str) -> list[report.Ask]:
    return [(name, lambda result=result: dict(result=result)) for name, result in results.items()]


@every_build
def test_a_report_says_what_the_probe_found_and_is_json(build, provider):
    header = report.header("cpu", provider(build))
    assert header["verdicts"]["softcap"] is (build != "2026-08") and header["versions"]["torch"]
    assert json.loads(json.dumps(header)) == header


@pytest.mark.parametrize("form,kind", report.graphs())
@every_build
def test_replays_are_eager_steps_on_every_build(build, form, kind, provider):
    case = told(report.graph, provider(build), form, kind)
    refused = (kind == "mla" and (build == "vllm" or form in MERGED)) or (build == "2026-08" and form in MERGED)
    assert case["result"] == ("refused" if refused else "right"), case


def test_the_report_tells_right_from_refused_from_wrong_from_an_error(provider, install, monkeypatch):
    name = provider("2026-08")
    assert told(report.numerics, name, "extend", "full", "plain")["result"] == "right"
    refused = told(report.numerics, name, "extend", "full", "softcap")
    assert refused["result"] == "refused" and "softcap" in refused["says"]
    module: Any = install("sgl_xpu", modules(Build(softcap=False)), "2026-10")
    monkeypatch.setattr(module, "narrowed", lambda table, verdicts: table)
    wrong = told(report.numerics, "sgl_xpu", "extend", "full", "softcap")
    assert wrong["result"] == "wrong" and wrong["error"] > wrong["budget"]
    install("sgl_xpu", modules(Build(lse="empty")), "2026-10")
    monkeypatch.setattr(module, "narrowed", lambda table, verdicts: table)
    case = told(report.numerics, "sgl_xpu", "verify-tree", "full", "plain")
    assert case["result"] == "error" and case["says"].startswith("IndexError")
    assert report.summary([refused, wrong, wrong]) == {"refused": 1, "wrong": 2}


@pytest.mark.parametrize("bad", ["wrong", "error"])
def test_one_bad_case_fails_the_suite_and_stays_in_the_report(bad):
    reports, entry = Report(), dict(cases=[])
    test_xpu.judge(reports, entry, answers(a="right", b="refused"))
    with pytest.raises(AssertionError, match="1 of 2 cases"):
        test_xpu.judge(reports, entry, answers(c="right", d=bad))
    assert entry["summary"] == {bad: 1, "refused": 1, "right": 2}
    with pytest.raises(AssertionError, match="every case was refused"):
        test_xpu.judge(reports, entry, answers(e="refused"))


# ---- what is in the file, and when -----------------------------------------------------------------------


def test_a_crash_leaves_what_ran_and_names_what_was_running(tmp_path, provider):
    reports = Report(tmp_path / "report.json")
    entry = reports.entry_of("cpu", provider("2026-10"))
    seen = []

    def looks() -> dict[str, Any]:
        (written,) = json.loads((tmp_path / "report.json").read_text())
        seen.append(([case["case"] for case in written["cases"]], written["running"]))
        return dict(result="right")

    def crashes() -> dict[str, Any]:
        looks()
        raise KeyboardInterrupt  # as a crash, it is no answer of a kernel

    with pytest.raises(KeyboardInterrupt):
        reports.run(entry, [("a", looks), ("b", looks), ("c", crashes), ("d", looks)])
    assert seen == [([], "a"), (["a"], "b"), (["a", "b"], "c")]
    (written,) = json.loads((tmp_path / "report.json").read_text())
    assert written["summary"] == {"right": 2} and written["running"] == "c" and written["verdicts"]["plain"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_write_that_fails_leaves_the_report_before_it(tmp_path, monkeypatch):
    reports = Report(tmp_path / "report.json")
    reports.add(dict(provider="a", cases=[]))
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        reports.add(dict(provider="b", cases=[]))
    assert [entry["provider"] for entry in json.loads((tmp_path / "report.json").read_text())] == ["a"]


def test_kernels_wrong_in_plain_attention_leave_a_report_with_header_and_verdicts(tmp_path, install):
    broken = modules(Build())
    zeros: Any = with_signature("sgl_kernel", "flash_attn_with_kvcache", lambda q, **call: torch.zeros_like(q))
    broken["sgl_kernel.flash_attn"].flash_attn_with_kvcache = zeros  # type: ignore[attr-defined]
    install("sgl_xpu", broken, "2026-10")
    reports = Report(tmp_path / "report.json")
    with pytest.raises(pytest.fail.Exception, match=r"UnsupportedByProvider.*failed a problem of two keys"):
        test_xpu.able(reports.entry_of("cpu", "sgl_xpu"))
    (written,) = json.loads((tmp_path / "report.json").read_text())
    assert written["verdicts"]["plain"] is False and written["generation"] == "2026-10" and written["versions"]["torch"]
    assert any(note.startswith("plain, 1 per sequence: [0.0") for note in written["verdicts"]["notes"])


def test_one_package_is_enough_and_none_is_a_failure(tmp_path, install, monkeypatch):
    reports = Report(tmp_path / "report.json")
    for name in test_xpu.PROVIDERS:
        monkeypatch.setitem(select.PROVIDERS, name, "cpu")
    with pytest.raises(AssertionError, match=r"no kernels for an Intel GPU: .*no wheel.* \| .*vllm-xpu-kernels"):
        test_xpu.installed(reports, "cpu")
    written = json.loads((tmp_path / "report.json").read_text())
    assert [entry["provider"] for entry in written] == ["sgl_xpu", "vllm_xpu"] and all(e["missing"] for e in written)
    with pytest.raises(pytest.skip.Exception, match="no wheel"):
        test_xpu.able(written[0])
    install("sgl_xpu", modules(Build()), "2026-10")
    test_xpu.installed(Report(), "cpu")


# ---- the whole command -----------------------------------------------------------------------------------

without_gpu = pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an Intel GPU")


def test_a_build_for_other_devices_is_told_from_a_driver_that_shows_none(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    assert "is not a build for Intel GPUs; install one" in str(report.no_device())
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    assert "sees none; check the driver" in str(report.no_device())
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert report.no_device() is None


@without_gpu
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_without_a_device_make_test_xpu_fails_and_the_report_says_what_is_missing(tmp_path):
    path = tmp_path / "report.json"
    command = ["make", "test-xpu", f"PYTHON={sys.executable}", f"FA_XPU_REPORT={path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "no device: torch" in done.stdout
    (written,) = json.loads(path.read_text())
    assert written["device"] is None and written["error"].startswith("no device: torch") and written["versions"]


@without_gpu
def test_where_no_report_is_asked_for_the_suite_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="what is missing"):
        test_xpu.without_device(Report(), "what is missing")
