"""Reports about Intel GPUs, on every emulated build of their kernels, and on the routes that run anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
from fa_ref import ForwardMode, UnsupportedByProvider
from fa_ref.cases import Case, encoder_slots, visible_slots
from tests.support import every_route, run
from tests.xpu.conftest import BUILDS
from tests.xpu.forms import problem

every_build = pytest.mark.parametrize("build", BUILDS)
every_kind = pytest.mark.parametrize("kind", ["full", "sliding", "local", "mla"])
every_page_size = pytest.mark.parametrize("page_size", [1, 16, 64, 128])
NEW, PAST = 5, 131


# ---- text behind an encoder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("form", ["extend", "mixed", "decode"])
@every_build
def test_text_starts_right_behind_an_encoder_of_1500_tokens(build, form, page_size, provider):
    """sglang PR #36298: the encoder ends in the middle of a page of 64, and a table of whole pages begins too late."""
    for kind in ("full", "cross"):
        case = problem(form, kind, encoder_lens=(1500, 0, 70), encode=form != "decode", page_size=page_size)
        assert int(visible_slots(case, 0)[0]) == int(encoder_slots(case, 0)[-1]) + 1 and 1500 % 64
        assert case.judge(case.run(fa_fast, provider(build))).ok, kind


@every_build
def test_a_text_that_begins_a_page_late_would_be_noticed(build, provider):
    """sglang PR #36298: the same text with the row padded to whole pages, as the report's table had it."""
    case = problem("decode", "full", encoder_lens=(1500, 64, 70), encode=False, context_len=2048)
    padded = replace(case.batch, encoder_lens=torch.tensor([1536, 64, 128]), encoder_lens_cpu=[1536, 64, 128])
    assert not case.judge(replace(case, batch=padded).run(fa_fast, provider(build))).ok


# ---- several queries over a filled cache -----------------------------------------------------------------------------


def several(kind: str, page_size: int) -> Case:
    """One request: NEW queries behind PAST cached keys, more than a tile of 64 and no multiple of it."""
    return problem("extend", kind, prefix_lens=(PAST,), new_lens=(NEW,), page_size=page_size)


def one_at_a_time(case: Case, run_case: Callable[[Case], Tensor]) -> Tensor:
    """The same tokens as NEW decode steps, one behind the other."""
    row = case.config.req_to_token_pool.req_to_token[case.batch.req_pool_indices]
    outs = []
    for i in range(NEW):
        length = torch.tensor([PAST + i + 1])
        step = replace(
            case.batch, forward_mode=ForwardMode.DECODE, seq_lens=length, seq_lens_cpu=length,
            out_cache_loc=row[0, PAST + i : PAST + i + 1].long(), extend_seq_lens=None, extend_seq_lens_cpu=None,
            extend_prefix_lens=None, extend_prefix_lens_cpu=None,
        )  # fmt: skip
        q, k, v = (x if x is None else x[i : i + 1] for x in (case.q, case.k, case.v))
        assert q is not None
        single = replace(case, batch=step, q=q, k=k, v=v)
        out = run_case(single)
        assert single.judge(out).ok, f"query {i} alone"
        outs.append(out)
    return torch.cat(outs)


def are_one_thing(case: Case, run_case: Callable[[Case], Tensor]) -> bool:
    together = run_case(case)
    verdict = case.judge(together)
    assert verdict.ok, f"together: {verdict}"
    return bool((one_at_a_time(case, run_case) - together).abs().max() <= 2 * verdict.budget)


@every_kind
@every_page_size
@every_build
def test_several_queries_over_a_filled_cache_are_as_many_single_ones(build, page_size, kind, provider):
    """sgl-kernel-xpu #196: decode and prefill are kernels of their own there, which disagreed."""
    name, case = provider(build), several(kind, page_size)
    if kind == "mla" and build == "vllm":
        with pytest.raises(UnsupportedByProvider, match="absorbed MLA"):
            case.run(fa_fast, name)
        return
    assert are_one_thing(case, lambda each: each.run(fa_fast, name))


@every_kind
@every_page_size
@every_route
def test_several_queries_are_as_many_single_ones_anywhere(route, page_size, kind):
    """sgl-kernel-xpu #196, on the definition, on the readable passes and on a CPU's kernels."""
    assert are_one_thing(several(kind, page_size), lambda each: run(each, route))


def test_a_kernel_that_sees_one_key_too_few_is_noticed(install):
    """sgl-kernel-xpu #196: queries that miss their own key, where several of them stand behind a cache."""
    from tests.xpu import emulated_sgl

    modules = emulated_sgl.modules(emulated_sgl.BUILDS["2026-10"])
    home: Any = modules["sgl_kernel.flash_attn"]
    right = home.flash_attn_with_kvcache

    def short(**call: Any) -> Any:
        several = call["max_seqlen_q"] > 2  # the probe asks one and two
        return right(**call | (dict(cache_seqlens=call["cache_seqlens"] - 1) if several else {}))

    short.__signature__ = right.__signature__  # type: ignore[attr-defined]
    home.flash_attn_with_kvcache = short
    install("sgl_xpu", modules, "2026-10")
    case = several("full", 64)
    assert not case.judge(case.run(fa_fast, "sgl_xpu")).ok
