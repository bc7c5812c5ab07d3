"""Checks of a batch before it is planned, and of a layer before it writes.

Host values always; device values with FA_CHECK=1, and on a CPU also what keeps every read and write inside the pool.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fa_ref.api.batch import DraftInput, ForwardBatch, VerifyInput, host_lengths
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadConfig, BadPageTable
from fa_ref.api.layer import AttentionLayer, layer_kind, window_left
from fa_ref.api.modes import LayerKind
from fa_ref.api.plan import AttentionPass, TreePass
from fa_ref.api.slots import check_branches, check_pages, check_slots, check_tree, check_window_slots, check_written

_INTEGERS = (torch.int32, torch.int64)


def device_checks_enabled() -> bool:
    """True under FA_CHECK=1: values on the device are checked too, which synchronises. Never while a graph records."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return os.environ.get("FA_CHECK", "0") == "1"


def reads_values(config: BackendConfig) -> bool:
    """True where tensors may be read: on a CPU, which has nothing to wait for, and everywhere under FA_CHECK=1."""
    return torch.device(config.device).type == "cpu" or device_checks_enabled()


def new_tokens(batch: ForwardBatch) -> int:
    """Query rows of the batch, from host values only."""
    mode = batch.forward_mode
    if mode.is_idle():
        return 0
    if mode.is_target_verify():
        return batch.batch_size * verify_input(batch).draft_token_num
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
        return verify_input(batch).draft_token_num
    return draft_steps(batch) if getattr(batch.spec_info, "topk", 0) == 1 else 0


def is_tree(batch: ForwardBatch) -> bool:
    """True for drafts to verify under a mask of their own."""
    return batch.forward_mode.is_target_verify() and verify_input(batch).custom_mask is not None


def verify_input(batch: ForwardBatch) -> VerifyInput:
    """The drafts of a TARGET_VERIFY. Raises BadBatch if the batch brings none."""
    if not isinstance(batch.spec_info, VerifyInput):
        raise BadBatch(
            "TARGET_VERIFY needs spec_info=VerifyInput(draft_token_num=T), for a tree with topk= above 1 and "
            f"custom_mask=, or an object with these fields; got {batch.spec_info!r}"
        )
    return batch.spec_info


def check_batch(batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadBatch or BadPageTable if the batch contradicts itself or its pools."""
    if batch.forward_mode.is_idle():
        return
    _check_numbers(batch)
    check_shapes(batch, config)
    _check_host_lengths(batch, config)
    if batch.forward_mode.is_target_verify():
        _check_custom_mask(batch, config)
    if reads_values(config):
        _check_ranges(batch, config)
    if device_checks_enabled():
        _check_device_values(batch, config)


def check_step(batch: ForwardBatch, step: int) -> None:
    """Raise BadBatch for a step that the batch's draft does not have."""
    steps = draft_steps(batch)
    if steps and not 0 <= step < steps:
        raise BadBatch(f"step {step} of a draft of {steps} steps, which are counted from 0; raise num_steps")


def _check_numbers(batch: ForwardBatch) -> None:
    """What a batch counts beside its tensors."""
    mode, info = batch.forward_mode, batch.spec_info
    _check_number("shared_prefix_len", batch.shared_prefix_len, 0, "pass the tokens that all requests share, or 0")
    if mode.is_decode() and isinstance(info, DraftInput):
        says = "say it in spec_info, or build the backend with topk= and speculative_num_steps="
        _check_number("spec_info.topk", info.topk, 1, says)
        _check_number("spec_info.num_steps", info.num_steps, 1, says)
    if mode.is_target_verify():
        verify = verify_input(batch)
        _check_number("spec_info.draft_token_num", verify.draft_token_num, 1, "pass the drafts of a request")
        _check_number("spec_info.topk", verify.topk, 1, "pass 1 for a chain, more for a tree")


def _check_number(name: str, value: object, least: int, then: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadBatch(f"{name} is {value!r}; it must be an int of at least {least}: {then}")


def _check_custom_mask(batch: ForwardBatch, config: BackendConfig) -> None:
    verify = verify_input(batch)
    mask, drafts, topk = verify.custom_mask, verify.draft_token_num, verify.topk
    if mask is None:
        if topk > 1:
            raise BadBatch(f"spec_info has topk={topk} without a custom_mask; a tree needs one, a chain has topk=1")
        return
    if not isinstance(mask, Tensor):
        raise BadBatch(f"custom_mask is {mask!r}; it must be a flat tensor of bool")
    if mask.device.type != torch.device(config.device).type:
        raise BadBatch(f"custom_mask is on {mask.device}, the backend on {config.device}; move the batch there")
    lens = batch.seq_lens if reads_values(config) else batch.seq_lens_cpu
    least = batch.batch_size * drafts * drafts  # without prefixes
    entries = max(mask.numel(), least) if lens is None else sum((n + drafts) * drafts for n in lens.tolist())
    if mask.dtype != torch.bool or mask.shape != (entries,):
        raise BadBatch(
            f"custom_mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool and flat, "
            f"{'at least ' if lens is None else ''}{entries} entries: for each request {drafts} rows of seq_lens + "
            f"{drafts} columns"
        )


def check_shapes(batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadBatch for a field of the batch with another type, dtype, shape or device than planning needs."""
    check_batch_size(batch)
    req_to_token(batch, config)
    if batch.token_to_kv_pool is not None:
        config.check_pool(batch.token_to_kv_pool)
    names = ["req_pool_indices", "seq_lens"]
    if config.is_encoder_decoder:
        names += ["encoder_lens"]
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
    copies = ["seq_lens_cpu", "encoder_lens_cpu"]
    if batch.forward_mode.is_extend_or_draft_extend_or_mixed():  # elsewhere nothing reads them
        copies += ["extend_seq_lens_cpu", "extend_prefix_lens_cpu"]
    for name in copies:
        if getattr(batch, name) is not None:
            count = len(host_lengths(name, getattr(batch, name)))
            if count != batch.batch_size:
                raise BadBatch(f"{name} has {count} entries for {batch.batch_size} requests")
    check_locs(batch, config)


def check_batch_size(batch: ForwardBatch) -> None:
    """Raise BadBatch for a batch_size that is no number of requests."""
    _check_number("batch_size", batch.batch_size, 0, "pass the number of requests")


def check_locs(batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadBatch for slots to write of another type, dtype, shape or device. Reads no value."""
    device = torch.device(config.device)
    for name in ("out_cache_loc", "encoder_out_cache_loc"):
        loc = getattr(batch, name)
        if loc is None:
            continue
        if not isinstance(loc, Tensor):
            raise BadBatch(f"{name} is {loc!r}; it must be a tensor, one slot a new token")
        if loc.dtype not in _INTEGERS or loc.dim() != 1:
            raise BadBatch(
                f"{name} is {loc.dtype} of shape {tuple(loc.shape)}; it must be int32 or int64, one slot a new token"
            )
        if loc.device.type != device.type:
            raise BadBatch(f"{name} is on {loc.device}, the backend on {device}; move the batch there")


def _check_host_lengths(batch: ForwardBatch, config: BackendConfig) -> None:
    width = req_to_token(batch, config).shape[1]
    drafts = columns_of_drafts(batch)
    lens = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    if lens is not None:
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
        check_slots("out_cache_loc", batch.out_cache_loc, available)
    if not rows.numel():
        return
    check_rows(batch, config)
    keys, width = batch.seq_lens + columns_of_drafts(batch), table.shape[1]
    for request, (length, count) in enumerate(zip(batch.seq_lens.tolist(), keys.tolist(), strict=True)):
        if length < 0 or count > width:
            raise BadPageTable(f"request {request} has {count} keys, its row holds {width}")
    longest = int(keys.max())
    used = torch.arange(longest, device=table.device) < keys[:, None]
    slots = torch.where(used, table[rows.long(), :longest], 0)
    wrong = torch.nonzero(((slots < 0) | (slots >= available)).any(dim=1))
    if wrong.numel():
        request = int(wrong[0])
        check_slots(f"request {request}", slots[request], available)


def check_rows(batch: ForwardBatch, config: BackendConfig) -> None:
    """Raise BadPageTable for a row that req_to_token does not have."""
    table, rows = req_to_token(batch, config), batch.req_pool_indices
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
        raise BadPageTable(
            f"req_pool_indices span {int(rows.min())}..{int(rows.max())}, req_to_token has {table.shape[0]} rows"
        )


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
    rows, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    in_pages = 0 if is_tree(batch) else columns_of_drafts(batch)  # the drafts of a tree are read slot by slot
    for request, (row, length) in enumerate(zip(rows, lens, strict=True)):
        if row > 0:  # row 0 is padding: all slot 0
            check_pages(f"request {request}", table[row, : length + in_pages], config.page_size)
    shared = table[batch.req_pool_indices.long(), : batch.shared_prefix_len]
    if bool((shared != shared[:1]).any()):
        raise BadPageTable(
            f"shared_prefix_len is {batch.shared_prefix_len}, but the rows of the batch differ in these first columns; "
            "requests share a prefix only if they keep it in the same slots"
        )
    if is_tree(batch):
        check_tree(verify_input(batch).custom_mask, lens, verify_input(batch).draft_token_num)  # type: ignore[arg-type]
    if rows:
        _check_new_tokens(batch, config)


def _check_new_tokens(batch: ForwardBatch, config: BackendConfig) -> None:
    """New tokens in slots of their own: at the end of their rows, or on branches; a window pool that has what it reads.

    A chain of drafts and the drafts of a tree come after seq_lens; the slots of several branches are in no row.
    """
    loc, columns, steps = batch.out_cache_loc, columns_of_drafts(batch), draft_steps(batch)
    indices, cached = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    branches = None
    if columns or steps:
        new = [columns] * batch.batch_size
        branches = None if columns or loc is None else loc.view(batch.batch_size, -1)
    else:
        new = _new_of_each(batch)
        cached = [total - count for total, count in zip(cached, new, strict=True)]
    table = req_to_token(batch, config)
    rows = [table[row, : past + count] for row, past, count in zip(indices, cached, new, strict=True)]
    if branches is not None:
        check_branches(branches, rows, [row == 0 for row in indices])
    elif loc is not None:
        check_written(loc, rows, new)
    if config.is_hybrid_swa:
        pool = batch.token_to_kv_pool or config.token_to_kv_pool
        for request, (row, first) in enumerate(zip(rows, cached, strict=True)):
            drafts = row[first:] if is_tree(batch) else None if branches is None else branches[request]
            check_window_slots(pool, config, request, row if drafts is None else row[:first], first, drafts)


def _new_of_each(batch: ForwardBatch) -> list[int]:
    """New tokens of each request, where seq_lens counts them; lengths that do not add up are refused."""
    lens = batch.seq_lens.tolist()
    if batch.forward_mode.is_decode():
        new = [1] * len(lens)
    else:
        new = batch.extend_seq_lens.tolist()  # type: ignore[union-attr]
    cached = [s - n for s, n in zip(lens, new, strict=True)]
    prefix = None if batch.forward_mode.is_decode() else batch.extend_prefix_lens
    if prefix is not None and prefix.tolist() != cached:
        raise BadBatch(
            f"extend_prefix_lens {prefix.tolist()} and extend_seq_lens {new} do not add up to seq_lens {lens}"
        )
    if any(n < 0 for n in (*new, *cached)):
        raise BadBatch(f"extend_seq_lens {new} must lie between 0 and seq_lens {lens}, request by request")
    if sum(new) != new_tokens(batch):
        raise BadBatch(f"extend_seq_lens {new} are {sum(new)} new tokens, out_cache_loc has {new_tokens(batch)} slots")
    return new


def req_to_token(batch: ForwardBatch, config: BackendConfig) -> Tensor:
    """The table of slots that this batch's rows index. Raises BadBatch for a pool of rows without one."""
    pool = batch.req_to_token_pool or config.req_to_token_pool
    table = getattr(pool, "req_to_token", None)
    if not isinstance(table, Tensor) or table.dim() != 2:
        raise BadBatch(f"req_to_token_pool is {pool!r} without a tensor req_to_token; pass a ReqToTokenPool, or None")
    return table


def kv_slots(pool: Any) -> int:
    """Slots of the (full) pool, padding page included."""
    inner = getattr(pool, "full_kv_pool", pool)
    if hasattr(inner, "full_to_swa_index_mapping"):
        return inner.full_to_swa_index_mapping.shape[0]
    buffers = getattr(inner, "k_buffer", getattr(inner, "kv_buffer", None))
    if buffers is not None and not len(buffers):  # all layers have windows, none lives in the full pool
        return pool.full_to_swa_index_mapping.shape[0]
    return (inner.get_kv_buffer(getattr(inner, "start_layer", 0))[0] if buffers is None else buffers[0]).shape[0]


def check_layer_inputs(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: Any,
    tokens: int,
    config: BackendConfig,
    sinks: Tensor | None = None,
    key_rows: tuple[int, ...] | None = None,
) -> None:
    """Raise BadBatch unless q, k, v are [tokens, heads * dim] (or [tokens, heads, dim]) of this layer and config.

    key_rows: the numbers of rows that k and v may have, if not q's: those of a CROSS layer are the encoder's.
    Called before anything is written, so that a refused call leaves the cache as it was.
    """
    expected = {
        "q": (q, layer.tp_q_head_num * layer.head_dim),
        "k": (k, layer.tp_k_head_num * layer.head_dim),
        "v": (v, layer.tp_v_head_num * layer.v_head_dim),
    }
    for name, (value, width) in expected.items():
        if value is None and name != "q":
            continue
        if name == "q" or key_rows in (None, (tokens,)):
            check_value(layer, name, value, tokens, width, config)
            continue
        given = value.shape[:1].numel() if isinstance(value, Tensor) else key_rows[-1]
        if isinstance(value, Tensor) and given not in key_rows:
            raise BadBatch(
                f"layer {layer.layer_id}: {name} has shape {tuple(value.shape)}; this batch has {key_rows[-1]} "
                "encoder_out_cache_loc slots for new encoder tokens, and k and v of a cross layer have a row for each. "
                "Where the cache holds the encoder's keys already, pass k and v of None"
            )
        check_value(layer, name, value, given, width, config, "encoder_out_cache_loc slots for new encoder tokens")
    if (k is None) != (v is None):
        raise BadBatch(f"layer {layer.layer_id}: pass both k and v, or neither to attend to the cache as it is")
    if k is not None and v is not None and k.shape[:1] != v.shape[:1]:
        raise BadBatch(
            f"layer {layer.layer_id}: k has shape {tuple(k.shape)} and v {tuple(v.shape)}; pass a row of each a token"
        )
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


def check_loc(loc: Tensor, tokens: int) -> None:
    """Raise BadBatch unless there is a slot for each token to write."""
    if loc.shape != (tokens,):
        raise BadBatch(f"{tuple(loc.shape)} slots for {tokens} new tokens to write; pass one slot a token")


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


def check_cut(step: AttentionPass | TreePass, layer: Any) -> None:
    """Raise BadConfig if a pass was cut to another window than the layer's."""
    if step.cut_to_window >= 0 and step.cut_to_window != window_left(layer):
        raise BadConfig(
            f"layer {layer.layer_id} has sliding_window_size {window_left(layer)}, the config {step.cut_to_window}; "
            "drafts of a tree are planned for the config's window alone: give all window layers that size"
        )
