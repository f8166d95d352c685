"""What a Python object is, as a digest: code, constants and values, however deep. None where that cannot be told."""

import builtins
import dis
import enum
import functools
import hashlib
import inspect
import struct
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from fedflat.core.checks import turning
from fedflat.core.imports import DIGEST

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), enum.Enum, PurePath)
_OWN = ("torch.", "numpy.", "builtins.", "fedflat.", "math.", "functools.", "operator.")
"""Code that the versions in a run's records stand for: its name is enough."""
_PURE = frozenset((
    "abc", "collections", "contextlib", "copy", "copyreg", "dataclasses", "enum", "fractions", "functools", "itertools",
    "math", "numbers", "operator", "re", "string", "types", "typing", "warnings", "weakref",
))  # fmt: skip
"""Modules of the standard library whose functions answer by what they are given alone."""
_OUTSIDE = frozenset((
    "open", "environ", "getenv", "globals", "locals", "vars", "eval", "exec", "compile", "input", "__import__",
    "__globals__", "__dict__", "__builtins__", "read_text", "read_bytes", "import_module", "__doc__", "__annotations__",
    "as_strided", "untyped_storage",
))  # fmt: skip
"""Names by which code reaches what no digest of it covers: files, the environment, names made as it runs, memory."""
_BUILTINS = frozenset(dir(builtins))
_FILES = frozenset(("load", "fromfile", "from_file", "fromregex", "loadtxt", "genfromtxt", "memmap", "open_memmap"))
"""The same, of numpy and torch."""
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
        _add(total, "plain", type(value).__qualname__, plain_text(value))
        # A path's attributes are caches that fill as it is used.
        if not isinstance(value, PurePath):
            _kind(value, functools.partial(_walk, total=total, seen=seen))
        return
    if id(value) in seen:
        _add(total, "again", seen[id(value)][0])
        return
    seen[id(value)] = (len(seen), value)  # kept alive, so that its address stays its own
    walk = functools.partial(_walk, total=total, seen=seen)
    if isinstance(value, Mapping):
        _add(total, "map", len(value))
        for key, inner in value.items():  # in its own order, which may be one of calls
            _walk_all((key, inner), walk)
        # What a defaultdict answers for a key that is not there is a part of how it acts.
        walk(getattr(value, "default_factory", None))
        _kind(value, walk)
    elif isinstance(value, (list, tuple)):
        _add(total, "list", type(value).__qualname__, len(value))
        _walk_all(value, walk)
        _kind(value, walk)
    elif isinstance(value, (set, frozenset)):
        _add(total, "set", len(value))
        # A set has no order of its own.
        _walk_all(sorted(value, key=repr), walk)
        _kind(value, walk)
    elif isinstance(value, types.CodeType):
        _code(value, total, walk)
    elif isinstance(value, functools.partial):
        _add(total, "partial")
        _walk_all((value.func, value.args, value.keywords, *filter(None, [vars(value)])), walk)
        _kind(value, walk)
    elif isinstance(value, types.MethodType):
        _add(total, "method")
        _walk_all((value.__func__, value.__self__), walk)
    elif isinstance(value, types.ModuleType):
        if not _is_known(value.__name__):  # what is read of a user's module is seen where its name stands in code alone
            raise _Unknown
        _add(total, "module", value.__name__)
    elif isinstance(value, types.FunctionType):
        _function(value, total, walk)
    elif isinstance(value, type):
        _class(value, total, walk)
    elif isinstance(value, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)):
        _add(total, "builtin", getattr(value, "__module__", ""), value.__qualname__)
        owner = getattr(value, "__self__", None)
        # ``[].append`` is bound to its list.
        if owner is not None and not isinstance(owner, types.ModuleType):
            walk(owner)
    elif type(value).__module__ == "typing" or isinstance(value, (types.GenericAlias, types.UnionType)):
        _add(total, "annotation", repr(value))
    elif isinstance(value, (staticmethod, classmethod, property)):
        _add(total, type(value).__name__)
        _walk_all((value.fget, value.fset) if isinstance(value, property) else (value.__func__,), walk)
    else:
        _instance(value, total, walk)


def plain_text(value: Any) -> str:
    """Return a plain value as its kind shows it: a class of the user's own may show less of a number than there is."""
    show: Any = next((kind.__repr__ for kind in (int, float, complex, str, bytes) if isinstance(value, kind)), repr)
    return str(show(value))


def _kind(value: Any, walk: Any) -> None:
    """Add the class and the attributes of what is more than a number, a text or a container of the language."""
    if type(value).__module__ not in sys.stdlib_module_names and not type(value).__module__.startswith(_OWN):
        walk(type(value))
        walk(vars(value) if hasattr(value, "__dict__") else None)


def _walk_all(values: Iterable[Any], walk: Any) -> None:
    for value in values:
        walk(value)


def _add(total: Any, *words: object) -> None:
    for word in words:
        text = str(word).encode()
        total.update(len(text).to_bytes(8, "big") + text)


def _named(value: Any, total: Any) -> bool:
    """Add a name; return whether it identifies the object by itself."""
    module = str(value.__module__).partition(DIGEST)[0]  # of a user's file the code counts, not its place or comments
    name = f"{module}.{value.__qualname__}"
    _add(total, type(value).__name__, name)
    return name.startswith(_OWN) and "<locals>" not in name


def _function(value: types.FunctionType, total: Any, walk: Any) -> None:
    # A packaged function is known by its name and the version; what it closes over is not, nor one that took the name.
    home = f"{value.__globals__.get('__name__')}."
    if _named(value, total) and not value.__closure__ and home.startswith(_OWN):
        return
    _walk_all((value.__code__, value.__defaults__, value.__kwdefaults__), walk)
    if vars(value):
        walk(vars(value))
    with turning(ValueError, _Unknown()):  # a name that is not bound yet
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
    _walk_all(inside, walk)
    names = sorted(names_in(value.__code__))
    for name in names:
        used = value.__globals__.get(name, names_in)
        if isinstance(used, types.ModuleType):
            _add(total, "module", used.__name__.partition(DIGEST)[0])
        elif used is not names_in:
            walk(used)
        elif name in vars(builtins) and name not in _BUILTINS:  # put there by somebody
            raise _Unknown
        if isinstance(used, types.ModuleType) and not _is_known(used.__name__):
            for inner in (vars(used)[n] for n in names if n in vars(used)):  # what the code may read of a user's module
                if isinstance(inner, types.ModuleType) and not _is_known(inner.__name__):
                    raise _Unknown
                walk(inner)
    _refuse_outside(value, names)


def _refuse_outside(value: types.FunctionType, names: Sequence[str]) -> None:
    """Raise _Unknown for code that may read what is not in it: files, the environment, modules that it imports."""
    home = str(value.__globals__.get("__name__", "")).partition(".")[0]
    used = {name.__name__ for name in map(value.__globals__.get, names) if isinstance(name, types.ModuleType)}
    modules = used.union(_imports_in(value.__code__))
    roots, users = {name.partition(".")[0] for name in modules}, {name for name in modules if not _is_known(name)}
    if home in sys.stdlib_module_names and home != "__main__":
        outside = home not in _PURE
    else:
        outside = not _OUTSIDE.isdisjoint(names) or not (roots & sys.stdlib_module_names) <= _PURE
        # A module of the user's that is imported inside the function was not walked through above.
        outside |= not users <= used or (bool(users) and "getattr" in names)
        outside |= bool(roots & {"torch", "numpy"}) and not _FILES.isdisjoint(names)
    if outside:
        raise _Unknown


def _imports_in(code: types.CodeType) -> Iterator[str]:
    """Yield the modules that code imports as it runs, with those of the functions inside it."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield str(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imports_in(inner)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that code uses, with those of the functions inside it."""
    return set(code.co_names).union(*(names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _is_known(module: str) -> bool:
    return f"{module}.".startswith(_OWN) or module.partition(".")[0] in sys.stdlib_module_names


def _code(value: types.CodeType, total: Any, walk: Any) -> None:
    _add(total, "code", value.co_name, value.co_argcount, value.co_kwonlyargcount, value.co_flags, value.co_code.hex())
    _walk_all((value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_consts), walk)


def _class(value: type, total: Any, walk: Any) -> None:
    if _named(value, total):
        return
    walk(value.__bases__ if _is_known(type(value).__module__) else (*value.__bases__, type(value)))
    skip = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__slotnames__"}
    for name, member in sorted(vars(value).items()):
        if name not in skip and not inspect.isgetsetdescriptor(member) and not inspect.ismemberdescriptor(member):
            _add(total, name)
            walk(member)


def _has_hidden(kind: type) -> bool:
    """Return whether objects of a class hold more than their attributes and slots: values of C that nobody can look
    into.
    """
    while kind.__base__ is not None:
        added = kind.__basicsize__ - kind.__base__.__basicsize__
        if kind.__itemsize__ or added > POINTER * (len(slots_of(kind)) + 2):
            return True
        kind = kind.__base__
    return False


POINTER = struct.calcsize("P")
"""Bytes of a reference: each slot has one, and so may ``__dict__`` and ``__weakref__``."""


def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names by which an object has the slots of a class: a private one has the class's name in it."""
    names = kind.__dict__.get("__slots__", ())
    names = (names,) if isinstance(names, str) else names
    mangled = (f"_{kind.__name__.lstrip('_')}{n}" if n[:2] == "__" != n[-2:] else n for n in names)
    return tuple(name for name in mangled if name not in ("__dict__", "__weakref__"))


def _instance(value: Any, total: Any, walk: Any) -> None:
    array = value
    if hasattr(value, "detach") and hasattr(value, "layout"):  # a torch tensor, without importing torch
        # Others have no one array of values.
        if str(value.layout) != "torch.strided":  # sparse tensors
            raise _Unknown
        array = value.detach().cpu().resolve_neg().resolve_conj().contiguous()
        if str(array.dtype) == "torch.bfloat16":  # NumPy has no such numbers
            _add(total, array.dtype)
            array = array.float()
        array = np.asarray(array)
        if vars(value):
            walk(vars(value))
        if type(value).__module__.partition(".")[0] != "torch":
            walk(type(value))
        if not value.is_contiguous():
            _add(total, value.stride())
    if isinstance(array, (np.ndarray, np.generic)):
        if array.dtype.hasobject or type(array).__module__ != "numpy":  # a mask is not in its bytes
            raise _Unknown
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        _add(total, "array", array.dtype, array.shape, content)
        return
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "Size", "layout"):
        _add(total, value)
        return
    state = getattr(value, "__dict__", None)
    slots = [name for kind in type(value).__mro__ for name in slots_of(kind) if hasattr(value, name)]
    if isinstance(value, functools._lru_cache_wrapper):
        # Not the cache: it only saves time. Nor the module's name, which has the place of a user's file in it.
        walk({name: inner for name, inner in vars(value).items() if name != "__module__"})
        return
    if (state is None and not slots) or _has_hidden(type(value)):
        raise _Unknown
    walk(type(value))
    fields = {name: inner for name, inner in (state or {}).items() if name != _MODE or "_modules" not in (state or {})}
    fields |= {name: getattr(value, name) for name in slots}
    for name in sorted(fields):
        _add(total, name)
        walk(fields[name])
