"""What the providers pass to the kernels: by keyword, under recorded names, and nothing that a kernel ignores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_fast
from fa_ref import UnsupportedByProvider
from tests.support import FP8
from tests.xpu import emulated_sgl, emulated_vllm
from tests.xpu.forms import pairs, problem
from tests.xpu.signatures import GENERATIONS, RECORD, signature

PACKAGES = {"sgl_xpu": "sgl_kernel", "vllm_xpu": "vllm_xpu_kernels"}
CALLED = {  # every function of a package that its provider may call in a step
    "sgl_xpu": {
        "flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_mla_decode", "flash_mla_prefill",
        "flash_mla_get_workspace_size", "flash_mla_prefill_get_workspace_size",
    },
    "vllm_xpu": {"flash_attn_varlen_func"},
}  # fmt: skip
# Accepted, and ignored or not built: whoever passes them gets the answer to another question.
IGNORED = {
    "k", "v", "qv", "q_v", "rotary_cos", "rotary_sin", "rotary_seqlens", "cache_batch_idx", "cache_leftpad",
    "cu_seqlens_k_new", "seqused_q", "scheduler_metadata", "attention_chunk", "q_descale", "alibi_slopes", "dropout_p",
}  # fmt: skip
FEATURES: list[dict[str, Any]] = [
    {},
    dict(page_size=16),
    dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.5),
    dict(sinks=True, softcap=0.5, deterministic=True),
]


class Recorder:
    """Stands before every function of emulated modules, and keeps how it was called."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for module in modules.values():
            for name in vars(module).keys() & {name for names in RECORD.values() for name in names}:
                setattr(module, name, self._before(name, getattr(module, name)))

    def _before(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return function(*args, **kwargs)

        call.__signature__ = function.__signature__  # type: ignore[attr-defined]
        return call


def recorded(install: Any, name: str, generation: str) -> Recorder:
    """A recorder in front of a provider's kernels, of which nothing is kept that the probe asks."""
    if name == "vllm_xpu":
        modules = emulated_vllm.modules()
    else:
        modules = emulated_sgl.modules(emulated_sgl.BUILDS[generation])
    recorder = Recorder(modules)
    provider = install(name, modules, generation if name == "sgl_xpu" else None)
    provider.load(torch.device("cpu"))
    recorder.calls.clear()
    return recorder


def run_all(name: str) -> None:
    for form, kind in pairs():
        for features in FEATURES:
            try:
                problem(form, kind, **features).run(fa_fast, name)
            except UnsupportedByProvider:
                continue


@pytest.fixture(params=[("sgl_xpu", g) for g in GENERATIONS] + [("vllm_xpu", "only")], ids="-".join)
def steps(request, install) -> tuple[str, Recorder]:
    name, generation = request.param
    recorder = recorded(install, name, generation)
    run_all(name)
    return name, recorder


def test_calls_of_every_form_and_layer_bind(steps):
    name, recorder = steps
    assert {function for function, _, _ in recorder.calls} == CALLED[name]
    for function, args, kwargs in recorder.calls:
        assert not args, f"{function} is called by keyword: generations order their parameters differently"
        signature(PACKAGES[name], function).bind(**kwargs)


def test_nothing_is_passed_that_a_kernel_ignores(steps):
    _, recorder = steps
    for function, _, kwargs in recorder.calls:
        keys_and_values = {"k", "v"} if function == "flash_attn_varlen_func" else set()
        passed = {n for n, value in kwargs.items() if n in IGNORED - keys_and_values and value is not None}
        assert not passed, f"{function}({passed})"


def test_bounds_are_ints_and_given(steps):
    """Their default is 0 in one package, and a bound that is a tensor would make the host wait."""
    _, recorder = steps
    bounded = 0
    for function, _, kwargs in recorder.calls:
        bounds = [n for n in ("max_seqlen_q", "max_seqlen_k") if function.startswith("flash_attn_")]
        bounded += len(bounds)
        assert all(type(kwargs[bound]) is int for bound in bounds), function
    assert bounded
