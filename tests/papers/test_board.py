"""The leaderboard as the package shows it: its rows name what was run, and a data set's name takes the best recipe."""

import json
from typing import Any

import pytest

from fedflat.config.recipe import Recipe
from fedflat.papers import board


def test_reported_seeds_are_not_those_of_tuning_and_commands_are_recipes() -> None:
    for row in board.load()["rows"]:
        assert 100 not in row["seeds"] and len(row["seeds"]) == len(row["accuracy"])
        assert row["proven"] <= row["epsilon"] + 1e-9
        parts = board.command(row).split(" -o ")
        Recipe.load(parts[0].removeprefix("fedflat run "), overrides=parts[1:])


def test_a_data_sets_name_takes_the_best_recipe_for_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"data": "cifar10", "alpha": 0.6, "epsilon": 8, "method": {"name": "dp-fedavg-la"}}
    measured = ((board.PATCHES, 65.0), (board.NATURAL, 70.0))
    rows = [{**row, "prior": prior, "accuracy": [value]} for prior, value in measured]
    monkeypatch.setattr(board, "load", lambda: {"rows": rows})
    monkeypatch.setattr(board, "find_spec", lambda name: name)
    assert (board.recipe_for("cifar10") or "")[0] == "cifar10-image-encoder"
    monkeypatch.setattr(board, "find_spec", lambda name: None)
    name, said = board.recipe_for("cifar10") or ("", "")
    assert name == "cifar10-representation" and "[vision]'" in said and "70.0 %" in said and "\n" not in said
    assert board.recipe_for("cifar") is None


def test_an_announced_recipe_has_the_settings_that_were_measured() -> None:
    methods = {task: Recipe.load(task.recipe).algorithm.name for task in board.TASKS}
    own = [row for row in board.load()["rows"] if row["method"]["name"] == methods[board.task_of(row)]]
    for (task, epsilon), row in board.best(own).items():
        if task.alpha in (0.6, None) and not task.public and epsilon == board.MEASURED_AT:
            recipe = Recipe.load(task.recipe)
            assert Recipe.load(task.recipe, [f"{key}={value}" for key, value in row["setting"].items()]) == recipe


def test_the_command_shows_all_rows(command: Any) -> None:
    shown, listed = (command("leaderboard", *more).out for more in ([], ["--json"]))
    assert "CIFAR-10, 0.1" in shown and "Shakespeare" in shown and max(map(len, shown.splitlines())) <= 80
    printed, rows = json.loads(listed), board.load()["rows"]
    assert [(r["method"], r["accuracies"]) for r in printed] == [(r["method"]["name"], r["accuracy"]) for r in rows]
    assert all({"data", "alpha", "epsilon", "method", "accuracies", "prior"} <= row.keys() for row in printed)
