"""Train students and release noisy votes (AE-DPFL).

It is the same round as any other: cohort, messages, clip, sum, noise, ledger, server step. Only the message differs:
Q·V one-hot votes (Q labels of one cohort draw, V classes), and a round may hold several draws (``plan.draws``).
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.backends.in_process import Sequential
from fedflat.config.recipe import Recipe
from fedflat.config.sections import ServerSection
from fedflat.core import PersonalState, require, seeded_torch, stream, wrong
from fedflat.core.types import Aggregate, Algorithm, Broadcast, Clip, Local, Mechanism, ServerView
from fedflat.data.clients import FederatedData
from fedflat.data.sources import HELD_OUT, TEST, public_examples
from fedflat.engine.batches import ClientBatches, Order
from fedflat.engine.client import train_client
from fedflat.engine.job import Job
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Accumulator, Clipped, Part, Trained
from fedflat.methods.noise import trust_of
from fedflat.methods.plans import VotesPlan
from fedflat.pieces.clipping import NormClip, norms_of
from fedflat.pieces.mechanisms import GaussianNoise, gaussian

NO_LABEL = -1
CACHE_BYTES = 256 * 2**20
_PIECE = 500
LOCAL_MODEL = Algorithm("local model")
"""What clients and the student train by: plain SGD."""


@dataclass(frozen=True)
class VoteClip(NormClip):
    """Bounds a message of votes by √Q, its declared norm; one with a negative entry is no vote and counts as zero.

    Two non-negative messages of norm ≤ √Q differ by at most √(2Q): the sensitivity under replace-one.
    """

    labels: int

    def factors(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """Messages ``(n, Q·V)`` -> norms ``(n,)`` before the clip (inf where it is no vote), factors ``(n,)``."""
        norms = torch.where((messages >= 0).all(-1), norms_of(messages), math.inf)
        return norms, self.scale(norms, threshold)


@dataclass(frozen=True)
class VoteAggregate(Aggregate):
    """The votes of all draws of a round, one after the other in ``total``. counts: messages of each draw."""

    counts: tuple[int, ...] = ()


class VoteAccumulator:
    """One running sum for each cohort draw of a round; memory is O(draws·Q·V), not O(cohort)."""

    def __init__(self, clip: Clip, threshold: float, draws: range, size: int) -> None:
        self._sums = {draw: Accumulator(clip, threshold, (slice(0, size),), size) for draw in draws}

    def of(self, draw: int) -> Accumulator:
        """Return the sum of one draw."""
        return self._sums[draw]

    def result(self) -> VoteAggregate:
        """Return the aggregate of all draws, in their order."""
        draws = [draw.result() for draw in self._sums.values()]
        names = sorted({name for draw in draws for name in draw.stats})
        finite = {n: [f.stats[n] for f in draws if n in f.stats and math.isfinite(f.stats[n])] for n in names}
        return VoteAggregate(
            total=torch.cat([draw.total for draw in draws]), count=sum(draw.count for draw in draws), bits=0.0,
            norms=torch.cat([draw.norms for draw in draws]), factors=torch.cat([draw.factors for draw in draws]),
            stats={name: sum(values) / len(values) for name, values in finite.items() if values},
            counts=tuple(draw.count for draw in draws),
        )  # fmt: skip


@dataclass(frozen=True)
class VoteNoise(Mechanism):
    """Noise on the votes, drawn for each cohort draw from a stream of its own.

    draws: round -> its draws. size: Q·V. std: messages in a draw -> std of everything added to each count.
    releases: whether a sum of so many messages may leave secure aggregation; another one is cancelled, unreleased.
    """

    draws: Callable[[int], range]
    size: int
    std: Callable[[int], float]
    releases: Callable[[int], bool]

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: object, key: bytes) -> VoteAccumulator:
        """Return what adds up a round's votes."""
        return VoteAccumulator(clip, broadcast.clip, self.draws(broadcast.round), self.size)

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the noise ``(draws·Q·V,)``; where a draw is aborted, the exact negative of its sum."""
        counts = aggregate.counts if isinstance(aggregate, VoteAggregate) else (aggregate.count,)
        pieces = []
        for place, (draw, count) in enumerate(zip(self.draws(round), counts)):
            if self.releases(count):
                pieces.append(gaussian(self.size, self.std(count), stream(key, "noise", draw)).double())
            else:
                # The release is then exactly zero, which is no vote and no label.
                pieces.append(-aggregate.total[place * self.size : (place + 1) * self.size])
        return torch.cat(pieces)


@dataclass
class Voters:
    """The back end: a client's model is trained from w^0 when it is first drawn, answers all queries, and is dropped.

    What is kept of a client is one class number per query, at most ``limit`` bytes over all clients; the client drawn
    longest ago goes first, and is trained again (to the same bits) if it is drawn again. Clients train one by one, so
    that a client's answers depend on nobody else's data, nor on where a run was resumed.

    inner: trains one client. answers: client -> its class ``(queries,)`` for every public example, and facts of its
    training.
    """

    inner: Sequential
    first: Tensor
    queries: Tensor
    labels: int
    classes: int
    limit: int = CACHE_BYTES
    name: str = "sequential"

    def __post_init__(self) -> None:
        self._kind = torch.uint8 if self.classes <= 256 else torch.int32
        size = max(1, len(self.queries) * self._kind.itemsize)
        self.answers = functools.lru_cache(max(1, self.limit // size))(self._train)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Give the votes of a draw's cohort (sorted ids) on the Q queries of that draw."""
        start, sizes = broadcast.draw * self.labels, self.inner.data.sizes[cohort]
        present = cohort[sizes > 0].tolist()
        if len(present) < len(sizes):  # nothing to train on, so nothing to say
            yield Trained.nothing(len(sizes) - len(present), self.labels * self.classes)
        if present:
            answers, facts = zip(*map(self.answers, present))
            labels = torch.stack([answer[start : start + self.labels] for answer in answers]).long()
            votes = F.one_hot(labels, self.classes).to(torch.float32).flatten(1)
            stats = {name: torch.stack([fact[name] for fact in facts]) for name in facts[0]}
            yield Trained(votes, sizes[sizes > 0].tolist(), facts=stats)

    def _train(self, client: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        weights = self.first.to(self.inner.problem.device, copy=True)
        result = self.inner.one(client, Broadcast(0, self.first, math.inf, 1.0), weights)
        return self._predict(weights), {"train_loss": result.loss.cpu(), "train_accuracy": result.accuracy.cpu()}

    def _predict(self, weights: Tensor) -> Tensor:
        problem = self.inner.problem
        problem.bind(weights)
        with problem.evaluating(), torch.no_grad():
            pieces = [problem.module(x).argmax(-1).to(self._kind) for x in torch.split(self.queries, _PIECE)]
        return torch.cat(pieces).cpu()


@dataclass(frozen=True)
class Student:
    """The server step: noisy arg-max labels, then a student fitted anew from w^0 on everything labelled so far.

    It spends nothing: it sees released votes and public examples only. ``labels`` in the state are the labels so far,
    -1 where a draw gave none (aborted, or no vote and no noise).
    """

    problem: ModuleProblem
    local: Local
    queries: Tensor
    first: Tensor
    classes: int
    epochs: int
    seed: int

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        """Its slots before round 0: no example has a label yet."""
        return {"labels": torch.zeros(0, dtype=torch.int64)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        """Noisy votes ``(draws·Q·V,)`` -> the student's weights ``(d,)``, and the labels so far."""
        # The student is always fitted anew on all labels, so a resumed run needs only these.
        labels = torch.cat([view.slots["labels"], winners(mean.reshape(-1, self.classes))])
        return self.fit(labels, view.round), {"labels": labels}

    def fit(self, labels: Tensor, round: int) -> Tensor:
        """Return the student ``(d,)`` for ``labels`` ``(n,)`` of the first n queries; w^0 without any label."""
        device, labelled = self.problem.device, torch.nonzero(labels != NO_LABEL).flatten()
        if labelled.numel() == 0:
            return self.first.clone()
        weights = self.first.to(device, copy=True)
        rows = np.arange(labelled.numel(), dtype=np.int64)
        inputs, targets, nothing = self.queries[labelled.to(device)], labels[labelled].to(device), np.empty(0, np.int64)
        data = FederatedData(inputs, targets, (rows,), (nothing,), None, None, self.classes, "student")
        steps = self.epochs * math.ceil(len(rows) / self.local.batch_size)
        batches = ClientBatches(data, STUDENT, Order(self.seed, round, self.local.batch_size), rows)
        local, start = replace(self.local, steps=steps), Broadcast(0, weights.clone(), math.inf, 1.0)
        with seeded_torch(self.seed, "dropout of the student", round):
            train_client(LOCAL_MODEL, self.problem, start, local, batches, weights)
        return weights.cpu()


STUDENT = 2**62  # no client's number: the student's batches have a stream of their own


def winners(votes: Tensor) -> Tensor:
    """Arg-max ``(n,)`` of noisy counts ``(n, V)`` (ties: lowest class); -1 where every count is exactly zero."""
    return torch.where((votes != 0).any(-1), votes.argmax(-1), torch.full((len(votes),), NO_LABEL))


def take(shared: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the server optimiser of ae-dpfl: what its step returns is the new model."""
    return mean, {}


# ---------------------------------------------------------------------------------------------------- from a recipe

UNUSED_CLIP = "privacy.clip is not used by votes: a message of one-hot votes has the fixed norm √labels_per_draw."


def account_of(recipe: Recipe, method: Algorithm) -> VotesPlan:
    """Return the account of the votes a recipe asks for: ``queries`` labels in all (default: one draw a round), spread
    over its rounds.

    Raises:
        InputError: ``queries`` is no multiple of Q, or too few for one draw a round; or settings that mean nothing for
            votes.
    """
    labels = int(method.options["labels_per_draw"])
    least = recipe.rounds * labels
    queries = int(method.options["queries"] or least)
    if queries < least or queries % labels:
        allowed = f"a multiple of labels_per_draw = {labels}, at least {least} (a cohort draw in each round)"
        raise wrong("algorithm.queries", queries, allowed)
    if recipe.server.filled() != ServerSection().filled():
        raise wrong("server", "settings", "none for ae-dpfl", hint="Its server step is the fit of a student.")
    require(not recipe.privacy.secure_rng, "privacy.secure_rng", True, "false for ae-dpfl")
    # Under local trust a ballot is always there, so a neighbour changes it.
    replaced = recipe.cohort.sampling == "fixed" or trust_of(recipe, method) == "local"
    return VotesPlan(labels, queries // labels, "replace-one" if replaced else "add-remove")


def split(
    recipe: Recipe, method: Algorithm, data: FederatedData, given: bool, *, own: bool
) -> tuple[FederatedData, Tensor]:
    """Return the federation without the queries, and the queries ``(N, …)``.

    given: whether the clients were given in Python. own: whether their examples are their own, given or from files, so
    that none may be made public; ``public`` then is ``test`` by default.
    """
    require(data.targets.dim() <= 1, "data.dataset", data.name, "examples with one label each for ae-dpfl")
    source = method.options["public"] or (TEST if own else HELD_OUT)
    queries = account_of(recipe, method).queries
    return public_examples(data, str(source), queries, recipe.seed, None if given else recipe.data.dataset, own=own)


def with_votes(job: Job, queries: Tensor) -> Job:
    """Return the same job with the parts that votes need: clip, noise, back end, server step."""
    parts, data, plan, account = job.parts, job.data, job.parts.plan, job.parts.plan.account
    if not isinstance(account, VotesPlan):
        raise TypeError("not the plan of votes")
    classes, labels, threshold = data.classes, account.labels, math.sqrt(account.labels)
    # Every client and the student begin at w^0, so votes depend on data and seed only.
    first, queries = job.initial_weights[: parts.layout.dimension], queries.to(job.problem.device)
    epochs = int(parts.algorithm.options["student_epochs"])
    student = Student(job.problem, parts.local, queries, first, classes, epochs, job.seed)
    added = GaussianNoise(plan.std, plan.trust, float(plan.min_cohort or plan.divisor))
    noise = VoteNoise(plan.draws, labels * classes, functools.partial(added.total_std, threshold), plan.releases)
    method, clip = replace(parts.algorithm, server=(student,)), VoteClip(labels)
    voting = replace(parts, algorithm=method, clip=clip, mechanism=noise, optimizer=lambda view: take)
    one_by_one = Sequential(LOCAL_MODEL, job.problem, parts.local, data, job.seed)
    voters = Voters(one_by_one, first, queries, labels, classes)
    return replace(job, parts=voting, backend=voters, threshold=threshold)
