"""Multi-head latent attention: the absorbed form in every mode, the MHA form in chunks, and that both are one thing."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fa_ref
from fa_fast.kernels import flash_mla
from fa_ref import BadBatch, BadConfig, ForwardMode, LayerKind, MLAProjections, chunk_prefix
from fa_ref.api.mla_cost import cheaper_form, mla_costs
from fa_ref.cases import Case, make_case
from tests.support import (
    FP8,
    ROUTES,
    agrees,
    both_packages,
    case_on,
    every_page_size,
    every_route,
    plans,
    run,
    verdicts,
    with_batch,
    with_layer,
)

TREES = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]
MODES: dict[str, dict[str, Any]] = {
    "extend": dict(mode=ForwardMode.EXTEND),
    "mixed": dict(mode=ForwardMode.MIXED, new_lens=(5, 1, 1)),
    "decode": dict(mode=ForwardMode.DECODE),
    "draft-decode-chain": dict(mode=ForwardMode.DECODE, topk=1, step=2),
    "draft-decode-branches": dict(mode=ForwardMode.DECODE, topk=3, step=1),
    "verify-chain": dict(mode=ForwardMode.TARGET_VERIFY, draft_token_num=4),
    "verify-tree": dict(mode=ForwardMode.TARGET_VERIFY, trees=TREES),
    "verify-tree-expand": dict(mode=ForwardMode.TARGET_VERIFY, trees=TREES, tree_attention="expand"),
    "draft-extend": dict(mode=ForwardMode.DRAFT_EXTEND, new_lens=(2, 3, 1)),
    "deterministic": dict(mode=ForwardMode.MIXED, new_lens=(5, 1, 1), deterministic=True),
    "idle": dict(mode=ForwardMode.IDLE, prefix_lens=(), new_lens=()),
}
every_mode = pytest.mark.parametrize("mode", MODES)


def mla_case(device: str = "cpu", **settings: Any) -> Case:
    return case_on(device, **dict(latent=32, rope=8, heads=4) | settings)


# ---- the absorbed form ---------------------------------------------------------------------------------------------


@every_mode
@every_page_size
def test_masks_passes_and_fast_agree_on_latents(mode, page_size, device):
    assert agrees(mla_case(device, page_size=page_size, **MODES[mode])), verdicts(
        mla_case(device, page_size=page_size, **MODES[mode])
    )


@pytest.mark.parametrize("mode", ["draft-decode-branches", "verify-tree", "verify-tree-expand"])
def test_drafts_agree_in_fp64_where_they_are_merged_by_an_fp32_lse(mode):
    assert agrees(mla_case(dtype=torch.float64, softcap=5.0, **MODES[mode]))


@every_mode
def test_the_two_packages_plan_latents_alike(mode):
    case = mla_case(page_size=3, **MODES[mode])
    found = plans(case)
    assert found["fa_ref"] == found["fa_fast"]


@every_mode
@every_route
def test_split_and_packed_inputs_are_the_same(mode, route, device):
    case = mla_case(device, **MODES[mode])
    packed = run(case, route)
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(case.config, speculative_step_id=case.step, provider=provider)
    backend.init_forward_metadata(case.batch)
    latent, heads = case.layer.v_head_dim, case.layer.tp_q_head_num
    q = case.q.view(-1, heads, case.layer.head_dim)
    given = backend.forward(
        q[..., :latent].contiguous(), case.k[:, :latent].contiguous(), None, case.layer, case.batch,
        q_rope=q[..., latent:].contiguous(), k_rope=case.k[:, latent:].contiguous(),
    )  # fmt: skip
    torch.testing.assert_close(given, packed, rtol=0, atol=0 if device == "cpu" else 2e-2)


@every_route
def test_a_new_token_is_cached_as_one_row_and_nothing_else_is_touched(route, device):
    case = mla_case(device)
    pool = case.config.token_to_kv_pool
    before = pool.kv_buffer[0].clone()
    run(case, route)
    slots = case.batch.out_cache_loc
    assert torch.equal(pool.kv_buffer[0][slots, 0], case.k)
    before[slots] = pool.kv_buffer[0][slots]
    assert torch.equal(pool.kv_buffer[0].view(torch.uint8), before.view(torch.uint8))


@every_route
@every_mode
def test_an_fp8_cache_is_descaled_by_its_one_scale(mode, route):
    case = mla_case(kv_dtype=FP8, k_scale=0.05, dtype=torch.bfloat16, **MODES[mode])
    verdict = case.judge(run(case, route))
    assert verdict.ok, verdict
    if mode != "idle":  # a scale that is ignored must show
        assert not case.judge(run(with_layer(case, k_scale=1.0), route)).ok


def test_other_latent_sizes_softcap_sinks_and_windows_agree():
    for settings in (
        dict(latent=16, rope=4, heads=3),
        dict(softcap=5.0),
        dict(sinks=True),
        dict(sinks=True, mode=ForwardMode.TARGET_VERIFY, trees=TREES),
        dict(kind=LayerKind.SLIDING, window=3),
        dict(kind=LayerKind.LOCAL, chunk=4),
        dict(dtype=torch.float64),
        dict(shared_prefix=8, prefix_lens=(9, 8, 13)),
    ):
        assert agrees(mla_case(**settings)), settings


@every_route
def test_dropping_the_rope_part_is_noticed(route, device):
    case = mla_case(device)
    out = run(case, route)
    bare = case.q.view(-1, case.layer.tp_q_head_num, case.layer.head_dim).clone()
    bare[..., case.layer.v_head_dim :] = 0
    assert not case.judge(run(replace(case, q=bare.flatten(1)), route)).ok
    assert case.judge(out).ok


@both_packages
def test_a_fused_tree_is_refused_only_where_it_is_not_there(package):
    case = mla_case(tree_attention="fused", **MODES["verify-tree"])
    assert case.judge(case.run(package, "passes" if package is fa_ref else None)).ok


# ---- the MHA form --------------------------------------------------------------------------------------------------


class Model:
    """What an MLA layer of a model hands over for a case: random projections, q before absorption, latents."""

    def __init__(self, case: Case, nope: int = 12, v_dim: int = 10):
        heads, latent = case.layer.tp_q_head_num, case.layer.v_head_dim
        rope, tokens = case.layer.head_dim - latent, case.k.shape[0]
        gen = torch.Generator().manual_seed(1)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=gen) * scale).to(case.q.dtype).to(case.q.device)

        self.case, self.heads, self.v_dim = case, heads, v_dim
        self.layer = replace(case.layer, scaling=(nope + rope) ** -0.5)
        weight = draw(heads * (nope + v_dim), latent, scale=latent**-0.5)
        self.projections = MLAProjections.of_kv_b_proj(weight, heads=heads, nope=nope)
        self.q_nope, self.q_rope = draw(tokens, heads, nope), draw(tokens, heads, rope)
        self.latent, self.k_rope = case.k[:, :latent], case.k[:, latent:]

    def run(self, route: str, form: str, workspace_tokens: int = 4) -> Tensor:
        package, provider = ROUTES[route]
        backend = package.FlashAttentionBackend(self.case.config, provider=provider)
        backend.init_forward_metadata(self.case.batch)
        return package.mla_attention(
            backend, self.q_nope, self.q_rope, self.latent, self.k_rope, self.layer, self.case.batch, self.projections,
            form=form, workspace_tokens=workspace_tokens,
        )  # fmt: skip


def model_on(device: str, **settings: Any) -> Model:
    if device == "cpu":
        return Model(mla_case(**settings))
    return Model(mla_case(device, **settings), nope=128, v_dim=128)


@every_route
@pytest.mark.parametrize("form", ["chunked", "one_shot", "auto"])
def test_the_mha_form_equals_the_absorbed_form_in_fp64(form, route):
    for prefix_lens in ((3, 0, 6), (0, 0, 0), (1, 17, 5)):
        model = Model(mla_case(dtype=torch.float64, prefix_lens=prefix_lens))
        absorbed = model.run(route, "absorbed")
        for workspace in (1, 2, 5, 7, 100):
            torch.testing.assert_close(model.run(route, form, workspace), absorbed, rtol=1e-6, atol=1e-6)


@every_page_size
@pytest.mark.parametrize("mode", ["extend", "mixed", "deterministic"])
def test_both_forms_are_near_the_fp32_answer_on_every_device(mode, page_size, device):
    settings = MODES[mode] | dict(page_size=page_size, prefix_lens=(300, 0, 70), new_lens=(5, 1, 1))
    model = model_on(device, **settings)
    exact = Model(mla_case(dtype=torch.float64, latent=model.layer.v_head_dim, rope=model.k_rope.shape[1], **settings))
    for name in ("q_nope", "q_rope", "latent", "k_rope"):
        setattr(exact, name, getattr(model, name).double().cpu())
    exact.projections = MLAProjections(
        w_uk=model.projections.w_uk.double().cpu(), w_uv=model.projections.w_uv.double().cpu()
    )
    exact.layer, exact.case = replace(exact.case.layer, scaling=model.layer.scaling), exact.case
    exact.case.config.token_to_kv_pool.kv_buffer[0].copy_(model.case.config.token_to_kv_pool.kv_buffer[0])
    right = exact.run("masks", "absorbed")
    eps = torch.finfo(model.q_nope.dtype).eps
    for form in ("absorbed", "chunked", "one_shot"):
        error = (model.run("fast", form, 64).double().cpu() - right).abs().max()
        # three products in a row (absorb or expand, attend, project), each rounded in the model's dtype
        assert error <= 8 * eps * right.abs().max(), (form, error)


@every_route
def test_the_states_of_the_mha_form_merge_to_the_whole(route, device):
    model = model_on(device, prefix_lens=(9, 0, 6))
    one_shot, chunked = model.run(route, "one_shot"), model.run(route, "chunked")
    torch.testing.assert_close(chunked, one_shot, rtol=0, atol=1e-5 if device == "cpu" else 2e-2)


@both_packages
def test_a_chunk_without_keys_for_a_request_leaves_its_rows_empty(package):
    """sglang PR 22688: prefixes [256, 1024] in chunks of 256 keys a request: later chunks hold none of the first."""
    model = Model(mla_case(prefix_lens=(256, 1024), new_lens=(3, 2)))
    backend = package.FlashAttentionBackend(model.case.config)
    backend.init_forward_metadata(model.case.batch)
    layer = model.projections.mha_layer(model.layer)
    q = torch.cat([model.q_nope, model.q_rope], dim=-1)
    cu = torch.tensor([[0, 256, 512], [0, 0, 256]], dtype=torch.int32)
    second = replace(
        model.case.batch, attn_attend_prefix_cache=True, mha_return_lse=True, prefix_chunk_idx=1,
        prefix_chunk_cu_seq_lens=cu, prefix_chunk_max_seq_lens=[256, 256],
    )  # fmt: skip
    k, v = torch.randn(256, 4, layer.head_dim), torch.randn(256, 4, layer.v_head_dim)
    out, lse = backend.forward(q, k, v, layer, second, save_kv_cache=False)
    assert (out[:3] == 0).all() and (lse[:3] == -torch.inf).all()
    assert torch.isfinite(out[3:]).all() and torch.isfinite(lse[3:]).all()


@both_packages
def test_keys_and_values_of_other_widths_are_viewed_by_their_own(package):
    """sglang PR 30548: qk 192, v 128."""
    case = mla_case(prefix_lens=(9, 2), new_lens=(3, 2), heads=2)
    model = Model(case, nope=184, v_dim=128)
    absorbed = model.run("masks", "absorbed")
    route = "passes" if package is fa_ref else "fast"
    torch.testing.assert_close(model.run(route, "chunked", 3), absorbed, rtol=1e-4, atol=1e-5)


def test_chunks_are_as_few_as_the_workspace_allows():
    chunks = chunk_prefix([5, 0, 3], workspace_tokens=4)
    assert chunks.seq_lens.tolist() == [[4, 0, 0], [1, 0, 3]]
    assert chunks.starts.tolist() == [[0, 0, 0], [4, 0, 0]]
    assert chunks.cu_seq_lens.tolist() == [[0, 4, 4, 4], [0, 1, 1, 4]]
    assert (chunks.max_seq_lens, chunks.num_tokens) == ((4, 3), (4, 4))
    assert len(chunk_prefix([0, 0], workspace_tokens=4)) == 0
    assert len(chunk_prefix([], workspace_tokens=4)) == 0


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 30))
def test_every_prefix_key_is_in_exactly_one_chunk(prefix_lens, workspace):
    chunks = chunk_prefix(prefix_lens, workspace)
    assert all(n <= workspace for n in chunks.num_tokens)
    assert len(chunks) == -(-sum(prefix_lens) // workspace)
    for request, length in enumerate(prefix_lens):
        found: list[int] = []
        for chunk in range(len(chunks)):
            start, count = int(chunks.starts[chunk, request]), int(chunks.seq_lens[chunk, request])
            found += range(start, start + count)
        assert found == list(range(length))


# ---- what the forms cost ---------------------------------------------------------------------------------------------


def test_counted_pairs_are_those_of_the_mask():
    sizes = dict(heads=2, nope=3, rope=1, latent=5, v_dim=4)
    costs = mla_costs([4, 1], [2, 7], **sizes)
    case = make_case(prefix_lens=(2, 7), new_lens=(4, 1))
    pairs = sum(len(seen) for seen in _visible(case))
    weights, keys, tokens = 2 * 5 * (3 + 4), 6 + 8, 5
    assert costs["absorbed"].flops == 2 * pairs * 2 * (5 + 1 + 5) + 2 * tokens * weights
    assert costs["mha"].flops == 2 * pairs * 2 * (3 + 1 + 4) + 2 * keys * weights


def _visible(case: Case) -> list[list[int]]:
    from fa_ref.oracle import mask_of, questions

    masks = [
        mask_of(LayerKind.FULL, case.layer, case.config).dense(question.q_pos, question.k_pos)
        for question in questions(case.batch, case.config)
    ]
    return [torch.nonzero(row).flatten().tolist() for mask in masks for row in mask]


def test_decode_is_absorbed_and_a_long_prefill_is_not():
    sizes = dict(heads=128, nope=128, rope=64, latent=512, v_dim=128)
    assert cheaper_form(mla_costs([1] * 8, [4096] * 8, **sizes)) == "absorbed"
    assert cheaper_form(mla_costs([4096], [4096], **sizes)) == "mha"
    assert cheaper_form(mla_costs([16], [32768], **sizes)) == "absorbed"


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(package: Any, case: Case, says: str, error: type[Exception] = BadBatch, **call: Any) -> None:
    """The layer call raises and writes nothing."""
    pool = case.config.token_to_kv_pool
    before = pool.kv_buffer[0].view(torch.uint8).clone()
    backend = package.FlashAttentionBackend(case.config)
    backend.init_forward_metadata(with_batch(case, attn_attend_prefix_cache=None, mha_return_lse=False).batch)
    arguments = dict(q=case.q, k=case.k, v=None) | call
    with pytest.raises(error, match=says):
        backend.forward(**arguments, layer=case.layer, forward_batch=case.batch)
    assert torch.equal(pool.kv_buffer[0].view(torch.uint8), before)


@both_packages
def test_bad_inputs_of_a_latent_layer_are_refused_before_the_write(package):
    case = mla_case()
    tokens, heads = case.q.shape[0], 4
    rope = torch.zeros(tokens, heads, 8)
    refused(package, case, "q has shape", q=case.q[:, :-1].contiguous())
    refused(package, case, "q has shape", q_rope=rope)  # q is packed already
    refused(
        package, case, "q_rope has shape", q=case.q[:, : heads * 32].contiguous(), q_rope=rope[..., :4].contiguous()
    )
    refused(package, case, "k has shape", k_rope=torch.zeros(tokens, 8))
    refused(package, case, "v has shape", v=case.k)
    refused(package, case, "k_rope or v without k", k=None, v=case.k[:, :32])
    refused(package, case, "it must be a tensor", q=None)
    refused(package, case, "sinks has shape", sinks=torch.zeros(3))
    refused(package, with_layer(case, tp_k_head_num=2, tp_v_head_num=2), "key heads", BadConfig)
    refused(package, with_layer(case, k_scale=0.5, v_scale=0.25), "one scale", BadConfig)


@both_packages
def test_the_mha_form_says_what_it_needs(package):
    case = mla_case()
    new = with_batch(case, attn_attend_prefix_cache=False)
    refused(package, new, "save_kv_cache=False")
    refused(package, new, "expanded k and v", k=None, save_kv_cache=False)
    refused(package, new, "q has shape", q=case.k, v=case.k, save_kv_cache=False)
    chunk = with_batch(case, attn_attend_prefix_cache=True)
    layer = MLAProjections(w_uk=torch.zeros(4, 8, 32), w_uv=torch.zeros(4, 6, 32)).mha_layer(case.layer)
    mha = dict(q=torch.zeros(10, 4, 16), k=torch.zeros(9, 4, 16), v=torch.zeros(9, 4, 6), save_kv_cache=False)
    for fields, says in (
        ({}, "prefix_chunk_idx"),
        (dict(prefix_chunk_idx=1, prefix_chunk_max_seq_lens=[6]), "prefix_chunk_idx 1"),
        (dict(prefix_chunk_idx=0, prefix_chunk_max_seq_lens=[6], prefix_chunk_cu_seq_lens=torch.zeros(1, 3)), "int32"),
    ):
        refused(package, with_batch(replace(chunk, layer=layer), **fields), says, **mha)
    short = chunk_prefix([3, 0, 6], 100).batch(case.batch, 0)
    refused(package, replace(case, batch=short, layer=layer), "k has shape", **mha | dict(k=torch.zeros(8, 4, 16)))
    refused(package, with_batch(case, mha_return_lse=True), "only the MHA form")


@both_packages
def test_the_mha_form_is_for_extends_of_latent_models(package):
    decode = with_batch(mla_case(**MODES["decode"]), attn_attend_prefix_cache=False)
    refused(package, decode, "for extend modes", save_kv_cache=False)
    plain = with_batch(make_case(), attn_attend_prefix_cache=False)
    backend = package.FlashAttentionBackend(plain.config)
    backend.init_forward_metadata(plain.batch)
    with pytest.raises(BadBatch, match="for extend modes of an MLA model"):
        backend.forward(plain.q, plain.k, plain.v, plain.layer, plain.batch)
    with pytest.raises(BadBatch, match="q_rope or k_rope without use_mla"):
        backend.forward(plain.q, plain.k, plain.v, plain.layer, make_case().batch, q_rope=plain.q)


@both_packages
def test_pool_and_config_must_agree_on_latents(package):
    latent, plain = mla_case(), make_case()
    with pytest.raises(BadConfig, match="use_mla=False over a MLAKVPool"):
        replace(latent.config, use_mla=False)
    with pytest.raises(BadConfig, match="use_mla=True over a MHAKVPool"):
        replace(plain.config, use_mla=True)
    with pytest.raises(BadConfig, match="kv_cache_dtype"):  # never converted as a whole
        replace(latent.config, kv_cache_dtype=torch.bfloat16)


@both_packages
def test_forms_that_cannot_run_are_refused_by_name(package):
    model = Model(mla_case())
    route = "passes" if package is fa_ref else "fast"
    for form, workspace, says in (("mha", 4, "supported: auto"), ("chunked", 0, "workspace_tokens 0")):
        with pytest.raises(BadBatch, match=says):
            model.run(route, form, workspace)
    drafting = Model(mla_case(**MODES["decode"]))
    with pytest.raises(BadBatch, match="the MHA form is for EXTEND"):
        drafting.run(route, "chunked")
    blind = Model(mla_case(host_lengths=False))
    with pytest.raises(BadBatch, match="in EXTEND without extend_seq_lens_cpu, seq_lens_cpu; "):
        blind.run(route, "one_shot")
    torch.testing.assert_close(blind.run(route, "auto"), blind.run(route, "absorbed"), rtol=0, atol=0)


@both_packages
@pytest.mark.parametrize("form", ["absorbed", "chunked", "one_shot", "auto"])
def test_what_a_model_hands_over_is_checked_before_the_write(package, form):
    model = Model(mla_case())
    latent = model.layer.v_head_dim
    short = replace(model.layer, head_dim=latent + 4)  # a rope part of 4, in a pool of 8
    zeros = torch.zeros
    bf16 = MLAProjections(w_uk=model.projections.w_uk.bfloat16(), w_uv=model.projections.w_uv.bfloat16())
    row = "k" if form == "absorbed" else "(latent|k)"  # forward calls it k
    two_heads = MLAProjections(w_uk=zeros(2, 8, latent), w_uv=zeros(2, 6, latent))
    for wrong, error, says in (
        (dict(latent=model.case.k), BadBatch, f"{row} has shape"),
        (dict(latent=model.latent[:-1]), BadBatch, f"{row} has shape"),
        (dict(k_rope=model.k_rope[:, :-1]), BadBatch, "k_rope has shape"),
        (dict(q_nope=model.q_nope[:, :-1]), BadBatch, "q_nope has shape"),
        (dict(q_rope=model.q_rope.double()), BadBatch, "q_rope is torch.float64"),
        (dict(layer=model.projections.mha_layer(model.layer)), BadConfig, "an absorbed MLA layer has one key head"),
        (dict(layer=short, q_rope=model.q_rope[..., :4], k_rope=model.k_rope[:, :4]), BadConfig, "buffers in the pool"),
        (dict(projections=two_heads), BadConfig, "4 query heads"),
        (dict(projections=MLAProjections(w_uk=zeros(4, 8, 16), w_uv=zeros(4, 6, 16))), BadConfig, "a latent of 32"),
        (dict(projections=bf16), BadConfig, "w_uk is torch.bfloat16"),
    ):
        changed = copy(model)
        vars(changed).update(wrong)
        buffer = model.case.config.token_to_kv_pool.kv_buffer[0]
        before = buffer.clone()
        with pytest.raises(error, match=says):
            changed.run("passes" if package is fa_ref else "fast", form)
        assert torch.equal(buffer.nan_to_num(), before.nan_to_num())


@both_packages
@pytest.mark.parametrize("form", ["absorbed", "chunked", "one_shot"])
def test_flat_queries_and_rows_with_a_head_axis_are_the_same(package, form):
    model = Model(mla_case())
    route = "passes" if package is fa_ref else "fast"
    other = copy(model)
    other.q_nope, other.q_rope = model.q_nope.flatten(1), model.q_rope.flatten(1)
    other.latent, other.k_rope = model.latent[:, None], model.k_rope[:, None]
    torch.testing.assert_close(other.run(route, form), model.run(route, form), rtol=0, atol=0)


def test_projections_of_other_shapes_are_refused():
    with pytest.raises(BadConfig, match="must be"):
        MLAProjections(w_uk=torch.zeros(2, 8, 16), w_uv=torch.zeros(2, 8, 12))
    with pytest.raises(BadConfig, match=r"kv_b_proj\.weight"):
        MLAProjections.of_kv_b_proj(torch.zeros(24, 16), heads=2, nope=12)


# ---- which kernel runs a decode on CUDA ----------------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch):
    """FlashMLA installed on a device of 132 processors."""
    monkeypatch.setattr(flash_mla, "_functions", lambda: flash_mla)
    monkeypatch.setattr(flash_mla, "_processors", lambda: 132)


def flash_runs(sequences: int, longest_k: int, heads: int, **call: Any) -> bool:
    settings = dict(queries=sequences, page_size=64, longest_q=1, packed=True) | call
    return flash_mla.is_faster(sequences=sequences, heads=heads, longest_k=longest_k, **settings)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("heads", [16, 128])
def test_the_measured_winner_is_chosen(heads):
    assert not flash_runs(1, 4096, heads)
    assert not flash_runs(1, 32768, heads)
    for requests in (32, 128):
        assert flash_runs(requests, 4096, heads)
        assert flash_runs(requests, 32768, heads)
    assert flash_runs(1, 1024, heads)


@pytest.mark.usefixtures("h200")
def test_calls_that_flash_mla_cannot_run_are_never_given_to_it():
    assert not flash_runs(32, 4096, 128, page_size=16)
    assert not flash_runs(32, 4096, 128, queries=33, longest_q=2)  # ragged
    assert flash_runs(32, 4096, 128, queries=64, longest_q=2)
    assert not flash_runs(0, 4096, 128)
    assert not flash_runs(32, 4096, 16, packed=False)
    assert flash_runs(32, 4096, 128, packed=False)


def test_without_flash_mla_fa3_runs_everything(monkeypatch):
    monkeypatch.setattr(flash_mla, "_functions", lambda: None)
    assert not flash_runs(32, 4096, 128)


def test_pages_are_split_among_blocks_as_counted_by_hand():
    assert flash_mla.split_among(132, sequences=1, rows=16, pages=64) == (1, 64)  # 69 pages for 132 parts
    assert flash_mla.split_among(132, sequences=4, rows=128, pages=128) == (9, 15)  # 532 pages for 66 parts
    assert flash_mla.split_among(4, sequences=1, rows=1024, pages=7) == (12, 1)
