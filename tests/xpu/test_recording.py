"""How a graph of an Intel GPU is captured: the order of calls into a torch.xpu that keeps a log, on CPU tensors.

Everything the log takes is bound against torch's own signatures, which lack what torch.cuda's have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa_fast.recording import WARM_UPS, Recorder
from fa_ref import UnsupportedByProvider


class Stream:
    def __init__(self, log: list[str], name: str = "side") -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")


def logging(log: list[str]) -> Any:
    """A torch.xpu that runs everything at once and writes down what it was asked."""
    takes = inspect.signature(torch.xpu.graph.__init__)
    main = Stream(log, "main")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    @contextmanager
    def capture(*args: Any, **named: Any) -> Iterator[None]:
        given = takes.bind(None, *args, **named).arguments
        assert isinstance(given["xpu_graph"], Graph)
        log.append(f"capture in {given['pool']} on {given['stream'].name}")
        yield
        log.append("captured")

    return SimpleNamespace(
        Stream=lambda: Stream(log), current_stream=lambda: main, stream=on, graph=capture,
        XPUGraph=lambda: Graph(log), graph_pool_handle=lambda: "pool",
    )  # fmt: skip


def test_torch_takes_no_error_mode_for_these_captures():
    """It does for CUDA, so a shared call that passed one would fail on an Intel GPU alone."""
    assert "capture_error_mode" in inspect.signature(torch.cuda.graph.__init__).parameters
    assert "capture_error_mode" not in inspect.signature(torch.xpu.graph.__init__).parameters


def test_a_recording_warms_up_beside_the_main_stream_and_captures_once(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(torch, "xpu", logging(log))
    kept = torch.zeros(2)

    def work() -> torch.Tensor:
        log.append("work")
        return kept

    recorder = Recorder("xpu")
    first, second = recorder.record(work), recorder.record(work)
    once = [
        "side waits for main",
        "on side",
        *["work"] * WARM_UPS,
        "off side",
        "main waits for side",
        "capture in pool on side",
        "work",
        "captured",
    ]
    assert log == once + once
    assert first.result is second.result is kept
    first.replay()
    assert log[len(once) * 2 :] == ["replay"]


def test_a_torch_without_graphs_of_these_devices_says_which_has_them(monkeypatch):
    older = logging([])
    del older.XPUGraph, older.graph, older.graph_pool_handle
    monkeypatch.setattr(torch, "xpu", older)
    with pytest.raises(UnsupportedByProvider, match=r"no torch\.xpu\.XPUGraph.* supported: torch 2\.11 or newer"):
        Recorder("xpu:0")
