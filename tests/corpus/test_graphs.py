"""Reports 4, 5, 7, 8, 13 to 15, 22, 24, 25, 29, 30 and 51: what a captured step must not keep from its capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_ref
from fa_fast.graphs import GraphRunner
from fa_fast.recording import Recorder
from fa_ref import AttentionPass, ForwardMode, LayerKind
from fa_ref.cases import Case
from tests.support import case_on
from tests.test_graphs import (
    REPLAYS,
    REQUESTS,
    at,
    eager,
    every_form,
    problem,
    runner_of,
    same,
    step_of,
    tensors_of,
)
from tests.test_graphs import T as DRAFTS

C = 16  # the chunk of problem(..., "local")
EVERYONE = list(range(REQUESTS))
every_way = pytest.mark.parametrize("way", ["eager", "graph"])
every_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])
TEXT = {
    "full": LayerKind.FULL, "sliding": LayerKind.SLIDING, "local": LayerKind.LOCAL, "hybrid": LayerKind.SLIDING,
}  # fmt: skip
text_kinds = pytest.mark.parametrize("kind", TEXT)


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


def oracle(case: Case, batch: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The reference's masks, which plan nothing."""
    backend = fa_ref.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_forward_metadata(batch)
    return step_of(case, backend)(batch, **inputs)


def check(case, runner, lens, order):
    batch, inputs = at(case, lens, order)
    assert same(case, runner.run(batch, **inputs), eager(case, batch, inputs)), (lens, order)
    return batch


def test_report_4_a_chunk_that_ends_between_two_replays(device):
    """sglang PR 6162: gibberish past the chunk in graph decode. Capture at 1, replay at C-1, C, C+1, 2C+3."""
    case = problem(device, "decode", "local")
    runner = runner_of(case, buckets=(1,))
    for length in (C - 1, C, C + 1, 2 * C + 3):
        check(case, runner, [length - 1], [2])


def test_report_5_a_decode_holds_one_virtual_batch_a_request():
    """sglang 8538: 6 GB of graph buffers. One row a request, as wide as a chunk."""
    case = problem("cpu", "decode", "local")
    backend = fa_fast.FlashAttentionBackend(case.config)
    runner = GraphRunner(
        backend, step_of(case, backend), ForwardMode.DECODE, (REQUESTS,), at(case, [10] * REQUESTS, EVERYONE)[1]
    )
    check(case, runner, [30] * REQUESTS, EVERYONE)
    (step,) = backend.forward_metadata.for_kind(LayerKind.LOCAL)
    assert isinstance(step, AttentionPass)
    assert step.page_table.shape == (REQUESTS, C // 4)
    assert step.cache_seqlens.shape == (REQUESTS,)


@pytest.mark.parametrize("kind", [LayerKind.LOCAL, LayerKind.SLIDING])
@pytest.mark.parametrize("form", ["decode", "verify-tree", "draft-extend"])
def test_report_7_a_window_pool_with_slots_of_its_own(form, kind, device):
    """sglang PR 38187: page ids sent through a token-slot map. Page 16, two replays."""
    case = problem(device, form, "hybrid", page_size=16)
    assert not torch.equal(case.config.token_to_kv_pool.full_to_swa_index_mapping[16:].long().cpu(),
                           torch.arange(16, len(case.config.token_to_kv_pool.full_to_swa_index_mapping)))  # fmt: skip
    runner = runner_of(case)
    check(case, runner, [20, 3, 33, 16, 1, 30], EVERYONE)
    check(case, runner, [5, 31, 17], [4, 2, 0])


@pytest.mark.parametrize("form", ["verify-chain", "draft-extend"])
def test_report_8_the_number_of_virtual_batches_changes(form, device):
    """vllm PR 26034: drafts that cross a chunk make two virtual batches, others one; one capture serves both."""
    case = problem(device, form, "local")
    runner = runner_of(case, buckets=(REQUESTS,))
    check(case, runner, [1] * REQUESTS, EVERYONE)  # no request crosses
    check(case, runner, [C - 1] * REQUESTS, EVERYONE)  # all do
    check(case, runner, [C - 1, 1, 2 * C - 2, 20, C - 1, 3], EVERYONE)


@pytest.mark.parametrize("form", ["decode", "verify-chain", "verify-tree", "draft-branches"])
def test_reports_13_14_24_fewer_rows_than_before(form, device):
    """sglang 10892, tokenspeed PR 955, vllm 23789: after a full bucket, three and five rows in it; nothing is stale."""
    case = problem(device, form, "sliding")
    runner = runner_of(case, buckets=(REQUESTS,))
    check(case, runner, [33, 34, 20, 31, 34, 30], EVERYONE)
    for lens, order in (([4, 30, 9], [5, 0, 3]), ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4])):
        check(case, runner, lens, order)
        padding = {
            name: value[len(order) :] for name, value in runner.static.tensors.items() if name != "out_cache_loc"
        }
        slots = runner.static.tensors["out_cache_loc"][len(order) * runner.static.slots :]
        assert (padding["req_pool_indices"] == 0).all()  # the padding row
        assert (padding["seq_lens"] == 1).all()  # report 29: sglang PRs 1779, 1469
        assert (slots == 0).all()  # the padding slot


@every_way
@every_form
@pytest.mark.parametrize("kind", ["full", "sliding", "local", "hybrid", "mla"])
@every_page_size
def test_report_13_fewer_rows_read_nothing_of_the_fuller_bucket_before(page_size, kind, form, way, device):
    """sglang 10892, 6309, 8296, 9888: stale positions. Three rows, then one, after the longest six there are."""
    case = problem(device, form, kind, page_size)
    run = way_to_run(case, way)
    batch, inputs = at(case, [34] * REQUESTS, EVERYONE)
    run(batch, **inputs)
    for lens, order in (([4, 30, 9], [5, 0, 3]), ([2], [4])):
        batch, inputs = at(case, lens, order)
        found = run(batch, **inputs).clone()
        assert found.isfinite().all()
        assert same(case, found, oracle(case, batch, inputs)), lens


@every_form
@text_kinds
@every_page_size
@pytest.mark.parametrize("placed", [False, True], ids=["copied", "placed"])
def test_report_14_rows_past_the_batch_have_the_padding_page_alone(placed, page_size, kind, form, device):
    """tokenspeed PR 955: table rows past the batch kept other requests' pages, and were written."""
    case = problem(device, form, kind, page_size)
    runner, count = runner_of(case, buckets=(REQUESTS,)), 4
    batch, inputs = at(case, [34] * REQUESTS, EVERYONE)
    runner.run(batch, **inputs)
    batch, inputs = at(case, [1, 20, 3, 30], [0, 4, 2, 3])
    before = cache_bytes(case)
    run_placed(runner, batch, inputs) if placed else runner.run(batch, **inputs)
    pool, loc = case.config.token_to_kv_pool, batch.out_cache_loc
    own = pool.full_to_swa_index_mapping[loc] if kind == "hybrid" else loc
    allowed = {*range(page_size), *own.tolist()}
    for old, new in zip(before, cache_bytes(case), strict=True):
        assert set((old != new).flatten(1).any(dim=1).nonzero().flatten().tolist()) <= allowed
    assert list(pages_of_padding(runner.backend, TEXT[kind], count)) != []
    for pages in pages_of_padding(runner.backend, TEXT[kind], count):
        assert set(pages) <= {0}


def run_placed(runner: GraphRunner, batch: Any, inputs: dict[str, Tensor]) -> None:
    """The same, written where the graph reads it."""
    place, held = runner.place(batch.batch_size)
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(place, name).copy_(getattr(batch, name))
    mask = getattr(batch.spec_info, "custom_mask", None)
    if mask is not None:
        place.spec_info.custom_mask[: mask.numel()].copy_(mask)
    for name, value in inputs.items():
        held[name].copy_(value)
    runner.run(place, **held)


def cache_bytes(case: Case) -> list[Tensor]:
    buffers = case.config.token_to_kv_pool.get_kv_buffer(case.layer.layer_id)
    return [buffer.view(torch.uint8).clone() for buffer in buffers]


def pages_of_padding(backend: Any, kind: LayerKind, count: int) -> Iterator[list[int]]:
    """What the planned passes read for requests from `count` on: page ids, and slots of drafts."""
    for step in backend.forward_metadata.for_kind(kind):
        if isinstance(step, AttentionPass):
            each = step.sequences // REQUESTS
            yield from (step.pages(i) for i in range(count * each, step.sequences))
        else:
            yield step.slots[count:].flatten().tolist()


@pytest.mark.parametrize("form", ["draft-chain", "draft-branches"])
def test_report_15_a_draft_shrinks_on_a_two_pool_cache(form, device):
    """sglang 28569: faults as the batch shrinks through the buckets of a draft graph with a window pool."""
    case = problem(device, form, "hybrid")
    runner = runner_of(case, buckets=(1, 2, 4, 6))
    for count in (6, 5, 3, 2, 1):
        check(case, runner, [30 - count] * count, EVERYONE[:count])


def test_reports_22_25_a_capture_at_length_one_replays_at_any(device):
    """vllm PR 20301, Dao 1164: splits and bounds of the capture must hold for 100 000 keys."""
    case = case_on(device, ForwardMode.DECODE, prefix_lens=[100_000], page_size=16, heads=4, kv_heads=2, poison=False)
    backend = fa_fast.FlashAttentionBackend(case.config)
    runner = GraphRunner(
        backend, step_of(case, backend), ForwardMode.DECODE, (1,), dict(q=case.q, k=case.k, v=case.v)
    )  # captured on the padding row, whose length is 1
    for length in (100_000, 1, 99, 50_000):
        batch, inputs = at_one(case, length)
        assert same(case, runner.run(batch, **inputs), eager(case, batch, inputs)), length


def at_one(case, length):
    """The only request of a decode with `length` cached tokens."""
    batch = case.batch
    row = case.config.req_to_token_pool.req_to_token[batch.req_pool_indices[0]]
    lens = torch.tensor([length + 1], device=batch.seq_lens.device)
    batch = replace(batch, seq_lens=lens, seq_lens_cpu=lens.cpu(), out_cache_loc=row[length : length + 1].long())
    return batch, dict(q=case.q, k=case.k, v=case.v)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@every_form
@text_kinds
@every_page_size
def test_report_30_a_replay_follows_the_server_s_tensors_of_either_width(page_size, kind, form, dtype, device):
    """SGLang 0.4.5: the capture rebinds tensors, so that int64 lengths stay those of the capture."""
    case = problem(device, form, kind, page_size)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_cuda_graph_state(REQUESTS, REQUESTS * DRAFTS)
    full, inputs = at(case, [1] * REQUESTS, EVERYONE)
    rows, lens, loc = full.req_pool_indices.to(dtype), full.seq_lens.to(dtype), full.out_cache_loc.clone()
    backend.init_forward_metadata_capture_cuda_graph(
        REQUESTS, len(inputs["q"]), rows, lens, None, full.forward_mode, full.spec_info
    )
    addresses = [tensor.data_ptr() for tensor in tensors_of(backend.forward_metadata)]
    static, step = replace(full, out_cache_loc=loc), step_of(case, backend)
    recording = Recorder(case.config.device).record(lambda: step(static, **inputs))
    for new_lens, order in (REPLAYS[0], REPLAYS[3]):
        batch, new_inputs = at(case, new_lens, order)
        pairs = ((rows, batch.req_pool_indices), (lens, batch.seq_lens), (loc, batch.out_cache_loc))
        for held, value in (*pairs, *((inputs[name], value) for name, value in new_inputs.items())):
            held.copy_(value)  # the server writes into its own tensors, and hands over those it captured with
        backend.init_forward_metadata_replay_cuda_graph(
            REQUESTS, rows, lens, None, None, batch.forward_mode, batch.spec_info, None, loc
        )
        recording.replay()
        assert [tensor.data_ptr() for tensor in tensors_of(backend.forward_metadata)] == addresses
        assert same(case, recording.result, oracle(case, batch, new_inputs))


@every_form
@text_kinds
@every_page_size
def test_report_30_all_sizes_share_their_buffers_and_gather_the_batch_s_rows_alone(page_size, kind, form, device):
    """SGLang 0.4.5: a private table for each captured size; a replay gathers the rows of the whole pool."""
    case = problem(device, form, kind, page_size)
    runner = runner_of(case, buckets=(1, 2, 4, 6))
    table = case.config.req_to_token_pool.req_to_token
    for name in runner.static.tensors:
        assert len({getattr(runner.static.view(size), name).data_ptr() for size in runner.buckets}) == 1
    for count in (6, 3, 1):
        batch, inputs = at(case, [20] * count, EVERYONE[:count])
        runner.run(batch, **inputs)
        bucket = next(size for size in runner.buckets if size >= count)
        for step in runner.backend.forward_metadata.for_kind(TEXT[kind]):
            if device == "cuda" or not isinstance(step, AttentionPass):  # there a replay leaves the backend's plan
                continue
            is_the_pool_s = step.page_table.data_ptr() == table.data_ptr()
            assert is_the_pool_s or step.page_table.shape[0] in (bucket, step.sequences)
            assert is_the_pool_s or page_size != 1 or kind != "full", "copied for nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 4])
def test_report_30_on_a_gpu_more_sizes_take_no_more_tables(page_size):
    """Thirty-two sizes, of tables of 6 MB for the largest, and all the tables of the sizes together of 100 MB."""
    requests = 64
    case = case_on("cuda", ForwardMode.DECODE, prefix_lens=[5] * requests, page_size=page_size, heads=8, kv_heads=1,
                   context_len=24_000 * page_size, poison=False)  # fmt: skip
    inputs = dict(q=case.q, k=case.k, v=case.v)

    def reserved(buckets: tuple[int, ...]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        backend = fa_fast.FlashAttentionBackend(case.config)
        runner = GraphRunner(backend, step_of(case, backend), ForwardMode.DECODE, buckets, inputs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found = torch.cuda.memory_reserved() - before
        runner.run(case.batch, **inputs)
        return found

    reserved((requests,))  # what the kernels allocate once
    assert reserved(tuple(range(2, requests + 1, 2))) <= reserved((requests,)) + 40 * 2**20


@pytest.mark.parametrize(
    "form", ["decode", "draft-chain", "draft-branches", "verify-chain", "verify-tree", "draft-extend"]
)
def test_report_51_local_layers_are_local_in_every_graph(form, device):
    """The newest public code skips chunks in some graphs that eager applies: here a chunk matters, and both agree."""
    case = problem(device, form, "local")
    runner = runner_of(case)
    batch = check(case, runner, [34] * REQUESTS, EVERYONE)
    full = problem(device, form, "full")
    inputs = at(case, [34] * REQUESTS, EVERYONE)[1]
    assert not same(case, runner.run(batch, **inputs), eager(full, batch, inputs))
