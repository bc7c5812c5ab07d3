"""Bad calls of MLA layers: an FaError that says what was passed, nothing written, and the backend goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa_ref import (
    BadBatch,
    BadConfig,
    BadPageTable,
    DraftInput,
    FaError,
    ForwardMode,
    LayerKind,
    MHAKVPool,
    MLAKVPool,
    MLAProjections,
    UnsupportedByProvider,
    chunk_prefix,
)
from fa_ref.cases import make_case
from tests.support import ROUTES, cache_bytes, every_route, planned_routes
from tests.test_mla import MODES, Model, mla_case

FORMS = ("absorbed", "chunked", "one_shot", "auto")
every_form = pytest.mark.parametrize("form", FORMS)
Change = Callable[[Model], dict[str, Any]]


def call(model: Model, route: str, form: str = "chunked", **changes: Any) -> torch.Tensor:
    """mla_attention on a backend that planned the model's batch, some arguments changed."""
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(model.case.config, provider=provider)
    backend.init_forward_metadata(model.case.batch)
    given = dict(
        backend=backend, q_nope=model.q_nope, q_rope=model.q_rope, latent=model.latent, k_rope=model.k_rope,
        layer=model.layer, batch=model.case.batch, projections=model.projections, form=form, workspace_tokens=4,
    )  # fmt: skip
    return package.mla_attention(**given | changes)


def served(thing: Any) -> SimpleNamespace:
    """A server's own object: the same names, those that are None left out."""
    return SimpleNamespace(**{name: value for name, value in vars(thing).items() if value is not None})


# ---- mla_attention -------------------------------------------------------------------------------------------------


def operand(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    return lambda model: {name: change(getattr(model, name))}


def projections(w_uk: Any = lambda w: w, w_uv: Any = lambda w: w) -> Change:
    return lambda model: dict(
        projections=MLAProjections(w_uk=w_uk(model.projections.w_uk), w_uv=w_uv(model.projections.w_uv))
    )


def in_batch(**changes: Callable[[Any], Any]) -> Change:
    """Some fields of the batch changed since it was planned."""
    return lambda model: dict(
        batch=replace(
            model.case.batch, **{name: change(getattr(model.case.batch, name)) for name, change in changes.items()}
        )
    )


def of_layer(**changes: Any) -> Change:
    return lambda model: dict(layer=replace(model.layer, **changes))


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda x: None,
    "a-list": lambda x: x.tolist(),
    "too-few-tokens": lambda x: x[:-1],
    "too-narrow": lambda x: x[..., :-1],
    "flat": lambda x: x.flatten(),
    "half": lambda x: x.half(),
    "meta": lambda x: x.to("meta"),
}
OPERANDS = {
    f"{name}-{how}": (name, CHANGES[how]) for name in ("q_nope", "q_rope", "latent", "k_rope") for how in CHANGES
}

BAD: dict[str, tuple[Change, type[FaError], str]] = {
    "other-heads": (projections(lambda w: w[:2], lambda w: w[:2]), BadConfig, "its projections 2 and 32"),
    "other-latent": (projections(lambda w: w[..., :16], lambda w: w[..., :16]), BadConfig, "its projections 4 and 16"),
    "other-nope": (projections(lambda w: w[:, :5]), BadBatch, r"q_nope has shape \(10, 4, 12\).* must be \[10, 20\]"),
    "half-weights": (projections(torch.Tensor.half, torch.Tensor.half), BadConfig, "w_uk is torch.float16"),
    "no-projections": (lambda model: dict(projections=None), BadBatch, "projections is None; pass an MLAProjections"),
    "no-batch": (lambda model: dict(batch=None), BadBatch, "a NoneType without forward_mode"),
    "no-layer": (lambda model: dict(layer=None), BadConfig, "a NoneType without layer_id"),
    "no-backend": (lambda model: dict(backend=None), BadConfig, "no backend of an MLA model"),
    "a-form-that-is-none": (lambda model: dict(form="mha"), BadBatch, "form 'mha'.*supported: auto, absorbed"),
    "workspace-none": (lambda model: dict(workspace_tokens=None), BadBatch, "workspace_tokens None; .*an int of"),
    "workspace-text": (lambda model: dict(workspace_tokens="4"), BadBatch, "workspace_tokens '4'"),
    "workspace-float": (lambda model: dict(workspace_tokens=4.5), BadBatch, r"workspace_tokens 4\.5"),
    "slots-a-list": (in_batch(out_cache_loc=lambda x: x.tolist()), BadBatch, r"out_cache_loc is \["),
    "slots-float": (in_batch(out_cache_loc=lambda x: x.float()), BadBatch, "out_cache_loc is torch.float32"),
    "slots-short": (in_batch(out_cache_loc=lambda x: x[:-1]), BadBatch, "out_cache_loc has 9 slots"),
    "slots-outside": (in_batch(out_cache_loc=lambda x: x + 9999), BadPageTable, "out_cache_loc: slots span"),
    "slots-negative": (in_batch(out_cache_loc=lambda x: x * 0 - 1), BadPageTable, r"slots span -1\.\.-1"),
    "other-rows": (in_batch(req_pool_indices=lambda x: x + 500), BadBatch, "req_pool_indices is .*the planned batch"),
    "other-mode": (in_batch(forward_mode=lambda x: ForwardMode.DECODE), BadBatch, "a DECODE batch of 3 requests"),
    "fewer-requests": (lambda model: dict(batch=model.case.batch.subset([0, 1])), BadBatch, "of 2 requests, but"),
    "two-key-heads": (of_layer(tp_k_head_num=2, tp_v_head_num=2), BadConfig, "has 2 key heads of 40"),
    "no-such-layer": (of_layer(layer_id=7), BadConfig, "layer_id 7 has no buffer"),
    "other-rope": (of_layer(head_dim=44), BadConfig, r"keys and values of \(heads, dim\) \(1, 44\)"),
}  # fmt: skip

BAD_LENGTHS: dict[str, tuple[Change, str]] = {
    "longer": (in_batch(seq_lens_cpu=lambda x: x + 1), "not of the planned batch"),
    "shorter-than-the-new": (in_batch(seq_lens_cpu=lambda x: torch.tensor([4, 8, 7])), "not of the planned batch"),
    "too-few": (in_batch(extend_seq_lens_cpu=lambda x: [5, 5]), "not of the planned batch"),
    "other-new-tokens": (in_batch(extend_seq_lens_cpu=lambda x: [4, 4, 1]), "not of the planned batch"),
    "none": (in_batch(extend_seq_lens_cpu=lambda x: [5, None, 5]), "it must be a list or an integer tensor"),
}


def check_refused(model: Model, route: str, form: str, change: Change, error: type[FaError], says: str) -> None:
    before = cache_bytes(model.case)
    changes = change(model)
    with pytest.raises(error, match=says):
        call(model, route, **dict(form=form) | changes)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_bytes(model.case), strict=True)), (
        "written before refused"
    )


@every_form
@every_route
@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_of_another_shape_type_or_device_is_refused_by_name(name, route, form):
    operand_name, change = OPERANDS[name]
    also = "|k" if operand_name == "latent" else ""  # the absorbed form hands it to forward, where it is k
    says = rf"layer 0: ({operand_name}{also}) (is|has shape) .*must (be|agree)"
    check_refused(Model(mla_case()), route, form, operand(operand_name, change), BadBatch, says)


@every_form
@every_route
@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_before_anything_is_written(name, route, form, monkeypatch):
    monkeypatch.delenv("FA_CHECK", raising=False)  # with it, slots other than planned are refused first
    change, error, says = BAD[name]
    model = Model(mla_case())
    check_refused(model, route, form, change, error, says)
    torch.testing.assert_close(model.run(route, form), model.run("masks", "absorbed"), rtol=1e-4, atol=1e-5)


@every_route
@pytest.mark.parametrize("form", ["chunked", "one_shot", "auto"])
@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_host_lengths_other_than_planned_are_refused_where_chunks_are_cut_by_them(name, form, route):
    change, says = BAD_LENGTHS[name]
    check_refused(Model(mla_case()), route, form, change, BadBatch, says)


@every_form
@planned_routes
def test_a_backend_of_a_model_without_latents_is_refused(route, form):
    package, provider = ROUTES[route]
    plain = package.FlashAttentionBackend(make_case().config, provider=provider)
    check_refused(Model(mla_case()), route, form, lambda _: dict(backend=plain), BadConfig, "use_mla=True")


@every_form
@every_route
def test_a_server_s_own_batch_and_layer_are_accepted(route, form):
    model = Model(mla_case())
    ours = call(model, route, form)
    theirs = call(model, route, form, batch=served(model.case.batch), layer=served(model.layer))
    assert torch.equal(ours, theirs)


@every_form
@every_route
@pytest.mark.parametrize("prefix_lens", [(3, 0, 6), (0, 0, 0)])
def test_a_prefill_without_new_tokens_gives_no_rows(prefix_lens, route, form):
    model = Model(mla_case(prefix_lens=prefix_lens, new_lens=(0, 0, 0)))
    assert call(model, route, form).shape == (0, 4 * model.v_dim)


# ---- windows and chunks --------------------------------------------------------------------------------------------

KINDS = {"sliding": dict(kind=LayerKind.SLIDING, window=2), "local": dict(kind=LayerKind.LOCAL, chunk=4)}


@every_route
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_do_not_see_all_keys_have_no_mha_form(name, route):
    """Chunks of a prefix do not say where a key is, so a window would be ignored."""
    model = Model(mla_case(**KINDS[name]))
    for form in ("chunked", "one_shot"):
        check_refused(
            model, route, form, lambda _: {}, UnsupportedByProvider, f"is {name.upper()}; the MHA form of MLA"
        )
    assert torch.equal(call(model, route, "auto"), call(model, route, "absorbed"))
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(model.case.config, provider=provider)
    backend.init_forward_metadata(model.case.batch)
    new = replace(model.case.batch, attn_attend_prefix_cache=False)
    k, v = torch.zeros(10, 4, 20), torch.zeros(10, 4, 10)
    with pytest.raises(UnsupportedByProvider, match="the MHA form of MLA is for FULL layers"):
        backend.forward(k, k, v, model.projections.mha_layer(model.layer), new, save_kv_cache=False)


# ---- chunks of a server's own --------------------------------------------------------------------------------------

CU = chunk_prefix([3, 0, 6], 4).cu_seq_lens  # [0, 3, 3, 4], [0, 0, 0, 4], [0, 0, 0, 1]

BAD_CHUNKS: dict[str, tuple[dict[str, Any], str]] = {
    **{f"index-{bad}": (dict(prefix_chunk_idx=bad), "prefix_chunk_idx") for bad in (None, -1, 3, "0", 1.0, [0])},
    "index-a-tensor": (dict(prefix_chunk_idx=torch.tensor([0, 1])), "prefix_chunk_idx"),
    "cu-none": (dict(prefix_chunk_cu_seq_lens=None), "prefix_chunk_cu_seq_lens None"),
    "cu-a-list": (dict(prefix_chunk_cu_seq_lens=CU.tolist()), r"prefix_chunk_cu_seq_lens \[\["),
    "cu-a-number": (dict(prefix_chunk_cu_seq_lens=3), "prefix_chunk_cu_seq_lens 3"),
    "cu-of-one-chunk": (dict(prefix_chunk_cu_seq_lens=CU[0]), r"prefix_chunk_cu_seq_lens \(4,\)"),
    "cu-int64": (dict(prefix_chunk_cu_seq_lens=CU.long()), "must be int32"),
    "cu-of-two-requests": (dict(prefix_chunk_cu_seq_lens=CU[:, :3]), r"shape \(3, 3\).*\(3, 4\)"),
    "cu-meta": (dict(prefix_chunk_cu_seq_lens=CU.to("meta")), "on meta"),
    "cu-not-from-0": (dict(prefix_chunk_cu_seq_lens=CU + 1), "must start at 0"),
    "cu-falling": (dict(prefix_chunk_cu_seq_lens=CU.flip(1)), "must start at 0"),
    "cu-ends-early": (dict(prefix_chunk_cu_seq_lens=(CU - 1).clamp(min=0)), "4 keys are given, the requests have 3"),
    "longest-none": (dict(prefix_chunk_max_seq_lens=None), "prefix_chunk_max_seq_lens is None"),
    "longest-a-number": (dict(prefix_chunk_max_seq_lens=4), "prefix_chunk_max_seq_lens is 4"),
    "longest-of-nones": (dict(prefix_chunk_max_seq_lens=[None] * 3), "prefix_chunk_max_seq_lens is"),
    "longest-text": (dict(prefix_chunk_max_seq_lens=["3", "4", "1"]), "prefix_chunk_max_seq_lens is"),
    "longest-of-one-chunk": (dict(prefix_chunk_max_seq_lens=[4]), "a number for each of the 3 chunks"),
    "longest-too-short": (dict(prefix_chunk_max_seq_lens=[2, 4, 1]), "at most 2 each"),
    "keys-a-number": (dict(prefix_chunk_num_tokens=4), "prefix_chunk_num_tokens is 4"),
    "keys-of-nones": (dict(prefix_chunk_num_tokens=[None] * 3), "prefix_chunk_num_tokens is"),
    "keys-of-no-chunk": (dict(prefix_chunk_num_tokens=[]), "a number for each of the 3 chunks"),
    "keys-wrong": (dict(prefix_chunk_num_tokens=[3, 3, 3]), r"k has shape \(4, 4, 20\); this batch has 3 keys here"),
}


def given(model: Model, route: str, batch: Any, keys: int = 4, plan: Any = None, **changes: Any) -> Any:
    """One layer call in the MHA form."""
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(model.case.config, provider=provider)
    backend.init_forward_metadata(model.case.batch if plan is None else plan)
    call = dict(
        q=torch.zeros(10, 4, 20), k=torch.zeros(keys, 4, 20), v=torch.zeros(keys, 4, 10),
        layer=model.projections.mha_layer(model.layer), forward_batch=batch, save_kv_cache=False,
    )  # fmt: skip
    return backend.forward(**call | changes)


@planned_routes
@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_chunks_that_contradict_themselves_or_their_keys_are_refused(name, route):
    model = Model(mla_case())
    fields, says = BAD_CHUNKS[name]
    batch = chunk_prefix([3, 0, 6], 4).batch(model.case.batch, 0)
    with pytest.raises(BadBatch, match=says):
        given(model, route, replace(batch, **fields))
    assert given(model, route, batch)[0].shape == (10, 4, 10)


@planned_routes
@pytest.mark.parametrize("keys", [0, 3, 5])
def test_keys_that_nobody_counted_must_be_those_of_the_chunk(keys, route):
    model = Model(mla_case())
    batch = replace(chunk_prefix([3, 0, 6], 4).batch(model.case.batch, 0), prefix_chunk_num_tokens=None)
    with pytest.raises(BadBatch, match=f"cu_seqlens_k .*for {keys} tokens|{keys} keys are given, the requests have 4"):
        given(model, route, batch, keys)
    with pytest.raises(BadBatch, match=r"k is \[\]; it must be a tensor"):
        given(model, route, batch, k=[])


@planned_routes
@pytest.mark.parametrize("keys", [18, 28])
def test_without_host_lengths_all_keys_of_the_requests_are_still_counted(keys, route):
    model = Model(mla_case())
    blind = replace(model.case.batch, seq_lens_cpu=None)
    one_shot = replace(blind, attn_attend_prefix_cache=False, mha_one_shot=True)
    with pytest.raises(BadBatch, match=f"for {keys} tokens|{keys} keys are given"):
        given(model, route, one_shot, keys, blind)
    assert given(model, route, one_shot, 19, blind).shape == (10, 40)


@planned_routes
def test_rope_parts_are_not_ignored_in_the_mha_form(route):
    model = Model(mla_case())
    batch = chunk_prefix([3, 0, 6], 4).batch(model.case.batch, 0)
    for part in ("q_rope", "k_rope"):
        with pytest.raises(BadBatch, match="or in the MHA form"):
            given(model, route, batch, **{part: torch.zeros(10, 4, 8)})


# ---- what a server's own objects may bring -------------------------------------------------------------------------

OTHER_POOLS = {
    "a-number": (lambda: 3, BadConfig, "token_to_kv_pool 3 has no get_kv_buffer"),
    "of-other-keys": (
        lambda: MHAKVPool(size=64, page_size=4, dtype=torch.float32, head_num=1, head_dim=40, layer_num=1),
        BadConfig,
        "use_mla=True over a MHAKVPool",
    ),
    "too-small": (
        lambda: MLAKVPool(size=4, page_size=4, dtype=torch.float32, kv_lora_rank=32, qk_rope_head_dim=8, layer_num=1),
        BadPageTable,
        r"slots span .* the pool holds 0\.\.7",
    ),
}


@every_route
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "only-in-forward"])
@pytest.mark.parametrize("name", OTHER_POOLS)
def test_a_pool_of_the_batch_s_own_must_fit(name, planned, route):
    pool, error, says = OTHER_POOLS[name]
    case = mla_case()
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    other = replace(case.batch, token_to_kv_pool=pool())

    def forward() -> None:
        backend.init_forward_metadata(other if planned else case.batch)
        backend.forward(case.q, case.k, case.v, case.layer, other)

    with pytest.raises(error, match=says):
        forward()
    assert case.judge(case.run(package, provider)).ok


@every_route
@pytest.mark.parametrize("info", [SimpleNamespace(), 3], ids=["empty", "a-number"])
def test_a_spec_info_without_its_fields_names_them(info, route):
    case = mla_case(**MODES["decode"])
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    with pytest.raises(BadBatch, match=r"spec_info\.topk is None; it must be an int"):
        backend.init_forward_metadata(replace(case.batch, spec_info=info))
    verifying = replace(case.batch, forward_mode=ForwardMode.TARGET_VERIFY, spec_info=info)
    with pytest.raises(
        BadBatch, match=r"needs spec_info=VerifyInput\(draft_token_num=T\).* custom_mask=.*got DraftInput"
    ):
        backend.init_forward_metadata(verifying)
    assert replace(case.batch, spec_info=SimpleNamespace(topk=2, num_steps=3)).spec_info == DraftInput(
        topk=2, num_steps=3
    )
