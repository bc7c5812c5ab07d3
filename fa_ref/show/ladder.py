"""A ladder of optimisations: how long one piece of work takes on each rung, and what the rung was worth."""

from __future__ import annotations

from collections.abc import Mapping

from fa_ref.api import BadBatch
from fa_ref.show.picture import Picture, group, label, text_width
from fa_ref.show.requests import WRONG, colour

_LONGEST = 240  # pixels of the longest time's bar
_CHARS = 30  # the same in characters
ROW = 22


def ladder(rungs: Mapping[str, float], floor: float, unit: str = "us", *, title: str = "") -> Picture:
    """The time on each rung as a bar, first rung on top, with how many times faster it is than the rung above.

    floor: what no rung can beat, a line through all bars, `|` in the twin.

    >>> ladder({"plain": 60, "paged": 20}, floor=10)
    plain  #####|######################## 60 us
    paged  #####|####                     20 us, 3.00x
    floor       |                         10 us
    """
    times = list(rungs.values())
    if not times or any(not 0 < time < float("inf") for time in [*times, floor]):
        raise BadBatch(f"rungs {dict(rungs)}, floor {floor}; give at least one rung, and finite times above 0")
    top = max(*times, floor)
    ratios = ["", *(f", {above / own:.2f}x" for above, own in zip(times, times[1:], strict=False))]
    notes = [f"{_short(time)} {unit}{ratio}" for time, ratio in zip(times, ratios, strict=True)]
    names = [*rungs, "floor"]
    notes.append(f"{_short(floor)} {unit}")
    side = max(map(text_width, names)) + 8
    line = side + round(floor / top * _LONGEST)
    ends = [side + round(time / top * _LONGEST) for time in times] + [line]
    bars = "".join(f"M{side} {i * ROW + 2}H{end}v15H{side}z" for i, end in enumerate(ends[:-1]))
    body = f'<path d="{bars}" fill="{colour(0)}" fill-opacity=".55"/>'
    body += f'<path d="M{line} 0v{len(names) * ROW}" stroke="{WRONG}" stroke-width="2"/>'
    body += group("".join(label(0, i * ROW + 14, name) for i, name in enumerate(names)))
    body += "".join(
        label(max(end, line) + 6, i * ROW + 14, note) for i, (end, note) in enumerate(zip(ends, notes, strict=True))
    )
    return Picture(
        alt=f"ladder of {len(times)} rungs over a floor",
        width=side + _LONGEST + 6 + max(map(text_width, notes)),
        height=len(names) * ROW,
        body=body,
        text=_twin(names, [*times, 0.0], notes, floor, top),
        title=title,
    )


def _twin(names: list[str], times: list[float], notes: list[str], floor: float, top: float) -> str:
    side, mark = max(map(len, names)), min(round(floor / top * _CHARS), _CHARS - 1)
    lines = []
    for name, time, note in zip(names, times, notes, strict=True):
        bar = ("#" * round(time / top * _CHARS)).ljust(_CHARS)
        lines.append(f"{name.ljust(side)}  {bar[:mark]}|{bar[mark + 1 :]} {note}")
    return "\n".join(lines)


def _short(time: float) -> str:
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"
