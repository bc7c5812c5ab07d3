"""A tree of drafts from the parent of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from fa_ref.api.speculative import DraftTree, check_depth, check_parents, depth_bound, parents_tensor


def build_tree(
    parents: Int[Tensor, "requests drafts"] | Sequence[Sequence[int]], max_depth: int | None = None
) -> DraftTree:
    """The tree in which draft i of request r hangs below draft parents[r, i]; -1 for the root, draft 0.

    max_depth: what the caller knows about the depth, a chain's T - 1 by default. Acceptance returns paths of
    max_depth + 1 drafts.

        0 --+-- 1 ---- 3
            +-- 2

    >>> tree = build_tree([[-1, 0, 0, 1]])
    >>> tree.ancestors[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    >>> tree.depth.tolist()
    [[0, 1, 1, 2]]

    Raises BadBatch for a parent that is not before its child, a second root, a wrong shape, or a draft deeper than
    max_depth. Twin: fa_fast.build_tree.
    """
    parents = parents_tensor(parents)
    check_parents(parents)
    requests, drafts = parents.shape
    ancestors = torch.zeros(requests, drafts, drafts, dtype=torch.bool, device=parents.device)
    for request, row in enumerate(parents.tolist()):
        for draft, parent in enumerate(row):
            if parent >= 0:
                ancestors[request, draft] = ancestors[request, parent]
            ancestors[request, draft, draft] = True
    depth = ancestors.sum(dim=-1) - 1
    max_depth = depth_bound(drafts, max_depth)
    check_depth(depth, max_depth)
    return DraftTree(parents=parents, ancestors=ancestors, depth=depth, max_depth=max_depth)
