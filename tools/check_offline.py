"""Fail when a built page needs the network: a script, style sheet, font, image or frame from another host.

    python tools/check_offline.py docs/_build/html

Plain links (<a href>) may lead anywhere.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADED = {"src", "srcset", "poster", "data"}
IN_STYLE = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")
IN_SCRIPT = re.compile(r"""(?:import\s*\(?|fetch\(|\.src\s*=)\s*['"`]((?:https?:)?//[^'"`]+)""")


class Page(HTMLParser):
    """Collects what one page loads from another host."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        values = {name: value or "" for name, value in attrs}
        loaded = [values[name] for name in LOADED & values.keys()]
        if tag == "link" and not {"canonical", "author", "license"} & set(values.get("rel", "").split()):
            loaded.append(values.get("href", ""))
        self.remote += [value for value in loaded if is_remote(value)]
        self.remote += IN_STYLE.findall(values.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.remote += IN_STYLE.findall(data)
        elif self._inside == "script":
            self.remote += IN_SCRIPT.findall(data)


def is_remote(address: str) -> bool:
    return address.strip().startswith(("http://", "https://", "//"))


def remote_addresses(path: Path) -> list[str]:
    """What a file of the site loads from another host."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".css":
        return IN_STYLE.findall(text)
    page = Page()
    page.feed(text)
    return page.remote


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: check_offline.py FOLDER_OF_A_BUILT_SITE", file=sys.stderr)
        return 2
    root = Path(argv[0])
    pages = sorted(root.rglob("*.html"))
    if not pages:
        print(f"{root} holds no page", file=sys.stderr)
        return 2
    bad = [(path, url) for path in [*pages, *root.rglob("*.css")] for url in remote_addresses(path)]
    for path, url in bad:
        print(f"{path}: loads {url}", file=sys.stderr)
    print(f"{len(pages)} pages, {len(bad)} remote resources")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
