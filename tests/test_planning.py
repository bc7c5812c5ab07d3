"""Plans as literal arrays for batches small enough to work out by hand; virtual batches; both packages' plans equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fa_ref import BackendConfig, BadConfig, ForwardBatch, ForwardMode, LayerKind, MHAKVPool, ReqToTokenPool, SWAKVPool
from fa_ref.planning.local import make_local_attention_virtual_batches_slow as slow
from fa_ref.planning.page_table import pages_of, shifted
from fa_ref.planning.ragged import cu_seqlens, spans
from tests.support import (
    PACKAGES,
    PAGE_SIZES,
    both_packages,
    case_on,
    check_bounds,
    every_page_size,
    meaning,
    plans,
)

FULL, SLIDING, LOCAL = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL
EXTENDS = (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL, ForwardMode.MIXED)

# Two requests, 9 and 6 tokens long, and the pages that hold them.
PAGES = {1: ([7, 3, 9, 4, 12, 5, 20, 11, 6], [8, 2, 10, 15, 1, 13]), 4: ([5, 2, 7], [3, 6]), 3: ([4, 1, 6], [2, 7])}
LENS, NEW = (9, 6), (3, 6)


def by_pages(page_size: int, *, window: int | None = None, chunk: int | None = None, **config: Any) -> BackendConfig:
    """A backend whose rows 2 and 1 hold the two requests, in the pages listed in PAGES."""
    rows = ReqToTokenPool(size=3, context_len=12)
    geometry = dict(size=36, page_size=page_size, dtype=torch.float32, head_num=1, head_dim=8, layer_num=1)
    pool: Any = MHAKVPool(**geometry)
    if config.get("is_hybrid_swa"):
        pool = SWAKVPool(full_pool=pool, swa_pool=MHAKVPool(**geometry), full_layer_ids=[0], swa_layer_ids=[1])
        backwards = torch.arange(36 // page_size).flip(0) + 1  # full page p is window page 36 / size + 1 - p
        slots = (backwards[:, None] * page_size + torch.arange(page_size)).flatten()
        pool.full_to_swa_index_mapping[page_size : 36 + page_size] = slots.int()
    for row, pages, length in zip((2, 1), PAGES[page_size], LENS, strict=True):
        slots = [page * page_size + offset for page in pages for offset in range(page_size)]
        rows.req_to_token[row, :length] = torch.tensor(slots[:length])
    return BackendConfig(
        device="cpu", dtype=torch.float32, kv_cache_dtype=torch.float32, page_size=page_size, context_len=12,
        sliding_window_size=window, attention_chunk_size=chunk, req_to_token_pool=rows, token_to_kv_pool=pool, **config,
    )  # fmt: skip


def batch_of(mode: ForwardMode, new: tuple[int, ...] = NEW, host: bool = True) -> ForwardBatch:
    lens, news = torch.tensor(LENS), torch.tensor(new)
    extends = mode in EXTENDS
    prefix = [n - m for n, m in zip(LENS, new, strict=True)]
    return ForwardBatch(
        forward_mode=mode,
        batch_size=2,
        req_pool_indices=torch.tensor([2, 1]),
        seq_lens=lens,
        seq_lens_cpu=lens if host else None,
        out_cache_loc=torch.arange(sum(new)) if extends else torch.arange(2),
        extend_seq_lens=news if extends else None,
        extend_seq_lens_cpu=list(new) if extends and host else None,
        extend_prefix_lens=torch.tensor(prefix) if extends else None,
        extend_prefix_lens_cpu=prefix if extends and host else None,
    )


HOST = pytest.mark.parametrize("host", [True, False], ids=["host-lengths", "device-lengths"])


def plan(package: Any, mode: ForwardMode, config: BackendConfig, kind: LayerKind, **batch: Any) -> dict[str, Any]:
    """The one pass of a kind, as `meaning` gives it."""
    (step,) = package.plan_batch(batch_of(mode, **batch), config).for_kind(kind)
    check_bounds(step)
    return meaning(step)


# ---- literal plans --------------------------------------------------------------------------------------------


@both_packages
@HOST
@pytest.mark.parametrize("mode", EXTENDS)
@pytest.mark.parametrize("page_size", PAGES)
def test_extend_reads_all_pages_of_each_request_causally(package, mode, page_size, host):
    found = plan(package, mode, by_pages(page_size), FULL, host=host)
    first, second = PAGES[page_size]
    assert found["pages"] == [first[: -(-9 // page_size)], second[: -(-6 // page_size)]]
    assert found["cache_seqlens"] == [9, 6]
    assert found["cu_seqlens_q"] == [0, 3, 9]
    assert (found["causal"], found["uses_window"], found["takes_sinks"]) == (True, False, True)
    assert (found["page_size"], found["pool"], found["token_index"]) == (page_size, "full", None)
    assert found["keys_are_new"] is False


@both_packages
@HOST
@pytest.mark.parametrize("page_size", PAGES)
def test_decode_is_one_query_a_request_over_all_its_pages(package, page_size, host):
    found = plan(package, ForwardMode.DECODE, by_pages(page_size), FULL, host=host)
    assert found["pages"] == list(PAGES[page_size])
    assert found["cache_seqlens"] == [9, 6]
    assert found["cu_seqlens_q"] == [0, 1, 2]


SLIDING_DECODE = {  # window left 2: the queries at 8 and 5 see 6, 7, 8 and 3, 4, 5
    1: ([[20, 11, 6], [15, 1, 13]], [3, 3]),
    3: ([[6], [7]], [3, 3]),  # positions 6 to 8 and 3 to 5 are a page each
    4: ([[2, 7], [3, 6]], [5, 6]),  # from the page that holds 6 (position 4 on) and the one that holds 3 (0 on)
}


@both_packages
@HOST
@pytest.mark.parametrize("page_size", SLIDING_DECODE)
def test_sliding_decode_reads_only_the_pages_that_hold_the_window(package, page_size, host):
    found = plan(package, ForwardMode.DECODE, by_pages(page_size, window=2), SLIDING, host=host)
    assert (found["pages"], found["cache_seqlens"]) == SLIDING_DECODE[page_size]
    assert found["uses_window"] is True


@both_packages
@HOST
@pytest.mark.parametrize("page_size", PAGES)
def test_sliding_extend_reads_like_full_and_leaves_the_window_to_the_kernel(package, page_size, host):
    config = by_pages(page_size, window=2)
    full = plan(package, ForwardMode.EXTEND, config, FULL, host=host)
    assert plan(package, ForwardMode.EXTEND, config, SLIDING, host=host) == full | {"uses_window": True}


LOCAL_DECODE = {  # (page size, chunk): the queries at 8 and 5
    (1, 4): ([[6], [1, 13]], [1, 2]),  # chunks 8.. and 4..
    (4, 4): ([[7], [6]], [1, 2]),
    (4, 8): ([[7], [3, 6]], [1, 6]),  # chunks 8.. and 0..
    (3, 3): ([[6], [7]], [3, 3]),  # chunks 6..8 and 3..5, both full
    (3, 6): ([[6], [2, 7]], [3, 6]),
    (1, 100): ([PAGES[1][0], PAGES[1][1]], [9, 6]),
}


@both_packages
@HOST
@pytest.mark.parametrize(("page_size", "chunk"), LOCAL_DECODE)
def test_local_decode_is_one_sequence_a_request_from_its_chunk_on(package, page_size, chunk, host):
    found = plan(package, ForwardMode.DECODE, by_pages(page_size, chunk=chunk), LOCAL, host=host)
    assert (found["pages"], found["cache_seqlens"]) == LOCAL_DECODE[page_size, chunk]
    assert found["cu_seqlens_q"] == [0, 1, 2]
    assert found["uses_window"] is False


LOCAL_EXTEND = {  # queries at 6, 7, 8 and at 0 .. 5
    (1, 4): (
        [[12, 5, 20, 11], [6], [8, 2, 10, 15], [1, 13]],
        [4, 1, 4, 2],
        [0, 2, 3, 7, 9],
    ),
    (4, 4): ([[2], [7], [3], [6]], [4, 1, 4, 2], [0, 2, 3, 7, 9]),
    (4, 8): ([[5, 2], [7], [3, 6]], [8, 1, 6], [0, 2, 3, 9]),
    (3, 3): ([[6], [2], [7]], [3, 3, 3], [0, 3, 6, 9]),
    (3, 6): ([[6], [2, 7]], [3, 6], [0, 3, 9]),
    (4, 8192): ([[5, 2, 7], [3, 6]], [9, 6], [0, 3, 9]),
}


@both_packages
@HOST
@pytest.mark.parametrize("mode", EXTENDS)
@pytest.mark.parametrize(("page_size", "chunk"), LOCAL_EXTEND)
def test_local_extend_is_one_sequence_for_each_chunk_touched(package, mode, page_size, chunk, host):
    found = plan(package, mode, by_pages(page_size, chunk=chunk), LOCAL, host=host)
    pages, lens, cu = LOCAL_EXTEND[page_size, chunk]
    assert (found["pages"], found["cache_seqlens"], found["cu_seqlens_q"]) == (pages, lens, cu)
    assert found["causal"] is True


@both_packages
@HOST
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(("page_size", "pages"), [(1, 36), (3, 12), (4, 9)])
def test_with_two_pools_window_layers_read_the_window_pool_s_pages(package, mode, page_size, pages, host):
    config = by_pages(page_size, window=30, chunk=page_size * 8, is_hybrid_swa=True)
    there = [[pages + 1 - page for page in request] for request in PAGES[page_size]]
    for kind, pool, expected in ((FULL, "full", list(PAGES[page_size])), (SLIDING, "swa", there)):
        found = plan(package, mode, config, kind, host=host)
        assert (found["pool"], found["pages"]) == (pool, expected)
    local = plan(package, mode, by_pages(page_size, chunk=page_size * 12, is_hybrid_swa=True), LOCAL, host=host)
    assert (local["pool"], local["pages"]) == ("swa", there)


@both_packages
def test_idle_has_no_passes_and_no_tokens(package):
    batch = ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        batch_size=0,
        req_pool_indices=torch.zeros(0, dtype=torch.int64),
        seq_lens=torch.zeros(0, dtype=torch.int64),
    )
    found = package.plan_batch(batch, by_pages(4, window=2, chunk=8))
    assert found.num_tokens == 0
    assert dict(found.passes) == {FULL: (), SLIDING: (), LOCAL: ()}


@both_packages
@pytest.mark.parametrize(("new", "expected"), [((9, 6), True), ((3, 6), False), ((9, 5), False)])
def test_keys_are_new_exactly_if_no_request_has_a_prefix(package, new, expected):
    assert plan(package, ForwardMode.EXTEND, by_pages(4), FULL, new=new)["keys_are_new"] is expected


@both_packages
def test_a_request_without_new_tokens_brings_no_queries(package):
    found = plan(package, ForwardMode.EXTEND, by_pages(4), FULL, new=(0, 6))
    assert (found["pages"], found["cu_seqlens_q"]) == ([[3, 6]], [0, 6])
    local = plan(package, ForwardMode.EXTEND, by_pages(4, chunk=4), LOCAL, new=(0, 6))
    assert (local["pages"], local["cu_seqlens_q"]) == ([[3], [6]], [0, 4, 6])


@both_packages
@pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL])
def test_deterministic_mode_plans_single_tokens_apart(package, kind):
    config = by_pages(4, window=2, chunk=4, deterministic=True)
    steps = package.plan_batch(batch_of(ForwardMode.MIXED, new=(1, 6)), config).for_kind(kind)
    single, longer = (meaning(step) for step in steps)
    assert single["token_index"] == [0]
    assert longer["token_index"] == [1, 2, 3, 4, 5, 6]
    assert single["pages"] == ([[7]] if kind is LOCAL else [[5, 2, 7]])
    assert longer["pages"] == ([[3], [6]] if kind is LOCAL else [[3, 6]])
    assert [step.max_seqlen_q for step in steps] == [1, 4 if kind is LOCAL else 12]


@both_packages
def test_a_kind_the_config_lacks_is_refused_by_mode_and_kind(package):
    found = package.plan_batch(batch_of(ForwardMode.DECODE), by_pages(4))
    for kind in (SLIDING, LOCAL, LayerKind.CROSS):
        with pytest.raises(package.UnsupportedByProvider, match=f"{kind.name} layer in DECODE"):
            found.for_kind(kind)


@both_packages
def test_describe_prints_one_row_a_pass(package):
    text = package.plan_batch(batch_of(ForwardMode.EXTEND), by_pages(4, window=2)).describe()
    title, head, *rows = text.splitlines()
    assert title == "EXTEND: 9 query tokens"
    assert head.split("  ")[0] == "layer kind"
    assert [row.split()[0] for row in rows] == ["FULL", "SLIDING", "LOCAL:", "CROSS:"]


# ---- the pieces -------------------------------------------------------------------------------------------------


def test_pages_come_from_the_first_slot_of_each_run():
    slots = torch.tensor([[8, 9, 10, 11, 4, 5], [0, 1, 2, 3, 0, 0]], dtype=torch.int32)
    assert pages_of(slots, 4).tolist() == [[2, 1], [0, 0]]
    assert torch.equal(pages_of(slots, 1), slots)
    assert pages_of(slots, 3).tolist() == [[2, 3], [0, 1]]


def test_shifted_rows_start_at_their_own_page_and_repeat_the_last():
    table = torch.tensor([[5, 6, 7], [8, 9, 10]], dtype=torch.int32)
    assert shifted(table, torch.tensor([2, 1]), 3).tolist() == [[7, 7, 7], [9, 10, 10]]


def test_cu_seqlens_and_spans_undo_each_other():
    cu = cu_seqlens(torch.tensor([4, 0, 5]))
    assert (cu.tolist(), cu.dtype) == ([0, 4, 4, 9], torch.int32)
    assert spans(cu) == [slice(0, 4), slice(4, 4), slice(4, 9)]
    assert cu_seqlens(torch.tensor([], dtype=torch.int64)).tolist() == [0]


# ---- virtual batches ----------------------------------------------------------------------------------------------


def virtual(package: Any, chunk: int, cu: list[int], lens: list[int], table: Tensor, page_size: int) -> tuple:
    make = package.make_local_attention_virtual_batches
    return make(chunk, np.array(cu, np.int32), np.array(lens, np.int32), table, page_size)


@both_packages
def test_the_well_known_example_has_these_virtual_batches(package):
    table = torch.arange(30, dtype=torch.int32).reshape(3, 10)
    q, cu, k, pages = virtual(package, 4, [0, 4, 14, 19], [6, 17, 9], table, 2)
    assert q.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert cu.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert k.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert pages.tolist() == [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]
    assert [x.dtype for x in (q, cu, k)] == [np.int32] * 3
    assert pages.dtype == torch.int32


EDGES = {
    # chunk, cu, lens, table, page size -> q, k, pages up to the length
    "one-token": (4, [0, 1], [1], [[7]], 4, [1], [1], [[7]]),
    "ends-on-a-chunk": (4, [0, 8], [8], [[7, 9]], 4, [4, 4], [4, 4], [[7], [9]]),
    "first-token-of-a-chunk": (4, [0, 1], [5], [[7, 9]], 4, [1], [1], [[9]]),
    "last-token-of-a-chunk": (4, [0, 1], [8], [[7, 9]], 4, [1], [4], [[9]]),
    "no-new-tokens": (4, [0, 0, 2], [3, 2], [[7], [8]], 4, [2], [2], [[8]]),
    "all-empty": (4, [0, 0], [0], [[7]], 4, [], [], []),
    "chunk-beyond-the-table": (64, [0, 3], [6], [[7, 9]], 4, [3], [6], [[7, 9]]),
    "chunk-of-one": (1, [0, 3], [3], [[5, 6, 7]], 1, [1, 1, 1], [1, 1, 1], [[5], [6], [7]]),
    "partial-last-page": (
        8,
        [0, 18],
        [18],
        [[10, 12, 14, 16, 18]],
        4,
        [8, 8, 2],
        [8, 8, 2],
        [[10, 12], [14, 16], [18]],
    ),
}


def used(pages: Tensor, lens: list[int], page_size: int) -> list[list[int]]:
    return [row[: -(-n // page_size)] for row, n in zip(pages.tolist(), lens, strict=True)]


@pytest.mark.parametrize("twin", [*PACKAGES, slow], ids=["fa_ref", "fa_fast", "slow"])
@pytest.mark.parametrize("edge", EDGES)
def test_virtual_batches_at_the_edges(twin, edge):
    make = slow if twin is slow else twin.make_local_attention_virtual_batches
    chunk, cu, lens, table, page_size, expect_q, expect_k, expect_pages = EDGES[edge]
    q, cu_q, k, pages = make(chunk, np.array(cu), np.array(lens), torch.tensor(table, dtype=torch.int32), page_size)
    assert (q.tolist(), k.tolist()) == (expect_q, expect_k)
    assert cu_q.tolist() == np.cumsum([0, *expect_q]).tolist()
    assert used(pages, k.tolist(), page_size) == expect_pages
    assert pages.shape[0] == len(expect_q)


@st.composite
def ragged_requests(draw: st.DrawFn) -> tuple[int, list[int], list[int], Tensor, int]:
    """A chunk, cu_seqlens_q, lengths around chunk boundaries, a table of distinct pages, and a page size."""
    page_size = draw(st.sampled_from([1, 2, 3, 16]))
    chunk = page_size * draw(st.integers(1, 6))
    near = st.one_of(
        st.integers(0, 3), *(st.integers(max(0, n * chunk - 1), n * chunk + 1) for n in (1, 2, 4)), st.integers(0, 50)
    )
    lens = draw(st.lists(near, min_size=1, max_size=5))
    new = [draw(st.one_of(st.sampled_from([0, min(1, n), n]), st.integers(0, n))) for n in lens]
    width = -(-max([*lens, 1]) // page_size) + draw(st.integers(0, 2))
    table = torch.randperm(len(lens) * width).int().reshape(len(lens), width)
    return chunk, [0, *np.cumsum(new).tolist()], lens, table, page_size


@both_packages
@given(requests=ragged_requests())
def test_virtual_batches_equal_their_definition(package, requests):
    chunk, cu, lens, table, page_size = requests
    found = virtual(package, chunk, cu, lens, table, page_size)
    expected = slow(chunk, np.array(cu), np.array(lens), table, page_size)
    for ours, definition in zip(found[:3], expected[:3], strict=True):
        assert ours.tolist() == definition.tolist()
    assert used(found[3], found[2].tolist(), page_size) == used(expected[3], expected[2].tolist(), page_size)


@both_packages
@pytest.mark.parametrize(("chunk", "page_size"), [(6, 4), (0, 1), (-4, 4), (3, 0)])
def test_a_chunk_that_is_not_whole_pages_is_refused(package, chunk, page_size):
    with pytest.raises(BadConfig, match=f"{chunk}.*{page_size}"):
        virtual(package, chunk, [0, 1], [1], torch.zeros(1, 1, dtype=torch.int32), page_size)


# ---- both packages build the same plan ------------------------------------------------------------------------------

SHAPES = {
    "ragged": ((3, 0, 6, 17), (5, 4, 1, 9)),
    "single": ((130,), (7,)),
    "holes": ((5, 0, 0, 31), (0, 3, 0, 2)),
    "no-prefix": ((0, 0, 0), (16, 1, 33)),
    "ones": ((15, 16, 17, 63), (1, 1, 1, 1)),
}


@HOST
@every_page_size
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", [*EXTENDS, ForwardMode.DECODE])
def test_both_packages_plan_the_same(mode, shape, page_size, host, device):
    prefix, new = SHAPES[shape]
    for kind in (FULL, SLIDING, LOCAL):
        for hybrid in (False, True):
            for deterministic in (False, True) if host else (False,):
                case = case_on(
                    device, mode, prefix_lens=prefix, new_lens=new, page_size=page_size, kind=kind, window=5,
                    chunk=page_size * 2, hybrid=hybrid, deterministic=deterministic, host_lengths=host,
                )  # fmt: skip
                found = plans(case)
                assert found["fa_ref"] == found["fa_fast"], (kind, hybrid, deterministic)
                assert kind in found["fa_ref"]


@both_packages
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_planning_leaves_the_batch_and_the_pools_alone(package, mode, page_size):
    case = case_on("cpu", mode, page_size=page_size, kind=LOCAL, chunk=page_size * 2, hybrid=True)
    rows = case.config.req_to_token_pool.req_to_token
    held = [rows, case.config.token_to_kv_pool.full_to_swa_index_mapping, case.batch.seq_lens, case.batch.out_cache_loc]
    before = [x.clone() for x in held]
    package.plan_batch(case.batch, case.config)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
