"""Cross attention: every text query sees the encoder's keys, whatever their order."""

from fa_ref.masks.mask import Mask
from fa_ref.masks.prefix import prefix


def cross(encoder_len: int) -> Mask:
    """The first `encoder_len` keys of a request's row are the encoder's; all text queries see all of them.

    >>> import torch
    >>> cross(3)(torch.tensor([[0], [9]]), torch.arange(4)).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 0]]
    """
    return Mask(prefix(encoder_len).predicate, f"cross({encoder_len})")
