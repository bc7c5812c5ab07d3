"""Pictures of masks, pools, page tables and plans: an SVG to look at, its ASCII twin to compare.

>>> from fa_ref import show
>>> from fa_ref.masks import causal
>>> show.mask_grid(causal, q_pos=1, k_pos=2)
causal
   k0 1
q1  # #
"""

from fa_ref.show.bars import bars
from fa_ref.show.chain import chain
from fa_ref.show.ladder import ladder
from fa_ref.show.local import virtual_batches
from fa_ref.show.mask import mask_diff, mask_grid, mask_row
from fa_ref.show.picture import Picture, side_by_side, stacked
from fa_ref.show.plan import plan
from fa_ref.show.pool import pool_strip
from fa_ref.show.ragged import ragged
from fa_ref.show.roofline import roofline
from fa_ref.show.source import Source, source
from fa_ref.show.table import page_table
from fa_ref.show.timeline import timeline
from fa_ref.show.tree import tree

__all__ = [
    "Picture",
    "Source",
    "bars",
    "chain",
    "ladder",
    "mask_diff",
    "mask_grid",
    "mask_row",
    "page_table",
    "plan",
    "pool_strip",
    "ragged",
    "roofline",
    "side_by_side",
    "source",
    "stacked",
    "timeline",
    "tree",
    "virtual_batches",
]
