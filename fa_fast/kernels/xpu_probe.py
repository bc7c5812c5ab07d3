"""What installed kernels get right, asked with problems so small that the answers are known in closed form.

Some builds accept a softcap and ignore it, or return an LSE that nothing wrote. No version tells, so the device is
asked once a process. A verdict takes away from a Capability, and never adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fa_fast.kernels.capability import Capability
from fa_fast.kernels.xpu_calls import PAGE, Kernels, Paged

HEADS, DIM = 2, 64
LOGITS, VALUES = (2.0, -1.0), (1.0, -1.0)  # of the two keys that every query sees
SINKS, CAP = (0.5, -1.0), 1.0  # a sink a head
TOLERANCE = 2e-2  # outputs are bf16 and at most 1


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """True where the answer was the known one, for decode and for prefill; `notes` say what came instead."""

    plain: bool
    softcap: bool
    sinks: bool
    lse: bool
    sinks_in_lse: bool
    merge: bool | None  # of two empty states, by the package's own function; None: it has none
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, bool | None]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "notes"]


def probe(kernels: Kernels, device: torch.device, merge: Callable[..., Any] | None = None) -> Verdicts:
    """Ask `kernels` on a device. merge: the package's own, with FlashAttention's (out, lse) pairs, lse (tokens, heads).

    An error that a kernel raises is a wrong answer. Waits for the device.
    """
    notes: list[str] = []

    def right(name: str, check: Callable[[int], str]) -> bool:
        for queries in (1, 2):  # decode and prefill are different kernels
            try:
                said = check(queries)
            except Exception as error:  # a build that lacks it may raise anything
                said = f"{type(error).__name__}: {error}"
            if said:
                notes.append(f"{name}, {queries} per sequence: {said.splitlines()[0]}")
                return False
        return True

    def ask(queries: int, **options: Any) -> tuple[Tensor, Tensor | None]:
        defaults: dict[str, Any] = dict(
            softmax_scale=0.125, causal=False, window_size=(-1, -1), softcap=0.0, return_softmax_lse=False
        )
        return kernels.paged(problem(device, queries), **(defaults | options))

    def output(queries: int, expected: list[float], **options: Any) -> str:
        out, _ = ask(queries, **options)
        return _differs(out.float().mean(dim=-1), [expected] * (3 * queries))

    def lse(queries: int, expected: list[float], **options: Any) -> str:
        _, found = ask(queries, return_softmax_lse=True, **options)
        if found is None or tuple(found.shape) != (HEADS, 3 * queries):
            return f"an LSE of shape {None if found is None else list(found.shape)}"
        return _differs(found.float().T, [expected] * (3 * queries))

    sinks = torch.tensor(SINKS, dtype=torch.bfloat16, device=device)
    capped = [CAP * math.tanh(x / CAP) for x in LOGITS]
    return Verdicts(
        plain=right("plain", lambda n: output(n, [_mean(LOGITS)] * HEADS)),
        softcap=right("softcap", lambda n: output(n, [_mean(capped)] * HEADS, softcap=CAP)),
        sinks=right("sinks", lambda n: output(n, [_mean(LOGITS, sink) for sink in SINKS], sinks=sinks)),
        lse=right("lse", lambda n: lse(n, [_lse(*LOGITS)] * HEADS)),
        sinks_in_lse=right("sinks_in_lse", lambda n: lse(n, [_lse(*LOGITS, s) for s in SINKS], sinks=sinks)),
        merge=None if merge is None else right("merge", lambda n: _merges(merge, n, device)),
        notes=tuple(notes),
    )


def problem(device: torch.device, queries: int) -> Paged:
    """Three sequences of `queries` queries over two keys each, whose logits are LOGITS and values VALUES, in bf16."""
    sequences = 3
    q = torch.zeros(sequences * queries, HEADS, DIM, dtype=torch.bfloat16, device=device)
    q[..., 0] = 8.0  # times the scale 1/8 it leaves a key's first number as the logit
    k_cache = torch.zeros(sequences + 1, PAGE, 1, DIM, dtype=torch.bfloat16, device=device)
    v_cache = torch.zeros_like(k_cache)
    for key, (logit, value) in enumerate(zip(LOGITS, VALUES, strict=True)):
        k_cache[:, key, :, 0] = logit
        v_cache[:, key] = value
    counts: dict[str, Any] = dict(dtype=torch.int32, device=device)
    return Paged(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=torch.tensor([[2], [3], [1]], **counts),
        cache_seqlens=torch.full((sequences,), len(LOGITS), **counts),
        cu_seqlens_q=torch.arange(sequences + 1, **counts) * queries,
        max_seqlen_q=queries,
        max_seqlen_k=len(LOGITS),
    )


def narrowed(table: Capability, verdicts: Verdicts) -> Capability:
    """What the table claims and the device confirmed. Raises UnsupportedByProvider if plain attention is wrong."""
    if not verdicts.plain:
        said = "; ".join(verdicts.notes)
        raise table.refuse(f"attention: the installed kernels failed a problem of two keys ({said})", "no call at all")
    return replace(
        table,
        softcap=table.softcap and verdicts.softcap,
        sinks=table.sinks and verdicts.sinks,
        lse=table.lse and verdicts.lse,
        sinks_in_lse=table.sinks_in_lse and verdicts.sinks_in_lse,
    )


_FOUND: dict[
    tuple[int, str], tuple[Any, Verdicts]
] = {}  # by module and device; the module is kept, so its id is its own


def probe_once(module: Any, kernels: Kernels, device: torch.device, merge: Callable[..., Any] | None) -> Verdicts:
    """`probe`, once a process for an imported module and a device."""
    key = (id(module), str(device))
    if key not in _FOUND:
        _FOUND[key] = (module, probe(kernels, device, merge))
    return _FOUND[key][1]


def of_all_devices(module: Any, own: Verdicts) -> Verdicts:
    """`own` with what the other devices of the process got wrong: a provider has one capability record for all of them.

    A device that fails plain attention has no backend, so it says nothing about the others.
    """
    others = [verdicts for held, verdicts in _FOUND.values() if held is module and verdicts.plain]
    wrong: dict[str, Any] = {name: False for one in others for name, right in one.rows() if right is False}
    return replace(own, **wrong)


def _mean(logits: tuple[float, ...] | list[float], sink: float | None = None) -> float:
    weights = [math.exp(x) for x in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink))
    return sum(weight * value for weight, value in zip(weights, VALUES, strict=True)) / total


def _lse(*logits: float) -> float:
    return math.log(sum(math.exp(x) for x in logits))


def _merges(merge: Callable[..., Any], tokens: int, device: torch.device) -> str:
    out = torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device)
    lse = torch.full((tokens, HEADS), -torch.inf, device=device)
    merged, _ = merge(out, lse, out.clone(), lse.clone())
    return _differs(merged.float().mean(dim=-1), [[0.0] * HEADS] * tokens)


def _differs(found: Tensor, expected: list[list[float]]) -> str:
    """What was found, in words, unless it is what was expected; NaN differs."""
    known = torch.tensor(expected)
    found = found.detach().cpu()
    if found.shape == known.shape and bool(((found - known).abs() <= TOLERANCE).all()):
        return ""
    return f"{found.flatten()[:4].tolist()} for {known.flatten()[:4].tolist()}"


__all__ = ["Verdicts", "narrowed", "of_all_devices", "probe", "probe_once", "problem"]
