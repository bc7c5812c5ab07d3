"""Bad arguments of the three functions: both packages refuse the same ones, by name, and write nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
import fa_ref
from fa_fast.kernels import sgl_cuda
from fa_ref import BadBatch, BadPageTable, UnsupportedByProvider
from tests.support import FP8, both_packages

F32, BF16 = torch.float32, torch.bfloat16


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged() -> dict[str, Any]:
    """Two sequences of 1 and 2 queries over 5 and 3 keys; 4 query heads over 2, in pages of 4."""
    return dict(
        q=torch.randn(3, 4, 16), k_cache=torch.randn(6, 4, 2, 16), v_cache=torch.randn(6, 4, 2, 16),
        cache_seqlens=int32(5, 3), page_table=torch.tensor([[1, 2], [4, 0]], dtype=torch.int32),
        cu_seqlens_q=int32(0, 1, 3),
    )  # fmt: skip


def dense() -> dict[str, Any]:
    """The same without a page table, over a cache of two rows of 4."""
    return paged() | dict(
        k_cache=torch.randn(2, 4, 2, 16), v_cache=torch.randn(2, 4, 2, 16), page_table=None, cache_seqlens=int32(4, 3)
    )


def batched() -> dict[str, Any]:
    return paged() | dict(q=torch.randn(2, 3, 4, 16), cu_seqlens_q=None)


def ragged() -> dict[str, Any]:
    return dict(
        q=torch.randn(3, 4, 16), k=torch.randn(8, 2, 16), v=torch.randn(8, 2, 16), cu_seqlens_q=int32(0, 1, 3),
        cu_seqlens_k=int32(0, 5, 8),
    )  # fmt: skip


def call(package: Any, arguments: dict[str, Any]) -> Any:
    name = "flash_attn_with_kvcache" if "k_cache" in arguments else "flash_attn_varlen_func"
    return getattr(package, name)(**arguments)


GOOD = [paged, dense, batched, ragged]
every_call = pytest.mark.parametrize("good", GOOD, ids=lambda good: good.__name__)


@every_call
@both_packages
def test_the_good_calls_run(package, good):
    assert call(package, good()).shape == good()["q"].shape


def wider(x: Tensor) -> Tensor:
    """The same values with stride 2 in the last dim."""
    return x.repeat_interleave(2, -1)[..., ::2]


IN_BOTH = [  # what both functions take
    (BadBatch, "multiple of the KV heads", dict(q=torch.zeros(3, 3, 16))),
    (BadBatch, "head dim 8", dict(q=torch.zeros(3, 4, 8))),
    (BadBatch, "q is a torch.float32 tensor of shape .1, 3, 4, 16.", dict(q=torch.zeros(1, 3, 4, 16))),
    (BadBatch, "q is torch.int32 .* floating", dict(q=torch.zeros(3, 4, 16, dtype=torch.int32))),
    (BadBatch, "q .*stride 2", dict(q=wider(torch.zeros(3, 4, 16)))),
    (BadBatch, "cu_seqlens_q is a torch.int64 .*int32", dict(cu_seqlens_q=torch.tensor([0, 1, 3]))),
    (BadBatch, r"cu_seqlens_q is \[0, 1, 3\]; .*int32", dict(cu_seqlens_q=[0, 1, 3])),
    (BadBatch, "cu_seqlens_q is empty", dict(cu_seqlens_q=int32())),
    (BadBatch, r"cu_seqlens_q is \[0, 2, 1\]", dict(cu_seqlens_q=int32(0, 2, 1))),
    (BadBatch, r"cu_seqlens_q is \[1, 2, 3\]", dict(cu_seqlens_q=int32(1, 2, 3))),
    (BadBatch, r"cu_seqlens_q is \[0, 1, 4\] for 3 tokens", dict(cu_seqlens_q=int32(0, 1, 4))),
    (BadBatch, "sequence of 2 queries", dict(max_seqlen_q=1)),
    (BadBatch, r"sinks is .*\(3,\); it must be \(4,\)", dict(sinks=torch.zeros(3))),
    (BadBatch, r"sinks is .*\(1,\); it must be \(4,\)", dict(sinks=torch.zeros(1))),
    (BadBatch, "sinks is 0.5", dict(sinks=0.5)),
    (BadBatch, r"qv is .*\(3, 4, 8\)", dict(qv=torch.zeros(3, 4, 8))),
    (BadBatch, r"qv is .*\(1, 3, 4, 16\)", dict(qv=torch.zeros(1, 3, 4, 16))),
    (BadBatch, "qv is a torch.bfloat16", dict(qv=torch.zeros(3, 4, 16, dtype=BF16))),
    *(
        (BadBatch, rf"{name} is .*must be torch.float32 \(2, 2\)", {name: factor})
        for name in ("q_descale", "k_descale", "v_descale")
        for factor in (torch.ones(1, 2), torch.ones(2), torch.tensor(1.0), torch.ones(2, 4), torch.ones(3, 2))
    ),
    (BadBatch, "k_descale is 0.5", dict(k_descale=0.5)),
    (BadBatch, "out is a torch.bfloat16", dict(out=torch.empty(3, 4, 16, dtype=BF16))),
    (BadBatch, r"out is .*\(3, 4, 8\)", dict(out=torch.empty(3, 4, 8))),
    (BadBatch, r"out is .*\(48, 4\)", dict(out=torch.empty(48, 4))),
    (BadBatch, "out .*stride 2", dict(out=wider(torch.empty(3, 4, 16)))),
    (BadBatch, "window_size is None", dict(window_size=None)),
    (BadBatch, "window_size is 3", dict(window_size=3)),
    (BadBatch, "window_size is .1, 2, 3.", dict(window_size=(1, 2, 3))),
    (BadBatch, "attention_chunk is -1", dict(attention_chunk=-1)),
    (BadBatch, "attention_chunk is 2.5", dict(attention_chunk=2.5)),
    (BadBatch, "sinks is on meta", dict(sinks=torch.empty(4, device="meta"))),
    (BadBatch, "out is on meta", dict(out=torch.empty(3, 4, 16, device="meta"))),
]
PAGED = [
    (BadBatch, "k_cache is .*6, 4, 16", dict(k_cache=torch.zeros(6, 4, 16))),
    (BadBatch, "agree in dtype and in all but", dict(v_cache=torch.zeros(6, 2, 2, 16))),
    (BadBatch, "agree in dtype and in all but", dict(v_cache=torch.zeros(6, 4, 2, 16, dtype=BF16))),
    (BadBatch, "v_cache .*stride 2", dict(v_cache=wider(torch.zeros(6, 4, 2, 16)))),
    (BadBatch, "page_table is a torch.int64 .*int32", dict(page_table=torch.tensor([[1, 2], [4, 0]]))),
    (BadBatch, "page_table is .*rank 2", dict(page_table=int32(1, 2))),
    (BadBatch, r"page_table is \[\[1, 2\]", dict(page_table=[[1, 2], [4, 0]])),
    (BadBatch, "page_table is on meta", dict(page_table=torch.empty(2, 2, dtype=torch.int32, device="meta"))),
    (BadPageTable, r"rows of the sequences are \[0, 1\], but there are 1", dict(page_table=int32(1, 2)[None])),
    (BadPageTable, r"row 1 .* page ids -1\.\.-1.*0\.\.5", dict(page_table=int32(1, 2, -1, 0).view(2, 2))),
    (BadPageTable, r"row 0 .* page ids 1\.\.6.*0\.\.5", dict(page_table=int32(1, 6, 4, 0).view(2, 2))),
    (BadBatch, "cache_seqlens is a torch.int64 .*int32", dict(cache_seqlens=torch.tensor([5, 3]))),
    (BadBatch, r"cache_seqlens is \[5, 3\]; .*int32", dict(cache_seqlens=[5, 3])),
    (BadBatch, "cache_seqlens has 1 entries for 2", dict(cache_seqlens=int32(5))),
    (BadBatch, "cache_seqlens holds -1", dict(cache_seqlens=int32(-1, 3))),
    (BadBatch, "cache_seqlens holds -1", dict(cache_seqlens=-1)),
    (BadPageTable, "reach 9; .* holds 8", dict(cache_seqlens=int32(9, 3))),
    (BadPageTable, "reach 9; .* holds 8", dict(cache_seqlens=9)),
    (BadBatch, "cache_seqlens is on meta", dict(cache_seqlens=torch.empty(2, dtype=torch.int32, device="meta"))),
    (BadBatch, "cache_batch_idx is a torch.int64 .*int32", dict(cache_batch_idx=torch.tensor([0, 1]))),
    (BadBatch, "cache_batch_idx has 1 entries for 2", dict(cache_batch_idx=int32(0))),
    (BadBatch, "cache_batch_idx has 3 entries for 2", dict(cache_batch_idx=int32(0, 1, 0))),
    (BadPageTable, r"\[0, 2\], but there are 2 rows", dict(cache_batch_idx=int32(0, 2))),
    (BadPageTable, r"\[-1, 0\], but there are 2 rows", dict(cache_batch_idx=int32(-1, 0))),
]
DENSE = [
    (BadBatch, "cache_seqlens holds -1", dict(cache_seqlens=int32(-1, 3))),
    (BadPageTable, "reach 5; .* holds 4", dict(cache_seqlens=int32(5, 3))),
    (BadPageTable, r"\[0, 9\], but there are 2 rows", dict(cache_batch_idx=int32(0, 9))),
    (BadPageTable, r"\[-1, 0\], but there are 2 rows", dict(cache_batch_idx=int32(-1, 0))),
]
BATCHED = [
    (BadBatch, "q is .*batch, seqlen", dict(q=torch.zeros(6, 4, 16))),
    (BadBatch, r"qv is .*\(6, 4, 16\)", dict(qv=torch.zeros(6, 4, 16))),
    (BadBatch, r"out is .*\(6, 4, 16\)", dict(out=torch.zeros(6, 4, 16))),
]
RAGGED = [
    (BadBatch, "k is .*keys, kv_heads", dict(k=torch.zeros(2, 4, 2, 16))),
    (BadBatch, "agree in dtype and in all but", dict(v=torch.zeros(8, 2, 16, dtype=BF16))),
    (BadBatch, "agree in dtype and in all but", dict(v=torch.zeros(7, 2, 16))),
    (BadBatch, "cu_seqlens_q has 3 entries, cu_seqlens_k 2", dict(cu_seqlens_k=int32(0, 8))),
    (BadBatch, r"cu_seqlens_k is \[0, 5, 9\] for 8 tokens", dict(cu_seqlens_k=int32(0, 5, 9))),
    (BadBatch, r"cu_seqlens_k is \[1, 5, 8\]", dict(cu_seqlens_k=int32(1, 5, 8))),
    (BadBatch, r"cu_seqlens_k is \[0, 5, 4\]", dict(cu_seqlens_k=int32(0, 5, 4))),
]
BAD = [
    *((good, *bad) for good in (paged, ragged) for bad in IN_BOTH),
    *((paged, *bad) for bad in PAGED),
    *((dense, *bad) for bad in DENSE),
    *((batched, *bad) for bad in BATCHED),
    *((ragged, *bad) for bad in RAGGED),
]


@both_packages
@pytest.mark.parametrize(
    ("good", "error", "says", "change"), BAD, ids=[f"{n}-{bad[0].__name__}-{bad[2]}" for n, bad in enumerate(BAD)]
)
def test_a_bad_argument_is_refused_by_name(package, good, error, says, change, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1" if "page ids" in says else "0")
    out = torch.full(good()["q"].shape, 7.0)
    with pytest.raises(error, match=says):
        call(package, good() | dict(out=out) | change)
    assert (out == 7).all()


@every_call
@both_packages
def test_no_chunk_is_none_or_zero(package, good):
    arguments = good() | dict(causal=True)
    plain = call(package, arguments)
    for off in (None, 0):
        assert torch.equal(call(package, arguments | dict(attention_chunk=off)), plain)


@every_call
@both_packages
@pytest.mark.parametrize("name", ["q", "keys", "values", "qv", "a part of q"])
def test_out_may_not_share_memory_with_what_is_read(package, good, name):
    arguments = good()
    arguments["qv"] = torch.randn(arguments["q"].shape)
    q_shape = arguments["q"].shape
    keys, values = [key for key in arguments if key.startswith(("k", "v"))]
    if name == "a part of q":
        both = torch.randn(2, *q_shape)
        arguments["q"], out = both[0], both[1]
    else:
        name = {"keys": keys, "values": values}.get(name, name)
        buffer = torch.randn(max(arguments[name].numel(), arguments["q"].numel()))
        arguments[name] = buffer[: arguments[name].numel()].view(arguments[name].shape)
        out = buffer[: arguments["q"].numel()].view(q_shape)
    before = out.clone()
    with pytest.raises(BadBatch, match="out shares its storage with"):
        call(package, arguments | dict(out=out))
    assert torch.equal(out, before)


@every_call
@both_packages
def test_out_may_be_a_slice_of_a_wider_buffer(package, good):
    arguments = good()
    wide = torch.full((*arguments["q"].shape[:-1], 40), 7.0)
    out = wide[..., 8:24]
    result = call(package, arguments | dict(out=out))
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out, call(package, arguments))
    assert (wide[..., :8] == 7).all() and (wide[..., 24:] == 7).all()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("keys", [3, 700])
@pytest.mark.parametrize("bad", [-1, 6, -(2**30)])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_cpu_names_a_page_id_outside_the_cache_without_being_asked_to_look(page_size, keys, bad, queries):
    pages = -(-keys // page_size)
    table = torch.arange(pages, dtype=torch.int32)[None] * 5 % 6
    table[0, pages // 2] = bad
    cache = torch.zeros(6, page_size, 1, 16)
    arguments = dict(k_cache=cache, v_cache=cache, page_table=table, cache_seqlens=keys)
    with pytest.raises(BadPageTable, match=r"page table .*6 pages"):
        fa_fast.flash_attn_with_kvcache(torch.zeros(1, queries, 2, 16), **arguments)
    table[0, pages // 2] = 0
    fa_fast.flash_attn_with_kvcache(torch.zeros(1, queries, 2, 16), **arguments)


@pytest.mark.parametrize("good", [paged, ragged], ids=["paged", "ragged"])
def test_keys_of_a_wider_dtype_than_the_queries_are_refused_by_the_fast_kernels(good):
    with pytest.raises(UnsupportedByProvider, match=r"bfloat16.*float32|float32.*bfloat16"):
        call(fa_fast, good() | dict(q=good()["q"].to(BF16)))


# ---- merge_state ------------------------------------------------------------------------------------------------

STATE = dict(out_a=torch.ones(3, 2, 4), lse_a=torch.zeros(3, 2), out_b=torch.ones(3, 2, 4), lse_b=torch.zeros(3, 2))


@both_packages
@pytest.mark.parametrize(
    ("says", "change"),
    [
        (r"out is .*\(1, 2, 4\)", dict(out=torch.ones(1, 2, 4))),
        (r"out is .*\(3, 2, 2\)", dict(out=torch.ones(3, 2, 2))),
        (r"out is .*\(4, 2, 4\)", dict(out=torch.ones(4, 2, 4))),
        ("out is a torch.bfloat16", dict(out=torch.ones(3, 2, 4, dtype=BF16))),
        ("out .*stride 2", dict(out=wider(torch.ones(3, 2, 4)))),
        ("out is on meta", dict(out=torch.ones(3, 2, 4, device="meta"))),
        ("out_a .*stride 2", dict(out_a=wider(torch.ones(3, 2, 4)))),
        ("out_b .*stride 2", dict(out_b=wider(torch.ones(3, 2, 4)))),
        (r"out_b is .*\(1, 2, 4\)", dict(out_b=torch.ones(1, 2, 4))),
        ("out_b is a torch.bfloat16", dict(out_b=torch.ones(3, 2, 4, dtype=BF16))),
        (r"out_a is .*\(3, 2\)", dict(out_a=torch.ones(3, 2))),
        (r"lse_a is .*\(2, 3\)", dict(lse_a=torch.zeros(2, 3))),
        (r"lse_b is .*\(3,\)", dict(lse_b=torch.zeros(3))),
        ("lse_a is a torch.bfloat16", dict(lse_a=torch.zeros(3, 2, dtype=BF16))),
        ("lse_b is a torch.float64", dict(lse_b=torch.zeros(3, 2, dtype=torch.float64))),
        ("lse_b is on meta", dict(lse_b=torch.zeros(3, 2, device="meta"))),
    ],
)
def test_a_bad_state_is_refused_by_name(package, says, change):
    assert torch.equal(package.merge_state(**STATE)[0], STATE["out_a"])
    with pytest.raises(BadBatch, match=says):
        package.merge_state(**STATE | change)


# ---- fp8, and the builds of sgl-kernel --------------------------------------------------------------------------


def test_an_fp8_cache_takes_batched_queries(device):
    gen = torch.Generator().manual_seed(4)
    dtype = BF16 if device == "cuda" else F32
    k, v = (torch.randn(6, 16, 2, 64, generator=gen).to(device, FP8) for _ in "kv")
    q = torch.randn(2, 3, 4, 64, generator=gen).to(device, dtype)
    scales = {f"{name}_descale": (0.5 + torch.rand(2, 2, generator=gen)).to(device) for name in ("q", "k", "v")}
    table = torch.tensor([[1, 2], [4, 0]], dtype=torch.int32, device=device)
    arguments = dict(k_cache=k, v_cache=v, page_table=table, cache_seqlens=int32(20, 9).to(device), causal=True,
                     return_softmax_lse=True, **scales)  # fmt: skip
    out, lse = fa_fast.flash_attn_with_kvcache(q=q, **arguments)
    packed, packed_lse = fa_fast.flash_attn_with_kvcache(
        q=q.flatten(0, 1), cu_seqlens_q=int32(0, 3, 6).to(device), max_seqlen_q=3, **arguments
    )
    room = 0.1 if device == "cuda" else 1e-5
    torch.testing.assert_close(out.flatten(0, 1), packed, atol=room, rtol=room)
    torch.testing.assert_close(lse.flatten(0, 1), packed_lse, atol=room, rtol=room)
    right, right_lse = fa_ref.flash_attn_with_kvcache(q=q, **arguments)
    torch.testing.assert_close(out, right, atol=room, rtol=room)
    torch.testing.assert_close(lse, right_lse, atol=room, rtol=room)


def test_ragged_fp8_keys_take_wide_queries(device):
    gen = torch.Generator().manual_seed(5)
    dtype = BF16 if device == "cuda" else F32
    q = torch.randn(5, 4, 64, generator=gen).to(device, dtype)
    k, v = (torch.randn(9, 2, 64, generator=gen).to(device, FP8) for _ in "kv")
    cu_q, cu_k = int32(0, 2, 5).to(device), int32(0, 5, 9).to(device)
    arguments = dict(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3, max_seqlen_k=5,
                     return_softmax_lse=True)  # fmt: skip
    out, lse = fa_fast.flash_attn_varlen_func(**arguments)
    right, right_lse = fa_ref.flash_attn_varlen_func(**arguments)
    assert out.dtype == dtype
    room = 0.1 if device == "cuda" else 1e-5
    torch.testing.assert_close(out, right, atol=room, rtol=room)
    torch.testing.assert_close(lse, right_lse, atol=room, rtol=room)


@pytest.mark.parametrize("takes_out", [True, False])
@pytest.mark.parametrize("good", [paged, ragged], ids=["paged", "ragged"])
def test_a_build_of_sgl_kernel_without_out_gets_a_copy(good, takes_out, monkeypatch):
    """sgl-kernel 0.3.21 has no `out`; later builds have."""
    answer, lse, given = torch.full((3, 4, 16), 2.0), torch.zeros(4, 3), []

    def with_out(q, out=None, **arguments):
        given.append(out)
        return answer if out is None else out.copy_(answer), lse

    def without_out(q, k=None, cu_seqlens_q=None, k_cache=None, v_cache=None, v=None, cu_seqlens_k=None,
                    q_descale=None, k_descale=None, v_descale=None, cache_seqlens=None, page_table=None,
                    softmax_scale=None, return_softmax_lse=False):  # fmt: skip
        given.append(None)
        return answer, lse

    build = with_out if takes_out else without_out
    fake = SimpleNamespace(flash_attn_with_kvcache=build, flash_attn_varlen_func=build)
    monkeypatch.setattr(sgl_cuda, "_fa3", lambda: fake)
    monkeypatch.setattr(sgl_cuda, "_operator", lambda: None)
    sgl_cuda._accepts.cache_clear()
    out = torch.empty(3, 4, 16)
    try:
        result: Any = call(sgl_cuda, good() | dict(out=out))
    finally:
        sgl_cuda._accepts.cache_clear()
    assert result is out and torch.equal(out, answer)
    assert given == [out] if takes_out else given == [None]
