"""The check that the built site needs no network sees what a page loads, and only that."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "check_offline.py"
_spec = importlib.util.spec_from_file_location("check_offline", TOOL)
assert _spec is not None
assert _spec.loader is not None
check_offline = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_offline)

REMOTE = [
    '<script src="https://cdn.example.org/x.js"></script>',
    '<script async src="//cdn.example.org/x.js"></script>',
    '<link rel="stylesheet" href="https://example.org/x.css">',
    '<link rel="preconnect" href="https://fonts.example.org">',
    '<img src="https://example.org/x.png">',
    "<style>@import 'https://example.org/x.css';</style>",
    '<p style="background: url(https://example.org/x.png)">',
    '<script>import("https://example.org/x.mjs")</script>',
]
LOCAL = [
    '<a href="https://example.org">a link</a>',
    '<script src="_static/x.js?v=1"></script>',
    '<link rel="canonical" href="https://example.org/page">',
    '<svg xmlns="http://www.w3.org/2000/svg"><title>x</title></svg>',
    "<p>see https://example.org</p>",
]


@pytest.mark.parametrize("html", REMOTE)
def test_a_remote_resource_fails(html, tmp_path, capsys):
    (tmp_path / "index.html").write_text(html)
    assert check_offline.main([str(tmp_path)]) == 1
    assert "example.org" in capsys.readouterr().err


@pytest.mark.parametrize("html", LOCAL)
def test_a_link_or_a_local_resource_passes(html, tmp_path):
    (tmp_path / "index.html").write_text(html)
    assert check_offline.main([str(tmp_path)]) == 0


def test_a_style_sheet_is_read_too(tmp_path):
    (tmp_path / "index.html").write_text("<p>x</p>")
    (tmp_path / "x.css").write_text("@font-face { src: url(https://example.org/x.woff2) }")
    assert check_offline.main([str(tmp_path)]) == 1


def test_an_empty_folder_is_not_a_site(tmp_path):
    assert check_offline.main([str(tmp_path)]) == 2
