"""Run published procedures in which each client adds a share of the noise.

The sound round adds noise once, to the sum. Shi et al. 2023a, 2023b and Liu et al. 2025 let each of m clients add
N(0, σ²C²/m) to its message; what they do to the message afterwards (masks, weights, the subtracted direction) then acts
on its noise too. Cheng et al. 2022 divide by the realised cohort. These are mechanisms and sums for the one server
path; no training loop knows of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.config.method import constant_clip
from fedflat.config.recipe import Recipe
from fedflat.core import Layout, require, stream, wrong
from fedflat.core.types import Aggregate, Algorithm, Broadcast, ClientView, Clip, Local, Mechanism, Transform
from fedflat.engine.job import RoundParts
from fedflat.engine.reduce import Accumulator, PlainSum
from fedflat.methods.published import CITED, Published, paper_of, published_plan, with_tensors
from fedflat.pieces import clipping
from fedflat.pieces.mechanisms import GaussianNoise
from fedflat.pieces.transforms import AddBackDirection, TopK
from fedflat.privacy.plan import Plan


@dataclass(frozen=True)
class NoisedAggregate(Aggregate):
    """The sum of clipped messages, and beside it the sum ``(d,)`` of the noise their senders added."""

    noise: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class NoiseShares(Mechanism):
    """Each client adds N(0, std(C)²/m) to its own clipped message before anything else is done to it.

    std: the plan's, from C to the std on the sum of m messages. clients: m. weighted: mean with weights n_i/Σn_j
    (item 4). mask: the client's own mask, taken from its *noised* message (item 3). local, beta: for DP-FedPGN; its
    clients subtract (1−β)·K_i·η·g̃ with their own K_i after the noise (item 6), where the server step
    subtracts the public K's.
    """

    std: Callable[[float], float]
    clients: float
    weighted: bool = False
    mask: Transform | None = None
    local: Local | None = None
    beta: float | None = None

    def accumulator(self, clip: Any, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """Return the sum of a round. clip: one that says what each message's noise is made for."""
        return SharesAccumulator(self, clip, broadcast, tensors, key)

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return what the clients' shares came to ``(d,)``."""
        return aggregate.noise  # type: ignore[attr-defined, no-any-return]


class SharesAccumulator(Accumulator):
    """Clips, adds each message's noise share, masks and weights it; signal and noise are summed apart."""

    def __init__(
        self, shares: NoiseShares, clip: Any, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes
    ) -> None:
        super().__init__(clip, broadcast.clip, tensors, tensors[-1].stop, shares.weighted)
        self.shares, self.message_clip, self.broadcast, self.key = shares, clip, broadcast, key
        self.noise = torch.zeros_like(self.total)
        self._drawn = 0
        self._sizes: Sequence[int] = ()

    def add(self, messages: Tensor, sizes: Sequence[int], stats: Mapping[str, Tensor] | None = None) -> Tensor:
        """As the plain sum, with noise; a client without data sends nothing and adds no noise."""
        self._sizes = sizes
        return super().add(messages, sizes, stats)

    def _sum(self, messages: Tensor, factors: Tensor) -> None:
        # Again, for the noise: the clip's factors do not say what a message was clipped to.
        thresholds = self.message_clip.limits(messages, self.threshold, self.tensors)[:, 0]
        for message, factor, threshold, size in zip(messages, factors, thresholds.tolist(), self._sizes):
            # Nobody sends for a client without data, so there is no noise of its own either.
            if size == 0:
                continue
            weight = float(size) if self.weighted else 1.0
            signal = torch.cat([message[where].double() * f for where, f in zip(self.tensors, factor)])
            noise = weight * self._share(threshold)
            mask = self._mask(signal + noise)
            self.total += signal * mask + weight * self._surplus(size)
            self.noise += noise * mask

    def _share(self, threshold: float) -> Tensor:
        """N(0, share²) float64 ``(d,)`` from a stream of the client's place in the cohort."""
        generator = stream(self.key, "noise share", self.broadcast.round, self._drawn)
        self._drawn += 1
        std = self.shares.std(threshold) / math.sqrt(self.shares.clients)
        drawn = torch.from_numpy(generator.standard_normal(self.dimension)) * std
        return drawn if self.broadcast.mask is None else drawn * self.broadcast.mask

    def _mask(self, noised: Tensor) -> Tensor:
        """1 where the client's own mask keeps its noised message, ``(d,)``."""
        if self.shares.mask is None:
            return torch.ones_like(noised)
        return (self.shares.mask(noised, ClientView(steps=0, lr=0.0, tensors=self.tensors)) != 0).to(noised)

    def _surplus(self, size: int) -> Tensor:
        """(1−β)(K − K_i)·η·g̃: what the server step's common K leaves over; zero without re-added direction."""
        local, beta, direction = self.shares.local, self.shares.beta, self.broadcast.vectors.get("direction")
        if local is None or beta is None or direction is None:
            return torch.zeros_like(self.total)
        steps = local.steps - local.of(size).steps
        return (1 - beta) * steps * (local.lr * self.broadcast.rate) * direction.double()

    def result(self) -> NoisedAggregate:
        """Return the aggregate so far, with its noise."""
        return NoisedAggregate(**vars(super().result()), noise=self.noise.clone())


class RealisedSum(PlainSum):
    """Divides by the clients that happened to come (Cheng et al. 2022, Alg. 1, line 7); an empty cohort: by one."""

    def result(self) -> Aggregate:
        """Return the aggregate so far, divided by |P_t|, the clients that came, and at least 1."""
        return replace(super().result(), divisor=float(max(len(self._present), 1)))


class RealisedMean(GaussianNoise):
    """Cheng et al. 2022: shares of σ²C²/|P_t| of the realised cohort, σ²C² on the sum in all, the realised divisor."""

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """Return the sum of a round."""
        return RealisedSum(clip, broadcast.clip, tensors, tensors[-1].stop)

    noisy_count = Mechanism.noisy_count  # its procedure has one constant clip


# ---------------------------------------------------------------------------------------------------- from a recipe

FOREIGN = {
    "privacy": {"trust", "secure_rng", "noise_cohort", "selection", "noise"},
    "cohort": {"max", "min", "max_participations"},
}
"""Keys of a recipe that no paper's released procedure has."""


def plan_of(recipe: Recipe, method: Algorithm, clients: int) -> Plan:
    """Return the plan of the paper's procedure; refuses what no paper's released procedure has."""
    privacy, cohort = recipe.privacy, recipe.cohort
    paper = paper_of(recipe.algorithm.name, privacy.published)
    require(method.kind == "update", "privacy.protocol", f"published for {method.name}", "sound")
    for section, keys in FOREIGN.items():
        for key, found in getattr(recipe, section).model_dump(include=keys, exclude_defaults=True).items():
            require(found == "central", f"{section}.{key}", found, "its default with privacy.protocol: published")
    if cohort.sampling not in ("poisson", "fixed") or (paper == "004" and cohort.sampling != "poisson"):
        allowed = "poisson" if paper == "004" else "fixed (drawn from the round number)"
        raise wrong("cohort.sampling", cohort.sampling, f"{allowed} in the procedure of {CITED[paper]}")
    spent = privacy.model_dump(include={"noise_multiplier", "epsilon", "delta"})
    clip = None if paper == "002" else constant_clip(recipe, f"the procedure of {CITED[paper]}")
    epochs = recipe.local.epochs is not None
    plan = published_plan(
        paper, clients=clients, cohort=cohort.size, rounds=recipe.rounds, clip=clip, epochs=epochs, **spent
    )
    return plan if privacy.budget is None else replace(plan, budget=privacy.budget)


def clip_of(account: Published, layout: Layout) -> tuple[Clip, float]:
    """Return the paper's clip and its threshold C (infinite where each client takes its own)."""
    if account.clip is None:
        return clipping.PublishedMedian(), math.inf
    if account.paper == "004":
        return clipping.whole_vector(account.clip), account.clip
    return clipping.PublishedPerTensor(layout.shared), account.clip


def parts_of(parts: RoundParts, account: Published) -> RoundParts:
    """Return the same parts with the paper's own order of clip, noise and mask, its weights and its denominator."""
    plan = with_tensors(parts.plan, parts.layout.shared)
    if account.paper == "004":
        return replace(parts, plan=plan, mechanism=RealisedMean(plan.std))
    method, mask = parts.algorithm, None
    if 3 in account.items:
        mask = next((t for t in method.transforms if isinstance(t, TopK)), None)
        method = replace(method, transforms=tuple(t for t in method.transforms if t is not mask))
    beta = next((t.beta for t in method.transforms if isinstance(t, AddBackDirection)), None)
    shares = NoiseShares(plan.std, plan.divisor, 4 in account.items, mask, parts.local, beta)
    return replace(parts, plan=plan, algorithm=method, mechanism=shares)
