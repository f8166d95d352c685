"""What a Python object is, as a digest: code, constants and values, however deep. None where that cannot be told."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), enum.Enum, PurePath)
_OWN = ("torch.", "numpy.", "builtins.", "fedflat.", "math.", "functools.", "operator.")
"""Code that the versions in a run's records stand for: its name is enough."""
_MODE = "training"
"""The engine sets a module's mode."""


class _Unknown(Exception):
    """An object whose identity cannot be told."""


def identity_of(value: Any) -> str | None:
    """SHA-256 (hex) over an object as it acts: dataclass fields and attributes, tensors and arrays by content,
    functions by name, bytecode, constants, defaults and what they close over, classes by name and methods.

    Equal digests: the same object in every process. None: something in it (an open file, a C object, a generator)
    cannot be looked into.
    """
    total = hashlib.sha256()
    try:
        _walk(value, total, {})
    except (_Unknown, RecursionError):
        return None
    return total.hexdigest()


def _walk(value: Any, total: Any, seen: dict[int, tuple[int, Any]]) -> None:
    """Add an object to the hash; one met before adds its number only, so that cycles end."""
    if isinstance(value, _PLAIN):
        _add(total, "plain", type(value).__qualname__, repr(value))
        if not isinstance(value, (enum.Enum, PurePath)):
            _kind(value, functools.partial(_walk, total=total, seen=seen))
        return
    if id(value) in seen:
        _add(total, "again", seen[id(value)][0])
        return
    seen[id(value)] = (len(seen), value)  # kept alive, so that its address stays its own
    walk = functools.partial(_walk, total=total, seen=seen)
    if isinstance(value, Mapping):
        _add(total, "map", len(value))
        for key in sorted(value, key=repr):
            walk(key)
            walk(value[key])
        _kind(value, walk)
    elif isinstance(value, (list, tuple)):
        _add(total, "list", type(value).__qualname__, len(value))
        _each(value, walk)
        _kind(value, walk)
    elif isinstance(value, (set, frozenset)):
        _add(total, "set", len(value))
        _each(sorted(value, key=repr), walk)
    elif isinstance(value, types.CodeType):
        _code(value, total, walk)
    elif isinstance(value, functools.partial):
        _add(total, "partial")
        _each((value.func, value.args, value.keywords), walk)
    elif isinstance(value, types.MethodType):
        _add(total, "method")
        _each((value.__func__, value.__self__), walk)
    elif isinstance(value, types.ModuleType):
        _add(total, "module", value.__name__)
    elif isinstance(value, types.FunctionType):
        _function(value, total, walk)
    elif isinstance(value, type):
        _class(value, total, walk)
    elif isinstance(value, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)):
        _add(total, "builtin", getattr(value, "__module__", ""), value.__qualname__)
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            walk(owner)
    elif isinstance(value, (staticmethod, classmethod, property)):
        _add(total, type(value).__name__)
        _each((value.fget, value.fset) if isinstance(value, property) else (value.__func__,), walk)
    else:
        _instance(value, total, walk)


def _kind(value: Any, walk: Any) -> None:
    """Add the class and the attributes of what is more than a number, a text or a container of the language."""
    if type(value).__module__ not in sys.stdlib_module_names and not type(value).__module__.startswith(_OWN):
        walk(type(value))
        walk(vars(value) if hasattr(value, "__dict__") else None)


def _held(name: str, value: Any, total: Any, walk: Any) -> None:
    """Add something that an object or a function has; where it is a map, with its order, which may be one of calls."""
    if isinstance(value, Mapping):
        _add(total, "order", name, *map(repr, value))
    walk(value)


def _each(values: Iterable[Any], walk: Any) -> None:
    for value in values:
        walk(value)


def _add(total: Any, *words: object) -> None:
    for word in words:
        text = str(word).encode()
        total.update(len(text).to_bytes(8, "big") + text)


def _named(value: Any, total: Any) -> bool:
    """Add a name; whether the name says it all."""
    name = f"{value.__module__}.{value.__qualname__}"
    _add(total, type(value).__name__, name)
    return name.startswith(_OWN) and "<locals>" not in name


def _function(value: types.FunctionType, total: Any, walk: Any) -> None:
    if _named(value, total) and not value.__closure__:
        return
    walk(value.__code__)
    walk(value.__defaults__)
    walk(value.__kwdefaults__)
    if vars(value):
        walk(vars(value))
    try:
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError as error:  # a name that is not bound yet
        raise _Unknown from error
    for inner in inside:
        _held("", inner, total, walk)
    names = sorted(_names_in(value.__code__))
    for name in names:
        used = value.__globals__.get(name, _names_in)
        if used is not _names_in:
            _held(name, used, total, walk)
        if isinstance(used, types.ModuleType) and not _known(used.__name__):
            for inner in (n for n in names if n in vars(used)):  # what the code may read of a user's module
                _held(inner, vars(used)[inner], total, walk)


def _names_in(code: types.CodeType) -> set[str]:
    """Names that code uses, with those of the functions inside it."""
    return set(code.co_names).union(*(_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _known(module: str) -> bool:
    return f"{module}.".startswith(_OWN) or module.partition(".")[0] in sys.stdlib_module_names


def _code(value: types.CodeType, total: Any, walk: Any) -> None:
    _add(total, "code", value.co_name, value.co_argcount, value.co_kwonlyargcount, value.co_flags, value.co_code.hex())
    _each((value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_consts), walk)


def _class(value: type, total: Any, walk: Any) -> None:
    if _named(value, total):
        return
    walk(value.__bases__)
    skip = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
    for name, member in sorted(vars(value).items()):
        if name not in skip and not inspect.isgetsetdescriptor(member) and not inspect.ismemberdescriptor(member):
            _add(total, name)
            walk(member)


def _instance(value: Any, total: Any, walk: Any) -> None:
    array = value
    if hasattr(value, "detach") and hasattr(value, "layout"):  # a torch tensor, without importing torch
        array = value.detach().cpu().contiguous()
        if str(array.dtype) == "torch.bfloat16":  # NumPy has no such numbers
            _add(total, array.dtype)
            array = array.float()
        array = np.asarray(array)
        if vars(value):
            walk(vars(value))
    if isinstance(array, (np.ndarray, np.generic)):
        if array.dtype.hasobject:
            raise _Unknown
        _add(
            total, "array", array.dtype, array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        )
        return
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "Size", "layout"):
        _add(total, value)
        return
    state = getattr(value, "__dict__", None)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    if state is None and not slots:
        raise _Unknown
    walk(type(value))
    kept = {name: inner for name, inner in (state or {}).items() if name != _MODE or "_modules" not in (state or {})}
    kept |= {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__")}
    for name in sorted(kept):
        _add(total, name)
        _held(name, kept[name], total, walk)
