"""The kernels of Intel GPUs without values: what their Python functions hand to the operator, checked on its way."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.xpu import emulated_sgl
from tests.xpu.fake_device import DEVICE
from tests.xpu.signatures import RECORD, with_signature

INDICES = ("cu_seqlens_q", "cu_seqlens_k", "page_table")


class Operator:
    """An operator of a recorded schema, in a namespace of its own, whose fake looks at every argument."""

    def __init__(self, generation: str) -> None:
        self.generation, self.calls = generation, 0
        namespace = f"fa_test_xpu_{generation.replace('-', '_')}_{id(self)}"
        self._library = torch.library.Library(namespace, "DEF")
        schema = RECORD["operator"][generation]
        self._library.define(schema)
        self._library._register_fake("fwd", self._fake)
        self.call: Any = getattr(torch.ops, namespace).fwd.default
        self.names = [argument.name for argument in self.call._schema.arguments]

    def _fake(self, *values: Any, **named: Any) -> Any:
        given = dict(zip(self.names, values, strict=False)) | named
        self.calls += 1
        for name, value in given.items():
            assert not isinstance(value, Tensor) or value.device == DEVICE, f"{name} on {value.device}"
        for name in INDICES:
            assert given[name] is None or (given[name].dtype == torch.int32 and given[name].stride(-1) == 1), name
        q, k, table = given["q"], given["k"], given["page_table"]
        sequences = given["cu_seqlens_q"].shape[0] - 1
        assert q.ndim == 3 and q.stride(-1) == k.stride(-1) == 1
        if table is None:
            assert k.ndim == 3 and given["cu_seqlens_k"].shape == (sequences + 1,)
        else:
            assert k.ndim == 4 and table.shape[0] == given["cu_seqlens_k"].shape[0] == sequences
        if self.generation == "2026-10":
            assert given["out"].shape == q.shape and given["softmax_lse"].shape == (q.shape[1], q.shape[0])
            return None
        answer = q.new_empty(*q.shape[:2], given["v"].shape[-1])
        return answer, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), q.new_empty(0), q.new_empty(0)


def modules(operator: Operator) -> dict[str, ModuleType]:
    """`sgl_kernel` whose functions call the operator, as the package's own do."""
    made = emulated_sgl.modules(emulated_sgl.BUILDS[operator.generation])

    def run(paged: bool, **call: Any) -> Any:
        q = call["q"]
        left, right = call["window_size"]
        given: dict[str, Any] = dict(
            q=q,
            k=call["k_cache" if paged else "k"],
            v=call["v_cache" if paged else "v"],
            q_v=call["qv"],
            cu_seqlens_k=call["cache_seqlens" if paged else "cu_seqlens_k"],
            softmax_scale=q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"],
            is_causal=call["causal"],
            window_size_left=left,
            window_size_right=right,
            is_rotary_interleaved=False,
            num_kv_splits=call["num_splits"],
        )
        given |= {name: call.get(name) for name in operator.names if name not in given}
        if operator.generation == "2026-10":
            out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
            operator.call(**given | dict(out=out, softmax_lse=lse))
            return (out, lse) if call["return_softmax_lse"] else out
        answer = operator.call(**given)
        return answer if call["return_softmax_lse"] else answer[0]

    def latent(**call: Any) -> Tensor:
        operator.calls += 1
        for name, value in call.items():
            assert not isinstance(value, Tensor) or value.device == DEVICE, f"{name} on {value.device}"
        lens = call["seq_lens"] if "seq_lens" in call else call["seq_lens_k"]
        assert lens.dtype == call["page_table"].dtype == torch.int32 and call["workspace"].dtype == torch.uint8
        assert call["kv_c_and_k_pe_cache"].ndim == 3 and call["page_table"].shape[0] == lens.shape[0]
        return torch.empty_like(call["q_nope"])

    replaced = dict(
        flash_attn_with_kvcache=lambda **call: run(True, **call),
        flash_attn_varlen_func=lambda **call: run(False, **call),
        flash_mla_decode=latent,
        flash_mla_prefill=latent,
    )
    for name, function in replaced.items():
        traced = with_signature("sgl_kernel", name, function)
        for module in made.values():
            if hasattr(module, name):
                setattr(module, name, traced)
    return made
