"""Checks of the checks: break one thing at a time and see the comparison of masks, passes and fast fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast.backend
import fa_ref.backend
import fa_ref.oracle
from fa_ref import AttentionPass, FaError, ForwardMode, LayerKind
from fa_ref.attention import attend, scores, softcap
from fa_ref.cases import Case, make_case
from fa_ref.masks import Mask, causal, everything, local_chunk, sliding_window
from fa_ref.numerics import judge
from tests.support import FP8, PACKAGES, PLANS_IN, agrees, meaning, planned_routes, run, with_layer

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
FULL, SLIDING, LOCAL = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL
MODES = pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=lambda mode: mode.name.lower())
PAGES = pytest.mark.parametrize("page_size", [1, 3, 16])
WINDOW = 5


def problem(mode: ForwardMode = EXTEND, *, kind: LayerKind = FULL, page_size: int = 3, **arguments: Any) -> Case:
    """Every request has cached tokens beyond any window, chunk and page in use here."""
    given = dict(
        prefix_lens=(40, 69, 50), new_lens=(5, 1, 9), page_size=page_size, kind=kind, window=WINDOW,
        chunk=2 * page_size if page_size > 1 else 8,
    )  # fmt: skip
    return make_case(mode, **(given | arguments))


def notices(case: Case, route: str) -> bool:
    """True if the comparison fails: outside the budget, refused, or out of the cache's memory."""
    try:
        return not case.judge(run(case, route)).ok
    except (FaError, IndexError):
        return True


def mutated(case: Case, wrong: Case, route: str) -> bool:
    """True if running `wrong` passes for `case`."""
    return case.judge(run(wrong, route)).ok


# ---- a broken mask in the oracle ------------------------------------------------------------------------------

top_left = Mask(lambda q, k: k <= q - 40, "causal counted from the first query")  # 40: the shortest prefix
BROKEN_MASKS = {
    "full-not-causal": (FULL, lambda case: everything),
    "full-top-left": (FULL, lambda case: top_left),
    "full-sees-one-less": (FULL, lambda case: Mask(lambda q, k: k < q, "strictly before")),
    "window-one-wider": (SLIDING, lambda case: causal & sliding_window(WINDOW + 1)),
    "window-one-narrower": (SLIDING, lambda case: causal & sliding_window(WINDOW - 1)),
    "window-not-applied": (SLIDING, lambda case: causal),
    "chunk-shifted": (LOCAL, lambda case: causal & shifted_chunk(case)),
    "chunk-halved": (LOCAL, lambda case: causal & local_chunk(case.config.attention_chunk_size // 2)),
    "chunk-doubled": (LOCAL, lambda case: causal & local_chunk(2 * case.config.attention_chunk_size)),
    "chunk-not-applied": (LOCAL, lambda case: causal),
    "chunk-as-a-window": (LOCAL, lambda case: causal & sliding_window(case.config.attention_chunk_size - 1)),
}


def shifted_chunk(case: Case) -> Mask:
    size = case.config.attention_chunk_size
    return Mask(lambda q, k: (q + 1) // size == (k + 1) // size, "chunks one position early")


@planned_routes
@PAGES
@pytest.mark.parametrize(
    ("name", "mode"),
    # Decode has one query, the last key: it sees everything whether causal or not.
    [(name, mode) for name in BROKEN_MASKS for mode in (EXTEND, DECODE) if (name, mode) != ("full-not-causal", DECODE)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_broken_mask_is_noticed(name, mode, page_size, route, monkeypatch):
    kind, broken = BROKEN_MASKS[name]
    case = problem(mode, kind=kind, page_size=page_size)
    assert agrees(case)
    monkeypatch.setattr(fa_ref.oracle, "mask_of", lambda *_: broken(case))
    assert notices(case, route)


# ---- broken arithmetic in the oracle ----------------------------------------------------------------------------


def wrong_attention(logits: Callable[..., Tensor]) -> Callable[..., Any]:
    def attention(q, k, v, mask, *, softmax_scale, logit_cap=0.0, sinks=None):
        return attend(logits(q, k, softmax_scale, logit_cap), v, mask, sinks)

    return attention


def capped_after_the_mask(q, k, v, mask, *, softmax_scale, logit_cap=0.0, sinks=None):
    masked = (scores(q, k) * softmax_scale).masked_fill(~mask, -torch.inf)
    return attend(softcap(masked, logit_cap), v, torch.ones_like(mask), sinks)


BROKEN_SUMS = {
    "softcap-after-the-mask": capped_after_the_mask,
    "softcap-before-the-scale": wrong_attention(lambda q, k, scale, cap: softcap(scores(q, k), cap) * scale),
    "no-softcap": wrong_attention(lambda q, k, scale, cap: scores(q, k) * scale),
    "no-scale": wrong_attention(lambda q, k, scale, cap: softcap(scores(q, k), cap)),
    "heads-interleaved": wrong_attention(
        lambda q, k, scale, cap: softcap(
            torch.einsum("qhd,khd->hqk", q, k.repeat(1, q.shape[1] // k.shape[1], 1)) * scale, cap
        )
    ),
}


@planned_routes
@pytest.mark.parametrize(
    ("name", "mode"),
    # A query that sees all keys has no mask to get in the wrong order.
    [(n, mode) for n in BROKEN_SUMS for mode in (EXTEND, DECODE) if (n, mode) != ("softcap-after-the-mask", DECODE)],
    ids=lambda value: getattr(value, "name", value),
)
def test_broken_arithmetic_is_noticed(name, mode, route, monkeypatch):
    case = problem(mode, softcap=0.8, heads=4, kv_heads=2)
    assert agrees(case)
    monkeypatch.setattr(fa_ref.oracle, "attention", BROKEN_SUMS[name])
    assert notices(case, route)


# ---- a broken layer, sink or scale ------------------------------------------------------------------------------


@planned_routes
@MODES
@PAGES
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_is_noticed(change, page_size, mode, route):
    case = problem(mode, kind=SLIDING, page_size=page_size)
    wrong = with_layer(case, sliding_window_size=WINDOW + change).replace_config(sliding_window_size=WINDOW + 1)
    assert mutated(case, case, route)
    assert not mutated(case, wrong, route)


@planned_routes
@MODES
@pytest.mark.parametrize("chunk", [3, 9, 12, 300])
def test_another_chunk_is_noticed(chunk, mode, route):
    case = problem(mode, kind=LOCAL)
    assert mutated(case, case, route)
    assert not mutated(case, case.replace_config(attention_chunk_size=chunk), route)


@planned_routes
@MODES
@pytest.mark.parametrize("change", [math.log(2), -math.log(2), -100.0], ids=["twice", "half", "left-out"])
def test_a_sink_that_counts_other_than_once_is_noticed(change, mode, route):
    case = problem(mode, sinks=True, heads=4)
    assert mutated(case, case, route)
    assert not mutated(case, replace(case, sinks=case.sinks + change), route)


@planned_routes
@MODES
def test_sinks_of_the_wrong_head_are_noticed(mode, route):
    case = problem(mode, sinks=True, heads=4)
    assert not mutated(case, replace(case, sinks=case.sinks.flip(0)), route)


@planned_routes
@MODES
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_missing_descale_is_noticed(name, mode, route):
    case = problem(mode, dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.25, v_scale=0.25)
    assert mutated(case, case, route)
    stored = replace(case, k=None, v=None)
    assert mutated(case, stored, route)
    assert not mutated(case, with_layer(stored, **{name: None}), route)


# ---- a broken plan ----------------------------------------------------------------------------------------------


def with_plan(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], dict[LayerKind, tuple]]) -> None:
    """Both backends run `change(plan)` in place of their plan's passes."""
    for package in PACKAGES:
        right = package.plan_batch

        def broken(batch, config, step=0, right=right):
            plan = right(batch, config, step)
            return replace(plan, passes=plan.passes | change(plan))

        monkeypatch.setattr(PLANS_IN[package], "plan_batch", broken)


def each_pass(change: Callable[[AttentionPass], AttentionPass]) -> Callable[[Any], dict[LayerKind, tuple]]:
    return lambda plan: {kind: tuple(map(change, steps)) for kind, steps in plan.passes.items()}


def rolled(values: Tensor) -> Tensor:
    return values.roll(1, dims=0)


BROKEN_PASSES = {
    "slots-for-pages": lambda step: replace(step, page_table=step.page_table * step.page_size),
    "pages-of-the-neighbour": lambda step: replace(
        step,
        page_table=step.page_table if step.row_index is not None else rolled(step.page_table),
        row_index=None if step.row_index is None else rolled(step.row_index),
    ),
    "one-page-late": lambda step: replace(step, page_table=step.page_table.roll(-1, dims=1)),
    "pages-swapped": lambda step: replace(step, page_table=step.page_table.flip(1)),
    "one-key-less": lambda step: replace(step, cache_seqlens=step.cache_seqlens - 1),
    "lengths-of-the-neighbour": lambda step: replace(step, cache_seqlens=rolled(step.cache_seqlens)),
    "not-causal": lambda step: replace(step, causal=False),
    "window-dropped": lambda step: replace(step, uses_window=False),
    "sinks-dropped": lambda step: replace(step, takes_sinks=False),
}
CANNOT_SHOW = {  # (mutation, mode, kind): nothing is broken there
    *(("not-causal", "DECODE", kind.name) for kind in (FULL, SLIDING, LOCAL)),
    # A window's kernel argument is (left, 0): no key after the query, causal or not.
    ("not-causal", "EXTEND", "SLIDING"),
    *(("window-dropped", mode, kind) for mode in ("EXTEND", "DECODE") for kind in ("FULL", "LOCAL")),
    *((name, "DECODE", "LOCAL") for name in ("one-page-late", "pages-swapped")),  # may be a single page
}


@planned_routes
@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        (name, mode, kind)
        for name in BROKEN_PASSES
        for mode in (EXTEND, DECODE)
        for kind in (FULL, SLIDING, LOCAL)
        if (name, mode.name, kind.name) not in CANNOT_SHOW
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_broken_pass_is_noticed(name, mode, kind, route, monkeypatch):
    case = problem(mode, kind=kind, sinks=True)
    assert agrees(case)
    with_plan(monkeypatch, each_pass(BROKEN_PASSES[name]))
    assert notices(case, route)


@pytest.mark.parametrize("name", sorted(set(BROKEN_PASSES) - {"pages-swapped"}))
def test_a_broken_pass_is_noticed_by_the_comparison_of_plans(name):
    case = problem(EXTEND, kind=SLIDING, sinks=True)
    (step,) = fa_ref.plan_batch(case.batch, case.config).for_kind(SLIDING)
    assert meaning(BROKEN_PASSES[name](step)) != meaning(step)


@planned_routes
@pytest.mark.parametrize("kind", [SLIDING, LOCAL], ids=lambda kind: kind.value)
def test_slots_translated_after_dividing_are_noticed(kind, route, monkeypatch):
    case = problem(EXTEND, kind=kind, hybrid=True, prefix_lens=(10, 7), new_lens=(2, 2), chunk=30)
    assert agrees(case)
    mapping = case.config.token_to_kv_pool.full_to_swa_index_mapping

    def divide_first(plan: Any) -> dict[LayerKind, tuple]:
        (full,), (step,) = plan.for_kind(FULL), plan.for_kind(kind)
        width = step.page_table.shape[1]
        return {kind: (replace(step, page_table=mapping[full.page_table.long()][:, :width]),)}

    with_plan(monkeypatch, divide_first)
    assert notices(case, route)


@planned_routes
@MODES
@pytest.mark.parametrize("page_size", [1, 3])
def test_slots_not_translated_at_all_are_noticed(page_size, mode, route, monkeypatch):
    case = problem(mode, kind=SLIDING, hybrid=True, page_size=page_size, window=1000)
    assert agrees(case)
    with_plan(monkeypatch, lambda plan: {SLIDING: (replace(plan.for_kind(FULL)[0], uses_window=True),)})
    assert notices(case, route)


# ---- merges -----------------------------------------------------------------------------------------------------


def cut_in_two(step: AttentionPass, sinks: tuple[bool, bool]) -> tuple[AttentionPass, AttentionPass]:
    """The same attention as two passes: the first three pages of every request, not causal, and the rest."""
    head = replace(
        step,
        page_table=step.page_table[:, :3],
        cache_seqlens=torch.full_like(step.cache_seqlens, 3 * step.page_size),
        causal=False,
        takes_sinks=sinks[0],
    )
    tail = replace(
        step,
        page_table=step.page_table[:, 3:],
        cache_seqlens=step.cache_seqlens - 3 * step.page_size,
        takes_sinks=sinks[1],
    )
    return head, tail


@planned_routes
@PAGES
@MODES
@pytest.mark.parametrize("sinks", [(True, False), (False, True)], ids=["in-the-first", "in-the-second"])
def test_two_passes_merge_to_the_same_result(sinks, mode, page_size, route, monkeypatch):
    case = problem(mode, sinks=True, page_size=page_size, heads=4, kv_heads=2, prefix_lens=(49, 69, 60))
    with_plan(monkeypatch, lambda plan: {FULL: cut_in_two(plan.for_kind(FULL)[0], sinks)})
    assert case.judge(run(case, route)).ok


@planned_routes
@MODES
@pytest.mark.parametrize("sinks", [(True, True), (False, False)], ids=["in-both", "in-none"])
def test_sinks_in_both_passes_or_none_are_noticed(sinks, mode, route, monkeypatch):
    case = problem(mode, sinks=True, heads=4, kv_heads=2)
    with_plan(monkeypatch, lambda plan: {FULL: cut_in_two(plan.for_kind(FULL)[0], sinks)})
    assert notices(case, route)


@planned_routes
@MODES
def test_a_pass_left_out_is_noticed(mode, route, monkeypatch):
    case = problem(mode)
    with_plan(monkeypatch, lambda plan: {FULL: cut_in_two(plan.for_kind(FULL)[0], (True, False))[1:]})
    assert notices(case, route)


@planned_routes
@MODES
def test_a_base_2_lse_is_noticed_in_a_merge(mode, route, monkeypatch):
    case = problem(mode)
    with_plan(monkeypatch, lambda plan: {FULL: cut_in_two(plan.for_kind(FULL)[0], (True, False))})
    assert case.judge(run(case, route)).ok

    def in_base_2(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            out, lse = kernel(**arguments)
            return out, lse / math.log(2)

        return call

    if route == "passes":
        where = fa_ref.backend
    else:
        where = fa_fast.FlashAttentionBackend(case.config).kernels
    monkeypatch.setattr(where, "flash_attn_with_kvcache", in_base_2(where.flash_attn_with_kvcache))
    assert notices(case, route)


# ---- trees ------------------------------------------------------------------------------------------------------

VERIFY = ForwardMode.TARGET_VERIFY
FOREST = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]
DRAFTS = len(FOREST[0])
TREE_WAYS = pytest.mark.parametrize("way", ["fused", "expand"])


def tree_problem(kind: LayerKind = FULL, **arguments: Any) -> Case:
    """A tree, a chain and a star to verify, each deeper or wider than the window."""
    return problem(VERIFY, kind=kind, **(dict(trees=FOREST, window=2, heads=4, kv_heads=2) | arguments))


def draft_problem(kind: LayerKind = FULL, **arguments: Any) -> Case:
    """Three branches at their third step."""
    drafting = dict(topk=3, num_steps=4, step=2, heads=4, kv_heads=2)
    return problem(DECODE, kind=kind, **(drafting | arguments))


def slot_order() -> Tensor:
    """What a window of 2 allows if the place in memory is taken for the position: [drafts, drafts]."""
    place = torch.arange(DRAFTS)
    return place[:, None] - place <= 2


def without_depth(plan: Any) -> tuple:
    prefix, tree = plan.for_kind(SLIDING)
    return replace(prefix, cache_seqlens=torch.full_like(prefix.cache_seqlens, 2)), tree


def by_slot_order(plan: Any) -> tuple:
    prefix, tree = plan.for_kind(SLIDING)
    lens = (2 - torch.arange(DRAFTS)).clamp(min=0).repeat(3).int()
    return replace(prefix, cache_seqlens=lens), tree


def deeper(by: int) -> Callable[[Any], tuple]:
    def change(plan: Any) -> tuple:
        prefix, tree = plan.for_kind(SLIDING)
        return replace(prefix, cache_seqlens=(prefix.cache_seqlens - by).clamp(min=0, max=2)), tree

    return change


BROKEN_WINDOWS: dict[str, Callable[[Any], tuple]] = {
    "prefix-by-slot-order": by_slot_order,
    "prefix-without-depth": without_depth,
    "one-too-deep": deeper(1),
    "one-too-shallow": deeper(-1),
    "oldest-first": lambda plan: (
        replace(plan.for_kind(SLIDING)[0], page_table=plan.for_kind(SLIDING)[0].page_table.flip(1)),
        plan.for_kind(SLIDING)[1],
    ),
    "tree-by-slot-order": lambda plan: (
        plan.for_kind(SLIDING)[0],
        replace(plan.for_kind(SLIDING)[1], mask=plan.for_kind(FULL)[1].mask & slot_order()),
    ),
    "no-window-in-the-tree": lambda plan: (
        plan.for_kind(SLIDING)[0],
        replace(plan.for_kind(SLIDING)[1], mask=plan.for_kind(FULL)[1].mask),
    ),
}


@planned_routes
@TREE_WAYS
@PAGES
@pytest.mark.parametrize("name", BROKEN_WINDOWS)
def test_a_broken_window_over_a_tree_is_noticed(name, page_size, way, route, monkeypatch):
    case = tree_problem(SLIDING, page_size=page_size, tree_attention=way)
    assert agrees(case)
    with_plan(monkeypatch, lambda plan: {SLIDING: BROKEN_WINDOWS[name](plan)})
    assert notices(case, route)


BROKEN_TREES: dict[str, Callable[[Any, Any], tuple]] = {
    "drafts-of-the-neighbour": lambda prefix, tree: (prefix, replace(tree, slots=rolled(tree.slots))),
    "one-draft-late": lambda prefix, tree: (prefix, replace(tree, slots=tree.slots.roll(1, dims=1))),
    "mask-of-the-neighbour": lambda prefix, tree: (prefix, replace(tree, mask=rolled(tree.mask))),
    "mask-upside-down": lambda prefix, tree: (prefix, replace(tree, mask=tree.mask.flip(1))),
    "all-drafts-seen": lambda prefix, tree: (prefix, replace(tree, mask=torch.ones_like(tree.mask))),
    "sinks-in-both": lambda prefix, tree: (replace(prefix, takes_sinks=True), tree),
    "sinks-in-none": lambda prefix, tree: (prefix, replace(tree, takes_sinks=False)),
    "no-tree": lambda prefix, tree: (prefix, replace(prefix, cache_seqlens=prefix.cache_seqlens * 0)),
    "no-prefix": lambda prefix, tree: (replace(prefix, cache_seqlens=prefix.cache_seqlens * 0), tree),
    "prefix-of-the-neighbour": lambda prefix, tree: (replace(prefix, page_table=rolled(prefix.page_table)), tree),
}


@planned_routes
@TREE_WAYS
@pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL], ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    ("name", "mode"),
    # The branches of all requests look alike, so that their masks are the same.
    [(n, m) for n in BROKEN_TREES for m in ("verify", "draft") if (n, m) != ("mask-of-the-neighbour", "draft")],
)
def test_a_broken_tree_is_noticed(name, mode, kind, way, route, monkeypatch):
    case = (tree_problem if mode == "verify" else draft_problem)(kind, sinks=True, tree_attention=way)
    assert agrees(case)
    with_plan(monkeypatch, lambda plan: {kind: BROKEN_TREES[name](*plan.for_kind(kind))})
    assert notices(case, route)


@pytest.mark.parametrize("name", BROKEN_TREES)
def test_a_broken_tree_is_noticed_by_the_comparison_of_plans(name):
    case = tree_problem(SLIDING)
    prefix, tree = fa_ref.plan_batch(case.batch, case.config).for_kind(SLIDING)
    broken = BROKEN_TREES[name](prefix, tree)
    assert [meaning(step) for step in broken] != [meaning(prefix), meaning(tree)]


@planned_routes
@pytest.mark.parametrize("mode", ["verify", "draft"])
@pytest.mark.parametrize("page_size", [3, 16])
def test_token_slots_in_a_table_of_pages_are_noticed(page_size, mode, route, monkeypatch):
    case = (tree_problem if mode == "verify" else draft_problem)(page_size=page_size)
    assert agrees(case)

    def viewed_in_pages(plan: Any) -> dict[LayerKind, tuple]:
        prefix, tree = plan.for_kind(FULL)
        return {FULL: (prefix, replace(tree.expanded(), page_size=page_size))}

    with_plan(monkeypatch, viewed_in_pages)
    assert notices(case, route)


@planned_routes
@TREE_WAYS
@PAGES
@pytest.mark.parametrize("mode", ["verify", "draft"])
@pytest.mark.parametrize("which", ["prefix", "drafts"])
def test_untranslated_slots_of_a_second_pool_are_noticed(which, mode, page_size, way, route, monkeypatch):
    make = tree_problem if mode == "verify" else draft_problem
    case = make(SLIDING, hybrid=True, page_size=page_size, tree_attention=way)
    full_pool = case.config.token_to_kv_pool.full_kv_pool
    plain = replace(case.config, is_hybrid_swa=False, token_to_kv_pool=full_pool)
    assert agrees(case)
    untranslated = fa_ref.plan_batch(case.batch, plain, case.step).for_kind(SLIDING)

    def change(plan: Any) -> dict[LayerKind, tuple]:
        prefix, tree = plan.for_kind(SLIDING)
        if which == "prefix":
            return {SLIDING: (replace(prefix, page_table=untranslated[0].page_table), tree)}
        return {SLIDING: (prefix, replace(tree, slots=untranslated[1].slots))}

    with_plan(monkeypatch, change)
    assert notices(case, route)


@planned_routes
@pytest.mark.parametrize("kind", [FULL, SLIDING], ids=lambda kind: kind.value)
def test_descales_of_the_size_of_the_batch_are_noticed(kind, route, monkeypatch):
    """One row a request, where the call has one a draft: the kernels refuse them, they read no further."""
    scale = torch.tensor([0.25, 3.0])
    case = tree_problem(kind, kv_dtype=FP8, k_scale=scale, v_scale=scale, tree_attention="expand")
    assert agrees(case)
    module, name = (fa_ref.backend, "descales") if route == "passes" else (fa_fast.backend, "_descale")
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: right(*arguments)[: case.batch.batch_size])
    with suppress(RuntimeError):  # the product of 18 rows with 3 factors
        assert notices(case, route)


@planned_routes
@TREE_WAYS
@pytest.mark.parametrize("mode", ["verify", "draft"])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_missing_descale_of_a_tree_is_noticed(name, mode, way, route):
    case = (tree_problem if mode == "verify" else draft_problem)(
        dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.25, v_scale=0.25, tree_attention=way
    )
    assert mutated(case, case, route)
    stored = replace(case, k=None, v=None)
    assert mutated(case, stored, route)
    assert not mutated(case, with_layer(stored, **{name: None}), route)


@planned_routes
@pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL], ids=lambda kind: kind.value)
def test_another_step_of_a_draft_is_noticed(kind, route):
    case = draft_problem(kind)
    assert mutated(case, case, route)
    for step in (0, 1, 3):
        assert not mutated(case, replace(case, step=step), route)


@planned_routes
@TREE_WAYS
@pytest.mark.parametrize("mode", ["verify", "draft"])
def test_a_base_2_lse_of_a_prefix_is_noticed(mode, way, route, monkeypatch):
    case = (tree_problem if mode == "verify" else draft_problem)(tree_attention=way)
    assert agrees(case)
    where = fa_ref.backend if route == "passes" else fa_fast.FlashAttentionBackend(case.config).kernels
    right = where.flash_attn_with_kvcache

    def in_base_2(**arguments: Any) -> Any:
        out, lse = right(**arguments)
        return out, lse / math.log(2)

    monkeypatch.setattr(where, "flash_attn_with_kvcache", in_base_2)
    assert notices(case, route)


def spreading(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tree attention that weighs the hidden values by zero: 0 x NaN reaches every query of the request."""

    def broken(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        leak = (v[named["slots"].long()] * 0).sum(dim=(1, 2)).repeat_interleave(named["queries"], dim=0)
        return right(q, k, v, **named) + leak[:, None]

    return broken


def dropping(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tree attention that takes a bad value for 0, also for those who see it."""
    return lambda q, k, v, **named: right(q, k, v.nan_to_num(0.0), **named)


def as_attention(change: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """The same changes to the reference's attention of one request."""

    def broken(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **named: Any) -> Any:
        changed = change(lambda q, k, v, slots, mask, queries: right(q, k, v, mask[0], **named).out)
        out = changed(q, k, v, slots=torch.arange(len(k))[None], mask=mask[None], queries=len(q))
        return right(q, k, v, mask, **named)._replace(out=out)

    return broken


@planned_routes
@pytest.mark.parametrize("mode", ["verify", "draft"])
@pytest.mark.parametrize("change", [spreading, dropping])
def test_nan_that_reaches_a_hidden_branch_or_nobody_is_noticed(change, mode, route, monkeypatch):
    case = (tree_problem if mode == "verify" else draft_problem)()
    case.v.view(3, -1, case.v.shape[1])[:, 1] = math.nan  # draft 1 of each tree, branch 1

    def lost() -> Tensor:
        return run(case, route).isnan().any(dim=-1)

    expected = run(case, "masks").isnan().any(dim=-1)
    assert 0 < expected.sum() < len(expected)
    assert torch.equal(lost(), expected)
    if route == "passes":
        monkeypatch.setattr(fa_ref.backend, "attention", as_attention(change, fa_ref.backend.attention))
    else:
        kernels = fa_fast.FlashAttentionBackend(case.config).kernels
        monkeypatch.setattr(kernels, "short_key_attention", change(kernels.short_key_attention))
    assert not torch.equal(lost(), expected)


# ---- the judge itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_judge_refuses_nan_infinity_zeros_and_a_small_bias(dtype):
    case = problem(dtype=dtype)
    out = run(case, "masks")
    assert case.judge(out).ok
    spoiled = out.clone()
    spoiled[0, 0] = torch.nan
    assert not case.judge(spoiled).ok
    spoiled[0, 0] = torch.inf
    assert not case.judge(spoiled).ok
    assert not case.judge(torch.zeros_like(out)).ok
    assert not case.judge(out + 0.05).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_merge_may_round_its_outputs_and_logarithms_once_more(dtype):
    oracle = torch.tensor([[3.0, -4.0], [1.0, 0.0]], dtype=torch.float64)
    lse = torch.tensor([-7.0, -torch.inf], dtype=torch.float64)
    alone, merged = judge(oracle, oracle, oracle, dtype), judge(oracle, oracle, oracle, dtype, lse)
    eps = torch.finfo(torch.float32).eps  # an LSE is fp32, whatever the outputs are
    assert math.isclose(merged.budget - alone.budget, (1 + 7) * eps * 4, rel_tol=1e-6)
    assert dtype is not torch.bfloat16 or merged.budget < 1.0001 * alone.budget
    empty = judge(oracle, oracle, oracle, dtype, torch.full_like(lse, -torch.inf))
    assert empty.budget < merged.budget


def test_only_what_is_merged_gets_the_allowance_of_a_merge():
    assert all(case.merges for case in (tree_problem(), draft_problem(), problem(DECODE, shared_prefix=9)))
    chain = problem(VERIFY, draft_token_num=3)
    assert not any(case.merges for case in (problem(), problem(DECODE), chain, draft_problem(topk=1)))


@planned_routes
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make", ["tree", "draft", "cascade"])
def test_merged_passes_in_fp32_stay_within_the_budget(make, seed, route):
    """Few heads over long prefixes, with softcap and sinks: where plain runs round least and logarithms are large."""
    given = dict(prefix_lens=(130, 299), heads=1, kv_heads=1, head_dim=8, softcap=30.0, sinks=True, seed=seed)
    if make == "cascade":
        case = problem(DECODE, shared_prefix=48, **given)
    else:
        changes = dict(trees=FOREST[:2]) if make == "tree" else {}
        case = (tree_problem if make == "tree" else draft_problem)(**(given | changes))
    assert case.judge(run(case, route)).ok
