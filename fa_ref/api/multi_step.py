"""A backend for every step of a draft, planned together: what both packages' multi-step backends are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fa_ref.api.batch import DraftInput, ForwardBatch
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadConfig, UnsupportedByProvider
from fa_ref.api.plan import AttentionPlan
from fa_ref.api.planned import read_batch


class MultiStepBackend:
    """One backend a draft step; `attn_backends[s]` answers the layers of step s.

    The steps of one draft differ only in how many draft tokens are behind them. They are planned at once and share the
    page table of their prefix. runner: a server's draft model runner, or a BackendConfig. topk: branches a request.

    Raises BadConfig for less than one step or branch, BadBatch for a batch that is not a draft of this shape.
    """

    _backend: ClassVar[Callable[..., Any]]  # the package's FlashAttentionBackend
    _plan_steps: ClassVar[Callable[..., list[AttentionPlan]]]  # the package's plan_steps

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int, provider: str | None = None) -> None:
        if topk < 1 or speculative_num_steps < 1:
            raise BadConfig(f"topk={topk}, speculative_num_steps={speculative_num_steps}; both must be at least 1")
        self.config = BackendConfig.from_model_runner(model_runner)
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [
            self._backend(
                self.config,
                speculative_step_id=step,
                topk=topk,
                speculative_num_steps=speculative_num_steps,
                provider=provider,
            )
            for step in range(speculative_num_steps)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step of a DECODE batch with DraftInput; out_cache_loc is [request, branch, step]."""
        for backend in self.attn_backends:
            backend.drop_plan()
        batch = self._read(forward_batch)
        if batch.forward_mode.is_idle():
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)
            return
        if not isinstance(batch.spec_info, DraftInput):
            raise BadBatch(
                f"spec_info is {batch.spec_info!r}; this backend plans DraftInput(topk={self.topk}, "
                f"num_steps={self.speculative_num_steps})"
            )
        plans = self._plan_steps(batch, self.config, self.speculative_num_steps)
        for backend, plan in zip(self.attn_backends, plans, strict=True):
            backend.use_plan(plan)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int | None = None) -> None:
        raise UnsupportedByProvider("the reference captures no graphs; use init_forward_metadata, or fa_fast")

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: Any) -> None:
        self.init_cuda_graph_state(0)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: Any, bs: int) -> None:
        self.init_cuda_graph_state(bs)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What a graph records in fa_fast. Here it plans, as init_forward_metadata does."""
        self.init_forward_metadata(forward_batch)

    def _read(self, batch: Any) -> ForwardBatch:
        """A server's batch; a draft must be the one that this backend was built for."""
        return read_batch(batch, self.config, self.topk, self.speculative_num_steps)
