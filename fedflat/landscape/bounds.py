"""Compute the papers' bounds and diagnostics, each with its equation; none enters a privacy statement.

``statements`` evaluates all of it (``fedflat bounds``).

Paper files: 000 (DP-FedSAM), 001 (DP2-FedSAM), 003 (DP-FedSAM, journal version), 004 (BLUR and LUS). Symbols: η local
learning rate, K local steps, L smoothness, ρ perturbation radius, σ_l local gradient standard deviation, C (004: S)
clip, σ noise multiplier, q sampling probability, T rounds, m cohort, M clients, d parameters, δ failure probability.

Convergence theorems bound (1/T)·Σ_t E[ᾱ^t‖∇f(w^t)‖²] (002: without ᾱ) up to a constant that they do not give; the terms
here are what stands inside their 𝒪(·). So a value says which term is the largest and how each moves, not how large the
gradient is. Only those of Shi et al., which take the measured ᾱ and α̃, are computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedflat.core import in_range, require, whole

# The orders of Shi et al. 2023a: 1.1 … 10.9 by 0.1, then 11 … 255.
ORDERS: tuple[float, ...] = (*(round(1 + k / 10, 1) for k in range(1, 100)), *map(float, range(11, 256)))


LARGEST = 1e30
"""The largest value of a constant: products of a few are still finite."""


@dataclass(frozen=True)
class Facts:
    """The theorems' constants.

    Public numbers of a run: lr η, steps K, rounds T, clients M, cohort m, clip C, noise_multiplier σ,
    dimension d. Given: smoothness L, gap f(w¹) − f*, local_std σ_l, global_std σ_g. alpha_mean, alpha_spread: ᾱ^t and
    α̃^t by round, measured; one number stands for all rounds.
    """

    lr: float
    steps: int
    rounds: int
    clients: int
    cohort: float
    clip: float
    noise_multiplier: float
    dimension: int
    smoothness: float = 1.0
    gap: float = 1.0
    local_std: float = 1.0
    global_std: float = 1.0
    alpha_mean: Sequence[float] = (1.0,)
    alpha_spread: Sequence[float] = (0.0,)

    def __post_init__(self) -> None:
        for name in ("lr", "smoothness", "cohort"):
            in_range(name, getattr(self, name), 0, LARGEST, open_low=True)
        for name in ("gap", "local_std", "global_std", "clip", "noise_multiplier"):
            in_range(name, getattr(self, name), 0, LARGEST)
        for name in ("steps", "rounds", "clients", "dimension"):
            whole(name, getattr(self, name), 1)


def squared_sensitivity_sam(facts: Facts, *, rho: float) -> float:
    """Return E S² of an unclipped SAM update ≤ 6η²ρ²KL²(12K²L²η² + 10) / (1 − 2η²L²K).

    Shi et al. 2023a, Eq. 10; Shi et al. 2023b, Eq. 13.

    Enters no privacy statement: it is about one *sample* and holds before the clip; after it the sensitivity is C for
    every solver, so Remark 1 there is no privacy claim. At ρ = 0 it is 0 and does not meet the SGD bound below.
    Raises ``InputError`` where 2η²L²K ≥ 1 (the bound is void).
    """
    squared = facts.lr**2 * facts.smoothness**2 * facts.steps
    rest = in_range("1 − 2η²L²K", 1 - 2 * squared, 0, open_low=True)
    return 6 * rho**2 * squared * (12 * facts.steps * squared + 10) / rest


def squared_sensitivity_sgd(facts: Facts) -> float:
    """Return E S² of an unclipped SGD update ≤ 6η²σ_l²K / (1 − 3η²KL²) (Shi et al. 2023a, under Eq. 11).

    Enters no privacy statement, for the reasons given at :func:`squared_sensitivity_sam`.
    """
    rest = in_range("1 − 3η²KL²", 1 - 3 * facts.lr**2 * facts.steps * facts.smoothness**2, 0, open_low=True)
    return 6 * facts.lr**2 * facts.local_std**2 * facts.steps / rest


def renyi_divergence(q: float, noise_multiplier: float, alpha: float) -> float:
    """Return one round's ε̄/T: ln E_{z∼N(0,σ²)}[(1 − q + q·μ₁(z)/μ₀(z))^α] / (α − 1), by quadrature.

    Shi et al. 2023a, Eq. 14, with μ₁ = N(1, σ²): the mixture printed there, in Shi et al. 2023b and in Liu et al. 2025
    is a misprint (see the papers' own numbers). Enters no privacy statement. The trapezoidal rule converges
    geometrically for this smooth, rapidly decaying integrand.
    """
    q = in_range("q", q, 0, 1)
    sigma = in_range("noise_multiplier", noise_multiplier, 0, open_low=True)
    alpha = in_range("alpha", alpha, 1, open_low=True)
    z = np.arange(-14 * sigma, alpha + 14 * sigma, sigma / 16)
    with np.errstate(divide="ignore"):
        ratio = np.logaddexp(np.log1p(-q), np.log(q) + (2 * z - 1) / (2 * sigma**2))
    exponent = alpha * ratio - z**2 / (2 * sigma**2)
    top = float(exponent.max())
    return max(0.0, top + math.log(float(np.exp(exponent - top).sum()) / 16 / math.sqrt(2 * math.pi))) / (alpha - 1)


def epsilon_at(alpha: float, *, q: float, rounds: int, noise_multiplier: float, delta: float) -> float:
    """Return ε of Shi et al. 2023a, Eq. 13–14 at one order α: ε̄ + ((α−1)·ln(1−1/α) − ln α − ln δ) / (α−1).

    Enters no privacy statement: the plan's accountant is tighter, and the formula assumes Poisson cohorts, one clip of
    the whole update and a trusted server, which the papers' released code does not give (docs/specification.md).
    """
    delta = in_range("delta", delta, 0, 1, open_low=True, open_high=True)
    spent = whole("rounds", rounds) * renyi_divergence(q, noise_multiplier, alpha)
    return spent + math.log1p(-1 / alpha) - (math.log(alpha) + math.log(delta)) / (alpha - 1)


def renyi_epsilon(*, q: float, rounds: int, noise_multiplier: float, delta: float) -> tuple[float, float]:
    """Return ``(ε, α)``: :func:`epsilon_at` minimised over the orders. Enters no privacy statement.

    Exact at every order. dp-accounting 0.6 gives only an upper bound at fractional orders and none below 2, so its RDP
    accountant prints a little more (10.83 instead of 10.79 for Shi et al. 2023a on CIFAR-10).
    """
    # Any order gives a valid ε, so the smallest counts.
    return min([(epsilon_at(a, q=q, rounds=rounds, noise_multiplier=noise_multiplier, delta=delta), a) for a in ORDERS])


def order_limit_001(q: float, noise_multiplier: float, order: float) -> float:
    """Return the right side of Lemma 4's condition α ≤ 1 + ⅔σ²·ln(1/(qα(1 + σ²))), beside σ² ≥ 0.7.

    The extracted text of Zhang et al. 2024 keeps neither formula of the lemma, only that it is about integer orders and
    what it cites. This is the condition of the lemma with the same 3.5q²α/σ² in Wang et al. 2019, Lemma 3.7. It is
    checked, not copied: wherever it holds on a grid, the bound for any RDP mechanism under sampling without
    replacement, which the lemma is about, is below 0.85 of 3.5q²α/σ² (tests/landscape). Enters no privacy statement.
    """
    squared = in_range("noise_multiplier", noise_multiplier, 0, open_low=True) ** 2
    share = in_range("q", q, 0, 1, open_low=True) * in_range("alpha", order, 1, open_low=True)
    return 1 - 2 / 3 * squared * math.log(share * (1 + squared))


class NoiseCondition(NamedTuple):
    """Zhang et al. 2024, Theorem 2 at its α = 1 + 2ln(1/δ)/ε: the σ it asks for, and Lemma 4's limit on α at that σ.

    Where α is over the limit, the lemma says nothing and the theorem's σ proves nothing.
    """

    noise_multiplier: float
    order: float
    limit: float


def noise_condition_001(*, q: float, rounds: int, epsilon: float, delta: float) -> NoiseCondition:
    """Return the smallest σ of Zhang et al. 2024, Theorem 2: σ² ≥ 7q²T(ε + 2ln(1/δ))/ε², with σ² ≥ 0.7 and ε <
    2ln(1/δ); and Lemma 4's condition on α checked.

    The formula is lost in the paper's text; this follows from its Lemmas 2–4 at α = 1 + 2ln(1/δ)/ε. Enters no privacy
    statement: it takes sensitivity C where sampling without replacement (replace-one) needs 2C.
    """
    log_delta = -math.log(in_range("delta", delta, 0, 1, open_low=True, open_high=True))
    epsilon = in_range("epsilon", epsilon, 0, 2 * log_delta, open_low=True, open_high=True)
    sigma = math.sqrt(max(0.7, 7 * q**2 * rounds * (epsilon + 2 * log_delta) / epsilon**2))
    order = 1 - 2 * math.log(delta) / epsilon
    return NoiseCondition(sigma, order, order_limit_001(q, sigma, order))


class RoundPrivacy(NamedTuple):
    """(ε̃, δ) of one round by Shi et al. 2023b, Theorem 4: per *sample*, not per client."""

    epsilon: float
    delta: float


def sample_round_privacy(facts: Facts, *, samples: int, cohort: int, rho: float, delta_tilde: float) -> RoundPrivacy:
    """Return (ε̃, δ) of Shi et al. 2023b, Theorem 4 (Eq. 19), N = ``samples``, m = ``cohort`` at ‖v‖ = 2Lρ/m.

    ε̃ = ln((N−m)/N + (m/N)·exp(Lρ√(2 ln(1/δ̃))/(σCd) + (√2·Lρ/(σCd))²)),
    δ = min_{1≤t≤T} exp(−√2·t‖v‖(σCd/m)·√ln(1/δ̃))·E e^{t⟨v,W'⟩}, W' ∼ N(0, (σCd/m)² I), minimised in closed form.

    Enters no privacy statement: the unit is a sample, and Lρ stands where the clip's sensitivity should.
    """
    smoothness = facts.smoothness
    scale = in_range("σCd", facts.noise_multiplier * facts.clip * facts.dimension, 0, open_low=True)
    log_tilde = math.log(1 / delta_tilde)
    ratio = smoothness * rho / scale
    share = cohort / samples
    exponent = ratio * math.sqrt(2 * log_tilde) + 2 * ratio**2
    # Written so that a large exponent does not overflow.
    epsilon = exponent + math.log(share + (1 - share) * math.exp(-exponent))
    spread = 2 * smoothness * rho / cohort * scale / cohort
    t = min(max((math.sqrt(2 * log_tilde) / spread if spread else math.inf), 1.0), float(facts.rounds))
    return RoundPrivacy(epsilon, math.exp(min(0.0, -math.sqrt(2 * log_tilde) * t * spread + (t * spread) ** 2 / 2)))


def generalization_bound(
    step: RoundPrivacy, *, samples: int, cohort: int, rounds: int, delta_tilde: float
) -> tuple[float, float]:
    """Shi et al. 2023b, Theorem 5 (Eq. 20): P[|empirical − expected risk| < 4ε'] > 1 − (2e^{−1.7ε'}δ'/ε')·ln(2/ε'), as
    (4ε', that probability); void where it is not positive.

    ``step`` is the (ε̃, δ) of Theorem 4. Enters no privacy statement: (ε', δ') are per sample and only serve the
    generalization bound. Raises ``InputError`` where ε' ≥ Tε̃ (too few rounds: δ' is not defined).
    """
    eps, total = in_range("step.epsilon", step.epsilon, 0, open_low=True), rounds * step.epsilon
    prime = math.sqrt(2 * rounds * math.log(1 / delta_tilde)) * eps + total * math.tanh(eps / 2)
    require(prime < total, "rounds", rounds, f"more rounds: ε' = {prime:.3g} must be under T·ε̃ = {total:.3g}")
    # The first summand of δ' in logarithms: its factors overflow long before their product does.
    log_first = -(prime + total) / 2 + rounds * (math.log(2 * total / (total - prime)) - np.logaddexp(0, eps))
    log_first -= (prime + total) / (2 * eps) * math.log((total + prime) / (total - prime))
    miss = cohort * step.delta / samples
    high, low = 1 - miss / (1 + math.exp(-eps)), 1 - miss * math.exp(-eps) / (1 + math.exp(-eps))
    jumps = math.ceil(prime / eps)
    delta_prime = math.exp(log_first) + 2 - high**jumps * low ** (rounds - jumps) - low**rounds
    return 4 * prime, 1 - (2 * math.exp(-1.7 * prime) * delta_prime / prime * math.log(2 / prime))


def dp_fedsam(facts: Facts, *, rho: float = 0.0, keep: float = 1.0) -> tuple[dict[str, float], dict[str, float]]:
    """Return the terms of Shi et al. 2023a, Theorem 3 (with keep p < 1, Shi et al. 2023b, Theorem 3 for top_k), and
    what its conditions ask for with the value that is there.

    Enters no privacy statement.

    2L(f(w¹)−f*)/√(KT) + L²σ_l²/(KT²) + Σ_t(ᾱ^tσ_g² + α̃^tL²)/T² + L²√T·σ²C²pd/(m²√K), where η = 𝒪(1/(L√(KT))) and
    ρ = 𝒪(1/√T): the ratios are ηL√(KT) and ρ√T. p is in the noise only where it lies on a client's own mask, which is
    not sound (docs/specification.md, item 3); in the sound round p = 1.
    """
    steps, rounds, smooth = facts.steps, facts.rounds, facts.smoothness
    clipped = _sum(facts.alpha_mean, rounds) * facts.global_std**2 + _sum(facts.alpha_spread, rounds) * smooth**2
    noise = smooth**2 * math.sqrt(rounds) * (facts.noise_multiplier * facts.clip) ** 2
    noise *= in_range("keep", keep, 0, 1, open_low=True) * facts.dimension / (facts.cohort**2 * math.sqrt(steps))
    terms = {
        "optimisation": 2 * smooth * facts.gap / math.sqrt(steps * rounds),
        "local variance": (smooth * facts.local_std) ** 2 / (steps * rounds**2),
        "clipping": clipped / rounds**2,
        "noise": noise,
    }
    ratios = {"ηL√(KT) = 𝒪(1)": facts.lr * smooth * math.sqrt(steps * rounds), "ρ√T = 𝒪(1)": rho * math.sqrt(rounds)}
    return terms, ratios


def _sum(values: Sequence[float], rounds: int) -> float:
    """Return Σ over T rounds of values that were measured in some of them: T times their mean."""
    return rounds * math.fsum(values) / len(values) if len(values) else 0.0
