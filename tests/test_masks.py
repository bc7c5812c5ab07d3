"""Each mask as a literal array, again by a loop over pairs, and composed with the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_ref.masks import Mask, causal, cross, everything, local_chunk, prefix, sliding_window, tree


def picture(mask: Mask, queries: range, keys: range) -> list[str]:
    """One string a query: # for a key it may attend to."""
    dense = mask.dense(torch.tensor(list(queries)), torch.tensor(list(keys)))
    return ["".join(".#"[int(cell)] for cell in row) for row in dense]


def test_causal_is_the_lower_triangle():
    assert picture(causal, range(4), range(4)) == ["#...", "##..", "###.", "####"]


def test_causal_behind_a_prefix_is_bottom_right_aligned():
    # Three cached keys, two new tokens: the queries stand at positions 3 and 4, not 0 and 1.
    assert picture(causal, range(3, 5), range(5)) == ["####.", "#####"]
    top_left = picture(causal, range(2), range(5))
    assert top_left == ["#....", "##..."]


def test_sliding_window_keeps_left_keys_and_the_query_itself():
    assert picture(causal & sliding_window(2), range(5), range(5)) == ["#....", "##...", "###..", ".###.", "..###"]


def test_sliding_window_alone_says_nothing_about_later_keys():
    assert picture(sliding_window(1), range(3), range(4)) == ["####", "####", ".###"]


def test_a_window_of_zero_is_the_diagonal():
    assert picture(causal & sliding_window(0), range(3), range(3)) == ["#..", ".#.", "..#"]


def test_local_chunk_is_blocks_on_the_diagonal():
    assert picture(local_chunk(2), range(5), range(5)) == ["##...", "##...", "..##.", "..##.", "....#"]


def test_local_chunk_counts_from_position_zero_not_from_the_first_query():
    assert picture(causal & local_chunk(4), range(3, 6), range(6)) == ["####..", "....#.", "....##"]


def test_prefix_is_the_same_for_every_query():
    assert picture(prefix(2), range(3), range(4)) == ["##..", "##..", "##.."]


def test_cross_sees_the_encoder_and_nothing_else():
    assert picture(cross(3), range(7, 9), range(5)) == ["###..", "###.."]
    assert picture(cross(0), range(2), range(3)) == ["...", "..."]


def test_everything_allows_everything():
    assert picture(everything, range(2), range(3)) == ["###", "###"]


def test_tree_sees_ancestors_and_itself():
    #   0      drafts 1 and 2 continue 0, draft 3 continues 1
    #  / \
    # 1   2
    # |
    # 3
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    assert picture(prefix(2) | tree(ancestors, start=2), range(2, 6), range(6)) == [
        "###...",
        "####..",
        "###.#.",
        "####.#",
    ]


def test_tree_answers_false_outside_its_drafts():
    lone = torch.ones(1, 1, dtype=torch.bool)
    assert picture(tree(lone, start=2), range(1, 4), range(4)) == ["....", "..#.", "...."]


BRUTE = {
    "causal": (causal, lambda q, k: k <= q),
    "everything": (everything, lambda q, k: True),
    **{f"window{w}": (sliding_window(w), lambda q, k, w=w: q - k <= w) for w in (0, 1, 3, 100)},
    **{f"chunk{c}": (local_chunk(c), lambda q, k, c=c: k - k % c == q - q % c) for c in (1, 2, 5, 100)},
    **{f"prefix{n}": (prefix(n), lambda q, k, n=n: k in range(n)) for n in (0, 1, 4)},
    **{f"cross{n}": (cross(n), lambda q, k, n=n: k in range(n)) for n in (0, 3)},
}


@pytest.mark.parametrize("name", BRUTE)
@pytest.mark.parametrize("first_query", [0, 1, 7])
def test_a_mask_answers_every_pair_like_its_definition(name, first_query):
    mask, answer = BRUTE[name]
    queries = range(first_query, first_query + 6)
    expected = [[answer(q, k) for k in range(13)] for q in queries]
    assert mask.dense(torch.tensor(list(queries)), torch.arange(13)).tolist() == expected


@given(
    names=st.lists(st.sampled_from(sorted(BRUTE)), min_size=2, max_size=3),
    q=st.integers(0, 30),
    k=st.integers(0, 30),
)
def test_masks_compose_like_booleans(names, q, k):
    masks = [BRUTE[name][0] for name in names]
    answers = [bool(BRUTE[name][1](q, k)) for name in names]
    both, either = masks[0], masks[0]
    for mask in masks[1:]:
        both, either = both & mask, either | mask
    at = torch.tensor(q), torch.tensor(k)
    assert bool(both(*at)) == all(answers)
    assert bool(either(*at)) == any(answers)
    assert bool((~both)(*at)) != all(answers)


def test_everything_is_the_identity_of_and_and_its_complement_that_of_or():
    pairs = torch.arange(9)
    for mask, _ in BRUTE.values():
        dense = mask.dense(pairs, pairs)
        assert torch.equal((mask & everything).dense(pairs, pairs), dense)
        assert torch.equal((mask | ~everything).dense(pairs, pairs), dense)


def test_masks_are_values_and_composing_leaves_them_alone():
    before = picture(causal, range(3), range(3))
    assert repr(causal & sliding_window(1)) == "Mask(causal & window(left=1))"
    assert picture(causal, range(3), range(3)) == before


def test_a_dense_mask_of_no_queries_or_no_keys_is_empty():
    none, some = torch.arange(0), torch.arange(3)
    for mask in (causal, everything, sliding_window(1), local_chunk(2), prefix(1), cross(1)):
        assert mask.dense(none, some).shape == (0, 3)
        assert mask.dense(some, none).shape == (3, 0)
