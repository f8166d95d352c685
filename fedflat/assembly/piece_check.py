"""Try every piece of a method on made-up numbers before anything is trained.

The guarantee takes a client's message to be a function of that client's data and the broadcast. A piece that remembers
a client would break it without a word; one that returns the wrong shape would train to the end on messages that all
count as zero. Packaged methods and users' own go through the same trial, on one client's vectors; in blocks a user's
own piece runs as a recording that cannot reach another row (``engine.isolated``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedflat.assembly.server_check import (
    Fault,
    Form,
    Vectors,
    as_expected,
    first_slots,
    numbers,
    refusing,
    same,
    told,
    try_server,
)
from fedflat.core.checks import InputError
from fedflat.core.held import global_generators
from fedflat.core.identity import identity_of
from fedflat.core.params import Layout
from fedflat.core.process import using_threads
from fedflat.core.rng import seeded_torch, stream
from fedflat.core.types import Algorithm, ClientState, ClientView, MaskView, Phase, broadcast_by
from fedflat.engine import isolated as pieces
from fedflat.pieces.clipping import MethodScale

SHORT, ENTRIES = 256, 2_000
"""Entries of a tensor in a shortened trial, and of a vector from which the shortened trial comes first."""
Call = Callable[[Tensor, Tensor, np.random.Generator], Tensor]
"""Two inputs of a piece, ``(k,)``, and a generator -> what it makes of them."""
Names = Sequence[str]
_TRIED: dict[str, bool] = {}
"""What trials found of methods that are made of packaged pieces alone, which their options say all of."""


def try_pieces(algorithm: Algorithm, layout: Layout) -> bool:
    """Raise InputError, naming the piece, for one that fails, returns a wrong shape or type, or remembers
    earlier clients; numbers that are not finite are no error.

    Returns whether a piece draws random numbers: its clients must then be trained one by one.
    """
    whole = layout.tensors("shared")
    forms = [Form(whole, layout.dimension, layout.size - layout.dimension)]
    if layout.size > ENTRIES:
        # A short vector shows the same faults sooner; only code made for one length needs the long one.
        forms.insert(0, _shortened(whole, layout.size - layout.dimension))
    steps = (*algorithm.server, algorithm.optimizer)
    # Packaged pieces are fully named by their options, so one trial a process is enough.
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
    """Return whether all that clients run are pieces of this package, which are tested to work row by row."""
    phases = [*algorithm.phases, *([] if algorithm.finetune is None else [algorithm.finetune])]
    states = [state.next for state in algorithm.client_state]
    return pieces.packaged(*algorithm.transforms, *(phase.rule for phase in phases), *states, algorithm.scale)


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
            steps = functools.partial(_steps, phase, form, vectors, states)
            draws |= _try_one(name, phase.rule, steps, form.size(phase))
    for index, transform in enumerate(algorithm.transforms):
        call: Call = functools.partial(_transformed, transform, form, vectors, states)
        if index == len(algorithm.transforms) - 1 and algorithm.vectors > 1:
            call = _Longer(call, algorithm.vectors)
        draws |= _try_one(f"algorithm.transforms[{index}]", transform, call, form.shared)
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
    """Return the second gradient of a rule on f(w) = ‖w − target‖²/2 + a wave, after one step."""
    view = ClientView(
        steps=2, lr=0.1, generator=generator, start=start.clone(), clip=1.0, shares=lambda k: torch.full((k,), 1 / k)
    )
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
    view = ClientView(
        steps=2, lr=0.1, broadcast=vectors, state=kept, generator=generator, tensors=form.tensors,
        gradient=gradient.clone, examples=lambda: torch.ones(1),
    )  # fmt: skip
    return cast(Tensor, transform(update.clone(), view))


def _moved(
    state: ClientState, algorithm: Algorithm, vectors: Vectors, sent: Tensor, before: Tensor, _: np.random.Generator
) -> Tensor:
    """Return a client's next state; it is asked for one client at a time."""
    view = ClientView(
        broadcast=vectors, state=_states([one.name for one in algorithm.client_state], before), steps=2, lr=0.1
    )
    return state.next(torch.cat([sent] * algorithm.vectors), view)


def _states(names: Names, like: Tensor) -> dict[str, Tensor]:
    return dict.fromkeys(names, 0.5 * like)


def _try_one(name: str, piece: object, call: Call, size: int) -> bool:
    """Try a piece on made-up vectors of one client; whether it draws random numbers."""
    name = told(name, piece)
    one, other = ([numbers(f"{who} {part}", size) for part in "ab"] for who in ("a client", "another client"))
    # One client, another one, the first again: memory of the second would change the third result.
    found, draws = _run(name, call, *one)
    _run(name, call, *other)
    if not same(_run(name, call, *one)[0], found):
        raise InputError(
            f"{name}: found a piece whose result for a client changes once another client was trained; "
            "allowed: one that remembers no client."
        )
    return draws


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


def _run(name: str, call: Call, *inputs: Tensor) -> tuple[Tensor, bool]:
    """Return what a piece makes of inputs, with its generators set anew; and whether it drew from torch's or the
    view's.
    """
    with refusing(name), seeded_torch(0, "trial of pieces"):
        own, fresh = (stream(0, "trial of a view's generator") for _ in range(2))
        # A draw from a global generator would follow the order of clients, and with it their number.
        before = global_generators()
        found = call(inputs[0].clone(), inputs[1].clone(), own)
        after = global_generators()
        if before[1:] != after[1:]:
            raise Fault("a draw from a global generator of NumPy or Python", "view.generator, or torch's own generator")
        as_expected(found, _like(call, inputs[0]))
    return found, before[0] != after[0] or own.bytes(16) != fresh.bytes(16)


def _like(call: Call, given: Tensor) -> Tensor:
    """Return what a piece's outcome should look like."""
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
