"""The eager backend on CUDA, at the sizes a server runs: every head dim, page size, layer kind and dtype of FA3."""

from __future__ import annotations

import itertools

import pytest
import torch

import fa_fast
import fa_ref
from fa_fast.triton_ops.quantize_q import quantize_q_torch
from fa_ref import ForwardMode, LayerKind, layer_kind
from fa_ref.attention import scores, softcap
from fa_ref.cases import make_case
from fa_ref.numerics import judge
from fa_ref.oracle import cached, mask_of, questions

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
PAGE_SIZES = [1, 3, 5, 16, 64, 128]
KINDS = [LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL]
RAGGED = dict(prefix_lens=[0, 1, 127, 128, 513, 700, 0], new_lens=[1, 130, 1, 129, 64, 3, 0])


def check(case):
    """fa_fast against the fp32 oracle on the same tensors, within the derived budget, twice."""
    result = case.run(fa_fast)
    verdict = case.judge(result)
    assert verdict.ok, f"error {verdict.error:.3e}, budget {verdict.budget:.3e}"
    assert torch.isfinite(result).all()
    return verdict


def chunk_for(page_size):
    return next(chunk for chunk in (128, 129, 125) if chunk % page_size == 0)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE], ids=lambda m: m.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=lambda d: f"qk{d[0]}v{d[1]}")
def test_every_head_dim_page_size_and_kind(mode, kind, page_size, dims):
    check(
        make_case(
            mode, kind=kind, page_size=page_size, heads=8, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1],
            dtype=torch.bfloat16, window=100, chunk=chunk_for(page_size), device="cuda", **RAGGED,
        )
    )  # fmt: skip


FEATURES = [
    dict(softcap=5.0),
    dict(sinks=True),
    dict(sinks=True, softcap=20.0),
    dict(dtype=torch.float16),
    dict(hybrid=True),
    dict(hybrid=True, sinks=True, host_lengths=False),
    dict(host_lengths=False),
    dict(deterministic=True),
    dict(heads=24, kv_heads=2),
    dict(heads=6, kv_heads=1),
    dict(latent=512, rope=64),
    dict(latent=512, rope=64, heads=16, sinks=True, deterministic=True),
    dict(latent=512, rope=32, softcap=5.0, host_lengths=False),
    dict(latent=256, rope=64, heads=128, dtype=torch.float16),
    dict(latent=256, rope=32, heads=3),
    dict(kv_dtype=FP8),
    dict(kv_dtype=FP8, k_scale=0.05, v_scale=2.0),
    dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.25, hybrid=True, deterministic=True),
    dict(kv_dtype=FP8, k_scale=0.5, v_scale=0.25, softcap=5.0),
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(map(str, f.items())))
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_every_feature_in_every_mode_and_kind(features, page_size):
    for mode, kind in itertools.product(
        [
            ForwardMode.EXTEND,
            ForwardMode.MIXED,
            ForwardMode.SPLIT_PREFILL,
            ForwardMode.DRAFT_EXTEND,
            ForwardMode.DECODE,
        ],
        KINDS,
    ):
        settings = dict(heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, window=100) | features
        case = make_case(
            mode, kind=kind, page_size=page_size, chunk=chunk_for(page_size), device="cuda", **settings, **RAGGED
        )
        if settings.get("kv_dtype") is FP8:
            check_fp8(case)
        else:
            check(case)


def check_fp8(case):
    """FA3 multiplies in e4m3: queries and softmax weights are rounded too, so the plain run rounds them as well."""
    result = case.run(fa_fast)
    assert torch.isfinite(result).all()
    verdict = judge(result, case.oracle().out.flatten(1), plain_fp8(case).flatten(1), torch.bfloat16)
    assert verdict.ok, f"error {verdict.error:.3e}, budget {verdict.budget:.3e}"


def plain_fp8(case):
    """The oracle with every operand of a product rounded to e4m3."""
    layer, q = case.layer, case.q.view(-1, case.layer.tp_q_head_num, case.layer.head_dim)
    kind = layer_kind(layer, case.config.attention_chunk_size)
    outs = []
    for question in questions(case.batch, case.config, case.step):
        q_pos, k_pos = question.q_pos, question.k_pos
        if len(q_pos) == 0:
            continue
        keys, values = cached(case.batch, layer, case.config, question.slots)
        cu = torch.tensor([0, len(q_pos)], dtype=torch.int32)
        rounded, descale = quantize_q_torch(q[question.rows], cu, layer.tp_k_head_num)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        wide = rounded.float() * descale[0].repeat_interleave(group)[:, None]
        logits = softcap(scores(wide, keys) * layer.scaling, layer.logit_cap)
        mask = mask_of(kind, layer, case.config).dense(q_pos, k_pos)
        mask = mask if question.allowed is None else mask & question.allowed
        logits = logits.masked_fill(~mask, -torch.inf)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights8 = (weights * 256).to(FP8).float() / 256  # the kernel lifts weights into e4m3's range alike
        out = torch.einsum("hqk,khd->qhd", weights8, values.repeat_interleave(group, 1))
        outs.append(out / weights.sum(-1).T[..., None])
    return torch.cat(outs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("requests", [1, 64, 256])
def test_batches_to_256(kind, page_size, requests):
    lens = torch.randint(0, 900, (requests,), generator=torch.Generator().manual_seed(requests)).tolist()
    for mode, new in ((ForwardMode.DECODE, [1] * requests), (ForwardMode.MIXED, [1 + (r % 9 == 0) * 40 for r in lens])):
        check(
            make_case(
                mode, kind=kind, page_size=page_size, prefix_lens=lens, new_lens=new, heads=8, kv_heads=1,
                head_dim=128, dtype=torch.bfloat16, window=127, chunk=256, device="cuda",
            )
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("page_size", [1, 128])
def test_contexts_to_128k(kind, page_size):
    for mode, new in ((ForwardMode.DECODE, [1, 1, 1]), (ForwardMode.EXTEND, [64, 1, 200])):
        check(
            make_case(
                mode, kind=kind, page_size=page_size, prefix_lens=[131072 - 64, 40000, 5], new_lens=new, heads=8,
                kv_heads=2, head_dim=128, dtype=torch.bfloat16, window=4095, chunk=8192, device="cuda",
            )
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_prefill_without_prefix_takes_keys_as_given(kind):
    case = make_case(
        ForwardMode.EXTEND, kind=kind, page_size=64, prefix_lens=[0, 0, 0], new_lens=[1000, 1, 700], heads=8,
        kv_heads=2, head_dim=128, dtype=torch.bfloat16, window=100, chunk=256, device="cuda",
    )  # fmt: skip
    check(case)
    assert fa_fast.plan_batch(case.batch, case.config).for_kind(kind)[0].keys_are_new


def random_tree(drafts, gen):
    """A parent for every draft, before it; draft 0 is the root."""
    return [-1, *(int(torch.randint(0, i, (1,), generator=gen)) for i in range(1, drafts))]


def speculative_cases(drafts, **settings):
    """Chain and tree verify, and draft decode with one branch and with four, at the first and a later step."""
    gen = torch.Generator().manual_seed(drafts)
    requests = len(settings["prefix_lens"])
    yield make_case(ForwardMode.TARGET_VERIFY, draft_token_num=drafts, **settings)
    trees = [random_tree(drafts, gen) for _ in range(requests)]
    yield make_case(ForwardMode.TARGET_VERIFY, trees=trees, **settings)
    yield make_case(ForwardMode.TARGET_VERIFY, trees=trees, tree_attention="expand", **settings)
    for topk, step in ((1, 0), (1, 2), (4, 0), (4, 2), (8, 4)):
        yield make_case(ForwardMode.DECODE, topk=topk, num_steps=5, step=step, **settings)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=lambda d: f"qk{d[0]}v{d[1]}")
def test_every_speculative_mode_head_dim_page_size_and_kind(kind, page_size, dims):
    for case in speculative_cases(
        9, kind=kind, page_size=page_size, heads=8, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1],
        dtype=torch.bfloat16, window=100, chunk=chunk_for(page_size), device="cuda",
        prefix_lens=[0, 1, 127, 128, 513, 700, 99],
    ):  # fmt: skip
        check(case)


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(map(str, f.items())))
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_every_feature_in_every_speculative_mode(features, page_size):
    for kind in KINDS:
        settings = dict(heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, window=100) | features
        for case in speculative_cases(
            16, kind=kind, page_size=page_size, chunk=chunk_for(page_size), device="cuda",
            prefix_lens=[3, 127, 128, 513, 700, 1], **settings,
        ):  # fmt: skip
            if settings.get("kv_dtype") is FP8:
                check_fp8(case)
            else:
                check(case)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("drafts", [1, 2, 17, 64, 100, 256])
def test_every_tree_size_to_256_drafts(kind, drafts):
    for case in speculative_cases(
        drafts, kind=kind, page_size=16, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, window=127,
        chunk=256, device="cuda", prefix_lens=[0, 255, 256, 1000], sinks=True,
    ):  # fmt: skip
        check(case)


def test_every_batch_size_to_256_verifies():
    for requests in (1, 64, 256):
        lens = torch.randint(0, 900, (requests,), generator=torch.Generator().manual_seed(requests)).tolist()
        for case in speculative_cases(
            8, kind=LayerKind.FULL, page_size=64, heads=8, kv_heads=1, head_dim=128, dtype=torch.bfloat16,
            device="cuda", prefix_lens=lens,
        ):  # fmt: skip
            check(case)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_shared_prefix_is_read_once(page_size):
    for mode, new in ((ForwardMode.DECODE, [1] * 4), (ForwardMode.MIXED, [30, 1, 1, 7])):
        case = make_case(
            mode, page_size=page_size, prefix_lens=[2100, 2049, 3000, 2222], new_lens=new, shared_prefix=2048,
            heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, sinks=True, device="cuda",
        )  # fmt: skip
        check(case)
        assert len(fa_fast.plan_batch(case.batch, case.config).for_kind(LayerKind.FULL)) == 2


@pytest.mark.parametrize("kind", [LayerKind.CROSS, LayerKind.FULL, LayerKind.LOCAL], ids=lambda k: k.name)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_mode_of_an_encoder_decoder(page_size, kind):
    shape = dict(
        kind=kind, page_size=page_size, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, sinks=True,
        chunk=chunk_for(page_size), device="cuda",
    )  # fmt: skip
    for mode, encode in itertools.product(
        [
            ForwardMode.EXTEND,
            ForwardMode.MIXED,
            ForwardMode.SPLIT_PREFILL,
            ForwardMode.DRAFT_EXTEND,
            ForwardMode.DECODE,
        ],
        [True, False],
    ):
        lens = (1500, 0, 7, 64, 300, 1, 0)
        check(make_case(mode, encoder_lens=lens, encode=encode, **shape, **RAGGED))
    for case in speculative_cases(9, encoder_lens=(1500, 0, 64), encode=False, prefix_lens=[0, 513, 128], **shape):
        check(case)


def test_every_kind_of_layer_idles():
    for kind in KINDS:
        case = make_case(
            ForwardMode.IDLE, kind=kind, prefix_lens=[], new_lens=[], heads=8, head_dim=64, dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        assert case.run(fa_fast).shape == (0, 8 * 64)


def test_a_length_beyond_its_row_reads_no_other_request():
    """Without host lengths there is nothing to check on the host: the length is cut to the row."""
    for page_size in (1, 16):
        case = make_case(
            ForwardMode.DECODE, page_size=page_size, prefix_lens=[63, 63], heads=8, kv_heads=2, head_dim=64,
            dtype=torch.bfloat16, host_lengths=False, device="cuda",
        )  # fmt: skip
        right = case.run(fa_fast)
        case.batch.seq_lens[0] = 100
        assert torch.equal(case.run(fa_fast), right)


def test_planning_and_running_never_wait_for_the_device():
    """Without host copies of the lengths nothing may synchronise; with them neither."""
    for host_lengths, kind, mode in itertools.product(
        [True, False], KINDS, [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE]
    ):
        case = make_case(
            mode, kind=kind, page_size=16, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16, chunk=128,
            host_lengths=host_lengths, device="cuda", **RAGGED,
        )  # fmt: skip
        case.run(fa_fast)  # compile first
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.run(fa_fast)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_deterministic_mode_gives_a_row_the_same_bits_alone_and_in_a_batch():
    geometry = dict(heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, deterministic=True, device="cuda")
    lens = [4000, 17, 900, 64, 3, 2048, 1, 555]
    for kind in KINDS:
        many = make_case(ForwardMode.DECODE, kind=kind, prefix_lens=lens, chunk=512, window=100, context_len=4096,
                         page_size=16, **geometry)  # fmt: skip
        together = many.run(fa_fast)
        for i in range(len(lens)):
            alone = pick(many, i)
            assert torch.equal(alone.run(fa_fast)[0], together[i])


def pick(case, request):
    """The same cache with one request of a decode batch only."""
    from dataclasses import replace

    batch = case.batch
    one = slice(request, request + 1)
    return replace(
        case,
        batch=replace(
            batch,
            batch_size=1,
            req_pool_indices=batch.req_pool_indices[one],
            seq_lens=batch.seq_lens[one],
            seq_lens_cpu=batch.seq_lens_cpu[one],
            out_cache_loc=batch.out_cache_loc[one],
        ),
        q=case.q[one],
        k=case.k[one],
        v=case.v[one],
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_functions_return_the_kernels_lse(page_size):
    """The LSE is natural log, (tokens, heads), with sinks in it, also split and grouped (8 query heads over 2)."""
    case = make_case(
        ForwardMode.DECODE, page_size=page_size, prefix_lens=[5000, 3, 64, 0], heads=8, kv_heads=2, head_dim=128,
        dtype=torch.bfloat16, sinks=True, device="cuda",
    )  # fmt: skip
    case.run(fa_fast)
    step = fa_fast.plan_batch(case.batch, case.config).for_kind(LayerKind.FULL)[0]
    k, v = case.config.token_to_kv_pool.get_kv_buffer(0)
    for splits in (0, 1, 4):
        _, lse = fa_fast.flash_attn_with_kvcache(
            q=case.q.view(-1, 8, 128), k_cache=k.view(-1, page_size, 2, 128), v_cache=v.view(-1, page_size, 2, 128),
            page_table=step.page_table, cache_batch_idx=step.row_index, cache_seqlens=step.cache_seqlens,
            cu_seqlens_q=step.cu_seqlens_q, max_seqlen_q=1, causal=True, num_splits=splits, sinks=case.sinks,
            return_softmax_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(lse, case.oracle().lse, atol=2e-2, rtol=2e-3)
        assert lse.shape == (4, 8)


def test_missing_and_unable_kernels_say_what_to_do():
    with pytest.raises(fa_ref.UnsupportedByProvider, match="head dims"):
        make_case(head_dim=80, dtype=torch.bfloat16, device="cuda").run(fa_fast)
    with pytest.raises(fa_ref.UnsupportedByProvider, match="float32"):
        make_case(head_dim=64, dtype=torch.float32, device="cuda").run(fa_fast)
