"""Prefix: the first keys, which every query sees."""

from fa_ref.masks.mask import Mask


def prefix(length: int) -> Mask:
    """Keys before `length`, whoever asks.

    >>> import torch
    >>> prefix(2)(torch.tensor(0), torch.arange(4)).tolist()
    [True, True, False, False]
    """
    return Mask(lambda q_pos, k_pos: (k_pos < length).expand((q_pos + k_pos).shape), f"prefix({length})")
