"""Who is protected from whom: the adversaries of each trust model, and the ε towards each.

``central``: who receives the models sees noisy means; the server is trusted. ``distributed``: every client adds
its share of the noise and the server sees the sum and knows the cohort. ``local``: the server sees each update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedflat.core.checks import InputError, in_range, one_of, whole, wrong
from fedflat.core.cohorts import Sampler
from fedflat.privacy.accounting.curves import EpsilonCurve, proving, refusal
from fedflat.privacy.accounting.gaussian import LITTLE, schedule_epsilon
from fedflat.privacy.accounting.steps import Step, step, steps_epsilon

TRUSTS = ("central", "distributed", "local")
NOISE = (1e-12, 1e8)
"""Multipliers other than 0 whose accounts stay within float64."""


def accountable(multiplier: float) -> float:
    """Return a noise multiplier that is 0 or within :data:`NOISE`; otherwise raise InputError."""
    in_range("privacy.noise_multiplier", multiplier, 0)
    if multiplier and not NOISE[0] <= multiplier <= NOISE[1]:
        raise wrong("privacy.noise_multiplier", multiplier, f"0, or a number from {NOISE[0]:g} to {NOISE[1]:g}")
    return multiplier


@dataclass(frozen=True)
class Guarantee:
    """One adversary's (ε, δ), for the whole run so far.

    adversary: who. description: what they see. relation: add-remove or replace-one. epsilon: inf where none is proven.
    accountant: what computed it.
    """

    adversary: str
    description: str
    relation: str
    epsilon: float
    delta: float
    accountant: str


@dataclass(frozen=True)
class Terms:
    """What the ε of Gaussian rounds depends on.

    Args:
        sampler: cohort law.
        multiplier: noise std / C, whatever the relation.
        delta: δ of the whole run.
        accountant: pld, rdp or fft.
        trust: central, distributed or local.
        cohort_min: n_min of ``distributed``: honest shares without which a round is aborted.
        max_participations: of ``local``: rounds one client takes part in at most.
        colluders: f of ``distributed``: clients whose noise shares the server may know.

    Raises:
        InputError: a combination for which no bound is known, in one line with the reason.
    """

    sampler: Sampler
    multiplier: float
    delta: float
    accountant: str = "pld"
    trust: str = "central"
    cohort_min: int | None = None
    max_participations: int | None = None
    colluders: int = 0

    def __post_init__(self) -> None:
        accountable(self.multiplier)
        in_range("privacy.delta", self.delta, 0, 1, open_low=True, open_high=True)
        proving(self.accountant)
        one_of("privacy.trust", self.trust, TRUSTS)
        reason = inapplicable(self.accountant, self.sampler.name, self.trust)
        if reason:
            raise InputError(f"accountant: {reason}.")
        self._check_limits()

    def _check_limits(self) -> None:
        if self.trust != "distributed" and self.cohort_min is not None:
            raise wrong("cohort.min", self.cohort_min, "nothing unless privacy.trust is distributed")
        if self.trust != "distributed" and self.colluders:
            raise wrong("colluders", self.colluders, "0 unless privacy.trust is distributed")
        if self.trust != "local" and self.max_participations is not None:
            raise wrong("cohort.max_participations", self.max_participations, "nothing unless privacy.trust is local")
        if self.max_participations is not None:
            whole("cohort.max_participations", self.max_participations, 1)
        whole("colluders", self.colluders, 0, self.sampler.clients - 1)
        if self.cohort_min is not None:
            whole("cohort.min", self.cohort_min, 1, self._largest_minimum)

    @property
    def _largest_minimum(self) -> int:
        largest = self.sampler.clients if self.sampler.name == "poisson" else int(_most(self.sampler))
        return max(largest - self.colluders, 0)

    @property
    def relation(self) -> str:
        """replace-one where the server sees each update, else the sampler's."""
        return "replace-one" if self.trust == "local" else self.sampler.relation

    @property
    def factor(self) -> int:
        """Sensitivity of the sum in units of C: 1 under add-remove, 2 under replace-one."""
        return 2 if self.relation == "replace-one" else 1

    def abort_probability(self, rounds: int) -> float:
        """The chance that any of ``rounds`` rounds has fewer than n_min honest shares (0 unless distributed)."""
        if self.cohort_min is None:
            return 0.0
        one = _too_few(self.sampler, self.cohort_min, self.colluders)
        return 1.0 if one >= 1 else -math.expm1(rounds * math.log1p(-one))

    def remaining_delta(self, rounds: int) -> float:
        """δ less the chance of an abort.

        Raises:
            InputError: nothing is left of δ.
        """
        left = self.delta - self.abort_probability(rounds)
        if left <= 0:
            chance = f"an aborted round has chance {self.abort_probability(rounds):.3g} ≥ δ = {self.delta:g}"
            allowed = f"at most {default_minimum(self.sampler, rounds, self.delta, self.colluders)} ({chance})"
            raise wrong("cohort.min", self.cohort_min, allowed, hint="Choose a smaller cohort.min.")
        return left


def _most(sampler: Sampler) -> float:
    """The largest cohort a law allows, other than Poisson's."""
    return float(getattr(sampler, "maximum", sampler.size))


def _too_few(sampler: Sampler, minimum: int, colluders: int) -> float:
    """P(fewer than ``minimum`` honest clients in one cohort); colluders in a fixed cohort are all assumed drawn."""
    from scipy.stats import binom

    if sampler.name == "fixed":
        return 0.0 if sampler.size - colluders >= minimum else 1.0
    if sampler.name == "truncated" and minimum > _most(sampler) - colluders:
        return 1.0
    # Where the truncation binds, at least maximum − colluders honest clients stay: only small draws are too few.
    return float(binom.cdf(minimum - 1, sampler.clients - colluders, sampler.q))


def default_minimum(sampler: Sampler, rounds: int, delta: float, colluders: int = 0) -> int:
    """The largest n_min whose chance of any abort over ``rounds`` stays below δ/100; at least 1.

    Raises:
        InputError: even n_min = 1 is too likely to abort.
    """
    high = math.ceil(sampler.size)
    for minimum in range(high, 0, -1):
        one = _too_few(sampler, minimum, colluders)
        if one < 1 and -math.expm1(rounds * math.log1p(-one)) <= delta / 100:
            return minimum
    raise wrong(
        "cohort.size", sampler.size, "a cohort that is hardly ever empty with privacy.trust: distributed",
        hint="The chance of an aborted round is charged to δ.",
    )  # fmt: skip


def inapplicable(accountant: str, sampling: str, trust: str) -> str:
    """Why this accountant gives no figure for this cohort law and trust model; empty if it does."""
    if trust == "local":
        return ""
    return refusal({"fixed": "without replacement"}.get(sampling, sampling), accountant)


def guarantees(terms: Terms, rounds: int) -> tuple[Guarantee, ...]:
    """The guarantee towards each adversary of the trust model after ``rounds`` rounds, the strongest protected first.

    Raises:
        InputError: the chance of an aborted round uses up δ.
    """
    return {"central": _central, "distributed": _distributed, "local": _local}[terms.trust](terms, rounds)


def guarantees_of(terms: Terms, multipliers: Mapping[float, int]) -> tuple[Guarantee, ...]:
    """As :func:`guarantees`, of rounds that differ in their noise: multiplier -> how many.

    Every round with the least noise is a bound; so is the composition of the rounds as they are, which is tighter
    but for what two grids differ by.

    Raises:
        InputError: the chance of an aborted round uses up δ.
    """
    rounds, least = sum(multipliers.values()), min(multipliers)
    found = guarantees(replace(terms, multiplier=least), rounds)
    if least < LITTLE:  # no grid holds such losses beside others
        return found
    together = steps_epsilon(_steps(terms, multipliers), terms.remaining_delta(rounds))
    how = "pld, each round with its own noise"
    return tuple(replace(g, epsilon=together, accountant=how) if together < g.epsilon else g for g in found)


def _steps(terms: Terms, multipliers: Mapping[float, int]) -> Counter[Step]:
    """The rounds' laws. A client of ``local`` takes part in those with the least noise first."""
    sampler, left = terms.sampler, terms.max_participations or sum(multipliers.values())
    found = Counter[Step]()
    for multiplier, rounds in sorted(multipliers.items()):
        sigma = multiplier / terms.factor
        if terms.trust == "local":
            found[Step("gaussian", 1.0, sigma)] += min(rounds, left)
            left -= min(rounds, left)
        elif terms.trust == "distributed":
            found[Step("known", sampler.q, sigma)] += rounds
        else:
            limit = {"truncated": _most(sampler), "fixed": sampler.size}.get(sampler.name, 0)
            found[step(sampler.name, sampler.q, sigma, sampler.clients, int(limit))] += rounds
    return found


def headline(terms: Terms, rounds: int) -> float:
    """The largest ε over the adversaries."""
    return max(found.epsilon for found in guarantees(terms, rounds))


def _amplified(terms: Terms, rounds: int) -> float:
    event = terms.sampler.event(terms.multiplier / terms.factor)
    return EpsilonCurve(event, terms.delta, terms.accountant).at(rounds, terms.remaining_delta(rounds))


def _central(terms: Terms, rounds: int) -> tuple[Guarantee, ...]:
    text = "everyone who sees the released models (the other clients, the public); the server itself is trusted"
    found = _amplified(terms, rounds)
    return (Guarantee("recipients", text, terms.relation, found, terms.delta, terms.accountant),)


def _distributed(terms: Terms, rounds: int) -> tuple[Guarantee, ...]:
    """Towards the server δ(ε) = Σ_n Bin(T, q)(n)·δ_Gauss(ε; n, σ): it knows who took part.

    Towards recipients: they see less than the server, so its figure holds. Amplification by the hidden cohort needs
    noise that does not depend on the cohort, else its size shows in the noise's energy; with n shares of equal
    variance that is so for cohorts of fixed size only.
    """
    spent = terms.remaining_delta(rounds)
    multiplier = terms.multiplier / terms.factor
    towards_server = schedule_epsilon(rounds, terms.sampler.q, multiplier, spent) if rounds else 0.0
    hidden = terms.sampler.name == "fixed"
    towards_all = min(_amplified(terms, rounds), towards_server) if hidden else towards_server
    how = "the cohort being hidden from them" if hidden else "not amplified: the noise's energy tells the cohort's size"
    exact = "exact Gaussian over Bin(T, q) participations"
    return (
        Guarantee(
            "recipients", f"everyone who sees the released models only; {how}", terms.relation, towards_all,
            terms.delta, terms.accountant if hidden else exact,
        ),
        Guarantee(
            "server", "the honest-but-curious server, which knows every cohort and sees each sum (secure aggregation)"
            + (f", with {terms.colluders} colluding clients" if terms.colluders else ""),
            terms.relation, towards_server, terms.delta, exact,
        ),
    )  # fmt: skip


def _local(terms: Terms, rounds: int) -> tuple[Guarantee, ...]:
    import dp_accounting

    most = rounds if terms.max_participations is None else min(rounds, terms.max_participations)
    event = dp_accounting.GaussianDpEvent(terms.multiplier / terms.factor)
    found = EpsilonCurve(event, terms.delta, terms.accountant).at(most)
    text = f"the server, which sees each client's noisy update, and everyone else; at most {most} participations"
    return (Guarantee("server", text, terms.relation, found, terms.delta, terms.accountant),)
