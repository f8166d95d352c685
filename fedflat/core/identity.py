"""What a Python object is, as a digest: code, constants and values, however deep. None where that cannot be told."""

import builtins
import dis
import enum
import functools
import hashlib
import inspect
import itertools
import struct
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
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
    walk = _Walk()
    try:
        walk.over(value)
    except (_Unknown, RecursionError):
        return None
    return walk.total.hexdigest()


class _Walk:
    """A hash that objects are added to, with all that they hold."""

    def __init__(self) -> None:
        self.total = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, *words: object) -> None:
        """Add words to the hash, each behind its length."""
        for word in words:
            text = str(word).encode()
            self.total.update(len(text).to_bytes(8, "big") + text)

    def over(self, *values: Any) -> None:
        """Add objects to the hash; of one met before only its number, so that cycles end."""
        for value in values:
            if isinstance(value, _PLAIN):
                self.add("plain", type(value).__qualname__, plain_text(value))
                # A path's attributes are caches that fill as it is used.
                if not isinstance(value, PurePath):
                    self._kind(value)
            elif id(value) in self._seen:
                self.add("again", self._seen[id(value)][0])
            else:
                self._seen[id(value)] = (len(self._seen), value)  # kept alive, so that its address stays its own
                self._inside(value)

    def _inside(self, value: Any) -> None:
        """Add what an object is made of."""
        if isinstance(value, types.CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            counts = value.co_argcount, value.co_kwonlyargcount, value.co_flags
            self.add("code", value.co_name, *counts, value.co_code.hex())
            self.over(*names, value.co_consts)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, Mapping):
            self.add("map", len(value))
            self.over(*itertools.chain.from_iterable(value.items()))  # in its own order, which may be one of calls
            # What a defaultdict answers for a key that is not there is a part of how it acts.
            self.over(getattr(value, "default_factory", None))
        elif isinstance(value, (list, tuple)):
            self.add("list", type(value).__qualname__, len(value))
            self.over(*value)
        elif isinstance(value, (set, frozenset)):
            self.add("set", len(value))
            # A set has no order of its own.
            self.over(*sorted(value, key=repr))
        elif isinstance(value, functools.partial):
            self.add("partial")
            self.over(value.func, value.args, value.keywords, *filter(None, [vars(value)]))
        elif isinstance(value, types.MethodType):
            self.add("method")
            self.over(value.__func__, value.__self__)
        elif isinstance(value, types.ModuleType):
            # What is read of a user's module is seen where its name stands in code alone.
            if not _is_known(value.__name__):
                raise _Unknown
            self.add("module", value.__name__)
        elif isinstance(value, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)):
            self.add("builtin", getattr(value, "__module__", ""), value.__qualname__)
            owner = getattr(value, "__self__", None)
            # ``[].append`` is bound to its list.
            if owner is not None and not isinstance(owner, types.ModuleType):
                self.over(owner)
        elif type(value).__module__ == "typing" or isinstance(value, (types.GenericAlias, types.UnionType)):
            self.add("annotation", repr(value))
        elif isinstance(value, (staticmethod, classmethod, property)):
            self.add(type(value).__name__)
            self.over(*((value.fget, value.fset) if isinstance(value, property) else (value.__func__,)))
        else:
            self._instance(value)
        if isinstance(value, (Mapping, list, tuple, set, frozenset, functools.partial)):
            self._kind(value)

    def _kind(self, value: Any) -> None:
        """Add the class and the attributes of what is more than a number, a text or a container of the language."""
        if type(value).__module__ not in sys.stdlib_module_names and not type(value).__module__.startswith(_OWN):
            self.over(type(value), vars(value) if hasattr(value, "__dict__") else None)

    def _named(self, value: Any) -> bool:
        """Add a name; return whether it identifies the object by itself."""
        # Of a user's file the code counts, not its place or comments.
        name = f"{str(value.__module__).partition(DIGEST)[0]}.{value.__qualname__}"
        self.add(type(value).__name__, name)
        return name.startswith(_OWN) and "<locals>" not in name

    def _function(self, value: types.FunctionType) -> None:
        # A packaged function is known by its name and the version; what it closes over is not, nor one that took the
        # name.
        home = f"{value.__globals__.get('__name__')}."
        if self._named(value) and not value.__closure__ and home.startswith(_OWN):
            return
        self.over(value.__code__, value.__defaults__, value.__kwdefaults__, *filter(None, [vars(value)]))
        with turning(ValueError, _Unknown()):  # a name that is not bound yet
            inside = [cell.cell_contents for cell in value.__closure__ or ()]
        self.over(*inside)
        names = sorted(names_in(value.__code__))
        for name in names:
            used = value.__globals__.get(name, names_in)
            if isinstance(used, types.ModuleType):
                self.add("module", used.__name__.partition(DIGEST)[0])
                # What the code may read of a user's module.
                inner = [] if _is_known(used.__name__) else [vars(used)[n] for n in names if n in vars(used)]
                self.over(*inner)
            elif used is not names_in:
                self.over(used)
            elif name in vars(builtins) and name not in _BUILTINS:  # put there by somebody
                raise _Unknown
        _refuse_outside(value, names)

    def _class(self, value: type) -> None:
        if self._named(value):
            return
        self.over(value.__bases__ if _is_known(type(value).__module__) else (*value.__bases__, type(value)))
        skip = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
        for name, member in sorted(vars(value).items()):
            descriptor = inspect.isgetsetdescriptor(member) or inspect.ismemberdescriptor(member)
            if name not in {*skip, "__slotnames__"} and not descriptor:
                self.add(name)
                self.over(member)

    def _tensor(self, value: Any) -> np.ndarray:
        """Add what a torch tensor has besides its numbers; return these. Nothing here imports torch."""
        if str(value.layout) != "torch.strided":  # a sparse one has no one array of values
            raise _Unknown
        array = value.detach().cpu().resolve_neg().resolve_conj().contiguous()
        if str(array.dtype) == "torch.bfloat16":  # NumPy has no such numbers
            self.add(array.dtype)
            array = array.float()
        if vars(value):
            self.over(vars(value))
        if type(value).__module__.partition(".")[0] != "torch":
            self.over(type(value))
        if not value.is_contiguous():
            self.add(value.stride())
        return np.asarray(array)

    def _instance(self, value: Any) -> None:
        if hasattr(value, "detach") and hasattr(value, "layout"):
            value = self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            if value.dtype.hasobject or type(value).__module__ != "numpy":  # a mask is not in its bytes
                raise _Unknown
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            self.add("array", value.dtype, value.shape, content)
            return
        if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "Size", "layout"):
            self.add(value)
            return
        state = getattr(value, "__dict__", None)
        slots = [name for kind in type(value).__mro__ for name in slots_of(kind) if hasattr(value, name)]
        if isinstance(value, functools._lru_cache_wrapper):
            # Not the cache: it only saves time. Nor the module's name, which has the place of a user's file in it.
            self.over({name: inner for name, inner in vars(value).items() if name != "__module__"})
            return
        if (state is None and not slots) or _has_hidden(type(value)):
            raise _Unknown
        self.over(type(value))
        fields = {**(state or {}), **{name: getattr(value, name) for name in slots}}
        if "_modules" in (state or {}):
            fields.pop(_MODE, None)
        for name in sorted(fields):
            self.add(name)
            self.over(fields[name])


def plain_text(value: Any) -> str:
    """Return a plain value as its kind shows it: a class of the user's own may show less of a number than there is."""
    show: Any = next((kind.__repr__ for kind in (int, float, complex, str, bytes) if isinstance(value, kind)), repr)
    return str(show(value))


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
