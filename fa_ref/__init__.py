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
    from fa_ref.planning import plan_batch
    from fa_ref.planning.local import make_local_attention_virtual_batches

_HOME = {
    "FlashAttentionBackend": "fa_ref.backend",
    "flash_attn_varlen_func": "fa_ref.kernels",
    "flash_attn_with_kvcache": "fa_ref.kernels",
    "make_local_attention_virtual_batches": "fa_ref.planning.local",
    "merge_state": "fa_ref.kernels",
    "plan_batch": "fa_ref.planning",
}

__all__ = [
    "AttentionLayer",
    "AttentionPass",
    "AttentionPlan",
    "BackendConfig",
    "BadBatch",
    "BadConfig",
    "BadPageTable",
    "DraftInput",
    "FaError",
    "FlashAttentionBackend",
    "ForwardBatch",
    "ForwardMode",
    "LayerKind",
    "MHAKVPool",
    "MLAKVPool",
    "ProviderNotInstalled",
    "ReqToTokenPool",
    "SWAKVPool",
    "TreePass",
    "UnsupportedByProvider",
    "VerifyInput",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "layer_kind",
    "make_local_attention_virtual_batches",
    "merge_state",
    "plan_batch",
    "window_left",
    "window_of_tokens",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME.get(name, "fa_ref.api")), name)
    raise AttributeError(f"module 'fa_ref' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
