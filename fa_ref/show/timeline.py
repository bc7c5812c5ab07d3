"""Who is busy when: a lane for each worker, a column for each unit of time."""

from __future__ import annotations

from collections.abc import Mapping

from fa_ref.api import BadBatch
from fa_ref.show.cells import boxes, runs
from fa_ref.show.picture import Picture, group, label, text_width
from fa_ref.show.requests import tint

UNIT, LANE, BLOCK = 9, 22, 16  # pixels of a unit of time, between lanes, and of a block's height
IDLE = "."


def timeline(lanes: Mapping[str, str], names: Mapping[str, str], *, title: str = "") -> Picture:
    """Lanes of letters, one a unit of time; a run of a letter is a block, a dot is idle. names: what letters mean.

    >>> timeline({"host": "ppa", "device": "..p.a"}, {"p": "plan", "a": "attend"})
    host    ppa..
    device  ..p.a
    p plan  a attend
    """
    length = max(map(len, lanes.values()), default=0)
    rows = {name: lane.ljust(length, IDLE) for name, lane in lanes.items()}
    unknown = {letter for lane in rows.values() for letter in lane} - {IDLE, *names}
    if unknown or IDLE in names or any(len(letter) != 1 for letter in names):
        raise BadBatch(f"letters {sorted(unknown)} without a name in {dict(names)}; name every letter but {IDLE!r}")
    side = max(map(text_width, rows), default=0) + 10
    body = "".join(label(0, number * LANE + 12, name) for number, name in enumerate(rows))
    foot, x, keys = len(rows) * LANE, 0, ""
    for number, (letter, name) in enumerate(names.items()):
        found = list(runs(list(rows.values()), letter))
        for long in sorted({long for _, _, long in found}):
            corners = [(side + start * UNIT, row * LANE) for row, start, size in found if size == long]
            body += boxes(corners, long * UNIT - 1, BLOCK, tint(number))
        keys += boxes([(x, foot + 2)], 10, 10, tint(number)) + group(label(x + 14, foot + 11, name), font_size=10)
        x += 14 + text_width(name, 10) + 14
    return Picture(
        alt=f"timeline of {', '.join(rows)} over {length} units of time",
        width=max(side + length * UNIT, x),
        height=foot + 16,
        body=body + keys,
        text="\n".join([*_lines(rows), "  ".join(f"{letter} {name}" for letter, name in names.items())]),
        title=title,
    )


def _lines(rows: Mapping[str, str]) -> list[str]:
    side = max(map(len, rows), default=0)
    return [f"{name.ljust(side)}  {lane}" for name, lane in rows.items()]
