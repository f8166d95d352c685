"""What a Python object is, as a digest: code, constants and values, however deep. None where that cannot be told."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), enum.Enum, PurePath)
_OWN = ("torch.", "numpy.", "builtins.", "fedflat.", "math.", "functools.", "operator.")
"""Code that the versions in a run's records stand for: its name is enough."""
_NOT_THE_OBJECT = ("training", "grad")
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
    elif isinstance(value, (list, tuple)):
        _add(total, "list", type(value).__qualname__, len(value))
        _each(value, walk)
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
    elif isinstance(value, (staticmethod, classmethod, property)):
        _add(total, type(value).__name__)
        _each((value.fget, value.fset) if isinstance(value, property) else (value.__func__,), walk)
    else:
        _instance(value, total, walk)


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
    try:
        _each((cell.cell_contents for cell in value.__closure__ or ()), walk)
    except ValueError as error:  # a name that is not bound yet
        raise _Unknown from error
    used = [name for name in value.__code__.co_names if name in value.__globals__]
    _each((value.__globals__[name] for name in sorted(used)), walk)


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
        array = np.asarray(array.float() if str(array.dtype) == "torch.bfloat16" else array)
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
    kept = {name: inner for name, inner in (state or {}).items() if name not in _NOT_THE_OBJECT}
    walk(kept | {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__")})
