"""``start: class-statistics``: round 0 is one clipped release of class sums, from which the run's method goes on."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.rounding import ROUNDING
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.engine.job import Job
from fedflat.engine.reduce import RoundSum
from fedflat.engine.round import RoundParts, accumulator_of, broadcast_of, finish_round
from fedflat.engine.train import train
from fedflat.privacy.ledger import read
from fedflat.privacy.verify import verify_run

SIZES = (7, 3, 12, 1, 5)
NOISED = {"clip": 0.3, "noise_multiplier": 1.0}
TURNS = {"size": 1, "sampling": "min-separation"}
EACH = {"kind": "per-tensor", "values": 0.1}
START = {"kind": "class-statistics", "clip": 2.0, "share": 0.3, "lr": 0.5}


def federation(without: int | None = None) -> FederatedData:
    draw = torch.Generator().manual_seed(3)
    pairs = [(torch.randn(n, 40, generator=draw), torch.arange(n) % 3) for n in SIZES]
    if without is not None:
        pairs[without] = (torch.zeros(0, 40), torch.zeros(0, dtype=torch.int64))
    return from_pairs(pairs)


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "algorithm": "dp-fedavg",
        "start": START,
        "cohort": {"size": len(SIZES)},
        "local": {"steps": 2, "batch_size": 4},
        "privacy": {"clip": 0.3, "noise_multiplier": 1.5, "delta": 1e-3, "randomness": "seeded", "benchmark": True},
        **changes,
    }


def quiet(**changes: Any) -> dict[str, Any]:
    return recipe(privacy={"clip": 0.3, "noise_multiplier": 0.0}, **changes)


def module(hidden: int = 0) -> nn.Module:
    torch.manual_seed(0)
    below = [nn.Linear(40, hidden), nn.Tanh()] if hidden else []
    return nn.Sequential(*below, nn.Linear(hidden or 40, 3))


def first_round(
    given: dict[str, Any], without: int | None = None, change: Callable[[RoundParts], RoundParts] = lambda p: p
) -> Tensor:
    """The weights after round 0."""
    job = prepare(Recipe.of(given), module(), federation(without))
    job.parts = change(job.parts)
    return train(job, on_round=lambda released, after: True).state.shared


def test_round_0_is_class_statistics_and_the_rest_is_the_method() -> None:
    alone = Recipe.of(quiet(algorithm="class-statistics", rounds=1, local={}, server={"lr": 0.5}) | {"start": None})
    alone = Recipe.of(alone, ["privacy.clip=2.0"])
    sums = train(prepare(alone, module(), federation())).state.shared
    assert torch.equal(first_round(quiet()), sums) and float(sums.norm()) > 0.1
    whole = train(prepare(Recipe.of(quiet()), module(), federation())).state.shared
    head = module()
    with torch.no_grad():
        for parameter, values in zip(head.parameters(), sums.split([120, 3])):
            parameter.copy_(values.view_as(parameter))
    # the later rounds: dp-fedavg from there, whose batches follow the round's number
    job = prepare(Recipe.of(quiet() | {"start": None}), head, federation())
    state = replace(job.parts.first_state(job.initial_weights, job.threshold), round=1)
    for _ in range(3):
        state = one_round(job, state)
    torch.testing.assert_close(whole, state.shared, rtol=1e-5, atol=1e-6)


def one_round(job: Job, state: Any) -> Any:
    import numpy as np

    from fedflat.core.params import PersonalState

    broadcast = broadcast_of(job.parts, state, job.seed)
    accumulator, kept = accumulator_of(job.parts, broadcast, job.key), PersonalState(job.initial_weights[:0])
    reduced = RoundSum(job.parts.algorithm, job.parts.local, broadcast, accumulator, kept)
    reduced.add_cohort(job.backend, np.arange(len(SIZES)))
    return finish_round(job.parts, state, broadcast, accumulator.result(), job.key, dict)[0]


def test_one_client_moves_round_0_by_its_own_clip_at_most() -> None:
    """m times the difference of the heads of two worlds; the broken twin clips with another threshold."""

    def moved(client: int, change: Callable[[RoundParts], RoundParts] = lambda p: p) -> float:
        here, gone = (first_round(quiet(), without, change) for without in (None, client))
        return float((here - gone).double().norm()) * len(SIZES) / START["lr"]  # type: ignore[operator]

    assert max(moved(client) for client in range(len(SIZES))) <= 2.0 * (1 + ROUNDING)

    def loose(parts: RoundParts) -> RoundParts:
        assert parts.round_zero is not None
        return replace(parts, round_zero=replace(parts.round_zero, threshold=20.0))

    assert moved(2, loose) > 2.0 * (1 + ROUNDING)


def test_the_noise_of_each_round_is_what_the_ledger_says() -> None:
    """Drawn with nobody in the cohort; the broken twin draws round 0 with the other rounds' σ."""
    job = prepare(Recipe.of(recipe()), module(hidden=100), federation())

    def drawn(parts: RoundParts, round: int) -> tuple[float, float]:
        size = parts.layout.dimension
        state = replace(parts.first_state(torch.zeros(size), job.threshold), round=round)
        broadcast, lines = broadcast_of(parts, state, 0), list[dict[str, Any]]()
        accumulator = accumulator_of(parts, broadcast, job.key)
        accumulator.add(torch.zeros(1, size), [0])
        after, _ = finish_round(parts, state, broadcast, accumulator.result(), job.key, lines.append)
        rate = 0.5 if round == 0 else 1.0
        (line,) = lines
        assert after.clip == job.threshold
        return float(after.shared.double().std()) * parts.plan.divisor / rate, line["std"]

    for round in (0, 1):
        found, said = drawn(job.parts, round)
        assert found == pytest.approx(said, rel=0.05)
    assert job.parts.round_zero is not None
    ratio = drawn(job.parts, 0)[1] / drawn(job.parts, 1)[1]
    assert ratio == pytest.approx(job.parts.plan.first * 2.0 / 0.3)
    twin = replace(job.parts, round_zero=replace(job.parts.round_zero, mechanism=job.parts.mechanism))
    found, said = drawn(twin, 0)
    assert found != pytest.approx(said, rel=0.05)


def test_statement_card_ledger_and_verification_tell_of_it(tmp_path: Path) -> None:
    from fedflat.report.card import card
    from fedflat.report.metrics import read_run

    given = recipe(privacy={"clip": 0.3, "epsilon": 4.0, "delta": 1e-3})
    result = fedflat.run(given, model=module(), clients=federation(), out=tmp_path / "run")
    assert 3.99 <= result.privacy["proven_epsilon"] <= 4.0
    assert "a clip of its own, 2; its share of the budget" in result.privacy["mechanism"]
    assert "fixed at 0.3" in result.privacy["mechanism"]
    assert [line["clip"] for line in result.history] == [2.0, 0.3, 0.3, 0.3]
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    multipliers = [line["noise_multiplier"] for line in lines]
    assert multipliers[0] != multipliers[1] == multipliers[3]
    assert multipliers[0] ** -2 / sum(sigma**-2 for sigma in multipliers) == pytest.approx(0.3)
    checked = verify_run(tmp_path / "run")
    assert checked.ok and checked.epsilon_recomputed == pytest.approx(4.0, rel=0.01)
    assert "its share of the budget" in str(card(read_run(tmp_path / "run")))


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_resumed_run_is_the_run_bit_for_bit(ended: int, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(released: dict[str, Any], after: object) -> None:
        if released["round"] == ended:
            raise Killed

    given = {"model": module(), "clients": federation()}
    whole = fedflat.run(recipe(), **given, out=tmp_path / "whole")
    with pytest.raises(Killed):
        fedflat.run(recipe(), **given, out=tmp_path / "run", on_round=kill)
    if ended == 0:  # killed before its checkpoint was written: round 0 is drawn again, with the same noise
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        (tmp_path / "run" / "checkpoints").mkdir()
    again = fedflat.run(recipe(), **given, out=tmp_path / "run", resume=True)
    for a, b in zip(whole.model.parameters(), again.model.parameters()):
        assert torch.equal(a, b)
    assert again.privacy["proven_epsilon"] == whole.privacy["proven_epsilon"]
    assert [line["round"] for line in read(tmp_path / "run" / "ledger.jsonl")] == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "method", ["dp-fedsam", "dp-fedpgn-ls", "dp-scaffold", "fed-normec", "fed-smp-topk", "dp-fedadam", "dp-fedavg-la"]
)
def test_any_method_that_averages_updates_goes_on_from_it(method: str) -> None:
    given = recipe(algorithm=method, server={"average": "tail"})
    result = fedflat.run(given, model=module(), clients=federation())
    assert (
        result.privacy["proven_epsilon"]
        == fedflat.run(recipe(), model=module(), clients=federation()).privacy["proven_epsilon"]
    )
    first = fedflat.run(quiet(algorithm=method, rounds=2), model=module(), clients=federation()).history[0]
    plain = fedflat.run(quiet(rounds=2), model=module(), clients=federation()).history[0]
    assert first["clip"] == plain["clip"] == 2.0


def test_its_clip_is_the_recipe_s_where_it_names_none() -> None:
    for clip in (0.3, {"kind": "constant", "value": 0.3}):
        job = prepare(
            Recipe.of(recipe(start="class-statistics", privacy={"clip": clip, "noise_multiplier": 1.0})),
            module(),
            federation(),
        )
        assert job.parts.round_zero is not None and job.parts.round_zero.threshold == 0.3
    assert Recipe.of(recipe()).dump()["start"]["share"] == 0.3
    assert "start" not in Recipe.of(recipe() | {"start": None}).dump()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"start": "class-sums"}, "class-statistics"),
        ({"start": {**START, "share": 0}}, r"start\.share"),
        ({"start": {**START, "sahre": 0.1}}, "Did you mean share"),
        ({"rounds": 1}, "at least 2 with start"),
        ({"algorithm": "class-statistics", "local": {}}, "class-statistics with start; allowed: a method that goes on"),
        ({"algorithm": "centaur"}, "centaur with start"),
        ({"algorithm": "ddgauss"}, "ddgauss with start"),
        ({"algorithm": "fedavg"}, "start: found a method without privacy"),
        ({"after": "x"}, "start: found class-statistics; allowed: nothing with after"),
        ({"task": "regression"}, "task: found regression; allowed: classification with start"),
        ({"loss": "torch.nn.functional:cross_entropy"}, "task: found a loss of one's own; allowed: classification"),
        ({"privacy": {**NOISED, "protocol": "published"}}, "published; allowed: sound with start"),
        ({"privacy": {**NOISED, "noise": "banded"}, "cohort": TURNS}, "start: found correlated noise"),
        ({"privacy": {**NOISED, "clip": EACH}, "start": "class-statistics"}, r"start\.clip: found nothing"),
    ],
)  # fmt: skip
def test_what_cannot_begin_so_is_refused_in_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        fedflat.run(recipe(**changes), model=module(), clients=federation())


def test_canary_audits_and_stateful_deployments_are_refused() -> None:
    import numpy as np

    from fedflat.algorithms import dp_scaffold
    from fedflat.audit.injection import Directions, with_canaries
    from fedflat.federation.task import check_deployable

    job = prepare(Recipe.of(recipe()), module(), federation())
    with pytest.raises(InputError, match="start: found class-statistics; allowed: nothing for canary audits"):
        with_canaries(job, Directions(1, 2, 123), np.ones(2, dtype=bool))
    with pytest.raises(InputError, match="class-statistics with dp-scaffold; allowed: nothing in a deployment"):
        check_deployable(Recipe.of(recipe(algorithm="dp-scaffold", privacy=NOISED)), dp_scaffold(), "central")
