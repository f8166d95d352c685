"""A private evaluation: what one client moves, what its noise is, and that ε is of both releases together."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import weights

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.types import RoundState
from fedflat.engine import evaluate
from fedflat.engine.evaluate import best_so_far, client_accuracies, cohort_scores
from fedflat.engine.round import private_accuracy
from fedflat.federation.task import check_deployable
from fedflat.privacy.ledger import read
from fedflat.privacy.verify import recompute
from fedflat.simulation.export import attest

CLIENTS = 12
HOSTILE = {
    "wrong labels": lambda x, y: (x, 1 - y), "no numbers": lambda x, y: (torch.full_like(x, math.nan), y),
    "huge": lambda x, y: (x * 1e30, y), "many": lambda x, y: (x.repeat(50, 1), (1 - y).repeat(50)),
    "none": lambda x, y: (x[:0], y[:0]),
}  # fmt: skip


def recipe(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "rounds": 3, "model": "linear", "algorithm": "dp-fedavg", "cohort": {"size": 6},
        "local": {"steps": 2, "batch_size": 5, "lr": 0.5}, "data": {"client_test_fraction": 0.5, "classes": 2},
        "privacy": {"clip": 0.5, "noise_multiplier": 1.5, "delta": 1e-3}, "evaluation": {"private": True, "share": 0.2},
    }  # fmt: skip
    return base | changes


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(10, 4, generator=draw), torch.randint(2, (10,), generator=draw)) for _ in range(CLIENTS)]


def sums(change: str, scores: Any = cohort_scores) -> np.ndarray:
    job = prepare(Recipe.of(recipe()), None, clients())
    data = job.data
    if change:
        x, y = HOSTILE[change](*[part[torch.from_numpy(data.held_back[4])] for part in (data.inputs, data.targets)])
        at = len(data.inputs)
        held = list(data.held_back)
        held[4] = np.arange(at, at + len(x))
        inputs, targets = torch.cat([data.inputs, x]), torch.cat([data.targets, y])
        data = replace(data, inputs=inputs, targets=targets, held_back=tuple(held))
    return scores(job.problem, data, job.initial_weights, range(CLIENTS))


def weighted(problem: Any, data: Any, weights: Any, cohort: Any) -> np.ndarray:
    """The broken twin: examples count, not clients."""
    sizes = np.array([len(data.held_back[i]) for i in cohort if len(data.held_back[i])])
    there = [i for i in cohort if len(data.held_back[i])]
    found = np.nan_to_num(client_accuracies(problem, data, lambda i: weights, there), nan=0.5)
    return np.array([(sizes * (found - 0.5)).sum(), sizes.sum() / 2])


@pytest.mark.parametrize("change", HOSTILE)
def test_one_client_moves_the_sums_by_at_most_the_bound(change: str) -> None:
    worlds = sums(change), sums("none")
    assert float(np.linalg.norm(worlds[0] - worlds[1])) <= 1 / math.sqrt(2)


def test_sums_over_examples_are_caught() -> None:
    assert float(np.linalg.norm(sums("many", weighted) - sums("none", weighted))) > 1 / math.sqrt(2)


def test_the_noise_is_what_the_ledger_accounts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = fedflat.run(recipe(), clients=clients(), out=out)
    plan, line = prepare(Recipe.of(recipe()), None, clients()).parts.plan, read(out / "ledger.jsonl")[0]
    assert line["evaluation"] == 0.2 and line["count_std"] == pytest.approx(1.5 / (2 * math.sqrt(0.2)))
    assert line["std"] / line["sensitivity"] == pytest.approx(1.5 / math.sqrt(0.8))
    assert result.privacy["proven_epsilon"] == pytest.approx(recompute(read(out / "ledger.jsonl")).epsilon, rel=1e-3)
    plain = fedflat.run(recipe(evaluation={}), clients=clients())
    assert result.privacy["proven_epsilon"] == pytest.approx(plain.privacy["proven_epsilon"], rel=1e-9)
    assert "0.2 of 1/σ²" in result.privacy["mechanism"]
    still = np.array([0.0, 1e9])  # so large that the ratio is the first sum's noise alone
    drawn = [private_accuracy(plan, still, bytes(32), turn)["private_accuracy"] for turn in range(4000)]
    assert np.std(drawn) * 2e9 == pytest.approx(math.sqrt(2) * line["count_std"], rel=0.05)


def test_an_evaluation_without_a_charge_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The broken twin charges the update alone: the ledger's ε is then below that of what was released."""
    honest = fedflat.run(recipe(), clients=clients(), out=tmp_path / "a").privacy["proven_epsilon"]
    line = read(tmp_path / "a" / "ledger.jsonl")
    uncharged = [{key: value for key, value in one.items() if key != "count_std"} for one in line]
    assert recompute(uncharged).epsilon < 0.95 * honest


def test_it_tells_the_accuracy_of_the_model_that_the_round_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = cohort_scores

    def watch(*given: Any) -> np.ndarray:
        found = real(*given)
        seen.append(0.5 + found[0] / (2 * found[1]))
        return found

    monkeypatch.setattr(evaluate, "cohort_scores", watch)
    quiet = recipe(privacy={"clip": 0.5, "noise_multiplier": 0.0, "delta": 1e-3}, cohort={"size": CLIENTS})
    found = fedflat.run(quiet, clients=clients())
    assert [row["private_accuracy"] for row in found.history] == pytest.approx(seen)
    assert [row["private_accuracy_sd"] for row in found.history] == [0.0] * 3


def killed_in(round: int) -> Callable[[Any, Any], None]:
    """What is called after each round, and ends the run at this one."""

    def killed(row: Any, after: Any) -> None:
        if row["round"] == round:
            raise RuntimeError("as if killed")

    return killed


def test_a_resumed_run_ends_bit_for_bit(tmp_path: Path) -> None:
    seeded = recipe(privacy={"clip": 0.5, "noise_multiplier": 1.5, "randomness": "seeded", "benchmark": True})
    whole = fedflat.run(seeded, clients=clients(), out=tmp_path / "whole")

    with pytest.raises(RuntimeError, match="as if killed"):
        fedflat.run(seeded, clients=clients(), out=tmp_path / "half", on_round=killed_in(0))
    assert fedflat.run(seeded, clients=clients(), out=tmp_path / "half", resume=True).history == whole.history


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"algorithm": "fedavg"}, "algorithm.name: found fedavg"),
        ({"privacy": {"clip": 0.5, "noise_multiplier": 1.0, "secure_rng": True}}, "privacy.secure_rng"),
        ({"privacy": {"clip": {"kind": "adaptive", "initial": 1.0}, "noise_multiplier": 1.0}}, "privacy.clip"),
        ({"privacy": {"clip": 0.5, "noise_multiplier": 1.0, "trust": "local"}}, "privacy.trust"),
        ({"privacy": {"clip": 0.5, "noise_multiplier": 1.0, "protocol": "published"}}, "privacy.protocol"),
        ({"data": {"classes": 2}}, "evaluation.private"),
        ({"evaluation": {"share": 0.3}}, "evaluation.share"),
    ],
)
def test_what_has_no_account_beside_it_is_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=found):
        fedflat.run(recipe(**changes), clients=clients())


def test_a_deployment_refuses_it() -> None:
    asked = Recipe.of(recipe())
    with pytest.raises(InputError, match=r"evaluation\.private: found True; allowed: false in a deployment"):
        check_deployable(asked)


def digits(**changes: Any) -> dict[str, Any]:
    data = {"dataset": "digits", "clients": 50, "partition": "dirichlet"}
    privacy = {"clip": 0.5, "noise_multiplier": 1.0, "randomness": "seeded"}
    return recipe(data=data, privacy=privacy, cohort={"size": 10}, rounds=8, **{"evaluation": {}, **changes})


def test_the_best_round_is_kept_in_model_folder_and_resume(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    plain = fedflat.run(digits(), on_round=lambda row, after: seen.append(weights(after.model())))
    accuracies = [row["test_accuracy"] for row in plain.history]
    best = max(range(len(seen)), key=lambda turn: accuracies[turn])
    kept = digits(evaluation={"keep": "best-by-public-metric"})

    with pytest.raises(RuntimeError, match="as if killed"):
        fedflat.run(kept, out=tmp_path / "run", on_round=killed_in(best))
    found = fedflat.run(kept, out=tmp_path / "run", resume=True)
    assert [row["test_accuracy"] for row in found.history] == accuracies
    assert torch.equal(weights(found.model), seen[best])
    assert torch.equal(weights(fedflat.load(tmp_path / "run").model), seen[best])
    assert found.privacy["proven_epsilon"] == plain.privacy["proven_epsilon"]


def test_a_metric_that_is_not_there_keeps_what_was_best() -> None:
    first = best_so_far(RoundState(1, torch.ones(2), 1.0, {}), {"test_accuracy": None, "test_loss": 2.0})
    assert float(first.slots[evaluate.BEST]) == -2.0
    for public in ({"test_accuracy": None, "test_loss": None}, {"test_accuracy": math.nan, "test_loss": 1.0}):
        assert best_so_far(first, public) is first
    assert best_so_far(first, {"test_accuracy": None, "test_loss": 2.0}) is first


@pytest.mark.parametrize("changes", [{"server": {"average": "tail"}}, {"algorithm": "dp2-fedsam", "model": "mlp"}])
def test_nothing_else_may_say_what_is_released(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"evaluation\.keep: found best-by-public-metric with "):
        fedflat.run(digits(evaluation={"keep": "best-by-public-metric"}, **changes))
    with pytest.raises(InputError, match="last where there are no public test data"):
        fedflat.run(recipe(evaluation={"keep": "best-by-public-metric"}), clients=clients())


class Drawing(torch.nn.Module):
    """Draws in eval mode too, as Monte Carlo dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.nn.functional.dropout(x, 0.5, training=True))


class Turning(torch.nn.Linear):
    """Turns its own weights round when it is evaluated on large numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and bool(x.abs().max() > 50):
            self.weight.data.mul_(-1)
        return super().forward(x)


@pytest.mark.parametrize("module", [Drawing, lambda: Turning(4, 2)])
def test_a_module_that_draws_or_writes_while_it_is_evaluated_mixes_nobody(module: Any) -> None:
    torch.manual_seed(0)
    given = module()
    pairs = clients()
    pairs[0] = (pairs[0][0] * 1e3, pairs[0][1])
    found = []
    for first in (pairs[0], (pairs[0][0][:0], pairs[0][1][:0])):
        job = prepare(Recipe.of(recipe()), given, [first, *pairs[1:]])
        found.append(cohort_scores(job.problem, job.data, job.initial_weights, range(CLIENTS)))
    assert float(np.linalg.norm(found[0] - found[1])) <= 1 / math.sqrt(2)


@pytest.mark.parametrize("sampling", [{"sampling": "min-separation"}, {"sampling": "cyclic-poisson", "separation": 2}])
def test_the_independent_checker_counts_it_on_a_schedule(sampling: dict[str, Any], tmp_path: Path) -> None:
    asked = recipe(cohort={"size": 4, **sampling}, rounds=6)
    stated = fedflat.run(asked, clients=clients(), out=tmp_path / "run").privacy["proven_epsilon"]
    attest(tmp_path / "run", tmp_path / "out")
    done = subprocess.run([sys.executable, tmp_path / "out" / "check.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[2]) == pytest.approx(stated, rel=1e-3)
