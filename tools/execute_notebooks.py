"""Execute notebooks top to bottom and write them back in one normal form: a second run changes nothing.

    python tools/execute_notebooks.py                     every notebook of notebooks/
    python tools/execute_notebooks.py notebooks/05_*.ipynb
    python tools/execute_notebooks.py --normalise-only    no execution: only the normal form

One thread and a fixed hash seed; each notebook has a kernel of its own, started in the notebook's folder.
A cell that raises stops the notebook, unless it is tagged `raises-exception`; its file then stays as it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The normal form, in place: stable ids, counts 1..n, and no metadata that differs between two runs.

    Kept of a cell's metadata: its tags. Neighbouring outputs of one stream are joined: a kernel may
    split them anywhere.
    """
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02d}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": sorted(tags)} if tags else {})
        cell.pop("attachments", None)
        if cell.cell_type != "code":
            continue
        count += bool(cell.source.strip())
        cell.execution_count = count if cell.source.strip() else None
        cell.outputs = _joined_streams(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def _joined_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        is_stream = output.output_type == "stream" and joined and joined[-1].output_type == "stream"
        if is_stream and joined[-1].name == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def execute(path: Path, notebook: nbformat.NotebookNode, timeout: int) -> None:
    """Run every cell of a notebook in a fresh kernel, in place. Raises CellExecutionError."""
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=timeout, kernel_name=KERNEL["name"], resources=resources).execute()


def write(path: Path, notebook: nbformat.NotebookNode) -> bool:
    """Write a notebook when its text differs from the file; whether it did."""
    nbformat.validate(notebook)
    text = nbformat.writes(notebook) + "\n"
    if path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="execute_notebooks.py", description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--normalise-only", action="store_true", help="do not execute")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a cell may take")
    arguments = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    failed = []
    for path in arguments.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        began = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        if not arguments.normalise_only:
            try:
                execute(path.resolve(), notebook, arguments.timeout)
            except Exception as error:  # the next notebook may still be fine: report all of them
                failed.append(path)
                print(f"{path}: {error}", file=sys.stderr)
                continue
        changed = write(path, normalise(notebook))
        print(f"{path}  {time.perf_counter() - began:5.1f} s  {'written' if changed else 'unchanged'}")
    if failed:
        print(f"failed: {', '.join(map(str, failed))}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
