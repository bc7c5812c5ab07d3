"""Reports about chunked local attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import make_case
from tests.support import (
    PAGE_SIZES,
    agrees,
    both_packages,
    every_page_size,
    every_route,
    meaning,
    planned_routes,
    plans,
    run,
    seen,
    sized,
    with_layer,
)

FULL, LOCAL = LayerKind.FULL, LayerKind.LOCAL
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
SMALL = dict(head_dim=8, heads=1, kind=LOCAL)


def whole_pages(tokens: int, page_size: int) -> int:
    """The least multiple of the page size that holds that many tokens."""
    return -(-tokens // page_size) * page_size


def local_pass(package, case):
    (step,) = package.plan_batch(case.batch, case.config).for_kind(LOCAL)
    return step


@every_page_size
def test_the_last_chunk_of_a_long_request_is_in_reach(page_size, device):
    """sglang PR #5173: IndexError at 8193 tokens. C 512, 1000 keys, 4 queries: the last chunk has 488 keys."""
    chunk = whole_pages(512, page_size)
    case = make_case(
        EXTEND, **sized(device, prefix_lens=[996], new_lens=[4], page_size=page_size, chunk=chunk, **SMALL)
    )
    for package_plan in plans(case).values():
        (step,) = package_plan[LOCAL]
        assert step["cache_seqlens"] == [1000 - chunk]
    assert 1000 - 512 == 488
    assert agrees(case)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_one_token_past_a_chunk_of_8192(mode, page_size, device):
    """sglang PR #5173: IndexError at 8193 tokens with the default chunk of 8192."""
    case = make_case(mode, **sized(device, prefix_lens=[8192], new_lens=[1], page_size=page_size, chunk=8192, **SMALL))
    for package_plan in plans(case).values():
        (step,) = package_plan[LOCAL]
        assert (step["cache_seqlens"], step["cu_seqlens_q"]) == ([1], [0, 1])
    assert agrees(case)


@every_page_size
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_a_table_that_is_not_whole_chunks(mode, page_size, device):
    """vllm PR #16209: an error for a table of 10 pages, C of 4 pages, a length in the last, partial chunk."""
    length = 9 * page_size + 1
    case = make_case(
        mode,
        **sized(device, prefix_lens=[length - 1], new_lens=[1], page_size=page_size, chunk=4 * page_size,
                context_len=10 * page_size, **SMALL),
    )  # fmt: skip
    assert case.config.req_to_token_pool.req_to_token.shape[1] == 10 * page_size
    for package_plan in plans(case).values():
        assert package_plan[LOCAL][0]["cache_seqlens"] == [page_size + 1]
    assert agrees(case)


@both_packages
@every_page_size
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_a_chunk_longer_than_the_context_is_plain_causal(mode, page_size, package):
    """vllm #16274: wrong when C is larger than the context. C 8192, context 4096."""
    chunk = whole_pages(8192, page_size)
    case = make_case(
        mode, prefix_lens=[4091, 17], new_lens=[5, 3], page_size=page_size, chunk=chunk, context_len=4096, **SMALL
    )
    plan = package.plan_batch(case.batch, case.config)
    (local,), (full,) = (map(meaning, plan.for_kind(kind)) for kind in (LOCAL, FULL))
    assert local == full
    local_out, full_out = case.run(package), with_layer(case, use_irope=False).run(package)
    assert case.judge(local_out).ok
    assert torch.equal(local_out, full_out)


@both_packages
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_entries_are_page_ids_and_the_chunk_stays_whole(mode, hybrid, package):
    """sglang PR #32902, #23757: token slots used as page ids, and the chunk shrunk to the sequence.

    Page 16, 1000 keys, C 8192: one virtual batch whose entries are the request's 63 pages.
    """
    case = make_case(
        mode, prefix_lens=[988 if mode is EXTEND else 999], new_lens=[12], page_size=16, chunk=8192, hybrid=hybrid,
        **SMALL,
    )  # fmt: skip
    step = local_pass(package, case)
    slots = case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[0]), :1000].long()
    slots = case.config.token_to_kv_pool.write_slots(case.layer, slots)
    assert step.sequences == 1
    assert step.cache_seqlens.tolist() == [1000]
    assert step.pages(0) == [int(slot) // 16 for slot in slots[::16]]
    assert len(step.pages(0)) == 63


@both_packages
def test_a_chunk_is_never_cut_to_whole_pages_of_a_short_request(package):
    """Local attention of sglang 0.4.5: C 8192, page 64, 100 tokens became 64 + 36. They are one batch of 100."""
    q, cu, k, table = package.make_local_attention_virtual_batches(
        8192, np.array([0, 100]), np.array([100]), torch.tensor([[4, 9]], dtype=torch.int32), 64
    )
    assert (q.tolist(), cu.tolist(), k.tolist(), table.tolist()) == ([100], [0, 100], [100], [[4, 9]])


@both_packages
def test_the_table_is_strided_into_pages_before_it_is_cut_into_chunks(package):
    """Local attention of sglang 0.4.5: the local table was built from slots, before page striding.

    Page 4, C 8, pages 10 12 14 16 18: [[10, 12], [14, 16], [18, any]].
    """
    case = make_case(prefix_lens=[0], new_lens=[18], page_size=4, chunk=8, **SMALL)
    row = case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[0])]
    row[:18] = torch.tensor([page * 4 + offset for page in (10, 12, 14, 16, 18) for offset in range(4)][:18])
    step = local_pass(package, case)
    assert [step.pages(i) for i in range(3)] == [[10, 12], [14, 16], [18]]


@every_route
@every_page_size
def test_decode_keeps_to_its_chunk(page_size, route):
    """Local attention of sglang 0.4.5: decode ignored local layers and attended to the whole request."""
    chunk = 3 * page_size
    lens = [chunk - 1, chunk, chunk + 1, 2 * chunk + 2]
    longest = max(lens)
    case = make_case(
        DECODE, prefix_lens=[n - 1 for n in lens], page_size=page_size, chunk=chunk, v_head_dim=longest, **SMALL
    )
    assert seen(case, route) == [list(range((n - 1) // chunk * chunk, n)) for n in lens]


@both_packages
@pytest.mark.parametrize("host_lengths", [True, False])
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_bounds_are_python_ints(mode, host_lengths, package):
    """Local attention of sglang 0.4.5: the maxima handed to the kernel were numpy scalars."""
    case = make_case(mode, page_size=4, host_lengths=host_lengths, **SMALL)
    plan = package.plan_batch(case.batch, case.config)
    for kind in plan.passes:
        for step in plan.for_kind(kind):
            assert type(step.max_seqlen_q) is int
            assert type(step.max_seqlen_k) is int
            assert type(step.page_size) is int


@both_packages
def test_cu_seqlens_of_the_example_in_the_comments(package):
    """A comment that many engines carry gives [0, 4, 6, 10, 14, 18, 19, 23, 24] for this example."""
    _, cu, _, _ = package.make_local_attention_virtual_batches(
        4, np.array([0, 4, 14, 19]), np.array([6, 17, 9]), torch.zeros(3, 10, dtype=torch.int32), 2
    )
    assert cu.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]


@planned_routes
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extend_keeps_to_chunks_too(page_size, route):
    """sglang PR #6162: wrong past C. Queries before, on and after every chunk edge."""
    chunk = 2 * page_size
    total = 2 * chunk + 3
    case = make_case(
        prefix_lens=[1, 0], new_lens=[total - 1, total], page_size=page_size, chunk=chunk, v_head_dim=total, **SMALL
    )
    expected = [list(range(p // chunk * chunk, p + 1)) for p in [*range(1, total), *range(total)]]
    assert seen(case, route) == expected
    assert case.judge(run(case, route)).ok
