"""Steps captured once and replayed: buckets of batch sizes over one set of static inputs, planning included.

    runner = GraphRunner(backend, step, ForwardMode.DECODE, buckets=[1, 2, 4, 8], inputs=dict(q=q, k=k, v=v))
    out = runner.run(batch, q=q, k=k, v=v)

`step(batch, **inputs)` runs the layers of a planned batch. A replay copies the batch's rows, lengths and slots to the
static inputs and launches one graph: page tables, lengths and schedules are computed inside it. What the caller writes
there himself is not copied:

    batch, inputs = runner.place(requests=3)
    batch.seq_lens.copy_(lens)  # ... and all the others
    out = runner.run(batch, **inputs)
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fa_fast.planning.fixed import FixedBatch
from fa_fast.recording import Recorder, Recording
from fa_ref.api import BackendConfig, BadBatch, BadConfig, DraftInput, ForwardBatch, ForwardMode, VerifyInput
from fa_ref.api.checks import check_shapes, reads_values
from fa_ref.api.encoder import checked_text
from fa_ref.api.planned import read_batch

PADDING_ROW, PADDING_SLOT = 0, 0


class StaticBatch:
    """The tensors of a batch where a recorded step reads them: for up to `max_requests` requests of one mode.

    A row that no request has is the padding row, of the shortest length that the mode allows, on the padding slot.
    Rows and lengths are int32, as kernels read them; slots int64, as pools are indexed.
    draft_tokens: query tokens a request in DRAFT_EXTEND, where every request has as many.
    """

    def __init__(
        self,
        config: BackendConfig,
        mode: ForwardMode,
        max_requests: int,
        spec_info: DraftInput | VerifyInput | None = None,
        draft_tokens: int = 0,
    ) -> None:
        self.config, self.mode, self.max_requests, self.spec_info = config, mode, max_requests, spec_info
        self.tokens, self.slots = _per_request(mode, spec_info, draft_tokens)
        self.held = 0  # requests, from the front, whose rows may hold something else than padding
        device, fill_len = config.device, draft_tokens if mode.is_draft_extend() else 1
        self._padding: dict[str, Tensor] = dict(
            req_pool_indices=torch.full((max_requests,), PADDING_ROW, dtype=torch.int32, device=device),
            seq_lens=torch.full((max_requests,), fill_len, dtype=torch.int32, device=device),
            out_cache_loc=torch.full((max_requests * self.slots,), PADDING_SLOT, dtype=torch.int64, device=device),
        )
        if config.is_encoder_decoder:
            self._padding["encoder_lens"] = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.tensors = {name: value.clone() for name, value in self._padding.items()}
        self._storages = {_storage(value) for value in self.tensors.values()}
        self._new = torch.full((max_requests,), self.tokens, dtype=torch.int32, device=device)
        self._mask: Tensor | None = None
        if isinstance(spec_info, VerifyInput) and (spec_info.topk > 1 or spec_info.custom_mask is not None):
            width = config.req_to_token_pool.req_to_token.shape[1]
            entries = max_requests * spec_info.draft_token_num * width
            self._mask = torch.ones(entries, dtype=torch.bool, device=device)
        self._views: dict[int, FixedBatch] = {}
        self._constants: dict[Any, Tensor] = {}

    def view(self, requests: int) -> FixedBatch:
        """The first `requests` of it as a batch without host copies of its lengths."""
        if requests not in self._views:
            self._views[requests] = self._view(requests)
        return self._views[requests]

    def _view(self, requests: int) -> FixedBatch:
        info, extends = self.spec_info, self.mode.is_draft_extend()
        if isinstance(info, VerifyInput):
            info = replace(info, custom_mask=self._mask)
        tensors: dict[str, Any] = {name: value[: requests * self._each(name)] for name, value in self.tensors.items()}
        return FixedBatch(
            forward_mode=self.mode,
            batch_size=requests,
            extend_seq_lens=self._new[:requests] if extends else None,
            extend_seq_lens_cpu=[self.tokens] * requests if extends else None,
            spec_info=info,
            constants=self._constants,
            **tensors,
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a checked batch in, and make padding of the rows that the one before it had beyond."""
        count = batch.batch_size
        self.holds(count)
        copy_together(self._moves(batch, self.view(count)))
        self.held = count

    def holds(self, requests: int) -> None:
        """Rows of so many requests are about to be written: a copy that fails halfway leaves them to be padded."""
        self.held = max(self.held, requests)

    def _moves(self, batch: ForwardBatch, view: ForwardBatch) -> Iterable[tuple[Tensor, Tensor]]:
        """(where to, what) of every tensor; a field that the batch leaves out is padding."""
        count = batch.batch_size
        if batch is not view:
            for name, padding in self._padding.items():
                value = getattr(batch, name)
                yield getattr(view, name), padding[: count * self._each(name)] if value is None else value
            mask = getattr(batch.spec_info, "custom_mask", None)
            if self._mask is not None and mask is not None:
                yield self._mask[: mask.numel()], mask
        if count < self.held:
            for name, padding in self._padding.items():
                rows = slice(count * self._each(name), self.held * self._each(name))
                yield self.tensors[name][rows], padding[rows]

    def _each(self, name: str) -> int:
        return self.slots if name == "out_cache_loc" else 1

    def check(self, batch: ForwardBatch) -> None:
        """Raise BadBatch for a batch of another mode or shape than what is recorded, or a larger one."""
        info = batch.spec_info
        same = _shape(info) == _shape(self.spec_info) and batch.forward_mode is self.mode
        if not same or batch.batch_size > self.max_requests:
            raise BadBatch(
                f"{batch.batch_size} requests of {_named(batch.forward_mode, info)}; captured is "
                f"{_named(self.mode, self.spec_info)}, of up to {self.max_requests}"
            )
        for name in ("token_to_kv_pool", "req_to_token_pool"):
            if getattr(batch, name) not in (None, getattr(self.config, name)):
                raise BadBatch(
                    f"{name} of the batch is not the config's, which graphs read: make a runner for each pool"
                )
        for name, static in self.tensors.items():
            check_apart(name, getattr(batch, name), static, self._storages)
        lens = batch.extend_seq_lens_cpu
        if self.mode.is_draft_extend() and (lens is None or any(int(n) != self.tokens for n in lens)):
            raise BadBatch(
                f"extend_seq_lens_cpu is {lens}; a captured DRAFT_EXTEND has {self.tokens} tokens in every request: "
                "run a ragged one without a graph"
            )

    def given(self, batch: ForwardBatch) -> ForwardBatch:
        """A batch of a server's own capture as it is checked: with the lengths that all requests have.

        Padding rows of DRAFT_EXTEND may have length 1, which counts fewer tokens than they run.
        """
        if not self.mode.is_draft_extend():
            return batch
        lens, rows = batch.seq_lens, batch.req_pool_indices
        if reads_values(self.config) and getattr(lens, "shape", None) == getattr(rows, "shape", ()):
            lens = torch.where(rows == PADDING_ROW, lens.clamp(min=self.tokens), lens)
        return replace(batch, seq_lens=lens, extend_seq_lens=self._new[: batch.batch_size])

    def check_values(self, batch: ForwardBatch) -> None:
        """Raise BadBatch or BadPageTable for what a caller wrote to a view, where it may be read."""
        info = batch.spec_info
        if isinstance(info, VerifyInput) and self._mask is not None:
            entries = info.draft_token_num * (int(batch.seq_lens.sum()) + batch.batch_size * info.draft_token_num)
            batch = replace(batch, spec_info=replace(info, custom_mask=self._mask[:entries]))
        checked_text(batch, self.config)


def check_apart(name: str, value: Any, static: Tensor, storages: set[int]) -> None:
    """Raise BadBatch for a value in another place of the static tensors: a copy would read what it overwrites."""
    if isinstance(value, Tensor) and value.data_ptr() != static.data_ptr() and _storage(value) in storages:
        raise BadBatch(f"{name} lies in the runner's static tensors, elsewhere than it is read; pass a clone of it")


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def copy_together(moves: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each (target, source) in as few launches as their dtypes allow. What lies there already is left."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in moves:
        if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
            targets, sources = groups.setdefault((target.dtype, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)  # type: ignore[reportPrivateImportUsage]


def _per_request(mode: ForwardMode, info: Any, draft_tokens: int) -> tuple[int, int]:
    """Query tokens and slots of one request. Raises BadConfig for a mode that has no fixed number."""
    if mode.is_target_verify() and isinstance(info, VerifyInput):
        return info.draft_token_num, info.draft_token_num
    if mode.is_decode() and isinstance(info, DraftInput):
        assert info.topk is not None and info.num_steps is not None
        return info.topk, info.topk * info.num_steps
    if mode.is_decode() and info is None:
        return 1, 1
    if mode.is_draft_extend() and draft_tokens > 0:
        return draft_tokens, draft_tokens
    raise BadConfig(
        f"no graph of {_named(mode, info)} with draft_tokens {draft_tokens}; captured are DECODE, "
        "DECODE with DraftInput, TARGET_VERIFY with VerifyInput, and DRAFT_EXTEND with draft_tokens, as many in every "
        "request"
    )


def _shape(info: Any) -> Any:
    """What of a spec_info a recorded step depends on."""
    if isinstance(info, VerifyInput):
        return "verify", info.draft_token_num, info.topk > 1 or info.custom_mask is not None
    return info


def _named(mode: ForwardMode, info: Any) -> str:
    """A mode and its spec_info in a message, without the mask."""
    if isinstance(info, VerifyInput):
        form = "a chain" if info.topk == 1 and info.custom_mask is None else "a tree"
        return f"{mode.name} with spec_info of {info.draft_token_num} drafts, {form}"
    return f"{mode.name} with spec_info {info!r}"


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where batches of one size are read and answered."""

    batch: FixedBatch
    inputs: dict[str, Tensor]
    recording: Recording
    result: Any  # of the recording, the rows of the batch


class GraphRunner:
    """Captures a step over buckets of batch sizes, and replays the smallest one that holds a batch.

    backend: a FlashAttentionBackend or FlashAttentionMultiStepBackend of this package, planned inside the graph.
    step(batch, **inputs): the layers of the batch; returns a tensor, or a tuple or dict of them, whose rows are the
    batch's (any number a request). inputs: tensors with the rows of the largest bucket; they show shapes and dtypes,
    and are copied. Pools and weights are read where they are. It is run to warm up before it is recorded, on padding
    rows, so what it does beside its tensors is done then too.
    mode, spec_info: of every batch, the server's own objects included; of a VerifyInput the mask is not read.
    draft_tokens: query tokens a request in DRAFT_EXTEND.

    On CUDA and XPU a step is one graph (on XPU contract-tested, never run on Intel hardware); on a CPU it is run again
    over the same static inputs.
    Raises BadConfig for no or unsorted buckets, and for a mode without a fixed number of tokens a request.
    """

    def __init__(
        self,
        backend: Any,
        step: Callable[..., Any],
        mode: Any,
        buckets: Sequence[int],
        inputs: Mapping[str, Tensor],
        *,
        spec_info: Any = None,
        draft_tokens: int = 0,
    ) -> None:
        self.buckets = list(buckets)
        if not self.buckets or self.buckets != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise BadConfig(f"buckets {self.buckets}; pass rising batch sizes from 1 on")
        most = self.buckets[-1]
        rowless = [name for name, value in inputs.items() if not isinstance(value, Tensor) or value.dim() == 0]
        if rowless:
            raise BadConfig(f"inputs {', '.join(rowless)} are no tensors with a row for each token or request")
        uneven = [name for name, value in inputs.items() if value.shape[0] % most]
        if uneven:
            raise BadConfig(f"inputs {', '.join(uneven)}: {most} requests, the largest bucket, cannot share their rows")
        self.backend, self.config, self.step = backend, backend.config, step
        none = torch.zeros(0, dtype=torch.int32)
        kind = self._as_batch(
            SimpleNamespace(forward_mode=mode, batch_size=0, req_pool_indices=none, seq_lens=none, spec_info=spec_info)
        )
        self.static = StaticBatch(backend.config, kind.forward_mode, most, kind.spec_info, draft_tokens)
        self.inputs = {name: torch.zeros_like(value) for name, value in inputs.items()}
        self._storages = {_storage(value) for value in self.inputs.values()}
        self._recorder = Recorder(backend.config.device)
        self._places: dict[int, _Place] = {}
        self._recorded: dict[int, Recording] = {}
        for bucket in reversed(self.buckets):  # the largest first: smaller ones fit into its memory
            self._recorded[bucket] = self._recorder.record(self._work(bucket))
            self._place(bucket)

    def place(self, requests: int) -> tuple[ForwardBatch, dict[str, Tensor]]:
        """A batch of so many requests and its inputs, where the graph reads them: write there, then `run` them.

        Such a run launches the graph and nothing else, and pads the rows that a larger batch before it has used: what
        was written for a batch is there for its own run, and not after that of a smaller one. The
        values written are checked only where they may be read: on a CPU, and under FA_CHECK=1.
        Raises BadBatch for no request, and for more than the largest bucket holds.
        """
        place = self._place(requests)
        self.static.holds(requests)
        return place.batch, dict(place.inputs)

    def run(self, batch: Any, **inputs: Tensor) -> Any:
        """The step's result for a batch: views of static outputs, which the next run overwrites.

        Raises BadBatch for a batch that is larger than the largest bucket or otherwise not what was captured; nothing
        is copied or run then.
        """
        place = self._places.get(batch.batch_size) if isinstance(batch, FixedBatch) else None
        if place is None or batch is not place.batch:
            batch = self._read(batch)
            place = self._place(batch.batch_size)
            self.static.check(batch)
        elif reads_values(self.config):
            self.static.check_values(batch)
        self._check_inputs(inputs, place)
        self._fill(batch, inputs, place)
        place.recording.replay()
        return place.result

    def _as_batch(self, batch: Any) -> ForwardBatch:
        topk, steps = getattr(self.backend, "topk", 0), getattr(self.backend, "speculative_num_steps", 0)
        return read_batch(batch, self.config, topk, steps)

    def _read(self, batch: Any) -> ForwardBatch:
        batch = self._as_batch(batch)
        if batch.batch_size == 0:
            raise BadBatch("a batch without requests; an idle step needs no graph")
        checked_text(batch, self.config)
        return batch

    def _place(self, requests: int) -> _Place:
        if requests not in self._places:
            self._places[requests] = self._make_place(requests)
        return self._places[requests]

    def _make_place(self, requests: int) -> _Place:
        if not 1 <= requests <= self.buckets[-1]:
            raise BadBatch(
                f"a batch of {requests} requests; captured are buckets of {self.buckets}: add a larger one, or run it "
                "without a graph"
            )
        bucket = self.buckets[bisect.bisect_left(self.buckets, requests)]
        recording = self._recorded[bucket]
        return _Place(
            batch=self.static.view(requests),
            inputs=self._views(requests),
            recording=recording,
            result=_first(recording.result, requests, bucket),
        )

    def _check_inputs(self, inputs: Mapping[str, Tensor], place: _Place) -> None:
        if inputs.keys() != place.inputs.keys():
            raise BadBatch(f"inputs {sorted(inputs)}; the step was captured with {sorted(self.inputs)}")
        for name, value in inputs.items():
            static = place.inputs[name]
            if value is static:
                continue
            if not isinstance(value, Tensor) or value.shape != static.shape or value.dtype != static.dtype:
                found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise BadBatch(
                    f"{name} is {found}; for {place.batch.batch_size} requests it must be {static.dtype} of shape "
                    f"{tuple(static.shape)}"
                )
            check_apart(name, value, static, self._storages)

    def _fill(self, batch: ForwardBatch, inputs: Mapping[str, Tensor], place: _Place) -> None:
        self.static.holds(batch.batch_size)
        copy_together((place.inputs[name], value) for name, value in inputs.items())
        if batch.batch_size < self.static.held:
            stale = [self._rows(name, batch.batch_size, self.static.held) for name in self.inputs]
            for dtype in {value.dtype for value in stale}:  # padding stays finite, whatever it held
                of_dtype = [value for value in stale if value.dtype == dtype]
                torch._foreach_zero_(of_dtype)  # type: ignore[reportPrivateImportUsage]
        self.static.fill(batch)

    def _views(self, requests: int) -> dict[str, Tensor]:
        return {name: self._rows(name, 0, requests) for name in self.inputs}

    def _rows(self, name: str, start: int, end: int) -> Tensor:
        each = self.inputs[name].shape[0] // self.buckets[-1]
        return self.inputs[name][start * each : end * each]

    def _work(self, bucket: int) -> Callable[[], Any]:
        batch, views = self.static.view(bucket), self._views(bucket)

        def work() -> Any:
            self.backend.init_forward_metadata_in_graph(batch)
            return self.step(batch, **views)

        return work


def _first(result: Any, count: int, bucket: int) -> Any:
    """The rows of the first `count` of `bucket` requests, in every tensor of a result."""
    if isinstance(result, Mapping):
        return {name: _first(one, count, bucket) for name, one in result.items()}
    if isinstance(result, tuple | list):
        parts = [_first(one, count, bucket) for one in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if not isinstance(result, Tensor) or result.dim() == 0 or result.shape[0] % bucket:
        found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise BadConfig(
            f"the step returned {found} for {bucket} requests; return tensors, or tuples or dicts of them, with as "
            "many rows for every request"
        )
    return result[: result.shape[0] // bucket * count]


class PlanGraphs:
    """Plans at fixed addresses, for a server that captures its layers itself: one recording a mode and batch size.

    plan: of a static batch, on the device alone. take: makes a backend use what `plan` returned.

    `capture` before the server records its layers, `replay` before it replays them.
    """

    def __init__(
        self,
        config: BackendConfig,
        plan: Callable[[ForwardBatch], Any],
        take: Callable[[Any], None],
        max_requests: int,
    ) -> None:
        self.config, self.max_requests, self.draft_tokens = config, max_requests, 0
        self._plan, self._take = plan, take
        self._recorder = Recorder(config.device)
        self._static: dict[Any, StaticBatch] = {}
        self._recorded: dict[Any, Recording] = {}

    def capture(self, batch: ForwardBatch, draft_tokens: int = 0) -> None:
        """Record the plan of batches of this mode, size and spec_info, and take it.

        draft_tokens: query tokens a request; 0 where the mode and spec_info say them. Values may be anything.
        """
        static = self._static_for(batch, draft_tokens)
        static.check(batch)
        check_shapes(static.given(batch), self.config)
        if draft_tokens not in (0, static.tokens):
            raise BadBatch(
                f"num_tokens counts {draft_tokens} for each request; {_named(batch.forward_mode, batch.spec_info)} has "
                f"{static.tokens}"
            )
        self._static[self._key(batch)[:2]] = static
        if batch.forward_mode.is_draft_extend():
            self.draft_tokens = static.tokens
        static.fill(batch)
        view = static.view(batch.batch_size)
        recording = self._recorder.record(lambda: self._plan(view))
        self._recorded[self._key(batch)] = recording
        self._take(recording.result)

    def replay(self, batch: ForwardBatch) -> None:
        """Plan a batch into the tensors of the recorded plan, and take it. Raises BadBatch if none is recorded."""
        recording = self._recorded.get(self._key(batch))
        if recording is None:
            raise BadBatch(
                f"no captured plan of {batch.batch_size} requests of {_named(batch.forward_mode, batch.spec_info)}; "
                "call init_forward_metadata_capture_cuda_graph with that size first"
            )
        static = self._static[self._key(batch)[:2]]
        static.check(batch)
        checked_text(static.given(batch), self.config)
        info = batch.spec_info
        if isinstance(info, DraftInput) and info.topk != 1 and batch.out_cache_loc is None:
            raise BadBatch("draft decoding with topk > 1 needs out_cache_loc [request, branch, step], which is None")
        static.fill(batch)
        recording.replay()
        self._take(recording.result)

    def _static_for(self, batch: ForwardBatch, draft_tokens: int) -> StaticBatch:
        if batch.batch_size > self.max_requests:
            raise BadBatch(f"{batch.batch_size} requests; init_cuda_graph_state was called for {self.max_requests}")
        kept = self._static.get(self._key(batch)[:2])
        return kept or StaticBatch(self.config, batch.forward_mode, self.max_requests, batch.spec_info, draft_tokens)

    @staticmethod
    def _key(batch: ForwardBatch) -> tuple[Any, ...]:
        return batch.forward_mode, _shape(batch.spec_info), batch.batch_size


def prepared(graphs: PlanGraphs | None) -> PlanGraphs:
    """The graphs of a backend. Raises BadBatch before init_cuda_graph_state has made them."""
    if graphs is None:
        raise BadBatch("no graph state; call init_cuda_graph_state(max_bs) before capturing or replaying")
    return graphs


__all__ = ["GraphRunner", "PlanGraphs", "StaticBatch"]
