"""Masks as grids: a row a query, a column a key, filled where the query may look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from fa_ref.api import BadBatch
from fa_ref.masks import Mask
from fa_ref.show.cells import GAP, boxes, fill
from fa_ref.show.picture import Picture, group, label, side_by_side, text_width
from fa_ref.show.requests import COLOURS, PALE, WRONG, colour, ints

SIZE = 18  # pixels of a cell with its gap
_SMALL = 9  # font of the labels
_LINE = 13  # pixels of a line of labels

Positions = int | Sequence[int] | range | Tensor | None
Bands = Mapping[str, tuple[int, int]] | None


def mask_grid(
    mask: Mask | Tensor,
    *,
    q_pos: Positions = None,
    k_pos: Positions = None,
    page_size: int | None = None,
    bands: Bands = None,
    title: str = "",
    highlight: Tensor | None = None,
    request: str | int = 0,
) -> Picture:
    """A mask as a grid. `#` visible, `.` hidden, `X` and `x` the same for highlighted cells, `|` a page border.

    mask: a Mask, with positions; or its dense form, bool [queries, keys]. k_pos, q_pos: logical positions, or how many:
    k_pos=9 is 0 .. 8, q_pos=4 the last four of the keys. bands: name -> (start, end) of key positions to tint.
    request: whose colour, by name or number.

    >>> from fa_ref.masks import causal
    >>> mask_grid(causal, q_pos=2, k_pos=6, page_size=4)
    causal
       k0 1 2 3 | 4 5
    q4  # # # # | # .
    q5  # # # # | # #
    """
    dense, queries, keys = _resolve(mask, q_pos, k_pos)
    marked = torch.zeros_like(dense) if highlight is None else _same_shape(highlight, dense, "highlight")
    chars = _characters(dense, marked, ("#", ".", "X", "x"))
    title = title or (mask.name if isinstance(mask, Mask) else "")
    return _draw(chars, queries, keys, page_size, bands, title, colour(request), "")


def mask_diff(
    right: Mask | Tensor,
    wrong: Mask | Tensor,
    *,
    q_pos: Positions = None,
    k_pos: Positions = None,
    page_size: int | None = None,
    bands: Bands = None,
    title: str = "",
    request: str | int = 0,
) -> Picture:
    """Where a wrong mask differs from the right one: `+` sees too much, `-` sees too little.

    >>> right = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    >>> mask_diff(right, ~right)
       k0 1
    q0  - +
    q1  - -
    + sees a key it must not: 1 cell
    - misses a key it should see: 3 cells
    """
    good, queries, keys = _resolve(right, q_pos, k_pos)
    bad = _same_shape(_resolve(wrong, q_pos, k_pos)[0], good, "wrong")
    chars = _characters(bad, good ^ bad, ("#", ".", "+", "-"))
    counts = [("+", "sees a key it must not", bad & ~good), ("-", "misses a key it should see", good & ~bad)]
    lines = [f"{mark} {what}: {_cells(int(cells.sum()))}" for mark, what, cells in counts if cells.any()]
    return _draw(chars, queries, keys, page_size, bands, title, colour(request), "\n".join(lines or ["no difference"]))


def mask_row(*masks: Any, titles: Sequence[str] | None = None, title: str = "", **options: Any) -> Picture:
    """Several masks side by side, `options` as for mask_grid; pictures among them stay as they are.

    >>> a = torch.ones(1, 2, dtype=torch.bool)
    >>> mask_row(a, ~a, titles=["all", "none"], q_pos=range(1))
    all        none
       k0 1       k0 1
    q0  # #    q0  . .
    """
    given = [""] * len(masks) if titles is None else list(titles)
    if len(given) != len(masks):
        raise BadBatch(f"{len(given)} titles for {len(masks)} masks; give one a mask, or none")
    pictures = [
        mask if isinstance(mask, Picture) else mask_grid(mask, title=name, **options)
        for mask, name in zip(masks, given, strict=True)
    ]
    return side_by_side(*pictures, title=title)


def _resolve(mask: Any, q_pos: Positions, k_pos: Positions) -> tuple[Tensor, list[int], list[int]]:
    """The dense mask, and the logical positions of its rows and columns."""
    shape = (None, None) if isinstance(mask, Mask) else tuple(mask.shape)
    if len(shape) != 2:
        raise BadBatch(f"a mask of shape {shape}; a grid needs [queries, keys]: pick one request and head")
    keys = _positions(k_pos if k_pos is not None else shape[1], 0)
    count = q_pos if q_pos is not None else shape[0]
    queries = _positions(count, max(len(keys) - count, 0) if isinstance(count, int) else 0)
    if isinstance(mask, Mask):
        return mask.dense(torch.tensor(queries), torch.tensor(keys)), queries, keys
    if shape != (len(queries), len(keys)):
        raise BadBatch(f"a mask of shape {shape} with {len(queries)} q_pos and {len(keys)} k_pos; give one a row")
    return torch.as_tensor(mask).bool().cpu(), queries, keys


def _positions(given: Positions, first: int) -> list[int]:
    if given is None:
        raise BadBatch("a Mask has no size of its own; pass q_pos and k_pos, as positions or as counts")
    return list(range(first, first + given)) if isinstance(given, int) else ints(given)


def _same_shape(other: Tensor, dense: Tensor, name: str) -> Tensor:
    if other.shape != dense.shape:
        raise BadBatch(f"{name} has shape {tuple(other.shape)}, the mask {tuple(dense.shape)}; they must agree")
    return other.bool().cpu()


def _characters(dense: Tensor, marked: Tensor, alphabet: tuple[str, str, str, str]) -> list[str]:
    """One character a cell: visible, hidden, and the same two for marked cells."""
    number = (~dense).int() + 2 * marked.int()
    return ["".join(alphabet[i] for i in row) for row in number.tolist()]


def _cells(count: int) -> str:
    return f"{count} cell" if count == 1 else f"{count} cells"


def _draw(
    chars: list[str],
    queries: list[int],
    keys: list[int],
    page_size: int | None,
    bands: Bands,
    title: str,
    paint: str,
    legend: str,
) -> Picture:
    borders = [j for j, k in enumerate(keys) if j and page_size and k % page_size == 0]
    spans = _band_columns(bands, keys)
    left, top = text_width(f"q{max(queries, default=0)}", _SMALL) + 6, _LINE
    levels = 1 if _fit_in_a_line(spans) else len(spans)
    top += _LINE * levels if spans else 0
    width, height = left + len(keys) * SIZE, top + len(queries) * SIZE
    notes = legend.split("\n") if legend else []
    ends = [left + start * SIZE + 3 + text_width(name, _SMALL) for name, (start, _) in spans.items()]
    ends += [width, *(text_width(note, _SMALL + 1) for note in notes)]
    body = (
        _svg_bands(spans, left, height, levels)
        + _svg_cells(chars, left, top, paint)
        + _svg_borders(borders, left, top, height)
        + _svg_labels(queries, keys, left, top)
        + group("".join(label(0, height + _LINE * (i + 1), n) for i, n in enumerate(notes)), font_size=_SMALL + 1)
    )
    return Picture(
        alt=f"mask, {len(queries)} queries by {len(keys)} keys",
        width=max(ends),
        height=height + _LINE * len(notes),
        body=body,
        text=_ascii(chars, queries, keys, borders, spans) + ("\n" + legend if legend else ""),
        title=title,
    )


def _band_columns(bands: Bands, keys: list[int]) -> dict[str, tuple[int, int]]:
    """Bands of key positions as half-open ranges of columns; a band without a column is left out."""
    spans = {}
    for name, (start, end) in (bands or {}).items():
        columns = [j for j, k in enumerate(keys) if start <= k < end]
        if columns:
            spans[name] = (columns[0], columns[-1] + 1)
    return spans


def _fit_in_a_line(spans: Mapping[str, tuple[int, int]]) -> bool:
    return all(text_width(name, _SMALL) <= (end - start) * SIZE for name, (start, end) in spans.items())


def _svg_bands(spans: Mapping[str, tuple[int, int]], left: int, height: int, levels: int) -> str:
    parts = []
    for number, (name, (start, end)) in enumerate(spans.items()):
        x, y = left + start * SIZE - 1, 0 if levels == 1 else number * _LINE
        tinted = f'fill="{COLOURS[3 + number % 3]}" fill-opacity=".35"'
        parts.append(f'<path d="M{x} {y}h{(end - start) * SIZE}V{height}h-{(end - start) * SIZE}z" {tinted}/>')
        parts.append(f'<text x="{x + 3}" y="{y + 9}" font-size="{_SMALL}">{escape(name)}</text>')
    return "".join(parts)


def _svg_cells(chars: list[str], x: int, y: int, paint: str) -> str:
    inner = SIZE - GAP
    where = {c: [(i, j) for i, row in enumerate(chars) for j, char in enumerate(row) if char == c] for c in "X+-x"}
    marked = sorted(cell for cells in where.values() for cell in cells)
    corners = [(x + j * SIZE + 1, y + i * SIZE + 1) for i, j in marked]
    signs = "".join(f"M{x + j * SIZE + 4} {y + i * SIZE + 8}h8m-4-4v8" for i, j in where["+"])
    signs += "".join(f"M{x + j * SIZE + 4} {y + i * SIZE + 8}h8" for i, j in where["-"])
    outlined = f'fill="none" stroke="{WRONG}" stroke-width="2"'
    return (
        fill(chars, ".x-", x, y, SIZE, PALE)
        + fill(chars, "#X", x, y, SIZE, f'stroke="{paint}"')
        + fill(chars, "+", x, y, SIZE, f'stroke="{WRONG}" stroke-opacity=".55"')
        + boxes(corners, inner - 2, inner - 2, outlined)
        + (f'<path d="{signs}" stroke="currentColor" stroke-width="2"/>' if signs else "")
    )


def _svg_borders(borders: list[int], left: int, top: int, height: int) -> str:
    path = "".join(f"M{left + j * SIZE - 1} {top - _LINE}V{height}" for j in borders)
    dashed = 'stroke="currentColor" stroke-opacity=".7" stroke-dasharray="4 3"'
    return f'<path d="{path}" {dashed}/>' if path else ""


def _svg_labels(queries: list[int], keys: list[int], left: int, top: int) -> str:
    rows = "".join(label(left - 5, top + i * SIZE + 11, f"q{q}") for i, q in enumerate(queries))
    names = [f"k{k}" if j == 0 else str(k) for j, k in enumerate(keys)]
    columns = "".join(label(left + j * SIZE + 8, top - 4, name) for j, name in enumerate(names))
    return group(group(rows, text_anchor="end") + group(columns, text_anchor="middle"), font_size=_SMALL)


def _ascii(
    chars: list[str],
    queries: list[int],
    keys: list[int],
    borders: list[int],
    spans: Mapping[str, tuple[int, int]],
) -> str:
    cell = max(len(str(k)) for k in keys) if keys else 1
    side = max((len(f"q{q}") for q in queries), default=2) + 1

    def line(head: str, entries: Sequence[str]) -> str:
        parts = [("| " if j in borders else "") + entry.rjust(cell) for j, entry in enumerate(entries)]
        return (head.ljust(side) + " " + " ".join(parts)).rstrip()

    header = line("", [str(k) for k in keys])
    first = side + 1 + cell - len(str(keys[0])) if keys else side
    lines = [header[: first - 1] + "k" + header[first:] if keys else header]
    lines += [line(f"q{q}", list(row)) for q, row in zip(queries, chars, strict=True)]
    for name, (start, end) in spans.items():
        marks = ["~" if start <= j < end else "" for j in range(len(keys))]
        lines.append(line("", marks) + f"  {name}")
    return "\n".join(lines)
