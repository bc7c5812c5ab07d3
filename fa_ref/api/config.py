"""What a backend knows before the first batch: device, dtypes, cache geometry, and the pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fa_ref.api.errors import BadConfig


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Settings of one attention backend. `from_model_runner` builds it from a server's runner object.

    Raises BadConfig for a chunk that is not a multiple of the page size, a window together with an
    encoder, or a page size below 1.
    """

    device: torch.device | str
    dtype: torch.dtype  # of q, and of k and v before they are written
    kv_cache_dtype: torch.dtype
    page_size: int = 1  # tokens a page
    context_len: int  # longest request, tokens
    sliding_window_size: int | None = None  # W - 1 of the model's window layers; None or -1: none
    attention_chunk_size: int | None = None  # tokens; layers with use_irope attend within a chunk
    is_encoder_decoder: bool = False
    use_mla: bool = False
    is_hybrid_swa: bool = False  # window layers live in a second, smaller pool
    topk: int = 0  # branches of speculative decoding; 0 none
    num_draft_tokens: int = 0
    tree_attention: str = "auto"  # how TreePasses run: "fused" with the merge, "expand" to a page table, or "auto"
    cascade_prefix: bool = False  # full layers read a prefix that all requests share once, where that saves bytes
    deterministic: bool = False  # a row's result does not depend on its neighbours
    req_to_token_pool: Any
    token_to_kv_pool: Any

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise BadConfig(f"page_size {self.page_size}; it must be at least 1")
        if self.tree_attention not in ("auto", "fused", "expand"):
            raise BadConfig(f"tree_attention {self.tree_attention!r}; supported: 'auto', 'fused', 'expand'")
        chunk = self.attention_chunk_size
        if chunk is not None and (chunk < 1 or chunk % self.page_size):
            raise BadConfig(
                f"attention_chunk_size {chunk} with page_size {self.page_size}; a chunk must be a positive "
                f"multiple of the page size, so that every chunk starts on a page: use a page size that "
                f"divides {chunk}"
            )
        window = self.sliding_window_size
        if window is not None and window >= 0 and self.is_encoder_decoder:
            raise BadConfig(
                f"sliding_window_size {window} with is_encoder_decoder=True; windows and "
                "cross attention are not supported together: set sliding_window_size=None"
            )

    @classmethod
    def from_model_runner(cls, runner: Any) -> BackendConfig:
        """Normalise a server's runner (nested `model_config`, `server_args`) once; a config passes through."""
        if isinstance(runner, cls):
            return runner
        model, args = getattr(runner, "model_config", None), getattr(runner, "server_args", None)
        dtype = _first("dtype", torch.bfloat16, runner, model)
        kv_dtype = _first("kv_cache_dtype", "auto", runner, args)
        return cls(
            device=runner.device,
            dtype=dtype,
            kv_cache_dtype=dtype if kv_dtype == "auto" else _kv_dtype(kv_dtype),
            page_size=_first("page_size", 1, runner, args),
            context_len=_first("context_len", None, model, runner),
            sliding_window_size=_first("sliding_window_size", None, runner, model),
            attention_chunk_size=_first("attention_chunk_size", None, runner, model),
            is_encoder_decoder=bool(_first("is_encoder_decoder", False, model, runner)),
            use_mla=_uses_mla(model, runner),
            is_hybrid_swa=bool(_first("is_hybrid_swa", False, runner) or _first("is_hybrid", False, runner)),
            topk=_first("speculative_eagle_topk", 0, args) or 0,
            num_draft_tokens=_first("speculative_num_draft_tokens", 0, args) or 0,
            deterministic=bool(_first("enable_deterministic_inference", False, args)),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
        )


def _first(name: str, default: Any, *holders: Any) -> Any:
    """The first value of `name` on the holders that is not None."""
    found = (getattr(holder, name, None) for holder in holders)
    return next((value for value in found if value is not None), default)


def _uses_mla(model: Any, runner: Any) -> bool:
    arch = _first("attention_arch", None, model)
    return bool(_first("use_mla", False, runner)) or getattr(arch, "name", arch) == "MLA"


def _kv_dtype(name: Any) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    known = {
        "fp8_e4m3": torch.float8_e4m3fn,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }
    if name not in known:
        raise BadConfig(f"kv_cache_dtype {name!r}; supported: 'auto', {', '.join(map(repr, known))}")
    return known[name]
