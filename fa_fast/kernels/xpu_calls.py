"""FlashAttention's arguments as the kernels for Intel GPUs take them; both packages of such kernels share this.

They take no row index, want whole pages of some sizes, tables and tensors without gaps, and one scale a cache. Nothing
here waits for the device, and nothing is kept between calls, so that a graph records all of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_fast.kernels.capability import Capability
from fa_ref.api.pools import FP8

PAGE = 64  # of copied keys: every kernel takes it
_HINTS = frozenset({"num_splits", "num_splits_kv", "max_seqlen_k", "return_softmax_lse"})  # without them: same result


class Paged(NamedTuple):
    """A call over a cache of pages, one row of the table a sequence."""

    q: Tensor  # [tokens, heads, dim]
    k_cache: Tensor  # [pages, page_size, kv_heads, dim]
    v_cache: Tensor
    page_table: Tensor  # int32 [sequences, pages], contiguous
    cache_seqlens: Tensor  # int32 [sequences]
    cu_seqlens_q: Tensor  # int32 [sequences + 1]
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class Kernels:
    """One package of kernels. Each launch returns (out [tokens, heads, dim], lse (heads, tokens) or None)."""

    capability: Callable[[], Capability]
    reads_in_place: Callable[[int, int], bool]  # (page size, longest q)
    paged: Callable[..., tuple[Tensor, Tensor | None]]
    ragged: Callable[..., tuple[Tensor, Tensor | None]]
    latent: Callable[..., Tensor] | None = None  # absorbed MLA


def prepared(kernels: Kernels, function: str, **fixed: Any) -> Callable[..., Any]:
    """flash_attn_with_kvcache or flash_attn_varlen_func with some arguments given; called with the others."""
    run = {"flash_attn_with_kvcache": _with_kvcache, "flash_attn_varlen_func": _varlen}[function]
    return functools.partial(run, kernels, **fixed)


@torch.no_grad()
def _with_kvcache(
    kernels: Kernels,
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    **rest: Any,
) -> Any:
    if page_table is None:  # a cache of one row a sequence is a cache of one page a row
        page_table = torch.arange(k_cache.shape[0], dtype=torch.int32, device=q.device)[:, None]
    if cache_batch_idx is not None:
        page_table = page_table.index_select(0, cache_batch_idx)
    rows, starts, longest, shape = _ragged(q, cu_seqlens_q, max_seqlen_q)
    room = page_table.shape[1] * k_cache.shape[1]
    sequences = starts.shape[0] - 1
    if not isinstance(cache_seqlens, Tensor):
        keys = room if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((sequences,), keys, dtype=torch.int32, device=q.device)
    call = Paged(
        rows, k_cache, v_cache, page_table[:sequences].contiguous(), cache_seqlens.contiguous(), starts, longest,
        min(room, max_seqlen_k or room),
    )  # fmt: skip
    width = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    if qv is not None:
        return _latent(kernels, call, qv.reshape(-1, *qv.shape[-2:]), scale, shape, **rest)
    options, finish = _options(kernels, q, k_cache, longest, sequences, shape, scale, **rest)
    if not kernels.reads_in_place(k_cache.shape[1], longest):
        call = repaged(call)
    return finish(*kernels.paged(call, **options), starts, cache_seqlens)


@torch.no_grad()
def _varlen(
    kernels: Kernels,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    qv: Tensor | None = None,
    softmax_scale: float | None = None,
    **rest: Any,
) -> Any:
    if qv is not None:
        raise kernels.capability().refuse("qv over contiguous keys", "qv over a paged cache of latents")
    rows, starts, longest, shape = _ragged(q, cu_seqlens_q, max_seqlen_q)
    longest = max(2, longest)  # a bound of 1 selects the decode kernel, which reads pages
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options, finish = _options(kernels, q, k, longest, starts.shape[0] - 1, shape, scale, **rest)
    answer = kernels.ragged(
        q=rows,
        k=k.contiguous(),
        v=v.contiguous(),
        cu_seqlens_q=starts,
        cu_seqlens_k=cu_seqlens_k.contiguous(),
        max_seqlen_q=longest,
        max_seqlen_k=k.shape[0] if max_seqlen_k is None else max_seqlen_k,
        **options,
    )
    return finish(*answer, starts, cu_seqlens_k.diff())


def _ragged(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> tuple[Tensor, Tensor, int, torch.Size]:
    """q as rows, where its sequences start, a bound on one of them, and the shape of the caller's rows."""
    rows = q.reshape(-1, *q.shape[-2:]).contiguous()
    if cu_seqlens_q is not None:
        return rows, cu_seqlens_q.contiguous(), rows.shape[0] if max_seqlen_q is None else max_seqlen_q, q.shape[:-2]
    sequences, queries = q.shape[:2]
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=q.device) * queries
    return rows, starts, queries, q.shape[:2]


def _options(
    kernels: Kernels,
    q: Tensor,
    keys: Tensor,
    longest: int,
    sequences: int,
    shape: torch.Size,
    softmax_scale: float,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """The arguments that are no matter of layout, and what turns a launch's answer into the caller's."""
    capability = kernels.capability()
    capability.require_passes(
        merges=return_softmax_lse,
        one_query=longest == 1,
        group=q.shape[-2] // keys.shape[-2],
        sinks=sinks is not None,
        qv=False,
    )
    _refuse_others(capability, attention_chunk, scheduler_metadata, q_descale)
    scales: dict[str, Any] = {}
    if keys.dtype == FP8:
        kv_heads = keys.shape[-2]
        scales["k_descale"] = one_scale(capability, "k_descale", k_descale, q.device).expand(sequences, kv_heads)
        scales["v_descale"] = one_scale(capability, "v_descale", v_descale, q.device).expand(sequences, kv_heads)
    options: dict[str, Any] = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(window_size),
        softcap=softcap,
        num_splits=num_splits,
        sinks=None if sinks is None else sinks.to(q.dtype).contiguous(),
        return_softmax_lse=return_softmax_lse,
        **scales,
    )

    def finish(answer: Tensor, lse: Tensor | None, starts: Tensor, lengths: Tensor) -> Any:
        empty = _without_keys(answer.shape[0], starts, lengths) if return_softmax_lse or not causal else None
        if empty is not None:  # what the kernels leave there is not known
            answer = answer.masked_fill(empty[..., None], 0)
        if return_softmax_lse:
            assert lse is not None and empty is not None
            lse = lse.transpose(-1, -2)
            nothing = torch.full_like(lse[:1], -torch.inf) if sinks is None else sinks.to(lse.dtype)[None]
            lse = torch.where(empty, nothing, lse)
        answer = answer.to(q.dtype).view(*shape, *answer.shape[-2:])
        answer = answer if out is None else out.copy_(answer)
        return answer if lse is None or not return_softmax_lse else (answer, lse.view(*shape, answer.shape[-2]))

    return options, finish


def _without_keys(rows: int, starts: Tensor, lengths: Tensor) -> Tensor:
    """bool (rows, 1): the queries of sequences without keys. Causal ones that nothing is merged with see themselves."""
    sequence = torch.searchsorted(starts[1:], torch.arange(rows, device=starts.device), right=True)
    return (lengths == 0)[sequence.clamp(max=lengths.shape[0] - 1)][:, None]


def _latent(
    kernels: Kernels,
    call: Paged,
    qv: Tensor,
    softmax_scale: float,
    shape: torch.Size,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    **unused: Any,  # descales: the capability refuses fp8 latents
) -> Tensor:
    """Absorbed MLA: q and k_cache are rope parts, qv and v_cache latents."""
    capability = kernels.capability()
    _refuse_others(capability, attention_chunk, scheduler_metadata, q_descale)
    capability.require(
        dtype=call.q.dtype,
        kv_dtype=call.k_cache.dtype,
        head_dim=call.q.shape[-1],
        v_head_dim=qv.shape[-1],
        qv=True,
        softcap=softcap != 0,
        sinks=sinks is not None,
        lse=return_softmax_lse,
        window=tuple(window_size) != (-1, -1),
    )
    assert kernels.latent is not None, "a capability without latents refuses qv"
    answer = kernels.latent(call, qv.contiguous(), softmax_scale=softmax_scale, causal=causal)
    answer = answer.view(*shape, *answer.shape[-2:])
    return answer if out is None else out.copy_(answer)


def _refuse_others(
    capability: Capability, attention_chunk: int, scheduler_metadata: Any, q_descale: Tensor | None
) -> None:
    given = dict(attention_chunk=attention_chunk, scheduler_metadata=scheduler_metadata, q_descale=q_descale)
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            raise capability.refuse(name, "calls without it")


def repaged(call: Paged) -> Paged:
    """The keys of each sequence copied into pages of 64, in order: every page size becomes one that all kernels read.

    Slots past a sequence's length are copies of slot 0, which is finite. Costs a copy of all keys for every layer.
    """
    page_size, sequences = call.k_cache.shape[1], call.page_table.shape[0]
    pages = -(-max(1, call.max_seqlen_k) // PAGE)
    position = torch.arange(pages * PAGE, device=call.q.device)
    page = call.page_table[:, (position // page_size).clamp(max=call.page_table.shape[1] - 1)].long()
    slots = page * page_size + position % page_size
    slots = torch.where(position < call.cache_seqlens[:, None], slots, 0)
    table = torch.arange(sequences * pages, dtype=torch.int32, device=call.q.device).view(sequences, pages)
    k_cache, v_cache = (_copied(cache, slots) for cache in (call.k_cache, call.v_cache))
    return call._replace(k_cache=k_cache, v_cache=v_cache, page_table=table)


def _copied(cache: Tensor, slots: Tensor) -> Tensor:
    """[sequences * pages, PAGE, kv_heads, dim] of the cache's slots; fp8 moves as bytes."""
    tokens = cache.flatten(0, 1)
    picked = tokens.view(torch.uint8)[slots].view(FP8) if cache.dtype == FP8 else tokens[slots]
    return picked.view(-1, PAGE, *cache.shape[-2:])


def one_scale(capability: Capability, name: str, scale: Tensor | None, device: torch.device) -> Tensor:
    """The one factor of a whole cache, fp32 [1, 1], in memory of its own.

    Raises UnsupportedByProvider for one that may differ by sequence or head: told by strides, the values stay where
    they are.
    """
    if scale is None:
        return torch.ones(1, 1, device=device)
    if any(size != 1 and stride != 0 for size, stride in zip(scale.shape, scale.stride(), strict=True)):
        raise capability.refuse(f"{name} {list(scale.shape)} of a factor for each head", "one factor for a whole cache")
    return scale.as_strided((1, 1), (1, 1)).to(torch.float32, copy=True)


@functools.cache
def accepted(function: Callable[..., Any]) -> frozenset[str]:
    """The parameters of an installed function: builds differ, and version numbers do not tell."""
    return frozenset(inspect.signature(function).parameters)


def launch(function: Callable[..., Any], capability: Capability, **arguments: Any) -> Any:
    """Call by keyword, with those arguments that this build's function has.

    Raises UnsupportedByProvider for an argument that it lacks, unless the result is the same without it.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in given.keys() - accepted(function) - _HINTS:
        raise capability.refuse(
            f"a call with {name}, which the installed {function.__name__} lacks", "calls without it"
        )
    return function(**{name: value for name, value in given.items() if name in accepted(function)})
