"""Causal: a query sees itself and what came before."""

from fa_ref.masks.mask import Mask

causal = Mask(lambda q_pos, k_pos: k_pos <= q_pos, "causal")
"""Positions are logical, so a chunk of new tokens behind a cached prefix needs no special case:
give its queries the positions prefix .. prefix + new - 1 and the mask is bottom-right aligned by itself."""
