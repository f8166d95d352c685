"""Every piece of a method is tried on made-up numbers before anything is trained.

The guarantee takes a client's message to be a function of that client's data and the broadcast. A piece that looks at
the other rows of a block, or remembers a client, would break it without a word; one that returns the wrong shape would
train to the end on messages that all count as zero. Packaged methods and users' own go through the same trial.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedflat.assembly.trial import Fault, Form, Vectors, as_expected, numbers, refusing, same, told
from fedflat.assembly.trial_of_server import first_slots, try_server
from fedflat.core.checks import InputError
from fedflat.core.held import global_generators
from fedflat.core.identity import identity_of
from fedflat.core.params import Layout
from fedflat.core.rng import seeded_torch, stream
from fedflat.core.threads import using_threads
from fedflat.core.types import Algorithm, ClientState, LocalView, MaskView, Phase, StateView, UpdateView, broadcast_by
from fedflat.pieces.clipping import MethodScale
from fedflat.pieces.gradients import Composed

ROWS = 3
"""Clients of a tried block."""
SHORT, ENTRIES = 256, 2_000
"""Entries of a tensor in a shortened trial, and of a vector from which the shortened trial comes first."""
CLOSE = 1e-3
"""What rounding may change of a row, relative to its length, when it is alone or at another place in the block."""
Call = Callable[[Tensor, Tensor, np.random.Generator], Tensor]
"""Two inputs of a piece, ``(n, k)`` or ``(k,)``, and a generator -> what it makes of them."""
Names = Sequence[str]
_TRIED: dict[str, bool] = {}
"""What trials found of methods that are made of packaged pieces alone, which their options say all of."""


def try_pieces(algorithm: Algorithm, layout: Layout) -> bool:
    """Raise InputError, naming the piece, for one that fails, returns a wrong shape or type, mixes the clients of a
    block, or remembers earlier ones; numbers that are not finite are no error.

    Returns whether a piece draws random numbers: its clients must then be trained one by one.
    """
    whole = layout.tensors("shared")
    forms = [Form(whole, layout.dimension, layout.size - layout.dimension)]
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


def _try_in_turn(algorithm: Algorithm, forms: list[Form]) -> bool:
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


def _shortened(whole: tuple[slice, ...], personal: int) -> Form:
    tensors, end = list[slice](), 0
    for where in whole:
        tensors.append(slice(end, end + min(where.stop - where.start, SHORT)))
        end = tensors[-1].stop
    return Form(tuple(tensors), end, min(personal, SHORT))


def _try_all(algorithm: Algorithm, form: Form) -> bool:
    slots = first_slots(algorithm, form)
    vectors = {name: numbers(name, form.shared) for name in broadcast_by((*algorithm.server, algorithm.optimizer))}
    states = tuple(state.name for state in algorithm.client_state)
    phases = [(f"algorithm.phases[{index}].rule", phase) for index, phase in enumerate(algorithm.phases)]
    phases += [("algorithm.finetune.rule", algorithm.finetune)] if algorithm.finetune is not None else []
    draws = False
    for name, phase in phases:
        if phase.rule is not None and form.size(phase):
            draws |= _try_one(
                told(name, phase.rule), functools.partial(_steps, phase, form, vectors, states), form.size(phase)
            )
    for index, transform in enumerate(algorithm.transforms):
        call: Call = functools.partial(_transformed, transform, form, vectors, states)
        if index == len(algorithm.transforms) - 1 and algorithm.vectors > 1:
            call = _Longer(call, algorithm.vectors)
        draws |= _try_one(told(f"algorithm.transforms[{index}]", transform), call, form.shared)
    for state in algorithm.client_state:
        moved = functools.partial(_moved, state, algorithm, vectors)
        _try_state(f"algorithm.client_state ({state.name})", moved, form.shared)
    if algorithm.scale is not None:
        _try_scale(algorithm.scale)
    if algorithm.mask is not None:
        _try_mask(algorithm, form)
    try_server(algorithm, form, slots)
    return draws


def _steps(
    phase: Phase,
    form: Form,
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
    as_expected(first, start)
    return cast(Tensor, rule(gradient, view)(start - 0.1 * first))


def _transformed(
    transform: Any,
    form: Form,
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
    one = numbers("a client", ROWS, size), numbers("its gradient", ROWS, size)
    other = numbers("another client", ROWS, size), numbers("another gradient", ROWS, size)
    found, draws = _run(name, call, *one)
    _run(name, call, *other)
    if not same(_run(name, call, *one)[0], found):
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
    one, other = (numbers(who, 2, size) for who in ("a client", "another client"))
    found, draws = _run(name, call, one[0], one[1])
    _run(name, call, other[0], other[1])
    if draws or not same(_run(name, call, one[0], one[1])[0], found):
        raise InputError(f"{name}: found a function that draws or remembers; allowed: one of what it is given.")


def _try_scale(rule: Callable[[Tensor, float], Tensor]) -> None:
    """Try a factor of the method's own; what it does to the norms of a block cannot matter: it is asked one by one."""
    norms = torch.tensor([0.0, 1e-3, 0.5, 2.0, 1e6], dtype=torch.float64)
    clip = MethodScale(rule)
    with refusing("algorithm.scale", rule, "a function of a message's norm and C"):
        if not torch.equal(clip.scale(norms, 1.0), clip.scale(norms, 1.0)):
            raise Fault("other factors for the same norms", "a function of a message's norm and C")


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
        if not same(_run(name, call, rest[0], rest[1])[0][row], found[row]):
            return False
    return True


def _run(name: str, call: Call, *inputs: Tensor) -> tuple[Tensor, bool]:
    """What a piece makes of inputs, with its generators set anew; and whether it drew from torch's or the view's."""
    with refusing(name), seeded_torch(0, "trial of pieces"):
        own, fresh = (stream(0, "trial of a view's generator") for _ in range(2))
        before = global_generators()
        found = call(inputs[0].clone(), inputs[1].clone(), own)
        after = global_generators()
        if before[1:] != after[1:]:
            raise Fault("a draw from a global generator of NumPy or Python", "view.generator, or torch's own generator")
        as_expected(found, _like(call, inputs[0]))
    return found, before[0] != after[0] or own.bytes(16) != fresh.bytes(16)


def _like(call: Call, given: Tensor) -> Tensor:
    """What a piece's outcome should look like."""
    return torch.cat([given] * call.times, -1) if isinstance(call, _Longer) else given


def _try_mask(algorithm: Algorithm, form: Form) -> None:
    """The common mask: boolean, of the vector's length, and the same from the same public randomness."""
    mask: Any = algorithm.mask
    public = (lambda: numbers("public update", form.shared)) if algorithm.options.get("public") else None
    shared, initial = numbers("w^t", form.shared), numbers("w^0", form.shared)
    drawn = list[Tensor]()
    with refusing("algorithm.mask", mask, "a mask made of what its view holds"):
        for _ in range(2):
            with seeded_torch(0, "trial of pieces"):
                found = mask(MaskView(shared.clone(), initial.clone(), stream(0, "trial of a mask"), public))
            as_expected(found, torch.empty(form.shared, dtype=torch.bool))
            drawn.append(found)
        if not torch.equal(*drawn):
            raise Fault("another mask from the same public randomness", "draws from view.generator only")


def _close(a: Tensor, b: Tensor, like: Tensor) -> bool:
    """Up to rounding; entries that are not finite anywhere are left out."""
    apart = torch.where(torch.isfinite(a) & torch.isfinite(b), a - b, torch.zeros_like(a))
    finite = torch.where(torch.isfinite(b), b, torch.zeros_like(b))
    return bool(apart.norm() <= CLOSE * torch.maximum(finite.norm(), like.norm()))
