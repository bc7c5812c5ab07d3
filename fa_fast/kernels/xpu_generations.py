"""What each generation of sgl-kernel for Intel GPUs can do, as its source says; none of it was run by this project.

A generation is told by the installed operator's schema, never by a version. What the table claims is an upper bound:
kernels.xpu_probe asks the binary, and takes away what it gets wrong.

The source is github.com/sgl-project/sgl-kernel-xpu. "2026-08" is commit 9cf16bf9 of 2026-08-21 (distribution 0.11.0,
`__version__` 0.1.8). Of "2026-10" the operator's schema is recorded, without a commit; its LSE came with pull request
330 there, its softcap with 491. "vllm_xpu" is github.com/vllm-project/vllm-xpu-kernels, release 0.1.16.2.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fa_fast.kernels.capability import Capability
from fa_ref.api.pools import FP8

HEAD_DIMS = frozenset((dim, dim) for dim in (64, 96, 128, 192, 256))
REMEDY = "Otherwise try {other}, or run the layer on a CPU device (provider torch_cpu) or in fa_ref."

_LATER = Capability(
    provider="sgl_xpu",
    device="xpu",
    head_dims=HEAD_DIMS,
    page_sizes=None,  # those that the kernels do not take are copied into pages that they do
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    kv_dtypes=frozenset({torch.bfloat16, torch.float16, FP8}),
    softcap=True,
    sinks=True,
    lse=True,
    qv_dims=frozenset({(64, 512)}),
    qv_dtypes=frozenset({torch.bfloat16, torch.float16}),
    qv_trees=False,
    window=True,
    out=True,
    attention_chunk=False,
    scheduler_metadata=False,
    remedy=REMEDY.format(other="provider='vllm_xpu', whose kernels have other limits"),
    sink_dims=frozenset({64}),
    fp8_dtypes=frozenset({torch.bfloat16}),
    head_scales=False,
    decode_group=16,
    qv_plain=True,
)

GENERATIONS = {
    # softcap is accepted and ignored; the LSE is allocated and never written
    "2026-08": replace(_LATER, softcap=False, lse=False),
    # fwd writes out and softmax_lse in place
    "2026-10": _LATER,
}
NEWEST = "2026-10"


def installed_generation() -> str:
    """The generation of the operator that is registered; the newest one if its schema cannot be read.

    An unreadable schema says nothing, so the probe alone decides there.
    """
    packet = getattr(torch.ops.sgl_kernel, "fwd", None)
    if packet is None:
        return NEWEST
    names = {argument.name for argument in packet.default._schema.arguments}
    return "2026-10" if "softmax_lse" in names else "2026-08"


def reads_in_place(page_size: int, longest_q: int) -> bool:
    """Whether the kernels take pages of this size: decode 64 and 128, prefill multiples of 64.

    Prefill accepts smaller ones and reads other keys there.
    """
    return page_size in (64, 128) if longest_q == 1 else page_size % 64 == 0
