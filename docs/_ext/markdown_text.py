"""Markdown in small pieces, for the pages that are written from the code."""

from __future__ import annotations

import re
from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text with Markdown's own characters escaped, code spans kept."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<>\[\]$#|])", r"\\\1", p) for p in pieces)
