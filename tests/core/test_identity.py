"""What a method or model given in Python is: equal where it acts equally, different where it does not."""

import ctypes
import enum
import functools
import itertools
import math
import os
import subprocess
import sys
import time
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedflat.algorithms import dp_fedsam
from fedflat.core import identity
from fedflat.core.identity import identity_of


def scaled(factor: float) -> Any:
    def rule(vector: torch.Tensor) -> torch.Tensor:
        return vector * factor

    return rule


def plus(factor: float) -> Any:
    def rule(vector: torch.Tensor) -> torch.Tensor:
        return vector + factor

    return rule


def with_default(x: int, y: int = 1) -> int:
    return x + y


class Net(nn.Module):
    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.power, self.inner = power, nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) ** self.power


class Other(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@dataclass
class Holder:
    held: Any
    own: list[Any] = field(default_factory=list)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def cyclic() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


SCALE = 1.0


def inside(x: float) -> float:
    return next(scale * SCALE for scale in [x])


settings = types.ModuleType("settings_of_a_user")
settings.inner = types.ModuleType("settings_of_a_user.inner")  # type: ignore[attr-defined]


def of_a_module(x: float) -> float:
    return x * settings.scale  # type: ignore[attr-defined,no-any-return]


class Counted(float):
    """A number with attributes."""


@dataclass
class Trained:
    training: float = 1.0
    grad: float = 1.0


def _global(value: float) -> Any:
    globals()["SCALE"] = value
    return inside


def _setting(value: float) -> Any:
    settings.scale = value  # type: ignore[attr-defined]
    return of_a_module


def _attribute(made: Any, value: float) -> Any:
    made.extra = value
    return made


def _order(value: float) -> nn.Module:
    return nn.Sequential(OrderedDict(sorted({"a": nn.Tanh(), "b": nn.ReLU()}.items(), reverse=value > 1)))


def _nested(value: float) -> Any:
    return Holder([{"steps": dict(sorted({"add": 1.0, "scale": 2.0}.items(), reverse=value > 1))}])


def _mode(value: float) -> Any:
    class Mode(enum.Enum):
        A = "a"

        def act(self, x: float) -> float:
            return x * self.scale()

        scale = (lambda self: 1.0) if value < 2 else (lambda self: 2.0)

    return Mode


ONLY: dict[str, Callable[[float], Any]] = {
    "what a member of an enumeration does": lambda value: _mode(value).A,
    "what a missing key of a map gives": lambda value: defaultdict(plus(value)),
    "a global of an inner function": _global, "a constant of a user's module": _setting,
    "a field named training": lambda value: Trained(training=value),
    "a field named grad": lambda value: Trained(grad=value), "the order of layers": _order,
    "the order of a map inside a list": _nested, "the owner of a built-in method": lambda value: [value].__getitem__,
    "a function's attribute": lambda value: _attribute(plus(1.0), value),
    "a number's attribute": lambda value: _attribute(Counted(1), value),
    "a tensor's attribute": lambda value: _attribute(torch.ones(2), value),
    "a name taken from torch": lambda value: functools.wraps(torch.relu)(eval(f"lambda x: x * {value}")),
    "what a partial's class does": lambda value: type("Own", (functools.partial,), {"__call__": plus(value)})(len),
    "a tensor's class": lambda value: torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {"act": plus(value)})),
    "order in memory": lambda value: torch.ones(2, 3).as_strided((2, 3), (3, 1) if value > 1 else (1, 2)),
    "bf16": lambda value: torch.ones(2, dtype=torch.bfloat16 if value > 1 else torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("what", ONLY)
def test_a_difference_in_one_thing_only_shows(what: str) -> None:
    found = [identity_of(ONLY[what](value)) for value in (1.0, 2.0, 1.0)]
    assert None not in found and found[0] != found[1] and found[0] == found[2]


MAKERS: list[Any] = [
    lambda: 1, lambda: 1.0, lambda: "1", lambda: None, lambda: (1, 2), lambda: [1, 2], lambda: {1, 2}, lambda: {"a": 1,
    "b": 2}, lambda: scaled(1.0), lambda: scaled(2.0), lambda: plus(2.0), lambda: with_default, lambda:
    functools.partial(with_default, 1), lambda: functools.partial(with_default, 2), lambda: Net(), lambda: Net(2),
    lambda: Other(), lambda: Net().forward, lambda: Holder(1), lambda: Holder(2), lambda: Holder(scaled(1.0)), lambda:
    Slotted(1), lambda: Slotted(2), lambda: Slotted, lambda: np.arange(3), lambda: np.arange(3.0), lambda:
    torch.arange(3.0, dtype=torch.bfloat16), lambda: torch.float32, lambda: len, lambda: np, lambda: cyclic(), lambda:
    dp_fedsam(0.5), lambda: dp_fedsam(0.4), lambda: Holder, lambda: nn.Linear,
]  # fmt: skip


def test_equal_objects_have_equal_digests_and_no_two_others() -> None:
    found = [identity_of(make()) for make in MAKERS]
    assert None not in found and len(set(found)) == len(MAKERS)
    assert found == [identity_of(make()) for make in MAKERS]


def test_a_trained_mode_changes_nothing_and_a_weight_does() -> None:
    net = Net()
    assert identity_of(net.eval()) == identity_of(Net())
    with torch.no_grad():
        net.inner.weight[0, 0] = 2
    assert identity_of(net) != identity_of(Net())


@pytest.mark.parametrize("value", [iter([1]), np.ma.masked, np.array([object()]), Holder(iter("a")), (x for x in "a")])
def test_what_cannot_be_looked_into_is_not_identified(value: Any) -> None:
    assert identity_of(value) is None


def reads_the_environment(x: float) -> float:
    return x * float(os.environ.get("SCALE", "1"))


def reads_the_environment_inside(x: float) -> float:
    from os import getenv

    return x * float(getenv("SCALE", "1"))


def reads_a_file(x: float) -> float:
    with open("scale.txt") as file:
        return x * float(file.read())


def reads_a_tensor(x: float) -> Any:
    return x * torch.load("scale.pt")


def reads_a_global_by_its_name(x: float) -> Any:
    return x * globals()["SCA" + "LE"]


def reads_a_module_by_name(x: float) -> Any:
    return x * getattr(settings, "sca" + "le")


def reads_the_clock(x: float) -> float:
    return x * time.time()


def reads_a_module_of_a_module(x: float) -> Any:
    return settings.inner.scale * x


def imports_as_it_runs(x: float) -> Any:
    import settings_of_a_user  # type: ignore[import-not-found]

    return x * settings_of_a_user.scale


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda: x * float(Path("scale.txt").read_text()))()


class Deque(deque):  # type: ignore[type-arg]
    """A C object with a dictionary of attributes, and its values elsewhere."""


OUTSIDE: list[Any] = [
    reads_the_environment, reads_the_environment_inside, reads_a_file, reads_a_tensor, reads_a_global_by_its_name,
    reads_a_module_by_name, reads_a_module_of_a_module, reads_the_clock, imports_as_it_runs, Reads(),
    functools.partial(reads_a_file), ctypes.c_int(3), ctypes.c_double(3.0), Holder(ctypes.c_int(3)), (ctypes.c_int *
    2)(1, 2), Deque([1]),
]  # fmt: skip


@pytest.mark.parametrize("value", OUTSIDE, ids=[getattr(v, "__name__", type(v).__name__) for v in OUTSIDE])
def test_what_reads_the_outside_is_not_identified(value: Any) -> None:
    assert identity_of(value) is None


@functools.cache
def cached(x: float) -> float:
    return x * SCALE


def of_the_library(x: Any) -> Any:
    return np.load_like(x) + math.sqrt(itertools.count())  # type: ignore[attr-defined,arg-type,type-var]


def test_code_that_keeps_to_itself_is_identified() -> None:
    """Else every method of one's own would do without the seed."""
    for value in (cached, of_the_library, Net(), nn.Sequential(nn.Linear(2, 2)), Slotted(1), Counted(1)):
        assert identity_of(value) is not None, value


def test_identity_that_sorts_maps_or_reads_names_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins: no look at names that reach outside, and none at what C objects hold."""
    monkeypatch.setattr(identity, "_refuse_outside", lambda value, names: None)
    assert identity_of(reads_the_environment) is not None
    monkeypatch.setattr(identity, "_has_hidden", lambda kind: False)
    assert identity_of(ctypes.c_int(3)) == identity_of(ctypes.c_int(4)) is not None


def test_the_same_in_another_process() -> None:
    code = (
        "from fedflat.core.identity import identity_of\n"
        "from fedflat.algorithms import dp_fedsam\n"
        "def rule(x, y=3):\n    return (lambda z: z in {'a', 'b', 'c'})(x)\n"
        "found = identity_of((dp_fedsam(0.3), rule, {'x', 'y'}))"
    )
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(code, here)
    words = [sys.executable, "-c", f"{code}\nprint(found)"]
    there = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert there == here["found"] and len(there) == 64
