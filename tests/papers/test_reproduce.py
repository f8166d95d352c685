"""The papers' tables: what is transcribed, what is planned, one column trained."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedflat.cli import WIDTH
from fedflat.cli.reproduce import as_dict, lines
from fedflat.core.checks import InputError
from fedflat.papers.rows import claimed_epsilon, dry, fill
from fedflat.papers.scales import SCALES, differences, scaled, sigma_of
from fedflat.papers.tables import COUNTED, MEASURES, Table, find, load, names, printed

TABLES = {name: load(name.replace(" ", "-")) for name in names()}
SIZES = {
    "000 table-1": 84, "000 table-2": 28, "000 table-3": 12, "001 table-2": 24, "001 table-3": 24, "002 table-2": 84,
    "002 table-3": 84, "002 table-4": 70, "002 table-5": 42, "003 table-1": 126, "003 table-2": 56, "003 table-3": 36,
    "003 table-4": 12, "004 table-1": 32, "004 table-2": 32, "004 table-3": 22,
}  # fmt: skip
NUMBER = r"[+-]?\d+(\.\d\d?)?( ± \d\.\d\d?)?|\d(\.\d)?×|–"


def test_every_table_is_whole() -> None:
    assert {name: len(table.cells) for name, table in TABLES.items()} == SIZES
    for table in TABLES.values():
        assert table.measure in ("best", "final") and table.claimed in ("formula", "epsilon") and table.notes
        assert table.said("sound") and {note.protocol for note in table.notes} <= {"", "sound", "published"}
        parts = [replace(note, of=(part,)) for note in table.notes for part in note.of]
        assert all(part.holds(part.protocol or "sound", table.cells) for part in parts)


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
        (("000", "1", "EMNIST, Dirichlet 0.6: train", "DP-FedSAM-top_k"), "95.87 ± 1.52"),
        (("000", "3", "EMNIST, Dirichlet 0.6: train", "DP-FedSAM-top_k"), "95.87 ± 0.52"),
        (("000", "3", "EMNIST, Dirichlet 0.6: difference", "DP-FedSAM-top_k"), "11.07 ± 0.08"),
        (("003", "1", "CIFAR-100, IID: train", "DP-FedAvg-blurs"), "95.46 ± 0.05"),
        (("003", "3", "CIFAR-100: gain", "p = 0.2"), "1.53 ± 0.80"),
        (("003", "3", "CIFAR-10", "p = 1.0"), "54.14 ± 0.60"),
        (("003", "4", "EMNIST, Dirichlet 0.6: train", "Fed-SMP-top_k"), "99.72 ± 0.02"),
        (("002", "II", "CIFAR-10, Dirichlet 0.1: rounds", "DP-FedSAM"), "118"),
        (("002", "II", "CIFAR-100, Dirichlet 0.1: speed-up", "DP-FedPGN-LS"), "3.4×"),
        (("002", "III", "CIFAR-10, Dirichlet 0.6: rounds", "DP-FedPGN-LS"), "12"),
        (("002", "V", "RoBERTa-Base, QNLI", "DP-FedPGN-LS"), "90.66 ± 0.16"),
        (("002", "V", "ViT-Base, CIFAR-100", "DP-FedSAM"), "57.22 ± 0.28"),
        (("004", "3", "EMNIST, ResNet-18, ε = 6", "BLUR+LUS, c = 0.7"), "80.32"),
        (("004", "3", "EMNIST, ResNet-18, ε = 6: gain", "LUS, c = 0.5"), "+1.51"),
    ],
)
def test_values_as_printed(where: tuple[str, str, str, str], value: str) -> None:
    paper, table, column, method = where
    [cell] = [c for c in find(paper, table).cells if (c.column, c.method) == (column, method)]
    assert cell.published == value


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_cell_has_a_recipe_or_says_why_not(table: Table) -> None:
    for cell in table.cells:
        assert re.fullmatch(NUMBER, cell.published), cell
        assert (cell.value is None) == (cell.published == "–") and cell.measure in MEASURES
        assert (cell.target is not None) or cell.measure not in COUNTED
        assert cell.recipe is not None or "lost" in cell.column
    for recipe in {(cell.of, cell.method): cell.recipe for cell in table.cells if cell.recipe is not None}.values():
        for scale in SCALES:
            found = scaled(recipe, scale)
            assert found.algorithm == recipe.algorithm or recipe.algorithm.name == "ae-dpfl"
            assert found.rounds == min(recipe.rounds, SCALES[scale].rounds or recipe.rounds)


@pytest.mark.parametrize("name", ["000 table-1", "001 table-3", "002 table-2", "004 table-2"])
def test_every_plan_is_proven_and_at_most_what_is_claimed(name: str) -> None:
    table = TABLES[name]
    for row in dry(table.only(columns=[table.cells[0].column])).rows:
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
    assert row.recipe is not None and row.recipe.algorithm.options == {"rho": 0.5, "adaptive": True}
    [row] = dry(find("002", "2").only(["CIFAR-10, Dirichlet 0.1"], ["DP-FedPGN"]), "full", "published").rows
    assert row.proven == math.inf
    with pytest.raises(InputError, match=r"Zhang et al\. 2024 released no procedure"):
        dry(find("001", "3").only(methods=["DP-FedAvg"]), protocol="published")


def test_without_noise_nothing_is_claimed() -> None:
    cell = find("002", "4").only(["CIFAR-10, no noise"], ["DP-FedAvg"]).cells[0]
    assert claimed_epsilon(cell) == math.inf


def test_dry_run_as_text() -> None:
    found = dry(find("000", "Table 1").only(["CIFAR-10, Dirichlet 0.6"]))
    text = lines(found, dry_run=True)
    assert all(len(line) <= WIDTH for line in text)
    assert "DP-FedSAM       54.14 ± 0.60     10.84          9.38 0.002" in text
    assert not any("NOT COMPARABLE" in line for line in text)
    assert any(line.startswith("Differs: the released code clips each tensor") for line in text)
    json.dumps(as_dict(found))


def test_a_smaller_scale_says_what_it_changes() -> None:
    text = " ".join(lines(dry(find("000", "1").only(["CIFAR-10, IID"], ["DP-FedSAM"]), "small"), dry_run=True))
    assert "NOT COMPARABLE" in text and "data.clients 500 → 100" in text
    full = find("000", "1").cells[0].recipe
    assert full is not None and differences(full, full) == []


@pytest.mark.parametrize(
    ("paper", "table", "said"),
    [("000", "figure-1", "allowed: table-1, table-2"), ("004", "9", "table-1, table-2")],
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


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.long
def test_two_columns_of_the_same_runs_trained_on_digits(tmp_path: Path) -> None:
    chosen = find("000", "1").only(["CIFAR-10, IID", "CIFAR-10, IID: train"], ["DP-FedAvg", "DP-FedSAM"])
    overrides = ["data.dataset=digits", "data.max_examples=500", "data.clients=25"]
    found = fill(dry(chosen, "smoke", overrides=overrides), tmp_path / "runs", processes=1)
    assert found.complete and found.missing == () and len(list((tmp_path / "runs").glob("*/seed-0"))) == 2
    planned = dry(chosen, "smoke", overrides=overrides).rows[0]
    for row in found.rows:
        assert list(row.ours) == [0] and 0 <= row.ours[0] <= 100 and row.difference is not None
        assert row.proven == pytest.approx(planned.proven, rel=1e-6)
        assert row.simulated == pytest.approx(planned.simulated, rel=1e-6) and row.delta == 0.002
    text = lines(found)
    assert "data.dataset cifar10 → digits" in " ".join(text) and all(len(line) <= WIDTH for line in text)
    assert set(found.verdicts()) == {"CIFAR-10, IID", "CIFAR-10, IID: train"}
    record = json.loads(json.dumps(as_dict(found), allow_nan=False))
    assert record["verdicts"]["CIFAR-10, IID"]["text"][0].startswith("Rank agreement: Kendall τ")


@pytest.mark.usefixtures("quick_workers")
def test_data_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    chosen = find("000", "1").only(["CIFAR-10, IID"], ["DP-FedAvg"])
    found = fill(dry(chosen, "smoke", overrides=["data.dataset=./nowhere"]), tmp_path / "runs")
    assert not found.complete and len(found.missing) == 1 and "nowhere" in found.missing[0]
    assert found.rows[0].proven is None  # nothing ran, so nothing is proven of it
    assert not (tmp_path / "runs").exists()


def test_a_column_by_its_whole_name_and_whole_numbers() -> None:
    def columns(paper: str, table: str, text: str) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in find(paper, table).only(columns=[text]).cells))

    assert columns("004", "2", "Dirichlet 1") == ["CNN-2-Layers, Dirichlet 1", "ResNet-18, Dirichlet 1"]
    assert columns("004", "2", "ResNet-18, Dirichlet 10") == ["ResNet-18, Dirichlet 10"]
    assert columns("000", "1", "cifar-10, iid") == ["CIFAR-10, IID"]
    assert len(columns("003", "1", "CIFAR-10")) == 6 and len(columns("003", "1", "train")) == 9
    with pytest.raises(InputError, match="--column"):
        columns("004", "2", "richlet 10.")


def test_printed_numbers() -> None:
    assert printed("53.92 ± 0.55") == (53.92, 0.55) and printed("+1.04") == (1.04, None)
    assert printed("3.3×") == (3.3, None) and printed("118") == (118.0, None) and printed("–") is None


def test_numbers_of_the_same_runs_share_them() -> None:
    for table in TABLES.values():
        runs = {(cell.of, cell.method): cell.recipe for cell in table.cells}
        assert all(cell.recipe == runs[cell.of, cell.method] for cell in table.cells)
        slugs = [f"{recipe.name} {recipe.algorithm.name}" for recipe in runs.values() if recipe is not None]
        assert len(set(slugs)) == len(slugs)


def test_small_keeps_the_noise_of_the_papers_cohort() -> None:
    """σ, C, q, δ and σ/m, the noise in each coordinate of the mean over C, are those of full scale."""
    for paper, table, column, method in (
        ("000", "1", "CIFAR-10, IID", "DP-FedSAM"), ("004", "1", "ResNet-18, ε = 2", "DP-FedAvg"),
        ("004", "1", "ResNet-18, ε = 2", "AE-DPFL"),
    ):  # fmt: skip
        full = find(paper, table).only([column], [method]).cells[0].recipe
        assert full is not None
        small = scaled(full, "small")
        assert small.privacy.noise_multiplier == sigma_of(full) and small.privacy.epsilon is None
        assert small.privacy.noise_cohort == full.cohort.size and small.privacy.clip == full.privacy.clip
        clients = (full.data.clients or 0, small.data.clients or 0)
        assert small.cohort.size / clients[1] == pytest.approx(full.cohort.size / clients[0])
        assert small.cohort.size >= 10


def test_small_where_no_larger_cohort_can_be_simulated() -> None:
    full = find("004", "2").only(["CNN-2-Layers, Dirichlet 1"], ["DDGauss"]).cells[0].recipe
    assert full is not None
    small = scaled(full, "small")
    assert small.privacy.noise_cohort is None and small.privacy.noise_multiplier == pytest.approx(
        sigma_of(full) * small.cohort.size / full.cohort.size
    )
    [row] = dry(find("000", "1").only(["CIFAR-10, IID"], ["DP-FedSAM"]), "small", "published").rows
    assert row.recipe is not None and row.recipe.privacy.noise_multiplier == pytest.approx(0.95 / 5)
    assert row.recipe.privacy.noise_cohort is None and row.recipe.local.epochs == 1 and row.simulated is None


def test_the_simulated_epsilon_has_a_column_of_its_own() -> None:
    found = dry(find("000", "1").only(["CIFAR-10, IID"], ["DP-FedSAM"]), "small")
    [row] = found.rows
    assert row.simulated is not None and row.proven is not None and row.simulated < row.proven
    full = dry(found.table, "full", overrides=["rounds=150"])
    assert row.simulated == pytest.approx(full.rows[0].proven, rel=1e-9)  # the paper's system over as many rounds
    text = lines(found, dry_run=True)
    assert any("simul. ε" in line for line in text) and all(len(line) <= WIDTH for line in text)


def test_a_released_procedure_keeps_its_epochs_and_its_notes() -> None:
    chosen = find("003", "2").only(["CIFAR-10, ε = 8"], ["DP-FedSAM"])
    [row] = dry(chosen, "full", "published").rows
    assert row.recipe is not None and row.recipe.local.epochs == 30 and row.recipe.local.steps is None
    assert not any("here the round is sound" in note for note in chosen.said("published"))
    assert any("here the round is sound" in note for note in chosen.said("sound"))
    [row] = dry(chosen).rows
    assert row.recipe is not None and row.recipe.local.epochs is None and row.recipe.local.steps == 60


def test_every_table_names_what_the_text_leaves_open() -> None:
    for name, words in {
        "000 table-1": "EMNIST's split and batch", "003 table-2": "0.0005", "000 table-2": "0.005, is no factor",
        "002 table-3": "no local momentum", "001 table-3": "11,181,642", "004 table-1": "AE-DPFL's local training",
        "000 table-3": "Fed-SMP-top_k has no public data", "004 table-3": "77.19 in Table 1",
    }.items():  # fmt: skip
        assert any(words in note for note in TABLES[name].said("sound")), name


def test_a_note_stands_only_where_what_it_is_about_is_shown() -> None:
    whole = find("000", "1")
    chosen = whole.only(["CIFAR-10, IID"], ["DP-FedAvg"])
    assert not any(name in note for note in chosen.said("sound") for name in ("EMNIST", "Fed-SMP-top_k", "SAM"))
    assert any("EMNIST" in note for note in whole.said("sound")) and len(chosen.said("sound")) >= 3
