"""Requests in pictures: their names, their colours, and the slots they own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fa_ref.api import BadBatch

# Okabe and Ito's palette, told apart with any colour vision. Vermillion is kept for what is wrong.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
WRONG = "#D55E00"
PALE = 'stroke="currentColor" stroke-opacity=".13"'


def request_names(count: int, names: Sequence[str] | None = None) -> list[str]:
    """A, B, C, ... unless names are given; one a request.

    >>> request_names(3)
    ['A', 'B', 'C']
    """
    if names is None:
        return [chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(count)]
    if len(names) != count:
        raise BadBatch(f"{len(names)} names for {count} rows; give one name a row, or none")
    return list(names)


def colour(request: str | int) -> str:
    """The colour of a request: by number, or by the first letter of its name, so "B" and "B1" share one.

    >>> colour("B") == colour("B1") == colour(1)
    True
    """
    if isinstance(request, int):
        return COLOURS[request % len(COLOURS)]
    return COLOURS[(ord(request[:1].upper() or "A") - ord("A")) % len(COLOURS)]


def tint(request: str | int) -> str:
    """Paint of a cell with text on it: the request's colour, light enough for text of either theme.

    What several requests share, "A+B", is grey.
    """
    if isinstance(request, str) and "+" in request:
        return 'fill="currentColor" fill-opacity=".15"'
    return f'fill="{colour(request)}" fill-opacity=".4"'


def ints(values: Any) -> list[int]:
    """A tensor, array, range or list of whole numbers as a list."""
    return [int(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]


def slot_rows(source: Any, names: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Name -> slot of each logical position, from a case, a mapping, or one row of slots a request."""
    if isinstance(source, Mapping):
        return {name: ints(slots) for name, slots in source.items()}
    rows = _rows_of_batch(source) if hasattr(source, "batch") else source
    rows = list(rows)
    return {name: ints(slots) for name, slots in zip(request_names(len(rows), names), rows, strict=True)}


def _rows_of_batch(case: Any) -> Iterable[Any]:
    """The rows of req_to_token that a case's batch uses, each as long as its request."""
    pool = case.batch.req_to_token_pool or case.config.req_to_token_pool
    lens = ints(case.batch.seq_lens)
    rows = ints(case.batch.req_pool_indices)
    return [pool.req_to_token[row, :length] for row, length in zip(rows, lens, strict=True)]
