"""The privacy statement: what is promised, to whom, on what grounds, and what is not promised.

One dictionary (``privacy.json``). It follows the reporting items of Ponomareva et al.
2023, "How to DP-fy ML", Section 5.3 (setting, instantiation of the definition, accounting, verifiability); each item
has a stable key under ``checklist``. A claimed figure is never shown without the proven one (:func:`headline`).
"""

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fedflat.core import InputError, durable, whole, writing, wrong
from fedflat.privacy import tuning
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import extra_rounds, plain_json
from fedflat.privacy.plan import Plan

SECOND_DELTA = 1e-5
TEXTS: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("statement.yaml").read_text("utf-8"))
"""Every sentence of a statement, by the fact that asks for it."""
PRIORS: dict[str, str] = TEXTS["prior"]
"""What shaped the model before any client's data did, which no ε covers."""
SEEDED: str = TEXTS["caution"]
FALSE_POSITIVES = 0.01
"""The share of wrong accusations at which an attacker's right ones are bounded."""


def rounds_charged(rounds_run: int, entries: Sequence[Mapping[str, Any]]) -> int:
    """Rounds to compose: those run, or recorded although never released, and each further event of a round."""
    # A round with a line but no release still counts: its noise may have been seen.
    return max(whole("rounds_run", rounds_run), len({entry["round"] for entry in entries})) + extra_rounds(entries)


def least_noise(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> float:
    """The least multiplier that the plan or any ledger line says: that of all charged rounds, which bounds them.

    A run's own lines all have its plan's; those of a published procedure, which are about one message, name it apart.
    """
    name = "published_noise_multiplier" if plan.protocol == "published" else "noise_multiplier"
    return min([plan.event_multiplier, *(float(entry[name] or 0.0) for entry in entries if name in entry)])


def statement(
    plan: Plan, *, rounds_run: int, algorithm: str, facts: Mapping[str, Any], seeded: bool,
    warnings: Sequence[str] = (), entries: Sequence[Mapping[str, Any]] = (), claimed: float | None = None,
    proven: float | None = None, reasons: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The statement of a run, as plain JSON values (an infinite or missing ε is ``None`` with a reason).

    ``facts`` are the public facts of the recipe, kept as given; those known here: ``clip``, ``simulation`` (default
    true), ``secure``, ``personal``, ``finetuned``, ``client_state``, ``held_out``, ``left_out``, ``uncompared``,
    ``prior`` (a key of :data:`PRIORS`, with which one after a colon), ``mechanism`` (a sentence), ``own_clients``
    (false: published data) and ``paper_items`` (numbers of those in statement.yaml). ``seeded``: whether cohorts and
    noise followed the run's seed, and not entropy of the operating system.
    Under ``protocol: published`` the caller gives the paper's ``claimed`` ε and what is ``proven`` for what ran;
    under ``sound`` both are the plan's. ``entries`` are the ledger's lines.
    """
    charged = rounds_charged(rounds_run, entries)
    spent, count = plan.at(least_noise(plan, entries)), charged
    shared: list[str] = []
    if isinstance(plan.mechanism, ScheduledPlan):
        # Rounds share one account: that of the planned run, and of each further key.
        plan = spent = plan.standing(entries)
        count, keys = max(rounds_run, plan.rounds_within_budget()), len({entry.get("key_id") for entry in entries})
        shared = _sentences("reasons", {"keys": keys > 1, "planned": rounds_run < count}, keys=keys, planned=count)
    guarantees, refused = _guarantees(spent, count, proven)
    # The claimed figure is the paper's; it never stands for what is proven.
    if plan.protocol == "sound":
        claimed = proven = max((guarantee.epsilon for guarantee in guarantees), default=math.inf)
    finite = proven is not None and math.isfinite(proven)
    again = Counter(str(entry["reason"]) for entry in entries if "reason" in entry)
    simulated = spent.simulated_epsilon(charged) if plan.private and plan.noise_cohort else None
    body = {
        "algorithm": algorithm,
        "protocol": plan.protocol,
        "unit": "client: all data that one client holds, over the whole run",
        "adjacency": _adjacency(guarantees),
        "trust": plan.trust,
        "trust_model": TEXTS["trust"]["published" if plan.protocol == "published" else plan.trust],
        "adversaries": [dataclasses.asdict(guarantee) for guarantee in guarantees],
        "sampling": _sampling(plan, facts),
        "mechanism": _mechanism(spent, facts),
        **({"prior": prior(facts["prior"])} if "prior" in facts else {}),
        "randomness": "seeded" if seeded else "secret",
        **({"caution": SEEDED} if seeded and finite else {}),
        "rounds": rounds_run,
        "rounds_charged": charged,
        "epsilon": proven,
        "delta": plan.delta,
        "claimed_epsilon": claimed,
        "proven_epsilon": proven,
        "simulated_epsilon": simulated,
        "epsilon_at_1e-5": _second(spent, count),
        "accountant": plan.accountant,
        **({"selection": plan.selection.record()} if plan.selection else {}),
        "reasons": [
            *reasons, *shared, *_selected(plan), *refused, *_reasons(spent, finite, charged - rounds_run),
            *(TEXTS["reasons"]["again"].format(count=count, reason=reason) for reason, count in again.items()),
        ],
        "not_covered": not_covered(plan, facts, seeded=seeded),
        "noise_source": TEXTS["noise_source"][_noise_source(facts, seeded)],
        "floating_point": TEXTS["floating_point"]["secure" if facts.get("secure") else "plain"],
        "rounding": _rounding(plan, entries),
        "paper_items": [{"item": item, "text": TEXTS["paper_items"][item]} for item in facts.get("paper_items", ())],
        "warnings": [*plan.warnings, *warnings],
        "facts": dict(facts),
    }  # fmt: skip
    clean: dict[str, Any] = plain_json("privacy statement", body)
    return {**clean, "checklist": checklist(clean)}


def _sentences(section: str, conditions: Mapping[str, object], **numbers: Any) -> list[str]:
    """Return the sentences of a section of statement.yaml whose conditions hold, with their numbers."""
    return [TEXTS[section][name].format(**numbers) for name, holds in conditions.items() if holds]


def _guarantees(plan: Plan, count: int, proven: float | None) -> tuple[Sequence[Any], list[str]]:
    """Return the guarantees, none of a published procedure without a bound, and why there are none where one is due."""
    published = plan.protocol == "published"
    unbounded = plan.mechanism is None or proven is None or not math.isfinite(proven)
    if not plan.private or (published and unbounded):
        return (), []
    # Events charged beyond the plan can use up δ (aborted rounds).
    try:
        return plan.guarantees(count), []
    except InputError as error:
        return (), [str(error)]


def prior(fact: str) -> str:
    """Return the sentence for a key of :data:`PRIORS`, with what a fact says after a colon.

    >>> prior("public natural data: resnet-50").endswith("taken as public (resnet-50)")
    True
    """
    key, _, which = fact.partition(": ")
    return f"{PRIORS[key]} ({which})" if which else PRIORS[key]


def _selected(plan: Plan) -> list[str]:
    if plan.selection is None:
        return []
    one_trial = tuning.alone(plan).epsilon()
    return _sentences("reasons", {"selection": True}, mean=plan.selection.mean, alone=one_trial)


def _reasons(plan: Plan, finite: bool, extra: int) -> list[str]:
    """Return why there is no finite ε, and what the figures beside it mean."""
    noised, published = plan.event_multiplier != 0, plan.protocol == "published"
    conditions = {
        "published": published and not finite, "not_private": not plan.private,
        "no_noise": plan.private and not noised, "not_finite": noised and not published and not finite,
        "noise_cohort": plan.noise_cohort, "extra": extra > 0,
    }  # fmt: skip
    return _sentences("reasons", conditions, extra=extra)


def _adjacency(guarantees: Sequence[Any]) -> str:
    kinds = dict.fromkeys(str(g.relation) for g in guarantees)
    return "; ".join(TEXTS["adjacency"].get(kind.lower().replace("-", "_"), kind) for kind in kinds) or "none proven"


def _sampling(plan: Plan, facts: Mapping[str, Any]) -> str:
    sampler, keeps = plan.sampler, facts.get("personal") or facts.get("client_state")
    amplified = plan.protocol == "sound" and sampler.name == "poisson" and plan.trust != "local"
    more = TEXTS["keeps"] if keeps and amplified else ""
    law, q = TEXTS["sampling"][sampler.name], sampler.size / sampler.clients
    return f"{law} (M = {sampler.clients}, expected cohort m = {sampler.size:g}, q = {q:g}){more}"


def _mechanism(plan: Plan, facts: Mapping[str, Any]) -> str:
    texts = TEXTS["mechanism"]
    if not plan.private:
        return str(texts["none"])
    name = plan.mechanism.name if plan.mechanism else "gaussian"
    text = str(facts.get("mechanism", texts.get(name, name)))
    if name == "correlated":
        return f"{text} (noise multiplier σ = {plan.event_multiplier:g} of that mechanism; clip {facts.get('clip')})"
    clip = f"; clip {facts['clip']}" if "clip" in facts else ""
    allowed = f"·(1 + {plan.rounding:.3g}), which allows for rounding" if plan.rounding else ""
    more = TEXTS["scored"].format(share=plan.evaluation) if plan.evaluation else ""
    return f"{text} (noise multiplier σ = {plan.event_multiplier:g} = noise std / clip{allowed}{clip}){more}"


def _second(plan: Plan, count: int) -> float | None:
    """Return ε at δ = 10⁻⁵ as well: at δ near 1/M a guarantee can be met by publishing somebody's data."""
    if plan.private and plan.protocol == "sound":
        with contextlib.suppress(InputError):  # e.g. the chance of an aborted round alone exceeds 10⁻⁵
            return dataclasses.replace(plan, delta=SECOND_DELTA).epsilon(count)
    return None


def _noise_source(facts: Mapping[str, Any], seeded: bool) -> str:
    if seeded:
        return "seed"
    if facts.get("unidentified"):
        return "unidentified"
    return "secret" if facts.get("simulation", True) else "deployment"


def _rounding(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Return s, by which an accounted sensitivity exceeds C; None where neither the ledger nor the plan names one."""
    named = [float(entry["rounding"]) for entry in entries if entry.get("rounding") is not None]
    # The ledger is what was drawn; the plan only speaks where there is no line yet.
    share = max(named, default=plan.rounding)
    return share if plan.private and share else None


def not_covered(plan: Plan, facts: Mapping[str, Any], *, seeded: bool) -> list[str]:
    """Return what the guarantee says nothing about, one sentence each."""
    mechanism = plan.mechanism
    # The account of a public schedule covers clients whose turns stay.
    schedule = mechanism if isinstance(mechanism, ScheduledPlan) and mechanism.relation == "zero-out" else None
    conditions = {
        "untuned": not plan.selection, "selected": plan.selection, "side_channels": True, "public": True,
        "groups": True, "seed": seeded, "rerun": seeded, "private": facts.get("simulation", True),
        "pretrained": "public natural data" in str(facts.get("prior")), "held_out": facts.get("held_out"),
        "left_out": facts.get("left_out"), "uncompared": facts.get("uncompared"),
        "personal": facts.get("personal") or facts.get("finetuned"), "client_state": facts.get("client_state"),
        "enrolled": schedule, "floating_point": not facts.get("secure"),
        "server": plan.trust == "central" and plan.protocol == "sound", "aggregation": plan.trust == "distributed",
        "shares": plan.trust == "distributed" and plan.mechanism is None,
    }  # fmt: skip
    # Exchanging data moves two columns where emptying a slot moves one.
    exchanged = schedule and _number(schedule.epsilon(plan, plan.rounds_within_budget(), moved=2.0))
    return _sentences("not_covered", conditions, left_out=facts.get("left_out"), delta=plan.delta, epsilon=exchanged)


def is_seeded(statement: Mapping[str, Any]) -> bool:
    """Return whether a statement's noise follows the run's seed, so that its ε is only that of the mechanism."""
    old = statement.get("proven_epsilon") is not None and str(statement.get("noise_source")).startswith("simulation")
    return bool(statement.get("caution")) or old


def refuse_seeded(where: str, statement: Mapping[str, Any]) -> None:
    """Refuse to hand over a run on clients of one's own whose noise can be drawn again from its seed.

    Raises:
        InputError: it is one.
    """
    if is_seeded(statement) and (statement.get("facts") or {}).get("own_clients", True):
        hint = "Its noise can be drawn again. Train once more with privacy.randomness: secret."
        raise wrong(where, "a run on clients of one's own with privacy.randomness: seeded", "a secret one", hint=hint)


def checklist(body: Mapping[str, Any]) -> dict[str, str]:
    """The reporting items of Ponomareva et al. 2023, Section 5.3, each a sentence under a stable key."""
    items = TEXTS["checklist"] | (TEXTS["checklist_of_a_selection"] if "selection" in body else {})
    return {item: text.format(**body, headline=headline(body)) for item, text in items.items()}


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def true_positives(epsilon: float, delta: float) -> float:
    """Return min(1, e^ε·0.01 + δ): no attacker has more true positives at 1 % false positives, whatever they know."""
    return min(1.0, math.exp(min(epsilon, 700.0)) * FALSE_POSITIVES + delta)


def headline(statement: Mapping[str, Any]) -> str:
    """The one line that may stand for the statement; it never gives the claimed figure without the proven one."""
    at = f"at δ = {statement['delta']:g}"
    if statement["protocol"] == "published":
        claimed, proven = _number(statement["claimed_epsilon"]), _number(statement["proven_epsilon"])
        whose = ", of the mechanism" if statement.get("caution") else ""
        return f"claimed ε = {claimed} {at}, proven ε = {proven} (published procedure{whose})"
    simulated = statement["simulated_epsilon"]
    tail = "" if simulated is None else f"; ε = {_number(simulated)} for the simulated larger population"
    whose = " of the mechanism" if statement.get("caution") else ""
    return f"proven ε{whose} = {_number(statement['proven_epsilon'])} {at}{tail}"


def checksum(statement: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a statement without its own checksum."""
    body = {key: value for key, value in statement.items() if key != "checksum"}
    return durable.digest_of_json(body)


def is_whole(path: Path) -> bool:
    """Whether a statement's file has the checksum of what it says."""
    try:
        statement = json.loads(path.read_bytes())
        return bool(statement["checksum"] == checksum(statement))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def write(path: str | Path, statement: Mapping[str, Any], run: str = "", weights: str = "") -> None:
    """Write ``privacy.json`` so that a reader sees the old or the new one, never half. Raises ``RunError``.

    It ends with the run's id, so that another run's with the same ε cannot stand for it, with the SHA-256 of the
    released weights that it is about, and with its own checksum.
    """
    path = Path(path)
    ids = {name: value for name, value in (("run", run), ("weights", weights)) if value}
    body = plain_json("privacy statement", {**statement, **ids})
    text = json.dumps({**body, "checksum": checksum(body)}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with writing(path, "the privacy statement could not be written"):
        durable.replace(path, text, mode=0o644)
