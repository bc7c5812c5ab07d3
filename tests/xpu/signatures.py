"""The parameters that Intel builds were seen to take, as signatures that calls bind against.

Which commit and which release they were read from is said in tests/xpu/emulated_sgl.py and emulated_vllm.py.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

RECORD: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "xpu_signatures.json").read_text())
GENERATIONS = ("2026-08", "2026-10")
_CONSTANTS = {"DEFAULT_FA_VERSION": 2}


def signature(package: str, function: str) -> Signature:
    """The recorded signature of a package's function; both generations of sgl_kernel have the same ones."""
    return Signature([_parameter(text) for text in RECORD[package][function]])


def with_signature(package: str, function: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes exactly what the recorded one takes, and hands it to `compute` by keyword.

    >>> with_signature("sgl_kernel", "merge_state", print)(1, 2, 3, s_c=4)
    Traceback (most recent call last):
    TypeError: missing a required argument: 's_b'
    """
    bound_by = signature(package, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = bound_by.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute(**bound.arguments)

    named: Any = functools.update_wrapper(call, compute)
    named.__name__ = named.__qualname__ = function
    named.__signature__ = bound_by
    del named.__wrapped__
    return named


def _parameter(text: str) -> Parameter:
    name, equals, default = text.partition("=")
    if not equals:
        return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)
    value = _CONSTANTS[default] if default in _CONSTANTS else ast.literal_eval(default)
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value)
