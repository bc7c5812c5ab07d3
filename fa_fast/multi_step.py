"""FlashAttentionMultiStepBackend: a backend for every step of a draft, planned together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_fast.backend import FlashAttentionBackend
from fa_fast.graphs import PlanGraphs, prepared
from fa_fast.planning import plan_steps, plan_steps_unchecked
from fa_ref.api import AttentionPlan, ForwardBatch
from fa_ref.api.multi_step import MultiStepBackend


class FlashAttentionMultiStepBackend(MultiStepBackend):
    """One FlashAttentionBackend a draft step, planned together by this package's plan_steps, also inside a graph."""

    _backend = FlashAttentionBackend
    _plan_steps = staticmethod(plan_steps)
    _plan_graphs: PlanGraphs | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int | None = None) -> None:
        """For a server that captures its layers itself: allocate what its graphs read, for up to max_bs requests."""
        self._plan_graphs = PlanGraphs(self.config, self._plans_in_graph, self._take, max_bs)

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: Any) -> None:
        """Record the plans of all steps for batches of this size, before the server records the layers."""
        prepared(self._plan_graphs).capture(self._read(forward_batch))

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: Any, bs: int) -> None:
        """Plan all steps of the first bs requests into the recorded tensors, before the server replays its layers."""
        graphs, batch = prepared(self._plan_graphs), self._read(forward_batch)
        for backend in self.attn_backends:
            backend.drop_plan()
        loc = batch.out_cache_loc
        slots = None if loc is None else loc[: bs * self.topk * self.speculative_num_steps]
        encoder = None if batch.encoder_lens is None else batch.encoder_lens[:bs]
        rows, lens = batch.req_pool_indices[:bs], batch.seq_lens[:bs]
        graphs.replay(
            replace(
                batch, batch_size=bs, req_pool_indices=rows, seq_lens=lens, seq_lens_cpu=None, out_cache_loc=slots,
                encoder_lens=encoder, encoder_lens_cpu=None,
            )
        )  # fmt: skip

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan all steps on the device alone: what a graph records, ahead of the layers."""
        self._take(self._plans_in_graph(self._read(forward_batch)))
        for backend in self.attn_backends:
            backend._planned().only_for(forward_batch)

    def _plans_in_graph(self, batch: ForwardBatch) -> list[AttentionPlan]:
        plans = plan_steps_unchecked(batch, self.config, self.speculative_num_steps)
        return [backend._as_run(plan) for backend, plan in zip(self.attn_backends, plans, strict=True)]

    def _take(self, plans: list[AttentionPlan]) -> None:
        for backend, plan in zip(self.attn_backends, plans, strict=True):
            backend._take(plan)


__all__ = ["FlashAttentionMultiStepBackend"]
