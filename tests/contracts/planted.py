"""Planted defects of the client side: what back ends, models and methods did, or could do, before the sum is clipped.

Each twin is put into a prepared job, behind every check; the pairs of worlds (``worlds``) must move by more than C.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.audit.movements import faults, shared_noise
from fedflat.audit.worlds import CLIENTS, Case, Engine, Movement, Scenario, Worlds
from fedflat.backends.in_process import Sequential
from fedflat.config.recipe import Recipe
from fedflat.core.params import Layout, PersonalState, layout_of
from fedflat.core.rng import noise_key, seeded_torch
from fedflat.core.types import Broadcast, ClientView, Part
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.engine.batches import ClientBatches, Order
from fedflat.engine.client import train_client
from fedflat.engine.job import Job
from fedflat.engine.mlp import Linear, layers_of
from fedflat.engine.problem import Batch, Gradient, ModuleProblem
from fedflat.engine.reduce import Accumulator


class PastTheRound:
    """A back end that fills the round's sum itself, in a way of its own, and gives the round nothing to add."""

    def train(self, cohort: np.ndarray, broadcast: Broadcast, heads: PersonalState, clipped: Any) -> Iterator[Any]:
        """Add everybody's message."""
        self.fill(cohort, broadcast, clipped.__self__.total, heads)  # type: ignore[attr-defined]
        return iter(())


@dataclass
class Rows(PastTheRound):
    """One step of one linear layer as rows u (what the layer gets back) and x (its inputs), in float32.

    together: the sum is one product over all clients' rows, so that a huge client wipes out what others add; otherwise
    norms are taken from the rows' Gram matrices, which cancel, while the product of the rows is what is released.
    """

    layer: Linear
    data: FederatedData
    rate: float
    together: bool
    name: str = "rows"

    def fill(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Add the cohort's clipped messages, as the defect has it."""
        kept: list[tuple[Tensor, Tensor]] = []
        for client in cohort.tolist():
            accumulator.add(torch.zeros(1, broadcast.shared.numel()), [0])
            if not len(self.data.parts[client]):
                continue
            u, x = self._rows(client, broadcast)
            norm = _norm(self._product(u, x)) if self.together else _gram_norm(u, x)
            if torch.isfinite(norm):
                kept.append((u * float((broadcast.clip / norm.clamp_min(1e-30)).clamp(max=1.0)), x))
        if self.together:
            kept = [(torch.cat([u for u, _ in kept]), torch.cat([x for _, x in kept]))] if kept else []
        for u, x in kept:
            accumulator.total += self._product(u, x).double()

    def _rows(self, client: int, broadcast: Broadcast) -> tuple[Tensor, Tensor]:
        x, y = self.data.client(client)
        x, shared = x.flatten(1), broadcast.shared
        logits = x @ self.layer.matrix(shared).T
        if self.layer.bias is not None:
            logits = logits + shared[self.layer.bias]
        return (torch.softmax(logits, 1) - F.one_hot(y, self.layer.outputs)) * (-self.rate / len(y)), x

    def _product(self, u: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros(self.layer.outputs * self.layer.inputs + (self.layer.outputs if self.layer.bias else 0))
        self.layer.matrix(out).copy_(u.T @ x)
        if self.layer.bias is not None:
            out[self.layer.bias] = u.sum(0)
        return out


def _norm(vector: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return found


def _gram_norm(u: Tensor, x: Tensor) -> Tensor:
    """‖uᵀx‖ by inner products of rows, in float32."""
    return ((x @ x.T + 1) * (u @ u.T)).sum().clamp_min(0).sqrt()


def _rows_of(job: Job, together: bool) -> None:
    layers = layers_of(job.problem.module, job.parts.layout)
    job.backend = Rows(cast(Any, layers)[0], job.data, job.parts.local.lr, together)


@dataclass
class OneGenerator(PastTheRound):
    """Clients of a block draw their dropout masks from one generator, seeded by the block's first client with data."""

    inner: Sequential
    name: str = "one generator"

    def fill(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Train the cohort as one block."""
        real = self.inner
        present = [client for client in cohort.tolist() if len(real.data.parts[client])]
        accumulator.add(torch.zeros(len(cohort) - len(present), broadcast.shared.numel()), [0])
        with seeded_torch(real.seed, "dropout", broadcast.round, present[0] if present else 0):
            for client in present:
                rows = real.data.parts[client]
                local_data = ClientBatches(
                    real.data, client, Order(real.seed, broadcast.round, real.local.batch_size), rows
                )
                weights = heads.whole(broadcast.shared, client)
                found = train_client(real.algorithm, real.problem, broadcast, real.local, local_data, weights)
                accumulator.add(found.message[None], [len(rows)])


@dataclass
class Unguarded(PastTheRound):
    """Transforms get a block of clients at once and whatever they give back is summed, unchecked."""

    inner: Sequential
    layout: Layout
    name: str = "unguarded"

    def fill(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Train the cohort as one block."""
        real = replace(self.inner, algorithm=replace(self.inner.algorithm, transforms=()))
        present = [client for client in cohort.tolist() if len(real.data.parts[client])]
        accumulator.add(torch.zeros(len(cohort) - len(present), broadcast.shared.numel()), [0])
        if not present:
            return
        found = [real.one(client, broadcast, heads.whole(broadcast.shared, client)).message for client in present]
        view = ClientView(
            tensors=self.layout.tensors("shared"), gradient=lambda: torch.stack(found), steps=real.local.steps,
            lr=real.local.lr,
        )  # fmt: skip
        messages = torch.stack(found)
        for transform in self.inner.algorithm.transforms:
            messages = transform(messages, view)
        accumulator.add(messages, [1] * len(messages))


def mixes(update: Tensor, view: ClientView) -> Tensor:
    """A transform that takes the block's mean off each update."""
    return update - update.mean(0) if update.dim() == 2 else update


class Remembers:
    """A transform that adds what earlier clients sent."""

    def __init__(self) -> None:
        self.seen: Tensor | float = 0.0

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        rows = []
        for row in torch.atleast_2d(update):
            rows.append(row + self.seen)
            self.seen = self.seen + row
        return torch.stack(rows).reshape(update.shape)


def shortens(update: Tensor, view: ClientView) -> Tensor:
    """A transform that leaves the last entry off where an update is long: the wrong length, for a whole block."""
    return update[..., :-1] if bool((update.abs() > 10).any()) else update


class _Stateful(nn.Module):
    """A linear model that shifts its inputs by what it has seen; subclasses say where they keep it."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, classes)
        self.keep(torch.zeros(inputs))

    def keep(self, mean: Tensor) -> None:
        """Remember."""
        raise NotImplementedError

    def kept(self) -> Tensor:
        """What is remembered ``(inputs,)``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Inputs ``(n, …)`` -> logits."""
        x = x.flatten(1)
        if self.training:
            self.keep(0.5 * self.kept() + 0.5 * x.detach().mean(0))
        return self.head(x - self.kept())  # type: ignore[no-any-return]


class RunningMean(_Stateful):
    """A module that keeps a running mean of its inputs in a plain attribute."""

    def keep(self, mean: Tensor) -> None:
        self.mean = mean

    def kept(self) -> Tensor:
        return self.mean


class CodeBook(_Stateful):
    """In a parameter that asks for no gradient, as a code book is kept."""

    def keep(self, mean: Tensor) -> None:
        if not hasattr(self, "book"):
            self.book = nn.Parameter(mean.clone(), requires_grad=False)
        with torch.no_grad():
            self.book.copy_(mean)

    def kept(self) -> Tensor:
        return self.book.detach().clone()


class InADict(_Stateful):
    """A module that keeps what it saw in a dictionary."""

    def keep(self, mean: Tensor) -> None:
        self.held = {"mean": mean}

    def kept(self) -> Tensor:
        return self.held["mean"]


class InAList(_Stateful):
    """In a list that grows."""

    def keep(self, mean: Tensor) -> None:
        self.held: list[Tensor] = [*getattr(self, "held", []), mean][-2:]

    def kept(self) -> Tensor:
        return self.held[-1]


@dataclass
class Unrestored:
    """One client at a time on one module whose state nobody puts back."""

    module: nn.Module
    layout: Layout
    device: torch.device

    def gradient(self, weights: Tensor, part: Part, batch: Batch) -> Gradient:
        """The gradient of the mean loss."""
        at = weights.detach().clone().requires_grad_()
        logits = torch.func.functional_call(self.module.train(), dict(self.layout.views(at)), (batch.inputs,))
        loss = F.cross_entropy(logits, batch.targets)
        (found,) = torch.autograd.grad(loss, at)
        return Gradient(found[self.layout.span(part)], loss.detach(), torch.zeros(()))

    def restore_and_check(self, *, everything: bool = False) -> None:
        """Leaves changed buffers as they are: the defect."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Training and evaluation are the same here."""
        yield


def _stateful(kind: type[_Stateful]) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        module = kind(int(np.prod(job.data.input_shape)), job.data.classes)
        layout = layout_of(module, None)
        if layout.shapes != job.parts.layout.shapes:
            raise ValueError("the planted model must have the parameters of the job's own")
        problem = Unrestored(module, layout, job.problem.device)
        job.backend = Sequential(job.parts.algorithm, cast(ModuleProblem, problem), job.parts.local, job.data, job.seed)

    return change


def _own(job: Job) -> Sequential:
    return Sequential(job.parts.algorithm, job.problem, job.parts.local, job.data, job.seed)


def _transformed(make: Callable[[], Any]) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        inner = replace(_own(job), algorithm=replace(job.parts.algorithm, transforms=(make(),)))
        job.backend = Unguarded(inner, job.parts.layout)

    return change


def _one_generator(job: Job) -> None:
    job.backend = OneGenerator(_own(job))


@dataclass(frozen=True)
class Planted:
    """A defect. model: of the job it is put into, ``linear`` or ``dropout``. cases: those that show it."""

    change: Callable[[Job], None]
    cases: tuple[Case, ...]
    model: str = "linear"


_EVEN = (
    Case("cancelling 1e6", start="even"), Case("cancelling 1e14", start="even"),
    Case("pixels", others="pixels", start="even"),
)  # fmt: skip
_OTHERS = (Case("ordinary"), Case("huge 1e6"))
PLANTED: dict[str, Planted] = {
    "norms from float32 Gram matrices": Planted(lambda job: _rows_of(job, False), _EVEN),
    "one float32 product for all clients": Planted(
        lambda job: _rows_of(job, True), (Case("no gradient", others="constant", start="even", last=True),)
    ),
    "dropout seeded by a block's first client": Planted(_one_generator, _OTHERS, "dropout"),
    "a running mean as a plain attribute": Planted(_stateful(RunningMean), _OTHERS),
    "a code book without gradient": Planted(_stateful(CodeBook), _OTHERS),
    "a model's state in a dict": Planted(_stateful(InADict), _OTHERS),
    "a model's state in a list": Planted(_stateful(InAList), _OTHERS),
    "a transform that mixes a block": Planted(_transformed(lambda: mixes), _OTHERS),
    "a transform that remembers": Planted(_transformed(Remembers), _OTHERS),
    "a transform of the wrong length": Planted(_transformed(lambda: shortens), _OTHERS),
}


SEED_ONLY = "a noise key from the seed only"
INPUTS = 12


def scenario(method: str, layers: list[nn.Module], pair: tuple[Tensor, Tensor], **more: Any) -> Scenario:
    """A small federation at C = 0.05 that worlds are made of."""
    recipe = Recipe.of({
        "rounds": 1, "algorithm": {"name": method}, "cohort": {"size": CLIENTS},
        "local": {"steps": 2, "batch_size": 3, "lr": 0.3},
        "privacy": {"clip": 0.05, "noise_multiplier": 1.0, "delta": 1e-5},
    })  # fmt: skip
    return Scenario(recipe, nn.Sequential(nn.Flatten(), *layers), from_pairs([pair]), **more)


def planted_scenario(name: str) -> Scenario:
    """The federation that a planted defect is put into: 12 inputs, 2 classes, dp-fedavg."""
    with seeded_torch(0, "audit: planted"):
        dropped = name in PLANTED and PLANTED[name].model == "dropout"
        layers = [nn.Linear(INPUTS, 8), nn.Dropout(0.5), nn.Linear(8, 2)] if dropped else [nn.Linear(INPUTS, 2)]
        pair = torch.randn(30, INPUTS), torch.arange(30) % 2
    change = PLANTED[name].change if name in PLANTED else _seed_only if name == SEED_ONLY else None
    return scenario("dp-fedavg", layers, pair, change=change)


def _seed_only(job: Job) -> None:
    job.key = noise_key(job.seed)


def violations_of(name: str) -> tuple[str, ...]:
    """What the audit says of a planted defect: a sentence for each pair of worlds further apart than C."""
    planted = planted_scenario(name)
    if name == SEED_ONLY:
        return faults((), shared_noise(planted))
    worlds = Worlds(planted)
    found: list[Movement] = [worlds.movement(Engine("sequential"), case) for case in PLANTED[name].cases]
    return faults(found)
