"""Try every piece of a method on made-up numbers before anything is trained.

The guarantee takes a client's message to be a function of that client's data and the broadcast. A piece that remembers
a client would break it without a word; one that returns the wrong shape would train to the end on messages that all
count as zero. Packaged methods and users' own go through the same trial, on one client's vectors; in blocks a user's
own piece runs as a recording that cannot reach another row (``engine.isolated``).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import Layout, equal, global_generators, seeded_torch, stream, using_threads
from fedflat.core.checks import InputError, becoming, users_code, wrong
from fedflat.core.types import AVERAGE, Algorithm, ClientState, ClientView, MaskView, MeanView, ServerView, broadcast_by
from fedflat.engine.isolated import called
from fedflat.methods.rounds import scaling_clip

SHORT, ENTRIES = 256, 2_000
"""Entries of a tensor in a shortened trial, and of a vector from which the shortened trial comes first."""
ON_CLIENTS = "a piece that is called with ({}, view) and works on one client's vector (k,)"
ON_SERVER = "a step that reads its own slots and returns a vector (d,) and its slots"
OPTIMIZER = "algorithm.optimizer"
Call = Callable[[Tensor, Tensor, np.random.Generator], Any]
"""Two inputs of a piece, ``(k,)``, and a generator -> what it makes of them."""


def try_pieces(algorithm: Algorithm, layout: Layout) -> bool:
    """Raise InputError, naming the piece, for one that fails, returns a wrong shape or type, or remembers
    earlier clients; numbers that are not finite are no error.

    Returns whether a piece draws random numbers: its clients must then be trained one by one.
    """
    with using_threads(1):
        if layout.size > ENTRIES:
            # A short vector shows the same faults sooner; only code made for one length needs the long one.
            shapes = tuple(torch.Size([min(length, SHORT)]) for length in layout.lengths)
            with suppress(InputError):  # a piece may be made for vectors of the model's length only
                return _Trial(algorithm, replace(layout, shapes=shapes)).run()
        return _Trial(algorithm, layout).run()


class Fault(Exception):
    """What a trial found wrong: (found, allowed)."""


@contextmanager
def _refusing(name: str, piece: object, allowed: str) -> Iterator[None]:
    """Inside the block whatever goes wrong becomes an InputError that names the piece and where it stands in its
    method; ``allowed``: what a piece is that does not fail.
    """
    name = f"{name} ({called(piece)})"
    with users_code(name, allowed), becoming(lambda fault: wrong(name, *fault.args), Fault):
        yield


def _check_form(result: object, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Raise Fault for what is no tensor of a shape and type."""
    if not isinstance(result, Tensor):
        raise Fault(f"{type(result).__name__} returned", f"a tensor of shape {shape}")
    for returned, wanted, kind in ((tuple(result.shape), shape, "shape"), (result.dtype, dtype, "type")):
        if returned != wanted:
            raise Fault(f"{kind} {returned} returned for {wanted}", f"the same {kind}")


def _numbers(purpose: str, size: int) -> Tensor:
    """Return normal numbers that are the same for a purpose, always."""
    return torch.from_numpy(stream(0, purpose).standard_normal(size).astype("float32"))


class _Trial:
    """A method's pieces on made-up vectors in the form of a model's. slots: the server's, as its steps change them."""

    def __init__(self, algorithm: Algorithm, layout: Layout) -> None:
        self.algorithm, self.layout, self.size = algorithm, layout, layout.dimension
        self.tensors, self.weights = layout.tensors("shared"), _numbers("w^t", layout.dimension)
        self.slots: dict[str, Tensor] = {}
        self.on_server: dict[str, Any] = {f"algorithm.server[{i}]": step for i, step in enumerate(algorithm.server)}
        if algorithm.optimizer is not None:
            self.on_server[OPTIMIZER] = algorithm.optimizer

    def run(self) -> bool:
        """Try all of them; return whether one that clients run draws random numbers."""
        # What clients receive of the server's slots comes before any client's piece.
        self._try_slots()
        draws = self._try_clients()
        if self.algorithm.scale is not None:
            _try_scale(self.algorithm.scale)
        if self.algorithm.mask is not None:
            self._try_mask(self.algorithm.mask)
        self._try_server()
        return draws

    def _try_clients(self) -> bool:
        """Try gradient rules, transforms and states; return whether one draws random numbers."""
        method, size = self.algorithm, self.size
        phases = {f"algorithm.phases[{index}].rule": phase for index, phase in enumerate(method.phases)}
        if method.finetune is not None:
            phases["algorithm.finetune.rule"] = method.finetune
        draws = [
            self._try_one(name, phase.rule, functools.partial(self._train, phase), entries)
            for name, phase in phases.items()
            if phase.rule is not None and (entries := len(range(self.layout.size)[self.layout.span(phase.part)]))
        ]
        for index, transform in enumerate(method.transforms):
            vectors = method.vectors if index == len(method.transforms) - 1 else 1
            call = functools.partial(self._transform, transform)
            draws.append(self._try_one(f"algorithm.transforms[{index}]", transform, call, size, vectors))
        for state in method.client_state:
            name, call = f"algorithm.client_state ({state.name})", functools.partial(self._remember, state)
            if self._try_one(name, state.next, call, size):
                raise InputError(f"{name}: found a function that draws random numbers; allowed: one that does not.")
        return any(draws)

    def _try_one(self, name: str, piece: object, call: Call, size: int, vectors: int = 1) -> bool:
        """Try a piece on made-up vectors of one client; return whether it draws random numbers.

        vectors: how many vectors its outcome has for one of the input.
        """
        one, other = ([_numbers(f"{who} {part}", size) for part in "ab"] for who in ("a client", "another client"))
        given = "gradient" if name.endswith("rule") else "update" if "transforms" in name else "sent"
        with _refusing(name, piece, ON_CLIENTS.format(given)):
            # One client, another one, the first again: memory of the second would change the third result.
            results, draws = zip(*(_run(call, inputs, vectors * size) for inputs in (one, other, one)))
            if not equal(results[0], results[2]):
                problem = "a piece whose result for a client changes once another client was trained"
                raise Fault(problem, "one that remembers no client")
        return bool(draws[0])

    def _view(self, like: Tensor, generator: np.random.Generator, **only: Any) -> ClientView:
        """Return what a piece may see. like: what its states are made from; only: what one kind of piece sees."""
        method = self.algorithm
        names = broadcast_by((*method.server, method.optimizer))
        return ClientView(
            steps=2, lr=0.1, broadcast={name: _numbers(name, self.size) for name in names},
            state={state.name: 0.5 * like for state in method.client_state}, generator=generator,
            tensors=self.tensors, **only,
        )  # fmt: skip

    def _train(self, phase: Any, start: Tensor, target: Tensor, generator: np.random.Generator) -> Any:
        """Return the second gradient of a rule on f(w) = ‖w − target‖²/2 + a wave, after one step."""
        view = self._view(
            target, generator, start=start.clone(), clip=1.0, shares=lambda classes: torch.full((classes,), 1 / classes)
        )
        if phase.part == "personal":
            view = replace(view, broadcast={}, state={}, tensors=())

        def gradient(w: Tensor) -> Tensor:
            return (w - target) + 0.1 * torch.sin(3 * w)

        first = phase.rule(gradient, view)(start.clone())
        _check_form(first, tuple(start.shape))
        return phase.rule(gradient, view)(start - 0.1 * first)

    def _transform(self, transform: Any, update: Tensor, gradient: Tensor, generator: np.random.Generator) -> Any:
        seen = {"gradient": gradient.clone, "examples": lambda: torch.ones(1)}
        return transform(update, self._view(gradient, generator, **seen))

    def _remember(self, state: ClientState, sent: Tensor, before: Tensor, generator: np.random.Generator) -> Any:
        return state.next(sent.repeat(self.algorithm.vectors), self._view(before, generator))

    def _try_mask(self, mask: Callable[[MaskView], Tensor]) -> None:
        """Try the common mask: boolean, of the vector's length, and the same from the same public randomness."""
        public = (lambda: _numbers("public update", self.size)) if self.algorithm.options.get("public") else None
        drawn = list[Tensor]()
        with _refusing("algorithm.mask", mask, "a mask made of what its view holds"):
            for _ in range(2):
                generator, vectors = stream(0, "trial of a mask"), (self.weights.clone(), _numbers("w^0", self.size))
                with seeded_torch(0, "trial of pieces"):
                    drawn.append(mask(MaskView(*vectors, generator, public)))
                _check_form(drawn[-1], (self.size,), torch.bool)
            if not torch.equal(*drawn):
                raise Fault("another mask from the same public randomness", "draws from view.generator only")

    def _try_slots(self) -> None:
        """Look at the slots of the server's pieces at w^0, each with a name of its own, and at what clients receive."""
        for place, piece in self.on_server.items():
            with _refusing(place, piece, ON_SERVER):
                more = {} if place == OPTIMIZER else piece.initial(self.weights.clone())
                if taken := more.keys() & {*self.slots, AVERAGE}:
                    allowed = "a name that no other step and not the released average has"
                    raise Fault(f"the slot {min(taken)!r} twice", allowed)
                self.slots.update(more)
                names = getattr(piece, "broadcast", ())
                # A forgotten comma makes a string of the tuple, whose letters would be taken for names.
                if isinstance(names, str):
                    raise Fault(f"broadcast = {names!r}", f"a tuple of names: ({names!r},), with the comma")
                for name in names:
                    if (shape := tuple(self.slots.get(name, self.weights).shape)) != (self.size,):
                        raise Fault(f"the broadcast slot {name!r} of shape {shape}", f"({self.size},)")

    def _try_server(self) -> None:
        """Try the server's steps in turn, and the method's own optimiser behind them: they see nothing private, so only
        what they return is looked at.
        """
        vectors = self.algorithm.vectors
        if vectors > 1 and not self.algorithm.server:
            raise wrong("algorithm.server", f"nothing for messages of {vectors} vectors", "a step for their mean")
        mean = _numbers("a mean", vectors * self.size)
        for place, piece in self.on_server.items():
            with _refusing(place, piece, ON_SERVER):
                mean = self._twice(functools.partial(self._optimize if place == OPTIMIZER else self._step, piece), mean)

    def _step(self, step: Any, mean: Tensor, slots: dict[str, Tensor]) -> Any:
        return step(mean, ServerView(0, 2, 0.1, self.tensors, slots, 5.0, 20))

    def _optimize(self, factory: Any, mean: Tensor, slots: dict[str, Tensor]) -> Any:
        """Return one round of the server's optimiser, made anew as in every round."""
        view = MeanView(std=0.1, clip=1.0, divisor=10.0)
        return factory(self.algorithm.server_lr, view)(self.weights.clone(), mean, slots)

    def _twice(self, call: Callable[[Tensor, dict[str, Tensor]], Any], mean: Tensor) -> Tensor:
        """Return what the server makes of a mean and its slots, which change."""
        # Run twice on equal copies: a step with memory outside of its slots would resume to another model.
        runs = list[dict[str, Tensor]]()
        for _ in range(2):
            slots = {name: value.clone() for name, value in self.slots.items()}
            result = call(mean.clone(), slots)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
                raise Fault(f"{type(result).__name__} returned", "(a vector, changed slots)")
            _check_form(result[0], (self.size,))
            runs.append({**slots, **result[1], "": result[0]})
        one, other = runs
        if one.keys() != other.keys() or not all(equal(value, other[name]) for name, value in one.items()):
            raise Fault("another result for the same mean and slots", "a function of these, its memory in named slots")
        mean, self.slots = one.pop(""), one
        return mean


def _run(call: Call, inputs: list[Tensor], size: int) -> tuple[Tensor, bool]:
    """Return what a piece makes of inputs, with its generators set anew; and whether it drew from torch's or the
    view's.
    """
    with seeded_torch(0, "trial of pieces"):
        generator, fresh = (stream(0, "trial of a view's generator") for _ in range(2))
        # A draw from a global generator would follow the order of clients, and with it their number.
        before = global_generators()
        result = call(inputs[0].clone(), inputs[1].clone(), generator)
        after = global_generators()
        if before[1:] != after[1:]:
            raise Fault("a draw from a global generator of NumPy or Python", "view.generator, or torch's own generator")
        _check_form(result, (size,))
    return result, before[0] != after[0] or generator.bytes(16) != fresh.bytes(16)


def _try_scale(rule: Callable[[Tensor, float], Tensor]) -> None:
    """Try a factor of the method's own; what it does to the norms of a block cannot matter: it is asked one by one."""
    norms, clip = torch.tensor([0.0, 1e-3, 0.5, 2.0, 1e6], dtype=torch.float64), scaling_clip(rule)
    allowed = "a function of a message's norm and C"
    with _refusing("algorithm.scale", rule, allowed):
        factors = clip.scale(norms, 1.0)
        if not torch.equal(factors, clip.scale(norms, 1.0)):  # a memory out of the clip's sight
            raise Fault("other factors for the same norms", allowed)
        if not factors.any():
            raise Fault("no factor above 0 (negative ones and NaN count as 0)", allowed)
