"""Identities of softmax attention that keeps its LSE, and of the merge of two such states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fa_ref.attention import AttentionState, attend, attention, merge, scores, softcap
from tests.support import by_hand

HEADS = 4
EMPTY = AttentionState(torch.zeros(3, HEADS, 5), torch.full((3, HEADS), -torch.inf))


def problem(queries: int = 3, keys: int = 7, kv_heads: int = 2, dim: int = 8, v_dim: int = 5, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    shapes = (queries, HEADS, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim)
    return [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]


def everything_visible(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


def close(a: AttentionState, b: AttentionState, tolerance: float = 1e-12) -> bool:
    same_lse = torch.allclose(a.lse.double(), b.lse.double(), rtol=0, atol=tolerance)
    return same_lse and torch.allclose(a.out.double(), b.out.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("sink", [False, True])
def test_attention_is_the_textbook_sum(kv_heads, cap, sink):
    q, k, v = problem(kv_heads=kv_heads)
    mask = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[1] = False
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64) if sink else None
    state = attention(q, k, v, mask, softmax_scale=0.3, logit_cap=cap, sinks=sinks)
    hand = by_hand(q, k, v, lambda i, j: bool(mask[i, j]), scale=0.3, cap=cap, sinks=sinks.tolist() if sink else None)
    assert close(state, AttentionState(*hand))


def test_query_heads_share_key_heads_in_consecutive_groups():
    q = torch.ones(1, 4, 2)
    k = torch.tensor([[[1.0, 0.0], [10.0, 0.0]]])  # one key, two key heads
    assert scores(q, k).flatten().tolist() == [1.0, 1.0, 10.0, 10.0]


def test_grouped_heads_equal_repeated_key_heads():
    q, k, v = problem(kv_heads=2)
    mask = everything_visible(3, 7)
    grouped = attention(q, k, v, mask, softmax_scale=0.3)
    repeated = attention(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), mask, softmax_scale=0.3)
    assert close(grouped, repeated)


def test_values_may_be_narrower_than_keys():
    q, k, v = problem(dim=12, v_dim=3)
    state = attention(q, k, v, everything_visible(3, 7), softmax_scale=0.3)
    assert state.out.shape == (3, HEADS, 3)
    wide = torch.nn.functional.pad(v, (0, 9))
    padded = attention(q, k, wide, everything_visible(3, 7), softmax_scale=0.3)
    assert torch.equal(padded.out[..., :3], state.out)
    assert not padded.out[..., 3:].any()


def test_the_lse_is_a_natural_logarithm():
    keys = torch.zeros(8, 1, 4)
    state = attention(torch.zeros(1, 1, 4), keys, keys, everything_visible(1, 8), softmax_scale=1.0)
    assert state.lse.item() == pytest.approx(math.log(8), abs=1e-6)  # log2 would give 3


def test_the_lse_is_fp32_also_for_16_bit_inputs():
    q, k, v = (x.bfloat16() for x in problem())
    assert attention(q, k, v, everything_visible(3, 7), softmax_scale=0.3).lse.dtype == torch.float32


def test_a_row_that_sees_nothing_is_zero_and_minus_infinity():
    q, k, v = problem()
    mask = everything_visible(3, 7)
    mask[1] = False
    state = attention(q, k, v, mask, softmax_scale=0.3)
    assert not state.out[1].any()
    assert (state.lse[1] == -torch.inf).all()
    assert not state.out.isnan().any()


def test_nan_in_keys_and_values_that_nobody_sees_stays_there():
    q, k, v = problem()
    mask = everything_visible(3, 7)
    mask[:, 2] = False
    clean = attention(q, k, v, mask, softmax_scale=0.3, logit_cap=2.0)
    k[2], v[2] = torch.nan, torch.nan
    assert close(attention(q, k, v, mask, softmax_scale=0.3, logit_cap=2.0), clean, 0.0)


def test_a_bad_value_reaches_exactly_the_queries_that_see_it():
    """Number by number: an infinity stays one, two of different signs are NaN, and what is hidden changes no bit."""
    q, k, v = problem()
    mask = everything_visible(3, 7)
    mask[0, 2] = mask[1, 5] = False  # query 2 sees both keys
    clean = attention(q, k, v, mask, softmax_scale=0.3)
    v[2, 0, 0], v[2, 0, 1], v[5, 0, 1], v[5, 0, 2] = torch.inf, torch.inf, -torch.inf, torch.nan
    state = attention(q, k, v, mask, softmax_scale=0.3)
    expected = clean.out.clone()
    heads = slice(0, q.shape[1] // k.shape[1])
    expected[0, heads, 1], expected[0, heads, 2] = -torch.inf, torch.nan
    expected[1, heads, 0], expected[1, heads, 1] = torch.inf, torch.inf
    expected[2, heads, 0], expected[2, heads, 1], expected[2, heads, 2] = torch.inf, torch.nan, torch.nan
    torch.testing.assert_close(state.out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state.lse, clean.lse)


# ---- merge ------------------------------------------------------------------------------------------------


def parts(cuts: list[int], keys: int = 12, seed: int = 0) -> tuple[list[AttentionState], AttentionState]:
    """Attention over each piece of the keys, and over all of them."""
    q, k, v = problem(keys=keys, seed=seed)
    bounds = [0, *sorted(cuts), keys]
    pieces = [
        attention(q, k[a:b], v[a:b], everything_visible(3, b - a), softmax_scale=0.3)
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return pieces, attention(q, k, v, everything_visible(3, keys), softmax_scale=0.3)


@given(cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_merging_any_split_of_the_keys_gives_attention_over_all(cuts, seed):
    pieces, whole = parts(cuts, seed=seed)
    left = pieces[0]
    for piece in pieces[1:]:
        left = merge(left, piece)
    right = pieces[-1]
    for piece in pieces[-2::-1]:
        right = merge(piece, right)
    assert close(left, whole)
    assert close(right, whole)


def test_merge_is_associative_and_commutative():
    (a, b, c), _ = parts([3, 8])
    assert close(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert close(merge(a, b), merge(b, a))


def test_the_empty_state_is_the_identity_of_merge_bitwise():
    (a,), _ = parts([])
    a = AttentionState(a.out.float(), a.lse.float())
    for merged in (merge(a, EMPTY), merge(EMPTY, a)):
        assert torch.equal(merged.out, a.out)
        assert torch.equal(merged.lse, a.lse)


def test_merging_two_empty_states_gives_the_empty_state_and_no_nan():
    merged = merge(EMPTY, EMPTY)
    assert torch.equal(merged.out, EMPTY.out)
    assert torch.equal(merged.lse, EMPTY.lse)


def test_a_base_2_lse_in_a_natural_merge_is_wrong():
    (a, b), whole = parts([2])
    in_base_2 = [AttentionState(s.out, s.lse / math.log(2)) for s in (a, b)]
    assert not close(merge(*in_base_2), whole, 1e-3)


# ---- sinks ------------------------------------------------------------------------------------------------


def test_a_sink_is_a_merge_with_a_key_of_value_zero():
    q, k, v = problem()
    sinks = torch.tensor([-2.0, 0.0, 1.0, 6.0], dtype=torch.float64)
    mask = everything_visible(3, 7)
    mask[0] = False  # also where there is no key at all
    with_sinks = attention(q, k, v, mask, softmax_scale=0.3, sinks=sinks)
    without = attention(q, k, v, mask, softmax_scale=0.3)
    sink_state = AttentionState(torch.zeros_like(without.out), sinks.expand(3, HEADS))
    assert close(with_sinks, merge(without, sink_state))


def test_a_sink_belongs_to_one_pass_of_a_merge():
    q, k, v = problem()
    sinks = torch.tensor([4.0, 5.0, 6.0, 4.5], dtype=torch.float64)

    def piece(a: int, b: int, sinks: Tensor | None) -> AttentionState:
        return attention(q, k[a:b], v[a:b], everything_visible(3, b - a), softmax_scale=0.3, sinks=sinks)

    whole = piece(0, 7, sinks)
    assert close(merge(piece(0, 4, sinks), piece(4, 7, None)), whole)
    assert close(merge(piece(0, 4, None), piece(4, 7, sinks)), whole)
    assert not close(merge(piece(0, 4, sinks), piece(4, 7, sinks)), whole, 1e-2)


def test_a_very_low_sink_changes_nothing_and_a_very_high_one_leaves_nothing():
    q, k, v = problem()
    plain = attention(q, k, v, everything_visible(3, 7), softmax_scale=0.3)
    low, high = (torch.full((HEADS,), x, dtype=torch.float64) for x in (-200.0, 200.0))
    assert close(attention(q, k, v, everything_visible(3, 7), softmax_scale=0.3, sinks=low), plain)
    assert attention(q, k, v, everything_visible(3, 7), softmax_scale=0.3, sinks=high).out.abs().max() < 1e-60


# ---- softcap ----------------------------------------------------------------------------------------------


def test_softcap_bounds_large_logits_and_leaves_small_ones():
    logits = torch.tensor([-1e6, -0.01, 0.0, 0.01, 1e6], dtype=torch.float64)
    assert torch.allclose(softcap(logits, 5.0), torch.tensor([-5.0, -0.01, 0.0, 0.01, 5.0]).double(), atol=1e-7)
    assert softcap(logits, 0.0) is logits


def test_softcap_acts_on_scaled_logits_before_the_mask():
    q, k, v = problem()
    mask = torch.ones(3, 7, dtype=torch.bool).tril(2)
    right = attention(q, k, v, mask, softmax_scale=0.3, logit_cap=1.0)
    assert close(right, attend(torch.tanh(scores(q, k) * 0.3), v, mask))
    cap_before_scale = attend(torch.tanh(scores(q, k)) * 0.3, v, mask)
    assert not close(right, cap_before_scale, 1e-3)
    mask_before_cap = attend(torch.tanh((scores(q, k) * 0.3).masked_fill(~mask, -torch.inf)), v, mask | True)
    assert not close(right, mask_before_cap, 1e-3)
