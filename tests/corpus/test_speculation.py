"""Reports about draft decode, tree verification, their tables on two pools, and cascades on window layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fa_ref import (
    AttentionPass,
    ForwardMode,
    LayerKind,
    TreePass,
    UnsupportedByProvider,
)
from fa_ref.cases import Case, make_case
from tests.support import (
    FP8,
    ROUTES,
    agrees,
    both_packages,
    cache_bytes,
    every_page_size,
    every_route,
    planned_routes,
    run,
    seen_slots,
    with_batch,
)
from tests.test_tiny_engine import PROMPTS, expected, speculative_engine

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
FULL, SLIDING, LOCAL = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL
KINDS = pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL], ids=lambda kind: kind.value)
WINDOWED = pytest.mark.parametrize("kind", [SLIDING, LOCAL], ids=lambda kind: kind.value)

PARENTS = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]
SPECULATION: dict[str, tuple[ForwardMode, dict[str, Any]]] = {
    "draft-topk-1": (DECODE, dict(topk=1, num_steps=3, step=1)),
    "draft-topk-3": (DECODE, dict(topk=3, num_steps=3, step=2)),
    "verify-chain": (VERIFY, dict(draft_token_num=6)),
    "verify-tree": (VERIFY, dict(trees=PARENTS)),
    "draft-extend": (DRAFT_EXTEND, dict(new_lens=(1, 4, 2))),
}
MODES = pytest.mark.parametrize("mode", SPECULATION)


def problem(mode: str, page_size: int, **more: Any) -> Case:
    p = page_size
    given: dict[str, Any] = dict(
        prefix_lens=(2 * p + 3, 5, 3 * p), page_size=p, chunk=2 * p, heads=4, kv_heads=2, head_dim=16
    )
    forward_mode, arguments = SPECULATION[mode]
    return make_case(forward_mode, **given | arguments | more)


# ---- two pools --------------------------------------------------------------------------------------------------


@both_packages
@every_page_size
@MODES
@WINDOWED
def test_window_tables_hold_ids_of_the_window_pool(kind, mode, page_size, package):
    """sglang PR #24617: the speculative table of window layers held ids of the full pool."""
    case = problem(mode, page_size, kind=kind, hybrid=True)
    pool, rows = case.config.token_to_kv_pool, case.config.req_to_token_pool.req_to_token
    mapping = pool.full_to_swa_index_mapping
    lens = zip(case.batch.req_pool_indices.tolist(), case.batch.seq_lens.tolist(), strict=True)
    own = torch.cat([rows[row, : length + 6] for row, length in lens] + [case.batch.out_cache_loc]).long()
    theirs = set(mapping[own[own > 0]].tolist())
    assert theirs != set(own.tolist())
    for step in package.plan_batch(case.batch, case.config, case.step).for_kind(kind):
        assert step.pool == "swa"
        if isinstance(step, TreePass):
            assert set(step.slots.flatten().tolist()) <= theirs
        else:
            pages = {page for i in range(step.sequences) for page in step.pages(i)}
            assert pages <= {slot // step.page_size for slot in theirs}
    assert agrees(case)


@both_packages
@pytest.mark.parametrize("page_size", [3, 16, 64, 128])
@MODES
def test_slots_are_translated_before_they_are_divided(mode, page_size, package):
    """sglang PR #16267: the wrong window page for page sizes above 1: translate the slot, then divide."""
    case = problem(mode, page_size, kind=SLIDING, hybrid=True)
    mapping = case.config.token_to_kv_pool.full_to_swa_index_mapping
    rows = case.config.req_to_token_pool.req_to_token
    step = package.plan_batch(case.batch, case.config, case.step).for_kind(SLIDING)[0]
    assert isinstance(step, AttentionPass)
    row = rows[int(case.batch.req_pool_indices[0])].long()
    in_order = {int(mapping[slot]) // step.page_size for slot in row[row > 0]}
    divided_first = {int(mapping[int(slot) // page_size]) for slot in row[row > 0]}
    found = set(step.pages(0))
    assert found
    assert found <= in_order
    assert not found <= divided_first
    assert agrees(case)


# ---- a batch that shrinks ---------------------------------------------------------------------------------------


def first_requests(case: Case, count: int) -> Case:
    """The first `count` requests of a case, over the same pools and configuration."""
    batch = case.batch
    per_request = case.q.shape[0] // batch.batch_size
    slots = batch.out_cache_loc.shape[0] // batch.batch_size
    info = batch.spec_info
    if getattr(info, "custom_mask", None) is not None:
        entries = sum(info.draft_token_num * (n + info.draft_token_num) for n in batch.seq_lens[:count].tolist())
        info = replace(info, custom_mask=info.custom_mask[:entries])
    fewer = replace(
        batch,
        batch_size=count,
        req_pool_indices=batch.req_pool_indices[:count],
        seq_lens=batch.seq_lens[:count],
        seq_lens_cpu=None if batch.seq_lens_cpu is None else batch.seq_lens_cpu[:count],
        out_cache_loc=batch.out_cache_loc[: count * slots],
        spec_info=info,
    )
    q, k, v = (x[: count * per_request] for x in (case.q, case.k, case.v))
    return replace(case, batch=fewer, q=q, k=k, v=v)


SHRINKING = pytest.mark.parametrize("mode", ["draft-topk-1", "draft-topk-3", "verify-chain", "verify-tree"])


def many(mode: str, requests: int, page_size: int, **more: Any) -> Case:
    lens = [(7 * r) % 23 + 1 for r in range(requests)]
    trees = dict(trees=[PARENTS[r % 3] for r in range(requests)]) if mode == "verify-tree" else {}
    return problem(mode, page_size, prefix_lens=lens, **trees, **more)


@every_route
@pytest.mark.parametrize("page_size", [1, 3, 64])
@SHRINKING
@KINDS
@pytest.mark.parametrize("left", [3, 5])
def test_report_13_14_a_smaller_batch_reads_and_writes_nothing_of_the_one_before(left, kind, mode, page_size, route):
    """sglang #10892, #6309, #8296, #9888: fewer rows than before read stale positions. tokenspeed PR #955: rows past
    the batch kept other requests' pages and were written. Here on a backend without graphs: 8 requests, then 3 or 5.
    """
    package, provider = ROUTES[route]
    case = many(mode, 8, page_size, kind=kind)
    backend = package.FlashAttentionBackend(case.config, speculative_step_id=case.step, provider=provider)
    fewer = first_requests(case, left)
    backend.init_forward_metadata(case.batch)
    backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    before = cache_bytes(case)
    backend.init_forward_metadata(fewer.batch)
    out = backend.forward(fewer.q, fewer.k + 1, fewer.v + 1, fewer.layer, fewer.batch)
    assert fewer.judge(out).ok
    rows = out.shape[0]
    assert rows == case.q.shape[0] * left // 8
    pairs = zip(before, cache_bytes(case), strict=True)
    changed = [(old != new).flatten(1).any(dim=1).nonzero().flatten() for old, new in pairs]
    loc = fewer.batch.out_cache_loc
    written = loc.view(rows, -1)[:, case.step] if case.batch.forward_mode.is_decode() else loc
    for slots in changed:
        assert slots.tolist() == sorted(written.tolist())


@every_route
@pytest.mark.parametrize("page_size", [1, 16])
@SHRINKING
@WINDOWED
def test_a_shrinking_batch_on_two_pools(kind, mode, page_size, route):
    """sglang #28569: the draft faulted as the batch shrank on a cache of two pools. 32 running, then 12, 4, 1."""
    package, provider = ROUTES[route]
    case = many(mode, 32, page_size, kind=kind, hybrid=True)
    backend = package.FlashAttentionBackend(case.config, speculative_step_id=case.step, provider=provider)
    for running in (32, 12, 4, 1):
        now = first_requests(case, running)
        backend.init_forward_metadata(now.batch)
        assert now.judge(backend.forward(now.q, now.k, now.v, now.layer, now.batch)).ok


# ---- every mode and layer kind ----------------------------------------------------------------------------------


@both_packages
@every_page_size
@MODES
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
def test_every_mode_plans_every_kind_or_raises(mode, page_size, hybrid, package):
    """sglang #22679: window layers had no table in verify and draft extend, and read another kind's."""
    for kind in (FULL, SLIDING, LOCAL):
        case = problem(mode, page_size, kind=kind, hybrid=hybrid)
        plan = package.plan_batch(case.batch, case.config, case.step)
        assert plan.for_kind(kind)
        for other in set(LayerKind) - {FULL, kind}:
            with pytest.raises(UnsupportedByProvider, match=f"a {other.name} layer in {plan.forward_mode.name}"):
                plan.for_kind(other)
    both = case.replace_config(sliding_window_size=3)  # window and chunk layers in one model
    plan = package.plan_batch(both.batch, both.config, both.step)
    assert set(plan.passes) == {FULL, SLIDING, LOCAL}


# ---- slots and sizes --------------------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize("page_size", [1, 4])
def test_draft_slots_of_two_requests_are_not_transposed(page_size, route):
    """SGLang 0.4.5: slots [[100, 101], [200, 201]] of two requests became [[100, 102], [101, 200]] in their tables."""
    slots = torch.tensor([[100, 101], [200, 201]])
    for step in range(2):
        case = make_case(
            DECODE, prefix_lens=(4, 4), topk=1, num_steps=2, step=step, page_size=page_size, v_head_dim=16,
            poison=False, context_len=300, heads=2,
        )  # fmt: skip
        pool, rows = case.config.token_to_kv_pool, case.config.req_to_token_pool.req_to_token
        wide = type(pool)(
            size=256, page_size=page_size, dtype=torch.float32, head_num=1, head_dim=16, v_head_dim=16, layer_num=1
        )
        for row, own in zip(case.batch.req_pool_indices.tolist(), slots.tolist(), strict=True):
            rows[row, :6] = torch.tensor([own[0] - 4, own[0] - 3, own[0] - 2, own[0] - 1, *own]).int()
        case = with_batch(case.replace_config(token_to_kv_pool=wide), out_cache_loc=slots.flatten())
        for buffer in wide.get_kv_buffer(0):
            buffer[90:210] = torch.randn(120, 1, 16)
        out = run(case, route)
        assert case.judge(out).ok
        keys, _ = wide.get_kv_buffer(0)
        assert torch.equal(keys[slots[:, step]].flatten(1), case.k)
        expected = [list(range(own[0] - 4, own[0] + step + 1)) for own in slots.tolist()]
        assert seen_slots(case, route) == expected


@every_route
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [2, 4])
def test_branch_slots_are_read_request_by_request_and_branch_by_branch(topk, page_size, route):
    """SGLang 0.4.5: slots of several requests were transposed. out_cache_loc is [request, branch, step]."""
    for step in range(3):
        case = make_case(
            DECODE, prefix_lens=(5, 3), topk=topk, num_steps=3, step=step, page_size=page_size, v_head_dim=64, heads=2
        )
        rows = case.config.req_to_token_pool.req_to_token
        loc = case.batch.out_cache_loc.view(2, topk, 3)
        run(case, route)
        keys, _ = case.config.token_to_kv_pool.get_kv_buffer(0)
        assert torch.equal(keys[loc[:, :, step].flatten()].flatten(1), case.k)
        expected = [
            sorted(rows[int(row), : int(n)].tolist() + loc[r, branch, : step + 1].tolist())
            for r, (row, n) in enumerate(zip(case.batch.req_pool_indices, case.batch.seq_lens, strict=True))
            for branch in range(topk)
        ]
        assert seen_slots(case, route) == expected


@both_packages
@pytest.mark.parametrize(("requests", "drafts"), [(20, 8), (40, 7)])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_a_verify_of_many_tokens_has_a_ramp_as_long_as_itself(chain, requests, drafts, package):
    """SGLang 0.4.5: cu_seqlens_q ran out where requests x drafts reached the largest batch + 128."""
    shape = dict(draft_token_num=drafts) if chain else dict(trees=[[-1, *range(drafts - 1)]] * requests)
    for kind in (FULL, SLIDING, LOCAL):
        case = make_case(VERIFY, prefix_lens=[r % 9 for r in range(requests)], kind=kind, **shape)
        for step in package.plan_batch(case.batch, case.config).for_kind(kind):
            if isinstance(step, AttentionPass):
                assert int(step.cu_seqlens_q[-1]) == requests * drafts
                assert step.cu_seqlens_q.shape[0] == step.sequences + 1
        assert case.judge(case.run(package)).ok


# ---- the expand table -------------------------------------------------------------------------------------------


@both_packages
@every_page_size
def test_the_expand_table_holds_slots_and_is_read_as_slots(page_size, package):
    """SGLang 0.5.4: verify's expand table held token slots while the cache was viewed in pages."""
    case = problem("verify-tree", page_size, tree_attention="expand")
    _, tree = package.plan_batch(case.batch, case.config).for_kind(FULL)
    table = tree.expanded()
    assert table.page_size == 1
    row = case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[0])]
    own = row[int(case.batch.seq_lens[0]) :][:6].tolist()
    assert table.pages(4) == [own[0], own[1], own[4]]  # draft 4, below 1, below the root
    assert agrees(case)


@planned_routes
@KINDS
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("mode", ["verify-tree", "draft-topk-3"])
@pytest.mark.parametrize("way", ["fused", "expand"])
@pytest.mark.parametrize("sink", [4.0, 6.0])
def test_large_sinks_count_once(sink, way, mode, page_size, kind, route):
    """SGLang 0.5.4: both halves of a cascade took the sinks, about 10 % off for sinks of 4 to 6."""
    case = problem(mode, page_size, kind=kind, tree_attention=way, dtype=torch.bfloat16)
    case = replace(case, sinks=torch.full((4,), sink))
    out = run(case, route)
    assert case.judge(out).ok
    twice = replace(case, sinks=case.sinks + torch.log(torch.tensor(2.0)))
    wrong = run(twice, route)
    assert not case.judge(wrong).ok
    assert (wrong - out).abs().max() > 0.1 * out.abs().max()  # a tenth or more, as reported


@planned_routes
@KINDS
@every_page_size
@pytest.mark.parametrize("mode", ["verify-tree", "draft-topk-3"])
@pytest.mark.parametrize("way", ["fused", "expand"])
def test_descales_are_those_of_each_call(way, mode, page_size, kind, route):
    """SGLang 0.5.4: descales had a row a request, while the expand call has a sequence a draft."""
    scales = torch.tensor([0.25, 3.0])
    case = problem(
        mode, page_size, kind=kind, tree_attention=way, dtype=torch.bfloat16, kv_dtype=FP8, k_scale=scales,
        v_scale=scales.flip(0), hybrid=True,
    )  # fmt: skip
    assert case.judge(run(case, route)).ok


# ---- windows ----------------------------------------------------------------------------------------------------


@every_route
@every_page_size
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_every_branch_has_the_whole_window(topk, hybrid, page_size, route):
    """Newest public code: a non-causal window (w, 0) over k queries, so that branch i lost the newest k-1-i tokens."""
    window, prefix = 5, (page_size + 9, 8)
    for step in range(3):
        case = make_case(
            DECODE, prefix_lens=prefix, topk=topk, num_steps=3, step=step, kind=SLIDING, window=window,
            page_size=page_size, hybrid=hybrid, head_dim=16, v_head_dim=256, heads=2,
        )  # fmt: skip
        rows = case.config.req_to_token_pool.req_to_token
        expected = []
        for request, (row, length) in enumerate(zip(case.batch.req_pool_indices.tolist(), prefix, strict=True)):
            kept = rows[row, length - (window - step) : length].tolist()
            own = case.batch.out_cache_loc.view(2, topk, 3)[request, :, : step + 1].tolist()
            expected += [sorted(kept + path) for path in own]
        assert seen_slots(case, route) == expected


@both_packages
@every_page_size
@WINDOWED
@pytest.mark.parametrize("mode", [DECODE, ForwardMode.EXTEND, ForwardMode.MIXED], ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
def test_a_shared_prefix_on_window_layers_is_expanded(hybrid, mode, kind, page_size, package):
    """vllm #14881: cascade attention on window layers: expanded instead, never wrong."""
    p = page_size
    case = make_case(
        mode, prefix_lens=(3 * p, 2 * p + 1, 4 * p), new_lens=(1, 3, 2), page_size=p, kind=kind, window=p + 1,
        chunk=2 * p, hybrid=hybrid, shared_prefix=2 * p,
    )  # fmt: skip
    plan = package.plan_batch(case.batch, case.config)
    assert len(plan.for_kind(FULL)) == 2
    assert len(plan.for_kind(kind)) == 1
    assert agrees(case)


# ---- what speculation must not change ---------------------------------------------------------------------------


@both_packages
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("topk", "num_steps", "draft_tokens"), [(1, 1, 2), (1, 4, 5), (2, 3, 4), (4, 3, 16)])
def test_greedy_speculative_text_is_greedy_text(topk, num_steps, draft_tokens, page_size, package):
    """Loops as Hugging Face's: greedy speculative decoding gives the tokens of greedy decoding, for any topk and T."""
    name = {"fa_ref": "passes", "fa_fast": "fast"}[package.__name__]
    how = dict(topk=topk, num_steps=num_steps, draft_tokens=draft_tokens)
    engine = speculative_engine(name, how=how, page_size=page_size, pages=-(-320 // page_size))
    assert engine.generate(PROMPTS, 12) == expected(12)
