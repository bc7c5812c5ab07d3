"""Bad input: the error says what was passed, nothing was written, and the same backend goes on to a right result."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
from fa_fast.kernels import installed
from fa_fast.kernels.sgl_cuda import CAPABILITY
from fa_ref import (
    AttentionLayer,
    BackendConfig,
    BadBatch,
    BadConfig,
    BadPageTable,
    DraftInput,
    FaError,
    ForwardMode,
    LayerKind,
    ProviderNotInstalled,
    UnsupportedByProvider,
    VerifyInput,
    layer_kind,
)
from fa_ref.cases import Case, make_case
from tests.support import ROUTES, both_packages, cache_bytes, every_route, with_batch, with_layer

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


def good(mode: ForwardMode = EXTEND) -> Case:
    return make_case(mode, heads=4, kv_heads=2, sinks=True, page_size=4, kind=LayerKind.SLIDING, context_len=20)


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A change that makes a good case bad, and the error that must follow."""

    change: Callable[[Case], Case]
    error: type[FaError]
    says: str  # regular expression that the message matches
    mode: ForwardMode = EXTEND
    checked: bool = False  # only with FA_CHECK=1


def field(name: str, change: Callable[[Any], Any]) -> Callable[[Case], Case]:
    """The case with one field of its batch changed."""
    return lambda case: with_batch(case, **{name: change(getattr(case.batch, name))})


def tensor(name: str, change: Callable[[Tensor], Any]) -> Callable[[Case], Case]:
    """The case with q, k, v or sinks changed."""
    return lambda case: replace(case, **{name: change(getattr(case, name))})


def to_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def without_last(x: Any) -> Any:
    return x[:-1]


def strided(x: Tensor) -> Tensor:
    """The same values, with the last dim's elements not next to each other."""
    return x.t().contiguous().t()


def scattered(x: Tensor) -> Tensor:
    wider = torch.zeros(*x.shape, 2, dtype=x.dtype)
    wider[..., 0] = x
    return wider[..., 0]


INDEX = ("seq_lens", "req_pool_indices", "extend_seq_lens")
BAD_BATCHES: dict[str, Bad] = {
    **{
        f"{name}-float": Bad(
            change=field(name, lambda x: x.float()), error=BadBatch, says=f"{name} is torch.float32.*int32 or int64"
        )
        for name in INDEX
    },
    "out_cache_loc-float": Bad(
        change=field("out_cache_loc", lambda x: x.float()), error=BadBatch, says="out_cache_loc is torch.float32"
    ),
    **{
        f"{name}-other-device": Bad(change=field(name, to_meta), error=BadBatch, says=f"{name} is on meta.*cpu")
        for name in (*INDEX, "out_cache_loc")
    },
    **{
        f"{name}-one-entry-less": Bad(change=field(name, without_last), error=BadBatch, says=rf"{name}.*2.*3")
        for name in (*INDEX, "seq_lens_cpu", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
    },
    **{
        f"{name}-{how}": Bad(
            change=field(name, lambda x, bad=bad: bad), error=BadBatch, says=f"{name} is .*must be a list or an integer"
        )
        for name in ("extend_seq_lens_cpu", "extend_prefix_lens_cpu")
        for how, bad in (("a-number", 3), ("of-nones", [None] * 3), ("text", "xyz"), ("of-floats", [5.0, 4.0, 1.0]))
    },
    "a-batch-size-that-is-no-number": Bad(
        change=field("batch_size", str), error=BadBatch, says="batch_size is '3'; it must be an int"
    ),
    "out_cache_loc-one-slot-less": Bad(
        change=field("out_cache_loc", without_last),
        error=BadBatch,
        says="out_cache_loc has 9 slots, this batch needs 10",
    ),
    "out_cache_loc-two-dims": Bad(
        change=field("out_cache_loc", lambda x: x[None]), error=BadBatch, says=r"out_cache_loc is .* \(1, 10\)"
    ),
    "seq_lens-missing": Bad(
        change=field("seq_lens", lambda x: None), error=BadBatch, says="EXTEND needs seq_lens as a tensor, got None"
    ),
    "lengths-that-do-not-add-up": Bad(
        change=field("extend_prefix_lens_cpu", lambda x: [x[0], x[1] + 1, x[2]]),
        error=BadBatch,
        says=r"request 1: prefix 1 \+ new 4 tokens is not its seq_lens 4",
    ),
    "length-0-in-decode": Bad(
        mode=DECODE,
        change=field("seq_lens_cpu", lambda x: torch.tensor([4, 0, 7])),
        error=BadBatch,
        says="request 1 has seq_lens 0 in DECODE",
    ),
    "length-beyond-the-table": Bad(
        change=lambda case: with_batch(case, seq_lens_cpu=torch.tensor([8, 4, 21]), extend_prefix_lens_cpu=[3, 0, 20]),
        error=BadPageTable,
        says="request 2 has 21 keys.*holds 20",
    ),
    "no-slots-for-new-keys": Bad(
        change=field("out_cache_loc", lambda x: None), error=BadBatch, says="out_cache_loc is None"
    ),
    # ---- what only the device knows
    "row-out-of-range": Bad(
        checked=True,
        change=field("req_pool_indices", lambda x: x + 100),
        error=BadPageTable,
        says="req_pool_indices span 10.*6 rows",
    ),
    "host-and-device-lengths-differ": Bad(
        checked=True,
        change=field("seq_lens", lambda x: x + 1),
        error=BadBatch,
        says=r"seq_lens \[9, 5, 8\] and seq_lens_cpu \[8, 4, 7\] differ",
    ),
    "host-and-device-new-tokens-differ": Bad(
        checked=True,
        change=field("extend_seq_lens", lambda x: x + 1),
        error=BadBatch,
        says=r"extend_seq_lens \[6, 5, 2\]",
    ),
    "slot-past-the-pool": Bad(
        checked=True, change=field("out_cache_loc", lambda x: x + 1000), error=BadPageTable, says="out_cache_loc: slots"
    ),
    "negative-slot": Bad(
        checked=True, change=field("out_cache_loc", lambda x: x - 1000), error=BadPageTable, says="out_cache_loc: slots"
    ),
}
BAD_INPUTS: dict[str, Bad] = {
    "q-too-wide": Bad(
        change=tensor("q", lambda x: x.repeat(1, 2)), error=BadBatch, says=r"q has shape \(10, 128\).*\[10, 64\]"
    ),
    **{
        f"{name}-one-token-less": Bad(
            change=tensor(name, without_last), error=BadBatch, says=rf"{name} has shape \(9, .*10 new tokens"
        )
        for name in ("q", "k", "v")
    },
    "heads-of-another-layer": Bad(
        change=lambda case: with_layer(case, tp_q_head_num=8), error=BadBatch, says=r"q has shape \(10, 64\)"
    ),
    "k-without-v": Bad(change=lambda case: replace(case, v=None), error=BadBatch, says="both k and v, or neither"),
    **{
        f"{name}-other-dtype": Bad(
            change=tensor(name, lambda x: x.half()), error=BadBatch, says=f"{name} is torch.float16"
        )
        for name in ("k", "v")
    },
    "all-of-another-dtype": Bad(
        change=lambda case: replace(case, q=case.q.half(), k=case.k.half(), v=case.v.half()),
        error=BadBatch,
        says="q is torch.float16.*torch.float32",
    ),
    "all-of-an-integer-dtype": Bad(
        change=lambda case: replace(case, q=case.q.int(), k=case.k.int(), v=case.v.int()),
        error=BadBatch,
        says="q is torch.int32.*torch.float32",
    ),
    **{
        f"{name}-other-device": Bad(change=tensor(name, to_meta), error=BadBatch, says=f"{name} is .* on meta")
        for name in ("k", "v")
    },
    "all-on-another-device": Bad(
        change=lambda case: replace(case, q=to_meta(case.q), k=to_meta(case.k), v=to_meta(case.v)),
        error=BadBatch,
        says="q is .*on meta.*cpu",
    ),
    **{
        f"{name}-not-contiguous": Bad(
            change=tensor(name, change), error=BadBatch, says=f"{name} .*stride {stride} .*contiguous"
        )
        for name, change, stride in (("q", strided, 10), ("k", strided, 10), ("v", scattered, 2))
    },
    "sinks-for-fewer-heads": Bad(
        change=tensor("sinks", without_last), error=BadBatch, says=r"sinks has shape \(3,\).*\(4,\)"
    ),
    "one-sink-for-all-heads": Bad(
        change=tensor("sinks", lambda x: x[:1]), error=BadBatch, says=r"sinks has shape \(1,\).*\(4,\)"
    ),
    "sinks-on-another-device": Bad(
        change=tensor("sinks", to_meta), error=BadBatch, says=r"sinks has shape \(4,\) on meta.*on cpu"
    ),
    "window-wider-than-the-config-s": Bad(
        change=lambda case: with_layer(case, sliding_window_size=9),
        error=BadConfig,
        says="sliding_window_size 9, the config 3",
    ),
    "layer-kind-without-a-plan": Bad(
        change=lambda case: with_layer(case, sliding_window_size=-1, is_cross_attention=True),
        error=UnsupportedByProvider,
        says="CROSS layer in EXTEND",
    ),
}


def check_refused(bad: Bad, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_CHECK", "1" if bad.checked else "0")
    case = good(bad.mode)
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)

    def forward(case: Case) -> Tensor:
        backend.init_forward_metadata(case.batch)
        return backend.forward(case.q, case.k, case.v, case.layer, case.batch, sinks=case.sinks)

    before = cache_bytes(case)
    with pytest.raises(bad.error, match=bad.says):
        forward(bad.change(case))
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    assert case.judge(forward(case)).ok


@every_route
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_refused_and_the_backend_goes_on(name, route, monkeypatch):
    check_refused(BAD_BATCHES[name], route, monkeypatch)


@every_route
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_layer_inputs_are_refused_and_the_backend_goes_on(name, route, monkeypatch):
    check_refused(BAD_INPUTS[name], route, monkeypatch)


# ---- page tables, with FA_CHECK=1 -------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize(
    ("slot", "says"),
    [(-1, r"slots span -1\.\."), (4096, r"slots span .*\.\.4096, the pool holds"), (9, "position 1 is in slot 9")],
    ids=["negative", "past-the-pool", "inside-another-page"],
)
def test_a_page_table_that_addresses_wrong_memory_is_refused(slot, says, route, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    case = good()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    row = case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[0])]
    right = row.clone()
    assert int(right[1]) != slot
    row[1] = slot
    with pytest.raises(BadPageTable, match=says):
        backend.init_forward_metadata(case.batch)
    row.copy_(right)
    backend.init_forward_metadata(case.batch)
    out = backend.forward(case.q, case.k, case.v, case.layer, case.batch, sinks=case.sinks)
    assert case.judge(out).ok


@both_packages
@pytest.mark.parametrize("page", [-1, 10_000])
def test_the_kernel_refuses_page_ids_out_of_range(page, package, monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")
    cache = torch.zeros(4, 8, 1, 64)
    int32 = dict(dtype=torch.int32)
    with pytest.raises(BadPageTable, match=f"{page}"):
        package.flash_attn_with_kvcache(
            torch.zeros(1, 1, 64),
            cache,
            cache,
            page_table=torch.tensor([[1, page]], **int32),
            cache_seqlens=torch.tensor([9], **int32),
            cu_seqlens_q=torch.tensor([0, 1], **int32),
            max_seqlen_q=1,
        )


# ---- modes ------------------------------------------------------------------------------------------------------

MISMATCHED: dict[str, tuple[ForwardMode, Any, str]] = {
    "verify-without-drafts": (ForwardMode.TARGET_VERIFY, None, "TARGET_VERIFY needs spec_info=VerifyInput.*None"),
    "verify-of-a-draft-s-steps": (
        ForwardMode.TARGET_VERIFY,
        DraftInput(topk=2, num_steps=2),
        r"TARGET_VERIFY needs spec_info=VerifyInput.*DraftInput\(topk=2",
    ),
    "decode-of-a-tree": (DECODE, VerifyInput(draft_token_num=2), "DECODE with spec_info=VerifyInput"),
    "decode-with-slots-for-other-drafts": (
        DECODE,
        DraftInput(topk=1, num_steps=2),
        "out_cache_loc has 10 slots, this batch needs 6.*a request, branch and step",
    ),
}


@every_route
@pytest.mark.parametrize("name", MISMATCHED)
def test_a_spec_info_of_another_mode_is_refused(name, route):
    mode, spec_info, says = MISMATCHED[name]
    case = good()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    with pytest.raises(BadBatch, match=says):
        backend.init_forward_metadata(replace(case.batch, forward_mode=mode, spec_info=spec_info))
    with pytest.raises(BadBatch, match="no batch is planned"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    backend.init_forward_metadata(case.batch)
    out = backend.forward(case.q, case.k, case.v, case.layer, case.batch, sinks=case.sinks)
    assert case.judge(out).ok


DRAFTS: dict[str, tuple[dict[str, Any], Callable[[Case], Case], str]] = {
    "mask-missing": (
        dict(trees=[[-1, 0, 0]] * 3),
        lambda case: with_spec(case, custom_mask=None),
        "topk=2 without a custom_mask",
    ),
    "mask-one-entry-less": (
        dict(trees=[[-1, 0, 0]] * 3),
        lambda case: with_spec(case, custom_mask=case.batch.spec_info.custom_mask[:-1]),
        r"custom_mask .*\(53,\).*54 entries",
    ),
    "mask-in-rows": (
        dict(trees=[[-1, 0, 0]] * 3),
        lambda case: with_spec(case, custom_mask=case.batch.spec_info.custom_mask[None]),
        r"custom_mask .*\(1, 54\).*54 entries",
    ),
    "mask-of-numbers": (
        dict(trees=[[-1, 0, 0]] * 3),
        lambda case: with_spec(case, custom_mask=case.batch.spec_info.custom_mask.float()),
        "custom_mask is torch.float32.*bool",
    ),
    "mask-on-another-device": (
        dict(trees=[[-1, 0, 0]] * 3),
        lambda case: with_spec(case, custom_mask=to_meta(case.batch.spec_info.custom_mask)),
        "custom_mask is on meta",
    ),
    "no-drafts": (dict(draft_token_num=2), lambda case: with_spec(case, draft_token_num=0), "draft_token_num is 0"),
    "no-branches": (dict(topk=2, num_steps=2), lambda case: with_spec(case, topk=0), "spec_info.topk is 0"),
    "no-steps": (dict(topk=2, num_steps=2), lambda case: with_spec(case, num_steps=0), "spec_info.num_steps is 0"),
    "step-past-the-last": (
        dict(topk=2, num_steps=2),
        lambda case: replace(case, step=2),
        "step 2 of a draft of 2 steps",
    ),
    "step-past-the-last-of-a-chain": (
        dict(topk=1, num_steps=2),
        lambda case: replace(case, step=2),
        "step 2 of a draft of 2 steps",
    ),
    "step-before-the-first": (
        dict(topk=2, num_steps=2),
        lambda case: replace(case, step=-1),
        "step -1 of a draft of 2 steps",
    ),
}


def with_spec(case: Case, **changes: Any) -> Case:
    return with_batch(case, spec_info=replace(case.batch.spec_info, **changes))


@every_route
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_that_contradict_themselves_are_refused(name, route):
    arguments, change, says = DRAFTS[name]
    case = make_case(DECODE if "topk" in arguments else ForwardMode.TARGET_VERIFY, **arguments)
    before = cache_bytes(case)
    with pytest.raises(BadBatch, match=says):
        change(case).run(*ROUTES[route])
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"
    assert case.judge(case.run(*ROUTES[route])).ok


@every_route
def test_forward_before_a_plan_says_what_to_call(route):
    case = good()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    before = cache_bytes(case)
    with pytest.raises(BadBatch, match="call init_forward_metadata"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True))


@every_route
def test_an_unknown_mode_lists_the_known_ones(route):
    case = good()
    package, provider = ROUTES[route]
    server_batch = SimpleNamespace(**{**vars(case.batch), "forward_mode": "SIDEWAYS"})
    with pytest.raises(BadBatch, match=r"'SIDEWAYS' is unknown; supported: EXTEND, DECODE"):
        package.FlashAttentionBackend(case.config, provider=provider).init_forward_metadata(server_batch)


@every_route
def test_a_decode_backend_refuses_a_prefill(route):
    case = good()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, skip_prefill=True, provider=provider)
    with pytest.raises(BadBatch, match="EXTEND on a backend made with skip_prefill=True"):
        backend.init_forward_metadata(case.batch)
    decode = replace(good(DECODE), config=case.config)
    backend.init_forward_metadata(replace(case.batch, forward_mode=DECODE, out_cache_loc=None))
    assert backend.forward_metadata.num_tokens == decode.batch.batch_size


@every_route
def test_a_server_s_own_batch_object_is_accepted(route):
    case = good()
    package, provider = ROUTES[route]
    fields = {name: value for name, value in vars(case.batch).items() if value is not None}
    server_batch = SimpleNamespace(**{**fields, "forward_mode": SimpleNamespace(name="EXTEND"), "extra": 1})
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    backend.init_forward_metadata(server_batch)
    assert case.judge(backend.forward(case.q, case.k, case.v, case.layer, server_batch, sinks=case.sinks)).ok


# ---- configurations ---------------------------------------------------------------------------------------------


def config_with(**changes: Any) -> BackendConfig:
    return replace(good().config, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(attention_chunk_size=6), "attention_chunk_size 6 with page_size 4"),
        (dict(attention_chunk_size=0), "attention_chunk_size 0"),
        (dict(page_size=0), "page_size 0"),
        (dict(sliding_window_size=3, is_encoder_decoder=True), "windows and cross attention"),
    ],
    ids=["chunk-of-one-and-a-half-pages", "chunk-0", "page-0", "window-and-encoder"],
)
def test_a_config_that_contradicts_itself_is_refused(changes, says):
    with pytest.raises(BadConfig, match=says):
        config_with(**changes)


def layer_with(**changes: Any) -> AttentionLayer:
    given = dict(layer_id=7, tp_q_head_num=4, tp_k_head_num=2, head_dim=64, scaling=1.0)
    return AttentionLayer(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            dict(is_cross_attention=True, sliding_window_size=3),
            "layer 7 asks for a sliding window of 3 on cross attention",
        ),
        (dict(tp_k_head_num=3), "layer 7: 4 query heads over 3 key heads"),
        (dict(tp_k_head_num=0), "layer 7: 4 query heads over 0 key heads"),
        (dict(tp_v_head_num=1), "layer 7: 2 key heads but 1 value heads"),
        (dict(tp_q_head_num=0), "layer 7: tp_q_head_num is 0; it must be at least 1"),
        (dict(head_dim=-3), "layer 7: head_dim is -3"),
    ],
    ids=["window-on-cross-attention", "heads-do-not-divide", "no-key-heads", "fewer-value-heads", "no-heads", "dim-3"],
)
def test_a_layer_that_contradicts_itself_is_refused(changes, says):
    with pytest.raises(BadConfig, match=says):
        layer_with(**changes)


class ServerLayer(SimpleNamespace):
    """A layer object of a server's own: it checks nothing."""


@every_route
@pytest.mark.parametrize("bad", ["x", [1], (1,), {}], ids=["text", "list", "tuple", "dict"])
@pytest.mark.parametrize("name", [f.name for f in fields(AttentionLayer)])
def test_a_server_s_layer_with_a_field_of_another_type_is_refused_by_name(name, bad, route):
    case = good()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    backend.init_forward_metadata(case.batch)
    before = cache_bytes(case)
    layer = ServerLayer(**vars(case.layer) | {name: bad})
    with pytest.raises(BadConfig, match=rf"{name} is {re.escape(repr(bad))}; it must be"):
        backend.forward(case.q, case.k, case.v, layer, case.batch)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(case), strict=True)), "written before refused"


def test_a_host_copy_of_lengths_that_holds_none_is_refused_where_it_is_given():
    with pytest.raises(BadBatch, match=r"seq_lens_cpu is \[None, 1, 2\]; it must be a list or an integer tensor"):
        replace(good().batch, seq_lens_cpu=[None, 1, 2])


def test_a_layer_with_both_a_window_and_chunks_is_refused():
    layer = layer_with(use_irope=True, sliding_window_size=3)
    assert layer_kind(layer) is LayerKind.SLIDING  # no chunk size, no chunks
    with pytest.raises(BadConfig, match="sliding window and chunked local attention at once"):
        layer_kind(layer, attention_chunk_size=8)


@both_packages
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (dict(provider="abacus"), BadConfig),
    ],
    ids=["provider"],
)
def test_backend_arguments_without_a_meaning_here_are_refused(arguments, error, package):
    with pytest.raises(error, match=f"{next(iter(arguments.values()))}"):
        package.FlashAttentionBackend(good().config, **arguments)


def test_latents_and_encoders_do_not_mix():
    with pytest.raises(BadConfig, match="use_mla=True with is_encoder_decoder=True"):
        config_with(sliding_window_size=None, use_mla=True, is_encoder_decoder=True)


@both_packages
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_kernels_refuse_a_last_dim_that_is_not_contiguous(name, package):
    arguments = dict(q=torch.zeros(1, 1, 64), k_cache=torch.zeros(2, 4, 1, 64), v_cache=torch.zeros(2, 4, 1, 64))
    arguments[name] = scattered(arguments[name])
    int32 = dict(dtype=torch.int32)
    with pytest.raises(BadBatch, match=f"{name[0]}.* of shape .* stride 2 .*contiguous"):
        package.flash_attn_with_kvcache(
            **arguments,
            page_table=torch.tensor([[1]], **int32),
            cache_seqlens=torch.tensor([3], **int32),
            cu_seqlens_q=torch.tensor([0, 1], **int32),
            max_seqlen_q=1,
        )


# ---- kernel providers -------------------------------------------------------------------------------------------


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test pretend what is installed; the search for FA3 starts afresh before and after."""
    installed.fa3_functions.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    installed.fa3_functions.cache_clear()


def test_a_cuda_device_without_sgl_kernel_says_how_to_get_it(fa3):
    fa3.setitem(sys.modules, "sgl_kernel", None)
    fa3.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    fa3.setattr(installed, "installed_owners", list)
    with pytest.raises(ProviderNotInstalled, match=r"CUDA device needs sgl-kernel.*fa_fast\.doctor"):
        fa_fast.FlashAttentionBackend(config_with(device="cuda"))


def test_two_distributions_that_overwrite_each_other_are_refused_by_name(fa3):
    fa3.setattr(installed, "installed_owners", lambda: ["sgl-kernel", "sglang-kernel"])
    with pytest.raises(ProviderNotInstalled, match=r"sgl-kernel and sglang-kernel both install.*pip uninstall"):
        fa_fast.FlashAttentionBackend(config_with(device="cuda"))


def test_a_missing_provider_can_be_caught_as_an_import_error():
    assert issubclass(ProviderNotInstalled, ImportError)
    assert issubclass(ProviderNotInstalled, FaError)


def test_a_device_without_kernels_lists_those_that_have_some():
    with pytest.raises(UnsupportedByProvider, match="no kernels for device meta; supported: cpu, cuda"):
        fa_fast.FlashAttentionBackend(config_with(device="meta"))


def test_a_provider_of_another_device_is_refused():
    with pytest.raises(BadConfig, match="'sgl_cuda' on device cpu"):
        fa_fast.FlashAttentionBackend(good().config, provider="sgl_cuda")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (dict(head_dim=80, v_head_dim=80), r"head dims \(qk 80, v 80\).*\(64, 64\)"),
        (dict(head_dim=128, v_head_dim=64), r"head dims \(qk 128, v 64\)"),
        (dict(dtype=torch.float32), "q of torch.float32.*torch.bfloat16"),
        (dict(kv_dtype=torch.float32), "a torch.float32 cache"),
        (dict(qv=True), r"cannot run qv .*rope 128 and latent 128"),
    ],
    ids=["head-dim", "narrow-values", "dtype", "cache-dtype", "qv"],
)
def test_what_fa3_cannot_run_is_refused_with_what_it_can(asked, says):
    plain = dict(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=128, v_head_dim=128, page_size=64)
    CAPABILITY.require(**plain)
    with pytest.raises(UnsupportedByProvider, match=says):
        CAPABILITY.require(**plain | asked)


def test_a_page_size_that_a_provider_lacks_is_refused():
    picky = replace(CAPABILITY, page_sizes=frozenset({64, 128}))
    asked = dict(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=128, v_head_dim=128)
    picky.require(**asked, page_size=64)
    with pytest.raises(UnsupportedByProvider, match=r"page size 16.*\[64, 128\]"):
        picky.require(**asked, page_size=16)


def test_every_error_is_an_fa_error_and_one_of_python_s_own_kinds():
    for error, kind in ((BadBatch, ValueError), (BadConfig, ValueError), (BadPageTable, ValueError)):
        assert issubclass(error, FaError)
        assert issubclass(error, kind)
    assert issubclass(UnsupportedByProvider, NotImplementedError)
