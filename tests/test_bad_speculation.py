"""Bad drafts: the error says what was passed, nothing was written, and the same backend goes on to a right result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_fast.write import write_kv
from fa_ref import (
    BadBatch,
    BadPageTable,
    DraftInput,
    FaError,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    VerifyInput,
    build_tree,
)
from fa_ref.cases import Case, make_case
from tests.support import ROUTES, both_packages, cache_bytes, every_route, with_batch

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
TREES = [[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]]
SHAPES: dict[str, tuple[ForwardMode, dict[str, Any]]] = {
    "draft-chain": (DECODE, dict(topk=1, num_steps=3)),
    "branches": (DECODE, dict(topk=2, num_steps=3)),
    "verify-chain": (VERIFY, dict(draft_token_num=4)),
    "tree": (VERIFY, dict(trees=TREES)),
}
IN_ROWS = ("draft-chain", "verify-chain", "tree")  # whose drafts have columns of req_to_token
every_shape = pytest.mark.parametrize("shape", SHAPES)
drafts_in_rows = pytest.mark.parametrize("shape", IN_ROWS)


def problem(shape: str, **changes: Any) -> Case:
    mode, arguments = SHAPES[shape]
    return make_case(mode, **(dict(prefix_lens=(5, 2, 8), heads=4, kv_heads=2, page_size=4) | arguments | changes))


def table(case: Case) -> Tensor:
    return case.config.req_to_token_pool.req_to_token


def row(case: Case, request: int) -> int:
    return int(case.batch.req_pool_indices[request])


def spec(case: Case, **changes: Any) -> Case:
    """The case with some fields of its spec_info replaced."""
    return with_batch(case, spec_info=replace(case.batch.spec_info, **changes))


def forward(backend: Any, case: Case) -> Tensor:
    return backend.forward(case.q, case.k, case.v, case.layer, case.batch)


def backend_of(case: Case, route: str, **arguments: Any) -> Any:
    package, provider = ROUTES[route]
    return package.FlashAttentionBackend(case.config, provider=provider, **arguments)


def check_refused(case: Case, route: str, spoil: Callable[[Case], Case], error: type[FaError], says: str) -> None:
    """`spoil` may change the case's tables in place; they are put back before the backend goes on."""
    backend, pool = backend_of(case, route), case.config.token_to_kv_pool
    tables = [table(case)] + ([pool.full_to_swa_index_mapping] if case.config.is_hybrid_swa else [])
    before, right = cache_bytes(case), [tensor.clone() for tensor in tables]
    with pytest.raises(error, match=says):
        backend.init_forward_metadata(spoil(case).batch)
    with pytest.raises(BadBatch, match="no batch is planned"):
        forward(backend, case)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    for tensor, values in zip(tables, right, strict=True):
        tensor.copy_(values)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok


# ---- columns of drafts, always on a CPU -------------------------------------------------------------------------


@every_route
@drafts_in_rows
@pytest.mark.parametrize("slot", [-1, 100_000])
def test_on_a_cpu_drafts_in_slots_outside_the_pool_are_refused(slot, shape, route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)

    def spoil(case: Case) -> Case:
        table(case)[row(case, 1), int(case.batch.seq_lens[1]) + 2] = slot
        return case

    says = rf"request 1: slots span {slot}\.\." if slot < 0 else rf"request 1: slots span .*\.\.{slot}, the pool holds"
    check_refused(problem(shape, host_lengths=False), route, spoil, BadPageTable, says)


@every_route
@drafts_in_rows
def test_on_a_cpu_drafts_beyond_the_row_are_refused_without_host_lengths(shape, route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    case = problem(shape, host_lengths=False)
    width, drafts = table(case).shape[1], 3 if shape == "draft-chain" else 4

    def spoil(case: Case) -> Case:
        lens = case.batch.seq_lens.clone()
        lens[2] = width - drafts + 1
        wrong = with_batch(case, seq_lens=lens)
        return spec(wrong, custom_mask=build_tree(TREES).custom_mask(lens)) if shape == "tree" else wrong

    check_refused(case, route, spoil, BadPageTable, f"request 2 has {width + 1} keys, its row holds {width}")


@every_route
def test_on_a_cpu_a_negative_length_is_refused_without_host_lengths(route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    lens = torch.tensor([5, -2, 8])
    spoil = lambda case: with_batch(case, seq_lens=lens)  # noqa: E731
    check_refused(problem("branches", host_lengths=False), route, spoil, BadPageTable, "request 1 has -2 keys")


# ---- what a batch says ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A change that makes a shape bad, and the error that must follow."""

    shape: str
    change: Callable[[Case], Case]
    says: str  # regular expression that the message matches
    error: type[FaError] = BadBatch
    arguments: dict[str, Any]  # of make_case, beside the shape's


def bad(
    shape: str, says: str, change: Callable[[Case], Case], error: type[FaError] = BadBatch, **arguments: Any
) -> Bad:
    return Bad(shape=shape, change=change, says=says, error=error, arguments=arguments)


def mask_of(change: Callable[[Tensor], Any]) -> Callable[[Case], Case]:
    return lambda case: spec(case, custom_mask=change(case.batch.spec_info.custom_mask))


NUMBERS = {
    "topk-float": ("branches", dict(topk=2.0), "spec_info.topk is 2.0; it must be an int of at least 1"),
    "topk-true": ("branches", dict(topk=True), "spec_info.topk is True"),
    "num-steps-none": ("draft-chain", dict(num_steps=None), "spec_info.num_steps is None"),
    "num-steps-word": ("draft-chain", dict(num_steps="3"), "spec_info.num_steps is '3'"),
    "drafts-float": ("verify-chain", dict(draft_token_num=4.0), "spec_info.draft_token_num is 4.0"),
    "drafts-none": ("tree", dict(draft_token_num=None), "spec_info.draft_token_num is None"),
    "tree-topk-none": ("tree", dict(topk=None), "spec_info.topk is None"),
    "chain-topk-0": ("verify-chain", dict(topk=0), "spec_info.topk is 0"),
}
SAID: dict[str, Bad] = {
    **{
        name: bad(shape, says, lambda case, changes=changes: spec(case, **changes))
        for name, (shape, changes, says) in NUMBERS.items()
    },
    "shared-prefix-float": bad(
        "tree", "shared_prefix_len is 4.0", lambda case: with_batch(case, shared_prefix_len=4.0)
    ),
    "shared-prefix-negative": bad(
        "verify-chain", "shared_prefix_len is -4", lambda case: with_batch(case, shared_prefix_len=-4)
    ),
    "mask-a-list": bad("tree", r"custom_mask is \[True.*flat tensor of bool", mask_of(Tensor.tolist)),
    **{
        f"mask-{name}-{'with' if host else 'without'}-host-lengths": bad(
            "tree", "custom_mask is .*bool and flat, 108 entries", mask_of(change), host_lengths=host
        )
        for name, change in (("short", lambda mask: mask[:-4]), ("long", lambda mask: torch.cat([mask, mask[:4]])))
        for host in (True, False)
    },
}


@every_route
@pytest.mark.parametrize("name", SAID)
def test_drafts_that_are_described_wrongly_are_refused(name, route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    wrong = SAID[name]
    check_refused(problem(wrong.shape, **wrong.arguments), route, wrong.change, wrong.error, wrong.says)


@pytest.mark.parametrize("entries", [0, 47, 48])
def test_where_lengths_may_not_be_read_a_mask_has_at_least_the_entries_of_its_trees(entries, monkeypatch):
    monkeypatch.setattr("fa_ref.api.checks.reads_values", lambda config: False)  # as on a GPU
    case = problem("tree", host_lengths=False, prefix_lens=(0, 0, 0))
    wrong = mask_of(lambda mask: mask[:entries])(case)
    if entries == 48:
        assert case.judge(wrong.run(*ROUTES["fast"])).ok
        return
    with pytest.raises(BadBatch, match=rf"custom_mask .*\({entries},\).*at least 48 entries"):
        wrong.run(*ROUTES["fast"])


# ---- what only the values say, with FA_CHECK=1 ------------------------------------------------------------------


def loc_of(change: Callable[[Tensor], Any]) -> Callable[[Case], Case]:
    """The case with some slots of out_cache_loc changed in place, on a copy."""

    def changed(case: Case) -> Case:
        loc = case.batch.out_cache_loc.clone()
        change(loc)
        return with_batch(case, out_cache_loc=loc)

    return changed


def swap(loc: Tensor) -> None:
    loc[:2] = loc[:2].flip(0)


def of_prefix(request: int) -> Callable[[Case], Case]:
    """A branch of request 0 writes where a prefix is."""
    return lambda case: loc_of(lambda loc: loc.__setitem__(4, table(case)[row(case, request), 1]))(case)


def unmapped(drafts: bool) -> Callable[[Case], Case]:
    """A slot that window layers read is not in the window pool: of a draft, or the newest of the prefix."""

    def spoil(case: Case) -> Case:
        length = int(case.batch.seq_lens[1])
        slot = table(case)[row(case, 1), length - 1]
        if drafts:
            slot = case.batch.out_cache_loc.view(3, -1)[1, 2]
        case.config.token_to_kv_pool.full_to_swa_index_mapping[slot] = 0
        return case

    return spoil


def entry(request: int, draft: int, column: int, value: bool) -> Callable[[Case], Case]:
    """One entry of one request's tree mask; columns count from the start of the prefix."""

    def spoil(case: Case) -> Case:
        lens, mask = case.batch.seq_lens.tolist(), case.batch.spec_info.custom_mask.clone()
        start = sum(4 * (n + 4) for n in lens[:request])
        mask[start + draft * (lens[request] + 4) + column] = value
        return spec(case, custom_mask=mask)

    return spoil


GONE = "not in the window pool"
VALUES: dict[str, Bad] = {
    **{
        f"slots-of-another-position-{shape}": bad(
            shape, r"request 0: out_cache_loc has slots \[.*at the same positions", loc_of(swap)
        )
        for shape in IN_ROWS
    },
    "branches-in-one-slot": bad(
        "branches", "are written by two requests", loc_of(lambda loc: loc.__setitem__(0, loc[-1])), BadPageTable
    ),
    "a-branch-that-writes-padding": bad(
        "branches", "request 1: its branches write slot 0, which is padding",
        loc_of(lambda loc: loc.__setitem__(7, 0)), BadPageTable,
    ),
    "a-branch-over-its-own-prefix": bad("branches", "request 0.*hold cached tokens", of_prefix(0), BadPageTable),
    "a-branch-over-another-prefix": bad("branches", "request 0.*hold cached tokens", of_prefix(2), BadPageTable),
    **{
        f"{'draft' if drafts else 'prefix'}-not-in-the-window-pool-{shape}-{kind.value}": bad(
            shape, f"request 1: .*{GONE}", unmapped(drafts), BadPageTable, hybrid=True, kind=kind, page_size=1
        )
        for shape in SHAPES
        for drafts in (True, False)
        for kind in (LayerKind.SLIDING, LayerKind.LOCAL)
    },
    "a-draft-blind-to-itself": bad("tree", "request 1: draft 2 does not see itself", entry(1, 2, 2 + 2, False)),
    "a-draft-blind-to-the-prefix": bad("tree", "request 2: draft 3 does not see all 8", entry(2, 3, 7, False)),
    "a-draft-that-sees-ahead": bad("tree", "request 0: draft 1 sees a draft that comes", entry(0, 1, 5 + 3, True)),
}  # fmt: skip


@every_route
@pytest.mark.parametrize("name", VALUES)
def test_with_checks_on_drafts_that_contradict_their_tables_are_refused(name, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    wrong = VALUES[name]
    check_refused(problem(wrong.shape, **wrong.arguments), route, wrong.change, wrong.error, wrong.says)


@both_packages
@every_shape
@pytest.mark.parametrize("page_size", [1, 4])
def test_with_checks_on_a_padded_request_passes(page_size, shape, package, monkeypatch):
    """Row 0 with length 1: its key, its drafts and what it writes are all slot 0."""
    monkeypatch.setenv("FA_CHECK", "1")
    case = problem(shape, page_size=page_size)
    rows, lens = (getattr(case.batch, name).clone() for name in ("req_pool_indices", "seq_lens"))
    rows[1:], lens[1:] = 0, 1
    padded = with_batch(loc_of(lambda loc: loc.view(3, -1)[1:].zero_())(case), req_pool_indices=rows, seq_lens=lens)
    padded = with_batch(padded, seq_lens_cpu=lens, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    if shape == "tree":
        padded = spec(padded, custom_mask=build_tree(TREES).custom_mask(lens))
    assert package.plan_batch(padded.batch, case.config).batch_size == 3


@every_route
def test_with_checks_on_a_tree_needs_no_whole_page_of_a_window(route, monkeypatch):
    """Its prefix is read key by key: a page half evicted holds what the window still sees."""
    monkeypatch.setenv("FA_CHECK", "1")
    case = problem("tree", hybrid=True, kind=LayerKind.SLIDING, window=2, prefix_lens=(7, 7, 7))
    first = table(case)[row(case, 0), 4]  # positions 5 and 6 are in the window, 4 is in their page
    case.config.token_to_kv_pool.full_to_swa_index_mapping[first] = 0
    assert case.judge(case.run(*ROUTES[route])).ok


@every_route
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND])
def test_with_checks_on_new_tokens_are_checked_whatever_spec_info_they_bring(mode, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = with_batch(make_case(mode), spec_info=DraftInput(topk=2, num_steps=3))
    check_refused(case, route, loc_of(swap), BadBatch, "request 0: out_cache_loc has slots")


# ---- the drafts that were planned, and those given to forward ---------------------------------------------------

OTHERS: dict[str, tuple[str, Callable[[Case], Case], str]] = {
    "another-topk": ("branches", lambda c: spec(c, topk=3, num_steps=2), "topk=3, num_steps=2, .*topk=2, num_steps=3"),
    "other-steps": ("draft-chain", lambda c: spec(c, num_steps=1), "topk=1, num_steps=1, .*topk=1, num_steps=3"),
    "no-drafts": ("draft-chain", lambda c: with_batch(c, spec_info=None), "has no drafts, .*drafts to make, topk=1"),
    "fewer-drafts": ("verify-chain", lambda c: spec(c, draft_token_num=3), "draft_token_num=3, .*draft_token_num=4"),
    "a-chain-for-a-tree": ("tree", lambda c: spec(c, custom_mask=None), "a chain of .*, .*a tree of"),
    "a-tree-of-other-topk": ("tree", lambda c: spec(c, topk=4), "topk=4, .*topk=2"),
    "another-kind": (
        "draft-chain",
        lambda c: with_batch(c, spec_info=VerifyInput(draft_token_num=3)),
        "has no drafts, .*drafts to make",
    ),
}


def check_forward_refused(case: Case, route: str, other: Case, says: str) -> None:
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    before = cache_bytes(case)
    with pytest.raises(BadBatch, match=says):
        forward(backend, other)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    assert case.judge(forward(backend, case)).ok


@every_route
@pytest.mark.parametrize("name", OTHERS)
def test_forward_refuses_other_drafts_than_planned(name, route):
    shape, change, says = OTHERS[name]
    case = problem(shape)
    check_forward_refused(case, route, change(case), says)


@every_route
@every_shape
@pytest.mark.parametrize("slots", [1, -1])
def test_forward_refuses_slots_for_another_number_of_drafts(slots, shape, route):
    case = problem(shape)
    loc = case.batch.out_cache_loc
    other = with_batch(case, out_cache_loc=torch.cat([loc, loc[:1]]) if slots > 0 else loc[:slots])
    says = f"out_cache_loc has {len(other.batch.out_cache_loc)} slots, the planned batch {len(case.q)} new tokens"
    check_forward_refused(case, route, other, says)


@pytest.mark.parametrize("route", ["passes", "fast"])
@pytest.mark.parametrize("shape", ["draft-chain", "branches"])
def test_forward_takes_the_slots_of_one_step(shape, route):
    case = problem(shape)
    now = with_batch(case, out_cache_loc=case.batch.out_cache_loc.view(len(case.q), 3)[:, 0])
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, now)).ok


def test_masks_of_branches_need_the_slots_of_all_steps():
    case = problem("branches")
    now = with_batch(case, out_cache_loc=case.batch.out_cache_loc.view(len(case.q), 3)[:, 0])
    backend = backend_of(case, "masks")
    backend.init_forward_metadata(case.batch)
    with pytest.raises(BadBatch, match="6 slots; the masks of branches need those of all steps"):
        forward(backend, now)


@pytest.mark.parametrize("slots", [2, 4])
def test_keys_are_written_to_one_slot_a_token(slots):
    case = make_case(DECODE)
    before = cache_bytes(case)
    k, v = case.k.view(3, 1, 16), case.v.view(3, 1, 16)
    with pytest.raises(BadBatch, match=rf"\({slots},\) slots for 3 new tokens"):
        write_kv(case.config.token_to_kv_pool, case.layer, torch.arange(4, 4 + slots), k, v)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True))


# ---- drafts that a server describes in its own words ------------------------------------------------------------


def server_batch(case: Case, **info: Any) -> SimpleNamespace:
    """The batch as an object of the server's own, with a spec_info that has these fields."""
    return SimpleNamespace(**vars(case.batch) | {"spec_info": SimpleNamespace(**info)})


INCOMPLETE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "none": dict(topk=None, num_steps=None),
    "topk": dict(topk=2),
    "steps": dict(num_steps=3),
}


@every_route
@pytest.mark.parametrize("info", INCOMPLETE)
@pytest.mark.parametrize("built", ["arguments", "config"])
def test_what_a_server_s_draft_leaves_out_is_what_the_backend_was_built_with(built, info, route):
    case = problem("branches")
    arguments = dict(speculative_num_steps=3)
    if built == "arguments":
        case, arguments = case.replace_config(topk=0), arguments | dict(topk=2)
    batch = server_batch(case, **INCOMPLETE[info])
    backend = backend_of(case, route, **arguments)
    backend.init_forward_metadata(batch)
    assert case.judge(backend.forward(case.q, case.k, case.v, case.layer, batch)).ok


@every_route
@pytest.mark.parametrize(
    ("info", "says"), [("topk", "num_steps is None"), ("steps", "topk is None"), ("nothing", "topk is None")]
)
def test_what_neither_the_draft_nor_the_backend_says_is_refused(info, says, route):
    case = problem("branches").replace_config(topk=0)
    own = with_batch(case, spec_info=DraftInput(**(dict(topk=None, num_steps=None) | INCOMPLETE[info]))).batch
    for batch in (server_batch(case, **INCOMPLETE[info]), own):
        with pytest.raises(BadBatch, match=f"spec_info.{says}.*the backend with topk= and speculative_num_steps="):
            backend_of(case, route).init_forward_metadata(batch)


@every_route
@pytest.mark.parametrize(
    ("built", "says"),
    [
        (dict(topk=4, speculative_num_steps=3), r"plans DraftInput\(topk=4, num_steps=3\)"),
        (dict(topk=4), r"plans DraftInput\(topk=4\)"),
        (dict(speculative_num_steps=2), r"plans DraftInput\(num_steps=2\)"),
    ],
)
def test_a_backend_built_for_another_draft_refuses_the_batch(built, says, route):
    case = problem("branches")
    with pytest.raises(BadBatch, match=r"spec_info is DraftInput\(topk=2, num_steps=3\); this backend " + says):
        backend_of(case, route, **built).init_forward_metadata(case.batch)
    backend = backend_of(case, route, topk=2, speculative_num_steps=3)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok


@both_packages
def test_the_steps_of_a_server_s_draft_are_planned_together(package):
    case = problem("branches").replace_config(topk=0)
    backend = package.FlashAttentionMultiStepBackend(case.config, 2, 3)
    batch = server_batch(case)
    backend.init_forward_metadata(batch)
    out = backend.attn_backends[0].forward(case.q, case.k, case.v, case.layer, batch)
    assert case.judge(out).ok


@every_route
def test_outside_of_decode_a_draft_needs_no_shape(route):
    """A server's draft object travels with the prefill that starts it."""
    case = make_case(ForwardMode.DRAFT_EXTEND)
    batch = server_batch(case)
    backend = backend_of(case, route)
    backend.init_forward_metadata(batch)
    assert case.judge(backend.forward(case.q, case.k, case.v, case.layer, batch)).ok


@both_packages
def test_a_plan_keeps_the_drafts_of_its_batch(package):
    for shape, words in (("branches", "topk=2, num_steps=3"), ("tree", "a tree of draft_token_num=4, topk=2")):
        case = problem(shape)
        assert words in package.plan_batch(case.batch, case.config).drafts
    assert package.plan_batch(make_case().batch, make_case().config).drafts == ""
    assert isinstance(ForwardBatch.of(server_batch(make_case(DECODE))).spec_info, DraftInput)
