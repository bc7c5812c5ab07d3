"""sgl-kernel for Intel GPUs, behind the common seam. Tested against the contract; this project never ran it on one.

What differs from CUDA: no qv (MLA has kernels of its own), no chunks, no tile schedule, no row index; pages of some
sizes only; a cache in fp8 keeps its queries in bf16. The source of each limit is in kernels.xpu_generations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fa_fast.kernels import xpu_calls
from fa_fast.kernels.joint import joint_view
from fa_fast.kernels.torch_cpu import merge_state, short_key_attention  # torch alone; the package's merge gives NaN
from fa_fast.kernels.xpu_calls import Kernels, Paged, launch, repaged
from fa_fast.kernels.xpu_generations import GENERATIONS, NEWEST, installed_generation, reads_in_place
from fa_fast.kernels.xpu_probe import Verdicts, narrowed, of_all_devices, probe_once
from fa_ref.api.errors import ProviderNotInstalled

CAPABILITY = GENERATIONS[NEWEST]  # until `load` has asked the device
VERDICTS: Verdicts | None = None  # of the device that was loaded last
GENERATION: str | None = None

_MLA_PAGES = (16, 32, 64, 128)


def load(device: torch.device | None = None) -> None:
    """Import the kernels and ask them, once a process and device, what they get right.

    Raises ProviderNotInstalled, with what to do, if they are missing.
    """
    global CAPABILITY, VERDICTS, GENERATION
    functions = _functions()
    GENERATION = installed_generation()
    table = GENERATIONS[GENERATION]
    # What the probe may launch is not narrowed by what it found out before.
    unbound = Kernels(lambda: GENERATIONS[NEWEST], reads_in_place, _paged, _ragged)
    VERDICTS = probe_once(functions, unbound, torch.device(device or "xpu"), _merge())
    CAPABILITY = narrowed(table, of_all_devices(functions, VERDICTS))


def _functions() -> Any:
    """The module sgl_kernel.flash_attn."""
    try:
        return import_module("sgl_kernel.flash_attn")
    except (ImportError, OSError, RuntimeError) as error:
        raise ProviderNotInstalled(
            f"an Intel GPU needs sgl-kernel built for it, and importing sgl_kernel.flash_attn failed: {error}. There "
            "is no wheel: run `python -m fa_fast.doctor` for how to build it, or use a CPU device"
        ) from error


def _merge() -> Callable[..., Any] | None:
    """The package's own merge of states, which is probed and reported, and not used."""
    package = import_module("sgl_kernel")
    return getattr(package, "merge_state_v2", None) or getattr(package, "merge_state", None)


def _paged(call: Paged, **options: Any) -> tuple[Tensor, Tensor | None]:
    answer = launch(
        _functions().flash_attn_with_kvcache,
        CAPABILITY,
        q=call.q,
        k_cache=call.k_cache,
        v_cache=call.v_cache,
        page_table=call.page_table,
        cache_seqlens=call.cache_seqlens,
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        **options,
    )
    return _parts(answer)


def _ragged(**arguments: Any) -> tuple[Tensor, Tensor | None]:
    return _parts(launch(_functions().flash_attn_varlen_func, CAPABILITY, **arguments))


def _parts(answer: Any) -> tuple[Tensor, Tensor | None]:
    return (answer, None) if isinstance(answer, Tensor) else (answer[0], answer[1])


def _latent(call: Paged, qv: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
    """flash_mla_decode where every sequence has one query, else flash_mla_prefill."""
    package = import_module("sgl_kernel")
    if call.k_cache.shape[1] not in _MLA_PAGES:
        call = repaged(call)
    rows = joint_view(call.v_cache, call.k_cache)
    cache = (torch.cat([call.v_cache, call.k_cache], dim=-1) if rows is None else rows).squeeze(2)
    page_size, sequences = cache.shape[1], call.page_table.shape[0]
    even = -call.page_table.shape[1] % max(1, 128 // page_size)  # the kernels want tables of whole 128 tokens
    table = torch.nn.functional.pad(call.page_table, (0, even)) if even else call.page_table
    shared: dict[str, Any] = dict(
        q_nope=qv, q_pe=call.q, kv_c_and_k_pe_cache=cache, page_table=table, sm_scale=softmax_scale
    )  # fmt: skip
    sizes: dict[str, Any] = dict(
        max_seq_len=max(1, table.shape[1]) * page_size,
        num_batches=sequences,
        num_heads=qv.shape[1],
        page_size=page_size,
    )
    decodes = call.max_seqlen_q == 1 and qv.shape[0] == sequences
    if decodes:
        workspace = _workspace(package.flash_mla_get_workspace_size, qv.device, num_kv_splits=1, **sizes)
        return launch(
            package.flash_mla_decode,
            CAPABILITY,
            seq_lens=call.cache_seqlens,
            workspace=workspace,
            num_kv_splits=1,
            **shared,
        )
    workspace = _workspace(package.flash_mla_prefill_get_workspace_size, qv.device, **sizes)
    return launch(
        package.flash_mla_prefill,
        CAPABILITY,
        cu_seqlens_q=call.cu_seqlens_q,
        seq_lens_k=call.cache_seqlens,
        max_seqlen_q=call.max_seqlen_q,
        workspace=workspace,
        causal=causal,
        **shared,
    )


def _workspace(size_of: Callable[..., int], device: torch.device, **sizes: int) -> Tensor:
    return torch.empty(launch(size_of, CAPABILITY, **sizes), dtype=torch.uint8, device=device)


def _capability() -> Any:
    return CAPABILITY


_KERNELS = Kernels(_capability, reads_in_place, _paged, _ragged, _latent)
prepared = partial(xpu_calls.prepared, _KERNELS)


def flash_attn_with_kvcache(**arguments: Any) -> Any:
    """Arguments and results of torch_cpu.flash_attn_with_kvcache; raises UnsupportedByProvider past CAPABILITY."""
    return prepared("flash_attn_with_kvcache", **arguments)()


def flash_attn_varlen_func(**arguments: Any) -> Any:
    """Arguments and results of torch_cpu.flash_attn_varlen_func; raises UnsupportedByProvider past CAPABILITY."""
    return prepared("flash_attn_varlen_func", **arguments)()


prefers_short_keys = None  # the definition in torch gathers keys: it is for the drafts of a tree, which are few
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
