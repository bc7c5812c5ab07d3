"""Their side: run a model of transformers as it is, and keep what goes in and out of every layer's attention."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
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

PROMPTS, DECODES = (30, 6, 47), 5  # decoding crosses the edges of chunks, windows and pages
SCALE_UP = 8  # random weights start so small that a softcap or a wrong scale would hardly show


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One layer: its geometry as a server would state it, and for each request what its attention took and gave."""

    layer: AttentionLayer
    sinks: Tensor | None  # [heads]
    q: list[Tensor]  # a request: [tokens, heads, head_dim], rotated
    k: list[Tensor]  # a request: [tokens, kv_heads, head_dim], rotated; a cross layer's tokens are the encoder's
    v: list[Tensor]  # a request: [tokens, kv_heads, v_head_dim]
    out: list[Tensor]  # a request: [tokens, heads, v_head_dim], by their code in fp32
    fine: list[Tensor]  # the same by their code in fp64
    w_uv: Tensor | None = None  # MLA: [heads, v_dim, latent], from the latents that attention gives to values


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
def record(
    model: Any,
    encoder_lens: Sequence[int] | None = None,
    finer: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda module, k, v: (k.double(), v.double()),
) -> list[Recorded]:
    """Generate from random prompts, one request at a time: a prefill and DECODES steps on their cache.

    encoder_lens: of an encoder's random output, which the decoder attends to. finer: a layer's keys and values in
    fp64, where they can be had finer than by a cast.
    """
    calls: dict[Any, list[list[dict[str, Any]]]] = defaultdict(lambda: [[] for _ in PROMPTS])
    request = 0  # calls: of each layer, in the order the model runs them; of each request; of each step

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, weights = eager(module, q, k, v, attention_mask, **kwargs)
        steps, cross = calls[module][request], not module.is_causal
        assert (attention_mask is None) == cross, "a causal mask must come from their code"
        fine_mask = None if attention_mask is None else attention_mask.double()
        with InDouble():
            fine, _ = eager(module, q.double(), *finer(module, k, v), fine_mask, **kwargs)
        cached = k.shape[2] - q.shape[2]  # k and v hold the cached tokens too, and the new ones last
        if cross:  # the encoder's are all new in the first step, and none later
            cached = k.shape[2] if steps else 0
        rows = dict(q=q, k=k[:, :, cached:], v=v[:, :, cached:])
        step = {name: x[0].transpose(0, 1) for name, x in rows.items()} | dict(out=out[0], fine=fine[0])
        steps.append(step | dict(arguments=kwargs))
        return out, weights

    AttentionInterface.register("recorded", attend)
    AttentionMaskInterface.register("recorded", eager_mask)
    model.set_attn_implementation("recorded")
    for request, length in enumerate(PROMPTS):
        inputs: dict[str, Any] = dict(inputs=torch.randint(1, model.config.vocab_size, (1, length)))
        if encoder_lens is not None:
            states = torch.randn(1, encoder_lens[request], model.config.hidden_size)
            encoded = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)
            inputs = dict(decoder_input_ids=inputs["inputs"], encoder_outputs=encoded)
        new = DECODES + 1  # the last one is not fed back
        transformers.GenerationMixin.generate(model, **inputs, min_new_tokens=new, max_new_tokens=new, do_sample=False)
    return [as_recorded(layer_id, module, calls[module]) for layer_id, module in enumerate(calls)]


def as_recorded(layer_id: int, module: Any, requests: list[list[dict[str, Any]]]) -> Recorded:
    """The steps of each request put together, and the layer's settings as their code passed them on."""
    tensors = {
        name: [torch.cat([step[name] for step in steps]) for steps in requests]
        for name in ("q", "k", "v", "out", "fine")
    }
    given = requests[0][0]["arguments"]
    kinds = getattr(module.config, "layer_types", None) or []
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
        use_irope=kinds[module.layer_idx : module.layer_idx + 1] == ["chunked_attention"],
        is_cross_attention=not module.is_causal,
    )
    return Recorded(layer=layer, sinks=given.get("s_aux"), **tensors)


def assert_only_rounding(recorded: Recorded) -> None:
    """Their outputs in fp32 and fp64 differ by a few units in the last place of the largest."""
    out, fine = torch.cat(recorded.out), torch.cat(recorded.fine)
    assert (out.dtype, fine.dtype) == (torch.float32, torch.float64)
    assert 0 < (out - fine).abs().max() < 16 * torch.finfo(torch.float32).eps * fine.abs().max()
