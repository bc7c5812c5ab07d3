"""What the support table says of Intel GPUs, cell by cell, is what the emulated kernels compute."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fa_ref import ForwardMode, LayerKind
from tests.test_support_table import support_table
from tests.xpu.test_numerics import outcome

KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.LOCAL, LayerKind.CROSS)


every_provider = pytest.mark.parametrize("column,build", [("xpu", "2026-10"), ("vllm_xpu", "vllm")])


@every_provider
@pytest.mark.parametrize("feature", support_table._features(), ids=lambda feature: feature.name)
def test_a_feature_is_computed_or_refused(feature, column, build, provider):
    said, name = support_table.feature_cell(feature, column), provider(build)
    defaults = dict(dtype=torch.bfloat16, head_dim=64)
    for arguments, mode, kind in product(feature.cases, (ForwardMode.EXTEND, ForwardMode.DECODE), feature.kinds):
        case = support_table.make_case(mode, kind=kind, **(defaults | arguments))
        assert outcome(case, name) == ("right" if said == "emulated" else said), (mode, kind)


@pytest.mark.parametrize("build", ["2026-10", "vllm"])
@pytest.mark.parametrize("row", support_table.MODES, ids=lambda row: row[0])
def test_a_mode_is_computed(row, build, provider):
    _, mode, arguments = row
    name = provider(build)
    for kind in KINDS:
        assert support_table.mode_cell(mode, arguments, kind).endswith(" + emulated")
        encoder = dict(encoder_lens=(3, 0, 7)) if kind is LayerKind.CROSS else {}
        tokens = dict(prefix_lens=(), new_lens=(), encoder_lens=()) if mode.is_idle() else {}
        given = arguments | encoder | (tokens if encoder else {n: tokens[n] for n in tokens if n != "encoder_lens"})
        case = support_table.make_case(mode, kind=kind, head_dim=64, dtype=torch.bfloat16, **given)
        assert outcome(case, name) == "right", kind
