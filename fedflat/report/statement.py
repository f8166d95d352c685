"""The privacy statement of a run as a page shows it. Keys it does not know are shown as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from fedflat.report import metrics, tables
from fedflat.report.metrics import Run
from fedflat.report.pages import Facts

TITLES = {
    "proven_epsilon": "Proven ε",
    "claimed_epsilon": "Claimed ε (the paper's formula)",
    "epsilon": "ε",
    "delta": "δ",
    "epsilon_at_1e-5": "ε at δ = 10⁻⁵",
    "simulated_epsilon": "ε of the simulated population",
    "reasons": "Reasons",
    "warnings": "Warnings",
    "paper_items": "Where the published procedure leaves its formula",
    "unit": "Unit of privacy",
    "adjacency": "Adjacency",
    "trust": "Trust model",
    "trust_model": "Trusted",
    "adversaries": "Protected from",
    "not_covered": "Not covered",
    "protocol": "Protocol",
    "sampling": "Sampling",
    "mechanism": "Mechanism",
    "accountant": "Accountant",
    "rounds": "Rounds run",
    "rounds_charged": "Rounds charged",
    "noise_source": "Noise",
    "floating_point": "Arithmetic",
    "rounding": "Rounding that the sensitivity allows for, as a share of the clip",
}
FOLDED = {"checklist": "Reporting checklist", "facts": "Facts the statement was made from"}


class Statement(NamedTuple):
    """What stands open, and what is folded in, by its title."""

    facts: Facts
    folds: list[tuple[str, Facts]]


def statement_of(run: Run) -> Statement | str:
    """The statement with the keys of the contract first, in reading order; a sentence where there is none."""
    if not run.privacy:
        return f"{metrics.NO_STATEMENT[:1].upper() + metrics.NO_STATEMENT[1:]}: nothing is proven."
    known = {key: run.privacy[key] for key in TITLES if key in run.privacy}
    rest = {key: value for key, value in run.privacy.items() if key not in TITLES}
    folded = [(name, rest.pop(key)) for key, name in FOLDED.items() if isinstance(rest.get(key), Mapping)]
    return Statement(facts(_without_repeats(known) | rest), [(name, facts(tree)) for name, tree in folded if tree])


def _without_repeats(known: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only repeats the proven ε, or says that there is no claim or simulated population."""
    proven = known.get("proven_epsilon")
    repeated = "proven_epsilon" in known and known.get("epsilon", proven) == proven
    drop = {"epsilon"} if repeated else set()
    drop |= {key for key in ("claimed_epsilon", "simulated_epsilon", "rounding") if known.get(key) is None}
    lists = ("reasons", "not_covered", "adversaries", "warnings", "paper_items", "epsilon_at_1e-5")
    drop |= {key for key in lists if known.get(key) in ([], "", None)}
    if "proven_epsilon" not in known and "claimed_epsilon" in known:
        known = {"proven_epsilon": None} | known  # a claim never stands alone
    return {key: value for key, value in known.items() if key not in drop}


def facts(tree: Mapping[str, Any], *, verbatim: bool = False) -> Facts:
    """A mapping as names and values; nested mappings nest. verbatim: the keys as they are written."""
    return Facts(tuple((str(key) if verbatim else title(key), _value(key, value)) for key, value in tree.items()))


def title(key: str) -> str:
    """A key as a reader would write it."""
    plain = str(key).replace("_", " ").replace("epsilon", "ε").replace("delta", "δ")
    return TITLES.get(str(key), plain[:1].upper() + plain[1:])


def _value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and value:
        return facts(value)
    if isinstance(value, list) and value:
        return [_item(key, item) for item in value]
    return _text(key, value)


def _text(key: str, value: Any) -> str:
    if value is None and "epsilon" in str(key):
        return tables.NO_EPSILON
    if "epsilon" in str(key) and metrics.number(value) is not None:
        return tables.epsilon_text(metrics.number(value))
    return readable(value)


def _item(key: str, value: Any) -> Any:
    """A list's item; a flat mapping is one line, so that a list of adversaries reads as a list."""
    if isinstance(value, Mapping) and "adversary" in value:
        return _adversary(value)
    if isinstance(value, Mapping) and set(value) == {"item", "text"}:
        return f"{value['text']} (item {value['item']})"
    if isinstance(value, Mapping) and not any(isinstance(part, (Mapping, list)) for part in value.values()):
        return " · ".join(f"{title(name)}: {_text(name, part)}" for name, part in value.items())
    return _value(key, value)


def _adversary(value: Mapping[str, Any]) -> Markup:
    """Who is protected from whom as a sentence, with whatever else the entry says behind it."""
    said = f"ε = {_text('epsilon', value.get('epsilon'))}"
    said += f" at δ = {readable(value['delta'])}" if "delta" in value else ""
    rest = [readable(part) for key, part in value.items() if key not in ("adversary", "epsilon", "delta") and part]
    return Markup("<strong>{}</strong>: {}").format(readable(value["adversary"]), "; ".join([said, *rest]))


def readable(value: Any) -> str:
    """A value as text: yes and no, short numbers, lists with commas."""
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
