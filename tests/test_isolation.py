"""Who may import whom: the contract stands alone, fa_fast sees only the contract, imports stay cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STANDARD = frozenset(sys.stdlib_module_names)
FA_REF = sorted((ROOT / "fa_ref").rglob("*.py"))
FA_FAST = sorted((ROOT / "fa_fast").rglob("*.py"))
API = [path for path in FA_REF if path.is_relative_to(ROOT / "fa_ref" / "api")]


def imported_modules(path: Path, tree: ast.AST | None = None) -> set[str]:
    """Absolute names of every module a file imports, at any depth; a relative import is resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(tree or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from fa_ref import api` imports fa_ref.api: keep the names so that the rule can tell
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def allowed_in_fa_fast(module: str) -> bool:
    return not module.startswith("fa_ref") or module == "fa_ref.api" or module.startswith("fa_ref.api.")


def allowed_in_api(module: str) -> bool:
    top = module.split(".")[0]
    return top in STANDARD or top in {"torch", "jaxtyping"} or module.startswith("fa_ref.api.")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", API, ids=relative)
def test_the_contract_imports_torch_shapes_and_nothing_else_of_ours(path):
    assert [name for name in sorted(imported_modules(path)) if not allowed_in_api(name)] == []


@pytest.mark.parametrize("path", FA_FAST, ids=relative)
def test_fa_fast_imports_only_the_contract_from_fa_ref(path):
    assert [name for name in sorted(imported_modules(path)) if not allowed_in_fa_fast(name)] == []


@pytest.mark.parametrize("path", FA_REF, ids=relative)
def test_fa_ref_never_imports_fa_fast(path):
    assert [name for name in sorted(imported_modules(path)) if name.split(".")[0] == "fa_fast"] == []


@pytest.mark.parametrize("path", FA_REF + FA_FAST, ids=relative)
def test_the_packages_never_import_tests_notebooks_or_benchmarks(path):
    outside = {"tests", "notebooks", "tiny_engine", "benchmarks", "tools"}
    assert [name for name in sorted(imported_modules(path)) if name.split(".")[0] in outside] == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from fa_ref.masks import causal", "fa_ref.masks.causal"),
        ("import fa_ref.planning.decode", "fa_ref.planning.decode"),
        ("def late():\n    from fa_ref import merge_state", "fa_ref.merge_state"),
        ("from fa_ref.apiary import x", "fa_ref.apiary.x"),
    ],
)
def test_the_scan_catches_a_forbidden_import(source, wrong):
    names = imported_modules(ROOT / "fa_fast" / "example.py", ast.parse(source))
    assert [name for name in names if not allowed_in_fa_fast(name)] == [wrong]


def test_the_scan_resolves_relative_imports():
    tree = ast.parse("from ..planning import decode\nfrom .masks import causal")
    path = ROOT / "fa_ref" / "api" / "example.py"
    assert imported_modules(path, tree) == {"fa_ref.planning.decode", "fa_ref.api.masks.causal"}


def modules_after(statement: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter after one statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] in {"fa_ref", "fa_fast"}}


def test_importing_the_contract_loads_nothing_else_of_ours():
    loaded = ours(modules_after("import fa_ref.api"))
    assert "fa_ref.api" in loaded
    assert {name for name in loaded if not name.startswith("fa_ref.api")} == {"fa_ref"}


def test_importing_fa_fast_loads_no_kernel_no_plotting_and_no_reference():
    loaded = modules_after("import fa_fast")
    assert "fa_fast" in loaded
    tops = {name.split(".")[0] for name in loaded}
    assert tops.isdisjoint({"sgl_kernel", "triton", "einops", "matplotlib"})
    assert {name for name in ours(loaded) if name.startswith("fa_ref.") and "fa_ref.api" not in name} == set()


def test_using_every_name_of_fa_fast_loads_only_the_contract_of_fa_ref():
    loaded = modules_after("import fa_fast\n[getattr(fa_fast, name) for name in fa_fast.__all__]")
    reference = {name for name in ours(loaded) if name.startswith("fa_ref")}
    assert {name for name in reference if not name.startswith("fa_ref.api")} <= {"fa_ref"}
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"sgl_kernel", "einops", "matplotlib"})


def test_importing_fa_fast_does_not_initialise_cuda():
    code = "import fa_fast, torch; assert not torch.cuda.is_initialized(); print('untouched')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    assert done.stdout.strip() == "untouched"


@pytest.mark.gpu
def test_using_every_name_of_fa_fast_does_not_initialise_cuda():
    code = (
        "import fa_fast, torch\n[getattr(fa_fast, name) for name in fa_fast.__all__]\n"
        "assert not torch.cuda.is_initialized(); print('untouched')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    assert done.stdout.strip() == "untouched"
