"""sgl-kernel's FlashAttention-3 on NVIDIA GPUs of compute capability 9.0, behind the common seam.

What its arguments mean beyond their names, and why each line here is as it is, was checked on an H200.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_fast.kernels import flash_mla
from fa_fast.kernels.capability import Capability
from fa_fast.kernels.fa3_op import Operator, find_operator
from fa_fast.kernels.installed import fa3_functions
from fa_ref.api.pools import FP8

_OF_LAYER = ("qv", "softmax_scale", "sinks", "q_descale", "k_descale", "v_descale", "out")
_SAME = [(dim, dim) for dim in (64, 96, 128, 192, 256)]

CAPABILITY = Capability(
    provider="sgl_cuda",
    device="cuda",
    head_dims=frozenset([*_SAME, (192, 128)]),
    page_sizes=None,
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset({torch.bfloat16, torch.float16, FP8}),
    softcap=True,
    sinks=True,
    lse=True,
    qv_dims=frozenset({(64, 512), (64, 256), (32, 512), (32, 256)}),
    qv_dtypes=frozenset({torch.bfloat16, torch.float16}),
    qv_trees=False,
    window=True,
    out=True,
    attention_chunk=True,
    scheduler_metadata=True,
    remedy="Run the layer on a CPU device (provider torch_cpu) or in fa_ref.",
)


def load(device: torch.device | None = None) -> None:
    """Raise ProviderNotInstalled, with what to do, unless FA3 can be called."""
    fa3_functions()
    _operator()


def _fa3() -> Any:
    return fa3_functions()


@functools.cache
def _accepts(function: str, argument: str) -> bool:
    """Whether this build takes an argument: builds differ, and version numbers do not tell."""
    return argument in inspect.signature(getattr(_fa3(), function)).parameters


@functools.cache
def _operator() -> Operator | None:
    """FA3's operator, or None where the build's Python function is called: chosen once, and the doctor says which."""
    found = find_operator()
    return found if isinstance(found, Operator) else None


def prepared(
    function: str, *, return_softmax_lse: bool = False, scheduler_metadata: Any = None, **fixed: Any
) -> Callable[..., Any]:
    """flash_attn_with_kvcache or flash_attn_varlen_func with some arguments given; called with the others, by keyword.

    lse comes back as a (tokens, heads) view of the kernel's (heads, tokens).
    With a FlashMLASchedule for metadata, FlashMLA answers instead.
    """
    if function == "flash_attn_with_kvcache":
        fixed.pop("max_seqlen_k", None)  # FA3 reads it off the table
    schedule = scheduler_metadata if isinstance(scheduler_metadata, flash_mla.FlashMLASchedule) else None
    metadata = {} if schedule is not None or scheduler_metadata is None else dict(scheduler_metadata=scheduler_metadata)
    launch = _launcher(function, **metadata, **fixed)
    keys = "k_cache" if function == "flash_attn_with_kvcache" else "k"

    def call(**given: Any) -> Any:
        q, sinks, out = given["q"], given.get("sinks"), given.get("out")
        if schedule is not None and sinks is None:
            return flash_mla.attend(schedule=schedule, return_softmax_lse=return_softmax_lse, **fixed, **given)
        if given.get("softmax_scale") is None:
            qv = given.get("qv")
            given["softmax_scale"] = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5
        if given[keys].dtype == FP8:
            given["out"] = None  # its result is bf16, whatever `out` is
            if q.dtype != FP8:
                kv_heads = given[keys].shape[-2]
                given["q"], given["q_descale"] = _quantized(
                    q, fixed.get("cu_seqlens_q"), given.get("q_descale"), kv_heads
                )
        if sinks is not None:
            given["sinks"] = sinks.to(torch.bfloat16).contiguous()
        if out is not None and not _accepts(function, "out"):
            given["out"] = None
        answer, lse, *_ = launch(given)
        if answer.dtype != q.dtype:  # fp8 queries come back as bf16
            answer = answer.to(q.dtype)
        if out is not None and answer.data_ptr() != out.data_ptr():
            answer = out.copy_(answer)
        if not return_softmax_lse:
            return answer
        if sinks is not None:  # FA3 forgets the sink of a row without keys; a merge would lose it
            lse = torch.where(lse.isneginf(), sinks.float()[:, None], lse)
        return answer, lse.transpose(-1, -2)

    return call


def _launcher(function: str, **fixed: Any) -> Callable[[dict[str, Any]], Any]:
    """The build's function with these arguments; takes the others as a dict and returns (out, lse, ...)."""
    operator = _operator()
    if operator is not None:
        return operator.prepared(**fixed)
    call = getattr(_fa3(), function)

    def launch(given: dict[str, Any]) -> Any:
        named = {name: value for name, value in given.items() if value is not None}
        return call(**fixed, **named, return_softmax_lse=True)

    return launch


def flash_attn_with_kvcache(*, q: Tensor, k_cache: Tensor, v_cache: Tensor, **arguments: Any) -> Any:
    """FA3 over a paged cache: out, or (out, lse)."""
    of_layer = {name: arguments.pop(name) for name in _OF_LAYER if name in arguments}
    return prepared("flash_attn_with_kvcache", **arguments)(q=q, k_cache=k_cache, v_cache=v_cache, **of_layer)


def flash_attn_varlen_func(*, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    """FA3 over contiguous ragged keys."""
    of_layer = {name: arguments.pop(name) for name in _OF_LAYER if name in arguments}
    return prepared("flash_attn_varlen_func", **arguments)(q=q, k=k, v=v, **of_layer)


def get_scheduler_metadata(
    *,
    sequences: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool,
    window_size: tuple[int, int],
    has_softcap: bool,
    num_splits: int,
    queries: int,
    longest_k: int,
    indexed: bool,
    qv: bool,
    packed: bool,
) -> Tensor | flash_mla.FlashMLASchedule | None:
    """The tile schedule of a call, made once a step for all layers that share a geometry; None if the build has none.

    queries: query rows of all sequences. longest_k: a bound on the keys of one. indexed: the table has a row index.
    qv: absorbed MLA, where the schedule also says whether FlashMLA is to answer. packed: q and qv lie side by side.
    """
    plain = window_size == (-1, -1) and not has_softcap and num_splits == 0 and not indexed
    served = qv and plain and (head_dim, v_head_dim) == flash_mla.DIMS and dtype == torch.bfloat16
    if served and flash_mla.is_faster(
        sequences=sequences, queries=queries, heads=heads, page_size=page_size, longest_q=max_seqlen_q,
        longest_k=longest_k, packed=packed,
    ):  # fmt: skip
        return flash_mla.schedule(cache_seqlens, queries // sequences * heads)
    if getattr(_fa3(), "get_scheduler_metadata", None) is None:
        return None
    return _fa3().get_scheduler_metadata(
        batch_size=sequences,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_heads=heads,
        num_heads_k=kv_heads,
        headdim=head_dim,
        headdim_v=v_head_dim,
        qkv_dtype=dtype,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        page_size=page_size,
        causal=causal,
        window_size=window_size,
        has_softcap=has_softcap,
        num_splits=num_splits,
    )


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge with the LSE in any layout: sgl-kernel's own merge wants two transposed copies first."""
    from fa_fast.triton_ops.merge_state import merge_state as launch

    return launch(out_a, lse_a, out_b, lse_b, out)


def short_key_attention(*arguments: Any, num_splits: int = 0, **named: Any) -> Tensor:
    """The keys of a window or of a tree in one Triton kernel; arguments of kernels.short_keys' definition.

    num_splits makes no difference: a program adds up a request's drafts in an order that no other request changes.
    """
    from fa_fast.triton_ops.short_keys import short_key_attention as launch

    return launch(*arguments, **named)


def _quantized(
    q: Tensor, cu_seqlens_q: Tensor | None, q_descale: Tensor | None, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """q in e4m3 and its factors [sequences, kv_heads], the caller's included. Batched q: a sequence a batch row."""
    from fa_fast.triton_ops.quantize_q import quantize_q

    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    quantized, factor = quantize_q(q.reshape(-1, *q.shape[-2:]), cu_seqlens_q, kv_heads)
    return quantized.view(q.shape), factor if q_descale is None else factor * q_descale
