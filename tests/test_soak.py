"""Thousands of replays of one capture, beside a backend that plans every step eagerly on a cache of its own.

Requests come and go between buckets, lengths reach the context limit with drafts past it, unused slots hold NaN, and
what a larger batch left behind is garbage. After all of it outputs, caches, addresses and memory are what they were.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
from fa_fast.graphs import GraphRunner
from fa_ref import AttentionLayer, DraftInput, ForwardBatch, ForwardMode, MHAKVPool, VerifyInput
from fa_ref.cases import Case, _custom_mask
from tests.support import case_on
from tests.test_graphs import FORMS, TREES, every_form

REQUESTS, BUCKETS = 6, (1, 2, 4, 6)
CONTEXT, WINDOW, CHUNK = 48, 6, 16
DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
NEW = {DECODE: 1, VERIFY: 5, EXTEND: 3}  # tokens a request, where it is no draft
REPLAYS = {"cpu": 60, "cuda": 840}  # of each of twelve captures: 720 on a CPU, 10 080 on a GPU


@dataclass(frozen=True, kw_only=True)
class Model:
    """A window, a chunk and a plain layer over one cache, and a backend to run them."""

    case: Case
    layers: list[AttentionLayer]
    backend: Any

    def step(self, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Every layer; of a draft every layer of every step. Each has inputs of its own."""
        steps = getattr(self.backend, "attn_backends", [self.backend])
        return tuple(
            backend.forward(q + number + nth, k - number, v - nth, layer, batch)
            for number, backend in enumerate(steps)
            for nth, layer in enumerate(self.layers)
        )

    def eager(self, batch: ForwardBatch, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if self.case.q.is_cuda:  # a window wider than the longest request is another kernel, with other bits
            batch = replace(batch, seq_lens_cpu=None)
        self.backend.init_forward_metadata(batch)
        return self.step(batch, **inputs)

    def cache(self) -> list[Tensor]:
        """Keys and values of all layers, as bytes and without the padding page."""
        pool = self.case.config.token_to_kv_pool
        page = self.case.config.page_size
        return [buffer[page:].view(torch.uint8) for buffer in (*pool.k_buffer, *pool.v_buffer)]


def model_of(device: str, form: str, page_size: int = 16) -> Model:
    """The same model every time: rows of CONTEXT cached tokens, drafts past it, NaN where nothing is cached."""
    settings = {name: value for name, value in FORMS[form].items() if name != "step"}
    drafts = settings["mode"] is VERIFY or "topk" in settings
    prefix = CONTEXT if drafts else CONTEXT - NEW[settings["mode"]]
    case = case_on(
        device, **settings, page_size=page_size, prefix_lens=[prefix] * REQUESTS, context_len=CONTEXT + 8, heads=4,
        kv_heads=2, deterministic=True,
    )  # fmt: skip
    old = case.config.token_to_kv_pool
    pool = MHAKVPool(
        size=old.size, page_size=page_size, dtype=old.dtype, head_num=2, head_dim=case.layer.head_dim, layer_num=3,
        device=device,
    )  # fmt: skip
    for nth in range(3):
        pool.k_buffer[nth].copy_(old.k_buffer[0].roll(nth, dims=2))
        pool.v_buffer[nth].copy_(old.v_buffer[0].roll(-nth, dims=2))
    assert pool.k_buffer[2].isnan().any(), "slots that nobody owns are poisoned"
    case = case.replace_config(token_to_kv_pool=pool, sliding_window_size=WINDOW, attention_chunk_size=CHUNK)
    kinds: list[dict[str, Any]] = [dict(sliding_window_size=WINDOW), dict(use_irope=True), {}]
    layers = [replace(case.layer, layer_id=nth, **changes) for nth, changes in enumerate(kinds)]
    info = case.batch.spec_info
    if isinstance(info, DraftInput):
        backend: Any = fa_fast.FlashAttentionMultiStepBackend(case.config, info.topk, info.num_steps)
    else:
        backend = fa_fast.FlashAttentionBackend(case.config)
    return Model(case=case, layers=layers, backend=backend)


def runner_of(model: Model, buckets: tuple[int, ...] = BUCKETS, step: Callable[..., Any] | None = None) -> GraphRunner:
    mode, info = model.case.batch.forward_mode, model.case.batch.spec_info
    inputs = inputs_of(model, max(buckets), torch.Generator().manual_seed(0))
    return GraphRunner(
        model.backend, step or model.step, mode, buckets, inputs, spec_info=info,
        draft_tokens=NEW[mode] if mode is EXTEND else 0,
    )  # fmt: skip


def inputs_of(model: Model, requests: int, gen: torch.Generator) -> dict[str, Tensor]:
    info, mode, q = model.case.batch.spec_info, model.case.batch.forward_mode, model.case.q
    each = info.topk if isinstance(info, DraftInput) else NEW[mode]
    assert each is not None
    widths = dict(q=q.shape[1], k=q.shape[1] // 2, v=q.shape[1] // 2)  # two query heads a key head
    return {name: torch.randn(requests * each, width, generator=gen).to(q) for name, width in widths.items()}


def batch_of(model: Model, lens: list[int], order: list[int]) -> ForwardBatch:
    """Requests `order` with `lens` cached tokens; one length of CONTEXT has no column left for a new token."""
    full, device = model.case.batch, model.case.batch.seq_lens.device
    mode, info, count = full.forward_mode, full.spec_info, len(order)
    pick = torch.tensor(order, device=device)
    rows, past = full.req_pool_indices[pick], torch.tensor(lens, device=device)
    new = info.num_steps if isinstance(info, DraftInput) else NEW[mode]
    assert new is not None
    columns = past[:, None] + torch.arange(new, device=device)
    loc = model.case.config.req_to_token_pool.req_to_token[rows[:, None], columns].flatten().long()
    if isinstance(info, DraftInput) and info.topk != 1:
        loc = full.out_cache_loc.view(REQUESTS, -1)[pick].flatten()
    if isinstance(info, VerifyInput) and info.custom_mask is not None:
        info = replace(info, custom_mask=_custom_mask([TREES[i] for i in order], lens).to(device))
    seq_lens = past if mode is VERIFY or isinstance(info, DraftInput) else past + new
    extend = dict(
        extend_seq_lens=torch.full_like(past, new), extend_seq_lens_cpu=[new] * count,
        extend_prefix_lens=past, extend_prefix_lens_cpu=lens,
    )  # fmt: skip
    return replace(
        full, batch_size=count, req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens.cpu(),
        out_cache_loc=loc, spec_info=info, **extend if mode is EXTEND else dict.fromkeys(extend),
    )  # fmt: skip


def traffic(model: Model, gen: torch.Generator) -> tuple[ForwardBatch, dict[str, Tensor]]:
    """A batch of the next step: any number of requests in any order, every third of them at its limit."""
    count = int(torch.randint(1, REQUESTS + 1, (1,), generator=gen))
    order = torch.randperm(REQUESTS, generator=gen)[:count].tolist()
    longest = int(model.case.recipe["prefix_lens"][0])
    lens = torch.randint(0, longest + 1, (count,), generator=gen)
    lens[torch.rand(count, generator=gen) < 1 / 3] = longest
    return batch_of(model, lens.tolist(), order), inputs_of(model, count, gen)


def leave_garbage(runner: GraphRunner) -> None:
    """As a caller does who asks for the largest place, writes there what comes, and then runs a smaller batch."""
    batch, inputs = runner.place(REQUESTS)
    for value in inputs.values():
        value.fill_(math.nan)
    batch.req_pool_indices.fill_(2**30)
    batch.seq_lens.fill_(-7)
    batch.out_cache_loc.fill_(1 << 40)


def held(device: str) -> tuple[int, int]:
    """(tensors, bytes that they or, on a GPU, anything else hold)."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is Tensor]  # isinstance would wake lazy modules
    if device == "cuda":
        torch.cuda.synchronize()
        return len(tensors), torch.cuda.memory_allocated()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return len(tensors), sum(storages.values())


def addresses(runner: GraphRunner) -> list[int]:
    """Of the static inputs and of every bucket's results."""
    results = [one for recording in runner._recorded.values() for one in recording.result]
    return [one.data_ptr() for one in (*runner.static.tensors.values(), *runner.inputs.values(), *results)]


@every_form
@pytest.mark.parametrize("page_size", [1, 16])
def test_replays_never_drift_from_the_eager_step(page_size, form, device):
    captured, plain = model_of(device, form, page_size), model_of(device, form, page_size)
    runner = runner_of(captured)
    gen, pool = torch.Generator().manual_seed(page_size), captured.case.config.token_to_kv_pool

    def soak(replays: int) -> None:
        for number in range(replays):
            batch, inputs = traffic(captured, gen)
            if number % 3 == 0:
                leave_garbage(runner)
            found = runner.run(batch, **inputs)
            assert pool.k_buffer[0][:page_size].isfinite().all(), "garbage went to the padding page"
            for one, right in zip(found, plain.eager(batch, inputs), strict=True):
                assert one.isfinite().all()
                assert torch.equal(one, right), (number, batch.seq_lens.tolist())

    def all_sizes() -> None:
        """At their longest, which takes all scratch that is kept; the last of it of one short request, so that the
        backends hold the same plans each time.
        """
        longest = int(captured.case.recipe["prefix_lens"][0])
        for length in (longest, 1):
            for count in range(REQUESTS, 0, -1):
                batch = batch_of(captured, [length] * count, list(range(count)))
                inputs = inputs_of(captured, count, gen)
                runner.run(batch, **inputs)
                plain.eager(batch, inputs)

    all_sizes()
    before, where = held(device), addresses(runner)
    soak(REPLAYS[device])
    all_sizes()
    assert held(device) == before
    assert addresses(runner) == where
    assert all(map(torch.equal, captured.cache(), plain.cache())), "the caches differ"
