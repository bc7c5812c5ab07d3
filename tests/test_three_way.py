"""Masks = passes = fast, on a grid of cases small enough to read; and what must hold between modes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import Case, make_case
from tests.support import (
    FP8,
    ROUTES,
    cache_bytes,
    case_on,
    every_page_size,
    every_route,
    planned_routes,
    run,
    sized,
    verdicts,
)

FULL, SLIDING, LOCAL = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL
KINDS = pytest.mark.parametrize("kind", [FULL, SLIDING, LOCAL], ids=lambda kind: kind.name.lower())
HOST = pytest.mark.parametrize("host_lengths", [True, False], ids=["host-lengths", "device-lengths"])
MODES = (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL, ForwardMode.MIXED, ForwardMode.DECODE)

SHAPES = {  # name: (cached tokens, new tokens)
    "ragged": ((3, 0, 6, 40), (5, 4, 1, 9)),
    "no-prefix": ((0, 0, 0), (7, 1, 33)),
    "ones": ((0, 15, 16, 63), (1, 1, 1, 1)),
    "one-request": ((130,), (3,)),
    "nothing-new": ((5, 0, 9), (0, 0, 2)),
}


def assert_agrees(case: Case) -> None:
    for route, verdict in verdicts(case).items():
        assert verdict.ok, (route, verdict)


@HOST
@KINDS
@every_page_size
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_masks_passes_and_fast_agree(mode, shape, page_size, kind, host_lengths, device):
    prefix, new = SHAPES[shape]
    for hybrid in (False, True):
        assert_agrees(
            case_on(
                device,
                mode,
                prefix_lens=prefix,
                new_lens=new,
                page_size=page_size,
                kind=kind,
                window=5,
                chunk=2 * page_size,
                hybrid=hybrid,
                host_lengths=host_lengths,
            )
        )


GEOMETRY = {
    "mha": dict(heads=4, kv_heads=4),
    "grouped": dict(heads=8, kv_heads=2),
    "one-key-head": dict(heads=6, kv_heads=1),
    "narrow-values": dict(head_dim=24, v_head_dim=16),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "sinks-and-softcap": dict(sinks=True, softcap=1.0, heads=4, kv_heads=2),
    "bf16": dict(dtype=torch.bfloat16),
    "fp16": dict(dtype=torch.float16),
    "fp8-cache": dict(dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.5, v_scale=2.0),
    "fp8-cache-no-scale": dict(dtype=torch.bfloat16, kv_dtype=FP8),
    "bf16-cache-with-a-scale": dict(dtype=torch.bfloat16, k_scale=0.05, v_scale=3.0),
    "deterministic": dict(deterministic=True),
}


@KINDS
@pytest.mark.parametrize("geometry", GEOMETRY)
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name.lower())
def test_every_layer_geometry_agrees(mode, geometry, kind):
    assert_agrees(make_case(mode, page_size=4, kind=kind, **GEOMETRY[geometry]))


GPU_GEOMETRY = {
    "grouped": dict(heads=8, kv_heads=2),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "fp16": dict(dtype=torch.float16),
    "deterministic": dict(deterministic=True),
    **{f"head_dim{d}": dict(head_dim=d) for d in (64, 96, 128, 192, 256)},
    "qk192-v128": dict(head_dim=192, v_head_dim=128),
}


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("geometry", GPU_GEOMETRY)
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name.lower())
def test_every_layer_geometry_agrees_on_a_gpu(mode, geometry, kind):
    assert_agrees(case_on("cuda", mode, page_size=16, chunk=32, kind=kind, **GPU_GEOMETRY[geometry]))


@every_route
def test_an_idle_batch_gives_an_empty_output(route):
    case = make_case(ForwardMode.IDLE, prefix_lens=[], new_lens=[])
    assert run(case, route).shape == (0, 2 * 16)


@every_route
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name.lower())
def test_an_empty_batch_gives_an_empty_output(mode, route):
    case = make_case(mode, prefix_lens=[], new_lens=[])
    assert run(case, route).shape == (0, 2 * 16)


# ---- what a server leaves in its tables ---------------------------------------------------------------------------


@HOST
@KINDS
@every_page_size
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name.lower())
def test_stale_entries_behind_a_request_are_not_read(mode, hybrid, page_size, kind, host_lengths, device):
    p = page_size
    case = case_on(
        device, mode, prefix_lens=(p - 1, p, 2 * p + 1), new_lens=(1, p, 3), page_size=p, kind=kind, window=5,
        chunk=2 * p, hybrid=hybrid, context_len=6 * p, host_lengths=host_lengths,
    )  # fmt: skip
    rows, pool = case.config.req_to_token_pool.req_to_token, case.config.token_to_kv_pool
    keys, _ = pool.get_kv_buffer(0)
    slots = torch.arange(pool.size + p, device=keys.device)
    poisoned = keys[pool.write_slots(case.layer, slots)].isnan().flatten(1).all(dim=1)
    nan_page = int(torch.nonzero(poisoned)[0]) // p
    for row, total in zip(case.batch.req_pool_indices.tolist(), case.batch.seq_lens.tolist(), strict=True):
        end = -(-total // p) * p  # the request's last page is its own
        rows[row, end:] = (nan_page * p + torch.arange(rows.shape[1] - end, device=rows.device) % p).int()
    assert_agrees(case)


@HOST
@pytest.mark.parametrize("kind", [SLIDING, LOCAL], ids=lambda kind: kind.name.lower())
@every_page_size
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name.lower())
def test_tokens_that_left_the_window_may_be_freed(mode, page_size, kind, host_lengths, device):
    p, window, chunk = page_size, 5, 2 * page_size
    prefix = (4 * p + 7, 3, 6 * p + 8)
    case = case_on(
        device, mode, prefix_lens=prefix, new_lens=(2, 4, 1), page_size=p, kind=kind, window=window, chunk=chunk,
        hybrid=True, host_lengths=host_lengths,
    )  # fmt: skip
    rows, pool = case.config.req_to_token_pool.req_to_token, case.config.token_to_kv_pool
    freed = 0
    for row, first_query in zip(case.batch.req_pool_indices.tolist(), prefix, strict=True):
        oldest = max(0, first_query - window) if kind is SLIDING else first_query // chunk * chunk
        gone = rows[row, : oldest // p * p].long()
        for buffer in pool.get_kv_buffer(0):
            buffer[pool.full_to_swa_index_mapping[gone].long()] = torch.nan
        pool.full_to_swa_index_mapping[gone] = 0
        freed += len(gone)
    assert freed
    assert_agrees(case)


# ---- between modes ------------------------------------------------------------------------------------------------


def prompt(device: str, prefix: list[int], new: list[int], page_size: int, kind: LayerKind, **more) -> Case:
    """Requests cut anywhere into cached and new tokens; the same seed and totals give the same slots."""
    mode = more.pop("mode", ForwardMode.EXTEND)
    arguments = dict(
        prefix_lens=prefix, new_lens=new, page_size=page_size, kind=kind, window=5, chunk=2 * page_size, sinks=True,
        heads=4, kv_heads=2,
    )  # fmt: skip
    return make_case(mode, **sized(device, **arguments | more))


def continued(whole: Case, done: list[int], new: list[int], mode: ForwardMode) -> Case:
    """The step that brings requests of `whole` from `done` to done + new tokens, over the same cache."""
    totals = whole.batch.extend_seq_lens.tolist()
    starts = [sum(totals[:r]) for r in range(len(totals))]
    rows = torch.cat([torch.arange(s + d, s + d + n) for s, d, n in zip(starts, done, new, strict=True)])
    rows = rows.to(whole.q.device)
    lens, news = torch.tensor(done) + torch.tensor(new), torch.tensor(new)
    batch = replace(
        whole.batch,
        forward_mode=mode,
        seq_lens=lens.to(whole.q.device),
        seq_lens_cpu=lens,
        out_cache_loc=whole.batch.out_cache_loc[rows],
        extend_seq_lens=news.to(whole.q.device),
        extend_seq_lens_cpu=new,
        extend_prefix_lens=torch.tensor(done).to(whole.q.device),
        extend_prefix_lens_cpu=done,
    )
    return replace(whole, batch=batch, q=whole.q[rows], k=whole.k[rows], v=whole.v[rows])


TOTALS = [19, 1, 34]


def split_outputs(whole: Case, route: str, steps: list[tuple[list[int], ForwardMode]]) -> torch.Tensor:
    """The outputs of a prompt run in steps, put back in the order of the prompt run at once."""
    pieces: list[list[torch.Tensor]] = [[] for _ in TOTALS]
    done = [0] * len(TOTALS)
    for new, mode in steps:
        out = run(continued(whole, done, new, mode), route)
        for request, piece in enumerate(out.split(new)):
            pieces[request].append(piece)
        done = [d + n for d, n in zip(done, new, strict=True)]
    assert done == TOTALS
    return torch.cat([torch.cat(request) for request in pieces])


SPLITS = {
    "two-halves": [([10, 1, 17], ForwardMode.EXTEND), ([9, 0, 17], ForwardMode.EXTEND)],
    "uneven": [([1, 0, 33], ForwardMode.EXTEND), ([17, 0, 1], ForwardMode.MIXED), ([1, 1, 0], ForwardMode.MIXED)],
    "at-page-edges": [([16, 0, 16], ForwardMode.SPLIT_PREFILL), ([3, 1, 18], ForwardMode.SPLIT_PREFILL)],
}


@every_route
@KINDS
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("split", SPLITS)
def test_a_prompt_in_pieces_gives_the_prompt_at_once(split, page_size, kind, route, device):
    whole = prompt(device, [0, 0, 0], TOTALS, page_size, kind)
    run(whole, "masks")
    assert whole.judge(split_outputs(whole, route, SPLITS[split])).ok


@every_route
@KINDS
@every_page_size
def test_decode_equals_the_last_row_of_extend(page_size, kind, route, device):
    whole = prompt(device, [0, 0, 0], TOTALS, page_size, kind)
    run(whole, "masks")
    done = [n - 1 for n in TOTALS]
    step = continued(whole, done, [1, 1, 1], ForwardMode.DECODE)
    decoded = run(step, route)
    last = [sum(TOTALS[: r + 1]) - 1 for r in range(3)]
    assert step.judge(decoded).ok
    exact, plain = (whole.oracle(dtype).out[last].flatten(1) for dtype in (torch.float32, whole.q.dtype))
    room = 2 * (plain.float() - exact).abs().max() + 4 * torch.finfo(whole.q.dtype).eps
    assert (decoded.float() - exact).abs().max() <= room


@planned_routes
@KINDS
def test_decoding_token_by_token_gives_the_prompt_at_once(kind, route):
    whole = prompt("cpu", [0, 0, 0], [9, 9, 9], 3, kind)
    run(whole, "masks")
    steps = [continued(whole, [n] * 3, [1] * 3, ForwardMode.DECODE) for n in range(9)]
    rows = torch.stack([run(step, route) for step in steps], dim=1).flatten(0, 1)
    assert whole.judge(rows).ok


@every_page_size
@KINDS
@pytest.mark.parametrize("hybrid", [False, True], ids=["one-pool", "two-pools"])
@pytest.mark.parametrize("cache", ["same", "fp8"])
def test_every_route_writes_the_same_bytes_to_the_cache(cache, hybrid, kind, page_size, device):
    more = dict(kv_dtype=FP8, k_scale=0.25, v_scale=1.5) if cache == "fp8" else {}
    written = []
    for route in ROUTES if (device, cache) != ("cuda", "fp8") else ("masks", "passes"):
        arguments = sized(device, page_size=page_size, kind=kind, chunk=page_size * 2, dtype=torch.bfloat16)
        case = make_case(hybrid=hybrid, **arguments, **more)
        run(case, route)
        written.append(cache_bytes(case))
    for keys, values in written[1:]:
        assert torch.equal(keys, written[0][0])
        assert torch.equal(values, written[0][1])


@every_route
def test_without_saving_the_cache_stays_as_it_is(route):
    package, provider = ROUTES[route]
    case = make_case()
    before = cache_bytes(case)
    backend = package.FlashAttentionBackend(case.config, provider=provider)
    backend.init_forward_metadata(case.batch)
    backend.forward(case.q, case.k, case.v, case.layer, case.batch, save_kv_cache=False)
    after = cache_bytes(case)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@every_route
def test_without_k_and_v_a_layer_attends_to_the_cache_as_it_is(route):
    case = make_case()
    run(case, "masks")
    again = replace(case, k=None, v=None)
    assert case.judge(run(again, route)).ok


@every_route
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda mode: mode.name.lower())
def test_q_k_and_v_may_come_split_into_heads(mode, route):
    case = make_case(mode, heads=4, kv_heads=2)
    flat = run(case, route)
    heads = replace(
        case, q=case.q.unflatten(1, (4, 16)), k=case.k.unflatten(1, (2, 16)), v=case.v.unflatten(1, (2, 16))
    )
    assert torch.equal(run(heads, route), flat)


@every_route
def test_the_inputs_are_left_alone(route):
    case = make_case(dtype=torch.bfloat16, kv_dtype=FP8, k_scale=0.1, v_scale=0.1, sinks=True)
    before = [x.clone() for x in (case.q, case.k, case.v, case.sinks)]
    run(case, route)
    assert all(torch.equal(a, b) for a, b in zip(before, (case.q, case.k, case.v, case.sinks), strict=True))
