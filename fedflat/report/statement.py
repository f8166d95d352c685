"""Show a run's privacy statement on a page, and what audits of the run found beside what is claimed and proven."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from fedflat.report import metrics
from fedflat.report.metrics import Record, Run, listed, number, section
from fedflat.report.pages import Facts
from fedflat.report.wording import asset

WORDS: dict[str, Any] = yaml.safe_load(asset("statement.yaml"))
TITLES: dict[str, str] = WORDS["titles"]


def statement_of(run: Run) -> dict[str, Facts] | str:
    """Return the statement's ``facts``, with the keys of the contract first, in reading order, and its ``folds``, facts
    that a page folds in, by title; a sentence where there is none."""
    if not run.privacy:
        return f"{metrics.NO_STATEMENT[:1].upper() + metrics.NO_STATEMENT[1:]}: nothing is proven."
    stated = {key: run.privacy[key] for key in TITLES if key in run.privacy}
    rest = {key: value for key, value in run.privacy.items() if key not in TITLES}
    folded = [(name, rest.pop(key)) for key, name in WORDS["folded"].items() if isinstance(rest.get(key), Mapping)]
    open_facts = facts(_without_repeats(stated) | rest)
    # A seeded run's ε has another name.
    names = {TITLES["proven_epsilon"]: metrics.epsilon_name(run)}
    open_facts = {names.get(label, label): value for label, value in open_facts.items()}
    return {"facts": open_facts, "folds": {name: facts(tree) for name, tree in folded if tree}}


def _without_repeats(stated: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only repeats the proven ε, or says that there is no claim or simulated population."""
    if "claimed_epsilon" in stated and "proven_epsilon" not in stated:
        # A claimed ε is never shown without the proven one.
        stated = {"proven_epsilon": None} | stated
    drop = {key for key in WORDS["optional"] if stated.get(key) in ([], "", None)}
    if "proven_epsilon" in stated:
        drop |= {key for key in ("epsilon", "claimed_epsilon") if stated.get(key) == stated["proven_epsilon"]}
    return {key: value for key, value in stated.items() if key not in drop}


def facts(tree: Mapping[str, Any], *, verbatim: bool = False) -> Facts:
    """Return a mapping as names and values; nested mappings nest. verbatim: the keys as they are written."""
    if "noise_multiplier" in tree and tree.get("epsilon", 0) is None:
        tree = {**tree, "epsilon": "–"}  # a σ that was given, and no ε asked for
    return {str(key) if verbatim else title(key): _value(key, value) for key, value in tree.items()}


def title(key: str) -> str:
    """Return a key as a reader would write it."""
    plain = str(key).replace("_", " ").replace("epsilon", "ε").replace("delta", "δ")
    return TITLES.get(str(key), plain[:1].upper() + plain[1:])


def _value(key: str, value: Any) -> Any:
    """Return a value as a page shows it: an adversary as a sentence, a paper's item as its text."""
    if isinstance(value, Mapping) and "adversary" in value:
        return _adversary(value)
    if isinstance(value, Mapping) and set(value) == {"item", "text"}:
        return f"{value['text']} (item {value['item']})"
    if isinstance(value, Mapping) and value:
        return facts(value)
    if isinstance(value, list) and value:
        return [_value(key, item) for item in value]
    if "epsilon" in str(key) and (value is None or number(value) is not None):
        return metrics.epsilon_text(number(value))
    return readable(value)


def _adversary(value: Mapping[str, Any]) -> Markup:
    """Return who is protected from whom as a sentence, with whatever else the entry says behind it."""
    guarantee = f"ε = {_value('epsilon', value.get('epsilon'))}"
    guarantee += f" at δ = {readable(value['delta'])}" if "delta" in value else ""
    rest = [readable(part) for key, part in value.items() if key not in ("adversary", "epsilon", "delta") and part]
    return Markup("<strong>{}</strong>: {}").format(readable(value["adversary"]), "; ".join([guarantee, *rest]))


def readable(value: Any) -> str:
    """Return a value as text: yes and no, short numbers, lists with commas."""
    if value is None or value in ([], {}, ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {readable(item)}" for key, item in value.items())
    return str(value)


def exceeded(audit: Record) -> bool:
    """Return whether the audit found more than is proven, or the contract on sensitivity broken."""
    return audit.get("exceeds_proven") is True


def reading(audit: Record) -> tuple[str, str]:
    """Return what an audit measured, ``1.000 C`` of a movement, ``1.000 σC`` of noise, or ``≥ 1.23``, a lower bound;
    and what follows from it, in a few words."""
    details, broken, idle = section(audit, "details"), exceeded(audit), audit.get("runs") == 0
    if audit.get("kind") == "noise":
        ratio = number(details.get("ratio"))
        verdict = "not as planned" if broken else "not run" if idle else "as planned"
        return "–" if ratio is None else f"{ratio:.3f} σC", verdict
    if "movement" in details:
        return "–" if idle else _times(details["movement"]), "over C" if broken else "not run" if idle else "within C"
    bound, proven = number(audit.get("lower_bound")), number(audit.get("proven"))
    verdict = "nothing is proven" if proven is None else "within the proof"
    if bound is None:
        return "–", "contract 2b broken" if broken else "no bound"
    if broken:
        verdict = "contract 2b broken" if proven is None or bound <= proven else "over the proven ε"
    return f"≥ {metrics.epsilon_text(bound, round_up=False)}", verdict


def remarks(audit: Record) -> list[str]:
    """Return what a worlds audit did not do, and why, one sentence each."""
    details = section(audit, "details")
    sentences = [f"{engine}: {reason}" for engine, reason in section(details, "refused").items()]
    if left := details.get("left_out"):
        sentences.append(f"{left} pairs were left out to end in time; fedflat audit --kind worlds runs all.")
    return sentences


def _times(value: object) -> str:
    """Return ``1.000 C``; JSON's null is no finite number: only one of both worlds came to an end."""
    movement = number(value)
    if movement is None:
        return "∞ C"
    return f"{movement:.3f} C" if movement < 100 else f"{movement:.1e} C"


def cells(audit: Record) -> list[str]:
    """Return an audit as a table row: what was audited, claimed, proven, audited, confidence, verdict."""
    missing = "–" if audit.get("kind") == "noise" else metrics.NO_EPSILON  # it looks at no ε
    claimed, proven = (metrics.epsilon_text(number(audit.get(key)), missing) for key in ("claimed", "proven"))
    sure = number(audit.get("confidence"))
    confidence = "–" if sure is None else f"{100 * sure:.10g} %"
    audited, verdict = reading(audit)
    return [str(audit.get("kind")), claimed, proven, audited, confidence, verdict]


HEADS = ("Audit", "ε claimed", "ε proven", "audited", "confidence", "verdict")


def notes(audits: Sequence[Record]) -> list[dict[str, Any]]:
    """Return what each kind looked at and rests on: head, about, lines; a broken contract comes first."""
    entries = []
    for audit in audits:
        kind = str(audit.get("kind"))
        texts = [WORDS["audits"].get(kind, ""), *(f"{key}: {audit.get(key)}" for key in ("canary", "statistic"))]
        broken = "" if kind == "noise" or "movement" in section(audit, "details") else "Contract 2b broken: "
        violations = [f"{broken}{text}" for text in listed(audit, "violations")]
        lines = [*violations, *remarks(audit), *map(str, listed(audit, "assumptions"))]
        basis = "; ".join(fact for fact in texts if fact and not fact.endswith(": None"))
        entries.append({"head": f"{kind}, {audit.get('method')}: what it rests on", "about": basis, "lines": lines})
    return entries
