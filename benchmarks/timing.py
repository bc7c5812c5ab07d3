"""GPU work by graph replay, host work on an idle stream, CPU work by the clock; medians of interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

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
    host_us: tuple[float, float] | None = None  # until the call returns, ours and the peer's; rows of whole steps
    launches: tuple[int, int] | None = None  # outside of graphs, likewise
    waits: tuple[int, int] | None = None  # calls that wait for the device, likewise

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it, without what was not measured."""
        kept = ("floor_us", "note")
        return {name: value for name, value in asdict(self).items() if value is not None or name in kept}


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


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """One work by the clock, started on an idle device; microseconds, an entry a round."""

    whole: list[float]  # from the call until the device is idle again
    host: list[float]  # until the call returns


def clock_steps(*works: Work, calls: int = 5) -> list[Clocked]:
    """Medians of some calls of each work, once per round, rounds interleaved."""
    found = [Clocked(whole=[], host=[]) for _ in works]
    for work in works:
        work()
    for _ in range(ROUNDS):
        for work, kept in zip(works, found, strict=True):
            whole, host = zip(*(_clocked(work) for _ in range(calls)), strict=True)
            kept.whole.append(statistics.median(whole))
            kept.host.append(statistics.median(host))
    return found


def _clocked(work: Work) -> tuple[float, float]:
    _wait()
    started = time.perf_counter()
    work()
    returned = time.perf_counter()
    _wait()
    return (time.perf_counter() - started) * 1e6, (returned - started) * 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Calls(NamedTuple):
    """Calls of the CUDA runtime that a work makes."""

    launches: int  # kernels, copies and fills, outside of graphs
    graphs: int
    waits: int  # for the device, a stream or an event


def calls_of(works: dict[str, Work]) -> dict[str, Calls]:
    """The calls of one run of each work, from one profile of all. It slows what is timed later in the same process."""
    for work in works.values():
        work()
    _wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as found:
        for name, work in works.items():
            with record_function(name):
                work()
            _wait()
    events = [event for event in found.events() if event.device_type == DeviceType.CPU]
    spans = {event.name: event.time_range for event in events if event.name in works}
    return {name: _calls_within(spans[name], events) for name in works}


def _calls_within(span: Any, events: list[Any]) -> Calls:
    names = [event.name for event in events if span.start <= event.time_range.start <= span.end]
    return Calls(
        launches=sum(name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")) for name in names),
        graphs=sum(name.startswith("cudaGraphLaunch") for name in names),
        waits=sum(name.startswith("cuda") and "Synchronize" in name for name in names),
    )


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
