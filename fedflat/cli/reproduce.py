"""``fedflat reproduce``: the papers' tables and figures, with what is proven beside what is claimed.

``fedflat leaderboard``: the best private accuracies, measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fedflat import cli
from fedflat.core import counted, one_of, plain, require, wrong

if TYPE_CHECKING:
    from fedflat.papers import figures, outcome, tables


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a table or a figure is to be reproduced.

    Args:
        scale: smoke (seconds a method), small (minutes), full (the paper's size: days without a GPU). Default: small;
            full with --dry-run.
        column: Only the column of this name, or those whose name contains it (numbers whole); of a figure, only the
            panels whose title contains it. May be repeated.
        method: Only this method, as printed; may be repeated.
        protocol: sound: the guarantee holds. published: the procedure that the paper released.
        seeds: Runs of each cell. Default: the scale's; at full scale the paper's.
        out: Folder of a table's runs; of a figure, the one that its tables' are in.
        dry_run: Published values, claimed and proven ε; nothing is trained.
    """

    scale: str | None = None
    column: list[str] | None = None
    method: list[str] | None = None
    protocol: str = "sound"
    override: cli.Overrides = None
    seeds: cli.Count = None
    out: Path | None = None
    processes: cli.Processes = None
    dry_run: bool = False
    as_json: cli.Json = False

    @property
    def size(self) -> str:
        """The scale, or its default."""
        return self.scale or ("full" if self.dry_run else "small")


def reproduce(
    paper: str | None = None,
    table: str | None = None,
    request: Request = Request(),
    *,
    list_all: Annotated[bool, Option("--list")] = False,
) -> None:
    """A table or a figure of the papers: the published number, ours, the claimed and the proven ε.

    Claimed is the paper's own ε for its own setting; proven is ε of what runs here. Under each column stands whether
    its methods rank as in the paper, below the table what differs from it. Runs that are done are kept: after Ctrl-C
    the same command goes on.

    Example: fedflat reproduce --list

    Example: fedflat reproduce 000 table-1 --dry-run

    Example: fedflat reproduce 002 II --column "CIFAR-10, Dirichlet 0.6" --method DP-FedAvg --method DP-FedPGN

    Example: fedflat reproduce 000 figure-4 --column ρ

    Args:
        paper: The paper: 000 to 004, or cited as by --list.
        table: Its table or figure: table-1, 1, II; figure-4.
        list_all: What can be reproduced, of this paper or of all, one line each.
    """
    from fedflat.methods.published import CITED, reproduced_paper
    from fedflat.papers import figures, tables

    if list_all:
        listed = {name: tables.load(name.replace(" ", "-")).about for name in tables.names()}
        listed |= {name: entry["about"] for name, entry in figures.ENTRIES.items()}
        # A name begins with the paper's number, of three digits.
        number = None if paper is None else reproduced_paper(paper, (name[:3] for name in listed))
        every = {name: listed[name] for name in sorted(listed) if number in (None, name[:3])}
        cited = {name: f"{CITED[name[:3]]}. {description}" for name, description in every.items()}
        texts = [line for item in cited.items() for line in cli.labelled(*item, 16)]
        print(cli.json_text(every) if request.as_json else "\n".join(texts))
        return
    if paper is None or table is None:
        missing = "no paper and no table" if paper is None else f"{paper} without a table"
        raise wrong("reproduce", missing, "PAPER TABLE, for example 000 table-1; --list shows all")
    published = one_of("--protocol", request.protocol, ("sound", "published")) == "published"
    if figures.is_figure(table):
        only_tables = {"--method": request.method, "--protocol": published, "--json": request.as_json}
        for option, used in only_tables.items():
            require(not used, option, "a figure", "a table")
        _draw(figures.find_figure(paper, table).only(request.column or ()), request)
    else:
        _fill(tables.find(paper, table).only(request.column or (), request.method or ()), request)


def _fill(table: tables.Table, request: Request) -> None:
    """Print a table with our numbers in it: only planned, or trained."""
    from fedflat.papers.rows import dry, fill
    from fedflat.report.progress import ExperimentProgress

    result = dry(table, request.size, request.protocol, request.override or ())
    if not request.dry_run:
        folder = request.out or Path("runs") / table.folder_name
        with ExperimentProgress(quiet=request.as_json) as progress:
            result = fill(result, folder, request.seeds, request.processes, progress.update)
    print(cli.json_text(as_dict(result)) if request.as_json else "\n".join(lines(result, request.dry_run)))
    if not request.dry_run and not result.complete:
        raise typer.Exit(1)


def _draw(figure: figures.PaperFigure, request: Request) -> None:
    """Draw a figure; its runs are trained, or only planned."""
    from fedflat.papers import figures
    from fedflat.report.progress import ExperimentProgress

    overrides, folder = request.override or (), request.out or Path("runs")
    if request.dry_run:
        print("\n".join(planned_lines(figure, request.size, overrides)))
        return
    with ExperimentProgress() as progress:
        drawn = figures.draw(
            figure, folder, request.size, overrides, request.seeds, request.processes, progress.update, progress.say
        )
    write_drawn(drawn, folder / f"reproduce-{figure.paper}-{figure.name}")


def write_drawn(drawn: figures.Drawn, folder: Path) -> None:
    """Write a page, and each drawing as SVG, PNG and PDF beside it; print the files, and what differs."""
    from fedflat.report import flatness

    for page in write_pages(drawn, folder):
        print(page)
    curves = [curve for record in drawn.landscapes for curve in flatness.figures(record)]
    cli.print_plates([*drawn.figures, *curves], folder, drawn.landscapes)
    for text in notes(drawn):
        cli.say(text)


def lines(result: outcome.Outcome, dry_run: bool = False) -> list[str]:
    """Return the outcome as text of at most 80 columns: a table and a verdict for each column of the paper's."""
    from fedflat.papers import outcome

    table = result.table
    texts = [*cli.wrapped(f"Paper {table.paper}, {table.table}: {table.title}"), *cli.wrapped(table.about)]
    simulated = any(row.simulated is not None for row in result.rows)
    verdicts = {} if dry_run else result.verdicts()
    for column, rows in result.columns().items():
        cell = rows[0].cell
        target = "" if cell.target is None or cell.measure != "rounds" else f" to {cell.target:g} %"
        by_hand = f" ({', '.join(result.by_hand)})" if result.by_hand else ""
        texts += ["", *cli.wrapped(column + target + by_hand), *_grid(_body(rows, dry_run, simulated))]
        why = dict.fromkeys(row.missing for row in rows if row.missing)
        texts += [text for reason in why for text in cli.wrapped(f"  {reason}")]
        texts += [text for sentence in outcome.sentences(verdicts.get(column)) for text in cli.wrapped(f"  {sentence}")]
    return [*texts, "", *_remarks(result, dry_run)]


def planned_lines(figure: figures.PaperFigure, scale: str, overrides: Sequence[str]) -> list[str]:
    """Return what would run for a figure, as text of at most 80 columns: for each panel its runs and what is proven of
    them.

    Claimed ε is left out where a setting was changed: the paper names none for it.
    """
    from fedflat.papers import rows, scales

    texts = [*cli.wrapped(f"Paper {figure.paper}, {figure.name}: {figure.about}")]
    total: set[str] = set()
    for panel in figure.panels:
        recipes = [line.recipe(panel.table, scale, overrides) for line in panel.lines]
        planned = [rows.accounted(line.cell, recipe) for line, recipe in zip(panel.lines, recipes)]
        seeds = scales.SCALES[scale].seeds or panel.table.seeds
        grid = [["run", "rounds", "claimed ε", _epsilon_head(planned), "δ"]]
        for line, recipe, row in zip(panel.lines, recipes, planned):
            at = ", ".join(line.changes) or ("" if line.x is None else f"{panel.x} {line.x:g}")
            name = f"{line.label} ({at})" if at else line.label
            claimed = "–" if line.changes else _epsilon(row.claimed)
            grid.append([name, str(recipe.rounds), claimed, _epsilon(row.proven), _delta(row)])
        total |= {recipe.name for recipe in recipes}
        texts += ["", *cli.wrapped(f"{panel.title} ({panel.draw}; {counted(seeds, 'seed')})"), *_grid(grid)]
    remarks = [f"Scale {scale}: {len(total)} settings would run; nothing was trained.", *figure.notes]
    return [*texts, "", *(text for remark in remarks for text in cli.wrapped(remark))]


def _epsilon_head(rows: Iterable[outcome.Row]) -> str:
    """Return what the ε of the runs is called: with seeded noise it is only that of the mechanism."""
    seeded = any(row.recipe is not None and row.recipe.privacy.randomness == "seeded" for row in rows)
    return "mechanism's ε" if seeded else "proven ε"


def _body(rows: Sequence[outcome.Row], dry_run: bool, simulated: bool) -> list[list[str]]:
    """Return the heads and the cells of a column's rows."""
    ours, more = ([] if dry_run else ["ours", "diff."]), (["simul. ε"] if simulated else [])
    table = [["method", "published", *ours, "claimed ε", _epsilon_head(rows), *more, "δ"]]
    for row in rows:
        points = "–" if row.difference is None else f"{row.difference:+.1f}".replace("-", "−")
        ours = [] if dry_run else [_ours(row), points]
        epsilons = [_epsilon(value) for value in (row.claimed, row.proven, *([row.simulated] if simulated else []))]
        table.append([row.cell.method, row.cell.published, *ours, *epsilons, _delta(row)])
    return table


def _epsilon(value: float | None) -> str:
    from fedflat.report.metrics import epsilon_text

    return epsilon_text(value, missing="–")


def _delta(row: outcome.Row) -> str:
    return "–" if row.delta is None else f"{row.delta:.2g}"


def _grid(texts: list[list[str]]) -> list[str]:
    """Return the rows of texts under each other; headings fold at their space where the whole would be wider than
    80 columns.
    """
    grid = cli.columns(texts, gap=" ")
    if max(map(len, grid)) <= cli.WIDTH:
        return grid
    folded = [text.split(" ", 1) if " " in text else ["", text] for text in texts[0]]
    return cli.columns([[top for top, _ in folded], [low for _, low in folded], *texts[1:]], gap=" ")


def _remarks(result: outcome.Outcome, dry_run: bool) -> list[str]:
    """Return what is to be said below a table, in lines."""
    from fedflat.papers import tables
    from fedflat.report.metrics import FATES, MARKS

    kinds = dict.fromkeys(row.cell.measure for row in result.rows)
    fates = {fate for row in result.rows for fate in row.fates.values()}
    changed: dict[tuple[str, ...], list[str]] = {}
    for column, texts in result.changed.items():
        changed.setdefault(tuple(texts), []).append(column)
    return cli.filled(
        "reproduce.txt", result=result, table=result.table, dry_run=dry_run, head=_epsilon_head(result.rows),
        measures=[tables.MEASURES[kind] for kind in kinds], private=bool({"train", "gap"} & set(kinds)),
        simulated=any(row.simulated is not None for row in result.rows), changed=changed,
        fates=[f"{MARKS[fate]} {text[:1].upper()}{text[1:]}" for fate, text in FATES.items() if fate in fates],
    )  # fmt: skip


def _ours(row: outcome.Row) -> str:
    """Return the mean ± sd, and a mark where runs came to nothing."""
    from fedflat.papers import tables
    from fedflat.report.metrics import MARKS

    spread = row.spread
    marks = "".join(dict.fromkeys(MARKS[fate] for fate in row.fates.values()))
    if spread is None:
        return f"–{marks}"
    if math.isinf(spread.mean):
        late = sum(map(math.isinf, row.ours.values()))
        return f"never{marks}" if late == len(row.ours) else f"never in {late} of {len(row.ours)}{marks}"
    digits = 1 if row.cell.measure in tables.COUNTED else 2
    text = f"{spread.mean:.{digits}f}" + ("" if spread.sd is None else f" ± {spread.sd:.{digits}f}")
    return f"{text}{marks}".replace("-", "−")


def as_dict(result: outcome.Outcome) -> dict[str, Any]:
    """Return the plain values for ``--json``; an infinite ε, or a target that was never reached, is null."""
    from fedflat.papers import outcome

    table, verdicts = result.table, result.verdicts()
    return {
        "paper": table.paper, "table": table.table, "measure": table.measure, "scale": result.scale,
        "comparable": result.comparable and result.complete, "protocol": result.protocol,
        "rows": [_record(row) for row in result.rows],
        "verdicts": {name: plain(asdict(v)) | {"text": outcome.sentences(v)} for name, v in verdicts.items()},
        "changed": {name: list(texts) for name, texts in result.changed.items()},
        "notes": table.said(result.protocol), "missing": list(result.missing),
        "folder": None if result.folder is None else str(result.folder),
    }  # fmt: skip


def _record(row: outcome.Row) -> Any:
    names = ("column", "method", "measure", "target", "published")
    return plain({name: getattr(row.cell, name) for name in names} | {
        "ours": list(row.ours.values()), "seeds": list(row.ours),
        "difference": row.difference, "claimed_epsilon": row.claimed, "proven_epsilon": row.proven,
        "simulated_epsilon": row.simulated, "delta": row.delta, "fates": dict(row.fates), "missing": row.missing,
    })  # fmt: skip


def write_pages(drawn: figures.Drawn, folder: Path) -> list[Path]:
    """Write ``NAME.html`` with the drawings, and ``landscape-N.html`` for each landscape."""
    from fedflat.methods.published import CITED
    from fedflat.report import flatness, pages

    # Made first, so that a folder that cannot be written is one line.
    cli.write_files(folder, {})
    written = [
        pages.write(flatness.render(record), folder / f"landscape-{place}.html")
        for place, record in enumerate(drawn.landscapes)
    ]
    if drawn.figures:
        figure = drawn.of
        differs = pages.Section("notes", "What differs", "prose", notes(drawn))
        sections = [pages.Section("drawings", "", "cards", pages.cards(list(drawn.figures))), differs]
        page = pages.page(f"{CITED[figure.paper]}, {figure.name.replace('-', ' ')}", figure.about, sections, "fedflat")
        written.append(pages.write(page, folder / f"{figure.name}.html"))
    return written


def notes(drawn: figures.Drawn) -> list[str]:
    """Return what differs from the paper's figure, in sentences."""
    scale = [] if drawn.scale == "full" else [f"Scale {drawn.scale}: not comparable with the paper's drawing."]
    differences = [f"{text[:1].upper()}{text[1:]}." for text in drawn.of.notes]
    return [*scale, *drawn.remarks, *differences, *[f"Missing: {text}" for text in drawn.missing]]


def leaderboard(*, as_json: cli.Json = False) -> None:
    """Accuracies under a proven ε, as measured for this release: mean ± sd, and the ceiling.

    Example: fedflat leaderboard
    """
    from fedflat.papers import board

    measured = board.load()
    table = [["", *(f"ε = {value}" for value in board.EPSILONS), "ceiling"], *board.summary(measured)]
    below = "Test accuracy in %, mean±sd over seeds, by Dirichlet α; –: not measured.\nAll rows: --json."
    records = [board.record(row) for row in measured["rows"]]
    print(cli.json_text(records) if as_json else "\n".join([*cli.columns(table, left=None), below]))
