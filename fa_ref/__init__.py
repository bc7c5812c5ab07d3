"""What an LLM-serving attention backend computes, in code to read.

Start with `FlashAttentionBackend`, `plan_batch` and `fa_ref.masks`. Every name here exists in `fa_fast` too, with
the same signature. Names load on first use, so that `fa_ref.api` needs torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fa_ref.api import *
    from fa_ref.backend import FlashAttentionBackend
    from fa_ref.kernels import flash_attn_varlen_func, flash_attn_with_kvcache, merge_state
    from fa_ref.mla import mla_attention
    from fa_ref.multi_step import FlashAttentionMultiStepBackend
    from fa_ref.planning import plan_batch
    from fa_ref.planning.local import make_local_attention_virtual_batches
    from fa_ref.speculative import build_tree, compact_kv, grow, select, start, verify_greedy, verify_sampled

_HOME = {
    "FlashAttentionMultiStepBackend": "fa_ref.multi_step",
    "FlashAttentionBackend": "fa_ref.backend",
    "build_tree": "fa_ref.speculative",
    "compact_kv": "fa_ref.speculative",
    "flash_attn_varlen_func": "fa_ref.kernels",
    "flash_attn_with_kvcache": "fa_ref.kernels",
    "grow": "fa_ref.speculative",
    "make_local_attention_virtual_batches": "fa_ref.planning.local",
    "mla_attention": "fa_ref.mla",
    "merge_state": "fa_ref.kernels",
    "plan_batch": "fa_ref.planning",
    "select": "fa_ref.speculative",
    "start": "fa_ref.speculative",
    "verify_greedy": "fa_ref.speculative",
    "verify_sampled": "fa_ref.speculative",
}

__all__ = [
    "Accepted",
    "AttentionLayer",
    "AttentionPass",
    "AttentionPlan",
    "BackendConfig",
    "BadBatch",
    "BadConfig",
    "BadPageTable",
    "DraftBeams",
    "DraftInput",
    "DraftTree",
    "FaError",
    "FlashAttentionBackend",
    "FlashAttentionMultiStepBackend",
    "ForwardBatch",
    "ForwardMode",
    "GivenKeys",
    "LayerKind",
    "MHAKVPool",
    "MLAKVPool",
    "MLAProjections",
    "PrefixChunks",
    "ProviderNotInstalled",
    "ReqToTokenPool",
    "SWAKVPool",
    "TreePass",
    "UnsupportedByProvider",
    "VerifyInput",
    "build_tree",
    "chunk_prefix",
    "compact_kv",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "grow",
    "layer_kind",
    "make_local_attention_virtual_batches",
    "merge_state",
    "mla_attention",
    "plan_batch",
    "select",
    "start",
    "verify_greedy",
    "verify_sampled",
    "window_left",
    "window_of_tokens",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME.get(name, "fa_ref.api")), name)
    raise AttributeError(f"module 'fa_ref' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
