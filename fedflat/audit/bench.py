"""Build the audit's small federation, and draw many releases of one round through the real server path.

A canary is a client whose loss is linear: its gradient is constant, so the real local loop, gradient rule, mask and
transforms of the method turn a chosen direction into the message that the method would send.

Behind the sum everything is the key's noise and deterministic functions of the noisy sum, so n runs are one call on a
state of n copies: n·d entries of noise, the constant divisor, the server's steps applied to each copy (by vmap of the
real steps). That is checked against single calls; where it does not hold, a loop of single calls is used instead.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fedflat.assembly.jobs import prepare
from fedflat.audit.bounds import Floats
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import Aggregate, Broadcast, ClientContext, RoundState, ServerStep, ServerView, digest, stream
from fedflat.engine.client import train_client
from fedflat.engine.job import Job, RoundParts
from fedflat.engine.problem import LinearData, LinearProblem
from fedflat.engine.round import accumulator_of, broadcast_of, finish_round, noisy_sum, select_cohort

TENSORS, ENTRIES, CLIENTS = 16, 12, 3
"""The model has 16 tensors of 12 entries and a linear head of 26; two clients are there beside the canary."""
SIGMA, CLIP, DELTA = 3.0, 1.0, 1e-5
"""The fixed configuration of the mechanism audit (docs/specification.md): one round at q = 1; claimed ε 1.27."""


class AuditModel(nn.Module):
    """Many small tensors, so that a per-tensor clip shows; a head for personal methods; a still buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(ENTRIES)) for _ in range(TENSORS)])
        self.head = nn.Linear(ENTRIES, 2)
        self.register_buffer("scale", torch.ones(ENTRIES))
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``(n, 2)`` of inputs ``(n, 12)``."""
        return self.head(inputs * self.scale * torch.stack(list(self.blocks)).sum(0))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Bench:
    """Real parts and a public state to start the round from. make: a fresh job of the same, as :func:`prepare_job`."""

    parts: RoundParts
    state: RoundState
    personal: Tensor
    make: Callable[[Tensor | None], Job]

    def random(self, purpose: str) -> Tensor:
        """Return a standard normal vector ``(d,)`` of a named public stream."""
        return torch.from_numpy(stream(0, "audit: " + purpose).standard_normal(self.state.shared.numel())).float()

    def messages(self, broadcast: Broadcast, update: Tensor) -> Tensor:
        """Return the messages ``(…, d)`` of clients that pull into ``update`` ``(…, d)``, by real local training."""
        algorithm, local, personal = self.parts.algorithm, self.parts.local, self.personal
        slope = torch.cat([-update / (local.lr * local.steps), torch.zeros(*update.shape[:-1], personal.numel())], -1)
        weights = torch.cat([broadcast.shared, personal]).expand(slope.shape).clone()
        problem = LinearProblem(self.parts.layout)
        context = ClientContext({state.name: torch.zeros_like(update) for state in algorithm.client_state})
        return train_client(algorithm, problem, broadcast, local, LinearData(slope), weights, context).message


@dataclass(frozen=True)
class Client:
    """An update ``(d,)`` and the number of examples its client says it has."""

    update: Tensor
    size: int = 1


@dataclass(frozen=True)
class World:
    """What the server holds before noise: the round's broadcast and the aggregate."""

    broadcast: Broadcast
    aggregate: Aggregate


def bench_of(name: str, options: Mapping[str, Any] | None = None, sections: Mapping[str, Any] | None = None) -> Bench:
    """Return the audit's federation for a method: q = 1, σ = 3, C = 1, δ = 1e-5, one round.

    options: the algorithm's keys. sections: recipe sections to audit as they are (``privacy`` may bring a clip of its
    own, ``server`` an optimiser); the fixed configuration overrides what it fixes.
    """
    make = functools.partial(prepare_job, name, options, sections)
    job = make(None)
    width = job.parts.layout.dimension
    start = stream(0, "audit: start").standard_normal(width) * 0.1
    state = job.parts.first_state(torch.from_numpy(start).float(), job.threshold)
    bench = Bench(job.parts, state, job.initial_weights[width:].clone(), make)
    slots = {
        slot: value + 0.1 * bench.random("slot " + slot) if value.shape == state.shared.shape else value
        for slot, value in state.slots.items()
    }
    return replace(bench, state=replace(state, slots=slots))


def prepare_job(
    name: str, options: Mapping[str, Any] | None = None, sections: Mapping[str, Any] | None = None,
    inputs: Tensor | None = None,
) -> Job:  # fmt: skip
    """Return a live job of the audit's federation; ``inputs`` ``(12,)`` is the last client's only example."""
    sections = {key: dict(value) for key, value in (sections or {}).items()}
    privacy: dict[str, Any] = {"clip": CLIP} | sections.get("privacy", {})
    privacy |= {"noise_multiplier": SIGMA, "delta": DELTA, "epsilon": None, "budget": None, "noise_cohort": None}
    recipe = Recipe.of(
        {
            "name": "audit",
            "rounds": 1,
            "algorithm": {"name": name, **(options or {})},
            "cohort": {"size": CLIENTS},
            "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
            "privacy": privacy,
            "server": sections.get("server", {}),
            "engine": {"device": "cpu", "backend": "sequential"},
        }
    )
    if algorithm_of(recipe).kind == "ddgauss" or recipe.privacy.trust == "distributed":
        # The least cohort must be met with and without the client.
        recipe = Recipe.of(recipe, [f"cohort.min={CLIENTS - 1}"])
    return prepare(recipe, AuditModel(), *examples_of(CLIENTS, inputs))


def examples_of(clients: int, last: Tensor | None = None) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return a pair of one example for each client, of zeros but for the ``last`` client's ``(12,)``; and test data."""
    examples = [torch.zeros(1, ENTRIES) for _ in range(clients)]
    if last is not None:
        examples[-1] = last.reshape(1, ENTRIES)
    return [(x, torch.zeros(1, dtype=torch.int64)) for x in examples], (torch.zeros(2, ENTRIES), torch.tensor([0, 1]))


Slots = dict[str, Tensor]
Stepped = tuple[Tensor, Slots]


@dataclass(frozen=True)
class Neighbours:
    """Two worlds that differ in one client; ``canary`` is absent in world 0."""

    bench: Bench
    others: Client
    canary: Client

    def world(self, present: bool, key: bytes) -> World:
        """Return what the server holds before noise: after broadcast, local training, clip and sum of a round.

        The cohort comes from the real sampler: at q = 1 everybody. The last client is the canary. Where clients bring
        the noise (trust distributed, local), a removed client's slot still sends its share of it, and a zero update.
        """
        parts, state = self.bench.parts, self.bench.state
        # NaN counts as a message of zeros.
        removed = None if parts.plan.trust == "central" else Client(torch.full_like(state.shared, math.nan))
        canary = self.canary if present else removed
        broadcast = broadcast_of(parts, state, 0)
        accumulator = accumulator_of(parts, broadcast, key)
        for client in select_cohort(parts, key, state.round).tolist():
            if (chosen := canary if client == CLIENTS - 1 else self.others) is not None:
                accumulator.add(self.bench.messages(broadcast, chosen.update)[None], [chosen.size])
        return World(broadcast, accumulator.result())


def run_key(seed: int, purpose: str, number: int) -> bytes:
    """Return the noise key of one audited run."""
    return digest(seed, "audit: " + purpose, number)


def released(bench: Bench, new: RoundState, copies: int = 1) -> Tensor:
    """Return the whole released state ``(copies, width)``: the shared vector's change, changed slots, the next clip."""
    old = bench.state
    columns = [new.shared.reshape(copies, -1) - old.shared]
    for name, value in sorted(new.slots.items()):
        flat = value.reshape(copies, -1)
        if name not in old.slots or not bool((flat == old.slots[name]).all()):
            columns.append(flat)
    if new.clip != old.clip:
        columns.append(torch.full((copies, 1), new.clip))
    return torch.cat(columns, 1)


def single(neighbours: Neighbours, present: bool, key: bytes) -> Tensor:
    """Return one run: the real path from the cohort to the new state; ``(width,)``."""
    bench, held = neighbours.bench, neighbours.world(present, key)
    new, _ = finish_round(bench.parts, bench.state, held.broadcast, held.aggregate, key, _ignore)
    return released(bench, new)[0]


def side_by_side(neighbours: Neighbours, world: World, key: bytes, copies: int) -> Tensor:
    """Return ``copies`` runs in one call of the real ``finish_round``: ``(copies, width)``."""
    bench = neighbours.bench
    method, mask = bench.parts.algorithm, world.broadcast.mask
    steps: Any = tuple(functools.partial(_step_each, step, copies) for step in method.server)
    # The real server optimiser on each of the copies.
    parts = replace(bench.parts, optimizer=lambda view: functools.partial(_vmap, bench.parts.optimizer(view), copies))
    parts = replace(parts, algorithm=replace(method, server=steps))
    slots = {name: value.repeat(copies) for name, value in bench.state.slots.items()}
    state = replace(bench.state, shared=bench.state.shared.repeat(copies), slots=slots)
    broadcast = replace(world.broadcast, shared=state.shared, mask=None if mask is None else mask.repeat(copies))
    aggregate = replace(world.aggregate, total=world.aggregate.total.repeat(copies))
    new, _ = finish_round(parts, state, broadcast, aggregate, key, _ignore)
    return released(bench, new, copies)


def releases(neighbours: Neighbours, present: bool, runs: int, purpose: str, looped: bool) -> Tensor:
    """Return ``runs`` releases ``(runs, width)`` of one world, with fresh noise."""
    if looped:
        keys = (run_key(number, f"{purpose} {present}", 1) for number in range(runs))
        return torch.stack([single(neighbours, present, key) for key in keys])
    key = run_key(runs, f"{purpose} {present}", 0)
    return side_by_side(neighbours, neighbours.world(present, key), key, runs)


def must_loop(neighbours: Neighbours) -> bool:
    """Return whether copies side by side would not be the same as single runs: the first copy is the single run of the
    same key, and the next one has noise of its own.
    """
    if neighbours.bench.parts.clip.moves:
        return True
    for present in (False, True):
        keys = [run_key(n, "faithful", int(present)) for n in range(2)]
        worlds = [neighbours.world(present, key) for key in keys]
        if worlds[0].aggregate.exact is not None or type(worlds[0].aggregate) is not Aggregate:
            # Copies of the total would lose what else such a sum holds.
            return True
        if not torch.equal(worlds[0].aggregate.total, worlds[1].aggregate.total):
            # Messages are random where clients add their own noise.
            return True
        separate = single(neighbours, present, keys[0])
        first, second, _ = side_by_side(neighbours, worlds[0], keys[0], 3)
        if separate.shape != first.shape or not torch.allclose(separate, first, rtol=1e-4, atol=1e-5):
            return True
        if neighbours.bench.parts.plan.event_multiplier and torch.equal(first, second):
            return True
    return False


def coupled_difference(neighbours: Neighbours) -> Tensor:
    """Return world 1 minus world 0 under the same noise key ``(width,)``: noise cancels where it does not see the
    data.
    """
    one, zero = (single(neighbours, present, run_key(0, "coupled", 0)) for present in (True, False))
    return one - zero if one.shape == zero.shape else torch.zeros_like(one)


def _ignore(entry: Mapping[str, Any]) -> None:
    """The audit writes no ledger."""


def _step_each(step: ServerStep, copies: int, mean: Tensor, view: ServerView) -> Stepped:
    """Return what a real server step makes of each of ``copies`` copies."""
    return _vmap(lambda mean, slots: step(mean, replace(view, slots=slots)), copies, mean, view.slots)


def _vmap(function: Callable[..., Stepped], copies: int, *tensors: Any) -> Stepped:
    """Return what ``function`` makes of each copy, where ``copies`` of every tensor lie side by side."""
    rows = tree_map(lambda tensor: tensor.reshape(copies, -1), tensors)
    return cast(Stepped, tree_map(lambda tensor: tensor.reshape(-1), torch.func.vmap(function)(*rows)))


def vote_releases(bench: Bench, present: bool, runs: int) -> Floats:
    """Return the noisy votes ``(runs, draws·Q·V)``: others vote for the last class, the canary, if ``present``, for the
    first.
    """
    parts, state = bench.parts, bench.state
    broadcast, size = broadcast_of(parts, state, 0), parts.mechanism.size  # type: ignore[attr-defined]
    votes = torch.zeros(CLIENTS, size)
    votes[:-1, -1] = votes[-1, 0] = 1.0
    released = []
    for number in range(runs):
        key = run_key(number, f"votes {present}", 0)
        accumulator = accumulator_of(parts, broadcast, key)
        for draw in parts.plan.draws(state.round):
            cohort = select_cohort(parts, key, draw)
            chosen = cohort if present else cohort[cohort != CLIENTS - 1]
            accumulator.of(draw).add(votes[torch.from_numpy(chosen)], [1] * len(chosen))
        released.append(noisy_sum(parts, broadcast, accumulator.result(), key))
    return torch.stack(released).double().numpy()
