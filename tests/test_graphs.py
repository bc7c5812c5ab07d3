"""Captured steps: one recording a bucket, replayed with other lengths, fewer rows and poisoned padding."""

from __future__ import annotations

import gc
import math
from collections import namedtuple
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_ref
from fa_fast.graphs import GraphRunner, StaticBatch
from fa_fast.recording import Recorder, copy_into
from fa_ref import BadBatch, BadConfig, BadPageTable, DraftInput, ForwardBatch, ForwardMode, LayerKind, VerifyInput
from fa_ref.cases import Case, _custom_mask
from tests.support import FP8, case_on

REQUESTS, T, WIDTH = 6, 5, 3
DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
TREES = [[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, 0, 1, 2], [-1, 0, 1, 0, 3], [-1, 0, 0, 2, 2]]
FORMS: dict[str, dict[str, Any]] = {
    "decode": dict(mode=DECODE),
    "draft-chain": dict(mode=DECODE, topk=1, num_steps=3, step=1),
    "draft-branches": dict(mode=DECODE, topk=3, num_steps=2, step=1),
    "verify-chain": dict(mode=VERIFY, draft_token_num=T),
    "verify-tree": dict(mode=VERIFY, trees=TREES),
    "draft-extend": dict(mode=EXTEND, new_lens=[WIDTH] * REQUESTS),
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": dict(kind=LayerKind.SLIDING, window=6),
    "local": dict(kind=LayerKind.LOCAL, chunk=16),
    "cross": dict(kind=LayerKind.CROSS, encoder_lens=(3, 0, 7, 16, 1, 9), encode=False),
    "text-behind-encoder": dict(encoder_lens=(3, 0, 7, 16, 1, 9), encode=False),
    "mla": dict(latent=32, rope=8),
    "hybrid": dict(kind=LayerKind.SLIDING, window=6, hybrid=True),
    "fp8": dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.25, dtype=torch.bfloat16),
    "deterministic": dict(deterministic=True),
    "expand": dict(tree_attention="expand"),
    "sinks-softcap": dict(sinks=True, softcap=8.0),
}
every_form = pytest.mark.parametrize("form", FORMS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def problem(device: str, form: str, kind: str = "full", page_size: int = 4) -> Case:
    """Six requests with rows for 40 cached tokens each; `at` cuts them to other lengths."""
    settings = dict(page_size=page_size, prefix_lens=[40] * REQUESTS, heads=4, kv_heads=2, context_len=64)
    case = case_on(device, **settings | FORMS[form] | KINDS[kind])
    table = case.config.req_to_token_pool.req_to_token  # drafts of shorter requests come earlier: all columns are there
    assert (table[case.batch.req_pool_indices, :40] > 0).all()
    return case


def at(case: Case, lens: list[int], order: list[int]) -> tuple[ForwardBatch, dict[str, Tensor]]:
    """Requests `order` of a case with `lens` cached tokens, and new random inputs for them."""
    batch, mode, info = case.batch, case.batch.forward_mode, case.batch.spec_info
    device, count = batch.seq_lens.device, len(order)
    pick = torch.tensor(order, device=device)
    rows, length = batch.req_pool_indices[pick], torch.tensor(lens, device=device)
    encoder = None if batch.encoder_lens is None else batch.encoder_lens[pick]
    first = length if encoder is None else length + encoder
    table = case.config.req_to_token_pool.req_to_token
    new = {DECODE: 1, VERIFY: T, EXTEND: WIDTH}[mode]
    tokens, past = count * new, length
    if isinstance(info, DraftInput):
        assert info.topk is not None and info.num_steps is not None
        tokens = count * info.topk
        if info.topk > 1:
            loc = batch.out_cache_loc.view(REQUESTS, -1)[pick].flatten()
        else:
            columns = first[:, None] + torch.arange(info.num_steps, device=device)
            loc = table[rows[:, None], columns].flatten().long()
    else:
        loc = table[rows[:, None], first[:, None] + torch.arange(new, device=device)].flatten().long()
        past = length if mode is VERIFY else length + new
    if isinstance(info, VerifyInput) and info.custom_mask is not None:
        info = replace(info, custom_mask=_custom_mask([TREES[i] for i in order], lens).to(device))
    smaller = replace(
        batch, batch_size=count, req_pool_indices=rows, seq_lens=past, seq_lens_cpu=past.cpu(), out_cache_loc=loc,
        spec_info=info, encoder_lens=encoder, encoder_lens_cpu=None,
        extend_seq_lens=torch.full_like(length, new), extend_seq_lens_cpu=[new] * count,
        extend_prefix_lens=length, extend_prefix_lens_cpu=lens,
    )  # fmt: skip
    keys = {} if case.k is None or case.k.shape[0] == 0 else dict(k=case.k, v=case.v)
    inputs = {
        name: torch.randn(tokens, value.shape[1], device=device).to(value.dtype)
        for name, value in (dict(q=case.q) | keys).items()
    }
    return smaller, inputs


def step_of(case: Case, backend: Any) -> Any:
    def step(batch: ForwardBatch, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        if case.config.use_mla:
            v = None
        return backend.forward(q, k, v, case.layer, batch, sinks=case.sinks)

    return step


def runner_of(case: Case, buckets: tuple[int, ...] = (1, 2, 4, 6), rows_of: int = 0) -> GraphRunner:
    """rows_of: requests that the inputs have rows for; 0: those of the largest bucket."""
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    count = rows_of or max(buckets, default=1)
    _, inputs = at(case, [10] * count, list(range(count)))
    return GraphRunner(
        backend, step_of(case, backend), case.batch.forward_mode, buckets, inputs, spec_info=case.batch.spec_info,
        draft_tokens=WIDTH if case.batch.forward_mode is EXTEND else 0,
    )  # fmt: skip


def eager(case: Case, batch: ForwardBatch, inputs: dict[str, Tensor]) -> Tensor:
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_forward_metadata(batch)
    return step_of(case, backend)(batch, **inputs)


def same(case: Case, found: Tensor, right: Tensor) -> bool:
    tolerance = 1e-5 if case.q.dtype == torch.float32 else 3e-2
    return torch.allclose(found.float(), right.float(), rtol=tolerance, atol=tolerance)


REPLAYS = [
    ([20, 3, 33, 16, 1, 30], [0, 1, 2, 3, 4, 5]),  # full
    ([5, 31, 17], [4, 2, 0]),  # fewer rows, in another order
    ([9], [5]),
    ([34, 34, 34, 34, 34, 34], [5, 4, 3, 2, 1, 0]),  # the longest that the rows hold
    ([15, 16], [1, 3]),  # either side of a chunk
    ([1, 2, 4, 8, 16], [0, 2, 4, 1, 3]),
]


@every_form
@every_kind
def test_a_replay_equals_the_eager_step(kind, form, device):
    """Lengths, rows and their number change between replays of one capture."""
    case = problem(device, form, kind)
    runner = runner_of(case)
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        found = runner.run(batch, **inputs).clone()
        assert found.isfinite().all()
        assert same(case, found, eager(case, batch, inputs)), (lens, order)


@every_form
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_page_size_replays(page_size, form, device):
    case = problem(device, form, page_size=page_size)
    runner = runner_of(case, buckets=(6,))
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        assert same(case, runner.run(batch, **inputs), eager(case, batch, inputs))


@every_form
def test_poisoned_padding_reaches_no_request_and_no_page(form, device):
    """After a full replay of NaN, a smaller one is clean, and wrote the padding slot and its own slots alone."""
    case = problem(device, form)
    runner = runner_of(case)
    batch, inputs = at(case, *REPLAYS[0])
    runner.run(batch, **{name: torch.full_like(value, math.nan) for name, value in inputs.items()})
    pool, fresh = (c.config.token_to_kv_pool for c in (case, problem(device, form)))
    for buffer, other in zip([*pool.k_buffer, *pool.v_buffer], [*fresh.k_buffer, *fresh.v_buffer], strict=True):
        buffer.copy_(other)
    batch, inputs = at(case, *REPLAYS[5])  # five requests in the bucket of six
    before = case.config.token_to_kv_pool.k_buffer[0].clone()
    found = runner.run(batch, **inputs).clone()
    assert found.isfinite().all()
    after = case.config.token_to_kv_pool.k_buffer[0]
    touched = torch.nonzero((before.view(torch.uint8) != after.view(torch.uint8)).flatten(1).any(dim=1)).flatten()
    assert set(touched.tolist()) <= {0, *batch.out_cache_loc.tolist()}
    assert same(case, found, eager(case, batch, inputs))


@every_form
def test_a_plan_made_outside_the_graph_is_noticed(form, device, monkeypatch):
    """The comparison fails if the plan is not part of what is replayed: it keeps the lengths of the capture."""
    case = problem(device, form)
    planned: set[int] = set()

    def once(self: Any, batch: Any) -> None:
        if batch.batch_size not in planned:
            planned.add(batch.batch_size)
            plans[batch.batch_size] = self._plan_in_graph(batch)
        self._take(plans[batch.batch_size])

    plans: dict[int, Any] = {}
    monkeypatch.setattr(fa_fast.FlashAttentionBackend, "init_forward_metadata_in_graph", once)
    runner = runner_of(case, buckets=(6,))
    batch, inputs = at(case, *REPLAYS[0])
    assert not same(case, runner.run(batch, **inputs), eager(case, batch, inputs))


def test_requests_come_and_go_between_buckets(device):
    """Random batches, one after another: no drift from the eager step."""
    case = problem(device, "decode", "sliding")
    runner = runner_of(case)
    gen = torch.Generator().manual_seed(3)
    for _ in range(40):
        count = int(torch.randint(1, REQUESTS + 1, (1,), generator=gen))
        order = torch.randperm(REQUESTS, generator=gen)[:count].tolist()
        batch, inputs = at(case, torch.randint(0, 39, (count,), generator=gen).tolist(), order)
        assert same(case, runner.run(batch, **inputs), eager(case, batch, inputs))


# ---- several steps of a draft in one graph ---------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("kind", ["full", "sliding", "local", "mla"])
def test_all_steps_of_a_draft_are_one_graph(kind, topk, device):
    name = "draft-chain" if topk == 1 else "draft-branches"
    case = problem(device, name, kind)
    info = case.batch.spec_info
    assert isinstance(info, DraftInput) and info.num_steps is not None
    steps = info.num_steps
    captured = fa_fast.FlashAttentionMultiStepBackend(case.config, topk=topk, speculative_num_steps=steps)
    plain = fa_fast.FlashAttentionMultiStepBackend(case.config, topk=topk, speculative_num_steps=steps)

    def steps_of(backend: Any) -> Any:
        def run(batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            value = None if case.config.use_mla else v
            return tuple(
                one.forward(q + s, k - s, value, case.layer, batch) for s, one in enumerate(backend.attn_backends)
            )

        return run

    _, inputs = at(case, [10] * REQUESTS, list(range(REQUESTS)))
    runner = GraphRunner(captured, steps_of(captured), DECODE, (2, 6), inputs, spec_info=info)
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        found = [one.clone() for one in runner.run(batch, **inputs)]
        plain.init_forward_metadata(batch)
        for one, right in zip(found, steps_of(plain)(batch, **inputs), strict=True):
            assert same(case, one, right)


# ---- a server that captures its layers itself -----------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("kind", ["full", "sliding", "local", "mla", "text-behind-encoder"])
def test_a_server_s_own_capture_and_replay(kind, form, device):
    """The methods of a well-known backend: plan buffers outside the server's graph, at fixed addresses."""
    case = problem(device, form, kind)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_cuda_graph_state(REQUESTS, REQUESTS * T)
    step = step_of(case, backend)
    full, inputs = at(case, [10] * REQUESTS, list(range(REQUESTS)))
    tokens = inputs["q"].shape[0]
    backend.init_forward_metadata_capture_cuda_graph(
        REQUESTS, tokens, full.req_pool_indices, full.seq_lens, full.encoder_lens, full.forward_mode, full.spec_info
    )
    addresses = [t.data_ptr() for t in tensors_of(backend.forward_metadata)]
    static = replace(full, out_cache_loc=full.out_cache_loc.clone())
    held = {name: value.clone() for name, value in inputs.items()}
    recording = Recorder(case.config.device).record(lambda: step(static, **held))
    for lens, order in (REPLAYS[0], REPLAYS[3]):
        batch, inputs = at(case, lens, order)
        backend.init_forward_metadata_replay_cuda_graph(
            REQUESTS, batch.req_pool_indices, batch.seq_lens, None, batch.encoder_lens, batch.forward_mode,
            batch.spec_info, None, batch.out_cache_loc,
        )  # fmt: skip
        assert [t.data_ptr() for t in tensors_of(backend.forward_metadata)] == addresses
        static.out_cache_loc.copy_(batch.out_cache_loc)
        for name, value in inputs.items():
            held[name].copy_(value)
        recording.replay()
        assert same(case, recording.result, eager(case, batch, inputs))


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a plan."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for one in value.values() for t in tensors_of(one)]
    if isinstance(value, tuple | list):
        return [t for one in value for t in tensors_of(one)]
    return (
        [t for one in vars(value).values() for t in tensors_of(one)] if hasattr(value, "__dataclass_fields__") else []
    )


def test_the_steps_of_a_draft_replay_for_a_server():
    case = problem("cpu", "draft-branches")
    backend = fa_fast.FlashAttentionMultiStepBackend(case.config, topk=3, speculative_num_steps=2)
    full, _ = at(case, [10] * REQUESTS, list(range(REQUESTS)))
    with pytest.raises(BadBatch, match="init_cuda_graph_state"):
        backend.init_forward_metadata_capture_cuda_graph(full)
    backend.init_cuda_graph_state(REQUESTS)
    backend.init_forward_metadata_capture_cuda_graph(full)
    batch, inputs = at(case, *REPLAYS[0])
    backend.init_forward_metadata_replay_cuda_graph(batch, REQUESTS)
    right = fa_fast.FlashAttentionMultiStepBackend(case.config, topk=3, speculative_num_steps=2)
    right.init_forward_metadata(batch)
    for one, other in zip(backend.attn_backends, right.attn_backends, strict=True):
        found = one.forward(**inputs, layer=case.layer, forward_batch=batch)
        assert same(case, found, other.forward(**inputs, layer=case.layer, forward_batch=batch))


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_what_was_not_captured_is_refused_and_nothing_runs():
    case = problem("cpu", "decode")
    runner = runner_of(case, buckets=(1, 2))
    batch, inputs = at(case, *REPLAYS[1])
    before = case.config.token_to_kv_pool.k_buffer[0].view(torch.uint8).clone()
    small, one = at(case, *REPLAYS[2])
    for wrong, given, says in (
        (batch, inputs, "buckets of"),
        (replace(small, forward_mode=VERIFY, spec_info=VerifyInput(draft_token_num=1)), one, "captured is DECODE"),
        (replace(small, spec_info=DraftInput(topk=1, num_steps=1)), one, "captured is DECODE"),
        (small, dict(q=one["q"]), "captured with"),
        (small, one | dict(q=inputs["q"]), "must be"),
        (small, one | dict(q=one["q"].double()), "must be"),
        (replace(small, batch_size=0), one, "without requests"),
        (replace(small, out_cache_loc=torch.tensor([10**6])), one, "slots span"),
    ):
        with pytest.raises(fa_ref.FaError, match=says):
            runner.run(wrong, **given)
    assert torch.equal(case.config.token_to_kv_pool.k_buffer[0].view(torch.uint8), before)
    assert same(case, runner.run(small, **one), eager(case, small, one))  # a failed call leaves the runner usable


def test_buckets_and_modes_that_cannot_be_captured_are_refused():
    case = problem("cpu", "decode")
    for buckets in ((), (2, 1), (0, 1), (1, 1)):
        with pytest.raises(BadConfig, match="rising batch sizes"):
            runner_of(case, buckets)
    with pytest.raises(BadConfig, match="cannot share their rows"):
        runner_of(case, (4,), rows_of=6)
    for mode, info in ((ForwardMode.EXTEND, None), (ForwardMode.MIXED, None), (EXTEND, None), (VERIFY, None)):
        with pytest.raises(BadConfig, match=f"no graph of {mode.name}"):
            StaticBatch(case.config, mode, 2, info)


def test_a_ragged_draft_extend_is_refused():
    case = problem("cpu", "draft-extend")
    runner = runner_of(case)
    batch, inputs = at(case, *REPLAYS[4])
    ragged = replace(
        batch, extend_seq_lens=torch.tensor([2, 4]), extend_seq_lens_cpu=[2, 4], extend_prefix_lens=None,
        extend_prefix_lens_cpu=None,
    )  # fmt: skip
    with pytest.raises(BadBatch, match="in every request"):
        runner.run(ragged, **inputs)


def test_a_size_that_was_not_captured_is_refused():
    case = problem("cpu", "decode")
    backend = fa_fast.FlashAttentionBackend(case.config)
    batch, _ = at(case, *REPLAYS[2])
    arguments = (1, batch.req_pool_indices, batch.seq_lens, None, None, DECODE, None)
    with pytest.raises(BadBatch, match="init_cuda_graph_state"):
        backend.init_forward_metadata_replay_cuda_graph(*arguments)
    backend.init_cuda_graph_state(4)
    with pytest.raises(BadBatch, match="no captured plan of 1 requests of DECODE"):
        backend.init_forward_metadata_replay_cuda_graph(*arguments)
    with pytest.raises(BadBatch, match="called for 4"):
        backend.init_forward_metadata_capture_cuda_graph(
            5, 5, batch.req_pool_indices, batch.seq_lens, None, DECODE, None
        )


def captured_by_a_server(form: str) -> tuple[Case, Any, ForwardBatch]:
    """A backend with a plan of three requests recorded, and a batch that it can replay."""
    case = problem("cpu", form)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_cuda_graph_state(4)
    batch, inputs = at(case, *REPLAYS[1])
    info = batch.spec_info
    if isinstance(info, VerifyInput):
        info = replace(info, custom_mask=None)
    backend.init_forward_metadata_capture_cuda_graph(
        3, len(inputs["q"]), torch.zeros(3).int(), torch.ones(3).int(), None, batch.forward_mode, info
    )
    return case, backend, batch


def replayed_by_a_server(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_replay_cuda_graph(
        3, batch.req_pool_indices, batch.seq_lens, None, None, batch.forward_mode, batch.spec_info, None,
        batch.out_cache_loc,
    )  # fmt: skip


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a row that is none": (dict(req_pool_indices=torch.tensor([1, 2, 999])), BadPageTable, "req_pool_indices span"),
    "a negative row": (dict(req_pool_indices=torch.tensor([1, 2, -5])), BadPageTable, "req_pool_indices span"),
    "a length past the row": (dict(seq_lens=torch.tensor([4, 5, 99999])), BadPageTable, "its row holds 64"),
    "a negative length": (dict(seq_lens=torch.tensor([4, 5, -3])), BadPageTable, "its row holds 64"),
    "lengths that are no integers": (dict(seq_lens=torch.tensor([4.0, 5.0, 6.0])), BadBatch, "float32"),
    "two rows for three requests": (dict(req_pool_indices=torch.tensor([1, 2])), BadBatch, r"shape \(2,\)"),
    "a list": (dict(seq_lens=[4, 5, 6]), BadBatch, "as a tensor"),
}


@every_form
@pytest.mark.parametrize("name", WRONG)
def test_a_server_s_replay_refuses_what_an_eager_plan_refuses(name, form):
    _, backend, batch = captured_by_a_server(form)
    replayed_by_a_server(backend, batch)
    recorded = tensors_of(backend.forward_metadata)
    before = [value.clone() for value in recorded]
    changes, error, says = WRONG[name]
    if form == "verify-tree" and "length" in name and error is BadPageTable:
        error, says = BadBatch, "custom_mask is"  # of another size than these lengths want
    with pytest.raises(error, match=says):
        replayed_by_a_server(backend, replace(batch, **changes))
    assert all(torch.equal(one, other) for one, other in zip(before, recorded, strict=True))
    with pytest.raises(BadBatch, match="no batch is planned"):  # not the batch before, for layers that run all the same
        _ = backend.forward_metadata
    replayed_by_a_server(backend, batch)
    assert [value.data_ptr() for value in tensors_of(backend.forward_metadata)] == [x.data_ptr() for x in recorded]


def test_a_server_s_replay_of_a_tree_needs_the_mask_of_this_step():
    """Without it the mask of the step before would be read once more."""
    _, backend, batch = captured_by_a_server("verify-tree")
    replayed_by_a_server(backend, batch)
    assert isinstance(batch.spec_info, VerifyInput) and batch.spec_info.custom_mask is not None
    for mask, says in ((None, "a tree needs one"), (batch.spec_info.custom_mask[:50], r"shape \(50,\)")):
        with pytest.raises(BadBatch, match=says):
            replayed_by_a_server(backend, replace(batch, spec_info=replace(batch.spec_info, custom_mask=mask)))


def test_a_server_s_padding_rows_have_the_fill_value(monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    for form in FORMS:
        case, backend, batch = captured_by_a_server(form)
        fill = backend.get_cuda_graph_seq_len_fill_value()
        rows, lens = batch.req_pool_indices.clone(), batch.seq_lens.clone()
        rows[2], lens[2], info = 0, fill, batch.spec_info
        if isinstance(info, VerifyInput) and info.custom_mask is not None:
            sizes = [T * (n + T) for n in batch.seq_lens.tolist()]
            masks, padding = info.custom_mask.split(sizes), torch.ones(T, fill + T).tril(fill).bool()
            info = replace(info, custom_mask=torch.cat([*masks[:2], padding.flatten()]))
        loc = None
        if isinstance(info, DraftInput):
            loc = batch.out_cache_loc.clone()  # type: ignore[union-attr]
            loc[-(loc.numel() // 3) :] = 0
        padded = replace(batch, req_pool_indices=rows, seq_lens=lens, spec_info=info, out_cache_loc=loc)
        replayed_by_a_server(backend, padded)
        (*_, step) = backend.forward_metadata.for_kind(LayerKind.FULL)
        assert case.config.req_to_token_pool.req_to_token[0].eq(0).all() and step is not None


@pytest.mark.parametrize(("bs", "tokens"), [(0, 0), (3, 4), (3, 0), (3, 6)])
def test_a_server_s_capture_counts_its_tokens(bs, tokens):
    case = problem("cpu", "decode")
    backend = fa_fast.FlashAttentionBackend(case.config)
    backend.init_cuda_graph_state(4)
    with pytest.raises(BadBatch, match="num_tokens"):
        backend.init_forward_metadata_capture_cuda_graph(
            bs, tokens, torch.zeros(3).int(), torch.ones(3).int(), None, DECODE, None
        )


def test_a_refused_capture_of_another_width_leaves_the_good_one():
    _, backend, batch = captured_by_a_server("draft-extend")
    with pytest.raises(BadBatch, match="a captured DRAFT_EXTEND has 3 tokens"):
        backend.init_forward_metadata_capture_cuda_graph(
            2, 2, torch.zeros(3).int(), torch.ones(3).int(), None, EXTEND, None
        )
    replayed_by_a_server(backend, batch)


@pytest.mark.parametrize("missing", ["out_cache_loc", "encoder_lens"])
def test_a_server_s_replay_needs_what_planning_reads(missing):
    if missing == "encoder_lens":
        case = problem("cpu", "decode", "cross")
        backend = fa_fast.FlashAttentionBackend(case.config)
        backend.init_cuda_graph_state(4)
        batch, _ = at(case, *REPLAYS[1])
        backend.init_forward_metadata_capture_cuda_graph(
            3, 3, torch.zeros(3).int(), torch.ones(3).int(), torch.zeros(3).int(), DECODE, None
        )
    else:
        _, backend, batch = captured_by_a_server("draft-branches")
        batch = replace(batch, out_cache_loc=None)
    with pytest.raises(BadBatch, match=missing):
        replayed_by_a_server(backend, batch)


# ---- which plan is in use --------------------------------------------------------------------------------------------


def test_a_runner_leaves_no_plan_for_other_batches(device):
    """Its plan is of static tensors: which batches share their values, nothing on the host could tell."""
    case = problem(device, "decode")
    backend = fa_fast.FlashAttentionBackend(case.config)
    batch, inputs = at(case, *REPLAYS[1])
    other, _ = at(case, [7, 8, 9], [4, 2, 0])
    step, says = step_of(case, backend), "the current plan is that of a graph"
    backend.init_forward_metadata(batch)
    runner = GraphRunner(backend, step, DECODE, [3], inputs)
    with pytest.raises(BadBatch, match=says):
        step(batch, **inputs)
    if device == "cpu":  # where a replay plans again
        backend.init_forward_metadata(batch)
        runner.run(other, **inputs)
        with pytest.raises(BadBatch, match=says):
            step(batch, **inputs)
    backend.init_forward_metadata(batch)
    assert same(case, step(batch, **inputs), runner.run(batch, **inputs))


def test_a_runner_of_a_draft_leaves_no_plan_either():
    case = problem("cpu", "draft-branches")
    backend = fa_fast.FlashAttentionMultiStepBackend(case.config, topk=3, speculative_num_steps=2)
    batch, inputs = at(case, *REPLAYS[1])

    def steps(batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [one.forward(q, k, v, case.layer, batch) for one in backend.attn_backends]

    GraphRunner(backend, steps, DECODE, [3], inputs, spec_info=batch.spec_info)
    with pytest.raises(BadBatch, match="that of a graph"):
        steps(batch, **inputs)


# ---- a server's own objects -----------------------------------------------------------------------------------------


class ServersMode(IntEnum):
    DECODE = 7
    TARGET_VERIFY = 9


@pytest.mark.parametrize("form", ["decode", "verify-tree"])
def test_a_runner_takes_a_server_s_own_mode_and_drafts(form):
    case = problem("cpu", form)
    backend, mode = fa_fast.FlashAttentionBackend(case.config), ServersMode[case.batch.forward_mode.name]
    batch, inputs = at(case, *REPLAYS[0])
    mine = SimpleNamespace(**vars(batch) | dict(forward_mode=mode))
    if isinstance(batch.spec_info, VerifyInput):
        mine.spec_info = SimpleNamespace(**vars(batch.spec_info))
    runner = GraphRunner(backend, step_of(case, backend), mode, [REQUESTS], inputs, spec_info=mine.spec_info)
    assert same(case, runner.run(mine, **inputs), eager(case, batch, inputs))
    with pytest.raises(BadBatch, match="forward_mode 'draw' is unknown"):
        GraphRunner(backend, step_of(case, backend), "draw", [REQUESTS], inputs)


def test_a_step_may_return_a_dict():
    case = problem("cpu", "decode")
    backend = fa_fast.FlashAttentionBackend(case.config)
    batch, inputs = at(case, *REPLAYS[1])
    one = step_of(case, backend)
    runner = GraphRunner(
        backend, lambda batch, **given: dict(out=one(batch, **given), twice=[given["q"] * 2]), DECODE, [4],
        {name: value.new_zeros(4, value.shape[1]) for name, value in inputs.items()},
    )  # fmt: skip
    found = runner.run(batch, **inputs)
    assert same(case, found["out"], eager(case, batch, inputs)) and torch.equal(found["twice"][0], inputs["q"] * 2)


def test_a_step_may_return_a_named_tuple_and_nothing_without_rows():
    case = problem("cpu", "decode")
    backend = fa_fast.FlashAttentionBackend(case.config)
    batch, inputs = at(case, *REPLAYS[1])
    one, pair = step_of(case, backend), namedtuple("pair", "out lens")
    runner = GraphRunner(
        backend, lambda batch, **given: pair(one(batch, **given), batch.seq_lens), DECODE, [3], inputs
    )  # fmt: skip
    found = runner.run(batch, **inputs)
    assert same(case, found.out, eager(case, batch, inputs)) and torch.equal(found.lens, batch.seq_lens.int())
    for wrong in (torch.arange(7), torch.tensor(1.0), None, 5):
        with pytest.raises(BadConfig, match="as many rows for every request"):
            GraphRunner(backend, lambda batch, wrong=wrong, **given: (one(batch, **given), wrong), DECODE, [3], inputs)


def test_inputs_are_tensors_with_rows_and_lie_elsewhere():
    case = problem("cpu", "decode")
    runner = runner_of(case)
    batch, inputs = at(case, *REPLAYS[1])
    for wrong in (torch.tensor(1.0), [1.0]):
        with pytest.raises(BadConfig, match="inputs extra are no tensors"):
            GraphRunner(
                runner.backend, lambda batch, extra, **given: None, DECODE, [3], inputs | {"extra": wrong}  # type: ignore[dict-item]
            )  # fmt: skip
        with pytest.raises(BadBatch, match=r"q is .*; for 3 requests"):
            runner.run(batch, **inputs | dict(q=wrong))
    placed, views = runner.place(3)
    for wrong in (dict(k=views["v"], v=views["k"]), dict(q=runner.inputs["q"][3:6])):
        with pytest.raises(BadBatch, match="lies in the runner's static tensors"):
            runner.run(batch, **inputs | wrong)
    moved = replace(batch, seq_lens=runner.static.tensors["seq_lens"][1:4])
    with pytest.raises(BadBatch, match="seq_lens lies in"):
        runner.run(moved, **inputs)
    assert same(case, runner.run(batch, **inputs), eager(case, batch, inputs))
    assert runner.run(placed, **views).shape == inputs["q"].shape


def test_pools_of_a_batch_s_own_are_not_left_out():
    """An eager step reads them; a graph reads those that it was captured with."""
    case, other = problem("cpu", "decode"), problem("cpu", "decode")
    runner = runner_of(case)
    batch, inputs = at(case, *REPLAYS[1])
    for name in ("token_to_kv_pool", "req_to_token_pool"):
        with pytest.raises(BadBatch, match=f"{name} of the batch is not the config's"):
            runner.run(replace(batch, **{name: getattr(other.config, name)}), **inputs)
        mine = replace(batch, **{name: getattr(case.config, name)})
        assert same(case, runner.run(mine, **inputs), eager(case, batch, inputs))


@pytest.mark.parametrize("form", ["draft-chain", "draft-branches"])
def test_a_step_that_the_draft_does_not_have_is_not_captured(form):
    case = problem("cpu", form)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=9)
    _, inputs = at(case, *REPLAYS[1])
    with pytest.raises(BadBatch, match="step 9 of a draft"):
        GraphRunner(backend, step_of(case, backend), DECODE, [3], inputs, spec_info=case.batch.spec_info)


def test_a_refusal_names_the_drafts_and_not_their_mask():
    _, backend, batch = captured_by_a_server("verify-tree")
    with pytest.raises(BadBatch) as refused:
        backend.init_forward_metadata_replay_cuda_graph(
            2, batch.req_pool_indices, batch.seq_lens, None, None, batch.forward_mode, batch.spec_info
        )
    assert f"TARGET_VERIFY with spec_info of {T} drafts, a tree" in str(refused.value)
    assert "tensor(" not in str(refused.value)


def test_the_reference_captures_nothing():
    backend = fa_ref.FlashAttentionBackend(problem("cpu", "decode").config)
    with pytest.raises(fa_ref.UnsupportedByProvider, match="the reference captures no graphs"):
        backend.init_cuda_graph_state(4)


def test_a_cpu_replay_writes_where_the_first_result_lies():
    source = torch.ones(2)
    recording = Recorder("cpu").record(lambda: (source * 2, dict(a=source + 1)))
    address = recording.result[0].data_ptr()
    source.fill_(5)
    assert recording.result[0].tolist() == [2, 2]
    recording.replay()
    assert recording.result[0].tolist() == [10, 10] and recording.result[1]["a"].tolist() == [6, 6]
    assert recording.result[0].data_ptr() == address
    with pytest.raises(ValueError, match="zip"):
        copy_into([torch.zeros(1)], [])


@pytest.mark.gpu
def test_a_recording_keeps_what_its_work_refers_to():
    def recorded() -> Any:
        table = torch.arange(1 << 20, device="cuda")
        return Recorder("cuda").record(lambda: table * 2)

    recording = recorded()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.zeros(1 << 20, dtype=torch.int64, device="cuda").sum() == 0  # would take the table's memory
    recording.replay()
    assert torch.equal(recording.result, torch.arange(1 << 20, device="cuda") * 2)


@pytest.mark.gpu
def test_a_replay_launches_one_graph_and_never_waits():
    case = problem("cuda", "decode")
    runner = runner_of(case)
    batch, inputs = at(case, *REPLAYS[1])
    runner.run(batch, **inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.run(batch, **inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
