"""FA3's operator is called by the names in its schema, with what the Python function around it would give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
from fa_fast.kernels import fa3_op, sgl_cuda
from fa_fast.kernels.fa3_op import Operator
from fa_ref import ForwardMode, LayerKind, UnsupportedByProvider
from fa_ref.cases import make_case
from tests.support import FP8

NEWEST = """Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,
Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,
int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,
Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool is_causal,
int window_size_left, int window_size_right, int attention_chunk, float softcap, bool is_rotary_interleaved,
Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? sinks""".replace("\n", " ")
OLDEST = NEWEST.replace("int attention_chunk, ", "").replace(", Tensor? sinks", "").replace("float? soft", "float soft")
SCHEMAS = {
    "newest": NEWEST,
    "oldest": OLDEST,
    "with-a-switch": NEWEST.replace("int sm_margin", "bool only_qv, int sm_margin"),
    "in-another-order": ", ".join(NEWEST.split(", ")[:3] + NEWEST.split(", ")[:2:-1]),
    "with-more-that-may-be-left-out": NEWEST + ", Tensor? mask, int tile=128",
}
counted = iter(range(1000))


class Build:
    """An operator of some schema that answers with zeros, and keeps what it was given by the schema's names."""

    def __init__(self, schema: str) -> None:
        name = f"fa_test_{next(counted)}"
        self._library = torch.library.Library(name, "DEF")
        self._library.define(f"fwd({schema}) -> (Tensor, Tensor, Tensor, Tensor)")
        self._library.impl("fwd", self._answer, "CompositeExplicitAutograd")
        self.namespace = getattr(torch.ops, name)
        self.op = self.namespace.fwd.default
        self.names = [argument.name for argument in self.op._schema.arguments]
        self.given: dict[str, Any] = {}

    def _answer(self, *values: Any) -> tuple[Tensor, ...]:
        self.given = dict(zip(self.names, values, strict=False))
        q, v, out = (self.given.get(name) for name in ("q", "v", "out"))
        assert q is not None and v is not None
        answer = q.new_ones(*q.shape[:-1], v.shape[-1]) if out is None else out.fill_(1).clone()
        return answer, torch.zeros(q.shape[-2], q.shape[0]), q.new_empty(0), q.new_empty(0)


@pytest.fixture(params=SCHEMAS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    build = Build(SCHEMAS[request.param])
    operator = Operator(build.op)
    monkeypatch.setattr(sgl_cuda, "_operator", lambda: operator)
    monkeypatch.setattr(sgl_cuda, "_accepts", lambda function, argument: True)
    return build


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


PAGED = dict(
    page_table=torch.zeros(2, 3, dtype=torch.int32), cache_batch_idx=int32(1, 0), cache_seqlens=int32(5, 6),
    cu_seqlens_q=int32(0, 1, 2), max_seqlen_q=1, causal=True, window_size=(7, 0), softcap=3.0, num_splits=2,
    scheduler_metadata=int32(4),
)  # fmt: skip
RENAMED = dict(causal="is_causal", cache_batch_idx="kv_batch_idx", cache_seqlens="seqused_k")
Q, CACHE = torch.randn(2, 4, 8), torch.randn(6, 2, 2, 8)


def test_every_argument_reaches_the_operator_under_its_own_name(build):
    call = sgl_cuda.prepared("flash_attn_with_kvcache", **PAGED)
    latent = torch.randn(2, 4, 8)
    out = call(q=Q, qv=latent, k_cache=CACHE, v_cache=CACHE, softmax_scale=0.5, sinks=None)
    assert torch.equal(out, torch.ones(2, 4, 8))
    right: dict[str, Any] = {RENAMED.get(name, name): value for name, value in PAGED.items()}
    left, after = right.pop("window_size")
    right |= dict(q=Q, k=CACHE, v=CACHE, q_v=latent, softmax_scale=0.5, window_size_left=left, window_size_right=after)
    for name, value in right.items():
        found = build.given[name]
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, name
    neutral = dict(is_rotary_interleaved=True, sm_margin=0, attention_chunk=0, only_qv=False, tile=128)
    for name in set(build.given) - set(right):
        assert build.given[name] == neutral.get(name), name


def test_a_ragged_call_reaches_the_operator(build):
    cu = int32(0, 1, 2)
    arguments = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=1, max_seqlen_k=1, causal=True, num_splits=0)
    out, lse = sgl_cuda.prepared("flash_attn_varlen_func", return_softmax_lse=True, **arguments)(
        q=Q, k=Q[:, :2], v=Q[:, :2, :6]
    )
    assert out.shape == (2, 4, 6) and lse.shape == (2, 4)
    found = build.given
    assert torch.equal(found["cu_seqlens_k"], cu) and found["max_seqlen_k"] == 1 and found["softmax_scale"] == 8**-0.5
    assert (found["page_table"], found["window_size_left"], found["window_size_right"]) == (None, -1, -1)


def test_one_layer_s_arguments_do_not_reach_the_next(build):
    call = sgl_cuda.prepared("flash_attn_with_kvcache", **PAGED)
    out = torch.empty(2, 4, 8)
    assert call(q=Q, k_cache=CACHE, v_cache=CACHE, k_descale=torch.ones(2, 2), out=out) is out
    call(q=Q, k_cache=CACHE, v_cache=CACHE)
    assert (build.given["k_descale"], build.given["out"]) == (None, None)


def test_tables_and_lengths_with_gaps_are_closed_as_the_python_function_does(build):
    wide = torch.arange(12, dtype=torch.int32).view(2, 6)[:, ::2]
    lens = int32(5, 0, 6, 0)[::2]
    sgl_cuda.flash_attn_with_kvcache(
        q=Q, k_cache=CACHE, v_cache=CACHE, **PAGED | dict(page_table=wide, cache_seqlens=lens)
    )
    for name, value in (("page_table", wide), ("seqused_k", lens)):
        assert build.given[name].is_contiguous() and torch.equal(build.given[name], value)


def test_an_argument_that_a_build_lacks_is_refused_by_its_name(monkeypatch):
    operator = Operator(Build(OLDEST).op)
    monkeypatch.setattr(sgl_cuda, "_operator", lambda: operator)
    with pytest.raises(UnsupportedByProvider, match="takes no sinks; it takes q, k, v"):
        sgl_cuda.prepared("flash_attn_with_kvcache", **PAGED)(q=Q, k_cache=CACHE, v_cache=CACHE, sinks=torch.zeros(4))
    with pytest.raises(UnsupportedByProvider, match="takes no attention_chunk"):
        sgl_cuda.prepared("flash_attn_with_kvcache", **PAGED, attention_chunk=8)
    sgl_cuda.prepared("flash_attn_with_kvcache", **PAGED, attention_chunk=0)(q=Q, k_cache=CACHE, v_cache=CACHE)


FA3_CASES: dict[str, dict[str, Any]] = {
    "decode": dict(mode=ForwardMode.DECODE),
    "extend": dict(prefix_lens=(100, 0, 7), new_lens=(5, 130, 1)),
    "new-keys": dict(prefix_lens=(0, 0), new_lens=(130, 1)),
    "window": dict(mode=ForwardMode.DECODE, kind=LayerKind.SLIDING, window=20),
    "sinks-softcap": dict(mode=ForwardMode.DECODE, sinks=True, softcap=5.0),
    "fp8": dict(mode=ForwardMode.DECODE, kv_dtype=FP8, k_scale=0.5, v_scale=0.25),
    "latents": dict(mode=ForwardMode.DECODE, latent=512, rope=64, heads=16),
    "tree": dict(mode=ForwardMode.TARGET_VERIFY, trees=[[-1, 0, 0, 1]] * 3),
    "branches": dict(mode=ForwardMode.DECODE, topk=2, sinks=True),
    "deterministic": dict(prefix_lens=(100, 0, 7), new_lens=(1, 130, 1), deterministic=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", FA3_CASES)
def test_the_operator_gives_the_bits_of_the_python_function_around_it(name, page_size, monkeypatch):
    settings = dict(heads=8, kv_heads=2, head_dim=128, prefix_lens=(100, 1, 700), dtype=torch.bfloat16, device="cuda")
    case = make_case(**settings | FA3_CASES[name] | dict(page_size=page_size))
    assert sgl_cuda._operator() is not None, fa3_op.find_operator()
    direct = case.run(fa_fast)
    monkeypatch.setattr(sgl_cuda, "_operator", lambda: None)
    assert torch.equal(case.run(fa_fast), direct)


STRANGE = {
    "an-argument-that-nobody-knows": (NEWEST + ", int warps", "takes warps"),
    "no-page-table": (NEWEST.replace("Tensor? page_table, ", ""), "has no page_table"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_operator_that_nobody_knows_is_called_through_the_build_s_own_function(name, monkeypatch):
    schema, says = STRANGE[name]
    build = Build(schema)
    monkeypatch.setattr(fa3_op.torch.ops, "sgl_kernel", build.namespace, raising=False)
    assert says in str(fa3_op.find_operator())
    called = []
    fake = SimpleNamespace(flash_attn_with_kvcache=lambda **given: (called.append(given), Q, torch.zeros(4, 2))[1:])
    monkeypatch.setattr(sgl_cuda, "_fa3", lambda: fake)
    sgl_cuda._operator.cache_clear()
    try:
        assert sgl_cuda.prepared("flash_attn_with_kvcache", **PAGED)(q=Q, k_cache=CACHE, v_cache=CACHE) is Q
    finally:
        sgl_cuda._operator.cache_clear()
    (given,) = called
    assert given["page_table"] is PAGED["page_table"] and given["k_cache"] is CACHE and "qv" not in given


def test_without_an_operator_the_build_s_own_function_is_called(monkeypatch):
    monkeypatch.setattr(fa3_op.torch.ops, "sgl_kernel", SimpleNamespace(), raising=False)
    assert fa3_op.find_operator() == "this build registers no torch.ops.sgl_kernel.fwd"
    monkeypatch.setattr(fa3_op.torch.ops, "sgl_kernel", Build(NEWEST).namespace, raising=False)
    assert isinstance(fa3_op.find_operator(), Operator)
