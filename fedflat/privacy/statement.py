"""The privacy statement: what is promised, to whom, on what grounds, and what is not promised.

One dictionary (``privacy.json``) rendered as text and Markdown. It follows the reporting items of Ponomareva et al.
2023, "How to DP-fy ML", Section 5.3 (setting, instantiation of the definition, accounting, verifiability); each item
has a stable key under ``checklist``. A claimed figure is never shown without the proven one (:func:`headline`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from fedflat.core.checks import InputError, RunError, one_of, whole
from fedflat.core.durable import flush
from fedflat.privacy import tuning
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import extra_rounds, plain_json

SECOND_DELTA = 1e-5
ROUNDED = "the accounted sensitivity is C·(1 + {:.3g}), which allows for the rounding of sums"

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


class PlanLike(Protocol):
    """What a statement needs to know of a privacy plan (``privacy.plan.Plan``)."""

    @property
    def private(self) -> bool: ...
    @property
    def event_multiplier(self) -> float: ...
    @property
    def rounding(self) -> float: ...
    @property
    def mechanism(self) -> Any: ...
    @property
    def delta(self) -> float: ...
    @property
    def accountant(self) -> str: ...
    @property
    def trust(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    @property
    def sampler(self) -> Any: ...
    @property
    def noise_cohort(self) -> Any: ...
    @property
    def selection(self) -> Any: ...
    @property
    def warnings(self) -> Sequence[str]: ...
    def at(self, multiplier: float) -> PlanLike: ...
    def at_round(self, round: int) -> PlanLike: ...
    def guarantees_of(self, multipliers: Mapping[float, int]) -> Sequence[Any]: ...
    def simulated_epsilon(self, rounds: int) -> float | None: ...


def rounds_charged(rounds_run: int, entries: Sequence[Mapping[str, Any]]) -> int:
    """Rounds to compose: those run, or recorded although never released, and each further event of a round."""
    recorded = {entry["round"] for entry in entries}
    return max(whole("rounds_run", rounds_run), len(recorded)) + extra_rounds(entries)


def multipliers(plan: PlanLike, entries: Sequence[Mapping[str, Any]], charged: int) -> dict[float, int]:
    """The charged rounds by the multiplier that their ledger lines say; those without a line have the least.

    Under a mechanism with its own account all have the least. A run's own lines all have its plan's.
    """
    said = [float(entry["noise_multiplier"] or 0.0) for entry in entries if "noise_multiplier" in entry]
    least, found = min([plan.event_multiplier, plan.at_round(0).event_multiplier, *said]), Counter(said)
    rest = charged - found.total()
    if plan.mechanism or not found or rest < 0:
        return {least: charged}
    return found | Counter({least: found[least] + rest}) if rest else found


def statement(
    plan: PlanLike,
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
    true), ``secure``, ``personal``, ``finetuned``, ``client_state``, ``held_out``, ``prior`` (a key of
    :data:`PRIORS`), ``mechanism`` (a sentence) and ``paper_items`` (numbers of :data:`PAPER_ITEMS`).
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
    guarantees, claimed, proven, why = _proof(plan, spent, claimed, proven)
    again = Counter(str(entry["reason"]) for entry in entries if "reason" in entry)
    simulated = plan.at(min(spent)).simulated_epsilon(charged) if plan.private and plan.noise_cohort else None
    found = {
        **_promise(plan, algorithm, facts, spent, guarantees),
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
    plan: PlanLike, spent: Mapping[float, int], claimed: float | None, proven: float | None
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
    plan: PlanLike, algorithm: str, facts: Mapping[str, Any], spent: Mapping[float, int], guarantees: Sequence[Any]
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
        **({"prior": PRIORS[facts["prior"]]} if "prior" in facts else {}),
    }


def _guarantees(plan: PlanLike, spent: Mapping[float, int]) -> tuple[Sequence[Any], list[str]]:
    """The plan's guarantees, or none and why: events charged beyond the plan can use up δ (aborted rounds)."""
    if not plan.private:
        return (), []
    try:
        return plan.guarantees_of(spent), []
    except InputError as error:
        return (), [str(error)]


def _reasons(plan: PlanLike, epsilon: float | None, extra: int, least: float) -> list[str]:
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


def _sampling(plan: PlanLike, facts: Mapping[str, Any]) -> str:
    sampler, keeps = plan.sampler, facts.get("personal") or facts.get("client_state")
    more = KEEPS if keeps and plan.protocol == "sound" and sampler.name == "poisson" and plan.trust != "local" else ""
    share = f"q = {sampler.size / sampler.clients:g}"
    return f"{SAMPLING[sampler.name]} (M = {sampler.clients}, expected cohort m = {sampler.size:g}, {share}){more}"


def _mechanism(plan: PlanLike, facts: Mapping[str, Any], spent: Mapping[float, int]) -> str:
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
        return "simulation: noise reproducible from the seed"
    if facts.get("unidentified"):
        return (
            "256 bits of operating-system entropy at every start, never stored: the method or model given in Python "
            "cannot be identified, so the run cannot be reproduced"
        )
    if not facts.get("simulation", True):
        half = "256 bits of operating-system entropy at each start of the server, never stored, and 256 more,"
        return f"{half} kept outside the run folder and deleted at its end"
    return "256 bits of operating-system entropy, kept outside the run folder and deleted at its end"


def _floating_point(facts: Mapping[str, Any]) -> str:
    if facts.get("secure"):
        return "Noise is drawn by a method that withstands floating-point attacks (privacy.secure_rng)."
    return "float32 Gaussian noise: it does not withstand attacks on floating-point arithmetic."


def _rounding(plan: PlanLike, entries: Sequence[Mapping[str, Any]]) -> float | None:
    """s: the sensitivity that is accounted is C·(1 + s); None where neither the ledger nor the plan names one."""
    named = [float(entry["rounding"]) for entry in entries if entry.get("rounding") is not None]
    share = max(named, default=plan.rounding)
    return share if plan.private and share else None


def not_covered(plan: PlanLike, facts: Mapping[str, Any], key_source: str) -> list[str]:
    """What the guarantee says nothing about, one sentence each."""
    found = [
        tuning.NOT_COVERED if plan.selection else UNTUNED,
        "Side channels: timing, message sizes, memory, and which clients answer.",
        "Public by assumption: number of clients, expected cohort, local steps, δ, model size, number of classes and "
        "of token ids, form of inputs and targets, partition seed, examples per client (the public n̄), and the test "
        "data used for accuracies.",
        "Groups of clients: k clients that belong to one person are protected only by group privacy.",
    ]
    if key_source == "seed":
        found.append(
            "simulation: noise reproducible from the seed, so whoever knows the seed can remove it: this key protects "
            "only while the seed is secret and hard to guess (of high entropy, as a small number is not)."
        )
        found.append(
            "A rerun with the same recipe, data and seed repeats the noise: it is the same release only if it is the "
            "same bit for bit; otherwise the difference of the two is free of noise."
        )
    if facts.get("simulation", True):
        found.append(
            "private/private.jsonl: realised cohorts, update norms, train accuracies; for the simulation's owner only."
        )
    if facts.get("prior") == "public natural data":
        found.append("The people in the data that the model was pretrained on: those data are taken to be public.")
    if facts.get("held_out"):
        found.append(
            "Public by assumption: the examples held out for this method. In this simulation they are clients' own, "
            "taken from them before training, and nothing protects them."
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
        return f"claimed ε = {claimed} {at}, proven ε = {proven} (published procedure)"
    simulated = found["simulated_epsilon"]
    tail = "" if simulated is None else f"; ε = {_number(simulated)} for the simulated larger population"
    return f"proven ε = {_number(found['proven_epsilon'])} {at}{tail}"


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    second = found["epsilon_at_1e-5"]
    return [
        ("Guarantee", headline(found)),
        ("At δ = 1e-05", f"ε = {_number(second)}" if second is not None else "no ε given"),
        ("Unit", found["unit"]),
        ("Adjacency", found["adjacency"]),
        ("Trust", f"{found['trust']}: {found['trust_model']}"),
        ("Sampling", found["sampling"]),
        ("Mechanism", found["mechanism"]),
        ("Accounting", found["checklist"]["accounting_type"]),
        *([("Prior", found["prior"])] if "prior" in found else []),
        *([("Tuning", found["checklist"]["tuning"])] if "selection" in found else []),
        ("Noise", found["noise_source"]),
        ("Arithmetic", found["floating_point"]),
        *([("Rounding", ROUNDED.format(found["rounding"]))] if found.get("rounding") else []),
    ]


def _lists(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    protected = [
        f"{a['adversary']}: ε = {_number(a['epsilon'])} at δ = {a['delta']:g} ({a['relation']}); {a['description']}"
        for a in found["adversaries"]
    ]
    items = [f"{item['item']}. {item['text']}" for item in found["paper_items"]]
    every = [
        ("Who is protected from whom", protected),
        ("Reasons", found["reasons"]),
        ("Where the published procedure leaves its formula", items),
        ("Warnings", found["warnings"]),
        ("Not covered", found["not_covered"]),
    ]
    return [(title, lines) for title, lines in every if lines]


def render_text(found: Mapping[str, Any], width: int = 80) -> str:
    """The statement for a terminal of ``width`` columns."""
    lines = [*textwrap.wrap(f"Privacy statement: {found['algorithm']} ({found['protocol']} protocol)", width), ""]
    for label, text in _facts(found):
        lines += textwrap.wrap(f"{label + ':':<13} {text}", width, break_on_hyphens=False, subsequent_indent=" " * 14)
    for title, sentences in _lists(found):
        lines += ["", f"{title}:"]
        for sentence in sentences:
            lines += textwrap.wrap(sentence, width, break_on_hyphens=False, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def render_markdown(found: Mapping[str, Any]) -> str:
    """The statement as Markdown: one table and one list per heading."""
    lines = [
        f"## Privacy statement: {_escape(found['algorithm'])} ({found['protocol']} protocol)",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {label} | {_escape(text)} |" for label, text in _facts(found)]
    for title, sentences in _lists(found):
        lines += ["", f"### {title}", "", *(f"- {_escape(sentence)}" for sentence in sentences)]
    return "\n".join(lines) + "\n"


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


def write(path: str | Path, found: Mapping[str, Any], run: str = "") -> None:
    """Write ``privacy.json`` so that a reader sees the old or the new one, never half. Raises ``RunError``.

    It ends with the run's id, so that another run's with the same ε cannot stand for it, and with its own checksum.
    """
    path = Path(path)
    body = plain_json("privacy statement", {**found, "run": run} if run else found)
    whole = {**body, "checksum": checksum(body)}
    text = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    scratch = ""
    try:
        scratch = f"{path.parent}/.{path.name}.{secrets.token_hex(8)}"
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        flush(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise RunError(f"{path}: the privacy statement could not be written ({error.strerror})") from error
