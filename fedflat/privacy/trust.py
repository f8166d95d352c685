"""Who is protected from whom: the adversaries of each trust model, and the ε towards each.

``central``: who receives the models sees noisy means; the server is trusted. ``distributed``: every client adds
its share of the noise and the server sees the sum and knows the cohort. ``local``: the server sees each update.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from fedflat.core import ROUNDING, InputError, Sampler, in_range, one_of, require, whole, wrong
from fedflat.privacy.accounting.curves import PROVEN, compose_epsilon, refuse_unproven, schedule_epsilon

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
class AccountingParams:
    """What the ε of Gaussian rounds depends on.

    Args:
        sampler: cohort law.
        rounds: T.
        noise_multiplier: noise std / C, whatever the relation.
        delta: δ of the whole run.
        accountant: pld, rdp or fft.
        trust: central, distributed or local.
        min_cohort: the minimum cohort of ``distributed``: honest shares without which a round is aborted.
        max_participations: of ``local``: rounds one client takes part in at most.
        colluders: f of ``distributed``: clients whose noise shares the server may know.

    Raises:
        InputError: a combination for which no bound is known, in one line with the reason.
    """

    sampler: Sampler
    rounds: int
    noise_multiplier: float
    delta: float
    accountant: str = "pld"
    trust: str = "central"
    min_cohort: int | None = None
    max_participations: int | None = None
    colluders: int = 0

    def __post_init__(self) -> None:
        whole("rounds", self.rounds)
        accountable(self.noise_multiplier)
        in_range("privacy.delta", self.delta, 0, 1, open_low=True, open_high=True)
        one_of("privacy.accountant", self.accountant, PROVEN)
        one_of("privacy.trust", self.trust, TRUSTS)
        if self.trust == "distributed" and self.sampler.name in ("min-separation", "cyclic-poisson"):
            reason = "sampling whose rounds keep apart has a proof under trust: central only"
            raise InputError(f"privacy.accountant: {reason}.")
        if self.trust != "local":
            refuse_unproven(self.sampler.name, self.accountant)
        limits = {
            "cohort.min": (self.min_cohort, "distributed"),
            "colluders": (self.colluders or None, "distributed"),
            "cohort.max_participations": (self.max_participations, "local"),
        }
        for where, (value, trust) in limits.items():
            require(value is None or self.trust == trust, where, value, f"nothing unless privacy.trust is {trust}")
        if self.max_participations is not None:
            whole("cohort.max_participations", self.max_participations, 1)
        whole("colluders", self.colluders, 0, self.sampler.clients - 1)
        if self.min_cohort is not None:
            # A Poisson cohort may be everybody, the others have a public maximum.
            law = self.sampler
            most = law.clients if law.name == "poisson" else int(law.maximum or law.size)
            whole("cohort.min", self.min_cohort, 1, max(most - self.colluders, 0))

    @property
    def relation(self) -> str:
        """replace-one where the server sees each update, else the sampler's."""
        return "replace-one" if self.trust == "local" else self.sampler.relation

    @property
    def factor(self) -> int:
        """Sensitivity of the sum in units of C: 1 under add-remove, 2 under replace-one."""
        return 2 if self.relation == "replace-one" else 1

    def guarantee(self, adversary: str, description: str, epsilon: float, accountant: str = "") -> Guarantee:
        """Return an adversary's guarantee at the whole run's δ. accountant: what computed it, if not this one's."""
        return Guarantee(adversary, description, self.relation, epsilon, self.delta, accountant or self.accountant)

    def abort_probability(self) -> float:
        """The chance that any round has fewer honest shares than the minimum cohort (0 unless distributed)."""
        return 0.0 if self.min_cohort is None else _abort(self.sampler, self.rounds, self.min_cohort, self.colluders)

    def remaining_delta(self) -> float:
        """δ less the chance of an abort.

        Raises:
            InputError: nothing is left of δ.
        """
        left = self.delta - self.abort_probability()
        if left <= 0:
            chance = f"an aborted round has chance {self.abort_probability():.3g} ≥ δ = {self.delta:g}"
            allowed = f"at most {default_min_cohort(self.sampler, self.rounds, self.delta, self.colluders)} ({chance})"
            raise wrong("cohort.min", self.min_cohort, allowed, hint="Choose a smaller cohort.min.")
        return left


class Accounted:
    """What answers for a plan's noise. This one is for the Gaussian sum; a mechanism with an account of its own (votes,
    the discrete Gaussian, schedules, published procedures) says what differs. ``plan`` is a ``plan.Plan``, which
    is made of these and so cannot be imported here.

    relation: the neighbouring relation; the Gaussian sum has the cohort law's. rounding: s, what the rounding
    of a sum may add to the clip, as a share of it. most: the noise shares that a sum has room for; None: any number.
    several: whether a round has several cohort draws, each with its own line.
    """

    relation: str
    rounding: float = ROUNDING
    most: int | None = None
    several: bool = False

    @property
    def name(self) -> str:
        """The name that the ledger shows."""
        return "gaussian"

    @property
    def scale(self) -> float:
        """How many times C·(1 + s) one client moves the value that the noise is made for."""
        return 1.0

    def sensitivity(self, plan: Any, bound: float) -> float:
        """Return the sensitivity of the sum of one draw's messages, each of norm ≤ ``bound``."""
        return bound * (1 + self.rounding) * (2 if plan.relation == "replace-one" else 1) * self.scale

    def std(self, plan: Any, bound: float) -> float:
        """Return the standard deviation of the noise on that sum."""
        multiplier: float = plan.effective_multiplier
        return multiplier * bound * (1 + self.rounding) * self.scale if multiplier else 0.0

    def guarantees(self, plan: Any, rounds: int) -> tuple[Guarantee, ...]:
        """Return the guarantee towards each adversary after ``rounds`` rounds; ε falls in ``plan.event_multiplier``."""
        return guarantees(replace(plan.params, rounds=rounds))

    def draws(self, plan: Any, round: int) -> range:
        """Return the cohort draws of a round, numbered through the run."""
        return range(round, round + 1)

    def record(self, plan: Any) -> dict[str, Any]:
        """Return what the ledger needs, beyond the plan's own fields, to recompute ε with another library."""
        return {}

    def by_round(self, plan: Any, round: int) -> dict[str, Any]:
        """Return what the ledger needs of this round alone."""
        return {}

    def claimed(self, plan: Any, rounds: int) -> float | None:
        """Return the paper's ε of a published procedure, to show beside the proven one; None for all others."""
        return None


GAUSSIAN = Accounted()


def _abort(sampler: Sampler, rounds: int, min_cohort: int, colluders: int) -> float:
    """P(too few honest clients in any of the rounds' cohorts)."""
    chance = _too_few(sampler, min_cohort, colluders)
    return 1.0 if chance >= 1 else -math.expm1(rounds * math.log1p(-chance))


def _too_few(sampler: Sampler, min_cohort: int, colluders: int) -> float:
    """P(fewer than ``min_cohort`` honest clients in one cohort); colluders in a fixed cohort are all assumed drawn."""
    from scipy.stats import binom

    if sampler.name == "fixed":
        return 0.0 if sampler.size - colluders >= min_cohort else 1.0
    if sampler.maximum is not None and min_cohort > sampler.maximum - colluders:
        return 1.0
    # Where the truncation binds, at least maximum − colluders honest clients stay: only small draws are too few.
    return float(binom.cdf(min_cohort - 1, sampler.clients - colluders, sampler.q))


def default_min_cohort(sampler: Sampler, rounds: int, delta: float, colluders: int = 0) -> int:
    """The largest minimum cohort whose chance of any abort over ``rounds`` stays below δ/100; at least 1.

    Raises:
        InputError: even a minimum of 1 is too likely to abort.
    """
    for min_cohort in range(math.ceil(sampler.size), 0, -1):
        if _abort(sampler, rounds, min_cohort, colluders) <= delta / 100:
            return min_cohort
    allowed = "a cohort that is hardly ever empty with privacy.trust: distributed"
    raise wrong("cohort.size", sampler.size, allowed, hint="The chance of an aborted round is charged to δ.")


def guarantees(params: AccountingParams) -> tuple[Guarantee, ...]:
    """The guarantee towards each adversary of the trust model, the strongest protected first.

    Raises:
        InputError: the chance of an aborted round uses up δ.
    """
    return {"central": _central, "distributed": _distributed, "local": _local}[params.trust](params)


def headline(params: AccountingParams) -> float:
    """The largest ε over the adversaries."""
    return max(guarantee.epsilon for guarantee in guarantees(params))


def round_event(params: AccountingParams) -> Any:
    """Return one round as a dp-accounting event, of multiplier std / sensitivity under the relation."""
    import dp_accounting

    multiplier = params.noise_multiplier / params.factor
    return dp_accounting.GaussianDpEvent(multiplier) if params.trust == "local" else params.sampler.event(multiplier)


def _amplified(params: AccountingParams) -> float:
    # Rounds closer together than the separation never concern the same client.
    turns = -(-params.rounds // params.sampler.separation)
    return compose_epsilon(round_event(params), turns, params.remaining_delta(), params.accountant)


def _central(params: AccountingParams) -> tuple[Guarantee, ...]:
    text = "everyone who sees the released models (the other clients, the public); the server itself is trusted"
    return (params.guarantee("recipients", text, _amplified(params)),)


def _distributed(params: AccountingParams) -> tuple[Guarantee, ...]:
    """Towards the server δ(ε) = Σ_n Bin(T, q)(n)·δ_Gauss(ε; n, σ): it knows who took part.

    Towards recipients: they see less than the server, so its figure holds. Amplification by the hidden cohort needs
    noise that does not depend on the cohort, else its size shows in the noise's energy; with n shares of equal
    variance that is so for cohorts of fixed size only.
    """
    rounds, spent = params.rounds, params.remaining_delta()
    multiplier = params.noise_multiplier / params.factor
    towards_server = schedule_epsilon(rounds, params.sampler.q, multiplier, spent) if rounds else 0.0
    # With shares of noise, a cohort of random size would show in how large the noise is.
    hidden = params.sampler.name == "fixed"
    towards_all = min(_amplified(params), towards_server) if hidden else towards_server
    how = "the cohort being hidden from them" if hidden else "not amplified: the noise's energy tells the cohort's size"
    exact = "exact Gaussian over Bin(T, q) participations"
    recipients = f"everyone who sees the released models only; {how}"
    server = "the honest-but-curious server, which knows every cohort and sees each sum (secure aggregation)"
    server += f", with {params.colluders} colluding clients" if params.colluders else ""
    return (
        params.guarantee("recipients", recipients, towards_all, "" if hidden else exact),
        params.guarantee("server", server, towards_server, exact),
    )


def _local(params: AccountingParams) -> tuple[Guarantee, ...]:
    most = params.rounds if params.max_participations is None else min(params.rounds, params.max_participations)
    epsilon = compose_epsilon(round_event(params), most, params.delta, params.accountant)
    text = f"the server, which sees each client's noisy update, and everyone else; at most {most} participations"
    return (params.guarantee("server", text, epsilon),)
