"""A roofline: how fast a device may be for work of some intensity, and how fast pieces of work were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fa_ref.api import BadBatch
from fa_ref.show.picture import Picture, group, label, text_width
from fa_ref.show.requests import colour

WIDE, HIGH, SIDE = 440, 210, 34  # pixels: the plot, and the scale at its left
COLUMNS, LINES = 56, 15  # characters of the twin's plot
ROW = 15  # pixels of a line of the key


@dataclass(frozen=True)
class _Scale:
    """Powers of ten from low to high, laid out over `size` pixels or characters."""

    low: int
    high: int

    @classmethod
    def around(cls, values: list[float]) -> _Scale:
        low = math.floor(math.log10(min(values)))
        return cls(low, max(math.ceil(math.log10(max(values))), low + 1))

    def at(self, value: float, size: int) -> float:
        return (math.log10(value) - self.low) / (self.high - self.low) * size

    def value(self, place: float, size: int) -> float:
        return 10 ** (self.low + place / size * (self.high - self.low))

    def powers(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def roofline(
    points: Mapping[str, tuple[float, float]],
    *,
    tera_bytes: float,
    tera_flops: float,
    roofs: Mapping[str, float] | None = None,
    title: str = "",
) -> Picture:
    """Points under the roof min(intensity x tera_bytes, tera_flops), both axes logarithmic.

    points: name -> (flops per byte, measured TFLOP/s); each gets a letter. tera_bytes, tera_flops: ceilings in TB/s
    and TFLOP/s. The share behind a name is that of the roof above its point, or of the TFLOP/s that `roofs` has for
    it: where points were measured under ceilings of their own, and the line is the highest.

    >>> picture = roofline({"decode": (4, 16)}, tera_bytes=4.4, tera_flops=770)
    >>> print(picture.text.splitlines()[-1])
    a decode: 4 flops a byte, 16 TFLOP/s, 91 % of the roof
    """
    own = roofs or {}
    numbers = [tera_bytes, tera_flops, *own.values(), *(value for point in points.values() for value in point)]
    if not 0 < len(points) <= 26 or any(not 0 < value < math.inf for value in numbers):
        raise BadBatch(
            f"points {dict(points)} under {tera_bytes} TB/s, {tera_flops} TFLOP/s and roofs {dict(own)}; give 1 "
            "to 26 points, and finite numbers above 0"
        )
    if not own.keys() <= points.keys():
        raise BadBatch(f"roofs of {sorted(own.keys() - points.keys())}, which are no points; name points")
    x = _Scale.around([tera_flops / tera_bytes, *(intensity for intensity, _ in points.values())])
    y = _Scale.around([tera_flops, *(speed for _, speed in points.values())])

    def roof(intensity: float) -> float:
        return min(intensity * tera_bytes, tera_flops)

    keys = [
        f"{_letter(i)} {name}: {at:.4g} flops a byte, {speed:.3g} TFLOP/s, "
        f"{100 * speed / own.get(name, roof(at)):.0f} % of {'its' if name in own else 'the'} roof"
        for i, (name, (at, speed)) in enumerate(points.items())
    ]
    corners = [max(10.0**x.low, 10.0**y.low / tera_bytes), tera_flops / tera_bytes, 10.0**x.high]
    line = "L".join(f"{_right(x, at):g} {_down(y, roof(at)):g}" for at in corners)
    return Picture(
        alt=f"roofline of {tera_bytes:.3g} TB/s and {tera_flops:.3g} TFLOP/s with {len(points)} points",
        width=max(SIDE + WIDE + 10, *map(text_width, keys)),
        height=HIGH + 24 + ROW * len(keys),
        body=_grid(x, y)
        + f'<path d="M{line}" fill="none" stroke="currentColor" stroke-width="2"/>'
        + _dots(x, y, points)
        + "".join(label(0, HIGH + 35 + ROW * i, key) for i, key in enumerate(keys)),
        text="\n".join([*_twin(x, y, points, roof), *keys]),
        title=title,
    )


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def _right(x: _Scale, value: float) -> int:
    return SIDE + round(x.at(value, WIDE))


def _down(y: _Scale, value: float) -> int:
    return HIGH - round(y.at(value, HIGH))


def _grid(x: _Scale, y: _Scale) -> str:
    """A thin line and a number at every power of ten."""
    path = "".join(f"M{_right(x, at)} 0v{HIGH}" for at in x.powers())
    path += "".join(f"M{SIDE} {_down(y, at)}h{WIDE}" for at in y.powers())
    below = "".join(label(_right(x, at), HIGH + 13, f"{at:g}") for at in x.powers()[:-1])
    left = "".join(label(SIDE - 4, _down(y, at) + 4, f"{at:g}") for at in y.powers()[:-1])
    named = label(SIDE + WIDE, HIGH + 13, "flops a byte") + label(SIDE + 48, 14, "TFLOP/s")
    return f'<path d="{path}" stroke="currentColor" stroke-opacity=".2"/>' + group(
        group(below, text_anchor="middle") + group(left + named, text_anchor="end"), font_size=9
    )


def _dots(x: _Scale, y: _Scale, points: Mapping[str, tuple[float, float]]) -> str:
    """A dot for each point, its letter right below it, or at its left where another letter stands already."""
    places = [(_right(x, at), _down(y, speed)) for at, speed in points.values()]
    path = "".join(f"M{right - 4} {down}a4 4 0 1 0 8 0a4 4 0 1 0-8 0" for right, down in places)
    written: list[tuple[int, int]] = []
    for right, down in places:
        spots = [(right + 5, down + 11), (right - 11, down + 12), (right - 3, down + 18)]
        written.append(next((spot for spot in spots if not _taken(spot, written)), spots[0]))
    letters = "".join(label(*spot, _letter(i)) for i, spot in enumerate(written))
    return f'<path d="{path}" fill="{colour(0)}"/>' + letters


def _taken(spot: tuple[int, int], written: list[tuple[int, int]]) -> bool:
    return any(abs(spot[0] - right) < 9 and abs(spot[1] - down) < 10 for right, down in written)


def _twin(x: _Scale, y: _Scale, points: Mapping[str, tuple[float, float]], roof: Callable[[float], float]) -> list[str]:
    """The plot in characters: the roof as / and =, points as letters; of two in one place the later is seen."""
    cells = [[" "] * (COLUMNS + 1) for _ in range(LINES + 1)]
    for column in range(COLUMNS + 1):
        at = x.value(column, COLUMNS)
        height = round(y.at(roof(at), LINES))
        if height >= 0:
            cells[LINES - height][column] = "=" if roof(at) == roof(math.inf) else "/"
    for i, (at, speed) in enumerate(points.values()):
        cells[LINES - round(y.at(speed, LINES))][round(x.at(at, COLUMNS))] = _letter(i)
    axes = f"flops a byte, 1e{x.low} to 1e{x.high}; upwards TFLOP/s, 1e{y.low} to 1e{y.high}"
    return [f"| {''.join(row)}".rstrip() for row in cells] + ["+" + "-" * (COLUMNS + 2), axes]
