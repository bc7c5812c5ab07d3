"""A function's own source, so that a notebook shows the code of the package and not a copy of it."""

from __future__ import annotations

import ast
import inspect
import io
import keyword
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Source:
    """Source code under a line that names it."""

    name: str  # module.function
    code: str

    def __repr__(self) -> str:
        return f"# {self.name}\n{self.code}"

    def _repr_html_(self) -> str:
        body = "\n".join(_marked(self.code))
        return (
            '<pre style="font-family:monospace;line-height:1.35;overflow-x:auto">'
            f'<span style="opacity:.65"># {escape(self.name)}</span>\n'
            f"{body}</pre>"
        )


def source(function: Any, *, docstring: bool = False) -> Source:
    """The source of a function, method, property or class; docstrings cut to their first line unless asked for.

    >>> from fa_ref.planning.ragged import cu_seqlens
    >>> print(source(cu_seqlens).code)
    def cu_seqlens(lens: Int[Tensor, " sequences"]) -> Int32[Tensor, " sequences_plus_1"]:
        \"\"\"Where each sequence starts, and the end of the last: the prefix sums of the lengths, as int32.\"\"\"
        ends = torch.cumsum(lens, dim=0, dtype=torch.int32)
        return torch.cat([ends.new_zeros(1), ends])
    """
    target: Any = function.fget if isinstance(function, property) else function
    target = inspect.unwrap(target)
    code = textwrap.dedent(inspect.getsource(target)).rstrip()
    return Source(f"{target.__module__}.{target.__qualname__}", code if docstring else _trim(code))


def _trim(code: str) -> str:
    """Every docstring of several lines becomes its first line."""
    lines = code.split("\n")
    for node in sorted(ast.walk(ast.parse(code)), key=lambda n: -getattr(n, "lineno", 0)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        text, first = ast.get_docstring(node), node.body[0]
        if text and first.end_lineno and first.end_lineno > first.lineno:
            indent = " " * first.col_offset
            lines[first.lineno - 1 : first.end_lineno] = [f'{indent}"""{text.splitlines()[0]}"""']
    return "\n".join(lines)


def _marked(code: str) -> Iterator[str]:
    """Lines of HTML: keywords bold, comments and docstrings faint. Words inside strings stay as they are."""
    marks: dict[int, list[tuple[int, int, str]]] = {}
    formatted, statement = (
        0,
        True,
    )  # depth of f-strings (tokens of their own from Python 3.12); at a line's start
    for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
        kind = tokenize.tok_name[token.type]
        formatted += kind.startswith("FSTRING_START") - kind.startswith("FSTRING_END")
        faint = kind == "COMMENT" or (kind == "STRING" and statement)
        if faint and not formatted:
            _mark(marks, token, "opacity:.65")
        elif kind == "NAME" and not formatted and keyword.iskeyword(token.string):
            _mark(marks, token, "font-weight:bold")
        if kind not in ("COMMENT", "NL"):
            statement = kind in ("NEWLINE", "INDENT", "DEDENT")
    for number, line in enumerate(code.split("\n"), start=1):
        html, done = "", 0
        for start, end, style in marks.get(number, []):
            html += escape(line[done:start]) + f'<span style="{style}">{escape(line[start:end])}</span>'
            done = end
        yield html + escape(line[done:])


def _mark(marks: dict[int, list[tuple[int, int, str]]], token: tokenize.TokenInfo, style: str) -> None:
    """Note the part of each line that a token covers."""
    (first, left), (last, right) = token.start, token.end
    for number in range(first, last + 1):
        start = left if number == first else 0
        end = right if number == last else len(token.line)
        marks.setdefault(number, []).append((start, end, style))
