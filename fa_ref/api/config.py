"""What a backend knows before the first batch: device, dtypes, cache geometry, and the pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fa_ref.api.errors import BadConfig

_WIDE = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Settings of one attention backend. `from_model_runner` builds it from a server's runner object.

    dtypes may be given by name ("bfloat16", "fp8_e4m3"), and kv_cache_dtype as "auto": the same as dtype.
    Raises BadConfig for values without a meaning, and for pools of another page size, dtype, width or kind.
    """

    device: torch.device | str  # of the pools and batches; it chooses the kernels
    dtype: torch.dtype  # of q, and of k and v before they are written
    kv_cache_dtype: torch.dtype  # of the pool: dtype itself, or fp8 (e4m3)
    page_size: int = 1  # tokens a page
    context_len: int  # longest request, tokens; an encoder's are not counted
    sliding_window_size: int | None = None  # W - 1 of the model's window layers; None or -1: none
    attention_chunk_size: int | None = None  # tokens; layers with use_irope attend within a chunk
    is_encoder_decoder: bool = False  # CROSS layers attend to encoder keys, which every batch counts in encoder_lens
    use_mla: bool = False  # multi-head latent attention, with an MLAKVPool
    is_hybrid_swa: bool = False  # window layers live in a second, smaller pool
    topk: int = 0  # branches of speculative decoding; 0 none
    num_draft_tokens: int = 0  # draft tokens a request that a verification checks; 0 none
    tree_attention: str = "auto"  # how TreePasses run: "fused" with the merge, "expand" to a page table, or "auto"
    cascade_prefix: bool = False  # full layers read a prefix that all requests share once, where that saves bytes
    deterministic: bool = False  # a row's result does not depend on its neighbours
    req_to_token_pool: Any  # a ReqToTokenPool, or an object with its `req_to_token`
    token_to_kv_pool: Any  # an MHAKVPool, MLAKVPool or SWAKVPool, or an object with their methods

    def __post_init__(self) -> None:
        dtype = _dtype("dtype", self.dtype, _WIDE)
        cache = dtype if self.kv_cache_dtype == "auto" else _dtype("kv_cache_dtype", self.kv_cache_dtype, _WIDE | _FP8)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "kv_cache_dtype", cache)
        for name in ("page_size", "context_len"):
            if not isinstance(getattr(self, name), int):
                raise BadConfig(f"{name} {getattr(self, name)!r}; it must be a number of tokens")
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
        if window is not None and window < -1:
            raise BadConfig(f"sliding_window_size {window}; pass W - 1 for a window of W tokens, None or -1 for none")
        if window is not None and window >= 0 and self.is_encoder_decoder:
            raise BadConfig(
                f"sliding_window_size {window} with is_encoder_decoder=True; windows and "
                "cross attention are not supported together: set sliding_window_size=None"
            )
        if self.use_mla and self.is_encoder_decoder:
            raise BadConfig(
                "use_mla=True with is_encoder_decoder=True; a pool of latents holds no encoder keys: set one of them"
            )
        table = getattr(self.req_to_token_pool, "req_to_token", None)
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise BadConfig(
                f"req_to_token_pool {self.req_to_token_pool!r} has no tensor req_to_token; pass a ReqToTokenPool"
            )
        if not 1 <= self.context_len <= table.shape[1]:
            raise BadConfig(
                f"context_len {self.context_len}, but the rows of req_to_token hold {table.shape[1]} tokens; make the "
                "pool as wide as the longest request"
            )
        self.check_pool(self.token_to_kv_pool)

    def check_pool(self, pool: Any) -> None:
        """Raise BadConfig for a KV pool of another page size or dtype, or of the other kind: one pool, or two."""
        if not hasattr(pool, "get_kv_buffer"):
            raise BadConfig(f"token_to_kv_pool {pool!r} has no get_kv_buffer; pass an MHAKVPool or another KV pool")
        page_size, dtype = getattr(pool, "page_size", self.page_size), getattr(pool, "dtype", self.kv_cache_dtype)
        if page_size % self.page_size:
            raise BadConfig(
                f"page_size {self.page_size} over a pool with pages of {page_size}; pass the pool's page size, or one "
                "that divides it"
            )
        if dtype != self.kv_cache_dtype:
            raise BadConfig(f"kv_cache_dtype {self.kv_cache_dtype} over a pool of {dtype}; they must be the same")
        if hasattr(pool, "set_mla_kv_buffer") != self.use_mla:
            raise BadConfig(
                f"use_mla={self.use_mla} over a {type(pool).__name__}; it must be True exactly for a pool of latents "
                "(with set_mla_kv_buffer, such as MLAKVPool)"
            )
        if hasattr(pool, "full_to_swa_index_mapping") != self.is_hybrid_swa:
            raise BadConfig(
                f"is_hybrid_swa={self.is_hybrid_swa} over a {type(pool).__name__}; it must be True exactly for a pool "
                "with a window pool behind it (full_to_swa_index_mapping), or layers read slots of the wrong pool"
            )

    @classmethod
    def from_model_runner(cls, runner: Any) -> BackendConfig:
        """Normalise a server's runner (nested `model_config`, `server_args`) once; a config passes through."""
        if isinstance(runner, cls):
            return runner
        model, args = getattr(runner, "model_config", None), getattr(runner, "server_args", None)
        device, pool = _first("device", None, runner), _first("token_to_kv_pool", None, runner)
        if device is None:
            raise BadConfig(f"a {type(runner).__name__} without device; pass a model runner or a BackendConfig")
        hybrid = _first("is_hybrid_swa", False, runner) or _first("is_hybrid", False, runner)
        return cls(
            device=device,
            dtype=_first("dtype", torch.bfloat16, runner, model),
            kv_cache_dtype=_first("kv_cache_dtype", "auto", runner, args),
            page_size=_first("page_size", 1, runner, args),
            context_len=_first("context_len", None, model, runner),
            sliding_window_size=_first("sliding_window_size", None, runner, model),
            attention_chunk_size=_first("attention_chunk_size", None, runner, model),
            is_encoder_decoder=bool(_first("is_encoder_decoder", False, model, runner)),
            use_mla=_uses_mla(model, runner),
            is_hybrid_swa=bool(hybrid) or hasattr(pool, "full_to_swa_index_mapping"),
            topk=_first("speculative_eagle_topk", 0, args) or 0,
            num_draft_tokens=_first("speculative_num_draft_tokens", 0, args) or 0,
            deterministic=bool(_first("enable_deterministic_inference", False, args)),
            req_to_token_pool=_first("req_to_token_pool", None, runner),
            token_to_kv_pool=pool,
        )


def _first(name: str, default: Any, *holders: Any) -> Any:
    """The first value of `name` on the holders that is not None."""
    found = (getattr(holder, name, None) for holder in holders)
    return next((value for value in found if value is not None), default)


def _uses_mla(model: Any, runner: Any) -> bool:
    arch = _first("attention_arch", None, model)
    return bool(_first("use_mla", False, runner)) or getattr(arch, "name", arch) == "MLA"


def _dtype(field: str, value: Any, supported: dict[str, torch.dtype]) -> torch.dtype:
    dtype = supported.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in supported.values():
        raise BadConfig(f"{field} {value!r}; supported: {', '.join(map(repr, supported))}, or the torch dtype")
    return dtype
