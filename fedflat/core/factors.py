"""Factor correlated noise: C is a lower triangular matrix whose inverse mixes the rounds' noise.

The rounds' clipped sums are the rows of X (T × d). What is released is X + s·σ·C⁻¹Z, Z standard normal: a function of
C·X/s + σ·Z, one Gaussian mechanism, if one client moves C·X by at most s. A client's allowed rounds π are at least
``separation`` apart, and in each it moves its row of X by at most 1 (in units of the clip):
s = max over π, ‖u_t‖ ≤ 1 of ‖Σ_{t∈π} c_t u_tᵀ‖_F with c_t the columns of C. How that maximum is found or bounded is
said at :meth:`Factor.sensitivity`, with the proofs; docs/participation.md says the rest.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import require, wrong

Floats = NDArray[np.float64]

PLACES = 16
"""Entries of C are multiples of 2^−16, so that products with whole numbers are exact (``methods.noise``)."""
MOST_ROUNDS = 2048
UP = 1 + 1e-9
"""More than the float64 arithmetic here can be off by."""


@dataclass(frozen=True, eq=False)
class Factor:
    """C by its columns: ``columns[t, j]`` = C[t + j, t], float64 ``(T, bands)``, zero where t + j ≥ T.

    Raises:
        InputError: more than ``MOST_ROUNDS`` rounds. ValueError: a diagonal that is not positive, or an entry that is
            no multiple of 2^−16.
    """

    columns: Floats

    def __post_init__(self) -> None:
        if len(self.columns) > MOST_ROUNDS:
            raise wrong("rounds", len(self.columns), f"at most {MOST_ROUNDS} with noise that follows a schedule")
        scaled = self.columns * 2.0**PLACES
        if not (self.columns[:, 0] > 0).all() or not (scaled == np.rint(scaled)).all():
            raise ValueError("C needs a positive diagonal and entries that are multiples of 2^-16")

    @property
    def rounds(self) -> int:
        """T."""
        return len(self.columns)

    @property
    def bands(self) -> int:
        """Diagonals of C that may be other than 0."""
        return int(self.columns.shape[1])

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of C."""
        return hashlib.sha256(repr(self.columns.shape).encode() + self.columns.astype("<f8").tobytes()).hexdigest()

    @cached_property
    def matrix(self) -> Floats:
        """C itself, ``(T, T)``."""
        matrix = np.zeros((self.rounds, self.rounds))
        for j in range(self.bands):
            rows = np.arange(j, self.rounds)
            matrix[rows, rows - j] = self.columns[: self.rounds - j, j]
        return matrix

    @cached_property
    def inverse(self) -> Floats:
        """C⁻¹, ``(T, T)``, row by row: row t = (e_t − Σ_j C[t, t − j]·row (t − j)) / C[t, t], in this order always."""
        inverse = np.zeros((self.rounds, self.rounds))
        for t in range(self.rounds):
            row = inverse[t]
            # Always in this order: the same bits on every machine, or rows of noise would not cancel.
            row[t] = 1.0
            for j in range(1, min(self.bands, t + 1)):
                row -= self.columns[t - j, j] * inverse[t - j]
            row /= self.columns[t, 0]
        return inverse

    @cached_property
    def row_norms(self) -> Floats:
        """‖row t of C⁻¹‖₂: the std of round t's noise, in units of that of Z."""
        norms: Floats = np.sqrt((self.inverse**2).sum(axis=1))
        return norms

    @cached_property
    def falling(self) -> bool:
        """Whether C is Toeplitz with coefficients c_0 ≥ c_1 ≥ … ≥ 0."""
        first = self.columns[0]
        alike = all((self.columns[: self.rounds - j, j] == first[j]).all() for j in range(min(self.bands, self.rounds)))
        return alike and bool((np.diff(first) <= 0).all() and (first >= 0).all())

    def sensitivity(self, separation: int, first: int = 0, last: int | None = None) -> float:
        """s for a client whose rounds lie in [first, last) and are at least ``separation`` apart, clip 1; zero-out.

        Replacing a client moves each row by at most 2, so that figure is twice this one. Three cases:

        - bands ≤ separation: columns that are ``separation`` apart have no row in common, so s² is the largest
          Σ_{t∈π} ‖c_t‖², found exactly.
        - falling Toeplitz: G = CᵀC has G_ij = Σ_u c_u·c_{u+j−i} over u < T − j (i ≤ j), which is ≥ 0 and falls in j and
          in j − i. The rounds first, first + separation, … have the smallest of both, and are the most: the worst π.
        - else Σ_{i,j∈π} |G_ij| bounds it, and that is at most the largest Σ_{i∈π} r_i with r_i the largest
          Σ_{j∈π} |G_ij| over all π that contain i.
        """
        stop = self.rounds if last is None else last
        if stop <= first:
            return 0.0
        if self.bands <= separation:
            return math.sqrt(spaced_maximum((self.columns[first:stop] ** 2).sum(axis=1), separation)) * UP
        if self.falling:
            # The worst pattern is known: as often, and as early, as it may come.
            return math.sqrt(float((self.matrix[:, first:stop:separation].sum(axis=1) ** 2).sum())) * UP
        return math.sqrt(_pattern_bound(self._overlaps[first:stop, first:stop], separation)) * UP

    @cached_property
    def _overlaps(self) -> Floats:
        """|CᵀC|."""
        return np.abs(self.matrix.T @ self.matrix)

    def largest_column(self) -> float:
        """max_t ‖c_t‖: the sensitivity of a client that takes part once."""
        return math.sqrt(float((self.columns**2).sum(axis=1).max())) * UP


def spaced_maximum(values: Floats, separation: int) -> float:
    """Return the largest sum of ``values`` ≥ 0 whose places are at least ``separation`` apart."""
    best = np.zeros(len(values) + separation)
    for t, value in enumerate(values):
        # Either round t is not in the pattern, or it is, and none of the last ``separation`` - 1.
        best[t + separation] = max(best[t + separation - 1], value + best[t])
    return float(best[-1])


def _pattern_bound(entries: Floats, separation: int) -> float:
    """Return the largest Σ_{i∈π} r_i, r_i the largest Σ_{j∈π} of row i of ``entries`` ≥ 0 over patterns π that contain
    i.
    """
    n = len(entries)
    before, after = np.zeros((n + separation, n)), np.zeros((n + separation, n))
    for t in range(n):
        before[t + separation] = np.maximum(before[t + separation - 1], entries[t] + before[t])
        after[n - 1 - t] = np.maximum(after[n - t], entries[n - 1 - t] + after[n - 1 - t + separation])
    places = np.arange(n)
    rows = np.diag(entries) + before[places, places] + after[np.minimum(places + separation, n), places]
    return spaced_maximum(rows, separation)


def identity(rounds: int) -> Factor:
    """C of independent noise."""
    return Factor(np.ones((rounds, 1)))


def on_grid(columns: Floats) -> Floats:
    """Return the nearest entries that are multiples of 2^−16; rounding keeps the order of coefficients."""
    rounded: Floats = np.rint(columns * 2.0**PLACES) * 2.0**-PLACES
    return rounded


def cut(columns: Floats) -> Floats:
    """Return the same without what would lie below the last row."""
    rounds, bands = columns.shape
    return np.where(np.arange(rounds)[:, None] + np.arange(bands)[None, :] < rounds, columns, 0.0)


def tree(rounds: int) -> Factor:
    """C of the binary tree (Dwork et al. 2010; Kairouz et al. 2021) with each subtree's best estimate from below.

    The tree adds one noise to the sum of every dyadic interval of rounds. A complete interval's sum is estimated from
    its own noisy sum, weight w = 2v/(1 + 2v), and its halves' estimates, weight 1 − w, v being a half's variance
    (Honaker 2015); a prefix is the sum of its dyadic intervals. That is A·X + B·Z with B of T rows, and A·X + L·Z′ has
    the same law for LLᵀ = BBᵀ: so C = L⁻¹A, lower triangular, then rounded to the grid, from which its sensitivity is
    taken.
    """
    from scipy.linalg import cholesky, solve_triangular

    require(rounds <= MOST_ROUNDS // 2, "rounds", rounds, f"at most {MOST_ROUNDS // 2} with noise: tree")
    mixed = _tree_estimates(rounds)
    full = solve_triangular(cholesky(mixed @ mixed.T, lower=True), np.tril(np.ones((rounds, rounds))), lower=True)
    columns = np.zeros((rounds, rounds))
    for t in range(rounds):
        columns[t, : rounds - t] = full[t:, t]
    return Factor(on_grid(columns))


def _tree_estimates(rounds: int) -> Floats:
    """B, ``(T, nodes)``: by how much each node's noise is in each prefix."""
    count = 0
    starts: list[int] = []
    while rounds >> len(starts):
        starts.append(count)
        count += rounds >> (len(starts) - 1)
    variance, estimates = 1.0, np.eye(count)
    for height in range(1, len(starts)):
        # A node's own noise has variance 1, the sum of its halves twice a half's.
        weight = 2 * variance / (1 + 2 * variance)
        variance = weight
        for i in range(rounds >> height):
            below = starts[height - 1] + 2 * i
            estimates[starts[height] + i] *= weight
            estimates[starts[height] + i] += (1 - weight) * (estimates[below] + estimates[below + 1])
    prefixes = np.zeros((rounds, count))
    for t in range(rounds):
        at = 0
        for height in reversed(range(len(starts))):
            if (t + 1 - at) >> height:
                prefixes[t] += estimates[starts[height] + (at >> height)]
                at += 1 << height
    return prefixes
