"""One round of a Gaussian, everybody's or Poisson-sampled, cohorts truncated or not, as privacy losses on a grid:
dp-accounting's mechanisms and its algorithm (connect-the-dots, Doroshenko et al. 2022, Algorithm 1), with all points of
the grid at once instead of one by one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["deltas", "sampled_gaussian", "truncated_gaussian"]


def deltas(loss: Any, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """δ of one round at each ε ``(n,)``, as ``loss.get_delta_for_epsilon(epsilons)`` gives it point by point.

    δ is the largest μ(A) − e^ε·ν(A), reached where A is all x at which the loss is at least ε. The x found here may
    differ from the library's in their last bits; as δ is flat there, that moves it by the square of their distance.

    Args:
        loss: dp-accounting's ``GaussianPrivacyLoss`` with 0 < ``sampling_prob``, add, remove or replace.
    """
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    if loss.sampling_prob == 1:
        return _above(loss, epsilons, -0.5 - epsilons * loss.standard_deviation**2)
    if loss.adjacency_type == AdjacencyType.REPLACE:
        return _above(loss, epsilons, _where_replaced(loss, epsilons))
    q, removed = loss.sampling_prob, loss.adjacency_type == AdjacencyType.REMOVE
    sign = 1.0 if removed else -1.0
    # Beyond log(1 − q) no output has such a loss, so the logarithm below would be of a negative number.
    bounded = sign * epsilons > math.log1p(-q)
    found = np.zeros_like(epsilons)
    if removed:
        found[~bounded] = -np.expm1(epsilons[~bounded])  # every loss is above these ε; added, none is above the others
    inside = epsilons[bounded]
    scaled = sign * inside - math.log(q)
    with np.errstate(divide="ignore"):
        plain = sign * (scaled + np.log1p(-np.minimum(np.exp(math.log(1 / q - 1) - scaled), 1.0)))
    x = -0.5 - plain * loss.standard_deviation**2 + (0.0 if removed else 1.0)
    found[bounded] = _above(loss, inside, x)
    return found


def _above(loss: Any, epsilons: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """μ − e^ε·ν of everything up to ``x``."""
    found: NDArray[np.float64] = loss.mu_upper_cdf(x) - np.exp(epsilons + loss.mu_lower_log_cdf(x))
    return np.clip(found, 0.0, 1.0)


def _where_replaced(loss: Any, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """x with loss ε between shifts by ±1, each taken with probability q: σ²·(arsinh(−α·sinh(ε/2)) − ε/2) with
    α = e^(1/2σ²)·(1 − q)/q, in logarithms, as none of the factors fits a float."""
    variance, q, half = loss.standard_deviation**2, loss.sampling_prob, np.abs(epsilons) / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
    log_product = 0.5 / variance + math.log1p(-q) - math.log(q) + log_sinh
    over = np.maximum(log_product, 0.0)
    large = over + np.log1p(np.sqrt(1 + np.exp(-2 * over)))
    arsinh = np.where(log_product > 0, large, np.arcsinh(np.exp(np.minimum(log_product, 0.0))))
    found: NDArray[np.float64] = variance * (-np.sign(epsilons) * arsinh - epsilons / 2)
    return found


def _one(adjacency: str, q: float, multiplier: float, step: float) -> Any:
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    loss = GaussianPrivacyLoss(multiplier, sampling_prob=q, adjacency_type=AdjacencyType(adjacency))
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
    found = deltas(loss, np.arange(low, high + 1) * step)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, found)


def sampled_gaussian(q: float, multiplier: float, step: float) -> tuple[Any, ...]:
    """The library's distributions of the loss (remove, add), upper bounds on a grid of spacing ``step``; one where they
    are the same, at q = 1."""
    return tuple(_one(kind, q, multiplier, step) for kind in (("REMOVE", "ADD") if q < 1 else ("REMOVE",)))


def truncated_gaussian(clients: int, q: float, most: int, multiplier: float, step: float) -> tuple[Any, ...]:
    """As :func:`sampled_gaussian`, of cohorts cut to ``most``, by the library's rule: a client that is in a cohort that
    would be full without it (chance ``full``) takes the place of another one, and is one among ``most``."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from scipy.stats import binom

    plain = sampled_gaussian(q, multiplier, step)
    full = float(binom.sf(most - 1, clients - 1, q))
    if full == 0:
        return plain
    # The chance to be one of those who stay, given that the cohort was too large.
    among = float(binom.sf(most, clients, q)) * most / full / clients
    replaced = PrivacyLossDistribution(_one("REPLACE", among, multiplier / 2, step))
    # No public view of the two directions either; a test notices if these names change.
    mixed = replaced.compute_mixture(PrivacyLossDistribution(*plain), full)
    return mixed._pmf_remove, mixed._pmf_add
