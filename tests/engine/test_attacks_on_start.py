"""What ``start`` must not break: hostile round 0s, noise keys, and whatever takes all rounds to be alike."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.audit.worlds import Engine, cases_for, world_recipe
from fedflat.cli.privacy import Options, scheduled_plan
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.rounding import ROUNDING
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.engine.train import train
from fedflat.federation.project import _taking_turns
from fedflat.privacy.accounting.gaussian import gaussian_epsilon
from fedflat.privacy.attacker import attacker
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.statement import multipliers
from fedflat.simulation.planning import alternatives, best, lines
from fedflat.simulation.settings import costs_of

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

SIZES = (7, 3, 12, 1, 5)
START = {"kind": "class-statistics", "clip": 2.0, "share": 0.3, "lr": 0.5}


def recipe(**changes: Any) -> Recipe:
    return Recipe.of(
        {
            "rounds": 20,
            "data": {"dataset": "digits", "clients": 100},
            "algorithm": "dp-fedavg",
            "start": START,
            "cohort": {"size": 100, "sampling": "full"},
            "local": {"steps": 1},
            "privacy": {"clip": 0.3, "epsilon": 4.0, "delta": 1e-3},
            **changes,
        }
    )


def small(**changes: Any) -> Recipe:
    given: dict[str, Any] = {"rounds": 4, "data": {}, "cohort": {"size": len(SIZES)}}
    return recipe(**given | {"privacy": {"clip": 0.3, "noise_multiplier": 0.0, "delta": 1e-3}} | changes)


def plan_of(share: float = 0.5, **changes: Any) -> Plan:
    given: dict[str, Any] = {"clients": 100, "cohort": 100, "sampling": "full", "rounds": 20, "delta": 1e-3}
    return build_plan(**given | {"epsilon": 4.0} | changes, share=share)


def federation(hostile: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> FederatedData:
    draw = torch.Generator().manual_seed(3)
    pairs = [(torch.randn(n, 40, generator=draw), torch.arange(n) % 3) for n in SIZES]
    if hostile is not None:
        pairs[2] = torch.zeros_like(hostile), torch.arange(len(hostile)) % 3 if targets is None else targets
    made = from_pairs(pairs)
    if hostile is not None:
        made.inputs[torch.from_numpy(made.parts[2])] = hostile  # as a client whose own check was taken out
    return made


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 3))


HOSTILE = {
    "huge": torch.full((6, 40), 1e30),
    "at the end of float32": torch.full((6, 40), 3e38),
    "not a number": torch.full((6, 40), math.nan),
    "infinite": torch.full((6, 40), math.inf),
    "tiny": torch.full((6, 40), 1e-40),
    "one huge entry": torch.eye(6, 40) * 1e20,
    "much": torch.ones(3000, 40) * 50,
}


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_client_holds_moves_round_0_by_its_clip_at_most(kind: str, backend: str) -> None:
    def released(data: FederatedData) -> torch.Tensor:
        job = prepare(small(engine={"backend": backend}), module(), data)
        return train(job, on_round=lambda record, after: True).state.shared

    one_class = torch.zeros(len(HOSTILE[kind]), dtype=torch.int64)
    gone = released(federation(HOSTILE[kind][:0]))
    for targets in (None, one_class):
        here = released(federation(HOSTILE[kind], targets))
        assert float((here - gone).double().norm()) * len(SIZES) / 0.5 <= 2.0 * (1 + ROUNDING) * (1 + 1e-6)


def test_no_two_starts_share_their_noise() -> None:
    given = {"privacy": {"clip": 0.3, "noise_multiplier": 1.0, "delta": 1e-3}}
    changed: list[dict[str, Any]] = [{}, {"clip": 2.5}, {"share": 0.4}, {"lr": 0.6}]
    jobs = [prepare(small(**given, start={**START, **one}), module(), federation()) for one in changed]
    jobs.append(prepare(small(**given, start=None), module(), federation()))
    jobs.append(prepare(small(**given, start={**START, "clip": None}), module(), federation()))
    same = prepare(small(**given, start={**START, "clip": 0.3}), module(), federation())
    assert len({job.key for job in jobs}) == len(jobs) and same.key == jobs[-1].key
    units = []
    for number in range(2):  # of one key, each round has noise of its own
        now = jobs[0].parts.of(number)
        units.append(now.mechanism.unit(jobs[0].key, number, 1000))  # type: ignore[attr-defined]
    assert abs(float(torch.corrcoef(torch.stack([u.double() for u in units]))[0, 1])) < 0.15


def test_a_loss_given_in_python_is_refused_too() -> None:
    loss = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(InputError, match=r"a loss of one's own; allowed: classification with start"):
        fedflat.run(small(), model=module(), clients=federation(), loss=loss)


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_the_forecast_s_lines_have_round_0_s_own_noise(share: float) -> None:
    plan = plan_of(share)
    entries = lines(plan, 0.3)
    assert [line["round"] for line in entries] == list(range(20))
    assert entries[0]["noise_multiplier"] == plan.at_round(0).event_multiplier
    assert {line["noise_multiplier"] for line in entries[1:]} == {plan.event_multiplier}
    found = attacker(entries, plan.epsilon(), plan.delta)
    assert found is not None and found.mu is not None
    assert gaussian_epsilon(found.mu, plan.delta) == pytest.approx(plan.epsilon(), rel=1e-6)


def test_rounds_without_a_line_have_the_least_noise_of_all() -> None:
    plan = plan_of(0.5)
    least = plan.at_round(0).event_multiplier
    assert least < plan.event_multiplier
    assert multipliers(plan, [], 3) == {least: 3}
    assert multipliers(plan, [plan.record(1, 0.3)], 2) == {plan.event_multiplier: 1, least: 1}
    assert plan.guarantees_of(multipliers(plan, [], 0))[0].epsilon == 0


def test_the_budget_s_table_takes_a_started_plan_as_it_is(tmp_path: Any) -> None:
    import yaml

    file = tmp_path / "started.yaml"
    file.write_text(yaml.safe_dump(recipe().dump()))
    plan = scheduled_plan(Options(recipe=str(file), override=[]), {})
    assert plan is not None and 3.99 < plan.epsilon() <= 4.0 and plan.first != 1
    with pytest.raises(InputError, match=r"start: found class-statistics; allowed: nothing with after"):
        scheduled_plan(Options(recipe=str(file), override=["after=somewhere"]), {})
    assert (
        scheduled_plan(
            Options(recipe=str(file), override=["start=null", "cohort.sampling=poisson", "cohort.size=10"]), {}
        )
        is None
    )


def test_what_takes_all_rounds_to_be_alike_refuses_a_start() -> None:
    with pytest.raises(InputError, match="start: found class-statistics; allowed: nothing where settings are chosen"):
        costs_of(recipe(), [], 10, 100)


def test_alternatives_keep_the_share_and_leave_correlated_noise_out() -> None:
    noised = lambda plan: plan.std(1.0) / plan.divisor  # noqa: E731
    found = {each.what: each for each in alternatives(plan_of(0.5), 10, noised)}
    half = found["half the rounds"].noise_multiplier
    assert half == pytest.approx(plan_of(0.5, rounds=10).noise_multiplier, rel=1e-3)
    sampled = plan_of(0.5, cohort=10, sampling="poisson", rounds=3, epsilon=None, noise_multiplier=2.0)
    assert "correlated noise, clients in turns" not in {a.what for a in alternatives(sampled, 10, noised)}
    assert "half the rounds" not in {a.what for a in alternatives(replace(sampled), 10, noised)}
    one = best(plan_of(0.5), 10, noised)
    assert one is not None and one.run == pytest.approx(one.round * math.sqrt(2 * 19))


def test_worlds_of_a_started_recipe_are_those_of_its_later_rounds() -> None:
    (case, *_) = cases_for(federation())
    assert world_recipe(recipe(), 4, Engine("sequential"), 1, case).start is None


def test_a_deployment_of_a_start_keeps_its_secret_coins() -> None:
    sampled = recipe(cohort={"size": 10})
    kept, said = _taking_turns(sampled, unnamed=True)
    assert kept is sampled and "a start's own noise" in said
    turned, _ = _taking_turns(recipe(cohort={"size": 10}, start=None), unnamed=True)
    assert turned.cohort.sampling == "min-separation"
