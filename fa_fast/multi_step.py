"""FlashAttentionMultiStepBackend: a backend for every step of a draft, planned together."""

from __future__ import annotations

from fa_fast.backend import FlashAttentionBackend
from fa_fast.planning import plan_steps
from fa_ref.api.multi_step import MultiStepBackend


class FlashAttentionMultiStepBackend(MultiStepBackend):
    """One FlashAttentionBackend a draft step, planned together by this package's plan_steps."""

    _backend = FlashAttentionBackend
    _plan_steps = staticmethod(plan_steps)


__all__ = ["FlashAttentionMultiStepBackend"]
