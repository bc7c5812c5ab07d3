"""Planning: a ragged batch becomes a few kernel calls. One file a forward mode; this is the switch."""

from __future__ import annotations

from typing import Any

from fa_ref.api import AttentionPlan, BackendConfig, ForwardBatch, LayerKind
from fa_ref.api.checks import check_batch, new_tokens, values_to_compare
from fa_ref.api.support import layer_kinds, refuse_unplanned
from fa_ref.planning.decode import plan_decode
from fa_ref.planning.extend import plan_extend


def plan_batch(batch: Any, config: BackendConfig) -> AttentionPlan:
    """The kernel calls of a batch, for every kind of layer that `config` has.

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
    mode = batch.forward_mode
    kinds, refused = layer_kinds(config)
    if mode.is_idle():
        passes = dict.fromkeys(kinds, ())
    else:
        planner = plan_decode if mode.is_decode() else plan_extend
        passes = {kind: planner(batch, config, kind) for kind in kinds}
    return AttentionPlan(
        forward_mode=mode,
        num_tokens=new_tokens(batch),
        passes=passes,
        refused=refused,
        batch_size=batch.batch_size,
        values=values_to_compare(batch),
    )


__all__ = ["plan_batch"]
