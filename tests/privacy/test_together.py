"""Publishing several runs: their figures add up, repeats count once, and noise used twice has no total."""

import math
from typing import Any

from fedflat.privacy.accounting.independent import epsilon_bounds
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.together import Published, total

DELTA = 2e-3


def plan_of(**change: Any) -> Plan:
    facts = {"clients": 500, "cohort": 50, "rounds": 20, "noise_multiplier": 0.95, "delta": DELTA, **change}
    return build_plan(**facts)


def run_of(plan: Plan, name: str = "a", key: str | None = None, **more: Any) -> Published:
    line = plan.record(0, 0.2) | {"key_id": key or name, **more.pop("line", {})}
    entries = [{**line, "round": turn} for turn in range(plan.rounds)]
    return Published(name, more.pop("epsilon", plan.epsilon()), plan.delta, entries, **more)


def test_two_runs_are_bounded_by_their_sum() -> None:
    """At both δ together; twin: the larger of the two alone is far below what all rounds as one run surely cost."""
    plan = plan_of(rounds=150)
    both = total([run_of(plan, "a"), run_of(plan, "b")])
    assert both.epsilon == 2 * plan.epsilon() and both.delta == 2 * DELTA
    assert (both.runs, both.unbounded, both.relation) == (("a", "b"), (), "add-remove")
    assert both.reasons[0].startswith("ε and δ of the runs are added")
    low, _ = epsilon_bounds(0.1, 0.95, 300, both.delta)
    assert both.epsilon >= low > 1.1 * plan.epsilon()
    assert total([run_of(plan, "a")]).epsilon == plan.epsilon() and total([run_of(plan, "a")]).reasons == ()


def test_the_neighbours_of_a_total_are_the_narrowest() -> None:
    fixed = run_of(plan_of(sampling="fixed"), "a")
    assert total([fixed, run_of(plan_of(sampling="fixed", noise_multiplier=1.5), "b")]).relation == "replace-one"
    both = total([fixed, run_of(plan_of(), "b")])
    assert both.relation == "add-remove" and "zero-out neighbours" in both.reasons[0]
    turns = run_of(build_plan(clients=40, cohort=8, rounds=12, noise_multiplier=0.9, sampling="min-separation",
                              noise="banded", delta=1e-3), "c")  # fmt: skip
    assert total([turns]).relation == total([turns, run_of(plan_of(), "b")]).relation == "zero-out"
    assert total([fixed, Published("b", 1.0, DELTA)]).relation == "add-remove"  # no line says what b's neighbours are


def test_runs_without_a_guarantee_stand_apart() -> None:
    found = total([run_of(plan_of(), "a"), Published("b", None, DELTA), Published("c", math.inf, DELTA)])
    assert found.runs == ("a",) and found.unbounded == ("b", "c") and found.epsilon == plan_of().epsilon()
    assert total([]).epsilon == total([]).delta == 0


def test_the_same_release_counts_once_and_shared_noise_has_no_total() -> None:
    release = ("5a", [{"round": 19, "test_loss": 1.0}])
    first = run_of(plan_of(), "a", "key", released=release)
    found = total([first, run_of(plan_of(), "b", "key", released=release)])
    assert found.epsilon == plan_of().epsilon() and "b is a again" in found.reasons[0]
    others = {
        "weights": run_of(plan_of(), "c", "key", released=("5b", release[1])),
        "metrics": run_of(plan_of(), "c", "key", released=("5a", [{"round": 19, "test_loss": 1.1}])),
        "events": run_of(plan_of(rounds=19), "c", "key", released=release),
        "no digest": run_of(plan_of(), "c", "key"),
    }
    for what, other in others.items():
        for one in (first, run_of(plan_of(), "a", "key")):
            shared = total([one, other])
            assert shared.epsilon == math.inf, what
            assert "a and c share a noise key but not what they released" in shared.reasons[0]
    assert total([first, run_of(plan_of(), "c", "another key")]).epsilon == 2 * plan_of().epsilon()
