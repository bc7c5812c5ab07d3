"""What an Intel GPU answers, case by case, as data: right within the budget, refused, wrong, or an error."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fa_fast
from fa_fast.graphs import GraphRunner
from fa_fast.kernels.select import provider_for
from fa_ref import ProviderNotInstalled, UnsupportedByProvider
from fa_ref.cases import Case, make_case
from tests import test_graphs
from tests.xpu.forms import pairs, problem
from tests.xpu.test_numerics import FEATURES, rows

PACKAGES = (
    "torch", "sgl-kernel", "sglang-kernel", "sglang-kernel-xpu", "vllm-xpu-kernels",
    "triton", "triton-xpu", "pytorch-triton-xpu",
)  # fmt: skip
GRAPH_KINDS = ("full", "sliding", "local", "cross", "mla", "fp8", "deterministic")
REPLAYED = [([3, 17, 0, 40, 1, 9], [0, 1, 2, 3, 4, 5]), ([5, 40, 33], [4, 0, 2]), ([12], [5])]  # lengths, requests


Ask = tuple[str, Callable[[], dict[str, Any]]]  # a case's name, and what asks the device


class Report:
    """One entry a provider, written after every case: a hang or a crash leaves what ran, and what was running.

    path: None keeps the entries in memory alone.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.entries: list[dict[str, Any]] = []

    def entry_of(self, device: str, provider: str) -> dict[str, Any]:
        """The provider's entry, with its header; begun at the first call."""
        for entry in self.entries:
            if entry.get("provider") == provider:
                return entry
        return self.add(header(device, provider) | dict(cases=[]))

    def add(self, entry: dict[str, Any]) -> dict[str, Any]:
        self.entries.append(entry)
        self.save()
        return entry

    def run(self, entry: dict[str, Any], asks: Iterable[Ask]) -> list[dict[str, Any]]:
        """Ask case by case; returns the new cases, which the entry holds too."""
        new = []
        for name, ask in asks:
            entry["running"] = name
            self.save()
            new.append(dict(case=name) | _told(ask))
            del entry["running"]
            entry["cases"].append(new[-1])
            entry["summary"] = summary(entry["cases"])
            self.save()
        return new

    def save(self) -> None:
        """Replace the file in one step; it is on the disk afterwards, whatever becomes of the machine."""
        if self.path is None:
            return
        partial_file = self.path.with_name(self.path.name + ".partial")
        with partial_file.open("w") as file:
            file.write(self.text() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_file, self.path)

    def text(self) -> str:
        return json.dumps(self.entries, indent=1)


def no_device() -> str | None:
    """What is missing for a test on an Intel GPU, and what to do; None where nothing is."""
    if torch.xpu.is_available():
        return None
    if getattr(torch.version, "xpu", None) is None:
        return (
            f"no device: torch {torch.__version__} is not a build for Intel GPUs; install one (docs/install.md), and "
            "run this in its environment: make test-xpu PYTHON=python"
        )
    return (
        f"no device: torch {torch.__version__} is a build for Intel GPUs and sees none; check the driver, and that "
        "this user may open /dev/dri/renderD*"
    )


def machine() -> dict[str, Any]:
    """What a report says of the machine, whether or not it has a device."""
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    return dict(python=platform.python_version(), system=platform.platform(), versions=versions)


def header(device: str, provider: str) -> dict[str, Any]:
    """The machine and what the probe found on it; `missing` or `error` says why the provider cannot be used."""
    found: dict[str, Any] = dict(device=device, provider=provider) | machine()
    if torch.device(device).type == "xpu":
        found["name"] = torch.xpu.get_device_name()
        found["driver"] = str(getattr(torch.xpu.get_device_properties(), "driver_version", "unknown"))
    module: Any = import_module(f"fa_fast.kernels.{provider}")
    try:
        provider_for(device, provider)
    except ProviderNotInstalled as error:
        return found | dict(missing=str(error))
    except Exception as error:  # wrong in plain attention, or whatever a probe raises: the report is about that
        found["error"] = f"{type(error).__name__}: {error}"
    found["generation"] = getattr(module, "GENERATION", None)
    verdicts = module.VERDICTS  # kept even where they say that the provider is of no use
    found["verdicts"] = None if verdicts is None else dict(verdicts.rows()) | dict(notes=list(verdicts.notes))
    return found


def numerics(device: str, provider: str, form: str, kind: str, feature: str) -> dict[str, Any]:
    """One eager layer against the fp32 oracle on the same tensors."""
    case = problem(form, kind, device=device, **FEATURES[feature])
    verdict = case.judge(case.run(fa_fast, provider))
    return dict(result="right" if verdict.ok else "wrong", error=verdict.error, budget=verdict.budget)


def graph(device: str, provider: str, form: str, kind: str) -> dict[str, Any]:
    """A step captured once and replayed with other requests and lengths, against the eager step: bit by bit."""
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


def all_numerics(device: str, provider: str) -> list[Ask]:
    return [("-".join(row), partial(numerics, device, provider, *row)) for row in rows()]


def graphs() -> list[tuple[str, str]]:
    return [(form, kind) for form in test_graphs.FORMS for kind in GRAPH_KINDS if (form, kind) in _graphed()]


def all_graphs(device: str, provider: str) -> list[Ask]:
    return [("-".join(("graph", *pair)), partial(graph, device, provider, *pair)) for pair in graphs()]


def _graphed() -> set[tuple[str, str]]:
    """A cross layer has the graphs of decode; the other kinds have those of every form."""
    met = set(pairs())
    return {(f, k) for f in test_graphs.FORMS for k in GRAPH_KINDS if k != "cross" or (f, k) in met}


def summary(cases: list[dict[str, Any]]) -> dict[str, int]:
    """How many cases had each result."""
    return dict(sorted(Counter(case["result"] for case in cases).items()))


def _told(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What came out, an exception being one of the things that may."""
    try:
        return ask()
    except UnsupportedByProvider as error:
        return dict(result="refused", says=str(error))
    except Exception as error:  # whatever a kernel raises belongs into the report
        return dict(result="error", says=f"{type(error).__name__}: {error}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
