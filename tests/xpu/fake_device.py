"""A problem moved to a device that is not there: tensors of shape, dtype and device "xpu", without values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

ON_HOST = ("seq_lens_cpu",)
DEVICE = torch.device("xpu", 0)


class HostTensor(Tensor):
    """A tensor of the host: it keeps its values inside a FakeTensorMode, and reading them waits for no device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unset_fake_temporarily():
            return super().__torch_function__(func, types, args, kwargs or {})


def moved(given: Any) -> Any:
    """A copy on the fake device, inside a FakeTensorMode: dataclasses, pools, containers, and what is in them."""
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=DEVICE)
    if isinstance(given, torch.device):
        return DEVICE
    if isinstance(given, list | tuple):
        return type(given)(map(moved, given))
    if is_dataclass(given) and not isinstance(given, type):
        changes = {f.name: _field(f.name, getattr(given, f.name)) for f in fields(given) if f.init}
        return replace(given, **changes)
    if type(given).__module__.startswith("fa_ref") and hasattr(given, "__dict__") and not isinstance(given, str | int):
        other = copy.copy(given)
        other.__dict__.update({name: moved(value) for name, value in vars(given).items()})
        return other
    return given


def _field(name: str, value: Any) -> Any:
    if name == "device":
        return str(DEVICE)
    if name in ON_HOST and isinstance(value, Tensor):
        return value.as_subclass(HostTensor)
    return moved(value)


class Indexing(TorchFunctionMode):
    """x[...], and what else asks for the device's driver first, by the ops below it, which have a fake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is Tensor.__getitem__ and not isinstance(args[0], HostTensor):
            return _picked(*args)
        if func is Tensor.__setitem__ and not isinstance(args[0], HostTensor):
            return _put(*args)
        return _GUARDED.get(func, func)(*args, **named)


# Methods that ask for the device's driver, and the ops below them, which do not.
_GUARDED: dict[Any, Any] = {
    Tensor.contiguous: torch.ops.aten.contiguous.default,
    Tensor.__invert__: torch.ops.aten.bitwise_not.default,
}


def _picked(x: Tensor, key: Any) -> Tensor:
    x, index = _viewed(x, key)
    return torch.ops.aten.index.Tensor(x, index) if index else x


def _put(x: Tensor, key: Any, value: Any) -> None:
    x, index = _viewed(x, key)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    x.index_put_(index, value.to(x.dtype)) if index else x.copy_(value)


def _viewed(x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that ints, slices, None and ... make of x, and the tensors of the key at its dims."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(k.ndim if isinstance(k, Tensor) and k.dtype == torch.bool else k is not None for k in keys)
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.ndim - taken + 1)
    dim, index = 0, []
    for k in keys:
        if isinstance(k, int):
            x = torch.ops.aten.select.int(x, dim, k)
            continue
        if isinstance(k, Tensor):
            index += [None] * (dim - len(index)) + [k]
        elif k is None:
            x = x.unsqueeze(dim)
        else:
            x = torch.ops.aten.slice.Tensor(x, dim, k.start, k.stop, k.step or 1)
        dim += k.ndim if isinstance(k, Tensor) and k.dtype == torch.bool else 1
    return x, index


@contextmanager
def fake_xpu() -> Iterator[None]:
    """Tensors made inside have no values: whatever asks for one, a sync on the real device, raises."""
    with FakeTensorMode(allow_non_fake_inputs=False), Indexing():
        yield
