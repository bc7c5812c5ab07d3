"""The ragged batch of one forward pass, as a server hands it to an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from fa_ref.api.modes import ForwardMode


@dataclass(frozen=True, kw_only=True)
class DraftInput:
    """`spec_info` of a draft model's DECODE: each request continues `topk` branches."""

    topk: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class VerifyInput:
    """`spec_info` of TARGET_VERIFY: `draft_token_num` draft tokens a request, a chain or a tree."""

    draft_token_num: int
    topk: int = 1
    custom_mask: Bool[Tensor, " entries"] | None = None
    """Flat: for each request draft_token_num rows of seq_lens + draft_token_num columns; None for a chain."""


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Requests r = 0 .. batch_size - 1 of one forward pass; tokens are packed in request order.

    A server's own object with these field names is accepted wherever a ForwardBatch is (see `of`).
    Lengths count tokens (logical positions). `seq_lens` is the total S = prefix + new tokens, except where
    the new tokens are drafts (DECODE with DraftInput, TARGET_VERIFY): there it counts what came before them.
    """

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: Int[Tensor, " requests"]  # row of each request in req_to_token
    seq_lens: Int[Tensor, " requests"]  # on the backend's device
    out_cache_loc: Int[Tensor, " tokens"] | None = None  # slot of every new token
    seq_lens_cpu: Int[Tensor, " requests"] | None = None  # host copy; None: never synchronise, use bounds
    extend_seq_lens: Int[Tensor, " requests"] | None = None  # new tokens L; EXTEND, MIXED, ...
    extend_seq_lens_cpu: Sequence[int] | None = None
    extend_prefix_lens: Int[Tensor, " requests"] | None = None  # cached tokens P
    extend_prefix_lens_cpu: Sequence[int] | None = None
    encoder_lens: Int[Tensor, " requests"] | None = None  # encoder keys, the first columns of the row
    encoder_out_cache_loc: Int[Tensor, " encoder_tokens"] | None = None
    spec_info: DraftInput | VerifyInput | None = None
    shared_prefix_len: int = 0  # leading tokens that all requests keep in the very same slots; for cascade_prefix
    attn_attend_prefix_cache: bool | None = None  # MLA as MHA: None absorbed, False new tokens, True a chunk
    prefix_chunk_idx: int | None = None
    prefix_chunk_cu_seq_lens: Int[Tensor, "chunks requests_plus_1"] | None = None
    prefix_chunk_max_seq_lens: Sequence[int] | None = None
    mha_return_lse: bool = False
    req_to_token_pool: Any = None  # None: the config's
    token_to_kv_pool: Any = None

    @classmethod
    def of(cls, batch: Any) -> ForwardBatch:
        """This batch as a ForwardBatch; fields a server's object lacks keep their defaults."""
        if isinstance(batch, cls):
            return batch
        given = {f.name: getattr(batch, f.name) for f in fields(cls) if hasattr(batch, f.name)}
        given["forward_mode"] = ForwardMode.of(given["forward_mode"])
        given["spec_info"] = _spec_info(given.get("spec_info"))
        return cls(**given)

    def subset(self, requests: Sequence[int]) -> ForwardBatch:
        """The batch of some of its requests: rows and lengths, as planning needs them; no slots to write."""
        index = torch.tensor(requests, device=self.seq_lens.device)

        def pick(values):
            if values is None:
                return None
            return values[index.to(values.device)] if isinstance(values, Tensor) else [values[i] for i in requests]

        names = ("req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu")
        names += ("extend_prefix_lens", "extend_prefix_lens_cpu", "encoder_lens")
        picked = {name: pick(getattr(self, name)) for name in names}
        return replace(self, batch_size=len(requests), out_cache_loc=None, **picked)

    def grown(self, tokens: int) -> ForwardBatch:
        """The batch with `tokens` more keys a request, already in req_to_token, and no longer speculative."""
        host = self.seq_lens_cpu
        return replace(
            self,
            seq_lens=self.seq_lens + tokens,
            seq_lens_cpu=None if host is None else host + tokens,
            out_cache_loc=None,
            spec_info=None,
        )

    def as_extend(self) -> ForwardBatch:
        """A chain of T drafts to verify, as an extend of T tokens behind seq_lens cached ones."""
        assert isinstance(self.spec_info, VerifyInput)
        drafts, host = self.spec_info.draft_token_num, self.seq_lens_cpu
        return replace(
            self.grown(drafts),
            forward_mode=ForwardMode.EXTEND,
            extend_seq_lens=torch.full_like(self.seq_lens, drafts),
            extend_seq_lens_cpu=[drafts] * self.batch_size,
            extend_prefix_lens=self.seq_lens,
            extend_prefix_lens_cpu=None if host is None else host.tolist(),
        )

    def token_rows(self, requests: Sequence[int]) -> Int32[Tensor, " tokens"]:
        """The query rows of some requests, in order. Needs extend_seq_lens_cpu."""
        assert self.extend_seq_lens_cpu is not None
        ends = torch.cumsum(torch.tensor(list(self.extend_seq_lens_cpu)), dim=0).tolist()
        rows = [torch.arange(ends[i] - self.extend_seq_lens_cpu[i], ends[i]) for i in requests]
        return torch.cat(rows).to(self.seq_lens.device, torch.int32)


def _spec_info(info: Any) -> DraftInput | VerifyInput | None:
    if info is None or isinstance(info, DraftInput | VerifyInput):
        return info
    if hasattr(info, "draft_token_num"):
        return VerifyInput(
            draft_token_num=info.draft_token_num,
            topk=getattr(info, "topk", 1),
            custom_mask=getattr(info, "custom_mask", None),
        )
    return DraftInput(topk=getattr(info, "topk", 1), num_steps=getattr(info, "num_steps", 1))
