"""Make the privacy statement of a run from its recipe, its ledger and a few public terms.

The run writes it with :func:`stated`; ``fedflat verify`` makes it again with the same function from the files of the
run's folder (:func:`restated`), and compares the two field by field.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from fedflat.assembly.plans import is_public, plan_of
from fedflat.assembly.records import is_seeded, settled
from fedflat.config.method import algorithm_of
from fedflat.config.reading import GIVEN
from fedflat.config.recipe import Recipe
from fedflat.core import Algorithm, ClientState, Phase, RunError, versions
from fedflat.data.clients import GIVEN as PAIRS
from fedflat.data.sources import HELD_OUT
from fedflat.engine.job import SEEN, Job, Outcome, interrupted
from fedflat.methods import noise as noising
from fedflat.methods import published
from fedflat.methods.plans import DDGaussPlan
from fedflat.methods.published import Published
from fedflat.privacy.accounting.curves import schedule_epsilon
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.plan import Plan
from fedflat.privacy.statement import PRIORS, TEXTS, least_noise, rounds_charged, statement

Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Terms:
    """Public facts that a statement needs and that neither the recipe nor the ledger's events show.

    The ledger's first line carries them. method: the packaged one, or, of the user's own one, a stand-in with what the
    account asks for. left_out: how many clients became public test data. uncompared: whether test data of one's own do
    not name their users. identified: whether the user's own code can be told apart from other code. dimension: d.
    tensors: how many tensors are shared. fedflat: the version that began the run.
    """

    method: Algorithm
    identified: bool = True
    prior: str = "unknown"
    held_out: bool = False
    left_out: int = 0
    uncompared: bool = False
    deployment: bool = False
    dimension: int = 1
    tensors: int = 1
    fedflat: str = ""

    @classmethod
    def of(cls, recipe: Recipe, job: Job, *, deployment: bool = False) -> "Terms":
        """Return the terms of a run that is about to begin."""
        method, layout = job.parts.algorithm, job.parts.layout
        return cls(
            method, identified=job.identity.method is not None, prior=prior_of(recipe, job.problem.pristine),
            held_out=held_out(method, recipe.data.dataset, job.data.name), left_out=job.data.left_out,
            uncompared=not is_public(recipe.data.dataset) and job.data.unknown, deployment=deployment,
            dimension=layout.dimension, tensors=layout.shared, fedflat=versions(("fedflat",))["fedflat"],
        )  # fmt: skip

    @classmethod
    def read(cls, recipe: Recipe, record: Mapping[str, Any]) -> "Terms":
        """Return the terms in a ledger's record; a packaged method comes from its code."""
        method = _stand_in(record) if own_method(recipe) else algorithm_of(recipe)
        return cls(method, **{name: record[name] for name in ({field.name for field in fields(cls)} & record.keys())})

    def record(self) -> dict[str, Any]:
        """Return what the ledger keeps."""
        method, others = self.method, {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {
            "algorithm": method.name, "kind": method.kind, "private": method.private, "vectors": method.vectors,
            "personal": method.head is not None, "finetuned": method.finetune is not None,
            "client_state": [state.name for state in method.client_state], **others,
        }  # fmt: skip


def _stand_in(record: Mapping[str, Any]) -> Algorithm:
    """Return a method with the properties in a ledger's record, whose own functions are never called."""
    return Algorithm(
        record["algorithm"],
        private=record.get("private", True),
        vectors=record.get("vectors", 1),
        transforms=(_never_called,) if record.get("vectors", 1) > 1 else (),
        head=("*",) if record.get("personal") else None,
        finetune=Phase() if record.get("finetuned") else None,
        client_state=tuple(ClientState(name, _never_called) for name in record.get("client_state", ())),
        kind=record.get("kind", "update"),
    )


def _never_called(*_: Any) -> Any:
    raise TypeError("a stand-in for a method's own function is never called")


def own_method(recipe: Recipe) -> bool:
    """Return whether the recipe's method is the user's own code, which reading a folder must not run."""
    return ":" in recipe.algorithm.name or recipe.algorithm.options.get("source") == GIVEN


def prior_of(recipe: Recipe, module: nn.Module | None) -> str:
    """Return what shaped the weights before any client's data did: a key of ``privacy.statement.PRIORS``, and which."""
    by_user = recipe.model.name == GIVEN or ":" in recipe.model.name
    members = {**vars(type(module)), **vars(module)} if by_user and module is not None else {}  # never what it inherits
    prior = members.get("prior", "unknown") if by_user else getattr(module, "prior", "none")
    return prior if str(prior).partition(": ")[0] in PRIORS else "unknown"


def held_out(method: Algorithm, dataset: str, loaded: str) -> bool:
    """Return whether the examples a method takes for public were clients' own (``data.public``): held out of their
    data.
    """
    source, in_python = method.options.get("public"), loaded == PAIRS
    if source is None and method.kind == "votes" and not in_python and is_public(dataset):
        source = HELD_OUT
    return source == HELD_OUT or (source is not None and source == dataset and not in_python)


def state_privacy(recipe: Recipe, job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return the privacy statement of a run so far."""
    folder = job.folder
    history = outcome.history or ([] if folder is None else folder.released())
    return stated(
        recipe, settled(recipe, job.parts, job.data.clients, job.problem.pristine), job.parts.plan,
        Terms.of(recipe, job, deployment=folder is not None and folder.deployment), rounds=outcome.state.round,
        entries=outcome.entries, tested=tested(history), seen=outcome.seen,
    )  # fmt: skip


def tested(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether figures on public test data were released."""
    # Others are null in a file.
    figures = [value for row in metrics for name, value in row.items() if name.startswith("test_")]
    return any(isinstance(value, (int, float)) and abs(value) < math.inf for value in figures)


def plan_again(recipe: Recipe, terms: Terms) -> Plan:
    """Return the plan of a run's files: of its recipe and of what it began with."""
    plan = plan_of(recipe, terms.method, recipe.data.clients or 0, terms.dimension)
    return published.with_tensors(plan, terms.tensors)


def restated(
    recipe: Recipe, content: Mapping[str, Any], terms: Terms, *, rounds: int, entries: Entries, public_data: bool
) -> dict[str, Any]:
    """Return the statement made again from a run's files. content: of its recipe.yaml, which is settled.

    Raises:
        InputError: the recipe is no settled one. RunError: this machine makes another factorisation of the noise.
    """
    plan = plan_again(recipe, terms)
    digest = plan.mechanism.factor.digest if isinstance(plan.mechanism, ScheduledPlan) else None
    if digest is not None and entries and entries[0].get("factor", digest) != digest:
        raise RunError("the noise's factorisation comes out otherwise on this machine, and with it the sentences on it")
    base = {key: value for key, value in content.items() if key != "versions"}
    if isinstance(base.get("model"), Mapping) and recipe.model.name == GIVEN:  # as it was written once
        base["model"] = {key: value for key, value in base["model"].items() if key not in ("class", "file")}
    return stated(recipe, base, plan, terms, rounds=rounds, entries=entries, tested=public_data)


def stated(
    recipe: Recipe, base: Mapping[str, Any], plan: Plan, terms: Terms, *, rounds: int, entries: Entries,
    tested: bool, seen: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the statement of ``rounds`` finished rounds whose ledger has ``entries``. base: the settled recipe."""
    plan = plan.standing(entries)
    # Where it ran changes nothing, and whoever knows a simulation's seed knows its noise.
    public = {key: value for key, value in base.items() if key not in ("engine", "seed")}
    facts = {**public, **_facts(recipe, terms, tested), **noising.facts(recipe, plan)}
    charged = rounds_charged(rounds, entries)
    warnings: list[str] = []
    if terms.deployment:
        more, warnings = _of_deployment(plan, rounds, entries)
        facts |= more
    asked = plan.mechanism.stated(plan, charged) if isinstance(plan.mechanism, Published) else {}
    record = statement(
        plan, rounds_run=rounds, algorithm=terms.method.name, facts=facts, entries=entries, warnings=warnings,
        seeded=is_seeded(recipe) and terms.identified and not terms.deployment, **asked,
    )  # fmt: skip
    if not terms.deployment:
        last = min(plan.rounds, plan.rounds_within_budget(plan.again(entries)))
        record["reasons"] += interrupted(plan, record["rounds_charged"], last)
    record["warnings"] += [SEEN] if seen else []
    return record


def _facts(recipe: Recipe, terms: Terms, tested: bool) -> dict[str, Any]:
    """Return the public facts that the statement puts into sentences of its own."""
    method = terms.method
    facts = {
        "clip": recipe.privacy.model_dump(exclude_none=True)["clip"] if method.private else None,
        "secure": recipe.privacy.secure_rng, "own_clients": not is_public(recipe.data.dataset),
        "personal": method.head is not None, "finetuned": method.finetune is not None, "public_data": tested,
        "prior": terms.prior, "held_out": terms.held_out,
    }  # fmt: skip
    rare = {
        "client_state": [state.name for state in method.client_state],
        "unidentified": not terms.identified,
        "left_out": terms.left_out,
        "uncompared": terms.uncompared,
    }
    return facts | {name: value for name, value in rare.items() if value}


def _of_deployment(plan: Plan, rounds: int, entries: Entries) -> tuple[dict[str, Any], list[str]]:
    """Return what a deployment's statement says besides, and its warning: what real check-ins mean for the sampling."""
    cohort_known = cohort_known_epsilon(plan, rounds, entries)
    cohort_chosen = cohort_chosen_epsilon(plan, rounds, entries)
    check_ins = TEXTS["check_ins"]["public" if plan.sampler.name == "min-separation" else "secret"]
    facts = {"simulation": False, "deployment": True, "check_ins": check_ins, "epsilon_cohort_known": cohort_known}
    facts["epsilon_cohort_chosen"] = cohort_chosen if math.isfinite(cohort_chosen or 0.0) else None
    figures = [("known", cohort_known), ("chosen", cohort_chosen)]
    parts = [TEXTS["towards"][who].format(epsilon=e, delta=plan.delta) for who, e in figures if e is not None]
    return facts, [" ".join([check_ins, *parts])] if plan.private else []


def cohort_known_epsilon(plan: Plan, rounds: int, entries: Entries) -> float | None:
    """ε of the models towards somebody who also learns every cohort: exact Gaussian over Bin(T, q) participations.

    None where the plan's own figure holds towards them already (local, distributed), or nothing is proven.
    """
    mechanism = plan.standing(entries).mechanism
    if isinstance(mechanism, ScheduledPlan) and mechanism.chance is not None and plan.event_multiplier > 0:
        return mechanism.known_epsilon(plan, plan.rounds)
    if not plan.private or plan.event_multiplier == 0 or plan.trust != "central" or plan.mechanism is not None:
        return None
    charged = rounds_charged(rounds, entries)
    sigma = least_noise(plan, entries) / plan.params.factor
    return schedule_epsilon(charged, plan.sampler.q, sigma, plan.delta) if charged else 0.0


def cohort_chosen_epsilon(plan: Plan, finished: int, entries: Entries) -> float | None:
    """ε towards a lying server that asks a client in all T rounds, whatever cohorts it draws and lines it writes.

    distributed (ddgauss): T sums of the minimum cohort's shares, no amplification; inf where none is proven. local: T
    answers, if fewer rounds are charged. None elsewhere. T, not the rounds charged: what a client counts is its own
    answers, T of them; the ledger is the server's.
    """
    charged = rounds_charged(finished, entries)
    rounds = max(plan.rounds, charged)
    if plan.trust == "local" and plan.private and plan.event_multiplier > 0:
        return plan.epsilon(rounds) if rounds > charged else None
    if not isinstance(plan.mechanism, DDGaussPlan):
        return None
    return plan.mechanism.account(plan).epsilon(rounds, "server", amplification=False)
