"""FA3's operator, called without the Python function around it, to save host time.

Builds of sgl-kernel differ in the operator's arguments, so they are placed by the names in its own schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fa_ref.api.errors import UnsupportedByProvider

OPERATOR = "torch.ops.sgl_kernel.fwd"

# FlashAttention's arguments, where the operator has another name for them.
_NAMES = dict(
    k_cache="k", v_cache="v", qv="q_v", cache_seqlens="seqused_k", cache_batch_idx="kv_batch_idx", causal="is_causal",
)  # fmt: skip
# What an argument is that the schema wants and a call does not give; other such arguments make an operator unknown.
_NEUTRAL = dict(
    q=None, k=None, v=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    attention_chunk=0, softcap=0.0, is_rotary_interleaved=True, num_splits=0, sm_margin=0, only_qv=False,
)  # fmt: skip
_NEEDED = ("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "num_splits")


class Operator:
    """The operator under FlashAttention's names for its arguments. Raises UnsupportedByProvider if it is another."""

    def __init__(self, op: Any) -> None:
        self._op, arguments = op, op._schema.arguments
        names = [argument.name for argument in arguments]
        strange = [a.name for a in arguments if a.name not in _NEUTRAL and not _may_be_left_out(a)]
        missing = [name for name in _NEEDED if name not in names]
        if strange or missing:
            both = (("takes", strange), ("has no", missing))
            says = " and ".join(f"{verb} {', '.join(wrong)}" for verb, wrong in both if wrong)
            raise UnsupportedByProvider(f"{OPERATOR} {says}: {_schema(names)}")
        self._neutral = [_NEUTRAL.get(a.name, a.default_value) for a in arguments]
        places = {name: place for place, name in enumerate(names)}
        self._places = _Places(places | {ours: places[theirs] for ours, theirs in _NAMES.items() if theirs in places})

    def prepared(self, **fixed: Any) -> Callable[[dict[str, Any]], Any]:
        """The call with these arguments; it takes the others as a dict, None for those left out."""
        line, places, op = self._neutral.copy(), self._places, self._op
        left, right = fixed.pop("window_size", (-1, -1))
        for name, value in fixed.items() | dict(window_size_left=left, window_size_right=right).items():
            if value is not None and not (name == "attention_chunk" and not value):
                line[places[name]] = _contiguous(value)

        def launch(given: dict[str, Any]) -> Any:
            call = line.copy()
            for name, value in given.items():
                if value is not None:
                    call[places[name]] = value
            return op(*call)

        return launch


class _Places(dict[str, int]):
    """Where each argument stands in a call."""

    def __missing__(self, name: str) -> int:
        raise UnsupportedByProvider(
            f"{OPERATOR} of the installed sgl-kernel takes no {name}; it takes {_schema(self)}. Leave it out, or "
            "install a newer build (python -m fa_fast.doctor)"
        )


def find_operator() -> Operator | str:
    """The operator of the imported sgl-kernel; or why it is called through the Python function around it."""
    fwd = getattr(torch.ops.sgl_kernel, "fwd", None)
    if fwd is None or "default" not in fwd.overloads():
        return f"this build registers no {OPERATOR}"
    try:
        return Operator(fwd.default)
    except UnsupportedByProvider as error:
        return str(error)


def _may_be_left_out(argument: Any) -> bool:
    return argument.has_default_value() or isinstance(argument.type, torch.OptionalType)


def _contiguous(value: Any) -> Any:
    """The operator wants the last dim of tables and lengths contiguous."""
    return value.contiguous() if isinstance(value, Tensor) and value.stride(-1) != 1 else value


def _schema(names: Iterable[str]) -> str:
    return ", ".join(names)
