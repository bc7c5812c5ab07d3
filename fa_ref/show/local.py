"""Chunked local attention as virtual batches: the pieces of each mask, and the sequence each becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fa_ref.api import BadConfig
from fa_ref.show.cells import fill
from fa_ref.show.picture import Picture, group, label, stacked, text_width
from fa_ref.show.requests import PALE, colour, ints, request_names

SIZE = 14  # pixels of a cell with its gap
_SMALL = 9


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The queries of one request that lie in one chunk."""

    first_query: int  # logical position
    first_key: int  # logical position, a multiple of the chunk
    end: int  # one past the last query, and the last key
    pages: list[int]


def virtual_batches(
    attn_chunk_size: int,
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    page_size: int = 1,
    *,
    names: Sequence[str] | None = None,
    title: str = "",
) -> Picture:
    """Each request's local mask, its pieces outlined, and beside each piece its lengths and pages.

    Arguments as for make_local_attention_virtual_batches. `|` is a chunk border.

    >>> virtual_batches(4, [0, 3], [5], [[7, 3]], page_size=4)
    A    k0 1 2 3 | 4
    q2    # # # . | .  sequence 0: q 2, k 4, pages 7
    q3    # # # # | .
    q4    . . . . | #  sequence 1: q 1, k 1, pages 3
    """
    if attn_chunk_size < 1 or page_size < 1 or attn_chunk_size % page_size:
        raise BadConfig(f"chunk {attn_chunk_size}, pages of {page_size}; a chunk must be a multiple of a page")
    bounds, totals = ints(query_start_loc), ints(seq_lens)
    named = request_names(len(totals), names)
    number, panels = 0, []
    for request, (name, total) in enumerate(zip(named, totals, strict=True)):
        start = total - (bounds[request + 1] - bounds[request])
        pieces = list(_pieces(attn_chunk_size, start, total, ints(block_table[request]), page_size))
        panels.append(_panel(name, attn_chunk_size, start, total, pieces, number))
        number += len(pieces)
    return stacked(*panels, title=title)


def _pieces(chunk: int, start: int, total: int, table: list[int], page_size: int) -> Iterator[Piece]:
    for key in range(start // chunk * chunk, total if start < total else 0, chunk):
        end = min(key + chunk, total)
        pages = table[key // page_size : -(-end // page_size)]
        yield Piece(first_query=max(key, start), first_key=key, end=end, pages=pages)


def _panel(name: str, chunk: int, start: int, total: int, pieces: list[Piece], number: int) -> Picture:
    rows = [
        "".join("#" if k <= q and k // chunk == q // chunk else "." for k in range(total)) for q in range(start, total)
    ]
    left, top = 30, 14
    right = left + total * SIZE + 8
    texts = {p.first_query: _note(number + i, p) for i, p in enumerate(pieces)}
    lines = "".join(label(right, top + (q - start) * SIZE + 10, text) for q, text in texts.items())
    outline = "".join(_outline(p, left - 1, top - 1 - start * SIZE) for p in pieces)
    labels = "".join(label(left - 4, top + i * SIZE + 10, f"q{start + i}") for i in range(len(rows)))
    ticks = "".join(label(left + k * SIZE, top - 4, f"k{k}") for k in range(0, total, chunk))
    return Picture(
        alt=f"request {name}: {len(rows)} queries in {len(pieces)} pieces of chunks of {chunk}",
        width=right + max((text_width(text, 10) for text in texts.values()), default=0),
        height=top + max(len(rows), 1) * SIZE,
        body=fill(rows, ".", left, top, SIZE, PALE)
        + fill(rows, "#", left, top, SIZE, f'stroke="{colour(name)}"')
        + f'<path d="{outline}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        + group(labels, font_size=_SMALL, text_anchor="end")
        + group(ticks, font_size=_SMALL)
        + group(lines, font_size=10)
        + group(label(0, top - 4, name), font_weight="bold"),
        text=_ascii(name, rows, start, total, chunk, texts),
    )


def _note(number: int, piece: Piece) -> str:
    lens = f"q {piece.end - piece.first_query}, k {piece.end - piece.first_key}"
    return f"sequence {number}: {lens}, pages {' '.join(map(str, piece.pages))}"


def _outline(piece: Piece, x: int, y: int) -> str:
    """The rectangle of a piece in a grid whose position 0 is at x, y."""
    wide, high = (piece.end - piece.first_key) * SIZE, (piece.end - piece.first_query) * SIZE
    return f"M{x + piece.first_key * SIZE} {y + piece.first_query * SIZE}h{wide}v{high}h-{wide}z"


def _ascii(name: str, rows: list[str], start: int, total: int, chunk: int, texts: dict[int, str]) -> str:
    cell = len(str(max(total - 1, 0)))
    if not rows:
        return f"{name} has no queries"

    def line(head: str, entries: Sequence[str]) -> str:
        parts = [("| " if k and k % chunk == 0 else "") + e.rjust(cell) for k, e in enumerate(entries)]
        return head.ljust(5) + " " + " ".join(parts)

    header = line(name, [str(k) for k in range(total)])
    first = 6 + cell - 1
    lines = [header[: first - 1] + "k" + header[first:]]
    for i, row in enumerate(rows):
        note = texts.get(start + i, "")
        lines.append((line(f"q{start + i}", row) + ("  " + note if note else "")).rstrip())
    return "\n".join(lines)
