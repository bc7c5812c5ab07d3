"""Both forms of latent attention on the emulated builds: what each build can run is near the fp64 answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa_fast
from fa_ref import ForwardMode, MLAProjections, UnsupportedByProvider
from tests.support import ROUTES
from tests.test_mla import Model, mla_case
from tests.xpu.conftest import BUILDS

FORMS = ("absorbed", "one_shot", "chunked")
RAGGED: dict[str, Any] = dict(
    mode=ForwardMode.EXTEND, prefix_lens=(300, 0, 70), new_lens=(5, 1, 3), page_size=64, latent=512, rope=64,
)  # fmt: skip


def expected(build: str, form: str, nope: int) -> str:
    """The MHA form needs heads as wide for keys as for values; chunks are merged by an LSE that 2026-08 lacks."""
    if form == "absorbed":
        return "refused" if build == "vllm" else "right"
    return "refused" if nope != 64 or (form == "chunked" and build == "2026-08") else "right"


@pytest.mark.parametrize("nope", [64, 128], ids=["even-heads", "wider-keys"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("build", BUILDS)
def test_a_form_is_right_or_refused(build, form, nope, provider, monkeypatch):
    monkeypatch.setitem(ROUTES, "emulated", (fa_fast, provider(build)))
    model = Model(mla_case(dtype=torch.bfloat16, **RAGGED), nope=nope, v_dim=128)
    if expected(build, form, nope) == "refused":
        with pytest.raises(UnsupportedByProvider, match="provider torch_cpu"):
            model.run("emulated", form, 64)
        return
    found = model.run("emulated", form, 64)
    exact = Model(mla_case(dtype=torch.float64, **RAGGED), nope=nope, v_dim=128)
    for name in ("q_nope", "q_rope", "latent", "k_rope"):
        setattr(exact, name, getattr(model, name).double())
    weights = model.projections
    exact.projections = MLAProjections(w_uk=weights.w_uk.double(), w_uv=weights.w_uv.double())
    exact.case.config.token_to_kv_pool.kv_buffer[0].copy_(model.case.config.token_to_kv_pool.kv_buffer[0])
    right = exact.run("masks", "absorbed")
    # three products in a row, each rounded in the model's dtype
    assert (found.double() - right).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * right.abs().max()


# What "auto" runs where the MHA form is the cheaper one; a workspace of 64 cuts chunks, one of 10 000 none.
AUTO: dict[tuple[str, int, int], str] = {
    ("2026-10", 64, 64): "chunked",
    ("2026-10", 64, 10_000): "one_shot",
    ("2026-08", 64, 64): "absorbed",  # chunks are merged by an LSE
    ("2026-08", 64, 10_000): "one_shot",
    ("vllm", 64, 64): "chunked",
    ("vllm", 64, 10_000): "one_shot",
    ("2026-10", 128, 64): "absorbed",  # DeepSeek's widths: keys of 192, values of 128
    ("2026-10", 128, 10_000): "absorbed",
    ("2026-08", 128, 64): "absorbed",
    ("2026-08", 128, 10_000): "absorbed",
    ("vllm", 128, 64): "refused",  # it has neither form
    ("vllm", 128, 10_000): "refused",
}


@pytest.mark.parametrize("build,nope,workspace", AUTO)
def test_auto_is_a_form_that_the_build_runs(build, nope, workspace, provider, monkeypatch):
    monkeypatch.setitem(ROUTES, "emulated", (fa_fast, provider(build)))
    monkeypatch.setattr("fa_ref.api.mla_form.cheaper_form", lambda costs: "mha")
    model = Model(mla_case(dtype=torch.bfloat16, **RAGGED), nope=nope, v_dim=128)
    runs = AUTO[build, nope, workspace]
    if runs == "refused":
        with pytest.raises(UnsupportedByProvider, match=r"qv \(absorbed MLA\).*provider='sgl_xpu'"):
            model.run("emulated", "auto", workspace)
        return
    assert torch.equal(model.run("emulated", "auto", workspace), model.run("emulated", runs, workspace))


@pytest.mark.parametrize("build", BUILDS)
def test_a_form_that_is_asked_for_and_not_there_writes_nothing_and_names_another(build, provider, monkeypatch):
    monkeypatch.setitem(ROUTES, "emulated", (fa_fast, provider(build)))
    model = Model(mla_case(dtype=torch.bfloat16, **RAGGED), nope=128, v_dim=128)
    cache = model.case.config.token_to_kv_pool.kv_buffer[0]
    before = cache.clone()
    with pytest.raises(UnsupportedByProvider, match=r"form 'chunked'.*\(qk 192, v 128\)") as refusal:
        model.run("emulated", "chunked", 64)
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
    assert ("pass form='absorbed'" in str(refusal.value)) is (build != "vllm")
