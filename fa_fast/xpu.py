"""The backend on Intel GPUs: FlashAttentionBackend as it is, under the name that servers look for.

What is different there is in the providers (kernels.sgl_xpu, kernels.vllm_xpu) and their capabilities. It was tested
against the kernels' contract and never run on the hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from fa_fast.backend import FlashAttentionBackend
from fa_ref.api import BackendConfig, BadConfig


class XPUAttentionBackend(FlashAttentionBackend):
    """FlashAttentionBackend that insists on an Intel GPU. provider: "sgl_xpu", the default, or "vllm_xpu".

    Raises BadConfig for any other device.
    """

    def __init__(
        self,
        runner: Any,
        skip_prefill: bool = False,
        speculative_step_id: int = 0,
        topk: int = 0,
        speculative_num_steps: int = 0,
        provider: str | None = None,
    ) -> None:
        config = BackendConfig.from_model_runner(runner)
        if torch.device(config.device).type != "xpu":
            raise BadConfig(
                f"XPUAttentionBackend on device {config.device}; it is for xpu devices. Use "
                "FlashAttentionBackend, which serves every device"
            )
        super().__init__(config, skip_prefill, speculative_step_id, topk, speculative_num_steps, provider)


__all__ = ["XPUAttentionBackend"]
