"""A picture: an SVG for people and its ASCII twin for comparing, both plain strings that never vary."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

Pixels = int | float
FONT = 11  # pixels; a monospace character is at most 0.62 of it wide
_HEADING = 20  # pixels that a title takes

# Text is currentColor and the background transparent, so a picture inside a page follows the page's theme. Shown
# as an image file it has no page to inherit from: the rule matches only then, and brings its own paper and ink.
_ALONE = "<style>svg:root{color:#222;background:#fff}</style>"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing of fixed size. Notebooks show the SVG; repr, and so every text comparison, is the ASCII twin.

    >>> Picture(alt="nothing", width=10, height=10, body="", text="(nothing)")
    (nothing)
    """

    alt: str  # what is drawn, for the <title> of the SVG
    width: int  # pixels, without the heading
    height: int
    body: str  # SVG elements
    text: str  # the ASCII twin, without the heading
    title: str = ""  # the heading, if any

    @property
    def size(self) -> tuple[int, int]:
        """Width and height with the heading."""
        return max(self.width, text_width(self.title)), self.height + (_HEADING if self.title else 0)

    def elements(self) -> str:
        """The body under its heading, to be placed in this picture's or another's SVG."""
        if not self.title:
            return self.body
        heading = f'<text y="12" font-weight="bold">{escape(self.title)}</text>'
        return f'{heading}<g transform="translate(0 {_HEADING})">{self.body}</g>'

    def _repr_svg_(self) -> str:
        width, height = self.size
        named = escape(f"{self.title}: {self.alt}" if self.title else self.alt)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 8}" height="{height + 8}" '
            f'viewBox="-4 -4 {width + 8} {height + 8}" role="img" fill="currentColor" '
            f'font-family="ui-monospace,Menlo,DejaVu Sans Mono,monospace" font-size="{FONT}" '
            f'style="max-width:100%;height:auto"><title>{named}</title>{_ALONE}{self.elements()}</svg>'
        )

    def __repr__(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


def side_by_side(*pictures: Picture, gap: int = 28, title: str = "") -> Picture:
    """Several pictures in a row, top edges aligned."""
    x, parts = 0, []
    for picture in pictures:
        parts.append(f'<g transform="translate({x} 0)">{picture.elements()}</g>')
        x += picture.size[0] + gap
    return Picture(
        alt="; ".join(p.title or p.alt for p in pictures),
        width=max(x - gap, 0),
        height=max((p.size[1] for p in pictures), default=0),
        body="".join(parts),
        text=_beside([repr(p) for p in pictures]),
        title=title,
    )


def stacked(*pictures: Picture, gap: int = 14, title: str = "") -> Picture:
    """Several pictures, one below the other."""
    y, parts = 0, []
    for picture in pictures:
        parts.append(f'<g transform="translate(0 {y})">{picture.elements()}</g>')
        y += picture.size[1] + gap
    return Picture(
        alt="; ".join(p.title or p.alt for p in pictures),
        width=max((p.size[0] for p in pictures), default=0),
        height=max(y - gap, 0),
        body="".join(parts),
        text="\n\n".join(repr(p) for p in pictures),
        title=title,
    )


def text_width(content: str, font: int = FONT) -> int:
    """Pixels that a line of text takes at most."""
    return -(-len(content) * font * 62 // 100)


def label(x: Pixels, y: Pixels, content: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(content)}</text>'


def group(content: str, **attributes: object) -> str:
    """Elements with attributes in common: group(body, text_anchor="end"). Empty content gives nothing."""
    if not content:
        return ""
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f"<g{given}>{content}</g>"


def _beside(blocks: list[str]) -> str:
    lines = [block.split("\n") for block in blocks]
    height = max((len(block) for block in lines), default=0)
    padded = [[line.ljust(max(map(len, block))) for line in block + [""] * (height - len(block))] for block in lines]
    return "\n".join("    ".join(row).rstrip() for row in zip(*padded, strict=True))
