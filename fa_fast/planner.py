"""The half of a backend that plans batches: for eager steps, inside graphs, and for servers that capture themselves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fa_fast.calls import Step
from fa_fast.graphs import PlanGraphs, prepared
from fa_fast.planning import plan_batch, plan_unchecked
from fa_ref.api import AttentionPass, AttentionPlan, BackendConfig, BadBatch, ForwardBatch, ForwardMode, TreePass
from fa_ref.api.checks import check_step
from fa_ref.api.encoder import checked_text
from fa_ref.api.planned import read_batch


class BatchPlanner:
    """Plans a batch once, for all layers. expands_trees: a tree runs as one sequence a draft, through a page table."""

    def __init__(
        self,
        config: BackendConfig,
        *,
        skip_prefill: bool,
        speculative_step_id: int,
        topk: int,
        speculative_num_steps: int,
        expands_trees: bool,
    ) -> None:
        self.config, self.skip_prefill = config, skip_prefill
        self.speculative_step_id, self.topk = speculative_step_id, topk
        self.speculative_num_steps = speculative_num_steps
        self._expands = expands_trees
        self._step: Step | None = None
        self._plan_graphs: PlanGraphs | None = None

    @property
    def forward_metadata(self) -> AttentionPlan:
        """The plan of the current batch."""
        return self._planned().plan

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch; every layer of the forward pass reuses it."""
        self.drop_plan()
        batch = self._to_plan(forward_batch)
        self.use_plan(plan_batch(batch, self.config, self.speculative_step_id))
        self._planned().remember(forward_batch, batch)

    def planned_batch(self, forward_batch: Any) -> ForwardBatch:
        """A layer's batch as a ForwardBatch. Raises BadBatch unless it is the planned one."""
        return self._planned().of(forward_batch)

    def drop_plan(self) -> None:
        """Forget the current plan: a refused batch leaves none behind."""
        self._step = None

    def use_plan(self, plan: AttentionPlan) -> None:
        """Take a plan made elsewhere: the steps of a draft are planned together."""
        self._take(self._as_run(plan))

    def _planned(self) -> Step:
        if self._step is None:
            raise BadBatch("no batch is planned; call init_forward_metadata(forward_batch) before forward")
        return self._step

    def _as_run(self, plan: AttentionPlan) -> AttentionPlan:
        """The plan with its trees as this backend runs them."""
        if not self._expands:
            return plan
        expanded = {kind: tuple(map(_expanded, passes)) for kind, passes in plan.passes.items()}
        return replace(plan, passes=expanded)

    def _take(self, plan: AttentionPlan) -> None:
        self._step = Step(plan, self.config, self._batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padded row of a captured graph: 1, on the padding slot."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int | None = None, kv_indices_buf: Any = None) -> None:
        """For a server that captures its layers itself: allocate what its graphs read, for up to max_bs requests."""
        self._plan_graphs = PlanGraphs(self.config, self._plan_in_graph, self._take, max_bs)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Record the plan of batches of this size, before the server records the layers.

        num_tokens: query rows of all bs requests, as many each. Of rows and lengths only the first bs are read, and of
        a VerifyInput no mask: values may be those of padding, row 0 and length 1.
        """
        if bs < 1 or num_tokens < bs or num_tokens % bs:
            raise BadBatch(f"num_tokens {num_tokens} for bs {bs} requests; pass 1 or more, with as many tokens each")
        tokens = num_tokens // bs
        prepared(self._plan_graphs).capture(
            self._static(bs, tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info, None), tokens
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int | None,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None = None,
        out_cache_loc: Tensor | None = None,
    ) -> None:
        """Plan a batch into the recorded tensors, before the server replays its layers. Rows past bs are not read.

        bs is a size that was captured: the server pads a smaller batch with rows 0 of length
        `get_cuda_graph_seq_len_fill_value`, whose slots are 0, and the mask of a tree with rows for them.
        out_cache_loc: [request, branch, step], which draft decoding with topk > 1 needs. seq_lens_sum and seq_lens_cpu
        are not read: nothing here needs the host.
        """
        graphs = prepared(self._plan_graphs)
        self.drop_plan()
        graphs.replay(
            self._static(bs, 0, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info, out_cache_loc)
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The host's part of a graphed step: check the batch that will be replayed. in_capture: there is none yet."""
        batch = self._to_plan(forward_batch)
        if not in_capture:
            checked_text(batch, self.config)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan on the device alone: what a graph records, ahead of the layers. The batch is one of static tensors.

        Layers must bring this very batch: which others share its values, nothing on the host can tell.
        """
        self._take(self._plan_in_graph(self._batch(forward_batch)))
        self._planned().only_for(forward_batch)

    def _plan_in_graph(self, batch: ForwardBatch) -> AttentionPlan:
        check_step(batch, self.speculative_step_id)
        return self._as_run(plan_unchecked(batch, self.config, self.speculative_step_id))

    def _static(
        self,
        bs: int,
        tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        out_cache_loc: Tensor | None,
    ) -> ForwardBatch:
        """The arguments of a server's capture or replay as a batch of bs requests."""
        extends = ForwardMode.of(forward_mode).is_draft_extend()
        batch = SimpleNamespace(
            forward_mode=forward_mode,
            batch_size=bs,
            req_pool_indices=_front(req_pool_indices, bs),
            seq_lens=_front(seq_lens, bs),
            encoder_lens=_front(encoder_lens, bs),
            spec_info=spec_info,
            out_cache_loc=out_cache_loc,
            extend_seq_lens_cpu=[tokens or prepared(self._plan_graphs).draft_tokens] * bs if extends else None,
        )
        return self._batch(batch)

    def _to_plan(self, forward_batch: Any) -> ForwardBatch:
        """A server's batch, of a mode that this backend plans."""
        batch = self._batch(forward_batch)
        if self.skip_prefill and not batch.forward_mode.is_decode_or_idle():
            raise BadBatch(f"{batch.forward_mode.name} on a backend made with skip_prefill=True")
        return batch

    def _batch(self, batch: Any) -> ForwardBatch:
        """A server's batch; a draft must be the one that this backend was built for."""
        return read_batch(batch, self.config, self.topk, self.speculative_num_steps)


def _front(values: Any, bs: int) -> Any:
    return values[:bs] if isinstance(values, Tensor) else values


def _expanded(step: AttentionPass | TreePass) -> AttentionPass:
    return step.expanded() if isinstance(step, TreePass) else step


__all__ = ["BatchPlanner"]
