"""One thread, one device fixture, and the Hypothesis profiles of the whole suite."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("short", max_examples=30, deadline=None, derandomize=True, suppress_health_check=_HEALTH)
settings.register_profile("long", max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=_HEALTH)
settings.load_profile(os.environ.get("FA_FUZZ", "short"))


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for a `device` run on the CPU, and where there is a GPU also there, marked gpu."""
    if "device" in metafunc.fixturenames:
        devices: list[object] = ["cpu"]
        if torch.cuda.is_available():
            devices.append(pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("device", devices)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device the tests marked gpu are skipped, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
