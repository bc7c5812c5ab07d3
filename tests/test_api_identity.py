"""The two packages export the same names with the same signatures, and every name is documented."""

from __future__ import annotations

import dataclasses
import enum
import inspect

import pytest

import fa_fast
import fa_ref

PACKAGES = [fa_ref, fa_fast]
NAMES = sorted(set(fa_ref.__all__) & set(fa_fast.__all__))
EXPORTS = [(package, name) for package in PACKAGES for name in package.__all__]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(fa_ref, name))]


def export_id(value: object) -> str:
    return getattr(value, "__name__", str(value))


def signature(function: object) -> list[tuple[str, str, str]]:
    """(name, kind, default) of each parameter. Annotations may name a package's own types: left out."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, _default(p.default)) for p in parameters]


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else repr(value)


def public_methods(cls: type) -> dict[str, object]:
    """Methods and properties a class or its bases (short of object) define, by name; and its constructor."""
    found = {}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") and name not in {"__init__", "__call__"}:
            continue
        if inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property):
            found[name] = member
    return found


def test_both_packages_export_the_same_names():
    assert sorted(fa_ref.__all__) == sorted(fa_fast.__all__)


@pytest.mark.parametrize("package", PACKAGES, ids=export_id)
def test_names_are_exported_once_and_in_dir(package):
    assert len(package.__all__) == len(set(package.__all__))
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize(("package", "name"), EXPORTS, ids=export_id)
def test_every_name_exists_and_has_a_docstring(package, name):
    value = getattr(package, name)
    doc = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    assert doc is not None
    assert len(doc.strip()) > 20
    # A dataclass without a docstring gets its own signature for one.
    assert not doc.startswith(f"{name}(")


@pytest.mark.parametrize("package", PACKAGES, ids=export_id)
def test_an_unknown_name_is_an_attribute_error_that_names_it(package):
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_same_kind_of_thing_in_both(name):
    ref, fast = getattr(fa_ref, name), getattr(fa_fast, name)
    assert inspect.isclass(ref) == inspect.isclass(fast)
    assert callable(ref) == callable(fast)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(fa_ref, name))])
def test_a_function_has_one_signature(name):
    assert signature(getattr(fa_ref, name)) == signature(getattr(fa_fast, name))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_same_public_methods_with_the_same_signatures(name):
    ref, fast = public_methods(getattr(fa_ref, name)), public_methods(getattr(fa_fast, name))
    assert sorted(ref) == sorted(fast)
    for method, member in ref.items():
        if isinstance(member, property):
            assert isinstance(fast[method], property), method
        else:
            assert signature(member) == signature(fast[method]), method


@pytest.mark.parametrize("name", [name for name in CLASSES if dataclasses.is_dataclass(getattr(fa_ref, name))])
def test_a_dataclass_has_the_same_fields(name):
    ref, fast = dataclasses.fields(getattr(fa_ref, name)), dataclasses.fields(getattr(fa_fast, name))
    assert [(f.name, str(f.type), f.kw_only) for f in ref] == [(f.name, str(f.type), f.kw_only) for f in fast]


@pytest.mark.parametrize("name", [name for name in CLASSES if issubclass(getattr(fa_ref, name), enum.Enum)])
def test_an_enum_has_the_same_members(name):
    ref, fast = getattr(fa_ref, name), getattr(fa_fast, name)
    assert list(ref.__members__) == list(fast.__members__)


@pytest.mark.parametrize("change", ["renamed", "reordered", "default"])
def test_the_comparison_sees_a_changed_signature(change):
    def original(q, k, *, softcap=0.0): ...

    def renamed(q, keys, *, softcap=0.0): ...

    def reordered(k, q, *, softcap=0.0): ...

    def default(q, k, *, softcap=None): ...

    changed = {"renamed": renamed, "reordered": reordered, "default": default}[change]
    assert signature(original) != signature(changed)
