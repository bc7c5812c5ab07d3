"""A llama: embedding, then per layer attention and a gated feed-forward, then logits. Plain torch and einops.

The model does not know how attention is computed. It hands queries, keys and values to a function
`attend(layer_id, q, k, v)`, and that function decides where keys and values are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import gguf
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tiny_engine.weights import field

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_len: int
    rope_base: float = 1e4
    norm_eps: float = 1e-5


class Model:
    """`layers[i]["attn_q"]` is [heads * head_dim, width], and so on by GGUF name; `embedding` [vocab, width]
    also turns hidden states into logits."""

    def __init__(self, config: ModelConfig, embedding: Tensor, output_norm: Tensor, layers: list[Weights]):
        self.config, self.embedding, self.output_norm, self.layers = config, embedding, output_norm, layers
        pair = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
        self.frequencies = config.rope_base ** (-pair / config.head_dim)  # radians per position

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [tokens] -> hidden states [tokens, width]. Requests may lie end to end."""
        c, x = self.config, self.embedding[token_ids]
        rotation = torch.polar(torch.ones(()).double(), torch.outer(positions.double(), self.frequencies))
        rotation = rearrange(rotation.to(torch.complex64), "tokens pairs -> tokens 1 pairs")
        for layer_id, w in enumerate(self.layers):
            h = rms_norm(x, w["attn_norm"], c.norm_eps)
            q, k, v = (F.linear(h, w[name]) for name in ("attn_q", "attn_k", "attn_v"))
            q, k = rope(q, rotation, c.heads), rope(k, rotation, c.kv_heads)
            x = x + F.linear(attend(layer_id, q, k, v), w["attn_output"])
            h = rms_norm(x, w["ffn_norm"], c.norm_eps)
            x = x + F.linear(F.silu(F.linear(h, w["ffn_gate"])) * F.linear(h, w["ffn_up"]), w["ffn_down"])
        return rms_norm(x, self.output_norm, c.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, width] -> [tokens, vocab]."""
        return F.linear(hidden, self.embedding)

    def first(self, layers: int) -> "Model":
        """A model of the first `layers` layers, with the same last norm and embedding. Weights are shared."""
        if not 1 <= layers <= self.config.layers:
            raise ValueError(f"the first {layers} layers of a model that has {self.config.layers}")
        config = replace(self.config, layers=layers)
        return Model(config, self.embedding, self.output_norm, self.layers[:layers])

    def dense(self, token_ids: list[int]) -> Tensor:
        """Logits [tokens, vocab] of one sequence without any cache: what a cached run must reproduce."""
        ids = torch.tensor(token_ids)
        return self.logits(self.forward(ids, torch.arange(len(ids)), self.dense_attention))

    def dense_attention(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c = self.config
        q = rearrange(q, "tokens (heads dim) -> heads tokens dim", heads=c.heads)
        k, v = (rearrange(t, "tokens (heads dim) -> heads tokens dim", heads=c.kv_heads) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return rearrange(out, "heads tokens dim -> tokens (heads dim)")

    @classmethod
    def from_gguf(cls, reader: gguf.GGUFReader) -> "Model":
        """Dequantise to fp32. Shapes and constants are the file's own."""
        if (kind := field(reader, "general.architecture")) != "llama":
            raise ValueError(f"the file holds a {kind!r} model; this engine runs the architecture 'llama'")
        config = ModelConfig(
            layers=field(reader, "llama.block_count"),
            width=field(reader, "llama.embedding_length"),
            heads=field(reader, "llama.attention.head_count"),
            kv_heads=field(reader, "llama.attention.head_count_kv"),
            head_dim=field(reader, "llama.rope.dimension_count"),
            vocab=field(reader, "llama.vocab_size"),
            context_len=field(reader, "llama.context_length"),
            rope_base=field(reader, "llama.rope.freq_base"),
            norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        )
        found = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
        names = [name.split(".")[2] for name in found if name.startswith("blk.0.")]  # blk.<layer>.<name>.weight
        layers = [{name: found[f"blk.{i}.{name}.weight"] for name in names} for i in range(config.layers)]
        return cls(config, found["token_embd.weight"], found["output_norm.weight"], layers)

    @classmethod
    def random(cls, *, seed=0, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=96, context_len=256) -> "Model":
        """Random weights, for runs of milliseconds."""
        w, kv, generator = heads * head_dim, kv_heads * head_dim, torch.Generator().manual_seed(seed)

        def weight(out: int, into: int, gain: float = 1.0) -> Tensor:
            return torch.randn(out, into, generator=generator) * gain / into**0.5

        # Much attention, little else: the next token depends on the whole context, not on the last one.
        shapes = {"attn_q": (w, w, 3), "attn_k": (kv, w), "attn_v": (kv, w), "attn_output": (w, w, 4)}
        shapes |= {"ffn_gate": (2 * w, w), "ffn_up": (2 * w, w), "ffn_down": (w, 2 * w)}
        norms = {"attn_norm": torch.ones(w), "ffn_norm": torch.ones(w)}
        blocks = [norms | {name: weight(*shape) for name, shape in shapes.items()} for _ in range(layers)]
        sizes = {"head_dim": head_dim, "vocab": vocab, "context_len": context_len}
        config = ModelConfig(layers=layers, width=w, heads=heads, kv_heads=kv_heads, **sizes)
        return cls(config, weight(vocab, w), torch.ones(w), blocks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, rotation: Tensor, heads: int) -> Tensor:
    """x [tokens, heads * dim]: turn each pair of neighbours by the complex rotation [tokens, 1, dim / 2].

    GGUF files order the rows of attn_q and attn_k so that a pair is (2i, 2i + 1), not (i, i + dim / 2).
    """
    pairs = rearrange(x, "tokens (heads pairs two) -> tokens heads pairs two", heads=heads, two=2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    return rearrange(turned, "tokens heads pairs two -> tokens (heads pairs two)")
