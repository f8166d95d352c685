"""The engine's server path as one function of a cohort, its deliberately broken twins, and the rules they are held to.

Every rule takes an aggregation. The honest one passes all of them; each twin must break the rule named beside it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from small_federation import at_the_sum, beginning, job, sum_of
from torch import Tensor

from fedflat.core.rng import stream
from fedflat.core.types import Aggregate
from fedflat.engine.job import Job
from fedflat.engine.round import finish_round

CLIP, COHORT, SIGMA = 0.2, 5, 1.5
KEY = bytes(range(32))


@dataclass(frozen=True, eq=False)
class Member:
    """What one client of the cohort hands over: its message, its number of examples, its running statistics.

    Equal to itself only, so that what a cohort gave can be kept.
    """

    message: Tensor
    size: int = 5
    buffer: float = 0.0


@dataclass(frozen=True)
class Released:
    """What leaves the server: the change of the shared vector, and everything else in the state."""

    shared: Tensor
    rest: Tensor


Aggregation = Callable[[list[Member], float], Released]
"""(cohort, noise multiplier) -> what is released."""

REST = torch.tensor([0.25, -3.0])


def honest(method: str, **changes: dict) -> Aggregation:
    """The real path: ``Accumulator`` and ``finish_round`` with the parts that ``fedflat.run`` builds."""
    made = {s: at_the_sum(job(method, {**changes, "privacy": {"noise_multiplier": s}})) for s in (0.0, SIGMA)}

    @functools.cache
    def aggregate(cohort: tuple[Member, ...], sigma: float) -> Released:
        parts, (state, broadcast) = made[sigma].parts, beginning(made[sigma])
        total = total_of(made[sigma], cohort)
        new, _ = finish_round(parts, state, broadcast, total, KEY, lambda line: None)
        assert torch.equal(new.shared - state.shared, parts.algorithm.server[0].mean[: len(new.shared)])
        return Released(parts.algorithm.server[0].mean.clone(), REST.clone())

    return lambda cohort, sigma: aggregate(tuple(cohort), sigma)


def total_of(made: Job, cohort: Sequence[Member]) -> Aggregate:
    """What the server holds of a cohort before noise."""
    return sum_of(made, ((member.message, member.size) for member in cohort), KEY)


def dimension(method: str) -> tuple[int, tuple[slice, ...]]:
    """Length of a method's message, and its tensors."""
    parts = job(method).parts
    return parts.message_length, parts.message_tensors


def _clean(member: Member, d: int) -> Tensor:
    m = member.message
    ok = m.shape == (d,) and m.is_floating_point() and bool(torch.isfinite(m).all())
    return m.double() if ok else torch.zeros(d, dtype=torch.float64)


def _clipped(v: Tensor) -> Tensor:
    return v * min(1.0, CLIP / max(float(torch.linalg.vector_norm(v)), 1e-300))


def _noise(d: int, sigma: float, round: int = 0) -> Tensor:
    return torch.from_numpy(stream(KEY, "noise", round).standard_normal(d)) * sigma * CLIP


Broken = Callable[[list[Member], float, int, tuple[slice, ...]], Tensor | Released]


def twin(aggregate: Broken) -> Callable[[int, tuple[slice, ...]], Aggregation]:
    """A broken aggregation, of messages of a length and their tensors."""

    @functools.wraps(aggregate)
    def of(d: int, tensors: tuple[slice, ...]) -> Aggregation:
        def released(cohort: list[Member], sigma: float) -> Released:
            found = aggregate(cohort, sigma, d, tensors)
            return found if isinstance(found, Released) else Released(found, REST.clone())

        return released

    return of


def _sum(messages: Iterable[Tensor], d: int) -> Tensor:
    return sum(messages, torch.zeros(d, dtype=torch.float64))


@twin
def per_tensor_clip(cohort: list[Member], sigma: float, d: int, tensors: tuple[slice, ...]) -> Tensor:
    """Each tensor clipped to C, reported as C (published item 1)."""
    total = torch.zeros(d, dtype=torch.float64)
    for member in cohort:
        for t in tensors:
            total[t] += _clipped(_clean(member, d)[t])
    return (total + _noise(d, sigma)) / COHORT


@twin
def weighted_mean(cohort: list[Member], sigma: float, d: int, tensors: tuple[slice, ...]) -> Tensor:
    """Weights n_i/Σn_j (published item 4)."""
    number = max(1, sum(member.size for member in cohort))
    return _sum((_clipped(_clean(m, d)) * m.size for m in cohort), d) / number + _noise(d, sigma) / COHORT


@twin
def mask_after_noise(cohort: list[Member], sigma: float, d: int, tensors: tuple[slice, ...]) -> Tensor:
    """Every client masks its own noisy share (published item 3)."""
    total = torch.zeros(d, dtype=torch.float64)
    for place, member in enumerate(cohort):
        update = _clipped(_clean(member, d))
        kept = update.abs() >= update.abs().topk(max(1, d // 3)).values[-1]
        total += torch.where(kept, update + _noise(d, sigma / math.sqrt(COHORT), place), 0.0)
    return total / COHORT


@twin
def realised_denominator(cohort: list[Member], sigma: float, d: int, tensors: tuple[slice, ...]) -> Tensor:
    """Divided by the number that came (the round's step 7)."""
    return (_sum((_clipped(_clean(m, d)) for m in cohort), d) + _noise(d, sigma)) / max(1, len(cohort))


@twin
def unclipped_buffer(cohort: list[Member], sigma: float, d: int, tensors: tuple[slice, ...]) -> Released:
    """Running statistics averaged into the state (published item 8)."""
    rest = REST + sum(member.buffer for member in cohort) / max(1, len(cohort))
    return Released((_sum((_clipped(_clean(m, d)) for m in cohort), d) + _noise(d, sigma)) / COHORT, rest)


@twin
def trusting_sum(cohort: list[Member], sigma: float, d: int, tensors: tuple[slice, ...]) -> Tensor:
    """No clip and no check for broken messages."""
    total = _sum((m.message.double() for m in cohort if m.message.shape == (d,)), d)
    return (total + _noise(d, sigma)) / COHORT


def canaries(d: int, tensors: tuple[slice, ...]) -> dict[str, Member]:
    """Adversarial messages: as large, as broken and as well aimed as a client can send."""
    direction = torch.from_numpy(np.random.default_rng(0).normal(size=d)).float()
    direction /= torch.linalg.vector_norm(direction)
    each = torch.cat([direction[t] / torch.linalg.vector_norm(direction[t]) * CLIP for t in tensors])
    nan, inf, one = torch.zeros(d), torch.zeros(d), torch.zeros(d)
    nan[0], inf[-1], one[d // 2] = math.nan, -math.inf, 1e38
    return {
        "aimed": Member(direction * CLIP, 5), "against": Member(-direction * CLIP, 10_000, 1e6),
        "huge": Member(direction * 1e30, 5), "all largest": Member(torch.full((d,), 3e38), 5),
        "one largest": Member(one, 5), "tiny": Member(direction * 1e-30, 10_000),
        "every tensor at the clip": Member(each, 5), "nan": Member(nan, 5, math.nan), "inf": Member(inf, 5),
        "all nan": Member(torch.full((d,), math.nan), 5), "double": Member(direction.double() * 1e300, 5),
        "half": Member(direction.half() * 1000, 5), "too short": Member(torch.ones(d - 1), 5),
        "too long": Member(torch.ones(d + 1), 5), "empty": Member(torch.zeros(0), 0),
        "whole numbers": Member(torch.full((d,), 7), 5), "complex": Member(torch.full((d,), 1j), 5),
        "zero": Member(torch.zeros(d), 1_000_000),
    }  # fmt: skip


def crowds(d: int, tensors: tuple[slice, ...]) -> dict[str, list[Member]]:
    """The other clients, adversarial too."""
    found = canaries(d, tensors)
    one = torch.zeros(d)
    one[0] = CLIP
    return {
        "nobody": [], "all aimed": [found["aimed"]] * 4, "all huge": [found["huge"]] * 4,
        "all broken": [found["nan"], found["inf"], found["too short"], found["whole numbers"]],
        "one coordinate": [Member(one, 3)] * 2,
    }  # fmt: skip


def neighbours(d: int, tensors: tuple[slice, ...]) -> Sequence[tuple[str, list[Member], list[Member]]]:
    """Pairs of cohorts that differ in one client: (name, with it, without it); the same members in every call."""
    return _neighbours(d, tuple((t.start, t.stop) for t in tensors))


@functools.cache
def _neighbours(d: int, ends: tuple[tuple[int, int], ...]) -> Sequence[tuple[str, list[Member], list[Member]]]:
    tensors = tuple(slice(*end) for end in ends)
    return [
        (f"{name} among {crowd}", [*others[:1], canary, *others[1:]], others)
        for crowd, others in crowds(d, tensors).items()
        for name, canary in canaries(d, tensors).items()
    ]


def sensitivity_holds(aggregation: Aggregation, d: int, tensors: tuple[slice, ...], factor: float = 1.0) -> None:
    """No client moves the noiseless mean by more than sensitivity / m (C under add-remove)."""
    for name, with_it, without in neighbours(d, tensors):
        moved = (aggregation(with_it, 0.0).shared - aggregation(without, 0.0).shared).double()
        distance = float(torch.linalg.vector_norm(moved))
        assert distance <= factor * CLIP / COHORT * (1 + 1e-6), f"{name}: moved by {distance * COHORT / CLIP:.4g}·C/m"


def replacement_holds(aggregation: Aggregation, d: int, tensors: tuple[slice, ...]) -> None:
    """Replacing one client by another moves the noiseless mean by at most 2C/m."""
    found = list(canaries(d, tensors).items())
    for others in crowds(d, tensors).values():
        for (first, a), (second, b) in itertools.pairwise(found):
            moved = (aggregation([*others, a], 0.0).shared - aggregation([*others, b], 0.0).shared).double()
            assert float(torch.linalg.vector_norm(moved)) <= 2 * CLIP / COHORT * (1 + 1e-6), f"{first} or {second}"


def noise_is_the_same(aggregation: Aggregation, d: int, tensors: tuple[slice, ...]) -> None:
    """Under one key the very same noise is added whoever takes part, up to the rounding of the sum."""
    for name, with_it, without in neighbours(d, tensors):
        noise = [(aggregation(c, SIGMA).shared - aggregation(c, 0.0).shared).double() for c in (with_it, without)]
        assert float((noise[0] - noise[1]).abs().max()) <= 1e-6 * SIGMA * CLIP, name


def rest_is_the_first(aggregation: Aggregation, d: int, tensors: tuple[slice, ...]) -> None:
    """The released state minus the shared vector is w^0's, bit for bit."""
    for name, with_it, _ in neighbours(d, tensors):
        assert torch.equal(aggregation(with_it, SIGMA).rest, REST), name


RULES = (sensitivity_holds, noise_is_the_same, rest_is_the_first)
TWINS = {
    per_tensor_clip: (sensitivity_holds,), weighted_mean: (sensitivity_holds,), mask_after_noise: (noise_is_the_same,),
    realised_denominator: (sensitivity_holds, noise_is_the_same), unclipped_buffer: (rest_is_the_first,),
    trusting_sum: (sensitivity_holds,),
}  # fmt: skip
