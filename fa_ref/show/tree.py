"""A draft tree: its nodes, their tokens, and the drafts that each may see: its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_ref.api import BadBatch
from fa_ref.show.cells import fill
from fa_ref.show.picture import Picture, group, label, text_width
from fa_ref.show.requests import PALE, colour, ints, tint

STEP, ROW, CELL = 40, 22, 18  # pixels: a level of depth, a node, a cell of the mask
_RADIUS = 8
_TOP = 14


def tree(
    parents: Any,
    tokens: Sequence[str] | None = None,
    *,
    path: Sequence[int] = (),
    request: str | int = 0,
    title: str = "",
) -> Picture:
    """Nodes in slot order, a column a level of depth; each with its token and its row of the tree mask.

    parents[i]: the node that draft i continues, earlier than i; -1 for a root, which follows the prefix. path: nodes to
    set off, such as the accepted ones; their rings and the edges between them are bold, and a star in the text.

    >>> tree([-1, 0, 0, 1], tokens=["the", "cat", "dog", "sat"])
    d0  the         # . . .
    d1  +-cat       # # . .
    d2  +-dog       # . # .
    d3    +-sat d1  # # . #
    >>> tree([-1, 0, 0], path=[0, 2])
    d0*      # . .
    d1   +-  # # .
    d2*  +-  # . #
    """
    above = ints(parents)
    for node, parent in enumerate(above):
        if not -1 <= parent < node:
            raise BadBatch(f"node {node} has parent {parent}; a parent comes before its children, -1 is a root")
    if not set(path) <= set(range(len(above))):
        raise BadBatch(f"path {list(path)} of a tree of {len(above)} nodes; name nodes of the tree")
    names = [""] * len(above) if tokens is None else list(tokens)
    if len(names) != len(above):
        raise BadBatch(f"{len(names)} tokens for {len(above)} nodes; give one a node, or none")
    paths = [ancestors(above, node) for node in range(len(above))]
    depth = [len(path) - 1 for path in paths]
    rows = ["".join("#" if j in path else "." for j in range(len(above))) for path in paths]
    words = 2 * _RADIUS + max(depth, default=0) * STEP + 10  # left edge of the tokens
    right = words + max(map(text_width, names), default=0) + 14  # and of the mask
    numbers = "".join(label(right + j * CELL + CELL // 2 - 1, 10, f"d{j}") for j in range(len(above)))
    return Picture(
        alt=f"draft tree of {len(above)} nodes with its mask",
        width=right + len(above) * CELL,
        height=_TOP + len(above) * ROW,
        body=_nodes(above, depth, request, set(path))
        + "".join(label(words, _TOP + i * ROW + ROW // 2 + 4, name) for i, name in enumerate(names) if name)
        + _mask(rows, right, request)
        + group(numbers, font_size=9, text_anchor="middle"),
        text=_ascii(above, depth, names, rows, set(path)),
        title=title,
    )


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """A node and all above it, root last.

    >>> ancestors([-1, 0, 0, 1], 3)
    [3, 1, 0]
    """
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def _nodes(parents: list[int], depth: list[int], request: str | int, path: set[int]) -> str:
    """A circle a node, and a curve from each parent: curves stay between two columns, so they meet no circle."""
    r, numbers = _RADIUS, ""
    edges, circles = ["", ""], ["", ""]  # plain and bold
    centres = [(r + d * STEP, _TOP + node * ROW + ROW // 2) for node, d in enumerate(depth)]
    for node, parent in enumerate(parents):
        x, y = centres[node]
        if parent >= 0:
            px, py = centres[parent]
            middle = (px + x) // 2
            edges[{node, parent} <= path] += f"M{px + r} {py}C{middle} {py} {middle} {y} {x - r} {y}"
        circles[node in path] += f"M{x - r} {y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0-{2 * r} 0"
        numbers += label(x, y + 3, f"d{node}")
    ring = f'{tint(request)} stroke="{colour(request)}"'
    return (
        f'<path d="{edges[0]}" fill="none" stroke="currentColor" stroke-opacity=".6"/>'
        + (f'<path d="{edges[1]}" fill="none" stroke="{colour(request)}" stroke-width="3"/>' if edges[1] else "")
        + f'<path d="{circles[0]}" {ring}/>'
        + (f'<path d="{circles[1]}" {ring} stroke-width="3"/>' if path else "")
        + group(numbers, font_size=9, text_anchor="middle")
    )


def _mask(rows: list[str], x: int, request: str | int) -> str:
    """The mask rows, each level with its node."""
    body = ""
    for i, row in enumerate(rows):
        y = _TOP + i * ROW + (ROW - CELL) // 2 + 1
        body += fill([row], ".", x, y, CELL, PALE)
        body += fill([row], "#", x, y, CELL, f'stroke="{colour(request)}"')
    return body


def _ascii(parents: list[int], depth: list[int], names: list[str], rows: list[str], path: set[int]) -> str:
    """A node is indented by its depth; it names its parent where that is not the last node one level up."""
    heads = []
    for node, parent in enumerate(parents):
        branch = "  " * (depth[node] - 1) + "+-" if depth[node] else ""
        above = [n for n in range(node) if depth[n] == depth[node] - 1]
        heads.append(f"{branch}{names[node]}" + (f" d{parent}" if above and above[-1] != parent else ""))
    numbers = [f"d{i}{'*' if i in path else ''}" for i in range(len(parents))]
    side, number = max(map(len, heads), default=0), max(map(len, numbers), default=0)
    return "\n".join(
        f"{node.ljust(number)}  {head.ljust(side)}  {' '.join(row)}"
        for node, head, row in zip(numbers, heads, rows, strict=True)
    )
