"""The leaderboard's program: its page is made of the results, and a method joins without a look at test data."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import leaderboard, leaderboard_page
from benchmarks.leaderboard_cell import REPORTED, TUNING, Cell, Examples, measure
from fedflat.data.clients import FederatedData
from fedflat.papers import board

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
    assert (DOCS / "leaderboard.md").read_text(encoding="utf-8") == leaderboard_page.markdown(board.load())
    assert "<svg" in (DOCS / "images" / "leaderboard.svg").read_text(encoding="utf-8")


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
    row = measure(Cell(dataclasses.replace(TASK, base=FEW), 8, {"name": "dp-fedavg-la", "strength": 0.5}), known, told)
    tried = dict(row["tried"])
    assert seen == [(TUNING, True)] * len(tried) + [(seed, False) for seed in REPORTED]
    best = row["setting"]["server.lr"]
    assert tried[best] == max(tried.values()) and len(row["accuracy"]) == 3
    assert len(tried) == 8 or min(tried) < best < max(tried), (
        "the best lies at the border, and nothing beyond was tried"
    )
    assert row["proven"] == pytest.approx(8)
    assert leaderboard_page.method_name(row) == "dp-fedavg-la (strength 0.5)"


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
    assert len(held) == 16 and 25 < leaderboard.ceiling(known) <= 100


def test_what_an_idea_adds_is_paired_by_seed() -> None:
    row = {"data": "mnist", "alpha": 0.6, "epsilon": 8, "tried": [], "method": {"name": "dp-fedavg"}}
    found = {"rows": [{**row, "accuracy": [90.0, 80.0]}]}
    found["rows"].append({**row, "method": {"name": "dp-fedsam"}, "accuracy": [89.0, 79.0]})
    assert leaderboard_page.paired(found, 8)[1] == [["dp-fedsam − dp-fedavg", "−1.00 [−1.00, −1.00]"]]
    heads, rows = leaderboard_page.methods(found, 8)
    assert heads == ["", "MNIST, Dirichlet 0.6"] and [row[0] for row in rows] == ["dp-fedavg", "dp-fedsam"]


def test_a_method_of_ones_own_joins_the_tables_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(cell: Cell, known: Examples, told: Any) -> dict[str, Any]:
        return {**board.load()["rows"][0], "method": dict(cell.method)}

    before = board.FILE.read_bytes()
    monkeypatch.setattr(leaderboard, "examples", lambda task, encoder: small())
    monkeypatch.setattr(leaderboard, "measure", measured)
    leaderboard.main(["digits", "--with", "fedflat.algorithms:dp_fedavg_lus", "--out", str(tmp_path)])
    assert "| dp_fedavg_lus |" in (tmp_path / "leaderboard.md").read_text(encoding="utf-8")
    assert (tmp_path / "images" / "leaderboard.svg").is_file() and board.FILE.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        [], ["digits", "--with", "a.py:b"], ["digits", "--with", "fedflat.algorithms:dp_fedavg", "--epsilon", "-1"],
        ["digits", "dp-fedavgg"], ["sst2", "dp-fedavg"], ["digits", "dp-fedavg", "--encoder", "FOLDER"],
        ["digits", "dp-fedavg", "--alpha", "0.1"],
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_measured(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        raise AssertionError("features before the mistake")

    monkeypatch.setattr(leaderboard, "examples", late)
    with pytest.raises(SystemExit):
        leaderboard.main(words)
