"""Checks of a batch before it is planned, and of a layer before it writes.

Host values always; device values with FA_CHECK=1, and on a CPU also what keeps every read and write inside the pool.
"""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fa_ref.api.batch import DraftInput, ForwardBatch, VerifyInput
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadConfig, BadPageTable
from fa_ref.api.layer import AttentionLayer, layer_kind, window_left
from fa_ref.api.modes import ForwardMode, LayerKind
from fa_ref.api.plan import AttentionPass, AttentionPlan, TreePass
from fa_ref.api.support import refuse_unplanned_fields

_INTEGERS = (torch.int32, torch.int64)


def device_checks_enabled() -> bool:
    """True under FA_CHECK=1: values on the device are checked too, which synchronises."""
    return os.environ.get("FA_CHECK", "0") == "1"


def new_tokens(batch: ForwardBatch) -> int:
    """Query rows of the batch, from host values only."""
    mode = batch.forward_mode
    if mode.is_idle():
        return 0
    if mode.is_target_verify():
        return batch.batch_size * _verify(batch).draft_token_num
    if mode.is_decode():
        return batch.batch_size * max(1, getattr(batch.spec_info, "topk", 1))
    if batch.extend_seq_lens_cpu is not None:
        return sum(int(n) for n in batch.extend_seq_lens_cpu)
    if batch.out_cache_loc is not None:
        return batch.out_cache_loc.shape[0]
    raise BadBatch(
        f"{mode.name} needs extend_seq_lens_cpu or out_cache_loc to know its number of new tokens; both are None"
    )


def draft_steps(batch: ForwardBatch) -> int:
    """Steps whose slots a draft batch's out_cache_loc [request, branch, step] holds; 0 without drafting."""
    return (
        batch.spec_info.num_steps if isinstance(batch.spec_info, DraftInput) and batch.forward_mode.is_decode() else 0
    )


def columns_of_drafts(batch: ForwardBatch) -> int:
    """Columns of req_to_token past seq_lens that the batch's draft tokens use."""
    if batch.forward_mode.is_target_verify():
        return _verify(batch).draft_token_num
    return draft_steps(batch) if getattr(batch.spec_info, "topk", 0) == 1 else 0


def _verify(batch: ForwardBatch) -> VerifyInput:
    if not isinstance(batch.spec_info, VerifyInput):
        raise BadBatch(f"TARGET_VERIFY needs spec_info=VerifyInput(...), got {batch.spec_info!r}")
    return batch.spec_info


def check_batch(batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadBatch or BadPageTable if the batch contradicts itself or its pools."""
    if batch.forward_mode.is_idle():
        return
    _check_drafts(batch)
    _check_shapes(batch, config)
    _check_host_lengths(batch, config)
    if batch.forward_mode.is_target_verify():
        _check_custom_mask(batch, config)
    if torch.device(config.device).type == "cpu" or device_checks_enabled():
        _check_ranges(batch, config)
    if device_checks_enabled():
        _check_device_values(batch, config)


def check_step(batch: ForwardBatch, step: int) -> None:
    """Raise BadBatch for a step that the batch's draft does not have."""
    steps = draft_steps(batch)
    if steps and not 0 <= step < steps:
        raise BadBatch(f"step {step} of a draft of {steps} steps, which are counted from 0; raise num_steps")


def _check_drafts(batch: ForwardBatch) -> None:
    mode, info = batch.forward_mode, batch.spec_info
    if mode.is_decode() and isinstance(info, DraftInput) and min(info.topk, info.num_steps) < 1:
        raise BadBatch(f"spec_info has topk={info.topk}, num_steps={info.num_steps}; both must be at least 1")
    if mode.is_target_verify() and _verify(batch).draft_token_num < 1:
        raise BadBatch(f"spec_info has draft_token_num={_verify(batch).draft_token_num}; it must be at least 1")


def _check_custom_mask(batch: ForwardBatch, config: BackendConfig) -> None:
    mask, drafts, topk = _verify(batch).custom_mask, _verify(batch).draft_token_num, _verify(batch).topk
    if mask is None:
        if topk > 1:
            raise BadBatch(f"spec_info has topk={topk} without a custom_mask; a tree needs one, a chain has topk=1")
        return
    if mask.device.type != torch.device(config.device).type:
        raise BadBatch(f"custom_mask is on {mask.device}, the backend on {config.device}; move the batch there")
    lens = batch.seq_lens if device_checks_enabled() else batch.seq_lens_cpu
    entries = mask.numel() if lens is None else sum((n + drafts) * drafts for n in lens.tolist())
    if mask.dtype != torch.bool or mask.shape != (entries,):
        raise BadBatch(
            f"custom_mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool and flat, {entries} entries: "
            f"for each request {drafts} rows of seq_lens + {drafts} columns"
        )


def _check_shapes(batch: ForwardBatch, config: BackendConfig) -> None:
    names = ["req_pool_indices", "seq_lens"]
    if batch.forward_mode.is_extend_or_draft_extend_or_mixed():
        names += ["extend_seq_lens"]
    device = torch.device(config.device)
    for name in names:
        value = getattr(batch, name)
        if not isinstance(value, Tensor):
            raise BadBatch(f"{batch.forward_mode.name} needs {name} as a tensor, got {value!r}")
        if value.dtype not in _INTEGERS or value.shape != (batch.batch_size,):
            raise BadBatch(
                f"{name} is {value.dtype} of shape {tuple(value.shape)}; it must be int32 or int64 of shape "
                f"({batch.batch_size},), one entry a request"
            )
        if value.device.type != device.type:
            raise BadBatch(f"{name} is on {value.device}, the backend on {device}; move the batch there")
    host = batch.seq_lens_cpu
    if host is not None and (not isinstance(host, Tensor) or host.dtype not in _INTEGERS or host.device.type != "cpu"):
        raise BadBatch(f"seq_lens_cpu is {host!r}; it must be a list or an integer tensor on the CPU, or None")
    loc = batch.out_cache_loc
    if loc is not None and not isinstance(loc, Tensor):
        raise BadBatch(f"out_cache_loc is {loc!r}; it must be a tensor, one slot a new token")
    if loc is not None and (loc.dtype not in _INTEGERS or loc.dim() != 1):
        raise BadBatch(
            f"out_cache_loc is {loc.dtype} of shape {tuple(loc.shape)}; it must be int32 or int64, one slot a new token"
        )
    if loc is not None and loc.device.type != device.type:
        raise BadBatch(f"out_cache_loc is on {loc.device}, the backend on {device}; move the batch there")


def _check_host_lengths(batch: ForwardBatch, config: BackendConfig) -> None:
    width = req_to_token(batch, config).shape[1]
    drafts = columns_of_drafts(batch)
    lens = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    if lens is not None:
        if len(lens) != batch.batch_size:
            raise BadBatch(f"seq_lens_cpu has {len(lens)} entries for {batch.batch_size} requests")
        least = 1 if batch.forward_mode.is_decode() and batch.spec_info is None else 0
        for request, length in enumerate(lens):
            if length < least:
                raise BadBatch(
                    f"request {request} has seq_lens {length} in {batch.forward_mode.name}; the length counts "
                    f"the new token, so it is at least {least}"
                )
            if length + drafts > width:
                raise BadPageTable(
                    f"request {request} has {length + drafts} keys, its row of req_to_token holds {width}; "
                    "raise context_len or cut the request"
                )
    if batch.forward_mode.is_extend_or_draft_extend_or_mixed():
        _check_extend(batch, config, lens)
    tokens, loc = new_tokens(batch), batch.out_cache_loc
    slots = tokens * (draft_steps(batch) or 1)
    if loc is not None and loc.shape[0] != slots:
        raise BadBatch(
            f"out_cache_loc has {loc.shape[0]} slots, this batch needs {slots}: one a new token, and when drafting one "
            "a request, branch and step"
        )


def _check_extend(batch: ForwardBatch, config: BackendConfig, lens: list[int] | None) -> None:
    extend, prefix = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    for name, host in (("extend_seq_lens_cpu", extend), ("extend_prefix_lens_cpu", prefix)):
        if host is not None and len(host) != batch.batch_size:
            raise BadBatch(f"{name} has {len(host)} entries for {batch.batch_size} requests")
        if host is not None and any(int(n) < 0 for n in host):
            raise BadBatch(f"{name} is {list(host)}; no request has fewer than 0 tokens")
    if extend is None and config.deterministic:
        raise BadBatch(
            "deterministic mode plans single-token requests apart and needs extend_seq_lens_cpu, which is None"
        )
    if extend is None or lens is None:
        return
    for request, (new, total) in enumerate(zip(extend, lens, strict=True)):
        cached = total - new if prefix is None else prefix[request]
        if new < 0 or cached < 0 or cached + new != total:
            raise BadBatch(f"request {request}: prefix {cached} + new {new} tokens is not its seq_lens {total}")


def _check_ranges(batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadPageTable for a row or a slot out of range: rows, slots of the requests' keys, slots to write."""
    table, rows = req_to_token(batch, config), batch.req_pool_indices
    available = kv_slots(batch.token_to_kv_pool or config.token_to_kv_pool)
    if batch.out_cache_loc is not None:
        _check_slots("out_cache_loc", batch.out_cache_loc, available)
    if not rows.numel():
        return
    if not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
        raise BadPageTable(
            f"req_pool_indices span {int(rows.min())}..{int(rows.max())}, req_to_token has {table.shape[0]} rows"
        )
    longest = min(max(int(batch.seq_lens.max()), 0), table.shape[1])
    used = torch.arange(longest, device=table.device) < batch.seq_lens[:, None]
    slots = torch.where(used, table[rows.long(), :longest], 0)
    wrong = torch.nonzero(((slots < 0) | (slots >= available)).any(dim=1))
    if wrong.numel():
        request = int(wrong[0])
        _check_slots(f"request {request}", slots[request], available)


def _check_device_values(batch: ForwardBatch, config: BackendConfig) -> None:
    table = req_to_token(batch, config)
    copies = [
        ("seq_lens", batch.seq_lens, batch.seq_lens_cpu),
        ("extend_seq_lens", batch.extend_seq_lens, batch.extend_seq_lens_cpu),
        ("extend_prefix_lens", batch.extend_prefix_lens, batch.extend_prefix_lens_cpu),
    ]
    for name, device, host in copies:
        if device is not None and host is not None and device.tolist() != [int(n) for n in host]:
            raise BadBatch(f"{name} {device.tolist()} and {name}_cpu {[int(n) for n in host]} differ")
    slots, drafts = kv_slots(batch.token_to_kv_pool or config.token_to_kv_pool), columns_of_drafts(batch)
    is_tree = getattr(batch.spec_info, "custom_mask", None) is not None  # its drafts are read slot by slot
    for request, (row, length) in enumerate(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)):
        if not 0 <= length <= table.shape[1] - drafts:
            raise BadPageTable(f"request {request} has {length + drafts} keys, its row holds {table.shape[1]}")
        used = table[row, : length + drafts]
        _check_slots(f"request {request}", used, slots)
        _check_pages(request, used[:length] if is_tree else used, config.page_size)
    shared = table[batch.req_pool_indices.long(), : batch.shared_prefix_len]
    if bool((shared != shared[:1]).any()):
        raise BadPageTable(
            f"shared_prefix_len is {batch.shared_prefix_len}, but the rows of the batch differ in these first columns; "
            "requests share a prefix only if they keep it in the same slots"
        )
    if batch.spec_info is None:
        _check_new_tokens(batch, config)


def _check_new_tokens(batch: ForwardBatch, config: BackendConfig) -> None:
    """Lengths that add up; new tokens in slots of their own at the end of their rows; a window pool that has both."""
    lens = batch.seq_lens.tolist()
    new = [1] * len(lens) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()  # type: ignore[union-attr]
    prefix = batch.extend_prefix_lens
    cached = [s - n for s, n in zip(lens, new, strict=True)]
    if prefix is not None and not batch.forward_mode.is_decode() and prefix.tolist() != cached:
        raise BadBatch(
            f"extend_prefix_lens {prefix.tolist()} and extend_seq_lens {new} do not add up to seq_lens {lens}"
        )
    if any(n < 0 for n in (*new, *cached)):
        raise BadBatch(f"extend_seq_lens {new} must lie between 0 and seq_lens {lens}, request by request")
    if sum(new) != new_tokens(batch):
        raise BadBatch(f"extend_seq_lens {new} are {sum(new)} new tokens, out_cache_loc has {new_tokens(batch)} slots")
    table = req_to_token(batch, config)
    rows = [table[row, :length] for row, length in zip(batch.req_pool_indices.tolist(), lens, strict=True)]
    if batch.out_cache_loc is not None:
        _check_written(batch.out_cache_loc, rows, new)
    if config.is_hybrid_swa:
        for request, (row, first) in enumerate(zip(rows, cached, strict=True)):
            _check_window_slots(batch, config, request, row, first)


def _check_written(loc: Tensor, rows: list[Tensor], new: list[int]) -> None:
    ends = list(accumulate(new))
    for request, (row, count, end) in enumerate(zip(rows, new, ends, strict=True)):
        mine = loc[end - count : end].tolist()
        if mine != row[len(row) - count :].tolist():
            raise BadBatch(
                f"request {request}: out_cache_loc has slots {mine} for its new tokens, its row of req_to_token "
                f"{row[len(row) - count :].tolist()} at the same positions; write both from one allocation"
            )
    slots, writers = loc[loc > 0].unique(return_counts=True)  # slot 0 is padding, which any number of rows may write
    if (writers > 1).any():
        raise BadPageTable(f"slots {slots[writers > 1].tolist()} are written by two requests of the batch")
    # A prefix that another request of this batch writes may be read in the same step, at the same positions.
    top = max((int(s.max()) for s in (loc, *rows) if len(s)), default=0)
    written = torch.full((top + 1,), -1, device=loc.device)
    for row, count in zip(rows, new, strict=True):
        position = torch.arange(len(row), device=loc.device)
        written[row[len(row) - count :].long()] = position[len(row) - count :]
    for request, row in enumerate(rows):
        at, position = written[row.long()], torch.arange(len(row), device=loc.device)
        wrong = torch.nonzero((at >= 0) & (at != position) & (row > 0))
        if wrong.numel():
            first = int(wrong[0])
            raise BadPageTable(
                f"request {request}: slot {int(row[first])} of its position {first} is written in this step, for "
                f"position {int(at[first])}; a slot holds one token"
            )


def _check_window_slots(batch: ForwardBatch, config: BackendConfig, request: int, row: Tensor, query: int) -> None:
    """What window and chunk layers can read from position `query` on must be in the window pool, page by page."""
    pool: Any = batch.token_to_kv_pool or config.token_to_kv_pool
    firsts = [max(0, query - window_left(config))] if window_left(config) >= 0 else []
    if config.attention_chunk_size is not None:
        firsts.append(query // config.attention_chunk_size * config.attention_chunk_size)
    for first in firsts:
        start = first // config.page_size * config.page_size
        slots = pool.full_to_swa_index_mapping[row[start:].long()]
        gone = torch.nonzero((slots < config.page_size) & (row[start:] >= config.page_size))
        if gone.numel():
            raise BadPageTable(
                f"request {request}: position {start + int(gone[0])} is not in the window pool, and a window layer "
                f"reads its page; evict a page of {config.page_size} only when all its tokens left the window"
            )
        _check_pages(request, slots, config.page_size, start)


def _check_slots(owner: str, slots: Tensor, available: int) -> None:
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < available:
        raise BadPageTable(
            f"{owner}: slots span {int(slots.min())}..{int(slots.max())}, the pool holds 0..{available - 1}"
        )


def _check_pages(request: int, slots: Tensor, page_size: int, start: int = 0) -> None:
    """Within a page, consecutive positions (from `start`) must lie in consecutive slots, from its first slot on."""
    offset = torch.arange(slots.shape[0], device=slots.device) % page_size
    wrong = torch.nonzero(slots % page_size != offset)
    first = slots[torch.arange(slots.shape[0], device=slots.device) - offset]
    wrong = torch.cat([wrong, torch.nonzero(slots - first != offset)])
    if wrong.numel():
        position = int(wrong[0])
        raise BadPageTable(
            f"request {request}: position {start + position} is in slot {int(slots[position])}, which is not offset "
            f"{position % page_size} of its page of {page_size}; allocate whole pages to a request"
        )


def req_to_token(batch: ForwardBatch, config: BackendConfig) -> Tensor:
    """The table of slots that this batch's rows index."""
    return (batch.req_to_token_pool or config.req_to_token_pool).req_to_token


def kv_slots(pool: Any) -> int:
    """Slots of the (full) pool, padding page included."""
    inner = getattr(pool, "full_kv_pool", pool)
    if hasattr(inner, "full_to_swa_index_mapping"):
        return inner.full_to_swa_index_mapping.shape[0]
    buffers = getattr(inner, "k_buffer", getattr(inner, "kv_buffer", None))
    return (inner.get_kv_buffer(getattr(inner, "start_layer", 0))[0] if buffers is None else buffers[0]).shape[0]


def check_layer_inputs(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: Any,
    tokens: int,
    config: BackendConfig,
    sinks: Tensor | None = None,
) -> None:
    """Raise BadBatch unless q, k, v are [tokens, heads * dim] (or [tokens, heads, dim]) of this layer and config.

    Called before anything is written, so that a refused call leaves the cache as it was.
    """
    expected = {
        "q": (q, layer.tp_q_head_num * layer.head_dim),
        "k": (k, layer.tp_k_head_num * layer.head_dim),
        "v": (v, layer.tp_v_head_num * layer.v_head_dim),
    }
    for name, (value, width) in expected.items():
        if value is not None or name == "q":
            check_value(layer, name, value, tokens, width, config)
    if (k is None) != (v is None):
        raise BadBatch(f"layer {layer.layer_id}: pass both k and v, or neither to attend to the cache as it is")
    check_sinks(sinks, layer, config)


def check_value(
    layer: Any, name: str, value: object, rows: int, width: int, config: BackendConfig, counted: str = "new tokens"
) -> None:
    """Raise BadBatch unless `value` is [rows, width], or [rows, heads, dim] of that size, as the config runs it."""
    device = torch.device(config.device).type
    if not isinstance(value, Tensor):
        raise BadBatch(f"layer {layer.layer_id}: {name} is {value!r}; it must be a tensor")
    if value.shape[:1].numel() != rows or value.numel() != rows * width:
        raise BadBatch(
            f"layer {layer.layer_id}: {name} has shape {tuple(value.shape)}; this batch has {rows} "
            f"{counted}, so {name} must be [{rows}, {width}] or [{rows}, heads, dim] of that size"
        )
    if value.device.type != device or value.dtype != config.dtype:
        raise BadBatch(
            f"layer {layer.layer_id}: {name} is {value.dtype} on {value.device}; this backend runs {config.dtype} on "
            f"{device}, and q, k and v must agree with it"
        )
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise BadBatch(
            f"layer {layer.layer_id}: {name} of shape {tuple(value.shape)} has stride {value.stride(-1)} in its "
            "last dim, which must be contiguous; call .contiguous()"
        )


def check_sinks(sinks: object, layer: Any, config: BackendConfig) -> None:
    """Raise BadBatch unless sinks are None, or one logit a query head on the config's device."""
    device = torch.device(config.device).type
    if sinks is not None and not isinstance(sinks, Tensor):
        raise BadBatch(f"layer {layer.layer_id}: sinks is {sinks!r}; it must be a tensor, one logit a query head")
    if sinks is not None and (sinks.shape != (layer.tp_q_head_num,) or sinks.device.type != device):
        raise BadBatch(
            f"layer {layer.layer_id}: sinks has shape {tuple(sinks.shape)} on {sinks.device}; it must hold one logit "
            f"a query head, ({layer.tp_q_head_num},), on {device}"
        )


def check_window(layer: Any, config: BackendConfig) -> None:
    """Raise BadConfig if a layer looks further back than the tables of a trimmed decode reach."""
    if window_left(layer) > window_left(config) >= 0:
        raise BadConfig(
            f"layer {layer.layer_id} has sliding_window_size {window_left(layer)}, the config {window_left(config)}; "
            "decode tables are cut to the config's window: set the config to the largest window of the model"
        )


def check_layer_pool(layer: AttentionLayer, config: BackendConfig, pool: Any) -> None:
    """Raise BadConfig unless the pool has buffers of this layer's heads, in the pool that its kind reads."""
    config.check_pool(pool)
    try:
        if layer.layer_id < (getattr(pool, "start_layer", 0) or 0):
            raise IndexError
        keys, values = pool.get_kv_buffer(layer.layer_id)
    except (IndexError, KeyError):
        raise BadConfig(f"layer_id {layer.layer_id} has no buffer in the {type(pool).__name__}") from None
    expected = ((layer.tp_k_head_num, layer.head_dim), (layer.tp_v_head_num, layer.v_head_dim))
    found = (tuple(keys.shape[1:]), tuple(values.shape[1:]))
    if found != expected or keys.dtype != config.kv_cache_dtype:
        raise BadConfig(
            f"layer {layer.layer_id} has keys and values of (heads, dim) {expected[0]} and {expected[1]} in "
            f"{config.kv_cache_dtype}, its buffers in the pool {found[0]} and {found[1]} in {keys.dtype}; make the "
            "pool with the layer's sizes"
        )
    kind = layer_kind(layer, config.attention_chunk_size)
    windowed = config.is_hybrid_swa and kind in (LayerKind.SLIDING, LayerKind.LOCAL)
    if hasattr(pool, "in_swa_pool") and pool.in_swa_pool(layer.layer_id) != windowed:
        raise BadConfig(
            f"layer {layer.layer_id} is {kind.name} and lives in the {'full' if windowed else 'window'} pool; list it "
            f"in {'swa_layer_ids' if windowed else 'full_layer_ids'}: sliding and chunked layers read the window pool, "
            "all others the full one"
        )


def check_planned(plan: AttentionPlan, batch: Any) -> None:
    """Raise BadBatch unless `batch` (a ForwardBatch or a server's) is the one that was planned."""
    refuse_unplanned_fields(batch)
    mode, size = ForwardMode.of(getattr(batch, "forward_mode", None)), getattr(batch, "batch_size", None)
    loc = getattr(batch, "out_cache_loc", None)
    if mode is not plan.forward_mode or plan.batch_size not in (None, size):
        raise BadBatch(
            f"a {mode.name} batch of {size} requests, but {plan.forward_mode.name} of {plan.batch_size} is planned; "
            "call init_forward_metadata with every new batch"
        )
    if loc is not None and getattr(batch, "spec_info", None) is None and loc.shape[0] != plan.num_tokens:
        raise BadBatch(f"out_cache_loc has {loc.shape[0]} slots, the planned batch {plan.num_tokens} new tokens")
    for name, planned in (plan.values or {}).items():
        value = getattr(batch, name, None)
        if value is not None and value.tolist() != planned:
            raise BadBatch(f"{name} is {value.tolist()}, the planned batch has {planned}; plan every new batch")


def values_to_compare(batch: ForwardBatch) -> dict[str, list[int]] | None:
    """With FA_CHECK=1 the values that a planned batch and the batch given to forward must share."""
    if not device_checks_enabled():
        return None
    names = ["req_pool_indices", "seq_lens"]
    if not isinstance(batch.spec_info, DraftInput):  # a server may pass the slots of one step at a time
        names.append("out_cache_loc")
    found = {name: getattr(batch, name) for name in names}
    return {name: value.tolist() for name, value in found.items() if value is not None}


def check_cut(step: AttentionPass | TreePass, layer: Any) -> None:
    """Raise BadConfig if a pass was cut to another window than the layer's."""
    if step.cut_to_window >= 0 and step.cut_to_window != window_left(layer):
        raise BadConfig(
            f"layer {layer.layer_id} has sliding_window_size {window_left(layer)}, the config {step.cut_to_window}; "
            "drafts of a tree are planned for the config's window alone: give all window layers that size"
        )
