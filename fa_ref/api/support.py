"""Which forward modes and layer kinds have a plan, in both packages alike."""

from __future__ import annotations

from fa_ref.api.config import BackendConfig
from fa_ref.api.layer import window_left
from fa_ref.api.modes import LayerKind


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
    if config.is_encoder_decoder:
        planned.append(LayerKind.CROSS)
    else:
        refused[LayerKind.CROSS] = "config.is_encoder_decoder is not set"
    return tuple(planned), refused
