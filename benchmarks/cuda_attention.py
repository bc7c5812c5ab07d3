"""fa_fast on CUDA against raw sgl-kernel calls: the same attention, set up the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import fa_fast
from benchmarks.timing import Row, gpu_rounds, host_rounds, matmul_ceiling_flop_per_us, read_ceiling_bytes_per_us, row
from fa_fast.triton_ops.store_kv import store_kv
from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import Case, make_case

RAW = "sgl-kernel call"


def problem(mode: ForwardMode, **settings: Any) -> Case:
    """A case in bf16 on the GPU, its keys already written."""
    settings = dict(heads=32, kv_heads=8, head_dim=128) | settings
    case = make_case(mode, dtype=torch.bfloat16, device="cuda", poison=False, **settings)
    case.run(fa_fast)
    return case


def ours(case: Case, layers: int = 1) -> Callable[[], Any]:
    """The backend's attention of a planned batch, KV write left out."""
    backend = fa_fast.FlashAttentionBackend(case.config)
    backend.init_forward_metadata(case.batch)

    def work() -> None:
        for _ in range(layers):
            backend.forward(case.q, case.k, case.v, case.layer, case.batch, save_kv_cache=False)

    return work


def raw(case: Case, layers: int = 1, **overrides: Any) -> Callable[[], Any]:
    """One flash_attn_with_kvcache call over a gathered page table, as a plain user of the kernel writes it."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    arguments = raw_arguments(case) | overrides

    def work() -> None:
        for _ in range(layers):
            flash_attn_with_kvcache(**arguments)

    return work


def raw_arguments(case: Case) -> dict[str, Any]:
    batch, layer, page = case.batch, case.layer, case.config.page_size
    k, v = case.config.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    longest = int(batch.seq_lens.max())
    table = case.config.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest][:, ::page] // page
    new = batch.extend_seq_lens
    return dict(
        q=case.q.view(-1, layer.tp_q_head_num, layer.head_dim),
        k_cache=k.view(-1, page, layer.tp_k_head_num, layer.head_dim),
        v_cache=v.view(-1, page, layer.tp_v_head_num, layer.v_head_dim),
        page_table=table.contiguous(),
        cache_seqlens=batch.seq_lens.int(),
        cu_seqlens_q=torch.nn.functional.pad(torch.cumsum(new, 0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=int(new.max()),
        softmax_scale=layer.scaling,
        causal=True,
    )


def kv_bytes(case: Case, keys: int) -> int:
    layer = case.layer
    size = case.config.kv_cache_dtype.itemsize
    return keys * layer.tp_k_head_num * (layer.head_dim + layer.v_head_dim) * size


def decode_rows() -> list[Row]:
    ceiling = read_ceiling_bytes_per_us()
    rows = []
    for requests, context, page in (
        (64, 8192, 64),
        (64, 8192, 1),
        (8, 4096, 64),
        (1, 4096, 1),
        (1, 4096, 64),
        (1, 16384, 1),
    ):
        case = problem(ForwardMode.DECODE, prefix_lens=[context - 1] * requests, page_size=page)
        layers = 1 if requests >= 64 else 16
        mine, theirs = gpu_rounds(ours(case, layers), raw(case, layers), repeats=layers)
        cached = "" if requests >= 64 else "the cache of one layer fits the L2, on both sides"
        floor = kv_bytes(case, requests * context) / ceiling
        rows.append(row(f"decode {requests} x {context}, page {page}, 32/8/128", RAW, mine, theirs, floor, cached))
    case = problem(ForwardMode.DECODE, prefix_lens=[8191] * 64, page_size=64, kv_dtype=torch.float8_e4m3fn, k_scale=1.0)
    plain = problem(ForwardMode.DECODE, prefix_lens=[8191] * 64, page_size=64)
    mine, theirs = gpu_rounds(ours(case), ours(plain))
    floor = kv_bytes(case, 64 * 8192) / ceiling
    rows.append(row("decode 64 x 8192, page 64, fp8 cache", "the same with a bf16 cache", mine, theirs, floor))
    return rows


def window_rows() -> list[Row]:
    rows = []
    for context in (8192, 32768, 131072):
        case = problem(
            ForwardMode.DECODE, prefix_lens=[context - 1] * 64, page_size=1, kind=LayerKind.SLIDING, window=127,
            heads=64, kv_heads=8, head_dim=64,
        )  # fmt: skip
        mine, theirs = gpu_rounds(ours(case, 8), raw(case, 8, window_size=(127, 0)), repeats=8)
        rows.append(
            row(f"sliding decode, window 128, 64 x {context}, 64/8/64", RAW + " with window_size", mine, theirs)
        )
    context = [45000 + 13 * i for i in range(32)]
    case = problem(ForwardMode.DECODE, prefix_lens=context, page_size=64, kind=LayerKind.LOCAL, chunk=8192)
    floor = kv_bytes(case, sum(n % 8192 + 1 for n in context)) / read_ceiling_bytes_per_us()
    mine, theirs = gpu_rounds(ours(case), raw(case, attention_chunk=8192))
    rows.append(row("local decode, chunk 8192, 32 x 45K", RAW + " with attention_chunk", mine, theirs, floor))
    return rows


def prefill_rows() -> list[Row]:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    ceiling, rows = matmul_ceiling_flop_per_us(), []
    case = problem(ForwardMode.EXTEND, prefix_lens=[0], new_lens=[16384], page_size=1)
    q, k, v = (x.view(16384, -1, 128) for x in (case.q, case.k, case.v))
    cu = torch.tensor([0, 16384], dtype=torch.int32, device="cuda")
    dense = dict(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=16384, max_seqlen_k=16384, causal=True)
    mine, varlen, paged = gpu_rounds(ours(case), lambda: flash_attn_varlen_func(**dense), raw(case))
    floor = 4 * 32 * 128 * 16384**2 / 2 / ceiling
    rows.append(row("prefill 16384, no prefix, 32/8/128", "dense varlen call", mine, varlen, floor))
    rows.append(row("prefill 16384, no prefix, page 1", RAW + " over the cache", mine, paged, floor))
    for page in (1, 128):
        case = problem(ForwardMode.EXTEND, prefix_lens=[8192], new_lens=[8192], page_size=page)
        mine, theirs = gpu_rounds(ours(case), raw(case))
        floor = 4 * 32 * 128 * (8192 * 8192 + 8192**2 / 2) / ceiling
        rows.append(row(f"extend 8192 on 8192, page {page}", RAW, mine, theirs, floor))
    case = problem(
        ForwardMode.EXTEND, prefix_lens=[1], new_lens=[65535], page_size=128, kind=LayerKind.LOCAL, chunk=8192
    )
    mine, native, full = gpu_rounds(ours(case), raw(case, attention_chunk=8192), raw(case))
    note = "the ideal is 8 times faster: a query sees 4096 keys on average instead of 32768"
    rows.append(row("local prefill 64K, chunk 8192, page 128", RAW + " with attention_chunk", mine, native))
    rows.append(row("local prefill 64K, chunk 8192, page 128", RAW + ", full attention", mine, full, note=note))
    return rows


def write_rows() -> list[Row]:
    rows = []
    for tokens in (64, 8192):
        case = problem(ForwardMode.EXTEND, prefix_lens=[0], new_lens=[tokens], page_size=1)
        k, v = (x.view(tokens, 8, 128) for x in (case.k, case.v))
        caches, loc = case.config.token_to_kv_pool.get_kv_buffer(0), case.batch.out_cache_loc

        def indexed(k=k, v=v, caches=caches, loc=loc) -> None:
            caches[0][loc], caches[1][loc] = k, v

        mine, theirs = gpu_rounds(lambda k=k, v=v, c=caches, loc=loc: store_kv(k, v, *c, loc), indexed)
        rows.append(row(f"KV write of {tokens} tokens, 8 x 128", "two indexed assignments", mine, theirs))
    return rows


def host_rows() -> list[Row]:
    rows = []
    for page, requests in ((1, 64), (64, 64)):
        case = problem(ForwardMode.DECODE, prefix_lens=[1023] * requests, page_size=page)
        backend = fa_fast.FlashAttentionBackend(case.config)

        def plan(backend=backend, case=case) -> None:
            backend.init_forward_metadata(case.batch)

        mine, theirs = host_rounds(plan, lambda case=case: raw_arguments(replace(case)))
        rows.append(
            row(f"host: plan of a decode, {requests} requests, page {page}", "the same set up plainly", mine, theirs)
        )
        mine, theirs = host_rounds(ours(case), raw(case))
        rows.append(row(f"host: one layer call, page {page}", RAW, mine, theirs, note="checks, dispatch and the call"))
    return rows


PARTS = (decode_rows, window_rows, prefill_rows, write_rows, host_rows)


def rows(device: str = "cuda", only: str = "") -> Iterator[Row]:
    """The rows whose name contains `only`, as they are measured."""
    assert device == "cuda", f"these rows measure CUDA kernels; got device {device!r}"
    for part in PARTS:
        yield from (found for found in part() if only in found.row)
        torch.cuda.empty_cache()
