"""Pages that are written from the code when the site is built, so that they cannot disagree with it.

generated/modes.md         the table of forward modes, from the members of ForwardMode
generated/support.md       what was run on which device, from tools/support_table.py
generated/capabilities.md  what each kernel provider can run, from its Capability record
generated/api.md           every public name of both packages, side by side
notebooks/                 the notebooks, since Sphinx reads nothing outside its own folder
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent.parent


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


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

    names = [name for name in doctor.PROVIDERS.values() if importlib.util.find_spec(f"fa_fast.kernels.{name}")]
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


# ---- the two packages side by side -----------------------------------------------------------------------


def api_page() -> str:
    import fa_fast
    import fa_ref

    names = sorted(fa_ref.__all__, key=str.lower)
    shared = [name for name in names if getattr(fa_ref, name) is getattr(fa_fast, name)]
    twins = [name for name in names if name not in shared]
    parts = [
        "# API reference",
        "Both packages export the same names with the same signatures. The first part lists what each "
        "package computes in its own way, side by side; the second the contract both share (`fa_ref.api`).",
        "## Two implementations",
    ]
    for name in twins:
        parts += [f"### {name}", side_by_side(name, fa_ref, fa_fast)]
    parts.append("## The shared contract")
    for name in shared:
        parts += [f"### {name}", entry(name, fa_ref)]
    return "\n\n".join(parts)


def side_by_side(name: str, *packages: ModuleType) -> str:
    columns = "\n\n".join(f"::::{{container}} column\n{entry(name, package)}\n::::" for package in packages)
    return f":::::{{container}} side-by-side\n{columns}\n:::::"


def entry(name: str, package: ModuleType) -> str:
    """One documented object: signature, docstring as written, and its public methods."""
    value = getattr(package, name)
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    body = [docstring(value)]
    if kind == "class":
        body.append("\n".join(method_line(method, member) for method, member in methods(value)))
    content = "\n\n".join(filter(None, body))
    return directive(kind, f"{package.__name__}.{name}{signature(value)}", content, colons=3)


def methods(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class itself or a base of ours defines."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] in {"fa_ref", "fa_fast"}]
    members: dict[str, Any] = {}
    for base in reversed(own):
        members.update({name: member for name, member in vars(base).items() if not name.startswith("_")})
    return [
        (name, member)
        for name, member in sorted(members.items())
        if inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
    ]


def method_line(name: str, member: Any) -> str:
    """A method as an item of its class's list: signature and the first paragraph of its docstring."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    call = "" if isinstance(member, property) else signature(function)
    summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return f"- `{name}{call}`" + (f": {plain(summary)}" if summary else "")


def signature(value: Any) -> str:
    """Names and defaults only: the shapes are in the docstring, and annotations of tensors are long."""
    if not callable(value):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    bare = [p.replace(annotation=inspect.Parameter.empty, default=_short(p)) for p in parameters if p.name != "self"]
    return str(inspect.Signature(bare))


class _Shown:
    """A default value that prints as the given text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _short(parameter: inspect.Parameter) -> Any:
    """The default, unless its repr holds an address or spans lines."""
    if parameter.default is inspect.Parameter.empty:
        return parameter.default
    text = repr(parameter.default)
    return _Shown("..." if "0x" in text or "\n" in text or "<" in text else text)


def docstring(value: Any) -> str:
    """The docstring as it was written: worked examples keep their lines."""
    text = inspect.getdoc(value) or ""
    fence = "`" * (3 + max(map(len, re.findall(r"`{3,}", text)), default=0))
    return f"{fence}text\n{text}\n{fence}" if text else ""


def plain(text: str) -> str:
    """Text with Markdown's own characters escaped, code spans kept."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<>\[\]$#|])", r"\\\1", p) for p in pieces)


def directive(kind: str, head: str, content: str, colons: int) -> str:
    fence = ":" * colons
    return f"{fence}{{py:{kind}}} {head}\n\n{content}\n{fence}"


# ---- the build -------------------------------------------------------------------------------------------

PAGES = {"modes": modes_page, "support": support_page, "capabilities": capabilities_page, "api": api_page}


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
