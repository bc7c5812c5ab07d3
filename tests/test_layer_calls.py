"""What a step or a layer can hold is made once; what a server changes in between is seen all the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_fast.backend
import fa_fast.calls
import fa_fast.write
from fa_fast.kernels import torch_cpu
from fa_ref import AttentionLayer, BadBatch, BadPageTable, ForwardBatch, ForwardMode, LayerKind
from fa_ref.api import checks, planned
from fa_ref.cases import Case, make_case
from tests.support import FP8, ROUTES, cache_bytes, every_route, run, with_batch, with_layer

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
FORMS: dict[str, dict[str, Any]] = {
    "decode": dict(mode=DECODE),
    "extend": dict(mode=EXTEND),
    "new-keys": dict(mode=EXTEND, prefix_lens=(0, 0), new_lens=(5, 2)),
    "branches": dict(mode=DECODE, topk=2),
    "tree": dict(mode=VERIFY, trees=[[-1, 0, 0]] * 3),
    "latents": dict(mode=DECODE, latent=16),
    "two-pools": dict(mode=DECODE, kind=LayerKind.SLIDING, hybrid=True),
    "fp8": dict(mode=DECODE, kv_dtype=FP8, dtype=torch.bfloat16, k_scale=0.5, v_scale=torch.tensor(0.25)),
    "encoder": dict(mode=EXTEND, kind=LayerKind.CROSS, encoder_lens=(3, 0, 2)),
}
every_form = pytest.mark.parametrize("form", FORMS)


def as_server(of: Any, **changes: Any) -> SimpleNamespace:
    """A batch or layer as a server's own object, which can be changed in place."""
    return SimpleNamespace(**vars(of) | changes)


def backend_of(case: Case, batch: Any = None) -> Any:
    backend = fa_fast.FlashAttentionBackend(case.config)
    backend.init_forward_metadata(batch or case.batch)
    return backend


def forward(backend: Any, case: Case, layer: Any = None, batch: Any = None, **changes: Any) -> Tensor:
    given = dict(q=case.q, k=case.k, v=None if case.config.use_mla else case.v, sinks=case.sinks) | changes
    return backend.forward(layer=layer or case.layer, forward_batch=batch or case.batch, **given)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often batches were read and compared, layers made or checked, inputs checked, and kernel calls prepared."""
    count: Counter[str] = Counter()

    def counting(where: Any, name: str) -> None:
        right = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, **k: (count.update([name]), right(*a, **k))[1])

    for where, name in (
        (ForwardBatch, "of"), (ForwardBatch, "__post_init__"), (planned, "check_planned"),
        (AttentionLayer, "__post_init__"), (fa_fast.backend, "check_layer_pool"), (checks, "check_value"),
        (fa_fast.calls, "slots_to_write"), (torch_cpu, "prepared"),
    ):  # fmt: skip
        counting(where, name)
    return count


# ---- made once --------------------------------------------------------------------------------------------------


@every_form
def test_later_layers_of_a_step_make_and_check_nothing_anew(form, made):
    case = make_case(**FORMS[form])
    batch, layer = as_server(case.batch), as_server(case.layer)
    backend = backend_of(case, batch)
    first = forward(backend, case, layer, batch)
    made.clear()
    for _ in range(3):
        assert torch.equal(forward(backend, case, layer, batch), first)
    assert made == Counter()
    assert case.judge(first).ok


def test_the_first_layer_of_a_step_reads_the_planned_batch_no_second_time(made):
    case = make_case(DECODE)
    batch = as_server(case.batch)
    backend = backend_of(case, batch)
    assert made["of"] > 0 and made["__post_init__"] > 0
    made.clear()
    forward(backend, case, batch=batch)
    assert made["of"] == made["__post_init__"] == made["check_planned"] == 0


def test_layers_of_one_geometry_share_their_calls_and_others_do_not(made):
    case = make_case(DECODE, kind=LayerKind.SLIDING, window=5)
    backend = backend_of(case)
    like, capped = replace(case.layer, scaling=0.5), replace(case.layer, logit_cap=3.0)
    narrow = replace(case.layer, sliding_window_size=2)
    for layer, calls in ((case.layer, 1), (like, 0), (capped, 1), (narrow, 1), (capped, 0)):
        made.clear()
        changed = replace(case, layer=layer)
        assert changed.judge(forward(backend, changed)).ok
        assert made["prepared"] == calls, layer


@pytest.mark.parametrize("form", ["decode", "latents", "two-pools", "fp8"])
def test_a_new_plan_prepares_its_own_calls(form):
    """The same requests the other way round: rows, lengths and slots of the step before are in no call."""
    case = make_case(**FORMS[form])
    backend, names = backend_of(case), ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc")
    first = forward(backend, case)
    other = with_batch(case, **{name: getattr(case.batch, name).flip(0) for name in names})
    other = replace(other, q=case.q.flip(0), k=case.k.flip(0), v=case.v.flip(0))
    backend.init_forward_metadata(other.batch)
    torch.testing.assert_close(forward(backend, other), first.flip(0))


WRITES = {name: FORMS[name] for name in ("decode", "two-pools", "latents", "fp8", "encoder")}
WRITES["fp8-latents"] = FORMS["latents"] | dict(kv_dtype=FP8, k_scale=0.5)


@pytest.mark.parametrize("form", WRITES)
def test_the_write_of_a_gpu_stores_what_the_pool_stores(form, monkeypatch):
    """One kernel in place of the pool's own method; on a CPU it runs in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton runs CPU tensors only in its interpreter: TRITON_INTERPRET=1")
    numbers = dict(dtype=torch.bfloat16) | WRITES[form]
    case = make_case(**numbers)
    small = {name: torch.randint(-7, 8, getattr(case, name).shape).to(torch.bfloat16) for name in "kv"}  # exact in e4m3
    if case.config.use_mla:
        small["v"] = small["k"][:, : case.layer.v_head_dim]
    right, case = replace(make_case(**numbers), **small), replace(case, **small)
    forward(backend_of(right), right)
    launched = []
    monkeypatch.setattr(fa_fast.write, "_by_pool", lambda *a: (launched.append(1), fa_fast.write._by_kernel(*a))[1])
    forward(backend_of(case), case)
    assert launched
    assert all(torch.equal(a, b) for a, b in zip(cache_bytes(case), cache_bytes(right), strict=True))


# ---- what changes is seen ---------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Any, str]] = {
    "batch_size": (2, "of 2 requests"),
    "forward_mode": ("EXTEND", "EXTEND batch"),
    "seq_lens": (torch.tensor([9, 1, 7]), "seq_lens is"),
    "req_pool_indices": (torch.tensor([1, 2, 3]), "req_pool_indices is"),
    "out_cache_loc": (torch.tensor([4, 5]), "out_cache_loc has 2 slots"),
    "spec_info": (SimpleNamespace(topk=1, num_steps=2), "drafts to make"),
    "req_to_token_pool": (object(), "without a tensor req_to_token"),
    "mha_return_lse": (True, "mha_return_lse=True in DECODE"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_a_server_changes_in_its_batch_is_seen_by_the_next_layer(name):
    value, says = OTHERS[name]
    case = make_case(DECODE)
    batch = as_server(case.batch)
    if name in ("spec_info", "mha_return_lse"):
        delattr(batch, name)  # a field that it did not have before
    backend = backend_of(case, batch)
    forward(backend, case, batch=batch)
    before = cache_bytes(case)
    old = getattr(case.batch, name)
    setattr(batch, name, value)
    with pytest.raises(BadBatch, match=says):
        forward(backend, case, batch=batch)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    setattr(batch, name, old)
    assert case.judge(forward(backend, case, batch=batch)).ok


def test_every_field_of_a_batch_is_watched(made):
    case = make_case(DECODE)
    batch = as_server(case.batch)
    backend = backend_of(case, batch)
    for name in (f.name for f in fields(ForwardBatch)):
        value = getattr(batch, name)
        copies = {int: 10**6, bool: value, type(None): 0, list: [*(value or [])] if isinstance(value, list) else 0}
        setattr(batch, name, value.clone() if isinstance(value, Tensor) else copies.get(type(value), value))
        if getattr(batch, name) is value:
            continue  # there is one True and one mode: the same object means the same
        made.clear()
        try:
            forward(backend, case, batch=batch)
        except BadBatch:
            made["of"] += 1
        assert made["of"], name
        setattr(batch, name, value)
        forward(backend, case, batch=batch)


@pytest.mark.parametrize("change", [dict(num_steps=2), dict(topk=1)], ids=str)
def test_a_server_s_draft_changed_in_place_is_seen(change):
    case = make_case(DECODE, topk=2)
    batch = as_server(case.batch, spec_info=as_server(case.batch.spec_info))
    backend = backend_of(case, batch)
    forward(backend, case, batch=batch)
    vars(batch.spec_info).update(change)
    with pytest.raises(BadBatch, match="the planned batch drafts to make, topk=2, num_steps=3"):
        forward(backend, case, batch=batch)


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("seq_lens", 2, BadBatch, "seq_lens is .*2.*the planned batch has"),
        ("req_pool_indices", 3, BadBatch, "req_pool_indices is"),
        ("out_cache_loc", 10_000, BadPageTable, r"out_cache_loc: slots span .*10000"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["our-batch", "a-server-s"])
def test_on_a_cpu_values_written_between_two_layers_are_seen(own, name, value, error, says):
    case = make_case(DECODE)
    case = with_batch(case, **{name: getattr(case.batch, name).clone()})
    batch = case.batch if own else as_server(case.batch)
    backend = backend_of(case, batch)
    forward(backend, case, batch=batch)
    before = cache_bytes(case)
    getattr(batch, name)[1] = value
    with pytest.raises(error, match=says):
        forward(backend, case, batch=batch)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"


def test_batches_made_in_inference_mode_run():
    """Their tensors do not count writes."""
    with torch.inference_mode():
        case = make_case(DECODE)
        backend = backend_of(case)
        assert torch.equal(forward(backend, case), forward(backend, case))


def test_with_checks_on_every_layer_s_batch_is_compared(made, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = make_case(DECODE)
    backend = backend_of(case)
    made.clear()
    for _ in range(3):
        forward(backend, case)
    assert made["check_planned"] == 3


@every_form
def test_inputs_of_another_look_are_checked_at_every_layer(form):
    case = make_case(**FORMS[form])
    backend = backend_of(case)
    first = forward(backend, case)
    before = cache_bytes(case)
    spaced = torch.empty(*case.q.shape, 2, dtype=case.q.dtype)[..., 0]
    for name in ("q", "k"):
        good = getattr(case, name)
        for bad in (good[:-1], good.double(), good.to("meta"), spaced, 0.5):
            with pytest.raises(BadBatch, match=f"{name} (is|has|of)"):
                forward(backend, case, **{name: bad})
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    assert torch.equal(forward(backend, case), first)


def test_a_pool_s_new_buffers_are_read_and_written():
    case = make_case(DECODE)
    backend, pool = backend_of(case), case.config.token_to_kv_pool
    first = forward(backend, case)
    old = pool.k_buffer[0], pool.v_buffer[0]
    pool.k_buffer[0], pool.v_buffer[0] = old[0].clone(), 2 * old[1]
    new = forward(backend, case, v=2 * case.v)
    torch.testing.assert_close(new, 2 * first)
    assert torch.equal(pool.v_buffer[0][case.batch.out_cache_loc], 2 * old[1][case.batch.out_cache_loc])


def test_a_pool_s_new_latents_are_read():
    case = make_case(DECODE, latent=16)
    backend, pool = backend_of(case), case.config.token_to_kv_pool
    first = forward(backend, case)
    pool.kv_buffer[0] = 2 * pool.kv_buffer[0]
    cached = replace(case, k=None, v=None)
    second = forward(backend, cached)
    assert not torch.allclose(second, first)
    assert cached.judge(second).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scale_written_in_place_is_seen(dtype):
    scale = torch.tensor([0.5], dtype=dtype)
    case = make_case(DECODE, kv_dtype=FP8, dtype=torch.bfloat16, k_scale=0.5, v_scale=scale)
    backend = backend_of(case)
    forward(backend, case)
    scale.fill_(0.25)
    assert torch.equal(forward(backend, case), run(with_layer(case, v_scale=0.25), "fast"))


@every_route
@pytest.mark.parametrize("size", [3.0, "3", None, True], ids=repr)
def test_a_batch_size_that_is_no_number_is_refused_by_forward_before_anything_is_written(size, route):
    case = make_case(DECODE, prefix_lens=(4,)) if size is True else make_case(DECODE)
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    backend.init_forward_metadata(case.batch)
    before = cache_bytes(case)
    with pytest.raises(BadBatch, match=f"batch_size is {size!r}; it must be an int"):
        forward(backend, case, batch=replace(case.batch, batch_size=size))
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    assert case.judge(forward(backend, case)).ok
