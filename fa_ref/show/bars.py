"""A bar chart for a handful of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_ref.api import BadBatch
from fa_ref.show.picture import Picture, label, text_width
from fa_ref.show.requests import colour

_LONGEST = 240  # pixels of the largest value's bar
_CHARS = 30  # the same in characters
ROW = 20


def bars(labels: Sequence[str], values: Sequence[Any], unit: str = "", *, title: str = "") -> Picture:
    """Horizontal bars from zero, longest value full width, each with its number and unit.

    >>> bars(["plain", "cascade"], [48, 16], "tokens")
    plain    ############################## 48 tokens
    cascade  ########## 16 tokens
    """
    numbers = [float(v) for v in values]
    if len(labels) != len(numbers) or any(not 0 <= v < float("inf") for v in numbers):
        raise BadBatch(f"{len(labels)} labels, values {numbers}; give one finite value of at least 0 a label")
    top = max(numbers, default=0.0) or 1.0
    notes = [f"{_short(v)} {unit}".rstrip() for v in numbers]
    side = max(map(text_width, labels), default=0) + 8
    body, lines = "", []
    for i, (name, value, note) in enumerate(zip(labels, numbers, notes, strict=True)):
        long = round(value / top * _LONGEST)
        body += label(0, i * ROW + 13, name) + label(side + long + 6, i * ROW + 13, note)
        body += f'<path d="M{side} {i * ROW + 2}h{long}v14h-{long}z" fill="{colour(0)}"/>'
        lines.append(f"{name.ljust(max(map(len, labels)))}  {'#' * round(value / top * _CHARS)} {note}")
    return Picture(
        alt=f"bar chart of {len(numbers)} values",
        width=side + _LONGEST + 6 + max(map(text_width, notes), default=0),
        height=len(numbers) * ROW,
        body=body,
        text="\n".join(lines),
        title=title,
    )


def _short(value: float) -> str:
    """Whole numbers in full with thousands set apart, others with three digits."""
    return f"{int(value):,}" if value == int(value) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
