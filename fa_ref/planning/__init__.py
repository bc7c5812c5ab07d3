"""Planning: a ragged batch becomes a few kernel calls. One file a forward mode; this is the switch."""

from __future__ import annotations

from typing import Any

from fa_ref.api import AttentionPass, AttentionPlan, BackendConfig, ForwardBatch, LayerKind, TreePass
from fa_ref.api.bounds import shared_prefix
from fa_ref.api.checks import check_batch, check_step, new_tokens, values_to_compare
from fa_ref.api.support import layer_kinds, refuse_unplanned
from fa_ref.planning.cascade import cascade
from fa_ref.planning.decode import plan_decode
from fa_ref.planning.draft import plan_draft, plan_draft_steps
from fa_ref.planning.extend import given_keys, plan_extend
from fa_ref.planning.verify import plan_verify


def plan_batch(batch: Any, config: BackendConfig, step: int = 0) -> AttentionPlan:
    """The kernel calls of a batch, for every kind of layer that `config` has; `step` of draft decoding, from 0.

    Raises BadBatch or BadPageTable for a batch that contradicts itself, and UnsupportedByProvider for modes
    that are not planned. The twin in fa_fast builds the same plan on the device.

    >>> import torch
    >>> from fa_ref import ForwardMode, MHAKVPool, ReqToTokenPool
    >>> rows = ReqToTokenPool(size=2, context_len=8)
    >>> kv = MHAKVPool(size=16, page_size=4, dtype=torch.float32, head_num=1, head_dim=8, layer_num=1)
    >>> config = BackendConfig(device="cpu", dtype=torch.float32, kv_cache_dtype=torch.float32, page_size=4,
    ...                        context_len=8, req_to_token_pool=rows, token_to_kv_pool=kv)
    >>> rows.req_to_token[1, :6] = torch.tensor([8, 9, 10, 11, 4, 5])
    >>> batch = ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=1, req_pool_indices=torch.tensor([1]),
    ...                      seq_lens=torch.tensor([6]), seq_lens_cpu=torch.tensor([6]))
    >>> plan_batch(batch, config).for_kind(LayerKind.FULL)[0].pages(0)
    [2, 1]
    """
    batch = ForwardBatch.of(batch)
    refuse_unplanned(batch)
    check_batch(batch, config)
    check_step(batch, step)
    mode = batch.forward_mode
    kinds, refused = layer_kinds(config)
    passes = {kind: _plan_kind(batch, config, kind, step) for kind in kinds}
    saving, extends = shared_prefix(batch, config), batch.forward_mode.is_extend_or_draft_extend_or_mixed()
    if saving is not None:  # full layers only: windows and chunks never look that far back
        (whole,) = passes[LayerKind.FULL]
        assert isinstance(whole, AttentionPass)
        passes[LayerKind.FULL] = cascade(whole, saving.tokens, new_tokens(batch))
    return AttentionPlan(
        forward_mode=mode,
        num_tokens=new_tokens(batch),
        passes=passes,
        refused=refused,
        shared_prefix=saving,
        given=given_keys(batch, config) if config.use_mla and extends else None,
        batch_size=batch.batch_size,
        values=values_to_compare(batch),
    )


def plan_steps(batch: Any, config: BackendConfig, steps: int) -> list[AttentionPlan]:
    """The plans of the first `steps` steps of draft decoding, made together so that they share page tables."""
    batch = ForwardBatch.of(batch)
    refuse_unplanned(batch)
    check_batch(batch, config)
    check_step(batch, steps - 1)
    kinds, refused = layer_kinds(config)
    by_kind = {kind: plan_draft_steps(batch, config, kind, steps) for kind in kinds}
    return [
        AttentionPlan(
            forward_mode=batch.forward_mode,
            num_tokens=new_tokens(batch),
            passes={kind: plans[step] for kind, plans in by_kind.items()},
            refused=refused,
            batch_size=batch.batch_size,
            values=values_to_compare(batch),
        )
        for step in range(steps)
    ]


def _plan_kind(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int
) -> tuple[AttentionPass | TreePass, ...]:
    mode = batch.forward_mode
    if mode.is_idle():
        return ()
    if mode.is_target_verify():
        return plan_verify(batch, config, kind)
    if mode.is_decode():
        return plan_decode(batch, config, kind) if batch.spec_info is None else plan_draft(batch, config, kind, step)
    return plan_extend(batch, config, kind)


__all__ = ["plan_batch", "plan_steps"]
