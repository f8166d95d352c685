"""The papers' tables: what is transcribed, what is planned, one column trained."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from fedflat.cli.reproduce import WIDTH, as_dict, lines
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.reproduce import SCALES, Table, dry, find, load, names, scaled, train
from fedflat.reproduce.rows import claimed_epsilon
from fedflat.reproduce.scales import differences

TABLES = {name: load(name.replace(" ", "-")) for name in names()}
SIZES = {
    "000 table-1": 42, "000 table-2": 28, "001 table-2": 24, "001 table-3": 24, "002 table-2": 28, "002 table-3": 28,
    "002 table-4": 70, "003 table-1": 63, "003 table-2": 56, "004 table-1": 32, "004 table-2": 32,
}  # fmt: skip


def printed(paper: str, table: str, column: str, method: str) -> str:
    [cell] = [c for c in find(paper, table).cells if (c.column, c.method) == (column, method)]
    return cell.published


def test_every_table_is_whole() -> None:
    assert {name: len(table.cells) for name, table in TABLES.items()} == SIZES
    for table in TABLES.values():
        assert table.measure in ("best", "final") and table.claimed in ("formula", "epsilon") and table.notes


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("000", "1", "CIFAR-10, Dirichlet 0.6", "DP-FedSAM-top_k"), "57.00 ± 0.69"),
        (("000", "1", "EMNIST, IID", "DP-FedAvg"), "81.90 ± 0.86"),
        (("000", "2", "CIFAR-10, ε = 8", "DP-FedSAM"), "51.30 ± 0.95"),
        (("003", "1", "CIFAR-100, Dirichlet 0.3", "DP-FedAvg"), "16.10 ± 0.71"),
        (("002", "II", "CIFAR-10, Dirichlet 0.1", "DP-FedPGN-LS"), "61.80 ± 0.27"),
        (("002", "III", "CIFAR-100, Dirichlet 0.6", "DP-FedSAM"), "14.67 ± 0.57"),
        (("002", "IV", "CIFAR-100, no noise", "DP-FedPGN-LS"), "59.74 ± 0.65"),
        (("001", "III", "CIFAR-10, ε = 2.0", "DP2-FedSAM"), "85.3 ± 0.8"),
        (("001", "II", "CIFAR-10, third, split lost", "CENTAUR"), "–"),
        (("004", "1", "ResNet-18, ε = 8", "BLUR + LUS"), "82.12 ± 0.52"),
        (("004", "2", "CNN-2-Layers, Dirichlet 0.1", "AE-DPFL"), "55.79 ± 0.86"),
    ],
)
def test_values_as_printed(where: tuple[str, str, str, str], value: str) -> None:
    assert printed(*where) == value


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_cell_has_a_recipe_or_says_why_not(table: Table) -> None:
    for cell in table.cells:
        assert re.fullmatch(r"\d\d?\.\d\d? ± \d\.\d\d?|–", cell.published), cell
        if cell.recipe is None:
            assert "lost" in cell.column
        else:
            for scale in SCALES:
                assert Recipe.of(scaled(cell.recipe, scale).dump()).algorithm == cell.recipe.algorithm or (
                    cell.recipe.algorithm.name == "ae-dpfl"
                )


@pytest.mark.parametrize("name", ["000 table-1", "001 table-3", "002 table-2", "004 table-2"])
def test_every_plan_is_proven_and_at_most_what_is_claimed(name: str) -> None:
    table = TABLES[name]
    first = table.only(columns=[table.cells[0].column])
    for row in dry(first).rows:
        assert row.claimed is not None and row.proven is not None
        assert 0 < row.proven <= row.claimed * (1 + 1e-6), row.cell


def test_claimed_and_proven_are_those_of_the_papers_settings() -> None:
    """The figures of the packaged recipes' test, reached through the tables."""
    for paper, table, column, claimed, proven in (
        ("000", "1", "CIFAR-10, Dirichlet 0.6", 10.83, 9.37),
        ("000", "1", "EMNIST, IID", 8.58, 7.30),
        ("002", "2", "CIFAR-10, Dirichlet 0.1", 15.90, 13.46),
    ):
        for row in dry(find(paper, table).only(columns=[column])).rows:
            assert row.claimed == pytest.approx(claimed, abs=0.006) and row.proven == pytest.approx(proven, abs=0.006)


def test_the_released_procedure_proves_far_less() -> None:
    [row] = dry(find("000", "1").only(["EMNIST, IID"], ["DP-FedSAM"]), "full", "published").rows
    assert row.claimed == pytest.approx(8.58, abs=0.006) and row.proven is not None and row.proven > 1000
    [row] = dry(find("002", "2").only(["CIFAR-10, Dirichlet 0.1"], ["DP-FedPGN"]), "full", "published").rows
    assert row.proven == math.inf
    with pytest.raises(InputError, match=r"Zhang et al\. 2024 released no procedure"):
        dry(find("001", "3").only(methods=["DP-FedAvg"]), protocol="published")


def test_without_noise_nothing_is_claimed() -> None:
    cell = find("002", "4").only(["CIFAR-10, no noise"], ["DP-FedAvg"]).cells[0]
    assert claimed_epsilon(find("002", "4"), cell) == math.inf


def test_dry_run_as_text() -> None:
    found = dry(find("000", "Table 1").only(["CIFAR-10, Dirichlet 0.6"]))
    text = lines(found, dry_run=True)
    assert all(len(line) <= WIDTH for line in text)
    assert "DP-FedSAM            54.14 ± 0.60              –       10.83        9.37" in text
    assert not any("NOT COMPARABLE" in line for line in text)
    assert any(line.startswith("Differs: the released code clips each tensor") for line in text)
    json.dumps(as_dict(found))


def test_a_smaller_scale_says_what_it_changes() -> None:
    found = dry(find("000", "1").only(["CIFAR-10, IID"], ["DP-FedSAM"]), "small")
    text = " ".join(lines(found, dry_run=True))
    assert "NOT COMPARABLE" in text and "data.clients 500 → 100" in text
    full = find("000", "1").cells[0].recipe
    assert full is not None and differences(full, full) == []


@pytest.mark.parametrize(
    ("paper", "table", "said"),
    [("000", "figure-1", "allowed: table-1, table-2"), ("005", "1", "000, 001"), ("004", "9", "table-1, table-2")],
)
def test_what_is_not_there_is_one_line(paper: str, table: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        find(paper, table)


def test_filters_that_fit_nothing_are_refused() -> None:
    table = find("000", "1")
    with pytest.raises(InputError, match="--column"):
        table.only(columns=["SVHN"])
    with pytest.raises(InputError, match=r"--method.*DP-FedSAM"):
        table.only(methods=["DP-FedSAN"])
    with pytest.raises(InputError, match="--scale"):
        dry(table, "tiny")


def test_one_column_trained_on_digits(tmp_path: Path) -> None:
    chosen = find("000", "1").only(["CIFAR-10, IID"], ["DP-FedAvg", "DP-FedSAM"])
    overrides = ["data.dataset=digits", "data.max_examples=200"]
    found = train(chosen, tmp_path / "runs", "smoke", overrides=overrides, processes=1)
    assert found.complete and found.missing == ()
    for row in found.rows:
        assert len(row.ours) == 1 and 0 <= row.ours[0] <= 100
        assert row.proven == pytest.approx(dry(chosen, "smoke", overrides=overrides).rows[0].proven, rel=1e-6)
    assert "data.dataset cifar10 → digits" in " ".join(lines(found))


def test_data_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    chosen = find("000", "1").only(["CIFAR-10, IID"], ["DP-FedAvg"])
    found = train(chosen, tmp_path / "runs", "smoke", overrides=["data.dataset=./nowhere"])
    assert not found.complete and len(found.missing) == 1 and "nowhere" in found.missing[0]
    assert found.rows[0].proven is None  # nothing ran, so nothing is proven of it
    assert not (tmp_path / "runs").exists()
