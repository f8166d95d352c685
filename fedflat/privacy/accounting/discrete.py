"""ε of the distributed discrete Gaussian mechanism, from proven Rényi bounds only.

Kairouz et al. 2021 "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation"
(below: KLS). Nothing here uses the continuous Gaussian's privacy-loss distribution: a sum of discrete Gaussians has
another one. What is used, and why it holds, for n shares N_Z(0, s²) with s ≥ 1/2 and a whole-number shift v:

- The law of the sum differs from N_Z(0, n·s²) by at most τ/2 in log-probability at every point,
  τ = 10·Σ_{k=1}^{n−1} exp(−2π²s²k/(k+1)) (KLS, convolution theorem; by Poisson summation, and checked in the tests).
  One draw of c shares' worth, N_Z(0, c·s²), in place of c shares only takes terms out of that sum.
- Each share has E exp(tX) ≤ exp(t²s²/2), so with a = v/(√n·s), per coordinate and summed over d coordinates,
  D_α ≤ α‖a‖²/2 + τd, and by Hölder's and Hoeffding's inequalities D_α ≤ (α/2)(‖a‖₂ + τ√d)².
- Poisson sampling of an even, coordinatewise noise: the worse direction is mixture against base (Mironov et
  al. 2019, theorem 5: reflecting at v/2 swaps the two laws), which the binomial theorem expands into the unsampled
  curve at whole orders.
  Shares and merged draws give noise laws within τd/2 of N_Z(0, n·s²)^d, so the theorem is applied to that ideal and
  both mixtures' distance to it costs at most τd(2α−1)/(2(α−1)) ≤ 3τd/2 at orders ≥ 2.
- Rényi to (ε, δ): Canonne et al. 2020, proposition 12.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedflat.core import in_range, one_of, whole
from fedflat.core.discrete import MIN_SHARE_STD, Floats, ShareNumbers
from fedflat.privacy.trust import Guarantee

Curve = Callable[[Floats], Floats]
Adversary = Literal["recipients", "server"]

WHOLE_ORDERS = np.array([*range(2, 129), *range(136, 257, 8), 320, 384, 448, 512], dtype=np.float64)
ORDERS = np.array([1 + 2.0 ** (j / 8) for j in range(-48, 113)])


def sum_gap(shares: int, share_variance: float) -> float:
    """τ = 10·Σ_{k=1}^{n−1} exp(−2π²s²k/(k+1)), s² the variance parameter of a share on the whole-number grid (KLS)."""
    k = np.arange(1, shares, dtype=np.float64)
    return float(10 * np.exp(-2 * math.pi**2 * share_variance * k / (k + 1)).sum())


def sum_curve(bound: float, shares: int, share_variance: float, dimension: int) -> Curve:
    """The Rényi curve α ↦ ε(α) of n discrete Gaussian shares for whole-number shifts of norm ≤ `bound` (grid units).

    KLS print τd/2 in the first term; the Rényi bound proven here gives 2τd. Both vanish once s is above about 1.5.
    Infinite where a share's parameter is below 1/2, for which the convolution theorem says nothing.
    """
    if not share_variance >= MIN_SHARE_STD**2:
        return lambda orders: np.full(np.shape(orders), math.inf)
    gap, ratio = sum_gap(shares, share_variance), bound / math.sqrt(shares * share_variance)

    def curve(orders: Floats) -> Floats:
        additive = orders * ratio**2 / 2 + gap * dimension
        joint = orders * (ratio + gap * math.sqrt(dimension)) ** 2 / 2
        return np.asarray(np.minimum(additive, joint))

    return curve


def poisson_curve(curve: Curve, rate: float) -> Curve:
    """The Rényi curve, at whole orders ≥ 2, of a mechanism applied to a Poisson sample of the clients (add-remove).

    The noise has to be even around each output, as here (Mironov et al. 2019, theorem 5). `rate`: in (0, 1].
    """
    from scipy import special  # where it is used: it takes longer to load than most runs need it

    def one(order: int) -> float:
        if rate == 1:
            return float(curve(np.array([float(order)]))[0])
        level = np.arange(2, order + 1, dtype=np.float64)
        log_binomial = special.gammaln(order + 1) - special.gammaln(level + 1) - special.gammaln(order - level + 1)
        terms = log_binomial + level * math.log(rate) + (order - level) * math.log1p(-rate) + (level - 1) * curve(level)
        first = (order - 1) * math.log1p(-rate) + math.log1p((order - 1) * rate)
        return float(special.logsumexp(np.append(terms, first))) / (order - 1)

    return lambda orders: np.array([one(int(order)) for order in orders])


def curve_epsilon(orders: Floats, values: Floats, delta: float) -> float:
    """Smallest ε at δ that the Rényi values prove (CKS 2020, proposition 12); infinite at δ ≤ 0."""
    if delta <= 0:
        return math.inf
    return max(0.0, float(np.min(values + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))))


def curve_delta(orders: Floats, values: Floats, epsilon: float) -> Floats:
    """Smallest δ at ε, at most 1, that the Rényi values ``(…, orders)`` prove (CKS 2020, proposition 12): ``(…)``."""
    log_delta = (orders - 1) * (values - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    delta: Floats = np.exp(np.minimum(0.0, log_delta.min(axis=-1)))
    return delta


def participation_epsilon(curve: Curve, rounds: int, rate: float, delta: float) -> float:
    """ε when the adversary knows in which rounds a client took part: δ(ε) = Σ_n Bin(T, q)(n)·δ(ε after n rounds)."""
    from scipy import stats

    # Who knows the cohorts sees a mixture over how often the client took part; its law is public.
    weights = stats.binom.pmf(np.arange(rounds + 1), rounds, rate)
    counts = np.flatnonzero(weights > delta * 1e-9 / (rounds + 1))
    missed = max(0.0, 1.0 - float(weights[counts].sum()))  # the neglected counts are charged with δ = 1
    # A client that never took part loses nothing.
    counts = counts[counts > 0]
    single = curve(ORDERS)

    def total(epsilon: float) -> float:
        return missed + float(weights[counts] @ curve_delta(ORDERS, counts[:, None] * single, epsilon))

    return _smallest(lambda epsilon: total(epsilon) <= delta, curve_epsilon(ORDERS, rounds * single, delta))


def _smallest(enough: Callable[[float], bool], high: float) -> float:
    """Bisect for the smallest argument in [0, high] that is enough; `high` if nothing below is known to be."""
    if not math.isfinite(high) or not enough(high):
        return high
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class DDGaussAccount(ShareNumbers):
    """The privacy of `rounds` rounds of the distributed discrete Gaussian mechanism.

    clients, cohort: M and the expected cohort m (Poisson, q = m/M). A sum of fewer than min_cohort honest shares is
    aborted and stays charged; the sum mod 2^bits is post-processing. delta: δ of the whole run.
    n_max: the server tops every sum up to n_max shares and aborts a larger one, so that the released noise does not
    depend on the cohort. Only so are recipients granted amplification by sampling: otherwise the energy of the noise
    over d coordinates would give the cohort's size away.
    colluders: clients whose shares do not count; subtracted from n_max, and added to min_cohort in the abort rule.
    "Remove" means that the slot sends a zero update, still noised (zero-out).
    Raises InputError on impossible values.
    """

    clients: int
    cohort: float
    delta: float
    n_max: int
    colluders: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("clients", self.clients, 1)
        in_range("cohort.size", self.cohort, 0, self.clients, open_low=True)
        whole("colluders", self.colluders, 0)
        whole("cohort.min", self.min_cohort, 1, self.clients)
        in_range("delta", self.delta, 0, 1, open_low=True, open_high=True)
        whole("cohort.max", self.n_max, self.min_cohort + self.colluders)

    @property
    def rate(self) -> float:
        return self.cohort / self.clients

    @property
    def share_variance(self) -> float:
        """s² of one client's share on the grid: (σC/γ)²/min_cohort."""
        return (self.noise_multiplier * self.clip / self.granularity) ** 2 / self.min_cohort

    def curve(self, shares: int) -> Curve:
        """The unsampled Rényi curve of one round whose sum holds that many honest shares."""
        return sum_curve(self.bound / self.granularity, shares, self.share_variance, self.padded)

    def amplified(self, shares: int) -> Floats:
        """Rényi values at `WHOLE_ORDERS` of one Poisson-sampled round, every sum topped up to that many shares."""
        if self.share_variance < MIN_SHARE_STD**2:
            return np.full(WHOLE_ORDERS.shape, math.inf)
        # The theorem is about one noise law; what real sums differ from it is added as `distance`.
        ideal = sum_curve(self.bound / self.granularity, 1, shares * self.share_variance, self.padded)
        distance = 1.5 * sum_gap(shares, self.share_variance) * self.padded
        return poisson_curve(ideal, self.rate)(WHOLE_ORDERS) + distance

    def abort_probability(self, rounds: int) -> float:
        """Chance (union over rounds) that some round is aborted, with or without the client in question."""
        from scipy import stats

        # Without the client in question, so that the chance is the same in both worlds.
        others = stats.binom(self.clients - 1, self.rate)
        chance = float(others.cdf(self.min_cohort + self.colluders - 1)) + float(others.sf(self.n_max - 1))
        return min(1.0, rounds * chance)

    def epsilon(self, rounds: int, adversary: Adversary = "recipients", amplification: bool = True) -> float:
        """Proven ε at `delta` after `rounds` rounds, the abort probability taken out of δ; infinite if none is proven.

        recipients: see only released models. server: sees the sums and knows every cohort. amplification=False: a
        client that takes part in every round, for either adversary.
        """
        whole("rounds", rounds, 0)
        one_of("adversary", adversary, ("recipients", "server"))
        delta = self.delta - self.abort_probability(rounds)
        if rounds == 0:
            return 0.0
        if self.noise_multiplier == 0 or delta <= 0:
            return math.inf
        # Colluders know their own shares, so these hide nothing.
        shares = self.n_max - self.colluders if adversary == "recipients" else self.min_cohort
        curve = self.curve(shares)
        if not amplification:
            return curve_epsilon(ORDERS, rounds * curve(ORDERS), delta)
        unamplified = participation_epsilon(curve, rounds, self.rate, delta)
        if adversary == "server":
            return unamplified
        return min(unamplified, curve_epsilon(WHOLE_ORDERS, rounds * self.amplified(shares), delta))

    def guarantees(self, rounds: int) -> tuple[Guarantee, ...]:
        """Return the guarantees towards recipients and the server."""
        recipients = "those who see released models only: Poisson amplification, noise topped up to cohort.max"
        server = "the server, which knows each cohort and sees each sum: Bin(T, q) rounds"
        rule = "Renyi, sum of discrete Gaussians (Kairouz et al. 2021)"
        amplified = f"{rule}, Poisson (Mironov et al. 2019, thm 5)"
        return (
            Guarantee("recipients", recipients, "add-remove", self.epsilon(rounds), self.delta, amplified),
            Guarantee("server", server, "add-remove", self.epsilon(rounds, "server"), self.delta, rule),
        )
