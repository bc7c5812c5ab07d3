"""Trees of drafts, acceptance and compaction as a few tensor operations, without asking the device anything.

The twins in fa_ref.speculative explain what is computed and why; here nothing depends on a value, so all of it can be
recorded in a graph. With FA_CHECK=1 values are checked too, which synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_ref.api.checks import device_checks_enabled
from fa_ref.api.speculative import (
    Accepted,
    DraftBeams,
    DraftTree,
    check_columns,
    check_compaction,
    check_depth,
    check_logprobs,
    check_parents,
    check_sampling,
    check_selection,
    check_shape,
    check_topk,
    depth_bound,
    parents_tensor,
)

# ---- trees -----------------------------------------------------------------------------------------------------


def build_tree(parents: Tensor | Sequence[Sequence[int]], max_depth: int | None = None) -> DraftTree:
    """The tree in which draft i of request r hangs below draft parents[r, i]; -1 for the root, draft 0.

    max_depth: what the caller knows about the depth, a chain's T - 1 by default; it sizes the accepted paths.
    Raises BadBatch for a wrong shape, and under FA_CHECK=1 for parents that make no tree. Twin: fa_ref.build_tree.

    >>> build_tree([[-1, 0, 0, 1]]).depth.tolist()
    [[0, 1, 1, 2]]
    """
    parents = parents_tensor(parents)
    drafts = parents.shape[1]
    max_depth = levels = depth_bound(drafts, max_depth)
    if device_checks_enabled():
        check_parents(parents)
        levels = drafts - 1  # enough to see a draft that is too deep
    # After n rounds row i holds its 2^n nearest ancestors and `jump` is the one 2^n levels up. The root, an ancestor
    # of every draft, jumps to itself.
    jump = parents.clamp(min=0)
    draft = torch.arange(drafts, device=parents.device)
    ancestors = (draft == draft[:, None]) | (draft == jump[:, :, None])
    for _ in range(max(levels - 1, 0).bit_length()):
        ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand_as(ancestors))
        jump = jump.gather(1, jump)
    depth = ancestors.sum(dim=-1) - 1
    if device_checks_enabled():
        check_depth(depth, max_depth)
    return DraftTree(parents=parents, ancestors=ancestors, depth=depth, max_depth=max_depth)


# ---- beams -----------------------------------------------------------------------------------------------------


def start(logprobs: Tensor, topk: int) -> DraftBeams:
    """The first beams: the topk likeliest tokens after the root, from logprobs [requests, vocab].

    Ties go to the smaller token id. Raises BadBatch for a topk larger than the vocabulary, and under FA_CHECK=1 for a
    logprob above 0. Twin: fa_ref.start.

    >>> start(torch.tensor([[0.5, 0.1, 0.4]]).log(), topk=2).tokens.tolist()
    [[0, 2]]
    """
    check_shape("logprobs", logprobs, (-1, -1), "requests, vocab")
    check_topk(topk, logprobs.shape[1])
    if device_checks_enabled():
        check_logprobs(logprobs)
    scores, tokens = _best(logprobs, topk)
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


def grow(beams: DraftBeams, logprobs: Tensor) -> DraftBeams:
    """One step deeper, from logprobs [requests, topk, vocab] after each beam.

    `origin` of the new beams says which old beam each continues. Raises BadBatch for a wrong shape, and under
    FA_CHECK=1 for a logprob above 0. Twin: fa_ref.grow.

    >>> beams = start(torch.tensor([[0.5, 0.1, 0.4]]).log(), topk=2)
    >>> grow(beams, torch.tensor([[[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]]]).log()).origin.tolist()
    [[1, 0]]
    """
    requests, topk = beams.tokens.shape
    check_shape("logprobs", logprobs, (requests, topk, -1), "requests, topk, vocab")
    check_topk(topk, logprobs.shape[2])
    if device_checks_enabled():
        check_logprobs(logprobs)
    gain, token = _best(logprobs, topk)
    score, token = (beams.scores[:, :, None] + gain).flatten(1), token.flatten(1)
    parent = beams.candidate.repeat_interleave(topk, dim=1)

    scores, child = _best(score, topk)
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


def select(beams: DraftBeams, root_tokens: Tensor, num_draft_tokens: int) -> tuple[Tensor, DraftTree]:
    """The root and the num_draft_tokens - 1 best candidates: tokens [requests, drafts], and their tree.

    Parents come before children, better siblings first. Raises BadBatch when there are fewer candidates.
    Twin: fa_ref.select.

    >>> beams = start(torch.tensor([[0.5, 0.1, 0.4]]).log(), topk=2)
    >>> beams = grow(beams, torch.tensor([[[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]]]).log())
    >>> tokens, tree = select(beams, torch.tensor([9]), num_draft_tokens=4)
    >>> tokens.tolist(), tree.parents.tolist()
    ([[9, 0, 2, 1]], [[-1, 0, 0, 2]])
    """
    check_selection(beams, root_tokens, num_draft_tokens)
    _, chosen = _best(beams.candidate_scores, num_draft_tokens - 1)
    chosen = chosen.sort(dim=1).values
    above = beams.candidate_parents.gather(1, chosen)
    # The chosen are sorted, so a parent's draft number is its place among them; the root's child, -1, finds place 0.
    draft = torch.searchsorted(chosen, above) + (above >= 0)
    parents = torch.cat([torch.full_like(root_tokens[:, None], -1, dtype=torch.int64), draft], dim=1)
    tokens = torch.cat([root_tokens[:, None], beams.candidate_tokens.gather(1, chosen)], dim=1)
    return tokens, build_tree(parents, max_depth=min(beams.steps, num_draft_tokens - 1))


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest in fp32 along the last axis, largest first, and where; of equals the earlier.

    topk leaves ties open, so it gets keys without ties: the bits of a float, made to sort like an integer, above the
    distance from the end. Adding 0.0 turns -0.0 into 0.0.
    """
    scores = scores.float() + 0.0
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    size = scores.shape[-1]
    keys = ordered * 2**32 + torch.arange(size - 1, -1, -1, device=scores.device)
    places = keys.topk(count, dim=-1).indices
    return scores.gather(-1, places), places


# ---- acceptance ------------------------------------------------------------------------------------------------


def verify_greedy(tree: DraftTree, tokens: Tensor, target_ids: Tensor) -> Accepted:
    """Keep the drafts that the target agrees with. target_ids [requests, drafts]: its prediction after each draft.

    A draft is kept if it and all its ancestors are what the target predicts after their parents. Raises BadBatch for
    a wrong shape. Twin: fa_ref.verify_greedy.

    >>> tree = build_tree([[-1, 0, 0, 1]])
    >>> done = verify_greedy(tree, torch.tensor([[5, 7, 8, 2]]), torch.tensor([[8, 2, 4, 0]]))
    >>> done.path.tolist(), done.bonus.tolist()
    ([[0, 2, -1, -1]], [4])
    """
    check_shape("tokens", tokens, tuple(tree.parents.shape), "requests, drafts")
    check_shape("target_ids", target_ids, tuple(tree.parents.shape), "requests, drafts")
    path, lengths, last = _walk(tree, tokens == target_ids.gather(1, tree.parents.clamp(min=0)))
    return Accepted(path=path, lengths=lengths, bonus=target_ids.gather(1, last).squeeze(1).long())


def verify_sampled(
    tree: DraftTree, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor
) -> Accepted:
    """Keep drafts by rejection sampling: the new tokens are distributed as if the target had drawn them.

    target_probs and draft_probs [requests, drafts, vocab]: after each draft, the target's distribution, and the one
    its children were drawn from, in order, without replacement (None: they were chosen). uniforms
    [requests, drafts + 1] in [0, 1): one a draft, the last for the bonus. Raises BadBatch for a wrong shape.
    Twin: fa_ref.verify_sampled.

    >>> tree, tokens = build_tree([[-1, 0, 0]]), torch.tensor([[2, 0, 1]])
    >>> target = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    >>> done = verify_sampled(tree, tokens, target, None, torch.tensor([[0.0, 0.6, 0.4, 0.9]]))
    >>> done.path.tolist(), done.bonus.tolist()
    ([[0, 2, -1]], [1])
    """
    check_sampling(tree, tokens, target_probs, draft_probs, uniforms)
    tokens = tokens.long()
    if draft_probs is None:
        takes, missing = _takes_of_chosen(tree, tokens, target_probs, uniforms), None
    else:
        takes, missing = _takes_of_drawn(tree, tokens, target_probs, draft_probs, uniforms)
    path, lengths, last = _walk(tree, takes)
    if missing is None:
        missing = _without_children(tree, tokens, target_probs, last)
    return Accepted(path=path, lengths=lengths, bonus=_draw(missing, uniforms[:, -1:]))


def _walk(tree: DraftTree, takes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(path, lengths, last draft [requests, 1]) when each draft of `takes` would be kept if the walk asked it.

    The walk stops asking at the first child that is kept, so of the willing children of a draft only the first
    counts; then the kept drafts are those with no unwilling ancestor.
    """
    requests, drafts = tree.parents.shape
    parents = tree.parents.clamp(min=0)
    draft = torch.arange(drafts, device=parents.device).expand(requests, drafts)
    willing = torch.where(takes & (draft > 0), draft, drafts)
    first = torch.full_like(parents, drafts).scatter_reduce(1, parents, willing, "amin")
    kept = (draft == first.gather(1, parents)) | (draft == 0)
    kept = ~(tree.ancestors & ~kept[:, None, :]).any(dim=-1)
    lengths = kept.sum(dim=1)
    width = tree.max_depth + 1
    path = torch.full((requests, width + 1), -1, dtype=torch.int64, device=parents.device)
    path = path.scatter(1, torch.where(kept, tree.depth, width), draft)[:, :width]  # the rest lands past the end
    return path, lengths, path.gather(1, lengths[:, None] - 1)


def _takes_of_chosen(tree: DraftTree, tokens: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Which chosen drafts the walk would keep: with probability p(c), over what its earlier siblings left of p."""
    drafts = tokens.shape[1]
    parents = tree.parents.clamp(min=0)
    place = torch.arange(drafts, device=tokens.device)
    p = target_probs[torch.arange(len(tokens), device=tokens.device)[:, None], parents, tokens].double()
    earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (place < place[:, None])
    p = p.masked_fill((earlier & (tokens[:, :, None] == tokens[:, None, :])).any(dim=-1), 0.0)  # proposed before
    left = target_probs.sum(dim=-1, dtype=torch.float64).gather(1, parents) - (earlier * p[:, None, :]).sum(dim=-1)
    return uniforms[:, :-1].double() * left < p


def _without_children(tree: DraftTree, tokens: Tensor, target_probs: Tensor, last: Tensor) -> Tensor:
    """The target's distribution after draft `last`, without the children of that draft: they were refused."""
    p = target_probs.take_along_dim(last[:, :, None], dim=1).squeeze(1).double()
    limit = torch.where(tree.parents == last, 0.0, torch.inf).double()
    left = p.scatter_reduce(1, tokens, limit, "amin")
    return torch.where(left.sum(dim=1, keepdim=True) > 0, left, p)


def _takes_of_drawn(
    tree: DraftTree, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Which drawn drafts the walk keeps, and what is missing of the target's distribution where it ends.

    One sweep: children come after their parent, so the walk of every request moves at most one draft further each
    time. `missing` and `offered` are its two distributions [requests, vocab] at the current draft.
    """
    takes = torch.zeros_like(tokens, dtype=torch.bool)
    current = torch.zeros_like(tokens[:, :1])
    missing, offered = _scaled(target_probs[:, 0]), _scaled(draft_probs[:, 0])
    for draft in range(1, tokens.shape[1]):
        asked = tree.parents[:, draft : draft + 1] == current
        token = tokens[:, draft : draft + 1]
        fits = uniforms[:, draft : draft + 1].double() * offered.gather(1, token) < missing.gather(1, token)
        take = asked & fits
        refuse = asked & ~fits
        rest = (missing - offered).clamp(min=0)
        rest = torch.where(refuse & (rest.sum(dim=1, keepdim=True) > 0), rest, missing)
        missing = torch.where(take, _scaled(target_probs[:, draft]), _scaled(rest))
        others = torch.where(refuse, offered.scatter(1, token, 0.0), offered)
        offered = torch.where(take, _scaled(draft_probs[:, draft]), _scaled(others))
        current = torch.where(take, draft, current)
        takes[:, draft : draft + 1] = take
    return takes, missing


def _scaled(mass: Tensor) -> Tensor:
    """[requests, vocab] as distributions, in fp64; nothing stays nothing."""
    mass = mass.double()
    total = mass.sum(dim=1, keepdim=True)
    return mass / torch.where(total > 0, total, 1.0)


def _draw(mass: Tensor, uniforms: Tensor) -> Tensor:
    """The token [requests] at `uniforms` [requests, 1] when the masses are laid end to end."""
    ends = torch.cumsum(mass, dim=1)
    token = torch.searchsorted(ends, uniforms.double() * ends[:, -1:], right=True)
    return token.squeeze(1).clamp(max=mass.shape[1] - 1)


# ---- compaction ------------------------------------------------------------------------------------------------


def compact_kv(
    token_to_kv_pool: Any, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, accepted: Accepted
) -> None:
    """Move the keys and values of the accepted drafts, in every layer, to the slots right after the prefix.

    seq_lens: the cached tokens before the drafts. The draft path[i], at column seq_lens + path[i] of the request's
    row, moves to the slot of column seq_lens + i. Places past the end of a path copy the padding slot onto itself.
    Raises BadBatch for a wrong shape, and under FA_CHECK=1 BadPageTable for drafts past the last column.
    Twin: fa_ref.compact_kv.

    >>> from fa_fast import MHAKVPool
    >>> pool = MHAKVPool(size=8, page_size=1, dtype=torch.float32, head_num=1, head_dim=1, layer_num=1)
    >>> pool.k_buffer[0][:, 0, 0] = torch.arange(9.0)
    >>> rows = torch.tensor([[0, 0, 0, 0], [5, 8, 3, 7]])
    >>> done = Accepted(path=torch.tensor([[0, 2, -1]]), lengths=torch.tensor([2]), bonus=torch.tensor([1]))
    >>> compact_kv(pool, rows, torch.tensor([1]), torch.tensor([1]), done)
    >>> pool.k_buffer[0][:, 0, 0].tolist()
    [0.0, 1.0, 2.0, 7.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    """
    check_compaction(req_to_token, req_pool_indices, seq_lens, accepted)
    if device_checks_enabled():
        check_columns(req_to_token, seq_lens, accepted)
    place = torch.arange(accepted.path.shape[1], device=seq_lens.device)
    real = place < accepted.lengths[:, None]
    rows = req_pool_indices.long()[:, None]

    def slots(offset: Tensor) -> Tensor:
        columns = torch.where(real, seq_lens[:, None] + offset, 0).long()
        return torch.where(real, req_to_token[rows, columns], 0).long().flatten()

    _move(token_to_kv_pool, slots(accepted.path), slots(place))


def _move(pool: Any, source: Tensor, target: Tensor) -> None:
    """Copy whole tokens between slots in all layers of a pool; with two pools, in both, each by its own slots."""
    if hasattr(pool, "full_kv_pool"):
        to_window = pool.full_to_swa_index_mapping.long()
        _move(pool.full_kv_pool, source, target)
        _move(pool.swa_kv_pool, to_window[source], to_window[target])
        return
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        tokens = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer  # fp8 moves as bytes
        tokens[target] = tokens[source]
