"""What the tests share: the routes to one answer, what a device can run, attention by hand, plans made comparable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_fast.planner
import fa_ref
import fa_ref.backend
from fa_ref import AttentionPass, ForwardMode, LayerKind, TreePass
from fa_ref.cases import Case, make_case
from fa_ref.numerics import Verdict

PACKAGES = (fa_ref, fa_fast)
PLANS_IN = {fa_ref: fa_ref.backend, fa_fast: fa_fast.planner}  # where a backend looks plan_batch up
ROUTES = {"masks": (fa_ref, "masks"), "passes": (fa_ref, "passes"), "fast": (fa_fast, None)}
PAGE_SIZES = (1, 3, 16, 64, 128)
FP8 = torch.float8_e4m3fn

both_packages = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
every_route = pytest.mark.parametrize("route", ROUTES)
planned_routes = pytest.mark.parametrize("route", ["passes", "fast"])
every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


def sized(device: str, **arguments: Any) -> dict[str, Any]:
    """Arguments of make_case that the device's kernels can run: FA3 wants 16 bit and at least 64 wide heads."""
    if device != "cuda":
        return arguments
    arguments["head_dim"] = max(64, arguments.get("head_dim", 64))
    if arguments.get("latent"):
        arguments["latent"], arguments["rope"] = 512, 64
    if arguments.get("dtype", torch.float32) == torch.float32:
        arguments["dtype"] = torch.bfloat16
    return arguments | {"device": device}


def case_on(device: str, mode: ForwardMode = ForwardMode.EXTEND, **arguments: Any) -> Case:
    """make_case on a device, its sizes raised to what the device runs."""
    return make_case(mode, **sized(device, **arguments))


def run(case: Case, route: str) -> Tensor:
    """The layer's output [tokens, heads * v_head_dim] by one of ROUTES; writes the new keys."""
    package, provider = ROUTES[route]
    return case.run(package, provider)


def verdicts(case: Case) -> dict[str, Verdict]:
    """Every route's error and budget on one case."""
    return {route: case.judge(run(case, route)) for route in ROUTES}


def agrees(case: Case) -> bool:
    """True if masks, passes and fast are all within the budget."""
    return all(verdict.ok for verdict in verdicts(case).values())


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Callable[[int, int], bool],
    *,
    scale: float,
    cap: float = 0.0,
    sinks: list[float] | None = None,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in Python floats, one (query, head) at a time: out [queries, heads, v_dim], lse [queries, heads]."""
    queries, heads = q.shape[:2]
    group = heads // k.shape[1]
    out = torch.zeros(queries, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((queries, heads), -torch.inf, dtype=torch.float64)
    for i in range(queries):
        keys = [j for j in range(k.shape[0]) if visible(i, j)]
        for h in range(heads):
            logits = []
            for j in keys:
                logit = float(q[i, h].double() @ k[j, h // group].double())
                if qv is not None:
                    logit += float(qv[i, h].double() @ v[j, h // group].double())
                logit *= scale
                logits.append(cap * math.tanh(logit / cap) if cap else logit)
            terms = logits + ([sinks[h]] if sinks is not None else [])
            if not terms:
                continue
            top = max(terms)
            denominator = sum(math.exp(t - top) for t in terms)
            lse[i, h] = top + math.log(denominator)
            for j, logit in zip(keys, logits, strict=True):
                out[i, h] += math.exp(logit - top) / denominator * v[j, h // group].double()
    return out, lse


def meaning(step: AttentionPass | TreePass) -> dict[str, Any]:
    """What a pass asks for, free of its layout: empty sequences dropped, tables as the pages each sequence reads."""
    if isinstance(step, TreePass):
        return {
            "slots": step.slots.tolist(),
            "mask": step.mask.int().tolist(),
            "pool": step.pool,
            "takes_sinks": step.takes_sinks,
            "cut_to_window": step.cut_to_window,
        }
    cu = step.cu_seqlens_q.tolist()
    kept = [i for i in range(step.sequences) if cu[i + 1] > cu[i]]
    ends = [0]
    for i in kept:
        ends.append(ends[-1] + cu[i + 1] - cu[i])
    return {
        "pages": [step.pages(i) for i in kept],
        "cache_seqlens": [int(step.cache_seqlens[i]) for i in kept],
        "cu_seqlens_q": ends,
        "causal": step.causal,
        "page_size": step.page_size,
        "pool": step.pool,
        "uses_window": step.uses_window,
        "takes_sinks": step.takes_sinks,
        "keys_are_new": step.keys_are_new,
        "cut_to_window": step.cut_to_window,
        "token_index": None if step.token_index is None else step.token_index.tolist(),
    }


def check_bounds(step: AttentionPass | TreePass) -> None:
    """The rules every pass keeps: int32, bounds that bound, tables wide enough, query rows in order."""
    if isinstance(step, TreePass):
        assert (step.slots.dtype, step.mask.dtype) == (torch.int32, torch.bool)
        assert step.slots.shape == (step.mask.shape[0], step.mask.shape[2])
        assert step.mask.any(dim=-1).all(), "every draft sees itself"
        return
    for name in ("page_table", "cache_seqlens", "cu_seqlens_q", "row_index", "token_index"):
        value = getattr(step, name)
        assert value is None or value.dtype == torch.int32, name
    new = step.cu_seqlens_q.diff()
    assert int(step.cu_seqlens_q[0]) == 0
    assert (new >= 0).all()
    assert step.sequences == 0 or int(new.max()) <= step.max_seqlen_q
    used = step.cache_seqlens[new > 0]
    assert used.numel() == 0 or int(used.max()) <= step.max_seqlen_k
    assert used.numel() == 0 or int(used.max()) <= step.page_table.shape[1] * step.page_size
    assert not step.causal or (new[new > 0] <= used).all()


def plans(case: Case) -> dict[str, dict[LayerKind, list[dict[str, Any]]]]:
    """The meaning of each package's plan of a case, by package name."""
    found = {}
    for package in PACKAGES:
        plan = package.plan_batch(case.batch, case.config, case.step)
        for steps in plan.passes.values():
            for step in steps:
                check_bounds(step)
        found[package.__name__] = {kind: [meaning(s) for s in steps] for kind, steps in plan.passes.items()}
    return found


def with_batch(case: Case, **changes: Any) -> Case:
    """The case with some fields of its batch replaced."""
    return replace(case, batch=replace(case.batch, **changes))


def with_layer(case: Case, **changes: Any) -> Case:
    """The case with some fields of its layer replaced."""
    return replace(case, layer=replace(case.layer, **changes))


def cache_bytes(case: Case) -> tuple[Tensor, Tensor]:
    """A copy of the layer's keys and values, as bytes, so that NaN compares equal to itself."""
    keys, values = case.config.token_to_kv_pool.get_kv_buffer(case.layer.layer_id)
    return keys.contiguous().view(torch.uint8).clone(), values.contiguous().view(torch.uint8).clone()


def seen_slots(case: Case, route: str) -> list[list[int]]:
    """The slots (of the full pool) that each query attends to, in rising order, read off the output of a route.

    q is zero, so that visible keys weigh the same, and each slot of the batch has a unit vector of its own for a value.
    The case needs v_head_dim of at least its slots, drafts included.
    """
    pool, layer, batch = case.config.token_to_kv_pool, case.layer, case.batch
    rows = case.config.req_to_token_pool.req_to_token
    lens = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    slots = torch.cat([rows[row, :length] for row, length in lens] + [batch.out_cache_loc]).long().unique()
    marks = torch.eye(layer.v_head_dim)[: len(slots), None, :].expand(-1, layer.tp_v_head_num, -1)
    pool.get_value_buffer(layer.layer_id)[pool.write_slots(layer, slots)] = marks.to(pool.dtype)
    out = run(replace(case, q=torch.zeros_like(case.q), k=None, v=None, sinks=None), route)
    by_head = out.unflatten(1, (layer.tp_q_head_num, layer.v_head_dim)).float() > 1e-6
    assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
    return [slots[row[0][: len(slots)]].tolist() for row in by_head]


def seen(case: Case, route: str) -> list[list[int]]:
    """The logical positions that each query attends to, read off the output of a route.

    q is zero, so that visible keys weigh the same, and the value at position p is the p-th unit vector. The case
    needs v_head_dim of at least its longest request.
    """
    pool, layer, batch = case.config.token_to_kv_pool, case.layer, case.batch
    marks = torch.eye(layer.v_head_dim)[:, None, :].expand(-1, layer.tp_v_head_num, -1)
    new_marks = []
    new = [1] * batch.batch_size if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
    rows = case.config.req_to_token_pool.req_to_token
    for row, total, count in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), new, strict=True):
        slots = pool.write_slots(layer, rows[row, :total].long())
        pool.get_value_buffer(layer.layer_id)[slots] = marks[:total].to(pool.dtype).to(slots.device)
        new_marks.append(marks[total - count : total])
    marked = replace(case, q=torch.zeros_like(case.q), v=torch.cat(new_marks).flatten(1).to(case.v), sinks=None)
    out = run(marked, route).unflatten(1, (layer.tp_q_head_num, layer.v_head_dim)).float()
    per_query = [[torch.nonzero(head > 1e-6).flatten().tolist() for head in query] for query in out]
    assert all(head == heads[0] for heads in per_query for head in heads)
    return [heads[0] for heads in per_query]
