"""Chunked local attention: query and key lie in the same chunk."""

from fa_ref.masks.mask import Mask


def local_chunk(size: int) -> Mask:
    """Same chunk of `size` logical positions. Chunks start at multiples of `size`, whatever the batch.

    >>> import torch
    >>> local_chunk(4)(torch.tensor(5), torch.arange(9)).nonzero().flatten().tolist()
    [4, 5, 6, 7]
    """
    return Mask(lambda q_pos, k_pos: k_pos // size == q_pos // size, f"chunk({size})")
