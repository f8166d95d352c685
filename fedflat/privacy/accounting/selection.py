"""What it costs to release the best of several private runs, when nobody learns how many there were.

Papernot and Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy": K trials, K drawn from a public law;
every trial draws its settings from one fixed public distribution, independently of the others, and is a whole private
run; the one with the best score is released and nothing else. From the Rényi divergence ε(λ) of one trial (both
directions of neighbours, all settings) follows that of the selection: Theorem 2 for the truncated negative binomial,
Theorem 6 for Poisson.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import in_range, nearest, wrong
from fedflat.privacy.accounting.curves import renyi_epsilon

Floats = NDArray[np.float64]
LAWS: dict[str, float | None] = {"geometric": 1.0, "logarithmic": 0.0, "poisson": None}
"""η of the laws that have a name; None: Poisson."""
MOST = 1e6
"""The largest mean number of trials."""
SHAPES = (-0.9, 10.0)
"""Values of η whose γ stays within float64 for every mean."""


@dataclass(frozen=True)
class Trials:
    """The law of K, the number of trials: public, while K itself is secret.

    mean: E[K]. eta: η > −1 of the truncated negative binomial, K ≥ 1 (1: geometric, 0: logarithmic; the smaller, the
    cheaper, and the likelier that K is 1); None: Poisson, where K may be 0, and then nothing is selected.
    Raises InputError: η or the mean out of range.
    """

    mean: float
    eta: float | None = 1.0

    def __post_init__(self) -> None:
        if self.eta is None:
            in_range("trials", self.mean, 0, MOST, open_low=True)
            return
        in_range("law", self.eta, *SHAPES)
        in_range("trials", self.mean, 1.001, MOST)

    @property
    def name(self) -> str:
        """In words."""
        known = {eta: name for name, eta in LAWS.items()}
        return known.get(self.eta) or f"truncated negative binomial with η = {self.eta:g}"

    @cached_property
    def gamma(self) -> float:
        """γ in (0, 1) at which the truncated negative binomial has this mean."""
        from scipy.optimize import brentq

        eta, goal = self.eta or 0.0, math.log(self.mean)
        most = 300 / max(1.0, eta)
        found = brentq(lambda x: math.log(negative_binomial_mean(eta, x)) - goal, 1e-6, most, xtol=1e-14)
        return math.exp(-float(found))

    def chances(self) -> Iterator[tuple[int, float]]:
        """K and its probability, from the smallest K on, without end."""
        if self.eta is None:
            number, log = 0, math.log(self.mean)
            while True:  # each by its logarithm: e^−μ is 0 in float64 from μ = 746 on
                yield number, math.exp(number * log - self.mean - math.lgamma(number + 1))
                number += 1
        gamma = self.gamma
        number, chance = 1, (1 - gamma) * _ratio(self.eta, -math.log(gamma))
        while True:
            yield number, chance
            number, chance = number + 1, chance * (1 - gamma) * (number + self.eta) / (number + 1)

    def draw(self, generator: np.random.Generator) -> int:
        """K, by inversion of one uniform number."""
        every = self.chances()
        number, chance = next(every)
        # One uniform number against running sums, so that K needs no library's sampler.
        left = float(generator.random()) - chance
        while left >= 0 and (chance > 1e-300 or number < self.mean):
            number, chance = next(every)
            left -= chance
        return number

    def selected(self, orders: Sequence[float], one: Floats) -> Floats:
        """Rényi divergences of the selection at ``orders`` (all > 1), from those of one trial, both ``(n,)``."""
        at = np.asarray(orders, dtype=np.float64)
        found = self._poisson(at, one) if self.eta is None else self._negative_binomial(at, one, self.eta)
        return np.minimum.accumulate(found[::-1])[::-1]  # divergences grow with the order

    def _negative_binomial(self, at: Floats, one: Floats, eta: float) -> Floats:
        """ε(λ) + (1 + η)·min over λ̂ of ((1 − 1/λ̂)·ε(λ̂) + ln(1/γ)/λ̂) + ln E[K]/(λ − 1)."""
        # λ̂ is free in the theorem: the best of all orders is still a bound.
        among = (1 + eta) * float(np.min((1 - 1 / at) * one - math.log(self.gamma) / at))
        return one + among + math.log(negative_binomial_mean(eta, -math.log(self.gamma))) / (at - 1)

    def _poisson(self, at: Floats, one: Floats) -> Floats:
        """ln(e^−μ + μ·e^((λ−1)(ε(λ) + μδ̂)))/(λ − 1), the trial being (ln(1 + 1/(λ − 1)), δ̂)-DP."""
        hats = _deltas(at, one, np.log1p(1 / (at - 1)))
        exponent = (at - 1) * (one + self.mean * hats)
        return np.asarray(np.logaddexp(-self.mean, math.log(self.mean) + exponent) / (at - 1))

    def epsilon(self, orders: Sequence[float], one: Floats, delta: float) -> float:
        """ε of the selection at ``delta``, the best over all orders; inf where a trial has no noise."""
        if not np.isfinite(one).any():
            return math.inf
        return renyi_epsilon(orders, self.selected(orders, one), delta)


def law(value: str | float) -> float | None:
    """η of a law that is given by its name, or as η itself.

    Raises:
        InputError: neither.
    """
    if str(value) in LAWS:
        return LAWS[str(value)]
    try:
        return float(value)
    except ValueError:
        raise wrong(
            "law",
            value,
            f"{', '.join(LAWS)}, or a number η from {SHAPES[0]} to {SHAPES[1]:g}",
            hint=nearest(str(value), LAWS),
        ) from None


def _deltas(at: Floats, one: Floats, epsilons: Floats) -> Floats:
    """The smallest δ proven at each ε by divergences ``one`` at orders ``at``; all ``(n,)``.

    Canonne et al. 2020, Proposition 12; and the total variation, at most √(1 − e^−ε(λ)) by
    Bretagnolle and Huber.
    """
    log = (at - 1) * (one + np.log1p(-1 / at)) - np.log(at) - np.multiply.outer(epsilons, at - 1)
    # At large ε the total variation says more than any single order.
    variation = np.sqrt(-np.expm1(-np.maximum(one, 0.0)))
    return np.asarray(np.minimum(np.exp(np.minimum(log.min(axis=1), 0.0)), variation.min()))


def negative_binomial_mean(eta: float, log: float) -> float:
    """E[K] = η(1 − γ)/(γ(1 − γ^η)) of the truncated negative binomial, of log = ln(1/γ); (e^log − 1)/log at η = 0."""
    return math.expm1(log) * _ratio(-eta, log)


def _ratio(eta: float, log: float) -> float:
    """η/(e^(η·log) − 1); 1/log at η = 0."""
    return eta / math.expm1(eta * log) if abs(eta * log) > 1e-12 else 1 / log
