"""MLA's latent and rope parts as the one tensor that they often are slices of."""

from __future__ import annotations

from torch import Tensor


def joint_view(v: Tensor, k: Tensor) -> Tensor | None:
    """[v | k] along the last dim where both are slices of one cache (MLA's latent and rope), else None."""
    width = v.shape[-1] + k.shape[-1]
    adjacent = (
        v.dtype == k.dtype
        and v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and v.storage_offset() + v.shape[-1] == k.storage_offset()
        and v.stride() == k.stride()
        and all(stride >= width for stride in v.stride()[:-1])
    )
    return v.as_strided((*v.shape[:-1], width), v.stride(), v.storage_offset()) if adjacent else None
