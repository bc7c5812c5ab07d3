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
        code = block.replace("fa_fast", package).replace(f"{package}.graphs", "fa_fast.graphs")  # which has no twin
        exec(compile(code, "README.md", "exec"), names)
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


def test_the_replayed_step_is_the_eager_one():
    names = run()
    backend, batch = names["backend"], names["token"]
    inputs = {name: names[name][:1] for name in ("q", "k", "v")}
    replayed = names["runner"].run(batch, **inputs).clone()
    backend.init_forward_metadata(batch)
    torch.testing.assert_close(replayed, names["layer_step"](batch, **inputs), atol=2e-2, rtol=2e-2)
    assert replayed.shape == names["replayed"].shape == (1, 32 * 128)


def test_both_packages_give_the_same():
    fast, ref = run("fa_fast"), run("fa_ref")
    for name in (
        "prompt_out",
        "token_out",
        "replayed",
        "verify_out",
        "second_out",
        "start_cross",
        "word_text",
        "word_cross",
    ):
        torch.testing.assert_close(fast[name], ref[name], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("package", ["fa_fast", "fa_ref"])
def test_its_latent_attention_is_that_of_expanded_keys(package, monkeypatch):
    """The second piece of the prompt, against keys and values of every head made from the cached rows."""
    queries = {}

    def attend(backend, q_nope, q_rope, *others):
        queries[q_nope.shape[0]] = torch.cat([q_nope, q_rope], dim=-1).float()
        return original(backend, q_nope, q_rope, *others)

    module = {"fa_fast": fa_fast, "fa_ref": fa_ref}[package]
    original = module.mla_attention
    monkeypatch.setattr(module, "mla_attention", attend)
    names = run(package)
    latent, k_rope = names["latents"].get_key_buffer(0)[16:36, 0].float().split([512, 64], dim=-1)
    keys_values = (latent @ names["kv_b_proj"].float().T).view(20, 16, 128 + 128)  # as a checkpoint has it
    k_nope, values = keys_values.split([128, 128], dim=-1)
    keys = torch.cat([k_nope, k_rope[:, None].expand(-1, 16, -1)], dim=-1)
    seen = torch.arange(20) <= torch.arange(12, 20)[:, None]
    q, k, v = (x.transpose(0, 1) for x in (queries[8], keys, values))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # scales by (128 + 64) ** -0.5
    torch.testing.assert_close(names["second_out"].float(), exact.transpose(0, 1).flatten(1), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("package", [fa_fast, fa_ref], ids=lambda package: package.__name__)
def test_its_cross_layer_attends_to_the_encoder_and_its_text_starts_behind(package):
    names = run(package.__name__)
    assert names["start_cross"].shape == (5, 8 * 64) and names["word_cross"].shape == (2, 8 * 64)
    assert names["start_cross"][:3].abs().sum(dim=1).gt(0).all() and not names["start_cross"][3:].any()
    text_keys, cross_keys = (names["audio"].get_key_buffer(layer) for layer in range(2))
    assert torch.equal(cross_keys[16:36].flatten(1), names["encoder_k"])  # once, and still there after the decode
    assert cross_keys.flatten(1).any(dim=1).nonzero().flatten().tolist() == list(range(16, 36))
    assert text_keys.flatten(1).any(dim=1).nonzero().flatten().tolist() == [*range(36, 40), *range(48, 51)]

    torch.manual_seed(1)
    q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    backend, layer, batch = names["decoder"], names["cross_layer"], names["word"]
    out = backend.forward(q.flatten(1), None, None, layer, batch).view(2, 8, 64)
    k, v = (names[name].view(20, 8, 64).transpose(0, 1).float() for name in ("encoder_k", "encoder_v"))
    exact = torch.nn.functional.scaled_dot_product_attention(q[:1].transpose(0, 1).float(), k, v)
    torch.testing.assert_close(out[:1].float(), exact.transpose(0, 1), atol=1e-2, rtol=1e-2)
    assert not out[1].any()


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
