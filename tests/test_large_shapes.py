"""Sizes that no test of one feature has: none a power of two, over a thousand sequences, offsets past 2**31.

The kernels of metadata and of short keys beside their torch twins, and whole layers beside the masks.
"""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from fa_fast.kernels.short_keys import short_key_attention_torch
from fa_fast.planning.local import virtual_batch_bound, virtual_batch_count, virtual_batches_torch
from fa_fast.planning.page_table import gather_pages_torch
from fa_fast.planning.verify import tree_tables_torch
from fa_ref import ForwardMode, LayerKind
from tests.support import case_on, run

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
MANY = 1031  # sequences: FA3 makes schedules of up to 992, and the kernels walk requests in blocks of 1024


@pytest.fixture
def ops(device):
    """The Triton kernels, where they run."""
    triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton runs CPU tensors only in its interpreter: TRITON_INTERPRET=1")
    from fa_fast.triton_ops import gather_pages, short_keys, tree_tables, virtual_batches

    return SimpleNamespace(
        gather_pages=gather_pages.gather_pages, short_keys=short_keys.short_key_attention,
        tree_tables=tree_tables.tree_tables, virtual_batches=virtual_batches.virtual_batches,
    )  # fmt: skip


def ints(gen: torch.Generator, high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=gen, dtype=torch.int32)


def same(ours: tuple[Tensor, ...], twin: tuple[Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


def spread(entries: int, dtype: torch.dtype, device: str) -> Tensor:
    """[entries] of which only what is touched takes memory, on a CPU; on a GPU all of it, or the test is skipped."""
    size = entries * dtype.itemsize
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < size + 2**30:
            pytest.skip(f"needs {size / 2**30:.0f} GiB of GPU memory")
        return torch.empty(entries, dtype=dtype, device=device)
    reserve = getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve), dtype=dtype)


# ---- no power of two -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [1, 77, 1029])
@pytest.mark.parametrize("requests", [1, 11])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("left", "chunk"), [(-1, 0), (37, 0), (-1, 48)])
def test_page_tables_of_odd_sizes(device, ops, left, chunk, page_size, requests, positions):
    gen = torch.Generator().manual_seed(requests)
    slots = ints(gen, 9000, requests + 3, positions + 7).to(device)[:, :positions]
    rows = torch.randperm(requests + 3, generator=gen)[:requests].to(device)
    lens = ints(gen, positions + 1, requests).to(device)
    args = (slots, rows, lens, page_size, -(-positions // page_size), left, chunk, None)
    assert same(ops.gather_pages(*args), gather_pages_torch(*args))


@pytest.mark.parametrize(("requests", "drafts"), [(1, 1), (3, 7), (13, 11), (2, 61), (1, 129)])
def test_tree_tables_of_odd_sizes(device, ops, requests, drafts):
    args = tree_problem(device, requests, drafts, longest=71)
    assert same(ops.tree_tables(*args), tree_tables_torch(*args))


def tree_problem(device: str, requests: int, drafts: int, longest: int) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(requests * drafts)
    lens = ints(gen, longest, requests)
    mask = torch.rand(int(((lens.long() + drafts) * drafts).sum()), generator=gen) < 0.4
    slots = ints(gen, 5000, requests + 2, longest + drafts)
    rows = torch.randperm(requests + 2, generator=gen)[:requests]
    return mask.to(device), lens.to(device), slots.to(device), rows.to(device), drafts, None


@pytest.mark.parametrize(("requests", "chunk", "page_size"), [(1, 7, 1), (13, 9, 3), (29, 22, 11), (5, 65, 13)])
def test_virtual_batches_of_odd_sizes(device, ops, requests, chunk, page_size):
    args = local_problem(device, requests, chunk, page_size)
    assert same(ops.virtual_batches(*args), virtual_batches_torch(*args))


def local_problem(device: str, requests: int, chunk: int, page_size: int, idle: float = 0.0) -> tuple[Any, ...]:
    """Arguments of virtual_batches; a share of the requests has no new token."""
    gen = torch.Generator().manual_seed(requests * chunk)
    new = ints(gen, 2 * chunk + 2, requests) * (torch.rand(requests, generator=gen) >= idle)
    total = new + ints(gen, 2 * chunk, requests)
    cu = pad(torch.cumsum(new, 0, dtype=torch.int32), (1, 0))
    table = ints(gen, 7000, requests + 1, -(-5 * chunk // page_size)).to(device)
    row_index = torch.randperm(requests + 1, generator=gen)[:requests].to(device, torch.int32)
    count = virtual_batch_count(new.tolist(), total.tolist(), chunk)
    assert count <= virtual_batch_bound(requests, int(cu[-1]), chunk)
    return cu.to(device), total.to(device), table, row_index, count + 3, chunk, page_size


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (7, 1), (33, 3)])
@pytest.mark.parametrize(("dim", "v_dim"), [(72, 72), (96, 40), (192, 136)])
@pytest.mark.parametrize(("queries", "drafts"), [(1, 0), (3, 0), (3, 13), (7, 7)])
def test_short_keys_of_odd_sizes(device, ops, queries, drafts, dim, v_dim, heads, kv_heads):
    arguments, named = keys_problem(device, 3, queries, drafts, heads, kv_heads, dim, v_dim)
    assert close(ops.short_keys(*arguments, **named), short_key_attention_torch(*arguments, **named))


def keys_problem(
    device: str, requests: int, queries: int, drafts: int, heads: int, kv_heads: int, dim: int, v_dim: int,
    keys: int = 75, page_size: int = 3,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:  # fmt: skip
    """Arguments of short_key_attention: a window over random pages, and drafts if there are any."""
    gen = torch.Generator().manual_seed(requests * heads + dim)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter's dot does not know bf16
    width = keys // page_size
    pages = requests * width * 2
    q, k_cache, v_cache = (
        torch.randn(*shape, generator=gen).to(device, dtype)
        for shape in ((requests * queries, heads, dim), (pages * page_size, kv_heads, dim),
                      (pages * page_size, kv_heads, v_dim))
    )  # fmt: skip
    table = torch.randperm(pages, generator=gen)[: requests * width].view(requests, width).to(device, torch.int32)
    lens = ints(gen, keys + 1, requests, low=queries).to(device)
    named = dict(
        queries=queries, softmax_scale=dim**-0.5, page_table=table, cache_seqlens=lens, page_size=page_size,
        causal=not drafts, window_left=-1 if drafts else 19,
    )  # fmt: skip
    if drafts:
        mask = torch.rand(requests, queries, drafts, generator=gen) < 0.6
        named |= dict(slots=ints(gen, pages * page_size, requests, drafts).to(device), mask=mask.to(device))
    return (q, k_cache, v_cache), named


def close(ours: Tensor, twin: Tensor) -> bool:
    loose = 0.04 if ours.is_cuda else 1e-5
    error, size = (ours.float() - twin.float()).norm(), twin.float().norm()
    return torch.allclose(ours.float(), twin.float(), atol=loose, rtol=loose / 2) and bool(error <= loose / 6 * size)


SHAPES: dict[str, dict[str, Any]] = {
    "decode": dict(mode=DECODE),
    "extend": dict(mode=ForwardMode.EXTEND, new_lens=[5, 1, 13, 2, 0, 7, 3]),
    "mixed": dict(mode=ForwardMode.MIXED, new_lens=[5, 1, 13, 1, 1, 7, 1]),
    "draft-chain": dict(mode=DECODE, topk=1, num_steps=5, step=3),
    "draft-branches": dict(mode=DECODE, topk=7, num_steps=3, step=2),
    "verify-chain": dict(mode=VERIFY, draft_token_num=11),
    "verify-tree": dict(mode=VERIFY, trees=[[-1, *(n // 2 for n in range(12))]] * 7),
    "draft-extend": dict(mode=EXTEND, new_lens=[3, 1, 2, 5, 7, 1, 3]),
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": dict(kind=LayerKind.SLIDING, window=13),
    "local": dict(kind=LayerKind.LOCAL, chunk=21),
    "hybrid": dict(kind=LayerKind.SLIDING, window=13, hybrid=True),
}


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 3, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(21, 3, 96), (5, 5, 40)])
def test_layers_of_odd_sizes(device, heads, kv_heads, head_dim, page_size, kind, form):
    """Seven requests; a GPU runs 40 as 64, the least that FA3 knows."""
    case = case_on(
        device, **SHAPES[form], **KINDS[kind], prefix_lens=[37, 0, 21, 5, 20, 63, 1], page_size=page_size, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip
    verdict = case.judge(run(case, "fast"))
    assert verdict.ok, verdict


# ---- over a thousand sequences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "left", "chunk"), [(1, 3, 0), (2, -1, 0), (2, -1, 4)])
def test_page_tables_of_a_thousand_sequences(device, ops, page_size, left, chunk):
    gen = torch.Generator().manual_seed(1)
    slots = ints(gen, 20_000, MANY + 1, 9).to(device)
    rows, lens = torch.randperm(MANY + 1, generator=gen)[:MANY].to(device), ints(gen, 10, MANY).to(device)
    args = (slots, rows, lens, page_size, -(-9 // page_size), left, chunk, None)
    assert same(ops.gather_pages(*args), gather_pages_torch(*args))


def test_tree_tables_of_a_thousand_sequences(device, ops):
    args = tree_problem(device, MANY, drafts=2, longest=7)
    assert same(ops.tree_tables(*args), tree_tables_torch(*args))


def test_virtual_batches_of_a_thousand_sequences(device, ops):
    args = local_problem(device, MANY, chunk=2, page_size=1, idle=0.8)
    assert args[0].diff()[1024:].any(), "the last requests have virtual batches too"
    assert same(ops.virtual_batches(*args), virtual_batches_torch(*args))


def test_short_keys_of_a_thousand_sequences(device, ops):
    arguments, named = keys_problem(device, MANY, 1, 0, 2, 1, 16, 16, keys=6)
    assert close(ops.short_keys(*arguments, **named), short_key_attention_torch(*arguments, **named))


CROWDS: dict[str, dict[str, Any]] = {
    "full-page1": dict(page_size=1),
    "sliding-page4-deterministic": dict(kind=LayerKind.SLIDING, window=3, page_size=4, deterministic=True),
    "local-page2": dict(kind=LayerKind.LOCAL, chunk=4, page_size=2),
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("form", ["decode", "draft-branches", "verify-chain", "verify-tree", "draft-extend"])
def test_layers_of_a_thousand_sequences(device, form, crowd):
    shapes: dict[str, dict[str, Any]] = {
        "decode": dict(mode=DECODE),
        "draft-branches": dict(mode=DECODE, topk=2, num_steps=2, step=1),
        "verify-chain": dict(mode=VERIFY, draft_token_num=2),
        "verify-tree": dict(mode=VERIFY, trees=[[-1, 0, 0]] * MANY),
        "draft-extend": dict(mode=EXTEND, new_lens=[2] * MANY),
    }
    case = case_on(
        device, **shapes[form], **CROWDS[crowd], prefix_lens=[n % 9 for n in range(MANY)], heads=2, kv_heads=1,
        head_dim=8,
    )  # fmt: skip
    assert case.batch.batch_size == MANY
    verdict = case.judge(run(case, "fast"))
    assert verdict.ok, verdict


# ---- offsets past 2**31 ----------------------------------------------------------------------------------------------
# Offsets of whole multiples of 2**32 entries: as 32 bit numbers they are those of row 0, which holds something else.

FAR = [8, 0, 3, 1]  # of rows 2**29 entries apart: the first lies 2**32 entries, 16 GiB, into the table


def far_table(device: str, width: int, high: int) -> Tensor:
    """int32 [9, width] whose rows are 2 GiB apart; only rows FAR hold anything."""
    table = spread(8 * 2**29 + width, torch.int32, device).as_strided((9, width), (2**29, 1))
    table[FAR] = ints(torch.Generator().manual_seed(3), high, len(FAR), width).to(device)
    return table


@pytest.mark.parametrize(("page_size", "left", "chunk"), [(1, -1, 0), (16, -1, 0), (4, 9, 0), (4, -1, 12)])
def test_page_tables_of_rows_far_apart(device, ops, page_size, left, chunk):
    slots, rows = far_table(device, 130, 9000), torch.tensor(FAR, device=device)
    lens = torch.tensor([130, 7, 64, 31], device=device)
    args = (slots, rows, lens, page_size, -(-130 // page_size), left, chunk, None)
    ours = ops.gather_pages(*args)
    assert same(ours, gather_pages_torch(*args))
    assert not torch.equal(ours[0][0], ours[0][1])


def test_virtual_batches_of_rows_far_apart(device, ops):
    table, rows = far_table(device, 20, 9000), torch.tensor(FAR, device=device, dtype=torch.int32)
    cu = torch.tensor([0, 9, 10, 15, 35], dtype=torch.int32, device=device)
    total = torch.tensor([40, 7, 64, 31], dtype=torch.int32, device=device)
    count = virtual_batch_count(cu.diff().tolist(), total.tolist(), 8)
    args = (cu, total, table, rows, count, 8, 4)
    assert same(ops.virtual_batches(*args), virtual_batches_torch(*args))


def test_tree_tables_of_rows_far_apart_and_a_mask_as_long(device, ops):
    """The first request's mask has 2**32 entries."""
    drafts, longest = 64, 2**26 - 64
    first = drafts * (longest + drafts)
    assert first == 2**32
    lens = torch.tensor([longest, 30, 64], device=device)
    mask = spread(first + int((drafts * (lens[1:] + drafts)).sum()), torch.uint8, device)
    gen = torch.Generator().manual_seed(5)
    mask[: 2**16] = torch.randint(0, 2, (2**16,), generator=gen, dtype=torch.uint8).to(device)
    mask[first:] = torch.randint(0, 2, (len(mask) - first,), generator=gen, dtype=torch.uint8).to(device)
    for draft in range(drafts):
        end = (draft + 1) * (longest + drafts)
        mask[end - drafts : end] = torch.randint(0, 2, (drafts,), generator=gen, dtype=torch.uint8).to(device)
    slots, rows = far_table(device, 130, 9000), torch.tensor(FAR[:3], device=device)
    args = (mask, lens, slots, rows, drafts, None)
    ours, twin = ops.tree_tables(*args), tree_tables_torch(*args)
    assert same(ours, twin)
    assert ours[0][1].any() and not ours[0][1].all()


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("page_size", [1, 4])
def test_short_keys_far_into_the_cache(device, ops, page_size, drafts):
    """Keys of 128 entries a slot, half of them 2**32 entries into the cache, where row 0 of a 32 bit offset is."""
    heads, kv_heads, dim, keys, queries = 6, 2, 64, 24, 3
    arguments, named = keys_problem(device, 3, queries, drafts, heads, kv_heads, dim, dim, keys, page_size)
    q, k, v = arguments
    offset, count = 2**32 // (kv_heads * dim), k.shape[0]
    far_k, far_v = (spread((offset + count) * kv_heads * dim, x.dtype, device).view(-1, kv_heads, dim) for x in (k, v))
    for cache, values in ((far_k, k), (far_v, v)):
        cache[:count], cache[offset:] = values, -values.flip(0)
    far = named["page_table"] + offset // page_size
    named["page_table"] = torch.where(torch.arange(far.shape[1], device=device) % 2 == 0, far, named["page_table"])
    if drafts:
        named["slots"][:, ::2] += offset
    ours, twin = (attend(q, far_k, far_v, **named) for attend in (ops.short_keys, short_key_attention_torch))
    assert close(ours, twin)
    near = short_key_attention_torch(q, k, v, **named | wrapped(named, offset, page_size))
    assert not close(near, twin), "the far keys do not matter"


def wrapped(named: dict[str, Any], offset: int, page_size: int) -> dict[str, Any]:
    """Tables as 32 bit offsets would read them."""
    tables = dict(page_table=named["page_table"] % (offset // page_size))
    return tables | (dict(slots=named["slots"] % offset) if "slots" in named else {})


@pytest.mark.parametrize("row_index", [True, False], ids=["row-index", "own-rows"])
def test_short_keys_behind_a_table_of_rows_far_apart(device, ops, row_index):
    queries, keys = 2, 24
    (q, k, v), named = keys_problem(device, 9, queries, 0, 4, 2, 64, 64, keys, page_size=1)
    table = far_table(device, keys, k.shape[0])
    table[[2, 4, 5, 6, 7]] = table[[1, 1, 1, 1, 1]]
    named |= dict(page_table=table, cache_seqlens=torch.full((9,), keys, dtype=torch.int32, device=device))
    if row_index:
        rows = torch.tensor([8, 0, 3, 1, 8, 2, 3, 0, 8], dtype=torch.int32, device=device)
        named |= dict(row_index=rows)
    ours, twin = ops.short_keys(q, k, v, **named), short_key_attention_torch(q, k, v, **named)
    assert close(ours, twin)


@pytest.mark.parametrize("page_size", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["decode", "verify-tree", "draft-branches"])
def test_layers_of_requests_whose_rows_lie_far_apart(device, form, kind, page_size):
    """A server's req_to_token may be a view of a wider one: here its rows are 2 GiB apart."""
    case = case_on(
        device, **SHAPES[form], **KINDS[kind], prefix_lens=[37, 0, 21, 5, 20, 63, 1], page_size=page_size, heads=4,
        kv_heads=2,
    )  # fmt: skip
    right, pool = run(case, "fast").clone(), case.config.req_to_token_pool
    near, (rows, width) = pool.req_to_token, pool.req_to_token.shape
    pool.req_to_token = spread((rows - 1) * 2**29 + width, torch.int32, device).as_strided((rows, width), (2**29, 1))
    pool.req_to_token.copy_(near)
    assert torch.equal(run(case, "fast"), right)
    assert case.judge(right).ok
