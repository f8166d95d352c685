"""The account of a run that was selected among several: its ε is the selection's, whatever one trial alone would have.

Every trial is a run under ``privacy.selection``, which says what K, the number of trials, was drawn from. So a trial's
plan, its ledger's lines and its statement name the total, and none of them the trial's own figure as a guarantee. The
proof is towards whoever sees the winner's release and nothing of the others.

Papernot and Steinke 2022, "Hyperparameter Tuning with Rényi Differential Privacy": K trials, K geometric with a public
mean; every trial draws its settings from one fixed public distribution, independently of the others, and is a whole
private run; the one with the best score is released and nothing else. From the Rényi divergence ε(λ) of one trial (both
directions of neighbours, all settings alike) follows that of the selection by Theorem 2 at η = 1, γ = 1/E[K].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedflat.core import in_range, make_sampler, require, turning, wrong
from fedflat.core.factors import Floats
from fedflat.privacy.accounting.curves import rdp_accountant, renyi, renyi_epsilon
from fedflat.privacy.trust import Guarantee, round_event

MOST = 1e6
"""The largest mean number of trials."""
SAMPLINGS = ("poisson", "fixed", "full")
"""Cohort laws whose rounds have a bound on their Rényi divergence."""
TOWARDS = (
    "everyone who sees the release of the selected run and nothing of the other trials: no model, no score, not how "
    "many there were. Not the clients of a federation, who see the models of every trial they take part in"
)


@dataclass(frozen=True)
class Selection:
    """What a run was selected by: the best of K trials. K is geometric and at least 1; its mean is public, K secret.

    Raises InputError: the mean out of range.
    """

    mean: float

    def __post_init__(self) -> None:
        in_range("trials", self.mean, 1.001, MOST)

    def draw(self, generator: np.random.Generator) -> int:
        """Draw K, the number of trials."""
        return int(generator.geometric(1 / self.mean))

    def selected(self, orders: Sequence[float], one: Floats) -> Floats:
        """Rényi divergences of the selection at ``orders`` (all > 1), from those of one trial, both ``(n,)``:
        ε(λ) + 2·min over λ̂ of ((1 − 1/λ̂)·ε(λ̂) + ln E[K]/λ̂) + ln E[K]/(λ − 1)."""
        at, log = np.asarray(orders, dtype=np.float64), math.log(self.mean)
        # λ̂ is free in the theorem: the best of all orders is still a bound.
        among = 2 * float(np.min((1 - 1 / at) * one + log / at))
        return np.minimum.accumulate((one + among + log / (at - 1))[::-1])[::-1]  # divergences grow with the order

    def epsilon(self, orders: Sequence[float], one: Floats, delta: float) -> float:
        """ε of the selection at ``delta``, the best over all orders; inf where a trial has no noise."""
        if not np.isfinite(one).any():
            return math.inf
        return renyi_epsilon(orders, self.selected(orders, one), delta)

    def record(self) -> dict[str, Any]:
        """Return what the ledger's lines say of it. eta: 1 is the geometric law."""
        return {"mean": self.mean, "eta": 1.0}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Selection":
        """Return the selection that ``record`` describes.

        Raises:
            InputError: another law, or trials that cost differently, which versions before 1.0 had.
        """
        if record["eta"] != 1 or record.get("beside"):
            raise wrong("selection", dict(record), "the geometric law (eta: 1) of trials that are alike")
        return cls(float(record["mean"]))


def check(plan: Any) -> None:
    """Refuse a plan whose selection is not proven.

    Raises:
        InputError: in one line, with the reason.
    """
    hint = "A server that is not trusted sees every trial, and how many there are: nothing hides the losers."
    require(plan.trust == "central", "privacy.selection", f"trust {plan.trust}", "privacy.trust: central", hint=hint)
    if plan.mechanism is not None or plan.sampler.name not in SAMPLINGS:
        refused = plan.mechanism.name if plan.sampler.name in SAMPLINGS else f"cohort.sampling {plan.sampler.name}"
        allowed = f"independent Gaussian noise with cohort.sampling {', '.join(SAMPLINGS)}"
        raise wrong("privacy.selection", refused, allowed, hint="The proof needs a trial's Rényi divergence.")
    hint = "A selection is proven by Rényi divergences."
    require(plan.accountant == "rdp", "privacy.accountant", plan.accountant, "rdp with privacy.selection", hint=hint)
    require(plan.noise_cohort is None, "privacy.selection", "privacy.noise_cohort", "the noise of the system that runs")


def guarantee(plan: Any, rounds: int) -> Guarantee:
    """Return the selection's guarantee when a trial is charged for ``rounds``; never for fewer than are planned.

    The score that selects is of whole runs, so whoever looks at a selected run's first rounds looks at all of them.
    """
    # The score that selects is of whole runs, so a trial counts as a whole run from its first round on.
    orders, divergences = renyi(round_event(plan.params), max(rounds, plan.rounds))
    epsilon = plan.selection.epsilon(orders, divergences, plan.delta)
    return plan.guarantee("recipients", TOWARDS, epsilon, "rdp")  # type: ignore[no-any-return]


def alone(plan: Any) -> Any:
    """Return the plan of one trial by itself: to describe it, never for a statement."""
    return replace(plan, selection=None)


def recomputed(entries: Sequence[Mapping[str, Any]], delta: float, sigma: float) -> tuple[float, float]:
    """(ε by dp-accounting's own account of a selection, ε by ours), both from a ledger's lines alone.

    Lines of rounds that were drawn again count as rounds. sigma: their least std / sensitivity, > 0.
    Raises InputError: lines that differ in what selected them, or do not say enough.
    """
    import dp_accounting

    first, incomplete = entries[0], (KeyError, TypeError, AttributeError)
    if any(entry.get("selection") != first.get("selection") for entry in entries):
        raise wrong("ledger", "lines of different selections", "one per run")
    with turning(incomplete, wrong("ledger line 0: selection", "not all of it", "every parameter of the selection")):
        selection = Selection.of(first["selection"])
        sampler = make_sampler(str(first["sampling"]), int(first["clients"]), float(first["cohort"]))
        event = sampler.event(sigma)
        orders, divergences = renyi(event, len(entries))
    accountant, trial = rdp_accountant(event), dp_accounting.SelfComposedDpEvent(event, len(entries))
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(trial, selection.mean, 1.0))
    return float(accountant.get_epsilon(delta)), selection.epsilon(orders, divergences, delta)
