"""What a deployment may claim: its privacy statement, and the figures towards those who know or choose the cohorts."""

from __future__ import annotations

import math
from typing import Any

from fedflat.engine.train import Job, Outcome
from fedflat.federation.task import Task
from fedflat.privacy.correlated import ScheduledPlan

CHECK_INS = (
    "The cohort is drawn by the server from the roster of registered clients, connected or not; a client that does "
    "not answer counts as a zero vector. So a client takes part with probability at most q, whatever decides who is "
    "connected, and the sampling law holds towards everybody who does not learn the cohort. Not towards those who do: "
    "who runs the SuperLink, who watches the network, and the client itself."
)
TURNS = (
    "Clients take turns as they come: of those who are connected and whose last turn is far enough back, the server "
    "asks those that have waited longest, and keeps each one's last turn on disk. A client that does not answer counts "
    "as a zero vector. Nobody's participation is secret, so this holds towards those who see it too. It counts on "
    "clients connecting whatever their data."
)


def deployment_statement(task: Task, job: Job, outcome: Outcome, *, tested: bool = False) -> dict[str, Any]:
    """The privacy statement of a deployment: no simulation, OS entropy, and what real check-ins mean for the
    sampling. tested: the run had a public test set, though this job has none.
    """
    from fedflat.assembly.records import settled, stated_facts
    from fedflat.methods.noise import facts as noise_facts
    from fedflat.privacy.statement import statement

    plan = job.parts.plan
    known, chosen = cohort_known_epsilon(job, outcome), cohort_chosen_epsilon(job, outcome)
    facts = settled(task.recipe, job.parts, job.data.clients, job.problem.pristine) | stated_facts(task.recipe, job)
    check_ins = TURNS if plan.sampler.name == "min-separation" else CHECK_INS
    facts |= noise_facts(task.recipe, plan) | {"simulation": False, "deployment": True, "check_ins": check_ins}
    facts["public_data"] = bool(facts.get("public_data")) or tested
    facts |= {"epsilon_cohort_known": known, "epsilon_cohort_chosen": chosen if math.isfinite(chosen or 0.0) else None}
    return statement(
        plan,
        rounds_run=outcome.state.round,
        algorithm=job.parts.algorithm.name,
        facts=facts,
        key_source="os-entropy",
        entries=outcome.entries,
        warnings=[check_ins + _towards(known, chosen, plan.delta)] if plan.private else (),
    )


def cohort_known_epsilon(job: Job, outcome: Outcome) -> float | None:
    """ε of the models towards somebody who also learns every cohort: exact Gaussian over Bin(T, q) participations.

    None where the plan's own figure holds towards them already (local, distributed), or nothing is proven.
    """
    from fedflat.privacy.accounting.steps import Step, steps_epsilon
    from fedflat.privacy.statement import multipliers, rounds_charged

    plan = job.parts.plan
    own = plan.standing(outcome.entries).mechanism
    if isinstance(own, ScheduledPlan) and own.chance is not None and plan.event_multiplier > 0:
        return own.known_epsilon(plan, plan.rounds)
    if not plan.private or plan.event_multiplier == 0 or plan.trust != "central" or plan.mechanism is not None:
        return None
    rounds = rounds_charged(outcome.state.round, outcome.entries)
    spent = multipliers(plan, outcome.entries, rounds) if rounds else {}
    return steps_epsilon(
        {Step("known", plan.sampler.q, s / plan.params.factor): n for s, n in spent.items()}, plan.delta
    )


def cohort_chosen_epsilon(job: Job, outcome: Outcome) -> float | None:
    """ε towards a lying server that asks a client in all T rounds, whatever cohorts it draws and lines it writes.

    distributed (ddgauss): T sums of the minimum cohort's shares, no amplification; inf where none is proven. local: T
    answers, if fewer rounds are charged. None elsewhere. T, not the rounds charged: what a client counts is its own
    answers, T of them; the ledger is the server's.
    """
    from fedflat.methods.ddgauss.plan import DDGaussPlan
    from fedflat.privacy.statement import rounds_charged

    plan = job.parts.plan
    charged = rounds_charged(outcome.state.round, outcome.entries)
    rounds = max(plan.rounds, charged)
    if plan.trust == "local" and plan.private and plan.event_multiplier > 0:
        return plan.epsilon(rounds) if rounds > charged else None
    if not isinstance(plan.mechanism, DDGaussPlan):
        return None
    return plan.mechanism.account(plan).epsilon(rounds, "server", amplification=False)


def _towards(known: float | None, chosen: float | None, delta: float) -> str:
    """The figures in words; nothing where there is none."""
    text = ""
    if known is not None:
        text += f" Towards them, if they are not the trusted server: ε = {known:.4g} at δ = {delta:g}."
    if chosen is not None:
        text += " The server's figure counts on its asking and charging as agreed: "
        text += f"one that asks a client in every planned round learns of it at ε = {chosen:.4g}, δ = {delta:g}."
    return text
