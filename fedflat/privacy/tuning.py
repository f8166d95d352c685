"""The account of a run that was selected among several: its ε is the selection's, whatever one trial alone would have.

Every trial is a run under ``privacy.selection``, which says what K, the number of trials, was drawn from. So a trial's
plan, its ledger's lines and its statement name the total, and none of them the trial's own figure as a guarantee. The
proof is towards whoever sees the winner's release and nothing of the others.

Papernot and Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy": K trials, K drawn from a public law;
every trial draws its settings from one fixed public distribution, independently of the others, and is a whole private
run; the one with the best score is released and nothing else. From the Rényi divergence ε(λ) of one trial (both
directions of neighbours, all settings) follows that of the selection: Theorem 2 for the truncated negative binomial,
Theorem 6 for Poisson.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import in_range, nearest, require, wrong
from fedflat.core.cohorts import make_sampler
from fedflat.privacy.accounting.curves import quiet, renyi, renyi_epsilon
from fedflat.privacy.trust import Guarantee

Floats = NDArray[np.float64]
LAWS: dict[str, float | None] = {"geometric": 1.0, "logarithmic": 0.0, "poisson": None}
"""η of the laws that have a name; None: Poisson."""
MOST = 1e6
"""The largest mean number of trials."""
SHAPES = (-0.9, 10.0)
"""Values of η whose γ stays within float64 for every mean."""


@dataclass(frozen=True)
class Trials:
    """The law of K, the number of trials: public, while K itself is secret.

    mean: E[K]. eta: η > −1 of the truncated negative binomial, K ≥ 1 (1: geometric, 0: logarithmic; the smaller, the
    cheaper, and the likelier that K is 1); None: Poisson, where K may be 0, and then nothing is selected.
    Raises InputError: η or the mean out of range.
    """

    mean: float
    eta: float | None = 1.0

    def __post_init__(self) -> None:
        if self.eta is None:
            in_range("trials", self.mean, 0, MOST, open_low=True)
            return
        in_range("law", self.eta, *SHAPES)
        in_range("trials", self.mean, 1.001, MOST)

    @property
    def name(self) -> str:
        """In words."""
        known = {eta: name for name, eta in LAWS.items()}
        return known.get(self.eta) or f"truncated negative binomial with η = {self.eta:g}"

    @cached_property
    def gamma(self) -> float:
        """γ in (0, 1) at which the truncated negative binomial has this mean."""
        from scipy.optimize import brentq

        eta, goal = self.eta or 0.0, math.log(self.mean)
        most = 300 / max(1.0, eta)
        found = brentq(lambda x: math.log(negative_binomial_mean(eta, x)) - goal, 1e-6, most, xtol=1e-14)
        return math.exp(-float(found))

    def chances(self) -> Iterator[tuple[int, float]]:
        """K and its probability, from the smallest K on, without end."""
        if self.eta is None:
            number, log = 0, math.log(self.mean)
            while True:  # each by its logarithm: e^−μ is 0 in float64 from μ = 746 on
                yield number, math.exp(number * log - self.mean - math.lgamma(number + 1))
                number += 1
        gamma = self.gamma
        number, chance = 1, (1 - gamma) * _ratio(self.eta, -math.log(gamma))
        while True:
            yield number, chance
            number, chance = number + 1, chance * (1 - gamma) * (number + self.eta) / (number + 1)

    def draw(self, generator: np.random.Generator) -> int:
        """K, by inversion of one uniform number."""
        every = self.chances()
        number, chance = next(every)
        # One uniform number against running sums, so that K needs no library's sampler.
        left = float(generator.random()) - chance
        while left >= 0 and (chance > 1e-300 or number < self.mean):
            number, chance = next(every)
            left -= chance
        return number

    def selected(self, orders: Sequence[float], one: Floats) -> Floats:
        """Rényi divergences of the selection at ``orders`` (all > 1), from those of one trial, both ``(n,)``."""
        at = np.asarray(orders, dtype=np.float64)
        found = self._poisson(at, one) if self.eta is None else self._negative_binomial(at, one, self.eta)
        return np.minimum.accumulate(found[::-1])[::-1]  # divergences grow with the order

    def _negative_binomial(self, at: Floats, one: Floats, eta: float) -> Floats:
        """ε(λ) + (1 + η)·min over λ̂ of ((1 − 1/λ̂)·ε(λ̂) + ln(1/γ)/λ̂) + ln E[K]/(λ − 1)."""
        # λ̂ is free in the theorem: the best of all orders is still a bound.
        among = (1 + eta) * float(np.min((1 - 1 / at) * one - math.log(self.gamma) / at))
        return one + among + math.log(negative_binomial_mean(eta, -math.log(self.gamma))) / (at - 1)

    def _poisson(self, at: Floats, one: Floats) -> Floats:
        """ln(e^−μ + μ·e^((λ−1)(ε(λ) + μδ̂)))/(λ − 1), the trial being (ln(1 + 1/(λ − 1)), δ̂)-DP."""
        hats = _deltas(at, one, np.log1p(1 / (at - 1)))
        exponent = (at - 1) * (one + self.mean * hats)
        return np.asarray(np.logaddexp(-self.mean, math.log(self.mean) + exponent) / (at - 1))

    def epsilon(self, orders: Sequence[float], one: Floats, delta: float) -> float:
        """ε of the selection at ``delta``, the best over all orders; inf where a trial has no noise."""
        if not np.isfinite(one).any():
            return math.inf
        return renyi_epsilon(orders, self.selected(orders, one), delta)


def law(value: str | float) -> float | None:
    """η of a law that is given by its name, or as η itself.

    Raises:
        InputError: neither.
    """
    if str(value) in LAWS:
        return LAWS[str(value)]
    try:
        return float(value)
    except ValueError:
        raise wrong(
            "law",
            value,
            f"{', '.join(LAWS)}, or a number η from {SHAPES[0]} to {SHAPES[1]:g}",
            hint=nearest(str(value), LAWS),
        ) from None


def _deltas(at: Floats, one: Floats, epsilons: Floats) -> Floats:
    """The smallest δ proven at each ε by divergences ``one`` at orders ``at``; all ``(n,)``.

    Canonne et al. 2020, Proposition 12; and the total variation, at most √(1 − e^−ε(λ)) by
    Bretagnolle and Huber.
    """
    log = (at - 1) * (one + np.log1p(-1 / at)) - np.log(at) - np.multiply.outer(epsilons, at - 1)
    # At large ε the total variation says more than any single order.
    variation = np.sqrt(-np.expm1(-np.maximum(one, 0.0)))
    return np.asarray(np.minimum(np.exp(np.minimum(log.min(axis=1), 0.0)), variation.min()))


def negative_binomial_mean(eta: float, log: float) -> float:
    """E[K] = η(1 − γ)/(γ(1 − γ^η)) of the truncated negative binomial, of log = ln(1/γ); (e^log − 1)/log at η = 0."""
    return math.expm1(log) * _ratio(-eta, log)


def _ratio(eta: float, log: float) -> float:
    """η/(e^(η·log) − 1); 1/log at η = 0."""
    return eta / math.expm1(eta * log) if abs(eta * log) > 1e-12 else 1 / log


# ------------------------------------------------------------------------------------------ the account of a run

Multiplier = Callable[[Mapping[str, Any]], float]

SAMPLINGS = ("poisson", "fixed", "full")
"""Cohort laws whose rounds have a bound on their Rényi divergence."""
TOWARDS = (
    "everyone who sees the release of the selected run and nothing of the other trials: no model, no score, not how "
    "many there were. Not the clients of a federation, who see the models of every trial they take part in"
)


@dataclass(frozen=True)
class Law:
    """The rounds of one trial, as public numbers: T, the expected cohort m, and σ = std / C."""

    rounds: int
    cohort: float
    noise_multiplier: float


@dataclass(frozen=True)
class Selection:
    """What a run was selected by.

    trials: the law of their number. beside: the rounds that other trials may have, where the settings that are drawn
    change them; a trial's own need not be among them.
    """

    trials: Trials
    beside: tuple[Law, ...] = ()

    def record(self) -> dict[str, Any]:
        """For the ledger's lines."""
        found: dict[str, Any] = {"mean": self.trials.mean, "eta": self.trials.eta}
        return found | ({"beside": [dataclasses.asdict(law) for law in self.beside]} if self.beside else {})

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Selection":
        """From what ``record`` gave."""
        beside = tuple(
            Law(int(law["rounds"]), float(law["cohort"]), float(law["noise_multiplier"]))
            for law in record.get("beside") or ()
        )
        return cls(Trials(float(record["mean"]), record["eta"]), beside)


def check(plan: Any) -> None:
    """Refuse a plan whose selection is not proven.

    Raises:
        InputError: in one line, with the reason.
    """
    if plan.trust != "central":
        hint = "A server that is not trusted sees every trial, and how many there are: nothing hides the losers."
        raise wrong("privacy.selection", f"trust {plan.trust}", "privacy.trust: central", hint=hint)
    if plan.mechanism is not None or plan.sampler.name not in SAMPLINGS:
        found = plan.mechanism.name if plan.mechanism is not None else plan.sampler.name
        if plan.sampler.name not in SAMPLINGS:
            found = f"cohort.sampling {plan.sampler.name}"
        allowed = f"independent Gaussian noise with cohort.sampling {', '.join(SAMPLINGS)}"
        raise wrong("privacy.selection", found, allowed, hint="The proof needs a trial's Rényi divergence.")
    if plan.accountant != "rdp":
        hint = "A selection is proven by Rényi divergences."
        raise wrong("privacy.accountant", plan.accountant, "rdp with privacy.selection", hint=hint)
    require(plan.noise_cohort is None, "privacy.selection", "privacy.noise_cohort", "the noise of the system that runs")


def guarantee(plan: Any, rounds: int) -> Guarantee:
    """Of the selection when a trial is charged for ``rounds``; never for fewer than are planned.

    The score that selects is of whole runs, so whoever looks at a selected run's first rounds looks at all of them.
    """
    selection: Selection = plan.selection
    # The score that selects is of whole runs, so a trial counts as a whole run from its first round on.
    own = Law(max(rounds, plan.rounds), plan.sampler.size, plan.event_multiplier)
    orders, most = _most(plan.sampler.name, plan.sampler.clients, plan.params.factor, (own, *selection.beside))
    found = selection.trials.epsilon(orders, most, plan.delta)
    return Guarantee("recipients", TOWARDS, plan.relation, found, plan.delta, "rdp")


def _most(sampling: str, clients: int, factor: int, laws: Sequence[Law]) -> tuple[tuple[float, ...], Floats]:
    """Orders, and the largest Rényi divergence of any of the laws at each."""
    found: list[Floats] = []
    orders: tuple[float, ...] = ()
    # The winner may be a trial with any of these settings: the largest divergence bounds them all.
    for law in dict.fromkeys(laws):
        event = make_sampler(sampling, clients, law.cohort).event(law.noise_multiplier / factor)
        orders, one = renyi(event, law.rounds)
        found.append(one)
    return orders, np.max(found, axis=0)


def alone(plan: Any) -> Any:
    """The plan of one trial, taken by itself: for what is said of it, never for a statement."""
    return replace(plan, selection=None)


def sentences(plan: Any) -> list[str]:
    """What a statement says of the selection."""
    trials = plan.selection.trials
    one, least = alone(plan).epsilon(), " (it may be none)" if trials.eta is None else ""
    return [
        f"ε is that of the selection among a secret number of trials ({trials.name}, {trials.mean:g} in the "
        f"mean{least}), each with settings drawn anew from one public distribution; the selection is not free: one "
        f"such run, its settings fixed beforehand, would have ε = {one:.4g}."
    ]


def recomputed(entries: Sequence[Mapping[str, Any]], delta: float, multiplier: Multiplier) -> tuple[float, float]:
    """(ε by dp-accounting's own account of a selection, ε by ours), both from a ledger's lines alone.

    Lines of rounds that were drawn again count as rounds. The library knows η ≥ 0 and means ≥ 1 only; elsewhere both
    figures are ours. multiplier: std / sensitivity of a line.
    Raises InputError: lines that differ in what selected them, or do not say enough.
    """
    first = entries[0]
    if any(entry.get("selection") != first.get("selection") for entry in entries):
        raise wrong("ledger", "lines of different selections", "one per run")
    try:
        selection = Selection.of(first["selection"])
        factor = 2 if first["relation"] == "replace-one" else 1
        sampling, clients = str(first["sampling"]), int(first["clients"])
        least = float(f"{min(map(multiplier, entries)):.12g}") * factor
        laws = (Law(len(entries), float(first["cohort"]), least), *selection.beside)
        ours = selection.trials.epsilon(*_most(sampling, clients, factor, laws), delta)
    except (KeyError, TypeError, AttributeError) as error:
        raise wrong("ledger line 0: selection", "not all of it", "every parameter of the selection") from error
    if least == 0 or selection.trials.mean < 1 or (selection.trials.eta or 0.0) < 0:
        return ours, ours
    return max(_by_library(selection.trials, sampling, clients, factor, law, delta) for law in set(laws)), ours


def _by_library(trials: Trials, sampling: str, clients: int, factor: int, law: Law, delta: float) -> float:
    import dp_accounting
    from dp_accounting import rdp

    event = make_sampler(sampling, clients, law.cohort).event(law.noise_multiplier / factor)
    shape = math.inf if trials.eta is None else trials.eta
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant(renyi(event, 1)[0], relation)
    whole = dp_accounting.SelfComposedDpEvent(event, law.rounds)
    with quiet():
        accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(whole, trials.mean, shape))
        return float(accountant.get_epsilon(delta))
