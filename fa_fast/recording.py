"""Recording a piece of work once and replaying it: graphs of a GPU, and on a CPU the same work run again.

Work reads and writes tensors that stay where they are. What it returns is written anew by every replay, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fa_ref.api import UnsupportedByProvider

GRAPHS = {"cuda": "CUDAGraph", "xpu": "XPUGraph"}  # module of torch -> its class of graphs
WARM_UPS = 2  # runs before a capture: kernels compile, and libraries allocate what they keep


class Recording(Protocol):
    """Recorded work. `result` is what the work returned; a replay overwrites its tensors."""

    result: Any

    def replay(self) -> None: ...


class Recorder:
    """Records work on one device. Recordings share memory: a replay invalidates the results of the others.

    On a device of graphs everything the work launches is recorded, and a replay is one launch. On a CPU a replay runs
    the work again and copies its result to where the first one lies, so that whoever keeps an address sees what a graph
    would show him: what the work read from a tensor that was rebound, or on the host, stays as it was.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        kind = self.device.type
        if kind != "cpu" and kind not in GRAPHS:
            raise UnsupportedByProvider(f"no graphs on {device}; supported: {', '.join(GRAPHS)}, and replay on a cpu")
        self._torch: Any = None if kind == "cpu" else _with_graphs(kind)
        self._pool = None if kind == "cpu" else self._torch.graph_pool_handle()

    def record(self, work: Callable[[], Any]) -> Recording:
        """Run the work to warm up, then record it."""
        if self._torch is None:
            return _Again(work)
        stream, current = self._torch.Stream(), self._torch.current_stream()
        stream.wait_stream(current)
        with self._torch.stream(stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(stream)
        graph = getattr(self._torch, GRAPHS[self.device.type])()
        with self._torch.graph(graph, pool=self._pool, stream=stream):
            result = work()
        return _Graph(graph, result, work)


def _with_graphs(kind: str) -> Any:
    """The module of torch for a kind of device."""
    module: Any = getattr(torch, kind)
    if not hasattr(module, GRAPHS[kind]):
        raise UnsupportedByProvider(
            f"torch {torch.__version__} has no torch.{kind}.{GRAPHS[kind]}, so no graphs; supported: torch 2.11 or "
            "newer. Install it, or run the steps without graphs"
        )
    return module


class _Graph:
    def __init__(self, graph: Any, result: Any, work: Callable[[], Any]) -> None:
        self.graph, self.result = graph, result
        self.work = work  # kept: a graph knows addresses only, and what the work refers to must stay where it is

    def replay(self) -> None:
        self.graph.replay()


class _Again:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.result = work, work()

    def replay(self) -> None:
        copy_into(self.result, self.work())


def copy_into(old: Any, new: Any) -> None:
    """Every tensor of `new` copied over its counterpart in `old`: tensors, sequences, mappings, dataclasses of them."""
    if isinstance(old, Tensor):
        if old.data_ptr() != new.data_ptr():  # a view of a static buffer is there already
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in old.stride())  # of an expanded one
            old[once].copy_(new[once])
    elif isinstance(old, Mapping):
        for key in old:
            copy_into(old[key], new[key])
    elif isinstance(old, tuple | list):
        for one, other in zip(old, new, strict=True):
            copy_into(one, other)
    elif is_dataclass(old):
        for field in fields(old):
            copy_into(getattr(old, field.name), getattr(new, field.name))
