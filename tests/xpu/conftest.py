"""The emulated Intel builds, where `import sgl_kernel` finds them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, ModuleType]], ModuleType]:
    """Put modules where imports find them, for one test; returns the package."""

    def put(modules: dict[str, ModuleType]) -> ModuleType:
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return next(iter(modules.values()))

    return put
