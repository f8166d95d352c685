"""How a comparison reads: zoomed axes, named ends, the finding."""

import csv
import io
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic_runs import NONE, grouped, write_many, write_run

from fedflat.report import figures, groups, metrics, pages, tables
from fedflat.report.figures import Figure, Series, figures_of_run
from fedflat.report.pages import describe
from fedflat.report.plates import draw_on, write_figure


def test_equal_privacy_starts_at_nothing(tmp_path: Path) -> None:
    found = figures.figures_of_groups(grouped(write_many(tmp_path / "runs", 3, 1, rounds=20)))
    lines = next(figure for figure in found if figure.key == "epsilon").series
    assert len({line.classes for line in lines}) == 3
    for line in lines:
        assert line.x["round"][0] == line.y[0] == 0.0 and line.x["round"][-1] == 20.0


def test_an_axis_of_shares_begins_at_zero_and_marks_guessing(tmp_path: Path) -> None:
    """Accuracies of 94.3 and 95.0 % must not look like a climb, on the page or in a file."""
    high = Figure("accuracy", "", (Series("a", {"round": (1.0, 2.0, 3.0)}, (0.943, 0.948, 0.95)),), "%", percent=True)
    assert pages.y_scale(high).low == 0.0
    (folder,) = write_many(tmp_path / "runs", 1, 1, rounds=20)
    accuracy = figures_of_run(metrics.read_run(folder))[0]
    assert accuracy.lines == (("guessing", 0.1),) and ">guessing</text>" in pages.draw(accuracy, "round")
    from matplotlib.figure import Figure as Sheet

    axes = Sheet().subplots()
    draw_on(axes, high)
    assert axes.get_ylim()[0] == 0.0


def test_a_lines_label_stands_where_no_curve_is() -> None:
    rising = Series("ε spent", {"round": (0.0, 1.0, 2.0)}, (0.0, 5.0, 8.0))
    drawn = pages.draw(Figure("epsilon", "", (rising,), lines=(("budget", 8.0),), zero=True), "round")
    assert 'class="rl left"' in drawn


@pytest.mark.parametrize("count", [1, 5, pages.MOST_LABELS])
def test_line_ends_are_named_and_apart(count: int) -> None:
    lines = tuple(Series(f"m{k}", {"round": (1.0, 2.0)}, (0.1, 0.9 + k / 1e4), style=k) for k in range(count))
    figure = Figure("accuracy", "", lines, "%", percent=True, overlay=True)
    labels = pages.end_labels(figure, "round", pages.y_scale(figure))
    heights = [label.y for label in labels]
    assert {label.text for label in labels} == {series.label for series in lines}
    assert all(b - a >= pages.LINE_GAP - 1e-9 for a, b in pairwise(heights))
    assert heights[-1] <= pages.BOTTOM and labels[0].text == f"m{count - 1}"


def test_the_headline_is_the_best_private_method(tmp_path: Path) -> None:
    top = [write_run(tmp_path / f"f{seed}", "fedavg", seed, top=0.99, rounds=30, statement=NONE) for seed in range(3)]
    found = tables.comparison_table(grouped([*top, *write_many(tmp_path / "runs", 2, 3, rounds=30)])).headline
    assert all(part in found for part in ("Best at ε = 9.37: dp-fedsam, ", "(95 % interval", "by these 3 seeds."))
    assert tables.comparison_table(grouped(top)).headline == ""
    assert tables.comparison_table(grouped([top[0], tmp_path / "runs" / "dp-fedavg-0"])).headline == ""


@pytest.fixture
def grid(tmp_path: Path) -> list[groups.Group]:
    """Two methods at ε 2 and 8, two seeds; the worst method is at the larger ε, and one ends at guessing."""
    folders = []
    for epsilon, noise, tops in ((2.0, 2.64, (0.6, 0.7)), (8.0, 0.99, (0.5, 0.11))):
        for name, top in zip(("dp-fedavg", "dp-fedsam"), tops):
            for seed in range(2):
                privacy = {"clip": 0.2, "noise_multiplier": noise, "budget": epsilon, "delta": 0.002}
                folders.append(
                    write_run(tmp_path / f"{name}-{epsilon:g}-{seed}", name, seed, rounds=5, top=top, private=False,
                              privacy=privacy, statement={"proven_epsilon": epsilon, "claimed_epsilon": epsilon})
                )  # fmt: skip
    return grouped(folders)


def test_a_grid_compares_within_equal_epsilon_only(grid: list[groups.Group], tmp_path: Path) -> None:
    table = tables.comparison_table(grid)
    assert [row.method for row in table.rows] == [
        "dp-fedavg (epsilon=2)", "dp-fedsam (epsilon=2)", "dp-fedavg (epsilon=8)", "dp-fedsam (epsilon=8)",
    ]  # fmt: skip
    assert [row.against for row in table.rows] == ["", "dp-fedavg (epsilon=2)", "", "dp-fedavg (epsilon=8)"]
    assert [row.difference is not None for row in table.rows] == [False, True, False, True]
    text = tables.to_terminal(table)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "noise" not in text
    assert len(lines) - lines.index("") - 6 <= tables.BENEATH
    assert "? ended at the accuracy of guessing: dp-fedsam (epsilon=8) (2 of 2 runs)." in text
    assert "Best at ε = 8" not in text  # and none where only one is left
    assert {groups.without_epsilon(f"a ({of})") for of in ("rho=1, epsilon=2", "epsilon=2, rho=1")} == {"a (rho=1)"}
    found = groups.headline([*grid[:2], *grouped(write_many(tmp_path / "more", 2, 2, rounds=5))])
    assert "dp-fedavg by these 2 seeds. Best at ε = 9.37: dp-fedsam, " in found and found.count("by these") == 2


def test_a_grid_is_kept_by_seed_and_drawn_by_epsilon(grid: list[groups.Group], tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.runs_csv(grid))))
    assert len(rows) == 8 and {row["seed"] for row in rows} == {"0", "1"}
    assert {row["privacy.budget"] for row in rows} == {"2.0", "8.0"} and rows[-1]["ended"] == "chance"
    first = grid[0].runs[0]
    assert float(rows[0]["final_accuracy"]) == metrics.final_accuracy(first) and rows[0]["proven_epsilon"] == "2.0"
    figure = figures.figures_of_groups(grid)[0]
    assert [series.label for series in figure.series] == ["dp-fedavg", "dp-fedsam"]
    assert all(series.x["round"] == (2.0, 8.0) for series in figure.series)
    (path,) = write_figure(figure, tmp_path, ("pdf",))
    assert path.name == "by-epsilon.pdf" and path.read_bytes().startswith(b"%PDF")


def test_a_figure_in_words_states_what_it_shows(tmp_path: Path) -> None:
    accuracy = figures.figures_of_groups(grouped(write_many(tmp_path / "runs", 3, 1, rounds=20)))[0]
    assert describe(accuracy).startswith("In the end, highest first: dp-fedsam-topk ")
    assert describe(figures_of_run(metrics.read_run(tmp_path / "runs" / "dp-fedavg-0"))[1]).startswith("In the end: ")
