"""Whole attention steps of 32 layers through graphs, metadata included, against the same done plainly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import fa_fast
from benchmarks.cuda_attention import problem
from benchmarks.timing import Row, clock_rounds, row
from fa_fast.graphs import GraphRunner
from fa_fast.recording import Recorder
from fa_ref import ForwardBatch, ForwardMode
from fa_ref.cases import Case

LAYERS = 32
PLAIN = "a plain replay: metadata by torch outside the graph, sgl-kernel calls inside"


def ours(case: Case) -> Callable[[], None]:
    """GraphRunner over 32 layers of attention without the KV write; planning is inside the graph."""
    backend = fa_fast.FlashAttentionBackend(case.config)

    def step(batch: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            out = backend.forward(q, None, None, case.layer, batch)
        return out

    runner = GraphRunner(
        backend, step, case.batch.forward_mode, [case.batch.batch_size], dict(q=case.q), spec_info=case.batch.spec_info
    )
    batch, q = case.batch, case.q.clone()

    def run() -> None:
        runner.run(batch, q=q)
        torch.cuda.synchronize()

    return run


def plain(case: Case) -> Callable[[], None]:
    """What a server's decode replay does: copy inputs, gather and stride the page table on the host's order, replay."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    batch, layer, page = case.batch, case.layer, case.config.page_size
    requests = batch.batch_size
    pool = case.config.req_to_token_pool.req_to_token
    k, v = case.config.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    lens = torch.ones(requests, dtype=torch.int32, device="cuda")
    table = torch.zeros(requests, -(-pool.shape[1] // page), dtype=torch.int32, device="cuda")
    cu = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    cu_k = torch.zeros(requests + 1, dtype=torch.int32, device="cuda")
    q = case.q.view(-1, layer.tp_q_head_num, layer.head_dim).clone()
    strided = torch.arange(0, pool.shape[1], page, device="cuda")

    def layers() -> None:
        for _ in range(LAYERS):
            flash_attn_with_kvcache(
                q=q, k_cache=k.view(-1, page, layer.tp_k_head_num, layer.head_dim),
                v_cache=v.view(-1, page, layer.tp_v_head_num, layer.v_head_dim), page_table=table, cache_seqlens=lens,
                cu_seqlens_q=cu, max_seqlen_q=1, softmax_scale=layer.scaling, causal=True,
            )  # fmt: skip

    recording = Recorder("cuda").record(layers)

    def run() -> None:
        q.copy_(case.q.view_as(q))
        longest = int(batch.seq_lens_cpu.max())  # type: ignore[union-attr]
        lens.copy_(batch.seq_lens.to(torch.int32))
        cu_k[1:].copy_(torch.cumsum(lens, dim=0, dtype=torch.int32))
        pages = -(-longest // page)
        slots = pool[batch.req_pool_indices[:, None], strided[:pages][None]]
        table[:, :pages].copy_(slots // page)
        recording.replay()
        torch.cuda.synchronize()

    return run


def decode_rows() -> list[Row]:
    rows = []
    for requests, context in ((1, 4096), (8, 4096), (64, 4096)):
        for page in (1, 64):
            case = problem(ForwardMode.DECODE, prefix_lens=[context - 1] * requests, page_size=page, context_len=8192)
            case = replace(case, k=None, v=None)
            mine, theirs = clock_rounds(ours(case), plain(case))
            rows.append(
                row(f"step: 32 layers of decode {requests} x {context}, page {page}", PLAIN, mine, theirs,
                    note="by the clock, from host copies of the inputs to the result; no KV write")
            )  # fmt: skip
            torch.cuda.empty_cache()
    return rows


def rows(device: str = "cuda", only: str = "") -> Iterator[Row]:
    """The rows whose name contains `only`, as they are measured."""
    assert device == "cuda", f"these rows measure CUDA graphs; got device {device!r}"
    yield from (found for found in decode_rows() if only in found.row)
