"""Reports about encoder-decoder models."""

from __future__ import annotations

import pytest

from fa_ref import ForwardMode, LayerKind
from fa_ref.cases import encoder_slots, visible_slots
from tests.support import agrees, case_on, planned_routes, plans, run

FULL, CROSS = LayerKind.FULL, LayerKind.CROSS
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
MODES = pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=["extend", "decode"])


@MODES
@pytest.mark.parametrize("kind", [FULL, CROSS], ids=["full", "cross"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_every_request_has_an_encoder_length_of_its_own(page_size, kind, mode, device):
    """sglang PR #25045: one encoder length for the whole batch. encoder_lens [3, 0, 7]."""
    case = case_on(device, mode, encoder_lens=[3, 0, 7], kind=kind, page_size=page_size)
    for planned in plans(case).values():
        assert [step["cache_seqlens"] for step in planned[CROSS]] == [[3, 0, 7]]
        assert [pages[0] for pages in planned[FULL][0]["pages"]] == [int(visible_slots(case, r)[0]) for r in range(3)]
    assert agrees(case)


@MODES
@pytest.mark.parametrize("kind", [FULL, CROSS], ids=["full", "cross"])
@pytest.mark.parametrize("host", [True, False], ids=["host-lengths", "device-lengths"])
def test_text_starts_right_after_an_encoder_that_ends_in_the_middle_of_a_page(host, kind, mode, device):
    """sglang PR #36298: encoder of 1500 tokens, page 64: the text starts at the 29th slot of the last page."""
    case = case_on(
        device, mode, encoder_lens=[1500, 64, 0], kind=kind, page_size=64, head_dim=8, heads=1, host_lengths=host
    )
    encoder, text = encoder_slots(case, 0), visible_slots(case, 0)
    assert 1500 % 64 == 28
    assert int(text[0]) == int(encoder[-1]) + 1
    assert int(text[0]) // 64 == int(encoder[-1]) // 64
    for planned in plans(case).values():
        (cross,), (full,) = planned[CROSS], planned[FULL]
        assert (len(cross["pages"][0]), cross["page_size"]) == (24, 64)
        assert (full["pages"][0], full["page_size"]) == (text.tolist(), 1)
    assert agrees(case)


@planned_routes
def test_an_encoder_of_a_whole_number_of_pages_is_no_special_case(route, device):
    """sglang PR #36298: 128 tokens in pages of 64, where a padded and an unpadded text start in the same slot."""
    for kind in (FULL, CROSS):
        case = case_on(device, EXTEND, encoder_lens=[128, 64, 1500], kind=kind, page_size=64, head_dim=8, heads=1)
        assert int(visible_slots(case, 0)[0]) % 64 == 0
        assert case.judge(run(case, route)).ok
