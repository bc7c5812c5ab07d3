"""Reports 4, 5, 7, 8, 13 to 15, 22, 24, 25, 29 and 51: what a captured step must not keep from its capture."""

from __future__ import annotations

import pytest
import torch

import fa_fast
from fa_fast.graphs import GraphRunner
from fa_ref import AttentionPass, ForwardMode, LayerKind
from tests.support import case_on
from tests.test_graphs import REQUESTS, at, eager, problem, runner_of, same, step_of

C = 16  # the chunk of problem(..., "local")
EVERYONE = list(range(REQUESTS))


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
    from dataclasses import replace

    batch = case.batch
    row = case.config.req_to_token_pool.req_to_token[batch.req_pool_indices[0]]
    lens = torch.tensor([length + 1], device=batch.seq_lens.device)
    batch = replace(batch, seq_lens=lens, seq_lens_cpu=lens.cpu(), out_cache_loc=row[length : length + 1].long())
    return batch, dict(q=case.q, k=case.k, v=case.v)


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
