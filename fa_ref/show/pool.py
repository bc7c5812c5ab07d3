"""The pool as a strip: a cell a slot, in pages, coloured by the request that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_ref.api import BadBatch
from fa_ref.show.cells import boxes
from fa_ref.show.picture import Picture, group, label, text_width
from fa_ref.show.requests import colour, ints, slot_rows, tint

SIZE = 20  # pixels of a cell
_CELLS = 24  # cells in a line of the strip, at most
_LINE = SIZE + 26  # pixels of a line: slot numbers, cells, page number

Owners = dict[int, tuple[str, int]]


def pool_strip(
    requests: Any,
    page_size: int | None = None,
    slots: int | None = None,
    names: Sequence[str] | None = None,
    *,
    new: Any = None,
    title: str = "",
) -> Picture:
    """Who owns each slot; the number in a cell is the logical position kept there.

    requests: for each request the slots of its positions, as rows or as {name: slots}; or a Case, which knows
    its page size too. slots: how many to draw, the padding page included (default: up to the last page used).
    A slot in the rows of several requests is striped, "AB0".
    new: slots written by this step (default, with a Case: out_cache_loc), underlined, `*` in the ASCII twin.

    >>> pool_strip({"A": [8, 9, 10, 11, 4], "B": [12]}, page_size=4, new=[4, 12])
    page 0           page 1           page 2           page 3
    ///|///|///|///  A4*| . | . | .   A0 |A1 |A2 |A3   B0*| . | . | .
    """
    rows = slot_rows(requests, names)
    if hasattr(requests, "batch"):
        page_size = page_size or requests.config.page_size
        new = requests.batch.out_cache_loc if new is None else new
    if page_size is None:
        raise BadBatch("page_size is missing; pass the tokens a page holds, or a Case")
    owner = _owners(rows)
    written = set() if new is None else set(ints(new))
    last = max([page_size - 1, *owner, *written])
    pages = -(-(last + 1 if slots is None else slots) // page_size)
    if last >= pages * page_size:
        raise BadBatch(f"slot {last} is used, only {slots} slots are drawn; raise slots")
    per_line = max(_CELLS // page_size, 1)
    legend, width = _legend(rows, bool(written))
    below = -(-pages // per_line) * _LINE
    body = _svg(rows, owner, written, pages, page_size, per_line)
    return Picture(
        alt=f"pool of {pages} pages of {page_size} slots; page 0 is the padding page",
        width=max(_x(min(pages, per_line), page_size), width),
        height=below + 16,
        body=body + group(legend, font_size=10, transform=f"translate(0 {below})"),
        text=_ascii(owner, written, pages, page_size, per_line),
        title=title,
    )


def _owners(rows: dict[str, list[int]]) -> Owners:
    """slot -> (request, logical position). A slot that A and B share has "AB", and the position of the first."""
    owner: Owners = {}
    for name, slots in rows.items():
        for position, slot in enumerate(slots):
            before, first = owner.get(slot, ("", position))
            owner[slot] = (before if before.endswith(name) else before + name, first)
    return owner


def _x(page: int, page_size: int) -> int:
    """Left edge of a page."""
    return page * (page_size * SIZE + 8)


def _corner(slot: int, page_size: int, per_line: int) -> tuple[int, int]:
    line, page = divmod(slot // page_size, per_line)
    return _x(page, page_size) + slot % page_size * SIZE, line * _LINE + 11


def _svg(
    rows: dict[str, list[int]],
    owner: Owners,
    written: set[int],
    pages: int,
    page_size: int,
    per_line: int,
) -> str:
    def corners(slots: Any) -> list[tuple[int, int]]:
        return [_corner(slot, page_size, per_line) for slot in slots]

    free = [s for s in range(page_size, pages * page_size) if s not in owner]
    padding = corners(range(page_size))
    body = boxes(corners(free), SIZE, SIZE, 'fill-opacity=".05"')
    for name, slots in rows.items():
        body += boxes(corners(s for s in slots if owner[s][0] == name), SIZE, SIZE, tint(name))
    body += _shared(rows, owner, page_size, per_line)
    hatch = "".join(f"M{x} {y + 10}l10-10M{x} {y + 20}l20-20M{x + 10} {y + 20}l10-10" for x, y in padding)
    body += f'<path d="{hatch}" stroke="currentColor" stroke-opacity=".45"/>'
    body += boxes(
        corners(range(pages * page_size)), SIZE, SIZE, 'fill="none" stroke="currentColor" stroke-opacity=".3"'
    )
    first = corners(range(0, pages * page_size, page_size))
    frame = 'fill="none" stroke="currentColor" stroke-width="1.5"'
    body += boxes(first, SIZE * page_size, SIZE, frame)
    body += boxes([(x + 3, y + SIZE - 4) for x, y in corners(sorted(written))], SIZE - 6, 2, "")
    numbers = "".join(
        label(x + SIZE // 2, y + 14, str(owner[s][1]))
        for s, (x, y) in zip(sorted(owner), corners(sorted(owner)), strict=True)
    )
    word = "page " if page_size > 1 else ""  # of one slot: page and slot have the same number
    names = "".join(
        label(x + SIZE * page_size // 2, y + SIZE + 11, f"{word}{page}") for page, (x, y) in enumerate(first)
    )
    slot_numbers = "".join(label(x, y - 3, str(page * page_size)) for page, (x, y) in enumerate(first))
    body += group(numbers + group(names, font_size=9), text_anchor="middle") + group(slot_numbers, font_size=8)
    return body


def _shared(rows: dict[str, list[int]], owner: Owners, page_size: int, per_line: int) -> str:
    """Slots of several requests: a stripe each."""
    body = ""
    for slot in owner:
        names = [name for name, slots in rows.items() if slot in slots]
        x, y = _corner(slot, page_size, per_line)
        stripe = SIZE / len(names)
        if len(names) > 1:
            body += "".join(boxes([(x, y + i * stripe)], SIZE, stripe, tint(n)) for i, n in enumerate(names))
    return body


def _legend(rows: dict[str, list[int]], written: bool) -> tuple[str, int]:
    """A swatch a request, with its count of tokens; and the width of it all."""
    x, body = 0, ""
    for name, slots in rows.items():
        entry = f"{name}: {len(slots)} token" + ("s" if len(slots) != 1 else "")
        body += f'<path d="M{x} 2h10v10h-10z" fill="{colour(name)}"/>' + label(x + 14, 11, entry)
        x += 14 + text_width(entry, 10) + 12
    for entry in ["/ padding", *(["_ new"] if written else [])]:
        body += label(x, 11, entry)
        x += text_width(entry, 10) + 12
    return body, x


def _ascii(owner: Owners, written: set[int], pages: int, page_size: int, per_line: int) -> str:
    cell = max((len(f"{name}{position}") + 1 for name, position in owner.values()), default=3)
    width = (cell + 1) * page_size - 1
    blocks = []
    for start in range(0, pages, per_line):
        line = range(start, min(start + per_line, pages))
        heads = [f"page {page}".ljust(width) for page in line]
        strips = []
        for page in line:
            cells = [_cell(s, owner, written, page_size, cell) for s in range(page * page_size, (page + 1) * page_size)]
            strips.append("|".join(cells))
        blocks.append("  ".join(heads).rstrip() + "\n" + "  ".join(strips).rstrip())
    return "\n".join(blocks)


def _cell(slot: int, owner: Owners, written: set[int], page_size: int, width: int) -> str:
    star = "*" if slot in written else ""
    if slot in owner:
        name, position = owner[slot]
        return f"{name}{position}{star}".ljust(width)
    return "/" * width if slot < page_size else f".{star}".center(width)
