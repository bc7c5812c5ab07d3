"""The ragged batch of one forward pass, as a server hands it to an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from fa_ref.api.errors import BadBatch
from fa_ref.api.modes import ForwardMode


@dataclass(frozen=True, kw_only=True)
class DraftInput:
    """`spec_info` of a draft model's DECODE: each request continues `topk` branches.

    What a server's own object leaves out is None until a backend that was built with it fills it in.
    """

    topk: int  # branches a request
    num_steps: int  # draft steps; each adds a token to every branch


@dataclass(frozen=True, kw_only=True)
class VerifyInput:
    """`spec_info` of TARGET_VERIFY: `draft_token_num` draft tokens a request, a chain or a tree."""

    draft_token_num: int  # T, draft tokens a request
    topk: int = 1  # above 1 the drafts form a tree, and custom_mask says which sees which
    custom_mask: Bool[Tensor, " entries"] | None = None
    """Flat: for each request draft_token_num rows of seq_lens + draft_token_num columns; None for a chain."""


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Requests r = 0 .. batch_size - 1 of one forward pass; tokens are packed in request order.

    A server's own object with these field names is accepted wherever a ForwardBatch is (see `of`).
    Lengths count tokens (logical positions). `seq_lens` is the total S = prefix + new tokens, except where
    the new tokens are drafts (DECODE with DraftInput, TARGET_VERIFY): there it counts what came before them.
    Encoder tokens are counted by encoder_lens alone; logical positions start at the first token of the text.
    """

    forward_mode: ForwardMode  # what this pass does; a server's own enum is matched by its members' names
    batch_size: int  # requests
    req_pool_indices: Int[Tensor, " requests"]  # row of each request in req_to_token
    seq_lens: Int[Tensor, " requests"]  # total tokens S, on the backend's device
    out_cache_loc: Int[Tensor, " tokens"] | None = None  # slot of every new token
    seq_lens_cpu: Int[Tensor, " requests"] | None = None  # host copy; None: never synchronise, use bounds
    extend_seq_lens: Int[Tensor, " requests"] | None = None  # new tokens L
    extend_seq_lens_cpu: Sequence[int] | None = None  # host copy; None: bounds instead
    extend_prefix_lens: Int[Tensor, " requests"] | None = None  # cached tokens P
    extend_prefix_lens_cpu: Sequence[int] | None = None  # host copy, checked against the other lengths
    encoder_lens: Int[Tensor, " requests"] | None = None  # encoder keys, the first columns of the row; 0: no encoder
    encoder_lens_cpu: Sequence[int] | None = None  # host copy; None: the width of the row instead
    encoder_out_cache_loc: Int[Tensor, " encoder_tokens"] | None = None  # slot of every new encoder token; None: none
    spec_info: DraftInput | VerifyInput | None = None  # speculative decoding: the drafts of this pass
    shared_prefix_len: int = 0  # leading tokens that all requests keep in the very same slots; for cascade_prefix
    attn_attend_prefix_cache: bool | None = None  # MLA as MHA: None absorbed, False new tokens, True a chunk
    prefix_chunk_idx: int | None = None  # MLA as MHA: which chunk of the prefix this pass attends to
    prefix_chunk_cu_seq_lens: Int[Tensor, "chunks requests_plus_1"] | None = None  # keys of each chunk, ragged
    prefix_chunk_max_seq_lens: Sequence[int] | None = None  # the longest request of each chunk
    prefix_chunk_num_tokens: Sequence[int] | None = None  # keys of each chunk; None: not compared with the keys given
    mha_one_shot: bool = False  # MLA as MHA: k and v are those of all keys of the requests, prefix included
    mha_return_lse: bool = False  # return (out, lse), for a caller that merges
    req_to_token_pool: Any = None  # None: the config's
    token_to_kv_pool: Any = None  # None: the config's

    def __post_init__(self) -> None:
        object.__setattr__(self, "forward_mode", ForwardMode.of(self.forward_mode))
        object.__setattr__(self, "shared_prefix_len", self.shared_prefix_len or 0)
        object.__setattr__(self, "spec_info", _spec_info(self.spec_info))
        if isinstance(self.seq_lens_cpu, list | tuple):
            lens = host_lengths("seq_lens_cpu", self.seq_lens_cpu)
            object.__setattr__(self, "seq_lens_cpu", torch.tensor(lens, dtype=torch.int64))

    @classmethod
    def of(cls, batch: Any) -> ForwardBatch:
        """This batch as a ForwardBatch; fields a server's object lacks keep their defaults."""
        if isinstance(batch, cls):
            return batch
        given = {f.name: getattr(batch, f.name) for f in fields(cls) if hasattr(batch, f.name)}
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in given]
        if missing:
            raise BadBatch(f"a {type(batch).__name__} without {', '.join(missing)}; a batch needs these fields")
        return cls(**given)

    def subset(self, requests: Sequence[int]) -> ForwardBatch:
        """The batch of some of its requests: rows and lengths, as planning needs them; no slots to write."""
        index = torch.tensor(requests, device=self.seq_lens.device)

        def pick(values):
            if values is None:
                return None
            return values[index.to(values.device)] if isinstance(values, Tensor) else [values[i] for i in requests]

        names = ("req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu")
        names += ("extend_prefix_lens", "extend_prefix_lens_cpu", "encoder_lens", "encoder_lens_cpu")
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


def host_lengths(name: str, lens: Any) -> list[int]:
    """A host copy of lengths as a list. Raises BadBatch for what is none: floats, None, a tensor of a device."""
    entries: Any = lens
    if isinstance(lens, Tensor):
        entries = lens.tolist() if lens.device.type == "cpu" else None
    try:
        return [index(n) for n in entries]
    except TypeError:
        raise BadBatch(f"{name} is {lens!r}; it must be a list or an integer tensor on the CPU, or None") from None


def _spec_info(info: Any) -> DraftInput | VerifyInput | None:
    if info is None or isinstance(info, DraftInput | VerifyInput):
        return info
    if hasattr(info, "draft_token_num"):
        return VerifyInput(
            draft_token_num=info.draft_token_num,
            topk=getattr(info, "topk", 1),
            custom_mask=getattr(info, "custom_mask", None),
        )
    return DraftInput(topk=getattr(info, "topk", None), num_steps=getattr(info, "num_steps", None))  # type: ignore[arg-type]
