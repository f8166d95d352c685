"""The privacy card: every figure from statement and ledger, names harmless, registry entries as the schema has them."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import escape

import fedflat
from fedflat.core.checks import InputError
from fedflat.privacy.ledger import read
from fedflat.privacy.together import Published, total
from fedflat.report.card import as_yaml, brief, card, html, markdown, registry_entry
from fedflat.report.figures import figures_of_run
from fedflat.report.html import render
from fedflat.report.metrics import NO_EPSILON, epsilon_text, read_run
from fedflat.simulation.result import export

NAME = "<img src=x onerror=alert(1)> & *many*"


def recipe(seed: int = 0, **change: Any) -> dict[str, Any]:
    return {
        "name": NAME, "seed": seed, "rounds": 3, "data": {"dataset": "digits", "clients": 20},
        "model": {"name": "mlp", "hidden": 4}, "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 8},
        "cohort": {"size": 10}, "privacy": {"clip": 0.5, "epsilon": 8}, "engine": {"backend": "sequential"}, **change,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    fedflat.run(recipe(), out=path / "one")
    fedflat.run(recipe(1), out=path / "two")
    fedflat.run(recipe(algorithm="fedavg", privacy={}), out=path / "plain")
    return path


def test_every_figure_is_the_runs_own(folder: Path) -> None:
    run = read_run(folder / "one")
    found = card(run)
    proven = math.ceil(100 * run.privacy["proven_epsilon"]) / 100
    for told in (f"ε = {proven:.2f}", "δ = 0.005", "may be right about all of those who did"):
        assert told in found.sentence
    assert found.text("Guarantee", "Any attacker") == "at most 100 % true positives at 1 % false positives"
    digest = hashlib.sha256((folder / "one" / "ledger.jsonl").read_bytes()).hexdigest()
    assert found.text("Checks", "Ledger").endswith(digest)
    assert found.text("How", "As executed") == "3 events in the ledger (poisson, q = 0.5)"
    assert found.text("What is released", "Not covered") == " ".join(run.privacy["not_covered"])
    assert found.text("Tuning, preprocessing and public data", "Tuning").startswith("Not counted")
    assert "this run alone" in found.text("Composition", "Counted")
    assert [*found.sections][-1] == "Checks"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(8.004, "8.01"), (8.0, "8.00"), (7.99919, "8.00"), (0.12341, "0.124"), (0.00999901, "0.01"), (1e-7, "1e-07"),
     (1234.2, "1,235"), (999.999, "1,000"), (0.0, "0"), (None, NO_EPSILON)],
)  # fmt: skip
def test_a_bound_is_never_rounded_down(value: float | None, shown: str) -> None:
    assert epsilon_text(value) == shown


def test_runs_published_together(folder: Path) -> None:
    one, two = (read_run(folder / name) for name in ("one", "two"))
    found = card(one, [two])
    known = [(r, r.privacy["proven_epsilon"], read(r.path / "ledger.jsonl")) for r in (one, two)]
    whole = total([Published(r.name, epsilon, 0.005, entries) for r, epsilon, entries in known])
    assert f"ε = {math.ceil(100 * whole.epsilon) / 100:.2f} at δ = 0.01" in found.text("Composition", "All together")
    assert found.text("Composition", "Counted") == "one two"
    assert found.text("Composition", "Same clients").endswith("so it cannot be checked")
    alike = card(one, [dataclasses.replace(two, name="one")])
    assert alike.text("Composition", "Counted") == "one #1 one #2"  # and no path of this machine
    assert "counts once" in card(one, [one]).text("Composition", "How")
    mixed = card(one, [read_run(folder / "plain")])
    assert mixed.text("Composition", "All together") == "no finite ε"
    assert mixed.text("Composition", "Without a guarantee") == "plain"
    assert "All together: no finite" in registry_entry(mixed)["deployment"]["accounting"]["composition"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "whether a client took part"),
        ({"privacy": {"clip": 0.5, "epsilon": 8, "trust": "local"}}, "which of two data sets a client has"),
        ({"privacy": {"clip": 0.5, "epsilon": 8, "trust": "distributed"}, "cohort": {"size": 15}},
         "whether a client sent its update or nothing"),
        ({"cohort": {"size": 5, "sampling": "fixed"}}, "which of two data sets a client has"),
    ],
)  # fmt: skip
def test_the_attacker_asks_what_neighbours_differ_in(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Who takes part is no secret from a server that sees each update, nor what replace-one bounds."""
    fedflat.run(recipe(**{"rounds": 1, **change}), out=tmp_path / "run")
    assert said in card(read_run(tmp_path / "run")).sentence


def test_a_statement_that_the_ledger_goes_beyond_gives_no_card(folder: Path, tmp_path: Path) -> None:
    """A run that ended early, was resumed and then killed still has its first statement."""
    behind = tmp_path / "behind"
    shutil.copytree(folder / "one", behind)
    said = json.loads((behind / "privacy.json").read_text())
    said["rounds_charged"] -= 1
    (behind / "privacy.json").write_text(json.dumps(said))
    for runs in ([behind], [folder / "two", behind]):
        with pytest.raises(InputError, match="does not count"):
            card(read_run(runs[0]), [read_run(other) for other in runs[1:]])
    with pytest.raises(InputError, match="as it was written"):
        export(behind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_proven_nothing_promised(folder: Path) -> None:
    found = card(read_run(folder / "plain"))
    assert found.sentence.startswith("Nothing is proven of this run") and "Any attacker" not in html(found)
    with pytest.raises(InputError, match="finite proven"):
        registry_entry(found)


def test_names_are_text_and_the_page_is_one_file(folder: Path) -> None:
    found = card(read_run(folder / "one"))
    page, plain = html(found), markdown(found)
    for bad in ("<img src=x", "<script", "http://", "https://"):
        assert bad not in page.replace("&lt;", "")
    assert "&lt;img src=x" in page and "<script>" not in plain and r"&amp; \*many\*" in plain
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page and "default-src 'none'" in page


def test_no_name_turns_the_text_around(folder: Path) -> None:
    run = read_run(folder / "one")
    run.recipe["name"] = "safe\u202eeslaf\x1b[31m"
    found = card(run)
    assert found.title == "safeeslaf[31m"
    assert not set("\u202e\x1b") & set(html(found) + markdown(found))


def test_the_report_shows_it(folder: Path) -> None:
    page = render([read_run(folder / "one")])
    assert 'id="guarantee"' in page and "whoever guesses from the release" in page
    found = brief(read_run(folder / "one"))
    assert not isinstance(found, str) and page.count(str(escape(found.sentence))) == 1
    empty = read_run(folder / "one").__class__(folder, "x", {}, [], [], {})
    assert "without privacy.json" in str(brief(empty)) and "nothing is proven" in render([empty])


def test_a_seeded_run_bounds_no_attacker(tmp_path: Path) -> None:
    fedflat.run(recipe(privacy={"clip": 0.5, "epsilon": 2, "randomness": "seeded"}), out=tmp_path / "run")
    assert "Any attacker" not in html(card(read_run(tmp_path / "run")))


def fits(entry: Any, schema: Any) -> bool:
    """Whether an entry has what ``registry.yaml`` says, and nothing else; a sector is missing."""
    if isinstance(schema, dict):
        needed = {name for name, kind in schema.items() if kind != "sector"}
        return needed <= set(entry) <= set(schema) and all(fits(part, schema[name]) for name, part in entry.items())
    if isinstance(schema, list):
        return entry in schema
    kinds = {"texts": list, "number": float, "text": str, "day": str}
    day = schema != "day" or datetime.date.fromisoformat(entry).isoformat() == entry
    return type(entry) is kinds[schema] and bool(entry) and day


def test_an_entry_is_what_the_schema_takes(folder: Path) -> None:
    run = read_run(folder / "one")
    run.recipe["name"] = "Digits"
    entry = yaml.safe_load(as_yaml(registry_entry(card(run), datetime.date(2026, 3, 4))))
    basic = entry["deployment"]["basic"]
    assert (entry["url_slug"], entry["status"], entry["tier"]) == ("digits", "Draft", 3)
    assert basic["publication_date"] == "2026-03-04" and basic["data_product_type"] == "Machine learning model"
    loss = entry["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": run.privacy["proven_epsilon"], "delta": 0.005}
    assert entry["deployment"]["deployment_model"]["model_name"] == "Central"
    assert "day on which this draft" in entry["deployment"]["administrative"]["notes"]
    schema = yaml.safe_load(Path(__file__).with_name("registry.yaml").read_text())
    assert fits(entry, schema)
    assert not fits(entry | {"tier": "3"}, schema) and not fits(entry | {"surprise": 1}, schema)
    del entry["deployment"]["accounting"]
    assert not fits(entry, schema)


def test_the_command(folder: Path, tmp_path: Path, command: Any) -> None:
    out = tmp_path / "out"
    found = command("card", str(folder / "one"), "--with", str(folder / "two"), "--out", str(out))
    assert found.status == 0 and "All 2 runs together: ε = " in found.out, found
    assert sorted(path.name for path in out.iterdir()) == ["card.html", "card.md", "registry.yaml"]
    assert "not stated" in (out / "registry.yaml").read_text() and "is a draft" in found.out
    plain = command("card", str(folder / "plain"), "--out", str(out / "plain")).out
    assert "card.html, card.md\n" in plain and "No entry for the registry" in plain


def test_no_folder_is_one_line_at_once(folder: Path, tmp_path: Path, command: Any) -> None:
    missing = command("card", str(tmp_path / "nowhere"))
    assert missing.status == 2 and "no such folder" in missing.err
    (tmp_path / "file").touch()
    refused = command("card", str(folder / "one"), "--out", str(tmp_path / "file"))
    assert refused.status == 2 and "cannot be written" in refused.err


def test_an_exported_folder_stays_sealed(folder: Path, tmp_path: Path, command: Any) -> None:
    target = tmp_path / "handed-over"
    export(folder / "one", target)
    refused = command("card", str(target))
    assert refused.status == 2 and "sealed" in refused.err
    assert command("card", str(target), "--out", str(tmp_path / "card")).status == 0
    assert command("verify", str(target)).status == 0


def test_the_registrys_words_are_its_own(folder: Path) -> None:
    """As opendp/deployments-registry-data spells them: a renaming in this code must not reach them."""
    for trust, name in {"central": "Central", "distributed": "Federated", "local": "Local", "else": "Varies"}.items():
        run = read_run(folder / "one")
        run.privacy["trust"] = trust
        assert registry_entry(card(run))["deployment"]["deployment_model"]["model_name"] == name


def test_figures_are_labelled_in_words(folder: Path) -> None:
    labels = {series.label for figure in figures_of_run(read_run(folder / "one")) for series in figure.series}
    assert "Median" in labels and not any(any(c.isupper() for c in label[1:]) for label in labels if " " not in label)


def test_a_run_without_its_ledger_has_no_card(folder: Path, tmp_path: Path, command: Any) -> None:
    """Its ε is that of events which nobody can see any more; a run without a finite ε never had any."""
    shutil.copytree(folder / "one", tmp_path / "one")
    (tmp_path / "one" / "ledger.jsonl").unlink(missing_ok=True)
    found = command("card", str(tmp_path / "one"))
    assert found.status == 2 and "without ledger.jsonl" in found.err
