"""The support table of the README is what its generator says, and the generator looks before it speaks."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fa_fast.kernels import sgl_cuda, torch_cpu
from fa_ref import ForwardMode, LayerKind

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("support_table", ROOT / "tools" / "support_table.py")
assert _spec is not None
assert _spec.loader is not None
support_table = importlib.util.module_from_spec(_spec)
sys.modules["support_table"] = support_table  # dataclasses look their module up
_spec.loader.exec_module(support_table)


def feature(name: str):
    (found,) = [f for f in support_table._features() if f.name.startswith(name)]
    return found


def test_the_readme_holds_the_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == support_table.with_support(readme), "run python tools/support_table.py --write"


def test_the_words_of_the_table_and_no_others_are_explained():
    text = support_table.support()
    explained = re.findall(r"\*([\w ]+)\*: ", text)
    used = {word for word in support_table.LEGEND if re.search(rf"[|+] {word} [|+]", text)}
    assert set(explained) == used == set(support_table.LEGEND) - {"not yet"}


def test_every_forward_mode_has_a_row():
    assert {mode for _, mode, _ in support_table.MODES} == set(ForwardMode)


def test_planned_modes_and_kinds_ran_where_the_table_says():
    cell = support_table.mode_cell
    assert cell(ForwardMode.MIXED, {}, LayerKind.LOCAL) == "H200 + CPU + emulated"
    assert cell(ForwardMode.TARGET_VERIFY, dict(draft_token_num=4), LayerKind.FULL) == "H200 + CPU + emulated"
    assert cell(ForwardMode.DECODE, {}, LayerKind.CROSS) == "H200 + CPU + emulated"


def test_a_kind_without_a_plan_is_not_yet(monkeypatch):
    monkeypatch.setattr(support_table, "layer_kinds", lambda config: ((LayerKind.FULL,), {}))
    assert support_table.mode_cell(ForwardMode.DECODE, {}, LayerKind.CROSS) == "not yet"


@pytest.mark.parametrize(
    ("mode", "arguments", "left"),
    [
        (ForwardMode.MIXED, {}, dict(modes=set())),
        (ForwardMode.DECODE, dict(topk=4, step=2), dict(topks={1, 2})),
        (ForwardMode.TARGET_VERIFY, dict(draft_token_num=4), dict(drafts=set())),
        (ForwardMode.TARGET_VERIFY, dict(trees=[[-1, 0]] * 3), dict(drafts={("draft_token_num", "drafts")})),
        (
            ForwardMode.TARGET_VERIFY,
            dict(trees=[[-1, 0]] * 3, tree_attention="expand"),
            dict(drafts={("trees", "trees"), ("tree_attention", "'fused'")}),
        ),
    ],
    ids=["mixed", "draft", "chain", "tree", "expand"],
)
def test_a_mode_that_no_gpu_test_runs_is_contract_only(mode, arguments, left, monkeypatch):
    assert support_table.mode_cell(mode, arguments, LayerKind.SLIDING) == "H200 + CPU + emulated"
    fewer = replace(support_table.gpu_tests(), **left)
    monkeypatch.setattr(support_table, "gpu_tests", lambda: fewer)
    assert support_table.mode_cell(mode, arguments, LayerKind.SLIDING) == "contract + CPU + emulated"


def test_draft_rows_run_the_passes_of_drafts():
    arguments = {name: arguments for name, _, arguments in support_table.MODES}
    case = support_table.make_case(ForwardMode.TARGET_VERIFY, **arguments["`TARGET_VERIFY`, tree"])
    assert case.batch.spec_info.custom_mask is not None
    case = support_table.make_case(ForwardMode.DECODE, **arguments["`DECODE` of drafts, topk > 1"])
    assert case.batch.spec_info.topk > 1


def test_what_a_capability_refuses_is_refused():
    assert support_table.feature_cell(feature("fp32"), "cuda") == "refused"
    assert support_table.feature_cell(feature("fp32"), "cpu") == "CPU"


def test_what_no_gpu_test_runs_is_contract_only(monkeypatch):
    sinks = feature("sinks, head dim 64")
    assert support_table.feature_cell(sinks, "cuda") == "H200"
    left = replace(support_table.gpu_tests(), arguments=support_table.gpu_tests().arguments - set(sinks.on_gpu))
    monkeypatch.setattr(support_table, "gpu_tests", lambda: left)
    assert support_table.feature_cell(sinks, "cuda") == "contract"


def test_a_device_without_a_provider_is_not_yet(monkeypatch):
    without = {name: kind for name, kind in support_table.PROVIDERS.items() if kind != "xpu"}
    monkeypatch.setattr(support_table, "PROVIDERS", without)
    assert support_table.feature_cell(feature("bf16"), "xpu") == "not yet"


INTEL = {
    "head dims qk/v": "refused", "other head dims": "refused", "fp32": "refused", "other MLA": "refused",
    "sinks, other": "refused", "sinks, head dim 64": "emulated", "page sizes": "emulated", "fp8": "emulated",
    "softcap": "emulated", "MLA, absorbed": "emulated", "the same, SLIDING": "refused", "a shared prefix": "emulated",
}  # fmt: skip


@pytest.mark.parametrize("name", INTEL)
def test_what_intel_kernels_cannot_do_is_refused(name):
    assert support_table.feature_cell(feature(name), "xpu") == INTEL[name]


def test_the_other_provider_of_intel_gpus_has_a_column_of_its_own():
    assert "Intel GPU (`vllm_xpu`)" in support_table.support()
    sinks, latent = feature("sinks, other"), feature("MLA, absorbed")
    assert [support_table.feature_cell(f, "vllm_xpu") for f in (sinks, latent)] == ["emulated", "refused"]
    assert [support_table.feature_cell(f, "xpu") for f in (sinks, latent)] == ["refused", "emulated"]


def test_the_pages_that_cost_a_copy_on_an_intel_gpu_are_named(monkeypatch):
    from fa_fast.kernels import sgl_xpu

    said = support_table.support()
    assert (
        "`sgl_xpu` reads pages of 64 and 128 where they are" in said and "also 16 and 32. With pages of other" in said
    )
    monkeypatch.setattr(sgl_xpu, "reads_in_place", lambda page_size, longest_q: page_size == 64)
    assert "`sgl_xpu` reads pages of 64 where they are" in support_table.support()


def test_an_older_build_of_intel_kernels_has_no_trees(monkeypatch):
    from fa_fast.kernels import sgl_xpu

    monkeypatch.setattr(sgl_xpu, "CAPABILITY", sgl_xpu.GENERATIONS["2026-08"])
    trees = dict(trees=[[-1, 0]] * 3)
    assert support_table.mode_cell(ForwardMode.TARGET_VERIFY, trees, LayerKind.FULL) == "H200 + CPU"
    assert support_table.feature_cell(feature("softcap"), "xpu") == "refused"


def test_a_wrong_cpu_provider_stops_the_table(monkeypatch):
    right = torch_cpu.flash_attn_with_kvcache
    monkeypatch.setattr(torch_cpu, "flash_attn_with_kvcache", lambda **arguments: 2 * right(**arguments))
    with pytest.raises(AssertionError, match="torch_cpu is wrong"):
        support_table.feature_cell(feature("bf16"), "cpu")


def test_the_head_dims_of_the_gpu_tests_are_the_provider_s():
    assert set(support_table.gpu_tests().head_dims) == sgl_cuda.CAPABILITY.head_dims


def test_text_around_the_markers_stays():
    text = f"before\n{support_table.BEGIN}\nold\n{support_table.END}\nafter\n"
    renewed = support_table.with_support(text)
    assert renewed.startswith("before\n")
    assert renewed.endswith("\nafter\n")
    assert "old" not in renewed


@pytest.mark.parametrize("text", ["no markers", f"{support_table.BEGIN}", support_table.BEGIN * 2 + support_table.END])
def test_a_document_without_both_markers_is_an_error(text):
    with pytest.raises(SystemExit):
        support_table.with_support(text)
