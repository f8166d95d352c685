"""A privacy card as a draft entry of the public registry of deployments; ``registry`` says what the schema allows."""

from __future__ import annotations

import datetime
from typing import Any

from fedflat.core.checks import wrong
from fedflat.report.card import Card
from fedflat.report.metrics import Run, section
from fedflat.report.registry import UNSAID

TRUST = {"central": "Central", "distributed": "Federated", "local": "Local"}
CHOICES, HOW, CHECKS = "Tuning, preprocessing and public data", "How", "Checks"
ACTORS, RELEASED = "Actors and trust", "What is released"


def registry_entry(found: Card, today: datetime.date | None = None) -> dict[str, Any]:
    """The card as an entry of the public registry, not yet checked.

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
            "privacy_unit_details": f"{_stated(found, 'unit')}. {_stated(found, 'adjacency')}",
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


def _stated(found: Card, key: str) -> str:
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
        "model_name": TRUST.get(_stated(found, "trust"), "Varies"),
        "model_name_details": found.text(ACTORS, "Trust"),
        "actors": f"{actors}. Clients: {found.text(ACTORS, 'Clients')}.",
        "release_type": "One release",
        "release_type_details": f"One training. {found.text(RELEASED, 'Released')}",
        "data_source_type": "Static",
        "data_source_type_details": "A client's data do not change during the training.",
        "access_type": "Non-interactive",
        "access_type_details": "Whoever has the model has it; nothing is queried.",
    }


def _composed(found: Card) -> str:
    rows = dict(dict(found.sections)["Composition"])
    return ". ".join(f"{label}: {text if isinstance(text, str) else ', '.join(text)}" for label, text in rows.items())


def _implementation(found: Card) -> dict[str, Any]:
    before = [
        f"{label}: {found.text(CHOICES, label)}" for label in ("Tuning", "Preprocessing", "Public data and priors")
    ]
    how = [found.text(HOW, "Mechanism"), f"Sampler: {found.text(HOW, 'Sampler')}"]
    how += [f"Random source: {_stated(found, 'noise_source')}.", _stated(found, "floating_point")]
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
