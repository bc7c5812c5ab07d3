"""What every committed notebook keeps to: executed in order, comparable anywhere, small, a whole lesson."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CODE_LINES = 15
MAX_OUTPUT_BYTES = 200_000
MAX_SVG_BYTES = 5_000
MIN_ASSERTS = 5
MIN_EXERCISES = 3
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|Users|tmp|opt|mnt|srv|work\w*)/[\w.]")
SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)

_spec = importlib.util.spec_from_file_location("execute_notebooks", ROOT / "tools" / "execute_notebooks.py")
assert _spec is not None
assert _spec.loader is not None
execute_notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(execute_notebooks)

every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook: nbformat.NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def texts(output: nbformat.NotebookNode) -> list[str]:
    """Every textual representation of one output; base64 pictures are left out."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return list(output.traceback)
    return [text for kind, text in output.data.items() if kind.startswith("text/") or kind == "image/svg+xml"]


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def code_lines(source: str) -> int:
    """Lines that hold code: neither blank nor only a comment."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in source.splitlines())


def asserts(notebook: nbformat.NotebookNode) -> int:
    trees = [ast.parse(python_only(cell.source)) for cell in code_cells(notebook)]
    return sum(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree))


def python_only(source: str) -> str:
    """A cell without its magics (%, !, trailing ?), which are not Python."""
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))


def svgs(notebook: nbformat.NotebookNode) -> list[str]:
    return [svg for output in outputs(notebook) for text in texts(output) for svg in SVG.findall(text)]


def test_there_are_notebooks():
    assert PATHS


def test_the_numbers_are_unique_and_two_digits():
    numbers = [path.stem.split("_")[0] for path in PATHS]
    assert all(re.fullmatch(r"\d\d", number) for number in numbers)
    assert len(set(numbers)) == len(numbers)


@every_notebook
def test_code_cells_are_numbered_from_one_in_order(path):
    """nbval runs a cell without a number but never compares it."""
    counts = [cell.execution_count for cell in code_cells(read(path))]
    assert counts == list(range(1, len(counts) + 1))


@every_notebook
def test_the_file_is_in_normal_form(path):
    """`make notebooks`, or tools/execute_notebooks.py --normalise-only, writes that form."""
    text = nbformat.writes(execute_notebooks.normalise(read(path))) + "\n"
    assert path.read_text(encoding="utf-8") == text


@every_notebook
def test_an_error_is_only_kept_where_it_is_the_lesson(path):
    for cell in code_cells(read(path)):
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        assert errors == [] or "raises-exception" in cell.metadata.get("tags", [])


@every_notebook
def test_nothing_is_written_to_stderr(path):
    streams = [output for output in outputs(read(path)) if output.output_type == "stream"]
    assert [output.text for output in streams if output.name == "stderr"] == []


@every_notebook
def test_outputs_show_no_path_of_a_machine(path):
    found = [text for output in outputs(read(path)) for text in texts(output) if MACHINE_PATH.search(text)]
    assert found == []


@every_notebook
def test_a_code_cell_has_one_idea(path):
    long = [cell.source for cell in code_cells(read(path)) if code_lines(cell.source) > MAX_CODE_LINES]
    assert long == []


@every_notebook
def test_outputs_stay_small(path):
    size = sum(len(str(output)) for output in outputs(read(path)))
    assert size < MAX_OUTPUT_BYTES


@every_notebook
def test_figures_are_small_and_have_a_title(path):
    for svg in svgs(read(path)):
        assert len(svg.encode()) <= MAX_SVG_BYTES
        assert re.search(r"<title>[^<]+</title>", svg)


@every_notebook
def test_a_figure_has_a_twin_in_plain_text(path):
    for output in outputs(read(path)):
        if "image/svg+xml" in output.get("data", {}):
            assert output.data.get("text/plain", "").strip() not in {"", "<IPython.core.display.SVG object>"}


@every_notebook
def test_it_opens_with_a_question_and_its_answer(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    heading, *rest = first.source.strip().splitlines()
    assert re.fullmatch(r"# .+\?", heading)
    assert any(line.startswith("> ") for line in rest)


@every_notebook
def test_it_has_one_title(path):
    headings = re.findall(r"^# .+", markdown(read(path)), re.MULTILINE)
    assert len(headings) == 1


@every_notebook
def test_claims_are_asserted(path):
    assert asserts(read(path)) >= MIN_ASSERTS


@every_notebook
def test_it_ends_with_exercises_and_folded_answers(path):
    text = markdown(read(path))
    assert re.search(r"^##+ .*Exercises", text, re.MULTILINE)
    assert text.count("<details>") >= MIN_EXERCISES
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>")


@every_notebook
def test_links_between_notebooks_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#:\s]+\.ipynb)(?:#[^)]*)?\)", markdown(read(path)))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def example() -> nbformat.NotebookNode:
    """A notebook as a kernel leaves it: random ids, gaps in the counts, a stream in pieces, timings."""
    v4 = nbformat.v4
    pieces = [v4.new_output("stream", name="stdout", text=text) for text in ("one\n", "two\n")]
    result = v4.new_output("execute_result", data={"text/plain": "3"}, execution_count=9)
    first = v4.new_code_cell("print('one'); print('two')", execution_count=4, outputs=pieces)
    first.metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
    second = v4.new_code_cell("1 + 2", execution_count=9, outputs=[result], metadata={"tags": ["b", "a"]})
    return v4.new_notebook(cells=[v4.new_markdown_cell("# Why?"), first, second], metadata={"widgets": {}})


def test_normalising_numbers_joins_and_strips():
    notebook = execute_notebooks.normalise(example())
    assert [cell.id for cell in notebook.cells] == ["cell-00", "cell-01", "cell-02"]
    assert [cell.execution_count for cell in code_cells(notebook)] == [1, 2]
    assert [output.text for output in notebook.cells[1].outputs] == ["one\ntwo\n"]
    assert notebook.cells[2].outputs[0].execution_count == 2
    assert notebook.cells[1].metadata == {}
    assert notebook.cells[2].metadata == {"tags": ["a", "b"]}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_normalising_twice_changes_nothing():
    once = nbformat.writes(execute_notebooks.normalise(example()))
    assert nbformat.writes(execute_notebooks.normalise(nbformat.reads(once, as_version=4))) == once


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('File "/home/ada/fa/x.py", line 3', True),
        ("/Users/ada/.venv/lib", True),
        ("https://example.org/home/page", False),
        ("pages/slot = 3/4", False),
    ],
)
def test_the_path_pattern_knows_a_path_of_a_machine(text, found):
    assert bool(MACHINE_PATH.search(text)) == found


def test_the_executor_runs_a_notebook_and_a_second_run_changes_nothing(tmp_path):
    path = tmp_path / "00_example.ipynb"
    nbformat.write(example(), path)
    assert execute_notebooks.main([str(path)]) == 0
    once = path.read_text()
    assert [output.text for output in read(path).cells[1].outputs] == ["one\ntwo\n"]
    assert execute_notebooks.main([str(path)]) == 0
    assert path.read_text() == once


def test_the_executor_fails_and_keeps_the_file_when_a_cell_raises(tmp_path, capsys):
    path = tmp_path / "00_example.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    before = path.read_text()
    assert execute_notebooks.main([str(path)]) == 1
    assert path.read_text() == before
    assert "ZeroDivisionError" in capsys.readouterr().err
