"""One step by each rung of a ladder: gathered keys, pages, split keys, one schedule a step, a graph, fused drafts.

All rungs of a step are timed in one run, in turns, and a row compares a rung with the one below it. Two times are
taken, metadata included: by the clock, from the call until the device is idle; and on the device, from a captured graph
of the same work, which hides what the host costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cuda_steps import OurStep, assert_same, free, short
from benchmarks.plain_steps import kernels
from benchmarks.step_problems import StepProblem, binary_trees, problem
from benchmarks.timing import Row, clock_steps, gpu_rounds, read_ceiling_bytes_per_us, row
from fa_ref import ForwardMode

NAIVE = "naive: gathered keys, torch SDPA per request"
PAGED = "paged: one kernel call a layer, one split"
SPLIT = "split-KV: the kernel picks the splits"
ONCE = "metadata once: one schedule a step"
GRAPH = "in-graph: planning and layers replayed"
TWO_CALLS = "two calls: drafts as a table, and a merge"
FUSED = "fused suffix: drafts and merge in one kernel"
ON_DEVICE = (NAIVE, PAGED, SPLIT, ONCE)  # a graph of these differs on the device too
K = 1024
DECODE = [(8, 4 * K), (1, 4 * K)]
TREES = [(16, 2 * K, 64)]
Make = Callable[..., StepProblem]


class NaiveStep:
    """No kernel that knows pages: each request's keys are copied together, and one dense call made for it."""

    def __init__(self, given: StepProblem) -> None:
        batch = given.batch
        assert batch.seq_lens_cpu is not None
        self.given = given
        self.requests = list(zip(batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist(), strict=True))
        self.q = given.q.view(len(self.requests), -1, 1, given.layers[0].head_dim)

    def run(self) -> Tensor:
        rows = self.given.config.req_to_token_pool.req_to_token
        slots = [rows[request, :length] for request, length in self.requests]
        for layer in self.given.layers:
            keys, values = self.given.config.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            out = [
                scaled_dot_product_attention(
                    q[None],
                    keys[own].transpose(0, 1)[None],
                    values[own].transpose(0, 1)[None],
                    scale=layer.scaling,
                    enable_gqa=True,
                )
                for q, own in zip(self.q, slots, strict=True)
            ]
        return torch.cat(out).view(self.given.q.shape)


class PagedStep:
    """One page table a step and one bare kernel call a layer, from Python each time."""

    def __init__(self, given: StepProblem, *, num_splits: int = 0, schedule_once: bool = False) -> None:
        self.given, self.num_splits, self.schedule_once = given, num_splits, schedule_once
        self.attend = kernels(str(given.config.device)).attend
        self.q = given.q.view(given.batch.batch_size, -1, given.layers[0].head_dim)

    def run(self) -> Tensor:
        arguments, page = self.metadata(), self.given.config.page_size
        for layer in self.given.layers:
            keys, values = self.given.config.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            out = self.attend(
                q=self.q,
                k_cache=keys.view(-1, page, *keys.shape[1:]),
                v_cache=values.view(-1, page, *values.shape[1:]),
                softmax_scale=layer.scaling,
                **arguments,
            )
        return out.view(self.given.q.shape)

    def metadata(self) -> dict[str, Any]:
        """The arguments that all layers of the step share."""
        batch, page = self.given.batch, self.given.config.page_size
        assert batch.seq_lens_cpu is not None
        rows, longest = self.given.config.req_to_token_pool.req_to_token, int(batch.seq_lens_cpu.max())
        slots = rows[batch.req_pool_indices, :longest][:, ::page]
        shared = dict(
            page_table=(slots // page).contiguous() if page > 1 else slots,
            cache_seqlens=batch.seq_lens.int(),
            cu_seqlens_q=torch.arange(batch.batch_size + 1, dtype=torch.int32, device=slots.device),
            max_seqlen_q=1,
            causal=True,
            num_splits=self.num_splits,
        )
        return shared | (schedule(self.given, shared) if self.schedule_once else {})


def schedule(given: StepProblem, shared: dict[str, Any]) -> dict[str, Any]:
    """The tile schedule of a step's calls; a CPU has none."""
    if str(given.config.device) == "cpu":
        return {}
    from sgl_kernel.flash_attn import get_scheduler_metadata

    layer, page = given.layers[0], given.config.page_size
    metadata = get_scheduler_metadata(
        batch_size=given.batch.batch_size,
        max_seqlen_k=shared["page_table"].shape[1] * page,
        num_heads=layer.tp_q_head_num,
        num_heads_k=layer.tp_k_head_num,
        headdim=layer.head_dim,
        headdim_v=layer.v_head_dim,
        qkv_dtype=given.q.dtype,
        page_size=page,
        **{name: value for name, value in shared.items() if name != "page_table"},
    )
    return dict(scheduler_metadata=metadata)


def decode_rungs(given: StepProblem) -> dict[str, Any]:
    """Every way to do a decode step, the slowest idea first."""
    return {
        NAIVE: NaiveStep(given),
        PAGED: PagedStep(given, num_splits=1),
        SPLIT: PagedStep(given),
        ONCE: PagedStep(given, schedule_once=True),
        GRAPH: OurStep(given),
    }


def verify_rungs(given: StepProblem) -> dict[str, Any]:
    """Both ways to verify a tree, each planned and replayed in a graph."""
    expanded, fused = (
        replace(given, config=replace(given.config, tree_attention=name)) for name in ("expand", "fused")
    )
    return {TWO_CALLS: OurStep(expanded), FUSED: OurStep(fused)}


# ---- rows ------------------------------------------------------------------------------------------------------------


def ladder_rows(name: str, given: StepProblem, rungs: dict[str, Any], ceiling: float) -> Iterator[Row]:
    """A row for each rung but the lowest, against the rung below it. ceiling: bytes a microsecond."""
    for lower, upper in pairwise(rungs):
        assert_same(f"{name}, {upper}", lower, rungs[upper], rungs[lower])
    floor = read_bytes(given) / ceiling
    on_device = {rung: step.run for rung, step in rungs.items() if rung in ON_DEVICE}
    if on_device:
        times = dict(zip(on_device, gpu_rounds(*on_device.values()), strict=True))
        for lower, upper in pairwise(times):
            yield row(f"ladder: {name}, on the device, {upper}", lower, times[upper], times[lower], floor, given.cached)
    clocked = dict(zip(rungs, clock_steps(*(step.run for step in rungs.values())), strict=True))
    for lower, upper in pairwise(clocked):
        mine, theirs = clocked[upper], clocked[lower]
        yield replace(
            row(f"ladder: {name}, by the clock, {upper}", lower, mine.whole, theirs.whole, floor, given.cached),
            host_us=(round(median(mine.host), 2), round(median(theirs.host), 2)),
        )


def read_bytes(given: StepProblem) -> int:
    """Bytes of keys and values that the layers of a step must read once: what is cached, and drafts."""
    lens, layer = given.batch.seq_lens_cpu, given.layers[0]
    assert lens is not None
    drafts = 0 if given.batch.forward_mode.is_decode() else given.q.shape[0]
    token = layer.tp_k_head_num * (layer.head_dim + layer.v_head_dim) * given.config.kv_cache_dtype.itemsize
    return (int(lens.sum()) + drafts) * token * len(given.layers)


def named_ladders(make: Make) -> Iterator[tuple[str, Callable[[], tuple[StepProblem, dict[str, Any]]]]]:
    """What is measured, by name; the problem is made when it is measured."""
    for requests, context in DECODE:

        def decode(requests: int = requests, context: int = context) -> tuple[StepProblem, dict[str, Any]]:
            given = make(ForwardMode.DECODE, requests, context)
            return given, decode_rungs(given)

        yield f"decode {requests} x {short(context)}", decode
    for requests, context, drafts in TREES:

        def verify(requests: int = requests, context: int = context, drafts: int = drafts) -> Any:
            given = make(ForwardMode.TARGET_VERIFY, requests, context, trees=binary_trees(requests, drafts))
            return given, verify_rungs(given)

        yield f"tree verify T {drafts}, {requests} x {short(context)}", verify


def rows(device: str = "cuda", only: str = "") -> Iterator[Row]:
    """The rows of the ladders whose name contains `only`, as they are measured."""
    assert device == "cuda", f"these rows measure CUDA graphs; got device {device!r}"
    ceiling = read_ceiling_bytes_per_us()
    for name, made in named_ladders(problem):
        if only in f"ladder: {name}":
            yield from ladder_rows(name, *made(), ceiling)
            free()
