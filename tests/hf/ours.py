"""Our side: the recorded queries, keys and values, in ragged batches over a paged cache, through a backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_ref import (
    BackendConfig,
    ForwardBatch,
    ForwardMode,
    LayerKind,
    MHAKVPool,
    MLAKVPool,
    ReqToTokenPool,
    SWAKVPool,
    layer_kind,
)
from fa_ref.numerics import Verdict, judge
from tests.hf.theirs import DECODES, PROMPTS, Recorded
from tests.support import ROUTES

Step = tuple[ForwardMode, list[int]]  # the mode of a batch, and the new tokens of every request; 0: not in the batch


def at_once() -> Iterator[Step]:
    """Every prompt whole, then one token at a time."""
    return in_pieces(size=max(PROMPTS))


def in_pieces(size: int = 11) -> Iterator[Step]:
    """Prompts in pieces of `size` tokens, all requests side by side; then one token at a time."""
    for start in range(0, max(PROMPTS), size):
        yield ForwardMode.EXTEND, [min(size, max(0, prompt - start)) for prompt in PROMPTS]
    for _ in range(DECODES):
        yield ForwardMode.DECODE, [1] * len(PROMPTS)


def one_after_another(size: int = 23) -> Iterator[Step]:
    """A request starts when the one before it decodes, so that prefills and decodes share batches."""
    done, ends = [0] * len(PROMPTS), [prompt + DECODES for prompt in PROMPTS]
    while done != ends:
        new = [0] * len(PROMPTS)
        for r, prompt in enumerate(PROMPTS):
            new[r] = min(size, prompt - done[r]) if done[r] < prompt else int(done[r] < ends[r])
            if done[r] < prompt:
                break
        done = [a + b for a, b in zip(done, new, strict=True)]
        yield ForwardMode.MIXED, new


SCHEDULES = {schedule.__name__: schedule for schedule in (at_once, in_pieces, one_after_another)}


def verdicts(
    layers: list[Recorded],
    *,
    route: str,
    schedule: str,
    page_size: int = 4,
    chunk: int | None = None,
    two_pools: bool = False,
) -> list[Verdict]:
    """For each layer: our error against their code in fp64, and the budget that their code in fp32 leaves."""
    totals = [len(q) for q in layers[0].q]
    config = paged(layers, totals, page_size, chunk, two_pools)
    encoder = encoder_lens(layers)
    package, provider = ROUTES[route]
    backend = package.FlashAttentionBackend(config, provider=provider)
    ours: list[list[list[Tensor]]] = [[[] for _ in totals] for _ in layers]  # layer, request, step
    done = [0] * len(totals)
    for mode, new in SCHEDULES[schedule]():
        present = [r for r, tokens in enumerate(new) if tokens]
        starting = [r for r in present if done[r] == 0]
        batch = batch_of(config, mode, present, done, new, encoder)
        backend.init_forward_metadata(batch)
        for recorded, found in zip(layers, ours, strict=True):
            q, k, v = (
                torch.cat([rows[r][done[r] : done[r] + new[r]] for r in present]).flatten(1)
                for rows in (recorded.q, recorded.k, recorded.v)
            )
            if recorded.layer.is_cross_attention:
                k, v = (
                    torch.cat([x[r] for r in starting]).flatten(1) if starting else None
                    for x in (recorded.k, recorded.v)
                )
            out = backend.forward(q, k, v, recorded.layer, batch, sinks=recorded.sinks)
            if recorded.w_uv is not None:
                latents = out.unflatten(1, (recorded.layer.tp_q_head_num, -1))
                out = torch.einsum("thc,hvc->thv", latents, recorded.w_uv).flatten(1)
            for r, part in zip(present, out.split([new[r] for r in present]), strict=True):
                found[r].append(part)
        done = [a + b for a, b in zip(done, new, strict=True)]
    assert done == totals, "the schedule ran every token"
    return [
        judge(torch.cat([torch.cat(steps) for steps in found]), *(torch.cat(x).flatten(1) for x in (rec.fine, rec.out)))
        for rec, found in zip(layers, ours, strict=True)
    ]


def paged(
    layers: list[Recorded], totals: list[int], page_size: int, chunk: int | None = None, two_pools: bool = False
) -> BackendConfig:
    """Pools three times too large, with pages in random order; a page that no request owns holds NaN."""
    kinds = [layer_kind(recorded.layer, chunk) for recorded in layers]
    windows = [recorded.layer.sliding_window_size or 0 for recorded in layers]
    in_row = [own + total for own, total in zip(encoder_lens(layers) or [0] * len(totals), totals, strict=True)]
    owned = [-(-length // page_size) for length in in_row]
    size = 3 * sum(owned) * page_size
    rows = ReqToTokenPool(size=len(totals) + 2, context_len=max(in_row))
    pages, start = 1 + torch.randperm(size // page_size), 0
    for row, length, count in zip(range(1, len(totals) + 1), in_row, owned, strict=True):
        mine = pages[start : start + count, None] * page_size + torch.arange(page_size)
        rows.req_to_token[row, :length], start = mine.flatten()[:length].int(), start + count
    in_window = [i for i, kind in enumerate(kinds) if two_pools and kind is not LayerKind.FULL]
    in_full = [i for i in range(len(layers)) if i not in in_window]
    pool: Any = filled(layers, len(in_full), size, page_size, pages[:start])
    if two_pools:
        others = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(size // page_size)])
        window_pool = filled(layers, len(in_window), size, page_size, others[pages[:start]])
        pool = SWAKVPool(full_pool=pool, swa_pool=window_pool, full_layer_ids=in_full, swa_layer_ids=in_window)
        pool.full_to_swa_index_mapping.copy_((others[:, None] * page_size + torch.arange(page_size)).flatten())
    return BackendConfig(
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype="auto",
        page_size=page_size,
        context_len=max(in_row),
        sliding_window_size=max(windows) if LayerKind.SLIDING in kinds else None,
        attention_chunk_size=chunk,
        is_encoder_decoder=LayerKind.CROSS in kinds,
        is_hybrid_swa=two_pools,
        use_mla=layers[0].w_uv is not None,
        req_to_token_pool=rows,
        token_to_kv_pool=pool,
    )


def filled(layers: list[Recorded], layer_num: int, size: int, page_size: int, owned: Tensor) -> MHAKVPool | MLAKVPool:
    """A pool of the layers' geometry: zero in the padding page and in owned pages, NaN elsewhere."""
    layer = layers[0].layer
    shared: dict[str, Any] = dict(size=size, page_size=page_size, dtype=torch.float32, layer_num=layer_num)
    pool: MHAKVPool | MLAKVPool
    if layers[0].w_uv is None:
        pool = MHAKVPool(**shared, head_num=layer.tp_k_head_num, head_dim=layer.head_dim, v_head_dim=layer.v_head_dim)
    else:
        pool = MLAKVPool(**shared, kv_lora_rank=layer.v_head_dim, qk_rope_head_dim=layer.head_dim - layer.v_head_dim)
    free = torch.ones(1 + size // page_size, dtype=torch.bool)
    free[0] = free[owned] = False
    for layer_id in range(layer_num):
        for buffer in pool.get_kv_buffer(layer_id):
            buffer[free.repeat_interleave(page_size)] = torch.nan
    return pool


def encoder_lens(layers: list[Recorded]) -> list[int] | None:
    """The encoder's tokens of each request, if there are layers that attend to them."""
    return next(([len(k) for k in recorded.k] for recorded in layers if recorded.layer.is_cross_attention), None)


def encoder_rows(rows: list[Tensor], starting: list[int]) -> Tensor | None:
    """The encoder's keys (or values) of the requests that start in this batch; None if there are none."""
    return torch.cat([rows[r] for r in starting]).flatten(1) if starting else None


def batch_of(
    config: BackendConfig,
    mode: ForwardMode,
    present: list[int],
    done: list[int],
    new: list[int],
    encoder: list[int] | None = None,
) -> ForwardBatch:
    """The requests that are present, as a server describes them: request r has row r + 1, its encoder first."""
    cached, added = [done[r] for r in present], [new[r] for r in present]
    lens = torch.tensor(cached) + torch.tensor(added)
    rows = config.req_to_token_pool.req_to_token[1:]
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(present),
        req_pool_indices=torch.tensor(present) + 1,
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=torch.tensor(added),
        extend_seq_lens_cpu=added,
        extend_prefix_lens=torch.tensor(cached),
        extend_prefix_lens_cpu=cached,
    )
    text = encoder or [0] * len(done)  # column of a request's first text token
    loc = torch.cat([rows[r, text[r] + done[r] : text[r] + done[r] + new[r]] for r in present])
    if encoder is None:
        return replace(batch, out_cache_loc=loc)
    of_encoder = [rows[r, : encoder[r]] for r in present if done[r] == 0]
    return replace(
        batch,
        out_cache_loc=loc,
        encoder_lens=torch.tensor([encoder[r] for r in present]),
        encoder_lens_cpu=[encoder[r] for r in present],
        encoder_out_cache_loc=torch.cat(of_encoder) if of_encoder else None,
    )
