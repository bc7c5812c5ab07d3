"""Tree verification and draft decoding on CUDA, against two calls and a merge, and against FlexAttention.

The first peer is what serving backends do without a fused suffix: a pass over the prefix, a pass over an expanded page
table with one row a query, two transposed copies of the LSEs, and a merge kernel. Planning is left out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import fa_fast
from benchmarks.cuda_attention import kv_bytes
from benchmarks.timing import Row, gpu_rounds, read_ceiling_bytes_per_us, row
from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import Case, make_case

TWO_CALLS = "two sgl-kernel calls and a merge"


def problem(mode: ForwardMode, **settings: Any) -> Case:
    case = make_case(
        mode, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda", poison=False, **settings
    )
    case.run(fa_fast)
    return case


def ours(case: Case) -> Callable[[], Any]:
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_forward_metadata(case.batch)
    return lambda: backend.forward(case.q, case.k, case.v, case.layer, case.batch, save_kv_cache=False)


def passes(case: Case) -> tuple[Any, Any]:
    plan = fa_fast.plan_batch(case.batch, case.config, case.step)
    prefix, tree = plan.for_kind(LayerKind.FULL)
    return prefix, tree


def call(case: Case, step: Any, lse: bool = True) -> Callable[[], Any]:
    """One raw kernel call over a pass."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    k, v = case.config.token_to_kv_pool.get_kv_buffer(0)
    arguments = dict(
        q=case.q.view(-1, 32, 128),
        k_cache=k.view(-1, step.page_size, 8, 128),
        v_cache=v.view(-1, step.page_size, 8, 128),
        page_table=step.page_table if step.row_index is None else step.page_table[step.row_index.long()],
        cache_seqlens=step.cache_seqlens,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=step.max_seqlen_q,
        softmax_scale=case.layer.scaling,
        causal=False,
        return_softmax_lse=lse,
    )
    return lambda: flash_attn_with_kvcache(**arguments)


def two_calls(case: Case) -> Callable[[], Any]:
    from sgl_kernel import merge_state_v2

    prefix, tree = passes(case)
    first, second = call(case, prefix), call(case, tree.expanded())

    def work() -> Any:
        out, lse, *_ = first()
        out_tree, lse_tree, *_ = second()
        return merge_state_v2(out, lse.T.contiguous(), out_tree, lse_tree.T.contiguous())

    return work


def flex(case: Case) -> Callable[[], Any]:
    """FlexAttention over keys gathered beforehand, its mask read from a dense boolean tensor."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _, tree = passes(case)
    requests, queries, drafts = tree.mask.shape
    context = int(case.batch.seq_lens[0])
    slots = case.config.req_to_token_pool.req_to_token[case.batch.req_pool_indices, :context].long()
    slots = torch.cat([slots, tree.slots.long()], dim=1)
    k, v = (buffer[slots].transpose(1, 2) for buffer in case.config.token_to_kv_pool.get_kv_buffer(0))
    q = case.q.view(requests, queries, 32, 128).transpose(1, 2)
    dense = torch.cat([tree.mask.new_ones(requests, queries, context), tree.mask], dim=2)
    mask = create_block_mask(
        lambda b, h, i, j: dense[b, i, j], requests, None, queries, context + drafts, device="cuda"
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"FORCE_USE_FLEX_ATTENTION": True}  # its decoding kernel does not take every number of queries
    return lambda: compiled(q, k, v, block_mask=mask, scale=case.layer.scaling, enable_gqa=True, kernel_options=options)


def chain_of_trees(requests: int, drafts: int) -> list[list[int]]:
    """A binary tree a request: parents before children."""
    return [[-1, *((i - 1) // 2 for i in range(1, drafts))]] * requests


def verify_rows(only: str) -> Iterator[Row]:
    ceiling = read_ceiling_bytes_per_us()
    for requests, context, drafts in ((16, 8192, 16), (16, 2048, 64), (64, 4096, 8), (1, 8192, 16)):
        name = f"tree verify T {drafts}, {requests} x {context}, 32/8/128"
        if only not in name:
            continue
        case = problem(
            ForwardMode.TARGET_VERIFY, page_size=1, prefix_lens=[context] * requests,
            trees=chain_of_trees(requests, drafts),
        )  # fmt: skip
        prefix, _ = passes(case)
        mine, theirs, alone = gpu_rounds(ours(case), two_calls(case), call(case, prefix))
        floor = kv_bytes(case, requests * (context + drafts)) / ceiling
        yield row(name, TWO_CALLS, mine, theirs, floor)
        yield row(name, "the prefix pass alone", mine, alone, floor, "what the suffix and the merge add")
        mine, theirs = gpu_rounds(ours(case), flex(case))
        yield row(name, "FlexAttention with a dense mask, keys already gathered", mine, theirs, floor)


def draft_rows(only: str) -> Iterator[Row]:
    ceiling = read_ceiling_bytes_per_us()
    for requests, context, topk, step in ((16, 4096, 4, 3), (64, 4096, 8, 4), (1, 4096, 4, 3)):
        name = f"draft decode topk {topk}, step {step + 1}, {requests} x {context}, 32/8/128"
        if only not in name:
            continue
        case = problem(
            ForwardMode.DECODE, page_size=1, prefix_lens=[context] * requests, topk=topk, num_steps=step + 1, step=step
        )
        prefix, _ = passes(case)
        mine, theirs, alone = gpu_rounds(ours(case), two_calls(case), call(case, prefix))
        floor = kv_bytes(case, requests * (context + topk * (step + 1))) / ceiling
        yield row(name, TWO_CALLS, mine, theirs, floor)
        yield row(name, "the prefix pass alone", mine, alone, floor, "what the suffix and the merge add")


def rows(device: str = "cuda", only: str = "") -> Iterator[Row]:
    assert device == "cuda", f"these rows measure CUDA kernels; got device {device!r}"
    for part in (verify_rows, draft_rows):
        yield from part(only)
        torch.cuda.empty_cache()
