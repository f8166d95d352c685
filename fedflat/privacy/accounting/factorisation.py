"""Factorisations A = B·C that leave little noise in the released models: banded Toeplitz, banded, and the binary tree.

A is what the server makes of the rounds: with server momentum β the model after round t holds
Σ_{i≤t} a_{t−i}·(mean of round i), a_j = (1 − β^{j+1})/(1 − β); the server's learning rate scales all of it and changes
no optimum, and local rates move updates, not noise. The error is the root mean square, over the rounds, of the noise
in a coordinate of the model, ‖A·C⁻¹‖_F/√T, times the sensitivity. Every C serves; how good it is, is all that depends
on an optimiser, and the sensitivity is taken from the entries as they are after rounding (``core.factors``).
"""

import math
from functools import lru_cache

import numpy as np

from fedflat.core import one_of, require, whole, wrong
from fedflat.core.factors import MOST_ROUNDS, Factor, Floats, cut, identity, on_grid, tree

KINDS = ("independent", "tree", "banded", "toeplitz")
MOST_BANDS = 64
MOST_BANDED_ROUNDS = 512
"""Of kind banded, whose optimisation takes time with the cube of the rounds."""


def workload(rounds: int, momentum: float = 0.0) -> Floats:
    """a_0 … a_{T−1}, the first column of A."""
    return np.cumsum(momentum ** np.arange(rounds, dtype=np.float64))


def _workload_matrix(rounds: int, momentum: float) -> Floats:
    """A, ``(T, T)``: lower triangular, and the same along each diagonal."""
    from scipy.linalg import toeplitz

    matrix: Floats = toeplitz(workload(rounds, momentum), np.zeros(rounds))
    return matrix


def noise_in_model(factor: Factor, momentum: float = 0.0) -> tuple[float, float]:
    """(root mean square over the rounds, last round) of the std of A·C⁻¹Z in a coordinate, Z of std 1."""
    variances = ((_workload_matrix(factor.rounds, momentum) @ factor.inverse) ** 2).sum(axis=1)
    return math.sqrt(float(variances.mean())), math.sqrt(float(variances[-1]))


@lru_cache(maxsize=32)
def factor_for(
    kind: str, rounds: int, separation: int, bands: int | None = None, momentum: float = 0.0, *, once: bool = False
) -> Factor:
    """The C of a recipe's ``privacy.noise``.

    Args:
        kind: of ``KINDS``. rounds: T. separation: of a client's rounds. momentum: the server's.
        bands: None (auto): those with the least error, of at most ``MOST_BANDS``.
        once: only columns' norms count, as where groups join by coin: bands then may not exceed ``separation``.

    Raises:
        InputError: bands out of range, or given for a kind without; too many rounds.
    """
    one_of("privacy.noise.kind", kind, KINDS)
    require(bands is None or kind in ("banded", "toeplitz"), "privacy.noise.bands", bands, f"nothing with kind: {kind}")
    require(rounds <= MOST_ROUNDS, "rounds", rounds, f"at most {MOST_ROUNDS} with a schedule or correlated noise")
    if kind == "independent" or rounds == 0:
        return identity(rounds)
    if kind == "tree":
        return tree(rounds)
    if kind == "banded" and rounds > MOST_BANDED_ROUNDS:
        hint = "kind: toeplitz has nearly as little noise."
        raise wrong("rounds", rounds, f"at most {MOST_BANDED_ROUNDS} with noise: banded", hint=hint)
    widest = min(MOST_BANDS, rounds, separation if once or kind == "banded" else rounds)
    if bands is not None:
        allowed = f"at most {widest} with {rounds} rounds of separation {separation}"
        require(whole("privacy.noise.bands", bands, 1) <= widest, "privacy.noise.bands", bands, allowed)
        return _factor(kind, rounds, separation, bands, momentum)
    # Wider bands contain the narrower ones and have less error, but those beyond the separation move further: which
    # wins depends on the schedule, so all are tried.
    least = min(separation, widest)
    factors = [_factor(kind, rounds, separation, n, momentum) for n in (least, 2 * least, 4 * least) if n <= widest]
    return min(factors, key=lambda factor: noise_in_model(factor, momentum)[0] * factor.sensitivity(separation))


def _factor(kind: str, rounds: int, separation: int, bands: int, momentum: float) -> Factor:
    columns = cut(np.tile(_toeplitz(rounds, separation, bands, momentum), (rounds, 1)))
    return Factor(on_grid(columns if kind == "toeplitz" else _banded(columns, momentum)))


def _toeplitz(rounds: int, separation: int, bands: int, momentum: float) -> Floats:
    """c_0 = 1 ≥ c_1 ≥ … ≥ 0 with the least ‖A·C⁻¹‖_F·s, s that of the rounds 0, separation, 2·separation, …

    Powers series do it all: the first column of A·C⁻¹ is 1/((1 − x)(1 − βx)·c(x)), and its derivative by c_j is that
    series times −x^j/c(x).
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    if bands == 1:
        return np.ones(1)
    weights, pulse = np.arange(rounds, 0, -1.0), np.eye(1, rounds)[0]
    turns = np.zeros(rounds)
    turns[::separation] = 1.0

    def error(ratios: Floats) -> tuple[float, Floats]:
        c = np.concatenate([[1.0], np.cumprod(ratios)])
        # A filter divides power series: this is the first column of A·C⁻¹ in O(T·bands).
        left = lfilter([1.0], np.convolve(np.convolve(c, [1.0, -1.0]), [1.0, -momentum]), pulse)
        inner = lfilter([1.0], c, left)
        worst = np.convolve(turns, c)[:rounds]
        noise, moved = float(weights @ left**2), float(worst @ worst)
        by_c = np.empty(bands)
        for j in range(bands):
            lost = -2 * float((weights[j:] * left[j:]) @ inner[: rounds - j])
            by_c[j] = lost / noise + 2 * float(worst[j:] @ turns[: rounds - j]) / moved
        down = np.cumsum((by_c * c)[::-1])[::-1]
        return math.log(noise * moved), down[1:] / ratios

    # The square root of 1/(1 − x), which is optimal where everybody takes part once.
    start = np.array([(j - 0.5) / j for j in range(1, bands)])
    solution = minimize(
        error, start, jac=True, method="L-BFGS-B", bounds=[(1e-6, 1.0)] * (bands - 1),
        options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9},
    )  # fmt: skip
    return np.concatenate([[1.0], np.cumprod(solution.x)])


def _banded(start: Floats, momentum: float) -> Floats:
    """Columns of norm 1 with the least ‖A·C⁻¹‖_F among lower triangular matrices of these bands.

    d‖AC⁻¹‖² = −2⟨BᵀB·C⁻ᵀ, dC⟩ with B = AC⁻¹; a column of norm 1 is c/‖c‖ of a free column c.
    """
    from scipy.linalg import solve_triangular
    from scipy.optimize import minimize

    rounds, bands = start.shape
    if bands == 1:
        return np.ones((rounds, 1))
    whole_workload = _workload_matrix(rounds, momentum)
    inside = cut(np.ones_like(start)) > 0
    down, across = (np.arange(rounds)[:, None] + np.arange(bands)[None, :])[inside], np.nonzero(inside)[0]

    def error(free: Floats) -> tuple[float, Floats]:
        columns = np.zeros_like(start)
        columns[inside] = free
        norms = np.sqrt((columns**2).sum(axis=1, keepdims=True))
        unit = columns / norms
        c = np.zeros((rounds, rounds))
        c[down, across] = unit[inside]
        inverse = solve_triangular(c, np.eye(rounds), lower=True)
        b = whole_workload @ inverse
        noise = float((b**2).sum())
        slope = np.zeros_like(start)
        slope[inside] = (-2 * (b.T @ b) @ inverse.T)[down, across] / noise
        # The norm is fixed at 1, so only the part of the slope along the sphere counts.
        slope = (slope - unit * (slope * unit).sum(axis=1, keepdims=True)) / norms
        return math.log(noise), slope[inside]

    options = {"maxiter": 300, "ftol": 1e-12, "gtol": 1e-8}
    solution = minimize(error, start[inside], jac=True, method="L-BFGS-B", options=options)
    columns = np.zeros_like(start)
    columns[inside] = solution.x
    columns /= np.sqrt((columns**2).sum(axis=1, keepdims=True))
    # A column and its negative are the same mechanism; one sign makes digests comparable.
    return columns * np.sign(columns[:, :1])
