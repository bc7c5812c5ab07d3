"""What `import sgl_kernel` gives on a machine with an Intel GPU, on CPU tensors: its signatures, semantics and limits.

Written from the record of github.com/sgl-project/sgl-kernel-xpu, and from nothing of fa_fast. "2026-08" is its commit
9cf16bf9 of 2026-08-21 (distribution 0.11.0, `__version__` 0.1.8); of "2026-10" the operator's schema was recorded, and
no commit: the functions of 2026-08, with softcap (pull request 491) and an LSE that is written (330). Where the record
leaves a call open, the emulated kernel is the stricter one: rows that no sequence owns hold NaN, a bound must bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.xpu.dense import FP8, attend, descaled, is_int32, need, read_pages, spans
from tests.xpu.signatures import with_signature

LATENT, ROPE = 512, 64
TILE = 64  # keys that the prefill kernel takes at once


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build of the module. The fields are what builds were seen to get wrong; the defaults are right."""

    softcap: bool = True  # False: accepted, and ignored
    lse: str = "written"  # "garbage": allocated, never written; "empty": of size 0; "base-2": another logarithm
    sinks: bool = True  # False: accepted, and ignored
    sinks_in_lse: bool = True
    empty_merge_is_nan: bool = True  # in both generations
    returns: int = 2  # values of a call with return_softmax_lse=True


BUILDS = {"2026-08": Build(softcap=False, lse="garbage", returns=4), "2026-10": Build()}


def modules(build: Build) -> dict[str, ModuleType]:
    """The modules by name, for sys.modules."""
    functions: dict[str, Callable[..., Any]] = dict(
        flash_attn_with_kvcache=lambda **call: _with_kvcache(build, **call),
        flash_attn_varlen_func=lambda **call: _varlen(build, **call),
        merge_state=lambda **call: _merge(build, **call),
        merge_state_v2=lambda **call: _merge(build, **call),
        flash_mla_decode=_mla_decode,
        flash_mla_prefill=_mla_prefill,
        flash_mla_get_workspace_size=_workspace_size,
        flash_mla_prefill_get_workspace_size=_workspace_size,
    )
    functions = {name: with_signature("sgl_kernel", name, compute) for name, compute in functions.items()}
    homes = dict(flash_attn="flash_attn_", flash_mla="flash_mla_", attention="merge_")
    package = ModuleType("sgl_kernel")
    package.__path__ = []  # a package, whose submodules are found in sys.modules
    made = {"sgl_kernel": package}
    for home, prefix in homes.items():
        module = made[f"sgl_kernel.{home}"] = ModuleType(f"sgl_kernel.{home}")
        setattr(package, home, module)
        for name, function in functions.items():
            if name.startswith(prefix):
                setattr(module, name, function)
            setattr(package, name, function)
    return made


def _with_kvcache(
    build: Build,
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    qv: Tensor | None,
    softmax_scale: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    return_softmax_lse: bool,
    out: Tensor | None,
    **call: Any,
) -> Any:
    """k, v, rotary, leftpad, batch index, qv, splits: accepted and ignored. The table's rows are the sequences."""
    page_table = _table(page_table)
    need(k_cache.stride(-1) == v_cache.stride(-1) == 1, "the last dim of a cache must be contiguous")
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q = torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[1], q.shape[1]
        q = q.flatten(0, 1)
    is_int32(cache_seqlens, page_table, cu_seqlens_q)
    need(cache_seqlens.shape[0] + 1 == cu_seqlens_q.shape[0], "a length for each sequence")
    need(page_table.shape[0] >= cache_seqlens.shape[0], "a row of the page table for each sequence")
    lens, page_size = cache_seqlens.tolist(), k_cache.shape[1]
    _bounds(cu_seqlens_q, lens, max_seqlen_q, max_seqlen_k)
    decode = max_seqlen_q == 1
    if decode:
        need(page_size in (64, 128), f"decode: page size must be 64 or 128, got {page_size}")
        need(
            q.shape[1] // k_cache.shape[2] <= 16,
            f"decode: at most 16 query heads a kv head, got {q.shape[1] // k_cache.shape[2]}",
        )
    read = read_pages if decode or page_size % TILE == 0 else _read_tiles
    keys = [descaled(read(k_cache, page_table[i], n), k_descale) for i, n in enumerate(lens)]
    values = [descaled(read(v_cache, page_table[i], n), v_descale) for i, n in enumerate(lens)]
    found = _run(build, q, keys, values, cu_seqlens_q, softmax_scale, k_cache.dtype, call, out)
    return found if return_softmax_lse else found[0]


def _varlen(
    build: Build,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    return_softmax_lse: bool,
    **call: Any,
) -> Any:
    """seqused_q, seqused_k, qv: accepted and ignored."""
    is_int32(cu_seqlens_q, cu_seqlens_k)
    need(cu_seqlens_q.shape == cu_seqlens_k.shape, "as many sequences of keys as of queries")
    lens = cu_seqlens_k.diff().tolist()
    _bounds(cu_seqlens_q, lens, max_seqlen_q, max_seqlen_k)
    keys, values = ([x[start:end] for start, end in spans(cu_seqlens_k)] for x in (k, v))
    keys, values = [descaled(x, k_descale) for x in keys], [descaled(x, v_descale) for x in values]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    found = _run(build, q, keys, values, cu_seqlens_q, scale, k.dtype, call, None)
    return found if return_softmax_lse else found[0]


def _run(
    build: Build,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    cu_seqlens_q: Tensor,
    scale: float,
    kv_dtype: torch.dtype,
    call: dict[str, Any],
    out: Tensor | None,
) -> tuple[Tensor, ...]:
    need(q.dtype in (torch.bfloat16, torch.float16), f"q must be bf16 or fp16, got {q.dtype}")
    need(kv_dtype in (q.dtype, FP8), f"a cache of q's dtype or e4m3, got {kv_dtype}")
    sinks = call["sinks"]
    need(sinks is None or q.shape[-1] == 64, f"sinks: only head_dim 64 is built, got {q.shape[-1]}")
    need(q.shape[1] % values[0].shape[1] == 0 if values else True, "query heads must be a multiple of kv heads")
    lse = torch.full(q.shape[:2], torch.nan)
    answer = q.new_full((*q.shape[:2], values[0].shape[-1] if values else q.shape[-1]), torch.nan)
    for (start, end), k, v in zip(spans(cu_seqlens_q), keys, values, strict=True):
        options: dict[str, Any] = dict(
            scale=scale, causal=call["causal"], window=tuple(call["window_size"]),
            cap=call["softcap"] if build.softcap else 0.0,
        )  # fmt: skip
        mine, counted = q[start:end], sinks if build.sinks else None
        answer[start:end], lse[start:end] = attend(mine, k, v, sinks=counted, **options)
        if not build.sinks_in_lse:
            lse[start:end] = attend(mine, k, v, **options)[1]
    if out is not None:
        need(out.shape == answer.shape and out.dtype == answer.dtype, "out must look like the answer")
        answer = out.copy_(answer)
    rest = [q.new_empty(0)] * (build.returns - 2)
    return (answer, _lse(build, lse.T.contiguous()), *rest)


def _lse(build: Build, lse: Tensor) -> Tensor:
    """(heads, tokens), as the build leaves it: memory that is never written holds what was there before."""
    if build.lse == "empty":
        return lse.new_empty(0)
    if build.lse == "garbage":
        return (torch.arange(lse.numel()) * 37 % 101).float().view(lse.shape) - 50
    return lse / math.log(2) if build.lse == "base-2" else lse


def _read_tiles(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The keys as prefill finds them in pages that are no multiple of its tile: the rest of a tile is not looked up."""
    if length == 0:
        return read_pages(cache, pages, 0)
    key, page_size = torch.arange(length), cache.shape[1]
    slots = pages[key // TILE * TILE // page_size].long() * page_size + key % TILE
    rows = cache.view(torch.uint8).flatten(0, 1) if cache.dtype == FP8 else cache.flatten(0, 1)
    found = rows[slots.clamp(max=rows.shape[0] - 1)]
    return found.view(FP8) if cache.dtype == FP8 else found


def _table(page_table: Tensor | None) -> Tensor:
    need(page_table is not None, "a paged call needs a page table")
    assert page_table is not None
    return page_table.contiguous()


def _bounds(cu_seqlens_q: Tensor, lens: list[int], max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    need(type(max_seqlen_q) is int and type(max_seqlen_k) is int, "max_seqlen_q and max_seqlen_k must be int")
    longest = max(cu_seqlens_q.diff().tolist(), default=0)
    need(longest <= max_seqlen_q, f"max_seqlen_q {max_seqlen_q} is below {longest}")
    need(max(lens, default=0) <= max_seqlen_k, f"max_seqlen_k {max_seqlen_k} is below {max(lens, default=0)}")


def _merge(
    build: Build,
    *,
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None,
    s_merged: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """States [tokens, heads, dim] with lse (tokens, heads): softmax over the two, taken literally."""
    need(s_a.shape == s_b.shape == v_a.shape[:2], f"lse must be (tokens, heads), got {tuple(s_a.shape)}")
    s_a, s_b = s_a.float(), s_b.float()
    top = torch.maximum(s_a, s_b)
    if not build.empty_merge_is_nan:
        top = top.masked_fill(top.isneginf(), 0)
    a, b = torch.exp(s_a - top), torch.exp(s_b - top)
    whole = (a + b).masked_fill(a + b == 0, 1)
    out = ((a / whole)[..., None] * v_a + (b / whole)[..., None] * v_b).to(v_a.dtype)
    lse = top + torch.log(a + b)
    out = out if v_merged is None else v_merged.copy_(out)
    return out, lse if s_merged is None else s_merged.copy_(lse)


def _mla_decode(
    *,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    workspace: Tensor,
    sm_scale: float,
    num_kv_splits: int,
) -> Tensor:
    """One query a sequence: q_nope [sequences, heads, 512], q_pe [sequences, heads, 64] -> [sequences, heads, 512]."""
    need(q_nope.shape[0] == seq_lens.shape[0], "decode: one query a sequence")
    cu = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32)
    return _mla(
        q_nope, q_pe, kv_c_and_k_pe_cache, cu, seq_lens, 1, page_table, workspace, sm_scale, False, num_kv_splits
    )


def _mla_prefill(
    *,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_and_k_pe_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_k: Tensor,
    max_seqlen_q: int,
    page_table: Tensor,
    workspace: Tensor,
    sm_scale: float,
    causal: bool,
    num_kv_splits: int,
) -> Tensor:
    """Ragged queries [tokens, heads, ...] over pages of latents."""
    return _mla(
        q_nope, q_pe, kv_c_and_k_pe_cache, cu_seqlens_q, seq_lens_k, max_seqlen_q, page_table, workspace, sm_scale,
        causal, num_kv_splits,
    )  # fmt: skip


def _mla(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    cu_seqlens_q: Tensor,
    lens: Tensor,
    max_seqlen_q: int,
    page_table: Tensor,
    workspace: Tensor,
    scale: float,
    causal: bool,
    splits: int,
) -> Tensor:
    need(cache.ndim == 3 and cache.shape[2] == LATENT + ROPE, f"a cache [pages, page, 576], got {tuple(cache.shape)}")
    need(q_nope.shape[-1] == LATENT and q_pe.shape[-1] == ROPE, "latent must be 512 and rope 64")
    need(cache.shape[1] in (16, 32, 64, 128), f"page size must be 16, 32, 64 or 128, got {cache.shape[1]}")
    need(q_nope.dtype in (torch.bfloat16, torch.float16), f"q must be bf16 or fp16, got {q_nope.dtype}")
    need(q_nope.dtype == q_pe.dtype == cache.dtype, "q_nope, q_pe and the cache must share a dtype")
    is_int32(cu_seqlens_q, lens, page_table)
    need(cu_seqlens_q.shape[0] - 1 == lens.shape[0] == page_table.shape[0], "a length and a row for each sequence")
    _bounds(cu_seqlens_q, [], max_seqlen_q, 0)
    wanted = _workspace_size(
        max_seq_len=page_table.shape[1] * cache.shape[1], num_batches=lens.shape[0], num_heads=q_nope.shape[1],
        page_size=cache.shape[1], num_kv_splits=splits,
    )  # fmt: skip
    have = workspace.numel() * workspace.element_size()
    need(have >= wanted, f"workspace of {have} bytes, needs {wanted}")
    q, out = torch.cat([q_nope, q_pe], dim=-1), torch.full_like(q_nope, torch.nan)
    for i, (length, (start, end)) in enumerate(zip(lens.tolist(), spans(cu_seqlens_q), strict=True)):
        rows, mine = read_pages(cache, page_table[i], length)[:, None], slice(start, end)
        out[mine] = attend(q[mine], rows, rows[..., :LATENT], scale=scale, causal=causal)[0].to(out.dtype)
    return out


def _workspace_size(*, max_seq_len: int, num_batches: int, num_heads: int, page_size: int, num_kv_splits: int) -> int:
    """Bytes: a state in fp32 for every sequence, head and split. 0 heads: as many as there may be."""
    need(max_seq_len > 0 and num_batches > 0, "a workspace for at least one key and one sequence")
    splits = num_kv_splits if num_kv_splits > 0 else -(-max_seq_len // 512)
    return num_batches * (num_heads or 128) * splits * (LATENT + 1) * 4
