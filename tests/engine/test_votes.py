"""ae-dpfl: the votes' law and account, empty cohorts, resuming, and what a student learns."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.rounding import ROUNDING
from fedflat.core.types import Broadcast
from fedflat.engine.job import Job
from fedflat.engine.reduce import RoundSum
from fedflat.engine.round import accumulator_of, broadcast_of, finish_round, select_cohort
from fedflat.methods.votes import VoteClip, winners
from fedflat.privacy.ledger import read
from fedflat.simulation.recomputed import Records, second_account

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(**changes: Any) -> Recipe:
    """A small digits recipe; dotted keys change it."""
    texts = [f"{key}={value}" for key, value in changes.pop("o", {}).items()]
    base = {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20}, "model": {"name": "mlp", "hidden": 8},
        "algorithm": {"name": "ae-dpfl", "queries": 12, "student_epochs": 2}, "local": {"steps": 5, "batch_size": 16},
        "cohort": {"size": 8}, "privacy": {"noise_multiplier": 4.0},
    }  # fmt: skip
    return Recipe.of({**base, **changes}, texts)


def one_round(job: Job, key: bytes = bytes(32), votes: Any = None) -> tuple[Any, list[dict], Any]:
    """One round by hand: (new state, ledger lines, aggregate)."""
    parts = job.parts
    state = parts.first_state(job.initial_weights, job.threshold)
    broadcast = broadcast_of(parts, state, job.seed)
    accumulator, lines = accumulator_of(parts, broadcast, key), []
    for draw in parts.plan.draws(0):
        if votes is None:
            cohort = select_cohort(parts, key, draw)
            told = dataclasses.replace(broadcast, draw=draw)
            RoundSum(parts.algorithm, parts.local, told, accumulator.of(draw), None).add_cohort(job.backend, cohort)
        else:
            votes(draw, accumulator.of(draw))
    total = accumulator.result()
    new, _ = finish_round(parts, state, broadcast, total, key, lines.append)
    return new, lines, total


@pytest.mark.parametrize("labels", [1, 3])
def test_epsilon_is_that_of_one_event_per_cohort_draw(labels: int) -> None:
    plan = prepare(recipe(o={"algorithm.labels_per_draw": labels})).parts.plan
    draws = 12 // labels
    expected = fedflat.epsilon(clients=20, cohort=8, rounds=draws, noise_multiplier=4 / math.sqrt(labels))
    assert plan.epsilon() == pytest.approx(expected, rel=1e-6)
    assert [list(plan.draws(t)) for t in range(2)] == [list(range(draws // 2)), list(range(draws // 2, draws))]
    assert plan.std(math.sqrt(labels)) == 4.0 * (1 + ROUNDING)
    assert plan.sensitivity(math.sqrt(labels)) == pytest.approx(math.sqrt(labels) * (1 + ROUNDING))


@pytest.mark.parametrize("change", [{"cohort.sampling": "fixed"}, {"privacy.trust": "local"}])
def test_replacing_a_client_moves_two_votes_a_label(change: dict[str, str]) -> None:
    plan = prepare(recipe(o={**change, "algorithm.labels_per_draw": 2})).parts.plan
    assert plan.relation == "replace-one"
    assert plan.sensitivity(math.sqrt(2)) == pytest.approx(2.0 * (1 + ROUNDING))  # √(2Q)
    line = plan.records(0, math.sqrt(2))[0]
    assert line["std"] / line["sensitivity"] == pytest.approx(2.0)
    if change.get("privacy.trust"):
        gaussian = fedflat.epsilon(clients=20, cohort=8, rounds=6, noise_multiplier=2 * 2.0, trust="local")
        assert plan.epsilon() == pytest.approx(gaussian)


def test_the_votes_are_one_hot_and_sum_over_the_cohort() -> None:
    job = prepare(recipe(o={"algorithm.labels_per_draw": 3}))
    _, lines, total = one_round(job)
    votes = total.total.reshape(2, 3, 10)  # two draws in the round, Q = 3, V = 10
    assert [line["draw"] for line in lines] == [0, 1]
    assert torch.equal(votes.sum(-1), torch.tensor(total.counts, dtype=torch.float64)[:, None].expand(2, 3))
    client = select_cohort(job.parts, bytes(32), 0)
    expected = torch.zeros(3, 10, dtype=torch.float64)
    for i in client.tolist():
        for place, answer in enumerate(job.backend.answers(i)[0][:3].tolist()):
            expected[place, answer] += 1
    assert torch.equal(votes[0], expected)
    assert float(total.norms.max()) == pytest.approx(math.sqrt(3)) and float(total.factors.min()) == 1.0


def test_noise_has_the_stated_law_and_is_fresh_for_each_draw() -> None:
    job = prepare(recipe(o={"algorithm.queries": 400}))
    broadcast = Broadcast(0, job.initial_weights, job.threshold, 1.0)
    total = accumulator_of(job.parts, broadcast, bytes(32)).result()
    drawn = job.parts.mechanism.noise(bytes(32), 0, broadcast, total, 1.0).numpy()
    assert len(drawn) == 200 * 10
    assert stats.kstest(drawn / 4.0, "norm").pvalue > 1e-3
    assert min(stats.kstest(drawn / (4.0 * wrong), "norm").pvalue for wrong in (2 / 3, 3 / 2)) < 1e-6
    assert len(np.unique(drawn)) > 0.99 * len(drawn)


def test_an_empty_cohort_is_noised_and_charged() -> None:
    new, lines, _ = one_round(prepare(recipe()), votes=lambda draw, accumulator: None)
    assert len(lines) == 6
    assert new.slots["labels"].shape == (6,) and int(new.slots["labels"].min()) >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e30])
def test_no_message_moves_a_sum_by_more_than_its_norm(bad: float) -> None:
    clip, job = VoteClip(1), prepare(recipe())
    message = torch.full((1, 10), bad)
    _, factors = clip.factors(message, 1.0, ())
    assert not math.isfinite(bad) or bad > 0 or float(factors) == 0.0
    _, _, total = one_round(job, votes=lambda draw, accumulator: accumulator.add(message, [1]))
    assert float(torch.linalg.vector_norm(total.total.reshape(6, 10), dim=1).max()) <= 1 + 1e-6
    _, _, short = one_round(job, votes=lambda draw, accumulator: accumulator.add(torch.ones(1, 7), [1]))
    assert not short.total.any()


def test_an_aborted_draw_releases_nothing() -> None:
    job = prepare(recipe(o={"privacy.trust": "distributed", "cohort.min": 1, "privacy.delta": 0.5}))

    def vote(draw: int, accumulator: Any) -> None:
        if draw != 2:
            accumulator.add(torch.eye(10)[:1].repeat(3, 1), [1] * 3)

    new, lines, _ = one_round(job, votes=vote)
    assert len(lines) == 6
    assert (new.slots["labels"] == -1).tolist() == [draw == 2 for draw in range(6)]


def test_winners() -> None:
    assert winners(torch.tensor([[0.0, 3.0, 3.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -0.5]])).tolist() == [1, -1, 2]


def test_public_examples_belong_to_no_client() -> None:
    job = prepare(recipe())
    rows = np.concatenate(job.data.parts)
    held = {bytes(x) for x in job.backend.queries.numpy().reshape(12, -1).view(np.uint8)}
    given = {bytes(x) for x in job.data.inputs[torch.from_numpy(rows)].numpy().reshape(len(rows), -1).view(np.uint8)}
    assert len(held) == 12 and len(rows) == 1438 - 12
    assert not held & given


def test_public_examples_from_the_test_set_are_not_evaluated() -> None:
    assert len(prepare(recipe(o={"algorithm.public": "test"})).data.test_inputs) == 359 - 12
    named = prepare(recipe(o={"algorithm.public": "digits"}))  # the recipe's own set: held out of it
    assert len(np.concatenate(named.data.parts)) == 1438 - 12


def test_a_client_trains_once_and_forgetting_it_changes_nothing() -> None:
    job = prepare(recipe())
    first = one_round(job)[2].total
    trained = job.backend.answers.cache_info().misses
    assert torch.equal(one_round(job)[2].total, first) and job.backend.answers.cache_info().misses == trained <= 20
    job.backend = dataclasses.replace(job.backend, limit=12)  # room for one client's twelve answers
    assert torch.equal(one_round(job)[2].total, first) and job.backend.answers.cache_info().misses > trained
    assert job.backend.answers.cache_info().currsize == 1


def test_resume_is_bit_for_bit(tmp_path: Path) -> None:
    whole = fedflat.run(recipe(rounds=4), out=tmp_path / "whole")
    asked: list[int] = []
    fedflat.run(
        recipe(rounds=4), out=tmp_path / "cut", on_round=lambda *_: asked.append(1), should_stop=lambda: len(asked) == 2
    )
    resumed = fedflat.run(recipe(rounds=4), out=tmp_path / "cut", resume=True)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)
    lines = [read(tmp_path / name / "ledger.jsonl") for name in ("whole", "cut")]
    assert lines[0] == lines[1] and len(lines[0]) == 12
    assert second_account(Records(tmp_path / "cut")).ok
    assert resumed.privacy["proven_epsilon"] == pytest.approx(whole.history[-1]["epsilon"])


def test_the_budget_stops_between_rounds() -> None:
    full = fedflat.run(recipe(rounds=4))
    budget = (full.history[1]["epsilon"] + full.history[2]["epsilon"]) / 2
    stopped = fedflat.run(recipe(rounds=4, o={"privacy.budget": budget}))
    assert len(stopped.history) == 2 and "budget" in stopped.stopped


def test_a_student_learns_digits() -> None:
    changes = {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20}, "model": {"name": "mlp", "hidden": 32},
        "local": {"steps": 30, "batch_size": 16, "lr": 0.2}, "cohort": {"size": 15},
        "privacy": {"noise_multiplier": 2.0},
    }  # fmt: skip
    options = {"queries": 300, "student_epochs": 20}
    private = fedflat.run(recipe(**changes, algorithm={"name": "ae-dpfl", **options}))
    twin = fedflat.run(recipe(**changes, algorithm={"name": "ae-fl", **options}))
    assert private.history[-1]["test_accuracy"] > 0.75
    assert twin.history[-1]["test_accuracy"] >= private.history[-1]["test_accuracy"] - 0.03
    assert twin.privacy["proven_epsilon"] is None
    assert "one event per cohort draw" in private.privacy["mechanism"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"algorithm.queries": 1}, "algorithm.queries: found 1"),
        ({"algorithm.labels_per_draw": 5}, "a multiple of labels_per_draw = 5"),
        ({"algorithm.queries": 1000}, "half of the training examples"),
        ({"algorithm.public": "nothing-like-it"}, "nothing-like-it"),
        ({"server.lr": 0.5}, "student"),
        ({"privacy.secure_rng": "true"}, "privacy.secure_rng"),
        ({"algorithm.querys": 3}, "Did you mean queries"),
    ],
)
def test_mistakes_stop_before_any_work(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        prepare(recipe(o=change))


def test_clients_given_in_python_are_never_public() -> None:
    clients = [
        (torch.randn(10, 4), torch.randint(0, 2, (10,), generator=torch.Generator().manual_seed(i))) for i in range(5)
    ]
    test = (torch.randn(40, 4), torch.zeros(40, dtype=torch.int64))
    small = recipe(model={"name": "linear"}, cohort={"size": 3}, data={"classes": 2})
    job = prepare(small, clients=clients, test=test)
    assert len(job.data.test_inputs) == 28 and sum(map(len, job.data.parts)) == 50
    with pytest.raises(InputError, match="the clients' own examples are not public"):
        prepare(
            recipe(
                model={"name": "linear"}, cohort={"size": 3}, data={"classes": 2}, o={"algorithm.public": "held-out"}
            ),
            clients=clients,
        )
