"""Correlated noise end to end: what is released is one mechanism, goes on bit for bit, and its twins are caught."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_turns import TWINS, audit_turns, caught, correlated_job, released
from small_federation import after, clients, job, module, recipe, weights

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.cohorts import CyclicPoisson, MinSeparation
from fedflat.core.factors import Factor
from fedflat.core.rounding import ROUNDING
from fedflat.engine.job import Job
from fedflat.engine.round import mean_view
from fedflat.engine.train import train
from fedflat.privacy import correlated
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.simulation.recomputed import Records, second_account

ROUNDS, SEPARATION, SIGMA = 9, 3, 1.0
SIZES = (7, 3, 12, 1, 5, 4)


def changes(kind: str = "banded", sampling: str = "min-separation", **privacy: Any) -> dict[str, Any]:
    size = {"full": 6, "cyclic-poisson": 1}.get(sampling, 2)
    cohort = {"size": size, "sampling": sampling} | ({} if sampling == "full" else {"separation": SEPARATION})
    noise = (
        {"noise": {"kind": kind, "bands": 2 if sampling == "full" else "auto"}} if kind != "tree" else {"noise": kind}
    )
    return {"rounds": ROUNDS, "cohort": cohort, "privacy": {"clip": 0.2, "noise_multiplier": SIGMA, **noise, **privacy}}


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
    _run_kind(tmp_path / "cut", given, stop=after(4))
    found = _run_kind(tmp_path / "cut", given, resume=True)
    assert torch.equal(weights(whole.model), weights(found.model))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    drop = ("previous", "checksum", "run", "key_id")
    lines = [[{k: v for k, v in json.loads(text).items() if k not in drop} for text in ledger] for ledger in ledgers]
    assert lines[0] == lines[1]
    assert len(lines[0]) == ROUNDS
    assert second_account(Records(tmp_path / "cut")).ok
    assert found.privacy["epsilon"] == whole.privacy["epsilon"]


def _run_kind(folder: Path, given: dict[str, str], **more: Any) -> Any:
    if given["kind"] != "independent":
        return run(folder, **given, **more)
    made = recipe("dp-fedavg", changes(**{**given, "kind": "banded"}))
    made["privacy"].pop("noise")
    return fedflat.run(made, module(), clients(SIZES), out=folder, should_stop=more.pop("stop", None), **more)


def test_entropy_is_kept_and_a_lost_key_is_a_span_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    whole = run(tmp_path / "whole", randomness="secret", secure_rng=True)
    run(tmp_path / "cut", randomness="secret", secure_rng=True, stop=after(4))
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            path.unlink()
    found = run(tmp_path / "cut", randomness="secret", secure_rng=True, resume=True)
    assert found.privacy["epsilon"] > whole.privacy["epsilon"]
    assert any("2 noise keys" in reason for reason in found.privacy["reasons"])
    assert second_account(Records(tmp_path / "cut")).ok
    assert "grid" in found.privacy["mechanism"]


def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the optimiser ends elsewhere."""
    real = correlated.factor_for
    monkeypatch.setattr(
        correlated,
        "factor_for",
        lambda kind, rounds, separation, *rest, **named: real("toeplitz", rounds, separation),
    )


def test_another_factor_cannot_resume_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "run", stop=after(2))
    wider(monkeypatch)
    with pytest.raises(fedflat.InputError, match="factor"):
        run(tmp_path / "run", resume=True)


def test_another_factor_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe, data and seed where the optimiser ends elsewhere: one Z in two releases gives itself away."""
    first, same = job_of(), job_of()
    wider(monkeypatch)
    other = job_of()
    assert first.parts.plan.noise_multiplier == other.parts.plan.noise_multiplier
    assert first.key == same.key != other.key


def test_the_server_knows_each_rounds_noise() -> None:
    parts = job_of().parts
    assert isinstance(parts.mechanism.factor, Factor)
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
    train(made, on_round=lambda released, state: seen.append(state.private))
    assert [line["cohort"] for line in seen] == [2, 1, 1, 2, 1, 1, 2, 1, 1]
    assert [line.get("left_out", 0) for line in seen] == [0, 1, 1, 0, 1, 1, 0, 1, 1]


def job_of(kind: str = "banded", **privacy: Any) -> Job:
    return prepare(Recipe.of(recipe("dp-fedavg", changes(kind, **privacy))), module(), clients(SIZES))


KEY = b"k" * 32


@pytest.mark.parametrize("sampling", ["min-separation", "cyclic-poisson"])
def test_the_audit_stays_under_the_proven_epsilon(sampling: str) -> None:
    """Others' messages as in the twin of the groups."""
    others = None if sampling == "min-separation" else TWINS["groups split evenly"].others
    made = correlated_job(sampling)
    assert 0 < audit_turns(made, others) < made.parts.plan.epsilon()


@pytest.mark.parametrize("name", TWINS)
def test_every_twin_is_caught(name: str) -> None:
    bound, claimed = caught(name)
    assert bound > claimed


def test_a_group_follows_from_the_id_alone() -> None:
    """Under add-remove, groups of equal size move others when a client leaves; a hash of the id moves nobody."""
    assert (CyclicPoisson(40, 4, 3).groups[:39] == CyclicPoisson(39, 4, 3).groups).all()


def test_two_worlds_move_by_no_more_than_the_plan_says() -> None:
    """Without noise, the rounds' sums with and without a client differ by C in its turns alone: ‖C·ΔX‖ ≤ s."""
    made = correlated_job(noise_multiplier=0)
    own = made.parts.plan.mechanism
    assert isinstance(own, ScheduledPlan)
    moved = (released(made, True, [KEY]) - released(made, False, [KEY]))[0]
    together = float(np.linalg.norm(own.factor.matrix @ moved))
    assert together <= own.scale * (1 + ROUNDING)
    assert together > own.scale * 0.99


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
