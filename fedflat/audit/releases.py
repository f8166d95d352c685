"""Many releases of one round: the real ``finish_round``, on copies laid side by side or in a loop.

Behind the sum everything is the key's noise and deterministic functions of the noisy sum, so n runs are one call on a
state of n copies: n·d entries of noise, the constant divisor, the server's steps applied to each copy (by vmap of the
real steps). That is checked against single calls, exactly and in law; where it does not hold, a loop of single calls
is used instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.audit.bench import Bench, Client, World, world_of
from fedflat.core.rng import digest
from fedflat.core.types import Aggregate, MeanView, MovingClip, Optimizer, RoundState, ServerView
from fedflat.engine.round import finish_round

CHECKED = 150
"""Single calls per world that are compared with the copies."""


@dataclass(frozen=True)
class Neighbours:
    """Two worlds that differ in one client; ``canary`` is absent in world 0."""

    bench: Bench
    others: Client
    canary: Client

    def world(self, present: bool, key: bytes) -> World:
        """What the server holds before noise."""
        return world_of(self.bench, self.others, self.canary if present else None, key)


def run_key(seed: int, purpose: str, number: int) -> bytes:
    """The noise key of one audited run."""
    return digest(seed, "audit: " + purpose, number)


def released(bench: Bench, new: RoundState, copies: int = 1) -> Tensor:
    """The whole released state ``(copies, width)``: the shared vector's change, changed slots, the next clip."""
    old = bench.state
    columns = [new.shared.reshape(copies, -1) - old.shared]
    for name, value in sorted(new.slots.items()):
        flat = value.reshape(copies, -1)
        if name not in old.slots or not bool((flat == old.slots[name]).all()):
            columns.append(flat)
    if new.clip != old.clip:
        columns.append(torch.full((copies, 1), new.clip))
    return torch.cat(columns, 1)


def single(neighbours: Neighbours, present: bool, key: bytes, world: World | None = None) -> Tensor:
    """One run: the real path from the cohort to the new state; ``(width,)``. ``world`` if it is known already."""
    bench = neighbours.bench
    held = neighbours.world(present, key) if world is None else world
    new, _ = finish_round(bench.parts, bench.state, held.broadcast, held.aggregate, key, _ignore, divisor=held.divisor)
    return released(bench, new)[0]


def side_by_side(neighbours: Neighbours, world: World, key: bytes, copies: int) -> Tensor:
    """``copies`` runs in one call of the real ``finish_round``: ``(copies, width)``."""
    bench = neighbours.bench
    algorithm = replace(bench.parts.algorithm, server=tuple(_EachStep(s, copies) for s in bench.parts.algorithm.server))
    parts = replace(bench.parts, algorithm=algorithm, optimizer=_each_optimizer(bench.parts.optimizer, copies))
    state = replace(
        bench.state,
        shared=bench.state.shared.repeat(copies),
        slots={name: value.repeat(copies) for name, value in bench.state.slots.items()},
    )
    mask = world.broadcast.mask
    broadcast = replace(world.broadcast, shared=state.shared, mask=None if mask is None else mask.repeat(copies))
    aggregate = replace(world.aggregate, total=world.aggregate.total.repeat(copies))
    new, _ = finish_round(parts, state, broadcast, aggregate, key, _ignore, divisor=world.divisor)
    return released(bench, new, copies)


def releases(neighbours: Neighbours, present: bool, runs: int, purpose: str, looped: bool) -> Tensor:
    """``runs`` releases ``(runs, width)`` of one world, with fresh noise."""
    if looped:
        keys = (run_key(number, f"{purpose} {present}", 1) for number in range(runs))
        return torch.stack([single(neighbours, present, key) for key in keys])
    key = run_key(runs, f"{purpose} {present}", 0)
    return side_by_side(neighbours, neighbours.world(present, key), key, runs)


def must_loop(neighbours: Neighbours, law: bool = True) -> bool:
    """Whether copies side by side would not be the same as single runs.

    Exactly: the first copy is the single run of the same key. law: in distribution as well, by many single runs.
    """
    bench = neighbours.bench
    if isinstance(bench.parts.clip, MovingClip):
        return True
    for present in (False, True):
        keys = [run_key(n, "faithful", int(present)) for n in range(2)]
        worlds = [neighbours.world(present, key) for key in keys]
        if on_a_grid(worlds[0]) or type(worlds[0].aggregate) is not Aggregate:
            return True  # a sum that brings more than its total along, which copies of the total would leave behind
        if not torch.equal(worlds[0].aggregate.total, worlds[1].aggregate.total):
            return True  # messages are random: clients add noise of their own
        alone = single(neighbours, present, keys[0], worlds[0])
        first = side_by_side(neighbours, worlds[0], keys[0], 3)[0]
        if alone.shape != first.shape or not torch.allclose(alone, first, rtol=1e-4, atol=1e-5):
            return True
        if law and _law_differs(neighbours, present, worlds[0]):
            return True
    return False


def on_a_grid(world: World) -> bool:
    """Whether the mechanism works on whole numbers (secure grid noise, ddgauss): its runs are slow."""
    return world.aggregate.exact is not None


def _law_differs(neighbours: Neighbours, present: bool, world: World) -> bool:
    """Whether energy or a projection differ between single runs and copies: means or spreads."""
    one = torch.stack([single(neighbours, present, run_key(n, "law", 7), world) for n in range(CHECKED)]).double()
    many = side_by_side(neighbours, world, run_key(0, "law, copies", 7), 4 * CHECKED).double()
    if one.shape[1] != many.shape[1]:
        return True
    direction = torch.linspace(-1, 1, one.shape[1], dtype=torch.float64)
    for a, b in ((one.square().sum(1), many.square().sum(1)), (one @ direction, many @ direction)):
        error = torch.sqrt(a.var() / len(a) + b.var() / len(b))
        if float((a.mean() - b.mean()).abs()) > 6 * float(error) + 1e-6 * float(b.mean().abs()) + 1e-9:
            return True
        if max(float(a.var()), float(b.var())) > 1e-12 and not 1 / 4 < float((a.var() + 1e-30) / (b.var() + 1e-30)) < 4:
            return True
    return False


def coupled_difference(neighbours: Neighbours, number: int = 0) -> Tensor:
    """World 1 minus world 0 under the same noise key ``(width,)``: noise cancels where it does not see the data."""
    key = run_key(number, "coupled", 0)
    one, zero = single(neighbours, True, key), single(neighbours, False, key)
    if one.shape != zero.shape:
        return torch.zeros_like(one)
    return one - zero


def _ignore(entry: Mapping[str, Any]) -> None:
    """The audit writes no ledger."""


@dataclass(frozen=True)
class _EachStep:
    """A real server step on each of ``copies`` copies."""

    step: Any
    copies: int

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        """Only asked before round 0."""
        initial: dict[str, Tensor] = self.step.initial(shared)
        return initial

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        def one(row: Tensor, slots: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            found: tuple[Tensor, dict[str, Tensor]] = self.step(row, replace(view, slots=slots))
            return found

        return _flat(torch.func.vmap(one)(_rows(mean, self.copies), _rows_of(view.slots, self.copies)))


def _each_optimizer(optimizer: Callable[[MeanView], Optimizer], copies: int) -> Callable[[MeanView], Optimizer]:
    """The real server optimiser on each of ``copies`` copies."""

    def each(view: MeanView, w: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        made = optimizer(view)
        mapped = torch.func.vmap(lambda w, mean, slots: made(w, mean, slots))
        return _flat(mapped(_rows(w, copies), _rows(mean, copies), _rows_of(slots, copies)))

    return lambda view: functools.partial(each, view)


def _rows(vector: Tensor, copies: int) -> Tensor:
    return vector.reshape(copies, -1)


def _rows_of(slots: Mapping[str, Tensor], copies: int) -> dict[str, Tensor]:
    return {name: _rows(value, copies) for name, value in slots.items()}


def _flat(found: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    return found[0].reshape(-1), {name: value.reshape(-1) for name, value in found[1].items()}
