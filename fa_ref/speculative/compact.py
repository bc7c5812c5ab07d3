"""After acceptance, the cache has gaps: rejected drafts sit between accepted ones. This closes them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fa_ref.api.speculative import Accepted, check_columns, check_compaction


def compact_kv(
    token_to_kv_pool: Any,
    req_to_token: Int[Tensor, "rows columns"],
    req_pool_indices: Int[Tensor, " requests"],
    seq_lens: Int[Tensor, " requests"],
    accepted: Accepted,
) -> None:
    """Move the keys and values of the accepted drafts, in every layer, to the slots right after the prefix.

    seq_lens: the cached tokens before the drafts. The draft path[i] is stored at column seq_lens + path[i] of the
    request's row; it moves to the slot of column seq_lens + i, its logical position. All slots of a request are read
    before one is written. Slots past the accepted tokens keep what they hold; req_to_token does not change.
    Afterwards the request has seq_lens + lengths cached tokens.

    >>> import fa_ref, torch
    >>> pool = fa_ref.MHAKVPool(size=8, page_size=1, dtype=torch.float32, head_num=1, head_dim=1, layer_num=1)
    >>> pool.k_buffer[0][:, 0, 0] = torch.arange(9.0)
    >>> rows = torch.tensor([[0, 0, 0, 0], [5, 8, 3, 7]])  # request row 1: one cached token, then drafts in 8, 3, 7
    >>> done = fa_ref.Accepted(path=torch.tensor([[0, 2, -1]]), lengths=torch.tensor([2]), bonus=torch.tensor([1]))
    >>> compact_kv(pool, rows, torch.tensor([1]), torch.tensor([1]), done)
    >>> pool.k_buffer[0][:, 0, 0].tolist()  # draft 2, in slot 7, moved to slot 3
    [0.0, 1.0, 2.0, 7.0, 4.0, 5.0, 6.0, 7.0, 8.0]

    Raises BadBatch for a wrong shape, BadPageTable for drafts past the last column. Twin: fa_fast.compact_kv.
    """
    check_compaction(req_to_token, req_pool_indices, seq_lens, accepted)
    check_columns(req_to_token, seq_lens, accepted)
    lengths, starts = accepted.lengths.tolist(), seq_lens.tolist()
    for request, row in enumerate(req_pool_indices.tolist()):
        path = accepted.path[request, : lengths[request]]
        slots = req_to_token[row, starts[request] :].long()
        move(token_to_kv_pool, slots[path], slots[: len(path)])


def move(pool: Any, source: Int[Tensor, " tokens"], target: Int[Tensor, " tokens"]) -> None:
    """Copy whole tokens between slots in all layers of a pool; with two pools, in both, each by its own slots."""
    if hasattr(pool, "full_kv_pool"):
        to_window = pool.full_to_swa_index_mapping.long()
        move(pool.full_kv_pool, source, target)
        move(pool.swa_kv_pool, to_window[source], to_window[target])
        return
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        tokens = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer  # fp8 moves as bytes
        tokens[target] = tokens[source].clone()
