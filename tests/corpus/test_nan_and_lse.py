"""Reports about NaN, empty rows, and the log-sum-exp."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fa_ref import ForwardMode, LayerKind, MHAKVPool
from fa_ref.attention import AttentionState, merge
from fa_ref.cases import make_case
from tests.support import (
    PACKAGES,
    PAGE_SIZES,
    agrees,
    both_packages,
    by_hand,
    case_on,
    every_page_size,
    every_route,
    run,
    with_batch,
)

KINDS = pytest.mark.parametrize("kind", [LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL], ids=lambda k: k.value)
MODES = pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda m: m.name.lower())


def int32(values, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def cache(device: str, pages: int = 16, page_size: int = 16, kv_heads: int = 2, dim: int = 64):
    """Random keys and values of a small paged cache, in a dtype that the device's kernels read."""
    gen = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    k, v = (torch.randn(pages, page_size, kv_heads, dim, generator=gen).to(device, dtype) for _ in "kv")
    return k, v, gen, dtype


@KINDS
@every_page_size
@pytest.mark.parametrize("host_lengths", [True, False])
@MODES
def test_nan_in_pages_of_nobody_poisons_no_row(mode, host_lengths, page_size, kind, device):
    """Dao #1745, #2374: NaN in unused V slots poisons rows, since a kernel multiplies masked values by zero.

    No table of ours leads a kernel into a page that the request does not own.
    """
    case = case_on(
        device, mode, prefix_lens=(3, 0, 40), page_size=page_size, kind=kind, window=5, chunk=2 * page_size,
        host_lengths=host_lengths,
    )  # fmt: skip
    keys, values = case.config.token_to_kv_pool.get_kv_buffer(case.layer.layer_id)
    assert keys.isnan().any()
    assert values.isnan().any()
    assert agrees(case)


@pytest.mark.parametrize("route", ["masks", "passes"])
@KINDS
@pytest.mark.parametrize("page_size", [3, 16, 64, 128])
@MODES
def test_the_reference_is_clean_next_to_nan_in_the_same_page(mode, page_size, kind, route):
    """Dao #1745, #2374: NaN in unused V slots poisons rows. Slots behind a request's last token, in its own page.

    Production kernels read whole pages, so fa_fast relies on pools that are finite at allocation.
    """
    case = make_case(mode, prefix_lens=(3, 0, 40), page_size=page_size, kind=kind, window=5, chunk=2 * page_size)
    batch, rows = case.batch, case.config.req_to_token_pool.req_to_token
    keys, values = case.config.token_to_kv_pool.get_kv_buffer(case.layer.layer_id)
    spoiled = 0
    for row, total in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
        last = int(rows[row, total - 1])
        tail = slice(last + 1, (last // page_size + 1) * page_size)
        keys[tail], values[tail] = torch.nan, torch.nan
        spoiled += tail.stop - tail.start
    assert spoiled
    assert case.judge(run(case, route)).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pools_are_finite_at_allocation_and_say_so(page_size, dtype):
    """Dao #1745, #2374: what fa_fast relies on where kernels read a whole page."""
    pool = MHAKVPool(size=5, page_size=page_size, dtype=dtype, head_num=1, head_dim=8, layer_num=2)
    for layer_id in range(2):
        for buffer in pool.get_kv_buffer(layer_id):
            assert buffer.shape[0] % page_size == 0
            assert buffer.float().isfinite().all()
    assert "finite" in MHAKVPool.__doc__


@both_packages
def test_query_rows_past_cu_seqlens_q_do_not_reach_valid_rows(package, device):
    """sglang #18659, PR #27343: NaN in valid rows when q has more rows than cu_seqlens_q[-1]."""
    k, v, gen, dtype = cache(device)
    q = torch.randn(6, 4, 64, generator=gen).to(device, dtype)
    table, lens, cu = int32([[3, 1], [5, 2]], device), int32([20, 9], device), int32([0, 3, 4], device)
    arguments = dict(k_cache=k, v_cache=v, page_table=table, cache_seqlens=lens, cu_seqlens_q=cu, max_seqlen_q=3,
                     causal=True, return_softmax_lse=True)  # fmt: skip
    clean, clean_lse = package.flash_attn_with_kvcache(q=q[:4], **arguments)
    q[4:] = torch.nan
    out, lse = package.flash_attn_with_kvcache(q=q, **arguments)
    assert torch.equal(out[:4], clean)
    assert torch.equal(lse[:4], clean_lse)


@both_packages
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_rows_without_a_key_are_zero_and_minus_infinity(package, sinks, device):
    """Dao PR #978, vllm PR #15492: rows that see no key came back as NaN or as an average of garbage.

    A sequence without keys, and the first rows of a sequence with more queries than keys. A sink is then all there
    is: out 0, lse the sink.
    """
    k, v, gen, dtype = cache(device)
    q = torch.randn(7, 4, 64, generator=gen).to(device, dtype)
    values = torch.tensor([-1.0, 0.0, 0.5, 2.0], device=device).to(dtype)
    out, lse = package.flash_attn_with_kvcache(
        q=q, k_cache=k, v_cache=v, page_table=int32([[3, 1], [5, 2]], device), cache_seqlens=int32([0, 2], device),
        cu_seqlens_q=int32([0, 2, 7], device), max_seqlen_q=5, causal=True, return_softmax_lse=True,
        sinks=values if sinks else None,
    )  # fmt: skip
    empty = slice(0, 5)  # two of a sequence of no keys; three whose positions lie before the two keys
    assert not out[empty].any()
    expected = values.float().expand(5, 4) if sinks else torch.full((5, 4), -torch.inf, device=device)
    assert torch.allclose(lse[empty], expected, atol=1e-4)
    assert out[5:].isfinite().all()
    assert lse[5:].isfinite().all()
    assert out[5:].any()


@both_packages
def test_ragged_rows_without_a_key_are_zero_and_minus_infinity(package, device):
    """Dao PR #978, vllm PR #15492: the same for keys that lie one sequence after another."""
    _, _, gen, dtype = cache(device)
    q, k, v = (torch.randn(n, 2, 64, generator=gen).to(device, dtype) for n in (4, 3, 3))
    out, lse = package.flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=int32([0, 1, 4], device), cu_seqlens_k=int32([0, 0, 3], device), max_seqlen_q=3,
        max_seqlen_k=3, return_softmax_lse=True,
    )  # fmt: skip
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    assert out[1:].isfinite().all()


@both_packages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_empty_states(package, dtype, device):
    """vllm #27491, flashinfer #4051: merge(-inf, -inf) was NaN. It is (0, -inf); an empty side changes no bit."""
    gen = torch.Generator().manual_seed(2)
    out = torch.randn(5, 4, 64, generator=gen).to(device, dtype)
    lse = torch.randn(5, 4, generator=gen).to(device)
    out[0, 0, 0] = -0.0
    for held in (0.0, torch.nan, torch.inf):  # whatever an empty side holds
        empty, nothing = torch.full_like(out, held), torch.full_like(lse, -torch.inf)
        both_out, both_lse = package.merge_state(empty, nothing, empty, nothing)
        assert (both_out == 0).all()
        assert (both_lse == -torch.inf).all()
        for merged in (package.merge_state(out, lse, empty, nothing), package.merge_state(empty, nothing, out, lse)):
            assert torch.equal(merged[0].view(torch.uint8), out.view(torch.uint8))
            assert torch.equal(merged[1], lse)
        some, some_lse = out.clone(), lse.clone()
        some[:, 1], some_lse[:, 1] = held, -torch.inf  # an empty head beside full ones
        mixed_out, mixed_lse = package.merge_state(some, some_lse, empty, nothing)
        some[:, 1] = 0
        assert torch.equal(mixed_out, some)
        assert torch.equal(mixed_lse, some_lse)


@both_packages
def test_the_lse_of_every_kernel_is_natural(package, device):
    """sglang #40903, flashinfer #4485: a base-2 LSE fed to a natural-log merge, 12 % error."""
    k, v, _, dtype = cache(device)
    q = torch.zeros(1, 4, 64, device=device, dtype=dtype)  # equal keys: the LSE is the log of their number
    table, cu = int32([[3, 1]], device), int32([0, 1], device)
    _, lse = package.flash_attn_with_kvcache(
        q=q, k_cache=k, v_cache=v, page_table=table, cache_seqlens=int32([8], device), cu_seqlens_q=cu,
        max_seqlen_q=1, return_softmax_lse=True,
    )  # fmt: skip
    assert lse.dtype == torch.float32
    assert lse.flatten().tolist() == pytest.approx([math.log(8)] * 4, abs=1e-4)
    _, lse = package.flash_attn_varlen_func(
        q=q, k=k[3, :8], v=v[3, :8], cu_seqlens_q=cu, cu_seqlens_k=int32([0, 8], device), max_seqlen_q=1,
        max_seqlen_k=8, return_softmax_lse=True,
    )  # fmt: skip
    assert lse.flatten().tolist() == pytest.approx([math.log(8)] * 4, abs=1e-4)


@both_packages
def test_a_kernel_s_halves_merge_to_its_whole(package, device):
    """sglang #40903, flashinfer #4485: the base shows when two halves of different weight are merged."""
    k, v, gen, dtype = cache(device)
    q = torch.randn(1, 4, 64, generator=gen).to(device, dtype)
    cu = int32([0, 1], device)

    def over(pages: list[int], keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        return package.flash_attn_with_kvcache(
            q=q, k_cache=k, v_cache=v, page_table=int32([pages], device), cache_seqlens=int32([keys], device),
            cu_seqlens_q=cu, max_seqlen_q=1, return_softmax_lse=True,
        )  # fmt: skip

    (a, lse_a), (b, lse_b), (whole, lse) = over([3], 16), over([1], 5), over([3, 1], 21)
    room = (3 if device == "cuda" else 16) * torch.finfo(dtype).eps * float(whole.float().abs().max())
    for merged, merged_lse in (
        package.merge_state(a, lse_a, b, lse_b),
        merge(AttentionState(a.float(), lse_a), AttentionState(b.float(), lse_b)),
    ):
        assert (merged.float() - whole.float()).abs().max() <= room
        assert torch.allclose(merged_lse, lse, atol=1e-4)
    in_base_2 = merge(AttentionState(a.float(), lse_a / math.log(2)), AttentionState(b.float(), lse_b / math.log(2)))
    assert (in_base_2.out - whole.float()).abs().max() > room


@both_packages
@pytest.mark.parametrize("num_splits", [0, 1, 2, 4])
@pytest.mark.parametrize("max_seqlen_q", [1, 2])
def test_the_lse_of_split_keys_with_grouped_heads(package, num_splits, max_seqlen_q, device):
    """vllm #22103, vllm-flash-attention PR #87: split keys swapped grouped heads in the LSE. 8:2 heads, 1 query."""
    k, v, gen, dtype = cache(device, pages=40)
    q = torch.randn(2, 8, 64, generator=gen).to(device, dtype)
    table = torch.stack([torch.randperm(40, generator=gen)[:38] for _ in range(2)]).to(device, torch.int32)
    lens = [600, 77]
    out, lse = package.flash_attn_with_kvcache(
        q=q, k_cache=k, v_cache=v, page_table=table, cache_seqlens=int32(lens, device),
        cu_seqlens_q=int32([0, 1, 2], device), max_seqlen_q=max_seqlen_q, num_splits=num_splits, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for i, n in enumerate(lens):
        keys, values = (x[table[i].long()].flatten(0, 1)[:n].cpu().float() for x in (k, v))
        expected, expected_lse = by_hand(q[i : i + 1].cpu().float(), keys, values, lambda i, j: True, scale=64**-0.5)
        room = 1e-5 if device == "cpu" else 1e-2
        assert (lse[i].cpu() - expected_lse[0]).abs().max() < room
        assert (out[i].cpu() - expected[0]).abs().max() < room


@every_route
@KINDS
@pytest.mark.parametrize("page_size", [1, 16])
def test_padded_decode_rows_are_finite_and_touch_nobody(page_size, kind, route, device):
    """sglang PR #1779, #1469: padded rows of length 0 or garbage. Fill value 1, on a finite padding slot."""
    case = case_on(
        device, ForwardMode.DECODE, prefix_lens=(9, 16, 33), page_size=page_size, kind=kind, window=5,
        chunk=2 * page_size,
    )  # fmt: skip
    alone = run(case, route)
    keys, _ = case.config.token_to_kv_pool.get_kv_buffer(case.layer.layer_id)
    owned_by_requests = keys[page_size:].clone()
    for package in PACKAGES:
        assert package.FlashAttentionBackend(case.config).get_cuda_graph_seq_len_fill_value() == 1

    def pad(values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.cat([values, torch.full((2, *values.shape[1:]), fill).to(values)])

    batch = case.batch
    padded = replace(
        with_batch(
            case,
            batch_size=5,
            req_pool_indices=pad(batch.req_pool_indices, 0),
            seq_lens=pad(batch.seq_lens, 1),
            seq_lens_cpu=pad(batch.seq_lens_cpu, 1),
            out_cache_loc=pad(batch.out_cache_loc, 0),
            extend_seq_lens=None,
            extend_prefix_lens=None,
        ),
        q=pad(case.q, 7),
        k=pad(case.k, 100),
        v=pad(case.v, -100),
    )
    out = run(padded, route)
    assert case.judge(out[:3]).ok
    assert out.isfinite().all()
    room = 4 * torch.finfo(out.dtype).eps * float(alone.float().abs().max())
    assert (out[:3].float() - alone.float()).abs().max() <= room
    assert torch.equal(keys[page_size:].nan_to_num(), owned_by_requests.nan_to_num())
