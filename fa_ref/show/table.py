"""A page table: for each sequence the pages it reads, in order. What lies past its keys is never read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_ref.api import AttentionPass, BadBatch
from fa_ref.show.cells import boxes
from fa_ref.show.picture import Picture, Pixels, group, label, text_width
from fa_ref.show.requests import ints, request_names, tint

WIDE, HIGH, ROW = 28, 20, 26  # pixels: a cell, and the distance of rows
FRAME = 'fill="none" stroke="currentColor" stroke-opacity=".6"'


def page_table(
    table: Any,
    lens: Any = None,
    page_size: int | None = None,
    names: Sequence[str] | None = None,
    *,
    title: str = "",
) -> Picture:
    """Page ids, one row a request: `[3]` is read, a bare number is not.

    table: an AttentionPass, or page ids [rows, pages] with `lens` (keys of each row) and `page_size`. Without
    lens every entry counts as read. names: of the rows; the first letter picks the colour.

    >>> page_table([[3, 1, 7], [2, 0, 0]], lens=[9, 2], page_size=4)
    A [3] [1] [7]  9 keys
    B [2]  0   0   2 keys
    """
    if isinstance(table, AttentionPass):
        pages, counts, keys = rows_of_pass(table)
    else:
        pages = [ints(row) for row in table]
        keys = None if lens is None else ints(lens)
        counts = [len(row) for row in pages] if keys is None else _counts(keys, page_size, pages)
    named = request_names(len(pages), names)
    notes = [""] * len(pages) if keys is None else [_keys(n) for n in keys]
    side = max(map(text_width, named), default=0) + 8
    columns = max(map(len, pages), default=0)
    tops = [i * ROW for i in range(len(pages))]
    right = side + columns * WIDE + 10
    body = table_cells(pages, counts, named, side, tops)
    body += "".join(label(0, y + 14, name) for y, name in zip(tops, named, strict=True))
    body += group("".join(label(right, y + 14, n) for y, n in zip(tops, notes, strict=True) if n), font_size=10)
    return Picture(
        alt=f"page table of {len(pages)} rows and {columns} columns",
        width=right + max(map(text_width, notes), default=0),
        height=max(len(pages) * ROW - ROW + HIGH, 1),
        body=body,
        text=_ascii(pages, counts, named, notes),
        title=title,
    )


def rows_of_pass(step: AttentionPass) -> tuple[list[list[int]], list[int], list[int]]:
    """Of each row of a pass's table: its page ids, how many are read, and the keys that takes."""
    pages = [ints(row) for row in step.page_table]
    rows = list(range(step.sequences)) if step.row_index is None else ints(step.row_index)
    keys = [0] * len(pages)
    for row, length in zip(rows, ints(step.cache_seqlens), strict=True):
        keys[row] = max(keys[row], length)
    return pages, _counts(keys, step.page_size, pages), keys


def table_cells(pages: list[list[int]], counts: list[int], names: list[str], x: int, tops: Sequence[Pixels]) -> str:
    """Rows of page ids: those that are read in the colour of their row's name, the rest pale."""
    read, rest, numbers, faint = [], [], "", ""
    body = ""
    for row, count, name, y in zip(pages, counts, names, tops, strict=True):
        corners = [(x + j * WIDE, y) for j in range(len(row))]
        body += boxes(corners[:count], WIDE, HIGH, tint(name))
        read += corners[:count]
        rest += corners[count:]
        texts = [label(x + j * WIDE + WIDE // 2, y + 14, str(page)) for j, page in enumerate(row)]
        numbers += "".join(texts[:count])
        faint += "".join(texts[count:])
    return (
        boxes(rest, WIDE, HIGH, 'fill="none" stroke="currentColor" stroke-opacity=".2"')
        + body
        + boxes(read, WIDE, HIGH, FRAME)
        + group(numbers + group(faint, opacity=".4"), text_anchor="middle")
    )


def row_text(row: list[int], count: int, cell: int) -> str:
    """One row of page ids as text."""
    parts = [f"[{page}]" if j < count else f" {page} " for j, page in enumerate(row)]
    return " ".join(part.rjust(cell) for part in parts)


def cell_width(pages: list[list[int]]) -> int:
    return max((len(f"[{page}]") for row in pages for page in row), default=3)


def _counts(keys: list[int], page_size: int | None, pages: list[list[int]]) -> list[int]:
    if page_size is None or len(keys) != len(pages):
        raise BadBatch(f"{len(keys)} lens, page_size {page_size}, {len(pages)} rows; give a len a row and page_size")
    counts = [-(-length // page_size) for length in keys]
    for row, count in zip(pages, counts, strict=True):
        if count > len(row):
            raise BadBatch(f"a row of {len(row)} pages of {page_size} cannot hold its {count} pages; check lens")
    return counts


def _keys(count: int) -> str:
    return f"{count} key" if count == 1 else f"{count} keys"


def _ascii(pages: list[list[int]], counts: list[int], names: list[str], notes: list[str]) -> str:
    side, cell = max(map(len, names), default=0), cell_width(pages)
    wide = max((len(row_text(row, 0, cell)) for row in pages), default=0)
    return "\n".join(
        f"{name.ljust(side)} {row_text(row, count, cell).ljust(wide)}  {note}".rstrip()
        for row, count, name, note in zip(pages, counts, names, notes, strict=True)
    )
