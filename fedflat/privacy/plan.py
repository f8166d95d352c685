"""The privacy plan of a run: how much noise, what one round spends, and what is proven after any number of rounds.

Built once from the recipe; everything else (engine, ledger, statement, report) asks it, so that no privacy number
exists twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fedflat.core import MOST, Sampler, in_range, make_sampler, require, whole, wrong
from fedflat.privacy import tuning
from fedflat.privacy.accounting.epsilon import accounting_params, calibrate, default_delta, guess, largest, split_noise
from fedflat.privacy.correlated import ScheduledPlan, scheduled_plan
from fedflat.privacy.ledger import extra_rounds
from fedflat.privacy.trust import GAUSSIAN, Accounted, AccountingParams, Guarantee

__all__ = ["Accounted", "Guarantee", "Plan", "build_plan"]


@dataclass(frozen=True)
class Plan(AccountingParams):
    """What a run does for privacy: what its ε depends on, and more.

    Args:
        sampler: cohort law; its ``size`` is the public divisor m.
        rounds: T planned.
        noise_multiplier: σ = std / (C·(1 + rounding)); with ``noise_cohort``, of the simulated system.
        protocol: sound, or published (a paper's procedure as it was released).
        budget: ε that may not be exceeded, if any.
        noise_cohort: cohort of the larger system whose noise is simulated, if any.
        count_noise: σ_b of the adaptive clip's count, if the clip is adaptive.
        private: False for methods that neither clip nor add noise.
        mechanism: a mechanism with its own account; None for the Gaussian sum.
        warnings: one sentence each, for the user.
        selection: what this run was selected by among several, if it was: every ε is then the selection's.
        evaluation: share of 1/σ² that each round's private evaluation takes, if there is one.
    """

    protocol: str = "sound"
    budget: float | None = None
    noise_cohort: float | None = None
    count_noise: float | None = None
    private: bool = True
    mechanism: Accounted | None = None
    warnings: tuple[str, ...] = ()
    selection: tuning.Selection | None = None
    evaluation: float | None = None
    _known: dict[int, tuple[Guarantee, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Guarantees by their number of rounds: a round asks twice, for its ledger line and for what it shows."""

    @property
    def divisor(self) -> float:
        """m: every mean is divided by this public constant, whatever the realised cohort."""
        return float(self.sampler.size)

    @property
    def params(self) -> AccountingParams:
        """What the Gaussian account takes, for the noise that is really added."""
        values = {parameter.name: getattr(self, parameter.name) for parameter in fields(AccountingParams)}
        return AccountingParams(**values | {"noise_multiplier": self.event_multiplier})

    @property
    def account(self) -> Accounted:
        """The account of the rounds' noise: the mechanism's own, or that of the Gaussian sum."""
        return self.mechanism or GAUSSIAN

    @property
    def relation(self) -> str:
        """The neighbouring relation: add-remove or replace-one."""
        return self.mechanism.relation if self.mechanism else super().relation

    @property
    def rounding(self) -> float:
        """s: what the rounding of a float64 sum may add to the clip, as a share of it (``core.rounding``)."""
        return self.account.rounding

    def sensitivity(self, bound: float) -> float:
        """Sensitivity of the computed sum when messages are clipped to ``bound``: C·(1 + s) under add-remove.

        Twice that under replace-one.
        """
        return self.account.sensitivity(self, bound)

    @property
    def event_multiplier(self) -> float:
        """The multiplier of the accounted event: σ, scaled by size/noise_cohort when a larger cohort is simulated."""
        if not self.private:
            return 0.0
        return self.noise_multiplier * (self.sampler.size / self.noise_cohort if self.noise_cohort else 1.0)

    @property
    def count_std(self) -> float | None:
        """σ_b: std of the noise on what a round releases beside the update, scaled to a norm of at most ½ a client.

        That is the adaptive clip's count, or the private evaluation's two sums; None where there is neither.
        """
        return self.count_noise if self.evaluation is None else self.event_multiplier / (2 * self.evaluation**0.5)

    @property
    def effective_multiplier(self) -> float:
        """std / (C·(1 + s)) of the updates' noise: the event's, or σ_Δ if something beside it takes its share."""
        if self.count_std is None or self.event_multiplier == 0:
            return self.event_multiplier
        return split_noise(self.event_multiplier, self.count_std)

    def std(self, bound: float) -> float:
        """Noise std σ·C·(1 + s) on the sum of messages clipped to ``bound``; the only place where it is computed.

        distributed: of the minimum cohort's shares together, each of variance std²/min_cohort; local: of each client.
        Correlated: of Z, which C⁻¹ mixes; the noise of round t has ‖row t of C⁻¹‖ times as much.
        """
        return self.account.std(self, bound)

    def guarantees(self, rounds: int | None = None) -> tuple[Guarantee, ...]:
        """The guarantee towards each adversary after ``rounds`` rounds (default: all of them).

        Raises:
            InputError: trust distributed, and the chance of an aborted round uses up δ.
        """
        count = self.rounds if rounds is None else whole("rounds", rounds)
        if not self.private:
            text = "no clip, no noise: nothing is proven towards anyone"
            return (Guarantee("everyone", text, "add-remove", math.inf if count else 0.0, self.delta, "none"),)
        if count not in self._known:
            selected = self.selection is not None
            self._known[count] = (tuning.guarantee(self, count),) if selected else self.account.guarantees(self, count)
        return self._known[count]

    def at(self, multiplier: float) -> "Plan":
        """Return the plan with another event multiplier."""
        if multiplier == self.event_multiplier:
            return self
        return replace(self, noise_multiplier=multiplier * (self.noise_cohort or self.sampler.size) / self.sampler.size)

    def calibrated(self, epsilon: float) -> "Plan":
        """Return the plan with the least noise for a target ε; with noise_cohort, of the simulated system.

        Raises:
            InputError: no noise reaches it.
        """
        require(self.rounds > 0, "rounds", 0, "at least 1 when privacy.epsilon is given")
        measured = self.simulated() or self
        start = guess(measured.params, epsilon)
        sigma = calibrate(lambda s: replace(measured, noise_multiplier=s).epsilon(), epsilon, start)
        return replace(self, noise_multiplier=sigma)

    def epsilon(self, rounds: int | None = None) -> float:
        """Proven ε after ``rounds`` rounds: the largest over the adversaries; inf where none is finite."""
        return max(guarantee.epsilon for guarantee in self.guarantees(rounds))

    def simulated(self) -> "Plan | None":
        """The plan of the larger system that ``noise_cohort`` simulates: M' = M·noise_cohort/size, the same q and δ."""
        if self.noise_cohort is None or not self.private:
            return None
        # Population, cohort and least cohort grow alike, so that q and the rounds stay what they are.
        factor = self.noise_cohort / self.sampler.size
        minimum = None if self.min_cohort is None else max(1, round(self.min_cohort * factor))
        count = None if self.count_noise is None else self.count_noise * factor
        return replace(
            self, sampler=_scaled(self.sampler, factor), noise_cohort=None, min_cohort=minimum, count_noise=count
        )

    def simulated_epsilon(self, rounds: int | None = None) -> float | None:
        """ε that the simulated larger system would have (a projection); None without noise_cohort."""
        larger = self.simulated()
        return None if larger is None else larger.epsilon(rounds)

    def rounds_within_budget(self, again: int = 0) -> int:
        """The most rounds t ≤ T whose ε(t) stays within the budget; T without a budget.

        again: events charged a second time, beside one per round. With noise_cohort the budget is that of the simulated
        system, for which σ was chosen.
        """
        if self.budget is None or not self.private:
            return self.rounds
        budget, measured = self.budget, self.simulated() or self
        return largest(lambda rounds: measured.epsilon(rounds + again) <= budget, self.rounds)

    def releases(self, shares: int) -> bool:
        """Whether a sum of ``shares`` surviving messages may leave secure aggregation; another round is aborted.

        distributed: the minimum cohort's honest shares must be in it, and no more than a topped-up sum has room for.
        """
        if self.min_cohort is None:
            return True
        # More shares than were planned would make the noise's energy tell the cohort's size.
        most = self.account.most
        return shares - self.colluders >= self.min_cohort and (most is None or shares <= most)

    def draws(self, round: int) -> range:
        """The cohort draws of a round, numbered through the run: one per round, but for votes."""
        return self.account.draws(self, round)

    def records(self, round: int, clip: float) -> list[dict[str, Any]]:
        """The ledger's lines for a round: one for each cohort draw."""
        line = self.record(round, clip)
        return [{**line, "draw": draw} for draw in self.draws(round)] if self.account.several else [line]

    def record(self, round: int, clip: float) -> dict[str, Any]:
        """The ledger's line for one round, JSON-able (inf as None): enough to recompute ε with another library.

        Args:
            round: from 0. clip: the norm bound C of this round's messages.
        """
        line: dict[str, Any] = {
            "round": whole("round", round),
            "mechanism": self.account.name,
            "sampling": self.sampler.name,
            "relation": self.relation,
            "trust": self.trust,
            "clients": self.sampler.clients,
            "cohort": self.sampler.size,
            "q": self.sampler.q,
            "clip": _finite(clip),
            "sensitivity": _finite(self.sensitivity(clip)),
            "std": _finite(self.std(clip)),
            "noise_multiplier": self.event_multiplier,
            "delta": self.delta,
            "accountant": self.accountant,
            "epsilon": _finite(self.epsilon(round + 1)),
        }
        optional = {
            "cohort_max": self.sampler.maximum,
            "cohort_min": self.min_cohort,
            "max_participations": self.max_participations,
            "colluders": self.colluders or None,
            "noise_cohort": self.noise_cohort,
            "rounding": self.rounding or None,
            "count_std": self.count_std,
            "evaluation": self.evaluation,
            "update_multiplier": None if self.count_std is None else self.effective_multiplier,
            "selection": self.selection.record() if self.selection else None,
        }
        line |= {name: value for name, value in optional.items() if value is not None}
        return line | self.account.record(self) | self.account.by_round(self, round)

    def standing(self, entries: Sequence[Mapping[str, Any]], key: str | None = None, start: int = 0) -> "Plan":
        """Return the plan of a run that goes on: where rounds share noise, a ledger says which ones other keys drew."""
        if not isinstance(self.mechanism, ScheduledPlan):
            return self
        return replace(self, mechanism=self.mechanism.standing(entries, key, start))

    def again(self, entries: Sequence[Mapping[str, Any]], round: int | None = None, key: str | None = None) -> int:
        """Return how many more rounds than one each a ledger charges; 0 where ``standing`` counts them.

        round, key: the last round that ``key`` drew. Later ones were released, and will be drawn again with it.
        """
        if isinstance(self.mechanism, ScheduledPlan):
            return 0
        lines = () if round is None else [entry for entry in entries if entry["round"] > round]
        later: dict[int, object] = {entry["round"]: entry.get("key_id") for entry in lines}
        return extra_rounds(entries) + sum(name != key for name in later.values())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _scaled(sampler: Sampler, factor: float) -> Sampler:
    """The same law for a population ``factor`` times as large, with the same q."""
    clients = max(1, round(sampler.clients * factor))
    size = min(float(clients), sampler.q * clients)
    maximum = sampler.maximum and max(math.ceil(size), round(sampler.maximum * factor))
    return make_sampler(sampler.name, clients, max(1, round(size)) if sampler.name == "fixed" else size, maximum)


def build_plan(
    *, rounds: int, noise_multiplier: float | None = None, epsilon: float | None = None,
    noise_cohort: float | None = None, count_noise: float | None = None, adaptive: bool = False, private: bool = True,
    mechanism: Accounted | None = None, noise: str = "independent", bands: int | None = None, momentum: float = 0.0,
    selection: tuning.Selection | None = None, evaluation: float | None = None, **accounting: Any,
) -> Plan:  # fmt: skip
    """The checked plan of a run; σ is calibrated when ``epsilon`` is given instead of ``noise_multiplier``.

    Arguments as in :class:`Plan`; ``accounting`` as in :func:`fedflat.epsilon`, with its defaults. σ_b is m/20 by
    default. A target ε with ``noise_cohort`` is that of the simulated system. noise, bands: kind and bands of
    ``privacy.noise``; momentum: the server's, for which correlated noise is made. selection: as in :class:`Plan`; a
    target ε is then the selection's. evaluation: as in :class:`Plan`.

    Raises:
        InputError: neither or both of noise_multiplier and epsilon; a value out of range; a combination for which
            no bound is known.
    """
    chosen = 1.0 if noise_multiplier is None else noise_multiplier
    # Checked first and without privacy too: a wrong cohort is wrong for every method.
    params = accounting_params(rounds=rounds, noise_multiplier=chosen, **accounting)
    if not private:
        require(selection is None, "privacy.selection", "a method without privacy", "a private method")
        return _without_privacy(params, bool(noise_multiplier) or epsilon is not None or noise != "independent")
    check_target(noise_multiplier, epsilon)
    scheduled = scheduled_plan(params.sampler, rounds, noise, bands, momentum)
    if scheduled is not None:
        _check_scheduled(scheduled, mechanism, params.trust, noise_cohort, adaptive)
        mechanism = scheduled
    if noise_cohort is not None:
        in_range("privacy.noise_cohort", noise_cohort, params.sampler.size)
    plan = Plan(
        **vars(params), budget=epsilon, noise_cohort=noise_cohort, mechanism=mechanism, selection=selection,
        evaluation=evaluation,
    )  # fmt: skip
    if selection is not None:
        tuning.check(plan)
    if plan.rounding:
        _summable(plan.sampler)
    # An abort that uses up δ is refused here, before any data is read.
    plan.params.remaining_delta()  # refuses what cannot be accounted before any work
    if epsilon is not None:
        plan = plan.calibrated(epsilon)
    plan = _with_count_noise(plan, adaptive, count_noise)
    return replace(plan, warnings=tuple(warnings_of(plan)))


def check_target(noise_multiplier: float | None, epsilon: float | None) -> None:
    """Refuse a plan with neither or both of its two targets."""
    if (noise_multiplier is None) == (epsilon is None):
        targets = "neither noise_multiplier nor epsilon" if epsilon is None else "both noise_multiplier and epsilon"
        raise wrong("privacy", targets, "exactly one of the two")


def _check_scheduled(
    scheduled: ScheduledPlan, mechanism: Accounted | None, trust: str, noise_cohort: float | None, adaptive: bool
) -> None:
    """Refuse what the account of a schedule is not proven for."""
    kind = "a schedule" if scheduled.kind == "independent" else f"{scheduled.kind} noise"
    if mechanism is not None:
        raise wrong("algorithm.name", mechanism.name, f"a method whose noise is plain Gaussian, with {kind}")
    hint = "Noise of one round would have to be known to others, or to be another's in the next."
    require(trust == "central", "privacy.trust", trust, f"central with {kind}", hint=hint)
    require(noise_cohort is None, "privacy.noise_cohort", noise_cohort, f"nothing with {kind}")
    varied, hint = adaptive and scheduled.kind != "independent", "The one Gaussian that the run is needs one clip."
    require(not varied, "privacy.clip", "adaptive", f"one constant clip with {kind}", hint=hint)


def _without_privacy(params: AccountingParams, ignored: bool) -> Plan:
    warnings = ["This method neither clips nor adds noise: no privacy guarantee."]
    if ignored:
        warnings.append("privacy.noise_multiplier, epsilon and noise are ignored by a method without privacy.")
    return Plan(**vars(params) | {"noise_multiplier": 0.0}, private=False, warnings=tuple(warnings))


def _summable(sampler: Sampler) -> None:
    """Refuse cohorts that may be larger than the sums whose rounding is accounted for.

    A Poisson cohort of expected size m ≤ n/2 exceeds n = ``MOST`` with a chance below e^(−2·10⁵) (Chernoff).
    """
    # Only laws with a public largest cohort can be bounded without a chance.
    exact = sampler.name in ("fixed", "full", "min-separation")
    largest = sampler.maximum or (sampler.size if exact else min(sampler.clients, 2 * sampler.size))
    if largest > MOST:
        raise wrong("cohort.size", f"{sampler.size:g} of {sampler.clients}", f"cohorts of at most {MOST} clients")


def _with_count_noise(plan: Plan, adaptive: bool, count_noise: float | None) -> Plan:
    if not adaptive:
        require(count_noise is None, "privacy.clip.count_noise", count_noise, "nothing unless the clip is adaptive")
        return plan
    allowed, hint = "a constant clip with privacy.trust: local", "The server would see each client's own bit."
    require(plan.trust != "local", "privacy.clip", "adaptive", allowed, hint=hint)
    if plan.noise_multiplier == 0:
        return replace(plan, count_noise=0.0)
    # A twentieth of the cohort costs next to nothing (Andrew et al. 2021).
    chosen = plan.sampler.size / 20 if count_noise is None else count_noise
    split_noise(plan.event_multiplier, chosen)  # refuses σ ≥ 2σ_b
    return replace(plan, count_noise=float(chosen))


def warnings_of(plan: Plan) -> list[str]:
    """Return what a user is warned of, one sentence each."""
    delta, usual = plan.delta, default_delta(plan.sampler.clients)
    warnings = []
    if delta > usual * (1 + 1e-9):
        warnings.append(
            f"δ = {delta:g} is larger than 0.1/M = {usual:g}: at 1/M, publishing one client's data would meet it."
        )
    if plan.noise_multiplier == 0:
        warnings.append("noise_multiplier is 0: updates are clipped but nothing is proven (ε is infinite).")
    if plan.noise_cohort is not None:
        warnings.append(
            f"noise_cohort: the noise is that of a cohort of {plan.noise_cohort:g}; simulated_epsilon is a projection, "
            "proven_epsilon holds for the run that happened."
        )
    return warnings
