"""Byte-level byte-pair encoding, from the vocabulary and merges of a GGUF file.

Text is cut into words, a word into bytes, and neighbouring pieces are joined in the order of the merge list
until no pair is in it. The vocabulary writes each byte as one printable character ("Ġ" is the space).
"""

import codecs
from functools import lru_cache
from itertools import pairwise

import gguf
import regex

from tiny_engine.weights import field

# The rule "smollm": every digit alone, then GPT-2's words, which carry the space before them.
DIGITS = regex.compile(r"\p{N}|\P{N}+")
WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
CONTROL = 3  # gguf's token type for tokens such as <|im_start|>
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def byte_characters() -> list[str]:
    """The character that stands for each byte: its own if printable, else the next one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


class Tokenizer:
    def __init__(self, tokens: list[str], merges: list[str], control: set[int], eos_id: int):
        self.eos_id = eos_id
        self.id_of = {token: i for i, token in enumerate(tokens)}
        self.special = {tokens[i]: i for i in control}
        self.rank = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.characters = byte_characters()
        byte_of = {character: byte for byte, character in enumerate(self.characters)}
        self.bytes_of = [bytes(byte_of[character] for character in token) for token in tokens]
        self._word = lru_cache(maxsize=10_000)(self._merge)

    @classmethod
    def from_gguf(cls, reader: gguf.GGUFReader) -> "Tokenizer":
        if (rule := field(reader, "tokenizer.ggml.pre")) != "smollm":
            raise ValueError(f"the file cuts words by the rule {rule!r}; this tokenizer knows 'smollm'")
        types = field(reader, "tokenizer.ggml.token_type")
        control = {i for i, kind in enumerate(types) if kind == CONTROL}
        tokens, merges, eos_id = (field(reader, f"tokenizer.ggml.{n}") for n in ("tokens", "merges", "eos_token_id"))
        return cls(tokens, merges, control, eos_id)

    def encode(self, text: str) -> list[int]:
        """Plain text: "<|im_end|>" inside it is ten ordinary characters, never the control token."""
        words = (word for run in DIGITS.findall(text) for word in WORDS.findall(run))
        return [token for word in words for token in self._word(word)]

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        """(role, text) pairs, then the start of the assistant's answer."""
        if messages[0][0] != "system":
            messages = [("system", DEFAULT_SYSTEM), *messages]
        start, end, newline = self.special["<|im_start|>"], self.special["<|im_end|>"], self.encode("\n")
        ids: list[int] = []
        for role, text in messages:
            ids += [start, *self.encode(f"{role}\n{text}"), end, *newline]
        return [*ids, start, *self.encode("assistant\n")]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.bytes_of[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self):
        """A function: token id -> text that became readable. Half a character waits for its other half."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token, final=False: decoder.decode(self.bytes_of[token], final)

    def _merge(self, word: str) -> tuple[int, ...]:
        pieces = [self.characters[byte] for byte in word.encode()]
        while len(pieces) > 1:
            best = min(pairwise(pieces), key=lambda pair: self.rank.get(pair, len(self.rank)))
            if best not in self.rank:
                break
            pieces = list(join(pieces, best))
        if missing := [piece for piece in pieces if piece not in self.id_of]:
            codes = ", ".join(f"0x{self.characters.index(piece):02x}" for piece in missing)
            raise ValueError(f"cannot encode {word!r}: the vocabulary has no token for {codes}; remove it")
        return tuple(self.id_of[piece] for piece in pieces)


def join(pieces: list[str], pair: tuple[str, str]):
    """join(["a", "b", "a", "b"], ("a", "b")) -> "ab", "ab"."""
    i = 0
    while i < len(pieces):
        both = tuple(pieces[i : i + 2]) == pair
        yield "".join(pair) if both else pieces[i]
        i += 2 if both else 1
