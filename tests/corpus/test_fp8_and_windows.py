"""Reports about fp8 caches, sliding windows, head geometry, page sizes and tables too short for their lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa_ref import BadPageTable, ForwardMode, LayerKind, window_of_tokens
from fa_ref.cases import Case, make_case
from tests.support import (
    FP8,
    agrees,
    both_packages,
    cache_bytes,
    case_on,
    every_page_size,
    every_route,
    run,
    seen,
    with_batch,
    with_layer,
)

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
FULL, SLIDING, LOCAL = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL
MODES = pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=lambda mode: mode.name.lower())
KINDS = pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL], ids=lambda kind: kind.value)


# ---- fp8 ------------------------------------------------------------------------------------------------------


@every_route
@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_queries_over_an_fp8_cache(mode, dtype, route):
    """sglang #5700: q cast to fp8 without its scale, so that it was clamped. q up to 1000, k_scale 0.05."""
    case = make_case(mode, dtype=dtype, kv_dtype=FP8, k_scale=0.05, v_scale=0.1, heads=4, kv_heads=2)
    case = replace(case, q=case.q * (1000 / case.q.abs().max()), layer=replace(case.layer, scaling=1e-3))
    assert case.judge(run(case, route)).ok
    clamped = replace(case, q=case.q.clamp(-448, 448))
    assert not case.judge(run(clamped, route)).ok


@every_route
@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wide_cache_ignores_the_layer_s_scales(mode, dtype, route):
    """sglang PR #39543: a descale applied to a bf16 cache whose checkpoint carries a k_scale."""
    scaled = make_case(mode, dtype=dtype, k_scale=0.05, v_scale=3.0)
    plain = make_case(mode, dtype=dtype)
    assert torch.equal(run(scaled, route), run(plain, route))
    assert all(torch.equal(a, b) for a, b in zip(cache_bytes(scaled), cache_bytes(plain), strict=True))


@every_route
@MODES
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_wrong_scale_changes_the_result(mode, name, route):
    """sglang PR #20705: scales silently ignored. The same stored keys read with another scale must differ."""
    case = make_case(mode, dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.5, v_scale=0.5)
    right = run(case, route)
    assert case.judge(right).ok
    stored = replace(case, k=None, v=None)
    assert torch.equal(run(stored, route), right)
    assert not case.judge(run(with_layer(stored, **{name: 1.5}), route)).ok


@both_packages
@MODES
def test_the_cache_holds_keys_divided_by_their_scale(mode, package):
    """sglang PR #20705: scales silently ignored, on the writing side."""
    case = make_case(mode, dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.5, v_scale=4.0)
    case.run(package)
    keys, values = case.config.token_to_kv_pool.get_kv_buffer(0)
    for buffer, new, scale in ((keys, case.k, 0.5), (values, case.v, 4.0)):
        stored = buffer[case.batch.out_cache_loc].float().flatten(1)
        assert torch.equal(stored, (new.float() / scale).to(FP8).float())


@every_route
@KINDS
@MODES
@pytest.mark.parametrize("per_head", [False, True], ids=["one-factor", "one-a-head"])
def test_scales_may_be_tensors(mode, kind, per_head, route):
    """sglang PR #20705: a scale is one factor, or one a key head, never something broadcast along another axis."""
    factor = torch.tensor([0.25, 4.0]) if per_head else torch.tensor(0.25)
    case = make_case(
        mode, dtype=torch.float32, kv_dtype=FP8, page_size=4, kind=kind, heads=4, kv_heads=2, head_dim=16,
        k_scale=factor, v_scale=factor,
    )  # fmt: skip
    assert case.judge(run(case, route)).ok
    keys, _ = case.config.token_to_kv_pool.get_kv_buffer(0)
    slots = case.config.token_to_kv_pool.write_slots(case.layer, case.batch.out_cache_loc)
    read_back = keys[slots].float() * factor.reshape(-1, 1)
    assert (read_back.flatten(1) - case.k).abs().max() < 0.07 * case.k.abs().max()


# ---- windows ----------------------------------------------------------------------------------------------------


@every_route
@every_page_size
@pytest.mark.parametrize("host_lengths", [True, False])
@MODES
def test_a_window_of_four_tokens_shows_query_10_keys_7_to_10(mode, host_lengths, page_size, route):
    """Dao #1133, transformers #39408, vllm #3385: the window was one token too wide or too narrow."""
    case = make_case(
        mode, prefix_lens=[10, 2], new_lens=[1, 9], page_size=page_size, kind=SLIDING, window=window_of_tokens(4),
        head_dim=16, host_lengths=host_lengths,
    )  # fmt: skip
    positions = [10, 2] if mode is DECODE else [10, *range(2, 11)]
    assert seen(case, route) == [list(range(max(0, p - 3), p + 1)) for p in positions]
    assert seen(case, route)[0] == [7, 8, 9, 10]


@every_route
@every_page_size
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
@MODES
def test_grouped_heads_24_to_2_with_a_window(mode, hybrid, page_size, route, device):
    """vllm #17476: wrong with 24:2 heads and a window."""
    case = case_on(
        device, mode, prefix_lens=(3, 0, 70), new_lens=(5, 9, 2), heads=24, kv_heads=2, kind=SLIDING, window=6,
        page_size=page_size, hybrid=hybrid,
    )  # fmt: skip
    assert case.judge(run(case, route)).ok


# ---- geometry ---------------------------------------------------------------------------------------------------


@KINDS
@every_page_size
@MODES
def test_values_narrower_than_keys(mode, page_size, kind, device):
    """sglang PR #30548: V was viewed with head_dim. qk 192, v 128."""
    case = case_on(
        device, mode, page_size=page_size, kind=kind, chunk=2 * page_size, heads=4, kv_heads=2, head_dim=192,
        v_head_dim=128,
    )  # fmt: skip
    assert run(case, "fast").shape == (case.q.shape[0], 4 * 128)
    assert agrees(case)


@KINDS
@every_page_size
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
@pytest.mark.parametrize("mode", [EXTEND, DECODE, ForwardMode.MIXED], ids=lambda mode: mode.name.lower())
def test_any_page_size(mode, hybrid, page_size, kind, device):
    """sglang #31310: any page size: 1, 3, 16, 64, 128. Lengths on and next to page edges."""
    p = page_size
    case = case_on(
        device, mode, prefix_lens=(p - 1, p, p + 1, 0), new_lens=(1, p, 2, p + 1), page_size=p, kind=kind,
        window=p, chunk=2 * p, hybrid=hybrid,
    )  # fmt: skip
    assert agrees(case)


# ---- tables -----------------------------------------------------------------------------------------------------


def too_long(mode: ForwardMode, page_size: int, kind: LayerKind, host_lengths: bool) -> Case:
    """Two requests in rows of 8 tokens, the first of which claims to have 12."""
    case = make_case(
        mode, prefix_lens=[7, 7], new_lens=[1, 1], page_size=page_size, kind=kind, window=20, chunk=page_size * 20,
        context_len=8, host_lengths=host_lengths,
    )  # fmt: skip
    lens = torch.tensor([12, 8])
    return with_batch(
        case,
        seq_lens=lens,
        seq_lens_cpu=lens if host_lengths else None,
        extend_prefix_lens=lens - 1,
        extend_prefix_lens_cpu=[11, 7] if host_lengths else None,
    )


@both_packages
@KINDS
@every_page_size
@MODES
@pytest.mark.parametrize("host_lengths", [True, False])
def test_a_length_beyond_the_table_is_a_clear_error(host_lengths, mode, page_size, kind, package, monkeypatch):
    """Dao #1773: a length beyond the table read on into memory. An error that gives both numbers, with FA_CHECK=1."""
    monkeypatch.setenv("FA_CHECK", "1")
    case = too_long(mode, page_size, kind, host_lengths)
    with pytest.raises(BadPageTable, match=r"request 0 has 12 keys.*holds 8"):
        package.plan_batch(case.batch, case.config)


@both_packages
@MODES
def test_host_lengths_are_always_checked(mode, package, monkeypatch):
    """Dao #1773: lengths that the host knows cost nothing to check, so they are, without FA_CHECK too."""
    monkeypatch.delenv("FA_CHECK", raising=False)
    case = too_long(mode, 4, FULL, True)
    with pytest.raises(BadPageTable, match=r"request 0 has 12 keys.*holds 8"):
        package.plan_batch(case.batch, case.config)


@pytest.mark.parametrize("route", ["passes", "fast"])
@KINDS
@every_page_size
@MODES
def test_a_length_beyond_the_table_never_shows_another_request(mode, page_size, kind, route, monkeypatch):
    """Dao #1773: a length beyond the table silently read another request. Here: an error, or only own keys."""
    monkeypatch.delenv("FA_CHECK", raising=False)
    results = []
    for other in (0.0, 1000.0):
        case = too_long(mode, page_size, kind, False)
        neighbour = case.config.req_to_token_pool.req_to_token[int(case.batch.req_pool_indices[1]), :8].long()
        for buffer in case.config.token_to_kv_pool.get_kv_buffer(0):
            buffer[neighbour] = other
        try:
            results.append(run(replace(case, k=None, v=None), route)[0])
        except BadPageTable as error:
            results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())
