"""Write the privacy card of a run, and a draft entry of the public registry made from it.

Every figure comes from the statement, from the ledger, or is computed from the ledger here. The same sections become
HTML, Markdown and the entry for the public registry.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from fedflat.core.checks import InputError, wrong
from fedflat.privacy.attacker import SLOW, Attacker, attacker_of
from fedflat.privacy.ledger import extra_rounds
from fedflat.privacy.statement import SEEDED, refuse_seeded
from fedflat.privacy.together import Published, Total, total
from fedflat.report import metrics, statement
from fedflat.report.metrics import Run, published, section, uncounted
from fedflat.report.pages import asset, filled
from fedflat.report.registry import UNSAID, About, readable

PRETRAINED = ("vit-base", "roberta-base")

Text = str | list[str]


@dataclass(frozen=True)
class Card:
    """sentence: the one that may stand for it. sections: (title, rows of (label, text or list of texts))."""

    run: Run
    sentence: str
    sections: tuple[tuple[str, tuple[tuple[str, Text], ...]], ...]
    about: About
    epsilon: float | None
    delta: float | None

    @property
    def title(self) -> str:
        """What the card is of."""
        return readable(self.about.name or str(self.run.recipe.get("name") or self.run.name))

    def text(self, title: str, label: str) -> str:
        """Return one row's text, lists as sentences after one another."""
        found = dict(dict(self.sections)[title])[label]
        return found if isinstance(found, str) else " ".join(found)


def card(run: Run, others: Sequence[Run] = (), about: About | None = None, quick: bool = False) -> Card:
    """Return the card of ``run``; others: runs on the same clients that are published too.

    quick: leave out the best attacker where it takes minutes.
    Raises InputError: the run has no statement, or one of the runs has one that its ledger goes beyond.
    """
    if not run.privacy:
        raise wrong("card", f"{run.path} without privacy.json", "a run with a statement")
    refuse_seeded("card", run.privacy)
    about = about or About()
    epsilon, delta = metrics.proven_epsilon(run), metrics.number(run.privacy.get("delta"))
    every = [_published(one, [run, *others]) for one in (run, *others)]
    for one, its in zip((run, *others), every):
        if uncounted(one, its.entries):
            found = f"{one.path}, whose ledger has rounds that privacy.json does not count"
            raise wrong("card", found, "a run at its end", hint="fedflat run --resume goes on with it.")
    entries = list(every[0].entries)
    slow = quick and any(entry.get("mechanism") in SLOW for entry in entries)
    bound = None if slow or delta is None else attacker_of(every[:1], epsilon, delta)
    whole = total(every) if others else None
    sections = (
        ("Guarantee", _guarantee(run, bound, slow)), ("Whose data, and what neighbours are", _unit(run)),
        ("Actors and trust", _actors(run)), ("What is released", _released(run)), ("How", _how(run, entries)),
        ("Tuning, preprocessing and public data", _choices(run)), ("Composition", _composition(every, whole)),
        ("Randomness and arithmetic", _randomness(run)), ("Checks", _checks(run, len(entries))),
        ("Contact", (("Contact", about.contact or UNSAID),)),
    )  # fmt: skip
    return Card(run, _sentence(run, epsilon, delta, bound), sections, about, epsilon, delta)


def _published(run: Run, runs: Sequence[Run]) -> Published:
    return published(run, {str(r.path): r.name if [o.name for o in runs].count(r.name) == 1 else str(r.path)
                           for r in runs})  # fmt: skip


def _stated(run: Run, key: str) -> str:
    found = run.privacy.get(key)
    return str(found) if found not in (None, "", []) else UNSAID


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _share(value: float) -> str:
    """Return a share in per cent, rounded up in its third digit: it is a bound."""
    percent = 100 * value
    digits = max(0, 2 - math.floor(math.log10(percent))) if percent > 0 else 0
    # A bound must not be rounded down.
    shown = math.ceil(percent * 10**digits - 1e-9) / 10**digits
    return f"{min(shown, 100):.{digits}f} %"


def _up(value: float) -> str:
    """Return a bound with three digits behind the point, rounded up."""
    return f"{math.ceil(value * 1000 - 1e-9) / 1000:.3f}"


def _epsilon(value: float | None) -> str:
    return metrics.epsilon_text(value if value is None or math.isfinite(value) else None, round_up=True)


def _sentence(run: Run, epsilon: float | None, delta: float | None, bound: Attacker | None) -> str:
    if epsilon is None or delta is None:
        return f"Nothing is proven of this run: no finite ε protects its clients. {_why(run)}".strip()
    if metrics.seeded(run):
        return f"ε of the mechanism = {_epsilon(epsilon)}, δ = {delta:g}. {SEEDED}"
    against = " or ".join(dict.fromkeys(_adversaries(run))) or "whoever sees the released models"
    figure = f"ε = {_epsilon(epsilon)}, δ = {delta:g}"
    if bound is None:
        return f"Each client is protected against {against}: {figure}."
    but = f" but for {delta:g}" if bound.slack else ""
    mu = "" if bound.mu is None else f", Gaussian DP μ = {_up(bound.mu)}{but}"
    asked, these, those = _question(run)
    return (
        f"Each client is protected against {against}: {figure}{mu}; whoever guesses from the release {asked}, knowing "
        f"all others' data, is right about at most {_share(bound.true_positives)} of {these} while wrong about "
        f"{100 * bound.false_positives:g} % of {those}."
    )


def _question(run: Run) -> tuple[str, str, str]:
    """Return what the best attacker asks, as the neighbours differ, and of whom it is right and wrong.

    Who takes part is itself seen by some under trust local and distributed, and where turns are public.
    """
    if "replace-one" in _stated(run, "adjacency"):
        return "which of two data sets a client has", "those with the one", "those with the other"
    if _stated(run, "trust") != "central" or "in place" in _stated(run, "adjacency"):
        return "whether a client sent its update or nothing", "those who did", "those who did not"
    return "whether a client took part", "those who did", "those who did not"


def _why(run: Run) -> str:
    return " ".join(metrics.reasons(run)[:1])


def _adversaries(run: Run) -> list[str]:
    """Return those towards whom the largest ε is proven."""
    every = [a for a in run.privacy.get("adversaries") or [] if isinstance(a, Mapping)]
    known = [(metrics.number(a.get("epsilon")), str(a.get("description") or a.get("adversary"))) for a in every]
    most = max((value for value, _ in known if value is not None), default=None)
    return [text for value, text in known if value == most and most is not None]


def _guarantee(run: Run, bound: Attacker | None, slow: bool) -> tuple[tuple[str, Text], ...]:
    proven, claimed = metrics.proven_epsilon(run), metrics.claimed_epsilon(run)
    second = metrics.number(run.privacy.get("epsilon_at_1e-5"))
    rows: list[tuple[str, Text]] = [(metrics.epsilon_name(run), _epsilon(proven))]
    if claimed is not None and claimed != proven:
        rows.append(("Claimed by a formula", f"{_epsilon(claimed)}; it does not cover what ran"))
    rows.append(("δ", _stated(run, "delta")))
    if second is not None:
        rows.append(("ε at δ = 10⁻⁵", _epsilon(second)))
    if bound is not None and bound.mu is not None:
        but = f", but for {bound.slack:g}: at most Φ(Φ⁻¹(α) + μ) + {bound.slack:g} true positives"
        rows.append(("Gaussian DP", f"μ = {_up(bound.mu)}{but if bound.slack else ''}"))
    if bound is not None:
        rows.append(("Best attacker", _at_most(bound)))
    elif slow:
        rows.append(("Best attacker", "fedflat card works it out; for this mechanism it takes minutes"))
    return tuple([*rows, ("Why no ε is finite", metrics.reasons(run))] if proven is None else rows)


def _at_most(bound: Attacker) -> str:
    at = f"{_share(bound.true_positives)} true positives at {100 * bound.false_positives:g} % false positives"
    return f"at most {at}; {bound.how}"


def _unit(run: Run) -> tuple[tuple[str, Text], ...]:
    return (("Unit", _stated(run, "unit")), ("Neighbouring relation", _stated(run, "adjacency")))


def _actors(run: Run) -> tuple[tuple[str, Text], ...]:
    said = []
    for found in run.privacy.get("adversaries") or []:
        if isinstance(found, Mapping):
            figure = _epsilon(metrics.number(found.get("epsilon")))
            said.append(f"{found.get('adversary')}: ε = {figure} ({found.get('relation')}); {found.get('description')}")
    return (
        ("Trust", f"{_stated(run, 'trust')}: {_stated(run, 'trust_model')}"),
        ("Protected from", said or UNSAID),
        ("Clients", "hold their data and train on them; a client's own update is not hidden from the client itself"),
    )


def _released(run: Run) -> tuple[tuple[str, Text], ...]:
    final = section(run.privacy, "checklist").get("final_output")
    return (
        ("Released", str(final or "the shared model and the metrics of every round")),
        ("Not covered", _texts(run.privacy.get("not_covered")) or UNSAID),
    )


def _how(run: Run, entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, Text], ...]:
    laws = sorted({f"{e.get('sampling')}, q = {e.get('q'):g}" for e in entries if isinstance(e.get("q"), (int, float))})
    again = extra_rounds(entries)
    done = f"{len(entries)} events in the ledger" + (f" ({'; '.join(laws)})" if laws else "")
    done += f", {again} of them charged again" if again else ""
    return (
        ("Sampler", _stated(run, "sampling")), ("As executed", done), ("Mechanism", _stated(run, "mechanism")),
        ("Accountant", f"{_stated(run, 'accountant')}; {_stated(run, 'rounds_charged')} rounds charged"),
    )  # fmt: skip


def _choices(run: Run) -> tuple[tuple[str, Text], ...]:
    data, model = section(run.recipe, "data"), section(run.recipe, "model")
    tuning = section(run.privacy, "checklist").get("tuning") or "not counted"
    done = [f"{key}: {data[key]}" for key in ("scale", "categories", "max_per_client", "tokenizer") if data.get(key)]
    priors = [str(run.privacy["prior"])] if run.privacy.get("prior") else []
    if not priors and (model.get("name") in PRETRAINED or model.get("pretrained")):
        known = {key: value for key, value in model.items() if value is not None}
        priors.append(f"a pretrained {known.get('name')}: whatever its makers trained on is taken for public")
    source = section(run.recipe, "algorithm").get("public")
    priors += [f"public data of the method: {source}"] if source else []
    if section(run.privacy, "facts").get("public_data"):
        priors.append("a public test set, for the accuracies")
    return (
        ("Tuning", str(tuning)),
        ("Preprocessing", "; ".join(done) + " (from public knowledge; not counted)" if done
         else "nothing learnt from clients' data is named by the recipe; what was done before is not counted"),
        ("Public data and priors", priors or "none named by the recipe"),
    )  # fmt: skip


def _composition(every: Sequence[Published], whole: Total | None) -> tuple[tuple[str, Text], ...]:
    if whole is None:
        alone = "this run alone; every other release on the same clients adds to it (fedflat card RUN --with OTHER)"
        return (("Counted", alone),)
    figure = (
        f"ε = {_epsilon(whole.epsilon)} at δ = {whole.delta:g} ({whole.relation})"
        if math.isfinite(whole.epsilon) and not whole.unbounded else "no finite ε"
    )  # fmt: skip
    rows: list[tuple[str, Text]] = [("Counted", [run.name for run in every]), ("All together", figure)]
    if math.isfinite(whole.epsilon) and not whole.unbounded:
        bound = attacker_of(every, whole.epsilon, whole.delta)
        if bound is not None:
            rows.append(("Best attacker on all", _at_most(bound)))
    if whole.unbounded:
        rows.append(("Without a guarantee", list(whole.unbounded)))
    return tuple([*rows, ("How", list(whole.reasons))] if whole.reasons else rows)


def _randomness(run: Run) -> tuple[tuple[str, Text], ...]:
    share = metrics.number(run.privacy.get("rounding"))
    rounding = UNSAID if share is None else f"the sensitivity that is accounted is C·(1 + {share:.3g})"
    return (
        ("Random source", _stated(run, "noise_source")), ("Floating point", _stated(run, "floating_point")),
        ("Rounding of sums", rounding),
    )  # fmt: skip


def _checks(run: Run, events: int) -> tuple[tuple[str, Text], ...]:
    found = statement.short(run)
    told = f"ε {found}; the audit looked at clients' data, and no guarantee covers its figure" if found else "no audit"
    path = run.path / "ledger.jsonl"
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no ledger.jsonl"
    version = section(run.recipe, "versions").get("fedflat")
    return (
        ("Audited lower bound", told), ("Ledger", f"{events} events, SHA-256 {digest}"),
        ("Recompute", "fedflat verify RUN, with RUN the folder of the run or of its export"),
        ("Made by", f"fedflat {version}" if version else "fedflat"),
    )  # fmt: skip


def markdown(found: Card) -> str:
    """Return the card as Markdown."""
    lines = [f"# Privacy card: {_escaped(found.title)}", "", _escaped(found.sentence)]
    for title, rows in found.sections:
        lines += ["", f"## {title}", ""]
        for label, text in rows:
            lines += [f"- **{label}:** {_escaped(text)}"] if isinstance(text, str) else [f"- **{label}:**"]
            lines += [] if isinstance(text, str) else [f"  - {_escaped(item)}" for item in text]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    for mark in "&\\`*_[]<>|#":
        text = text.replace(mark, {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.get(mark, f"\\{mark}"))
    return " ".join(text.split())


VARYING = ("Composition", "Contact", "Tuning, preprocessing and public data")
"""Sections that may follow from what no run's folder holds: other runs, and what somebody said (``--about``)."""


def figures(found: Card, page: bool) -> list[str]:
    """Return the texts of a card that follow from the run alone, as they stand in card.html (``page``) or card.md."""
    rows = [text for title, pairs in found.sections if title not in VARYING for _, text in pairs]
    texts = [found.sentence, *(line for text in rows for line in ([text] if isinstance(text, str) else text))]
    return [str(escape(text)) if page else _escaped(text) for text in texts]


def html(found: Card) -> str:
    """Return the card as a page of its own: one file, no script, no network."""
    style = Markup(asset("page.css"))
    return str(filled("card.html", card=found, style=style))


def brief(run: Run) -> Card | str:
    """Return the card for a report, without what takes long; a sentence where there can be none."""
    try:
        return card(run, quick=True)
    except InputError as error:
        return str(error)


TRUST = {"central": "Central", "distributed": "Federated", "local": "Local"}
CHOICES, HOW, CHECKS = "Tuning, preprocessing and public data", "How", "Checks"
ACTORS, RELEASED = "Actors and trust", "What is released"


def registry_entry(found: Card, today: datetime.date | None = None) -> dict[str, Any]:
    """Return the card as an entry of the public registry, not yet checked.

    Raises:
        InputError: no finite ε is proven, so that there is nothing to enter.
    """
    if found.epsilon is None or found.delta is None:
        raise wrong("registry entry", "a run without a finite proven ε", "a run with one")
    words = "".join(c if c.isalnum() and c.isascii() else " " for c in found.title.lower()).split()
    deployment = {
        "basic": _basic(found, str(today or datetime.date.today())),
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": "Collections of clients' data sets, one for each of the public number of clients.",
            "unprotected_quantities": found.text(RELEASED, "Not covered"),
        },
        "privacy_loss": {
            "privacy_unit": "client",
            "privacy_unit_details": f"{_text_of(found, 'unit')}. {_text_of(found, 'adjacency')}",
            "privacy_parameters": {"epsilon": found.epsilon, "delta": found.delta},
            "privacy_parameters_details": found.sentence,
        },
        "deployment_model": _model(found),
        "accounting": {
            "post_processing": "The server's optimizer and steps after the noise use no client's data.",
            "composition": f"{found.text(HOW, 'Accountant')}. {_composed(found)}",
        },
        "implementation": _implementation(found),
        "administrative": _administrative(found),
    }
    return {"url_slug": "-".join(words) or "run", "status": "Draft", "tier": 3, "deployment": deployment}


def _text_of(found: Card, key: str) -> str:
    return str(found.run.privacy.get(key) or UNSAID)


def _basic(found: Card, today: str) -> dict[str, Any]:
    about = found.about
    return {
        "name": found.title, "data_curators": about.curators or [UNSAID],
        "description": about.description or _described(found.run), "intended_use": about.intended_use or UNSAID,
        "data_product_type": "Machine learning model", "data_product_region": about.region or UNSAID,
        "publication_date": about.publication_date or today, "data_product_sector": about.sector,
    }  # fmt: skip


def _described(run: Run) -> str:
    data, model = section(run.recipe, "data").get("dataset"), section(run.recipe, "model").get("name")
    return f"A model ({model}) trained on {data} with federated learning ({run.algorithm})."


def _model(found: Card) -> dict[str, Any]:
    protected = dict(dict(found.sections)[ACTORS])["Protected from"]
    actors = protected if isinstance(protected, str) else ". ".join(protected)
    return {
        "model_name": TRUST.get(_text_of(found, "trust"), "Varies"), "model_name_details": found.text(ACTORS, "Trust"),
        "actors": f"{actors}. Clients: {found.text(ACTORS, 'Clients')}.", "release_type": "One release",
        "release_type_details": f"One training. {found.text(RELEASED, 'Released')}", "data_source_type": "Static",
        "data_source_type_details": "A client's data do not change during the training.",
        "access_type": "Non-interactive", "access_type_details": "Whoever has the model has it; nothing is queried.",
    }  # fmt: skip


def _composed(found: Card) -> str:
    rows = dict(dict(found.sections)["Composition"])
    return ". ".join(f"{label}: {text if isinstance(text, str) else ', '.join(text)}" for label, text in rows.items())


def _implementation(found: Card) -> dict[str, Any]:
    before = [
        f"{label}: {found.text(CHOICES, label)}" for label in ("Tuning", "Preprocessing", "Public data and priors")
    ]
    how = [found.text(HOW, "Mechanism"), f"Sampler: {found.text(HOW, 'Sampler')}"]
    how += [f"Random source: {_text_of(found, 'noise_source')}.", _text_of(found, "floating_point")]
    return {
        "preprocessing_and_hyperparameter_tuning": "; ".join(before),
        "mechanisms": " ".join([*how, f"Library: {found.text(CHECKS, 'Made by')}."]),
        "justification": found.about.justification or UNSAID,
    }


def _administrative(found: Card) -> dict[str, Any]:
    about = found.about
    notes = [] if about.publication_date else ["The publication date is the day on which this draft was written"]
    notes += [f"Ledger: {found.text(CHECKS, 'Ledger')}", f"Audit: {found.text(CHECKS, 'Audited lower bound')}"]
    return {
        "sources": about.sources or UNSAID,
        "notes": ". ".join([*notes, f"Contact: {about.contact or UNSAID}"]),
        "registry_authors": about.authors or [UNSAID],
    }
