"""Reports 21 to 28: tile schedules that are older than their lengths, and results that depend on the neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_ref
import fa_ref.api.planned
from fa_fast.kernels import torch_cpu
from fa_ref import BadBatch, ForwardMode, LayerKind
from fa_ref.cases import Case
from fa_ref.numerics import judge
from tests.support import case_on
from tests.test_graphs import FORMS, REPLAYS, REQUESTS, at, eager, every_form, problem, runner_of, same, step_of
from tests.test_graphs import T as DRAFTS

PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])
KINDS = pytest.mark.parametrize("kind", ["full", "sliding", "local"])
every_way = pytest.mark.parametrize("way", ["eager", "graph"])


# ---- 21 to 25: the schedule of a call ----


class Scheduler:
    """A provider's tile scheduler: a schedule remembers what it was made for, and every call is held against it."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []  # by number, which is the schedule
        self.calls: list[int] = []  # the schedule that each call of the kernel brought
        self.wrong: list[str] = []

    def get_scheduler_metadata(self, **given: Any) -> Tensor:
        kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        self.made.append(kept)
        return torch.tensor(len(self.made) - 1)

    def prepared(self, function: str, *, scheduler_metadata: Any = None, **fixed: Any) -> Callable[..., Any]:
        kernel = RIGHT(function, **fixed)

        def call(**given: Any) -> Any:
            if function == "flash_attn_with_kvcache":
                assert scheduler_metadata is not None
                self.calls.append(int(scheduler_metadata))
                self.hold(self.made[self.calls[-1]], fixed | given)
            return kernel(**given)

        return call

    def hold(self, made: dict[str, Any], call: dict[str, Any]) -> None:
        """Note every argument in which the schedule and the call differ."""
        q, k, v, table = (call[name] for name in ("q", "k_cache", "v_cache", "page_table"))
        expected = dict(
            sequences=len(call["cache_seqlens"]), heads=q.shape[1], kv_heads=k.shape[2], head_dim=k.shape[3],
            v_head_dim=v.shape[3], dtype=k.dtype, page_size=k.shape[1], queries=q.shape[0],
            has_softcap=call["softcap"] != 0, indexed=call["cache_batch_idx"] is not None,
            max_seqlen_k=table.shape[1] * k.shape[1],
        )  # fmt: skip
        names = ("cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "causal", "window_size", "num_splits")
        for name, right in (expected | {name: call[name] for name in names}).items():
            found = made[name]
            if not (torch.equal(found, right) if isinstance(right, Tensor) else found == right):
                self.wrong.append(f"{name}: the schedule has {found}, the call {right}")
        if int(call["cache_seqlens"].max()) > made["longest_k"]:
            self.wrong.append(f"longest_k {made['longest_k']} bounds not {call['cache_seqlens'].tolist()}")


RIGHT = torch_cpu.prepared


@pytest.fixture
def scheduler(monkeypatch):
    found = Scheduler()
    monkeypatch.setattr(torch_cpu, "get_scheduler_metadata", found.get_scheduler_metadata)
    monkeypatch.setattr(torch_cpu, "prepared", found.prepared)
    return found


def way_to_run(case: Case, way: str, buckets: tuple[int, ...] = (REQUESTS,)) -> Callable[..., Tensor]:
    """One backend for all batches, eager or captured."""
    if way == "graph":
        return runner_of(case, buckets).run
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    step = step_of(case, backend)

    def run(batch: Any, **inputs: Tensor) -> Tensor:
        backend.init_forward_metadata(batch)
        return step(batch, **inputs)

    return run


@every_way
@every_form
@KINDS
@PAGES
def test_report_21_a_schedule_is_as_new_as_its_lengths(page_size, kind, form, way, scheduler):
    """sglang PR 24632: metadata older than the lengths."""
    case = problem("cpu", form, kind, page_size)
    run = way_to_run(case, way)
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        before = len(scheduler.made), len(scheduler.calls)
        run(batch, **inputs)
        assert len(scheduler.made) > before[0], "no new schedule for new lengths"
        assert len(scheduler.calls) > before[1]
        assert min(scheduler.calls[before[1] :]) >= before[0], "a call took the schedule of an older step"


@every_form
@KINDS
def test_report_21_lengths_that_change_in_place_after_planning_are_refused(kind, form, scheduler):
    """The kind of sglang PR 24632: a server writes its next lengths while this step's layers still run."""
    case = problem("cpu", form, kind)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    step, (batch, inputs) = step_of(case, backend), at(case, *REPLAYS[0])
    backend.init_forward_metadata(batch)
    batch.seq_lens.add_(1)
    before = case.config.token_to_kv_pool.k_buffer[0].clone()
    with pytest.raises(BadBatch, match=r"seq_lens is \[.*plan every new batch"):
        step(batch, **inputs)
    assert scheduler.calls == []
    assert torch.equal(before.view(torch.uint8), case.config.token_to_kv_pool.k_buffer[0].view(torch.uint8))
    batch.seq_lens.sub_(1)
    backend.init_forward_metadata(batch)
    assert torch.equal(step(batch, **inputs), eager(case, batch, inputs))


@every_form
@KINDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_report_21_where_lengths_may_not_be_read_a_plan_keeps_its_own(
    page_size, dtype, kind, form, scheduler, monkeypatch
):
    """The same on a GPU, which is not asked: schedule and call are of the lengths that were planned, both."""
    monkeypatch.setattr(fa_ref.api.planned, "reads_values", lambda config: False)
    case = problem("cpu", form, kind, page_size)
    batch, inputs = at(case, *REPLAYS[0])
    right = eager(case, batch, inputs)
    batch = replace(batch, seq_lens=batch.seq_lens.to(dtype), req_pool_indices=batch.req_pool_indices.to(dtype))
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_forward_metadata(batch)
    batch.seq_lens.add_(1)
    batch.req_pool_indices.copy_(batch.req_pool_indices.flip(0))
    assert torch.equal(step_of(case, backend)(batch, **inputs), right)
    assert scheduler.wrong == []


@every_way
@every_form
@KINDS
@PAGES
def test_report_23_one_record_feeds_the_schedule_and_its_call(page_size, kind, form, way, scheduler):
    """vllm PR 28702: metadata made with other arguments than the call."""
    case = problem("cpu", form, kind, page_size)
    run = way_to_run(case, way)
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        run(batch, **inputs)
    assert len(scheduler.calls) >= len(REPLAYS)
    assert scheduler.wrong == []


def numbers_of(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a graph holds of each schedule as plain values, and so keeps from its capture."""
    return [{name: value for name, value in one.items() if not isinstance(value, Tensor)} for one in made]


@every_form
@PAGES
def test_report_22_a_capture_has_the_splits_of_every_replay(page_size, form, scheduler):
    """vllm PR 20301: captured with fewer splits than a replay used. The number is one for all lengths."""
    case = problem("cpu", form, page_size=page_size)
    run = way_to_run(case, "graph")
    captured = len(scheduler.made)
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        run(batch, **inputs)
    assert len({made["num_splits"] for made in scheduler.made}) == 1
    assert len(scheduler.made) > captured
    assert scheduler.wrong == []


@every_form
@KINDS
@PAGES
def test_report_25_what_a_graph_holds_as_numbers_bounds_every_length_to_come(page_size, kind, form, scheduler):
    """Dao 1164, transformers PR 45323: a host max_seqlen of the capture baked into the graph."""
    case = problem("cpu", form, kind, page_size)
    run = way_to_run(case, "graph")
    numbers = numbers_of(scheduler.made)[0]
    width = case.config.req_to_token_pool.req_to_token.shape[1]
    assert kind != "full" or numbers["longest_k"] >= width
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        before = len(scheduler.made)
        found = run(batch, **inputs).clone()
        assert numbers_of(scheduler.made[before:]) == [numbers] * (len(scheduler.made) - before)
        assert same(case, found, eager(case, batch, inputs))
    assert scheduler.wrong == []  # no length was beyond its schedule's longest_k


@pytest.mark.parametrize("form", ["decode", "draft-chain", "verify-chain", "draft-extend"])
@PAGES
def test_report_24_a_schedule_is_that_of_the_padded_batch(page_size, form, scheduler):
    """vllm 23789: metadata for the unpadded batch. Four requests in a bucket of six."""
    case = problem("cpu", form, page_size=page_size)
    run = way_to_run(case, "graph")
    batch, inputs = at(case, [33, 5, 17, 20], [4, 0, 2, 1])
    assert same(case, run(batch, **inputs), eager(case, batch, inputs))
    made = scheduler.made[scheduler.calls[-2]]  # the eager step made the last
    assert made["sequences"] == REQUESTS
    shortest = {"draft-chain": 3, "verify-chain": 1 + DRAFTS, "draft-extend": 3, "decode": 1}[form]
    assert made["cache_seqlens"][4:].tolist() == [shortest] * 2
    assert scheduler.wrong == []


@pytest.mark.gpu
@every_form
@KINDS
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_reports_21_to_24_on_a_gpu_schedules_follow_lengths(page_size, kind, form):
    """The kernels' own schedules, captured at the shortest lengths: to the longest and back, with fewer rows too."""
    case = problem("cuda", form, kind, page_size)
    runner = runner_of(case, buckets=(REQUESTS,))
    for lens, order in (*REPLAYS, ([1] * REQUESTS, list(range(REQUESTS))), *REPLAYS):
        batch, inputs = at(case, lens, order)
        found = runner.run(batch, **inputs).clone()
        assert found.isfinite().all()
        assert same(case, found, eager(case, batch, inputs)), (lens, order)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("page_size", [1, 64])
def test_report_22_on_a_gpu_a_capture_at_length_one_has_splits_for_100_000_keys(page_size, requests):
    case = case_on(
        "cuda", ForwardMode.DECODE, prefix_lens=[100_000] * requests, page_size=page_size, heads=8, kv_heads=1,
        poison=False,
    )  # fmt: skip
    backend = fa_fast.FlashAttentionBackend(case.config)
    step = step_of(case, backend)
    runner = fa_fast.graphs.GraphRunner(
        backend, step, ForwardMode.DECODE, (8,),
        {name: getattr(case, name).repeat(8, 1)[:8] for name in ("q", "k", "v")},
    )  # fmt: skip
    found = runner.run(case.batch, q=case.q, k=case.k, v=case.v)
    assert case.judge(found).ok


# ---- 26 and 27: neighbours ----

ALONE: dict[str, dict[str, Any]] = {name: dict(form) for name, form in FORMS.items()} | {
    "extend": dict(mode=ForwardMode.EXTEND, new_lens=[3, 1, 9, 17, 1, 10]),
    "mixed": dict(mode=ForwardMode.MIXED, new_lens=[3, 1, 9, 17, 1, 10]),
}


def crowd(device: str, form: str, kind: str, page_size: int, copies: int) -> Case:
    """`copies` times six requests of all lengths, in deterministic mode."""
    settings = dict(ALONE[form])
    for name, count in (("trees", copies), ("new_lens", copies)):
        if name in settings:
            settings[name] = list(settings[name]) * count
    kinds: dict[str, dict[str, Any]] = {
        "full": {}, "sliding": dict(kind=LayerKind.SLIDING, window=6), "local": dict(kind=LayerKind.LOCAL, chunk=16),
    }  # fmt: skip
    return case_on(
        device, **settings, **kinds[kind], prefix_lens=[40, 3, 0, 16, 33, 9] * copies, page_size=page_size, heads=6,
        kv_heads=2, deterministic=True,
    )  # fmt: skip


def only(case: Case, request: int) -> Case:
    """One request of a batch, over the same cache."""
    batch, info, one = case.batch, case.batch.spec_info, slice(request, request + 1)
    ends = torch.tensor(batch.extend_seq_lens_cpu).cumsum(0).tolist()
    if batch.forward_mode.is_decode():
        each = case.q.shape[0] // batch.batch_size
        rows = slice(request * each, (request + 1) * each)
    else:
        rows = slice(ends[request] - batch.extend_seq_lens_cpu[request], ends[request])
    loc = batch.out_cache_loc
    if batch.forward_mode.is_decode():
        loc = loc.view(batch.batch_size, -1)[request]
    else:
        loc = loc[rows]
    if getattr(info, "custom_mask", None) is not None:
        sizes = [DRAFTS * (int(n) + DRAFTS) for n in batch.seq_lens_cpu]
        info = replace(info, custom_mask=info.custom_mask.split(sizes)[request])
    return replace(
        case,
        batch=replace(
            batch, batch_size=1, req_pool_indices=batch.req_pool_indices[one], seq_lens=batch.seq_lens[one],
            seq_lens_cpu=batch.seq_lens_cpu[one], out_cache_loc=loc, spec_info=info,
            extend_seq_lens=batch.extend_seq_lens[one], extend_seq_lens_cpu=batch.extend_seq_lens_cpu[one],
            extend_prefix_lens=batch.extend_prefix_lens[one], extend_prefix_lens_cpu=batch.extend_prefix_lens_cpu[one],
        ),
        q=case.q[rows], k=case.k[rows], v=case.v[rows],
    )  # fmt: skip


@pytest.mark.parametrize("form", ALONE)
@KINDS
@PAGES
def test_report_26_a_deterministic_row_is_the_same_alone_and_in_a_batch_of_66(page_size, kind, form, device):
    """Dao 1897, sglang PR 24101: not batch invariant."""
    case = crowd(device, form, kind, page_size, copies=11)
    assert case.batch.batch_size == 66
    together = case.run(fa_fast)
    at_row = 0
    for request in range(12):
        alone = only(case, request)
        rows = slice(at_row, at_row + alone.q.shape[0])
        assert torch.equal(alone.q, case.q[rows])
        assert torch.equal(alone.run(fa_fast), together[rows]), request
        at_row = rows.stop


@every_form
@KINDS
def test_report_26_a_deterministic_row_is_the_same_in_every_bucket(kind, form, device):
    """The kind: padding rows are neighbours too."""
    case = problem(device, form, kind).replace_config(deterministic=True)
    small, large = runner_of(case, (1,)), runner_of(case, (REQUESTS,))
    for lens, order in [*REPLAYS[2:3], ([1], [0]), ([34], [3])]:
        batch, inputs = at(case, lens, order)
        found = small.run(batch, **inputs).clone()
        assert torch.equal(found, large.run(batch, **inputs))


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED], ids=lambda mode: mode.name.lower())
@KINDS
@PAGES
def test_report_27_a_neighbour_of_nine_or_ten_tokens_changes_no_bit_of_a_decode_row(page_size, kind, mode, device):
    """vllm 51902: which kernel a single token ran on depended on the longest extend beside it."""
    case = crowd(device, "extend", kind, page_size, copies=1)
    case = replace(case, batch=replace(case.batch, forward_mode=mode))
    new = case.batch.extend_seq_lens_cpu
    first = [sum(new[:request]) for request in range(REQUESTS)]
    alone = only(case, 1).run(fa_fast)
    assert new[1] == 1 and {9, 10} < set(new)
    for neighbours in ([2], [5], [2, 5], [0, 4], [3, 2, 0]):
        batch, parts = case.batch, [only(case, request) for request in [1, *neighbours]]
        every = [1, *neighbours]
        pick = torch.tensor(every, device=batch.seq_lens.device)
        joined = replace(
            case,
            batch=replace(
                batch, batch_size=len(every), req_pool_indices=batch.req_pool_indices[pick],
                seq_lens=batch.seq_lens[pick], seq_lens_cpu=batch.seq_lens_cpu[pick.cpu()],
                out_cache_loc=torch.cat([part.batch.out_cache_loc for part in parts]),
                extend_seq_lens=batch.extend_seq_lens[pick], extend_seq_lens_cpu=[new[i] for i in every],
                extend_prefix_lens=batch.extend_prefix_lens[pick],
                extend_prefix_lens_cpu=[batch.extend_prefix_lens_cpu[i] for i in every],
            ),
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in ("q", "k", "v")},
        )  # fmt: skip
        assert torch.equal(joined.run(fa_fast)[:1], alone), neighbours
    assert first[1] == 3


# ---- 28: a length, or a shorter cache ----


@pytest.mark.parametrize("package", [fa_ref, fa_fast], ids=lambda package: package.__name__)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000, 1025, 2999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_report_28_a_length_over_a_long_cache_is_within_rounding_of_a_sliced_one(dtype, length, package, device):
    """Dao 1417: a cache cut to its length and the whole one with cache_seqlens differ slightly, never by more."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("FA3 wants 16 bit")
    gen = torch.Generator().manual_seed(length)
    q = torch.randn(2, 1, 8, 64, generator=gen).to(device, dtype)
    k, v = (torch.randn(2, 3000, 2, 64, generator=gen).to(device, dtype) for _ in "kv")
    lens = torch.full((2,), length, dtype=torch.int32, device=device)
    whole = package.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
    part = package.flash_attn_with_kvcache(q, k[:, :length].contiguous(), v[:, :length].contiguous(), causal=True)
    plain, oracle = (attention_in(t, q, k[:, :length], v[:, :length]) for t in (dtype, torch.float64))
    for found in (whole, part):
        assert judge(found.flatten(0, 1), oracle, plain, dtype).ok


def attention_in(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query a sequence over all keys, [sequences, heads, dim]."""
    k, v = (x.to(dtype).repeat_interleave(4, dim=2) for x in (k, v))
    weights = torch.einsum("bhd,bkhd->bhk", q[:, 0].to(dtype), k).mul(q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhk,bkhd->bhd", weights, v)
