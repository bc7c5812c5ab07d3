"""The emulated Intel builds compute attention, and have the limits that the real ones were seen to have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import FP8, by_hand
from tests.xpu import emulated_sgl, emulated_vllm
from tests.xpu.dense import KernelError
from tests.xpu.emulated_sgl import BUILDS
from tests.xpu.signatures import GENERATIONS

every_generation = pytest.mark.parametrize("generation", GENERATIONS)
BF16 = torch.bfloat16


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(page: int = 64, *, new: tuple[int, ...] = (3, 0, 1), lens: tuple[int, ...] = (70, 5, 64), dim: int = 64):
    """Ragged queries over random pages; NaN in what no sequence owns. Returns the call and contiguous keys, values."""
    width = [-(-n // page) for n in lens]
    order = torch.randperm(2 * sum(width) + 1)[: sum(width)].split(width)
    k, v = (torch.full((2 * sum(width) + 1, page, 2, dim), torch.nan, dtype=BF16) for _ in range(2))
    table = torch.zeros(len(lens), max(width), dtype=torch.int32)
    for row, (pages, length) in enumerate(zip(order, lens, strict=True)):
        table[row, : len(pages)] = pages
        for cache in (k, v):
            rows = torch.zeros(len(pages) * page, 2, dim)
            rows[:length] = torch.randn(length, 2, dim)
            cache[pages] = rows.view(len(pages), page, 2, dim).to(BF16)
    cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    call: dict[str, Any] = dict(
        q=torch.randn(sum(new), 4, dim).to(BF16), k_cache=k, v_cache=v, page_table=table, cache_seqlens=int32(*lens),
        cu_seqlens_q=cu, max_seqlen_q=max(new), max_seqlen_k=max(lens), causal=True,
    )  # fmt: skip
    keys = [k[pages].flatten(0, 1)[:n] for pages, n in zip(order, lens, strict=True)]
    values = [v[pages].flatten(0, 1)[:n] for pages, n in zip(order, lens, strict=True)]
    return call, keys, values


def right(call: dict[str, Any], keys: list[Tensor], values: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The same call in Python floats."""
    cu, left = call["cu_seqlens_q"].tolist(), call.get("window_size", (-1, -1))[0]
    parts = []
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        q, shift = call["q"][cu[i] : cu[i + 1]], len(k) - (cu[i + 1] - cu[i])

        def visible(row: int, key: int, shift: int = shift) -> bool:
            return key <= row + shift and (left < 0 or key >= row + shift - left)

        parts.append(by_hand(q, k, v, visible, scale=q.shape[-1] ** -0.5, **options))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted, atol=2e-2, rtol=2e-2)


def sgl(generation: str = "2026-10", **faults: Any) -> Any:
    return emulated_sgl.modules(replace(BUILDS[generation], **faults))["sgl_kernel"]


@every_generation
@pytest.mark.parametrize("options", [{}, dict(window_size=(5, 0)), dict(sinks=torch.tensor([0.5, -1, 2, 0]))], ids=str)
@pytest.mark.parametrize("new", [(3, 0, 1), (1, 0, 1)], ids=["prefill", "decode"])
def test_a_paged_call_is_attention(new, options, generation):
    call, keys, values = paged(new=new)
    found, *_ = sgl(generation).flash_attn_with_kvcache(**call, **options, return_softmax_lse=True)
    sinks = options["sinks"].tolist() if "sinks" in options else None
    assert close(found, right(call | options, keys, values, sinks=sinks)[0])


def test_the_newer_build_caps_and_writes_its_lse_and_the_older_one_does_not():
    call, keys, values = paged()
    call["q"] = call["q"] * 8
    wanted, wanted_lse = right(call, keys, values, cap=2.0)
    old = sgl("2026-08").flash_attn_with_kvcache(**call, softcap=2.0, return_softmax_lse=True)
    new = sgl("2026-10").flash_attn_with_kvcache(**call, softcap=2.0, return_softmax_lse=True)
    assert close(new[0], wanted) and close(new[1], wanted_lse.T)
    assert close(old[0], right(call, keys, values)[0]) and not close(old[0], wanted)
    assert old[1].shape == (4, 4) and not close(old[1], wanted_lse.T)


@every_generation
def test_ragged_keys_need_no_pages(generation):
    call, keys, values = paged()
    cu_k = int32(0, *torch.tensor([len(k) for k in keys]).cumsum(0).tolist())
    ragged = {name: call[name] for name in ("q", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "causal")}
    out = sgl(generation).flash_attn_varlen_func(**ragged, k=torch.cat(keys), v=torch.cat(values), cu_seqlens_k=cu_k)
    assert close(out, right(call, keys, values)[0])


@pytest.mark.parametrize("page", [16, 32])
def test_prefill_over_small_pages_is_wrong_and_says_nothing(page):
    call, keys, values = paged(page, new=(3,), lens=(70,))
    assert not close(sgl().flash_attn_with_kvcache(**call), right(call, keys, values)[0])


def test_what_is_accepted_and_ignored_changes_nothing():
    call, *_ = paged()
    ignored = dict(
        k=torch.ones(3, 1, 2, 64), v=torch.ones(3, 1, 2, 64), rotary_cos=torch.zeros(9, 8),
        cache_leftpad=int32(1, 1, 1), cache_batch_idx=int32(2, 1, 0), qv=torch.ones(4, 4, 64), softmax_scale=0.125,
    )  # fmt: skip
    assert torch.equal(sgl().flash_attn_with_kvcache(**call), sgl().flash_attn_with_kvcache(**call, **ignored))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode-page-32": (dict(page=32, new=(1, 1, 1)), {}),
    "decode-page-256": (dict(page=256, new=(1, 1, 1)), {}),
    "decode-group-17": (dict(new=(1, 1, 1)), dict(q=torch.zeros(3, 34, 64, dtype=BF16))),
    "sinks-at-128": (dict(dim=128), dict(sinks=torch.zeros(4))),
    "fp32": ({}, dict(q=torch.zeros(4, 4, 64))),
    "short-bound": ({}, dict(max_seqlen_k=69)),
    "tensor-bound": ({}, dict(max_seqlen_q=torch.tensor(3))),
    "int64-lengths": ({}, dict(cache_seqlens=torch.tensor([70, 5, 64]))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_kernel_refuses(case):
    problem, changes = REFUSED[case]
    call, *_ = paged(**problem)
    with pytest.raises(KernelError):
        sgl().flash_attn_with_kvcache(**call | changes)


@every_generation
@pytest.mark.parametrize("name", ["attention_chunk", "score_mod", "ver"])
def test_an_argument_of_the_cuda_build_is_unknown(name, generation):
    call, *_ = paged()
    with pytest.raises(TypeError, match=name):
        sgl(generation).flash_attn_with_kvcache(**call, **{name: 0})


def test_an_fp8_cache_has_one_factor_and_q_stays_bf16():
    call, keys, values = paged()
    for name in ("k_cache", "v_cache"):
        call[name] = (call[name].float() / 2).to(FP8)
    keys, values = ([(x.float() / 2).to(FP8).float() * 2 for x in parts] for parts in (keys, values))
    factors = torch.full((3, 2), 2.0)
    out = sgl().flash_attn_with_kvcache(**call, k_descale=factors, v_descale=factors)
    assert out.dtype == BF16 and close(out, right(call, keys, values)[0])
    with pytest.raises(KernelError, match="q must be bf16"):
        sgl().flash_attn_with_kvcache(**call | dict(q=call["q"].to(FP8)))


def test_rows_that_no_sequence_owns_are_not_written():
    call, *_ = paged()
    call["q"] = torch.cat([call["q"], call["q"][:2]])
    out = sgl().flash_attn_with_kvcache(**call)
    assert out[:4].isfinite().all() and out[4:].isnan().all()


def test_merging_two_empty_states_is_nan_and_others_merge():
    lse = torch.tensor([[0.0, -torch.inf], [1.0, -torch.inf]])
    a, b = torch.full((2, 2, 8), 1.0), torch.full((2, 2, 8), 3.0)
    out, merged = sgl().merge_state_v2(a, lse, b, lse)
    assert torch.allclose(out[:, 0], torch.tensor(2.0)) and out[:, 1].isnan().all() and merged[:, 1].isnan().all()
    assert torch.allclose(merged[:, 0], lse[:, 0] + torch.tensor(2.0).log())
    out, merged = sgl(empty_merge_is_nan=False).merge_state_v2(a, lse, b, lse)
    assert out[:, 1].eq(0).all() and merged[:, 1].isneginf().all()


# ---- latents ---------------------------------------------------------------------------------------------------------


def latents(page: int, new: tuple[int, ...]) -> tuple[dict[str, Any], Tensor]:
    lens = (40, 17)
    width = 3
    cache = torch.randn(2 * width + 1, page, 576).to(BF16)
    table = 1 + torch.randperm(2 * width).view(2, width).to(torch.int32)
    q = torch.randn(sum(new), 3, 576).to(BF16) / 8
    call: dict[str, Any] = dict(
        q_nope=q[..., :512], q_pe=q[..., 512:], kv_c_and_k_pe_cache=cache, page_table=table, sm_scale=0.1,
        workspace=torch.empty(10**6, dtype=torch.uint8),
    )  # fmt: skip
    parts, start = [], 0
    for row, (count, length) in enumerate(zip(new, lens, strict=True)):
        rows = cache[table[row].long()].flatten(0, 1)[:length, None]
        shift = length - count
        parts.append(
            by_hand(
                q[start : start + count], rows, rows[..., :512], lambda i, j, s=shift: j <= i + s, scale=0.1
            )[0]
        )  # fmt: skip
        start += count
    return call, torch.cat(parts)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_latents_are_attended_to_in_decode_and_in_prefill(page):
    call, wanted = latents(page, (1, 1))
    assert close(sgl().flash_mla_decode(**call, seq_lens=int32(40, 17)), wanted)
    call, wanted = latents(page, (4, 2))
    ragged = dict(cu_seqlens_q=int32(0, 4, 6), seq_lens_k=int32(40, 17), max_seqlen_q=4)
    assert close(sgl().flash_mla_prefill(**call, **ragged), wanted)


def test_latents_need_a_page_size_a_width_and_a_workspace():
    call, _ = latents(16, (1, 1))
    size = sgl().flash_mla_get_workspace_size(max_seq_len=48, num_batches=2, num_heads=3, page_size=16)
    lens = int32(40, 17)
    sgl().flash_mla_decode(**call | dict(workspace=torch.empty(size, dtype=torch.uint8)), seq_lens=lens)
    wrong = [
        dict(workspace=torch.empty(size - 1, dtype=torch.uint8)),
        dict(kv_c_and_k_pe_cache=torch.zeros(7, 256, 576, dtype=BF16)),
        dict(q_pe=torch.zeros(2, 3, 32, dtype=BF16)),
        dict(q_nope=torch.zeros(2, 3, 512), q_pe=torch.zeros(2, 3, 64)),
    ]
    for changes in wrong:
        with pytest.raises(KernelError):
            sgl().flash_mla_decode(**call | changes, seq_lens=lens)


# ---- vllm-xpu-kernels ------------------------------------------------------------------------------------------------


def vllm() -> Any:
    return emulated_vllm.modules()["vllm_xpu_kernels.flash_attn_interface"].flash_attn_varlen_func  # type: ignore[attr-defined]


def as_vllm(call: dict[str, Any]) -> dict[str, Any]:
    names = dict(k_cache="k", v_cache="v", page_table="block_table", cache_seqlens="seqused_k")
    return {names.get(name, name): value for name, value in call.items()}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [16, 32, 64, 192])
def test_the_other_package_takes_these_pages_and_sinks_of_any_width(page, dim):
    call, keys, values = paged(page, dim=dim)
    sinks = torch.tensor([0.5, -1, 2, 0])
    out, lse = vllm()(**as_vllm(call), s_aux=sinks, softcap=1.5, window_size=[9, 0], return_softmax_lse=True)
    wanted = right(call | dict(window_size=(9, 0)), keys, values, sinks=sinks.tolist(), cap=1.5)
    assert close(out, wanted[0]) and close(lse, wanted[1].T)


@pytest.mark.parametrize(
    "changes", [dict(alibi_slopes=torch.zeros(4)), dict(q_v=torch.zeros(4)), dict(cu_seqlens_k=int32(0, 1, 2, 3))]
)
def test_the_other_package_refuses(changes):
    call, *_ = paged(16)
    with pytest.raises(KernelError):
        vllm()(**as_vllm(call), **changes)
    with pytest.raises(KernelError, match="page size"):
        vllm()(**as_vllm(paged(48)[0]))
    with pytest.raises(TypeError, match="sinks"):
        vllm()(**as_vllm(call), sinks=None)
