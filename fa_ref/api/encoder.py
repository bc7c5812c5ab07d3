"""Encoder-decoder batches: a request's row holds its encoder tokens first, and the text right after them.

CROSS layers read the first encoder_lens[r] columns of row r. Every other layer reads the text, which is an ordinary
batch over rows that start encoder_lens[r] columns later: `after_encoder` makes it, and nothing else needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int32
from torch import Tensor

from fa_ref.api.batch import ForwardBatch
from fa_ref.api.checks import (
    check_batch,
    check_rows,
    check_shapes,
    columns_of_drafts,
    device_checks_enabled,
    kv_slots,
    reads_values,
    req_to_token,
)
from fa_ref.api.config import BackendConfig
from fa_ref.api.errors import BadBatch, BadPageTable
from fa_ref.api.slots import check_pages, check_slots

FIELDS = ("encoder_lens", "encoder_lens_cpu", "encoder_out_cache_loc")


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Rows of a batch as a pool of rows, each from the first token of its text on."""

    req_to_token: Int32[Tensor, "requests positions"]  # slots; past the end of a row its last slot repeats, unread


def after_encoder(batch: ForwardBatch, config: BackendConfig) -> tuple[ForwardBatch, BackendConfig]:
    """The text of an encoder-decoder batch as a batch of its own, and the config to plan it with.

    Its rows are req_to_token's, in request order, shifted by encoder_lens. The text starts wherever the encoder ends,
    in the middle of a page as a rule, so pages of the text are single slots. Nothing waits for the device.
    """
    assert batch.encoder_lens is not None
    table, device = req_to_token(batch, config), batch.encoder_lens.device
    columns = batch.encoder_lens.long()[:, None] + torch.arange(table.shape[1], device=device)
    rows = table[batch.req_pool_indices.long()[:, None], columns.clamp(max=table.shape[1] - 1)]
    text = replace(
        batch,
        req_pool_indices=torch.arange(batch.batch_size, device=device),
        req_to_token_pool=TextRows(req_to_token=rows),
        **dict.fromkeys(FIELDS),
    )
    return text, replace(config, page_size=1, is_encoder_decoder=False)


def checked_text(batch: ForwardBatch, config: BackendConfig) -> tuple[ForwardBatch, BackendConfig]:
    """What layers of the text are planned from, once all is checked; of a decoder-only model, the batch as it is.

    Raises BadBatch or BadPageTable for a batch that contradicts itself, its pools or the config.
    """
    given = [name for name in FIELDS if getattr(batch, name) is not None]
    if given and not config.is_encoder_decoder:
        raise BadBatch(
            f"{', '.join(given)} in a batch of a decoder-only config; leave it None, or set is_encoder_decoder=True"
        )
    if not config.is_encoder_decoder or batch.forward_mode.is_idle():
        check_batch(batch, config)
        return batch, config
    check_shapes(batch, config)
    _check_host_lengths(batch, config)
    if reads_values(config):
        _check_values(batch, config)
    text = after_encoder(batch, config)
    check_batch(*text)
    return text


def _check_host_lengths(batch: ForwardBatch, config: BackendConfig) -> None:
    if batch.encoder_lens_cpu is None:
        return
    encoder = [int(n) for n in batch.encoder_lens_cpu]
    text = [0] * len(encoder) if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    _check_row_widths(batch, config, encoder, text)


def _check_row_widths(batch: ForwardBatch, config: BackendConfig, encoder: list[int], text: list[int]) -> None:
    width, drafts = req_to_token(batch, config).shape[1], columns_of_drafts(batch)
    for request, (keys, tokens) in enumerate(zip(encoder, text, strict=False)):  # check_batch counts the text's
        if keys < 0:
            raise BadBatch(f"request {request} has encoder_lens {keys}; 0 is a request without an encoder")
        if keys + tokens + drafts > width:
            raise BadPageTable(
                f"request {request} has {keys} encoder keys and {tokens + drafts} of text, its row of req_to_token "
                f"holds {width}; make the rows wide enough for both, or cut the request"
            )


def _check_values(batch: ForwardBatch, config: BackendConfig) -> None:
    assert batch.encoder_lens is not None
    encoder, host = batch.encoder_lens.tolist(), batch.encoder_lens_cpu
    _check_row_widths(batch, config, encoder, batch.seq_lens.tolist())
    check_rows(batch, config)
    available = kv_slots(batch.token_to_kv_pool or config.token_to_kv_pool)
    if batch.encoder_out_cache_loc is not None:
        check_slots("encoder_out_cache_loc", batch.encoder_out_cache_loc, available)
    columns = _encoder_columns(batch, config)
    for request, slots in enumerate(columns):
        check_slots(f"the encoder of request {request}", slots, available)
    if not device_checks_enabled():
        return
    if host is not None and encoder != [int(n) for n in host]:
        raise BadBatch(f"encoder_lens {encoder} and encoder_lens_cpu {[int(n) for n in host]} differ")
    for request, slots in enumerate(columns):
        check_pages(f"the encoder of request {request}", slots, config.page_size)


def check_encoder_writes(batch: ForwardBatch, config: BackendConfig) -> None:
    """With FA_CHECK=1, raise BadPageTable unless new encoder keys go to encoder columns of the batch, each once."""
    if not device_checks_enabled():
        return
    loc, columns = batch.encoder_out_cache_loc, [s for slots in _encoder_columns(batch, config) for s in slots.tolist()]
    written = [] if loc is None else [slot for slot in loc.tolist() if slot > 0]  # slot 0 is padding
    strangers = sorted(set(written) - set(columns))
    if strangers:
        raise BadPageTable(
            f"encoder_out_cache_loc has slots {strangers}, which are in no encoder column of the batch's rows; the "
            "encoder's slots are the first encoder_lens columns of a row"
        )
    if len(set(written)) < len(written):
        raise BadPageTable(f"encoder_out_cache_loc {loc.tolist()} names a slot twice; a slot holds one token")  # type: ignore[union-attr]


def _encoder_columns(batch: ForwardBatch, config: BackendConfig) -> list[Tensor]:
    """The slots of each request's encoder tokens. Reads lengths on the device."""
    assert batch.encoder_lens is not None
    table = req_to_token(batch, config)
    lens = zip(batch.req_pool_indices.tolist(), batch.encoder_lens.tolist(), strict=True)
    return [table[row, :length] for row, length in lens]
