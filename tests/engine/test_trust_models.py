"""Trust models as the engine runs them: aborted rounds, n_max, caps on participations; and ddgauss end to end."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.rounding import ROUNDING
from fedflat.engine.round import accumulator_of, broadcast_of, finish_round, within_cap
from fedflat.engine.train import train
from fedflat.privacy.accounting.discrete import DDGaussAccount
from fedflat.privacy.ledger import read
from fedflat.privacy.statement import rounds_charged
from fedflat.privacy.trust import default_min_cohort
from fedflat.records.folder import read_lines
from fedflat.simulation import run as simulation
from fedflat.simulation.recomputed import Records, second_account

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

RECIPE = {
    "name": "trust", "rounds": 6, "data": {"dataset": "digits", "clients": 30, "max_examples": 300},
    "model": {"name": "linear"}, "algorithm": {"name": "dp-fedavg"}, "local": {"steps": 2, "batch_size": 8},
    "cohort": {"size": 15}, "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.003, "trust": "distributed"},
    "engine": {"backend": "sequential"},
}  # fmt: skip
KEY = b"\7" * 32


def job(**changes):
    return prepare(Recipe.of({**RECIPE, **changes}))


def rounds_with(made, sizes):
    """Rounds whose cohorts have the given sizes: (state, info) of each, and what was charged."""
    parts, state, found, charged = made.parts, made.parts.first_state(made.initial_weights, made.threshold), [], []
    for size in sizes:
        broadcast = broadcast_of(parts, state, 1)
        accumulator = accumulator_of(parts, broadcast, KEY)
        if size:
            accumulator.add(torch.ones(size, parts.layout.dimension), [1] * size)
        state, info = finish_round(parts, state, broadcast, accumulator.result(), KEY, charged.append)
        found.append((state, info))
    return found, charged


def test_a_round_with_too_few_shares_is_charged_and_not_released():
    made = job(cohort={"size": 15, "min": 3}, algorithm={"name": "dp-fedpgn"})
    (kept, aborted, empty, back), charged = rounds_with(made, [3, 2, 0, 4])
    assert [info.released["aborted"] for _, info in (kept, aborted, empty, back)] == [False, True, True, False]
    assert [line["round"] for line in charged] == [0, 1, 2, 3]
    for state, info in (aborted, empty):
        assert torch.equal(state.shared, kept[0].shared) and state.clip == kept[0].clip
        assert all(torch.equal(value, kept[0].slots[name]) for name, value in state.slots.items())
        assert "noise_norm" not in info.private
    assert not torch.equal(back[0].shared, kept[0].shared)


def test_colluders_do_not_count_towards_the_minimum():
    made = job(cohort={"size": 15, "min": 3, "colluders": 2})
    found, _ = rounds_with(made, [4, 5])
    assert [info.released["aborted"] for _, info in found] == [True, False]
    assert made.parts.plan.record(0, 0.5)["colluders"] == 2


def test_the_default_min_cohort_is_the_one_whose_aborts_are_charged_to_delta():
    plan = job().parts.plan
    assert plan.min_cohort == default_min_cohort(plan.sampler, 6, 0.003)
    assert plan.params.abort_probability() <= 0.003 / 100
    assert not plan.releases(plan.min_cohort - 1) and plan.releases(plan.min_cohort)


def test_ddgauss_aborts_a_sum_that_the_top_up_has_no_room_for():
    made = job(algorithm={"name": "ddgauss"}, cohort={"size": 9, "min": 1})
    most = made.parts.plan.mechanism.most
    assert most < 30
    found, charged = rounds_with(made, [most, most + 1])
    assert [info.released["aborted"] for _, info in found] == [False, True] and len(charged) == 2


def test_an_aborted_round_shows_in_the_files_and_the_run_goes_on(tmp_path):
    recipe = {**RECIPE, "cohort": {"size": 4, "min": 3}, "privacy": {**RECIPE["privacy"], "delta": 0.9}}
    made = prepare(Recipe.of(recipe))
    # A minimum this close to the cohort aborts often: δ pays for it, and the statement refuses a smaller one.
    made.parts = replace(made.parts, plan=replace(made.parts.plan, min_cohort=4, delta=0.999999))
    outcome = train(made)
    flags = [line["aborted"] for line in outcome.history]
    assert any(flags) and not all(flags) and len(outcome.entries) == 6
    assert rounds_charged(outcome.state.round, outcome.entries) == 6
    for before, line in zip(outcome.history, outcome.history[1:]):
        assert not line["aborted"] or line["test_loss"] == before["test_loss"]


def test_a_minimum_that_uses_up_delta_is_refused():
    with pytest.raises(InputError, match=r"cohort.min: found 14; allowed: at most \d+"):
        job(cohort={"size": 15, "min": 14})


def test_a_client_at_its_cap_is_left_out_and_resume_remembers(tmp_path):
    privacy = {"clip": 0.5, "noise_multiplier": 2.0, "trust": "local", "secure_rng": True}
    recipe = {**RECIPE, "cohort": {"size": 15, "max_participations": 2}, "privacy": privacy}
    made = prepare(Recipe.of(recipe))
    state, seen = made.parts.first_state(made.initial_weights, made.threshold), []
    for _ in range(5):
        allowed, state = within_cap(made.parts, state, np.arange(0, 30, 2))
        seen.append(len(allowed))
    assert seen == [15, 15, 0, 0, 0]
    assert state.slots["participations"].tolist() == [2, 0] * 15
    record = made.parts.plan.record(0, 0.5)
    assert record["relation"] == "replace-one" and record["sensitivity"] == record["std"] == 1 + ROUNDING
    count: list[int] = []
    folder = tmp_path / "run"
    simulation.run(recipe, out=folder, on_round=lambda *_: count.append(1), should_stop=lambda: len(count) == 3)
    result = simulation.run(Recipe.load(folder), out=folder, resume=True)
    assert sum(line["cohort"] for line in result.private_history) <= 60
    assert result.private_history[-1]["cohort"] < 8, "after two rounds of half the clients most have reached the cap"
    assert result.privacy["adversaries"][0]["epsilon"] == pytest.approx(made.parts.plan.epsilon(2))
    assert second_account(Records(folder)).ok


def test_ddgauss_runs_from_a_recipe_the_same_on_every_back_end(tmp_path):
    recipe = {**RECIPE, "algorithm": {"name": "ddgauss", "bits": 18}}
    recipe["privacy"] = {"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.003}  # trust: distributed by default
    one = simulation.run({**recipe, "engine": {"backend": "sequential"}}, out=tmp_path / "one")
    many = simulation.run({**recipe, "engine": {"backend": "vectorized", "block": 4}})
    for left, right in zip(one.history, many.history):
        assert left["test_loss"] == pytest.approx(right["test_loss"], rel=2e-3)
    assert one.privacy["trust"] == "distributed" and "discrete Gaussian" in one.privacy["mechanism"]
    recipients, server = one.privacy["adversaries"]
    assert recipients["epsilon"] < server["epsilon"] == one.privacy["epsilon"] == one.history[-1]["epsilon"]
    entry = read(tmp_path / "one" / "ledger.jsonl")[0]
    assert entry["mechanism"] == "ddgauss" and entry["bits"] == 18
    names = ("noise_multiplier", "clip", "granularity", "dimension", "beta", "bits", "n_max")
    numbers = {name: entry[name] for name in names} | {"min_cohort": entry["cohort_min"]}
    account = DDGaussAccount(clients=30, cohort=15, delta=0.003, **numbers)
    assert account.epsilon(6, "server") == pytest.approx(server["epsilon"]) and entry["dimension"] == 650
    assert second_account(Records(tmp_path / "one")).ok
    assert simulation.run(Recipe.load(tmp_path / "one"), out=tmp_path / "one", resume=True).privacy == one.privacy
    assert [line["aborted"] for line in read_lines(tmp_path / "one" / "metrics.jsonl")] == [False] * 6


def test_epsilon_at_another_delta_is_that_of_the_mechanism_that_ran():
    """n_max follows δ only while the plan is made: a smaller δ must not pretend a larger top-up."""
    plan = job(algorithm={"name": "ddgauss"}, privacy={"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.01}).parts.plan
    other = replace(plan, delta=0.005)
    assert other.mechanism.n_max(other) == plan.mechanism.n_max(plan)
    assert other.epsilon(3) > plan.epsilon(3)
    loose = replace(other, mechanism=replace(plan.mechanism, most=None, granularity=None))
    assert loose.mechanism.n_max(loose) >= plan.mechanism.n_max(plan)


def test_a_method_of_ones_own_may_use_the_discrete_mechanism():
    from fedflat.core.types import Algorithm, Phase
    from fedflat.pieces.gradients import sam

    method = Algorithm("mine", phases=(Phase(rule=sam(0.1)),), kind="ddgauss")
    privacy = {"clip": {"kind": "constant", "value": 0.5}, "noise_multiplier": 1.0, "delta": 0.003}
    result = simulation.run({**RECIPE, "rounds": 1, "privacy": privacy}, algorithm=method)
    assert math.isfinite(result.privacy["epsilon"]) and result.privacy["trust"] == "distributed"
