"""Cells: a grid of characters is the ASCII twin, and runs of one character become strokes of the SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from fa_ref.show.picture import Pixels

GAP = 2  # pixels between cells


def runs(rows: Sequence[str], wanted: str) -> Iterator[tuple[int, int, int]]:
    """(row, first column, length) of every horizontal run of characters in `wanted`.

    >>> list(runs(["##.", ".#."], "#"))
    [(0, 0, 2), (1, 1, 1)]
    """
    for number, row in enumerate(rows):
        column = 0
        for inside, run in groupby(row, key=lambda char: char in wanted):
            length = len(list(run))
            if inside:
                yield number, column, length
            column += length


def fill(rows: Sequence[str], wanted: str, x: int, y: int, size: int, paint: str) -> str:
    """All cells of some characters as one path: a dashed stroke a run, each dash a cell. Small, however large."""
    middle = (size - GAP) / 2
    path = "".join(
        f"M{x + column * size} {y + row * size + middle:g}h{length * size - GAP}"
        for row, column, length in runs(rows, wanted)
    )
    if not path:
        return ""
    return f'<path d="{path}" {paint} stroke-width="{size - GAP}" stroke-dasharray="{size - GAP} {GAP}"/>'


def boxes(corners: Iterable[tuple[Pixels, Pixels]], width: Pixels, height: Pixels, paint: str) -> str:
    """Rectangles of one size as one path."""
    path = "".join(f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z" for x, y in corners)
    return f'<path d="{path}" {paint}/>' if path else ""
