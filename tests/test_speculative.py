"""Trees of drafts: built, grown, accepted and compacted as written down, by definition, and by the other package.

The sampled acceptance is checked twice: exactly, by summing over a grid of uniforms on which every threshold falls
between two points, and by chi-square on random distributions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fa_fast
import fa_ref
from fa_ref import (
    Accepted,
    BadBatch,
    BadPageTable,
    DraftTree,
    ForwardMode,
    MHAKVPool,
    MLAKVPool,
    ReqToTokenPool,
    SWAKVPool,
    VerifyInput,
)
from fa_ref.cases import make_case
from tests.support import FP8, both_packages

T, F = True, False


def tensors(record: Any) -> dict[str, Any]:
    """A record's fields, tensors as lists, so that two records compare."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


# ---- trees to test with -----------------------------------------------------------------------------------------


def chain(drafts: int) -> list[int]:
    return list(range(-1, drafts - 1))


def star(drafts: int) -> list[int]:
    return [-1] + [0] * (drafts - 1)


def random_tree(drafts: int, gen: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(draft, (), generator=gen)) for draft in range(1, drafts)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def forests(draw: st.DrawFn, largest: int = 256) -> list[list[int]]:
    """One tree a request, all of one size: chains, stars, and trees with random parents."""
    drafts = draw(st.one_of(st.integers(1, min(12, largest)), st.integers(1, largest), st.just(largest)))
    gen = generator(draw(st.integers(0, 2**31)))
    kinds = draw(st.lists(st.sampled_from([chain, star, random_tree]), min_size=1, max_size=3))
    return [kind(drafts, gen) if kind is random_tree else kind(drafts) for kind in kinds]


# ---- trees ------------------------------------------------------------------------------------------------------


def above(parents: list[int], draft: int) -> set[int]:
    """A draft and everything between it and the root, by climbing."""
    found = set()
    while draft >= 0:
        found.add(draft)
        draft = parents[draft]
    return found


def is_tree_of(tree: DraftTree, forest: list[list[int]]) -> bool:
    """True if ancestors and depth are those of the parents, by definition."""
    drafts = range(len(forest[0]))
    lines = [[above(parents, draft) for draft in drafts] for parents in forest]
    return (
        tree.parents.tolist() == forest
        and tree.ancestors.tolist() == [[[j in line for j in drafts] for line in request] for request in lines]
        and tree.depth.tolist() == [[len(line) - 1 for line in request] for request in lines]
    )


def mask_by_loop(forest: list[list[int]], seq_lens: list[int]) -> list[bool]:
    """The flat mask entry by entry: prefix columns, then draft columns."""
    entries = []
    for parents, prefix in zip(forest, seq_lens, strict=True):
        for draft in range(len(parents)):
            line = above(parents, draft)
            entries += [True] * prefix + [column in line for column in range(len(parents))]
    return entries


@both_packages
def test_a_tree_from_its_parents(package):
    tree = package.build_tree([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    assert tree.depth.tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]
    assert tree.ancestors[0].tolist() == [[T, F, F, F], [T, T, F, F], [T, F, T, F], [T, T, F, T]]
    assert tree.ancestors[1].tolist() == [[T, F, F, F], [T, T, F, F], [T, T, T, F], [T, T, T, T]]
    assert tree.max_depth == 3
    assert tree.positions(torch.tensor([10, 20])).tolist() == [10, 11, 11, 12, 20, 21, 22, 23]


@both_packages
def test_the_flat_mask_of_two_requests(package):
    tree = package.build_tree([[-1, 0, 0], [-1, 0, 1]])
    mask = tree.custom_mask(torch.tensor([1, 0]))
    assert mask.tolist() == [
        *(T, T, F, F), *(T, T, T, F), *(T, T, F, T),  # one prefix column
        *(T, F, F), *(T, T, F), *(T, T, T),
    ]  # fmt: skip


@given(forest=forests(), data=st.data())
def test_both_build_the_tree_that_climbing_finds(forest, data):
    lens = data.draw(st.lists(st.integers(0, 5), min_size=len(forest), max_size=len(forest)))
    for package in (fa_ref, fa_fast):
        tree = package.build_tree(torch.tensor(forest, dtype=torch.int32))
        assert is_tree_of(tree, forest)
        assert tree.custom_mask(torch.tensor(lens)).tolist() == mask_by_loop(forest, lens)
        assert tree.custom_mask(torch.tensor(lens), torch.tensor(lens)).tolist() == mask_by_loop(forest, lens)
        positions = [n + len(above(p, i)) - 1 for p, n in zip(forest, lens, strict=True) for i in range(len(p))]
        assert tree.positions(torch.tensor(lens)).tolist() == positions


@both_packages
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5, 8, 9, 64, 255, 256])
def test_a_chain_is_causal_and_a_star_sees_the_root(package, drafts):
    tree = package.build_tree([chain(drafts), star(drafts)])
    causal, itself = torch.ones(drafts, drafts, dtype=torch.bool).tril(), torch.eye(drafts, dtype=torch.bool)
    itself[:, 0] = True
    assert torch.equal(tree.ancestors, torch.stack([causal, itself]))


@both_packages
def test_a_known_depth_changes_only_the_width_of_the_paths(package):
    gen = generator(1)
    forest = [random_tree(40, gen) for _ in range(3)]
    deepest = max(len(above(parents, draft)) - 1 for parents in forest for draft in range(40))
    tree = package.build_tree(forest, max_depth=deepest)
    assert is_tree_of(tree, forest) and tree.max_depth == deepest < 39
    tokens, target = (torch.randint(3, (3, 40), generator=gen) for _ in range(2))
    narrow = package.verify_greedy(tree, tokens, target)
    wide = package.verify_greedy(package.build_tree(forest), tokens, target)
    assert torch.equal(narrow.path, wide.path[:, : deepest + 1])
    assert torch.equal(narrow.bonus, wide.bonus)


@both_packages
def test_a_mask_is_what_verification_takes(package):
    trees, prefix = [[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 0]], [3, 6]
    case = make_case(ForwardMode.TARGET_VERIFY, trees=trees, prefix_lens=prefix)
    info = case.batch.spec_info
    assert isinstance(info, VerifyInput)
    assert torch.equal(package.build_tree(trees).custom_mask(case.batch.seq_lens), info.custom_mask)


@pytest.mark.parametrize("package", [fa_ref, fa_fast], ids=lambda package: package.__name__)
@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 2, 0]], "draft 1 has the parent 2"),
        ([[-1, 1]], "draft 1 has the parent 1"),
        ([[-1, 0, -1]], "draft 2 is a second root"),
        ([[0, 0]], "draft 0 is the root"),
        ([[-1, -2]], "draft 1 has the parent -2"),
    ],
)
def test_parents_that_make_no_tree_are_refused(package, parents, message, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    with pytest.raises(BadBatch, match=message):
        package.build_tree(parents)


@both_packages
@pytest.mark.parametrize("parents", [[-1, 0], [[]], [[-1, 0], [-1]], [[-1.0, 0.0]], torch.zeros(1, 1, 1).long()])
def test_parents_of_a_wrong_shape_are_refused_without_reading_them(package, parents):
    with pytest.raises(BadBatch, match="parents"):
        package.build_tree(parents)


@both_packages
def test_a_draft_below_the_given_depth_is_refused(package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    with pytest.raises(BadBatch, match="max_depth is 1"):
        package.build_tree([chain(3)], max_depth=1)
    with pytest.raises(BadBatch, match="max_depth is -1"):
        package.build_tree([chain(3)], max_depth=-1)


# ---- beams ------------------------------------------------------------------------------------------------------


def logprobs(*shape: int, gen: torch.Generator, levels: int = 0) -> Tensor:
    """Random log distributions along the last axis; with `levels`, few different values, so many ties."""
    logits = torch.randint(levels, shape, generator=gen).float() if levels else torch.randn(shape, generator=gen)
    return logits.log_softmax(dim=-1)


def grown(package: Any, requests: int, topk: int, steps: int, vocab: int, seed: int, levels: int = 0) -> Any:
    gen = generator(seed)
    beams = package.start(logprobs(requests, vocab, gen=gen, levels=levels), topk)
    for _ in range(steps - 1):
        beams = package.grow(beams, logprobs(requests, topk, vocab, gen=gen, levels=levels))
    return beams


def candidates_by_loop(topk: int, steps: int, vocab: int, seed: int, levels: int) -> list[list[tuple[float, int, int]]]:
    """For one request, (score, token, parent) of every candidate, by sorting Python lists."""
    gen = generator(seed)
    first = logprobs(1, vocab, gen=gen, levels=levels)[0].tolist()
    found = [(first[token], token, -1) for token in sorted(range(vocab), key=lambda t: (-first[t], t))[:topk]]
    beams = list(range(topk))
    for _ in range(steps - 1):
        after, new = logprobs(1, topk, vocab, gen=gen, levels=levels)[0], []
        for beam, candidate in enumerate(beams):
            row = after[beam].tolist()
            for token in sorted(range(vocab), key=lambda t: (-row[t], t))[:topk]:
                score = (torch.tensor(found[candidate][0]) + after[beam, token]).item()
                new.append((score, token, candidate))
        best = sorted(range(len(new)), key=lambda n: (-new[n][0], n))[:topk]
        beams = [len(found) + n for n in best]
        found += new
    return found


@both_packages
def test_beams_written_down(package):
    beams = package.start(torch.tensor([[0.5, 0.1, 0.4], [0.25, 0.25, 0.5]]).log(), topk=2)
    assert beams.tokens.tolist() == [[0, 2], [2, 0]]  # of the equal tokens 0 and 1 the first
    after = torch.tensor([[[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]], [[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]]).log()
    beams = package.grow(beams, after)
    assert beams.candidate_tokens.tolist() == [[0, 2, 2, 0, 1, 0], [2, 0, 0, 1, 2, 1]]
    assert beams.candidate_parents.tolist() == [[-1, -1, 0, 0, 1, 1]] * 2
    torch.testing.assert_close(
        beams.candidate_scores.exp(),
        torch.tensor([[0.5, 0.4, 0.3, 0.1, 0.4, 0.0], [0.5, 0.25, 0.25, 0.25, 0.1875, 0.0625]]),
    )
    assert (beams.tokens.tolist(), beams.origin.tolist()) == ([[1, 2], [0, 1]], [[1, 0], [0, 0]])
    assert (beams.candidate.tolist(), beams.steps) == ([[4, 2], [2, 3]], 2)

    tokens, tree = package.select(beams, torch.tensor([7, 8]), num_draft_tokens=4)
    # Request 0 keeps 0.5, 0.4 and 0.4: the tokens 0, 2, and 1 below 2. Request 1 keeps 0.5 and the first two quarters.
    assert tokens.tolist() == [[7, 0, 2, 1], [8, 2, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2], [-1, 0, 0, 1]]
    assert tree.max_depth == 2


@pytest.mark.parametrize("levels", [0, 2, 1], ids=["distinct", "ties", "all-equal"])
@pytest.mark.parametrize("topk,steps", [(1, 1), (1, 4), (2, 3), (4, 3), (3, 1)])
@both_packages
def test_candidates_are_those_of_sorted_lists(package, topk, steps, levels):
    beams = grown(package, 1, topk, steps, 6, 11, levels)
    found = candidates_by_loop(topk, steps, 6, 11, levels)
    assert beams.candidate_tokens.tolist() == [[token for _, token, _ in found]]
    assert beams.candidate_parents.tolist() == [[parent for _, _, parent in found]]
    assert beams.candidate_scores.tolist() == [[score for score, _, _ in found]]


@pytest.mark.parametrize("seed", range(4))
@both_packages
def test_select_finds_the_best_tree_of_all(package, seed):
    topk, steps, count = 2, 3, 4
    beams = grown(package, 1, topk, steps, 5, seed)
    scores, parents = beams.candidate_scores[0].tolist(), beams.candidate_parents[0].tolist()
    trees = [
        chosen
        for chosen in itertools.combinations(range(len(scores)), count)
        if all(parents[c] in (-1, *chosen) for c in chosen)
    ]
    best = max(trees, key=lambda chosen: sum(scores[c] for c in chosen))
    tokens, tree = package.select(beams, torch.tensor([3]), count + 1)
    assert tokens.tolist() == [[3, *(beams.candidate_tokens[0, c].item() for c in best)]]
    assert tree.parents.tolist() == [[-1, *(1 + best.index(parents[c]) if parents[c] >= 0 else 0 for c in best)]]


@given(
    topk=st.integers(1, 5),
    steps=st.integers(1, 4),
    requests=st.integers(1, 3),
    levels=st.sampled_from([0, 1, 2, 4]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_both_grow_and_select_the_same_and_parents_come_first(topk, steps, requests, levels, seed, data):
    ref, fast = (grown(package, requests, topk, steps, 7, seed, levels) for package in (fa_ref, fa_fast))
    assert tensors(ref) == tensors(fast)
    count = data.draw(st.integers(1, 1 + ref.candidate_tokens.shape[1]))
    roots = torch.arange(requests)
    (tokens, tree), (fast_tokens, fast_tree) = (p.select(ref, roots, count) for p in (fa_ref, fa_fast))
    assert torch.equal(tokens, fast_tokens) and tensors(tree) == tensors(fast_tree)
    fa_ref.build_tree(tree.parents, max_depth=tree.max_depth)  # refuses what is no tree, parents first
    assert tree.depth.max() <= min(steps, count - 1)


@both_packages
def test_a_path_of_probability_zero_still_ranks_below_its_parent(package):
    beams = package.start(torch.tensor([[1.0, 0.0, 0.0]]).log(), topk=3)
    beams = package.grow(beams, torch.tensor([[[0.0, 0.0, 1.0]] * 3]).log())
    _, tree = package.select(beams, torch.tensor([0]), num_draft_tokens=13)
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]]


@both_packages
def test_beams_refuse_what_they_cannot_rank(package, monkeypatch):
    beams = package.start(torch.tensor([[0.5, 0.5]]).log(), topk=2)
    with pytest.raises(BadBatch, match="topk is 3"):
        package.start(torch.zeros(1, 2), topk=3)
    with pytest.raises(BadBatch, match=r"requests, topk, vocab"):
        package.grow(beams, torch.zeros(1, 3, 2))
    with pytest.raises(BadBatch, match="num_draft_tokens is 4; 1 steps of topk 2 give a root and 2 candidates"):
        package.select(beams, torch.tensor([0]), 4)
    with pytest.raises(BadBatch, match="root_tokens"):
        package.select(beams, torch.tensor([0, 1]), 2)
    monkeypatch.setenv("FA_CHECK", "1")
    with pytest.raises(BadBatch, match="at most 0"):
        package.start(torch.tensor([[0.5, -1.0]]), topk=1)
    with pytest.raises(BadBatch, match="at most 0"):
        package.grow(beams, torch.full((1, 2, 2), math.nan))


# ---- greedy acceptance ------------------------------------------------------------------------------------------


def walk(parents: list[int], tokens: list[int], target: list[int]) -> tuple[list[int], int]:
    """From the root to the first child that is the prediction, as long as there is one; and the next token."""
    path = [0]
    while True:
        here = path[-1]
        right = [c for c in range(len(parents)) if parents[c] == here and tokens[c] == target[here]]
        if not right:
            return path, target[here]
        path.append(right[0])


def is_greedy_walk(done: Accepted, forest: list[list[int]], tokens: Tensor, target: Tensor) -> bool:
    walks = [walk(*request) for request in zip(forest, tokens.tolist(), target.tolist(), strict=True)]
    width = done.path.shape[1]
    return (
        done.path.tolist() == [path + [-1] * (width - len(path)) for path, _ in walks]
        and done.lengths.tolist() == [len(path) for path, _ in walks]
        and done.bonus.tolist() == [bonus for _, bonus in walks]
    )


@both_packages
def test_greedy_written_down(package):
    tree = package.build_tree([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]])
    tokens = torch.tensor([[5, 7, 8, 4, 4], [1, 2, 3, 4, 5], [9, 1, 2, 3, 4]])
    target = torch.tensor([[8, 4, 4, 0, 6], [2, 3, 9, 5, 6], [5, 0, 0, 0, 0]])
    done = package.verify_greedy(tree, tokens, target)
    assert done.path.tolist() == [[0, 2, 4, -1, -1], [0, 1, 2, -1, -1], [0, -1, -1, -1, -1]]
    assert (done.lengths.tolist(), done.bonus.tolist()) == ([3, 3, 1], [6, 9, 5])
    assert done.new_tokens(tokens).tolist() == [[8, 4, 6, -1, -1], [2, 3, 9, -1, -1], [5, -1, -1, -1, -1]]


@given(forest=forests(), vocab=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_greedy_acceptance_is_walking(forest, vocab, seed):
    gen = generator(seed)
    tokens, target = (torch.randint(vocab, (len(forest), len(forest[0])), generator=gen) for _ in range(2))
    for package in (fa_ref, fa_fast):
        done = package.verify_greedy(package.build_tree(forest), tokens, target)
        assert is_greedy_walk(done, forest, tokens, target)


@both_packages
def test_a_draft_model_that_is_always_right_is_accepted_whole(package):
    tokens = torch.arange(9).reshape(1, 9)
    done = package.verify_greedy(package.build_tree([chain(9)]), tokens, tokens + 1)
    assert done.new_tokens(tokens).tolist() == [list(range(1, 10))]


@both_packages
def test_acceptance_refuses_wrong_shapes(package):
    tree = package.build_tree([[-1, 0, 0]])
    tokens, probs = torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3, 2), 0.5)
    with pytest.raises(BadBatch, match="target_ids"):
        package.verify_greedy(tree, tokens, tokens[:, :2])
    with pytest.raises(BadBatch, match="tokens"):
        package.verify_greedy(tree, tokens[0], tokens)
    with pytest.raises(BadBatch, match="target_probs"):
        package.verify_sampled(tree, tokens, probs[:, :2], None, torch.zeros(1, 4))
    with pytest.raises(BadBatch, match="draft_probs"):
        package.verify_sampled(tree, tokens, probs, probs[..., :1], torch.zeros(1, 4))
    with pytest.raises(BadBatch, match="uniforms"):
        package.verify_sampled(tree, tokens, probs, None, torch.zeros(1, 3))


# ---- sampled acceptance: written down, and the two packages compared -----------------------------------------


@pytest.mark.parametrize(
    ("uniforms", "path", "bonus"),
    [
        ([0, 0.49, 0, 0.9], [0, 1, -1], 2),  # 0.49 < p(0): token 0; after it the target gives 2
        ([0, 0.51, 0.49, 0.9], [0, 2, -1], 1),  # not 0; 0.49 < 0.25 / 0.5: token 1; after it the target gives 1
        ([0, 0.51, 0.51, 0.0], [0, -1, -1], 2),  # neither: only 2 is left
    ],
)
@both_packages
def test_chosen_children_written_down(package, uniforms, path, bonus):
    tree, tokens = package.build_tree([[-1, 0, 0]]), torch.tensor([[2, 0, 1]])
    target = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    done = package.verify_sampled(tree, tokens, target, None, torch.tensor([uniforms]))
    assert (done.path.tolist(), done.bonus.tolist()) == ([path], [bonus])


@pytest.mark.parametrize(
    ("uniforms", "path", "bonus"),
    [
        ([0, 0.49, 0, 0.0], [0, 1, -1], 2),  # token 1: p / q = 0.25 / 0.5
        ([0, 0.51, 0.99, 0.0], [0, 2, -1], 0),  # refused: (p - q)+ is all on 0, and q without 1 gives it half
        ([0, 0.51, 0.0, 0.0], [0, 2, -1], 0),
    ],
)
@both_packages
def test_drawn_children_written_down(package, uniforms, path, bonus):
    tree, tokens = package.build_tree([[-1, 0, 0]]), torch.tensor([[2, 1, 0]])
    target = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
    draft = torch.tensor([[[0.25, 0.5, 0.25]] * 3])
    done = package.verify_sampled(tree, tokens, target, draft, torch.tensor([uniforms]))
    assert (done.path.tolist(), done.bonus.tolist()) == ([path], [bonus])


@given(
    forest=forests(largest=40), vocab=st.integers(1, 6), sharp=st.sampled_from([0.3, 1.0, 4.0]),
    drawn=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float64]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_both_accept_the_same_samples(forest, vocab, sharp, drawn, dtype, seed):
    gen = generator(seed)
    requests, drafts = len(forest), len(forest[0])
    tokens = torch.randint(vocab, (requests, drafts), generator=gen)  # siblings may repeat a token
    target, draft = (
        (sharp * torch.randn(requests, drafts, vocab, generator=gen)).softmax(-1).to(dtype) for _ in range(2)
    )
    uniforms = torch.rand(requests, drafts + 1, generator=gen)
    ref, fast = (
        package.verify_sampled(package.build_tree(forest), tokens, target, draft if drawn else None, uniforms)
        for package in (fa_ref, fa_fast)
    )
    assert tensors(ref) == tensors(fast)
    assert bool((ref.bonus < vocab).all())


@pytest.mark.parametrize("drafts", [64, 256])
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_both_accept_the_same_samples_of_large_trees(drafts, drawn):
    gen = generator(drafts)
    forest = [chain(drafts), star(drafts), random_tree(drafts, gen)]
    probs = torch.randn(3, drafts, 300, generator=gen).softmax(-1)
    tokens, uniforms = torch.randint(300, (3, drafts), generator=gen), 0.01 * torch.rand(3, drafts + 1, generator=gen)
    ref, fast = (
        package.verify_sampled(package.build_tree(forest), tokens, probs, probs if drawn else None, uniforms)
        for package in (fa_ref, fa_fast)
    )
    assert tensors(ref) == tensors(fast)
    assert ref.lengths.max() > 1


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@both_packages
def test_a_target_that_is_sure_makes_sampling_greedy(package, drawn):
    gen = generator(3)
    forest = [random_tree(30, gen) for _ in range(20)]
    tree = package.build_tree(forest)
    tokens, target = (torch.randint(3, (20, 30), generator=gen) for _ in range(2))
    probs = torch.nn.functional.one_hot(target, 3).float()
    draft = torch.full((20, 30, 3), 1 / 3) if drawn else None
    done = package.verify_sampled(tree, tokens, probs, draft, torch.rand(20, 31, generator=gen))
    assert is_greedy_walk(done, forest, tokens, target)


# ---- sampled acceptance: the distribution ----------------------------------------------------------------------------
#
# Lossless means: whatever the tree, the token after a kept draft follows the target's distribution after that draft.
# The chance of any longer text is the product of these.

GRID = 12  # thresholds below are multiples of 1/2, 1/3 and 1/4: each falls between two of the 12 midpoints


def grid(decisions: int) -> Tensor:
    """Every combination of `decisions` uniforms from the midpoints (n + 0.5) / GRID."""
    points = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    return torch.cartesian_prod(*[points] * decisions).reshape(-1, decisions)


def spread(uniforms: Tensor) -> Tensor:
    """Uniforms for the drafts after the root and for the bonus; the root's own column must not matter."""
    return torch.cat([torch.full((len(uniforms), 1), math.nan, dtype=torch.float64), uniforms], dim=1)


def following(done: Accepted, tokens: Tensor) -> list[list[tuple[int, int]]]:
    """For each request (draft, next token) along its path."""
    new = done.new_tokens(tokens).tolist()
    return [
        list(zip(path[:length], row[:length], strict=True))
        for path, row, length in zip(done.path.tolist(), new, done.lengths.tolist(), strict=True)
    ]


QUARTERS = torch.tensor([[2, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 3], [1, 2, 1, 0]]) / 4
CHOSEN = {
    "root-alone": (chain(1), [3]),
    "chain": (chain(3), [3, 0, 1]),
    "star": (star(3), [3, 1, 0]),
    "star-with-a-repeated-token": (star(3), [3, 1, 1]),
    "tree": ([-1, 0, 0, 1], [3, 0, 2, 2]),
}


@pytest.mark.parametrize(
    ("package", "shape"),
    [(package, shape) for package in (fa_ref, fa_fast) for shape in CHOSEN if (package, shape) != (fa_ref, "tree")],
    ids=lambda value: getattr(value, "__name__", value),
)  # the reference takes requests one by one: 12 ** 4 are too many for it
def test_chosen_children_leave_the_target_distribution_exactly(package, shape):
    parents, tokens = CHOSEN[shape]
    uniforms = spread(grid(len(parents)))
    ids, probs = torch.tensor([tokens]), QUARTERS[: len(parents)]
    done = package.verify_sampled(
        package.build_tree([parents] * len(uniforms)),
        ids.expand(len(uniforms), -1),
        probs.expand(len(uniforms), -1, -1),
        None,
        uniforms,
    )
    counted = Counter(pair for request in following(done, ids.expand(len(uniforms), -1)) for pair in request)
    visits = [sum(counted[draft, token] for token in range(4)) for draft in range(len(parents))]
    assert visits[0] == len(uniforms) and min(visits[:2]) > 0
    for draft, token in itertools.product(range(len(parents)), range(4)):
        assert counted[draft, token] == Fraction(probs[draft, token].item()) * visits[draft], (draft, token)


@both_packages
def test_children_drawn_in_turn_leave_the_target_distribution_exactly(package):
    """Two children, drawn without replacement: each pair of tokens weighs as much as its chance to be drawn."""
    p, q = (torch.tensor(values, dtype=torch.float64) / 12 for values in ([2, 4, 6], [6, 3, 3]))
    after = torch.tensor([[1, 2, 1], [2, 0, 2], [0, 1, 3]], dtype=torch.float64) / 4
    uniforms = spread(grid(3))
    requests, tree = len(uniforms), package.build_tree([star(3)] * GRID**3)
    chance: Counter[int] = Counter()
    for first, second in itertools.permutations(range(3), 2):
        tokens = torch.tensor([[0, first, second]]).expand(requests, -1)
        target = torch.stack([p, after[first], after[second]]).expand(requests, -1, -1)
        draft = torch.stack([q, q, q]).expand(requests, -1, -1)
        done = package.verify_sampled(tree, tokens, target, draft, uniforms)
        counted = Counter(pair for request in following(done, tokens) for pair in request)
        weights = [Fraction(6, 12), Fraction(3, 12), Fraction(3, 12)]
        for token in range(3):
            chance[token] += weights[first] * weights[second] / (1 - weights[first]) * counted[0, token]
        for child in (1, 2):
            visits = sum(counted[child, token] for token in range(3))
            assert [counted[child, token] for token in range(3)] == (target[0, child] * visits).tolist()
    assert [chance[token] / requests for token in range(3)] == [Fraction(n, 12) for n in (2, 4, 6)]


SHAPES = {"chain": chain(4), "star": star(4), "tree": [-1, 0, 0, 1, 1, 2, 0, 3]}
VOCAB = 5
MANY = 40_000


def drawn_tokens(parents: list[int], draft: Tensor, gen: torch.Generator) -> Tensor:
    """Tokens [requests, drafts]; the children of a draft are drawn from draft[its token], without replacement."""
    tokens = torch.zeros(MANY, len(parents), dtype=torch.int64)
    for parent in range(len(parents)):
        children = [child for child, its in enumerate(parents) if its == parent]
        if children:
            tokens[:, children] = draft[tokens[:, parent]].multinomial(len(children), generator=gen)
    return tokens


def misfit(done: Accepted, tokens: Tensor, target: Tensor) -> float:
    """Chi-square of the token after each kept draft against target[the draft's token], in standard deviations."""
    kept = done.path >= 0
    after = done.new_tokens(tokens)[kept]
    before = tokens.gather(1, done.path.clamp(min=0))[kept]
    seen = torch.bincount(before * VOCAB + after, minlength=VOCAB**2).reshape(VOCAB, VOCAB).double()
    want = seen.sum(dim=1, keepdim=True) * target.double()
    freedom = VOCAB * (VOCAB - 1)
    chi = float(((seen - want) ** 2 / want.clamp(min=1e-9)).sum())
    return ((chi / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))  # Wilson and Hilferty


def sampled_problem(shape: str, drawn: bool, seed: int) -> tuple[list[int], Tensor, Tensor, Tensor, Tensor]:
    """(parents, tokens, target, draft, uniforms): both distributions are tables [token, next token]."""
    gen = generator(seed)
    target, draft = (torch.randn(VOCAB, VOCAB, generator=gen).softmax(-1) for _ in range(2))
    parents = SHAPES[shape]
    tokens = drawn_tokens(parents, draft, gen) if drawn else drawn_tokens(parents, draft, gen)[:1].repeat(MANY, 1)
    return parents, tokens, target, draft, torch.rand(MANY, len(parents) + 1, generator=gen)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_samples_have_the_target_distribution(shape, drawn):
    for seed in range(3):
        parents, tokens, target, draft, uniforms = sampled_problem(shape, drawn, seed)
        tree = fa_fast.build_tree([parents]).parents.expand(MANY, -1)
        done = fa_fast.verify_sampled(
            fa_fast.build_tree(tree), tokens, target[tokens], draft[tokens] if drawn else None, uniforms
        )
        assert misfit(done, tokens, target) < 4
        few = slice(0, 200)
        ref = fa_ref.verify_sampled(
            fa_ref.build_tree([parents] * 200), tokens[few], target[tokens[few]],
            draft[tokens[few]] if drawn else None, uniforms[few],
        )  # fmt: skip
        assert torch.equal(ref.path, done.path[few]) and torch.equal(ref.bonus, done.bonus[few])


def wrong_target(args: dict[str, Any]) -> None:
    args["target_probs"] = (args["target_probs"].log() * 1.1).softmax(-1)


def chosen_as_drawn(args: dict[str, Any]) -> None:
    args["tokens"] = args["tokens"][:1].expand_as(args["tokens"])
    args["target_probs"] = args["target_probs"][:1].expand_as(args["target_probs"])
    args["draft_probs"] = args["draft_probs"][:1].expand_as(args["draft_probs"])


def wrong_draft(args: dict[str, Any]) -> None:
    args["draft_probs"] = torch.full_like(args["draft_probs"], 1 / VOCAB)


def one_uniform_for_all(args: dict[str, Any]) -> None:
    args["uniforms"] = args["uniforms"][:, :1].expand_as(args["uniforms"])


def siblings_in_another_order(args: dict[str, Any]) -> None:
    args["tokens"] = args["tokens"][:, [0, 3, 2, 1]]
    args["target_probs"] = args["target_probs"][:, [0, 3, 2, 1]]


WRONG_SAMPLING: list[Callable[[dict[str, Any]], None]] = [
    wrong_target,
    chosen_as_drawn,
    wrong_draft,
    one_uniform_for_all,
    siblings_in_another_order,
]


@pytest.mark.parametrize("wrong", WRONG_SAMPLING, ids=lambda wrong: wrong.__name__)
def test_the_chi_square_sees_wrong_sampling(wrong):
    parents, tokens, target, draft, uniforms = sampled_problem("star", True, 0)
    args = dict(tokens=tokens, target_probs=target[tokens], draft_probs=draft[tokens], uniforms=uniforms)
    wrong(args)
    done = fa_fast.verify_sampled(fa_fast.build_tree([parents] * MANY), **args)
    assert misfit(done, args["tokens"], target) > 8


def test_the_chi_square_sees_a_bonus_that_may_be_a_refused_child(monkeypatch):
    parents, tokens, target, _, uniforms = sampled_problem("star", False, 0)
    monkeypatch.setattr(
        fa_fast.speculative,
        "_without_children",
        lambda tree, tokens, p, last: p.take_along_dim(last[..., None], 1)[:, 0],
    )
    done = fa_fast.verify_sampled(fa_fast.build_tree([parents] * MANY), tokens, target[tokens], None, uniforms.double())
    assert misfit(done, tokens, target) > 8


# ---- compaction ------------------------------------------------------------------------------------------------------

POOLS = ("mha", "mha-fp8", "mla", "two-pools")


def pool_of(name: str, size: int, page_size: int) -> Any:
    """A pool of two layers (a window layer more with two pools), the padding page zero and the rest NaN."""
    shape: dict[str, Any] = dict(size=size, page_size=page_size, head_num=2, head_dim=4, v_head_dim=3)
    if name == "mla":
        pool: Any = MLAKVPool(
            size=size, page_size=page_size, dtype=torch.bfloat16, kv_lora_rank=4, qk_rope_head_dim=2, layer_num=2
        )
    elif name == "two-pools":
        full, window = (MHAKVPool(dtype=torch.float32, layer_num=n, **shape) for n in (2, 1))
        pool = SWAKVPool(full_pool=full, swa_pool=window, full_layer_ids=[0, 2], swa_layer_ids=[1])
        pages = 1 + torch.randperm(size // page_size)
        slots = pages[:, None] * page_size + torch.arange(page_size)
        pool.full_to_swa_index_mapping[page_size:] = slots.flatten().int()
    else:
        pool = MHAKVPool(dtype=FP8 if name.endswith("fp8") else torch.float32, layer_num=2, **shape)
    for buffer in buffers(pool):
        raw(buffer)[page_size:] = raw(torch.tensor(math.nan).to(buffer.dtype).reshape(1))[0]
    return pool


def buffers(pool: Any) -> list[Tensor]:
    if isinstance(pool, SWAKVPool):
        return [*buffers(pool.full_kv_pool), *buffers(pool.swa_kv_pool)]
    return pool.kv_buffer if isinstance(pool, MLAKVPool) else [*pool.k_buffer, *pool.v_buffer]


def raw(buffer: Tensor) -> Tensor:
    """The bits: NaN equals NaN there."""
    return buffer.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[buffer.element_size()])


def slot_maps(pool: Any) -> list[Callable[[int], int]]:
    """How each of `buffers` numbers the slots of the full pool."""
    if not isinstance(pool, SWAKVPool):
        return [int] * len(buffers(pool))
    mapping = pool.full_to_swa_index_mapping.tolist()
    return [int] * len(buffers(pool.full_kv_pool)) + [mapping.__getitem__] * len(buffers(pool.swa_kv_pool))


def scattered(name: str, page_size: int, seed: int, drafts: int = 7) -> tuple[Any, Tensor, Tensor, Tensor, Accepted]:
    """compact_kv's arguments: three requests in scattered pages, finite where accepted drafts are, NaN elsewhere."""
    torch.manual_seed(seed)
    seq_lens, requests = [5, 0, page_size], 3
    columns = max(seq_lens) + drafts
    pages = -(-columns // page_size)
    pool = pool_of(name, size=3 * requests * pages * page_size, page_size=page_size)
    order = 1 + torch.randperm(3 * requests * pages)
    req_to_token = torch.zeros(requests + 2, columns, dtype=torch.int32)
    rows = torch.tensor([4, 1, 3])
    for row, mine in zip(rows.tolist(), order[: requests * pages].reshape(requests, pages), strict=True):
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()
        req_to_token[row] = slots[:columns]
    gen = generator(seed)
    forest = [random_tree(drafts, gen), chain(drafts), star(drafts)]
    paths = []
    for parents in forest:
        end = int(torch.randint(2, drafts, (), generator=gen))  # so that the star's moves
        paths.append(sorted(above(parents, end)))
    path = torch.tensor([p + [-1] * (drafts - len(p)) for p in paths])
    lengths = torch.tensor([len(p) for p in paths])
    for buffer, number in zip(buffers(pool), slot_maps(pool), strict=True):
        for row, start, drafts_kept in zip(rows.tolist(), seq_lens, paths, strict=True):
            for draft in drafts_kept:
                slot = number(int(req_to_token[row, start + draft]))
                buffer[slot] = torch.randn(buffer.shape[1:], generator=gen).to(buffer.dtype)
    done = Accepted(path=path, lengths=lengths, bonus=torch.zeros(requests, dtype=torch.int64))
    return pool, req_to_token, rows, torch.tensor(seq_lens), done


def compacted_by_loop(pool: Any, req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, done: Accepted) -> list[Tensor]:
    """The bits of every buffer afterwards, one token at a time."""
    expected = []
    for buffer, number in zip(buffers(pool), slot_maps(pool), strict=True):
        before, after = raw(buffer).clone(), raw(buffer).clone()
        for request in range(len(rows)):
            slots = [number(slot) for slot in req_to_token[rows[request], seq_lens[request] :].tolist()]
            for place in range(int(done.lengths[request])):
                after[slots[place]] = before[slots[int(done.path[request, place])]]
        expected.append(after)
    return expected


def same_bits(pool: Any, expected: list[Tensor]) -> bool:
    return all(torch.equal(raw(buffer), bits) for buffer, bits in zip(buffers(pool), expected, strict=True))


@both_packages
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", POOLS)
def test_compaction_moves_what_a_loop_moves_and_nothing_else(package, name, page_size):
    for seed in range(4):
        arguments = scattered(name, page_size, seed)
        pool, req_to_token, rows, seq_lens, done = arguments
        expected, table = compacted_by_loop(*arguments), req_to_token.clone()
        package.compact_kv(*arguments)
        assert same_bits(pool, expected)
        assert torch.equal(req_to_token, table)
        for buffer, number in zip(buffers(pool), slot_maps(pool), strict=True):
            assert not bool(raw(buffer)[:page_size].any())  # the padding page stays zero
            for row, start, length in zip(rows.tolist(), seq_lens.tolist(), done.lengths.tolist(), strict=True):
                slots = [number(slot) for slot in req_to_token[row, start : start + length].tolist()]
                assert bool(buffer[slots].float().isfinite().all())


@both_packages
@pytest.mark.parametrize("name", POOLS)
def test_the_loop_sees_one_wrong_draft_and_one_more_row(package, name):
    arguments = scattered(name, 3, 0)
    pool, *_, done = arguments
    expected = compacted_by_loop(*arguments)
    request = int((done.lengths < done.path.shape[1]).nonzero()[-1])
    last = int(done.lengths[request]) - 1
    sibling = done.path.clone()
    sibling[request, last] = sibling[request, last] % (done.path.shape[1] - 1) + 1
    longer = done.path.clone()
    longer[request, last + 1] = done.path[request, last]
    for path, lengths in ((sibling, done.lengths), (longer, done.lengths + (longer != done.path).sum(dim=1))):
        broken = scattered(name, 3, 0)
        package.compact_kv(*broken[:-1], replace(done, path=path, lengths=lengths))
        assert not same_bits(broken[0], expected)
    package.compact_kv(*arguments)
    assert same_bits(pool, expected)


@both_packages
def test_the_window_pool_is_addressed_by_its_own_slots(package):
    arguments = scattered("two-pools", 3, 1)
    pool = arguments[0]
    expected = compacted_by_loop(*arguments)
    pool.full_to_swa_index_mapping.copy_(torch.arange(len(pool.full_to_swa_index_mapping)))
    package.compact_kv(*arguments)
    assert not same_bits(pool, expected)


@both_packages
def test_drafts_at_the_end_of_the_table_are_compacted_and_past_it_refused(package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    pool, req_to_token, rows, seq_lens, done = scattered("mha", 1, 0)
    wide = replace(done, path=torch.cat([done.path, torch.full((3, 4), -1)], dim=1))  # columns no table has, not used
    expected = compacted_by_loop(pool, req_to_token, rows, seq_lens, wide)
    package.compact_kv(pool, req_to_token, rows, seq_lens, wide)
    assert same_bits(pool, expected)
    with pytest.raises(BadPageTable, match="extra_tokens"):
        package.compact_kv(pool, req_to_token, rows, seq_lens + req_to_token.shape[1], done)
    with pytest.raises(BadBatch, match="seq_lens"):
        package.compact_kv(pool, req_to_token, rows, seq_lens[:2], done)


@both_packages
def test_compaction_of_a_pool_of_rows_says_to_pass_its_table(package):
    pool, req_to_token, rows, seq_lens, done = scattered("mha", 1, 0)
    expected = [bits.clone() for bits in map(raw, buffers(pool))]
    whole = ReqToTokenPool(size=4, context_len=req_to_token.shape[1])
    with pytest.raises(BadBatch, match=r"req_to_token is <.*ReqToTokenPool.*pass its \.req_to_token"):
        package.compact_kv(pool, whole, rows, seq_lens, done)
    with pytest.raises(BadBatch, match=r"seq_lens is \[5, 0, 1\]; it must be a tensor \[requests\]: pass one"):
        package.compact_kv(pool, req_to_token, rows, seq_lens.tolist(), done)
    assert same_bits(pool, expected)


# ---- one thing wrong at a time ---------------------------------------------------------------------------------------


@both_packages
@pytest.mark.parametrize("parents", [chain(5), star(5), [-1, 0, 0, 1, 1, 2, 3]], ids=str)
def test_one_ancestor_more_or_less_is_noticed(package, parents):
    """Every single entry of the ancestors matters: to the tree, and to the mask that verification takes."""
    tree, lens = package.build_tree([parents]), torch.tensor([2])
    assert is_tree_of(tree, [parents])
    for row, column in itertools.product(range(len(parents)), repeat=2):
        ancestors = tree.ancestors.clone()
        ancestors[0, row, column] ^= True
        broken = replace(tree, ancestors=ancestors)
        assert not is_tree_of(broken, [parents])
        assert broken.custom_mask(lens).tolist() != mask_by_loop([parents], lens.tolist())


def test_one_ancestor_less_lets_fa_fast_accept_what_walking_does_not():
    tree = fa_fast.build_tree([chain(3)])
    tokens, target = torch.tensor([[0, 1, 2]]), torch.tensor([[5, 2, 3]])  # draft 2 is right, its parent is not
    assert is_greedy_walk(fa_fast.verify_greedy(tree, tokens, target), [chain(3)], tokens, target)
    ancestors = tree.ancestors.clone()
    ancestors[0, 2, 1] = False
    broken = replace(tree, ancestors=ancestors, depth=ancestors.sum(dim=-1) - 1)
    assert not is_greedy_walk(fa_fast.verify_greedy(broken, tokens, target), [chain(3)], tokens, target)


@both_packages
def test_the_wrong_sibling_is_noticed(package):
    forest = [[-1, 0, 0, 1, 2]]
    tree = package.build_tree(forest)
    tokens, target = torch.tensor([[0, 1, 2, 3, 3]]), torch.tensor([[2, 3, 3, 7, 8]])
    done = package.verify_greedy(tree, tokens, target)
    assert done.path.tolist() == [[0, 2, 4, -1, -1]]
    for path, bonus in (([0, 1, 3, -1, -1], 7), ([0, 2, 3, -1, -1], 7), ([0, 1, 4, -1, -1], 8), ([0, 2, 4, -1, -1], 7)):
        wrong = replace(done, path=torch.tensor([path]), bonus=torch.tensor([bonus]))
        assert not is_greedy_walk(wrong, forest, tokens, target)
    for lengths in (2, 4):
        assert not is_greedy_walk(replace(done, lengths=torch.tensor([lengths])), forest, tokens, target)


# ---- without asking the device ---------------------------------------------------------------------------------------


def one_round(package: Any, device: str, seed: int = 0) -> list[Any]:
    """Every function once, on a device; seq_lens_cpu is the only value on the host. Returns every result."""
    gen, requests, topk, vocab, drafts = generator(seed), 2, 3, 9, 8

    def there(values: Tensor) -> Tensor:
        return values.to(device)

    beams = package.start(there(logprobs(requests, vocab, gen=gen)), topk)
    for _ in range(2):
        beams = package.grow(beams, there(logprobs(requests, topk, vocab, gen=gen)))
    tokens, tree = package.select(beams, there(torch.tensor([4, 5])), drafts)
    lens = torch.tensor([3, 6])
    mask, positions = tree.custom_mask(there(lens), lens), tree.positions(there(lens))
    again = package.build_tree(tree.parents)
    target, draft = (there(torch.randn(requests, drafts, vocab, generator=gen).softmax(-1)) for _ in range(2))
    uniforms = there(torch.rand(requests, drafts + 1, generator=gen))
    done = [
        package.verify_greedy(tree, tokens, target.argmax(dim=-1)),
        package.verify_sampled(tree, tokens, target, None, uniforms),
        package.verify_sampled(tree, tokens, target, draft, uniforms),
    ]
    moved = []
    for name in POOLS:
        pool, req_to_token, rows, seq_lens, accepted = on_device(scattered(name, 3, seed), device)
        package.compact_kv(pool, req_to_token, rows, seq_lens, accepted)
        moved += buffers(pool)
    records = [*done, beams, tree, again]
    values = [getattr(record, f.name) for record in records for f in fields(record)]
    return [tokens, mask, positions, *values, *moved, *[record.new_tokens(tokens) for record in done]]


def on_device(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """compact_kv's arguments on a device."""
    pool, *rest, done = arguments
    for part in (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,):
        for name in ("k_buffer", "v_buffer", "kv_buffer"):
            if hasattr(part, name):
                setattr(part, name, [buffer.to(device) for buffer in getattr(part, name)])
    if isinstance(pool, SWAKVPool):
        pool.full_to_swa_index_mapping = pool.full_to_swa_index_mapping.to(device)
    moved = Accepted(**{f.name: getattr(done, f.name).to(device) for f in fields(done)})
    return (pool, *[value.to(device) for value in rest], moved)


def test_fa_fast_never_reads_a_value(monkeypatch):
    """Tensors on the meta device have no values: reading one raises."""
    monkeypatch.setenv("FA_CHECK", "0")
    real, shapes = one_round(fa_fast, "cpu"), one_round(fa_fast, "meta")
    for value, shape in zip(real, shapes, strict=True):
        if isinstance(value, Tensor):
            assert shape.is_meta and (value.shape, value.dtype) == (shape.shape, shape.dtype)
        else:
            assert value == shape


@pytest.mark.parametrize("package", [fa_ref, fa_fast], ids=lambda package: package.__name__)
def test_the_meta_device_catches_a_read_value(package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")  # fa_fast's checks read values too
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        one_round(package, "meta")


def test_a_whole_round_is_the_same_in_both_packages():
    for ref, fast in zip(one_round(fa_ref, "cpu"), one_round(fa_fast, "cpu"), strict=True):
        if isinstance(ref, Tensor) and ref.is_floating_point():
            assert torch.equal(raw(ref), raw(fast))
        else:
            assert torch.equal(ref, fast) if isinstance(ref, Tensor) else ref == fast


@pytest.mark.gpu
def test_a_whole_round_never_synchronises_the_gpu():
    """The round's inputs are copied to the device while synchronising is allowed, then everything runs without."""
    expected = one_round(fa_fast, "cpu")
    torch.cuda.synchronize()
    for want, got in zip(expected, one_round(quiet(fa_fast), "cuda"), strict=True):
        if not isinstance(want, Tensor):
            assert want == got
        elif want.dtype == torch.float32 and not bool(want.isnan().any()):
            torch.testing.assert_close(got.cpu(), want)
        elif want.is_floating_point():
            assert torch.equal(raw(got.cpu()), raw(want))
        else:
            assert torch.equal(got.cpu(), want)


def quiet(package: Any) -> Any:
    """The package's functions with every synchronisation inside them an error."""

    class Quiet:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return getattr(package, name)(*args)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            return call

    return Quiet()


@pytest.mark.gpu
def test_acceptance_is_replayed_from_a_graph():
    gen, requests, drafts, vocab = generator(5), 4, 16, 32
    forest = torch.tensor([random_tree(drafts, gen) for _ in range(requests)])

    def inputs() -> list[Tensor]:
        probs = [torch.randn(requests, drafts, vocab, generator=gen).softmax(-1) for _ in range(2)]
        tokens = torch.randint(vocab, (requests, drafts), generator=gen)
        return [tokens, *probs, torch.rand(requests, drafts + 1, generator=gen)]

    first, second = inputs(), inputs()
    static = [value.cuda() for value in (forest, *first)]

    def run() -> Accepted:
        return fa_fast.verify_sampled(fa_fast.build_tree(static[0]), *static[1:])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        done = run()
    for value, new in zip(static[1:], second, strict=True):
        value.copy_(new)
    graph.replay()
    want = fa_ref.verify_sampled(fa_ref.build_tree(forest), *second)
    assert tensors(done) == tensors(want)
