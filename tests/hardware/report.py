"""What an Intel GPU answers, case by case, as data: right within the budget, refused, wrong, or an error."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import fa_fast
from fa_fast.graphs import GraphRunner
from fa_fast.kernels.select import provider_for
from fa_ref import UnsupportedByProvider
from fa_ref.cases import Case, make_case
from tests import test_graphs
from tests.xpu.forms import pairs, problem
from tests.xpu.test_numerics import FEATURES, rows

PACKAGES = ("torch", "sgl-kernel", "sglang-kernel", "vllm-xpu-kernels", "triton", "pytorch-triton-xpu")
GRAPH_KINDS = ("full", "sliding", "local", "cross", "mla", "fp8", "deterministic")
REPLAYED = [([3, 17, 0, 40, 1, 9], [0, 1, 2, 3, 4, 5]), ([5, 40, 33], [4, 0, 2]), ([12], [5])]  # lengths, requests


def header(device: str, provider: str) -> dict[str, Any]:
    """The machine and what the probe found on it."""
    module: Any = provider_for(device, provider)
    found = dict(device=device, provider=provider, python=platform.python_version(), system=platform.platform())
    if torch.device(device).type == "xpu":
        found["name"] = torch.xpu.get_device_name()
        found["driver"] = str(getattr(torch.xpu.get_device_properties(), "driver_version", "unknown"))
    found["versions"] = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    found["generation"] = getattr(module, "GENERATION", None)
    found["verdicts"] = dict(module.VERDICTS.rows()) | dict(notes=list(module.VERDICTS.notes))
    return found


def numerics(device: str, provider: str, form: str, kind: str, feature: str) -> dict[str, Any]:
    """One eager layer against the fp32 oracle on the same tensors."""

    def run() -> dict[str, Any]:
        case = problem(form, kind, device=device, **FEATURES[feature])
        verdict = case.judge(case.run(fa_fast, provider))
        return dict(result="right" if verdict.ok else "wrong", error=verdict.error, budget=verdict.budget)

    return dict(case=f"{form}-{kind}-{feature}") | _told(run)


def graph(device: str, provider: str, form: str, kind: str) -> dict[str, Any]:
    """A step captured once and replayed with other requests and lengths, against the eager step: bit by bit."""

    def run() -> dict[str, Any]:
        case = graph_problem(device, form, kind)
        backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step, provider=provider)
        _, inputs = test_graphs.at(case, [10] * test_graphs.REQUESTS, list(range(test_graphs.REQUESTS)))
        extends = case.batch.forward_mode.is_draft_extend()
        runner = GraphRunner(
            backend, test_graphs.step_of(case, backend), case.batch.forward_mode, (1, 4, 6), inputs,
            spec_info=case.batch.spec_info, draft_tokens=test_graphs.WIDTH if extends else 0,
        )  # fmt: skip
        differing = [lens for lens, order in REPLAYED if not _replays(runner, case, provider, lens, order)]
        return dict(result="wrong" if differing else "right") | (dict(lengths=differing) if differing else {})

    return dict(case=f"graph-{form}-{kind}") | _told(run)


def graph_problem(device: str, form: str, kind: str) -> Case:
    """tests.test_graphs' problem at the sizes that these kernels take."""
    count = test_graphs.REQUESTS
    settings: dict[str, Any] = dict(page_size=64, prefix_lens=[40] * count, heads=4, kv_heads=2, context_len=128)
    settings |= test_graphs.FORMS[form] | test_graphs.KINDS[kind] | dict(head_dim=64, dtype=torch.bfloat16)
    if kind == "mla":
        settings |= dict(latent=512, rope=64)
    if kind == "local":
        settings |= dict(chunk=64)
    return make_case(settings.pop("mode"), device=device, **settings)


def _replays(runner: GraphRunner, case: Case, provider: str, lens: list[int], order: list[int]) -> bool:
    batch, inputs = test_graphs.at(case, lens, order)
    replayed: Any = runner.run(batch, **inputs)
    replayed = replayed.clone()
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step, provider=provider)
    backend.init_forward_metadata(batch)
    eager: Tensor = test_graphs.step_of(case, backend)(batch, **inputs)
    return bool(torch.equal(eager, replayed)) and bool(eager.isfinite().all())


def all_numerics() -> list[tuple[str, str, str]]:
    return rows()


def all_graphs() -> list[tuple[str, str]]:
    return [(form, kind) for form in test_graphs.FORMS for kind in GRAPH_KINDS if (form, kind) in _graphed()]


def _graphed() -> set[tuple[str, str]]:
    """A cross layer has the graphs of decode; the other kinds have those of every form."""
    met = set(pairs())
    return {(f, k) for f in test_graphs.FORMS for k in GRAPH_KINDS if k != "cross" or (f, k) in met}


def summary(cases: list[dict[str, Any]]) -> dict[str, int]:
    """How many cases had each result."""
    return dict(sorted(Counter(case["result"] for case in cases).items()))


def _told(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What came out, an exception being one of the things that may."""
    try:
        return run()
    except UnsupportedByProvider as error:
        return dict(result="refused", says=str(error))
    except Exception as error:  # whatever a kernel raises belongs into the report
        return dict(result="error", says=f"{type(error).__name__}: {error}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
