"""Write the report of one run, or of several side by side: one HTML file without any network reference."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fedflat.privacy.statement import SEEDED
from fedflat.report import metrics, pages, statement, tables, wording
from fedflat.report.card import Card, brief
from fedflat.report.figures import Figure, Series, class_names, figures_of_groups, figures_of_run, last_classes
from fedflat.report.groups import Group, differing, group_runs, setting
from fedflat.report.metrics import Run, epsilon_text, section
from fedflat.report.pages import PRIVATE, Section, Table, cards
from fedflat.report.statement import facts, readable, statement_of
from fedflat.report.summary import cautions, remarks

MARK = "Noise from the seed: protects nobody"
"""What lies across the page of a seeded run."""


def write_report(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Write the report of one run, or the comparison of several, to ``out`` and return its path.

    What is private to the simulation is not on that page, but on one of its own in the folder ``private`` beside it.

    Args:
        runs: run folders, or folders that hold run folders.
        out: the HTML file to write (replaced in one step), or a folder, which receives ``report.html``.

    Raises:
        InputError: a folder is missing or is not a run.
    """
    target = Path(out, "report.html") if Path(out).is_dir() else Path(out)
    loaded = metrics.read_runs(runs)
    target.parent.mkdir(parents=True, exist_ok=True)
    if any(run.private for run in loaded):
        hidden = target.parent / "private"
        # Only the owner may read what no guarantee covers.
        hidden.mkdir(mode=0o700, exist_ok=True)
        pages.write(render(loaded), hidden / target.name, mode=0o600)
        loaded = [public(run) for run in loaded]
    return pages.write(render(loaded), target)


def public(run: Run) -> Run:
    """Return the run without what is private to the simulation."""
    return replace(run, private=[])


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of the page on these runs."""
    return figures_of_run(runs[0]) if len(runs) == 1 else figures_of_groups(group_runs(runs))


def render(runs: Sequence[Run]) -> str:
    """Return the page as text: a single run's report, or a comparison."""
    if len(runs) == 1:
        words = _words(runs[0])
        title, lead, sections = runs[0].name, words["lead"], _run_sections(runs[0], words)
    else:
        groups = group_runs(runs)
        title = " · ".join(group.label for group in groups) if len(groups) <= 3 else f"{len(groups)} methods compared"
        lead = f"{len(runs)} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}"
        lead += "; bands show one standard deviation over seeds" if len(runs) > len(groups) else ""
        sections = _comparison_sections(groups)
    lead += f" · {date}" if (date := _date(runs)) else ""
    # For programs: ``fedflat verify`` compares the statements on a page with the runs' own.
    guarantees = [{"run": run.name, "seed": run.seed, "privacy": run.privacy} for run in runs]
    mark = MARK if any(map(metrics.seeded, runs)) else ""
    version = section(runs[0].recipe, "versions").get("fedflat", "")
    return pages.page(title, lead, sections, f"fedflat {version}".strip(), data=guarantees, mark=mark)


def _date(runs: Sequence[Run]) -> str:
    """Return the day on which the last record of the runs was written (UTC); empty without any."""
    files = [path for run in runs if (path := run.path / "metrics.jsonl").is_file()]
    if not files:
        return ""
    day = datetime.datetime.fromtimestamp(max(path.stat().st_mtime for path in files), datetime.UTC)
    return f"{day.day} {day:%B %Y}"


def _words(run: Run) -> dict[str, Any]:
    """Return what a page says of a run: its lead, what is public of the data, and what is read with its ε."""
    stated = metrics.stated(run)
    classes = {"names": class_names(run), "count": len(last_classes(run))}
    values = {**stated, **classes, "partition": section(stated["data"], "partition"), "readable": readable}
    return cast(dict[str, Any], wording.texts("page.yaml", values))


# ---------------------------------------------------------------------------------------------------- single run


def _run_sections(run: Run, words: dict[str, Any]) -> list[Section]:
    privacy_card = brief(run) if run.privacy else None
    curves, simulation = _figure_sections(figures_of_run(run))
    return [
        Section("summary", "", "tiles", _summary(run, words, privacy_card)),
        Section("use", "Use this model", "use", _use(run)),
        Section("data", "Data", "facts", words.get("data")),
        curves,
        Section("guarantee", "Guarantee", "guarantee", {"card": privacy_card, "statement": statement_of(run)}),
        Section("audit", "Audit", "audit", _audit(run)),
        simulation,
        Section("recipe", "Recipe", "recipe", _recipe(run)),
        Section("reproduce", "Reproduce", "reproduce", {"folder": f"{run.name}-again"}),
    ]


def _use(run: Run) -> dict[str, Any] | None:
    """Return what the lines that load the model and answer for new rows name; None for a run without a round.

    An export's page names no folder: the original's name may tell the seed.
    """
    if not run.metrics:
        return None
    exported = run.seed is None
    name = "." if exported else run.path.resolve().name or "RUN"
    return {"name": name, "exported": exported, "predicts": bool(section(run.recipe, "data").get("inputs"))}


def _summary(run: Run, words: dict[str, Any], privacy_card: Card | str | None) -> dict[str, Any]:
    return {
        "sentence": privacy_card.sentence if isinstance(privacy_card, Card) else "",
        "facts": metrics.summary(run),
        # The best round must not stand for a run that came to nothing.
        "fate": metrics.FATES.get(metrics.fate(run), ""),
        "epsilon_name": metrics.epsilon_name(run),
        "beside_epsilon": words.get("beside_epsilon", "").removesuffix(";"),
        "own": {statement.title(key): metrics.last(run.metrics, key) for key in metrics.own_metrics(run.metrics)},
        "notices": [notice for notice in _notices(run) if notice["lines"]],
        "notes": remarks(run.metrics, run.private),
    }


def _notices(run: Run) -> list[dict[str, Any]]:
    proven, claimed = epsilon_text(metrics.proven_epsilon(run)), metrics.claimed_epsilon(run)
    claim = f"{metrics.epsilon_name(run)} is {proven}; the formula claims {epsilon_text(claimed)}"
    head = f"{claim}, which does not cover what ran."
    over = [audit for audit in run.audits if statement.exceeded(audit)]
    lines = [f"{audit.get('kind')}: {', '.join(statement.reading(audit))}" for audit in over]
    return [
        {"lead": "This model protects nobody", "lines": [SEEDED] if metrics.seeded(run) else []},
        {"lead": head, "lines": [] if claimed is None else metrics.reasons(run)},
        {"lead": "An audit found more than is proven: the proof or the code is wrong.", "lines": lines},
        {"lead": "Warnings", "lines": cautions(run.privacy, run.metrics, run.private)},
    ]


def _audit(run: Run) -> dict[str, Any] | None:
    if not run.audits:
        return None
    table = Table("Audits of this run", statement.HEADS, [statement.cells(audit) for audit in run.audits])
    return {"table": table, "rule": statement.WORDS["rule"], "notes": statement.notes(run.audits)}


def _recipe(run: Run) -> dict[str, Any] | str:
    import yaml

    if not run.recipe:
        return "The folder holds no recipe.yaml."
    recipe = {key: value for key, value in run.recipe.items() if key != "versions"}
    text = yaml.safe_dump(_without_nulls(recipe), sort_keys=False, allow_unicode=True, width=78)
    versions = section(run.recipe, "versions")
    return {"text": text, "versions": facts(versions, verbatim=True) if versions else None}


def _without_nulls(part: Any) -> Any:
    """Return a recipe's part without the keys that are null."""
    return {k: _without_nulls(v) for k, v in part.items() if v is not None} if isinstance(part, dict) else part


# ------------------------------------------------------------------------------------------------------- figures


def _figure_sections(figures: Sequence[Figure], chips: Sequence[Series] = ()) -> tuple[Section, Section]:
    """Return the section of the figures that are public, and that of those that are private to the simulation."""
    public, private = ([figure for figure in figures if figure.private is hidden] for hidden in (False, True))
    curves = Section("curves", "Curves", "cards", cards(public, chips=chips))
    return curves, Section("simulation", "Inside the simulation", "folded_cards", cards(private, PRIVATE))


# ---------------------------------------------------------------------------------------------------- comparison


def _comparison_sections(groups: Sequence[Group]) -> list[Section]:
    chips = [Series(group.label, {}, style=group.style) for group in groups]
    curves, simulation = _figure_sections(figures_of_groups(groups), chips)
    table = tables.comparison_table(groups)
    # What publishing all of the runs costs.
    costs = tables.cost_sentences(table.together)
    together = {"lead": costs[0], "lines": costs[1:]} if costs else None
    statements = [(group.label, statement_of(group.runs[0])) for group in groups]
    return [
        Section("summary", "", "noted_table", _comparison(table)),
        curves,
        Section("differences", "What differs", "table", _differences(groups)),
        Section("runs", "Runs", "table", _runs_table(groups)),
        Section("guarantee", "Guarantees", "statements", {"together": together, "each": statements}),
        simulation,
        Section("recipe", "Recipes", "recipes", [(group.label, _recipe(group.runs[0])) for group in groups]),
    ]


def _comparison(table: tables.Comparison) -> dict[str, Any]:
    columns = tables.columns(table)
    heads = [column.heading[:1].upper() + column.heading[1:] if column.left else column.heading for column in columns]
    rows = [[column.text(row) for column in columns] for row in table.rows]
    notes = [note for note in tables.notes(table) if note != table.headline]
    return {"table": Table("Comparison", heads, rows), "notes": notes, "headline": table.headline}


def _differences(groups: Sequence[Group]) -> Table | None:
    settings = [setting(group.runs[0]) for group in groups]
    keys = differing(settings)
    if not keys:
        return None
    rows = [[key, *(readable(flat.get(key)) for flat in settings)] for key in keys]
    return Table("Recipe keys that differ", ["Key", *(group.label for group in groups)], rows, left=len(groups) + 1)


def _runs_table(groups: Sequence[Group]) -> Table:
    """Return a row for each run."""
    runs = [(run, group.label) for group in groups for run in group.runs]
    proven = "ε of the mechanism" if any(metrics.seeded(run) for run, _ in runs) else "ε proven"
    rows = []
    for run, label in runs:
        seed = "–" if run.seed is None else str(run.seed)
        final, epsilon = wording.percent(metrics.final_accuracy(run)), epsilon_text(metrics.proven_epsilon(run))
        rows.append([run.name, label, seed, str(metrics.finished_rounds(run)), final, epsilon])
    return Table("Every run", ["Run", "Method", "seed", "rounds", "final %", proven], rows, left=2)
