"""Which kernels answer for a device. Chosen by device, never by failure."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from fa_fast.kernels.capability import Capability
from fa_ref.api.errors import BadConfig, UnsupportedByProvider

# Provider module -> the device type it runs on. The first of a device type is its default.
PROVIDERS = {"torch_cpu": "cpu", "sgl_cuda": "cuda", "sgl_xpu": "xpu", "vllm_xpu": "xpu"}


class Provider(Protocol):
    """A module of kernels; every function takes FlashAttention's arguments, by keyword."""

    CAPABILITY: Capability
    load: Callable[[torch.device], None]  # raises ProviderNotInstalled unless the kernels are there
    flash_attn_with_kvcache: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]
    prepared: Callable[..., Callable[..., Any]]  # (name of one of these two, **some arguments): called with the others
    merge_state: Callable[..., Any]
    short_key_attention: Callable[..., Any]
    prefers_short_keys: Callable[..., bool] | None  # whether it beats the two calls for a window of this shape
    get_scheduler_metadata: Callable[..., Any] | None


def provider_for(device: torch.device | str, name: str | None = None) -> Provider:
    """The provider of a device, or the named one if it runs there.

    Raises BadConfig for an unknown name or one for another device, UnsupportedByProvider for a device that no
    provider serves, ProviderNotInstalled (with the install line) if the kernels are missing.
    """
    kind = torch.device(device).type
    if name is None:
        served = [provider for provider, device_type in PROVIDERS.items() if device_type == kind]
        if not served:
            raise UnsupportedByProvider(
                f"no kernels for device {device}; supported: {', '.join(dict.fromkeys(PROVIDERS.values()))}. Move the "
                "pools and the batch to one of them"
            )
        name = served[0]
    if name not in PROVIDERS or PROVIDERS[name] != kind:
        known = ", ".join(f"{provider!r} on {device_type}" for provider, device_type in PROVIDERS.items())
        raise BadConfig(f"provider {name!r} on device {device}; fa_fast has {known}")
    module: Any = import_module(f"fa_fast.kernels.{name}")
    module.load(torch.device(device))
    return module
