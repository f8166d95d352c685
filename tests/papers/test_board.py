"""The leaderboard: its rows name what was run, and a method joins by the rule, without a look at test data."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.leaderboard import ceiling
from fedflat.cli.main import _assemble, app
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.data.clients import FederatedData
from fedflat.papers import board
from fedflat.papers.board_runs import REPORTED, TUNING, Cell, Examples, measure

TASK = next(task for task in board.TASKS if task.data == "mnist")
DOCS = Path(__file__).parent.parent.parent / "docs"
FEW = {"data.clients": 5, "cohort.size": 5, "rounds": 2, "engine.backend": "sequential"}


def told(_: str) -> None:
    """Nothing is shown."""


def small() -> Examples:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 4
    x = torch.randn(200, 6, generator=draw) + nn.functional.one_hot(y, 6)
    data = FederatedData(x[:160], y[:160], (), (), x[160:], y[160:], 4, "small features")
    return Examples(data, nn.Sequential(nn.Linear(6, 4)))


def test_the_page_of_the_docs_is_made_of_the_results() -> None:
    found = board.load()
    assert (DOCS / "leaderboard.md").read_text(encoding="utf-8") == board.markdown(found)
    assert "<svg" in (DOCS / "images" / "leaderboard.svg").read_text(encoding="utf-8")
    assert "not measured" in board.html(found, "fedflat") or all(map(all, board.summary(found)))


def test_reported_seeds_are_not_those_of_tuning_and_commands_are_recipes() -> None:
    for row in board.load()["rows"]:
        assert TUNING not in row["seeds"] and len(row["seeds"]) == len(row["accuracy"])
        assert row["proven"] <= row["epsilon"] + 1e-9
        parts = board.command(row).split(" -o ")
        Recipe.load(parts[0].removeprefix("fedflat run "), overrides=parts[1:])


def test_a_cell_is_tuned_on_training_examples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = small(), list[tuple[int, bool]]()
    real = Examples.federation

    def watched(self: Examples, alpha: float, clients: int, seed: int, tuning: bool) -> Any:
        data = real(self, alpha, clients, seed, tuning)
        rows = {tuple(row.tolist()) for row in data.test_inputs}
        used = [tuple(data.inputs[i].tolist()) for part in data.parts for i in part]
        assert not rows & set(used)
        assert tuning == (len(used) == 144) and (tuning or torch.equal(data.test_inputs, known.data.test_inputs))
        seen.append((seed, tuning))
        return data

    monkeypatch.setattr(Examples, "federation", watched)
    task = dataclasses.replace(TASK, base=FEW)
    row = measure(Cell(task, 8, {"name": "dp-fedavg-la", "strength": 0.5}), known, told)
    tried = dict(row["tried"])
    assert seen == [(TUNING, True)] * len(tried) + [(seed, False) for seed in REPORTED]
    best = row["setting"]["server.lr"]
    assert tried[best] == max(tried.values()) and len(row["accuracy"]) == 3
    assert len(tried) == 8 or min(tried) < best < max(tried), (
        "the best lies at the border, and nothing beyond was tried"
    )
    assert row["proven"] == pytest.approx(8)
    assert board.method_name(row) == "dp-fedavg-la (strength 0.5)"


def test_a_method_with_an_optimizer_of_its_own_starts_from_its_own_rate() -> None:
    assert Cell(TASK, 8, {"name": "dp-fedadam"}).advised() == {"server.momentum": 0.0, "server.lr": 0.03}
    own = {"server.momentum": 0.0, "server.lr": 10700, "privacy.clip": 0.0015}
    assert Cell(TASK, 8, {"name": "dp-fedpgn"}).advised() == own
    assert Cell(TASK, 8, {"name": "dp-fedavg"}).advised() == {"server.lr": 3200}


def test_clients_that_the_data_name_keep_their_examples() -> None:
    parts = (torch.arange(100).numpy(), torch.arange(100, 160).numpy())
    known = small()
    known = dataclasses.replace(known, data=dataclasses.replace(known.data, parts=parts), natural=True)
    held = set(known.apart(TUNING)[1].tolist())
    for part, own in zip(known.federation(None, 0, TUNING, True).parts, parts, strict=True):
        assert set(part.tolist()) == set(own.tolist()) - held
    assert len(held) == 16 and 25 < ceiling(known) <= 100


def test_what_an_idea_adds_is_paired_by_seed() -> None:
    row = {"data": "mnist", "alpha": 0.6, "epsilon": 8, "tried": [], "method": {"name": "dp-fedavg"}}
    found = {"rows": [{**row, "accuracy": [90.0, 80.0]}]}
    found["rows"].append({**row, "method": {"name": "dp-fedsam"}, "accuracy": [89.0, 79.0]})
    assert board.paired(found, 8)[1] == [["dp-fedsam − dp-fedavg", "−1.00 [−1.00, −1.00]"]]
    heads, rows = board.methods(found, 8)
    assert heads == ["", "MNIST, Dirichlet 0.6"] and [row[0] for row in rows] == ["dp-fedavg", "dp-fedsam"]


def test_a_data_sets_name_takes_the_best_recipe_for_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"data": "cifar10", "alpha": 0.6, "epsilon": 8, "method": {}, "accuracy": [value], "prior": prior}
        for prior, value in ((board.PATCHES, 65.0), (board.NATURAL, 70.0))
    ]
    monkeypatch.setattr(board, "load", lambda: {"rows": rows})
    monkeypatch.setattr(board, "find_spec", lambda name: name)
    assert (board.recipe_for("cifar10") or "")[0] == "cifar10-image-encoder"
    monkeypatch.setattr(board, "find_spec", lambda name: None)
    name, said = board.recipe_for("cifar10") or ("", "")
    assert name == "cifar10-representation" and "[vision]'" in said and "70.0 %" in said and "\n" not in said
    assert board.recipe_for("cifar") is None


def test_the_command_shows_writes_and_refuses(tmp_path: Path) -> None:
    _assemble()
    runner = CliRunner()
    shown = runner.invoke(app, ["leaderboard"]).output
    assert "CIFAR-10, 0.1" in shown and "Shakespeare" in shown and max(map(len, shown.splitlines())) <= 80
    printed, rows = json.loads(runner.invoke(app, ["leaderboard", "--json"]).output), board.load()["rows"]
    assert [(row["method"], row["accuracies"]) for row in printed] == [
        (row["method"]["name"], row["accuracy"]) for row in rows
    ]
    assert all({"data", "alpha", "epsilon", "method", "accuracies", "prior"} <= row.keys() for row in printed)
    assert runner.invoke(app, ["leaderboard", "--out", str(tmp_path / "new")]).exit_code == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"leaderboard.md", "leaderboard.html", "images"}
    for wrong in (
        ["--with", "mine"],
        ["--epsilon", "3"],
        ["--with", "a.py:b", "--data", "mnis"],
        ["--with", "a.py:b", "--alpha", "0.1"],
        ["--with", "a.py:b", "--data", "sst2"],
        ["--with", "a.py:b", "--encoder", "FOLDER"],
        ["--out", str(tmp_path / "new" / "leaderboard.md")],
    ):
        assert runner.invoke(app, ["leaderboard", *wrong]).exception is not None


@pytest.mark.parametrize(
    "given", [["--with", "a.py:b"], ["--with", "a.py:b", "--epsilon", "-1"], ["--out", "/dev/null"]]
)
def test_a_mistake_is_told_before_anything_is_measured(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        raise AssertionError("features before the mistake")

    monkeypatch.setattr("fedflat.papers.board_runs.examples", late)
    _assemble()
    found = CliRunner().invoke(app, ["leaderboard", "--with", "fedflat.algorithms:dp_fedavg", *given])
    assert isinstance(found.exception, InputError), found.exception


def test_json_is_all_that_standard_output_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(cell: Cell, known: Examples, told: Any) -> dict[str, Any]:
        told("tried")
        return {**board.load()["rows"][0], "method": dict(cell.method)}

    monkeypatch.setattr("fedflat.papers.board_runs.examples", lambda task, encoder: small())
    monkeypatch.setattr("fedflat.papers.board_runs.measure", measured)
    _assemble()
    found = CliRunner().invoke(app, ["leaderboard", "--json", "--with", "fedflat.algorithms:dp_fedavg"])
    assert len(json.loads(found.stdout)) == 1 + len(board.load()["rows"]) and "tried" in found.stderr
