"""Finding sgl-kernel, or saying exactly how to install it."""

from __future__ import annotations

import functools
from importlib import import_module, metadata
from typing import Any

from fa_fast.kernels.distributions import NAMES
from fa_ref.api.errors import ProviderNotInstalled


@functools.cache
def fa3_functions() -> Any:
    """The module `sgl_kernel.flash_attn`.

    Raises ProviderNotInstalled if it is missing, cannot be loaded, or is installed by two distributions.
    """
    owners = installed_owners()
    if len(owners) > 1:
        raise ProviderNotInstalled(
            f"{' and '.join(owners)} both install the module sgl_kernel and overwrite each other; keep one: "
            f"pip uninstall {' '.join(owners)}, then install the extra for this machine (python -m fa_fast.doctor)"
        )
    try:
        return import_module("sgl_kernel.flash_attn")
    except (ImportError, OSError, RuntimeError) as error:  # missing, unloadable, or for another torch
        raise ProviderNotInstalled(
            f"a CUDA device needs sgl-kernel's FlashAttention-3, and importing it failed: {error}. Run "
            "`python -m fa_fast.doctor` for the install line of this machine, or use a CPU device"
        ) from error


def installed_owners() -> list[str]:
    """Which of the distributions that own `sgl_kernel` are installed."""
    return [name for name in NAMES if _installed(name)]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
