"""Random batches: masks = passes = fast, and both packages plan the same.

FA_FUZZ=long runs 20 000 cases instead of 500, with trees of up to 256 drafts instead of 12. A failure prints the
arguments of make_case that reproduce it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fa_fast
from fa_fast.graphs import GraphRunner
from fa_ref import ForwardBatch, ForwardMode, LayerKind
from fa_ref.cases import make_case
from tests.support import FP8, PAGE_SIZES, plans, sized, verdicts

MODES = (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL, ForwardMode.MIXED, ForwardMode.DECODE)
SPECULATION = ("draft-decode", "verify-chain", "verify-tree", "draft-extend", "cascade")
WITH_ENCODER = (*(mode.name.lower() for mode in MODES), *SPECULATION)
KINDS_OF_CASES = len(MODES) + len(SPECULATION) + len(WITH_ENCODER)
CASES_A_MODE = max(75, settings().max_examples // KINDS_OF_CASES)
CASES_A_DRAFT = max(40, settings().max_examples // KINDS_OF_CASES)
LONGEST = 300  # keys a request
MOST_DRAFTS = 256 if settings().max_examples > 1000 else 12


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


@st.composite
def trees(draw: st.DrawFn, drafts: int) -> list[int]:
    """The parents of one tree: a chain, a star, two chains from the root, or every parent any earlier draft."""
    shape = draw(st.sampled_from(["random", "random", "chain", "star", "fork"]))
    if shape == "random":
        ranks = draw(st.lists(st.integers(0, 2**30), min_size=drafts - 1, max_size=drafts - 1))
        return [-1, *(rank % draft for draft, rank in enumerate(ranks, start=1))]
    step = {"chain": 1, "star": drafts, "fork": 2}[shape]
    return [-1, *(max(0, draft - step) for draft in range(1, drafts))]


@st.composite
def speculative(draw: st.DrawFn, name: str) -> tuple[ForwardMode, dict[str, Any]]:
    """A mode of speculation and arguments of make_case for one layer of one batch."""
    if name == "decode":
        return ForwardMode.DECODE, draw(arguments(ForwardMode.DECODE))
    if name == "draft-extend":
        return ForwardMode.DRAFT_EXTEND, draw(arguments(ForwardMode.DRAFT_EXTEND))
    if name == "cascade":
        mode = draw(st.sampled_from([ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED]))
        drawn = draw(arguments(mode))
        shared = draw(around(drawn["page_size"], 2 * drawn["page_size"]))
        longer = dict(prefix_lens=[shared + n for n in drawn["prefix_lens"]], shared_prefix=shared)
        return mode, drawn | longer | dict(context_len=drawn["context_len"] + shared)
    mode = ForwardMode.DECODE if name == "draft-decode" else ForwardMode.TARGET_VERIFY
    drawn = draw(arguments(ForwardMode.DECODE)) | dict(new_lens=[1])
    drawn["tree_attention"] = draw(st.sampled_from(["auto", "fused", "expand"]))
    if name == "draft-decode":
        drafts = draw(st.integers(1, 5))  # steps
        drawn |= dict(topk=draw(st.sampled_from([1, 2, 3, 4, 8])), num_steps=drafts)
        drawn["step"] = draw(st.integers(0, drafts - 1))
    else:
        near = [n for n in (1, 2, 16, 17, 64, 65, 256) if n <= MOST_DRAFTS]
        drafts = draw(st.one_of(st.sampled_from(near), st.integers(1, MOST_DRAFTS)))
        forest = st.lists(trees(drafts), min_size=len(drawn["prefix_lens"]), max_size=len(drawn["prefix_lens"]))
        drawn |= dict(draft_token_num=drafts) if name == "verify-chain" else dict(trees=draw(forest))
    return mode, drawn | dict(context_len=drawn["context_len"] + drafts)


@st.composite
def encoder_decoder(draw: st.DrawFn, name: str) -> tuple[ForwardMode, dict[str, Any]]:
    """Any of the cases above behind encoders of any length, encoded in this step or before."""
    if name in SPECULATION:
        mode, drawn = draw(speculative(name))
    else:
        mode = ForwardMode[name.upper()]
        drawn = draw(arguments(mode))
    count = len(drawn["prefix_lens"])
    encoder_lens = draw(st.lists(around(drawn["page_size"], 2 * drawn["page_size"]), min_size=count, max_size=count))
    kind = draw(st.sampled_from([LayerKind.CROSS, LayerKind.CROSS, LayerKind.FULL, LayerKind.LOCAL]))
    return mode, drawn | dict(
        kind=kind,
        encoder_lens=encoder_lens,
        encode=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        context_len=drawn["context_len"] + max(encoder_lens),
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


@pytest.mark.parametrize("name", SPECULATION)
@settings(max_examples=CASES_A_DRAFT)
@given(data=st.data())
def test_random_drafts_agree(name, data):
    mode, drawn = data.draw(speculative(name), label="mode, arguments")
    check(mode, drawn)


@pytest.mark.parametrize("name", WITH_ENCODER)
@settings(max_examples=CASES_A_DRAFT)
@given(data=st.data())
def test_random_encoder_decoder_batches_agree(name, data):
    mode, drawn = data.draw(encoder_decoder(name), label="mode, arguments")
    check(mode, drawn)


def check_replay(mode: ForwardMode, arguments: dict[str, Any], bucket: int) -> None:
    """The step recorded for `bucket` requests over this one's, replayed for the case twice: nothing stays behind."""
    case = make_case(mode, **arguments)
    backend = fa_fast.FlashAttentionBackend(case.config, speculative_step_id=case.step)
    count, rows = case.batch.batch_size, case.q.shape[0]
    given = {"q": case.q, "k": case.k, "v": case.v}
    inputs = {name: x for name, x in given.items() if x is not None}  # a cross layer's keys are there

    def step(batch: ForwardBatch, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        return backend.forward(q, k, v, case.layer, batch, sinks=case.sinks)

    runner = GraphRunner(
        backend, step, mode, [count + bucket],
        {name: x.new_zeros(rows // count * (count + bucket), x.shape[1]) for name, x in inputs.items()},
        spec_info=case.batch.spec_info, draft_tokens=rows // count if mode.is_draft_extend() else 0,
    )  # fmt: skip
    for _ in range(2):
        verdict = case.judge(runner.run(case.batch, **inputs))
        assert verdict.ok, verdict


REPLAYED = ("decode", "draft-decode", "verify-chain", "verify-tree", "draft-extend")


@st.composite
def replayed(draw: st.DrawFn, name: str) -> tuple[ForwardMode, dict[str, Any]]:
    """A mode and arguments of make_case that can be captured: as many tokens in every request."""
    behind_encoders = draw(st.booleans())
    mode, drawn = draw((encoder_decoder if behind_encoders else speculative)(name))
    if name == "draft-extend":
        width = draw(st.integers(1, 5))
        drawn |= dict(new_lens=[width] * len(drawn["prefix_lens"]), context_len=drawn["context_len"] + width)
        drawn["host_lengths"] = True  # they say that no request is ragged
    if behind_encoders:
        drawn["encode"] = [False] * len(drawn["prefix_lens"])
    return mode, drawn


@pytest.mark.parametrize("name", REPLAYED)
@settings(max_examples=CASES_A_DRAFT)
@given(data=st.data())
def test_random_replays_agree(name, data):
    mode, drawn = data.draw(replayed(name), label="mode, arguments")
    check_replay(mode, drawn, data.draw(st.integers(0, 3), label="padding rows"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
@settings(max_examples=CASES_A_DRAFT)
@given(data=st.data())
def test_random_replays_agree_on_a_gpu(name, data):
    mode, drawn = data.draw(replayed(name), label="mode, arguments")
    head_dim = data.draw(st.sampled_from([64, 96, 128, 192, 256]), label="head_dim")
    drawn = sized("cuda", **drawn | dict(head_dim=head_dim, v_head_dim=None, kv_dtype=None))
    check_replay(mode, drawn, data.draw(st.integers(0, 3), label="padding rows"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECULATION)
@settings(max_examples=CASES_A_DRAFT)
@given(data=st.data())
def test_random_drafts_agree_on_a_gpu(name, data):
    mode, drawn = data.draw(speculative(name), label="mode, arguments")
    head_dim = data.draw(st.sampled_from([64, 96, 128, 192, 256]), label="head_dim")
    check(mode, sized("cuda", **drawn | dict(head_dim=head_dim, v_head_dim=None, kv_dtype=None)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_ENCODER)
@settings(max_examples=CASES_A_DRAFT)
@given(data=st.data())
def test_random_encoder_decoder_batches_agree_on_a_gpu(name, data):
    mode, drawn = data.draw(encoder_decoder(name), label="mode, arguments")
    head_dim = data.draw(st.sampled_from([64, 96, 128, 192, 256]), label="head_dim")
    check(mode, sized("cuda", **drawn | dict(head_dim=head_dim, v_head_dim=None, kv_dtype=None)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@settings(max_examples=CASES_A_MODE)
@given(data=st.data())
def test_random_batches_agree_on_a_gpu(mode, data):
    drawn = data.draw(arguments(mode), label="arguments")
    head_dim = data.draw(st.sampled_from([64, 96, 128, 192, 256]), label="head_dim")
    changes = dict(head_dim=head_dim, v_head_dim=None, kv_dtype=None)
    check(mode, sized("cuda", **drawn | changes))
