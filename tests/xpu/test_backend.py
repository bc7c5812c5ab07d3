"""The backend of Intel GPUs is the one of every device, under a name that insists on its device."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest

import fa_fast
from fa_fast.kernels import select
from fa_fast.xpu import XPUAttentionBackend
from fa_ref import BadConfig, ProviderNotInstalled
from tests.xpu import emulated_sgl, emulated_vllm
from tests.xpu.forms import problem


def test_it_is_the_same_backend_with_the_same_arguments():
    own = {name for name in vars(XPUAttentionBackend) if not name.startswith("__")}
    assert issubclass(XPUAttentionBackend, fa_fast.FlashAttentionBackend) and own == set()
    assert inspect.signature(XPUAttentionBackend) == inspect.signature(fa_fast.FlashAttentionBackend)


@pytest.mark.parametrize("other", ["cpu", "cuda", "cuda:1"])
def test_another_device_is_refused_with_the_backend_to_use(other):
    runner = SimpleNamespace(**vars(problem("decode", "full").config) | dict(device=other))
    with pytest.raises(BadConfig, match=f"on device {other}; .* Use FlashAttentionBackend"):
        XPUAttentionBackend(runner)


@pytest.mark.parametrize("made", [XPUAttentionBackend, fa_fast.FlashAttentionBackend])
@pytest.mark.parametrize("asked,found", [(None, "sgl_xpu"), ("sgl_xpu", "sgl_xpu"), ("vllm_xpu", "vllm_xpu")])
def test_both_names_take_the_device_s_provider_or_the_one_that_is_asked_for(asked, found, made, install, monkeypatch):
    for name, modules in (
        ("sgl_xpu", emulated_sgl.modules(emulated_sgl.Build())),
        ("vllm_xpu", emulated_vllm.modules()),
    ):
        provider = install(name, modules)
        monkeypatch.setitem(select.PROVIDERS, name, "xpu")
        monkeypatch.setattr(provider, "load", lambda device: None)
    config = problem("decode", "full").config
    object.__setattr__(config, "device", "xpu")  # pools of this device cannot be made here
    assert made(config, provider=asked).provider == found


@pytest.mark.parametrize("name,says", [(None, "fa_fast.doctor"), ("vllm_xpu", "leave provider out for sgl_xpu")])
def test_without_kernels_there_is_an_error_that_says_what_to_do(name, says, monkeypatch):
    for package in ("sgl_kernel", "vllm_xpu_kernels"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ProviderNotInstalled, match=says):
        select.provider_for("xpu", name)
