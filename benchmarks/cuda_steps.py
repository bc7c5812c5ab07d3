"""Attention of whole steps through graphs, metadata included: decode, verify, and a whole speculative step.

Three numbers for both sides of a row: from the call until the device is idle (the row's time), until the call returns,
and what is launched outside of graphs. Inputs lie where the graphs read them; nothing is written to the cache.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fa_fast
from benchmarks.flashinfer_steps import FlashInferStep, installed
from benchmarks.plain_steps import PlainStep
from benchmarks.step_problems import StepProblem, binary_trees, problem
from benchmarks.timing import Calls, Row, calls_of, clock_steps, row
from fa_fast.graphs import GraphRunner
from fa_ref import DraftInput, ForwardBatch, ForwardMode

PLAIN = "a plain replay: metadata by torch outside the graph, sgl-kernel calls inside"
FLASHINFER = "FlashInfer: its plan outside the graph, its kernels inside"
PEERS: dict[str, Any] = {PLAIN: PlainStep, FLASHINFER: FlashInferStep}
CHAIN, TOPK, STEPS, EXTEND = 4, 4, 3, 4  # tokens of a chain; branches and steps of a draft; tokens of a draft extend
K = 1024
DECODE = [(1, K), (1, 4 * K), (1, 32 * K), (1, 128 * K), (8, 4 * K), (8, 128 * K), (32, 8 * K), (64, 4 * K),
          (64, 8 * K), (256, K), (256, 4 * K)]  # fmt: skip
PAGED = [(1, 4 * K), (64, 8 * K)]  # decode at page size 64 too
CHAINS = [(1, 4 * K), (16, 8 * K), (64, 4 * K), (256, 2 * K)]
TREES = [(1, 8 * K, 16), (16, 8 * K, 16), (16, 2 * K, 64), (64, 4 * K, 8), (1, 128 * K, 16)]
WHOLE = [(1, 4 * K, 8), (16, 4 * K, 8), (64, 4 * K, 8)]
HOST = [(1, 4 * K), (64, 4 * K), (256, 4 * K)]
WITH_FLASHINFER = {
    "decode 1 x 4K, page 1",
    "decode 64 x 8K, page 1",
    "tree verify T 16, 16 x 8K",
    "tree verify T 64, 16 x 2K",
}
Make = Callable[..., StepProblem]  # `problem`, for a device and sizes of heads


class OurStep:
    """A GraphRunner over the layers, its batch written where the graph reads it."""

    def __init__(self, given: StepProblem) -> None:
        batch, info = given.batch, given.batch.spec_info
        drafts = isinstance(info, DraftInput)
        if drafts:
            backend: Any = fa_fast.FlashAttentionMultiStepBackend(given.config, info.topk, info.num_steps)
        else:
            backend = fa_fast.FlashAttentionBackend(given.config)

        def step(batch: ForwardBatch, q: Tensor) -> tuple[Tensor, ...]:
            outs = []
            for one in backend.attn_backends if drafts else [backend]:
                for layer in given.layers:
                    out = one.forward(q, None, None, layer, batch)
                outs.append(out)
            return tuple(outs)

        extends = batch.forward_mode.is_draft_extend()
        self.runner = GraphRunner(
            backend, step, batch.forward_mode, [batch.batch_size], dict(q=given.q), spec_info=info,
            draft_tokens=given.q.shape[0] // batch.batch_size if extends else 0,
        )  # fmt: skip
        self.given = given
        self.batch, self.inputs = self.runner.place(batch.batch_size)
        self.runner.run(batch, q=given.q)  # copies everything to where it stays

    def run(self) -> Any:
        return self.runner.run(self.batch, **self.inputs)

    def metadata(self) -> None:
        """A run without its graph: what the host does for the batch that lies in place."""
        self._without_graph(self.batch, self.inputs)

    def copied_metadata(self) -> None:
        """The same where the batch is the caller's own: checked and copied."""
        self._without_graph(self.given.batch, self.inputs)

    def _without_graph(self, batch: Any, inputs: dict[str, Tensor]) -> None:
        (recording,) = self.runner._recorded.values()
        replay, recording.replay = recording.replay, _nothing
        try:
            self.runner.run(batch, **inputs)
        finally:
            recording.replay = replay


def _nothing() -> None:
    pass


class Together:
    """Several steps, one after another."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def run(self) -> list[Any]:
        return [step.run() for step in self.steps]


# ---- the steps -------------------------------------------------------------------------------------------------------


def decode(make: Make, requests: int, context: int, page: int = 1) -> list[StepProblem]:
    return [make(ForwardMode.DECODE, requests, context, page_size=page)]


def chain(make: Make, requests: int, context: int) -> list[StepProblem]:
    return [make(ForwardMode.TARGET_VERIFY, requests, context, draft_token_num=CHAIN)]


def tree(make: Make, requests: int, context: int, drafts: int) -> list[StepProblem]:
    return [make(ForwardMode.TARGET_VERIFY, requests, context, trees=binary_trees(requests, drafts))]


def speculation(make: Make, requests: int, context: int, drafts: int) -> list[StepProblem]:
    """Every step of a draft and a draft extend in one layer, and the tree verified in all."""
    return [
        make(ForwardMode.DECODE, requests, context, topk=TOPK, num_steps=STEPS, layers=1),
        *tree(make, requests, context, drafts),
        make(ForwardMode.DRAFT_EXTEND, requests, context - EXTEND, new_lens=[EXTEND] * requests, layers=1),
    ]


def named_steps() -> Iterator[tuple[str, Callable[[Make], list[StepProblem]]]]:
    """What is measured, by name."""
    for requests, context in DECODE:
        yield f"decode {requests} x {short(context)}, page 1", partial(decode, requests=requests, context=context)
    for requests, context in PAGED:
        yield (
            f"decode {requests} x {short(context)}, page 64",
            partial(decode, requests=requests, context=context, page=64),
        )
    for requests, context in CHAINS:
        yield (
            f"chain verify T {CHAIN}, {requests} x {short(context)}",
            partial(chain, requests=requests, context=context),
        )
    for requests, context, drafts in TREES:
        yield (
            f"tree verify T {drafts}, {requests} x {short(context)}",
            partial(tree, requests=requests, context=context, drafts=drafts),
        )
    for requests, context, drafts in WHOLE:
        yield (
            f"whole speculative step, topk {TOPK}, {STEPS} draft steps, T {drafts}, {requests} x {short(context)}",
            partial(speculation, requests=requests, context=context, drafts=drafts),
        )


def short(tokens: int) -> str:
    return f"{tokens // K}K" if tokens % K == 0 else str(tokens)


# ---- rows ------------------------------------------------------------------------------------------------------------


def compared(name: str, peer_name: str, ours: Any, peer: Any, note: str = "", calls: Any = None) -> Row:
    """The row of two steps, after a check that they give the same. calls: of both, as `count_calls` finds them."""
    assert_same(name, peer_name, ours, peer)
    mine, theirs = clock_steps(ours.run, peer.run)
    return replace(
        row(name, peer_name, mine.whole, theirs.whole, note=note),
        host_us=(round(median(mine.host), 2), round(median(theirs.host), 2)),
        launches=calls and (calls[0].launches, calls[1].launches),
        waits=calls and (calls[0].waits, calls[1].waits),
    )


def assert_same(name: str, peer_name: str, ours: Any, peer: Any) -> None:
    """Raise AssertionError unless both give the same, as far as bf16 goes."""
    for mine, theirs in zip(flat(ours.run()), flat(peer.run()), strict=True):
        difference = (mine.float() - theirs.float().view_as(mine)).abs().max() / theirs.float().abs().max()
        if not difference < 0.05:
            raise AssertionError(f"{name}: ours and {peer_name} differ by {float(difference):.3f} of the largest value")


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [one for part in result for one in flat(part)]


def sides(given: list[StepProblem], peer: str) -> tuple[Together, Together]:
    """Our steps and the peer's."""
    return Together(*map(OurStep, given)), Together(*map(PEERS[peer], given))


def step_rows(make: Make, peer: str, only: str) -> Iterator[Row]:
    calls = calls_elsewhere(peer, only)
    for name, problems in chosen(peer, only):
        given = problems(make)
        cached = "; ".join({one.cached for one in given if one.cached})
        yield compared(f"step: {name}", peer, *sides(given, peer), note=cached, calls=calls.get(name))
        free()


def host_rows(make: Make, requests: int, context: int) -> Iterator[Row]:
    """What the host does for a decode ahead of its graph."""
    (given,) = decode(make, requests, context)
    ours, peer = OurStep(given), PlainStep(given)
    size = f"{requests} x {short(context)}"
    for name, work, note in (
        ("in place", ours.metadata, ""),
        ("copied", ours.copied_metadata, "rows, lengths and slots are checked and copied; the peer reads the caller's"),
    ):
        mine, theirs = clock_steps(work, peer.metadata, calls=20)
        yield row(f"host: metadata of a decode replay, {name}, {size}", PLAIN, mine.host, theirs.host, note=note)


def rows(device: str = "cuda", only: str = "") -> Iterator[Row]:
    """The rows whose name contains `only`, as they are measured."""
    assert device == "cuda", f"these rows measure CUDA graphs; got device {device!r}"
    yield from step_rows(problem, PLAIN, only)
    for requests, context in HOST:
        yield from (found for found in host_rows(problem, requests, context) if only in found.row)
        free()
    if installed():
        yield from step_rows(problem, FLASHINFER, only)


def chosen(peer: str, only: str) -> list[tuple[str, Callable[[Make], list[StepProblem]]]]:
    """The steps that are measured against a peer, as far as the names of their rows contain `only`."""
    names = None if peer == PLAIN else WITH_FLASHINFER
    return [(name, f) for name, f in named_steps() if only in f"step: {name}" and (names is None or name in names)]


# ---- calls of the runtime --------------------------------------------------------------------------------------------


def calls_elsewhere(peer: str, only: str) -> dict[str, tuple[Calls, Calls]]:
    """`count_calls` in a process of its own: a profiler slows what is timed after it."""
    found = subprocess.run([sys.executable, "-m", __name__, peer, only], capture_output=True, text=True)
    if found.returncode:
        print(f"launches are not counted:\n{found.stderr}", file=sys.stderr)
        return {}
    (counts,) = (line for line in found.stdout.splitlines() if line.startswith("{"))
    return {name: (Calls(*mine), Calls(*theirs)) for name, (mine, theirs) in json.loads(counts).items()}


def count_calls(make: Make, peer: str, only: str) -> dict[str, tuple[Calls, Calls]]:
    """What our step and the peer's call. It does not depend on lengths or layers: one layer, a short context."""

    def short_one(mode: ForwardMode, requests: int, context: int, **settings: Any) -> StepProblem:
        return make(mode, requests, min(context, 256), **settings | dict(layers=1))

    works = {}
    for name, problems in chosen(peer, only):
        works[f"ours: {name}"], works[f"theirs: {name}"] = (side.run for side in sides(problems(short_one), peer))
    calls = calls_of(works)
    return {name: (calls[f"ours: {name}"], calls[f"theirs: {name}"]) for name, _ in chosen(peer, only)}


def free() -> None:
    """Give back the caches of the rows before: they hold each other by cycles."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":  # python -m benchmarks.cuda_steps PEER TEXT: the calls of the rows whose name contains it
    print(json.dumps(count_calls(problem, *sys.argv[1:])))
