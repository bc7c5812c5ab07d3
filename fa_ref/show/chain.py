"""A product of three matrices, drawn to scale: which two are multiplied first, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from fa_ref.api import BadBatch
from fa_ref.show.cells import boxes
from fa_ref.show.picture import Picture, group, label, text_width
from fa_ref.show.requests import tint

UNIT = 4  # pixels of one row or column
_ABOVE, _BELOW, _APART = 16, 14, 26  # pixels for a name, for a shape, and between matrices
_SMALL = 9

Matrix = tuple[str, int, int]  # name, rows, columns


def chain(matrices: Sequence[Matrix], *, first: int, result: str = "result", title: str = "") -> Picture:
    """Three matrices in the two steps of their product, matrices `first` and `first + 1` being multiplied first.

    >>> chain([("q", 1, 12), ("w", 12, 16), ("k", 16, 9)], first=0, result="scores")
    q 1x12 @ w 12x16 = q w 1x16  192 products
    q w 1x16 @ k 16x9 = scores 1x9  144 products
    336 products
    """
    shapes = [matrix[1:] for matrix in matrices]
    fits = len(shapes) == 3 and all(a[1] == b[0] for a, b in zip(shapes[:-1], shapes[1:], strict=True))
    if not fits or first not in (0, 1) or min(map(min, shapes)) < 1:
        raise BadBatch(
            f"matrices {list(matrices)}, first {first}; give three (name, rows, columns), each with as many rows as "
            "the one before it has columns, and 0 or 1 for the pair that is multiplied first"
        )
    left, right = matrices[first], matrices[first + 1]
    between = (f"{left[0]} {right[0]}", left[1], right[2])
    steps = [(left, right, between)]
    last = (between, matrices[2]) if first == 0 else (matrices[0], between)
    steps.append((*last, (result, matrices[0][1], matrices[2][2])))
    drawn = [matrix[0] for matrix in matrices]
    y, widths, body, lines, total = 0, [0], "", [], 0
    for one, other, product in steps:
        count = one[1] * one[2] * other[2]
        total += count
        part, width, height = _equation((one, other, product), f"{count:,} products", drawn)
        body += f'<g transform="translate(0 {y})">{part}</g>'
        y += height
        widths.append(width)
        lines.append(f"{_named(one)} @ {_named(other)} = {_named(product)}  {count:,} products")
    return Picture(
        alt=f"a product of three matrices in {total:,} products of numbers",
        width=max(widths),
        height=y,
        body=body,
        text="\n".join([*lines, f"{total:,} products"]),
        title=title,
    )


def _named(matrix: Matrix) -> str:
    return f"{matrix[0]} {_shape(matrix)}"


def _shape(matrix: Matrix) -> str:
    return f"{matrix[1]}x{matrix[2]}"


def _equation(matrices: Sequence[Matrix], note: str, drawn: Sequence[str]) -> tuple[str, int, int]:
    """One product in a line, and its width and height in pixels. Names in `drawn` have a colour of their own."""
    high = max(matrix[1] for matrix in matrices) * UNIT
    x, body, names, sizes, signs = 0, "", "", "", ""
    for matrix, sign in zip(matrices, ("@", "=", note), strict=True):
        name, rows, columns = matrix
        room = max(columns * UNIT, text_width(name), text_width(_shape(matrix), _SMALL))
        top = _ABOVE + (high - rows * UNIT) // 2
        paint = tint(drawn.index(name)) if name in drawn else 'fill="currentColor" fill-opacity=".45"'
        body += boxes([(x + (room - columns * UNIT) // 2, top)], columns * UNIT, rows * UNIT, paint)
        names += label(x + room // 2, top - 4, name)
        sizes += label(x + room // 2, top + rows * UNIT + 10, _shape(matrix))
        signs += label(x + room + 8, _ABOVE + high // 2 + 4, sign)
        x += room + (_APART if sign != note else 8)
    body += group(names, text_anchor="middle") + group(sizes, text_anchor="middle", font_size=_SMALL) + signs
    return body, x + text_width(note), _ABOVE + high + _BELOW + 6
