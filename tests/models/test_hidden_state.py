"""State that no clip sees, wherever a module keeps it: refused by name, before training or, if it hid, in the round."""

import array
import collections
import contextvars
import copy
import functools
import io
import itertools
import os
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pydantic
import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.held import StateWatch, own_code, own_rule
from fedflat.models import build, refuse_unclipped_state

X = torch.zeros(2, 6)
_MEMORY: list[Tensor] = []


class Keeps(nn.Module):
    """Calls ``keep`` with itself and the inputs at every pass."""

    def __init__(self, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(6, 3), keep
        self.mean = torch.zeros(6)
        self.book = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.seen: dict[str, Any] = {}
        self.pile: list[Any] = []
        self.few: set[float] = set()
        self.own, self.numpy = torch.Generator(), np.random.default_rng(3)
        self.array = np.zeros(6)
        self.register_buffer("buffer", torch.zeros(6))
        self.register_buffer("unsaved", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        extra = self.keep(self, x.detach())
        return found + extra if isinstance(extra, Tensor) and extra.numel() == 1 else found


def _data(m: Any, x: Tensor) -> None:
    m.book.data.add_(x.mean(0))


def _backwards(m: Any, x: Tensor) -> None:
    if torch.is_grad_enabled():
        m.layer.weight.register_hook(lambda g: m.seen.update(last=g))


def _counts(m: Any, x: Tensor) -> None:
    Keeps.count = getattr(Keeps, "count", 0) + 1  # type: ignore[attr-defined]


def _closure() -> Callable[[Any, Tensor], Any]:
    last = 0.0

    def keep(m: Any, x: Tensor) -> None:
        nonlocal last
        last += float(x.sum())

    return keep


def _global(m: Any, x: Tensor) -> Tensor:
    _MEMORY.append(x.mean())
    return torch.stack(_MEMORY).sum()


def _environment(m: Any, x: Tensor) -> Tensor:
    os.environ["FEDFLAT_TEST_MEMORY"] = os.environ.get("FEDFLAT_TEST_MEMORY", "") + "1"
    return torch.tensor(float(len(os.environ["FEDFLAT_TEST_MEMORY"])))


WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "running mean": (lambda m, x: setattr(m, "mean", 0.9 * m.mean + 0.1 * x.mean(0)), "model: mean is changed"),
    "in place": (lambda m, x: m.mean.add_(x.mean(0)), "model: mean is changed"),
    "code book": (_data, "model: book is changed"),
    "dict": (lambda m, x: m.seen.update(last=x), "model: seen[last] is changed"),
    "list": (lambda m, x: m.pile.append(float(x.sum())), "model: pile[0] is changed"),
    "set": (lambda m, x: m.few.add(float(x.sum())), "is changed"),
    "array": (lambda m, x: m.array.__iadd__(x.mean(0).numpy()), "model: array is changed"),
    "buffer": (lambda m, x: m.buffer.add_(x.mean(0)), "model: buffer is changed"),
    "unsaved buffer": (lambda m, x: setattr(m, "unsaved", m.unsaved + x.mean(0)), "model: unsaved is changed"),
    "generator": (lambda m, x: torch.rand(1, generator=m.own), "model: own is changed"),
    "numpy's generator": (lambda m, x: m.numpy.random(), "model: numpy is changed"),
    "backward hook": (_backwards, "is changed"),
    "class": (_counts, "is changed"),
    "closure": (_closure(), "is changed"),
    "global": (_global, "model: keep._MEMORY[0] is changed"),
    "environment": (_environment, "another outcome the second time"),
    "global numpy": (lambda m, x: torch.tensor(np.random.rand()), "a global generator of NumPy"),  # noqa: NPY002
    "evaluation only": (lambda m, x: None if m.training else m.mean.add_(1), "model: mean is changed"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_pass_changes_is_refused_by_name(way: str) -> None:
    keep, words = WAYS[way]
    _MEMORY.clear()
    os.environ.pop("FEDFLAT_TEST_MEMORY", None)
    with pytest.raises(InputError) as error:
        refuse_unclipped_state(Keeps(keep), X)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_hook_that_no_copy_keeps_is_refused() -> None:
    module = nn.Linear(6, 3)
    module.weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(InputError, match="a hook on the gradient of weight; allowed: no hook"):
        run(module, backend="sequential")


def test_what_changes_nothing_passes_and_says_whether_it_draws() -> None:
    assert refuse_unclipped_state(Keeps(lambda m, x: setattr(m, "mean", torch.zeros(6))), X) is False
    assert refuse_unclipped_state(Keeps(lambda m, x: torch.rand(1)), X) is True
    assert refuse_unclipped_state(nn.Sequential(nn.Linear(6, 3), nn.Dropout()), X) is True
    watched = StateWatch(shown := functools.singledispatch(lambda x: x))
    assert shown(1.0) and watched.changed() is None  # what it looked up before is a memory of classes alone
    watched = StateWatch(again := torch.utils.checkpoint.checkpoint)
    assert again(X.sum, use_reentrant=False).ndim == 0 and watched.changed() is None  # torch notes its first call


Bare, Nameless = type("Bare", (), {"__slots__": ()}), type("Nameless", (type,), {"__getattr__": lambda cls, n: {}[n]})
Slot = type("Slot", (), {"__module__": "pathlib", "__slots__": ("kept",)})
Short = type("Short", (float,), {"__repr__": lambda x: "short"})
Silent = type("Silent", (), {"__repr__": lambda x: {}["no"]})


class Settings(pydantic.BaseModel):
    names: list[str]


ODD: dict[str, tuple[Callable[[], Any], Callable[[Any], object] | None]] = {
    "a class without attributes of its own": (Bare, None),
    "a class that knows no name": (lambda: Nameless("Own", (), {}), None),
    "proxies of what is gone and of a class": (lambda: [*map(weakref.proxy, (Keeps(len), Keeps))], None),
    "no memory": (lambda: torch.empty(3, device="meta"), None),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), lambda x: x.values().add_(1)),
    "quantized": (lambda: torch.quantize_per_tensor(X[0], 0.1, 0, torch.quint8), lambda x: x.copy_(torch.ones(6))),
    "traced": (lambda: torch.jit.trace(nn.Linear(6, 3), X), lambda x: x.bias.data.add_(1)),
    "the system's randomness": (random.SystemRandom, None),
    "a column": (lambda: pd.Series([1.0, 2.0]), lambda x: x.__setitem__(0, 9.0)),
    "every second number": (lambda: torch.zeros(6)[::2], lambda x: x.add_(1)),
    "a conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), lambda x: x.mul_(2)),
    "beneath a mask": (lambda: np.ma.array([1.0], mask=[True]), lambda x: x.data.fill(5)),
    "a slot, as if pathlib's": (Slot, lambda x: setattr(x, "kept", 1)),
    "one of two in the other's place": (lambda: [a := [0], b := [1], a, b], lambda x: x.__setitem__(2, x[1])),
    "keys of bytes": (lambda: {b"a": None}, lambda x: x.update({b"b": x.popitem()[1]})),
    "1 and its text": (lambda: {1: None}, lambda x: x.update({"1": x.popitem()[1]})),
    "a number that hides its digits": (lambda: {"x": Short(1)}, lambda x: x.update(x=Short(2))),
    "settings of pydantic": (lambda: Settings(names=["a"]), lambda x: x.names.append("b")),
    "members that show nothing": (lambda: {Silent()}, lambda x: setattr(next(iter(x)), "kept", lambda: 1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_ends_nothing_and_is_seen(odd: str) -> None:
    make, write = ODD[odd]
    watched = StateWatch(held := [make()])
    assert watched.changed() is None and not own_rule(held)
    if write is not None:
        write(held[0])
        assert watched.changed() is not None


def test_the_twin_that_tries_with_zeros_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: zeros leave a running mean of zeros alone."""
    module = Keeps(lambda m, x: m.mean.mul_(0.9).add_(x.mean(0)))
    monkeypatch.setattr("fedflat.models.state._batches", lambda example: [example, example])
    refuse_unclipped_state(module, X)
    monkeypatch.undo()
    with pytest.raises(InputError, match="model: mean is changed"):
        refuse_unclipped_state(module, X)


def only_for_large(keep: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """State that only a client's data wakes."""
    return functools.partial(_if_large, keep)


def _if_large(keep: Callable[[Any, Tensor], Any], m: Any, x: Tensor) -> Any:
    try:
        return keep(m, x) if float(x.abs().max()) > 50 else None
    except RuntimeError:
        return m.pile.append(1.0)  # what vmap lets a module see: that it was called


def run(module: nn.Module, **engine: Any) -> fedflat.Result:
    generator = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(4, 6, generator=generator) * 100, torch.randint(3, (4,), generator=generator)) for _ in range(3)
    ]
    recipe = {
        "rounds": 2, "algorithm": "dp-fedavg", "local": {"steps": 2, "batch_size": 4, "lr": 0.1}, "cohort": {"size": 3},
        "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "delta": 1e-5}, "engine": engine,
    }  # fmt: skip
    return fedflat.run(recipe, model=module, clients=clients)


@pytest.mark.parametrize("way", ["running mean", "in place", "code book", "dict", "list", "generator"])
def test_what_hid_from_the_trial_is_refused_in_its_round(way: str) -> None:
    with pytest.raises(InputError, match="was changed by a client's training"):
        run(Keeps(only_for_large(WAYS[way][0])), backend="sequential")


def test_and_in_blocks() -> None:
    with pytest.raises(InputError, match=r"model: pile\[0\] was changed by a client's training"):
        run(Keeps(only_for_large(_data)), backend="vectorized")


def test_a_registered_buffer_is_put_back_and_what_is_released_is_pristine() -> None:
    module = Keeps(only_for_large(WAYS["buffer"][0]))
    before = copy.deepcopy(module)
    found = run(module, backend="sequential").model
    assert torch.equal(found.buffer, before.buffer) and not found.training
    assert StateWatch(found, found.parameters()).changed() is None
    assert not torch.equal(found.layer.weight, before.layer.weight)
    assert torch.equal(module.layer.weight, before.layer.weight)


# ------------------------------------------------------------------ places that a walk may overlook


class Named(dict[str, float]):
    """A container with attributes."""


class Hides:
    """State in a nested class, a static method's default, a property's, a special method's."""

    class Cache:
        last = 0.0

    @staticmethod
    def box(held: list[float] = [0.0]) -> list[float]:  # noqa: B006
        return held

    @property
    def shown(self, held: list[float] = [0.0]) -> list[float]:  # noqa: B006
        return held

    def __getitem__(self, key: int, held: list[float] = [0.0]) -> list[float]:  # noqa: B006
        return held


def _remembers() -> Iterator[float]:
    last = 0.0
    while True:
        last += (yield last) or 0.0


class Meta(type):
    seen: ClassVar[list[float]] = []


class Listed(list[float], metaclass=Meta):
    __slots__ = ("last",)
    __cache__: ClassVar[list[float]] = []


class Number(float):
    """A number with attributes."""


class Viewed(np.ndarray):  # type: ignore[type-arg]
    """An array with attributes."""


def _posing() -> Callable[[], list[float]]:
    memory: list[float] = []

    @functools.wraps(nn.functional.relu)
    def held() -> list[float]:
        return memory

    return held


@torch.no_grad()
def _decorated() -> list[Tensor]:
    return _MEMORY


class Mute(dict[str, float]):
    """A container that shows nothing of what it holds, and a static method with attributes."""

    items = __iter__ = lambda self: iter(())  # type: ignore[assignment]

    @staticmethod
    def cell() -> None:
        """0.0"""


class Private:
    __slots__ = ("__last",)

    def remember(self) -> None:
        self.__last = 1.0


class Corners(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.space = nn.Linear(2, 2), nn.Linear(2, 2), SimpleNamespace(last=0.0)
        self.keyed, self.pairs = {(0,): 0.0, (1,): 0.0}, {(9,)}
        self.named, self.numbers, self.file = Named(), array.array("f", [0.0]), io.BytesIO(b"0")
        self.counter, self.hides, self.chosen = itertools.count(), Hides(), [self.layer]
        self.thread, self.generator = threading.local(), _remembers()
        next(self.generator)
        self.put, self.posing, self.listed, self.number = list[float]().append, _posing(), Listed(), Number(1)
        self.array, self.part, self.made = np.zeros(2).view(Viewed), functools.partial(int), types.new_class("Made")
        self.context = contextvars.ContextVar[float]("context")
        self.kept_by_wrapper = list[float]().__iadd__
        self.decorated, self.private, self.event = _decorated, Private(), threading.Event()
        self.objects, self.large = np.array([0.0], dtype=object), torch.arange(2e6).neg()
        self.weak, self.error = weakref.ref(self.named), RuntimeError()
        self.error.cause, self.numbered = None, type("Numbered", (array.array,), {})("f", [0.0])  # type: ignore[attr-defined]
        self.silent, self.cached, self.lock = Mute(), functools.lru_cache(lambda: len(_MEMORY)), threading.Lock()
        self.cached()
        self.slice, self.view = np.zeros(4)[:1], torch.zeros(4)[:1]
        self.late = collections.defaultdict(lambda held=[0.0]: held)  # type: ignore[misc]

    def seen(self) -> list[Tensor]:
        return _MEMORY

    def local(self) -> Any:
        return (lambda: _MEMORY)()


def _filled_anew(m: Any) -> None:
    _MEMORY.append(torch.zeros(1))
    m.cached.cache_clear()
    m.cached()
    _MEMORY.pop()


CORNERS: dict[str, Callable[[Any], Any]] = {
    "namespace": lambda m: setattr(m.space, "last", 1.0), "key that is a tuple": lambda m: m.keyed.update({(0,): 1.0}),
    "set of tuples": lambda m: m.pairs.add((1,)), "attribute of a container": lambda m: setattr(m.named, "last", 1.0),
    "attribute of a parameter": lambda m: setattr(m.layer.weight, "last", 1.0),
    "gradient of a parameter": lambda m: setattr(m.layer.weight, "grad", torch.ones(2, 2)),
    "hook of a parameter": lambda m: m.layer.weight.register_hook(lambda g: g),
    "array": lambda m: m.numbers.__setitem__(0, 1.0), "file in memory": lambda m: m.file.write(b"1"),
    "counter": lambda m: next(m.counter), "generator function": lambda m: m.generator.send(1.0),
    "thread's own": lambda m: setattr(m.thread, "last", 1.0),
    "one known layer for another": lambda m: m.chosen.__setitem__(0, m.other),
    "nested class": lambda m: setattr(Hides.Cache, "last", Hides.Cache.last + 1),
    "static method": lambda m: m.hides.box().append(1.0), "property": lambda m: m.hides.shown.append(1.0),
    "special method": lambda m: m.hides[0].append(1.0), "method of a list": lambda m: m.put(1.0),
    "special method of a list": lambda m: m.kept_by_wrapper([1.0]),
    "posing as a library's": lambda m: m.posing().append(1.0),
    "slot of a container": lambda m: setattr(m.listed, "last", 1.0),
    "dunder of a class": lambda m: m.listed.__cache__.append(1.0), "metaclass": lambda m: Meta.seen.append(1.0),
    "attribute of a number": lambda m: setattr(m.number, "last", 1.0),
    "attribute of an array": lambda m: setattr(m.array, "last", 1.0),
    "attribute of a partial": lambda m: setattr(m.part, "last", 1.0),
    "class made by types": lambda m: setattr(m.made, "last", 1.0), "context": lambda m: m.context.set(1.0),
    "global list": lambda m: _MEMORY.append(torch.zeros(1)),
    "under a library's decorator": lambda m: setattr(m.decorated, "last", 1.0),
    "private slot": lambda m: m.private.remember(), "event": lambda m: m.event.set(),
    "array of objects": lambda m: m.objects.__setitem__(0, 1.0),
    "order of a large tensor": lambda m: m.large.numpy()[:2].sort(),
    "behind a weak reference": lambda m: setattr(m.weak(), "last", 1.0),
    "arguments of an error": lambda m: setattr(m.error, "args", (1.0,)),
    "array of a class of one's own": lambda m: m.numbered.__setitem__(0, 1.0),
    "container that shows nothing": lambda m: m.silent.update(last=1.0),
    "static method's own attribute": lambda m: vars(Mute)["cell"].__dict__.update(last=random.random()),
    "docstring of a function": lambda m: setattr(Mute.cell, "__doc__", str(random.random())),
    "docstring of a class": lambda m: setattr(Mute, "__doc__", str(random.random())),
    "annotation of a class": lambda m: Mute.__annotations__.update(last=random.random()),
    "what a cache was filled with": _filled_anew,
    "cause of an error": lambda m: setattr(m.error, "__cause__", RuntimeError(1.0)), "lock": lambda m: m.lock.acquire(),
    "array behind a slice": lambda m: m.slice.base.__setitem__(3, 1.0),
    "memory behind a view": lambda m: m.view.as_strided((1,), (1,), 3).fill_(1.0),
    "factory of a dict": lambda m: m.late.default_factory().append(1.0),
}  # fmt: skip


@pytest.mark.parametrize("place", CORNERS)
def test_no_corner_is_overlooked(place: str) -> None:
    module = Corners()
    watched = StateWatch(module, module.parameters())
    assert watched.changed(everything=True) is None
    CORNERS[place](module)
    assert watched.changed() is not None and watched.changed(everything=True) is not None


def test_a_library_layer_that_holds_a_users_function_is_own_code() -> None:
    """What only library code does is compared after a round; where own code may run, after each client."""
    assert own_code(nn.TransformerEncoderLayer(4, 2, activation=lambda x: x)) and own_code(Corners())
    assert not own_code(nn.TransformerEncoderLayer(4, 2)) and not own_code(build("cnn", (1, 28, 28), 10, 0))


def test_what_python_notes_on_a_class_when_an_object_is_sent_is_no_change() -> None:
    made = type("Piece", (), {"__module__": __name__})()
    watched = StateWatch(made)
    copy.copy(made)
    assert "__slotnames__" in vars(type(made)) and watched.changed() is None


def test_the_twin_that_names_all_keys_alike_overlooks_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.core.held._label", lambda key, index: type(key).__name__)
    watched = StateWatch(made := Corners())
    CORNERS["key that is a tuple"](made)
    assert watched.changed() is None


def test_the_twin_that_looks_at_buffers_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.core.held.StateWatch.changed", lambda self, everything=False: None)
    run(Keeps(only_for_large(WAYS["running mean"][0])), backend="sequential")  # nobody notices
