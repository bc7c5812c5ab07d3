"""Growing a tree of drafts, best guesses first, then keeping the best part of it.

At each step every beam proposes its topk likeliest continuations. The topk best of those topk * topk become the next
beams, but all are remembered: a token that missed the beam of its step may still beat the deepest tokens of a worse
path. A candidate's score is the log of the probability that the draft model gives to its whole path.
Reported as the dynamic draft tree of EAGLE-2 (Li et al. 2024).
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from fa_ref.api.speculative import (
    DraftBeams,
    DraftTree,
    check_logprobs,
    check_selection,
    check_shape,
    check_topk,
)
from fa_ref.speculative.tree import build_tree


def start(logprobs: Float[Tensor, "requests vocab"], topk: int) -> DraftBeams:
    """The first beams: the topk likeliest tokens after the root. Ties go to the smaller token id.

    >>> import torch
    >>> beams = start(torch.tensor([[0.5, 0.1, 0.4]]).log(), topk=2)
    >>> beams.tokens.tolist(), beams.scores.exp().tolist()
    ([[0, 2]], [[0.5, 0.4000000059604645]])

    Raises BadBatch for a topk larger than the vocabulary, or a logprob above 0. Twin: fa_fast.start.
    """
    check_shape("logprobs", logprobs, (-1, -1), "requests, vocab")
    check_topk(topk, logprobs.shape[1])
    check_logprobs(logprobs)
    scores, tokens = best(logprobs.float(), topk)
    root = torch.zeros_like(tokens)
    return DraftBeams(
        tokens=tokens,
        scores=scores,
        origin=root,
        candidate=root + torch.arange(topk, device=tokens.device),
        candidate_tokens=tokens,
        candidate_scores=scores,
        candidate_parents=root - 1,
        steps=1,
    )


def grow(beams: DraftBeams, logprobs: Float[Tensor, "requests topk vocab"]) -> DraftBeams:
    """One step deeper. logprobs[r, b]: the draft model's after beam b of request r.

    The new beams' `origin` says which old beam each of them continues: keys and values that the draft model keeps
    for each branch must follow it.

    >>> import torch
    >>> beams = start(torch.tensor([[0.5, 0.1, 0.4]]).log(), topk=2)
    >>> after = torch.tensor([[[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]]]).log()  # after token 0, after token 2
    >>> beams = grow(beams, after)
    >>> beams.tokens.tolist(), beams.origin.tolist()  # the paths 2 1 (0.4) and 0 2 (0.3)
    ([[1, 2]], [[1, 0]])
    >>> beams.candidate_parents.tolist()
    [[-1, -1, 0, 0, 1, 1]]
    """
    requests, topk = beams.tokens.shape
    check_shape("logprobs", logprobs, (requests, topk, -1), "requests, topk, vocab")
    check_topk(topk, logprobs.shape[2])
    check_logprobs(logprobs)
    gain, token = best(logprobs.float(), topk)
    score = rearrange(rearrange(beams.scores, "r b -> r b 1") + gain, "r b child -> r (b child)")
    token = rearrange(token, "r b child -> r (b child)")
    parent = repeat(beams.candidate, "r b -> r (b child)", child=topk)

    scores, child = best(score, topk)
    return DraftBeams(
        tokens=token.gather(1, child),
        scores=scores,
        origin=child // topk,
        candidate=beams.candidate_tokens.shape[1] + child,
        candidate_tokens=torch.cat([beams.candidate_tokens, token], dim=1),
        candidate_scores=torch.cat([beams.candidate_scores, score], dim=1),
        candidate_parents=torch.cat([beams.candidate_parents, parent], dim=1),
        steps=beams.steps + 1,
    )


def select(
    beams: DraftBeams, root_tokens: Int[Tensor, " requests"], num_draft_tokens: int
) -> tuple[Int[Tensor, "requests drafts"], DraftTree]:
    """The root and the num_draft_tokens - 1 best candidates of all steps: their tokens, and their tree.

    The choice is a tree without further care: a score is a sum of logprobs, none above 0, so no child outranks its
    parent, and among equals the earlier candidate wins. Listed in the order in which they were found, parents come
    before children and better siblings first.

    >>> import torch
    >>> beams = start(torch.tensor([[0.5, 0.1, 0.4]]).log(), topk=2)
    >>> beams = grow(beams, torch.tensor([[[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]]]).log())
    >>> tokens, tree = select(beams, torch.tensor([9]), num_draft_tokens=4)
    >>> tokens.tolist(), tree.parents.tolist()
    ([[9, 0, 2, 1]], [[-1, 0, 0, 2]])

    Raises BadBatch when there are fewer candidates. Twin: fa_fast.select.
    """
    check_selection(beams, root_tokens, num_draft_tokens)
    _, chosen = best(beams.candidate_scores, num_draft_tokens - 1)
    chosen = chosen.sort(dim=1).values
    parents = []
    for request, candidates in enumerate(chosen.tolist()):
        draft_of = {-1: 0} | {candidate: draft for draft, candidate in enumerate(candidates, start=1)}
        above = beams.candidate_parents[request].tolist()
        parents.append([-1] + [draft_of[above[candidate]] for candidate in candidates])
    tokens = torch.cat([rearrange(root_tokens, "r -> r 1"), beams.candidate_tokens.gather(1, chosen)], dim=1)
    tree = build_tree(
        torch.tensor(parents, dtype=torch.int64, device=tokens.device).reshape(len(parents), num_draft_tokens),
        max_depth=min(beams.steps, num_draft_tokens - 1),
    )
    return tokens, tree


def best(scores: Float[Tensor, "... n"], count: int) -> tuple[Float[Tensor, "... count"], Int[Tensor, "... count"]]:
    """The `count` largest, largest first, and where they are; of equals the earlier.

    >>> import torch
    >>> best(torch.tensor([-1.0, -0.5, -1.0]), 2)
    (tensor([-0.5000, -1.0000]), tensor([1, 0]))
    """
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]
