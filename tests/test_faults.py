"""A step that fails, wherever it does, changes nothing that the next one reads: the next good step is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_fast.graphs
from fa_fast.graphs import GraphRunner
from fa_ref import FaError, ForwardBatch
from tests.test_graphs import every_form
from tests.test_launches import written
from tests.test_soak import CONTEXT, REQUESTS, Model, batch_of, inputs_of, model_of, runner_of

Step = tuple[ForwardBatch, dict[str, Tensor]]


def good(model: Model, seed: int, count: int) -> Step:
    gen = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 40, (count,), generator=gen).tolist()
    return batch_of(model, lens, torch.randperm(REQUESTS, generator=gen)[:count].tolist()), inputs_of(model, count, gen)


def check(run: Callable[..., Any], plain: Model, step: Step) -> None:
    """The step's outputs, and what the cache holds after it, are those of a backend that never failed."""
    found = run(*step)
    for one, right in zip(found, plain.eager(*step), strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, right)


def replays(runner: GraphRunner) -> Callable[..., Any]:
    return lambda batch, inputs: runner.run(batch, **inputs)


def first_row(step: Step, **changes: Any) -> Step:
    """The step with other values for its first request; host copies of the lengths follow."""
    batch, fields = step[0], {}
    for name, value in changes.items():
        fields[name] = getattr(batch, name).clone()
        fields[name][0] = value
    if "seq_lens" in fields:
        fields |= dict(seq_lens_cpu=fields["seq_lens"].cpu(), extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    return replace(batch, **fields), step[1]


def with_inputs(step: Step, change: Callable[[Tensor], Tensor]) -> Step:
    return step[0], {name: change(value) for name, value in step[1].items()}


BAD: dict[str, Callable[[Step], Step]] = {
    "length-past-the-table": lambda step: first_row(step, seq_lens=CONTEXT + 9),
    "negative-length": lambda step: first_row(step, seq_lens=-1),
    "row-that-is-not-there": lambda step: first_row(step, req_pool_indices=999),
    "slot-that-is-not-there": lambda step: first_row(step, out_cache_loc=10**6),
    "rows-of-another-batch": lambda step: (step[0], {k: torch.cat([v, v]) for k, v in step[1].items()}),
    "heads-of-another-model": lambda step: with_inputs(step, lambda x: x[:, 1:]),
    "another-dtype": lambda step: with_inputs(step, lambda x: x.double()),
    "fewer-slots": lambda step: (replace(step[0], out_cache_loc=step[0].out_cache_loc[1:]), step[1]),
    "fewer-rows": lambda step: (replace(step[0], req_pool_indices=step[0].req_pool_indices[1:]), step[1]),
    "no-lengths": lambda step: (replace(step[0], seq_lens=None, seq_lens_cpu=None), step[1]),
}
every_fault = pytest.mark.parametrize("fault", BAD)


def state(model: Model, runner: GraphRunner | None = None) -> list[Tensor]:
    """Copies of all that a failed step may not change."""
    kept = model.cache()
    if runner is not None:
        results = [one for recording in runner._recorded.values() for one in recording.result]
        kept = [*kept, *runner.static.tensors.values(), *runner.inputs.values(), *results]
    return [one.clone() for one in kept]


@pytest.fixture(autouse=True)
def _values_are_looked_at(monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")  # on a GPU too


@every_form
@every_fault
def test_a_bad_batch_leaves_an_eager_backend_as_it_was(fault, form, device):
    model, plain = model_of(device, form), model_of(device, form)
    check(model.eager, plain, good(model, 1, 4))
    before = state(model)
    with pytest.raises(FaError):
        model.eager(*BAD[fault](good(model, 2, 3)))
    assert all(map(torch.equal, before, state(model)))
    check(model.eager, plain, good(model, 3, 5))
    assert all(map(torch.equal, model.cache(), plain.cache()))


@every_form
@every_fault
def test_a_bad_batch_leaves_a_captured_step_as_it_was(fault, form, device):
    model, plain = model_of(device, form), model_of(device, form)
    runner = runner_of(model)
    check(replays(runner), plain, good(model, 1, 4))
    before = state(model, runner)
    with pytest.raises(FaError):
        replays(runner)(*BAD[fault](good(model, 2, 3)))
    assert all(map(torch.equal, before, state(model, runner)))
    check(replays(runner), plain, good(model, 3, 5))
    assert all(map(torch.equal, model.cache(), plain.cache()))


@every_form
def test_more_requests_than_the_largest_bucket_are_refused_and_nothing_is_written(form, device):
    model, plain = model_of(device, form), model_of(device, form)
    runner = runner_of(model, buckets=(1, 4))
    check(replays(runner), plain, good(model, 1, 4))
    before = state(model, runner)
    for ask in (lambda: replays(runner)(*good(model, 2, 5)), lambda: runner.place(5)):
        with pytest.raises(FaError, match=r"a batch of 5 requests; captured are buckets of \[1, 4\]"):
            ask()
    assert all(map(torch.equal, before, state(model, runner)))
    check(replays(runner), plain, good(model, 3, 3))


PLACED: dict[str, Callable[[ForwardBatch], Any]] = {
    "length-past-the-table": lambda batch: batch.seq_lens[1:].fill_(CONTEXT + 9),
    "negative-length": lambda batch: batch.seq_lens[1:].fill_(-1),
    "row-that-is-not-there": lambda batch: batch.req_pool_indices[1:].fill_(999),
    "slot-that-is-not-there": lambda batch: batch.out_cache_loc[1:].fill_(10**6),
}


@every_form
@pytest.mark.parametrize("fault", PLACED)
def test_bad_values_written_in_place_never_reach_the_cache(fault, form, device):
    """They stay where they were written, and the next batch, a smaller one, pads them."""
    model, plain = model_of(device, form), model_of(device, form)
    runner = runner_of(model)
    batch, inputs = written(runner, *good(model, 1, 6))
    PLACED[fault](batch)
    inputs["k"].fill_(math.nan)
    before = state(model)
    with pytest.raises(FaError):
        runner.run(batch, **inputs)
    assert all(map(torch.equal, before, state(model)))
    check(replays(runner), plain, good(model, 2, 3))
    check(lambda *step: replays(runner)(*written(runner, *step)), plain, good(model, 3, 5))
    assert all(map(torch.equal, model.cache(), plain.cache()))


# ---- exceptions from within -----------------------------------------------------------------------------------------


class Broken(Exception):
    """What no part of the packages raises."""


def fails_at(times: int, right: Callable[..., Any]) -> Callable[..., Any]:
    """`right`, which fails at its call number `times`, once."""
    calls = [0]

    def call(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == times:
            raise Broken
        return right(*arguments, **named)

    return call


@every_form
@pytest.mark.parametrize("name", ["req_pool_indices", "seq_lens", "out_cache_loc", "q", "v"])
def test_a_copy_that_fails_halfway_leaves_nothing_for_padding_rows(name, form, monkeypatch):
    """All six rows may be those of the failed batch, or of none: the next batch, of three, pads them either way."""
    model, plain = model_of("cpu", form), model_of("cpu", form)
    runner = runner_of(model)
    check(replays(runner), plain, good(model, 1, 1))
    right, target = fa_fast.graphs.copy_together, runner.static.tensors.get(name, runner.inputs.get(name))
    assert target is not None

    def halfway(moves: Any) -> None:
        """Copies until it comes to the tensor, that one included."""
        for one in list(moves):
            right([one])
            if one[0].data_ptr() == target.data_ptr():
                raise Broken

    step = with_inputs(good(model, 2, 6), lambda x: torch.full_like(x, math.nan))
    with monkeypatch.context() as patch:
        patch.setattr(fa_fast.graphs, "copy_together", halfway)
        with pytest.raises(Broken):
            replays(runner)(*step)
    check(replays(runner), plain, good(model, 3, 3))
    pool = model.case.config.token_to_kv_pool
    assert all(buffer[: pool.page_size].isfinite().all() for buffer in (*pool.k_buffer, *pool.v_buffer))
    assert all(map(torch.equal, model.cache(), plain.cache()))


@every_form
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_an_exception_in_a_layer_leaves_the_backend_usable(layer, form, monkeypatch):
    """Eager and replayed: the keys of earlier layers are written by then, and written again by the good step."""
    for kind in ("eager", "replayed"):
        model, plain = model_of("cpu", form), model_of("cpu", form)
        run = model.eager if kind == "eager" else replays(runner_of(model))
        check(run, plain, good(model, 1, 4))
        step = good(model, 2, 3)
        one = getattr(model.backend, "attn_backends", [model.backend])[0]
        with monkeypatch.context() as patch:
            patch.setattr(one, "_run", fails_at(layer, one._run))
            with pytest.raises(Broken):
                run(*step)
        check(run, plain, step)
        check(run, plain, good(model, 3, 5))
        assert all(map(torch.equal, model.cache(), plain.cache())), kind


@every_form
def test_an_exception_while_planning_leaves_no_plan_of_an_older_batch(form, monkeypatch):
    model, plain = model_of("cpu", form), model_of("cpu", form)
    check(model.eager, plain, good(model, 1, 4))
    backends = getattr(model.backend, "attn_backends", [model.backend])
    step = good(model, 2, 4)
    with pytest.raises(FaError):
        model.eager(*BAD["length-past-the-table"](step))
    for one in backends:
        with pytest.raises(FaError, match="no batch is planned"):
            one.forward(**step[1], layer=model.layers[0], forward_batch=step[0])
    check(model.eager, plain, step)


@every_form
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_capture_that_fails_can_be_made_again(call, form, device):
    """In a warm-up or while recording on a GPU, in the run of either bucket on a CPU."""
    model, plain = model_of(device, form), model_of(device, form)
    with pytest.raises(Broken):
        runner_of(model, step=fails_at(call, model.step))
    check(model.eager, plain, good(model, 1, 4))
    runner = runner_of(model)
    check(replays(runner), plain, good(model, 2, 3))
    assert all(map(torch.equal, model.cache(), plain.cache()))
