"""Draft tree: a draft token sees its ancestors and itself."""

from jaxtyping import Bool
from torch import Tensor

from fa_ref.masks.mask import Mask


def tree(ancestors: Bool[Tensor, "drafts drafts"], start: int) -> Mask:
    """`ancestors[i, j]`: draft i descends from draft j, or is j. Draft i is stored at position start + i.

    Positions outside start .. start + drafts - 1 are not in the tree: the answer is False.
    Use as `prefix(start) | tree(ancestors, start)`: all drafts see the whole prefix.

    >>> import torch
    >>> siblings = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    >>> tree(siblings, start=5).dense(torch.tensor([7]), torch.arange(4, 8)).int().tolist()
    [[0, 1, 0, 1]]
    """
    drafts = ancestors.shape[0]

    def predicate(q_pos: Tensor, k_pos: Tensor) -> Tensor:
        q, k = q_pos - start, k_pos - start
        inside = (q >= 0) & (q < drafts) & (k >= 0) & (k < drafts)
        return inside & ancestors[q.clamp(0, drafts - 1), k.clamp(0, drafts - 1)]

    return Mask(predicate, f"tree({drafts} drafts from {start})")
