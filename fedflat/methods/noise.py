"""Choose where a recipe's noise comes from: trust model, the round's mechanism, and its account in the plan.

Correlated noise is here too: later rounds partly take it back. Round t adds std·(row t of C⁻¹)·Z, one Z for the whole
run. Row i of Z comes from the named stream of round i, and every round draws again the rows that it needs: t + 1 draws
of d numbers in round t, while clients train, and nothing to keep, so that a run that was killed goes on with the same
bits.
"""

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.config.method import constant_clip
from fedflat.config.recipe import Recipe
from fedflat.core import Aggregate, Algorithm, Broadcast, Clip, Mechanism, in_range, stream, whole, wrong
from fedflat.core.discrete import SecureBits, ShareNumbers, rounded_gaussian
from fedflat.core.factors import PLACES, Factor, identity
from fedflat.engine.job import RoundParts
from fedflat.engine.reduce import Accumulator
from fedflat.methods.ddgauss import DistributedDiscreteGaussian, SharedDiscreteNoise
from fedflat.methods.plans import DDGaussPlan, VotesPlan
from fedflat.methods.published import Published
from fedflat.pieces.clipping import MethodScale, whole_vector
from fedflat.pieces.mechanisms import GaussianNoise, GridGaussian, GridNoise
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.plan import Plan
from fedflat.privacy.statement import TEXTS

PIECE = 1 << 16
"""Numbers drawn at a time."""
CHUNK = 1 << 12
"""Coordinates whose exact rows are made together; part of the streams' names, so it never changes."""
MOST_BITS = 40 - PLACES
"""Of the grid: Z is drawn 2^16 times finer, and the exact sampler goes to 2^40."""


@dataclass(frozen=True)
class CorrelatedNoise(GaussianNoise):
    """Rows of C⁻¹Z on the rounds' sums, for a server that adds the noise. std: of Z on the sum, C_clip ↦ σ·s."""

    factor: Factor = field(default_factory=lambda: identity(1))

    def unit(self, key: bytes, round: int, size: int) -> Tensor:
        """Return row t of C⁻¹Z, float32 ``(size,)``, for Z of std 1."""
        total = np.zeros(size)
        for i, weight in enumerate(self.factor.inverse[round, : round + 1]):
            generator = stream(key, "noise", i)
            for start in range(0, size if weight else 0, PIECE):
                part = total[start : start + PIECE]
                part += weight * generator.standard_normal(len(part), dtype=np.float32)
        return torch.from_numpy(total.astype(np.float32))

    noisy_count = Mechanism.noisy_count  # the plan allows no adaptive clip with correlated noise


@dataclass(frozen=True)
class CorrelatedGridNoise(GridNoise):
    """The same for ``privacy.secure_rng``: whole-number sums X, and exact samples on a grid that hide no low bits.

    Released is R_t = X_t + y_t in grid steps, y_t = ⌊(Ẑ_t − Σ_j 2¹⁶C[t, t−j]·y_{t−j}) / 2¹⁶C[t, t]⌉ in whole numbers,
    with Ẑ_t = ⌊2¹⁶Z_t⌉ an exact rounded Gaussian and 2¹⁶C whole. Since 2¹⁶C·X is whole, Ẑ + 2¹⁶C·X = ⌊2¹⁶(Z + CX)⌉, and
    by induction R_t = ⌊(⌊2¹⁶(Z + CX)_t⌉ − Σ_j 2¹⁶C[t, t−j]·R_{t−j}) / 2¹⁶C[t, t]⌉: a function of CX + Z alone. So the
    release is post-processing of the continuous mechanism, at its ε.
    """

    factor: Factor = field(default_factory=lambda: identity(1))

    def grid(self, bound: float, dimension: int) -> GridGaussian:
        """Return the public grid of a round, on which Z has std 2^bits with at most ``MOST_BITS`` bits."""
        plain = super().grid(bound, dimension)
        return GridGaussian(bound, plain.std, dimension, min(plain.log2_std, MOST_BITS))

    def _steps(self, key: bytes, broadcast: Broadcast, count: int, grid: GridGaussian) -> NDArray[np.int64]:
        sizes = [min(CHUNK, grid.dimension - start) for start in range(0, grid.dimension, CHUNK)]
        rows = functools.partial(self._rows, key, broadcast.round, grid.log2_std)
        drawn = np.concatenate([rows(number, size) for number, size in enumerate(sizes)])
        if broadcast.mask is not None:
            drawn[~broadcast.mask.cpu().numpy()] = 0
        return drawn

    def _rows(self, key: bytes, round: int, log2_std: int, number: int, size: int) -> NDArray[np.int64]:
        """y_round of one chunk of coordinates: rows 0 to ``round`` one after the other, as many kept as C has bands."""
        entries = np.rint(self.factor.columns * 2.0**PLACES).astype(np.int64)
        bands, recent = self.factor.bands, np.zeros((self.factor.bands, size), dtype=np.int64)
        for t in range(round + 1):
            # Drawn 2^16 times finer, as fine as the entries of C: only so is every product whole.
            left = rounded_gaussian(log2_std + PLACES, size, SecureBits(key, "correlated noise", t, number))
            for j in range(1, min(bands, t + 1)):
                left -= entries[t - j, j] * recent[(t - j) % bands]
            # Rounded half up in whole numbers, as the proof above has it.
            recent[t % bands] = (2 * left + entries[t, 0]) // (2 * entries[t, 0])
        return np.array(recent[round % bands])


@dataclass(frozen=True)
class ClientNoise(Mechanism):
    """trust: local. Every message carries its client's own noise, so the server clips and adds nothing."""

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """Return a plain sum: a noised message is longer than the clip, and already private."""
        return Accumulator(whole_vector(float("inf")), float("inf"), tensors, tensors[-1].stop)

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return zeros: the noise is in the sum."""
        return torch.zeros_like(aggregate.total)


def of_a_server(parts: RoundParts, threshold: float) -> RoundParts:
    """Return the parts as a deployment's server uses them: its clients have scaled, clipped and perhaps noised."""
    if isinstance(parts.clip, MethodScale):  # scaled once more it would be another message
        parts = replace(parts, clip=whole_vector(threshold))
    if parts.plan.trust == "local" and parts.plan.private:
        parts = replace(parts, mechanism=ClientNoise())
    return parts


def trust_of(recipe: Recipe, method: Algorithm) -> str:
    """Return the recipe's trust model; where it names none, distributed for ddgauss and central for every other
    method."""
    return recipe.privacy.trust or ("distributed" if method.kind == "ddgauss" else "central")


def check(recipe: Recipe, method: Algorithm) -> None:
    """Refuse combinations of secure noise, trust model, cohorts and method for which there is no proven mechanism.

    Raises:
        InputError: with the reason.
    """
    _check_what_is_kept(recipe, method)
    _check_message(recipe, method)
    trust, discrete = trust_of(recipe, method), method.kind == "ddgauss"
    if discrete and trust != "distributed":
        raise wrong("privacy.trust", trust, f"distributed for {method.name}", hint="Its noise is clients' shares.")
    if recipe.privacy.secure_rng and trust == "distributed" and not discrete:
        hint = "A sum of rounded Gaussian shares has no proven ε; the distributed discrete Gaussian has."
        raise wrong("privacy.secure_rng", True, "false with trust: distributed, or algorithm ddgauss", hint=hint)
    if discrete and recipe.privacy.noise_cohort is not None:
        hint = "The grid is made for the cohort that runs."
        raise wrong("privacy.noise_cohort", recipe.privacy.noise_cohort, f"nothing for {method.name}", hint=hint)


def _check_what_is_kept(recipe: Recipe, method: Algorithm) -> None:
    """Refuse cohorts that clients' memories do not go with: amplification then needs independent coins.

    Given the others' coins and randomness, a release is (1 − q)·P₀ + q·E[P₁], however a client's state was made. Where
    the others' places in a cohort depend on its own, that is not so. Local trust and public schedules claim no
    amplification.
    """
    trust, sampling = trust_of(recipe, method), recipe.cohort.sampling
    keeps = "a state" if method.client_state else "personal heads" if method.head is not None else ""
    if not keeps or not method.private:
        return
    if method.client_state and trust == "distributed":
        hint = "Its clients keep a state, moved by what they sent; of a round that is aborted nothing is added."
        raise wrong("privacy.trust", trust, f"central or local for {method.name}", hint=hint)
    sound = recipe.privacy.protocol == "sound" and recipe.privacy.noise_multiplier != 0
    if sound and trust != "local" and sampling not in ("poisson", "full", "min-separation"):
        hint = f"Its clients keep {keeps} between rounds: amplification is proven for independent coins only."
        raise wrong("cohort.sampling", sampling, f"poisson for {method.name}, full or min-separation", hint=hint)


def _check_message(recipe: Recipe, method: Algorithm) -> None:
    """Refuse what messages of several vectors, a factor or a state of the method's own do not go with."""
    several = method.vectors > 1 or method.scale is not None or bool(method.client_state)
    if several and method.private and recipe.privacy.protocol == "published":
        raise wrong("privacy.protocol", "published", f"sound for {method.name}")
    if method.vectors < 1 or (method.vectors > 1 and not method.transforms):
        raise wrong("algorithm.vectors", method.vectors, "1, or as many as the last of algorithm.transforms makes")
    names = [state.name for state in method.client_state]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise wrong("algorithm.client_state", ", ".join(map(repr, names)), "different names that are identifiers")
    if method.vectors > 1 and method.mask is not None:
        raise wrong("algorithm.mask", f"a common mask, and {method.vectors} vectors in a message", "one of both")
    if method.scale is not None and not method.private:
        raise wrong("algorithm.scale", f"{method.name}, which is not private", "nothing where nothing is clipped")


def account_of(recipe: Recipe, method: Algorithm, dimension: int | None) -> DDGaussPlan | None:
    """Return the plan's own account for ddgauss, None for the Gaussian sum. dimension: d, None while it is not
    known."""
    if method.kind != "ddgauss":
        return None
    size = 1 if dimension is None else method.vectors * dimension
    options = {name: method.options[name] for name in ("bits", "granularity", "beta") if name in method.options}
    whole("algorithm.bits", options.get("bits", 16), 2, 48)
    if options.get("granularity") is not None:
        in_range("algorithm.granularity", options["granularity"], 0, 1e9, open_low=True)
    return DDGaussPlan(size, constant_clip(recipe, method.name), **options)


def with_fixed_numbers(plan: Plan) -> Plan:
    """Return the plan with n_max and γ as numbers."""
    return replace(plan, mechanism=plan.mechanism.settled(plan)) if isinstance(plan.mechanism, DDGaussPlan) else plan


def mechanism_of(recipe: Recipe, plan: Plan) -> Mechanism:
    """Return the noise of a run's rounds, with the law that its plan accounts."""
    secure = recipe.privacy.secure_rng
    if isinstance(plan.mechanism, DDGaussPlan) and plan.private:
        plan.mechanism.refuse_wrapping(plan)
        numbers = plan.mechanism.account(plan)
        shared = {item.name: getattr(numbers, item.name) for item in fields(ShareNumbers)}
        return SharedDiscreteNoise(DistributedDiscreteGaussian(**shared), recipe.seed, numbers.n_max, secure)
    if (mixing := mixing_of(plan)) is not None:
        # Without noise there is no grid to take it from.
        correlated = CorrelatedGridNoise if secure and plan.event_multiplier > 0 else CorrelatedNoise
        return correlated(plan.std, factor=mixing.factor)
    noise = GridNoise if secure and plan.effective_multiplier > 0 else GaussianNoise
    return noise(plan.std, plan.trust, float(plan.min_cohort or plan.divisor), plan.count_std or 0.0)


def mixing_of(plan: Plan) -> ScheduledPlan | None:
    """Return the account of a plan whose C mixes the rounds' noise, None where nothing does."""
    mechanism = plan.mechanism
    return mechanism if isinstance(mechanism, ScheduledPlan) and mechanism.kind != "independent" else None


def facts(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return what the privacy statement says of a mechanism that is not float Gaussian noise."""
    mechanism, text = plan.mechanism, TEXTS["noise"]
    if isinstance(mechanism, VotesPlan | DDGaussPlan | Published):
        return mechanism.facts
    if (mixing := mixing_of(plan)) is not None:
        return {"mechanism": mixing.sentence + (text["rows on a grid"] if recipe.privacy.secure_rng else "")}
    return {"mechanism": text["grid"]} if recipe.privacy.secure_rng else {}
