"""Every Triton kernel against its torch definition: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_fast.kernels.short_keys import short_key_attention_torch
from fa_fast.kernels.torch_cpu import merge_state as merge_state_torch
from fa_fast.planning.local import virtual_batch_count, virtual_batches_torch
from fa_fast.planning.page_table import gather_pages_torch
from fa_fast.planning.verify import tree_tables_torch
from fa_ref.api.errors import BadBatch
from fa_ref.api.pools import FP8, MHAKVPool, SWAKVPool
from fa_ref.cases import make_case

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from fa_fast.triton_ops.gather_pages import gather_pages  # noqa: E402
from fa_fast.triton_ops.merge_state import merge_state  # noqa: E402
from fa_fast.triton_ops.quantize_q import quantize_q, quantize_q_torch  # noqa: E402
from fa_fast.triton_ops.short_keys import short_key_attention  # noqa: E402
from fa_fast.triton_ops.store_kv import store_kv  # noqa: E402
from fa_fast.triton_ops.tree_tables import tree_tables  # noqa: E402
from fa_fast.triton_ops.virtual_batches import virtual_batches  # noqa: E402


@pytest.fixture(autouse=True)
def _runnable(device):
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton runs CPU tensors only in its interpreter: TRITON_INTERPRET=1")


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _ints(high, shape, seed, low=0):
    return torch.randint(low, high, shape, generator=_generator(seed), dtype=torch.int32)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize(("left", "chunk"), [(-1, 0), (0, 0), (5, 0), (127, 0), (-1, 48), (-1, 192)])
@pytest.mark.parametrize("mapped", [False, True], ids=["one-pool", "two-pools"])
def test_gather_pages_equals_its_definition(device, page_size, left, chunk, mapped):
    requests, positions = 7, 300
    slots = _ints(4000, (requests + 2, positions + 5), 1)[:, :positions].to(device)  # a strided table
    rows = torch.randperm(requests + 2, generator=_generator(2))[:requests].to(device)
    lens = torch.tensor([0, 1, 2, 47, 48, 300, 333], device=device)  # the last is longer than its row
    mapping = _ints(4000, (4000,), 3).to(device) if mapped else None
    for width in {1, 3, -(-positions // page_size)}:
        for index_dtype in (torch.int32, torch.int64):
            args = (slots, rows.to(index_dtype), lens.to(index_dtype), page_size, width, left, chunk, mapping)
            for ours, definition in zip(gather_pages(*args), gather_pages_torch(*args), strict=True):
                assert ours.dtype == torch.int32
                assert torch.equal(ours, definition)


@pytest.mark.parametrize(
    ("requests", "page_size", "chunk"), [(1, 1, 4), (3, 2, 4), (9, 4, 12), (17, 1, 5), (7, 16, 64)]
)
@pytest.mark.parametrize("indexed", [False, True], ids=["own-rows", "row-index"])
def test_virtual_batches_equal_their_definition(device, requests, page_size, chunk, indexed):
    new = _ints(3 * chunk, (requests,), 4)
    total = new + _ints(3 * chunk, (requests,), 5)
    cu = torch.nn.functional.pad(torch.cumsum(new, 0, dtype=torch.int32), (1, 0))
    pages = -(-6 * chunk // page_size)
    table = _ints(1000, (requests + 2, pages), 6).to(device)
    rows = torch.randperm(requests + 2, generator=_generator(7))[:requests].to(device, torch.int32) if indexed else None
    count = virtual_batch_count(new.tolist(), total.tolist(), chunk)
    for padded in (count, count + 5):
        args = (cu.to(device), total.to(device), table, rows, padded, chunk, page_size)
        for ours, definition in zip(virtual_batches(*args), virtual_batches_torch(*args), strict=True):
            assert ours.dtype == torch.int32
            assert torch.equal(ours, definition)


def test_virtual_batches_of_more_requests_than_one_block(device):
    requests, chunk = 1500, 4
    new, total = torch.zeros(requests, dtype=torch.int32), torch.full((requests,), 9, dtype=torch.int32)
    new[[3, 1024, 1499]] = torch.tensor([5, 2, 9], dtype=torch.int32)
    cu = torch.nn.functional.pad(torch.cumsum(new, 0, dtype=torch.int32), (1, 0))
    table = _ints(1000, (requests, 9), 8)
    count = virtual_batch_count(new.tolist(), total.tolist(), chunk)
    args = (cu.to(device), total.to(device), table.to(device), None, count, chunk, 1)
    for ours, definition in zip(virtual_batches(*args), virtual_batches_torch(*args), strict=True):
        assert torch.equal(ours, definition)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(("heads", "dim", "v_dim"), [(1, 64, 64), (3, 80, 48), (8, 128, 128), (2, 192, 128)])
@pytest.mark.parametrize("per_head", [False, True], ids=["one-scale", "scale-per-head"])
@pytest.mark.parametrize("mapped", [False, True], ids=["one-pool", "two-pools"])
def test_store_kv_writes_what_the_pool_writes(device, cache_dtype, heads, dim, v_dim, per_head, mapped):
    tokens, page_size = 9, 4
    geometry = dict(page_size=page_size, dtype=cache_dtype, head_num=heads, head_dim=dim, v_head_dim=v_dim,
                    layer_num=1, device=device)  # fmt: skip
    pool = MHAKVPool(size=64, **geometry)
    if mapped:
        full = MHAKVPool(size=64, **geometry)
        pool = SWAKVPool(full_pool=full, swa_pool=pool, full_layer_ids=[1], swa_layer_ids=[0])
        pool.full_to_swa_index_mapping.copy_(torch.randperm(68, generator=_generator(1)).to(device, torch.int32))
    fused = values(device, (tokens, heads * (dim + v_dim)), 2).bfloat16()
    k, v = fused.split([heads * dim, heads * v_dim], dim=1)  # strided, as a fused projection gives them
    k, v = k.unflatten(1, (heads, dim)), v.unflatten(1, (heads, v_dim))
    loc = torch.randperm(64, generator=_generator(3))[:tokens].to(device)
    k_scale = scales(device, heads if per_head else 1, 4)
    v_scale = scales(device, heads if per_head else 1, 5)
    layer = make_case().layer
    k_cache, v_cache = (torch.zeros_like(buffer) for buffer in pool.get_kv_buffer(0))

    pool.set_kv_buffer(layer, loc, k, v, k_scale, v_scale)
    store_kv(k, v, k_cache, v_cache, loc, mapping=pool.full_to_swa_index_mapping if mapped else None,
             k_scale=k_scale, v_scale=v_scale)  # fmt: skip

    for ours, definition in zip((k_cache, v_cache), pool.get_kv_buffer(0), strict=True):
        assert_same_bits(ours, definition)


def assert_same_bits(ours, definition):
    assert torch.equal(ours.view(torch.uint8), definition.view(torch.uint8))


def values(device, shape, seed):
    """Random numbers on a GPU; in the interpreter, which rounds to e4m3 in a way of its own, small whole ones."""
    if device == "cuda":
        return torch.randn(shape, generator=_generator(seed)).to(device) * 300
    return torch.randint(-7, 8, shape, generator=_generator(seed)).float()


def scales(device, count, seed):
    if device == "cuda":
        return torch.rand(count, generator=_generator(seed)).to(device) + 0.2
    return 2.0 ** torch.randint(-2, 3, (count,), generator=_generator(seed)).float()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 64), (6, 3, 80), (32, 8, 128), (24, 2, 64)])
def test_quantize_q_equals_its_definition(device, heads, kv_heads, dim):
    cu = torch.tensor([0, 1, 1, 6, 11], dtype=torch.int32, device=device)
    q = values(device, (13, heads, dim), 6)
    if device == "cuda":
        q = q * torch.logspace(-3, 3, 13, device=device)[:, None, None]
    q[1:6] = 0 if heads == 1 else q[1:6]  # a sequence of zeros has a scale too
    q = q.bfloat16()
    ours, descale = quantize_q(q, cu, kv_heads)
    expected, expected_descale = quantize_q_torch(q, cu, kv_heads)
    assert_same_bits(ours[:11], expected[:11])
    assert torch.equal(descale, expected_descale)


def test_a_query_of_any_size_keeps_its_precision_in_fp8(device):
    q = values(device, (4, 2, 64), 7).bfloat16() * 8
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    quantized, descale = quantize_q(q, cu, 2)
    back = quantized.float() * descale[0].reshape(1, 2, 1)
    assert ((back - q.float()).abs() <= q.float().abs() / 8 + descale.max() / 512).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "v_dim"), [(1, 1, 64), (5, 3, 80), (37, 8, 128), (3, 2, 512)])
def test_merge_state_equals_its_definition_in_any_lse_layout(device, dtype, tokens, heads, v_dim):
    gen = _generator(8)
    a, b = (torch.randn(tokens, heads, v_dim, generator=gen).to(device, dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(heads, tokens, generator=gen).to(device).T * 5 for _ in range(2))
    lse_a[0], lse_b[-1] = -torch.inf, -torch.inf
    a[0], b[-1] = 0, 0
    out, lse = merge_state(a, lse_a, b, lse_b)
    expected, expected_lse = merge_state_torch(a.cpu(), lse_a.cpu(), b.cpu(), lse_b.cpu())
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu(), expected, atol=4 * tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), expected_lse)


def test_merging_with_nothing_returns_the_other_side_bitwise(device):
    out_a = torch.randn(4, 2, 64, generator=_generator(9)).to(device, torch.bfloat16)
    lse_a = torch.randn(4, 2, generator=_generator(10)).to(device)
    out_a[0, 0, 0] = -0.0
    for held in (0.0, torch.nan, torch.inf):  # whatever an empty side holds
        nothing = torch.full_like(out_a, held), torch.full_like(lse_a, -torch.inf)
        for out, lse in (merge_state(out_a, lse_a, *nothing), merge_state(*nothing, out_a, lse_a)):
            assert_same_bits(out, out_a)
            assert torch.equal(lse, lse_a)
        out, lse = merge_state(*nothing, *nothing)
        assert (out == 0).all() and torch.equal(lse, nothing[1])


@pytest.mark.parametrize(("requests", "drafts"), [(1, 1), (3, 5), (40, 2), (2, 33)])
@pytest.mark.parametrize("mapped", [False, True], ids=["one-pool", "two-pools"])
def test_tree_tables_equal_their_definition(device, requests, drafts, mapped):
    lens = _ints(90, (requests,), 1).to(device)
    entries = int(((lens.long() + drafts) * drafts).sum())
    custom_mask = (torch.rand(entries, generator=_generator(2)) < 0.4).to(device)
    slots = _ints(700, (requests + 2, 100 + drafts), 3).to(device)
    rows = torch.randperm(requests + 2, generator=_generator(4))[:requests].to(device)
    mapping = _ints(700, (700,), 5).to(device) if mapped else None
    for dtype in (torch.int32, torch.int64):
        args = (custom_mask, lens.to(dtype), slots, rows, drafts, mapping)
        for ours, definition in zip(tree_tables(*args), tree_tables_torch(*args), strict=True):
            assert ours.dtype == definition.dtype
            assert torch.equal(ours, definition)


TREES = [(1, 1, 1), (3, 5, 5), (2, 4, 12), (2, 17, 17), (1, 70, 70)]  # requests, queries, drafts


def tree_problem(device, heads, kv_heads, dim, v_dim, requests, queries, drafts, extras, fp8):
    """Arguments of short_key_attention: random trees with a row that sees no draft, and one without a prefix."""
    gen = _generator(requests * drafts + dim)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter's dot does not know bf16
    cache_dtype = FP8 if fp8 else dtype
    q = torch.randn(requests * queries, heads, dim, generator=gen).to(device, dtype)
    k_cache, v_cache = (torch.randn(90, kv_heads, n, generator=gen).to(device).to(cache_dtype) for n in (dim, v_dim))
    slots = torch.stack([torch.randperm(90, generator=gen)[:drafts] for _ in range(requests)]).to(device, torch.int32)
    mask = torch.rand(requests, queries, drafts, generator=gen) < 0.5
    mask[0, 0] = False
    prefix_lse = torch.randn(heads, requests * queries, generator=gen).to(device).T * 2
    prefix_lse[-1] = -torch.inf
    prefix_out = torch.randn(requests * queries, heads, v_dim, generator=gen).to(device, dtype)
    prefix_out[-1] = 0
    named = dict(softmax_scale=dim**-0.5, prefix_out=prefix_out, prefix_lse=prefix_lse)
    if extras:
        named |= dict(softcap=3.0, sinks=torch.randn(heads, generator=gen).to(device))
    if fp8:
        named |= dict(k_scale=scales(device, kv_heads, 1), v_scale=scales(device, 1, 2))
    return (q, k_cache, v_cache), named | dict(slots=slots, mask=mask.to(device), queries=queries)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(4, 2, 64, 64), (3, 1, 80, 48), (8, 8, 128, 128)])
@pytest.mark.parametrize(("requests", "queries", "drafts"), TREES)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "softcap-sinks"])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache", "fp8-cache"])
def test_short_key_attention_equals_its_definition(
    device, heads, kv_heads, dim, v_dim, requests, queries, drafts, extras, fp8
):
    arguments, named = tree_problem(device, heads, kv_heads, dim, v_dim, requests, queries, drafts, extras, fp8)
    ours = short_key_attention(*arguments, **named)
    definition = short_key_attention_torch(*arguments, **named)
    loose = 0.04 if device == "cuda" else 1e-5
    torch.testing.assert_close(ours.float(), definition.float(), atol=loose, rtol=loose / 2)
    error, size = (ours.float() - definition.float()).norm(), definition.float().norm()
    assert error <= loose / 6 * size


@pytest.mark.parametrize("cap", [0.5, 8.0, 50.0, 1e3, 1e5])
def test_a_softcap_of_any_size_keeps_the_precision_of_the_logits(device, cap):
    """Logits far below the cap are where (1 - e) / (1 + e) cancels."""
    arguments, named = tree_problem(device, 4, 2, 64, 64, 3, 5, 5, False, False)
    ours, definition = (
        f(*arguments, **named | dict(softcap=cap)) for f in (short_key_attention, short_key_attention_torch)
    )
    loose = 0.02 if device == "cuda" else 2e-6
    torch.testing.assert_close(ours.float(), definition.float(), atol=loose, rtol=loose)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("attend", [short_key_attention, short_key_attention_torch])
@pytest.mark.parametrize(
    ("fp8", "value"), [(False, math.nan), (False, math.inf), (False, -math.inf), (True, math.nan)], ids=str
)
@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize(("requests", "queries", "drafts"), TREES)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "softcap-sinks"])
def test_a_bad_draft_changes_no_bit_of_the_queries_that_do_not_see_it(
    device, requests, queries, drafts, extras, fp8, where, value, attend
):
    """One number of key head 1 in each request's last draft: its readers lose heads 2 and 3, nothing else changes."""
    arguments, named = tree_problem(device, 4, 2, 80, 48, requests, queries, drafts, extras, fp8)
    (_, k_cache, v_cache), slots, mask = arguments, named["slots"], named["mask"]
    right = attend(*arguments, **named)
    bad = slots[:, -1]
    cache = k_cache if where == "keys" else v_cache
    cache.view(torch.uint8 if fp8 else cache.dtype)[bad.long(), 1, 47] = 0x7F if fp8 else value
    out = attend(*arguments, **named)
    sees = (mask & torch.isin(slots, bad)[:, None, :]).any(dim=-1).flatten()
    assert torch.equal(out[~sees], right[~sees])
    assert torch.equal(out[:, :2], right[:, :2])
    read_as_480 = fp8 and attend is short_key_attention and device == "cpu"  # e4m3's NaN, by the interpreter
    infinite_key = where == "keys" and math.isinf(value)
    if not read_as_480 and not infinite_key:  # a score of -inf is a key that weighs nothing
        assert out[sees][:, 2:].isnan().all()


WINDOWS = {  # of cached keys: what a decode, a chain of drafts and a tree ask for
    "decode": dict(queries=1, causal=True, window_left=9),
    "decode-whole": dict(queries=1, causal=True, window_left=-1),
    "chain": dict(queries=5, causal=True, window_left=6),
    "wide-chain": dict(queries=20, causal=True, window_left=70),
    "tree": dict(queries=6, causal=False, drafts=6),
    "branches": dict(queries=3, causal=False, drafts=12, depths=1),
}


def window_problem(device, form, page_size, requests, fp8=False, heads=4, kv_heads=2, dim=64, v_dim=64, extras=False):
    """Arguments of short_key_attention over a page table: random pages, lengths from the shortest there is."""
    shape = dict(WINDOWS[form])
    queries, drafts = shape["queries"], shape.pop("drafts", 0)
    depths = shape.pop("depths", queries if drafts else 1)
    gen = _generator(requests * page_size + queries)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache_dtype, width = FP8 if fp8 else dtype, -(-150 // page_size)
    pages = 2 * requests * width
    q = torch.randn(requests * queries, heads, dim, generator=gen).to(device, dtype)
    k_cache, v_cache = (
        torch.randn(pages * page_size, kv_heads, n, generator=gen).to(device).to(cache_dtype) for n in (dim, v_dim)
    )
    table = torch.randperm(pages, generator=gen)[: requests * width].view(requests, width).to(device, torch.int32)
    shortest = queries if shape["causal"] else 0
    lens = torch.randint(shortest, 140, (requests * depths,), generator=gen).to(device, torch.int32)
    lens[0] = shortest
    named: dict[str, Any] = shape | dict(
        softmax_scale=dim**-0.5, page_table=table, cache_seqlens=lens, page_size=page_size
    )
    if shape["causal"]:
        order = torch.randperm(requests, generator=gen)
        named |= dict(page_table=table[order.argsort().to(device)], row_index=order.to(device, torch.int32))
    if drafts:
        slots = torch.randint(0, pages * page_size, (requests, drafts), generator=gen).to(device, torch.int32)
        mask = torch.rand(requests, queries, drafts, generator=gen) < 0.5
        named |= dict(slots=slots, mask=mask.to(device))
    if extras:
        named |= dict(softcap=3.0, sinks=torch.randn(heads, generator=gen).to(device))
    if fp8:
        named |= dict(k_scale=scales(device, kv_heads, 1), v_scale=scales(device, 1, 2))
    return (q, k_cache, v_cache), named


@pytest.mark.parametrize(("page_size", "requests"), [(1, 3), (16, 5), (48, 2)])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "softcap-sinks"])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache", "fp8-cache"])
@pytest.mark.parametrize("form", WINDOWS)
def test_keys_of_a_page_table_equal_the_definition(device, form, fp8, extras, page_size, requests):
    sizes = dict(heads=6, kv_heads=2, dim=80, v_dim=48) if page_size == 16 else {}
    arguments, named = window_problem(device, form, page_size, requests, fp8, extras=extras, **sizes)
    ours, definition = short_key_attention(*arguments, **named), short_key_attention_torch(*arguments, **named)
    loose = 0.04 if device == "cuda" else 1e-5
    torch.testing.assert_close(ours.float(), definition.float(), atol=loose, rtol=loose / 2)
    error, size = (ours.float() - definition.float()).norm(), definition.float().norm()
    assert error <= loose / 6 * size


@pytest.mark.parametrize("form", WINDOWS)
def test_a_cached_key_outside_a_query_s_window_changes_no_bit_of_it(device, form):
    """Each cached value in turn is NaN in one request: the queries that see it are NaN, and no other changes."""
    (q, k_cache, v_cache), named = window_problem(device, form, 1, 3)
    right = short_key_attention(q, k_cache, v_cache, **named)
    sees = reads(named)
    for key in (0, 1, 60, 90, 139):
        slot = int(named["page_table"][named.get("row_index", torch.arange(3))[1], key])
        poisoned = v_cache.clone()
        poisoned[slot] = math.nan
        out = short_key_attention(q, k_cache, poisoned, **named)
        expected = (sees == slot).any(dim=-1).flatten()
        assert torch.equal(out.isnan().flatten(1).any(dim=1).cpu(), expected)
        assert torch.equal(out[~expected.to(device)], right[~expected.to(device)])


def reads(named: dict[str, Any]) -> Tensor:
    """int [requests, queries, keys]: the slots that each query reads, counted out one by one; -1 elsewhere."""
    table, lens, queries = named["page_table"].cpu(), named["cache_seqlens"].cpu(), named["queries"]
    requests = len(named["slots"]) if "slots" in named else len(lens)
    out = torch.full((requests, queries, 200), -1)
    for request in range(requests):
        row = table[named["row_index"][request]] if "row_index" in named else table[request]
        for query in range(queries):
            if named["causal"]:
                end = int(lens[request]) - queries + query + 1
            else:
                end = int(lens.view(requests, -1)[request, query * len(lens) // requests // queries])
            first = max(0, end - named["window_left"] - 1) if named.get("window_left", -1) >= 0 else 0
            seen = row[first:end].tolist()
            if "slots" in named:
                drafts = zip(named["slots"][request].tolist(), named["mask"][request, query].tolist(), strict=True)
                seen += [slot for slot, visible in drafts if visible]
            out[request, query, : len(seen)] = torch.tensor(seen)
    return out


# ---- NaN, and index tensors that are views ------------------------------------------------------------------------


def test_a_nan_key_stays_nan_in_an_fp8_cache(device):
    if device == "cpu":
        pytest.skip("Triton's interpreter casts NaN to a finite e4m3 value")
    k, v = (torch.ones(3, 2, 64, device=device, dtype=torch.bfloat16) for _ in "kv")
    k[1, 0, 5], v[2, 1, 63] = torch.nan, torch.nan
    k_cache, v_cache = (torch.zeros(8, 2, 64, device=device, dtype=FP8) for _ in "kv")
    loc = torch.tensor([5, 2, 7], device=device)
    store_kv(k, v, k_cache, v_cache, loc, k_scale=scales(device, 1, 4), v_scale=scales(device, 1, 5))
    assert torch.equal(k_cache[loc].float().isnan(), k.isnan())
    assert torch.equal(v_cache[loc].float().isnan(), v.isnan())


@pytest.mark.parametrize("slots", [2, 4])
def test_store_kv_refuses_slots_for_another_number_of_tokens(slots):
    k, cache = torch.ones(3, 1, 16), torch.zeros(8, 1, 16)
    with pytest.raises(BadBatch, match=rf"\({slots},\) slots for 3 new tokens"):
        store_kv(k, k, cache, cache, torch.arange(slots))
    assert not cache.any()


def test_a_nan_query_stays_nan_in_fp8_and_its_neighbours_keep_their_scale(device):
    cu = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
    q = values(device, (7, 4, 64), 11).bfloat16()
    q[1, 0, 3], clean = torch.nan, q.clone()
    clean[1, 0, 3] = 0
    for quantize in (quantize_q, quantize_q_torch):
        ours, descale = quantize(q, cu, 2)
        expected, expected_descale = quantize(clean, cu, 2)
        assert torch.equal(descale, expected_descale)
        assert torch.equal(ours.float()[~q.isnan()], expected.float()[~q.isnan()])
        if device == "cuda" or quantize is quantize_q_torch:  # the interpreter casts NaN to a finite e4m3 value
            assert ours.float()[q.isnan()].isnan().all()


def every_other(x):
    """The same values as every other one of a buffer that holds wrong ones between them."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


@pytest.mark.parametrize("page_size", [1, 4])
def test_index_tensors_may_be_strided_views(device, page_size):
    requests, positions, chunk = 5, 40, 8
    slots, mapping = _ints(400, (requests + 2, positions), 1).to(device), _ints(400, (400,), 2).to(device)
    rows = torch.randperm(requests + 2, generator=_generator(3))[:requests].to(device, torch.int32)
    lens = torch.tensor([1, 7, 8, 39, 40], device=device, dtype=torch.int32)
    args = (page_size, 3, -1, chunk)
    expected = gather_pages_torch(slots, rows, lens, *args, mapping)
    strided = gather_pages(slots, every_other(rows), every_other(lens), *args, every_other(mapping))
    assert all(torch.equal(ours, definition) for ours, definition in zip(strided, expected, strict=True))

    cu = torch.tensor([0, 1, 4, 12, 20, 21], device=device, dtype=torch.int32)
    count = virtual_batch_count(cu.diff().tolist(), lens.tolist(), chunk)
    expected = virtual_batches_torch(cu, lens, slots, rows, count, chunk, 1)
    strided = virtual_batches(every_other(cu), every_other(lens), slots, every_other(rows), count, chunk, 1)
    assert all(torch.equal(ours, definition) for ours, definition in zip(strided, expected, strict=True))

    q = values(device, (21, 2, 64), 4).bfloat16()
    for ours, definition in zip(quantize_q(q, every_other(cu), 1), quantize_q(q, cu, 1), strict=True):
        assert_same_bits(ours, definition)

    k, v = (values(device, (4, 2, 64), seed).bfloat16() for seed in (5, 6))
    loc, scale = torch.tensor([3, 90, 7, 20], device=device), torch.tensor([2.0, 0.5], device=device)
    caches = [torch.zeros(400, 2, 64, device=device, dtype=FP8) for _ in range(4)]
    store_kv(k, v, *caches[:2], loc, mapping=mapping, k_scale=scale, v_scale=scale)
    store_kv(k, v, *caches[2:], every_other(loc), mapping=every_other(mapping), k_scale=every_other(scale),
             v_scale=every_other(scale))  # fmt: skip
    assert_same_bits(caches[0], caches[2])
    assert_same_bits(caches[1], caches[3])


def test_tables_whose_rows_are_strided_are_refused(device):
    table, one = every_other(_ints(9, (3, 8), 1).to(device)), torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(BadBatch, match="req_to_token has stride 2"):
        gather_pages(table, one, one, 1, 8, -1, 0, None)
    with pytest.raises(BadBatch, match="page table has stride 2"):
        virtual_batches(torch.cat([one - 1, one]), one, table, None, 1, 4, 1)
