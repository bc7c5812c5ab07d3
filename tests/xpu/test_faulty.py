"""A build that gets something wrong is found out by the probe, and what it gets wrong is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch

import fa_fast
from fa_fast.kernels import select, xpu_probe
from fa_ref import UnsupportedByProvider
from fa_ref.cases import Case
from tests.xpu import emulated_vllm
from tests.xpu.emulated_sgl import BUILDS, Build, modules
from tests.xpu.forms import problem

RIGHT = Build(empty_merge_is_nan=False)
CASCADE: dict[str, Any] = dict(sinks=True, prefix_lens=(64, 64, 64), shared_prefix=64, softcap=0.1)  # merged by LSE
FAULTS: dict[str, tuple[dict[str, Any], set[str], dict[str, Any], tuple[str, str]]] = {
    # what is wrong with the build, the verdicts against it, a layer that needs it, in a form and of a kind
    "softcap-ignored": (dict(softcap=False), {"softcap"}, dict(softcap=0.1), ("extend", "full")),
    "lse-garbage": (dict(lse="garbage"), {"lse", "sinks_in_lse"}, {}, ("draft-branches", "full")),
    "lse-empty": (dict(lse="empty"), {"lse", "sinks_in_lse"}, {}, ("verify-tree", "full")),
    "lse-in-base-2": (dict(lse="base-2"), {"lse", "sinks_in_lse"}, {}, ("draft-branches", "full")),
    "sinks-ignored": (dict(sinks=False), {"sinks", "sinks_in_lse"}, dict(sinks=True), ("decode", "full")),
    "sinks-not-in-lse": (dict(sinks_in_lse=False), {"sinks_in_lse"}, CASCADE, ("decode", "full")),
}


def run(case: Case) -> torch.Tensor:
    return case.run(fa_fast, "sgl_xpu")


def verdicts(module: Any) -> dict[str, bool | None]:
    return dict(module.VERDICTS.rows())


def loaded(install: Any, build: Build, generation: str | None = None) -> Any:
    module = install("sgl_xpu", modules(build), generation)
    module.load(torch.device("cpu"))
    return module


def test_a_right_build_passes_every_question(install):
    module = loaded(install, RIGHT)
    assert all(verdicts(module).values()) and module.VERDICTS.notes == ()
    assert (module.CAPABILITY.softcap, module.CAPABILITY.lse, module.CAPABILITY.sinks) == (True, True, True)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_catches(fault, install):
    wrong, against, _, _ = FAULTS[fault]
    module = loaded(install, Build(empty_merge_is_nan=False, **wrong))
    assert {name for name, right in verdicts(module).items() if not right} == against
    assert len(module.VERDICTS.notes) == len(against)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_faulty_build_gets_wrong_is_refused_with_an_alternative(fault, install):
    wrong, _, needs, (form, kind) = FAULTS[fault]
    install("sgl_xpu", modules(Build(**wrong)))
    with pytest.raises(UnsupportedByProvider, match=r"cannot run .* It supports .* or in fa_ref"):
        run(problem(form, kind, **needs))


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_probe_the_faulty_build_answers_wrong(fault, install, monkeypatch):
    """So the refusals above stand between a caller and wrong numbers."""
    wrong, _, needs, (form, kind) = FAULTS[fault]
    module = install("sgl_xpu", modules(Build(**wrong)))
    monkeypatch.setattr(module, "narrowed", lambda table, verdicts: table)
    case = problem(form, kind, **needs)
    if fault == "lse-empty":
        with pytest.raises(IndexError):
            run(case)
    else:
        assert not case.judge(run(case)).ok


@pytest.mark.parametrize("lost", [dict(s_aux=None), dict(softcap=0.0)], ids=["sinks", "softcap"])
def test_a_faulty_build_of_the_other_package_is_found_out_too(lost, install):
    faulty = emulated_vllm.modules()
    interface: Any = faulty["vllm_xpu_kernels.flash_attn_interface"]
    right = interface.flash_attn_varlen_func
    interface.flash_attn_varlen_func = wraps(right)(lambda **call: right(**call | lost))
    module = install("vllm_xpu", faulty)
    module.load(torch.device("cpu"))
    against = {"sinks", "sinks_in_lse"} if "s_aux" in lost else {"softcap"}
    assert {name for name, said in verdicts(module).items() if said is False} == against


def test_a_merge_of_two_empty_states_that_is_nan_is_reported_and_not_used(install):
    module = loaded(install, Build())
    assert verdicts(module)["merge"] is False and any("nan" in note for note in module.VERDICTS.notes)
    empty = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    out, lse = module.merge_state(*empty, *empty)
    assert out.eq(0).all() and lse.isneginf().all()


def test_a_build_that_cannot_attend_is_refused_whole(install):
    faulty = modules(Build())
    faulty["sgl_kernel.flash_attn"].flash_attn_with_kvcache = lambda q, **call: torch.zeros_like(q)  # type: ignore[attr-defined]
    install("sgl_xpu", faulty)
    with pytest.raises(UnsupportedByProvider, match="failed a problem of two keys"):
        select.provider_for("cpu", "sgl_xpu")


@pytest.mark.parametrize("generation", BUILDS)
def test_a_generation_whose_schema_cannot_be_read_is_known_by_its_answers(generation, install):
    told = loaded(install, BUILDS[generation], generation).CAPABILITY
    asked = loaded(install, BUILDS[generation], "2026-10").CAPABILITY
    assert (told.softcap, told.lse) == (asked.softcap, asked.lse)
    assert (told.softcap, told.lse) == ((False, False) if generation == "2026-08" else (True, True))


@pytest.mark.parametrize("plain", [True, False], ids=["attends", "attends-to-nothing"])
@pytest.mark.parametrize("name", ["sgl_xpu", "vllm_xpu"])
def test_what_another_device_of_the_process_gets_wrong_is_refused_on_all(name, plain, install, monkeypatch):
    """A backend of the first device lives on when the second one is asked, and both read one record."""
    built = emulated_vllm.modules() if name == "vllm_xpu" else modules(RIGHT)
    module = install(name, built, None)
    module.load(torch.device("cpu"))
    functions = module._functions()
    second = replace(module.VERDICTS, plain=plain, softcap=False)
    monkeypatch.setitem(xpu_probe._FOUND, (id(functions), "xpu:1"), (functions, second))
    module.load(torch.device("cpu"))
    assert module.CAPABILITY.softcap is not plain  # one that cannot attend at all has no backend
    assert module.CAPABILITY.lse and module.VERDICTS.softcap


def test_a_verdict_never_adds_to_what_the_table_claims(install):
    capability = loaded(install, RIGHT, "2026-08").CAPABILITY
    assert (capability.softcap, capability.lse) == (False, False)
