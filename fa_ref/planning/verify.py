"""TARGET_VERIFY: the target model reads T draft tokens a request at once, a chain or a tree.

A chain is an extend of T tokens. In a tree, draft i sees the whole prefix and its own ancestors: a prefix pass for
all drafts of a request, and a TreePass under the tree's mask.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from fa_ref.api import AttentionPass, BackendConfig, ForwardBatch, LayerKind, TreePass, VerifyInput, window_left
from fa_ref.api.bounds import pool_of
from fa_ref.planning.extend import plan_extend
from fa_ref.planning.page_table import slot_table
from fa_ref.planning.speculative import kind_mask, prefix_pass


def plan_verify(batch: ForwardBatch, config: BackendConfig, kind: LayerKind) -> tuple[AttentionPass | TreePass, ...]:
    """Without a custom_mask the drafts are a chain; with one, a tree. Query rows are request-major."""
    if _verify(batch).custom_mask is None:
        return plan_extend(batch.as_extend(), config, kind)
    ancestors = tree_mask(batch)
    depth = ancestors.sum(dim=-1) - 1
    pool, drafts = pool_of(kind, config), _verify(batch).draft_token_num
    position = rearrange(batch.seq_lens, "r -> r 1") + depth
    tree = TreePass(
        slots=draft_slots(batch, config, pool, drafts),
        mask=ancestors & kind_mask(kind, config, position, position),
        pool=pool,
        cut_to_window=window_left(config) if kind is LayerKind.SLIDING else -1,
    )
    return prefix_pass(batch, config, kind, drafts, depth), tree


def tree_mask(batch: ForwardBatch) -> Bool[Tensor, "requests drafts drafts"]:
    """The draft columns of the flat custom_mask: [r, i, j] is True where draft i descends from draft j, or is it.

    Request r's part is T rows of seq_lens[r] + T columns; it starts after the parts of the requests before it.
    """
    verify = _verify(batch)
    drafts, mask = verify.draft_token_num, verify.custom_mask
    assert mask is not None
    row_len = batch.seq_lens + drafts
    start = torch.cumsum(row_len * drafts, dim=0) - row_len * drafts
    draft = torch.arange(drafts, device=mask.device)
    row_start = rearrange(start, "r -> r 1 1") + rearrange(row_len, "r -> r 1 1") * rearrange(draft, "i -> i 1")
    return mask[row_start + rearrange(batch.seq_lens, "r -> r 1 1") + draft].bool()


def draft_slots(batch: ForwardBatch, config: BackendConfig, pool: str, drafts: int) -> Int32[Tensor, "requests drafts"]:
    """The slots of the drafts: the `drafts` columns of req_to_token that follow each request's prefix."""
    slots = slot_table(batch, config, pool)
    columns: Int[Tensor, "requests drafts"] = rearrange(batch.seq_lens, "r -> r 1") + torch.arange(
        drafts, device=slots.device
    )
    return slots.gather(1, columns.clamp(max=slots.shape[1] - 1).long())


def _verify(batch: ForwardBatch) -> VerifyInput:
    assert isinstance(batch.spec_info, VerifyInput)
    return batch.spec_info
