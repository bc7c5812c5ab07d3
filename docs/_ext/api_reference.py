"""generated/api.md: every public name once, its docstring as prose, and a table of fields for each dataclass.

A field's meaning is the comment beside it in the source (or the string below it), so that a reader of the code and a
reader of the page read the same words. Which modes need a field of ForwardBatch is tried out: the batch is run without.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from types import ModuleType
from typing import Any

from markdown_text import plain, table

# The contract in reading order: the module, and the heading over its names.
ROOMS = {
    "config": "What a backend knows before the first batch",
    "batch": "One forward pass",
    "layer": "Layers and windows",
    "modes": "Modes and layer kinds",
    "pools": "Pools",
    "plan": "Plans",
    "errors": "Errors",
}


def page() -> str:
    import fa_fast
    import fa_ref

    names = sorted(fa_ref.__all__, key=str.lower)
    twins = [name for name in names if getattr(fa_ref, name) is not getattr(fa_fast, name)]
    parts = [
        "# API reference",
        "`fa_ref` and `fa_fast` export the same names with the same signatures. The first part lists what each "
        "computes in its own way; the second the contract that both share, which is one object in both "
        "(`fa_fast.ForwardBatch is fa_ref.ForwardBatch`).",
        "## Two implementations",
        *(entry(name, fa_ref, fa_fast) for name in twins),
        "## The shared contract",
    ]
    for room, heading in ROOMS.items():
        home = f"fa_ref.api.{room}"
        shared = [name for name in names if name not in twins and getattr(fa_ref, name).__module__ == home]
        parts += [f"### {heading}", *(entry(name, fa_ref) for name in shared)]
    return "\n\n".join(parts)


def entry(name: str, package: ModuleType, twin: ModuleType | None = None) -> str:
    """A name: signature, docstring, fields or members, methods; and what its twin says differently."""
    value = getattr(package, name)
    kind = "class" if inspect.isclass(value) else "function"
    body = [prose(inspect.getdoc(value) or "")]
    if twin is not None:
        body.append(f"*In `{twin.__name__}`:* " + prose(difference(getattr(twin, name), value)))
    if kind == "class":
        body += [field_table(value), member_table(value), method_list(value)]
    fence = "::::"
    content = "\n\n".join(filter(None, body))
    return f"{fence}{{py:{kind}}} {package.__name__}.{name}{signature(value)}\n\n{content}\n{fence}"


# ---- docstrings ------------------------------------------------------------------------------------------


def prose(docstring: str) -> str:
    """Paragraphs flow, worked examples keep their lines."""
    blocks = re.split(r"\n{2,}", docstring.strip())
    return "\n\n".join(
        f"```pycon\n{block}\n```" if block.startswith(">>>") else plain(" ".join(block.split())) for block in blocks
    )


def difference(twin: Any, reference: Any) -> str:
    """The paragraphs of a docstring that the other does not have."""
    known = set((inspect.getdoc(reference) or "").split("\n\n"))
    return "\n\n".join(block for block in (inspect.getdoc(twin) or "").split("\n\n") if block not in known)


# ---- fields ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Field:
    name: str
    type: str
    default: str
    meaning: str


def fields_of(cls: type) -> list[Field]:
    """The fields of a class in source order, each with the words beside or below it."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    found = []
    for node, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        meaning = comments.get(node.lineno) or words(below)
        if not meaning:
            raise ValueError(f"{cls.__name__}.{node.target.id} has no comment beside it: say what it means")
        default = "" if node.value is None else _default(ast.unparse(node.value))
        found.append(
            Field(name=node.target.id, type=shape(ast.unparse(node.annotation)), default=default, meaning=meaning)
        )
    return found


def words(node: ast.stmt | None) -> str:
    """The string below a field."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def shape(annotation: str) -> str:
    """Int32[Tensor, ' sequences'] reads Int32[sequences]."""
    return re.sub(r"(\w+)\[Tensor, '\s*([^']*)'\]", r"\1[\2]", annotation)


def _default(text: str) -> str:
    return "{}" if "default_factory=dict" in text else text


def field_table(cls: type) -> str:
    if not is_dataclass(cls):
        return ""
    header, needed = ["field", "type", "default", "meaning"], None
    if cls.__name__ == "ForwardBatch":
        header, needed = [*header, "needed in"], needed_in()
    rows = []
    for field in fields_of(cls):
        row = [f"`{field.name}`", f"`{field.type}`", f"`{field.default}`" if field.default else "", field.meaning]
        rows.append([row[0], row[1], row[2], plain(row[3]), *([needed[field.name]] if needed is not None else [])])
    found = table(header, rows)
    if needed is None:
        return found
    note = "*needed in*: a layer that brings k and v raises in these modes when the field is None."
    return f"{found}\n\n{note}"


def needed_in() -> dict[str, str]:
    """For each field of ForwardBatch, the modes that raise without it, found by running each mode without it."""
    import fa_fast
    import fa_ref

    cases = {mode: _case(mode) for mode in fa_ref.ForwardMode}
    cases = {mode: case for mode, case in cases.items() if case is not None}
    needed = {}
    for field in fields_of(fa_ref.ForwardBatch):
        if not field.default:
            needed[field.name] = "all"
            continue
        modes = [
            mode.name
            for mode, case in cases.items()
            if any(_raises_without(field.name, case, package) for package in (fa_ref, fa_fast))
        ]
        needed[field.name] = ", ".join(f"`{mode}`" for mode in modes)
    return needed


def _case(mode: Any) -> Any:
    """The running example in a mode, or None for a mode that has no plan without drafts."""
    import fa_ref
    from fa_ref.cases import make_case

    lens: dict[str, Any] = dict(prefix_lens=[], new_lens=[]) if mode.is_idle() else {}
    try:
        case = make_case(mode, **lens)
        case.run(fa_ref)
    except fa_ref.FaError:
        return None
    return case


def _raises_without(name: str, case: Any, package: ModuleType) -> bool:
    without = replace(case, batch=replace(case.batch, **{name: None}))
    try:
        without.run(package)
    except package.FaError:
        return True
    return False


# ---- members and methods ---------------------------------------------------------------------------------


def member_table(cls: type) -> str:
    """The members of an enum with the words below each. ForwardMode has a page of its own."""
    if not issubclass(cls, Enum):
        return ""
    if cls.__name__ == "ForwardMode":
        return "The members are the rows of [Forward modes](modes.md)."
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    pairs = zip(body, [*body[1:], None], strict=True)
    rows = [
        [f"`{node.targets[0].id}`", plain(words(below))]
        for node, below in pairs
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    return table(["member", "meaning"], rows)


def method_list(cls: type) -> str:
    return "\n".join(method_line(name, member) for name, member in methods(cls))


def methods(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class itself or a base of ours defines, in source order."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] in {"fa_ref", "fa_fast"}]
    members: dict[str, Any] = {}
    for base in reversed(own):
        members.update({name: member for name, member in vars(base).items() if not name.startswith("_")})
    return [
        (name, member)
        for name, member in members.items()
        if inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
    ]


def method_line(name: str, member: Any) -> str:
    """A method as an item of its class's list: signature and the first paragraph of its docstring."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    call = "" if isinstance(member, property) else signature(function)
    summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return f"- `{name}{call}`" + (f": {plain(summary)}" if summary else "")


def signature(value: Any) -> str:
    """Names and defaults only: shapes are in the docstring or the table, and annotations of tensors are long."""
    if inspect.isclass(value) and issubclass(value, (BaseException, Enum)):
        return ""
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name not in {"self", "cls"}]
    bare = [p.replace(annotation=inspect.Parameter.empty, default=_short(p)) for p in parameters]
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


def documented_classes() -> Iterable[type]:
    """The dataclasses of the contract, for the test that every field says what it means."""
    api = importlib.import_module("fa_ref.api")
    return [value for name in api.__all__ if inspect.isclass(value := getattr(api, name)) and is_dataclass(value)]
