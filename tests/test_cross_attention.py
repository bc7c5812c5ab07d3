"""Cross attention: encoder keys in the first columns of a row, the text right after them, in every mode."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_ref
import fa_ref.api.encoder
import fa_ref.oracle
from fa_fast.kernels import torch_cpu
from fa_ref import (
    BackendConfig,
    BadBatch,
    BadConfig,
    BadPageTable,
    FaError,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    MHAKVPool,
    ReqToTokenPool,
    UnsupportedByProvider,
)
from fa_ref.api.encoder import after_encoder
from fa_ref.cases import Case, encoder_slots, make_case, visible_slots
from fa_ref.masks import causal
from tests.support import (
    FP8,
    PACKAGES,
    PLANS_IN,
    ROUTES,
    agrees,
    both_packages,
    by_hand,
    cache_bytes,
    case_on,
    check_bounds,
    every_route,
    meaning,
    planned_routes,
    plans,
    run,
    with_batch,
    with_layer,
)

FULL, LOCAL, CROSS = LayerKind.FULL, LayerKind.LOCAL, LayerKind.CROSS
EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
KINDS = pytest.mark.parametrize("kind", [FULL, LOCAL, CROSS], ids=lambda kind: kind.name.lower())
PAGES = pytest.mark.parametrize("page_size", [1, 3, 16, 64])
HOST = pytest.mark.parametrize("host", [True, False], ids=["host-lengths", "device-lengths"])
RAGGED = (3, 0, 7)

TREES = [[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]]
FORMS: dict[str, tuple[ForwardMode, dict[str, Any]]] = {
    "extend": (EXTEND, {}),
    "mixed": (MIXED, {}),
    "split-prefill": (ForwardMode.SPLIT_PREFILL, {}),
    "draft-extend": (ForwardMode.DRAFT_EXTEND, {}),
    "decode": (DECODE, {}),
    "draft-topk-1": (DECODE, dict(topk=1, step=2)),
    "draft-topk-4": (DECODE, dict(topk=4, step=2)),
    "verify-chain": (ForwardMode.TARGET_VERIFY, dict(draft_token_num=4)),
    "verify-tree": (ForwardMode.TARGET_VERIFY, dict(trees=TREES)),
    "verify-tree-expanded": (ForwardMode.TARGET_VERIFY, dict(trees=TREES, tree_attention="expand")),
}
every_form = pytest.mark.parametrize("form", FORMS)


def problem(form: str = "extend", kind: LayerKind = CROSS, device: str = "cpu", **arguments: Any) -> Case:
    """Three requests of 3, 0 and 7 encoder tokens; with pages of 3, 4 or 16 their text starts in the middle of one."""
    mode, more = FORMS[form]
    page_size = arguments.get("page_size", 4)
    given = dict(kind=kind, encoder_lens=RAGGED, page_size=page_size, chunk=2 * page_size, heads=4, kv_heads=2)
    return case_on(device, mode, **given | more | arguments)


# ---- literal plans ----------------------------------------------------------------------------------------------

ROWS = {  # page size 4: encoder slots, then the text's
    2: ([8, 9, 10], [11, 4, 5, 6]),
    3: ([], [16, 17]),
    1: ([20, 21, 22, 23, 28, 29, 30], [31, 24, 25]),
}


def literal(mode: ForwardMode = DECODE, new: tuple[int, ...] = (1, 1, 1), **config: Any) -> tuple[ForwardBatch, Any]:
    rows = ReqToTokenPool(size=4, context_len=12)
    for row, (encoder, text) in ROWS.items():
        rows.req_to_token[row, : len(encoder) + len(text)] = torch.tensor(encoder + text)
    kv = MHAKVPool(size=32, page_size=4, dtype=torch.float32, head_num=1, head_dim=8, layer_num=1)
    texts = [text for _, text in ROWS.values()]
    lens = torch.tensor([len(text) for text in texts])
    prefix = [len(text) - n for text, n in zip(texts, new, strict=True)]
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=3,
        req_pool_indices=torch.tensor([2, 3, 1]),
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=torch.tensor([s for text, p in zip(texts, prefix, strict=True) for s in text[p:]]),
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=list(new),
        extend_prefix_lens_cpu=prefix,
        encoder_lens=torch.tensor([3, 0, 7]),
        encoder_lens_cpu=[3, 0, 7],
    )
    return batch, BackendConfig(
        device="cpu", dtype=torch.float32, kv_cache_dtype=torch.float32, page_size=4, context_len=12,
        is_encoder_decoder=True, req_to_token_pool=rows, token_to_kv_pool=kv, **config,
    )  # fmt: skip


def the_pass(package: Any, kind: LayerKind, *literal_of: Any, **config: Any) -> dict[str, Any]:
    (step,) = package.plan_batch(*literal(*literal_of, **config)).for_kind(kind)
    check_bounds(step)
    return meaning(step)


@both_packages
def test_a_cross_layer_reads_the_pages_of_the_encoder_and_is_not_causal(package):
    found = the_pass(package, CROSS)
    assert found["pages"] == [[2], [], [5, 7]]
    assert found["cache_seqlens"] == [3, 0, 7]
    assert found["cu_seqlens_q"] == [0, 1, 2, 3]
    assert (found["causal"], found["page_size"], found["keys_are_new"]) == (False, 4, False)
    assert the_pass(package, CROSS, EXTEND, (4, 1, 2))["cu_seqlens_q"] == [0, 4, 5, 7]


@both_packages
def test_a_text_layer_reads_single_slots_from_the_one_after_the_encoder_on(package):
    for mode, new in ((DECODE, (1, 1, 1)), (EXTEND, (4, 1, 2))):
        found = the_pass(package, FULL, mode, new)
        assert found["pages"] == [[11, 4, 5, 6], [16, 17], [31, 24, 25]]
        assert found["cache_seqlens"] == [4, 2, 3]
        assert (found["causal"], found["page_size"]) == (True, 1)


@both_packages
def test_a_chunk_is_counted_from_the_first_token_of_the_text(package):
    found = the_pass(package, LOCAL, DECODE, (1, 1, 1), attention_chunk_size=4)
    assert found["pages"] == [[11, 4, 5, 6], [16, 17], [31, 24, 25]]
    batch, config = literal(EXTEND, (4, 1, 2), attention_chunk_size=4)
    batch = replace(batch, extend_prefix_lens_cpu=None)
    (step,) = package.plan_batch(batch, replace(config, page_size=1, attention_chunk_size=2)).for_kind(LOCAL)
    assert meaning(step)["pages"] == [[11, 4], [5, 6], [16, 17], [31, 24], [25]]


def test_after_encoder_is_an_ordinary_batch_over_shifted_rows():
    batch, config = after_encoder(*literal())
    assert batch.req_pool_indices.tolist() == [0, 1, 2]
    table = batch.req_to_token_pool.req_to_token
    assert [table[r, :n].tolist() for r, n in enumerate((4, 2, 3))] == [text for _, text in ROWS.values()]
    assert (config.page_size, config.is_encoder_decoder, batch.encoder_lens) == (1, False, None)
    assert table.dtype == torch.int32


@both_packages
def test_deterministic_mode_plans_single_tokens_apart_on_cross_layers_too(package):
    batch, config = literal(MIXED, (4, 1, 2), deterministic=True)
    single, longer = package.plan_batch(batch, config).for_kind(CROSS)
    assert (meaning(single)["token_index"], meaning(longer)["token_index"]) == ([4], [0, 1, 2, 3, 5, 6])
    assert (meaning(single)["cache_seqlens"], meaning(longer)["cache_seqlens"]) == ([0], [3, 7])
    assert (single.max_seqlen_q, longer.max_seqlen_q) == (1, 12)


@both_packages
def test_an_idle_batch_needs_no_encoder_lengths(package):
    batch, config = literal()
    idle = replace(batch, forward_mode=ForwardMode.IDLE, encoder_lens=None, encoder_lens_cpu=None)
    assert package.plan_batch(idle, config).for_kind(CROSS) == ()


# ---- masks = passes = fast ----------------------------------------------------------------------------------------


@every_form
@KINDS
@PAGES
@HOST
def test_every_mode_agrees_with_the_definition(form, kind, page_size, host, device):
    case = problem(form, kind, device, page_size=page_size, host_lengths=host)
    if device == "cpu":
        planned = plans(case)
        assert planned["fa_ref"] == planned["fa_fast"]
    assert agrees(case)


@KINDS
@pytest.mark.parametrize("requests", range(1, 9))
@pytest.mark.parametrize("form", ["extend", "mixed", "decode"])
def test_any_number_of_requests(form, requests, kind, device):
    lens = dict(prefix_lens=[3 * r % 7 for r in range(requests)], new_lens=[1 + r % 4 for r in range(requests)])
    for encoder_lens in ([5 * r % 11 for r in range(requests)], [0] * requests, [8] * requests):
        assert agrees(problem(form, kind, device, encoder_lens=encoder_lens, **lens))


FEATURES = {
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "fp8": dict(dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.5, v_scale=0.25),
    "fp8-a-scale-a-head": dict(kv_dtype=FP8, k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor([0.25, 1.0])),
    "wide-values": dict(head_dim=24, v_head_dim=8),
    "24-to-2-heads": dict(heads=24),
    "deterministic": dict(deterministic=True),
    "two-pools": dict(hybrid=True),
}


@pytest.mark.parametrize("name", FEATURES)
@KINDS
@pytest.mark.parametrize("page_size", [1, 16])
def test_features_work_as_for_other_layers(name, kind, page_size):
    for form in FORMS:
        case = problem(form, kind, page_size=page_size, **FEATURES[name])
        assert agrees(case), form


@every_route
def test_a_request_without_encoder_keys_gets_zero_with_and_without_sinks(route):
    for sinks, form in itertools.product((False, True), ("extend", "decode")):
        case = problem(form, sinks=sinks)
        out = run(case, route)
        rows = slice(5, 9) if form == "extend" else slice(1, 2)  # request B
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
        assert bool((out[0] != 0).any())


@every_route
def test_a_cross_layer_equals_dense_cross_attention(route):
    case = problem()
    out = run(case, route).view(-1, 4, 16)
    q, k, v = case.q.view(-1, 4, 16), case.k.view(-1, 2, 16), case.v.view(-1, 2, 16)
    by_request = [(slice(0, 5), slice(0, 3)), (slice(5, 9), slice(3, 3)), (slice(9, 10), slice(3, 10))]
    for queries, keys in by_request:
        want, _ = by_hand(q[queries], k[keys], v[keys], lambda i, j: True, scale=case.layer.scaling)
        torch.testing.assert_close(out[queries].double(), want, atol=1e-5, rtol=1e-5)


@every_route
@pytest.mark.parametrize("kind", [FULL, LOCAL], ids=["full", "local"])
@pytest.mark.parametrize("form", ["extend", "decode", "draft-topk-4", "verify-tree"])
def test_text_behind_an_encoder_equals_the_same_text_of_a_decoder_only_model(form, kind, route):
    """The same tokens in other slots: the cache is copied position by position."""
    case, plain = problem(form, kind), problem(form, kind, encoder_lens=None)
    pools = [c.config.token_to_kv_pool for c in (case, plain)]
    for ours, theirs in zip(*(pool.get_kv_buffer(0) for pool in pools), strict=True):
        for request in range(3):
            ours[visible_slots(case, request).long()] = theirs[visible_slots(plain, request).long()]
        if form == "draft-topk-4":
            ours[case.batch.out_cache_loc] = theirs[plain.batch.out_cache_loc]
    case = replace(case, q=plain.q, k=plain.k, v=plain.v)
    torch.testing.assert_close(run(case, route), run(plain, route), atol=1e-5, rtol=1e-5)


# ---- the encoder is written once ----------------------------------------------------------------------------------


def decoded(case: Case, tokens: int) -> Case:
    """The decode that follows: one more token a request; the encoder's keys are in the cache."""
    lens = case.batch.seq_lens + tokens
    rows = case.config.req_to_token_pool.req_to_token
    assert (case.batch.encoder_lens + lens).max() <= rows.shape[1]
    return with_batch(
        replace(case, q=torch.randn(3, case.q.shape[1]), k=None, v=None),
        forward_mode=DECODE,
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=None,
        extend_seq_lens=None,
        extend_seq_lens_cpu=None,
        extend_prefix_lens=None,
        extend_prefix_lens_cpu=None,
        encoder_out_cache_loc=None,
    )


@every_route
@PAGES
def test_an_encoder_written_once_serves_every_later_decode(page_size, route):
    case = problem("extend", page_size=page_size, context_len=40)
    assert case.judge(run(case, route)).ok
    written = cache_bytes(case)
    keys = torch.cat([encoder_slots(case, r) for r in range(3)]).long()
    assert torch.equal(case.config.token_to_kv_pool.get_key_buffer(0)[keys].flatten(1), case.k)
    for tokens in range(1, 6):
        step = decoded(case, tokens)
        out = run(step, route)
        assert step.judge(out).ok
        empty = replace(step, k=step.q[:0, : 2 * 16], v=step.q[:0, : 2 * 16])
        stale = with_batch(empty, encoder_out_cache_loc=case.batch.encoder_out_cache_loc)
        assert torch.equal(run(stale, route), out), "an empty k is no k, whatever slots are left over"
    assert all(torch.equal(a, b) for a, b in zip(written, cache_bytes(case), strict=True))


@every_route
@pytest.mark.parametrize("encode", [(True, False, False), (False, True, True), (False, False, True), (False,) * 3])
def test_some_requests_of_a_batch_may_be_encoded_already(encode, route):
    case = problem("mixed", encode=encode)
    new = sum(n for n, is_new in zip(RAGGED, encode, strict=True) if is_new)
    assert (0 if case.k is None else len(case.k)) == new
    assert new != len(case.q)
    assert case.judge(run(case, route)).ok


@every_route
def test_a_text_layer_and_a_cross_layer_of_one_pass_write_their_own_slots(route):
    case = problem("extend", FULL)
    pool, package = case.config.token_to_kv_pool, ROUTES[route][0]
    pool.k_buffer.append(torch.zeros_like(pool.k_buffer[0]))
    pool.v_buffer.append(torch.zeros_like(pool.v_buffer[0]))
    backend = package.FlashAttentionBackend(case.config, provider=ROUTES[route][1])
    backend.init_forward_metadata(case.batch)
    cross = replace(case.layer, layer_id=1, is_cross_attention=True)
    text = backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    k, v = torch.randn(10, 32), torch.randn(10, 32)
    out = backend.forward(case.q, k, v, cross, case.batch)
    assert case.judge(text).ok
    assert replace(case, layer=cross).judge(out).ok
    assert torch.equal(pool.k_buffer[1][case.batch.encoder_out_cache_loc].flatten(1), k)
    assert not pool.k_buffer[1][case.batch.out_cache_loc].any()


@every_route
def test_save_kv_cache_false_leaves_the_encoder_s_slots_as_they_are(route):
    case = problem(encode=False)
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    loc = torch.cat([encoder_slots(case, r) for r in range(3)]).long()
    batch = replace(case.batch, encoder_out_cache_loc=loc)
    backend.init_forward_metadata(batch)
    before = cache_bytes(case)
    k = torch.randn(10, 32)
    out = backend.forward(case.q, k, k, case.layer, batch, save_kv_cache=False)
    assert case.judge(out).ok
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True))


# ---- what planning costs ------------------------------------------------------------------------------------------


def test_at_page_size_1_the_table_of_a_cross_layer_is_req_to_token_itself():
    case = problem("decode", page_size=1)
    (step,) = fa_fast.plan_batch(case.batch, case.config).for_kind(CROSS)
    assert step.page_table.data_ptr() == case.config.req_to_token_pool.req_to_token.data_ptr()
    assert step.row_index.tolist() == case.batch.req_pool_indices.tolist()


@both_packages
def test_a_cross_layer_is_one_kernel_call_in_every_mode(package):
    for form in FORMS:
        case = problem(form)
        assert len(package.plan_batch(case.batch, case.config, case.step).for_kind(CROSS)) == 1, form


@every_form
@pytest.mark.parametrize("page_size", [1, 4])
def test_without_host_lengths_planning_reads_no_value_of_the_device(form, page_size, monkeypatch):
    """On the meta device there are none to read."""
    monkeypatch.delenv("FA_CHECK", raising=False)
    case = problem(form, LOCAL, page_size=page_size, host_lengths=False)
    fields = {name: v.to("meta") for name, v in vars(case.batch).items() if isinstance(v, Tensor)}
    if case.recipe["trees"]:
        fields["spec_info"] = replace(
            case.batch.spec_info, custom_mask=case.batch.spec_info.custom_mask.to("meta")
        )  # fmt: skip
    config = replace(
        case.config,
        device="meta",
        req_to_token_pool=ReqToTokenPool(size=5, context_len=case.config.context_len, device="meta"),
        token_to_kv_pool=MHAKVPool(
            size=64, page_size=page_size, dtype=torch.float32, head_num=2, head_dim=16, layer_num=1, device="meta"
        ),
    )  # fmt: skip
    plan = fa_fast.plan_batch(replace(case.batch, **fields), config, case.step)
    assert plan.for_kind(CROSS)[0].cache_seqlens.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        plan.for_kind(CROSS)[0].cache_seqlens.tolist()


@both_packages
def test_without_host_lengths_the_bound_on_encoder_keys_is_the_row(package):
    batch, config = literal()
    (step,) = package.plan_batch(replace(batch, encoder_lens_cpu=None), config).for_kind(CROSS)
    width = config.req_to_token_pool.req_to_token.shape[1]
    assert step.max_seqlen_k == width
    assert package.plan_batch(batch, config).for_kind(CROSS)[0].max_seqlen_k == 7


@both_packages
def test_all_steps_of_a_draft_share_the_plan_of_cross_layers(package):
    case = problem("draft-topk-4")
    backend = package.FlashAttentionMultiStepBackend(case.config, topk=4, speculative_num_steps=3)
    backend.init_forward_metadata(case.batch)
    first, *others = [b.forward_metadata.for_kind(CROSS) for b in backend.attn_backends]
    assert all(other[0] is first[0] for other in others)
    for number, step in enumerate(backend.attn_backends):
        assert case.judge(step.forward(case.q, case.k, case.v, case.layer, case.batch)).ok
        single = package.plan_batch(case.batch, case.config, number)
        for kind in (FULL, CROSS):
            assert [meaning(s) for s in single.for_kind(kind)] == [
                meaning(s) for s in step.forward_metadata.for_kind(kind)
            ]


@pytest.mark.parametrize("shared", [7, 8])
def test_a_shared_prefix_of_texts_behind_encoders_is_read_once_to_the_last_token(shared):
    """Pages of a text are single slots, so that no part of the prefix is left over."""
    case = make_case(
        DECODE, prefix_lens=(9, 8, 12), encoder_lens=RAGGED, shared_prefix=8, page_size=4, heads=4, kv_heads=2
    )
    case = with_batch(case, shared_prefix_len=shared)
    planned = plans(case)
    assert planned["fa_ref"] == planned["fa_fast"]
    first, _ = planned["fa_ref"][FULL]
    assert first["cache_seqlens"] == [shared]
    assert agrees(case)


@every_route
def test_deterministic_rows_do_not_depend_on_their_neighbours(route):
    many = problem("mixed", deterministic=True, new_lens=(1, 4, 1))
    alone = with_batch(
        replace(many, q=many.q[5:6], k=None, v=None), **vars(many.batch.subset([2])) | dict(encoder_out_cache_loc=None)
    )
    assert torch.equal(run(many, route)[5:6], run(alone, route))


@both_packages
def test_a_server_s_batch_with_these_names_is_accepted(package):
    case = problem("extend")
    served = SimpleNamespace(**{name: value for name, value in vars(case.batch).items() if value is not None})
    backend = package.FlashAttentionBackend(case.config)
    backend.init_forward_metadata(served)
    assert case.judge(backend.forward(case.q, case.k, case.v, case.layer, served)).ok


def test_a_provider_of_large_pages_alone_runs_cross_layers_and_refuses_the_text_behind_encoders(monkeypatch):
    monkeypatch.setattr(torch_cpu, "CAPABILITY", replace(torch_cpu.CAPABILITY, page_sizes=frozenset({64})))
    assert agrees(problem(page_size=64))
    with pytest.raises(UnsupportedByProvider, match="cannot run page size 1"):
        problem(kind=FULL, page_size=64).run(fa_fast)


# ---- bad input ----------------------------------------------------------------------------------------------------


def batch(**changes: Any):
    return lambda case: with_batch(case, **changes)


BAD: dict[str, tuple[Any, type[FaError], str]] = {
    "no-encoder-lens": (batch(encoder_lens=None, encoder_lens_cpu=None), BadBatch, "EXTEND needs encoder_lens"),
    "encoder-lens-a-list": (batch(encoder_lens=[3, 0, 7]), BadBatch, "needs encoder_lens as a tensor"),
    "float": (batch(encoder_lens=torch.tensor([3.0, 0, 7])), BadBatch, "encoder_lens is torch.float32"),
    "one-for-all": (batch(encoder_lens=torch.tensor([3])), BadBatch, r"encoder_lens .*\(1,\).*\(3,\)"),
    "other-device": (batch(encoder_lens=torch.tensor(RAGGED, device="meta")), BadBatch, "encoder_lens is on meta"),
    "host-too-short": (batch(encoder_lens_cpu=[3, 0]), BadBatch, "encoder_lens_cpu has 2 entries for 3"),
    "host-negative": (batch(encoder_lens_cpu=[3, -1, 7]), BadBatch, "request 1 has encoder_lens -1"),
    "host-a-number": (batch(encoder_lens_cpu=3), BadBatch, "encoder_lens_cpu is 3; it must be a list or"),
    "host-of-nones": (batch(encoder_lens_cpu=[None] * 3), BadBatch, r"encoder_lens_cpu is \[None"),
    "host-text": (batch(encoder_lens_cpu="307"), BadBatch, "encoder_lens_cpu is '307'"),
    "host-2d": (batch(encoder_lens_cpu=torch.tensor([RAGGED])), BadBatch, "encoder_lens_cpu is tensor"),
    "host-float": (batch(encoder_lens_cpu=[3.5, 0, 7]), BadBatch, "encoder_lens_cpu is"),
    "host-meta": (batch(encoder_lens_cpu=torch.zeros(3, device="meta").long()), BadBatch, "encoder_lens_cpu is tensor"),
    "rows-a-number": (batch(req_to_token_pool=3), BadBatch, "req_to_token_pool is 3 without a tensor req_to_token"),
    "rows-a-list": (batch(req_to_token_pool=SimpleNamespace(req_to_token=[[1]])), BadBatch, "without a tensor req_to"),
    "pool-a-number": (batch(token_to_kv_pool=3), BadConfig, "token_to_kv_pool 3 has no get_kv_buffer"),
    "host-too-long": (batch(encoder_lens_cpu=[3, 90, 7]), BadPageTable, "request 1 has 90 encoder keys and 4 of text"),
    "negative": (batch(encoder_lens=torch.tensor([3, -1, 7])), BadBatch, "request 1 has encoder_lens -1"),
    "too-long": (batch(encoder_lens=torch.tensor([3, 0, 8])), BadPageTable, "request 2 has 8 encoder keys and 7 of te"),
    "loc-a-list": (batch(encoder_out_cache_loc=[4]), BadBatch, r"encoder_out_cache_loc is \[4\]"),
    "loc-float": (batch(encoder_out_cache_loc=torch.zeros(10)), BadBatch, "encoder_out_cache_loc is torch.float32"),
    "loc-outside": (
        batch(encoder_out_cache_loc=torch.full((10,), 9999)), BadPageTable, "encoder_out_cache_loc: slots span 9999",
    ),
    "loc-too-short": (
        batch(encoder_out_cache_loc=torch.arange(9)), BadBatch, r"k has shape \(10, 32\).*9 encoder_out_cache_loc",
    ),
    "loc-missing": (batch(encoder_out_cache_loc=None), BadBatch, "0 encoder_out_cache_loc slots"),
    "keys-of-the-text": (lambda case: replace(case, k=case.k[:9], v=case.v[:9]), BadBatch, "10 encoder_out_cache_loc"),
    "values-of-none": (lambda case: replace(case, v=case.v[:0]), BadBatch, r"k has shape \(10, 32\) and v \(0, 32\)"),
    "k-without-v": (lambda case: replace(case, v=None), BadBatch, "pass both k and v"),
    "row-outside": (batch(req_pool_indices=torch.tensor([1, 99, 2])), BadPageTable, "req_pool_indices span 1..99"),
    "text-length": (batch(seq_lens_cpu=torch.tensor([8, 4])), BadBatch, "seq_lens_cpu has 2 entries"),
}  # fmt: skip


def check_refused(case: Case, wrong: Case, route: str, error: type[FaError], says: str) -> None:
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    before = cache_bytes(case)

    def forward(case: Case) -> Tensor:
        backend.init_forward_metadata(case.batch)
        return backend.forward(case.q, case.k, case.v, case.layer, case.batch)

    with pytest.raises(error, match=says):
        forward(wrong)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    assert case.judge(forward(case)).ok


@every_route
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_before_anything_is_written(name, route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    change, error, says = BAD[name]
    case = problem()
    check_refused(case, change(case), route, error, says)


SINCE_PLANNED: dict[str, tuple[dict[str, Any], type[FaError], str]] = {
    "loc-a-list": (dict(encoder_out_cache_loc=[4]), BadBatch, r"encoder_out_cache_loc is \[4\]"),
    "loc-a-number": (dict(encoder_out_cache_loc=3), BadBatch, "encoder_out_cache_loc is 3"),
    "loc-float": (dict(encoder_out_cache_loc=torch.zeros(10)), BadBatch, "encoder_out_cache_loc is torch.float32"),
    "loc-2d": (dict(encoder_out_cache_loc=torch.ones(10, 1).long()), BadBatch, r"of shape \(10, 1\)"),
    "loc-outside": (dict(encoder_out_cache_loc=torch.full((10,), 9999)), BadPageTable, "slots span 9999"),
    "loc-negative": (dict(encoder_out_cache_loc=torch.full((10,), -1)), BadPageTable, "slots span -1"),
    "other-encoders": (dict(encoder_lens=torch.tensor([3, 0, 6])), BadBatch, r"encoder_lens is \[3, 0, 6\]"),
    "no-encoders": (dict(encoder_lens=None), BadBatch, "encoder_lens is None, the planned batch"),
    "other-rows": (dict(req_pool_indices=torch.tensor([1, 2, 99])), BadBatch, r"req_pool_indices is \[1, 2, 99\]"),
    "other-new-tokens": (dict(extend_seq_lens=torch.tensor([4, 4, 2])), BadBatch, r"extend_seq_lens is \[4, 4, 2\]"),
}


@every_route
@pytest.mark.parametrize("name", SINCE_PLANNED)
def test_what_changed_since_the_plan_is_refused_before_anything_is_written(name, route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    changes, error, says = SINCE_PLANNED[name]
    case = problem()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    backend.init_forward_metadata(case.batch)
    before = cache_bytes(case)
    with pytest.raises(error, match=says):
        backend.forward(case.q, case.k, case.v, case.layer, replace(case.batch, **changes))
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True))
    assert case.judge(backend.forward(case.q, case.k, case.v, case.layer, case.batch)).ok


@every_route
def test_an_encoder_slot_outside_the_pool_is_refused_on_a_cpu(route):
    case = problem(encode=False)
    rows, row = case.config.req_to_token_pool.req_to_token, int(case.batch.req_pool_indices[2])
    right = int(rows[row, 6])
    rows[row, 6] = 9999
    with pytest.raises(BadPageTable, match=r"the encoder of request 2: slots span .*9999"):
        run(case, route)
    rows[row, 6] = right
    assert case.judge(run(case, route)).ok


def other_slots(case: Case) -> Case:
    return with_batch(case, encoder_out_cache_loc=torch.cat([case.batch.out_cache_loc[:3], encoder_slots(case, 2)]))


def one_slot_twice(case: Case) -> Case:
    loc = case.batch.encoder_out_cache_loc.clone()
    loc[1] = loc[0]
    return with_batch(case, encoder_out_cache_loc=loc)


CHECKED = {
    "host-copy": (batch(encoder_lens_cpu=[3, 0, 6]), BadBatch, r"encoder_lens \[3, 0, 7\] and encoder_lens_cpu"),
    "slots-of-the-text": (other_slots, BadPageTable, "which are in no encoder column"),
    "slot-twice": (one_slot_twice, BadPageTable, "names a slot twice"),
}


@every_route
@pytest.mark.parametrize("name", CHECKED)
def test_with_fa_check_values_on_the_device_are_checked_too(name, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    change, error, says = CHECKED[name]
    case = problem()
    check_refused(case, change(case), route, error, says)


@every_route
def test_with_fa_check_another_encoder_length_than_the_planned_one_is_refused(route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = problem()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    backend.init_forward_metadata(case.batch)
    other = replace(case.batch, encoder_lens=torch.tensor([3, 0, 6]))
    with pytest.raises(BadBatch, match="encoder_lens is"):
        backend.forward(case.q, case.k, case.v, case.layer, other)


@both_packages
def test_with_fa_check_encoder_pages_that_are_torn_apart_are_refused(package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    batch, config = literal()
    config.req_to_token_pool.req_to_token[1, 4:7] = torch.tensor([29, 30, 28])
    with pytest.raises(BadPageTable, match="the encoder of request 2: position 4 is in slot 29"):
        package.plan_batch(batch, config)


@both_packages
@pytest.mark.parametrize("name", ["encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc"])
def test_encoder_fields_in_a_batch_of_a_decoder_only_config_are_refused_by_name(name, package):
    given, config = literal()
    others = dict.fromkeys(("encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc"))
    only = replace(given, **others | {name: torch.tensor([3, 0, 7])})
    with pytest.raises(BadBatch, match=f"^{name} in a batch of a decoder-only config"):
        package.plan_batch(only, replace(config, is_encoder_decoder=False))


@every_route
def test_layers_without_a_plan_are_refused_by_mode_and_kind(route):
    case = problem("decode", FULL)
    with pytest.raises(UnsupportedByProvider, match="a SLIDING layer in DECODE has no plan"):
        run(with_layer(case, sliding_window_size=3), route)
    plain = make_case(DECODE)
    with pytest.raises(UnsupportedByProvider, match=r"a CROSS layer in DECODE has no plan: config\.is_encoder_decoder"):
        run(with_layer(plain, is_cross_attention=True), route)


@both_packages
def test_a_draft_of_an_encoder_decoder_says_what_it_needs(package):
    case = problem("draft-topk-4")
    backend = package.FlashAttentionMultiStepBackend(case.config, topk=4, speculative_num_steps=3)
    with pytest.raises(BadBatch, match="DECODE needs encoder_lens as a tensor"):
        backend.init_forward_metadata(replace(case.batch, encoder_lens=None, encoder_lens_cpu=None))


# ---- mutations ----------------------------------------------------------------------------------------------------


def notices(case: Case, route: str) -> bool:
    """True if the comparison fails: outside the budget, refused, or out of the cache's memory."""
    try:
        return not case.judge(run(case, route)).ok
    except (FaError, IndexError):
        return True


def mutable(form: str, kind: LayerKind) -> Case:
    """No request is like another, and none is empty."""
    return problem(form, kind, encoder_lens=(6, 2, 9), prefix_lens=(9, 5, 7), new_lens=(4, 3, 2), sinks=kind is CROSS)


def filled(value: int):
    return lambda lens: torch.full_like(lens, value)


BROKEN_TEXT = {
    "not-shifted": lambda lens: torch.zeros_like(lens),
    "one-length-for-all": lambda lens: lens[:1].expand(3),
    "one-early": lambda lens: lens - 1,
    "one-late": lambda lens: lens + 1,
    "padded-to-a-page": lambda lens: (lens + 3) // 4 * 4,
    "of-the-neighbour": lambda lens: lens.roll(1),
}


@planned_routes
@pytest.mark.parametrize("kind", [FULL, LOCAL], ids=["full", "local"])
@pytest.mark.parametrize("form", ["extend", "decode", "verify-tree"])
@pytest.mark.parametrize("name", BROKEN_TEXT)
def test_text_that_starts_at_the_wrong_column_is_noticed(name, form, kind, route, monkeypatch):
    case = mutable(form, kind)
    assert agrees(case)
    right = fa_ref.api.encoder.after_encoder

    def wrong(batch: ForwardBatch, config: BackendConfig):
        return right(replace(batch, encoder_lens=BROKEN_TEXT[name](batch.encoder_lens)), config)

    monkeypatch.setattr(fa_ref.api.encoder, "after_encoder", wrong)
    assert notices(case, route)


BROKEN_CROSS = {
    "one-length-for-all": lambda step: replace(step, cache_seqlens=filled(6)(step.cache_seqlens)),
    "the-longest-for-all": lambda step: replace(step, cache_seqlens=filled(9)(step.cache_seqlens)),
    "one-key-less": lambda step: replace(step, cache_seqlens=step.cache_seqlens - 1),
    "the-text-too": lambda step: replace(step, cache_seqlens=step.cache_seqlens + 4),
    "of-the-neighbour": lambda step: replace(step, cache_seqlens=step.cache_seqlens.roll(1)),
    "pages-swapped": lambda step: replace(step, page_table=step.page_table.roll(1, dims=1)),
    "slots-for-pages": lambda step: replace(step, page_table=step.page_table * 4),
    "causal": lambda step: replace(step, causal=True),
    "no-sinks": lambda step: replace(step, takes_sinks=False),
}


@planned_routes
@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name in BROKEN_CROSS
        for form in ("extend", "decode", "verify-chain", "verify-tree")
        if (name, form) != ("causal", "decode")  # a single query that sees the last key sees all
    ],
)
def test_a_broken_cross_pass_is_noticed(name, form, route, monkeypatch):
    case = mutable(form, CROSS)
    assert agrees(case)
    for package in PACKAGES:
        right = package.plan_batch

        def broken(batch, config, step=0, right=right):
            plan = right(batch, config, step)
            return replace(plan, passes=plan.passes | {CROSS: tuple(map(BROKEN_CROSS[name], plan.for_kind(CROSS)))})

        monkeypatch.setattr(PLANS_IN[package], "plan_batch", broken)
    assert notices(case, route)


@planned_routes
def test_a_causal_definition_is_noticed(route, monkeypatch):
    case = mutable("extend", CROSS)
    assert agrees(case)
    monkeypatch.setattr(fa_ref.oracle, "mask_of", lambda *_: causal)
    assert notices(case, route)


@planned_routes
def test_encoder_keys_in_the_wrong_order_of_requests_are_noticed(route):
    case = problem(encoder_lens=(4, 4, 4))
    assert case.judge(run(case, route)).ok
    swapped = replace(case, k=case.k.roll(4, dims=0), v=case.v.roll(4, dims=0))
    out = run(swapped, route)
    run(case, "masks")  # the right keys are in the cache again
    assert not case.judge(out).ok


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_on_a_gpu_every_mode_agrees_at_a_server_s_sizes(page_size):
    for form, kind in itertools.product(FORMS, (FULL, LOCAL, CROSS)):
        case = problem(
            form, kind, "cuda", page_size=page_size, encoder_lens=(1500, 0, 7), prefix_lens=(130, 0, 513), head_dim=128,
            heads=8, kv_heads=2, sinks=True, host_lengths=page_size != 16,
        )  # fmt: skip
        assert case.judge(case.run(fa_fast)).ok, (form, kind)


@pytest.mark.gpu
def test_on_a_gpu_planning_never_waits_for_the_device():
    for form, kind, host in itertools.product(FORMS, (FULL, LOCAL, CROSS), (True, False)):
        case = problem(form, kind, "cuda", page_size=16, host_lengths=host)
        case.run(fa_fast)  # compiles what it needs
        backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.init_forward_metadata(case.batch)
            backend.forward(case.q, case.k, case.v, case.layer, case.batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
