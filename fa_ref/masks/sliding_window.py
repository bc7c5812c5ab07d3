"""Sliding window: keys at most `left` positions behind the query."""

from fa_ref.masks.mask import Mask


def sliding_window(left: int) -> Mask:
    """Keys no more than `left` positions before the query; says nothing about keys after it.

    `left` counts the keys *before* the query that stay visible, both ends inclusive: a window of W tokens
    that includes the query is left = W - 1.

    >>> import torch
    >>> sliding_window(3)(torch.tensor(10), torch.arange(11)).nonzero().flatten().tolist()
    [7, 8, 9, 10]
    """
    return Mask(lambda q_pos, k_pos: k_pos >= q_pos - left, f"window(left={left})")
