"""Watch everything that an object holds: whether anything reachable from it has changed, and where.

A model or a method may keep state in places nobody registered: a plain attribute, a list, a generator, a hook's
closure, a class, a global that its functions name. Such state carries one client's data to the next one, so all of it
is compared with what it was. Out of reach is what is looked up by a computed name, imported inside a function or
named through two modules (``package.module.memory``), what libraries keep (attributes put on them and on loggers, too),
the process's environment, and memory inside compiled extensions that cannot be pickled.
"""

import contextvars
import functools
import gc
import pickle
import random
import sys
import sysconfig
import threading
import types
import warnings
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.autograd import Function

from fedflat.core.identity import names_in, plain_text, slots_of

LARGE = 1_000_000
"""Entries of a tensor from which a digest is kept of it, and no copy."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice, PurePath)
_EXACTLY = frozenset(_PLAIN)
_INSTALLED = (
    "transformers", "peft", "huggingface_hub", "accelerate", "tokenizers", "safetensors", "packaging", "tqdm",
    "timm", "efficientnet_lite_pytorch", "pandas", "pyarrow", "scipy", "sklearn", "pydantic", "pydantic_core",
)  # fmt: skip
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "fedflat", *_INSTALLED}
"""Packages whose functions and classes hold nothing of a client's (their objects may)."""
_PYTHON = tuple(filter(None, map(sysconfig.get_path, ("stdlib", "platstdlib"))))
_OF_PYTHON = frozenset(dir(type)) | {
    "__weakref__", "__slots__", "__match_args__", "__orig_bases__", "__parameters__", "__classcell__", "_abc_impl",
    "__dataclass_fields__", "__dataclass_params__", "__slotnames__",
}  # fmt: skip
"""Names that Python itself gives to attributes of classes."""
_IMMUTABLE, _HEAP = 1 << 8, 1 << 9
"""The flags of a class that takes no attributes, as compiled ones, and of a class that is no static structure of C, as
Cython's are."""
_COMPILED = ("_is_torch_compile", "_compiled_call_impl")
"""What torch.compile notes on a module at its first pass; on functions and tensors its names have a prefix."""
_SCRIPT = torch._C.ScriptMethod
"""What a traced module keeps of its forward pass when it is first called."""
_BEHIND = {"get_unwrapped", "_unwrap_batched", "_remove_batch_dim", "_vmap_decrement_nesting"}
"""Functions of torch's own inside that show a client's code the whole block."""
_OPAQUE = ("logging", "_thread", "weakref", "torch._ops", "torch._C", "torch._dynamo", "enum", "importlib")
"""Modules, and what is in them, whose objects are no memory."""


def snapshot(root: object, skip: Iterable[Tensor] = ()) -> dict[str, Any]:
    """Path -> value of every leaf reachable from ``root``, and the form of all that holds something.

    Tensors in ``skip`` count as always the same.
    """
    skipped, reached = {id(tensor) for tensor in skip}, list(_walk(root))
    leaves = {path: _value(obj, skipped) for path, obj, children in reached if children is None}
    return leaves | {f"{path} ": _form(obj, children) for path, obj, children in reached if children is not None}


def own_code(root: object) -> bool:
    """Return whether a pass through a module, or a call of a method or a loss, may run Python that is neither this
    package's nor a library's: of its class, a hook, or a function or an object that it holds.
    """
    parts = list(root.modules()) if isinstance(root, nn.Module) else []
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any("forward" in vars(part) or any(getattr(part, name) for name in hooks) for part in parts)
    return hooked or any(not is_library(_home(obj)) for _, obj, _ in _walk(root))


def own_rule(root: object) -> str:
    """Return the name of a user's torch.autograd.Function or operation that says itself how vmap runs it, or of a
    function that looks behind vmap; "" if none.

    An operation that no ``torch.library.custom_op`` made counts wherever it is: code may call it under any name.
    """
    objects = [obj for _, obj, _ in _walk(root)]
    kinds = (k for k in objects if isinstance(k, type) and issubclass(k, Function) and k.vmap is not Function.vmap)
    named = [kind.__name__ for kind in kinds if not is_library(_home(kind))]
    named += [op._qualname for op in objects if isinstance(op, CustomOpDef) and getattr(op, "_vmap_fn", None)]
    named += [f.__name__ for f in objects if isinstance(f, types.FunctionType) and _BEHIND & {*names_in(f.__code__)}]
    named += [f.__name__ for f in objects if isinstance(f, types.BuiltinFunctionType) and f.__name__ in _BEHIND]
    every = (name for name in torch._C._dispatch_get_all_op_names() if not name.startswith("aten::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    named += [name for name in every if name not in OPDEFS and has_kernel(name, "FuncTorchBatched")]
    return named[0] if named and own_code(root) else ""


def _module(kind: type) -> str:
    named: Any = kind.__module__  # a compiled class may describe there what its objects say
    return named if isinstance(named, str) else "builtins"


def _home(obj: object) -> str:
    """Return the module that the code of an object is in: a function's or a class's own, or its class's."""
    if isinstance(obj, types.FunctionType):
        return str(obj.__globals__.get("__name__"))  # functools.wraps gives a function another one's __module__
    kind = obj if isinstance(obj, type) else type(obj)
    home = _module(kind)
    if _compiled_class(kind) or home.partition(".")[0] not in sys.stdlib_module_names:
        return home
    # types.new_class and ABCMeta call the user's classes their own; only the module's own are under their names.
    named: Any = sys.modules.get(home)
    for name in kind.__qualname__.split("."):
        named = getattr(named, name, None)
    return home if named is kind else f"<made in {home}>"


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the first path whose value is not the same in both; None if there is none."""
    for path in sorted({**before, **after}, key=lambda path: path.endswith(" ")):  # what holds a change comes last
        if path not in before or path not in after or not _same(before[path], after[path]):
            return path.rstrip()
    return None


def global_generators() -> tuple[bytes, tuple[Any, ...], tuple[Any, ...]]:
    """Return the states of the generators that belong to nobody: torch's (GPUs' included), NumPy's, Python's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = [torch.default_generator.get_state(), *map(torch.cuda.get_rng_state, devices)]
    name, *numbers = np.random.get_state()  # noqa: NPY002 (looked at, not drawn from)
    legacy = (name, *(n.tobytes() if isinstance(n, np.ndarray) else n for n in numbers))
    return b"".join(state.numpy().tobytes() for state in states), legacy, random.getstate()


class StateWatch:
    """What ``root`` held when this was made. skip: tensors that may change, such as bound parameters."""

    def __init__(self, root: object, skip: Iterable[Tensor] = ()) -> None:
        self.root, self._skip = root, list(skip)
        self._values, skipped = snapshot(root, self._skip), {id(tensor) for tensor in self._skip}
        tensors = [obj for _, obj, _ in _walk(root) if isinstance(obj, Tensor) and id(obj) not in skipped]
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._tensors]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.root, self._skip

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def changed(self, *, everything: bool = True) -> str | None:
        """Return where something is not as it was, or None.

        everything: False looks only if a tensor was written to by torch. That is enough after a client where no code
        of the user's own ran (``own_code``); at the end of a round everything is compared.
        """
        versions = [tensor._version for tensor in self._tensors]
        if not everything and versions == self._versions:
            return None
        path = difference(self._values, snapshot(self.root, self._skip))
        if path is None:
            self._versions = versions  # a tensor was written anew with what it held
        return path


def _walk(root: object) -> Iterator[tuple[str, Any, list[tuple[str, Any]] | None]]:
    """Yield every object once, with its path, and its children (None for a leaf); where it is met again, the first
    path.
    """
    seen: dict[int, tuple[str, object]] = {}  # holds on to what children() makes, so that no number is used twice
    waiting: deque[tuple[str, Any]] = deque([("", root)])
    while waiting:
        path, obj = waiting.popleft()
        if type(obj) in weakref.ProxyTypes:
            obj = _behind(obj)
        if type(obj) in _EXACTLY or (isinstance(obj, _PLAIN) and is_library(_home(obj))):
            yield path, obj, None
            continue
        if id(obj) in seen:
            # One of two that are held, put in the other's place, changes what is done, though nothing new is held.
            yield path, seen[id(obj)][0], None
            continue
        seen[id(obj)] = path, obj
        try:
            children = _children(obj)
            held = _beside(obj) if children is None else children
        except Exception:  # a user's class may answer every question with an error; its attributes are there
            children, held = None, []
            with suppress(AttributeError):
                held = [(f".{name}", value) for name, value in object.__getattribute__(obj, "__dict__").items()]
        yield path, obj, children
        waiting.extend((f"{path}{label}".lstrip("."), child) for label, child in held)


def _behind(proxy: Any) -> Any:
    """Return what a weak proxy stands for, None where that is gone: it answers every question with an error then."""
    try:
        method = proxy.__sizeof__  # a class's own is not bound to it
        return method.__self__ if hasattr(method, "__self__") else proxy.__mro__[0]
    except ReferenceError:
        return None


def _form(obj: Any, children: list[tuple[str, Any]]) -> tuple[Any, ...]:
    """Return the kind of an object, the labels of what it holds in their order, and a function's code or plain keys.

    A label does not tell 1 from "1", nor two keys of bytes.
    """
    more: Any = obj.__code__ if isinstance(obj, types.FunctionType) else None
    if isinstance(obj, Mapping):
        more = tuple(_value(key, set()) for key, _ in _pairs(obj) if isinstance(key, _PLAIN))
    return type(obj).__qualname__, tuple(label for label, _ in children), more


def _children(obj: Any) -> list[tuple[str, Any]] | None:
    """Return what an object holds, by label; None for a leaf."""
    if isinstance(obj, np.ndarray) and obj.dtype.hasobject:
        return [(f"[{index}]", value) for index, value in enumerate(obj.ravel().tolist())] + _attributes(obj)
    if isinstance(obj, (Tensor, types.ModuleType, *_PLAIN, *_STATE)):
        return None
    if isinstance(obj, Mapping):
        pairs = _pairs(obj)
        parts = [(f"[{_label(key, index)}]", value) for index, (key, value) in enumerate(pairs)]
        parts += [(f"{{key {index}}}", key) for index, (key, _) in enumerate(pairs) if not isinstance(key, _PLAIN)]
        return [*parts, (".default_factory", getattr(obj, "default_factory", None)), *_attributes(obj)]
    if base := next((kind for kind in (list, tuple, deque, set, frozenset) if isinstance(obj, kind)), None):
        return [(f"[{index}]", value) for index, value in enumerate(base.__iter__(obj))] + _attributes(obj)
    return next((parts for kind, parts in _INSIDE.items() if isinstance(obj, kind)), _of_object)(obj)


def _pairs(obj: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return what a mapping holds; a subclass of dict may show nothing of it."""
    base: Any = next((kind for kind in (OrderedDict, dict) if isinstance(obj, kind)), type(obj))
    return list(base.items(obj))  # an ordered one has an order of its own


def _of_generator(obj: Any) -> list[tuple[str, Any]]:
    """Return the local variables of a generator or a coroutine, and how far it has come, which is memory too."""
    kind, inner = ("gi", "gi_yieldfrom") if isinstance(obj, types.GeneratorType) else ("cr", "cr_await")
    kind, inner = ("ag", "ag_await") if isinstance(obj, types.AsyncGeneratorType) else (kind, inner)
    frame, parts = getattr(obj, f"{kind}_frame"), [(".<from>", getattr(obj, inner))]
    if frame is not None:
        parts += [(f".{name}", value) for name, value in {**frame.f_locals, "<at>": frame.f_lasti}.items()]
        parts += _globals_of(getattr(obj, f"{kind}_code"), frame.f_globals)
    return parts


def _attributes(obj: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes, its slots, and its class where that is a user's: it may count in itself."""
    kind = type(obj)
    if kind in (dict, list, tuple, set):
        return []
    parts = [(f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items() if not _noted(name)]
    for name in _slots(kind):
        with suppress(AttributeError):
            parts.append((f".{name}", object.__getattribute__(obj, name)))  # a class may answer otherwise
    return parts if is_library(_home(obj)) else [*parts, (f"<{kind.__name__}>", kind)]


def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class's objects, but pathlib's, which are worked out when asked for."""
    if id(kind) not in _SLOTS:
        _SLOTS[id(kind)] = kind, tuple(n for base in kind.__mro__ if _home(base) != "pathlib" for n in slots_of(base))
    return _SLOTS[id(kind)][1]


_SLOTS: dict[int, tuple[type, tuple[str, ...]]] = {}
"""By a class's number, which a class of the same number later cannot have while this holds on to it."""


def _noted(name: str) -> bool:
    return name in _COMPILED or name.startswith(("_dynamo_", "__dynamo_", "_torchdynamo_"))


def _beside(leaf: Any) -> list[tuple[str, Any]]:
    """Return what a leaf holds beside its value: attributes, a tensor's gradient and hooks."""
    if isinstance(leaf, (*_PLAIN, *_STATE)):
        base = leaf.base if type(leaf) is np.ndarray else leaf.obj if type(leaf) is memoryview else None
        behind = [] if isinstance(base, np.ndarray) and base.size >= LARGE else [(".base", base)]
        return [*behind, *_attributes(leaf)]
    # Subclasses may answer for attributes with anything, a computation even.
    if type(leaf) not in (Tensor, nn.Parameter):
        users = isinstance(leaf, Tensor) and not is_library(_home(leaf))
        return list(object.__getattribute__(leaf, "__dict__").items()) if users else []
    parts: list[tuple[str, Any]] = [(".grad", leaf.grad)] if leaf.is_leaf else []
    parts.append(("._base", leaf._base))  # a view's memory is more than it shows
    parts += [(f".{name}", getattr(leaf, name, None)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return parts + _attributes(leaf)


def _opaque(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _OPAQUE)


def _of_object(obj: Any) -> list[tuple[str, Any]] | None:
    kind = type(obj)
    if isinstance(obj, functools._lru_cache_wrapper):
        contents = [str(obj.cache_info()), *gc.get_referents(obj)]
        return [(f"[{index}]", value) for index, value in enumerate(contents)]
    if _opaque(_module(kind)) and not isinstance(obj, nn.Module):
        return None
    if isinstance(obj, nn.Module):
        user_class = [] if is_library(_home(obj)) else [(f"<{kind.__name__}>", kind)]
        inner = ("_parameters", "_buffers", "_modules")
        registered = [(f".{name}", value) for held in inner for name, value in getattr(obj, held).items()]
        rest = [(n, v) for n, v in vars(obj).items() if not (n in inner or _noted(n) or isinstance(v, _SCRIPT))]
        return [*registered, *((f".{name}", value) for name, value in rest), *user_class]
    if not hasattr(obj, "__dict__") and not any(map(slots_of, kind.__mro__)):
        return None
    return [*_compiled(obj), *_attributes(obj)] or None  # what has nothing to show may still say what it is


def _compiled_class(kind: type) -> bool:
    return bool((kind.__flags__ ^ _HEAP) & (_IMMUTABLE | _HEAP))


def _compiled(obj: Any) -> list[tuple[str, Any]]:
    """Return what the compiled class that an object derives from, such as an array or an exception, keeps of it."""
    if next(filter(_compiled_class, type(obj).__mro__)) is object:
        return []
    beside = ("__cause__", "__context__") if isinstance(obj, BaseException) else ()
    parts: list[tuple[str, Any]] = [(f".{name}", getattr(obj, name)) for name in beside]
    with suppress(Exception):  # any class may refuse in its own way
        parts.append(("<held>", obj.__reduce_ex__(4)[1:]))
    return parts


def _of_class(kind: type) -> list[tuple[str, Any]] | None:
    """Return the data that a user's class keeps for all its objects, and what its functions keep."""
    if is_library(_home(kind)):
        return None
    every = [(name, part) for name, value in vars(kind).items() for part in _parts_of(value)]
    members = [(f".{n}", part) for n, part in every if isinstance(part, types.FunctionType) or n not in _OF_PYTHON]
    members += [(f".{name}", vars(kind).get(name)) for name in ("__doc__", "__dataclass_fields__", "__module__")]
    members += [(f".{n}<own>", vars(v)) for n, v in vars(kind).items() if isinstance(v, staticmethod | classmethod)]
    members += [(".<hints>", _hints(vars(kind).get("__annotations__", {})))]
    bases = (base for base in (*kind.__bases__, type(kind)) if not is_library(_home(base)))
    return [*members, *((f"<{base.__name__}>", base) for base in bases)]


def _hints(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return annotations without types, in which typing itself notes what it has looked up."""
    return {n: v for n, v in hints.items() if not isinstance(v, type) and type(v).__module__ not in ("typing", "types")}


def _parts_of(value: Any) -> list[Any]:
    """Return what a class's attribute is made of."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset, value.fdel) if part is not None]
    return [value.func] if isinstance(value, functools.cached_property) else [value]


def _of_function(obj: types.FunctionType) -> list[tuple[str, Any]] | None:
    """Return a function's closure, defaults and attributes, and the globals that its code names."""
    parts: list[tuple[str, Any]] = [(f".{n}", c) for n, c in zip(obj.__code__.co_freevars, obj.__closure__ or ())]
    if is_library(_home(obj)):  # what a decorator returns, as torch.no_grad, holds the user's function
        parts += [(f".{name}", value) for name, value in vars(obj).items() if not _noted(name)]
        return [(name, value) for name, value in parts if name not in (".dispatch_cache", "._clear_cache")]
    parts += [(f".defaults[{index}]", value) for index, value in enumerate(obj.__defaults__ or ())]
    more = {**(obj.__kwdefaults__ or {}), **vars(obj), "__doc__": obj.__doc__}
    with suppress(Exception):  # Python 3.14 works them out when asked
        more["<hints>"] = _hints(obj.__annotations__)
    parts += [(f".{name}", value) for name, value in more.items()]
    return parts + _globals_of(obj.__code__, obj.__globals__)


def _globals_of(code: types.CodeType, scope: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = sorted(names_in(code))
    parts = [(f".{name}", operation) for name, operation in OPDEFS.items() if {"ops", *name.split("::")} <= {*names}]
    for name in names:
        value = scope.get(name)
        if not isinstance(value, types.ModuleType):
            parts.append((f".{name}", value))
        elif not is_library(value.__name__):
            parts += [(f".{name}.{n}", vars(value)[n]) for n in names if n in vars(value)]
    return parts


def _of_cell(cell: types.CellType) -> list[tuple[str, Any]] | None:
    """Return what a closure's variable holds; None where it is not bound yet."""
    try:
        return [("", cell.cell_contents)]
    except ValueError:
        return None


def _of_builtin(obj: Any) -> list[tuple[str, Any]] | None:
    """Return what a compiled function is bound to: a list's own method holds the list."""
    return None if isinstance(obj.__self__, types.ModuleType) else [(f".{obj.__name__}", obj.__self__)]


_INSIDE: dict[type, Callable[[Any], list[tuple[str, Any]] | None]] = {
    functools.partial: lambda part: [("()", part.func), (".args", (part.args, part.keywords)), *_attributes(part)],
    type: _of_class,
    types.FunctionType: _of_function,
    types.MethodType: lambda method: [("", method.__self__), ("()", method.__func__)],
    types.CellType: _of_cell,
    weakref.ref: lambda reference: [("", reference())],
    threading.local: _attributes,
    contextvars.ContextVar: lambda variable: [("", variable.get(None))],
    **dict.fromkeys((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _of_generator),
    **dict.fromkeys((types.BuiltinFunctionType, types.MethodWrapperType), _of_builtin),
}
"""Kinds that hold something in a way of their own, and what that is."""


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same numbers; NaN is NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def is_library(module: str) -> bool:
    """Return whether a module's functions and classes hold nothing of a client's."""
    name = module.partition(".")[0]
    # A user's own file may have the name of one of Python's.
    file = getattr(sys.modules.get(name), "__file__", None) if name in sys.stdlib_module_names else None
    return name in _LIBRARIES and (file is None or file.startswith(_PYTHON))


# Pickled and not shown: what is shown of an array leaves its middle out where somebody sets NumPy to do so.
_STATE: dict[type, Callable[[Any], Any]] = {
    torch.Generator: lambda leaf: bytes(leaf.get_state().numpy()),
    np.ndarray: lambda leaf: (leaf.dtype.str, leaf.shape, np.asarray(leaf).tobytes()),  # a masked one fills itself
    np.random.Generator: lambda leaf: pickle.dumps(leaf.bit_generator.state),
    np.random.BitGenerator: lambda leaf: pickle.dumps(leaf.state),
    np.random.RandomState: lambda leaf: pickle.dumps(leaf.get_state()),
    random.SystemRandom: lambda leaf: None,
    random.Random: lambda leaf: leaf.getstate(),
    type(threading.Lock()): lambda leaf: leaf.locked(),
    bytearray: bytes,
    memoryview: bytes,
}
"""Kinds whose objects are leaves with a state, and how it is read."""


def _label(key: Any, index: int) -> str:
    return str(key) if isinstance(key, str | int | float | bool | None) else f"{type(key).__name__} {index}"


def _value(leaf: Any, skipped: set[int]) -> Any:
    """Return what is compared of a leaf; two of them by ``_same``."""
    if isinstance(leaf, Tensor):
        return "skipped" if id(leaf) in skipped else _entries(leaf)
    for kind, state in _STATE.items():
        if isinstance(leaf, kind):
            return state(leaf)
    if isinstance(leaf, _PLAIN):
        return type(leaf).__name__, plain_text(leaf)
    return id(leaf), _pickled(leaf)


def _pickled(leaf: Any) -> bytes:
    """Return what a compiled object says of itself, such as an array or a counter; never read back."""
    if isinstance(leaf, type | types.ModuleType | types.BuiltinFunctionType) or _opaque(_module(type(leaf))):
        return b""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pickle.dumps(leaf)
    except Exception:  # any class may refuse in its own way
        return b""


def _entries(tensor: Tensor) -> Any:
    """Return a tensor's form and bits; of a large one a checksum."""
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.layout is not torch.strided:
        return id(tensor), tensor.dtype, _pickled(tensor)
    try:
        form = tensor.dtype, tuple(tensor.shape), str(tensor.device), tensor.requires_grad
        gradient = None if not tensor.is_leaf or tensor.grad is None else _entries(tensor.grad)
        # Bits, not values: NaN equals NaN, and -0.0 is not 0.0.
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        if tensor.numel() >= LARGE:
            return *form, zlib.crc32(flat.view(torch.uint8).cpu().numpy().data), gradient
        return *form, flat.view(torch.uint8).clone(), gradient
    except (RuntimeError, NotImplementedError):  # a tensor without plain memory, such as one that leaked out of vmap
        return id(tensor), tensor.dtype


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
