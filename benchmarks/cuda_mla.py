"""Multi-head latent attention on CUDA: decode against both kernels there are, prefill in both of its forms."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import fa_fast
from benchmarks.cuda_attention import ours
from benchmarks.timing import Row, gpu_rounds, matmul_ceiling_flop_per_us, read_ceiling_bytes_per_us, row
from fa_ref import ForwardMode, MLAProjections
from fa_ref.api.mla_cost import mla_costs
from fa_ref.api.mla_form import mla_form
from fa_ref.cases import Case, make_case

LATENT, ROPE, NOPE, V_DIM = 512, 64, 128, 128  # DeepSeek-V3's
BETTER = "the faster of FA3 with qv and FlashMLA"


def problem(mode: ForwardMode, **settings: Any) -> Case:
    """A case in bf16 on the GPU with a cache of latents, its rows already written."""
    settings = dict(latent=LATENT, rope=ROPE, page_size=64) | settings
    case = make_case(mode, dtype=torch.bfloat16, device="cuda", poison=False, **settings)
    case.run(fa_fast)
    return case


def fa3(case: Case, layers: int) -> Callable[[], Any]:
    """Raw flash_attn_with_kvcache over [rope] keys and [latent] values, its schedule made beforehand."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    q, rows, table, lens, per_request, heads = _operands(case)
    requests = lens.shape[0]
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * per_request
    shared = dict(cache_seqlens=lens, cu_seqlens_q=cu, max_seqlen_q=per_request, causal=True)
    schedule = get_scheduler_metadata(
        batch_size=requests, max_seqlen_k=table.shape[1] * 64, num_heads=heads, num_heads_k=1, headdim=ROPE,
        headdim_v=LATENT, qkv_dtype=torch.bfloat16, page_size=64, **shared,
    )  # fmt: skip

    def work() -> None:
        for _ in range(layers):
            flash_attn_with_kvcache(
                q=q[..., LATENT:], qv=q[..., :LATENT], k_cache=rows[..., LATENT:], v_cache=rows[..., :LATENT],
                page_table=table, softmax_scale=case.layer.scaling, scheduler_metadata=schedule, **shared,
            )  # fmt: skip

    return work


def flash_mla(case: Case, layers: int) -> Callable[[], Any]:
    """Raw flash_mla_with_kvcache, its schedule made beforehand."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    q, rows, table, lens, per_request, heads = _operands(case)
    schedule = get_mla_metadata(lens, per_request * heads, 1)
    by_request = q.view(lens.shape[0], per_request, heads, -1)

    def work() -> None:
        for _ in range(layers):
            flash_mla_with_kvcache(by_request, rows, table, lens, LATENT, *schedule, case.layer.scaling, True)

    return work


def _operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    batch, heads = case.batch, case.layer.tp_q_head_num
    q = case.q.view(-1, heads, LATENT + ROPE)
    drafts = q.shape[0] // batch.batch_size if batch.forward_mode.is_target_verify() else 0
    lens = (batch.seq_lens + drafts).int()
    table = case.config.req_to_token_pool.req_to_token[batch.req_pool_indices, : int(lens.max())][:, ::64] // 64
    rows = case.config.token_to_kv_pool.kv_buffer[0].view(-1, 64, 1, LATENT + ROPE)
    return q, rows, table.contiguous(), lens, max(drafts, 1), heads


def decode_rows() -> list[Row]:
    ceiling, peak, rows = read_ceiling_bytes_per_us(), matmul_ceiling_flop_per_us(), []
    shapes = [(h, r, c) for h in (16, 128) for r in (1, 32, 128) for c in (4096, 32768)]
    shapes += [(h, r, c) for h in (16, 32, 64, 128) for r, c in ((1, 1024), (4, 8192), (8, 4096), (64, 2048))]
    for heads, requests, context in shapes:
        case = problem(ForwardMode.DECODE, prefix_lens=[context - 1] * requests, heads=heads)
        rows.append(_best_of(f"MLA decode {requests} x {context}, {heads} heads", case, ceiling, peak, context))
    for heads, requests, drafts in ((16, 16, 4), (128, 16, 4), (128, 64, 2)):
        case = problem(
            ForwardMode.TARGET_VERIFY, prefix_lens=[4096 - drafts] * requests, draft_token_num=drafts, heads=heads
        )
        name = f"MLA chain verify {requests} x 4096, T {drafts}, {heads} heads"
        rows.append(_best_of(name, case, ceiling, peak, 4096))
    return rows


def _best_of(name: str, case: Case, ceiling: float, peak: float, context: int) -> Row:
    requests, heads = case.batch.batch_size, case.layer.tp_q_head_num
    layers = 1 if requests * context > 200_000 else 8
    mine, first, second = gpu_rounds(ours(case, layers), fa3(case, layers), flash_mla(case, layers), repeats=layers)
    better = min((first, second), key=statistics.median)
    keys = requests * context
    flops = 2 * case.q.shape[0] * context * heads * (2 * LATENT + ROPE)
    floor = max(keys * (LATENT + ROPE) * 2 / ceiling, flops / peak)
    note = f"FA3 {statistics.median(first):.1f} us, FlashMLA {statistics.median(second):.1f} us"
    return row(name, BETTER, mine, better, floor, note)


def prefill_rows() -> list[Row]:
    rows, peak = [], matmul_ceiling_flop_per_us()
    for heads, new, prefix in (
        (128, 4096, 0), (128, 4096, 8192), (128, 512, 16384), (128, 64, 16384), (16, 4096, 0), (16, 4096, 32768),
        (16, 64, 32768),
    ):  # fmt: skip
        case = problem(ForwardMode.EXTEND, prefix_lens=[prefix], new_lens=[new], heads=heads)
        works = {form: _form(case, form) for form in ("absorbed", "chunked")}
        chosen = mla_form("auto", case.batch, case.layer, _projections(case), 16384)
        chosen = "absorbed" if chosen == "absorbed" else "chunked"
        other = "chunked" if chosen == "absorbed" else "absorbed"
        mine, theirs = gpu_rounds(works[chosen], works[other])
        sizes = dict(heads=heads, nope=NOPE, rope=ROPE, latent=LATENT, v_dim=V_DIM)
        floor = min(cost.flops for cost in mla_costs([new], [prefix], **sizes).values()) / peak
        name = f"MLA prefill {new} on {prefix}, {heads} heads, {'MHA' if chosen == 'chunked' else 'absorbed'} form"
        rows.append(row(name, f"the {'MHA' if other == 'chunked' else 'absorbed'} form", mine, theirs, floor,
                        "projections included"))  # fmt: skip
    return rows


def _projections(case: Case) -> MLAProjections:
    heads = case.layer.tp_q_head_num
    weight = torch.randn(heads * (NOPE + V_DIM), LATENT, dtype=torch.bfloat16, device="cuda") * LATENT**-0.5
    return MLAProjections.of_kv_b_proj(weight, heads=heads, nope=NOPE)


def _form(case: Case, form: str) -> Callable[[], Any]:
    heads, tokens = case.layer.tp_q_head_num, case.q.shape[0]
    q_nope, q_rope = (torch.randn(tokens, heads, n, dtype=torch.bfloat16, device="cuda") for n in (NOPE, ROPE))
    latent, k_rope, projections = case.k[:, :LATENT].contiguous(), case.k[:, LATENT:].contiguous(), _projections(case)
    layer = replace(case.layer, scaling=(NOPE + ROPE) ** -0.5)
    backend = fa_fast.FlashAttentionBackend(case.config)
    backend.init_forward_metadata(case.batch)
    return lambda: fa_fast.mla_attention(
        backend, q_nope, q_rope, latent, k_rope, layer, case.batch, projections, form=form
    )


PARTS = (decode_rows, prefill_rows)


def rows(device: str = "cuda", only: str = "") -> Iterator[Row]:
    """The rows whose name contains `only`, as they are measured."""
    assert device == "cuda", f"these rows measure CUDA kernels; got device {device!r}"
    for part in PARTS:
        yield from (found for found in part() if only in found.row)
        torch.cuda.empty_cache()
