"""Config, pools, layers, the planned batch and the batch given to forward must agree; what does not is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
from fa_fast.kernels.torch_cpu import CAPABILITY
from fa_ref import (
    AttentionLayer,
    BackendConfig,
    BadBatch,
    BadConfig,
    BadPageTable,
    FaError,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    MHAKVPool,
    ReqToTokenPool,
    SWAKVPool,
    UnsupportedByProvider,
)
from fa_ref.api import checks
from fa_ref.api.checks import kv_slots
from fa_ref.cases import Case, make_case
from tests.support import ROUTES, both_packages, cache_bytes, every_route, run, with_batch, with_layer

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
MODES = pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=["extend", "decode"])


def backend_of(case: Case, route: str) -> Any:
    package, provider = ROUTES[route]
    return package.FlashAttentionBackend(case.config, provider=provider)


def forward(backend: Any, case: Case, layer: Any = None, batch: Any = None) -> Tensor:
    return backend.forward(case.q, case.k, case.v, layer or case.layer, batch or case.batch, sinks=case.sinks)


def check_refused(error: type[FaError], says: str, case: Case, call: Any) -> None:
    """The call raises, and no byte of the case's layer was written."""
    before = cache_bytes(case)
    with pytest.raises(error, match=says):
        call()
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"


# ---- the config and its pools -----------------------------------------------------------------------------------


def runner_of(case: Case, **changes: Any) -> SimpleNamespace:
    config = case.config
    fields = dict(
        device="cpu",
        dtype=config.dtype,
        page_size=config.page_size,
        sliding_window_size=config.sliding_window_size,
        model_config=SimpleNamespace(context_len=config.context_len),
        req_to_token_pool=config.req_to_token_pool,
        token_to_kv_pool=config.token_to_kv_pool,
    )
    return SimpleNamespace(**{name: value for name, value in (fields | changes).items() if value != "absent"})


def test_a_pool_with_a_window_pool_behind_it_is_never_read_as_one_pool():
    hybrid, plain = make_case(kind=SLIDING, hybrid=True), make_case(kind=SLIDING)
    with pytest.raises(BadConfig, match="is_hybrid_swa=False over a SWAKVPool"):
        hybrid.replace_config(is_hybrid_swa=False)
    with pytest.raises(BadConfig, match="is_hybrid_swa=True over a MHAKVPool"):
        plain.replace_config(is_hybrid_swa=True)
    assert BackendConfig.from_model_runner(runner_of(hybrid)).is_hybrid_swa  # whatever the server calls its flag
    assert not BackendConfig.from_model_runner(runner_of(plain)).is_hybrid_swa


@every_route
def test_the_kind_of_pool_also_counts_for_a_batch_s_own_pool(route):
    case, other = make_case(kind=SLIDING), make_case(kind=SLIDING, hybrid=True)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    with pytest.raises(BadConfig, match="is_hybrid_swa=False over a SWAKVPool"):
        forward(backend, case, batch=replace(case.batch, token_to_kv_pool=other.config.token_to_kv_pool))


@every_route
@pytest.mark.parametrize("kind", [FULL, SLIDING], ids=["full-layer", "window-layer"])
def test_a_layer_in_the_other_pool_of_two_is_refused(kind, route):
    case = make_case(kind=SLIDING, hybrid=True)
    layer_id, window = (0, -1) if kind is FULL else (1, 3)
    case = with_layer(case, layer_id=layer_id, sliding_window_size=window)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    check_refused(BadConfig, f"layer {layer_id} is {kind.name} and lives in", case, lambda: forward(backend, case))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(page_size=8), "page_size 8 over a pool with pages of 4"),
        (dict(page_size=3), "page_size 3 over a pool with pages of 4"),
        (dict(page_size="4"), "page_size '4'"),
        (dict(token_to_kv_pool=None), "token_to_kv_pool None"),
        (dict(req_to_token_pool=None), "req_to_token_pool None"),
        (dict(context_len=None), "context_len None"),
        (dict(context_len=9), "context_len 9, but the rows of req_to_token hold 8"),
        (dict(context_len=0), "context_len 0"),
        (dict(kv_cache_dtype=torch.bfloat16), "kv_cache_dtype torch.bfloat16 over a pool of torch.float32"),
        (dict(kv_cache_dtype="fp8_e4m3"), "kv_cache_dtype torch.float8_e4m3fn over a pool of torch.float32"),
        (dict(kv_cache_dtype=torch.float8_e5m2), "kv_cache_dtype torch.float8_e5m2; supported: .*'fp8_e4m3'"),
        (dict(dtype=torch.float8_e4m3fn), "dtype torch.float8_e4m3fn; supported"),
        (dict(dtype="int8"), "dtype 'int8'; supported: 'bfloat16'"),
        (dict(sliding_window_size=-5), "sliding_window_size -5"),
    ],
    ids=lambda value: "-".join(map(str, next(iter(value.items())))) if isinstance(value, dict) else "",
)
def test_a_config_that_contradicts_its_pools_is_refused(changes, says):
    with pytest.raises(BadConfig, match=says):
        make_case().replace_config(**changes)


def test_dtypes_may_be_given_by_name_and_a_page_size_may_divide_the_pool_s():
    config = make_case().replace_config(dtype="float32", kv_cache_dtype="auto", page_size=2).config
    assert (config.dtype, config.kv_cache_dtype, config.page_size) == (torch.float32, torch.float32, 2)


@pytest.mark.parametrize("name", ["device", "req_to_token_pool", "token_to_kv_pool"])
def test_a_runner_without_a_needed_field_is_refused_by_its_name(name):
    with pytest.raises(BadConfig, match=name):
        BackendConfig.from_model_runner(runner_of(make_case(), **{name: "absent"}))
    with pytest.raises(BadConfig, match="context_len None"):
        BackendConfig.from_model_runner(runner_of(make_case(), model_config=None))


# ---- the layer and the pool -------------------------------------------------------------------------------------

GEOMETRIES = {
    "one-key-head-of-two": (dict(heads=2, kv_heads=2), dict(tp_k_head_num=1, tp_v_head_num=1)),
    "half-the-head-dim": (dict(), dict(head_dim=8, v_head_dim=8)),
    "wider-values": (dict(), dict(v_head_dim=32)),
    "layer-minus-1": (dict(), dict(layer_id=-1)),
    "a-layer-too-many": (dict(), dict(layer_id=1)),
}


@every_route
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_layer_that_does_not_fit_the_pool_s_buffers_is_refused(name, route):
    arguments, changes = GEOMETRIES[name]
    right = make_case(**arguments)
    case = with_layer(right, **changes)
    layer, tokens = case.layer, case.q.shape[0]
    widths = [h * d for h, d in ((layer.tp_q_head_num, layer.head_dim), (layer.tp_k_head_num, layer.head_dim))]
    v_width = layer.tp_v_head_num * layer.v_head_dim
    q, k, v = (torch.zeros(tokens, width) for width in (*widths, v_width))
    case = replace(case, q=q, k=k, v=v)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    says = f"layer_id {layer.layer_id} has no buffer" if layer.layer_id else "its buffers in the pool"
    check_refused(BadConfig, says, right, lambda: forward(backend, case))
    assert right.judge(forward(backend, right)).ok


class ServerLayer:
    """A server's layer: no more attributes than the model set."""

    def __init__(self, case: Case, **changes: Any) -> None:
        names = ("layer_id", "tp_q_head_num", "tp_k_head_num", "head_dim", "scaling")
        vars(self).update({name: getattr(case.layer, name) for name in names} | changes)


@every_route
def test_a_layer_object_may_lack_every_field_that_has_a_default(route):
    case = make_case(head_dim=16)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case, ServerLayer(case))).ok


BAD_LAYERS = {
    "heads-that-do-not-divide": (dict(tp_q_head_num=5, tp_k_head_num=2), BadConfig, "5 query heads over 2"),
    "fewer-value-heads": (dict(tp_v_head_num=1), BadConfig, "2 key heads but 1 value heads"),
    "three-scales": (dict(k_scale=torch.ones(3)), BadConfig, "k_scale has 3 entries for 2 key heads"),
    "encoder-only": (dict(attn_type="encoder_only"), UnsupportedByProvider, "attn_type encoder_only"),
    "encoder-only-enum": (
        dict(attn_type=Enum("AttentionType", "ENCODER_ONLY").ENCODER_ONLY),
        UnsupportedByProvider,
        "attn_type",
    ),
    "no-scaling": (dict(scaling=None), BadConfig, "ServerLayer without scaling"),
}


@every_route
@pytest.mark.parametrize("name", BAD_LAYERS)
def test_a_layer_object_that_cannot_run_is_refused_before_anything_is_written(name, route):
    changes, error, says = BAD_LAYERS[name]
    case = make_case(heads=4, kv_heads=2, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    layer = ServerLayer(case, **changes)
    heads = layer.tp_q_head_num
    sized = replace(case, q=torch.zeros(case.q.shape[0], heads * 16, dtype=torch.bfloat16))
    check_refused(error, says, case, lambda: forward(backend, sized, layer))
    assert case.judge(forward(backend, case, ServerLayer(case, attn_type="decoder"))).ok


@every_route
def test_a_layer_object_changed_after_its_first_use_is_seen(route):
    case = make_case(heads=2)
    layer = ServerLayer(case, logit_cap=0.0, k_scale=None)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case, layer)).ok
    layer.logit_cap, layer.scaling = 0.5, 2.0
    changed = with_layer(case, logit_cap=0.5, scaling=2.0)
    assert changed.judge(forward(backend, changed, layer)).ok
    layer.sliding_window_size = 3
    with pytest.raises(UnsupportedByProvider, match="SLIDING layer"):
        forward(backend, case, layer)


class ServerPool:
    """A server's pool class: the two methods that a backend calls, and nothing of ours."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        if hasattr(pool, "full_to_swa_index_mapping"):
            self.full_to_swa_index_mapping = pool.full_to_swa_index_mapping

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self._pool.get_kv_buffer(layer_id)

    def set_kv_buffer(self, *args: Any) -> None:
        self._pool.set_kv_buffer(*args)


@every_route
@MODES
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
def test_a_server_s_own_pool_class_is_enough(hybrid, mode, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(mode, kind=SLIDING, hybrid=hybrid)
    case = case.replace_config(token_to_kv_pool=ServerPool(case.config.token_to_kv_pool))
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok


@pytest.mark.parametrize("route", ["masks", "passes"])
@MODES
def test_fp64_layers_run_in_the_reference(mode, route):
    case = make_case(mode, dtype=torch.float64, sinks=True, softcap=2.0)
    assert case.judge(case.run(ROUTES[route][0], route)).ok


def test_a_cache_of_a_dtype_that_fast_kernels_cannot_pair_with_q_is_refused_before_it_is_written():
    case = make_case(dtype=torch.bfloat16, kv_dtype=torch.float32)
    backend = backend_of(case, "fast")
    backend.init_forward_metadata(case.batch)
    check_refused(UnsupportedByProvider, "bfloat16 over a torch.float32 cache", case, lambda: forward(backend, case))
    CAPABILITY.require(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, head_dim=64, v_head_dim=64)


# ---- the planned batch and the batch given to forward -----------------------------------------------------------


@every_route
def test_a_batch_of_another_mode_or_size_than_the_planned_one_is_refused(route):
    decode, extend = make_case(DECODE), make_case(EXTEND, new_lens=(1, 1, 1))
    backend = backend_of(decode, route)
    backend.init_forward_metadata(decode.batch)
    other = replace(extend.batch, req_pool_indices=decode.batch.req_pool_indices)
    check_refused(BadBatch, "EXTEND batch of 3 .*DECODE of 3", decode, lambda: forward(backend, decode, batch=other))
    fewer = replace(decode.batch, batch_size=2)
    check_refused(BadBatch, "of 2 requests.*of 3 is", decode, lambda: forward(backend, decode, batch=fewer))


@every_route
def test_slots_for_another_number_of_tokens_than_planned_are_refused(route):
    case = make_case(DECODE, prefix_lens=[4])
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    three = replace(case.batch, out_cache_loc=case.batch.out_cache_loc.repeat(3))
    check_refused(BadBatch, "3 slots, the planned batch 1", case, lambda: forward(backend, case, batch=three))


@every_route
def test_a_refused_batch_leaves_no_older_plan_behind(route):
    case = make_case(DECODE)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    with pytest.raises(BadBatch):
        backend.init_forward_metadata(replace(case.batch, batch_size=2))
    check_refused(BadBatch, "no batch is planned", case, lambda: forward(backend, case))


@every_route
@pytest.mark.parametrize("name", ["req_pool_indices", "seq_lens", "out_cache_loc"])
def test_with_checks_on_forward_refuses_other_values_than_planned(name, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(DECODE)
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    other = replace(case.batch, **{name: getattr(case.batch, name).flip(0)})
    check_refused(BadBatch, f"{name} is .* the planned batch has", case, lambda: forward(backend, case, batch=other))
    assert case.judge(forward(backend, case)).ok


@pytest.mark.parametrize("route", ["passes", "fast"])
@MODES
def test_a_plan_keeps_its_lengths_when_the_caller_reuses_its_tensors(mode, route):
    case = make_case(mode, page_size=1)
    case = with_batch(case, **{n: getattr(case.batch, n).int() for n in ("seq_lens", "req_pool_indices")})
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    (step,) = backend.forward_metadata.for_kind(FULL)
    lens, rows = step.cache_seqlens.clone(), None if step.row_index is None else step.row_index.clone()
    case.batch.seq_lens.add_(1)
    case.batch.req_pool_indices.zero_()
    assert torch.equal(step.cache_seqlens, lens)
    assert rows is None or torch.equal(step.row_index, rows)


# ---- batches that contradict themselves, with FA_CHECK=1 --------------------------------------------------------


def device_only(case: Case, **changes: Any) -> Case:
    return with_batch(case, seq_lens_cpu=None, extend_seq_lens_cpu=None, extend_prefix_lens_cpu=None, **changes)


def swapped(x: Tensor) -> Tensor:
    return x[[1, 0, *range(2, len(x))]]


CONTRADICTIONS = {
    "prefix-on-the-device": (
        EXTEND,
        lambda b: dict(extend_prefix_lens=b.extend_prefix_lens + 1),
        BadBatch,
        "do not add up to seq_lens",
    ),
    "negative-new-tokens": (
        EXTEND,
        lambda b: dict(extend_seq_lens=torch.tensor([-1, 4, 7]), extend_prefix_lens=None),
        BadBatch,
        "must lie between 0 and seq_lens",
    ),
    "more-new-tokens-than-slots": (
        EXTEND,
        lambda b: dict(extend_seq_lens=torch.tensor([6, 4, 1]), extend_prefix_lens=None),
        BadBatch,
        "11 new tokens, out_cache_loc has 10 slots",
    ),
    "length-off-by-one-in-decode": (
        DECODE,
        lambda b: dict(seq_lens=b.seq_lens - 1),
        BadBatch,
        "request 0: out_cache_loc has slots",
    ),
    "slots-of-another-request": (
        DECODE,
        lambda b: dict(out_cache_loc=swapped(b.out_cache_loc)),
        BadBatch,
        "request 0: out_cache_loc has slots",
    ),
    "one-row-twice": (
        DECODE,
        lambda b: {n: getattr(b, n)[[0, 0, 2]] for n in ("req_pool_indices", "seq_lens", "out_cache_loc")},
        BadPageTable,
        "are written by two requests",
    ),
}


@every_route
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_with_checks_on_a_batch_that_contradicts_itself_is_refused(name, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    mode, change, error, says = CONTRADICTIONS[name]
    case = device_only(make_case(mode, prefix_lens=(3, 2, 6)))
    backend = backend_of(case, route)
    with pytest.raises(error, match=says):
        backend.init_forward_metadata(replace(case.batch, **change(case.batch)))
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok


@every_route
def test_with_checks_on_a_slot_holds_one_position_also_in_a_shared_prefix(route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(prefix_lens=(4, 4), new_lens=(2, 3), page_size=4)
    table, rows = case.config.req_to_token_pool.req_to_token, case.batch.req_pool_indices
    table[rows[1], :4] = table[rows[0], :4]
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok
    table[rows[1], 3] = table[rows[0], 5]
    table[rows[1], :3] = table[rows[0], 2:5]
    with pytest.raises(BadPageTable, match="is written in this step, for position 4"):
        checks.check_batch(case.batch, replace(case.config, page_size=1))


@every_route
def test_with_checks_on_a_prefix_may_be_read_in_the_step_that_writes_it(route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(prefix_lens=(0, 4), new_lens=(6, 3), page_size=4)
    table, rows = case.config.req_to_token_pool.req_to_token, case.batch.req_pool_indices
    table[rows[1], :4] = table[rows[0], :4]
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok


@every_route
@MODES
def test_with_checks_on_a_page_half_evicted_from_the_window_pool_is_refused(mode, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(mode, prefix_lens=(9,), new_lens=(1,), kind=SLIDING, window=3, hybrid=True, page_size=4)
    row = case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[0])].long()
    mapping = case.config.token_to_kv_pool.full_to_swa_index_mapping
    backend = backend_of(case, route)
    mapping[row[:4]] = 0  # a whole page that left the window: positions 6 to 9 are visible
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok
    mapping[row[4:6]] = 0
    with pytest.raises(BadPageTable, match="position 4 is not in the window pool"):
        backend.init_forward_metadata(case.batch)


# ---- always, on a CPU -------------------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("req_pool_indices", -1, "req_pool_indices span -1"),
        ("req_pool_indices", 99, r"req_pool_indices span .*99, req_to_token has"),
        ("out_cache_loc", -1, "out_cache_loc: slots span -1"),
        ("out_cache_loc", 10_000, r"out_cache_loc: slots span .*10000, the pool holds"),
    ],
)
def test_on_a_cpu_rows_and_slots_out_of_range_are_refused_without_fa_check(name, value, says, route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    case = make_case(DECODE)
    wrong = getattr(case.batch, name).clone()
    wrong[1] = value
    with pytest.raises(BadPageTable, match=says):
        backend_of(case, route).init_forward_metadata(replace(case.batch, **{name: wrong}))


@every_route
def test_on_a_cpu_a_table_that_leads_outside_the_pool_is_refused_without_fa_check(route, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)
    case = make_case(DECODE)
    case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[1]), 0] = 10_000
    with pytest.raises(BadPageTable, match=r"request 1: slots span .*10000, the pool holds"):
        backend_of(case, route).init_forward_metadata(case.batch)


# ---- fields and arguments ---------------------------------------------------------------------------------------


@every_route
def test_an_object_that_is_no_batch_is_refused_with_the_fields_it_lacks(route):
    case = make_case()
    backend = backend_of(case, route)
    with pytest.raises(BadBatch, match="SimpleNamespace without forward_mode, batch_size, req_pool_indices, seq_lens"):
        backend.init_forward_metadata(SimpleNamespace())
    backend.init_forward_metadata(case.batch)
    with pytest.raises(BadBatch, match="SimpleNamespace without"):
        forward(backend, case, batch=SimpleNamespace())


@every_route
def test_a_mode_by_name_and_host_lengths_as_a_list_are_accepted(route):
    case = make_case(DECODE)
    case = with_batch(case, forward_mode="decode", seq_lens_cpu=case.batch.seq_lens.tolist())
    assert case.batch.forward_mode is DECODE
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    assert case.judge(forward(backend, case)).ok
    with pytest.raises(BadBatch, match="seq_lens_cpu is 5; it must be a list or an integer tensor"):
        backend.init_forward_metadata(replace(case.batch, seq_lens_cpu=5))


@every_route
@pytest.mark.parametrize("name", ["q", "k", "sinks"])
def test_a_number_instead_of_a_tensor_is_refused(name, route):
    case = make_case()
    backend = backend_of(case, route)
    backend.init_forward_metadata(case.batch)
    check_refused(
        BadBatch, f"{name} is 0.5; it must be a tensor", case, lambda: forward(backend, replace(case, **{name: 0.5}))
    )


@both_packages
def test_deterministic_mode_without_host_lengths_is_refused(package):
    case = make_case(deterministic=True, host_lengths=False)
    with pytest.raises(BadBatch, match=r"deterministic mode .* needs extend_seq_lens_cpu"):
        package.plan_batch(case.batch, case.config)


# ---- pools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[1, 1], [3], [0], [5]], ids=["twice", "free-already", "padding", "unknown"])
def test_rows_that_were_not_handed_out_cannot_be_freed(rows):
    pool = ReqToTokenPool(size=4, context_len=8)
    assert pool.alloc(2) == [1, 2]
    with pytest.raises(BadBatch, match="cannot be freed"):
        pool.free(rows)
    assert pool.available_size() == 2
    pool.free([2, 1])
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]


def test_writing_keys_that_need_gradients_leaves_the_pool_without_any():
    geometry = dict(size=8, page_size=4, dtype=torch.float32, head_num=1, head_dim=8, layer_num=1)
    one = MHAKVPool(**geometry)
    full, window = MHAKVPool(**geometry), MHAKVPool(**geometry)
    two = SWAKVPool(full_pool=full, swa_pool=window, full_layer_ids=[0], swa_layer_ids=[])
    layer = AttentionLayer(layer_id=0, tp_q_head_num=1, tp_k_head_num=1, head_dim=8, scaling=1.0)
    for pool in (one, two):
        k = torch.ones(1, 1, 8, requires_grad=True)
        pool.set_kv_buffer(layer, torch.tensor([4]), k, k)
        assert not any(buffer.requires_grad for buffer in pool.get_kv_buffer(0))


@every_route
@pytest.mark.parametrize("mode", [EXTEND, DECODE])
@pytest.mark.parametrize("shared", [0, 4])
def test_a_model_of_window_layers_alone_has_a_full_pool_of_no_layers(shared, mode, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(mode, kind=LayerKind.SLIDING, hybrid=True, prefix_lens=(5, 4, 9), shared_prefix=shared)
    old = case.config.token_to_kv_pool
    geometry = dict(size=old.size, page_size=4, dtype=torch.float32, head_num=1, head_dim=16)
    pool = SWAKVPool(
        full_pool=MHAKVPool(layer_num=0, **geometry), swa_pool=old.swa_kv_pool, full_layer_ids=[], swa_layer_ids=[0]
    )
    pool.full_to_swa_index_mapping.copy_(old.full_to_swa_index_mapping)
    case = case.replace_config(token_to_kv_pool=pool)
    assert kv_slots(pool) == kv_slots(old)
    assert case.judge(run(case, route)).ok
    with pytest.raises(BadPageTable, match=f"the pool holds 0..{kv_slots(pool) - 1}"):
        run(with_batch(case, out_cache_loc=case.batch.out_cache_loc + 4096), route)


# ---- reports ----------------------------------------------------------------------------------------------------


@both_packages
def test_describe_says_which_pass_takes_sinks_and_counts_one_token_as_one(package):
    case = make_case(DECODE, prefix_lens=[4])
    title, head, *_ = package.plan_batch(case.batch, case.config).describe().splitlines()
    assert title == "DECODE: 1 query token"
    assert head.endswith("takes sinks")


def test_the_doctor_ends_quietly_when_its_reader_stops():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fa_fast.doctor", "--json"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.stderr, ended.returncode in (0, 1)) == ("", True)


def test_a_batch_and_a_layer_of_our_own_pass_through_unchanged():
    case = make_case()
    assert ForwardBatch.of(case.batch) is case.batch
    assert AttentionLayer.of(case.layer) is case.layer
    assert fa_fast.AttentionLayer is AttentionLayer
