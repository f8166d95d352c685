"""The papers' figures: from which runs, drawn how, and as files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import bowls
import pytest

from fedflat.cli.reproduce import Request, reproduce, write_pages
from fedflat.core.checks import InputError
from fedflat.papers.figures import DRAWS, ENTRIES, Drawn, Line, Panel, _moved, draw, find_figure, is_figure
from fedflat.papers.rows import dry
from fedflat.papers.scales import SCALES
from fedflat.papers.tables import find, names
from fedflat.report import groups, plates
from fedflat.report.metrics import Run
from fedflat.report.pages import PRIVATE
from fedflat.report.plates import KINDS, write_plates

EVERY = [find_figure(*name.split(" ")) for name in ENTRIES]


def run_of(line: Line, seed: int, accuracy: float = 0.5, norm: float = 0.3) -> Run:
    """Records as a run leaves them, of four rounds."""
    assert line.cell.recipe is not None
    spread = {"min": -0.2, "0.05": -0.1, "0.25": -0.05, "0.5": 0.0, "0.75": 0.05, "0.95": 0.1, "max": 0.2}
    public = [{"round": turn, "test_accuracy": accuracy + 0.01 * (turn + seed)} for turn in range(4)]
    secret = [
        {
            "round": turn, "update_norm_mean": norm, "personal_accuracy": accuracy + 0.2,
            "update_norm_quantiles": {name: norm + value for name, value in spread.items()},
        }
        for turn in range(4)
    ]  # fmt: skip
    recipe = json.loads(line.cell.recipe.model_dump_json()) | {"seed": seed}
    return Run(Path(f"run-{seed}"), f"run-{seed}", recipe, public, secret, {"epsilon": 1.0})


def drawn(panel: Panel, accuracies: Any = None) -> Any:
    """The first drawing of a panel over made-up runs of two seeds."""
    given = accuracies or [0.5] * len(panel.lines)
    ran = [(line, [run_of(line, seed, level) for seed in (0, 1)]) for line, level in zip(panel.lines, given)]
    return DRAWS[panel.draw](panel, ran)[0]


@pytest.mark.parametrize("figure", EVERY, ids=list(ENTRIES))
def test_every_line_has_a_recipe_at_every_scale(figure: Any) -> None:
    assert figure.panels and figure.about
    for panel in figure.panels:
        assert panel.lines and panel.draw in {*DRAWS, "landscape"}
        assert panel.draw != "axis" or all(line.x is not None for line in panel.lines)
        for scale in SCALES:
            found = [line.recipe(panel.table, scale) for line in panel.lines]
            assert len({(each.name, each.algorithm.name) for each in found}) == len(found)


def test_every_figure_that_the_papers_measure_is_there() -> None:
    """Figures 2 and 3 of 001 and 4 of 002 are sketches of an idea, drawn from nothing."""
    have = {paper: {f.name for f in EVERY if f.paper == paper} for paper in ("000", "001", "002", "003", "004")}
    asked = {"000": (1, 2, 3, 4), "001": (1, 4, 5, 6, 7), "002": (1, 2, 3, 5, 6, 7, 8), "003": (1, 2, 3, 4, 5)}
    for paper, numbers in {**asked, "004": (1, 2, 3, 4)}.items():
        assert {f"figure-{number}" for number in numbers} <= have[paper]


def test_by_name_and_what_is_not_there_in_one_line() -> None:
    assert find_figure("000", "Fig. 4").name == find_figure("Shi et al. 2023a", "figure 4b").name == "figure-4"
    assert is_figure("figure-4") and is_figure("by-epsilon") and not is_figure("table-1") and not is_figure("II")
    with pytest.raises(InputError, match=r"000: found figure-7; allowed: figure-1, .*Did you mean figure-"):
        find_figure("000", "figure-7")
    with pytest.raises(InputError, match=r"--column: found gamma; .*Radius ρ"):
        find_figure("000", "figure-4").only(["gamma"])
    assert not set(ENTRIES) & set(names())


def test_a_scale_shrinks_sizes_in_proportion_and_nothing_else() -> None:
    radius, epochs, clients = find_figure("000", "figure-4").panels
    small = [line.recipe(clients.table, "small") for line in clients.lines]
    assert [each.data.clients for each in small] == [20, 40, 60, 100, 140]
    assert [each.cohort.size for each in small] == [2, 4, 6, 10, 14]  # m follows M
    assert [each.privacy.noise_cohort for each in small] == [10, 20, 30, 50, 70]  # the noise is that of the paper's m
    assert [line.recipe(epochs.table, "small").local.steps for line in epochs.lines] == [1, 2, 3, 4]
    assert [line.recipe(epochs.table, "full").local.epochs for line in epochs.lines] == [15, 30, 40, 60]
    one, *_ = radius.lines
    assert one.recipe(radius.table, "small").algorithm.options["rho"] == 0.01 == one.x
    cohort = find_figure("004", "figure-4").panels[0]
    found = [line.recipe(cohort.table, "small") for line in cohort.lines[:4]]
    assert len({each.data.clients for each in found}) == 1
    sigmas = [each.privacy.noise_multiplier or 0.0 for each in found]
    assert sigmas == sorted(sigmas) and sigmas[0] < sigmas[-1]  # σ for the paper's ε at each q


def test_a_column_by_its_name_runs_what_the_whole_table_runs() -> None:
    """Rounds to a target are counted at every round, whether the column that shows them is asked for or not."""
    name = "CIFAR-10, Dirichlet 0.6"
    whole = {row.cell.method: row.recipe for row in dry(find("002", "II"), "small").rows if row.cell.of == name}
    part = {row.cell.method: row.recipe for row in dry(find("002", "II").only([name]), "small").rows}
    assert part == whole and all(recipe is not None and recipe.evaluation.every == 1 for recipe in part.values())


def test_runs_are_shared_with_the_table() -> None:
    panel = find_figure("000", "figure-2").panels[-1]
    cells = {cell.method: cell for cell in find("000", "1").only([panel.title]).cells}
    assert [line.cell for line in panel.lines] == list(cells.values())


def test_lines_are_told_apart() -> None:
    """One colour for all lines once came of a merge."""
    series = drawn(find_figure("000", "figure-2").panels[0]).series
    assert len({line.classes for line in series}) == len(series) > 1


def test_points_have_the_t_interval_of_their_seeds() -> None:
    figure = drawn(find_figure("000", "figure-4").panels[0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    [series] = figure.series
    assert figure.kind == "points" and series.x["round"] == (0.01, 0.1, 0.3, 0.5, 0.7, 1.0)
    assert series.y == pytest.approx([level + 0.035 for level in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)])
    half = 12.7062047 * 0.01 / math.sqrt(2) / math.sqrt(2)  # t of one degree of freedom · sd/√2
    assert series.high[2] - series.y[2] == pytest.approx(half) and series.low[0] == pytest.approx(0.135 - half)


@pytest.mark.parametrize(("paper", "name"), [("000", "figure-3"), ("001", "figure-5"), ("004", "figure-2")])
def test_norms_are_quantiles_by_round(paper: str, name: str) -> None:
    figure = drawn(find_figure(paper, name).panels[0])
    wide, narrow, middle = figure.series
    assert figure.key == "norms-0" and figure.private
    assert (wide.low[0], narrow.low[0], middle.y[0]) == pytest.approx((0.2, 0.25, 0.3))


def test_an_axis_that_a_scale_shrinks_says_what_ran() -> None:
    """The values stay the paper's, so that both can be compared; what they stand for is no secret."""

    def said(paper: str, name: str, place: int, scale: str) -> list[str]:
        panel = find_figure(paper, name).panels[place]
        return _moved(panel, [line.recipe(panel.table, scale) for line in panel.lines])

    [text] = said("004", "figure-3", 0, "small")
    assert "15 is local.steps = 1, 30 is local.steps = 2" in text and text.count("60 is") == 1  # one for both methods
    assert "4 is local.steps = 4" in said("001", "figure-7", 0, "small")[0]  # epochs there
    assert not said("000", "figure-4", 0, "small") and not said("004", "figure-3", 0, "full")


def test_bars_stand_in_pairs() -> None:
    [panel] = find_figure("001", "figure-1").panels
    figure = drawn(panel)
    assert figure.names == ("DP-FedAvg / FedAvg", "DP2-FedSAM / P-FedSAM") and len(figure.series) == 2
    assert figure.series[0].y == pytest.approx([0.535, 0.7])  # the personal method by its own accuracy
    assert find_figure("001", "figure-4").panels[0].shows == ["accuracy", "personal"]


def test_a_page_and_three_files_of_each_drawing(tmp_path: Path) -> None:
    figure = find_figure("000", "figure-4")
    landscape = bowls.found(bowls.group("dp-fedavg", 0, seeds=1), bowls.group("dp-fedsam", 1, seeds=1))
    found = Drawn(figure, "small", (replace(drawn(figure.panels[0]), key="axis-0"),), (landscape,))
    pages = write_pages(replace(found, remarks=("Measured <here>.",)), tmp_path)
    assert [page.name for page in pages] == ["landscape-0.html", "figure-4.html"]
    text = pages[1].read_text(encoding="utf-8")
    assert "not comparable with the paper" in text and "Measured &lt;here&gt;" in text and 'class="whisker' in text
    assert "Contours together" in pages[0].read_text(encoding="utf-8") and PRIVATE not in text
    written = write_plates(found.figures, tmp_path, found.landscapes)
    assert [path.name for path in written] == [f"{stem}.{kind}" for stem in ("axis-0", "contours-0") for kind in KINDS]
    before = {path: path.read_bytes() for path in written}
    assert before[written[0]].startswith(b"<?xml") and before[written[2]].startswith(b"%PDF")
    assert {path: path.read_bytes() for path in write_plates(found.figures, tmp_path, found.landscapes)} == before


def test_a_long_title_stays_on_its_sheet() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    figure = replace(drawn(find_figure("000", "figure-4").panels[0]), title="Radius ρ (data.dataset=mnist, " * 6)
    sheet = Sheet(figsize=plates.SIZE, layout="constrained")
    plates.draw_on(sheet.subplots(), figure)
    FigureCanvasAgg(sheet).draw()
    box = sheet.axes[0].title.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= sheet.bbox.x1 and box.y1 <= sheet.bbox.y1


def test_plates_have_the_pages_colours_and_dashes() -> None:
    style = (Path(plates.__file__).parent / "page.css").read_text(encoding="utf-8")
    assert len(plates.PALETTE) == groups.COLOURS and len(plates.STYLES) == groups.DASHES
    light = style[: style.index("@media")]
    assert all(f"--c{place}: {colour};" in light for place, colour in enumerate(plates.PALETTE))


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.long
def test_a_figure_trained_on_digits(tmp_path: Path) -> None:
    figure = find_figure("000", "figure-4").only(["radius"])
    few = replace(figure, panels=(replace(figure.panels[0], lines=figure.panels[0].lines[:2]),))
    given = ["data.dataset=digits", "data.max_examples=500", "data.clients=25", "engine.backend=sequential"]
    found = draw(few, tmp_path, "smoke", given, 1, 1)
    assert [len(each.series[0].y) for each in found.figures] == [2] and found.missing == ()
    assert any("data.dataset emnist → digits" in text for text in found.remarks)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--out: found .*file"):
        write_pages(found, tmp_path / "file")


def test_the_command_lists_and_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for paper in (None, "000"):
        reproduce(paper, list_all=True)
        shown = capsys.readouterr().out
        assert "000 figure-4" in shown and ("004 by-alpha" in shown and "002 table-5" in shown) is (paper is None)
    with pytest.raises(InputError, match="--method: found a figure; allowed: a table"):
        reproduce("000", "figure-4", Request(method=["DP-FedSAM"]))


def test_every_figure_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    for name in [*ENTRIES][::6]:
        paper, figure = name.split(" ")
        reproduce(paper, figure, Request(scale="smoke", dry_run=True))
        shown = capsys.readouterr().out
        assert f"Paper {paper}, {figure}" in shown and "mechanism" in shown and "nothing was trained" in shown


@pytest.mark.parametrize("look", [find_figure, find])
def test_a_paper_that_is_not_here_is_told_those_that_are(look: Any) -> None:
    with pytest.raises(InputError, match=r"found Shi; allowed: 000 \(Shi et al\. 2023a\), 001"):
        look("Shi", "1")
    with pytest.raises(InputError, match="Did you mean Liu et al"):
        look("Liu et al. 2024", "1")
