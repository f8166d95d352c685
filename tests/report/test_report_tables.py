"""Groups over seeds and the comparison table in every format."""

import json
import statistics
from pathlib import Path

import pytest
from scipy import stats
from synthetic_runs import NONE, grouped, write_many, write_run

from fedflat.core.checks import InputError
from fedflat.report import figures, groups, metrics, pages, tables, wording


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[groups.Group]:
    return grouped(write_many(tmp_path_factory.mktemp("three"), 3, 5, rounds=30))


def test_groups_ignore_the_seed_only(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"a{seed}", seed=seed, rounds=2) for seed in range(3)]
    folders.append(write_run(tmp_path / "b", "dp-fedsam", rounds=2, local={"steps": 60, "lr": 0.2}))
    found = grouped(folders)
    assert [len(group.runs) for group in found] == [3, 1]
    assert found[1].label.startswith("cifar10-dp-fedsam") or "lr=0.2" in found[1].label
    assert len({group.label for group in found}) == 2


def test_the_chosen_engine_splits_no_seeds(tmp_path: Path) -> None:
    """A recipe holds what auto chose, which may be another back end for another seed."""
    engines = [{"device": "cpu", "backend": name} for name in ("vectorized", "workers", "sequential")]
    folders = [write_run(tmp_path / f"s{seed}", seed=seed, rounds=2, engine=engines[seed]) for seed in range(3)]
    assert [len(group.runs) for group in grouped(folders)] == [3]
    folders.append(write_run(tmp_path / "again", seed=0, rounds=2, engine=engines[1]))
    found = grouped(folders)  # one seed on two engines: they are what is compared
    assert sorted(len(group.runs) for group in found) == [1, 1, 2]
    assert {group.label for group in found} == {f"dp-fedsam (backend={engine['backend']})" for engine in engines}


def test_a_run_that_came_to_nothing_is_marked_and_has_no_best(tmp_path: Path) -> None:
    runs = metrics.read_runs([write_run(tmp_path / f"s{seed}", seed=seed, rounds=6) for seed in range(2)])
    runs[0].metrics[-1]["test_loss"] = None
    runs[1].metrics[-1] |= {"class_accuracy": [1.0, *[0.0] * 9], "test_accuracy": 0.1}
    for record in [*runs[0].private, *runs[1].private]:
        del record["personal_accuracy"]
    assert [metrics.summary(run)["best_accuracy"] == metrics.final_accuracy(run) for run in runs] == [True, True]
    table = tables.comparison_table(groups.group_runs(runs))
    assert table.rows[0].fates == ("diverged", "chance")
    assert "!?" in tables.to_terminal(table) and all(len(line) <= 80 for line in tables.to_terminal(table).splitlines())
    said = " ".join(tables.notes(table))
    assert "! left finite numbers: dp-fedsam (1 of 2 runs)." in said
    assert "? ended at the accuracy of guessing: dp-fedsam (1 of 2 runs)." in said


@pytest.mark.parametrize("key", ["loss", "task"])
def test_runs_that_differ_in_what_they_minimise_are_no_seeds_of_each_other(key: str) -> None:
    one = metrics.Run(Path("a"), "a", {"name": "a", "seed": 0, key: "one"}, [], [], {})
    other = metrics.Run(Path("b"), "b", {"name": "a", "seed": 1, key: "two"}, [], [], {})
    assert groups.setting(one) != groups.setting(other)


def test_label_names_the_key_that_differs(tmp_path: Path) -> None:
    servers = [{"optimizer": "sgd", "lr": lr} for lr in (0.5, 1.0)]
    folders = [write_run(tmp_path / str(server["lr"]), rounds=2, server=server) for server in servers]
    assert [group.label for group in grouped(folders)] == ["dp-fedsam (lr=0.5)", "dp-fedsam (lr=1)"]


def test_mean_sd_and_paired_interval_against_scipy(three: list[groups.Group]) -> None:
    row = tables.comparison_table(three).rows[1]
    ours = [metrics.final_accuracy(run) or 0.0 for run in three[1].runs]
    first = [metrics.final_accuracy(run) or 0.0 for run in three[0].runs]
    assert (final := row.spreads["final"]) is not None and row.difference is not None
    assert final.mean == pytest.approx(statistics.fmean(ours))
    assert final.sd == pytest.approx(statistics.stdev(ours))
    expected = stats.ttest_rel(ours, first).confidence_interval(0.95)
    assert (row.difference.low, row.difference.high) == pytest.approx((expected.low, expected.high))
    # The unpaired interval is another one: pairing by seed is really done.
    assert row.difference.low != pytest.approx(stats.ttest_ind(ours, first).confidence_interval(0.95).low)


def test_pairs_are_the_common_seeds(three: list[groups.Group]) -> None:
    first, other = map(groups.finals, three[:2])
    found = groups.paired_difference(first, dict([*other.items()][3:]))
    assert found is not None and found.pairs == 2
    single = groups.paired_difference(first, dict([*other.items()][:1]))
    assert single is not None and single.low is None and groups.paired_difference(first, {}) is None


def test_equal_values_have_no_spread() -> None:
    assert groups.spread([0.1] * 7) == groups.Spread(0.1, 0.0, 7)
    assert groups.spread([None, 0.4]) == groups.Spread(0.4, None, 1)
    assert groups.spread([None]) is None


@pytest.mark.parametrize("claim", [False, True])
def test_terminal_fits_eighty_columns(three: list[groups.Group], tmp_path: Path, claim: bool) -> None:
    folders = [
        write_run(tmp_path / f"x{seed}", "a-method-with-a-rather-long-name", seed, rounds=3,
                  statement={"proven_epsilon": 14660.0 if claim else 9.37, "epsilon": None})
        for seed in (0, 1)
    ]  # fmt: skip
    text = tables.to_terminal(tables.comparison_table([*three, *grouped(folders)]))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert ("claimed" in text) is claim


def test_rows_say_the_same_in_every_format(three: list[groups.Group]) -> None:
    table = tables.comparison_table(three)
    files = tables.files(table)
    for row in json.loads(files["table.json"])["rows"]:
        shown = f"{100 * row['final']['mean']:.2f} ± {100 * row['final']['sd']:.2f}"
        assert shown in files["table.md"] and shown in tables.to_terminal(table)
        assert shown.replace("±", "$\\pm$") in files["table.tex"]


def test_global_and_personal_never_share_a_column(three: list[groups.Group]) -> None:
    table = tables.comparison_table(three)
    keys = [column.key for column in tables.columns(table)]
    assert "final" in keys and "personal" in keys
    assert any("not covered by the guarantee" in note for note in tables.notes(table))


def test_no_personal_column_without_personal_accuracies(tmp_path: Path) -> None:
    table = tables.comparison_table(grouped([write_run(tmp_path / "d", private=False, rounds=3)]))
    assert "personal" not in [column.key for column in tables.columns(table)]


def test_no_epsilon_is_said_with_its_reason(tmp_path: Path) -> None:
    none = NONE | {"reasons": ["No noise was added."]}
    table = tables.comparison_table(grouped([write_run(tmp_path / "f", "fedavg", rounds=3, statement=none)]))
    for name, text in {"terminal": tables.to_terminal(table), **tables.files(table)}.items():
        assert "No noise was added." in text, name
        assert {"table.json": "null", "table.tex": "$\\infty$ (none)"}.get(name, "∞ (none)") in text


def test_the_largest_epsilon_of_the_seeds_stands_for_the_group(tmp_path: Path) -> None:
    said = [{"proven_epsilon": value, "claimed_epsilon": None} for value in (3.0, None, 5.0)]
    folders = [write_run(tmp_path / str(n), seed=n, rounds=3, statement=one) for n, one in enumerate(said)]
    assert tables.comparison_table(grouped(folders)).rows[0].proven_epsilon is None
    assert tables.comparison_table(grouped([folders[0], folders[2]])).rows[0].proven_epsilon == 5.0


def test_different_delta_is_said(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", "dp-fedavg", rounds=3)]
    paths.append(write_run(tmp_path / "b", "dp-fedsam", rounds=3, statement={"delta": 1e-5}))
    table = tables.comparison_table(grouped(paths))
    assert any("different δ (1e-05, 0.002)" in note for note in tables.notes(table))


def test_a_share_never_leaves_its_axis(tmp_path: Path) -> None:
    """Mean + sd of shares near 1 is above 1; band and axis end at 100 % all the same."""
    runs = metrics.read_runs([write_run(tmp_path / str(seed), rounds=4, seed=seed) for seed in range(2)])
    for run, shares in zip(runs, ([1.0, 1.0, 0.9, 0.05], [0.6, 0.7, 0.95, 0.0]), strict=True):
        run.private[:] = [{"round": turn, "clipped_fraction": share} for turn, share in enumerate(shares)]
    found = figures.figures_of_groups(groups.group_runs(runs))
    clipped = next(figure for figure in found if figure.key == "clipped")
    assert max(clipped.series[0].high) == 1.0 and min(clipped.series[0].low) >= 0.0
    scale = pages.y_scale(clipped)
    assert scale.high == 1.0 and max(scale.ticks) <= 1.0


def test_user_names_cannot_break_a_table(tmp_path: Path) -> None:
    table = tables.comparison_table(grouped([write_run(tmp_path / "x", "a|b_50%&[red]<b>", rounds=3)]))
    assert "a\\|b_50%&[red]&lt;b>" in tables.files(table)["table.md"]
    assert "a|b\\_50\\%\\&[red]<b>" in tables.files(table)["table.tex"]
    assert "[red]" in tables.to_terminal(table)


def test_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="one or more runs"):
        tables.comparison_table([])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (0.0042, "0.0042 s"), (8.2, "8.2 s"), (59.96, "1 min 00 s"), (185, "3 min 05 s"),
     (7800, "2 h 10 min"), (950_400, "11 d")],
)  # fmt: skip
def test_durations(value: float, text: str) -> None:
    assert wording.duration(value) == text and wording.duration(None) == "–"
