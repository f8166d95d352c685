"""How a comparison reads: one colour for a method, zoomed axes, named ends, one curve for equal ε, the finding."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic_runs import write_many, write_run

from fedflat.report import groups, metrics, overlays, svg, tables
from fedflat.report.figures import Figure, Series, figures_of_run
from fedflat.report.finding import describe
from fedflat.report.html import write_report
from fedflat.report.styles import COLOURS, HOMES, style_of, styles


def read(folders: list[Path]) -> list[groups.Group]:
    return groups.group_runs(map(metrics.read_run, folders))


def colour(style: int) -> int:
    return style % COLOURS


def test_a_method_has_one_colour_whatever_it_stands_beside(tmp_path: Path) -> None:
    many, two = read(write_many(tmp_path / "many", 5, 1)), read(write_many(tmp_path / "two", 2, 1))
    assert {group.label: group.style for group in two}.items() <= {group.label: group.style for group in many}.items()
    single = figures_of_run(two[1].runs[0])
    assert {colour(series.style) for figure in single for series in figure.series if series.style >= 0} == {
        colour(style_of("dp-fedsam"))
    }


def test_settings_of_one_method_share_its_colour_among_others() -> None:
    found = styles(["dp-fedsam", "dp-fedavg", "dp-fedsam", "dp-fedsam"])
    assert len(set(found)) == 4 and len({colour(found[place]) for place in (0, 2, 3)}) == 1
    assert len({colour(style) for style in styles(["dp-fedsam"] * COLOURS)}) == COLOURS
    assert len(set(styles(["dp-fedsam"] * 40))) == 40 and len({style_of(name) for name in HOMES}) == len(HOMES)
    assert style_of("my_file.py:mine") == style_of("my_file.py:mine")


def test_equal_privacy_is_one_line_that_starts_at_nothing(tmp_path: Path) -> None:
    found = overlays.figures_of_groups(read(write_many(tmp_path / "runs", 3, 1, rounds=20)))
    (line,) = next(figure for figure in found if figure.key == "epsilon").series
    assert line.x["round"][0] == line.y[0] == 0.0 and line.x["round"][-1] == 20.0
    assert line.label == "3 settings alike"


def test_a_zoomed_axis_says_where_it_starts() -> None:
    rising = tuple(0.95 - 0.85 * 0.7**turn for turn in range(40))
    series = Series("a", {"round": tuple(map(float, range(1, 41)))}, rising)
    zoomed = Figure("accuracy", "", (series,), "%", percent=True, zoom=True)
    assert svg.cut(zoomed) == "The axis starts at 92.5 %." and svg.cut(Figure("loss", "", (series,))) == ""
    drawn = svg.draw(zoomed, "round")
    start = re.search(r'<path class="line [^"]*" d="M([\d.]+),([\d.]+)l', drawn)
    assert start is not None and float(start[2]) == svg.BOTTOM  # the line comes up from the axis, not from below
    level = Figure("accuracy", "", (Series("b", series.x, (0.1,) * 40),), "%", percent=True, zoom=True)
    assert svg.cut(level) == ""  # a method that learns nothing is no reason to look closer


@pytest.mark.parametrize("count", [1, 5, svg.MOST_LABELS])
def test_line_ends_are_named_and_apart(count: int) -> None:
    lines = tuple(Series(f"m{k}", {"round": (1.0, 2.0)}, (0.1, 0.9 + k / 1e4), style=k) for k in range(count))
    figure = Figure("accuracy", "", lines, "%", percent=True, overlay=True)
    labels = svg.end_labels(figure, "round", svg._y_scale(figure))
    heights = [label.y for label in labels]
    assert {label.text for label in labels} == {series.label for series in lines}
    assert all(b - a >= svg.LINE_GAP - 1e-9 for a, b in pairwise(heights))
    assert heights[-1] <= svg.BOTTOM and labels[0].text == f"m{count - 1}"


def test_the_headline_is_the_best_private_method(tmp_path: Path) -> None:
    none = {"proven_epsilon": None, "epsilon": None, "claimed_epsilon": None}
    top = [write_run(tmp_path / f"f{seed}", "fedavg", seed, top=0.99, rounds=30, statement=none) for seed in range(3)]
    found = tables.comparison_table(read([*top, *write_many(tmp_path / "runs", 2, 3, rounds=30)])).headline
    assert (
        found.startswith("Best private method: dp-fedsam, ")
        and "at proven ε = 9.37 (95 % interval over 3 seeds" in found
    )
    assert "chosen among 2 by this very test data" in found and found.endswith("dp-fedavg.")
    assert tables.comparison_table(read(top)).headline == ""
    one = tables.comparison_table(read([top[0], tmp_path / "runs" / "dp-fedavg-0"])).headline
    assert one.endswith("one seed, so without an interval.")


def test_differences_are_a_table_of_their_own(tmp_path: Path) -> None:
    write_many(tmp_path / "runs", 3, 3, rounds=30)
    page = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    assert '<section id="gaps">' in page and "from dp-fedavg" in page and "from dp-fedsam-topk" in page
    assert '<p class="headline">Best private method: ' in page and "ε claimed" not in page


def test_a_figure_in_words_states_what_it_shows(tmp_path: Path) -> None:
    accuracy = overlays.figures_of_groups(read(write_many(tmp_path / "runs", 3, 1, rounds=20)))[0]
    assert describe(accuracy).startswith("In the end, highest first: dp-fedsam-topk ")
    loss = figures_of_run(metrics.read_run(tmp_path / "runs" / "dp-fedavg-0"))[1]
    assert describe(loss).startswith("down from ")
