"""Everything that an object holds, watched: whether anything reachable from it has changed, and where.

A model or a method may keep state in places nobody registered: a plain attribute, a list, a generator, a hook's
closure, a class. Such state carries one client's data to the next one, so all of it is compared with what it was.
Out of reach are module-level globals and memory inside compiled extensions.
"""

from __future__ import annotations

import functools
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LARGE = 1_000_000
"""Entries of a tensor from which a digest is kept of it, and no copy."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice)
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "collections", "functools", "abc", "transformers")
"""Packages whose functions and classes hold nothing of a client's (their objects may)."""
_OPAQUE = ("logging", "threading", "_thread", "weakref", "types", "torch._ops", "torch._C", "enum", "importlib")


def snapshot(root: object, skip: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Path -> value of every leaf reachable from ``root``; tensors in ``skip`` count as always the same."""
    skipped = {id(tensor) for tensor in skip}
    return {path: _value(leaf, skipped) for path, leaf, children in _walk(root) if children is None}


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first path whose value is not the same in both; None if there is none."""
    for path in {**before, **after}:
        if path not in before or path not in after or not _same(before[path], after[path]):
            return path
    return None


def global_generators() -> tuple[bytes, tuple[Any, ...], tuple[Any, ...]]:
    """The states of the generators that belong to nobody: torch's (GPUs' included), NumPy's, Python's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    own = [torch.default_generator.get_state(), *map(torch.cuda.get_rng_state, devices)]
    name, *numbers = np.random.get_state()  # noqa: NPY002 (looked at, not drawn from)
    legacy = (name, *(n.tobytes() if isinstance(n, np.ndarray) else n for n in numbers))
    return b"".join(state.numpy().tobytes() for state in own), legacy, random.getstate()


class Held:
    """What ``root`` held when this was made. skip: tensors that may change, such as bound parameters.

    restored: tensors that somebody else puts back; only what is in them is looked at, not whether they were written to.
    """

    def __init__(self, root: object, skip: Iterable[Tensor] = (), restored: Iterable[Tensor] = ()) -> None:
        self.root, self._skip, self._restored = root, list(skip), list(restored)
        self._index(snapshot(root, self._skip))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.root, self._skip, self._restored

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def _index(self, values: dict[str, Any]) -> None:
        self._values = values
        silent = {id(tensor) for tensor in (*self._skip, *self._restored)}
        self._containers: list[tuple[Callable[[], list[Any]], list[Any]]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._others: list[tuple[Any, Any]] = []
        for _, thing, children in _walk(self.root):
            reader = None if children is None else _reader(thing)
            if reader is not None:
                self._containers.append((reader, reader()))
            elif isinstance(thing, Tensor):
                if id(thing) not in silent and not thing.is_inference():
                    self._tensors.append((thing, thing._version))
            elif children is None and not isinstance(thing, _PLAIN):
                self._others.append((thing, _value(thing, set())))

    def changed(self, *, everything: bool = False) -> str | None:
        """Where something is not as it was, or None. everything: compare the entries of all tensors too, which finds
        what was written behind autograd's back (``.data``, an array on the same memory)."""
        if not everything and self._untouched():
            return None
        now = snapshot(self.root, self._skip)
        found = difference(self._values, now)
        if found is None and not self._untouched():
            self._index(now)  # the same values in new objects
        return found

    def _untouched(self) -> bool:
        """Whether all objects are the very same, and no counter of writes has moved."""
        for read, saved in self._containers:
            now = read()
            if len(now) != len(saved) or not all(map(operator.is_, now, saved)):
                return False
        if any(tensor._version != version for tensor, version in self._tensors):
            return False
        return all(_same(_value(thing, set()), value) for thing, value in self._others)


def _walk(root: object) -> Iterator[tuple[str, Any, list[tuple[str, Any]] | None]]:
    """Every object once, with its path, and its children (None for a leaf)."""
    seen: dict[int, object] = {}  # holds on to what children() makes, so that no number is used twice
    waiting: deque[tuple[str, Any]] = deque([("", root)])
    while waiting:
        path, thing = waiting.popleft()
        if isinstance(thing, _PLAIN):
            yield path, thing, None
            continue
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        children = _children(thing)
        yield path, thing, children
        for label, child in children or ():
            waiting.append((f"{path}{label}".lstrip("."), child))


def _children(thing: Any) -> list[tuple[str, Any]] | None:
    """What a thing holds, by label; None for a leaf."""
    if isinstance(thing, (Tensor, *_STATEFUL)):
        return None
    if isinstance(thing, Mapping):
        return [(f"[{_label(key)}]", value) for key, value in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [(f"[{index}]", value) for index, value in enumerate(thing)]
    if isinstance(thing, set | frozenset):
        return [(f"{{{_label(value)}}}", value) for value in sorted(thing, key=repr)]
    if isinstance(thing, functools.partial):
        return [("()", thing.func), (".args", thing.args), (".keywords", thing.keywords)]
    if isinstance(thing, type):
        return _of_class(thing)
    if isinstance(thing, types.CellType):
        return [("", thing.cell_contents)] if _filled(thing) else None
    if isinstance(thing, types.MethodType):
        return [("", thing.__self__), ("()", thing.__func__)]
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    return _of_object(thing)


def _of_object(thing: Any) -> list[tuple[str, Any]] | None:
    kind = type(thing)
    if kind.__module__.startswith(_OPAQUE) or callable(getattr(thing, "cache_info", None)):
        return None
    whole = [] if _library(kind.__module__) else [(f"<{kind.__name__}>", kind)]
    if isinstance(thing, nn.Module):
        inner = ("_parameters", "_buffers", "_modules")
        own = [(f".{name}", value) for held in inner for name, value in vars(thing)[held].items()]
        rest = [(f".{name}", value) for name, value in vars(thing).items() if name not in inner]
        return [*own, *rest, *whole]
    slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(thing, name)]
    if not hasattr(thing, "__dict__") and not slots:
        return None
    held = [(f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items()]
    return [*held, *((f".{name}", getattr(thing, name)) for name in slots), *whole]


def _slots(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _of_class(kind: type) -> list[tuple[str, Any]] | None:
    """Data that a user's class keeps for all its objects, and what its functions keep."""
    if _library(kind.__module__):
        return None
    own = [(f".{name}", value) for name, value in _data_of(kind)]
    return [*own, *((f"<{base.__name__}>", base) for base in kind.__bases__ if not _library(base.__module__))]


def _data_of(kind: type) -> list[tuple[str, Any]]:
    skipped = (property, functools.cached_property, staticmethod, classmethod, type)
    return [
        (name, value)
        for name, value in vars(kind).items()
        if (not name.startswith(("__", "_abc")) or name in ("__init__", "__call__")) and not isinstance(value, skipped)
    ]


def _of_function(thing: types.FunctionType) -> list[tuple[str, Any]] | None:
    """A function's closure, defaults and attributes."""
    if _library(thing.__module__ or ""):
        return None
    found: list[tuple[str, Any]] = [(f".{n}", c) for n, c in zip(thing.__code__.co_freevars, thing.__closure__ or ())]
    found += [(f".defaults[{index}]", value) for index, value in enumerate(thing.__defaults__ or ())]
    return found + [(f".{name}", value) for name, value in {**(thing.__kwdefaults__ or {}), **vars(thing)}.items()]


def _filled(cell: types.CellType) -> bool:
    try:
        return not isinstance(cell.cell_contents, type)
    except ValueError:
        return False


def _library(module: str) -> bool:
    return module.split(".")[0] in _LIBRARIES


def _reader(thing: Any) -> Callable[[], list[Any]] | None:
    """What reads the children of a container that can change, in one go; None where parents see every change."""
    if isinstance(thing, Mapping):
        return lambda: [*thing.keys(), *thing.values()]
    if isinstance(thing, list | deque | set):
        return lambda: list(thing)
    if isinstance(thing, nn.Module):
        own = vars(thing)
        held = own["_parameters"], own["_buffers"], own["_modules"]
        return lambda: [*own, *own.values(), *held[0].values(), *held[1].values(), *held[2].values()]
    if isinstance(thing, tuple | frozenset):
        return None
    if isinstance(thing, type):
        return lambda: [part for pair in _data_of(thing) for part in pair]
    return lambda: [value for pair in _children(thing) or () for value in pair[1:]]


_STATEFUL = (
    torch.Generator,
    np.ndarray,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
    bytearray,
    memoryview,
)
"""Kinds whose state is read by ``_value``."""


def _label(key: Any) -> str:
    return str(key) if isinstance(key, str | int | float | bool | None) else type(key).__name__


def _value(leaf: Any, skipped: set[int]) -> Any:
    """What is compared of a leaf; two of them by ``_same``."""
    if isinstance(leaf, Tensor):
        return "skipped" if id(leaf) in skipped else _entries(leaf)
    if isinstance(leaf, torch.Generator):
        return bytes(leaf.get_state().numpy())
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.str, leaf.shape, id(leaf) if leaf.dtype.hasobject else leaf.tobytes()
    if isinstance(leaf, np.random.Generator):
        return repr(leaf.bit_generator.state)
    if isinstance(leaf, np.random.BitGenerator):
        return repr(leaf.state)
    if isinstance(leaf, np.random.RandomState):
        return tuple(n.tobytes() if isinstance(n, np.ndarray) else n for n in leaf.get_state())
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if isinstance(leaf, bytearray | memoryview):
        return bytes(leaf)
    if isinstance(leaf, _PLAIN):
        return type(leaf).__name__, repr(leaf)
    known = getattr(leaf, "cache_info", None)
    return id(leaf), str(known()) if callable(known) and not isinstance(leaf, type) else ""


def _entries(tensor: Tensor) -> Any:
    """A tensor's form and bits; of a large one a sum over its bits."""
    form = tensor.dtype, tuple(tensor.shape), str(tensor.device), tensor.requires_grad
    try:
        gradient = None if not tensor.is_leaf or tensor.grad is None else _entries(tensor.grad)
        flat = tensor.detach().reshape(-1)
        if tensor.numel() >= LARGE:
            whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
            return *form, int(flat.view(whole).sum(dtype=torch.int64)), gradient
        return *form, flat.view(torch.uint8).clone(), gradient
    except (RuntimeError, NotImplementedError):  # a tensor without plain memory, such as one that leaked out of vmap
        return *form, id(tensor), None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
