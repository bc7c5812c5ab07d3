"""The doctor asks the kernels that are there, and reports what they answered, by the provider's own probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_fast import doctor
from fa_fast.doctor import Device, Machine, Probed
from tests.xpu import emulated_sgl, emulated_vllm
from tests.xpu.emulated_sgl import BUILDS, Build


@pytest.fixture
def asked(install, monkeypatch) -> Any:
    """The doctor's answer for a provider over emulated modules, on CPU tensors."""

    def ask(name: str, modules: Any, generation: str | None = None) -> Probed:
        provider = install(name, modules, generation)
        load = provider.load
        monkeypatch.setattr(provider, "load", lambda: load(torch.device("cpu")))
        return doctor._asked(name)

    return ask


def report(*probes: Probed) -> list[str]:
    machine = Machine(
        torch="2.13.0+xpu", devices=(Device(kind="xpu", name="a GPU"),), triton_xpu=("triton-xpu", "3.7.1"),
        probes=probes, module_found=True, vllm_xpu_found=any(probed.provider == "vllm_xpu" for probed in probes),
    )  # fmt: skip
    return [f"{finding.level}: {finding.text}" for finding in doctor.diagnose(machine)]


def test_an_older_build_s_softcap_and_lse_are_named_with_what_came_instead(asked):
    probed = asked("sgl_xpu", emulated_sgl.modules(BUILDS["2026-08"]), "2026-08")
    assert dict(probed.verdicts) == dict(
        plain=True, softcap=False, sinks=True, lse=False, sinks_in_lse=False, merge=False
    )
    lines = report(probed)
    assert "ok: sgl_xpu: the kernels' answers are right for plain, sinks" in lines
    for name in ("softcap", "lse", "sinks_in_lse", "merge"):
        (line,) = [line for line in lines if f"not used: {name}, 1 per sequence: " in line]
        assert line.startswith("note: ") and "] for [" in line


def test_a_build_without_faults_has_no_note_of_them(asked):
    lines = report(asked("sgl_xpu", emulated_sgl.modules(Build(empty_merge_is_nan=False)), "2026-10"))
    assert "ok: sgl_xpu: the kernels' answers are right for plain, softcap, sinks, lse, sinks_in_lse, merge" in lines
    assert not any("wrong answer" in line for line in lines)


def test_the_other_package_is_asked_too(asked):
    probed = asked("vllm_xpu", emulated_vllm.modules())
    assert dict(probed.verdicts)["merge"] is None and probed.notes == ()
    assert "ok: vllm_xpu: the kernels' answers are right for plain, softcap, sinks, lse, sinks_in_lse" in report(probed)


def test_kernels_that_cannot_attend_are_an_error_with_its_reason(asked):
    modules = emulated_sgl.modules(Build())
    modules["sgl_kernel.flash_attn"].flash_attn_with_kvcache = lambda q, **call: torch.zeros_like(q)  # type: ignore[attr-defined]
    probed = asked("sgl_xpu", modules, "2026-10")
    assert probed.error is not None and probed.error.startswith("UnsupportedByProvider: ")
    assert any(line.startswith("broken: sgl_kernel cannot be used: ") for line in report(probed))


@pytest.mark.parametrize("there", [True, False], ids=["an-intel-gpu", "none"])
def test_only_a_machine_with_an_intel_gpu_is_asked(there, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(doctor, "_asked", lambda name: asked.append(name) or Probed(provider=name))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    devices = (Device(kind="xpu", name="a GPU"),) if there else ()
    monkeypatch.setattr(doctor, "_torch_facts", lambda: dict(torch="2.13.0", devices=devices))
    machine = doctor.gather()
    assert asked == (["sgl_xpu", "vllm_xpu"] if there else [])
    assert [probed.provider for probed in machine.probes] == asked
