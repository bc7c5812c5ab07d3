"""The report of this folder's tests: FA_XPU_REPORT names its file, which is written from the first case on.

Where a report is asked for, a machine that cannot give one fails; without it the tests are skipped there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hardware.report import Report

PATH = os.environ.get("FA_XPU_REPORT")
REPORT = Report(Path(PATH).absolute() if PATH else None)


@pytest.fixture
def reports() -> Report:
    return REPORT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not REPORT.entries:
        return
    if REPORT.path is None:
        terminalreporter.write_line(REPORT.text())
        return
    for entry in REPORT.entries:
        said = entry.get("summary") or entry.get("error") or entry.get("missing") or "nothing ran"
        terminalreporter.write_line(f"{entry.get('provider', 'no provider')}: {said}")
    terminalreporter.write_line(f"the report is {REPORT.path}")
