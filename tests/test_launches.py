"""What a replay costs beside its layers: launches of planning inside the graph, and copies and fills around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa_fast.graphs import GraphRunner, StaticBatch
from fa_fast.planning import local, page_table, plan_steps_unchecked, plan_unchecked, verify
from fa_ref import BadBatch, BadPageTable, DraftInput, ForwardBatch, VerifyInput
from tests.test_graphs import EXTEND, REPLAYS, REQUESTS, WIDTH, at, eager, every_form, problem, runner_of, same

# Each has a definition in torch and is one Triton kernel on a GPU.
KERNELS = [(page_table, "gather_pages_torch"), (verify, "tree_tables_torch"), (local, "virtual_batches_torch")]


class Launches(TorchDispatchMode):
    """Names of the ops that launch something, in order: not views, and not allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False  # a kernel counted as one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns, name = func._schema.returns, func._schema.name.removeprefix("aten::")
        alias = returns[0].alias_info if returns else None
        view = alias is not None and not alias.is_write
        if not (self.inside or view or name.startswith("empty")):
            self.names.append(name)
        return result


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what is launched meanwhile; the kernels of KERNELS by theirs."""
    mode = Launches()

    def as_one(definition: Callable[..., Any], name: str) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            mode.inside = True
            try:
                return definition(*arguments)
            finally:
                mode.inside = False
                mode.names.append(name)

        return kernel

    with monkeypatch.context() as patch, mode:
        for module, name in KERNELS:
            patch.setattr(module, name, as_one(getattr(module, name), name.removesuffix("_torch")))
        yield mode.names


# ---- inside the graph ------------------------------------------------------------------------------------------------

PLANNING = {  # at page size 1; at other sizes gather_pages, which cuts the lengths too, stands for the clamp
    "decode": ["clamp"],
    "draft-chain": ["add", "clamp"],
    "draft-branches": ["index", "_to_copy", "clamp"],
    "verify-chain": ["add", "clamp"],
    "verify-tree": ["tree_tables", "clamp"],
    "draft-extend": ["clamp"],
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["full", "mla", "deterministic"])
@every_form
def test_a_recorded_plan_launches_what_depends_on_lengths_and_nothing_else(form, kind, page_size, monkeypatch):
    case = problem("cpu", form, kind, page_size)
    batch = static_of(case).view(REQUESTS)
    plan_unchecked(batch, case.config, case.step)  # as a warm-up does: it makes the constants
    with counted(monkeypatch) as names:
        plan_unchecked(batch, case.config, case.step)
    assert names == [name if page_size == 1 or name != "clamp" else "gather_pages" for name in PLANNING[form]]


@pytest.mark.parametrize("form", ["draft-chain", "draft-branches"])
def test_more_steps_of_a_draft_launch_no_more(form, monkeypatch):
    case = problem("cpu", form, page_size=1)
    steps = case.batch.spec_info.num_steps
    assert steps > 1
    batch = static_of(case).view(REQUESTS)
    found = {}
    for count in range(1, steps + 1):
        plan_steps_unchecked(batch, case.config, count)
        with counted(monkeypatch) as names:
            plan_steps_unchecked(batch, case.config, count)
        found[count] = sorted(names)
    expected = ["add", "add", "clamp", "clamp"] if form == "draft-chain" else ["_to_copy", "clamp", "index"]
    assert found == dict.fromkeys(found, expected)


WINDOWS = {  # what the window layers of a model add to its full ones
    "decode": ["gather_pages"],
    "verify-chain": ["add", "clamp"],
    "draft-extend": ["clamp"],
    # slots newest first, and a mask by depth: chains that one kernel could do
    "verify-tree": [
        "tree_tables", "sub", "ge", "bitwise_and", "sub", "_to_copy", "clamp", "index", "rsub", "clamp", "minimum",
    ],
    "draft-branches": ["index", "_to_copy", "sub", "_to_copy", "clamp", "index", "clamp"],
}  # fmt: skip


@pytest.mark.parametrize("form", WINDOWS)
def test_window_layers_add_these_launches(form, monkeypatch):
    case = problem("cpu", form, "sliding", page_size=1)
    batch = static_of(case).view(REQUESTS)
    plan_unchecked(batch, case.config, case.step)
    with counted(monkeypatch) as names:
        plan_unchecked(batch, case.config, case.step)
    assert sorted(names) == sorted([*PLANNING[form], *WINDOWS[form]])


def static_of(case: Any) -> StaticBatch:
    extends = case.batch.forward_mode is EXTEND
    return StaticBatch(case.config, case.batch.forward_mode, REQUESTS, case.batch.spec_info, WIDTH if extends else 0)


# ---- around the graph ------------------------------------------------------------------------------------------------


def written(runner: GraphRunner, batch: ForwardBatch, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The batch and its inputs, written where the graph reads them."""
    place, views = runner.place(batch.batch_size)
    for name in runner.static.tensors:
        getattr(place, name).copy_(getattr(batch, name))
    for name, value in inputs.items():
        views[name].copy_(value)
    if isinstance(batch.spec_info, VerifyInput) and batch.spec_info.custom_mask is not None:
        mask = batch.spec_info.custom_mask
        place.spec_info.custom_mask[: mask.numel()] = mask
    return place, views


@every_form
@pytest.mark.parametrize("kind", ["full", "sliding", "mla", "text-behind-encoder", "hybrid"])
def test_a_batch_written_in_place_equals_the_eager_step(kind, form, device):
    """Alternating with batches of the caller's own, larger and smaller."""
    case = problem(device, form, kind)
    runner = runner_of(case)
    for number, (lens, order) in enumerate(REPLAYS):
        batch, inputs = at(case, lens, order)
        right = eager(case, batch, inputs)
        given = (batch, inputs) if number % 3 == 1 else written(runner, batch, inputs)
        assert same(case, runner.run(given[0], **given[1]), right), (lens, order)


def around(runner: GraphRunner, batch: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run launches outside of the graph."""
    with monkeypatch.context() as patch:
        patch.setattr("fa_fast.graphs.reads_values", lambda config: False)  # as on a GPU
        patch.setattr("fa_ref.api.encoder.reads_values", lambda config: False)
        patch.setattr("fa_ref.api.checks.reads_values", lambda config: False)
        for recording in runner._recorded.values():
            patch.setattr(recording, "replay", lambda: None)
        with counted(monkeypatch) as names:
            runner.run(batch, **inputs)
    return names


@every_form
def test_a_batch_written_in_place_costs_no_launch(form, monkeypatch):
    case = problem("cpu", form)
    runner = runner_of(case)
    batch, inputs = written(runner, *at(case, *REPLAYS[1]))
    assert around(runner, batch, inputs, monkeypatch) == []


@every_form
def test_a_batch_of_the_caller_s_own_is_copied_in_a_launch_for_each_pair_of_types(form, monkeypatch):
    """Rows and lengths to int32, slots to int64, q, k and v as they are, and the mask of a tree."""
    case = problem("cpu", form)
    runner = runner_of(case)
    batch, inputs = at(case, *REPLAYS[0])
    launches = 4 if form == "verify-tree" else 3
    assert around(runner, batch, inputs, monkeypatch) == ["_foreach_copy_"] * launches


@every_form
def test_padding_is_written_when_the_batch_has_shrunk_and_not_again(form, monkeypatch):
    case = problem("cpu", form)
    runner = runner_of(case)
    batch, inputs = written(runner, *at(case, *REPLAYS[0]))
    runner.run(batch, **inputs)
    batch, inputs = written(runner, *at(case, *REPLAYS[1]))
    assert sorted(around(runner, batch, inputs, monkeypatch)) == ["_foreach_copy_"] * 2 + ["_foreach_zero_"]
    assert around(runner, batch, inputs, monkeypatch) == []
    for name, fresh in static_of(case).tensors.items():  # three of six requests
        value = runner.static.tensors[name]
        assert torch.equal(value[len(value) // 2 :], fresh[len(value) // 2 :]), name
    assert all((value[len(value) // 2 :] == 0).all() for value in runner.inputs.values())


def test_rows_handed_out_count_as_held():
    """Who asks for a place may write there and then run a smaller batch: nothing of it is left."""
    case = problem("cpu", "decode")
    runner = runner_of(case, buckets=(6,))
    written(runner, *at(case, *REPLAYS[0]))
    batch, inputs = at(case, *REPLAYS[1])
    assert same(case, runner.run(batch, **inputs), eager(case, batch, inputs))
    assert runner.static.tensors["req_pool_indices"][3:].tolist() == [0, 0, 0]


def test_values_written_in_place_are_checked_where_they_may_be_read():
    case = problem("cpu", "verify-tree")
    runner = runner_of(case)
    batch, inputs = written(runner, *at(case, *REPLAYS[0]))
    runner.run(batch, **inputs)
    batch.req_pool_indices[1] = 1000
    with pytest.raises(BadPageTable, match="req_to_token has"):
        runner.run(batch, **inputs)
    batch, inputs = written(runner, *at(case, *REPLAYS[0]))
    batch.out_cache_loc[0] = -1
    with pytest.raises(BadPageTable, match="slots span"):
        runner.run(batch, **inputs)


def test_a_place_has_room_for_the_requests_it_was_asked_for():
    case = problem("cpu", "decode")
    runner = runner_of(case, buckets=(1, 4))
    for requests in (0, 5, -1):
        with pytest.raises(BadBatch, match=r"buckets of \[1, 4\]"):
            runner.place(requests)
    batch, inputs = runner.place(3)
    assert batch.seq_lens.shape == (3,) and inputs["q"].shape[0] == 3
    with pytest.raises(BadBatch, match="captured with"):
        runner.run(batch)  # inputs are named, in place or not


def test_a_place_of_another_runner_is_a_batch_like_any_other():
    case = problem("cpu", "decode")
    runner, other = runner_of(case), runner_of(case)
    batch, inputs = at(case, *REPLAYS[1])
    runner.place(batch.batch_size)
    elsewhere, views = written(other, batch, inputs)
    assert same(case, runner.run(elsewhere, **views), eager(case, batch, inputs))
    drafting, _ = runner_of(problem("cpu", "draft-chain")).place(batch.batch_size)
    with pytest.raises(BadBatch, match="captured is DECODE"):
        runner.run(drafting, **inputs)


def test_constants_are_made_once_for_all_sizes_and_never_written():
    case = problem("cpu", "draft-branches")
    assert isinstance(case.batch.spec_info, DraftInput)
    runner = runner_of(case)
    constants = runner.static.view(6).constants
    before = {key: value.clone() for key, value in constants.items()}
    assert before and runner.static.view(2).constants is constants
    for lens, order in REPLAYS:
        batch, inputs = at(case, lens, order)
        runner.run(batch, **inputs)
    assert constants.keys() == before.keys()
    assert all(torch.equal(constants[key], value) for key, value in before.items())


def launched(runner: GraphRunner, batch: Any, inputs: dict[str, Tensor]) -> dict[str, int]:
    """Calls of the CUDA runtime that put something on the device during a run, by name."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        runner.run(batch, **inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        runner.run(batch, **inputs)
        torch.cuda.synchronize()
    starts = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")
    return {event.key: event.count for event in found.key_averages() if event.key.startswith(starts)}


@pytest.mark.gpu
@every_form
def test_on_a_gpu_a_batch_written_in_place_is_one_graph_launch(form):
    case = problem("cuda", form)
    runner = runner_of(case)
    assert launched(runner, *written(runner, *at(case, *REPLAYS[1]))) == {"cudaGraphLaunch": 1}


@pytest.mark.gpu
@every_form
def test_on_a_gpu_a_batch_of_the_caller_s_own_is_copied_in_few_launches(form):
    case = problem("cuda", form)
    runner = runner_of(case)
    found = launched(runner, *at(case, *REPLAYS[1]))
    assert found.pop("cudaGraphLaunch") == 1
    assert sum(found.values()) <= (4 if form == "verify-tree" else 3), found
