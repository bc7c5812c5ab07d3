"""A ragged batch: requests of different lengths packed one after another, with the boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_ref.api import BadBatch
from fa_ref.show.cells import boxes
from fa_ref.show.picture import Picture, group, label
from fa_ref.show.requests import ints, request_names, tint

SIZE = 22  # pixels of a token
_APART = 8  # pixels between requests
_EMPTY = 22  # pixels of a request without tokens


def ragged(
    cu_seqlens: Any,
    names: Sequence[str] | None = None,
    *,
    first: Any = None,
    cuts: Sequence[int] = (),
    title: str = "",
) -> Picture:
    """Packed tokens, a cell each, and the values of cu_seqlens at the boundaries.

    first: logical position of each request's first token (default 0), such as its prefix length; cells are
    numbered from there. cuts: a bar, `/` in text, before these of the packed tokens, counted from 0.

    >>> ragged([0, 3, 3, 5], first=[4, 0, 8])
    A4 A5 A6 | B empty | C8 C9
    cu_seqlens 0 3 3 5
    >>> ragged([0, 3, 5], cuts=[2])
    A0 A1 / A2 | B0 B1
    cu_seqlens 0 3 5
    """
    bounds = ints(cu_seqlens)
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds):
        raise BadBatch(f"cu_seqlens {bounds}; they start at 0 and never fall: the prefix sums of the lengths")
    if any(not 0 <= cut < bounds[-1] for cut in cuts):
        raise BadBatch(f"cuts {list(cuts)} of {bounds[-1]} tokens; a cut is before a token: 0 to {bounds[-1] - 1}")
    lens = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    named = request_names(len(lens), names)
    starts = [0] * len(lens) if first is None else ints(first)
    x, body, bars, edges, texts = 0, "", "", [0], []
    for name, length, start, packed in zip(named, lens, starts, bounds[:-1], strict=True):
        wide = length * SIZE if length else _EMPTY
        body += _request(name, length, start, x, wide)
        edges.append(x + wide + _APART // 2)
        cut = [i for i in range(length) if packed + i in cuts]
        bars += "".join(f"M{x + 1 + i * SIZE} 11V41" for i in cut)
        x += wide + _APART
        tokens = [f"{'/ ' if i in cut else ''}{name}{start + i}" for i in range(length)]
        texts.append(" ".join(tokens) if tokens else f"{name} empty")
    ticks = "".join(f"M{edge} 14V44" for edge in edges)
    body += f'<path d="{ticks}" stroke="currentColor" stroke-opacity=".7" stroke-dasharray="4 3"/>'
    if bars:
        body += f'<path d="{bars}" stroke="currentColor" stroke-width="3"/>'
    values = "".join(label(edge, 56, str(bound)) for edge, bound in zip(edges, bounds, strict=True))
    body += group(values, text_anchor="middle", font_weight="bold") + group(
        label(x + 14, 56, "cu_seqlens"), font_size=9
    )
    return Picture(
        alt=f"{bounds[-1]} tokens of {len(lens)} requests, packed",
        width=x + 74,
        height=60,
        body=body,
        text=" | ".join(texts) + "\ncu_seqlens " + " ".join(map(str, bounds)),
        title=title,
    )


def _request(name: str, length: int, start: int, x: int, wide: int) -> str:
    left = x + 2
    corners = [(left + i * SIZE, 16) for i in range(length)]
    numbers = "".join(label(left + i * SIZE + SIZE // 2 - 1, 30, str(start + i)) for i in range(length))
    return (
        boxes(corners, SIZE - 2, 20, tint(name))
        + (label(left, 30, "-") if not length else "")
        + group(numbers, text_anchor="middle")
        + group(label(left + 1, 11, name), font_weight="bold")
    )
