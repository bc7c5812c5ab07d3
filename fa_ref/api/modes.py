"""Forward modes and layer kinds: the two questions that decide how a batch is planned."""

from __future__ import annotations

from enum import Enum


class ForwardMode(Enum):
    """What one forward pass of the model does to the batch.

    Each member says how many query tokens a request brings, whose keys and values are written before
    attention runs, what a full-attention layer sees, and how many kernel calls that takes.
    P is the cached prefix, L the new tokens, S = P + L, T the draft tokens.

    >>> ForwardMode.EXTEND.queries
    'L, ragged'
    >>> ForwardMode.DECODE.is_decode_or_idle()
    True
    """

    #           value, queries per request, keys written first, full layers see, kernel calls
    EXTEND = (1, "L, ragged", "the L new tokens", "causal over S keys", "1")
    DECODE = (
        2,
        "1; with DraftInput and topk k > 1: k",
        "that 1 token; with DraftInput: the draft tokens of this step",
        "S keys; with DraftInput, step s: seq_lens keys and the own branch's s + 1 draft tokens",
        "1; with DraftInput and topk > 1: 2 and a merge",
    )
    MIXED = (3, "L for some, 1 for the rest", "the new tokens of all", "causal over S keys", "1")
    IDLE = (4, "0", "none", "nothing: the output is empty", "0")
    TARGET_VERIFY = (
        5,
        "T",
        "the T draft tokens",
        "causal over seq_lens + T keys; topk > 1: seq_lens keys and the ancestors in the draft tree",
        "1; topk > 1: 2 and a merge",
    )
    DRAFT_EXTEND = (6, "the accepted tokens, ragged or a fixed width", "the accepted tokens", "causal", "1")
    SPLIT_PREFILL = (7, "L, ragged", "the L new tokens", "causal over S keys", "1; planned as EXTEND")

    def __init__(self, number: int, queries: str, keys_written: str, sees: str, kernel_calls: str) -> None:
        self.number = number
        self.queries = queries
        self.keys_written = keys_written
        self.sees = sees
        self.kernel_calls = kernel_calls
        self.__doc__ = (
            f"Queries per request: {queries}. The layer writes, before attention: {keys_written}. "
            f"Full layers see: {sees}. Kernel calls: {kernel_calls}."
        )

    def is_extend(self) -> bool:
        """New tokens over a cached prefix: EXTEND, MIXED, DRAFT_EXTEND, SPLIT_PREFILL, TARGET_VERIFY."""
        return self in (
            ForwardMode.EXTEND,
            ForwardMode.MIXED,
            ForwardMode.DRAFT_EXTEND,
            ForwardMode.SPLIT_PREFILL,
            ForwardMode.TARGET_VERIFY,
        )

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_extend_or_draft_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL, ForwardMode.DRAFT_EXTEND)

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return self.is_extend_or_draft_extend() or self is ForwardMode.MIXED

    @classmethod
    def of(cls, mode: object) -> ForwardMode:
        """Our member for a server's own enum member of the same name.

        Raises BadBatch when the name is unknown.
        """
        if isinstance(mode, cls):
            return mode
        name = getattr(mode, "name", mode)
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        from fa_ref.api.errors import BadBatch

        raise BadBatch(f"forward_mode {mode!r} is unknown; supported: {', '.join(cls.__members__)}")


class LayerKind(Enum):
    """What a layer may see of a request, beyond what the mode allows."""

    FULL = "full"
    """Every earlier key."""
    SLIDING = "sliding"
    """Keys at most `sliding_window_size` logical positions before the query."""
    LOCAL = "local"
    """Keys of the query's own chunk of `attention_chunk_size` logical positions."""
    CROSS = "cross"
    """All encoder keys of the request, not causal."""
