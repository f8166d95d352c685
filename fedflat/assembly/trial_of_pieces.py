"""Every piece of a method is tried on made-up numbers before anything is trained.

The guarantee takes a client's message to be a function of that client's data and the broadcast. A piece that looks at
the other rows of a block, or remembers a client, would break it without a word; one that returns the wrong shape would
train to the end on messages that all count as zero. Packaged methods and users' own go through the same trial.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import InputError, wrong
from fedflat.core.held import global_generators
from fedflat.core.identity import identity_of
from fedflat.core.params import Layout
from fedflat.core.rng import seeded_torch, stream
from fedflat.core.threads import using_threads
from fedflat.core.types import (
    AVERAGE,
    Algorithm,
    Broadcasting,
    ClientState,
    LocalView,
    MaskView,
    MeanView,
    Phase,
    ServerStep,
    ServerView,
    StateView,
    UpdateView,
    broadcast_by,
)
from fedflat.pieces.clipping import MethodScale
from fedflat.pieces.gradients import Composed

ROWS = 3
"""Clients of a tried block."""
SHORT, ENTRIES = 256, 2_000
"""Entries of a tensor in a shortened trial, and of a vector from which the shortened trial comes first."""
ON_CLIENTS = "a piece that works on the last axis, of one client's vector (k,) and of a block's (n, k)"
ON_SERVER = "a step that reads its own slots and returns a vector (d,) and its slots"
"""What a piece that failed should be."""
CLOSE = 1e-3
"""What rounding may change of a row, relative to its length, when it is alone or at another place in the block."""


@dataclass(frozen=True)
class _Form:
    """Where the tensors of a tried vector lie; entries of the shared part, and of the personal one behind it."""

    tensors: tuple[slice, ...]
    shared: int
    personal: int

    def size(self, phase: Phase) -> int:
        """Entries of the part that a phase trains."""
        return {"all": self.shared + self.personal, "shared": self.shared, "personal": self.personal}[phase.part]


Call = Callable[[Tensor, Tensor, np.random.Generator], Tensor]
"""Two inputs of a piece, ``(n, k)`` or ``(k,)``, and a generator -> what it makes of them."""
Vectors = Mapping[str, Tensor]
Names = Sequence[str]


_TRIED: dict[str, bool] = {}
"""What trials found of methods that are made of packaged pieces alone, which their options say all of."""


def try_pieces(algorithm: Algorithm, layout: Layout) -> bool:
    """Raise InputError, naming the piece, for one that fails, returns a wrong shape or type, mixes the clients of a
    block, or remembers earlier ones; numbers that are not finite are no error.

    Returns whether a piece draws random numbers: its clients must then be trained one by one.
    """
    whole = layout.tensors("shared")
    forms = [_Form(whole, layout.dimension, layout.size - layout.dimension)]
    if layout.size > ENTRIES:
        forms.insert(0, _shortened(whole, layout.size - layout.dimension))
    steps = (*algorithm.server, algorithm.optimizer)
    fixed = packaged(algorithm) and all(step is None or type(step).__module__.startswith("fedflat.") for step in steps)
    digest = identity_of(algorithm) if fixed else None
    if digest is None:
        return _try_in_turn(algorithm, forms)
    key = f"{digest} {forms}"
    if key not in _TRIED:
        _TRIED[key] = _try_in_turn(algorithm, forms)
    return _TRIED[key]


def _try_in_turn(algorithm: Algorithm, forms: list[_Form]) -> bool:
    with using_threads(1):
        try:
            return _try_all(algorithm, forms[0])
        except InputError:
            if len(forms) == 1:
                raise
            return _try_all(algorithm, forms[1])  # a piece may be made for vectors of this length only


def packaged(algorithm: Algorithm) -> bool:
    """Whether all that clients run are pieces of this package, which are tested to work row by row. No trial shows what
    a user's own does to the rows of a block once real data are in them, so those clients are trained one by one."""
    phases = [*algorithm.phases, *([] if algorithm.finetune is None else [algorithm.finetune])]
    pieces: list[Any] = [*algorithm.transforms, *(phase.rule for phase in phases if phase.rule is not None)]
    pieces += [state.next for state in algorithm.client_state]
    pieces += [] if algorithm.scale is None else [algorithm.scale]
    while pieces:
        piece = pieces.pop()
        if isinstance(piece, Composed):
            pieces += [piece.outer, piece.inner]
        elif not piece.__module__.startswith("fedflat.pieces."):  # a function's, or a class's
            return False
    return True


def _shortened(whole: tuple[slice, ...], personal: int) -> _Form:
    tensors, end = list[slice](), 0
    for where in whole:
        tensors.append(slice(end, end + min(where.stop - where.start, SHORT)))
        end = tensors[-1].stop
    return _Form(tuple(tensors), end, min(personal, SHORT))


def _try_all(algorithm: Algorithm, form: _Form) -> bool:
    slots: dict[str, Tensor] = {}
    for index, step in enumerate(algorithm.server):
        with _named(f"algorithm.server[{index}]", step, ON_SERVER):
            _add_slots(slots, step.initial(_numbers("w^t", form.shared)))
            _try_broadcast(step, slots, form.shared)
    if algorithm.optimizer is not None:
        with _named("algorithm.optimizer", algorithm.optimizer, ON_SERVER):
            _try_broadcast(algorithm.optimizer, slots, form.shared)
    vectors = {name: _numbers(name, form.shared) for name in broadcast_by((*algorithm.server, algorithm.optimizer))}
    states = tuple(state.name for state in algorithm.client_state)
    phases = [(f"algorithm.phases[{index}].rule", phase) for index, phase in enumerate(algorithm.phases)]
    phases += [("algorithm.finetune.rule", algorithm.finetune)] if algorithm.finetune is not None else []
    draws = False
    for name, phase in phases:
        if phase.rule is not None and form.size(phase):
            draws |= _try_one(
                _told(name, phase.rule), functools.partial(_steps, phase, form, vectors, states), form.size(phase)
            )
    for index, transform in enumerate(algorithm.transforms):
        call: Call = functools.partial(_transformed, transform, form, vectors, states)
        if index == len(algorithm.transforms) - 1 and algorithm.vectors > 1:
            call = _Longer(call, algorithm.vectors)
        draws |= _try_one(_told(f"algorithm.transforms[{index}]", transform), call, form.shared)
    for state in algorithm.client_state:
        moved = functools.partial(_moved, state, algorithm, vectors)
        _try_state(f"algorithm.client_state ({state.name})", moved, form.shared)
    if algorithm.scale is not None:
        _try_scale(algorithm.scale)
    if algorithm.mask is not None:
        _try_mask(algorithm, form)
    _try_server(algorithm, form, slots)
    return draws


def _steps(
    phase: Phase,
    form: _Form,
    vectors: Vectors,
    states: Names,
    start: Tensor,
    target: Tensor,
    generator: np.random.Generator,
) -> Tensor:
    """The second gradient of a rule on f(w) = ‖w − target‖²/2 + a wave, after one step."""
    view = LocalView(start.clone(), 1.0, steps=2, lr=0.1, generator=generator)
    if phase.part != "personal":
        view = replace(view, broadcast=vectors, state=_states(states, target), tensors=form.tensors)
    rule: Any = phase.rule

    def gradient(w: Tensor) -> Tensor:
        return (w - target) + 0.1 * torch.sin(3 * w)

    first = rule(gradient, view)(start.clone())
    _as_expected(first, start)
    return cast(Tensor, rule(gradient, view)(start - 0.1 * first))


def _transformed(
    transform: Any,
    form: _Form,
    vectors: Vectors,
    states: Names,
    update: Tensor,
    gradient: Tensor,
    generator: np.random.Generator,
) -> Tensor:
    kept = _states(states, gradient)
    view = UpdateView(form.tensors, gradient.clone, 2, 0.1, broadcast=vectors, state=kept, generator=generator)
    return cast(Tensor, transform(update.clone(), view))


def _moved(
    state: ClientState, algorithm: Algorithm, vectors: Vectors, sent: Tensor, before: Tensor, _: np.random.Generator
) -> Tensor:
    """A client's next state; it is asked for one client at a time."""
    view = StateView(vectors, _states([one.name for one in algorithm.client_state], before), 2, 0.1)
    return state.next(torch.cat([sent] * algorithm.vectors), view)


def _states(names: Names, like: Tensor) -> dict[str, Tensor]:
    return dict.fromkeys(names, 0.5 * like)


def _try_one(name: str, call: Call, size: int) -> bool:
    """Try a piece that works for one client and for a block; whether it draws random numbers."""
    one = _numbers("a client", ROWS, size), _numbers("its gradient", ROWS, size)
    other = _numbers("another client", ROWS, size), _numbers("another gradient", ROWS, size)
    found, draws = _run(name, call, *one)
    _run(name, call, *other)
    if not _same(_run(name, call, *one)[0], found):
        raise InputError(
            f"{name}: found a piece whose result for a client changes once another client was trained; "
            "allowed: one that remembers no client."
        )
    alone = [_run(name, call, one[0][row], one[1][row])[0] for row in range(ROWS)]
    if draws:
        return True
    turned = _run(name, call, one[0].flip(0), one[1].flip(0))[0].flip(0)
    for row in range(ROWS):
        near = _close(alone[row], found[row], one[0][row]) and _close(turned[row], found[row], one[0][row])
        if not near or not _strangers(name, call, one, other, found, row):
            raise InputError(
                f"{name}: found a piece that mixes the clients of a block; allowed: one that works on the last axis, "
                "row by row."
            )
    return False


def _try_state(name: str, call: Call, size: int) -> None:
    """Try a state's function, which is asked for one client at a time."""
    one, other = (_numbers(who, 2, size) for who in ("a client", "another client"))
    found, draws = _run(name, call, one[0], one[1])
    _run(name, call, other[0], other[1])
    if draws or not _same(_run(name, call, one[0], one[1])[0], found):
        raise InputError(f"{name}: found a function that draws or remembers; allowed: one of what it is given.")


def _try_scale(rule: Callable[[Tensor, float], Tensor]) -> None:
    """Try a factor of the method's own; what it does to the norms of a block cannot matter: it is asked one by one."""
    norms = torch.tensor([0.0, 1e-3, 0.5, 2.0, 1e6], dtype=torch.float64)
    clip = MethodScale(rule)
    with _named("algorithm.scale", rule, "a function of a message's norm and C"):
        if not torch.equal(clip.scale(norms, 1.0), clip.scale(norms, 1.0)):
            raise _Fault("other factors for the same norms", "a function of a message's norm and C")


@dataclass(frozen=True)
class _Longer:
    """A transform that makes messages of ``times`` vectors."""

    call: Call
    times: int

    def __call__(self, one: Tensor, other: Tensor, generator: np.random.Generator) -> Tensor:
        return self.call(one, other, generator)


def _strangers(
    name: str, call: Call, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], found: Tensor, row: int
) -> bool:
    """Whether a row stays the same bits, whatever is in the others."""
    for scale in (1.0, 1e6, 0.0, float("nan")):
        rest = [values * scale for values in other]
        for mine, theirs in zip(rest, one):
            mine[row] = theirs[row]
        if not _same(_run(name, call, rest[0], rest[1])[0][row], found[row]):
            return False
    return True


def _run(name: str, call: Call, *inputs: Tensor) -> tuple[Tensor, bool]:
    """What a piece makes of inputs, with its generators set anew; and whether it drew from torch's or the view's."""
    with _named(name), seeded_torch(0, "trial of pieces"):
        own, fresh = (stream(0, "trial of a view's generator") for _ in range(2))
        before = global_generators()
        found = call(inputs[0].clone(), inputs[1].clone(), own)
        after = global_generators()
        if before[1:] != after[1:]:
            raise _Fault(
                "a draw from a global generator of NumPy or Python", "view.generator, or torch's own generator"
            )
        _as_expected(found, _like(call, inputs[0]))
    return found, before[0] != after[0] or own.bytes(16) != fresh.bytes(16)


def _like(call: Call, given: Tensor) -> Tensor:
    """What a piece's outcome should look like."""
    return torch.cat([given] * call.times, -1) if isinstance(call, _Longer) else given


class _Fault(Exception):
    """found, allowed."""


class _named:
    """Inside, whatever goes wrong becomes an InputError about a piece; ``allowed``: what one is that does not fail."""

    def __init__(self, name: str, piece: object = None, allowed: str = ON_CLIENTS) -> None:
        self.name = name if piece is None else _told(name, piece)
        self.allowed = allowed

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _Fault):
            raise InputError(f"{self.name}: found {error.args[0]}; allowed: {error.args[1]}.") from error
        if isinstance(error, Exception) and not isinstance(error, InputError):
            line = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{self.name}: found {type(error).__name__} in a trial ({line}); allowed: {self.allowed}."
            ) from error


def _as_expected(found: object, like: Tensor) -> None:
    shape = tuple(like.shape)
    if not isinstance(found, Tensor):
        raise _Fault(f"{type(found).__name__} returned", f"a tensor of shape {shape}")
    if found.shape != like.shape:
        raise _Fault(f"shape {tuple(found.shape)} returned for {shape}", "the same shape")
    if found.dtype != like.dtype:
        raise _Fault(f"{found.dtype} returned for {like.dtype}", "the same type")


def _try_mask(algorithm: Algorithm, form: _Form) -> None:
    """The common mask: boolean, of the vector's length, and the same from the same public randomness."""
    mask: Any = algorithm.mask
    public = (lambda: _numbers("public update", form.shared)) if algorithm.options.get("public") else None
    shared, initial = _numbers("w^t", form.shared), _numbers("w^0", form.shared)
    drawn = list[Tensor]()
    with _named("algorithm.mask", mask, "a mask made of what its view holds"):
        for _ in range(2):
            with seeded_torch(0, "trial of pieces"):
                found = mask(MaskView(shared.clone(), initial.clone(), stream(0, "trial of a mask"), public))
            _as_expected(found, torch.empty(form.shared, dtype=torch.bool))
            drawn.append(found)
        if not torch.equal(*drawn):
            raise _Fault("another mask from the same public randomness", "draws from view.generator only")


def _try_server(algorithm: Algorithm, form: _Form, slots: dict[str, Tensor]) -> None:
    """Server steps see nothing private: only what they return is looked at."""
    mean, slots = _numbers("a mean", algorithm.vectors * form.shared), dict(slots)
    if algorithm.vectors > 1 and not algorithm.server:
        raise wrong("algorithm.server", f"nothing for messages of {algorithm.vectors} vectors", "a step for their mean")
    for index, step in enumerate(algorithm.server):
        call = functools.partial(_stepped, step, form)
        with _named(f"algorithm.server[{index}]", step, ON_SERVER):
            mean = _twice(call, mean, mean[: form.shared], slots)
    if algorithm.optimizer is not None:
        with _named("algorithm.optimizer", algorithm.optimizer, ON_SERVER):
            call = functools.partial(_optimized, algorithm, _numbers("w^t", form.shared))
            _twice(call, mean, mean, slots)


def _stepped(step: ServerStep, form: _Form, mean: Tensor, slots: dict[str, Tensor]) -> Any:
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
    alike = first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())
    if not (alike and _same(one, other)):
        raise _Fault("another result for the same mean and slots", "a function of these, its memory in named slots")
    slots.update(first)
    return one


def _add_slots(slots: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """A step's slots among the others'; each has a name of its own."""
    if taken := more.keys() & {*slots, AVERAGE}:
        raise _Fault(f"the slot {min(taken)!r} twice", "a name that no other step and not the released average has")
    slots.update(more)


def _try_broadcast(piece: object, slots: Vectors, size: int) -> None:
    """What clients receive of the server's slots: named in a tuple, of the model's length."""
    if not isinstance(piece, Broadcasting):
        return
    if isinstance(piece.broadcast, str):
        raise _Fault(f"broadcast = {piece.broadcast!r}", f"a tuple of names: ({piece.broadcast!r},), with the comma")
    for name in piece.broadcast:
        if name in slots and tuple(slots[name].shape) != (size,):
            raise _Fault(f"the broadcast slot {name!r} of shape {tuple(slots[name].shape)}", f"({size},)")


def _server_result(found: Any, like: Tensor, slots: dict[str, Tensor]) -> Tensor:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise _Fault(f"{type(found).__name__} returned", "(a vector, changed slots)")
    _as_expected(found[0], like)
    slots.update(found[1])
    return cast(Tensor, found[0])


def _numbers(purpose: str, *shape: int) -> Tensor:
    return torch.from_numpy(stream(0, purpose).standard_normal(shape).astype("float32"))


def _told(name: str, piece: object) -> str:
    own = getattr(piece, "__qualname__", None) or type(piece).__qualname__
    return f"{name} ({own.replace('.<locals>', '')})"


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: Tensor, b: Tensor, like: Tensor) -> bool:
    """Up to rounding; entries that are not finite anywhere are left out."""
    apart = torch.where(torch.isfinite(a) & torch.isfinite(b), a - b, torch.zeros_like(a))
    finite = torch.where(torch.isfinite(b), b, torch.zeros_like(b))
    return bool(apart.norm() <= CLOSE * torch.maximum(finite.norm(), like.norm()))
