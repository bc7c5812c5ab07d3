"""Report 50: kernels that make a step's metadata in one launch, beside what plain torch makes of the same batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast
from fa_fast.planning import local, page_table, verify
from fa_ref.cases import Case
from tests.test_graphs import FORMS, REPLAYS, at, problem, step_of, tensors_of

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from fa_fast.triton_ops.gather_pages import gather_pages  # noqa: E402
from fa_fast.triton_ops.tree_tables import tree_tables  # noqa: E402
from fa_fast.triton_ops.virtual_batches import virtual_batches  # noqa: E402

SLOTS, LONGEST = 6000, 133  # slots of the pool; tokens of a request before what it adds
page_sizes = pytest.mark.parametrize("page_size", [1, 2, 16, 64])
extras = pytest.mark.parametrize("extra", [0, 1, 4])  # tokens that this step adds behind the lengths


@pytest.fixture(autouse=True)
def _runnable(request):
    names = request.fixturenames
    if ("device" not in names or request.getfixturevalue("device") == "cpu") and not triton.knobs.runtime.interpret:
        pytest.skip("Triton runs CPU tensors only in its interpreter: TRITON_INTERPRET=1")


def batch_sizes(*case: int) -> list[int]:
    """1, one of the largest or around a block of 128, and another; all cases together have them all."""
    draw = random.Random(repr(case))
    return [1, draw.choice([127, 128, 129, 256, 257]), draw.randint(2, 60)]


def table_of(requests: int, extra: int, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(req_to_token, a strided view; rows in any order; lengths, the least and the most among them)."""
    slots = torch.randint(0, SLOTS, (requests + 1, LONGEST + extra + 3), generator=gen, dtype=torch.int32)
    rows = torch.randperm(requests + 1, generator=gen)[:requests]
    lens = torch.randint(1, LONGEST + 1, (requests,), generator=gen)
    lens[-1] = LONGEST
    return slots[:, : LONGEST + extra], rows, lens


def equal(ours: tuple[Tensor, ...], twin: tuple[Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


@page_sizes
@extras
@pytest.mark.parametrize("cut", ["whole", "window", "chunk"])
def test_report_50_page_tables_and_lengths(device, cut, extra, page_size):
    """sglang PR 20778: the fused kernel and the ops that it replaced. On two pools for every other batch size."""
    left, chunk = {"whole": (-1, 0), "window": (40, 0), "chunk": (-1, 64)}[cut]
    for nth, requests in enumerate(batch_sizes(page_size, extra, left, chunk)):
        gen = torch.Generator().manual_seed(requests)
        slots, rows, lens = (one.to(device) for one in table_of(requests, extra, gen))
        mapping = torch.randperm(SLOTS, generator=gen).to(device) if nth % 2 else None
        whole = -(-slots.shape[1] // page_size)
        width = whole if cut == "whole" else min(whole, -(-64 // page_size) + 1)
        args = (slots, rows, lens + extra, page_size, width, left, chunk, mapping)
        twin = page_table.gather_pages_torch(*args)
        assert equal(gather_pages(*args), twin), requests
        assert twin[0].shape == (requests, width) and twin[1].shape == (requests,)


@extras
@page_sizes
def test_report_50_virtual_batches(device, page_size, extra):
    """Each request adds one token and `extra` more, so that some of them cross a chunk."""
    for requests in batch_sizes(page_size, extra):
        gen = torch.Generator().manual_seed(requests)
        slots, rows, lens = table_of(requests, extra + 1, gen)
        table = slots[:, ::page_size].div(page_size, rounding_mode="floor").contiguous()
        new, total = torch.full_like(lens, extra + 1), lens + extra + 1
        cu = torch.nn.functional.pad(new.cumsum(0), (1, 0))
        count = local.virtual_batch_count(new.tolist(), total.tolist(), 64)
        ints = [one.to(device, torch.int32) for one in (cu, total, table, rows)]
        args = (*ints, count + 2, 64, page_size)
        assert equal(virtual_batches(*args), local.virtual_batches_torch(*args)), requests


@pytest.mark.parametrize("drafts", [1, 4])
def test_report_50_trees(device, drafts):
    """Its drafts are what such a step adds; on two pools for every other batch size."""
    for nth, requests in enumerate([1, 257, 128, 45]):
        gen = torch.Generator().manual_seed(requests)
        slots, rows, lens = table_of(requests, drafts, gen)
        mask = torch.rand(int(((lens + drafts) * drafts).sum()), generator=gen) < 0.4
        mapping = torch.randperm(SLOTS, generator=gen).to(device) if nth % 2 else None
        args = (*(one.to(device) for one in (mask, lens, slots, rows)), drafts, mapping)
        assert equal(tree_tables(*args), verify.tree_tables_torch(*args)), requests


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["full", "sliding", "local", "hybrid", "text-behind-encoder", "mla"])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_report_50_whole_plans_and_layers(page_size, kind, form, monkeypatch):
    """What the planner makes of the kernels, it makes of plain torch too."""
    case = problem("cpu", form, kind, page_size)
    lens, order = REPLAYS[0]
    batch, inputs = at(case, lens, order)
    twin = planned(case, batch, inputs)
    launched: list[str] = []
    for module, kernel in ((page_table, gather_pages), (verify, tree_tables), (local, virtual_batches)):

        def launch(*args: Any, kernel: Any = kernel) -> Any:
            launched.append(kernel.__name__)
            return kernel(*args)

        monkeypatch.setattr(module, f"{kernel.__name__}_torch", launch)
    assert equal(planned(case, batch, inputs), twin)
    windowed = kind in ("sliding", "hybrid")
    assert launched or page_size == 1 or windowed, "no kernel took part"  # those need no table, or slots alone


def planned(case: Case, batch: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Every tensor of an eager plan, and its layer's output."""
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    backend.init_forward_metadata(batch)
    return (*tensors_of(backend.forward_metadata), step_of(case, backend)(batch, **inputs))
