"""Planning: a ragged batch becomes a few kernel calls. One file a forward mode; this is the switch."""

from __future__ import annotations

from typing import Any

from fa_ref.api import AttentionPass, AttentionPlan, BackendConfig, ForwardBatch, LayerKind, TreePass
from fa_ref.api.bounds import cascade, shared_prefix
from fa_ref.api.checks import new_tokens
from fa_ref.api.planned import checked_batch, plan_of
from fa_ref.api.support import layer_kinds
from fa_ref.planning.cross import plan_cross
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
    batch, text = checked_batch(batch, config, step)
    passes = {
        kind: _plan_kind(*((batch, config) if kind is LayerKind.CROSS else text), kind, step)
        for kind in layer_kinds(config)[0]
    }
    saving = shared_prefix(*text)
    if saving is not None:  # full layers only: windows and chunks never look that far back
        (whole,) = passes[LayerKind.FULL]
        assert isinstance(whole, AttentionPass)
        passes[LayerKind.FULL] = cascade(whole, saving.tokens, new_tokens(batch))
    extends = config.use_mla and batch.forward_mode.is_extend_or_draft_extend_or_mixed()
    given = given_keys(batch, config) if extends else None
    return plan_of(batch, config, passes, shared_prefix=saving, given=given)


def plan_steps(batch: Any, config: BackendConfig, steps: int) -> list[AttentionPlan]:
    """The plans of the first `steps` steps of draft decoding, made together so that they share page tables."""
    batch, text = checked_batch(batch, config, steps - 1)
    by_kind: dict[LayerKind, list[tuple[AttentionPass | TreePass, ...]]] = {
        kind: plan_draft_steps(*text, kind, steps) for kind in layer_kinds(config)[0] if kind is not LayerKind.CROSS
    }
    if config.is_encoder_decoder:
        by_kind[LayerKind.CROSS] = [plan_cross(batch, config)] * steps  # the same encoder keys at every step
    passes = [{kind: plans[step] for kind, plans in by_kind.items()} for step in range(steps)]
    return [plan_of(batch, config, found) for found in passes]


def _plan_kind(
    batch: ForwardBatch, config: BackendConfig, kind: LayerKind, step: int
) -> tuple[AttentionPass | TreePass, ...]:
    mode = batch.forward_mode
    if mode.is_idle():
        return ()
    if kind is LayerKind.CROSS:
        return plan_cross(batch, config)
    if mode.is_target_verify():
        return plan_verify(batch, config, kind)
    if mode.is_decode():
        return plan_decode(batch, config, kind) if batch.spec_info is None else plan_draft(batch, config, kind, step)
    return plan_extend(batch, config, kind)


__all__ = ["plan_batch", "plan_steps"]
