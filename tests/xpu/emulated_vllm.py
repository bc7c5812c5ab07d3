"""What `import vllm_xpu_kernels.flash_attn_interface` gives on a machine with an Intel GPU, on CPU tensors.

Written from the record of release 0.1.16.2 of github.com/vllm-project/vllm-xpu-kernels, and from nothing of fa_fast.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.xpu.dense import FP8, attend, descaled, is_int32, need, read_pages, spans
from tests.xpu.signatures import with_signature

_UNBUILT = ("q_v", "alibi_slopes", "return_attn_probs")


def modules() -> dict[str, ModuleType]:
    """The modules by name, for sys.modules."""
    package, interface = ModuleType("vllm_xpu_kernels"), ModuleType("vllm_xpu_kernels.flash_attn_interface")
    package.__path__ = []
    function: Any = with_signature("vllm_xpu_kernels", "flash_attn_varlen_func", _varlen)
    interface.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    return {"vllm_xpu_kernels": package, "vllm_xpu_kernels.flash_attn_interface": interface}


def _varlen(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    block_table: Tensor | None,
    return_softmax_lse: bool,
    out: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    s_aux: Tensor | None,
    **call: Any,
) -> Any:
    """Pages [pages, page_size, kv_heads, dim] under a block_table with seqused_k; or rows under cu_seqlens_k."""
    for name in _UNBUILT:
        need(not isinstance(call[name], Tensor) and not call[name], f"{name} is not built")
    need(call["dropout_p"] == 0, "no dropout")
    need(q.dtype in (torch.bfloat16, torch.float16), f"q must be bf16 or fp16, got {q.dtype}")
    need(k.dtype in (q.dtype, FP8), f"a cache of q's dtype or e4m3, got {k.dtype}")
    is_int32(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    if block_table is not None:
        page_size = k.shape[1]
        need(page_size in (16, 32) or page_size % 64 == 0, f"page size 16, 32 or a multiple of 64, got {page_size}")
        need(seqused_k is not None and cu_seqlens_k is None, "a paged call takes seqused_k, and no cu_seqlens_k")
        assert seqused_k is not None
        lens = seqused_k.tolist()
        need(block_table.shape[0] == len(lens), "a row of the block table for each sequence")
        keys, values = ([read_pages(x, block_table[i], n) for i, n in enumerate(lens)] for x in (k, v))
    else:
        need(cu_seqlens_k is not None, "contiguous keys need cu_seqlens_k")
        assert cu_seqlens_k is not None
        lens = cu_seqlens_k.diff().tolist()
        keys, values = ([x[start:end] for start, end in spans(cu_seqlens_k)] for x in (k, v))
    need(cu_seqlens_q.shape[0] == len(lens) + 1, "as many sequences of keys as of queries")
    need(type(max_seqlen_q) is int and type(max_seqlen_k) is int, "max_seqlen_q and max_seqlen_k must be int")
    need(max(cu_seqlens_q.diff().tolist(), default=0) <= max_seqlen_q, "max_seqlen_q is too small")
    need(max(lens, default=0) <= max_seqlen_k, "max_seqlen_k is too small")
    answer, lse = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan), torch.full(q.shape[:2], torch.nan)
    for (start, end), key, value in zip(spans(cu_seqlens_q), keys, values, strict=True):
        answer[start:end], lse[start:end] = attend(
            q[start:end],
            descaled(key, k_descale),
            descaled(value, v_descale),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            window=(-1, -1) if window_size is None else tuple(window_size),
            cap=softcap,
            sinks=s_aux,
        )
    answer = answer if out is None else out.copy_(answer)
    return (answer, lse.T.contiguous()) if return_softmax_lse else answer
