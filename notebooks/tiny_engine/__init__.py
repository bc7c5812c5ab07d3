"""A whole language model server in a few hundred lines: model, tokenizer, paged cache, continuous batching.

Attention is the one part it does not contain: any backend with the interface of fa_ref or fa_fast drives it.

    model, tokenizer = tiny_engine.load()
    engine = Engine(model, fa_fast.FlashAttentionBackend)
    prompt = tokenizer.encode_chat([("user", "What is a page table?")])
    [output] = engine.generate([prompt], max_new_tokens=48)
    print(tokenizer.decode(output))
"""

from tiny_engine.cache import PageCache
from tiny_engine.engine import Engine, Request
from tiny_engine.model import Model, ModelConfig
from tiny_engine.runner import Runner
from tiny_engine.speculate import Speculation
from tiny_engine.tokenizer import Tokenizer
from tiny_engine.weights import open_gguf

__all__ = [
    "Engine",
    "Model",
    "ModelConfig",
    "PageCache",
    "Request",
    "Runner",
    "Speculation",
    "Tokenizer",
    "load",
    "open_gguf",
]


def load() -> tuple[Model, Tokenizer]:
    """SmolLM2-135M-Instruct in fp32, with its tokenizer."""
    reader = open_gguf()
    return Model.from_gguf(reader), Tokenizer.from_gguf(reader)
