"""The report of one run, or of several side by side: one self-contained HTML file without any network reference."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fedflat.report import audited, metrics, svg, tables
from fedflat.report.card import fragment
from fedflat.report.cautions import cautions
from fedflat.report.figures import Figure, Series, figures_of_groups, figures_of_run
from fedflat.report.groups import Group, differing, group_runs, setting
from fedflat.report.metrics import Run, column, section
from fedflat.report.statement import definition_list, readable, statement_html
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
    draft = target.with_name(f".{target.name}.part")
    draft.write_text(page, encoding="utf-8")
    draft.replace(target)
    return target


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
    body = "".join(_section(key, heading, content) for key, heading, content in sections if content)
    links = "".join(
        f'<a href="#{key}">{escape(heading)}</a>' for key, heading, content in sections if content and heading
    )
    style, script = _asset("page.css"), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        lead=escape(lead),
        links=links,
        body=body,
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=escape(_versions(runs[0])),
    )


def _asset(name: str) -> str:
    return resources.files("fedflat.report").joinpath(name).read_text(encoding="utf-8")


def _versions(run: Run) -> str:
    found = section(run.recipe, "versions").get("fedflat")
    return f"fedflat {found}" if found else "fedflat"


def _section(key: str, heading: str, content: str) -> str:
    title = f"<h2>{escape(heading)}</h2>" if heading else ""
    return f'<section id="{key}">{title}{content}</section>'


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


def _run_sections(run: Run) -> list[tuple[str, str, str]]:
    figures = figures_of_run(run)
    return [
        ("summary", "", _tiles(run)),
        ("curves", "Curves", _cards([figure for figure in figures if not figure.private])),
        ("simulation", "Inside the simulation", _private_cards(figures)),
        ("card", "Privacy card", fragment(run) if run.privacy else ""),
        ("privacy", "Privacy statement", statement_html(run)),
        ("audit", "Audit", _audit(run)),
        ("recipe", "Recipe", _recipe(run)),
        ("reproduce", "Reproduce", _reproduce(run)),
    ]


def _tile(label: str, value: str, below: str, kind: str = "") -> str:
    inside = f"<b>{escape(value)}</b><span>{escape(below)}</span>"
    return f'<div class="tile {kind}"><dt>{escape(label)}</dt><dd>{inside}</dd></div>'


def _tiles(run: Run) -> str:
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
    return f'<dl class="tiles">{"".join(tiles)}</dl>{_warning(run)}{_cautions(run)}'


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{tables.percent(value)} %"


def _pace(rounds: int, seconds: float) -> str:
    each = seconds / rounds if rounds else 0.0
    return f"{tables.duration(each) if each >= 0.1 else f'{1000 * each:.0f} ms'} a round" if each else ""


def _epsilon_tile(run: Run) -> str:
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


def _warning(run: Run) -> str:
    claimed = metrics.claimed_epsilon(run)
    if claimed is None:
        return _audit_warning(run)
    proven = tables.epsilon_text(metrics.proven_epsilon(run))
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in metrics.reasons(run))
    head = f"Proven ε is {proven}; the formula claims {tables.epsilon_text(claimed)}, which does not cover what ran."
    return f'<aside class="notice"><p><strong>{escape(head)}</strong></p><ul>{listed}</ul></aside>{_audit_warning(run)}'


def _cautions(run: Run) -> str:
    listed = "".join(f"<li>{escape(text)}</li>" for text in cautions(run.privacy, run.metrics, run.private))
    return f'<aside class="notice"><p><strong>Warnings</strong></p><ul>{listed}</ul></aside>' if listed else ""


def _audit_warning(run: Run) -> str:
    over = [audit for audit in run.audits if audited.exceeded(audit)]
    listed = "".join(
        f"<li>{escape(str(audit.get('kind')))}: {escape(audited.audited_text(audit))}, {audited.verdict(audit)}</li>"
        for audit in over
    )
    head = "An audit found more than is proven: the proof or the code is wrong."
    return f'<aside class="notice"><p><strong>{head}</strong></p><ul>{listed}</ul></aside>' if over else ""


def _audit(run: Run) -> str:
    if not run.audits:
        return ""
    rows = [audited.cells(audit) for audit in run.audits]
    tables_of_worlds = ""
    for audit in run.audits:
        heads, movements = audited.matrix(audit)
        if heads:
            tables_of_worlds += _table("Movement of the release over C, by data and back end", heads, movements)
    return _table("Audits of this run", audited.HEADS, rows) + tables_of_worlds + audited.notes_html(run.audits)


def _recipe(run: Run) -> str:
    if not run.recipe:
        return "<p>The folder holds no recipe.yaml.</p>"
    shown = {key: value for key, value in run.recipe.items() if key != "versions"}
    versions = section(run.recipe, "versions")
    ran = f"<h3>Ran with</h3>{definition_list(versions, verbatim=True)}" if versions else ""
    return f'<pre tabindex="0" aria-label="Recipe"><code>{escape(_yaml(shown))}</code></pre>{ran}'


def _yaml(tree: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=78)


def _reproduce(run: Run) -> str:
    again = shlex.quote(f"{run.name}-again")
    note = (
        "Run it in this run's folder, or save the recipe above as recipe.yaml."
        " Cohorts and noise repeat only where the statement says that they follow from the seed."
    )
    command = f"<code>fedflat run recipe.yaml --out {escape(again)}</code>"
    return f'<pre tabindex="0" aria-label="Command">{command}</pre><p>{note}</p>'


# ------------------------------------------------------------------------------------------------------- figures


def _private_cards(figures: Sequence[Figure]) -> str:
    cards = _cards([figure for figure in figures if figure.private])
    return f'<p class="private-note">{PRIVATE}.</p>{cards}' if cards else ""


def _cards(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    toggle = ""
    if any(len(figure.axes) > 1 for figure in figures):
        toggle = (
            '<fieldset class="axis"><legend>Horizontal axis</legend>'
            '<label><input type="radio" name="axis" value="round" checked><span>round</span></label>'
            '<label><input type="radio" name="axis" value="epsilon" id="axis-epsilon"><span>ε spent</span></label>'
            "</fieldset>"
        )
    return f'{toggle}<div class="cards">{"".join(map(_card, figures))}</div>'


def _card(figure: Figure) -> str:
    drawings = "".join(svg.draw(figure, axis) for axis in figure.axes)
    both = " both" if len(figure.axes) > 1 else ""
    unit = f' <span class="unit">{escape(figure.unit)}</span>' if figure.unit else ""
    badge = f'<span class="badge" title="{PRIVATE}">private</span>' if figure.private else ""
    legend = "" if figure.overlay or len(figure.series) < 2 else _legend(figure.series)
    return (
        f'<figure class="card{both}{" private" if figure.private else ""}" id="f-{figure.key}">'
        f"<figcaption><h3>{escape(figure.title)}{unit}{badge}</h3><p>{escape(figure.note)}</p></figcaption>"
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(figure.title)}: arrow keys read the values">'
        f'{drawings}<div class="tip" role="status" hidden></div></div>{legend}'
        f'<details class="data"><summary>Data</summary><div class="scroll" tabindex="0" role="region"'
        f' aria-label="Data of {escape(figure.title)}"></div></details>'
        f'<script type="application/json">{svg.data(figure)}</script></figure>'
    )


def _legend(series: Sequence[Series]) -> str:
    return '<p class="legend">' + "".join(f"<span>{svg.swatch(s)}{escape(s.label)}</span>" for s in series) + "</p>"


# ---------------------------------------------------------------------------------------------------- comparison


def _comparison_sections(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    figures = figures_of_groups(groups)
    public = _cards([figure for figure in figures if not figure.private])
    return [
        ("summary", "", _comparison(groups)),
        ("curves", "Curves", _group_legend(groups) + public if public else ""),
        ("simulation", "Inside the simulation", _private_cards(figures)),
        ("differences", "What differs", _differences(groups)),
        ("runs", "Runs", _runs_table(groups)),
        (
            "privacy",
            "Privacy statements",
            _together(groups) + "".join(_folded(group.label, statement_html(group.runs[0])) for group in groups),
        ),
        ("recipe", "Recipes", "".join(_folded(group.label, _recipe(group.runs[0])) for group in groups)),
    ]


def _folded(label: str, content: str) -> str:
    return f'<details class="fold"><summary>{escape(label)}</summary>{content}</details>'


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    def cells(row: Sequence[str]) -> str:
        first = f'<th scope="row">{escape(row[0])}</th>'
        return first + "".join(
            f"<td{' class=text' if place < left else ''}>{escape(cell)}</td>" for place, cell in enumerate(row[1:], 1)
        )

    head = "".join(
        f'<th scope="col"{" class=text" if i < left else ""}>{escape(name)}</th>' for i, name in enumerate(heads)
    )
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _comparison(groups: Sequence[Group]) -> str:
    table = tables.comparison_table(groups)
    shown = tables.columns(table)
    heads = [column.heading[:1].upper() + column.heading[1:] if column.left else column.heading for column in shown]
    rows = [[column.text(row) for column in shown] for row in table.rows]
    listed = "".join(f"<li>{escape(note)}</li>" for note in tables.notes(table))
    return f'{_table("Comparison", heads, rows)}<ul class="notes">{listed}</ul>'


def _together(groups: Sequence[Group]) -> str:
    """The statement of the comparison as a whole: what publishing all of its runs costs."""
    found = cost_sentences(costs([run for group in groups for run in group.runs]))
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in found[1:])
    lead = f"<p><strong>{escape(found[0])}</strong></p>" if found else ""
    return f'<aside class="notice">{lead}<ul>{listed}</ul></aside>' if found else ""


def _group_legend(groups: Sequence[Group]) -> str:
    chips = "".join(
        f'<button type="button" aria-pressed="true" data-group="{place}">'
        f"{svg.swatch(Series(group.label, {}, style=place))}{escape(group.label)}</button>"
        for place, group in enumerate(groups)
    )
    return f'<div class="chips" role="group" aria-label="Show or hide methods">{chips}</div>'


def _differences(groups: Sequence[Group]) -> str:
    settings = [setting(group.runs[0]) for group in groups]
    keys = differing(settings)
    if not keys:
        return ""
    rows = [[key, *(readable(each.get(key)) for each in settings)] for key in keys]
    return _table("Recipe keys that differ", ["Key", *(group.label for group in groups)], rows, left=len(groups) + 1)


def _runs_table(groups: Sequence[Group]) -> str:
    audits = any(audited.short(run) for group in groups for run in group.runs)
    rows = []
    for group in groups:
        for run in group.runs:
            found = metrics.summary(run)
            rows.append(
                [
                    run.name,
                    group.label,
                    "–" if run.seed is None else str(run.seed),
                    str(found["rounds"]),
                    tables.percent(found["final_accuracy"]),
                    tables.percent(found["best_accuracy"]),
                    tables.epsilon_text(found["proven_epsilon"]),
                    *([audited.short(run) or "–"] if audits else []),
                    tables.duration(found["seconds"]),
                ]
            )
    heads = [
        "Run",
        "Method",
        "seed",
        "rounds",
        "final %",
        "best %",
        "ε proven",
        *(["ε audited"] if audits else []),
        "time",
    ]
    return _table("Every run; best is chosen on test data", heads, rows, left=2)
