"""The CPU provider against a literal loop over rows, keys and heads in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fa_fast.kernels import _cpu_keys, torch_cpu
from fa_ref.api.errors import UnsupportedByProvider

INF = math.inf
FP8 = torch.float8_e4m3fn


def row_attention(*, query, keys, values, pos, total, scale, causal, window, chunk, softcap, sink, value_query=None):
    """One query head over the keys of its request, one key at a time. Returns (out, lse) in fp64."""
    scores, seen = [], []
    for j in range(total):
        if causal and j > pos:
            continue
        if window[0] >= 0 and j < pos - window[0]:
            continue
        if window[1] >= 0 and not causal and j > pos + window[1]:
            continue
        if chunk and math.floor(j / chunk) != math.floor(pos / chunk):
            continue
        x = float(query @ keys[j])
        if value_query is not None:
            x += float(value_query @ values[j])
        x *= scale
        scores.append(softcap * math.tanh(x / softcap) if softcap else x)
        seen.append(j)
    out = torch.zeros(values.shape[1], dtype=torch.float64)
    if sink is not None:
        scores.append(sink)
    if not scores:
        return out, -INF
    top = max(scores)
    denominator = sum(math.exp(x - top) for x in scores)
    for x, j in zip(scores, seen, strict=False):
        out += math.exp(x - top) / denominator * values[j]
    return out, top + math.log(denominator)


class Case:
    """Ragged requests with their keys in logical order, and the same keys in permuted pages.

    The pool is three times too large. Every slot no request owns holds NaN, and so do padding rows of q.
    """

    def __init__(
        self,
        query_lens,
        key_lens,
        *,
        page=4,
        heads=4,
        kv_heads=2,
        dim=16,
        v_dim=None,
        qv=False,
        dtype=torch.float32,
        kv_dtype=None,
        descale=False,
        padding=3,
        seed=0,
        shared_latent=False,
    ):
        gen = torch.Generator().manual_seed(seed)
        v_dim = v_dim or dim
        kv_dtype = kv_dtype or dtype
        self.query_lens, self.key_lens, self.page, self.v_dim = query_lens, key_lens, page, v_dim
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        tokens = sum(query_lens)

        def random(*shape):
            return torch.randn(*shape, generator=gen)

        def padded(width):
            rows = torch.full((tokens + padding, heads, width), math.nan)
            rows[:tokens] = random(tokens, heads, width)
            return rows.to(dtype)

        self.q = padded(dim)
        self.qv = padded(v_dim) if qv else None
        self.keys = [random(n, kv_heads, dim).to(kv_dtype) for n in key_lens]
        self.values = [random(n, kv_heads, v_dim).to(kv_dtype) for n in key_lens]

        width = max(max((-(-n // page) for n in key_lens), default=0), 1) + 1
        needed = sum(-(-n // page) for n in key_lens)
        pages = 3 * needed + 2
        order = torch.randperm(pages, generator=gen).tolist()
        rows = torch.randperm(len(key_lens) + 2, generator=gen)[: len(key_lens)]
        table = torch.full((len(key_lens) + 2, width + 5), -777, dtype=torch.int32)  # never read past a length
        if shared_latent:
            joint = torch.full((pages, page, kv_heads, v_dim + dim), math.nan).to(kv_dtype)
            self.v_cache, self.k_cache = joint[..., :v_dim], joint[..., v_dim:]
        else:
            self.k_cache = torch.full((pages, page, kv_heads, dim), math.nan).to(kv_dtype)
            self.v_cache = torch.full((pages, page, kv_heads, v_dim), math.nan).to(kv_dtype)
        for row, k, v in zip(rows.tolist(), self.keys, self.values, strict=True):
            for j in range(len(k)):
                if j % page == 0:
                    table[row, j // page] = order.pop()
                at = int(table[row, j // page])
                self.k_cache[at, j % page] = k[j]
                self.v_cache[at, j % page] = v[j]
        self.page_table, self.row_index = table[:, :width], rows.int()
        self.descales = {}
        if descale:
            names = ["k_descale", "v_descale"] + (["q_descale"] if dtype == FP8 else [])
            for name in names:
                self.descales[name] = 0.5 + torch.rand(len(key_lens), kv_heads, generator=gen)

    def starts(self, lens):
        return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)

    def paged(self, **kwargs) -> Any:
        return torch_cpu.flash_attn_with_kvcache(
            q=self.q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            qv=self.qv,
            cache_seqlens=torch.tensor(self.key_lens, dtype=torch.int32),
            cache_batch_idx=self.row_index,
            page_table=self.page_table,
            cu_seqlens_q=self.starts(self.query_lens),
            max_seqlen_q=max(self.query_lens),
            return_softmax_lse=True,
            **self.descales,
            **kwargs,
        )

    def varlen(self, **kwargs) -> Any:
        return torch_cpu.flash_attn_varlen_func(
            q=self.q,
            k=torch.cat(self.keys),
            v=torch.cat(self.values),
            qv=self.qv,
            cu_seqlens_q=self.starts(self.query_lens),
            cu_seqlens_k=self.starts(self.key_lens),
            max_seqlen_q=max(self.query_lens),
            max_seqlen_k=max(self.key_lens),
            return_softmax_lse=True,
            **self.descales,
            **kwargs,
        )

    def expected(
        self,
        *,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        sinks=None,
        softmax_scale=None,
        num_splits=0,
    ):
        width = self.dim + (self.v_dim if self.qv is not None else 0)
        scale = width**-0.5 if softmax_scale is None else softmax_scale
        out = torch.zeros(*self.q.shape[:2], self.v_dim, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -INF, dtype=torch.float64)
        token = 0

        def scale_of(name, r, head):
            return float(self.descales[name][r, head]) if name in self.descales else 1.0

        for r, (queries, total) in enumerate(zip(self.query_lens, self.key_lens, strict=True)):
            for i in range(queries):
                for head in range(self.heads):
                    kv = head * self.kv_heads // self.heads
                    q_scale = scale_of("q_descale", r, kv)
                    out[token, head], lse[token, head] = row_attention(
                        query=self.q[token, head].double() * q_scale,
                        keys=self.keys[r][:, kv].double() * scale_of("k_descale", r, kv),
                        values=self.values[r][:, kv].double() * scale_of("v_descale", r, kv),
                        value_query=None if self.qv is None else self.qv[token, head].double() * q_scale,
                        pos=i + total - queries,
                        total=total,
                        scale=scale,
                        causal=causal,
                        window=window_size,
                        chunk=attention_chunk,
                        softcap=softcap,
                        sink=None if sinks is None else float(sinks[head]),
                    )
                token += 1
        return out, lse


TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    FP8: 3e-2,
}


def assert_agrees(got, expected, dtype=torch.float32):
    (out, lse), (want_out, want_lse) = got, expected
    assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), want_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=max(tolerance, 1e-6), rtol=max(tolerance, 1e-6))


def check(case: Case, **kwargs):
    expected = case.expected(**kwargs)
    assert_agrees(case.paged(**kwargs), expected, case.dtype)
    if any(case.key_lens):
        assert_agrees(case.varlen(**kwargs), expected, case.dtype)


RAGGED = (
    [1, 0, 5, 2, 9, 1, 3],
    [17, 4, 5, 0, 7, 1, 33],
)  # decode, idle, prefill, no keys, more queries than keys
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "sliding": {"causal": True, "window_size": (3, 0)},
    "sliding of 1": {"causal": True, "window_size": (0, 0)},
    "two-sided": {"window_size": (4, 2)},
    "only left": {"window_size": (2, -1)},
    "only right": {"window_size": (-1, 1)},
    "causal ignores right": {"causal": True, "window_size": (-1, 5)},
    "chunk": {"causal": True, "attention_chunk": 4},
    "chunk, non-causal": {"attention_chunk": 6},
    "chunk and window": {"causal": True, "attention_chunk": 8, "window_size": (2, 0)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_every_mask_equals_the_loop(mask, softcap):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    check(Case(*RAGGED), softcap=softcap, **MASKS[mask])
    check(Case(*RAGGED, seed=1), softcap=softcap, sinks=sinks, **MASKS[mask])


@pytest.mark.parametrize("page", [1, 3, 16, 64, 128])
def test_lengths_around_a_page_equal_the_loop(page):
    key_lens = sorted({0, 1, page - 1, page, page + 1, 2 * page + 1})
    check(Case([1] * len(key_lens), key_lens, page=page), causal=True)
    check(Case([2] * len(key_lens), key_lens, page=page, seed=3), causal=True)


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (24, 2), (8, 1), (3, 3)])
def test_grouped_heads_share_their_keys(heads, kv_heads):
    check(Case([1, 4, 1], [9, 6, 2], heads=heads, kv_heads=kv_heads), causal=True)


@pytest.mark.parametrize("dim, v_dim", [(24, 16), (16, 32)])
def test_value_head_dim_may_differ(dim, v_dim):
    check(Case(*RAGGED, dim=dim, v_dim=v_dim), causal=True)
    check(Case(*RAGGED, dim=dim, v_dim=v_dim), causal=True, softcap=2.0)


@pytest.mark.parametrize("shared_latent", [True, False])
@pytest.mark.parametrize("page", [1, 4])
def test_absorbed_mla_scores_add_qv_times_values(shared_latent, page):
    case = Case(*RAGGED, kv_heads=1, dim=8, v_dim=32, qv=True, page=page, shared_latent=shared_latent)
    check(case, causal=True)
    check(case, causal=True, softmax_scale=0.3, softcap=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_agree_within_their_rounding(dtype):
    check(Case(*RAGGED, dtype=dtype), causal=True)
    check(Case(*RAGGED, dtype=dtype), causal=True, sinks=torch.zeros(4, dtype=torch.bfloat16))
    assert Case(*RAGGED, dtype=dtype).paged()[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
@pytest.mark.parametrize("qv", [False, True])
def test_fp8_caches_are_scaled_per_sequence_and_head(dtype, qv):
    case = Case(*RAGGED, dtype=dtype, kv_dtype=FP8, descale=True, qv=qv)
    check(case, causal=True)
    assert case.paged()[0].dtype == (torch.bfloat16 if dtype == FP8 else dtype)
    case.descales = {name: torch.full((1, 1), 0.75).expand(len(case.key_lens), 2) for name in case.descales}
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_256_e4m3_values_are_decoded_exactly(dtype):
    from fa_fast.kernels._cpu_attend import _decoded

    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    torch.testing.assert_close(_decoded(every, dtype), every.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"causal": True, "window_size": (700, 0)}])
def test_long_rows_are_merged_over_blocks(kwargs, softcap):
    check(Case([1, 3, 20], [1100, 1030, 530], page=16, heads=2, kv_heads=1, dim=8), softcap=softcap, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"causal": True},
        {"causal": True, "window_size": (100, 0)},
        {"causal": True, "attention_chunk": 96},
        {},
    ],
)
def test_prefill_tiles_meet_without_a_seam(kwargs):
    check(Case([300, 150], [340, 150], page=16, heads=2, kv_heads=1, dim=8), **kwargs)


def test_small_blocks_and_tiles_change_nothing(monkeypatch):
    """The same code with every limit tiny: many parts, folded merges, many tiles."""
    from fa_fast.kernels import _cpu_attend

    limits = {
        "DECODE_BLOCK": 4,
        "PREFILL_BLOCK": 8,
        "PACKED_QUERIES": 2,
        "FEW_ROWS": 4,
        "WINDOW_TILE": 3,
        "SOFTCAP_TILE": 2,
    }
    for name, value in (
        limits | {"CAUSAL_TILE": 4, "MAX_PARTS": 2, "SHORT": 3, "SHORT_BUDGET": 6, "LONG_GROUP": 2}
    ).items():
        monkeypatch.setattr(_cpu_attend, name, value)
    for kwargs in MASKS.values():
        check(Case(*RAGGED), **kwargs)
        check(Case(*RAGGED, page=1), softcap=3.0, sinks=torch.ones(4), **kwargs)


@pytest.mark.parametrize("options", [{}, {"sinks": torch.ones(4)}, {"causal": True, "window_size": (599, 0)}])
@pytest.mark.parametrize("given", [{}, {"kv_dtype": FP8, "descale": True}, {"page": 1}, {"page": 512}])
def test_long_decodes_share_their_blocks_and_leave_one_by_one(options, given):
    """Two end together, one is short, one sees its last 600 keys where there is a window, one has more queries."""
    check(Case([1, 1, 1, 2, 1, 1], [530, 1100, 700, 600, 40, 700], **given), **options)


def test_long_decodes_are_attended_together(monkeypatch):
    from fa_fast.kernels import _cpu_attend

    batches = []

    def fused(q, *rest, inner=_cpu_attend._fused):
        batches.append((len(q), rest[0].shape[2]))
        return inner(q, *rest)

    monkeypatch.setattr(_cpu_attend, "_fused", fused)
    case = Case([1, 1, 1], [1100, 700, 700])
    case.paged()
    assert batches == [(3, 682), (3, 18), (1, 400)]
    batches.clear()
    case.paged(num_splits=1)
    assert {batch for batch, _ in batches} == {1}


def test_scratch_outlives_a_call_up_to_its_limit(monkeypatch):
    """One made in inference mode serves calls outside of it, and other dtypes; a larger one goes with its call."""
    case = Case([1, 20], [700, 40])
    _cpu_keys._kept.__dict__.clear()
    with torch.inference_mode():
        case.paged()
    kept = _cpu_keys._kept.first
    check(case)
    check(Case([1, 20], [300, 40], dtype=torch.bfloat16))
    assert _cpu_keys._kept.first is kept
    monkeypatch.setattr(_cpu_keys, "KEPT_BYTES", len(kept))
    check(Case([1, 20], [1500, 40], dim=32))
    assert _cpu_keys._kept.first is kept


@pytest.mark.parametrize("limit, apart", [(2 * 20 * 48, True), (2 * 20 * 48 + 1, False)])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": FP8, "descale": True}, {"qv": True}])
def test_many_rows_times_keys_get_their_keys_head_by_head(monkeypatch, limit, apart, options):
    """20 queries of a group of 2 see 48 keys; joint keys are copied once."""
    from fa_fast.kernels import _cpu_attend

    seen = []

    def fused(q, k, v, *rest, inner=_cpu_attend._fused):
        seen.append(k.is_contiguous() and v.is_contiguous() and (k is v) == bool(options.get("qv")))
        return inner(q, k, v, *rest)

    monkeypatch.setattr(_cpu_attend, "_fused", fused)
    monkeypatch.setattr(_cpu_attend, "HEADS_APART", limit)
    for packed in (1, 64):
        monkeypatch.setattr(_cpu_attend, "PACKED_QUERIES", packed)
        case = Case([20], [48], **options)
        torch.testing.assert_close(case.paged()[0], case.varlen()[0], rtol=1e-5, atol=1e-5)
        check(case)
    assert seen == [apart] * len(seen) and seen


def test_short_decodes_of_mixed_lengths_share_a_call_and_stay_apart():
    case = Case([1] * 12, [1, 2, 3, 5, 8, 8, 8, 13, 21, 30, 31, 0], page=4)
    check(case, causal=True)
    check(case, causal=True, window_size=(5, 0), sinks=torch.ones(4))


@pytest.mark.parametrize("page", [1, 16])
def test_num_splits_1_gives_the_same_bits_in_any_batch(page):
    case = Case([1, 1, 40, 3, 1], [200, 37, 90, 600, 36], page=page, dtype=torch.bfloat16, dim=64)
    starts = case.starts(case.query_lens).tolist()
    kwargs = {"causal": True, "num_splits": 1}
    whole_out, whole_lse = case.paged(**kwargs)
    for r in range(5):
        alone_out, alone_lse = torch_cpu.flash_attn_with_kvcache(
            q=case.q[starts[r] : starts[r + 1]].clone(),
            k_cache=case.k_cache,
            v_cache=case.v_cache,
            cache_seqlens=torch.tensor(case.key_lens[r : r + 1], dtype=torch.int32),
            cache_batch_idx=case.row_index[r : r + 1],
            page_table=case.page_table,
            cu_seqlens_q=torch.tensor([0, case.query_lens[r]], dtype=torch.int32),
            return_softmax_lse=True,
            **kwargs,
        )
        assert torch.equal(alone_out, whole_out[starts[r] : starts[r + 1]])
        assert torch.equal(alone_lse, whole_lse[starts[r] : starts[r + 1]])


@pytest.mark.parametrize("page", [1, 16, 256])
def test_consecutive_pages_are_read_in_place_with_the_same_result(page):
    keys = 520
    k = torch.randn(-(-keys // page) + 2, page, 2, 16)
    v = torch.randn_like(k)
    pages = -(-keys // page)
    table = torch.arange(1, 1 + pages, dtype=torch.int32)[None]
    order = torch.randperm(len(k))
    moved = torch.argsort(order).int()[table.long()]
    call = {"q": torch.randn(1, 1, 4, 16), "cache_seqlens": keys}
    in_place = torch_cpu.flash_attn_with_kvcache(k_cache=k, v_cache=v, page_table=table, **call)
    gathered = torch_cpu.flash_attn_with_kvcache(k_cache=k[order], v_cache=v[order], page_table=moved, **call)
    assert torch.equal(in_place, gathered)


def test_unpaged_batched_cache_equals_the_loop():
    case = Case([2, 2], [5, 3])
    k, v = torch.full((4, 6, 2, 16), math.nan), torch.full((4, 6, 2, 16), math.nan)
    for row, keys, values in zip((3, 1), case.keys, case.values, strict=True):
        k[row, : len(keys)], v[row, : len(keys)] = keys, values
    out, lse = torch_cpu.flash_attn_with_kvcache(
        q=case.q[:4].view(2, 2, 4, 16),
        k_cache=k,
        v_cache=v,
        cache_seqlens=torch.tensor([5, 3], dtype=torch.int32),
        cache_batch_idx=torch.tensor([3, 1], dtype=torch.int32),
        causal=True,
        return_softmax_lse=True,
    )
    want_out, want_lse = case.expected(causal=True)
    assert out.shape == (2, 2, 4, 16) and lse.shape == (2, 2, 4)
    assert_agrees((out.flatten(0, 1), lse.flatten(0, 1)), (want_out[:4], want_lse[:4]))


def test_an_int_length_and_no_length_mean_every_row_alike():
    k, v, q = torch.randn(2, 6, 2, 16), torch.randn(2, 6, 2, 16), torch.randn(2, 1, 4, 16)
    call = {"q": q, "k_cache": k, "v_cache": v}
    whole = torch_cpu.flash_attn_with_kvcache(**call)
    assert torch.equal(whole, torch_cpu.flash_attn_with_kvcache(**call, cache_seqlens=6))
    assert not torch.equal(whole, torch_cpu.flash_attn_with_kvcache(**call, cache_seqlens=5))


def test_page_tables_may_be_strided_views_and_caches_strided_slices():
    case = Case(*RAGGED, page=1)
    wide = torch.stack([case.page_table, case.page_table], -1)
    case.page_table = wide[..., 0]
    both = torch.cat([case.k_cache, case.v_cache], -1)
    case.k_cache, case.v_cache = both[..., :16], both[..., 16:]
    expected = case.expected(causal=True)
    assert_agrees(case.paged(causal=True), expected)
    every_other = torch.full((2 * len(both), 1, 2, 32), math.nan)
    every_other[::2] = both
    case.k_cache, case.v_cache = every_other[::2][..., :16], every_other[::2][..., 16:]
    assert_agrees(case.paged(causal=True), expected)


def test_rows_without_keys_give_zero_and_padding_stays_untouched():
    case = Case([3, 2], [1, 0])
    out, lse = case.paged(causal=True)
    assert torch.equal(lse.isneginf().all(-1), torch.tensor([True, True, False, True, True, True, True, True]))
    assert torch.equal(out.eq(0).flatten(1).all(-1), lse.isneginf().all(-1))
    sinks = torch.tensor([0.25, -2.0, 3.0, 1.0])
    out, lse = case.paged(causal=True, sinks=sinks)
    assert torch.equal(lse[3:5], sinks.expand(2, 4)) and lse[5:].isneginf().all()
    assert out[3:].eq(0).all()


def test_out_is_written_in_place():
    case = Case(*RAGGED)
    buffer = torch.full((case.q.shape[0], 4, 16), math.nan)
    out, _ = case.paged(out=buffer)
    assert out.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, case.paged()[0])


def test_an_empty_batch_gives_empty_outputs():
    out = torch_cpu.flash_attn_with_kvcache(
        q=torch.empty(0, 4, 16),
        k_cache=torch.zeros(1, 4, 2, 16),
        v_cache=torch.zeros(1, 4, 2, 16),
        cache_seqlens=torch.empty(0, dtype=torch.int32),
        page_table=torch.empty(0, 3, dtype=torch.int32),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
    )
    assert out.shape == (0, 4, 16)


# merge_state


def test_merge_of_two_halves_is_attention_over_the_whole():
    whole = Case([2], [9], padding=0)
    k, v = whole.keys[0], whole.values[0]
    parts = []
    for cut in (slice(0, 4), slice(4, 9)):
        parts += torch_cpu.flash_attn_varlen_func(
            q=whole.q,
            k=k[cut],
            v=v[cut],
            cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, len(k[cut])], dtype=torch.int32),
            return_softmax_lse=True,
        )
    assert_agrees(torch_cpu.merge_state(*parts), whole.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_empty_state_is_the_identity_of_merge_bit_for_bit(dtype):
    out, lse = torch.randn(3, 2, 4).to(dtype), torch.randn(3, 2) * 50
    out[0, 0, 0] = -0.0
    nothing, never = torch.full_like(out, math.nan), torch.full_like(lse, -INF)
    for merged_out, merged_lse in (
        torch_cpu.merge_state(out, lse, nothing, never),
        torch_cpu.merge_state(nothing, never, out, lse),
    ):
        assert torch.equal(merged_out.view(torch.uint8), out.view(torch.uint8))
        assert torch.equal(merged_lse, lse)
    merged_out, merged_lse = torch_cpu.merge_state(nothing, never, nothing, never)
    assert merged_out.eq(0).all() and merged_lse.isneginf().all()


def test_merge_may_write_over_an_input():
    a, b, lse = torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.zeros(2, 1)
    expected = (a + b) / 2
    out, merged_lse = torch_cpu.merge_state(a, lse, b, lse, out=a)
    assert out is a
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(merged_lse, torch.full((2, 1), math.log(2)))


# Errors


def test_a_tile_schedule_is_refused():
    with pytest.raises(UnsupportedByProvider, match="scheduler_metadata"):
        Case([1], [3]).paged(scheduler_metadata=torch.zeros(1))


def test_this_provider_says_what_it_is():
    assert torch_cpu.get_scheduler_metadata is None
    torch_cpu.CAPABILITY.require(
        dtype=torch.bfloat16,
        kv_dtype=FP8,
        head_dim=576,
        v_head_dim=512,
        page_size=7,
        softcap=True,
        sinks=True,
        lse=True,
        qv=True,
        window=True,
        attention_chunk=True,
    )
