"""Speculative decoding around attention: grow a tree of drafts, accept part of it, and close the gaps in the cache.

One round of a request: the draft model grows `beams`, `select` cuts them to a tree of T drafts, the target reads the
tree in one TARGET_VERIFY pass, `verify_greedy` or `verify_sampled` picks a path, `compact_kv` moves its keys
and values to where the next round expects them.
"""

from fa_ref.api.speculative import Accepted, DraftBeams, DraftTree
from fa_ref.speculative.accept import verify_greedy, verify_sampled
from fa_ref.speculative.beams import grow, select, start
from fa_ref.speculative.compact import compact_kv
from fa_ref.speculative.tree import build_tree

__all__ = [
    "Accepted",
    "DraftBeams",
    "DraftTree",
    "build_tree",
    "compact_kv",
    "grow",
    "select",
    "start",
    "verify_greedy",
    "verify_sampled",
]
