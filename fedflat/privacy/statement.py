"""The privacy statement: what is promised, to whom, on what grounds, and what is not promised.

One dictionary (``privacy.json``). It follows the reporting items of Ponomareva et al.
2023, "How to DP-fy ML", Section 5.3 (setting, instantiation of the definition, accounting, verifiability); each item
has a stable key under ``checklist``. A claimed figure is never shown without the proven one (:func:`headline`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedflat.core import durable
from fedflat.core.checks import InputError, RunError, one_of, whole
from fedflat.privacy import tuning
from fedflat.privacy.compare import SEEDED
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import extra_rounds, plain_json
from fedflat.privacy.plan import Plan

SECOND_DELTA = 1e-5

# Where the papers' released procedures leave their formula (docs/specification.md), for protocol "published".
PAPER_ITEMS: dict[int, str] = {
    1: "Each tensor is clipped to C on its own: the whole update has sensitivity C·√L for L tensors.",
    2: "Each client clips at the median of its own layer norms: nothing bounds the sensitivity.",
    3: "Each client masks after adding its noise share: noise is only where a mask, which depends on data, is 1.",
    4: "Updates are weighted by data sizes: the sensitivity depends on the sizes of all clients.",
    5: "Fixed-size cohorts are drawn from the round number: the schedule is public and amplifies nothing.",
    6: "Local steps follow each client's data size, and so does the direction that is added back to its update.",
    7: "The server sees each update with its share of the noise only: towards it the multiplier is σ/√m.",
    8: "Batch-norm running statistics are averaged unclipped: a release of data statistics.",
    9: "δ = 1/M: publishing one random client's data meets it.",
    10: "Thresholds and rates were searched on the same clients: that search is not counted.",
}

TRUST: dict[str, str] = {
    "central": "The server is trusted: it sees each clipped update and adds the noise.",
    "distributed": "Clients add noise shares and only their sum is revealed (secure aggregation).",
    "local": "Nobody is trusted: each client adds its noise before it sends its update.",
}
TRUST_PUBLISHED = "Each client adds its own share of the noise; the server sees each noised message."
ADJACENCY: dict[str, str] = {
    "add_remove": "add-remove (zero-out): two populations differ in one client, whose slot contributes nothing in one",
    "zero_out": "zero-out in place: two populations differ in one client, whose turns come and stay empty in one",
    "replace_one": "replace-one: two populations differ in the whole data of one client",
}
PRIORS: dict[str, str] = {
    "none": "none: first weights drawn at random",
    "random process": "random process: a frozen body made from synthetic images; nobody's data shaped it",
    "public natural data": "public natural data: first weights, or a frozen body, were trained on data taken as public",
    "earlier run": "an earlier run, whose released model this one goes on from; what that cost comes on top",
    "unknown": "unknown: first weights, or the code that makes them, were given by the user",
}
"""What shaped the model before any client's data did, which no ε covers."""
MECHANISMS: dict[str, str] = {
    "gaussian": "Gaussian noise on the sum of clipped updates, divided by the public expected cohort.",
    "ddgauss": "Discrete Gaussian shares on clipped, rotated and rounded updates, summed modulo 2^bits.",
    "ae-dpfl": "Gaussian noise on the cohort's votes for public examples; the student is trained on their arg-max.",
}
START = (
    " Round 0 is one release of class sums with a clip of its own, {clip:g}; its share of the budget, the sum of 1/σ² "
    "over the planned rounds, was fixed at {share:g}."
)
SCORED = (
    " Each round also releases the sums of its clients' accuracies and of their number, with Gaussian noise that is "
    "joined with the update's in σ: {share:g} of 1/σ² is theirs."
)
KEEPS = (
    "; clients keep heads or states between rounds, and amplification still holds because one client's coin tells "
    "nothing about another's"
)
SAMPLING: dict[str, str] = {
    "poisson": "Poisson: each client takes part in a round independently with probability q; the draw is secret.",
    "truncated": "Poisson with a cap on the cohort: clients over the cap are dropped at random; the draw is secret.",
    "fixed": "A cohort of fixed size, drawn without replacement in each round.",
    "full": "Everybody takes part in every round.",
    "min-separation": "A public schedule: rounds of one client are a fixed number apart. It hides nobody.",
    "cyclic-poisson": "Groups take turns; each client of the round's group takes part by its own secret coin.",
    "round-number": "A cohort of fixed size, drawn from the round number: a public schedule, which amplifies nothing.",
}


UNTUNED = "The choice of hyper-parameters on these clients (clip, rates, method): each further run spends its own ε."


def rounds_charged(rounds_run: int, entries: Sequence[Mapping[str, Any]]) -> int:
    """Rounds to compose: those run, or recorded although never released, and each further event of a round."""
    # A round with a line but no release still counts: its noise may have been seen.
    recorded = {entry["round"] for entry in entries}
    return max(whole("rounds_run", rounds_run), len(recorded)) + extra_rounds(entries)


def multipliers(plan: Plan, entries: Sequence[Mapping[str, Any]], charged: int) -> dict[float, int]:
    """The charged rounds by the multiplier that their ledger lines say; those without a line have the least.

    Under a mechanism with its own account all have the least. A run's own lines all have its plan's.
    """
    said = [float(entry["noise_multiplier"] or 0.0) for entry in entries if "noise_multiplier" in entry]
    least, found = min([plan.event_multiplier, plan.at_round(0).event_multiplier, *said]), Counter(said)
    # Rounds without a line are taken to have had the least noise that any line names.
    rest = charged - found.total()
    if plan.mechanism or not found or rest < 0:
        return {least: charged}
    return found | Counter({least: found[least] + rest}) if rest else found


def statement(
    plan: Plan,
    *,
    rounds_run: int,
    algorithm: str,
    facts: Mapping[str, Any],
    key_source: Literal["seed", "os-entropy"],
    warnings: Sequence[str] = (),
    entries: Sequence[Mapping[str, Any]] = (),
    claimed: float | None = None,
    proven: float | None = None,
    reasons: Sequence[str] = (),
) -> dict[str, Any]:
    """The statement of a run, as plain JSON values (an infinite or missing ε is ``None`` with a reason).

    ``facts`` are the public facts of the recipe, kept as given; those known here: ``clip``, ``simulation`` (default
    true), ``secure``, ``personal``, ``finetuned``, ``client_state``, ``held_out``, ``left_out``, ``prior`` (a key of
    :data:`PRIORS`, with which one after a colon), ``mechanism`` (a sentence), ``own_clients`` (false: published data)
    and ``paper_items`` (numbers of :data:`PAPER_ITEMS`). ``key_source``: where cohorts and noise came from.
    Under ``protocol: published`` the caller gives the paper's ``claimed`` ε and what is ``proven`` for what ran;
    under ``sound`` both are the plan's. ``entries`` are the ledger's lines.
    """
    one_of("key_source", key_source, ("seed", "os-entropy"))
    charged = rounds_charged(rounds_run, entries)
    spent = multipliers(plan, entries, charged)
    planned: list[str] = []
    if isinstance(plan.mechanism, ScheduledPlan):
        plan = plan.standing(entries)  # type: ignore[attr-defined]
        spent = {plan.event_multiplier: max(rounds_run, plan.rounds_within_budget())}  # type: ignore[attr-defined]
        planned = _planned(plan, rounds_run, min(spent.values()))
    # The claimed figure is the paper's; it never stands for what is proven.
    guarantees, claimed, proven, why = _proof(plan, spent, claimed, proven)
    again = Counter(str(entry["reason"]) for entry in entries if "reason" in entry)
    simulated = plan.at(min(spent)).simulated_epsilon(charged) if plan.private and plan.noise_cohort else None
    found = {
        **_promise(plan, algorithm, facts, spent, guarantees),
        "randomness": "seeded" if key_source == "seed" else "secret",
        **({"caution": SEEDED} if key_source == "seed" and proven is not None and math.isfinite(proven) else {}),
        "rounds": rounds_run,
        "rounds_charged": charged,
        "epsilon": proven,
        "delta": plan.delta,
        "claimed_epsilon": claimed,
        "proven_epsilon": proven,
        "simulated_epsilon": simulated,
        "epsilon_at_1e-5": _second(plan, spent),
        "accountant": plan.accountant,
        **({"selection": plan.selection.record()} if plan.selection else {}),
        "reasons": [
            *reasons, *planned, *(tuning.sentences(plan) if plan.selection else ()), *why,
            *_reasons(plan, proven, charged - rounds_run, min(spent)),
            *(f"Charged too ({count} events): {reason}." for reason, count in again.items()),
        ],
        "not_covered": not_covered(plan, facts, key_source),
        "noise_source": _noise_source(facts, key_source),
        "floating_point": _floating_point(facts),
        "rounding": _rounding(plan, entries),
        "paper_items": [{"item": item, "text": PAPER_ITEMS[item]} for item in facts.get("paper_items", ())],
        "warnings": [*plan.warnings, *warnings],
        "facts": dict(facts),
    }  # fmt: skip
    clean: dict[str, Any] = plain_json("privacy statement", found)
    return {**clean, "checklist": checklist(clean)}


def _proof(
    plan: Plan, spent: Mapping[float, int], claimed: float | None, proven: float | None
) -> tuple[Sequence[Any], float | None, float | None, list[str]]:
    """The guarantees, the claimed and the proven ε, and why there is none."""
    if plan.protocol == "published":
        if proven is None or not math.isfinite(proven):
            return (), claimed, proven, ["No finite ε is proven for the published procedure that ran."]
        return _guarantees(plan, spent)[0] if plan.mechanism else (), claimed, proven, []
    guarantees, refused = _guarantees(plan, spent)
    epsilon = max((found.epsilon for found in guarantees), default=math.inf)
    return guarantees, epsilon, epsilon, refused


def _promise(
    plan: Plan, algorithm: str, facts: Mapping[str, Any], spent: Mapping[float, int], guarantees: Sequence[Any]
) -> dict[str, Any]:
    """What is promised, to whom, and by what."""
    return {
        "algorithm": algorithm,
        "protocol": plan.protocol,
        "unit": "client: all data that one client holds, over the whole run",
        "adjacency": _adjacency(guarantees),
        "trust": plan.trust,
        "trust_model": TRUST_PUBLISHED if plan.protocol == "published" else TRUST[plan.trust],
        "adversaries": [dataclasses.asdict(guarantee) for guarantee in guarantees],
        "sampling": _sampling(plan, facts),
        "mechanism": _mechanism(plan, facts, spent),
        **({"prior": prior(facts["prior"])} if "prior" in facts else {}),
    }


def prior(fact: str) -> str:
    """Return the sentence for a key of :data:`PRIORS`, with what a fact says after a colon.

    >>> prior("public natural data: resnet-50").endswith("taken as public (resnet-50)")
    True
    """
    key, _, which = fact.partition(": ")
    return f"{PRIORS[key]} ({which})" if which else PRIORS[key]


def _guarantees(plan: Plan, spent: Mapping[float, int]) -> tuple[Sequence[Any], list[str]]:
    """The plan's guarantees, or none and why: events charged beyond the plan can use up δ (aborted rounds)."""
    if not plan.private:
        return (), []
    try:
        return plan.guarantees_of(spent), []
    except InputError as error:
        return (), [str(error)]


def _reasons(plan: Plan, epsilon: float | None, extra: int, least: float) -> list[str]:
    found = []
    if not plan.private:
        found.append("This method neither clips nor adds noise: it gives no differential privacy.")
    elif least == 0:
        found.append("The noise multiplier is 0: the clip stays, but no ε is finite.")
    elif plan.protocol == "sound" and (epsilon is None or not math.isfinite(epsilon)):
        found.append("The accountant gives no finite ε for these settings.")
    if plan.noise_cohort:
        found.append(
            "The noise is that of a larger simulated population (noise_cohort): proven is what holds for the run that "
            "happened, simulated what would hold for that population."
        )
    if extra > 0:
        found.append(f"{extra} events beyond the rounds run are charged: open, drawn again, or never run.")
    return found


def _planned(plan: Any, run: int, planned: int) -> list[str]:
    """What is to be said of a run whose rounds share one account: that of the planned run, and of each further key."""
    found = []
    if plan.mechanism.spans:
        found.append(
            f"{len(plan.mechanism.spans) + 1} noise keys drew rounds: each is a mechanism of its own over its rounds, "
            "and they compose. That counts on restarts not being chosen by what was released."
        )
    if run < planned:
        found.append(
            f"ε is that of the {planned} planned rounds, since who ends a run early may have seen its releases."
        )
    return found


def _adjacency(guarantees: Sequence[Any]) -> str:
    kinds = dict.fromkeys(str(g.relation) for g in guarantees)
    return "; ".join(ADJACENCY.get(kind.lower().replace("-", "_"), kind) for kind in kinds) or "none proven"


def _sampling(plan: Plan, facts: Mapping[str, Any]) -> str:
    sampler, keeps = plan.sampler, facts.get("personal") or facts.get("client_state")
    more = KEEPS if keeps and plan.protocol == "sound" and sampler.name == "poisson" and plan.trust != "local" else ""
    share = f"q = {sampler.size / sampler.clients:g}"
    return f"{SAMPLING[sampler.name]} (M = {sampler.clients}, expected cohort m = {sampler.size:g}, {share}){more}"


def _mechanism(plan: Plan, facts: Mapping[str, Any], spent: Mapping[float, int]) -> str:
    if not plan.private:
        return "None: updates are averaged as they are."
    name = plan.mechanism.name if plan.mechanism else "gaussian"
    text = str(facts.get("mechanism", MECHANISMS.get(name, name)))
    if name == "correlated":
        return f"{text} (noise multiplier σ = {min(spent):g} of that mechanism; clip {facts.get('clip')})"
    clip = f"; clip {facts['clip']}" if "clip" in facts else ""
    allowed = f"·(1 + {plan.rounding:.3g}), which allows for rounding" if plan.rounding else ""
    sigma = " to ".join(f"{value:g}" for value in dict.fromkeys((min(spent), max(spent))))
    begun = START.format(**facts["start"]) if facts.get("start") else ""
    begun += SCORED.format(share=plan.evaluation) if plan.evaluation else ""
    return f"{text} (noise multiplier σ = {sigma} = noise std / clip{allowed}{clip}){begun}"


def _second(plan: Any, spent: Mapping[float, int]) -> float | None:
    """ε at δ = 10⁻⁵ as well: at δ near 1/M a guarantee can be met by publishing somebody's data."""
    if not plan.private or plan.protocol != "sound":
        return None
    with contextlib.suppress(InputError):  # e.g. the chance of an aborted round alone exceeds 10⁻⁵
        found = dataclasses.replace(plan, delta=SECOND_DELTA).guarantees_of(spent)
        return max(float(guarantee.epsilon) for guarantee in found)
    return None


def _noise_source(facts: Mapping[str, Any], key_source: str) -> str:
    if key_source == "seed":
        return "simulation: noise reproducible from the seed (privacy.randomness: seeded)"
    if facts.get("unidentified"):
        return (
            "256 bits of operating-system entropy at every start, never stored: the method or model given in Python "
            "cannot be identified, so the run cannot be reproduced"
        )
    if not facts.get("simulation", True):
        half = "256 bits of operating-system entropy at each start of the server, never stored, and 256 more,"
        return f"{half} kept outside the run folder and deleted at its end"
    return "256 bits of operating-system entropy, never in the run's folder and deleted at its end"


def _floating_point(facts: Mapping[str, Any]) -> str:
    if facts.get("secure"):
        return "Noise is drawn by a method that withstands floating-point attacks (privacy.secure_rng)."
    return "float32 Gaussian noise: it does not withstand attacks on floating-point arithmetic."


def _rounding(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> float | None:
    """s: the sensitivity that is accounted is C·(1 + s); None where neither the ledger nor the plan names one."""
    named = [float(entry["rounding"]) for entry in entries if entry.get("rounding") is not None]
    # The ledger is what was drawn; the plan only speaks where there is no line yet.
    share = max(named, default=plan.rounding)
    return share if plan.private and share else None


def not_covered(plan: Plan, facts: Mapping[str, Any], key_source: str) -> list[str]:
    """What the guarantee says nothing about, one sentence each."""
    found = [
        tuning.NOT_COVERED if plan.selection else UNTUNED,
        "Side channels: timing, message sizes, memory, and which clients answer.",
        "Public by assumption: number of clients, expected cohort, local steps and the number of examples that they "
        "follow from (stated, or of published data), δ, model size, number of classes and of token ids, form of inputs "
        "and targets, partition seed, and the test data used for accuracies.",
        "Groups of clients: k clients that belong to one person are protected only by group privacy.",
    ]
    if key_source == "seed":
        found.append(
            "Anybody who knows, guesses or finds the seed: the noise is reproducible from the seed, and the released "
            "weights tell which of many seeds their initial weights came from. It protects only while the seed is of "
            "high entropy."
        )
        found.append(
            "A rerun with the same recipe, data and seed repeats the noise: it is the same release only if it is the "
            "same bit for bit; otherwise the difference of the two is free of noise."
        )
    if facts.get("simulation", True):
        found.append(
            "private/private.jsonl: realised cohorts, update norms, train accuracies; for the simulation's owner only."
        )
    if str(facts.get("prior")).startswith("public natural data"):
        found.append("The people in the data that the model was pretrained on: those data are taken to be public.")
    if facts.get("held_out"):
        found.append(
            "Public by assumption: the examples held out for this method. In this simulation they are clients' own, "
            "taken from them before training, and nothing protects them."
        )
    if left := facts.get("left_out"):
        found.append(
            f"The {left} clients left out of training as public test data: what is measured on them is released "
            "without noise."
        )
    if facts.get("personal") or facts.get("finetuned"):
        found.append(
            "Personal parts: personal heads, fine-tuned models and personal accuracies are not released, not covered; "
            "the shared part is protected in the joint sense (what everyone but the client itself sees)."
        )
    if facts.get("client_state"):
        found.append(
            "Clients' states: what each client keeps between rounds stays with it; it is not released, not covered. "
            "What follows from it in later messages is covered."
        )
    found += _neighbours(plan)
    if not facts.get("secure"):
        found.append("Attacks on floating-point noise (privacy.secure_rng: true withstands them).")
    if plan.trust == "central" and plan.protocol == "sound":
        found.append("The server itself, which sees every update under trust: central.")
    if plan.trust == "distributed":
        found.append("A server that breaks secure aggregation, or more colluding clients than were accounted for.")
        if plan.mechanism is None:
            found.append(
                "Whether a client answers at all: the slot of a removed client is taken to send its noise share with a "
                "zero update, since the total noise follows the number of shares (ddgauss tops it up to a constant)."
            )
    return found


def _neighbours(plan: Any) -> list[str]:
    """What zero-out in place leaves out, with the figure of replace-one neighbours."""
    mechanism = plan.mechanism
    if not isinstance(mechanism, ScheduledPlan) or mechanism.relation != "zero-out":
        return []
    # Exchanging data moves two columns where emptying a slot moves one.
    replaced = mechanism.epsilon(plan, plan.rounds_within_budget(), moved=2.0)
    return [
        "A client that was never enrolled: the others' turns would be other ones. Covered is a client whose turns stay "
        f"empty; exchanging its data for another client's is covered at ε = {_number(replaced)}, δ = {plan.delta:g}."
    ]


def checklist(found: Mapping[str, Any]) -> dict[str, str]:
    """The reporting items of Ponomareva et al. 2023, Section 5.3, each a sentence under a stable key."""
    return {
        "dp_setting": f"{found['trust']}: {found['trust_model']}",
        "data_accesses": "Every round's cohort updates"
        + (", of all trials." if "selection" in found else ". Not the search for hyper-parameters; see not_covered."),
        "final_output": "Every round's shared model and the released metrics, not only the last model.",
        "unit_of_privacy": found["unit"],
        "adjacency": found["adjacency"],
        "accounting_type": f"{found['accountant']} accounting composed over {found['rounds_charged']} rounds.",
        "accounting_assumptions": f"{found['sampling']} This run drew its cohorts so.",
        "formal_statement": headline(found),
        "tuning": tuning.COUNTED if "selection" in found else "Not counted: see not_covered.",
        "verifiability": "ledger.jsonl holds every event; the figure can be recomputed from it with another library.",
    }


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def headline(found: Mapping[str, Any]) -> str:
    """The one line that may stand for the statement; it never gives the claimed figure without the proven one."""
    at = f"at δ = {found['delta']:g}"
    if found["protocol"] == "published":
        claimed, proven = _number(found["claimed_epsilon"]), _number(found["proven_epsilon"])
        whose = ", of the mechanism" if found.get("caution") else ""
        return f"claimed ε = {claimed} {at}, proven ε = {proven} (published procedure{whose})"
    simulated = found["simulated_epsilon"]
    tail = "" if simulated is None else f"; ε = {_number(simulated)} for the simulated larger population"
    whose = " of the mechanism" if found.get("caution") else ""
    return f"proven ε{whose} = {_number(found['proven_epsilon'])} {at}{tail}"


def checksum(found: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a statement without its own checksum."""
    body = {key: value for key, value in found.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def is_whole(path: Path) -> bool:
    """Whether a statement's file has the checksum of what it says."""
    try:
        found = json.loads(path.read_bytes())
        return bool(found["checksum"] == checksum(found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def write(path: str | Path, found: Mapping[str, Any], run: str = "", weights: str = "") -> None:
    """Write ``privacy.json`` so that a reader sees the old or the new one, never half. Raises ``RunError``.

    It ends with the run's id, so that another run's with the same ε cannot stand for it, with the SHA-256 of the
    released weights that it is about, and with its own checksum.
    """
    path = Path(path)
    about = {name: value for name, value in (("run", run), ("weights", weights)) if value}
    body = plain_json("privacy statement", {**found, **about})
    whole = {**body, "checksum": checksum(body)}
    text = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        durable.replace(path, text, mode=0o644)
    except OSError as error:
        raise RunError(f"{path}: the privacy statement could not be written ({error.strerror})") from error
