"""Try a method's server steps before training: made-up numbers, and the line that names a faulty piece."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedflat.core.checks import InputError, wrong
from fedflat.core.rng import stream
from fedflat.core.types import AVERAGE, Algorithm, MeanView, Phase, ServerStep, ServerView

ON_CLIENTS = "a piece that works on one client's vector (k,)"
ON_SERVER = "a step that reads its own slots and returns a vector (d,) and its slots"
"""What a piece that failed should be."""


@dataclass(frozen=True)
class Form:
    """Where the tensors of a tried vector lie; entries of the shared part, and of the personal one behind it."""

    tensors: tuple[slice, ...]
    shared: int
    personal: int

    def size(self, phase: Phase) -> int:
        """Return the entries of the part that a phase trains."""
        return {"all": self.shared + self.personal, "shared": self.shared, "personal": self.personal}[phase.part]


Vectors = Mapping[str, Tensor]


class Fault(Exception):
    """What a trial found wrong: (found, allowed)."""


class refusing:
    """Inside, whatever goes wrong becomes an InputError about a piece; ``allowed``: what one is that does not fail."""

    def __init__(self, name: str, piece: object = None, allowed: str = ON_CLIENTS) -> None:
        self.name = name if piece is None else told(name, piece)
        self.allowed = allowed

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Fault):
            raise InputError(f"{self.name}: found {error.args[0]}; allowed: {error.args[1]}.") from error
        if isinstance(error, Exception) and not isinstance(error, InputError):
            line = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{self.name}: found {type(error).__name__} in a trial ({line}); allowed: {self.allowed}."
            ) from error


def as_expected(found: object, like: Tensor) -> None:
    """Raise Fault for what is no tensor of ``like``'s shape and type."""
    shape = tuple(like.shape)
    if not isinstance(found, Tensor):
        raise Fault(f"{type(found).__name__} returned", f"a tensor of shape {shape}")
    if found.shape != like.shape:
        raise Fault(f"shape {tuple(found.shape)} returned for {shape}", "the same shape")
    if found.dtype != like.dtype:
        raise Fault(f"{found.dtype} returned for {like.dtype}", "the same type")


def numbers(purpose: str, *shape: int) -> Tensor:
    """Normal numbers that are the same for a purpose, always."""
    return torch.from_numpy(stream(0, purpose).standard_normal(shape).astype("float32"))


def told(name: str, piece: object) -> str:
    """Return where a piece stands in its method, and what it is called."""
    own = getattr(piece, "__qualname__", None) or type(piece).__qualname__
    return f"{name} ({own.replace('.<locals>', '')})"


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two vectors are equal; NaN is NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def first_slots(algorithm: Algorithm, form: Form) -> dict[str, Tensor]:
    """Return the slots of all server steps at w^0; what clients receive of them is looked at before any client's piece
    is.
    """
    slots: dict[str, Tensor] = {}
    for index, step in enumerate(algorithm.server):
        with refusing(f"algorithm.server[{index}]", step, ON_SERVER):
            _add_slots(slots, step.initial(numbers("w^t", form.shared)))
            _try_broadcast(step, slots, form.shared)
    if algorithm.optimizer is not None:
        with refusing("algorithm.optimizer", algorithm.optimizer, ON_SERVER):
            _try_broadcast(algorithm.optimizer, slots, form.shared)
    return slots


def try_server(algorithm: Algorithm, form: Form, slots: dict[str, Tensor]) -> None:
    """Server steps see nothing private: only what they return is looked at."""
    mean, slots = numbers("a mean", algorithm.vectors * form.shared), dict(slots)
    if algorithm.vectors > 1 and not algorithm.server:
        raise wrong("algorithm.server", f"nothing for messages of {algorithm.vectors} vectors", "a step for their mean")
    for index, step in enumerate(algorithm.server):
        call = functools.partial(_stepped, step, form)
        with refusing(f"algorithm.server[{index}]", step, ON_SERVER):
            mean = _twice(call, mean, mean[: form.shared], slots)
    if algorithm.optimizer is not None:
        with refusing("algorithm.optimizer", algorithm.optimizer, ON_SERVER):
            call = functools.partial(_optimized, algorithm, numbers("w^t", form.shared))
            _twice(call, mean, mean, slots)


def _stepped(step: ServerStep, form: Form, mean: Tensor, slots: dict[str, Tensor]) -> Any:
    return step(mean, ServerView(0, 2, 0.1, form.tensors, slots, 5.0, 20))


def _optimized(algorithm: Algorithm, shared: Tensor, mean: Tensor, slots: dict[str, Tensor]) -> Any:
    """Return one round of the server's optimiser, made anew as in every round."""
    made: Any = algorithm.optimizer
    return made(algorithm.server_lr, MeanView(std=0.1, clip=1.0, divisor=10.0))(shared.clone(), mean, slots)


def _twice(
    call: Callable[[Tensor, dict[str, Tensor]], Any], mean: Tensor, like: Tensor, slots: dict[str, Tensor]
) -> Tensor:
    """Return what the server makes of a mean and slots, which change; the same both times, or a resumed run would
    differ.
    """
    # Run twice on equal copies: a step with memory outside of its slots would resume to another model.
    runs = []
    for _ in range(2):
        after = {name: value.clone() for name, value in slots.items()}
        runs.append((_server_result(call(mean.clone(), after), like, after), after))
    (one, first), (other, second) = runs
    alike = first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if not (alike and same(one, other)):
        raise Fault("another result for the same mean and slots", "a function of these, its memory in named slots")
    slots.update(first)
    return one


def _add_slots(slots: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """A step's slots among the others'; each has a name of its own."""
    if taken := more.keys() & {*slots, AVERAGE}:
        raise Fault(f"the slot {min(taken)!r} twice", "a name that no other step and not the released average has")
    slots.update(more)


def _try_broadcast(piece: object, slots: Vectors, size: int) -> None:
    """What clients receive of the server's slots: named in a tuple, of the model's length."""
    if not hasattr(piece, "broadcast"):
        return
    # A forgotten comma makes a string of the tuple, whose letters would be taken for names.
    if isinstance(piece.broadcast, str):
        raise Fault(f"broadcast = {piece.broadcast!r}", f"a tuple of names: ({piece.broadcast!r},), with the comma")
    for name in piece.broadcast:
        if name in slots and tuple(slots[name].shape) != (size,):
            raise Fault(f"the broadcast slot {name!r} of shape {tuple(slots[name].shape)}", f"({size},)")


def _server_result(found: Any, like: Tensor, slots: dict[str, Tensor]) -> Tensor:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise Fault(f"{type(found).__name__} returned", "(a vector, changed slots)")
    as_expected(found[0], like)
    slots.update(found[1])
    return cast(Tensor, found[0])
