"""MLA on CUDA: FA3 and FlashMLA give one answer, and a plan's schedule says which of them runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fa_fast
from fa_fast.kernels import flash_mla, sgl_cuda
from fa_fast.kernels.flash_mla import FlashMLASchedule
from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import make_case

pytestmark = pytest.mark.gpu

LATENTS = dict(latent=512, rope=64, dtype=torch.bfloat16, device="cuda", page_size=64)
LENS = [0, 1, 63, 64, 700, 5000, 130, 9, 2, 64]
TREES = [[-1, 0, 0, 1, 1, 2]] * len(LENS)
CASES = {
    "decode": dict(mode=ForwardMode.DECODE),
    "verify-chain": dict(mode=ForwardMode.TARGET_VERIFY, draft_token_num=4),
    "verify-tree": dict(
        mode=ForwardMode.TARGET_VERIFY, trees=TREES
    ),  # its prefix pass needs the LSE, of empty rows too
    "draft-decode": dict(mode=ForwardMode.DECODE, topk=4, step=1),
}


def ran(case, monkeypatch, flash):
    """The result with FlashMLA forced where it can run, or without it, and the schedules that were made."""
    possible = flash_mla.is_faster
    everywhere = dict(sequences=64, queries=64, longest_q=1, longest_k=64, packed=True)

    def choose(**call):
        even = call["queries"] == call["sequences"] * call["longest_q"]
        return flash and even and possible(**call | everywhere)

    schedules, make = [], sgl_cuda.get_scheduler_metadata

    def kept(**call):
        schedules.append(make(**call))
        return schedules[-1]

    monkeypatch.setattr(flash_mla, "is_faster", choose)
    monkeypatch.setattr(sgl_cuda, "get_scheduler_metadata", kept)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_forward_metadata(case.batch)
    out = backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    monkeypatch.setattr(flash_mla, "is_faster", possible)
    monkeypatch.setattr(sgl_cuda, "get_scheduler_metadata", make)
    return out, schedules


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("name", CASES)
def test_both_kernels_give_the_oracles_answer(name, heads, monkeypatch):
    case = make_case(prefix_lens=LENS, heads=heads, **LATENTS, **CASES[name])
    for flash in (True, False):
        out, schedules = ran(case, monkeypatch, flash)
        assert any(isinstance(s, FlashMLASchedule) for s in schedules) == flash
        verdict = case.judge(out)
        assert verdict.ok, (flash, verdict)


def test_unpacked_queries_are_packed_for_flash_mla(monkeypatch):
    case = make_case(ForwardMode.DECODE, prefix_lens=LENS, heads=16, **LATENTS)
    right, _ = ran(case, monkeypatch, flash=True)
    monkeypatch.setattr(flash_mla, "is_faster", lambda **call: True)
    backend = fa_fast.FlashAttentionBackend(case.config)
    backend.init_forward_metadata(case.batch)
    q = case.q.view(-1, 16, 576)
    out = backend.forward(
        q[..., :512].contiguous(), case.k[:, :512], None, case.layer, case.batch,
        q_rope=q[..., 512:].contiguous(), k_rope=case.k[:, 512:],
    )  # fmt: skip
    assert torch.equal(out, right)


def test_what_flash_mla_cannot_run_goes_to_fa3(monkeypatch):
    """Other pages, ragged queries, softcap, sinks and deterministic mode: right all the same."""
    monkeypatch.setattr(flash_mla, "is_faster", lambda **call: call["page_size"] == 64)
    shared_rows = dict(mode=ForwardMode.TARGET_VERIFY, trees=TREES, kind=LayerKind.LOCAL, chunk=64)
    for settings in (dict(softcap=5.0), dict(sinks=True), dict(deterministic=True), dict(page_size=16), shared_rows):
        case = make_case(**dict(mode=ForwardMode.DECODE) | LATENTS | dict(prefix_lens=LENS, heads=16) | settings)
        assert case.judge(case.run(fa_fast)).ok, settings


def test_an_extend_of_many_tokens_agrees():
    for page_size in (1, 16, 64, 128):
        case = make_case(
            prefix_lens=[0, 300, 1000], new_lens=[700, 200, 1], heads=16, **LATENTS | dict(page_size=page_size)
        )
        assert case.judge(case.run(fa_fast)).ok


def test_an_fp8_cache_of_latents_is_refused():
    case = make_case(ForwardMode.DECODE, heads=16, kv_dtype=torch.float8_e4m3fn, **LATENTS)
    with pytest.raises(fa_fast.UnsupportedByProvider, match="absorbed MLA"):
        case.run(fa_fast)


def test_the_new_tokens_rows_are_written_whole_and_alone():
    case = make_case(prefix_lens=[5, 64], new_lens=[70, 1], heads=16, **LATENTS)
    buffer = case.config.token_to_kv_pool.kv_buffer[0]
    before = buffer.clone()
    case.run(fa_fast)
    before[case.batch.out_cache_loc, 0] = case.k
    assert torch.equal(buffer.view(torch.uint8), before.view(torch.uint8))


def test_latents_never_make_the_host_wait():
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        case = make_case(mode, heads=16, host_lengths=False, **LATENTS)
        case.run(fa_fast)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            replace(case).run(fa_fast)
        finally:
            torch.cuda.set_sync_debug_mode("default")
