"""Which drafts the target keeps: a path from the root, and the target's own token after it.

Both ways walk down the tree and ask the children of the current node in order. Greedy acceptance keeps the child
that the target would have produced. Sampled acceptance keeps a child with a probability such that the resulting
tokens have exactly the target's distribution, whatever the draft model proposed (Leviathan et al. 2023, Chen et al.
2023; several candidates a node as in SpecInfer, Miao et al. 2024; without replacement as in Jeon et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fa_ref.api.speculative import Accepted, DraftTree, check_sampling, check_shape


def verify_greedy(
    tree: DraftTree, tokens: Int[Tensor, "requests drafts"], target_ids: Int[Tensor, "requests drafts"]
) -> Accepted:
    """Keep the drafts that the target agrees with. target_ids[r, i]: its prediction after draft i.

    From the root, go to the first child whose token is the prediction at the current node, until there is none. The
    prediction where the walk ends is the bonus.

        5 --+-- 7 ---- 2        the target says 8 after the root 5, then 4 after 8
            +-- 8

    >>> import fa_ref, torch
    >>> tree = fa_ref.build_tree([[-1, 0, 0, 1]])
    >>> done = verify_greedy(tree, torch.tensor([[5, 7, 8, 2]]), torch.tensor([[8, 2, 4, 0]]))
    >>> done.path.tolist(), done.lengths.tolist(), done.bonus.tolist()
    ([[0, 2, -1, -1]], [2], [4])

    Raises BadBatch for a wrong shape. Twin: fa_fast.verify_greedy.
    """
    check_shape("tokens", tokens, tuple(tree.parents.shape), "requests, drafts")
    check_shape("target_ids", target_ids, tuple(tree.parents.shape), "requests, drafts")
    paths, bonus = [], []
    for parents, token, target in zip(tree.parents.tolist(), tokens.tolist(), target_ids.tolist(), strict=True):
        path = [0]
        for draft in range(1, len(parents)):  # children come after their parent, so one sweep walks the tree
            if parents[draft] == path[-1] and token[draft] == target[path[-1]]:
                path.append(draft)
        paths.append(path)
        bonus.append(target[path[-1]])
    return accepted(tree, paths, bonus)


def verify_sampled(
    tree: DraftTree,
    tokens: Int[Tensor, "requests drafts"],
    target_probs: Float[Tensor, "requests drafts vocab"],
    draft_probs: Float[Tensor, "requests drafts vocab"] | None,
    uniforms: Float[Tensor, "requests drafts_plus_1"],
) -> Accepted:
    """Keep drafts by rejection sampling: the new tokens are distributed as if the target had drawn them.

    target_probs[r, i]: the target's distribution after draft i. draft_probs[r, i]: the one from which the children of
    draft i were drawn, in order, without replacement; None if they were not drawn but chosen.
    uniforms: in [0, 1); column i decides about draft i (column 0, the root's, is not read), the last column draws the
    bonus. Computed in fp64.

    A child c, proposed from q where the target wants p, is kept with probability min(1, p(c) / q(c)). If it is not,
    what is still missing of p is (p - q)+, and the next child was drawn from q without c; both are scaled to sum 1.
    A chosen child is one drawn from the distribution that always gives c.

    >>> import fa_ref, torch
    >>> tree, tokens = fa_ref.build_tree([[-1, 0, 0]]), torch.tensor([[2, 0, 1]])
    >>> target = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    >>> done = verify_sampled(tree, tokens, target, None, torch.tensor([[0.0, 0.6, 0.4, 0.9]]))
    >>> done.path.tolist(), done.bonus.tolist()  # 0.6 >= 0.5: not token 0; 0.4 < 0.25 / 0.5: token 1; after it, 1
    ([[0, 2, -1]], [1])

    Raises BadBatch for a wrong shape. Twin: fa_fast.verify_sampled.
    """
    check_sampling(tree, tokens, target_probs, draft_probs, uniforms)
    paths, bonus = [], []
    for request, parents in enumerate(tree.parents.tolist()):
        path, token, uniform = [0], tokens[request].tolist(), uniforms[request].double()
        wanted = scaled(target_probs[request, 0])
        offered = None if draft_probs is None else scaled(draft_probs[request, 0])
        for draft in range(1, len(parents)):
            if parents[draft] != path[-1]:
                continue
            c = token[draft]
            q = certainly(c, wanted) if offered is None else offered
            if uniform[draft] * q[c] < wanted[c]:
                path.append(draft)
                wanted = scaled(target_probs[request, draft])
                offered = None if draft_probs is None else scaled(draft_probs[request, draft])
            else:
                wanted = scaled((wanted - q).clamp(min=0), otherwise=wanted)
                offered = None if offered is None else scaled(offered * (1 - certainly(c, offered)))
        paths.append(path)
        bonus.append(draw(wanted, uniform[-1]))
    return accepted(tree, paths, bonus)


def scaled(
    mass: Float[Tensor, " vocab"], otherwise: Float64[Tensor, " vocab"] | None = None
) -> Float64[Tensor, " vocab"]:
    """`mass` as a distribution; `otherwise` (or nothing at all) where rounding left none."""
    total = mass.double().sum()
    if total > 0:
        return mass.double() / total
    return mass.double() if otherwise is None else otherwise


def certainly(token: int, like: Float64[Tensor, " vocab"]) -> Float64[Tensor, " vocab"]:
    """The distribution that always gives `token`."""
    return torch.zeros_like(like).index_fill(0, torch.tensor([token], device=like.device), 1.0)


def draw(probs: Float64[Tensor, " vocab"], uniform: Float64[Tensor, ""]) -> int:
    """The token at `uniform` when the probabilities are laid end to end; one of probability 0 is never met.

    >>> import torch
    >>> draw(torch.tensor([0.25, 0.0, 0.75]).double(), torch.tensor(0.25).double())
    2
    """
    ends = torch.cumsum(probs, dim=0)
    return min(int((ends <= uniform * ends[-1]).sum()), len(probs) - 1)


def accepted(tree: DraftTree, paths: Sequence[Sequence[int]], bonus: Sequence[int]) -> Accepted:
    """The record of one path a request, padded to the width that all trees of this depth share."""
    width, device = tree.max_depth + 1, tree.parents.device
    padded = [[*path, *[-1] * (width - len(path))] for path in paths]
    return Accepted(
        path=torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(paths), width),
        lengths=torch.tensor([len(path) for path in paths], dtype=torch.int64, device=device),
        bonus=torch.tensor(bonus, dtype=torch.int64, device=device),
    )
