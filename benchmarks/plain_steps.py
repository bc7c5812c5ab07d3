"""The peer of whole steps: metadata by torch in launches of its own before each replay, bare kernel calls in the graph.

That is how serving backends do it: the lengths and page tables of a captured size are filled on the host's order; a
tree to verify, and the branches of a draft, are expanded to a page table with one row a query; in the graph, two
calls and a merge, with the two log-sum-exps transposed for it. No call shares its tile schedule with another.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_problems import StepProblem
from fa_fast.kernels import torch_cpu
from fa_fast.recording import Recorder
from fa_ref import DraftInput, VerifyInput


def kernels(device: str) -> Any:
    """attend(**arguments) -> out, or (out, lse (heads, tokens)); merge(out, lse, out, lse), lses (tokens, heads)."""
    if device == "cuda":
        from sgl_kernel import merge_state_v2
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        return SimpleNamespace(attend=flash_attn_with_kvcache, merge=merge_state_v2)

    def attend(**arguments: Any) -> Any:
        result = torch_cpu.flash_attn_with_kvcache(**arguments)
        return (result[0], result[1].T) if arguments.get("return_softmax_lse") else result

    return SimpleNamespace(attend=attend, merge=torch_cpu.merge_state)


class Tables:
    """What one kernel call reads, at fixed addresses: lengths, their sums, a page table, starts of queries."""

    def __init__(self, sequences: int, pages: int, each: int, device: Any) -> None:
        self.cache_seqlens = torch.ones(sequences, dtype=torch.int32, device=device)
        self.cu_seqlens_k = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(0, sequences * each + 1, each, dtype=torch.int32, device=device)
        self.max_seqlen_q = each

    def sum_lengths(self) -> None:
        self.cu_seqlens_k[1:].copy_(torch.cumsum(self.cache_seqlens, dim=0, dtype=torch.int32))


class PlainStep:
    """One captured size of one mode. `run` is what a server calls between two forwards."""

    def __init__(self, problem: StepProblem) -> None:
        self.problem, batch, config = problem, problem.batch, problem.config
        self.info, self.page = batch.spec_info, config.page_size
        self.rows, device = config.req_to_token_pool.req_to_token, config.device
        self.kernels = kernels(str(device))
        self.q = problem.q.view(problem.q.shape[0], -1, problem.layers[0].head_dim).clone()
        self.each = self.q.shape[0] // batch.batch_size
        self.strided = torch.arange(0, self.rows.shape[1], self.page, device=device)
        self.offsets = torch.arange(self.each, device=device)
        self.steps = self.info.num_steps if isinstance(self.info, DraftInput) else 1
        pages = self.strided.shape[0]
        self.prefix = [Tables(batch.batch_size, pages, self.each, device) for _ in range(self.steps)]
        self.suffix: list[Tables] = []
        if self.expands:
            drafts = [self.each] if isinstance(self.info, VerifyInput) else [s + 1 for s in range(self.steps)]
            self.suffix = [Tables(self.q.shape[0], count, 1, device) for count in drafts]
        self.metadata()
        self.recording = Recorder(str(device)).record(self.layers)

    @property
    def expands(self) -> bool:
        """Whether queries of one request see different drafts, so that a second call has a row for each."""
        return getattr(self.info, "topk", 0) > 1

    def run(self) -> Any:
        self.metadata()
        self.recording.replay()
        return self.recording.result

    def metadata(self) -> None:
        """Lengths and page tables for the batch, each in launches of its own."""
        for step, tables in enumerate(self.prefix):
            self._fill_prefix(tables, step)
        if isinstance(self.info, VerifyInput) and self.expands:
            self._fill_tree(self.suffix[0])
        elif self.expands:
            for step, tables in enumerate(self.suffix):
                self._fill_branches(tables, step)

    def _fill_prefix(self, tables: Tables, step: int) -> None:
        batch = self.problem.batch
        new = 0
        if isinstance(self.info, VerifyInput) and not self.expands:
            new = self.info.draft_token_num
        elif isinstance(self.info, DraftInput) and not self.expands:
            new = step + 1
        lens = batch.seq_lens_cpu
        assert lens is not None
        longest = int(lens.max()) + new
        tables.cache_seqlens.copy_(batch.seq_lens + new if new else batch.seq_lens)
        tables.sum_lengths()
        pages = -(-longest // self.page)
        slots = self.rows[batch.req_pool_indices[:, None], self.strided[:pages][None]]
        tables.page_table[:, :pages].copy_(slots if self.page == 1 else slots // self.page)

    def _fill_tree(self, tables: Tables) -> None:
        """A row a draft: the slots of the drafts it sees in front, in their order."""
        batch, drafts = self.problem.batch, self.each
        assert isinstance(self.info, VerifyInput) and self.info.custom_mask is not None
        columns = batch.seq_lens[:, None] + self.offsets
        widths = (batch.seq_lens + drafts).repeat_interleave(drafts)
        starts = torch.cumsum(widths, dim=0) - widths
        seen = self.info.custom_mask[columns.repeat_interleave(drafts, dim=0) + starts[:, None]]
        order = torch.where(seen, self.offsets, self.offsets + drafts).sort(dim=1).indices
        slots = self.rows[batch.req_pool_indices].gather(1, columns).repeat_interleave(drafts, dim=0)
        tables.page_table.copy_(slots.gather(1, order))
        tables.cache_seqlens.copy_(seen.sum(dim=1))
        tables.sum_lengths()

    def _fill_branches(self, tables: Tables, step: int) -> None:
        """A row a branch: its own drafts up to this step."""
        loc = self.problem.batch.out_cache_loc
        assert loc is not None
        tables.page_table.copy_(loc.view(-1, self.steps)[:, : step + 1])
        tables.cache_seqlens.fill_(step + 1)
        tables.sum_lengths()

    def layers(self) -> Any:
        """The layers of every step: what the graph records."""
        outs = []
        for step in range(self.steps):
            for layer in self.problem.layers:
                out = self._attend(layer, step)
            outs.append(out)
        return tuple(outs)

    def _attend(self, layer: Any, step: int) -> Tensor:
        call: Callable[..., Any] = self.kernels.attend
        prefix = self._arguments(layer, self.prefix[step], self.page)
        if not self.expands:
            return call(**prefix, causal=True)
        suffix = self._arguments(layer, self.suffix[step], 1)
        out, lse, *_ = call(**prefix, causal=False, return_softmax_lse=True)
        own, own_lse, *_ = call(**suffix, causal=False, return_softmax_lse=True)
        return self.kernels.merge(out, lse.T.contiguous(), own, own_lse.T.contiguous())[0]

    def _arguments(self, layer: Any, tables: Tables, page: int) -> dict[str, Any]:
        keys, values = self.problem.config.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return dict(
            q=self.q,
            k_cache=keys.view(-1, page, *keys.shape[1:]),
            v_cache=values.view(-1, page, *values.shape[1:]),
            page_table=tables.page_table,
            cache_seqlens=tables.cache_seqlens,
            cu_seqlens_q=tables.cu_seqlens_q,
            max_seqlen_q=tables.max_seqlen_q,
            softmax_scale=layer.scaling,
        )
