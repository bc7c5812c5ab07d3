"""Every mask of the backend, one a file, as predicates on two logical positions."""

from fa_ref.masks.causal import causal
from fa_ref.masks.cross import cross
from fa_ref.masks.everything import everything
from fa_ref.masks.local_chunk import local_chunk
from fa_ref.masks.mask import Mask
from fa_ref.masks.prefix import prefix
from fa_ref.masks.sliding_window import sliding_window
from fa_ref.masks.tree import tree

__all__ = ["Mask", "causal", "cross", "everything", "local_chunk", "prefix", "sliding_window", "tree"]
