"""Each argument of the readable kernels against a loop over single queries and heads, and the refused arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_ref import BadPageTable, UnsupportedByProvider
from fa_ref.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, merge_state
from tests.support import FP8, by_hand

QUERIES, KEYS = (2, 0, 4, 1), (5, 3, 4, 0)  # of each sequence; the last has a query and no key
HEADS, KV_HEADS, DIM, V_DIM, PAGE = 4, 2, 6, 3, 3


@dataclass
class Problem:
    """Ragged queries over a paged cache, with the keys of each sequence also as a plain list."""

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cu_seqlens_q: Tensor
    cache_seqlens: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)


def int32(values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lens) -> Tensor:
    return int32([0, *torch.tensor(lens).cumsum(0).tolist()])


@pytest.fixture
def problem() -> Problem:
    gen = torch.Generator().manual_seed(3)
    pages = 12
    k_cache = torch.randn(pages, PAGE, KV_HEADS, DIM, generator=gen)
    v_cache = torch.randn(pages, PAGE, KV_HEADS, V_DIM, generator=gen)
    page_table = (1 + torch.randperm(8, generator=gen)).reshape(4, 2).int()
    k = [k_cache[row.long()].reshape(-1, KV_HEADS, DIM)[:n] for row, n in zip(page_table, KEYS, strict=True)]
    v = [v_cache[row.long()].reshape(-1, KV_HEADS, V_DIM)[:n] for row, n in zip(page_table, KEYS, strict=True)]
    return Problem(
        q=torch.randn(sum(QUERIES), HEADS, DIM, generator=gen),
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        cu_seqlens_q=starts(QUERIES),
        cache_seqlens=int32(KEYS),
    )


def paged(p: Problem, **arguments: Any) -> Any:
    given = dict(
        q=p.q, k_cache=p.k_cache, v_cache=p.v_cache, page_table=p.page_table, cu_seqlens_q=p.cu_seqlens_q,
        cache_seqlens=p.cache_seqlens, max_seqlen_q=max(QUERIES), return_softmax_lse=True,
    )  # fmt: skip
    return flash_attn_with_kvcache(**(given | arguments))


def ragged(p: Problem, **arguments: Any) -> Any:
    given = dict(
        q=p.q, k=torch.cat(p.k), v=torch.cat(p.v), cu_seqlens_q=p.cu_seqlens_q, cu_seqlens_k=starts(KEYS),
        max_seqlen_q=max(QUERIES), max_seqlen_k=max(KEYS), return_softmax_lse=True,
    )  # fmt: skip
    return flash_attn_varlen_func(**(given | arguments))


BOTH = pytest.mark.parametrize("call", [paged, ragged], ids=["kvcache", "varlen"])


def expect(p: Problem, visible=lambda q, k: True, *, scale: float = DIM**-0.5, qv: Tensor | None = None, **how):
    """The same by hand; visible(query position, key position), queries at the end of the keys."""
    outs, lses, row = [], [], 0
    for new, k, v in zip(QUERIES, p.k, p.v, strict=True):
        first = len(k) - new
        rows = slice(row, row + new)
        out, lse = by_hand(
            p.q[rows], k, v, lambda i, j, first=first: visible(first + i, j), scale=scale,
            qv=None if qv is None else qv[rows], **how,
        )  # fmt: skip
        outs, lses, row = [*outs, out], [*lses, lse], row + new
    return torch.cat(outs), torch.cat(lses)


def check(result, expected, tolerance: float = 1e-5) -> None:
    (out, lse), (out_by_hand, lse_by_hand) = result, expected
    assert lse.dtype == torch.float32
    assert not out.isnan().any()
    torch.testing.assert_close(out.double(), out_by_hand, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), lse_by_hand, rtol=0, atol=tolerance)


@BOTH
def test_without_causal_every_query_sees_every_key_of_its_sequence(problem, call):
    check(call(problem), expect(problem))


@BOTH
def test_causal_is_bottom_right_aligned(problem, call):
    check(call(problem, causal=True), expect(problem, lambda q, k: k <= q))
    out, _ = call(problem, causal=True)
    top_left, _ = expect(problem, lambda q, k: k <= q - (5 - 2))  # the first sequence, counted from its first key
    assert (out[:2].double() - top_left[:2]).abs().max() > 0.1


@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (1, 0), (2, 1), (-1, 1), (1, -1), (0, -1), (50, 50)])
def test_window_ends_are_both_inclusive_and_minus_one_is_unlimited(problem, call, window, causal):
    left, right = window

    def visible(q: int, k: int) -> bool:
        inside = (left < 0 or k >= q - left) and (right < 0 or k <= q + right)
        return inside and (k <= q or not causal)

    check(call(problem, window_size=window, causal=causal), expect(problem, visible))


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_attention_chunk_keeps_the_keys_of_the_query_s_own_chunk(problem, call, chunk):
    def visible(q: int, k: int) -> bool:
        return k <= q and k // chunk == q // chunk

    check(call(problem, causal=True, attention_chunk=chunk), expect(problem, visible))


@BOTH
def test_softmax_scale_replaces_the_default(problem, call):
    check(call(problem, softmax_scale=0.9), expect(problem, scale=0.9))


@BOTH
def test_softcap_acts_after_the_scale(problem, call):
    check(call(problem, softcap=0.7, softmax_scale=0.9), expect(problem, scale=0.9, cap=0.7))


@BOTH
def test_sinks_join_the_denominator_and_the_lse(problem, call):
    sinks = [-1.0, 0.0, 1.0, 3.0]
    result = call(problem, sinks=torch.tensor(sinks), causal=True)
    check(result, expect(problem, lambda q, k: k <= q, sinks=sinks))
    out, lse = result
    assert not out[-1].any()  # the query without a key sees its sink alone
    assert lse[-1].tolist() == sinks


@BOTH
def test_qv_adds_its_products_with_the_values_and_widens_the_default_scale(problem, call):
    qv = torch.randn(sum(QUERIES), HEADS, V_DIM, generator=torch.Generator().manual_seed(9))
    check(call(problem, qv=qv), expect(problem, scale=(DIM + V_DIM) ** -0.5, qv=qv))
    check(call(problem, qv=qv, softmax_scale=0.2), expect(problem, scale=0.2, qv=qv))


@BOTH
def test_descales_belong_to_a_sequence_and_a_key_head(problem, call):
    gen = torch.Generator().manual_seed(5)
    scales = {name: 0.5 + torch.rand(4, KV_HEADS, generator=gen) for name in ("q", "k", "v")}
    result = call(problem, **{f"{name}_descale": scale for name, scale in scales.items()})
    row = 0
    for i, new in enumerate(QUERIES):
        group = scales["q"][i].repeat_interleave(HEADS // KV_HEADS)[:, None]
        problem.q[row : row + new] *= group
        problem.k[i] = problem.k[i] * scales["k"][i][:, None]
        problem.v[i] = problem.v[i] * scales["v"][i][:, None]
        row += new
    check(result, expect(problem))


@BOTH
def test_fp8_operands_are_read_as_what_they_store(problem, call):
    for name in ("k_cache", "v_cache"):
        setattr(problem, name, getattr(problem, name).to(FP8))
    problem.k, problem.v = ([x.to(FP8) for x in each] for each in (problem.k, problem.v))
    result = call(problem)
    problem.k, problem.v = ([x.float() for x in each] for each in (problem.k, problem.v))
    check(result, expect(problem))


@BOTH
def test_an_fp8_query_gives_a_bf16_output(problem, call):
    assert call(problem, q=problem.q.to(FP8))[0].dtype == torch.bfloat16


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_fp32_and_rounded_once(problem, call, dtype):
    for name in ("q", "k_cache", "v_cache"):
        setattr(problem, name, getattr(problem, name).to(dtype))
    problem.k, problem.v = ([x.to(dtype) for x in each] for each in (problem.k, problem.v))
    out, lse = call(problem)
    out_by_hand, lse_by_hand = expect(problem)
    assert out.dtype == dtype
    assert (out.double() - out_by_hand).abs().max() <= torch.finfo(dtype).eps * out_by_hand.abs().max()
    torch.testing.assert_close(lse.double(), lse_by_hand, rtol=0, atol=1e-5)


@BOTH
def test_arguments_that_divide_the_work_change_nothing(problem, call):
    plain = call(problem)
    steered = call(problem, num_splits=3, pack_gqa=True, sm_margin=4, max_seqlen_q=1000)
    assert torch.equal(plain[0], steered[0])
    assert torch.equal(plain[1], steered[1])
    if call is paged:
        assert torch.equal(paged(problem, scheduler_metadata=torch.zeros(4, dtype=torch.int32))[0], plain[0])


@BOTH
def test_out_is_filled_and_returned(problem, call):
    plain, _ = call(problem)
    buffer = torch.full_like(plain, torch.nan)
    result, _ = call(problem, out=buffer)
    assert result.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, plain)


@BOTH
def test_without_return_softmax_lse_the_output_comes_alone(problem, call):
    alone = call(problem, return_softmax_lse=False)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, call(problem)[0])


@BOTH
def test_query_rows_past_the_last_sequence_are_empty_rows(problem, call):
    out, lse = call(problem, q=torch.cat([problem.q, torch.ones(2, HEADS, DIM)]))
    check((out[:-2], lse[:-2]), expect(problem))
    assert not out[-2:].any()
    assert (lse[-2:] == -torch.inf).all()


# ---- arguments of the paged call alone ----------------------------------------------------------------------


def test_cache_batch_idx_picks_the_row_of_each_sequence(problem):
    order = [3, 1, 0, 2]
    shuffled = torch.empty_like(problem.page_table)
    shuffled[order] = problem.page_table
    check(paged(problem, page_table=shuffled, cache_batch_idx=int32(order)), expect(problem))


def test_cache_batch_idx_may_name_a_row_twice_and_skip_others(problem):
    out, _ = paged(problem, cache_batch_idx=int32([0, 0, 0, 0]), cache_seqlens=int32([5, 5, 5, 5]))
    problem.k, problem.v = [problem.k[0]] * 4, [problem.v[0]] * 4
    torch.testing.assert_close(out.double(), expect(problem)[0], rtol=0, atol=1e-5)


def test_a_cache_without_a_page_table_has_one_row_a_sequence(problem):
    room = 7
    dense_k, dense_v = (
        torch.full((4, room, KV_HEADS, DIM), torch.nan),
        torch.full((4, room, KV_HEADS, V_DIM), torch.nan),
    )
    for i, (k, v) in enumerate(zip(problem.k, problem.v, strict=True)):
        dense_k[i, : len(k)], dense_v[i, : len(v)] = k, v
    check(paged(problem, k_cache=dense_k, v_cache=dense_v, page_table=None), expect(problem))
    flipped = paged(
        problem, k_cache=dense_k.flip(0), v_cache=dense_v.flip(0), page_table=None, cache_batch_idx=int32([3, 2, 1, 0])
    )
    check(flipped, expect(problem))


def test_pages_and_slots_past_cache_seqlens_are_not_read(problem):
    read = {(int(page), slot) for row, n in zip(problem.page_table, KEYS, strict=True) for page, slot in
            [(row[j // PAGE], j % PAGE) for j in range(n)]}  # fmt: skip
    for page in range(12):
        for slot in range(PAGE):
            if (page, slot) not in read:
                problem.k_cache[page, slot] = problem.v_cache[page, slot] = torch.nan
    problem.page_table[3] = 999  # a sequence of no keys: its row is not looked at
    check(paged(problem), expect(problem))


@pytest.mark.parametrize("lens", [4, None], ids=["int", "None"])
def test_cache_seqlens_may_be_one_number_or_all_the_row_holds(problem, lens):
    out, lse = paged(problem, cache_seqlens=lens)
    n = lens or 2 * PAGE
    rows = [row.long() for row in problem.page_table]
    problem.k = [problem.k_cache[row].reshape(-1, KV_HEADS, DIM)[:n] for row in rows]
    problem.v = [problem.v_cache[row].reshape(-1, KV_HEADS, V_DIM)[:n] for row in rows]
    check((out, lse), expect(problem))


def test_batched_queries_have_a_batched_result(problem):
    q = problem.q[:6].reshape(2, 3, HEADS, DIM)
    lens, table = int32([5, 4]), problem.page_table[[0, 2]]
    out, lse = flash_attn_with_kvcache(
        q=q, k_cache=problem.k_cache, v_cache=problem.v_cache, page_table=table, cache_seqlens=lens, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    packed = flash_attn_with_kvcache(
        q=problem.q[:6], k_cache=problem.k_cache, v_cache=problem.v_cache, page_table=table, cache_seqlens=lens,
        cu_seqlens_q=int32([0, 3, 6]), max_seqlen_q=3, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert out.shape == (2, 3, HEADS, V_DIM)
    assert lse.shape == (2, 3, HEADS)
    assert torch.equal(out.flatten(0, 1), packed[0])
    assert torch.equal(lse.flatten(0, 1), packed[1])


# ---- refusals -----------------------------------------------------------------------------------------------

APPEND = ("k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens", "cache_leftpad", "cu_seqlens_k_new")


@pytest.mark.parametrize("name", APPEND)
def test_arguments_that_append_or_rotate_are_refused_by_name(problem, name):
    with pytest.raises(UnsupportedByProvider, match=rf"^{name} given"):
        paged(problem, **{name: torch.zeros(1)})


def test_the_ragged_call_refuses_a_page_table(problem):
    with pytest.raises(UnsupportedByProvider, match=r"page_table given.*flash_attn_with_kvcache"):
        ragged(problem, page_table=problem.page_table)


@pytest.mark.parametrize("page", [-1, 12])
def test_a_page_id_outside_the_cache_is_refused(problem, page):
    problem.page_table[2, 1] = page
    with pytest.raises(BadPageTable, match=r"row 2.*pages 0\.\.11"):
        paged(problem)


# ---- merge_state --------------------------------------------------------------------------------------------


def halves(problem: Problem):
    """Attention over the first two keys of each sequence, over the rest, and over all, without a mask."""
    first = [min(2, n) for n in KEYS]
    cu_all = starts(KEYS).tolist()
    k, v = torch.cat(problem.k), torch.cat(problem.v)
    head = torch.cat([torch.arange(a, a + n) for a, n in zip(cu_all[:-1], first, strict=True)])
    tail = torch.cat([torch.arange(a + n, b) for a, b, n in zip(cu_all[:-1], cu_all[1:], first, strict=True)])
    rest = [n - m for n, m in zip(KEYS, first, strict=True)]
    a = ragged(problem, k=k[head], v=v[head], cu_seqlens_k=starts(first))
    b = ragged(problem, k=k[tail], v=v[tail], cu_seqlens_k=starts(rest))
    return a, b, ragged(problem)


def test_merge_state_gives_attention_over_the_union(problem):
    (out_a, lse_a), (out_b, lse_b), (out, lse) = halves(problem)
    merged, merged_lse = merge_state(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-6)


def test_merge_state_writes_into_out(problem):
    (out_a, lse_a), (out_b, lse_b), _ = halves(problem)
    buffer = torch.full_like(out_a, torch.nan)
    merged, _ = merge_state(out_a, lse_a, out_b, lse_b, out=buffer)
    assert merged.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, merge_state(out_a, lse_a, out_b, lse_b)[0])


def test_merge_state_keeps_the_dtype_of_its_outputs(problem):
    (out_a, lse_a), (out_b, lse_b), _ = halves(problem)
    merged, lse = merge_state(out_a.bfloat16(), lse_a, out_b.bfloat16(), lse_b)
    assert merged.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
