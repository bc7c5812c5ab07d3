"""Providers of Intel GPUs on CPU tensors: the emulated builds stand where the imports find them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from fa_fast.kernels import select, xpu_probe
from tests.xpu import emulated_sgl, emulated_vllm

BUILDS = ("2026-08", "2026-10", "vllm")  # what the fixture `provider` takes
LOADED = ("CAPABILITY", "VERDICTS", "GENERATION")  # what `load` writes


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Serve a provider's kernels from emulated modules, on CPU tensors, for one test; returns the provider module.

    generation: what the operator's schema says; None: there is none to read.
    """
    monkeypatch.setattr(xpu_probe, "_FOUND", {})

    def put(name: str, modules: dict[str, ModuleType], generation: str | None = None) -> Any:
        for path, module in modules.items():
            monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.setitem(select.PROVIDERS, name, "cpu")
        provider: Any = import_module(f"fa_fast.kernels.{name}")
        for held in LOADED:
            if hasattr(provider, held):
                monkeypatch.setattr(provider, held, getattr(provider, held))
        if generation is not None:
            monkeypatch.setattr(provider, "installed_generation", lambda: generation)
        return provider

    return put


@pytest.fixture
def provider(install: Callable[..., Any]) -> Callable[[str], str]:
    """The name of a provider whose kernels are of one of BUILDS."""

    def named(build: str) -> str:
        if build == "vllm":
            install("vllm_xpu", emulated_vllm.modules())
            return "vllm_xpu"
        install("sgl_xpu", emulated_sgl.modules(emulated_sgl.BUILDS[build]), build)
        return "sgl_xpu"

    return named
