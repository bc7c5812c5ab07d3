"""The README's code runs, on both packages with the same results, and its install lines are those of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fa_fast
import fa_ref
from fa_ref import LayerKind
from fa_ref.numerics import judge
from fa_ref.oracle import masked_attention

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(package: str = "fa_fast") -> dict[str, Any]:
    """The names that the README's Python blocks leave behind, run one after another with one of the packages."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in python_blocks():
        exec(compile(block.replace("fa_fast", package), "README.md", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def device_checks(monkeypatch):
    monkeypatch.setenv("FA_CHECK", "1")


def test_there_is_code():
    assert len(python_blocks()) >= 3


def test_the_code_runs_and_gives_back_what_it_took():
    names = run()
    assert names["prompt_out"].shape == (20, 32 * 128)
    assert names["token_out"].shape == (1, 32 * 128)
    assert names["verify_out"].shape == (4, 32 * 128)
    assert (names["new_tokens"].tolist(), names["seq_lens"].tolist()) == ([8, 4], [23])
    for keys in names["kv"].k_buffer:  # draft 2 was written to slot 39 and moved to the one behind the root
        assert keys[39].any() and torch.equal(keys[38], keys[39])
    assert names["rows"].available_size() == names["rows"].size
    plan = names["backend"].forward_metadata
    assert set(plan.passes) == {LayerKind.FULL, LayerKind.SLIDING}


@pytest.mark.parametrize("package", [fa_fast, fa_ref], ids=lambda package: package.__name__)
def test_its_decode_is_right(package):
    """The last layer's output of the decode, against the definition over the cache that both steps wrote."""
    names = run(package.__name__)
    torch.manual_seed(1)
    q = torch.randn(1, 32, 128, dtype=torch.bfloat16)
    layer, batch, config, backend = (names[name] for name in ("layers", "token", "config", "backend"))
    backend.init_forward_metadata(batch)
    out = backend.forward(q.flatten(1), None, None, layer[-1], batch).reshape(1, 32, 128)
    exact, plain = (
        masked_attention(q, batch, layer[-1], config, compute_dtype=dtype).out
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert judge(out, exact, plain, torch.bfloat16).ok
    assert config.token_to_kv_pool.k_buffer[1][16:37].abs().amax(dim=(1, 2)).gt(0).all()  # 20 + 1 tokens were written
    assert not config.token_to_kv_pool.k_buffer[1][:16].any()  # and none to the padding page


def test_both_packages_give_the_same():
    fast, ref = run("fa_fast"), run("fa_ref")
    for name in ("prompt_out", "token_out", "verify_out"):
        torch.testing.assert_close(fast[name], ref[name], atol=2e-2, rtol=2e-2)


def install_lines(text: str) -> dict[str, str]:
    """machine -> command, from a table of install lines."""
    return dict(re.findall(r"^\| ([^|]+?) \| (`pip install [^|]+`) \|$", text, re.MULTILINE))


def test_the_install_lines_are_those_of_the_docs():
    lines = install_lines(README)
    assert "CPU" in lines
    assert lines == install_lines((ROOT / "docs" / "install.md").read_text(encoding="utf-8"))


def test_every_file_the_readme_links_exists():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
