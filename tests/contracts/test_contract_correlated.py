"""Correlated noise end to end: what is released is one mechanism, goes on bit for bit, and its twins are caught."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import at_the_sum, clients, job, module, recipe
from torch import Tensor

import fedflat
from fedflat.core.factors import Factor
from fedflat.core.rounding import ROUNDING
from fedflat.core.schedules import MinSeparation
from fedflat.core.types import Aggregate, Correlated
from fedflat.engine.round import broadcast_of, mean_view, noisy_sum, select_cohort, within_cap
from fedflat.engine.train import Job, train
from fedflat.methods.correlated import CorrelatedNoise
from fedflat.privacy.accounting.gaussian import gaussian_epsilon
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.verify import verify_run

ROUNDS, SEPARATION, SIGMA = 9, 3, 1.0
SIZES = (7, 3, 12, 1, 5, 4)


def changes(kind: str = "banded", sampling: str = "min-separation", **privacy: Any) -> dict[str, Any]:
    size = {"full": 6, "cyclic-poisson": 1}.get(sampling, 2)
    cohort = {"size": size, "sampling": sampling} | ({} if sampling == "full" else {"separation": SEPARATION})
    noise = (
        {"noise": {"kind": kind, "bands": 2 if sampling == "full" else "auto"}} if kind != "tree" else {"noise": kind}
    )
    return {
        "rounds": ROUNDS, "cohort": cohort, "privacy": {"clip": 0.2, "noise_multiplier": SIGMA, **noise, **privacy}
    }  # fmt: skip


def run(folder: Path, *, stop: Callable[[], bool] | None = None, resume: bool = False, **given: Any) -> Any:
    made = recipe("dp-fedavg", changes(**given))
    return fedflat.run(made, module(), clients(SIZES), out=folder, resume=resume, should_stop=stop)


KINDS = [
    ("banded", "min-separation"), ("toeplitz", "min-separation"), ("tree", "min-separation"), ("toeplitz", "full"),
    ("banded", "cyclic-poisson"), ("independent", "min-separation"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sampling"), KINDS)
def test_stopped_and_resumed_is_bit_for_bit(kind: str, sampling: str, tmp_path: Path) -> None:
    given = {"kind": kind, "sampling": sampling}
    whole = _run_kind(tmp_path / "whole", given)
    count = iter(range(100))
    _run_kind(tmp_path / "cut", given, stop=lambda: next(count) >= 4)
    found = _run_kind(tmp_path / "cut", given, resume=True)
    for a, b in zip(whole.model.parameters(), found.model.parameters()):
        assert torch.equal(a, b)
    ledgers = [(tmp_path / name / "ledger.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    drop = ("previous", "checksum", "run", "key_id")
    lines = [[{k: v for k, v in json.loads(text).items() if k not in drop} for text in ledger] for ledger in ledgers]
    assert lines[0] == lines[1]
    assert len(lines[0]) == ROUNDS
    assert verify_run(tmp_path / "cut").ok
    assert found.privacy["epsilon"] == whole.privacy["epsilon"]


def _run_kind(folder: Path, given: dict[str, str], **more: Any) -> Any:
    if given["kind"] != "independent":
        return run(folder, **given, **more)
    made = recipe("dp-fedavg", changes(**{**given, "kind": "banded"}))
    made["privacy"].pop("noise")
    stop = more.pop("stop", None)
    return fedflat.run(made, module(), clients(SIZES), out=folder, should_stop=stop, **more)


def test_entropy_is_kept_and_a_lost_key_is_a_span_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    whole = run(tmp_path / "whole", secure_rng=True)
    count = iter(range(100))
    run(tmp_path / "cut", secure_rng=True, stop=lambda: next(count) >= 4)
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            path.unlink()
    found = run(tmp_path / "cut", secure_rng=True, resume=True)
    assert found.privacy["epsilon"] > whole.privacy["epsilon"]
    assert any("2 noise keys" in reason for reason in found.privacy["reasons"])
    assert verify_run(tmp_path / "cut").ok
    assert "grid" in found.privacy["mechanism"]


def test_another_factor_cannot_resume_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))
    run(tmp_path / "run", stop=lambda: next(count) >= 2)
    from fedflat.privacy import correlated

    real = correlated.factor_for
    wider = lambda kind, rounds, separation, bands, *rest, **named: real("toeplitz", rounds, separation)  # noqa: E731
    monkeypatch.setattr(correlated, "factor_for", wider)
    with pytest.raises(fedflat.InputError, match="factor"):
        run(tmp_path / "run", resume=True)


def test_another_factor_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe, data and seed where the optimiser ends elsewhere: one Z in two releases gives itself away."""
    from fedflat.privacy import correlated

    first, same, real = job_of(), job_of(), correlated.factor_for
    wider = lambda kind, rounds, separation, bands, *rest, **named: real("toeplitz", rounds, separation)  # noqa: E731
    monkeypatch.setattr(correlated, "factor_for", wider)
    other = job_of()
    assert first.parts.plan.noise_multiplier == other.parts.plan.noise_multiplier
    assert first.key == same.key != other.key


def test_the_server_knows_each_rounds_noise() -> None:
    made = job_of()
    parts = made.parts
    assert isinstance(parts.mechanism, Correlated)
    for t in (0, 4, 8):
        expected = parts.plan.std(0.2) * parts.mechanism.row_norm(t) / 2
        assert mean_view(parts, 0.2, 2.0, t).std == pytest.approx(expected)
    plain = job("dp-fedavg").parts
    assert mean_view(plain, 0.2, 5.0, 1).std == pytest.approx(plain.plan.std(0.2) / 5)


def test_who_comes_too_early_counts_as_zero_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that asks somebody every round: the server leaves them out, in its own count."""
    monkeypatch.setattr(MinSeparation, "select_at", lambda self, round, generator: np.array([0, 1 + round % 5]))
    made = job_of()
    seen: list[dict[str, Any]] = []
    train(made, on_round=lambda released, hidden: seen.append(hidden))
    assert [line["cohort"] for line in seen] == [2, 1, 1, 2, 1, 1, 2, 1, 1]
    assert [line.get("left_out", 0) for line in seen] == [0, 1, 1, 0, 1, 1, 0, 1, 1]


def job_of(kind: str = "banded", **privacy: Any) -> Job:
    from fedflat.assembly.jobs import prepare
    from fedflat.config.recipe import Recipe

    return prepare(Recipe.of(recipe("dp-fedavg", changes(kind, **privacy))), module(), clients(SIZES))


def released(made: Job, pattern: set[int], keys: list[bytes], noise: CorrelatedNoise | None = None) -> Tensor:
    """R, ``(keys, T, d)``: rounds' noisy sums with one client at +C along e_0 in the rounds of ``pattern`` that the
    server lets it take part in, and nobody else."""
    parts = made.parts if noise is None else replace(made.parts, mechanism=noise)
    found = []
    for key in keys:
        state, rows = parts.first_state(made.first, made.threshold), []
        for t in range(ROUNDS):
            asked = np.array([0]) if t in pattern else np.array([], dtype=np.int64)
            cohort, state = within_cap(parts, replace(state, round=t), asked)
            total = torch.zeros(parts.message_length, dtype=torch.float64)
            total[0] = 0.2 * len(cohort)
            aggregate = Aggregate(total, len(cohort), 0.0, torch.zeros(0), torch.zeros(0))
            rows.append(noisy_sum(parts, broadcast_of(parts, state, 3), aggregate, key).double())
        found.append(torch.stack(rows))
    return torch.stack(found)


def bound(made: Job, pattern: set[int], noise: CorrelatedNoise | None = None, runs: int = 600) -> float:
    """A lower bound on ε from runs with and without the client, by the likelihood ratio of the honest mechanism's C."""
    own = made.parts.plan.mechanism
    assert isinstance(own, ScheduledPlan)
    keys = [b"%032d" % i for i in range(2 * runs)]
    with_client, without = released(made, pattern, keys[:runs], noise), released(made, set(), keys[runs:], noise)
    c = torch.from_numpy(own.factor.matrix)
    shift = with_client[..., 0].mean(0) * 0
    for t in pattern:
        shift[t] = 1.0
    weights = c.T @ (c @ shift)
    scores = [(rows[..., 0] @ weights).numpy() for rows in (without, with_client)]
    absent, present = (s / math.sqrt((np.var(scores[0]) + np.var(scores[1])) / 2) for s in scores)
    mu = float(np.mean(present) - np.mean(absent)) - 4 * math.sqrt(2 / runs)  # both are Gaussian, of one variance
    return gaussian_epsilon(max(mu, 0.0), 1e-5)


def test_the_honest_server_keeps_its_epsilon() -> None:
    made = job_of()
    assert bound(made, set(range(ROUNDS))) <= made.parts.plan.epsilon()


def test_twin_that_ignores_the_separation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedflat.engine import round as rounds

    made = job_of()
    monkeypatch.setattr(rounds, "separated", lambda last, cohort, round, separation: cohort)
    assert bound(made, set(range(ROUNDS))) > made.parts.plan.epsilon()


def test_twin_with_the_wrong_column_norm_is_caught() -> None:
    """Noise made for one column's norm where a client has three turns: s is too small by √3."""
    made = job_of()
    own = made.parts.plan.mechanism
    assert isinstance(own, ScheduledPlan)
    less = CorrelatedNoise(lambda c: made.parts.plan.std(c) * own.factor.largest_column() / own.scale, own.factor)
    assert bound(made, {0, 3, 6}, less) > made.parts.plan.epsilon()


def test_twin_that_uses_noise_twice_is_caught() -> None:
    """The same row of Z in every round, as if streams had no round: what is released in sum is less noisy."""

    class Same(CorrelatedNoise):
        def unit(self, key: bytes, round: int, size: int) -> Tensor:
            row = self.factor.inverse[round].sum()
            return CorrelatedNoise(self.std, _one(ROUNDS)).unit(key, 0, size) * float(row)

    made = job_of()
    own = made.parts.plan.mechanism
    assert isinstance(own, ScheduledPlan)
    twin = Same(made.parts.plan.std, own.factor)
    rows = released(made, {0}, [b"k" * 32], twin)[0]
    sums = own.factor.inverse.sum(axis=1)
    left = rows[0] - rows[1] * float(sums[0] / sums[1])  # free of noise
    assert float(left[0]) == pytest.approx(0.2, rel=1e-4)
    honest = released(made, {0}, [b"k" * 32])[0]
    assert abs(float((honest[0] - honest[1] * float(sums[0] / sums[1]))[1:].std())) > 0.1


def _one(rounds: int) -> Factor:
    return Factor(np.ones((rounds, 1)))


def test_twin_with_groups_split_evenly_is_caught() -> None:
    """Under add-remove, groups of equal size move others when a client leaves; a hash of the id moves nobody."""
    from fedflat.core.schedules import CyclicPoisson

    def evenly(clients: int) -> np.ndarray:
        return np.arange(clients) * 3 // clients

    kept = CyclicPoisson(40, 4, 3).groups[:39], CyclicPoisson(39, 4, 3).groups
    assert (kept[0] == kept[1]).all()
    assert (evenly(40)[:39] != evenly(39)).any()


def test_two_worlds_move_by_no_more_than_the_plan_says() -> None:
    """Without noise, the rounds' sums with and without a client differ by C in its turns alone: ‖C·ΔX‖ ≤ s."""
    made = job_of(noise_multiplier=0)
    own = made.parts.plan.mechanism
    assert isinstance(own, ScheduledPlan)
    turns = {t for t in range(ROUNDS) if 0 in select_cohort(made.parts, b"k" * 32, t)}
    moved = (released(made, turns, [b"k" * 32]) - released(made, set(), [b"k" * 32]))[0]
    together = float(torch.linalg.norm(torch.from_numpy(own.factor.matrix) @ moved))
    assert together <= own.scale * 0.2 * (1 + ROUNDING)
    assert together > own.scale * 0.2 * 0.99


@pytest.mark.parametrize("method", ["dp-scaffold", "dp2-fedsam"])
def test_clients_may_keep_a_state_under_a_public_schedule(method: str) -> None:
    assert job(method, {"cohort": {"size": 2, "sampling": "min-separation"}}).parts.plan.relation == "zero-out"
    with pytest.raises(fedflat.InputError, match="independent coins only"):
        job(method, {"cohort": {"size": 1, "sampling": "cyclic-poisson"}})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"privacy": {"protocol": "published"}}, "published"),
        ({"cohort": {"sampling": "poisson"}, "privacy": {"noise": "banded"}}, "min-separation"),
        ({"privacy": {"noise": "bandit"}}, "banded"),
        ({"privacy": {"noise": {"kind": "banded", "bands": 0}}}, "bands"),
        ({"cohort": {"separation": 2, "sampling": "poisson"}}, "cohort.separation"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], said: str) -> None:
    given = changes()
    for section, values in asked.items():
        given[section] = {**given[section], **values}
    with pytest.raises(fedflat.InputError, match=said):
        job("dp-fedsam", given)


def test_noise_of_the_sum_is_at_the_sum() -> None:
    """The engine adds the mechanism's rows to the clipped sums, and nothing else."""
    made = at_the_sum(job("dp-fedavg", {"rounds": 3, "cohort": {"size": 1, "sampling": "min-separation"},
                                        "privacy": {"noise": {"kind": "toeplitz"}}}))  # fmt: skip
    rows: list[Tensor] = []
    step = made.parts.algorithm.server[0]
    train(made, on_round=lambda released, hidden: rows.append(step.mean.clone()))
    assert len(rows) == 3
    assert math.isfinite(float(torch.stack(rows).sum()))
