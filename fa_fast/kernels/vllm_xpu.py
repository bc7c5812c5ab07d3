"""vllm-xpu-kernels (0.1.16.2) for Intel GPUs, behind the common seam. Contract-tested, never run on Intel hardware.

One function serves both kinds of call. Against sgl_xpu: pages of 16 and 32 are read in place too, sinks go by another
name and to every head dim, and there is no absorbed MLA. What a build gets wrong is taken away by the probe.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fa_fast.kernels import xpu_calls
from fa_fast.kernels.torch_cpu import merge_state, short_key_attention
from fa_fast.kernels.xpu_calls import Kernels, Paged, launch
from fa_fast.kernels.xpu_generations import GENERATIONS, NEWEST, REMEDY
from fa_fast.kernels.xpu_probe import Verdicts, narrowed, of_all_devices, probe_once
from fa_ref.api.errors import ProviderNotInstalled

TABLE = replace(
    GENERATIONS[NEWEST],
    provider="vllm_xpu",
    sink_dims=None,
    decode_group=None,
    qv_dims=frozenset(),
    qv_dtypes=frozenset(),
    remedy=REMEDY.format(other="provider='sgl_xpu', whose kernels have other limits and absorbed MLA"),
)
CAPABILITY = TABLE  # until `load` has asked the device
VERDICTS: Verdicts | None = None  # of the device that was loaded last


def reads_in_place(page_size: int, longest_q: int) -> bool:
    """Whether the kernels take pages of this size."""
    return page_size in (16, 32) or page_size % 64 == 0


def load(device: torch.device | None = None) -> None:
    """As sgl_xpu.load."""
    global CAPABILITY, VERDICTS
    unbound = Kernels(lambda: TABLE, reads_in_place, _paged, _ragged)
    functions = _functions()
    VERDICTS = probe_once(functions, unbound, torch.device(device or "xpu"), None)
    CAPABILITY = narrowed(TABLE, of_all_devices(functions, VERDICTS))


def _functions() -> Any:
    try:
        return import_module("vllm_xpu_kernels.flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:
        raise ProviderNotInstalled(
            "provider='vllm_xpu' needs vllm-xpu-kernels, and importing vllm_xpu_kernels.flash_attn_interface failed: "
            f"{error}. Install vllm-xpu-kernels beside its torch, or leave provider out for sgl_xpu"
        ) from error


def _paged(call: Paged, **options: Any) -> tuple[Tensor, Tensor | None]:
    return _launched(
        q=call.q,
        k=call.k_cache,
        v=call.v_cache,
        block_table=call.page_table,
        seqused_k=call.cache_seqlens,
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        **options,
    )


def _ragged(**arguments: Any) -> tuple[Tensor, Tensor | None]:
    return _launched(**arguments)


def _launched(*, sinks: Tensor | None = None, num_splits: int = 0, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    one = {"num_splits_kv": 1} if num_splits == 1 else {}  # its num_splits is another thing
    found = launch(_functions().flash_attn_varlen_func, CAPABILITY, s_aux=sinks, **one, **arguments)
    return (found, None) if isinstance(found, Tensor) else (found[0], found[1])


prepared = partial(xpu_calls.prepared, Kernels(lambda: CAPABILITY, reads_in_place, _paged, _ragged))


def flash_attn_with_kvcache(**arguments: Any) -> Any:
    """Arguments and results of torch_cpu.flash_attn_with_kvcache; raises UnsupportedByProvider past CAPABILITY."""
    return prepared("flash_attn_with_kvcache", **arguments)()


def flash_attn_varlen_func(**arguments: Any) -> Any:
    """Arguments and results of torch_cpu.flash_attn_varlen_func; raises UnsupportedByProvider past CAPABILITY."""
    return prepared("flash_attn_varlen_func", **arguments)()


prefers_short_keys = None
get_scheduler_metadata = None

__all__ = [
    "CAPABILITY",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "load",
    "merge_state",
    "prefers_short_keys",
    "prepared",
    "short_key_attention",
]
