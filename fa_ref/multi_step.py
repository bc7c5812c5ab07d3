"""FlashAttentionMultiStepBackend: a backend for every step of a draft, planned together."""

from __future__ import annotations

from fa_ref.api.multi_step import MultiStepBackend
from fa_ref.backend import FlashAttentionBackend
from fa_ref.planning import plan_steps


class FlashAttentionMultiStepBackend(MultiStepBackend):
    """One FlashAttentionBackend a draft step, planned together by this package's plan_steps."""

    _backend = FlashAttentionBackend
    _plan_steps = staticmethod(plan_steps)


__all__ = ["FlashAttentionMultiStepBackend"]
