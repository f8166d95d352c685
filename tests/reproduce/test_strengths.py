"""Tuning every method by one rule, on clients that are held back and never on test data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fedflat.cli.reproduced import lines
from fedflat.config.recipe import Recipe
from fedflat.reproduce import find, measured, strengths, train
from fedflat.reproduce.measured import outcomes
from fedflat.simulation.experiment_worker import data_for

SMALL = ["data.dataset=digits", "data.max_examples=500", "data.clients=25"]


def recipe(algorithm: dict[str, Any]) -> Recipe:
    data = {"dataset": "digits", "clients": 20, "max_examples": 400}
    rest = {"data": data, "cohort": {"size": 5}, "privacy": {"noise_multiplier": 1.0}, "model": "mlp"}
    return Recipe.of({"name": "r", "rounds": 2, "algorithm": algorithm, **rest})


def test_a_strength_leads_every_number_towards_dp_fedavg() -> None:
    whole = {"name": "dp-fedpgn-ls", "rho": 0.2, "beta": 0.3, "smoothing": 0.01}
    assert strengths.options_of(recipe(whole), 1.0) == {"rho": 0.2, "beta": 0.3, "smoothing": 0.01}
    assert strengths.options_of(recipe(whole), 0.2) == {"rho": 0.04, "beta": 0.86, "smoothing": 0.002}
    assert strengths.options_of(recipe({"name": "dp-fedavg-blurs"}), 0.0) == {"lam": 0, "sparsity": 0}  # printed: 0.4
    assert strengths.options_of(recipe({"name": "dp-fedavg"}), 0.2) == {}
    assert strengths.options_of(recipe({"name": "ddgauss"}), 0.2) == {}
    weak = strengths.at(recipe({"name": "fed-smp-randk", "keep": 0.5}), 0.04)
    assert weak.algorithm.options == {"keep": 0.98} and weak.name == "r_strength-0.04"


def test_a_trial_sees_neither_test_data_nor_its_own_clients_in_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    one = recipe({"name": "dp-fedsam", "rho": 0.1})
    seen: list[Any] = []
    real = strengths.run

    def spied(given: Recipe, data: Any) -> Any:
        seen.append((given, data))
        return real(given, data=data)

    monkeypatch.setattr(strengths, "run", spied)
    assert 0 <= strengths.trial(one) <= 100
    [(given, data)] = seen
    whole = data_for(Recipe.of(one, [f"seed={strengths.SEED}"]))
    assert given.seed == strengths.SEED and given.data.clients == data.clients == 18 and whole.clients == 20
    held = sorted(row for part in whole.parts[18:] for row in part)
    assert data.test_targets.tolist() == [int(whole.targets[row]) for part in whole.parts[18:] for row in part]
    assert not set(held) & {row for part in data.parts for row in part}


def test_the_best_is_chosen_and_equals_stay_as_printed() -> None:
    one = recipe({"name": "dp-fedsam", "rho": 0.5})
    keys = {strength: strengths._key(strengths.at(one, strength)) for strength in strengths.STRENGTHS}
    assert len(set(keys.values())) == 3
    found = strengths._best(one, {keys[1.0]: 10.0, keys[0.2]: 30.0, keys[0.04]: 20.0})
    assert found is not None and (found.strength, dict(found.options)) == (0.2, {"rho": 0.1})
    assert found.sentence("SAM") == (
        "SAM: 0.2 of the printed strength (rho 0.1); held-back clients: 10.0 % at 1, 30.0 % at 0.2, 20.0 % at 0.04"
    )
    same = strengths._best(one, dict.fromkeys(keys.values(), 10.0))
    assert same is not None and same.strength == 1.0
    assert strengths._best(recipe({"name": "dp-fedavg"}), {}) is None


def test_a_tuned_table_says_what_was_chosen_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Pool:
        """Trials in this process: another one would load torch first."""

        def __init__(self, *given: Any) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            pass

        def submit(self, action: Any, given: Recipe) -> Any:
            from concurrent.futures import Future

            done: Future[float] = Future()
            done.set_result(action(given))
            return done

    monkeypatch.setattr(strengths, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(strengths, "trial", lambda one: {0.5: 10.0, 0.1: 20.0}.get(one.algorithm.options["rho"], 30.0))
    part = find("000", "1").only(["CIFAR-10, IID"], ["DP-FedAvg", "DP-FedSAM"])
    part = dataclasses.replace(part, cells=tuple(cell for cell in part.cells if cell.measure == "best"))
    found = train(part, tmp_path, "smoke", overrides=SMALL, processes=1, tuned=True)
    assert "Trial: dp-fedsam, rho 0.1: 20.0 %" in capfd.readouterr().err
    assert [row.recipe.algorithm.options for row in found.rows if row.recipe] == [{}, {"rho": 0.02}]
    assert all(row.ours for row in found.rows)
    text = "\n".join(lines(found))
    assert "Tuned: DP-FedSAM: 0.04 of the printed strength (rho 0.02); held-back clients:" in text
    again = train(part, tmp_path, "smoke", overrides=SMALL, processes=1, tuned=True)
    assert again.rows == found.rows and "Trial:" not in capfd.readouterr().err
    measured.keep(tmp_path / "000-table-1.json", "fedflat …", found, SMALL, 1.0)
    assert json.loads((tmp_path / "000-table-1.json").read_text())["records"][0]["chosen"]
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    [(_, kept)] = outcomes(part)
    assert dict(kept.chosen) == dict(found.chosen)
