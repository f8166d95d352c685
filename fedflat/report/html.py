"""The report of one run, or of several side by side: one self-contained HTML file without any network reference."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedflat.report import audited, metrics, pages, svg, tables
from fedflat.report.card import brief
from fedflat.report.cautions import cautions
from fedflat.report.figures import Figure, Series, figures_of_run
from fedflat.report.groups import Group, differing, group_runs, paired_difference, setting
from fedflat.report.headline import best_private
from fedflat.report.metrics import Run, column, final_accuracy, section
from fedflat.report.overlays import figures_of_groups
from fedflat.report.pages import Section, Table
from fedflat.report.statement import facts, readable, statement_of
from fedflat.report.together import cost_sentences, costs

PRIVATE = "Private to the simulation, not covered by the guarantee"


def write_report(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Write the report of one run, or the comparison of several, to ``out`` and return its path.

    Args:
        runs: run folders, or folders that hold run folders.
        out: the HTML file to write (replaced in one step), or a folder, which receives ``report.html``.

    Raises:
        InputError: a folder is missing or is not a run.
    """
    target = Path(out)
    target = target / "report.html" if target.is_dir() else target
    page = render(metrics.read_runs(runs))
    target.parent.mkdir(parents=True, exist_ok=True)
    return pages.write(page, target)


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the page on these runs."""
    return figures_of_run(runs[0]) if len(runs) == 1 else figures_of_groups(group_runs(runs))


def render(runs: Sequence[Run]) -> str:
    """The page as text: a single run's report, or a comparison."""
    if len(runs) == 1:
        title, lead, sections = runs[0].name, _lead(runs[0]), _run_sections(runs[0])
    else:
        groups = group_runs(runs)
        title = " · ".join(group.label for group in groups) if len(groups) <= 3 else f"{len(groups)} methods compared"
        lead = f"{len(runs)} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}"
        lead += "; bands show one standard deviation over seeds" if len(runs) > len(groups) else ""
        sections = _comparison_sections(groups)
    return pages.page(title, lead, sections, _versions(runs[0]))


def _versions(run: Run) -> str:
    found = section(run.recipe, "versions").get("fedflat")
    return f"fedflat {found}" if found else "fedflat"


def _lead(run: Run) -> str:
    data, cohort = section(run.recipe, "data"), section(run.recipe, "cohort")
    parts = [run.algorithm, data.get("dataset"), section(run.recipe, "model").get("name")]
    if data.get("clients"):
        size = cohort.get("size")
        parts.append(f"{data['clients']} clients" + (f", about {readable(size)} a round" if size else ""))
    if run.seed is not None:
        parts.append(f"seed {run.seed}")
    return " · ".join(str(part) for part in parts if part)


# ---------------------------------------------------------------------------------------------------- single run


def _run_sections(run: Run) -> list[Section]:
    figures = figures_of_run(run)
    return [
        Section("summary", "", "tiles", _summary(run)),
        Section("curves", "Curves", "cards", cards([figure for figure in figures if not figure.private])),
        Section("simulation", "Inside the simulation", "cards", _private_cards(figures)),
        Section("card", "Privacy card", "privacy_card", brief(run) if run.privacy else None),
        Section("privacy", "Privacy statement", "statement", statement_of(run)),
        Section("audit", "Audit", "audit", _audit(run)),
        Section("recipe", "Recipe", "recipe", _recipe(run)),
        Section("reproduce", "Reproduce", "reproduce", _reproduce(run)),
    ]


def _tile(label: str, value: str, below: str, kind: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "below": below, "kind": kind}


def _summary(run: Run) -> dict[str, Any]:
    return {"tiles": _tiles(run), "notices": [each for each in _notices(run) if each["lines"]]}


def _tiles(run: Run) -> list[dict[str, str]]:
    found = metrics.summary(run)
    shown, never = found["best_accuracy"], "never evaluated on test data"
    best = never if shown is None else f"best {tables.percent(shown)} % after round {found['best_round'] + 1}"
    planned = found["rounds_planned"]
    rounds = found["rounds"]
    ended = f"of {planned} planned" if planned and planned != rounds else "as planned" if planned else ""
    tested = _tile(
        "Test accuracy", _percent(found["final_accuracy"]), best if found["final_accuracy"] is not None else never
    )
    if found["final_accuracy"] is None and found["final_loss"] is not None:  # a task without an accuracy
        tested = _tile("Test loss", f"{found['final_loss']:.4g}", "public test data")
    others = {key: column(run.metrics, key) for key in metrics.own_metrics(run.metrics)}
    tiles = [
        tested,
        *[_tile(key.replace("_", " ").capitalize(), f"{p[-1][1]:.4g}", "") for key, p in others.items() if p],
        _epsilon_tile(run),
        _tile("Rounds", f"{rounds:,}", ended),
        _tile("Time", tables.duration(found["seconds"]), _pace(rounds, found["seconds"])),
    ]
    if found["personal_accuracy"] is not None:
        tiles.append(_tile("Personal accuracy", _percent(found["personal_accuracy"]), PRIVATE, "private"))
    return tiles


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{tables.percent(value)} %"


def _pace(rounds: int, seconds: float) -> str:
    each = seconds / rounds if rounds else 0.0
    return f"{tables.duration(each) if each >= 0.1 else f'{1000 * each:.0f} ms'} a round" if each else ""


def _epsilon_tile(run: Run) -> dict[str, str]:
    proven, claimed = metrics.proven_epsilon(run), metrics.claimed_epsilon(run)
    delta = metrics.number(run.privacy.get("delta"))
    below = [f"δ = {delta:g}"] if delta is not None and (proven or claimed) is not None else []
    if claimed is not None:
        below.append(f"claimed by the formula: {tables.epsilon_text(claimed)}")
    if found := audited.short(run):
        below.append(f"audited: {found}")
    if found := audited.greatest(run):
        below.append(f"one client moves the release by {found}")
    if proven is None and claimed is None:
        below.append((metrics.reasons(run) or ["no finite ε is proven"])[0])
    return _tile("Proven ε", tables.epsilon_text(proven), "; ".join(below))


def _notices(run: Run) -> list[dict[str, Any]]:
    proven, claimed = tables.epsilon_text(metrics.proven_epsilon(run)), metrics.claimed_epsilon(run)
    head = f"Proven ε is {proven}; the formula claims {tables.epsilon_text(claimed)}, which does not cover what ran."
    over = [audit for audit in run.audits if audited.exceeded(audit)]
    found = [f"{audit.get('kind')}: {audited.audited_text(audit)}, {audited.verdict(audit)}" for audit in over]
    return [
        {"lead": head, "lines": [] if claimed is None else metrics.reasons(run)},
        {"lead": "An audit found more than is proven: the proof or the code is wrong.", "lines": found},
        {"lead": "Warnings", "lines": cautions(run.privacy, run.metrics, run.private)},
    ]


def _audit(run: Run) -> dict[str, Any] | None:
    if not run.audits:
        return None
    shown = [Table("Audits of this run", audited.HEADS, [audited.cells(audit) for audit in run.audits])]
    for heads, movements in map(audited.matrix, run.audits):
        if heads:
            shown.append(Table("Movement of the release over C, by data and back end", heads, movements))
    return {"tables": shown, "rule": audited.RULE, "notes": audited.notes(run.audits)}


def _recipe(run: Run) -> dict[str, Any] | str:
    if not run.recipe:
        return "The folder holds no recipe.yaml."
    shown = {key: value for key, value in run.recipe.items() if key != "versions"}
    versions = section(run.recipe, "versions")
    return {"text": _yaml(shown), "versions": facts(versions, verbatim=True) if versions else None}


def _yaml(tree: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=78)


def _reproduce(run: Run) -> dict[str, str]:
    note = (
        "Run it in this run's folder, or save the recipe above as recipe.yaml."
        " Cohorts and noise repeat only where the statement says that they follow from the seed."
    )
    return {"command": f"fedflat run recipe.yaml --out {shlex.quote(f'{run.name}-again')}", "note": note}


# ------------------------------------------------------------------------------------------------------- figures


def _private_cards(figures: Sequence[Figure]) -> dict[str, Any] | None:
    return cards([figure for figure in figures if figure.private], PRIVATE)


def cards(figures: Sequence[Figure], note: str = "", chips: Sequence[Any] = ()) -> dict[str, Any] | None:
    """A section of figures for the macro ``cards``; None without any. note: what is said of them all, as private."""
    if not figures:
        return None
    toggle = any(len(figure.axes) > 1 for figure in figures)
    return {"cards": list(map(_card, figures)), "toggle": toggle, "private_note": note, "chips": chips}


def _card(figure: Figure) -> dict[str, Any]:
    alone = figure.overlay or len(figure.series) < 2
    return {
        "figure": figure,
        "drawings": [svg.draw(figure, axis) for axis in figure.axes],
        "legend": [] if alone else [(series.label, svg.swatch(series)) for series in figure.series],
        "data": svg.data(figure),
        "cut": svg.cut(figure),
        "about_private": PRIVATE,
    }


# ---------------------------------------------------------------------------------------------------- comparison


def _comparison_sections(groups: Sequence[Group]) -> list[Section]:
    figures = figures_of_groups(groups)
    chips = [(group.label, svg.swatch(Series(group.label, {}, style=group.style)), group.style) for group in groups]
    public = cards([figure for figure in figures if not figure.private], chips=chips)
    statements = {
        "together": _together(groups),
        "each": [(group.label, statement_of(group.runs[0])) for group in groups],
    }
    recipes = [(group.label, _recipe(group.runs[0])) for group in groups]
    return [
        Section("summary", "", "noted_table", _comparison(groups)),
        Section("gaps", "Differences", "table", _gaps(groups)),
        Section("curves", "Curves", "cards", public),
        Section("simulation", "Inside the simulation", "cards", _private_cards(figures)),
        Section("differences", "What differs", "table", _differences(groups)),
        Section("runs", "Runs", "table", _runs_table(groups)),
        Section("privacy", "Privacy statements", "statements", statements),
        Section("recipe", "Recipes", "recipes", recipes),
    ]


def _comparison(groups: Sequence[Group]) -> dict[str, Any]:
    table = tables.comparison_table(groups)
    shown = [column for column in tables.columns(table) if column.key != "difference"]  # a table of its own: _gaps
    heads = [column.heading[:1].upper() + column.heading[1:] if column.left else column.heading for column in shown]
    rows = [[column.text(row) for column in shown] for row in table.rows]
    notes = [note for note in tables.notes(table, differences=False) if note != table.headline]
    return {"table": Table("Comparison", heads, rows), "notes": notes, "headline": table.headline}


def _gaps(groups: Sequence[Group]) -> Table | None:
    """Differences in final accuracy from the first method and from the best private one, paired over seeds."""
    against = [groups[0], *(best for best, _ in best_private(groups)[:1] if best is not groups[0])]
    rows = []
    for group in groups:
        gaps = [None if group is base else paired_difference(base, group, final_accuracy) for base in against]
        if any(gaps):
            rows.append([group.label, *map(tables.difference_text, gaps), str(max(gap.pairs for gap in gaps if gap))])
    heads = ["Method", *(f"from {base.label}" for base in against), "seeds"]
    caption = "Test accuracy, points: paired over common seeds, with 95 % t intervals, not corrected for their number"
    return Table(caption, heads, rows) if rows else None


def _together(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The statement of the comparison as a whole: what publishing all of its runs costs."""
    found = cost_sentences(costs([run for group in groups for run in group.runs]))
    return {"lead": found[0], "lines": found[1:]} if found else None


def _differences(groups: Sequence[Group]) -> Table | None:
    settings = [setting(group.runs[0]) for group in groups]
    keys = differing(settings)
    if not keys:
        return None
    rows = [[key, *(readable(each.get(key)) for each in settings)] for key in keys]
    return Table("Recipe keys that differ", ["Key", *(group.label for group in groups)], rows, left=len(groups) + 1)


def _runs_table(groups: Sequence[Group]) -> Table:
    found = [{"group": group.label} | _run_cells(run) for group in groups for run in group.runs]
    heads = {
        "run": "Run",
        "group": "Method",
        "seed": "seed",
        "rounds": "rounds",
        "final": "final %",
        "best": "best %",
        "epsilon": "ε proven",
        "audited": "ε audited",
        "time": "time",
    }
    if not any(row["audited"] for row in found):
        del heads["audited"]
    rows = [[row[key] or "–" for key in heads] for row in found]
    return Table("Every run; best is chosen on test data", list(heads.values()), rows, left=2)


def _run_cells(run: Run) -> dict[str, str]:
    found = metrics.summary(run)
    return {
        "run": run.name,
        "seed": "" if run.seed is None else str(run.seed),
        "rounds": str(found["rounds"]),
        "final": tables.percent(found["final_accuracy"]),
        "best": tables.percent(found["best_accuracy"]),
        "epsilon": tables.epsilon_text(found["proven_epsilon"]),
        "audited": audited.short(run),
        "time": tables.duration(found["seconds"]),
    }
