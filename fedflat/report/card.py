"""Write the privacy card of a run, and a draft entry of the public registry made from it.

The texts are templates, ``card.yaml`` and ``registry.yaml``; every figure in them comes from the statement, from the
ledger, or is computed from the ledger here. The same sections become HTML, Markdown and the registry's entry.

OpenDP announced the registry in November 2025; its entries and schema are in
https://github.com/opendp/deployments-registry-data, ``schemas/deployments-schema.yaml``. The tests hold our entries
to what that schema allowed in commit 3e9c812 of 15 July 2026. A later schema may differ; entries are always drafts, for
somebody to read and hand in.
"""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from markupsafe import Markup

from fedflat.core import InputError, digest_of_file, readable, require, wrong
from fedflat.privacy.ledger import extra_rounds
from fedflat.privacy.statement import FALSE_POSITIVES, SEEDED, refuse_seeded, true_positives
from fedflat.privacy.together import Published, total
from fedflat.report import metrics, wording
from fedflat.report.metrics import Run, number, published, uncounted

UNSAID = "not stated"


def as_yaml(entry: dict[str, Any]) -> str:
    """Return the entry as text; dates stay text, no text is folded."""
    return yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=10**6)


@dataclass(frozen=True)
class Card:
    """sentence: the one that may stand for it. sections: texts, or lists of texts, by title and label."""

    run: Run
    sentence: str
    sections: Mapping[str, Mapping[str, str | list[str]]]
    epsilon: float | None
    delta: float | None

    @property
    def title(self) -> str:
        """The name of the run that the card describes."""
        named = self.run.recipe.get("name")
        # Without a name of its own a run is called as its folder, as in its report.
        return readable(self.run.name if named in (None, "", "run") else str(named))

    def text(self, title: str, label: str, between: str = " ") -> str:
        """Return one row's text, with ``between`` between the items of a list."""
        row = self.sections[title][label]
        return row if isinstance(row, str) else between.join(row)


def card(run: Run, others: Sequence[Run] = ()) -> Card:
    """Return the card of ``run``; others: runs on the same clients that are published too.

    Raises InputError: the run has no statement, or one of the runs has one that its ledger goes beyond.
    """
    require(bool(run.privacy), "card", f"{run.path} without privacy.json", "a run with a statement")
    refuse_seeded("card", run.privacy)
    every = _with_ledgers([run, *others])
    entries = every[0].entries
    values = _stated(run) | {
        "entries": entries,
        "laws": sorted({f"{e.get('sampling')}, q = {e['q']:g}" for e in entries if number(e.get("q")) is not None}),
        "charged_again": extra_rounds(entries),
        "digest": digest_of_file(run.path / "ledger.jsonl"),
    }
    if others:
        combined = total(every)
        bounded = math.isfinite(combined.epsilon) and not combined.unbounded
        values |= {"total": combined, "bounded": bounded, "names": [run.name for run in every]}
    text = wording.texts("templates/card.yaml", values)
    sections = {title: {label: _lines(row) for label, row in rows.items()} for title, rows in text["sections"].items()}
    return Card(run, text["sentence"], sections, values["epsilon"], values["delta"])


def _with_ledgers(runs: Sequence[Run]) -> list[Published]:
    """Return the runs with their ledgers' lines; refuse one whose statement counts fewer rounds than its ledger."""
    every = published(runs)
    for run, its in zip(runs, every):
        found = f"{run.path}, whose ledger has rounds that privacy.json does not count"
        hint = "fedflat run --resume goes on with it."
        require(not uncounted(run.privacy, its.entries), "card", found, "a run at its end", hint=hint)
    return every


def _stated(run: Run) -> dict[str, Any]:
    """Return what a template may say of a run by its statement and recipe."""
    adversaries = [a for a in run.privacy.get("adversaries") or [] if isinstance(a, Mapping)]
    epsilons = [(number(a.get("epsilon")), str(a.get("description") or a.get("adversary"))) for a in adversaries]
    most = max((value for value, _ in epsilons if value is not None), default=None)
    return metrics.stated(run) | {
        "true_positives": lambda epsilon, delta: wording.share_bound(true_positives(epsilon, delta)),
        "false_positives": f"{100 * FALSE_POSITIVES:g} %",
        "stated": lambda key: UNSAID if run.privacy.get(key) in (None, "", []) else str(run.privacy[key]),
        "seeded_warning": SEEDED,
        "adversaries": adversaries,
        # Those towards whom the largest ε is proven.
        "against": list(dict.fromkeys(text for value, text in epsilons if value == most and most is not None)),
    }


def _lines(text: str | list[str]) -> str | list[str]:
    return text.split("\n") if isinstance(text, str) and "\n" in text else text


def markdown(card: Card) -> str:
    """Return the card as Markdown."""
    return str(wording.filled("card.md", card=card))


def html(card: Card) -> str:
    """Return the card as a page of its own: one file, no script, no network."""
    return str(wording.filled("card.html", card=card, style=Markup(wording.asset("page.css"))))


VARYING = ("Composition", "Tuning, preprocessing and public data")
"""Sections that may follow from what no run's folder holds, as other runs."""


def settled(text: str) -> str:
    """Return a card, as Markdown or as a page, without the sections that may follow from what no run's folder holds."""
    begin, end = rf"^(?:## |<section><h2>)(?:{'|'.join(VARYING)})", r"(?=^## |^<section>|^</main>|\Z)"
    return re.sub(rf"{begin}(?s:.*?){end}", "", text, flags=re.MULTILINE)


def brief(run: Run) -> Card | str:
    """Return the card for a report; a sentence where there can be none."""
    try:
        return card(run)
    except InputError as error:
        return str(error)


def registry_entry(card: Card, today: datetime.date | None = None) -> dict[str, Any]:
    """Return the card as an entry of the public registry.

    Raises:
        InputError: no finite ε is proven, so that there is nothing to enter.
    """
    if card.epsilon is None or card.delta is None:
        raise wrong("registry entry", "a run without a finite proven ε", "a run with one")
    values = _stated(card.run) | {"card": card, "today": today or datetime.date.today()}
    entry = wording.texts("templates/registry.yaml", values)
    entry["deployment"]["privacy_loss"]["privacy_parameters"] = {"epsilon": card.epsilon, "delta": card.delta}
    words = "".join(c if c.isalnum() and c.isascii() else " " for c in card.title.lower()).split()
    return {"url_slug": "-".join(words) or "run", **entry}
