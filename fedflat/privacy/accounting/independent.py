"""A second accountant, written from the formulas alone: it shares no code with dp-accounting or ``composition``.

The privacy loss of one Poisson-subsampled Gaussian round is rounded to the *nearest* grid point and shifted so that
its mean is exact; T rounds are composed by one FFT (Gopi et al. 2021). The rounding errors of the rounds are
independent, centred and within half a step, so by Hoeffding their sum stays within ``slack = h·√(T/2·ln(2/η))``
except with probability η. Hence ε(δ) lies in [ε̃(δ + η') − slack, ε̃(δ − η') + slack], η' = η + tails + rounding.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REACH = 9.0
"""Standard deviations of the noise that are kept on each side: 2e-19 of mass outside."""
_POINTS = 1 << 19


def _loss(x: Floats, q: float, sigma: float) -> Floats:
    """log of (mixture density / base density) at output x: base N(0, σ²), mixture (1 − q)·base + q·N(1, σ²)."""
    far = math.log(q) + (2 * x - 1) / (2 * sigma**2)
    return far if q == 1 else np.logaddexp(math.log1p(-q), far)


def _densities(x: Floats, q: float, sigma: float) -> tuple[Floats, Floats]:
    scale = 1 / (sigma * math.sqrt(2 * math.pi))
    base = scale * np.exp(-0.5 * (x / sigma) ** 2)
    return base, (1 - q) * base + q * scale * np.exp(-0.5 * ((x - 1) / sigma) ** 2)


def loss_moments(q: float, sigma: float) -> tuple[float, float]:
    """(standard deviation, range) of one round's privacy loss when the client is present, by quadrature."""
    x = np.linspace(-_REACH * sigma, 1 + _REACH * sigma, 8001)
    loss, (_, mixture) = _loss(x, q, sigma), _densities(x, q, sigma)
    weight = mixture / mixture.sum()
    return math.sqrt(float(weight @ (loss - float(weight @ loss)) ** 2)), float(loss[-1] - loss[0])


def _threshold(loss: Floats, q: float, sigma: float) -> Floats:
    """The output x at which the log ratio equals ``loss``; −inf below the ratio's infimum log(1 − q)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # The inverse of the log ratio: losses below log(1 − q) are not reached by any output.
        ratio = -np.expm1(math.log1p(-q) - loss) if q < 1 else np.ones_like(loss)
        return np.where(ratio > 0, sigma**2 * (loss + np.log(ratio) - math.log(q)) + 0.5, -np.inf)


def _cdf(loss: Floats, q: float, sigma: float, remove: bool) -> Floats:
    """P(privacy loss ≤ loss): with the client against without (``remove``), or without against with."""
    from scipy.special import ndtr

    x = _threshold(loss if remove else -loss, q, sigma)
    cdf: Floats = (1 - q) * ndtr(x / sigma) + q * ndtr((x - 1) / sigma) if remove else ndtr(-x / sigma)
    return cdf


def _mean(q: float, sigma: float, remove: bool) -> float:
    """E[privacy loss], by the trapezoid rule on a smooth integrand that vanishes at both ends (error near 1e-15)."""
    x = np.linspace(-_REACH * sigma, 1 + _REACH * sigma, 40_001)
    base, mixture = _densities(x, q, sigma)
    weighted = mixture * _loss(x, q, sigma) if remove else -base * _loss(x, q, sigma)
    return float(weighted.sum() * (x[1] - x[0]))


def _discretise(q: float, sigma: float, remove: bool, step: float) -> tuple[Floats, int, float]:
    """Probabilities on the grid, index of the first, and the shift that makes the mean exact."""
    ends = _loss(np.array([-_REACH * sigma, 1 + _REACH * sigma]), q, sigma)
    low, high = (ends[0], ends[1]) if remove else (-ends[1], -ends[0])
    first, last = math.floor(low / step), math.ceil(high / step)
    probs = np.diff(_cdf((np.arange(first, last + 2) - 0.5) * step, q, sigma, remove))
    return probs, first, _mean(q, sigma, remove) - (step * float(probs @ np.arange(first, last + 1)))


def _compose(probs: Floats, rounds: int, width: int) -> tuple[Floats, int]:
    """The ``rounds``-fold convolution around its mean: (probabilities, index of the first relative to rounds·first)."""
    length = 1 << max(width - 1, 1).bit_length()
    centre = round(float(probs @ np.arange(len(probs))))
    padded = np.zeros(max(length, -(-len(probs) // length) * length))
    padded[: len(probs)] = probs
    # A longer distribution is folded onto the circle; what wraps around is in the tails, which are charged.
    folded = np.roll(padded.reshape(-1, length).sum(axis=0), -centre)
    composed = np.fft.irfft(np.fft.rfft(folded) ** rounds, length)
    return np.maximum(np.roll(composed, length // 2), 0.0), centre * rounds - length // 2


def _width(probs: Floats, rounds: int, tail: float) -> int:
    """Points that hold the composed loss but for ``tail`` on either side (Chernoff's bound at several orders)."""
    index = np.arange(len(probs)) - round(float(probs @ np.arange(len(probs))))
    mean = float(probs @ index)
    spread = max(math.sqrt(float(probs @ index.astype(float) ** 2)), 1.0)
    reach = 1.0
    for sign in (1, -1):
        best = float(sign * (index[-1] if sign > 0 else index[0]) * rounds)
        for order in np.geomspace(1e-3, 10, 12) / spread:
            exponent = sign * order * index
            peak = float(exponent.max())
            moment = peak + math.log(max(float(probs @ np.exp(exponent - peak)), 1e-300))
            best = min(best, (rounds * moment - math.log(tail)) / order)
        reach = max(reach, best, abs(mean) * rounds)
    return 2 * math.ceil(reach) + 2


def _invert(probs: Floats, losses: Floats, delta: float) -> float:
    """The smallest ε ≥ 0 with Σ p·max(0, 1 − e^(ε − l)) ≤ ``delta``, by bisection on the sum itself."""

    def delta_at(epsilon: float) -> float:
        first = int(np.searchsorted(losses, epsilon, side="right"))
        return float(probs[first:] @ -np.expm1(epsilon - losses[first:]))

    low, high = 0.0, max(float(losses[-1]), 0.0)
    if delta_at(low) <= delta:
        return 0.0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


def _one_direction(q: float, sigma: float, rounds: int, delta: float, remove: bool) -> tuple[float, float]:
    deviation, span = loss_moments(q, sigma)
    failure = delta * 1e-5
    rounding = 1e-15 * (rounds + 100)
    if rounding >= delta:
        return 0.0, math.inf
    step = max(deviation * 4e-4, span / _POINTS)
    probs, first, shift = _discretise(q, sigma, remove, step)
    composed, start = _compose(probs, rounds, _width(probs, rounds, failure))
    losses: Floats = (np.arange(len(composed), dtype=np.float64) + (start + rounds * first)) * step + rounds * shift
    # Hoeffding: errors of rounding to the nearest point are centred, so they grow with √T, not with T.
    slack = step * math.sqrt(rounds / 2 * math.log(2 / failure))
    # Everything that the grid, the window and the transform may hide is taken from δ.
    doubt = 3 * failure + rounds * (1e-18 + max(0.0, 1 - float(probs.sum()))) + rounding
    upper = _invert(composed, losses, delta - doubt) + slack if doubt < delta else math.inf
    return max(0.0, _invert(composed, losses, delta + doubt) - slack), upper


def epsilon_bounds(q: float, sigma: float, rounds: int, delta: float) -> tuple[float, float]:
    """(lower, upper) bounds on the exact ε of ``rounds`` Poisson-subsampled Gaussian rounds, add-remove.

    The upper one is what the accountant ``fft`` reports.

    Args:
        q: sampling probability in (0, 1]. sigma: std / sensitivity > 0. rounds: ≥ 1. delta: in (0, 1).
    """
    both = [_one_direction(q, sigma, rounds, delta, remove) for remove in (True, False)]
    return max(low for low, _ in both), max(high for _, high in both)
