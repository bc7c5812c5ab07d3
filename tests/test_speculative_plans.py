"""Speculation planned: draft decode, verify, draft extend and cascades give the mask's result, by plans that are equal.

Small plans are written down in full, and what a query sees is read off the output, slot by slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_ref
from fa_ref import (
    AttentionPass,
    BadBatch,
    BadConfig,
    BadPageTable,
    DraftInput,
    ForwardMode,
    LayerKind,
    TreePass,
    VerifyInput,
    build_tree,
)
from fa_ref.cases import Case, make_case
from tests.support import (
    FP8,
    PACKAGES,
    ROUTES,
    both_packages,
    cache_bytes,
    case_on,
    every_route,
    meaning,
    planned_routes,
    plans,
    run,
    seen_slots,
    verdicts,
    with_batch,
    with_layer,
)

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
FULL, SLIDING, LOCAL = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL
KINDS = pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL], ids=lambda kind: kind.value)
PAGES = pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
POOLS = pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
TREE_WAYS = pytest.mark.parametrize("tree_attention", ["auto", "fused", "expand"])

TREES = [
    [-1, 0, 0, 1, 1, 2, 3],
    [-1, 0, 1, 2, 3, 4, 5],  # a chain
    [-1, 0, 0, 0, 0, 0, 0],  # a star
    [-1, 0, 1, 0, 3, 0, 5],
]
TREE = dict(trees=TREES)
SHAPES: dict[str, tuple[ForwardMode, dict[str, Any]]] = {
    **{
        f"draft-topk-{topk}-step-{step}": (DECODE, dict(topk=topk, num_steps=3, step=step))
        for topk in (1, 2, 4)
        for step in range(3)
    },
    "verify-chain": (VERIFY, dict(draft_token_num=7)),
    "verify-tree": (VERIFY, TREE),
    "draft-extend-ragged": (DRAFT_EXTEND, dict(new_lens=(1, 4, 2, 3))),
    "draft-extend-fixed": (DRAFT_EXTEND, dict(new_lens=(3, 3, 3, 3))),
    "cascade-decode": (DECODE, {}),
    "cascade-extend": (ForwardMode.EXTEND, dict(new_lens=(1, 4, 2, 3))),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def problem(shape: str, page_size: int = 4, *, device: str = "cpu", **more: Any) -> Case:
    """Four requests on and next to the edges of pages and chunks; drafts run across them."""
    mode, arguments = SHAPES[shape]
    p = page_size
    given: dict[str, Any] = dict(
        prefix_lens=(2 * p - 1, 2 * p, 0, 3 * p + 2), page_size=p, window=4, chunk=2 * p, heads=4, kv_heads=2
    )
    if shape.startswith("cascade"):
        given |= dict(prefix_lens=(2 * p + 1, 2 * p, 2 * p, 3 * p + 2), shared_prefix=2 * p)
    return case_on(device, mode, **given | arguments | more)


def assert_agrees(case: Case) -> None:
    planned = plans(case)
    assert planned["fa_ref"] == planned["fa_fast"]
    for route, verdict in verdicts(case).items():
        assert verdict.ok, (route, verdict)


# ---- masks = passes = fast --------------------------------------------------------------------------------------


@KINDS
@PAGES
@POOLS
@every_shape
def test_masks_passes_and_fast_agree(shape, hybrid, page_size, kind, device):
    assert_agrees(problem(shape, page_size, kind=kind, hybrid=hybrid, device=device))


FEATURES: dict[str, dict[str, Any]] = {
    "sinks": dict(sinks=True),
    "softcap": dict(softcap=0.8),
    "sinks-and-softcap": dict(sinks=True, softcap=0.8),
    "no-host-lengths": dict(host_lengths=False),
    "one-head": dict(heads=1, kv_heads=1),
    "heads-24-to-2": dict(heads=24, kv_heads=2),
    "narrow-values": dict(head_dim=32, v_head_dim=16),
    "bf16": dict(dtype=torch.bfloat16),
    "fp8": dict(dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.25, v_scale=1.5),
    "fp8-a-scale-a-head": dict(
        kv_dtype=FP8, k_scale=torch.tensor([0.25, 2.0]), v_scale=torch.tensor([3.0, 0.5]), sinks=True
    ),
    "window-0": dict(window=0),
    "window-1": dict(window=1),
    "window-beyond-everything": dict(window=1000),
    "chunk-of-a-page": dict(chunk=3),
    "chunk-beyond-everything": dict(chunk=3000),
    "room-behind": dict(context_len=70),
}


@KINDS
@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.endswith("step-1")])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_agrees(feature, shape, kind):
    assert_agrees(problem(shape, 3, kind=kind, hybrid=True, **FEATURES[feature]))


@TREE_WAYS
@KINDS
@POOLS
@pytest.mark.parametrize("feature", ["bf16", "fp8-a-scale-a-head", "sinks-and-softcap", "no-host-lengths"])
@pytest.mark.parametrize("shape", ["verify-tree", "draft-topk-4-step-2"])
def test_every_way_to_run_a_tree_agrees(shape, feature, hybrid, kind, tree_attention):
    case = problem(shape, 3, kind=kind, hybrid=hybrid, tree_attention=tree_attention, **FEATURES[feature])
    assert case.config.tree_attention == tree_attention
    assert_agrees(case)


def test_expand_leaves_no_tree_pass_in_the_plan_of_a_backend():
    for way, kinds in (("fused", [AttentionPass, TreePass]), ("expand", [AttentionPass, AttentionPass])):
        case = problem("verify-tree", tree_attention=way)
        backend = fa_fast.FlashAttentionBackend(case.config)
        backend.init_forward_metadata(case.batch)
        assert [type(step) for step in backend.forward_metadata.for_kind(FULL)] == kinds


@every_route
@KINDS
@every_shape
def test_the_cache_holds_the_drafts_afterwards(shape, kind, route):
    case = problem(shape, kind=kind, hybrid=True)
    run(case, route)
    pool, loc = case.config.token_to_kv_pool, case.batch.out_cache_loc
    if case.batch.spec_info is not None and case.batch.forward_mode.is_decode():
        loc = loc.view(-1, 3)[:, case.step]
    keys, values = pool.get_kv_buffer(0)
    slots = pool.write_slots(case.layer, loc)
    assert torch.equal(keys[slots].flatten(1), case.k)
    assert torch.equal(values[slots].flatten(1), case.v)


@planned_routes
@KINDS
def test_a_tree_without_branches_gives_the_chain(kind, route):
    """Drafts 0, 1, 2 ... one below the other, once as a causal extend and once under a mask that says the same."""
    lens = (7, 0, 8)
    chain = make_case(VERIFY, prefix_lens=lens, draft_token_num=5, kind=kind, sinks=True)
    tree = make_case(VERIFY, prefix_lens=lens, trees=[[-1, 0, 1, 2, 3]] * 3, kind=kind, sinks=True)
    assert torch.equal(chain.q, tree.q)
    torch.testing.assert_close(run(tree, route), run(chain, route), atol=2e-6, rtol=2e-6)


@planned_routes
@KINDS
def test_one_branch_is_one_of_several(kind, route):
    """A branch of a topk 2 draft gives what the same tokens give as the only branch."""
    wide = make_case(DECODE, topk=2, num_steps=3, step=2, prefix_lens=(6, 8), kind=kind, chunk=8)
    wide_out = run(wide, route).view(2, 2, -1)
    rows, pool = wide.config.req_to_token_pool.req_to_token, wide.config.token_to_kv_pool
    paths = wide.batch.out_cache_loc.view(2, 2, 3)
    for branch in range(2):
        alone = make_case(DECODE, topk=1, num_steps=3, step=2, prefix_lens=(6, 8), kind=kind, chunk=8)
        table, other = alone.config.req_to_token_pool.req_to_token, alone.config.token_to_kv_pool
        for request, row in enumerate(wide.batch.req_pool_indices.tolist()):
            prefix = int(wide.batch.seq_lens[request])
            source = torch.cat([rows[row, :prefix].long(), paths[request, branch]])
            target = table[int(alone.batch.req_pool_indices[request]), : prefix + 3].long()
            for to, came in zip(other.get_kv_buffer(0), pool.get_kv_buffer(0), strict=True):
                to[target] = came[source]
        pick = torch.tensor([branch, 2 + branch])
        alone = replace(alone, q=wide.q[pick], k=wide.k[pick], v=wide.v[pick])
        torch.testing.assert_close(run(alone, route), wide_out[:, branch], atol=2e-6, rtol=2e-6)


# ---- plans written down -----------------------------------------------------------------------------------------


def by_slots(case: Case, rows: list[list[int]]) -> Case:
    """The case with its requests in these slots of the full pool."""
    table = case.config.req_to_token_pool.req_to_token
    for row, slots in zip(case.batch.req_pool_indices.tolist(), rows, strict=True):
        table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return case


def planned(package: Any, case: Case, kind: LayerKind) -> list[dict[str, Any]]:
    return [meaning(step) for step in package.plan_batch(case.batch, case.config, case.step).for_kind(kind)]


def small_tree(kind: LayerKind = FULL, **more: Any) -> Case:
    """Request A: 6 tokens in pages 3 and 5, then 3 drafts; request B: 5 tokens in pages 9 and 4, then 3 drafts."""
    case = make_case(
        VERIFY, prefix_lens=(6, 5), trees=[[-1, 0, 0], [-1, 0, 1]], page_size=4, kind=kind, window=3, chunk=8,
        **more,
    )  # fmt: skip
    a = [12, 13, 14, 15, 20, 21, 22, 23, 28]
    b = [36, 37, 38, 39, 16, 17, 18, 19]
    return by_slots(case, [a, b])


PREFIX = dict(causal=False, uses_window=False, takes_sinks=False, keys_are_new=False, token_index=None)


@both_packages
def test_a_tree_to_verify_written_down(package):
    prefix, tree = planned(package, small_tree(), FULL)
    assert prefix == PREFIX | {
        "pages": [[3, 5], [9, 4]], "cache_seqlens": [6, 5], "cu_seqlens_q": [0, 3, 6], "page_size": 4,
        "pool": "full", "cut_to_window": -1,
    }  # fmt: skip
    assert tree == {
        "slots": [[22, 23, 28], [17, 18, 19]],
        "mask": [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]],
        "pool": "full", "takes_sinks": True, "cut_to_window": -1,
    }  # fmt: skip


@both_packages
def test_a_tree_under_a_window_written_down(package):
    """Window 3: a query sees 3 keys before itself. Depths are 0 1 1 and 0 1 2, so 3 2 2 and 3 2 1 are prefix keys."""
    prefix, tree = planned(package, small_tree(SLIDING), SLIDING)
    a, b = [21, 20, 15], [16, 39, 38]  # the newest three, newest first
    assert prefix == PREFIX | {
        "pages": [a, a[:2], a[:2], b, b[:2], b[:1]], "cache_seqlens": [3, 2, 2, 3, 2, 1],
        "cu_seqlens_q": [0, 1, 2, 3, 4, 5, 6], "page_size": 1, "pool": "full", "cut_to_window": 3,
    }  # fmt: skip
    assert tree["mask"] == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    assert tree["cut_to_window"] == 3


@both_packages
def test_a_window_goes_by_depth_in_the_tree_as_well(package):
    case = make_case(VERIFY, prefix_lens=(4,), trees=[[-1, 0, 0, 1, 3, 2]], kind=SLIDING, window=1, page_size=4)
    prefix, tree = planned(package, case, SLIDING)
    assert prefix["cache_seqlens"] == [1, 0, 0, 0, 0, 0]  # only the root has a prefix key in its window
    assert tree["mask"] == [
        [
            [1, 0, 0, 0, 0, 0],  # depth 0
            [1, 1, 0, 0, 0, 0],  # depth 1
            [1, 0, 1, 0, 0, 0],  # depth 1, stored two places behind its parent
            [0, 1, 0, 1, 0, 0],  # depth 2
            [0, 0, 0, 1, 1, 0],  # depth 3
            [0, 0, 1, 0, 0, 1],  # depth 2, stored three places behind its parent
        ]
    ]


@both_packages
def test_a_tree_across_the_edge_of_a_chunk_written_down(package):
    """Chunk 8, 6 tokens: depths 0 and 1 are positions 6 and 7, depth 2 is position 8 and starts the next chunk."""
    case = make_case(VERIFY, prefix_lens=(6,), trees=[[-1, 0, 0, 1]], kind=LOCAL, chunk=8, page_size=4)
    by_slots(case, [[12, 13, 14, 15, 20, 21, 22, 23, 28, 29]])
    prefix, tree = planned(package, case, LOCAL)
    assert prefix["pages"] == [[3, 5], [3, 5], [3, 5], []]
    assert prefix["cache_seqlens"] == [6, 6, 6, 0]
    assert tree["mask"] == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]]


@both_packages
def test_the_second_pool_has_its_own_slots(package):
    case = small_tree(SLIDING, hybrid=True)
    mapping = case.config.token_to_kv_pool.full_to_swa_index_mapping
    mapping[:40] = torch.arange(100, 60, -1)
    prefix, tree = planned(package, case, SLIDING)
    assert prefix["pages"][0] == [79, 80, 85]  # 100 minus 21, 20, 15
    assert tree["slots"] == [[78, 77, 72], [83, 82, 81]]
    assert (prefix["pool"], tree["pool"]) == ("swa", "swa")
    full_prefix, full_tree = planned(package, case, FULL)
    assert full_prefix["pages"] == [[3, 5], [9, 4]]
    assert full_tree["slots"] == [[22, 23, 28], [17, 18, 19]]


@both_packages
def test_branches_of_a_draft_written_down(package):
    """out_cache_loc is [request, branch, step]; at step 1 each branch has two tokens."""
    case = make_case(DECODE, prefix_lens=(6, 5), topk=2, num_steps=3, step=1, page_size=4)
    by_slots(case, [[12, 13, 14, 15, 20, 21], [36, 37, 38, 39, 16]])
    loc = torch.tensor([[[50, 51, 52], [60, 61, 62]], [[70, 71, 72], [80, 81, 82]]])
    prefix, tree = planned(package, with_batch(case, out_cache_loc=loc.flatten()), FULL)
    assert prefix == PREFIX | {
        "pages": [[3, 5], [9, 4]], "cache_seqlens": [6, 5], "cu_seqlens_q": [0, 2, 4], "page_size": 4,
        "pool": "full", "cut_to_window": -1,
    }  # fmt: skip
    assert tree["slots"] == [[50, 51, 60, 61], [70, 71, 80, 81]]
    assert tree["mask"] == [[[1, 1, 0, 0], [0, 0, 1, 1]]] * 2


@both_packages
def test_one_branch_is_a_decode_over_more_keys(package):
    case = make_case(DECODE, prefix_lens=(6, 5), topk=1, num_steps=3, step=1, page_size=4)
    by_slots(case, [[12, 13, 14, 15, 20, 21, 22, 23, 28], [36, 37, 38, 39, 16, 17, 18, 19]])
    (step,) = planned(package, case, FULL)
    assert step["pages"] == [[3, 5], [9, 4]]
    assert step["cache_seqlens"] == [8, 7]
    assert step["takes_sinks"]


@both_packages
def test_a_chain_to_verify_is_an_extend_of_its_drafts(package):
    case = make_case(VERIFY, prefix_lens=(6, 5), draft_token_num=3, page_size=4)
    by_slots(case, [[12, 13, 14, 15, 20, 21, 22, 23, 28], [36, 37, 38, 39, 16, 17, 18, 19]])
    (step,) = planned(package, case, FULL)
    assert step["pages"] == [[3, 5, 7], [9, 4]]
    assert step["cache_seqlens"] == [9, 8]
    assert step["cu_seqlens_q"] == [0, 3, 6]
    assert step["causal"]


def test_the_expand_table_written_down():
    """Three drafts in slots 8, 9, 10: a root and its two children."""
    slots = torch.tensor([[8, 9, 10]], dtype=torch.int32)
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    table = TreePass(slots=slots, mask=mask).expanded()
    assert [table.pages(i) for i in range(3)] == [[8], [8, 9], [8, 10]]
    assert table.cache_seqlens.tolist() == [1, 2, 2]
    assert table.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert (table.page_size, table.causal, table.takes_sinks) == (1, False, True)


@both_packages
def test_the_expand_table_of_a_batch_written_down(package):
    _, tree = package.plan_batch(small_tree().batch, small_tree().config).for_kind(FULL)
    table = tree.expanded()
    expected = [[22], [22, 23], [22, 28], [17], [17, 18], [17, 18, 19]]
    assert [table.pages(i) for i in range(6)] == expected


@both_packages
def test_the_expand_table_of_branches_written_down(package):
    case = make_case(DECODE, prefix_lens=(6, 5), topk=2, num_steps=3, step=1)
    loc = torch.tensor([[[50, 51, 52], [60, 61, 62]], [[70, 71, 72], [80, 81, 82]]])
    _, tree = package.plan_batch(with_batch(case, out_cache_loc=loc.flatten()).batch, case.config, 1).for_kind(FULL)
    table = tree.expanded()
    assert [table.pages(i) for i in range(4)] == [[50, 51], [60, 61], [70, 71], [80, 81]]


@both_packages
def test_a_shared_prefix_written_down(package):
    """Two requests share page 3: 4 tokens. A has 6 and B 7; one query each."""
    case = make_case(DECODE, prefix_lens=(5, 6), shared_prefix=4, page_size=4)
    by_slots(case, [[12, 13, 14, 15, 20, 21], [12, 13, 14, 15, 36, 37, 38]])
    shared, rest = planned(package, case, FULL)
    assert (shared["pages"], shared["cache_seqlens"], shared["cu_seqlens_q"]) == ([[3]], [4], [0, 2])
    assert (shared["causal"], shared["takes_sinks"]) == (False, False)
    assert (rest["pages"], rest["cache_seqlens"], rest["cu_seqlens_q"]) == ([[5], [9]], [2, 3], [0, 1, 2])
    assert (rest["causal"], rest["takes_sinks"]) == (True, True)


@both_packages
def test_the_plan_states_the_bytes_of_a_cascade(package):
    """fp32, one key head of 16: 128 bytes a token. 6 + 7 tokens, or 4 + 2 + 3."""
    case = make_case(DECODE, prefix_lens=(5, 6), shared_prefix=4, page_size=4)
    said = package.plan_batch(case.batch, case.config).describe()
    assert f"cascade over 4 shared tokens: a full layer reads {9 * 128} bytes instead of {13 * 128}" in said


# ---- cascades ---------------------------------------------------------------------------------------------------


def count_full(package: Any, case: Case) -> int:
    return len(package.plan_batch(case.batch, case.config).for_kind(FULL))


@both_packages
def test_a_cascade_is_planned_only_where_it_saves(package):
    many = problem("cascade-decode")
    assert count_full(package, many) == 2
    assert count_full(package, many.replace_config(cascade_prefix=False)) == 1
    assert count_full(package, many.replace_config(deterministic=True)) == 1
    assert count_full(package, with_batch(many, shared_prefix_len=0)) == 1
    assert count_full(package, with_batch(many, shared_prefix_len=3)) == 1  # less than a page
    assert count_full(package, with_batch(many, seq_lens_cpu=None)) == 1
    assert count_full(package, make_case(DECODE, prefix_lens=(9,), shared_prefix=8)) == 1
    long = dict(prefix_lens=(8, 8), shared_prefix=8)
    assert count_full(package, make_case(ForwardMode.EXTEND, new_lens=(40, 20), **long)) == 2
    assert count_full(package, make_case(ForwardMode.EXTEND, new_lens=(64, 64), **long)) == 1  # read twice anyway


@both_packages
@KINDS
def test_window_and_chunk_layers_have_no_cascade(kind, package):
    case = problem("cascade-decode", kind=kind)
    assert len(package.plan_batch(case.batch, case.config).for_kind(kind)) == (2 if kind is FULL else 1)


@both_packages
@pytest.mark.parametrize("shape", ["verify-tree", "verify-chain", "draft-topk-2-step-1"])
def test_drafts_with_a_shared_prefix_are_planned_as_without(shape, package):
    p = 4
    more = dict(prefix_lens=(2 * p + 1, 2 * p, 2 * p, 3 * p + 2), shared_prefix=2 * p)
    case = problem(shape, p, **more)
    plain = replace(case, batch=replace(case.batch, shared_prefix_len=0))
    assert planned(package, case, FULL) == planned(package, plain, FULL)
    assert_agrees(case)


@both_packages
def test_a_request_without_the_whole_shared_prefix_is_refused(package):
    case = problem("cascade-decode")
    with pytest.raises(BadBatch, match=r"request 0 has 9 cached tokens, shared_prefix_len is 12"):
        package.plan_batch(replace(case.batch, shared_prefix_len=12), case.config)


# ---- what a query sees, slot by slot ----------------------------------------------------------------------------


def expected_slots(case: Case, kind: LayerKind) -> list[list[int]]:
    """By hand: walk up each tree (or back along each branch) and keep what the layer kind's rule keeps."""
    rows, batch = case.config.req_to_token_pool.req_to_token, case.batch
    found = []
    for request, (row, prefix) in enumerate(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)):
        slots = rows[row].tolist()
        for path in paths(case, request, slots, prefix):
            keys = list(enumerate(slots[:prefix] + path))
            last = len(keys) - 1
            if kind is SLIDING:
                keys = [(at, slot) for at, slot in keys if at >= last - case.layer.sliding_window_size]
            if kind is LOCAL:
                chunk = case.config.attention_chunk_size
                keys = [(at, slot) for at, slot in keys if at // chunk == last // chunk]
            found.append(sorted(slot for _, slot in keys))
    return found


def paths(case: Case, request: int, slots: list[int], prefix: int) -> list[list[int]]:
    """For each query of a request the slots from its root down to itself."""
    info = case.batch.spec_info
    if isinstance(info, DraftInput):
        own = case.batch.out_cache_loc.view(-1, info.topk, info.num_steps)[request].tolist()
        return [branch[: case.step + 1] for branch in own]
    parents = TREES[request]
    found: list[list[int]] = []
    for draft, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), slots[prefix + draft]])
    return found


@every_route
@KINDS
@POOLS
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize(
    "shape", ["verify-tree", *(name for name in SHAPES if name.startswith(("draft-topk-2", "draft-topk-4")))]
)
def test_every_query_sees_its_own_path_and_nothing_else(shape, page_size, hybrid, kind, route):
    case = problem(shape, page_size, kind=kind, hybrid=hybrid, head_dim=16, v_head_dim=96)
    assert seen_slots(case, route) == expected_slots(case, kind)


# ---- isolation --------------------------------------------------------------------------------------------------


BAD = (math.nan, math.inf)
CACHES = pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["cache", "fp8-cache"])


def poisoned(case: Case, hidden: Tensor, value: float, keys: bool = True) -> Case:
    """`value` for the values and, unless told otherwise, the keys of some drafts, in the cache and among the new ones.

    hidden: bool, one entry a slot of out_cache_loc.
    """
    pool, slots = case.config.token_to_kv_pool, case.batch.out_cache_loc[hidden]
    new = hidden.view(len(case.q), -1)[:, case.step if isinstance(case.batch.spec_info, DraftInput) else 0]
    k, v = case.k.clone(), case.v.clone()
    v[new] = value
    bad = v.new_full((len(slots), case.layer.tp_k_head_num, case.layer.head_dim), value)
    if keys:
        k[new] = value
    pool.set_kv_buffer(case.layer, slots, bad if keys else pool.get_key_buffer(case.layer.layer_id)[slots], bad)
    return replace(case, k=k, v=v)


@every_route
@TREE_WAYS
@KINDS
@POOLS
@CACHES
@pytest.mark.parametrize("topk", [2, 3, 4])
def test_a_branch_is_not_touched_by_the_others(topk, kv_dtype, hybrid, kind, tree_attention, route, device):
    def problem() -> Case:
        return case_on(
            device, DECODE, topk=topk, num_steps=3, step=2, kind=kind, hybrid=hybrid, heads=4, kv_heads=2,
            tree_attention=tree_attention, kv_dtype=kv_dtype,
        )  # fmt: skip

    right = run(problem(), route).view(3, topk, -1)
    for branch in range(topk):
        for value in BAD:
            case = problem()
            hidden = (torch.arange(topk) != branch).repeat(3)[:, None].expand(-1, 3).flatten().to(case.q.device)
            out = run(poisoned(case, hidden, value), route).view(3, topk, -1)
            assert torch.equal(out[:, branch], right[:, branch])


def forest(device: str, **more: Any) -> Case:
    """Trees of seven drafts to verify, behind prefixes that end inside a page, with one, and that are empty."""
    given: dict[str, Any] = dict(prefix_lens=(7, 8, 0, 13), trees=TREES, chunk=8, heads=4, kv_heads=2)
    return case_on(device, VERIFY, **given | more)


@every_route
@TREE_WAYS
@KINDS
@CACHES
@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_a_draft_is_touched_by_its_ancestors_and_no_other_draft(
    page_size, kv_dtype, kind, tree_attention, route, device
):
    """Every draft in turn: all drafts that are not its ancestors hold poison, in all requests at once."""
    shape = dict(
        page_size=page_size, chunk=max(8, page_size), kind=kind, tree_attention=tree_attention, kv_dtype=kv_dtype
    )
    right = run(forest(device, **shape), route).view(4, 7, -1)
    ancestors = build_tree(TREES).ancestors
    for draft in range(7):
        for value in BAD:
            case = forest(device, **shape)
            hidden = ~ancestors[:, draft].flatten().to(case.q.device)
            out = run(poisoned(case, hidden, value), route).view(4, 7, -1)
            assert torch.equal(out[:, draft], right[:, draft])


@every_route
@TREE_WAYS
def test_poison_on_the_own_path_is_noticed(tree_attention, route, device):
    case = case_on(device, DECODE, topk=2, num_steps=3, step=2, tree_attention=tree_attention)
    hidden = torch.zeros(3, 2, 3, dtype=torch.bool, device=case.q.device)
    hidden[:, 0, 0] = True  # the first step of branch 0
    by_fa3 = device == "cuda" and tree_attention == "expand"  # FA3 gives a row whose scores are NaN as one without keys
    out = run(poisoned(case, hidden.flatten(), math.nan, keys=not by_fa3), route).view(3, 2, -1)
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@every_route
@TREE_WAYS
@pytest.mark.parametrize(
    ("kv_dtype", "value"), [(None, math.nan), (None, math.inf), (None, -math.inf), (FP8, math.nan)], ids=str
)
def test_one_bad_number_in_a_value_is_hidden_from_no_query_that_sees_it(kv_dtype, value, tree_attention, route, device):
    """Every draft in turn holds one, in the last number of key head 1, in all requests. Heads 2 and 3 share it."""
    shape = dict(tree_attention=tree_attention, kv_dtype=kv_dtype)
    right = run(forest(device, **shape), route).view(4, 7, 4, -1)
    ancestors = build_tree(TREES).ancestors
    for draft in range(7):
        case = forest(device, **shape)
        v = case.v.view(4, 7, 2, -1).clone()
        v[:, draft, 1, -1] = value
        out = run(replace(case, v=v.flatten(2).flatten(0, 1)), route).view(4, 7, 4, -1)
        sees = ancestors[:, :, draft].to(out.device)
        assert torch.equal(out[~sees], right[~sees])
        assert torch.equal(out[:, :, :2], right[:, :, :2])
        lost = out[sees][:, 2:]
        assert not lost[..., -1].isfinite().any()
        if route == "fast" and tree_attention != "expand":
            assert lost.isnan().all()  # the fused kernel keeps one flag a key and head
        else:
            assert torch.equal(lost[..., :-1], right[sees][:, 2:, :-1])
        if route != "fast":
            same = torch.full_like(lost[..., -1], value)
            torch.testing.assert_close(lost[..., -1], same, rtol=0, atol=0, equal_nan=True)


@every_route
@KINDS
@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("cascade")])  # those share slots
def test_no_request_is_touched_by_the_others(shape, kind, route):
    case = problem(shape, kind=kind)
    right = run(case, route)
    counts = [1, 4, 2, 3] if shape == "draft-extend-ragged" else [right.shape[0] // 4] * 4
    owner = torch.arange(4).repeat_interleave(torch.tensor(counts))
    for request in range(4):
        other = problem(shape, kind=kind)
        rows, pool = other.config.req_to_token_pool.req_to_token, other.config.token_to_kv_pool
        k, v = other.k.clone(), other.v.clone()
        k[owner != request], v[owner != request] = torch.nan, torch.nan
        mine = rows[int(other.batch.req_pool_indices[request])].long()
        loc = other.batch.out_cache_loc.view(len(owner), -1)
        keep = torch.cat([mine, loc[owner == request].flatten(), torch.zeros(1, dtype=torch.int64)])
        foreign = torch.ones(pool.get_kv_buffer(0)[0].shape[0], dtype=torch.bool)
        foreign.view(-1, 4)[keep // 4] = False  # whole pages stay: kernels multiply the rest of a page by zero
        for buffer in pool.get_kv_buffer(0):
            buffer[foreign] = torch.nan
        assert torch.equal(run(replace(other, k=k, v=v), route)[owner == request], right[owner == request])


# ---- one ancestor more or less ----------------------------------------------------------------------------------


def with_edge(case: Case, request: int, draft: int, ancestor: int) -> Case:
    """The case with one entry of one request's tree mask turned around."""
    info, prefix = case.batch.spec_info, case.batch.seq_lens.tolist()
    start = sum(7 * (n + 7) for n in prefix[:request])
    mask = info.custom_mask.clone()
    at = start + draft * (prefix[request] + 7) + prefix[request] + ancestor
    mask[at] = ~mask[at]
    return with_batch(case, spec_info=replace(info, custom_mask=mask))


@planned_routes
@TREE_WAYS
@pytest.mark.parametrize("page_size", [1, 4])
def test_one_ancestor_more_or_less_fails_the_judge(page_size, tree_attention, route):
    case = problem("verify-tree", page_size, tree_attention=tree_attention)
    assert case.judge(run(case, route)).ok
    for request, parents in enumerate(TREES):
        for draft in range(1, 7):
            for ancestor in range(draft):  # those it has are dropped, the others added
                wrong = with_edge(case, request, draft, ancestor)
                assert not case.judge(run(wrong, route)).ok, (parents, draft, ancestor)


@both_packages
def test_one_ancestor_more_or_less_is_noticed_by_the_comparison_of_plans(package):
    case = problem("verify-tree")
    right = planned(package, case, FULL)
    for ancestor in range(3):
        assert planned(package, with_edge(case, 0, 3, ancestor), FULL) != right


# ---- sinks ------------------------------------------------------------------------------------------------------


@both_packages
@KINDS
@every_shape
def test_exactly_one_pass_takes_the_sinks(shape, kind, package):
    case = problem(shape, kind=kind)
    steps = package.plan_batch(case.batch, case.config, case.step).for_kind(kind)
    assert sum(step.takes_sinks for step in steps) == 1


@planned_routes
@pytest.mark.parametrize("tree_attention", ["fused", "expand"])
@KINDS
@every_shape
def test_sinks_counted_twice_or_never_fail_the_judge(shape, kind, tree_attention, route):
    case = problem(shape, kind=kind, sinks=True, tree_attention=tree_attention)
    assert case.judge(run(case, route)).ok
    for off in (math.log(2), -100.0):  # twice, never
        assert not case.judge(run(replace(case, sinks=case.sinks + off), route)).ok


@planned_routes
@KINDS
def test_a_tree_over_an_empty_prefix_still_has_its_sinks(kind, route):
    case = make_case(VERIFY, prefix_lens=(0, 0), trees=TREES[:2], kind=kind, sinks=True)
    assert case.judge(run(case, route)).ok
    assert not case.judge(run(replace(case, sinks=None), route)).ok


# ---- several steps ----------------------------------------------------------------------------------------------


def multi(package: Any, case: Case, provider: str | None) -> Any:
    info = case.batch.spec_info
    backend = package.FlashAttentionMultiStepBackend(case.config, info.topk, info.num_steps, provider=provider)
    backend.init_forward_metadata(case.batch)
    return backend


@every_route
@KINDS
@POOLS
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_step_i_of_a_multi_step_backend_is_a_single_step_backend(page_size, topk, hybrid, kind, route):
    package, provider = ROUTES[route]
    more = dict(topk=topk, num_steps=3, page_size=page_size, kind=kind, hybrid=hybrid, chunk=2 * page_size, sinks=True)
    for step in range(3):
        case = make_case(DECODE, step=step, **more)
        right = case.run(package, provider)
        written = cache_bytes(case)
        case = make_case(DECODE, step=step, **more)
        backend = multi(package, case, provider).attn_backends[step]
        out = backend.forward(case.q, case.k, case.v, case.layer, case.batch, sinks=case.sinks)
        assert torch.equal(out, right)
        assert all(torch.equal(a, b) for a, b in zip(written, cache_bytes(case), strict=True))


@both_packages
@KINDS
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("host_lengths", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_plans_made_together_are_those_made_alone(page_size, host_lengths, topk, kind, package):
    case = make_case(
        DECODE, topk=topk, num_steps=4, page_size=page_size, kind=kind, chunk=2 * page_size,
        host_lengths=host_lengths,
    )  # fmt: skip
    module = {fa_ref: fa_ref.planning, fa_fast: fa_fast.planning}[package]
    together = module.plan_steps(case.batch, case.config, 4)
    assert len(together) == 4
    for step, plan in enumerate(together):
        alone = package.plan_batch(case.batch, case.config, step)
        assert (plan.forward_mode, plan.num_tokens, plan.refused) == (
            alone.forward_mode, alone.num_tokens, alone.refused,
        )  # fmt: skip
        for found in (FULL, kind):
            assert [meaning(s) for s in plan.for_kind(found)] == [meaning(s) for s in alone.for_kind(found)]


@both_packages
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_steps_of_full_layers_share_one_page_table(page_size, topk, package):
    case = make_case(DECODE, topk=topk, num_steps=4, page_size=page_size, prefix_lens=(page_size * 3 - 1, 2, 5))
    tables = [
        backend.forward_metadata.for_kind(FULL)[0].page_table for backend in multi(package, case, None).attn_backends
    ]
    assert len({table.data_ptr() for table in tables}) == 1
    assert len({tuple(table.shape) for table in tables}) == 1
    lens = [b.forward_metadata.for_kind(FULL)[0].cache_seqlens for b in multi(package, case, None).attn_backends]
    grows = 1 if topk == 1 else 0  # several branches: the prefix stays, the branches grow
    assert [int(n[0] - lens[0][0]) for n in lens] == [grows * step for step in range(4)]


@every_route
@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_of_all_steps_reads_what_earlier_steps_wrote(topk, route):
    """Run step after step on one cache; each output is judged against the oracle over that cache."""
    package, provider = ROUTES[route]
    case = make_case(DECODE, topk=topk, num_steps=4, prefix_lens=(7, 0, 8), heads=4, kv_heads=2)
    backend = multi(package, case, provider)
    gen = torch.Generator().manual_seed(1)
    for step in range(4):
        q, k, v = (torch.randn(x.shape, generator=gen) for x in (case.q, case.k, case.v))
        now = replace(case, q=q, k=k, v=v, step=step)
        assert case.config.token_to_kv_pool.get_kv_buffer(0)[0][0].isfinite().all()
        out = backend.attn_backends[step].forward(q, k, v, case.layer, case.batch)
        assert now.judge(out).ok


# ---- refused ----------------------------------------------------------------------------------------------------


@both_packages
@pytest.mark.parametrize(("topk", "steps"), [(0, 3), (4, 0), (-1, 1)])
def test_a_draft_without_steps_or_branches_is_refused(topk, steps, package):
    with pytest.raises(BadConfig, match=f"topk={topk}, speculative_num_steps={steps}"):
        package.FlashAttentionMultiStepBackend(make_case().config, topk, steps)


@both_packages
@pytest.mark.parametrize("info", [None, DraftInput(topk=2, num_steps=2), DraftInput(topk=1, num_steps=3)])
def test_a_batch_of_another_draft_is_refused(info, package):
    case = make_case(DECODE, topk=2, num_steps=3)
    backend = package.FlashAttentionMultiStepBackend(case.config, 2, 3)
    with pytest.raises(BadBatch, match=r"this backend plans DraftInput\(topk=2, num_steps=3\)"):
        backend.init_forward_metadata(replace(case.batch, spec_info=info))
    backend.init_forward_metadata(case.batch)


@both_packages
def test_idle_drafts_have_an_empty_output(package):
    case = make_case(ForwardMode.IDLE, prefix_lens=[], new_lens=[])
    backend = package.FlashAttentionMultiStepBackend(case.config, 2, 2)
    backend.init_forward_metadata(case.batch)
    for step in backend.attn_backends:
        assert step.forward(case.q, case.k, case.v, case.layer, case.batch).shape == (0, 32)


def with_spec(info: Any) -> Callable[[Case], Case]:
    return lambda case: with_batch(case, spec_info=info)


REFUSED: dict[str, tuple[str, Callable[[Case], Case], type[Exception], str]] = {
    "verify-without-spec-info": ("verify-chain", with_spec(None), BadBatch, "TARGET_VERIFY needs.*VerifyInput.*None"),
    "verify-with-a-draft": (
        "verify-chain", with_spec(DraftInput(topk=2, num_steps=2)), BadBatch, r"VerifyInput.*DraftInput\(topk=2",
    ),
    "decode-with-a-verify": (
        "draft-topk-1-step-0", with_spec(VerifyInput(draft_token_num=3)), BadBatch, "DECODE with spec_info=VerifyInput",
    ),
    "branches-without-slots": (
        "draft-topk-4-step-0", lambda case: with_batch(case, out_cache_loc=None), BadBatch,
        r"out_cache_loc \[request, branch, step\]",
    ),
    "slots-of-one-step-only": (
        "draft-topk-4-step-0", lambda case: with_batch(case, out_cache_loc=case.batch.out_cache_loc[:16]), BadBatch,
        "out_cache_loc has 16 slots, this batch needs 48",
    ),
    "drafts-beyond-the-row": (
        "verify-tree", lambda case: with_batch(case, seq_lens_cpu=torch.tensor([7, 8, 0, 22])), BadPageTable,
        r"request 3 has 29 keys.*holds 21",
    ),
    "steps-beyond-the-row": (
        "draft-topk-1-step-0", lambda case: with_batch(case, seq_lens_cpu=torch.tensor([7, 8, 0, 15])), BadPageTable,
        r"request 3 has 18 keys.*holds 17",
    ),
}  # fmt: skip


@every_route
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_speculative_batch_is_refused_and_the_backend_goes_on(name, route):
    shape, change, error, says = REFUSED[name]
    case = problem(shape)
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    before = cache_bytes(case)
    with pytest.raises(error, match=says):
        backend.init_forward_metadata(change(case).batch)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True))
    backend.init_forward_metadata(case.batch)
    assert case.judge(backend.forward(case.q, case.k, case.v, case.layer, case.batch)).ok


@every_shape
@POOLS
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("host_lengths", [True, False])
def test_the_device_checks_pass_what_is_right(host_lengths, page_size, hybrid, shape, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    assert_agrees(problem(shape, page_size, hybrid=hybrid, host_lengths=host_lengths))


@both_packages
@pytest.mark.parametrize("shape", ["verify-tree", "verify-chain", "draft-topk-1-step-0"])
def test_the_device_checks_see_drafts_past_the_row(shape, package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = problem(shape, host_lengths=False)
    width, drafts = case.config.req_to_token_pool.req_to_token.shape[1], 3 if "draft" in shape else 7
    lens = case.batch.seq_lens.clone()
    lens[3] = width - drafts + 1
    wrong = with_batch(case, seq_lens=lens)
    if shape == "verify-tree":
        mask = torch.ones(int(((lens + 7) * 7).sum()), dtype=torch.bool)
        wrong = with_batch(wrong, spec_info=replace(case.batch.spec_info, custom_mask=mask))
    with pytest.raises(BadPageTable, match=f"request 3 has {width + 1} keys, its row holds {width}"):
        package.plan_batch(wrong.batch, case.config)


@both_packages
@pytest.mark.parametrize("shape", ["verify-tree", "verify-chain", "draft-topk-1-step-0"])
def test_the_device_checks_see_drafts_outside_the_pool(shape, package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = problem(shape)
    row, length = int(case.batch.req_pool_indices[1]), int(case.batch.seq_lens[1])
    case.config.req_to_token_pool.req_to_token[row, length + 1] = 100_000
    with pytest.raises(BadPageTable, match=r"request 1: slots span .*100000, the pool holds"):
        package.plan_batch(case.batch, case.config)


@both_packages
def test_the_device_checks_see_a_mask_of_other_lengths(package, monkeypatch):
    case = problem("verify-tree", host_lengths=False)
    mask = case.batch.spec_info.custom_mask
    wrong = with_batch(case, spec_info=replace(case.batch.spec_info, custom_mask=torch.cat([mask, mask[:7]])))
    monkeypatch.setenv("FA_CHECK", "1")
    with pytest.raises(BadBatch, match=f"{mask.numel()} entries"):
        package.plan_batch(wrong.batch, case.config)


@planned_routes
@pytest.mark.parametrize("shape", ["verify-tree", "draft-topk-2-step-1"])
def test_a_tree_cut_to_another_window_than_the_layer_s_is_refused(shape, route):
    case = problem(shape, kind=SLIDING)
    with pytest.raises(BadConfig, match="sliding_window_size 2, the config 4"):
        run(with_layer(case, sliding_window_size=2), route)


def test_every_shape_is_planned_by_both_packages():
    for shape in SHAPES:
        case = problem(shape)
        for package in PACKAGES:
            assert package.plan_batch(case.batch, case.config, case.step).for_kind(FULL)


@every_route
def test_a_draft_of_no_request_gives_an_empty_output(route):
    case = make_case(ForwardMode.DECODE, topk=2, num_steps=2, prefix_lens=[])
    assert run(case, route).shape == (0, 2 * 16)
