"""An LLM-serving attention backend on production kernels.

Every name here exists in `fa_ref` too, with the same signature, in code to read. Importing this package touches no
device and loads no kernels: names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fa_fast.backend import FlashAttentionBackend
    from fa_fast.functional import flash_attn_varlen_func, flash_attn_with_kvcache, merge_state
    from fa_fast.mla import mla_attention
    from fa_fast.multi_step import FlashAttentionMultiStepBackend
    from fa_fast.planning import plan_batch
    from fa_fast.planning.local import make_local_attention_virtual_batches
    from fa_fast.speculative import build_tree, compact_kv, grow, select, start, verify_greedy, verify_sampled
    from fa_ref.api import *

_HOME = {
    "FlashAttentionMultiStepBackend": "fa_fast.multi_step",
    "FlashAttentionBackend": "fa_fast.backend",
    "build_tree": "fa_fast.speculative",
    "compact_kv": "fa_fast.speculative",
    "flash_attn_varlen_func": "fa_fast.functional",
    "flash_attn_with_kvcache": "fa_fast.functional",
    "grow": "fa_fast.speculative",
    "make_local_attention_virtual_batches": "fa_fast.planning.local",
    "mla_attention": "fa_fast.mla",
    "merge_state": "fa_fast.functional",
    "plan_batch": "fa_fast.planning",
    "select": "fa_fast.speculative",
    "start": "fa_fast.speculative",
    "verify_greedy": "fa_fast.speculative",
    "verify_sampled": "fa_fast.speculative",
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
    raise AttributeError(f"module 'fa_fast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
