"""The emulated kernels of Intel GPUs, for reports about them."""

from tests.xpu.conftest import install, provider

__all__ = ["install", "provider"]
