"""GPU work by graph replay, host work on an idle stream, CPU work by the clock; medians of interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

Work = Callable[[], Any]
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, measured in one run. ratio: how many times faster ours is than the peer."""

    row: str
    peer: str
    ours_us: float
    peer_us: float
    ratio: float
    spread: float  # of ours: (max - min) / median over the rounds
    floor_us: float | None = None  # the bytes or products that must be done, over the ceiling measured in this run
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def row(
    name: str, peer: str, ours: list[float], other: list[float], floor_us: float | None = None, note: str = ""
) -> Row:
    """A Row from rounds of both sides, in microseconds."""
    mine, theirs = statistics.median(ours), statistics.median(other)
    return Row(
        row=name, peer=peer, ours_us=round(mine, 2), peer_us=round(theirs, 2), ratio=round(theirs / mine, 3),
        spread=round((max(ours) - min(ours)) / mine, 3),
        floor_us=None if floor_us is None else round(floor_us, 2), note=note,
    )  # fmt: skip


def gpu_rounds(*works: Work, repeats: int = 1) -> list[list[float]]:
    """Microseconds of each work, once per round, rounds interleaved. `repeats`: how often one call of a work repeats.

    Each work is captured in a CUDA graph, so what is timed is the device's work alone.
    """
    graphs = [_capture(work) for work in works]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for graph, kept in zip(graphs, times, strict=True):
            kept.append(_replay_us(graph) / repeats)
    return times


def _capture(work: Work) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()  # the inputs are there before another stream reads them
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Mean of enough back-to-back replays to fill 20 ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    count = max(3, min(200, int(20 / max(start.elapsed_time(end), 1e-3))))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count * 1000


def host_rounds(*works: Work, calls: int = 50) -> list[list[float]]:
    """Microseconds the host spends issuing each work, on a stream that is idle when it starts."""
    times: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(ROUNDS):
        for work, kept in zip(works, times, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                work()
            kept.append((time.perf_counter() - started) / calls * 1e6)
            torch.cuda.synchronize()
    return times


def clock_rounds(*works: Work) -> list[list[float]]:
    """Microseconds of each work by the clock, once per round, rounds interleaved: for CPU kernels."""
    times: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(ROUNDS):
        for work, kept in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            kept.append((time.perf_counter() - started) * 1e6)
    return times


def read_ceiling_bytes_per_us() -> float:
    """Bytes a microsecond of reading 4 GB in the fastest of some large reductions: the ceiling for bandwidth rows."""
    data = torch.randn(2**30, device="cuda")
    works = [
        data.amax,
        data.sum,
        lambda: data.view(2**12, -1).amax(dim=1),
        lambda: data.view(2**16, -1).amax(dim=1),
        lambda: data.view(2**16, -1).sum(dim=1),
    ]
    fastest = min(statistics.median(rounds) for rounds in gpu_rounds(*works))
    return data.numel() * data.element_size() / fastest


def matmul_ceiling_flop_per_us() -> float:
    """bf16 products and sums a microsecond of an 8192 cubed matrix product."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    (rounds,) = gpu_rounds(lambda: a @ b)
    return 2 * 8192**3 / statistics.median(rounds)
