"""Tuning every method by one rule, on clients that are held back and never on test data."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import reproduced, strengths
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.papers.rows import dry, fill
from fedflat.papers.tables import find
from fedflat.simulation.experiment import data_for

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


def test_a_trial_sees_neither_test_data_nor_its_own_clients_in_the_score() -> None:
    one = Recipe.of(recipe({"name": "dp-fedsam", "rho": 0.1}), ["seed=100"])
    whole, found = data_for(one), strengths.apart(one)
    assert (whole.clients, found.clients) == (20, 18)
    trained = {int(row) for part in found.parts for row in part}
    held = [part for part in whole.parts if not set(map(int, part)) <= trained or not len(part)]
    scored = [int(row) for part in held for row in part]
    assert len(held) == 2 and not trained & set(scored) and trained | set(scored) == set(range(400))
    assert found.test_targets is not None and found.test_targets.tolist() == whole.targets[scored].tolist()
    assert whole.test_targets is not None and len(found.test_targets) != len(whole.test_targets)


def test_clients_without_examples_are_not_held_back_and_one_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Recipe.of(recipe({"name": "dp-fedsam", "rho": 0.1}), ["seed=100"])
    whole, empty = data_for(one), np.empty(0, dtype=np.int64)
    few = dataclasses.replace(whole, parts=(empty, whole.parts[0], empty, whole.parts[1]))
    monkeypatch.setattr(strengths, "data_for", lambda recipe: few)
    found = strengths.apart(one)
    assert [len(part) for part in found.parts].count(0) == 2 and found.clients == 3
    assert found.test_targets is not None and len(found.test_targets)
    few = dataclasses.replace(whole, parts=(empty, whole.parts[0]))
    with pytest.raises(InputError, match="--tuned: found 1 clients with examples; allowed: two or more"):
        strengths.apart(one)


def test_the_best_is_chosen_and_equals_stay_as_printed() -> None:
    one = recipe({"name": "dp-fedsam", "rho": 0.5})
    found = strengths._best(one, {1.0: 10.0, 0.2: 30.0, 0.04: 20.0})
    assert found is not None and (found.strength, dict(found.options)) == (0.2, {"rho": 0.1})
    assert found.sentence("SAM") == (
        "SAM: 0.2 of the printed strength (rho 0.1); held-back clients: 10.0 % at 1, 30.0 % at 0.2, 20.0 % at 0.04"
    )
    same = strengths._best(one, dict.fromkeys(strengths.STRENGTHS, 10.0))
    assert same is not None and same.strength == 1.0
    assert same.sentence("SAM").endswith("; no difference, so as printed")
    assert strengths._best(recipe({"name": "dp-fedavg"}), {}) is None


def test_a_trial_keeps_the_share_of_a_round_and_its_seed_is_not_reported(tmp_path: Path) -> None:
    one = recipe({"name": "dp-fedsam", "rho": 0.5})
    tried = strengths._trial(one)
    assert (tried.seed, tried.cohort.size, tried.evaluation.every) == (100, 4.5, 2)
    assert strengths._trial(Recipe.of(one, ["cohort.sampling=fixed"])).cohort.size == 4
    with pytest.raises(InputError, match="--tuned: found seed 100 among those that are reported"):
        strengths.choose([one], [99, 100, 101], tmp_path)


@pytest.mark.long
def test_a_tuned_table_says_what_was_chosen_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = find("000", "1").only(["CIFAR-10, IID"], ["DP-FedAvg", "DP-FedSAM"])
    plan, chosen = strengths.tuned(dry(part, "smoke", overrides=SMALL), tmp_path, processes=1)
    found = fill(plan, tmp_path, processes=1)
    [one] = chosen.values()
    assert set(one.tried) == set(strengths.STRENGTHS) and one.tried[one.strength] == max(one.tried.values())
    assert [row.recipe.algorithm.options for row in found.rows if row.recipe] == [{}, dict(one.options)]
    assert all(row.ours for row in found.rows) and one.seconds > 0
    runs = len(list(tmp_path.rglob("privacy.json")))
    assert fill(strengths.tuned(dry(part, "smoke", overrides=SMALL), tmp_path)[0], tmp_path).rows == found.rows
    assert len(list(tmp_path.rglob("privacy.json"))) == runs
    reproduced.keep(tmp_path / "000-table-1.json", "python …", found, SMALL, 1.0, chosen, True)
    monkeypatch.setattr(reproduced, "FOLDER", tmp_path)
    [(_, _, kept)] = reproduced.outcomes(part)
    assert dict(kept) == dict(chosen)


def test_a_trial_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recipe({"name": "dp-fedsam", "rho": 0.5})

    def failed(*given: Any) -> Any:
        return SimpleNamespace(failed={"r_dp-fedsam/seed-100": "no memory"})

    monkeypatch.setattr(strengths, "compare", failed)
    with pytest.raises(RunError, match="--tuned: the trial r_dp-fedsam/seed-100 failed: no memory"):
        strengths.choose([one], [0], tmp_path)
    monkeypatch.setattr(strengths, "compare", lambda *given: SimpleNamespace(failed={}))
    short = SimpleNamespace(metrics=[{"round": 0}], path=tmp_path)
    monkeypatch.setattr(strengths.metrics, "read_run", lambda place: short)
    with pytest.raises(RunError, match="ended before its last round and has no accuracy"):
        strengths.choose([one], [0], tmp_path)
