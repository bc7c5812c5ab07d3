"""FlashInfer as a peer of whole steps: its plan before each replay, its kernels in the graph. Written for 0.6.13."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_problems import StepProblem
from fa_fast.recording import Recorder
from fa_ref import VerifyInput

WORKSPACE = 256 << 20  # bytes


def installed() -> bool:
    return find_spec("flashinfer") is not None


class FlashInferStep:
    """A decode, or a tree to verify under its mask, of requests of one length each.

    `run` is what a server calls: gather the page ids, plan, replay.
    """

    def __init__(self, problem: StepProblem) -> None:
        self.problem, config, batch = problem, problem.config, problem.batch
        layer, device = problem.layers[0], config.device
        self.verify = batch.spec_info if isinstance(batch.spec_info, VerifyInput) else None
        assert batch.seq_lens_cpu is not None
        drafts = self.verify.draft_token_num if self.verify else 0
        self.lens = (batch.seq_lens_cpu + drafts).int()
        pages = -(-self.lens // config.page_size)
        self.columns = torch.arange(int(pages.max()), device=device) * config.page_size
        assert int(pages.min()) == int(pages.max()), "requests of one length each"
        self.indptr = torch.nn.functional.pad(torch.cumsum(pages, 0, dtype=torch.int32), (1, 0))
        self.last = (self.lens - 1) % config.page_size + 1
        self.q = problem.q.view(-1, layer.tp_q_head_num, layer.head_dim).clone()
        self.heads: dict[str, Any] = dict(
            num_qo_heads=layer.tp_q_head_num, num_kv_heads=layer.tp_k_head_num, page_size=config.page_size,
            q_data_type=self.q.dtype, kv_data_type=self.q.dtype, sm_scale=layer.scaling,
        )  # fmt: skip
        self.wrapper = self._make(batch.batch_size, int(self.indptr[-1]), device)
        self.metadata()
        self.recording = Recorder("cuda").record(self.layers)

    def run(self) -> Any:
        self.metadata()
        self.recording.replay()
        return self.recording.result

    def _make(self, requests: int, pages: int, device: Any) -> Any:
        import flashinfer

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        if self.verify is None:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=ints(requests + 1),
                paged_kv_indices_buffer=ints(pages), paged_kv_last_page_len_buffer=ints(requests),
            )  # fmt: skip
        # Masks are packed on the device, by starts that are there: its plan reads them back.
        self.indptr, self.last = self.indptr.to(device), self.last.to(device)
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * self.verify.draft_token_num
        assert self.verify.custom_mask is not None
        packed = torch.zeros(self.verify.custom_mask.numel() // 8 + requests, dtype=torch.uint8, device=device)
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, use_cuda_graph=True, qo_indptr_buf=ints(requests + 1), paged_kv_indptr_buf=ints(requests + 1),
            paged_kv_indices_buf=ints(pages), paged_kv_last_page_len_buf=ints(requests), custom_mask_buf=packed,
            mask_indptr_buf=ints(requests + 1), backend="fa2",
        )  # fmt: skip

    def metadata(self) -> None:
        """Page ids of all requests end to end, and FlashInfer's plan."""
        config, batch = self.problem.config, self.problem.batch
        slots = config.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], self.columns[None]]
        indices = (slots if config.page_size == 1 else slots // config.page_size).flatten()
        head_dim = self.q.shape[-1]
        if self.verify is None:
            self.wrapper.plan(self.indptr, indices, self.last, head_dim=head_dim, **self.heads)
        else:
            self.wrapper.plan(
                self.starts, self.indptr, indices, self.last, head_dim_qk=head_dim,
                custom_mask=self.verify.custom_mask, **self.heads,
            )  # fmt: skip

    def layers(self) -> Any:
        pool, page = self.problem.config.token_to_kv_pool, self.problem.config.page_size
        for layer in self.problem.layers:
            caches = tuple(buffer.view(-1, page, *buffer.shape[1:]) for buffer in pool.get_kv_buffer(layer.layer_id))
            out = self.wrapper.run(self.q, caches)
        return (out,)
