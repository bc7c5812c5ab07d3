"""A plan: the kernel calls of one forward pass, as data. Built once a batch, run once a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int32
from torch import Tensor

from fa_ref.api.errors import UnsupportedByProvider
from fa_ref.api.modes import ForwardMode, LayerKind


@dataclass(frozen=True, kw_only=True)
class AttentionPass:
    """One call of flash_attn_with_kvcache over all (or some) query rows of the batch.

    A *sequence* of a pass is a request, or a piece of one: a chunk of chunked local attention.

    >>> import torch
    >>> table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    >>> lens = torch.tensor([5, 2], dtype=torch.int32)
    >>> cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    >>> p = AttentionPass(page_table=table, cache_seqlens=lens, cu_seqlens_q=cu,
    ...                   max_seqlen_q=1, max_seqlen_k=5, causal=True, page_size=4)
    >>> p.pages(1)
    [2]
    """

    page_table: Int32[Tensor, "rows pages"]  # page ids of the pool, viewed in pages of `page_size`
    row_index: Int32[Tensor, " sequences"] | None = None  # row of page_table per sequence; None: its own
    cache_seqlens: Int32[Tensor, " sequences"]  # keys per sequence, counted from its first table entry
    cu_seqlens_q: Int32[Tensor, " sequences_plus_1"]  # query rows of sequence i: cu[i] .. cu[i + 1]
    max_seqlen_q: int  # bound, not necessarily attained
    max_seqlen_k: int  # bound
    causal: bool  # bottom-right aligned: the last query sees the last key
    page_size: int  # tokens a page of the view that page_table addresses
    pool: str = "full"  # "full" or "swa": which pool the page ids belong to
    uses_window: bool = False  # the layer's sliding window still has to be applied by the kernel
    takes_sinks: bool = True  # exactly one pass of a merge does
    cut_to_window: int = -1  # the keys are already those of this sliding_window_size, which the layer's must equal
    keys_are_new: bool = False  # every key is one of this step's own tokens, in query order
    token_index: Int32[Tensor, " tokens"] | None = None  # the query rows of this pass; None: all, in order

    @property
    def sequences(self) -> int:
        return self.cache_seqlens.shape[0]

    def pages(self, sequence: int) -> list[int]:
        """The page ids that one sequence may read, in order. Copies to the host: for people and tests."""
        row = sequence if self.row_index is None else int(self.row_index[sequence])
        count = -(-int(self.cache_seqlens[sequence]) // self.page_size)
        return self.page_table[row, :count].tolist()


@dataclass(frozen=True, kw_only=True)
class TreePass:
    """Attention of each request's query tokens over its draft tokens, under an explicit mask.

    The suffix of a cascade: the passes before it cover the keys that all queries share.
    """

    slots: Int32[Tensor, "requests drafts"]  # pool slot of each draft token, token-granular
    mask: Bool[Tensor, "requests queries drafts"]  # True: the query may see the draft token
    pool: str = "full"  # "full" or "swa": which pool the slots belong to
    takes_sinks: bool = True  # a query sees at least itself here, so a sink always has a row to join
    cut_to_window: int = -1  # as in AttentionPass
    token_index: None = None  # query rows are request-major: request r has rows r * queries .. (r + 1) * queries

    def expanded(self) -> AttentionPass:
        """The same attention as a page table: one sequence a query row, listing the draft slots it sees.

        Slots keep their order and stand without gaps at the front of a row; what follows them is not read.

        >>> import torch
        >>> slots = torch.tensor([[8, 9, 10]], dtype=torch.int32)
        >>> mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
        >>> table = TreePass(slots=slots, mask=mask).expanded()
        >>> [table.pages(i) for i in range(3)]
        [[8], [8, 9], [8, 10]]
        """
        requests, queries, drafts = self.mask.shape
        rows = self.mask.reshape(requests * queries, drafts)
        order = torch.argsort((~rows).to(torch.int8), dim=1, stable=True)  # visible drafts first, in their order
        slots = self.slots.repeat_interleave(queries, dim=0).gather(1, order)
        device = self.slots.device
        return AttentionPass(
            page_table=slots,
            cache_seqlens=rows.sum(dim=1).to(torch.int32),
            cu_seqlens_q=torch.arange(requests * queries + 1, dtype=torch.int32, device=device),
            max_seqlen_q=1,
            max_seqlen_k=drafts,
            causal=False,
            page_size=1,
            pool=self.pool,
            takes_sinks=self.takes_sinks,
            cut_to_window=self.cut_to_window,
        )


@dataclass(frozen=True, kw_only=True)
class GivenKeys:
    """MLA as MHA: the query rows of an extend, for keys and values that the caller expanded and passes himself."""

    cu_seqlens_q: Int32[Tensor, " requests_plus_1"]  # the new tokens of request i: cu[i] .. cu[i + 1]
    cu_seqlens_k: Int32[Tensor, " requests_plus_1"]  # all keys of request i, one request after another
    max_seqlen_q: int  # bound
    max_seqlen_k: int  # bound
    keys: int | None  # of all requests; None: not known on the host


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """For each layer kind, the passes whose merged states are the layer's output."""

    forward_mode: ForwardMode  # of the batch it was made from
    num_tokens: int  # query rows of the batch
    passes: Mapping[LayerKind, tuple[AttentionPass | TreePass, ...]]  # in the order in which states are merged
    refused: Mapping[LayerKind, str] = field(default_factory=dict)  # why a kind has no plan in this mode
    shared_prefix: tuple[int, int, int] | None = None  # cascade: prefix tokens, bytes a layer reads without, with it
    given: GivenKeys | None = None  # extend of an MLA model: the same queries in the MHA form
    batch_size: int | None = None  # of the planned batch; forward refuses another. None: not compared
    drafts: str = ""  # spec_info of the planned batch in words, where its mode reads it; forward refuses another
    values: Mapping[str, list[int]] | None = None  # the rows and lengths it was planned for, where they may be read

    def for_kind(self, kind: LayerKind) -> tuple[AttentionPass | TreePass, ...]:
        """The passes of a layer kind. Raises UnsupportedByProvider, naming mode and kind, if there are none."""
        if kind in self.passes:
            return self.passes[kind]
        why = self.refused.get(kind, "the backend was configured without such layers")
        planned = ", ".join(k.name for k in self.passes) or "none"
        raise UnsupportedByProvider(
            f"a {kind.name} layer in {self.forward_mode.name} has no plan: {why}. Planned kinds: {planned}."
        )

    def describe(self) -> str:
        """The plan as an aligned table, one row a pass."""
        head = (
            "layer kind",
            "pass",
            "sequences",
            "queries",
            "keys",
            "page",
            "pool",
            "causal",
            "window",
            "takes sinks",
        )
        rows: list[tuple[str, ...]] = [head]
        for kind, passes in self.passes.items():
            for number, step in enumerate(passes, start=1):
                rows.append((kind.name, str(number), *_cells(step)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        title = f"{self.forward_mode.name}: {self.num_tokens} query token{'' if self.num_tokens == 1 else 's'}"
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.shared_prefix is not None:
            tokens, plain, cascade = self.shared_prefix
            lines.append(f"cascade over {tokens} shared tokens: a full layer reads {cascade} bytes instead of {plain}")
        lines += [f"{kind.name}: refused, {why}" for kind, why in self.refused.items()]
        return "\n".join([title, *lines])


def _cells(step: AttentionPass | TreePass) -> tuple[str, ...]:
    if isinstance(step, TreePass):
        requests, queries, drafts = step.mask.shape
        keys, sinks = str(requests * drafts), "yes" if step.takes_sinks else "-"
        return (f"{requests} trees", str(requests * queries), keys, "1", step.pool, "mask", "-", sinks)
    return (
        str(step.sequences),
        str(int(step.cu_seqlens_q[-1])),
        str(int(step.cache_seqlens.sum())),
        str(step.page_size),
        step.pool,
        "yes" if step.causal else "no",
        "yes" if step.uses_window else "-",
        "yes" if step.takes_sinks else "-",
    )
