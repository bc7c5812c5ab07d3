"""Pages that are written from the code when the site is built, so that they cannot disagree with it.

generated/modes.md         the table of forward modes, from the members of ForwardMode
generated/support.md       what was run on which device, from tools/support_table.py
generated/capabilities.md  what each kernel provider can run, from its Capability record
generated/api.md           every public name, from docstrings and the comments beside the fields (api_reference.py)
performance.md             the stored measurements (performance.py); committed, so that it can be read without a build
notebooks/                 the notebooks, since Sphinx reads nothing outside its own folder
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import api_reference
import performance
from markdown_text import table
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent.parent

# ---- modes -----------------------------------------------------------------------------------------------


def modes_page() -> str:
    from fa_ref.api import ForwardMode

    columns = {
        "queries per request": "queries",
        "keys written first": "keys_written",
        "full layers see": "sees",
        "kernel calls": "kernel_calls",
    }
    rows = [[f"`{mode.name}`", *(getattr(mode, attribute) for attribute in columns.values())] for mode in ForwardMode]
    return "\n\n".join(
        [
            "# Forward modes",
            "What one forward pass does to a batch. P is the cached prefix of a request, L its new tokens, "
            "S = P + L, T the draft tokens; causal is aligned to the bottom right. The table is read from "
            "`fa_ref.api.ForwardMode`.",
            table(["mode", *columns], rows),
        ]
    )


# ---- capabilities ----------------------------------------------------------------------------------------


def capabilities_page() -> str:
    from fa_fast import doctor

    names = [name for name in doctor.PROVIDERS if importlib.util.find_spec(f"fa_fast.kernels.{name}")]
    records = [importlib.import_module(f"fa_fast.kernels.{name}").CAPABILITY for name in names]
    columns = [dict(doctor.capability_rows(record)) for record in records]
    rows = [
        [field.replace("_", " "), *(column[field] for column in columns)]
        for field in columns[0]
        if field not in {"provider", "remedy"}
    ]
    return "\n\n".join(
        [
            "# What each provider can run",
            "A provider stands between `fa_fast` and one set of kernels; the device chooses it. A request "
            "outside its column raises `UnsupportedByProvider` before any kernel starts. Head dims are qk/v, "
            "or one number where both are equal. `python -m fa_fast.doctor` prints the column of the machine "
            "it runs on.",
            table(["", *(f"`{name}`" for name in names)], rows),
        ]
    )


# ---- what was run, and where -----------------------------------------------------------------------------


def support_page() -> str:
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "tools" / "support_table.py")
    assert spec is not None and spec.loader is not None
    tool = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return "# What was run, and where\n\n" + tool.support()


# ---- the build -------------------------------------------------------------------------------------------

PAGES = {
    "modes": modes_page,
    "support": support_page,
    "capabilities": capabilities_page,
    "api": api_reference.page,
}


def write_if_changed(path: Path, text: str) -> None:
    """An untouched file keeps its time, so that Sphinx does not read it again."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def for_the_site(notebook: str, number: str) -> str:
    """The notebook with its number in the title, and its SVG outputs as HTML: there currentColor follows the theme."""
    content = json.loads(notebook)
    title = content["cells"][0]["source"]
    title = title if isinstance(title, str) else "".join(title)
    content["cells"][0]["source"] = title.replace("# ", f"# {number}: ", 1)
    for cell in content["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                data["text/html"] = data.pop("image/svg+xml")
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write_pages(app: Sphinx) -> None:
    source = Path(app.srcdir)
    for name, page in PAGES.items():
        write_if_changed(source / "generated" / f"{name}.md", page() + "\n")
    write_if_changed(source / "performance.md", performance.page() + "\n")
    if svg := performance.pictured(performance.results()):
        write_if_changed(source / performance.PICTURE, svg)
    kept = set()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        copy = source / "notebooks" / notebook.name
        text = notebook.read_text(encoding="utf-8")
        write_if_changed(copy, for_the_site(text, notebook.stem.split("_")[0]))
        kept.add(copy)
    for stale in set((source / "notebooks").glob("*.ipynb")) - kept:
        stale.unlink()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
