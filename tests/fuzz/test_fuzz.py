"""Random batches: masks = passes = fast, and both packages plan the same.

FA_FUZZ=long runs 20 000 cases instead of 300. A failure prints the arguments of make_case that reproduce it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import make_case
from tests.support import FP8, PAGE_SIZES, plans, sized, verdicts

MODES = (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL, ForwardMode.MIXED, ForwardMode.DECODE)
CASES_A_MODE = max(75, settings().max_examples // len(MODES))
LONGEST = 300  # keys a request


def around(*edges: int) -> st.SearchStrategy[int]:
    """Lengths at and next to 0, 1 and the given edges, and now and then anything small."""
    near = {n for edge in (0, 1, *edges) for n in (edge - 1, edge, edge + 1) if 0 <= n <= LONGEST}
    return st.one_of(st.sampled_from(sorted(near)), st.integers(0, 40))


@st.composite
def arguments(draw: st.DrawFn, mode: ForwardMode) -> dict[str, Any]:
    """Arguments of make_case for one layer of one batch."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    chunk = page_size * draw(st.sampled_from([1, 2, 3, 5] if page_size < 64 else [1, 2]))
    window = draw(st.sampled_from([0, 1, 3, page_size - 1, page_size, 37, 1000]))
    edges = (page_size, 2 * page_size, chunk, 2 * chunk, window, window + 1)
    count = draw(st.integers(1, 4))
    lens = st.lists(around(*edges), min_size=count, max_size=count)
    prefix, new = draw(st.one_of(lens, st.just([0] * count))), draw(lens)
    if mode is ForwardMode.MIXED:
        new[0] = 1
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3), (3, 2), (1, 8), (2, 12)]))
    head_dim = draw(st.sampled_from([8, 16, 24, 64, 80]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    fp8 = draw(st.booleans())
    scale = st.sampled_from([None, 0.25, 1.0, 3.0])
    host_lengths = draw(st.booleans())
    longest = max([p + n for p, n in zip(prefix, [1] * count if mode.is_decode() else new, strict=True)] + [1])
    return dict(
        prefix_lens=prefix,
        new_lens=new,
        page_size=page_size,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([None, None, 8, 32])),
        dtype=dtype,
        kv_dtype=FP8 if fp8 else None,
        kind=draw(st.sampled_from([LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL])),
        window=window,
        chunk=chunk,
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        sinks=draw(st.booleans()),
        k_scale=draw(scale),
        v_scale=draw(scale),
        hybrid=draw(st.booleans()),
        deterministic=host_lengths and draw(st.booleans()),
        context_len=longest + draw(st.sampled_from([0, 0, 1, 50])),
        host_lengths=host_lengths,
        seed=draw(st.integers(0, 2**16)),
    )


def check(mode: ForwardMode, arguments: dict[str, Any]) -> None:
    case = make_case(mode, **arguments)
    planned = plans(case)
    assert planned["fa_ref"] == planned["fa_fast"]
    for route, verdict in verdicts(case).items():
        assert verdict.ok, (route, verdict)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@settings(max_examples=CASES_A_MODE)
@given(data=st.data())
def test_random_batches_agree(mode, data):
    check(mode, data.draw(arguments(mode), label="arguments"))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@settings(max_examples=CASES_A_MODE)
@given(data=st.data())
def test_random_batches_agree_on_a_gpu(mode, data):
    drawn = data.draw(arguments(mode), label="arguments")
    head_dim = data.draw(st.sampled_from([64, 96, 128, 192, 256]), label="head_dim")
    changes = dict(head_dim=head_dim, v_head_dim=None, kv_dtype=None)
    check(mode, sized("cuda", **drawn | changes))
