"""A method's server steps and optimiser, tried before anything is trained: they see nothing private."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from fedflat.assembly.trial import ON_SERVER, Fault, Form, Vectors, as_expected, numbers, refusing, same
from fedflat.core.checks import wrong
from fedflat.core.types import AVERAGE, Algorithm, Broadcasting, MeanView, ServerStep, ServerView


def first_slots(algorithm: Algorithm, form: Form) -> dict[str, Tensor]:
    """The slots of all server steps at w^0; what clients receive of them is looked at before any client's piece is."""
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
    """One round of the server's optimiser, made anew as in every round."""
    made: Any = algorithm.optimizer
    return made(algorithm.server_lr, MeanView(std=0.1, clip=1.0, divisor=10.0))(shared.clone(), mean, slots)


def _twice(
    call: Callable[[Tensor, dict[str, Tensor]], Any], mean: Tensor, like: Tensor, slots: dict[str, Tensor]
) -> Tensor:
    """What the server makes of a mean and slots, which change; the same both times, or a resumed run would differ."""
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
    if not isinstance(piece, Broadcasting):
        return
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
