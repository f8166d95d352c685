"""One round of a Poisson-sampled Gaussian as privacy losses on a grid: dp-accounting's mechanism and its algorithm
(connect-the-dots, Doroshenko et al. 2022, Algorithm 1), with all points of the grid at once instead of one by one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["deltas", "sampled_gaussian"]


def deltas(loss: Any, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """δ of one round at each ε ``(n,)``, as ``loss.get_delta_for_epsilon(epsilons)`` gives it point by point.

    δ is the largest μ(A) − e^ε·ν(A), reached where A is all x at which the loss is at least ε. The x found here may
    differ from the library's in their last bits; as δ is flat there, that moves it by the square of their distance.

    Args:
        loss: dp-accounting's ``GaussianPrivacyLoss`` with 0 < ``sampling_prob`` < 1, add or remove.
    """
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    q, removed = loss.sampling_prob, loss.adjacency_type == AdjacencyType.REMOVE
    sign = 1.0 if removed else -1.0
    bounded = sign * epsilons > math.log1p(-q)
    found = np.zeros_like(epsilons)
    if removed:
        found[~bounded] = -np.expm1(epsilons[~bounded])  # every loss is above these ε; added, none is above the others
    inside = epsilons[bounded]
    scaled = sign * inside - math.log(q)
    with np.errstate(divide="ignore"):
        plain = sign * (scaled + np.log1p(-np.minimum(np.exp(math.log(1 / q - 1) - scaled), 1.0)))
    x = -0.5 - plain * loss.standard_deviation**2 + (0.0 if removed else 1.0)
    found[bounded] = loss.mu_upper_cdf(x) - np.exp(inside + loss.mu_lower_log_cdf(x))
    return np.clip(found, 0.0, 1.0)


def sampled_gaussian(q: float, multiplier: float, step: float) -> tuple[Any, Any]:
    """The library's distributions of the loss (remove, add), upper bounds on a grid of spacing ``step``; 0 < q < 1."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    def one(adjacency: Any) -> Any:
        loss = GaussianPrivacyLoss(multiplier, sampling_prob=q, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
        found = deltas(loss, np.arange(low, high + 1) * step)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, found)

    return one(AdjacencyType.REMOVE), one(AdjacencyType.ADD)
