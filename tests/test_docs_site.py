"""What the pages say in numbers and names is what the code says."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from fa_ref.api import FaError, errors
from fa_ref.cases import make_case

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("pictures", DOCS / "_ext" / "pictures.py")
assert _spec is not None
assert _spec.loader is not None
pictures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pictures)

NOTEBOOKS = sorted(path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb"))


def extension(name: str):
    """A module of docs/_ext; they import each other by name."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def named(text: str) -> set[str]:
    """The numbers of the notebooks that a page links."""
    return set(re.findall(r"\{nb\}`(\d\d)`", text))


def test_the_picture_of_the_readme_is_the_one_the_code_draws():
    committed = (DOCS / "_static" / "overview.svg").read_text(encoding="utf-8")
    assert committed == pictures.overview()._repr_svg_() + "\n", "run make generate"


def test_the_glossary_s_example_is_the_running_example():
    case = make_case()
    row = case.config.req_to_token_pool.req_to_token[case.batch.req_pool_indices[0], :8].tolist()
    text = page("glossary")
    assert f"`{row}`" in text
    slot = row[5]
    assert f"Position 5 is in slot {slot}, which is offset {slot % 4} of page {slot // 4}" in text
    assert f"`[{row[0]} // 4, {row[4]} // 4]` = `{[row[0] // 4, row[4] // 4]}`" in text


def test_every_notebook_is_on_a_reading_path():
    assert named(page("reading-paths")) == set(NOTEBOOKS)


@pytest.mark.parametrize("name", ["index", "glossary", "errors", "reading-paths", "graphs", "from-sglang"])
def test_every_notebook_a_page_names_exists(name):
    assert named(page(name)) <= set(NOTEBOOKS)


def test_every_error_has_a_row():
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, FaError)}
    assert set(re.findall(r"^\| `(\w+)`", page("errors"), re.MULTILINE)) == raised - {"FaError"}


def test_every_page_is_in_the_contents():
    contents = page("index")
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert {name for name in pages if not re.search(rf"^{name}$", contents, re.MULTILINE)} == set()


def test_the_performance_page_is_what_its_generator_says():
    assert page("performance") == extension("performance").page() + "\n", "run make generate"


def test_the_picture_of_whole_steps_is_the_one_of_the_stored_run():
    performance = extension("performance")
    committed = DOCS / performance.PICTURE
    found = committed.read_text(encoding="utf-8") if committed.exists() else None
    assert found == performance.pictured(performance.results()), "run make generate"


def test_whole_steps_are_drawn_and_say_what_they_cost_beside_their_graph():
    performance = extension("performance")
    row = dict(row="step: decode 1 x 4K", peer="a plain replay: x", ours_us=400.0, peer_us=560.0, ratio=1.4,
               spread=0.01, floor_us=None, note="")  # fmt: skip
    step = row | dict(host_us=[9.0, 80.0], launches=[0, 5], waits=[0, 1])
    run = dict(device="x", versions={}, cuda="13.0", python="3", commit="0" * 12, rows=[step, row | {"row": "other"}])
    text = performance.section("steps.json", run)
    assert "![Attention of a whole step" in text and "_static/steps.svg" in text
    assert "| 9.00 µs / 80.0 µs | 0 / 5 | 0 / 1 |" in text and "| floor | host | launches | waits | note |" in text
    assert repr(performance.picture(run)).splitlines()[1:] == ["decode 1 x 4K: 400 µs  " + 30 * "#" + " 1.4 x"]
    plain = performance.section("other.json", run | {"rows": [row]})
    assert "![" not in plain and "| floor | note |" in plain
    assert performance.picture(run | {"rows": [row]}) is None


def test_every_row_below_one_is_explained():
    performance = extension("performance")
    slow = [row for run in performance.results().values() for row in run["rows"] if row["ratio"] < 1]
    assert slow
    assert [row["row"] for row in slow if performance.why(row) == "slower than the peer"] == []


def test_a_row_faster_than_its_floor_is_said_so():
    row = {"row": "x", "ours_us": 1.0, "floor_us": 2.0}
    assert "x" in extension("performance").above_the_floor([row])
    assert extension("performance").above_the_floor([row | {"ours_us": 3.0}]) == ""


def test_every_field_of_the_contract_says_what_it_means():
    reference = extension("api_reference")
    for cls in reference.documented_classes():
        assert [field.name for field in reference.fields_of(cls)] == [field.name for field in fields(cls)]


def test_a_field_without_words_stops_the_page():
    with pytest.raises(ValueError, match="silent"):
        extension("api_reference").fields_of(_Silent)


def test_the_modes_that_need_a_field_are_found():
    needed = extension("api_reference").needed_in()
    assert needed["seq_lens"] == "all"
    assert "`EXTEND`" in needed["extend_seq_lens"]
    assert "DECODE" not in needed["extend_seq_lens"]
    assert needed["seq_lens_cpu"] == ""


@dataclass
class _Silent:
    said: int  # with words
    silent: int
