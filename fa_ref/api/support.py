"""Which forward modes and layer kinds have a plan, in both packages alike."""

from __future__ import annotations

from typing import Any

from fa_ref.api.batch import ForwardBatch, VerifyInput
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, UnsupportedByProvider
from fa_ref.api.layer import window_left
from fa_ref.api.modes import ForwardMode, LayerKind

PLANNED_MODES = tuple(ForwardMode)


UNPLANNED_FIELDS = ("encoder_lens", "encoder_out_cache_loc")


def refuse_unplanned_fields(batch: Any) -> None:
    """Raise UnsupportedByProvider for a batch that sets a field whose meaning no planner covers yet."""
    for name in UNPLANNED_FIELDS:
        value = getattr(batch, name, None)
        if value is not None:
            raise UnsupportedByProvider(
                f"{name}={value!r} is not planned yet; supported: attention over a request's own cache, "
                f"which leaves {', '.join(UNPLANNED_FIELDS)} unset"
            )


def refuse_unplanned(batch: ForwardBatch) -> None:
    """Raise UnsupportedByProvider for fields without a meaning yet, BadBatch where spec_info does not fit the mode."""
    refuse_unplanned_fields(batch)
    mode, info = batch.forward_mode, batch.spec_info
    if mode.is_target_verify() and not isinstance(info, VerifyInput):
        raise BadBatch(f"TARGET_VERIFY needs spec_info=VerifyInput(...), got {info!r}")
    if mode.is_decode() and isinstance(info, VerifyInput):
        raise BadBatch(
            "DECODE with spec_info=VerifyInput(...); draft decoding takes DraftInput, verifying TARGET_VERIFY"
        )


def layer_kinds(config: BackendConfig) -> tuple[tuple[LayerKind, ...], dict[LayerKind, str]]:
    """The layer kinds a config's plans cover, and why each other kind is refused."""
    planned, refused = [LayerKind.FULL], {}
    if window_left(config) >= 0:
        planned.append(LayerKind.SLIDING)
    else:
        refused[LayerKind.SLIDING] = "config.sliding_window_size is not set"
    if config.attention_chunk_size is not None:
        planned.append(LayerKind.LOCAL)
    else:
        refused[LayerKind.LOCAL] = "config.attention_chunk_size is not set"
    refused[LayerKind.CROSS] = "cross attention is not planned yet"
    return tuple(planned), refused


def refuse_unplanned_config(config: BackendConfig) -> None:
    """Raise UnsupportedByProvider for a config whose every plan would be wrong or missing."""
    if config.is_encoder_decoder:
        raise UnsupportedByProvider("is_encoder_decoder=True is not planned yet; supported: decoder-only models")
