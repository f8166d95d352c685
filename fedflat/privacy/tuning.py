"""The account of a run that was selected among several: its ε is the selection's, whatever one trial alone would have.

Every trial is a run under ``privacy.selection``, which says what K, the number of trials, was drawn from. So a trial's
plan, its ledger's lines and its statement name the total, and none of them the trial's own figure as a guarantee. The
proof is towards whoever sees the winner's release and nothing of the others (``accounting.selection``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedflat.core.checks import wrong
from fedflat.core.cohorts import make_sampler
from fedflat.privacy.accounting.curves import quiet, renyi
from fedflat.privacy.accounting.selection import Floats, Trials
from fedflat.privacy.trust import Guarantee

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
    def of(cls, record: Mapping[str, Any]) -> Selection:
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
    if plan.first != 1:
        hint = "The proof takes a trial's rounds to be alike."
        raise wrong("start", "class-statistics", "nothing where settings are chosen with privacy", hint=hint)
    if plan.noise_cohort is not None:
        raise wrong("privacy.selection", "privacy.noise_cohort", "the noise of the system that runs")


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
