"""Comparison at equal accuracy and at equal ε, and shares that stay shares."""

import csv
import io
import json
import statistics
from pathlib import Path

import pytest
from synthetic_runs import write_run

from fedflat.core.checks import InputError
from fedflat.report import figures, groups, metrics, pages, tables


def curve(folder: Path, name: str, seed: int, points: list[tuple[float | None, float]], personal: float = 0.9) -> Path:
    """A run whose (ε, accuracy) by round are ``points``; ε None: no privacy."""
    last = points[-1][0]
    statement = {"proven_epsilon": last, "epsilon": last, "claimed_epsilon": last}
    path = write_run(folder, name, seed, rounds=len(points), statement=statement)
    lines = [
        {"round": turn, "epsilon": spent, "test_accuracy": accuracy, "seconds": 1.0}
        for turn, (spent, accuracy) in enumerate(points)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hidden = [{"round": turn, "personal_accuracy": personal} for turn in range(len(points))]
    (path / "private/private.jsonl").write_text("".join(json.dumps(line) + "\n" for line in hidden))
    return path


@pytest.fixture
def table(tmp_path: Path) -> tables.Comparison:
    """Two private methods over two seeds with ε 4 and 8 at the end, and one without privacy."""
    paths = [
        curve(tmp_path / "a0", "dp-fedavg", 0, [(1.0, 0.3), (2.0, 0.5), (3.0, 0.55), (4.0, 0.6)]),
        curve(tmp_path / "a1", "dp-fedavg", 1, [(1.0, 0.2), (2.0, 0.4), (3.0, 0.50), (4.0, 0.7)]),
        curve(tmp_path / "b0", "dp-fedpgn", 0, [(2.0, 0.5), (4.0, 0.65), (6.0, 0.7), (8.0, 0.8)]),
        curve(tmp_path / "b1", "dp-fedpgn", 1, [(2.0, 0.6), (4.0, 0.55), (6.0, 0.7), (8.0, 0.9)]),
        curve(tmp_path / "c0", "fedavg", 0, [(None, 0.9), (None, 0.95)]),
    ]
    return tables.comparison_table(groups.group_runs(map(metrics.read_run, paths)))


def test_targets_are_what_every_private_run_reaches(table: tables.Comparison) -> None:
    assert table.equal == groups.Targets(accuracy=0.6, epsilon=4.0, one_epsilon=False)


def test_mean_and_sd_over_seeds_against_statistics(table: tables.Comparison) -> None:
    first, second, free = table.rows
    assert first.epsilon_at_accuracy == groups.Spread(4.0, 0.0, 2)  # the first crossing, in the last round of both
    assert second.epsilon_at_accuracy is not None and second.accuracy_at_epsilon is not None
    assert second.epsilon_at_accuracy.mean == statistics.mean([4.0, 2.0])
    assert second.epsilon_at_accuracy.sd == pytest.approx(statistics.stdev([4.0, 2.0]))
    assert second.accuracy_at_epsilon.mean == pytest.approx(statistics.mean([0.65, 0.55]))
    assert second.accuracy_at_epsilon.sd == pytest.approx(statistics.stdev([0.65, 0.55]))
    assert free.epsilon_at_accuracy is None and free.accuracy_at_epsilon is None


def test_every_format_says_it(table: tables.Comparison) -> None:
    text = tables.to_markdown(table)
    assert "ε at 60.00 %" in text and "% at ε 4.00" in text
    assert "3.00 ± 1.41" in text and "60.00 ± 7.07" in text
    assert "the lowest final" in text and "smallest final ε" in " ".join(text.split())
    assert "$\\varepsilon$ at 60.00 \\%" in tables.to_latex(table)
    found = json.loads(tables.to_json(table))
    assert found["equal"] == {"accuracy": 0.6, "epsilon": 4.0, "one_epsilon": False}
    assert found["rows"][1]["epsilon_at_accuracy"]["mean"] == 3.0
    lines = list(csv.DictReader(io.StringIO(tables.to_csv(table))))
    assert float(lines[1]["accuracy_at_epsilon.mean"]) == pytest.approx(0.6)
    assert lines[2]["epsilon_at_accuracy.mean"] == ""
    assert all(len(line) <= 80 for line in tables.to_terminal(table).splitlines())


def test_personal_accuracy_has_no_part_in_it(tmp_path: Path) -> None:
    """The same shared curves with other personal accuracies compare the same."""

    def at(personal: float, place: str) -> tables.Comparison:
        points = [(1.0, 0.3), (2.0, 0.5)]
        paths = [curve(tmp_path / place / name, name, 0, points, personal) for name in ("dp-fedavg", "dp2-fedsam")]
        return tables.comparison_table(groups.group_runs(map(metrics.read_run, paths)))

    low, high = at(0.1, "low"), at(0.99, "high")
    assert low.equal == high.equal and low.equal is not None and low.equal.accuracy == 0.5
    assert [row.epsilon_at_accuracy for row in low.rows] == [row.epsilon_at_accuracy for row in high.rows]


def test_one_final_epsilon_needs_no_second_column(tmp_path: Path) -> None:
    """Ends that differ by less than a calibration does are one ε, and the run a hair above keeps its last round."""
    paths = [
        curve(tmp_path / "a", "dp-fedavg", 0, [(1.0, 0.3), (7.9996, 0.5)]),
        curve(tmp_path / "b", "dp-fedsam", 0, [(1.0, 0.3), (8.0, 0.6)]),
    ]
    table = tables.comparison_table(groups.group_runs(map(metrics.read_run, paths)))
    assert tables.EQUAL[1] not in [column.key for column in tables.columns(table)]
    assert table.rows[1].accuracy_at_epsilon == table.rows[1].final
    assert any("every private run ends at ε = 8.00" in note for note in tables.notes(table))


def test_fewer_than_two_private_settings_compare_at_nothing(tmp_path: Path) -> None:
    paths = [
        curve(tmp_path / "a", "dp-fedavg", 0, [(1.0, 0.3), (2.0, 0.5)]),
        curve(tmp_path / "c", "fedavg", 0, [(None, 0.9)]),
    ]
    table = tables.comparison_table(groups.group_runs(map(metrics.read_run, paths)))
    assert table.equal is None and "Equal" not in tables.to_terminal(table)


def test_a_claimed_epsilon_is_not_compared_at(tmp_path: Path) -> None:
    claimed = {"proven_epsilon": None, "epsilon": None, "claimed_epsilon": 2.0, "reasons": ["published"]}
    paths = [
        curve(tmp_path / "a", "dp-fedavg", 0, [(1.0, 0.3), (2.0, 0.5)]),
        write_run(tmp_path / "b", "dp-fedsam", rounds=2, statement=claimed),
    ]
    assert tables.comparison_table(groups.group_runs(map(metrics.read_run, paths))).equal is None


def test_different_delta_is_said(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", "dp-fedavg", rounds=3)]
    paths.append(write_run(tmp_path / "b", "dp-fedsam", rounds=3, statement={"delta": 1e-5}))
    table = tables.comparison_table(groups.group_runs(map(metrics.read_run, paths)))
    assert any("different δ (1e-05, 0.002)" in note for note in tables.notes(table))


def test_accuracy_at_epsilon_edges(tmp_path: Path) -> None:
    run = metrics.read_run(curve(tmp_path / "a", "dp-fedavg", 0, [(1.0, 0.3), (2.0, 0.5)]))
    assert groups.accuracy_at_epsilon(run, 0.5) is None
    assert groups.accuracy_at_epsilon(run, 1.5) == 0.3
    assert groups.accuracy_at_epsilon(run, 99) == 0.5
    with pytest.raises(InputError, match="ε target"):
        groups.accuracy_at_epsilon(run, -1)


def test_a_share_never_leaves_its_axis(tmp_path: Path) -> None:
    """Mean + sd of shares near 1 is above 1; band and axis end at 100 % all the same."""
    paths = [write_run(tmp_path / str(seed), rounds=4, seed=seed) for seed in range(2)]
    for path, shares in zip(paths, ([1.0, 1.0, 0.9, 0.05], [0.6, 0.7, 0.95, 0.0]), strict=True):
        lines = [json.dumps({"round": turn, "clipped_fraction": share}) for turn, share in enumerate(shares)]
        (path / "private/private.jsonl").write_text("\n".join(lines) + "\n")
    found = figures.figures_of_groups(groups.group_runs(map(metrics.read_run, paths)))
    clipped = next(figure for figure in found if figure.key == "clipped")
    assert max(clipped.series[0].high) == 1.0 and min(clipped.series[0].low) >= 0.0
    scale = pages._y_scale(clipped)
    assert scale.high == 1.0 and max(scale.ticks) <= 1.0
