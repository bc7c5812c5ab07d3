"""Their side: run a model of transformers as it is, and keep what goes in and out of every layer's attention."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fa_ref import AttentionLayer, window_of_tokens

transformers = pytest.importorskip("transformers", reason='needs transformers: pip install -e ".[hf]"')
from transformers.masking_utils import AttentionMaskInterface, eager_mask  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

SCALE_UP = 8  # random weights start so small that a softcap or a wrong scale would hardly show


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One layer: its geometry as a server would state it, and for each request what its attention took and gave."""

    layer: AttentionLayer
    sinks: Tensor | None  # [heads]
    q: list[Tensor]  # a request: [tokens, heads, head_dim], rotated
    k: list[Tensor]  # a request: [tokens, kv_heads, head_dim], rotated
    v: list[Tensor]  # a request: [tokens, kv_heads, v_head_dim]
    out: list[Tensor]  # a request: [tokens, heads, v_head_dim], by their code in fp32
    fine: list[Tensor]  # the same by their code in fp64


class InDouble(TorchFunctionMode):
    """Their softmax asks for fp32 by name; here it gets fp64, so that their own code is its own oracle."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else {}))


def tiny(model_class: str, config_class: str, **sizes: Any) -> Any:
    """A model of a few thousand random weights, the same every time."""
    shared = dict(vocab_size=61, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**shared | dict(head_dim=16, pad_token_id=0) | sizes)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(SCALE_UP if weight.dim() > 1 or "sinks" in name else 1)
    return model


@torch.no_grad()
def record(model: Any, prompt_lens: Sequence[int], decodes: int) -> list[Recorded]:
    """Generate from random prompts, one request at a time: a prefill and `decodes` steps on their cache."""
    calls: dict[int, list[list[dict[str, Any]]]] = defaultdict(list)  # layer, request, step

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, weights = eager(module, q, k, v, attention_mask, **kwargs)
        assert attention_mask is not None, "the mask must come from their code"
        with InDouble():
            fine, _ = eager(module, q.double(), k.double(), v.double(), attention_mask.double(), **kwargs)
        new = q.shape[2]  # k and v hold the cached tokens too, and the new ones last
        rows = dict(q=q, k=k[:, :, -new:], v=v[:, :, -new:])
        step = {name: x[0].transpose(0, 1) for name, x in rows.items()} | dict(out=out[0], fine=fine[0])
        calls[module.layer_idx][-1].append(step | dict(arguments=kwargs))
        return out, weights

    AttentionInterface.register("recorded", attend)
    AttentionMaskInterface.register("recorded", eager_mask)
    model.set_attn_implementation("recorded")
    layers = range(model.config.num_hidden_layers)
    for length in prompt_lens:
        for layer in layers:
            calls[layer].append([])
        prompt = torch.randint(1, model.config.vocab_size, (1, length))
        model.generate(prompt, min_new_tokens=decodes + 1, max_new_tokens=decodes + 1, do_sample=False)
    return [as_recorded(model.config, layer, calls[layer]) for layer in layers]


def as_recorded(config: Any, layer_id: int, requests: list[list[dict[str, Any]]]) -> Recorded:
    """The steps of each request put together, and the layer's settings as their code passed them on."""
    tensors = {
        name: [torch.cat([step[name] for step in steps]) for steps in requests]
        for name in ("q", "k", "v", "out", "fine")
    }
    given = requests[0][0]["arguments"]
    kind = (getattr(config, "layer_types", None) or ["full_attention"] * (layer_id + 1))[layer_id]
    q, k, v = (tensors[name][0] for name in "qkv")
    layer = AttentionLayer(
        layer_id=layer_id,
        tp_q_head_num=q.shape[1],
        tp_k_head_num=k.shape[1],
        head_dim=q.shape[2],
        v_head_dim=v.shape[2],
        scaling=given["scaling"],
        logit_cap=given.get("softcap") or 0.0,
        sliding_window_size=window_of_tokens(given["sliding_window"]) if given.get("sliding_window") else -1,
        use_irope=kind == "chunked_attention",
    )
    return Recorded(layer=layer, sinks=given.get("s_aux"), **tensors)


def assert_only_rounding(recorded: Recorded) -> None:
    """Their outputs in fp32 and fp64 differ by a few units in the last place of the largest."""
    out, fine = torch.cat(recorded.out), torch.cat(recorded.fine)
    assert (out.dtype, fine.dtype) == (torch.float32, torch.float64)
    assert 0 < (out - fine).abs().max() < 16 * torch.finfo(torch.float32).eps * fine.abs().max()
