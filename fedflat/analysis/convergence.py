"""What the papers state of convergence, term by term. None of it enters a privacy statement.

The theorems bound (1/T)·Σ_t E[ᾱ^t‖∇f(w^t)‖²] (002: without ᾱ) up to a constant that they do not give; the terms here
are what stands inside their 𝒪(·). So a value says which term is the largest and how each moves, not how large the
gradient is. Theorem 1 of Zhang et al. 2024 is lost in its text: three terms as without privacy, one of
SAM's radius that goes with η = 𝒪(1/√T), and one of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedflat.core.checks import in_range, whole

LARGEST = 1e30
"""Of a constant: products of a few are still numbers."""


@dataclass(frozen=True)
class Facts:
    """The theorems' constants.

    Public numbers of a run: lr η, server_lr η_g, steps K, rounds T, clients M, cohort m, clip C, noise_multiplier σ,
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
    server_lr: float = 1.0
    alpha_mean: Sequence[float] = (1.0,)
    alpha_spread: Sequence[float] = (0.0,)

    def __post_init__(self) -> None:
        for name in ("lr", "smoothness", "server_lr", "cohort"):
            in_range(name, getattr(self, name), 0, LARGEST, open_low=True)
        for name in ("gap", "local_std", "global_std", "clip", "noise_multiplier"):
            in_range(name, getattr(self, name), 0, LARGEST)
        for name in ("steps", "rounds", "clients", "dimension"):
            whole(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Terms:
    """The terms of a statement by name, and what its conditions ask for, each with the value that is there."""

    terms: dict[str, float]
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Their sum."""
        return math.fsum(self.terms.values())


def dp_fedsam(facts: Facts, *, rho: float = 0.0, keep: float = 1.0) -> Terms:
    """Shi et al. 2023a, Theorem 3; with keep p < 1, Shi et al. 2023b, Theorem 3 for top_k. Enters no privacy statement.

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
    return Terms(terms, ratios)


def dp_fedpgn(facts: Facts, *, beta: float | None = None) -> Terms:
    """Liu et al. 2025, Theorem 1, Δ = f(x⁰) − f*: √(LΔσ_l²/(mKT)) + LΔ/T + σ²C²/m². Enters no privacy statement.

    It holds with β = min{1, √(mKLΔ/(σ_l²T))} and γ = min{1/(24L), β/(6L)} (the ratios: the recipe's β over that one,
    and γ = η_g·ηK over its value), and with ηKL ≲ min{1, 1/(βγLT), √(LΔ/(G₀β³T)), 1/√(βN), (β³NK)^(−1/4)}, of which G₀
    and N are not given: not evaluated. The last term has no d although σ²C²/m² is the variance of one coordinate of the
    mean, of d (Lemma 4); its Assumption 4 is that nothing is ever clipped.
    """
    work, smooth = facts.cohort * facts.steps * facts.rounds, facts.smoothness
    variance = facts.local_std**2
    ideal = 1.0 if variance == 0 else min(1.0, math.sqrt(work * smooth * facts.gap / (variance * facts.rounds**2)))
    limit = min(1 / (24 * smooth), ideal / (6 * smooth))
    ratios = {"γ/min{1/24L, β/6L} = 1": facts.server_lr * facts.lr * facts.steps / limit if limit else math.inf}
    if beta is not None:
        ratios["β/min{1, √(mKLΔ/(σ_l²T))} = 1"] = beta / ideal if ideal else math.inf
    terms = {
        "stochastic": math.sqrt(smooth * facts.gap * variance / work),
        "optimisation": smooth * facts.gap / facts.rounds,
        "noise": (facts.noise_multiplier * facts.clip / facts.cohort) ** 2,
    }
    return Terms(terms, ratios)


def blur_lus(facts: Facts) -> Terms:
    """Cheng et al. 2022, Theorem 2: 1/(η_gη_lQT) + η_l²Q² + η_gη_l/P + η_gσ²S²d/(η_lQP²) with P = m and Q = K.

    Enters no privacy statement.
    """
    lr, server, steps = facts.lr, facts.server_lr, facts.steps
    noise = server * (facts.noise_multiplier * facts.clip) ** 2 * facts.dimension / (lr * steps * facts.cohort**2)
    return Terms({**_averaging(facts), "noise": noise})


def blur_lus_at(facts: Facts, *, epsilon: float, delta: float) -> Terms:
    """004 Corollary 1, σ from Theorem 1 and S = η_lQG: the last term becomes η_gη_lQTd·ln(1/δ)/(N²ε²).

    Enters no privacy statement.
    """
    logs = -math.log(in_range("delta", delta, 0, 1, open_low=True, open_high=True))
    wanted = in_range("epsilon", epsilon, 0, open_low=True)
    noise = facts.server_lr * facts.lr * facts.steps * facts.rounds * facts.dimension * logs
    return Terms({**_averaging(facts), "noise": noise / (facts.clients * wanted) ** 2})


def _averaging(facts: Facts) -> dict[str, float]:
    lr, server = facts.lr, facts.server_lr
    return {
        "optimisation": 1 / (server * lr * facts.steps * facts.rounds),
        "drift": (lr * facts.steps) ** 2,
        "sampling": server * lr / facts.cohort,
    }


def _sum(values: Sequence[float], rounds: int) -> float:
    """Σ over T rounds of values that were measured in some of them: T times their mean."""
    return rounds * math.fsum(values) / len(values) if len(values) else 0.0
