"""Steps captured once and replayed: buckets of batch sizes over one set of static inputs, planning included.

    runner = GraphRunner(backend, step, ForwardMode.DECODE, buckets=[1, 2, 4, 8], inputs=dict(q=q, k=k, v=v))
    out = runner.run(batch, q=q, k=k, v=v)

`step(batch, **inputs)` runs the layers of a planned batch. A replay copies the batch's rows, lengths and slots to the
static inputs and launches one graph: page tables, lengths and schedules are computed inside it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_fast.recording import Recorder, Recording
from fa_ref.api import BackendConfig, BadBatch, BadConfig, DraftInput, ForwardBatch, ForwardMode, VerifyInput
from fa_ref.api.encoder import checked_text
from fa_ref.api.planned import read_batch

PADDING_ROW, PADDING_SLOT = 0, 0


class StaticBatch:
    """The tensors of a batch where a recorded step reads them: for up to `max_requests` requests of one mode.

    A row that no request has is the padding row, of the shortest length that the mode allows, on the padding slot.
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
        self.fill_len = draft_tokens if mode.is_draft_extend() else 1
        device = config.device
        self.tensors: dict[str, Tensor] = dict(
            req_pool_indices=torch.full((max_requests,), PADDING_ROW, dtype=torch.int64, device=device),
            seq_lens=torch.full((max_requests,), self.fill_len, dtype=torch.int64, device=device),
            out_cache_loc=torch.full((max_requests * self.slots,), PADDING_SLOT, dtype=torch.int64, device=device),
        )
        if config.is_encoder_decoder:
            self.tensors["encoder_lens"] = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._new = torch.full((max_requests,), self.tokens, dtype=torch.int64, device=device)
        self._mask: Tensor | None = None
        if isinstance(spec_info, VerifyInput) and (spec_info.topk > 1 or spec_info.custom_mask is not None):
            width = config.req_to_token_pool.req_to_token.shape[1]
            entries = max_requests * spec_info.draft_token_num * width
            self._mask = torch.ones(entries, dtype=torch.bool, device=device)

    def view(self, requests: int) -> ForwardBatch:
        """The first `requests` of it as a batch without host copies of its lengths."""
        info = self.spec_info
        if isinstance(info, VerifyInput):
            info = replace(info, custom_mask=self._mask)
        loc = self.tensors["out_cache_loc"][: requests * self.slots]
        tensors: dict[str, Any] = self.tensors | dict(out_cache_loc=loc)
        tensors |= {name: t[:requests] for name, t in self.tensors.items() if name != "out_cache_loc"}
        extends = self.mode.is_draft_extend()
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=requests,
            extend_seq_lens=self._new[:requests] if extends else None,
            extend_seq_lens_cpu=[self.tokens] * requests if extends else None,
            spec_info=info,
            **tensors,
        )

    def fill(self, batch: ForwardBatch, requests: int) -> None:
        """Copy a batch in, and pad it to `requests`. Raises BadBatch for one of another mode or shape."""
        self._check(batch, requests)
        count = batch.batch_size
        for name, target in self.tensors.items():
            value, each = getattr(batch, name), self.slots if name == "out_cache_loc" else 1
            pad = self.fill_len if name == "seq_lens" else 0
            if value is None:
                target[: requests * each].fill_(pad)
                continue
            target[: count * each].copy_(value, non_blocking=True)
            target[count * each : requests * each].fill_(pad)
        mask = getattr(batch.spec_info, "custom_mask", None)
        if self._mask is not None and mask is not None:
            self._mask[: mask.numel()].copy_(mask, non_blocking=True)

    def _check(self, batch: ForwardBatch, requests: int) -> None:
        info = batch.spec_info
        same = _shape(info) == _shape(self.spec_info) and batch.forward_mode is self.mode
        if not same or batch.batch_size > requests:
            raise BadBatch(
                f"a {batch.forward_mode.name} batch of {batch.batch_size} requests with spec_info {info!r}; captured "
                f"is {self.mode.name} of up to {requests} with {self.spec_info!r}"
            )
        lens = batch.extend_seq_lens_cpu
        if self.mode.is_draft_extend() and (lens is None or any(int(n) != self.tokens for n in lens)):
            raise BadBatch(
                f"extend_seq_lens_cpu is {lens}; a captured DRAFT_EXTEND has {self.tokens} tokens in every request: "
                "run a ragged one without a graph"
            )


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
        f"no graph of {mode.name} with spec_info {info!r} and draft_tokens {draft_tokens}; captured are DECODE, "
        "DECODE with DraftInput, TARGET_VERIFY with VerifyInput, and DRAFT_EXTEND with draft_tokens, as many in every "
        "request"
    )


def _shape(info: Any) -> Any:
    """What of a spec_info a recorded step depends on."""
    if isinstance(info, VerifyInput):
        return "verify", info.draft_token_num, info.topk > 1 or info.custom_mask is not None
    return info


class GraphRunner:
    """Captures a step over buckets of batch sizes, and replays the smallest one that holds a batch.

    backend: a FlashAttentionBackend or FlashAttentionMultiStepBackend of this package, planned inside the graph.
    step(batch, **inputs): the layers of the batch; returns a tensor, or a tuple of them, whose rows are the batch's
    (any number a request). inputs: tensors with the rows of the largest bucket; they show shapes and dtypes, and are
    copied. Pools and weights are read where they are.

    On CUDA and XPU a step is one graph; on a CPU it is run again over the same static inputs.
    Raises BadConfig for no or unsorted buckets, and for a mode without a fixed number of tokens a request.
    """

    def __init__(
        self,
        backend: Any,
        step: Callable[..., Any],
        mode: ForwardMode,
        buckets: Sequence[int],
        inputs: Mapping[str, Tensor],
        *,
        spec_info: DraftInput | VerifyInput | None = None,
        draft_tokens: int = 0,
    ) -> None:
        self.buckets = list(buckets)
        if not self.buckets or self.buckets != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise BadConfig(f"buckets {self.buckets}; pass rising batch sizes from 1 on")
        most = self.buckets[-1]
        uneven = [name for name, value in inputs.items() if value.shape[0] % most]
        if uneven:
            raise BadConfig(f"inputs {', '.join(uneven)}: {most} requests, the largest bucket, cannot share their rows")
        self.backend, self.config, self.step = backend, backend.config, step
        self.static = StaticBatch(backend.config, mode, most, spec_info, draft_tokens)
        self.inputs = {name: torch.zeros_like(value) for name, value in inputs.items()}
        self._recorder = Recorder(backend.config.device)
        self._recorded: dict[int, Recording] = {}
        for bucket in reversed(self.buckets):  # the largest first: smaller ones fit into its memory
            self._recorded[bucket] = self._recorder.record(self._work(bucket))

    def run(self, batch: Any, **inputs: Tensor) -> Any:
        """The step's result for a batch: views of static outputs, which the next run overwrites.

        Raises BadBatch for a batch that is larger than the largest bucket or otherwise not what was captured; nothing
        is copied or run then.
        """
        batch = self._read(batch)
        place = bisect.bisect_left(self.buckets, batch.batch_size)
        if place == len(self.buckets):
            raise BadBatch(
                f"a batch of {batch.batch_size} requests; captured are buckets of {self.buckets}: add a larger one, or "
                "run it without a graph"
            )
        bucket, count = self.buckets[place], batch.batch_size
        self._check_inputs(inputs, count)
        self.static.fill(batch, bucket)
        for name, value in inputs.items():
            rows = self._rows(name)
            self.inputs[name][: count * rows].copy_(value, non_blocking=True)
            self.inputs[name][count * rows : bucket * rows].zero_()  # padding stays finite, whatever it held
        recording = self._recorded[bucket]
        recording.replay()
        return _first(recording.result, count, bucket)

    def _read(self, batch: Any) -> ForwardBatch:
        topk, steps = getattr(self.backend, "topk", 0), getattr(self.backend, "speculative_num_steps", 0)
        batch = read_batch(batch, self.config, topk, steps)
        if batch.batch_size == 0:
            raise BadBatch("a batch without requests; an idle step needs no graph")
        checked_text(batch, self.config)
        return batch

    def _check_inputs(self, inputs: Mapping[str, Tensor], count: int) -> None:
        if set(inputs) != set(self.inputs):
            raise BadBatch(f"inputs {sorted(inputs)}; the step was captured with {sorted(self.inputs)}")
        for name, value in inputs.items():
            expected = (count * self._rows(name), *self.inputs[name].shape[1:])
            if tuple(value.shape) != expected or value.dtype != self.inputs[name].dtype:
                raise BadBatch(
                    f"{name} is {value.dtype} of shape {tuple(value.shape)}; for {count} requests it must be "
                    f"{self.inputs[name].dtype} of shape {expected}"
                )

    def _rows(self, name: str) -> int:
        return self.inputs[name].shape[0] // self.buckets[-1]

    def _work(self, bucket: int) -> Callable[[], Any]:
        batch = self.static.view(bucket)
        views = {name: value[: bucket * self._rows(name)] for name, value in self.inputs.items()}

        def work() -> Any:
            self.backend.init_forward_metadata_in_graph(batch)
            return self.step(batch, **views)

        return work


def _first(result: Any, count: int, bucket: int) -> Any:
    """The rows of the first `count` of `bucket` requests, in every tensor of a result."""
    if isinstance(result, tuple | list):
        return type(result)(_first(one, count, bucket) for one in result)
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
        """Record the plan of batches of this mode, size and spec_info, and take it."""
        if batch.forward_mode.is_draft_extend():
            self.draft_tokens = draft_tokens
        static = self._static_for(batch)
        static.fill(batch, batch.batch_size)
        view = static.view(batch.batch_size)
        recording = self._recorder.record(lambda: self._plan(view))
        self._recorded[self._key(batch)] = recording
        self._take(recording.result)

    def replay(self, batch: ForwardBatch) -> None:
        """Plan a batch into the tensors of the recorded plan, and take it. Raises BadBatch if none is recorded."""
        recording = self._recorded.get(self._key(batch))
        if recording is None:
            raise BadBatch(
                f"no captured plan of {batch.forward_mode.name} for {batch.batch_size} requests with spec_info "
                f"{batch.spec_info!r}; call init_forward_metadata_capture_cuda_graph with that size first"
            )
        self._static[self._key(batch)[:2]].fill(batch, batch.batch_size)
        recording.replay()
        self._take(recording.result)

    def _static_for(self, batch: ForwardBatch) -> StaticBatch:
        if batch.batch_size > self.max_requests:
            raise BadBatch(f"{batch.batch_size} requests; init_cuda_graph_state was called for {self.max_requests}")
        key = self._key(batch)[:2]
        if key not in self._static:
            self._static[key] = StaticBatch(
                self.config, batch.forward_mode, self.max_requests, batch.spec_info, self.draft_tokens
            )
        return self._static[key]

    @staticmethod
    def _key(batch: ForwardBatch) -> tuple[Any, ...]:
        return batch.forward_mode, _shape(batch.spec_info), batch.batch_size


def prepared(graphs: PlanGraphs | None) -> PlanGraphs:
    """The graphs of a backend. Raises BadBatch before init_cuda_graph_state has made them."""
    if graphs is None:
        raise BadBatch("no graph state; call init_cuda_graph_state(max_bs) before capturing or replaying")
    return graphs


__all__ = ["GraphRunner", "PlanGraphs", "StaticBatch"]
