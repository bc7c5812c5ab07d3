"""Prints what the tests of this folder found as JSON, and writes it where FA_XPU_REPORT says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

REPORTS: list[dict[str, Any]] = []


@pytest.fixture
def reports() -> list[dict[str, Any]]:
    return REPORTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not REPORTS:
        return
    text = json.dumps(REPORTS, indent=1)
    terminalreporter.write_line(text)
    if path := os.environ.get("FA_XPU_REPORT"):
        Path(path).write_text(text + "\n")
