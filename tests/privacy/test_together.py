"""Publishing several runs: against hand composition, and twins that add too little are found."""

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from safetensors.numpy import save_file

from fedflat.methods.plans import DDGaussPlan, VotesPlan
from fedflat.methods.published import published_plan
from fedflat.privacy.accounting import composition
from fedflat.privacy.accounting import curves as module
from fedflat.privacy.accounting.composition import LossDistribution
from fedflat.privacy.accounting.curves import Step, compose_epsilon, steps_epsilon
from fedflat.privacy.accounting.gaussian import gaussian_epsilon, schedule_epsilon
from fedflat.privacy.accounting.independent import epsilon_bounds
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.together import Published, release_digest, total

DELTA = 2e-3


def plan_of(**change: Any) -> Plan:
    facts = {"clients": 500, "cohort": 50, "rounds": 20, "noise_multiplier": 0.95, "delta": DELTA, **change}
    return build_plan(**facts)


def run_of(plan: Plan, name: str = "a", key: str | None = None, **more: Any) -> Published:
    line = plan.record(0, 0.2) | {"key_id": key or name, **more.pop("line", {})}
    entries = [{**line, "round": turn} for turn in range(plan.rounds)]
    return Published(name, more.pop("epsilon", plan.epsilon()), plan.delta, entries, **more)


def by_library(steps: dict[Step, int], way: str, delta: float = DELTA) -> float:
    """dp-accounting's distributions of one direction, convolved by it, rounds one by one of each kind."""
    found = None
    for step, count in steps.items():
        if step.kind == "gaussian":
            made = library.from_gaussian_mechanism(step.sigma, value_discretization_interval=1e-3)
        else:
            made = library.from_gaussian_mechanism(step.sigma, sampling_prob=step.q, value_discretization_interval=1e-3)
        mass = (made._pmf_remove if way == "remove" else made._pmf_add).self_compose(count)
        found = mass if found is None else found.compose(mass)
    return float(found.get_epsilon_for_delta(delta))


def test_two_runs_of_t_rounds_are_one_of_twice_as_many() -> None:
    plan = plan_of(rounds=150)
    both = total([run_of(plan, "a"), run_of(plan, "b")])
    assert both.epsilon == plan_of(rounds=300).epsilon() == pytest.approx(9.37, abs=0.005)
    assert (both.runs, both.unbounded, both.delta, both.relation) == (("a", "b"), (), DELTA, "add-remove")
    assert both.reasons == ()
    low, _ = epsilon_bounds(0.1, 0.95, 300, DELTA)
    assert both.epsilon >= low > 1.2 * plan.epsilon()  # the larger of the two alone is far below what is needed


def test_different_runs_convolve_each_direction_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {Step("poisson", 0.1, 0.95): 20, Step("poisson", 0.05, 0.8): 30, Step("gaussian", 1.0, 6.0): 4}
    found = steps_epsilon(steps, DELTA)
    hand = {way: by_library(steps, way) for way in ("remove", "add")}
    assert found == pytest.approx(max(hand.values()), rel=1e-4) and hand["remove"] > 1.02 * hand["add"]
    alone = [compose_epsilon(dp.PoissonSampledDpEvent(s.q, dp.GaussianDpEvent(s.sigma)), n, DELTA)
             for s, n in steps.items() if s.kind == "poisson"]  # fmt: skip
    assert max(alone) < 0.9 * found < found < sum(alone) + gaussian_epsilon(2 / 6.0, DELTA)
    # Twin: only the direction in which a client joins. It states less than the hand composition needs.
    directions = module._directions
    monkeypatch.setattr(module, "_directions", lambda step, spacing: (directions(step, spacing)[1],) * 2)
    assert steps_epsilon(steps, DELTA) == pytest.approx(hand["add"], rel=1e-4)
    assert steps_epsilon(steps, DELTA) < hand["remove"] * (1 - 0.01)


def test_parts_of_one_law_give_the_whole() -> None:
    """The joint convolution against the power of one distribution, and against the exact mixture and Gaussian."""
    near = 0.95 * (1 - 1e-12)
    one = compose_epsilon(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.95)), 40, DELTA)
    assert steps_epsilon({Step("poisson", 0.1, 0.95): 15, Step("poisson", 0.1, near): 25}, DELTA) == pytest.approx(one)
    seen = steps_epsilon({Step("known", 0.1, 0.95): 15, Step("known", 0.1, near): 25}, DELTA)
    exact = schedule_epsilon(40, 0.1, 0.95, DELTA)
    assert exact * (1 - 1e-6) < seen < exact * (1 + 1e-3)
    mixed = steps_epsilon({Step("gaussian", 1.0, 2.0): 3, Step("known", 0.9999999, 2.0): 4}, DELTA)
    assert mixed == pytest.approx(gaussian_epsilon(math.sqrt(7) / 2, DELTA), rel=1e-3)
    assert steps_epsilon({Step("gaussian", 1.0, 2.0): 3, Step("gaussian", 1.0, 1.0): 2}, DELTA) == gaussian_epsilon(
        math.sqrt(3 / 4 + 2), DELTA
    )


def test_ends_of_the_composition() -> None:
    noisy = Step("poisson", 0.1, 0.95)
    assert steps_epsilon({}, DELTA) == steps_epsilon({Step("gaussian", 1.0, math.inf): 3}, DELTA) == 0.0
    assert steps_epsilon({noisy: 3, Step("gaussian", 1.0, 0.0): 1}, DELTA) == math.inf == steps_epsilon({noisy: 1}, 0.0)
    leaky = LossDistribution(np.array([0.99]), 0, 1e-3, 0.01)
    assert composition.together([(leaky, 2)], DELTA) == math.inf
    far = LossDistribution(np.array([1.0]), 3000, 1e-3, 0.0)
    assert module._seen(far, 0.25).probs[[0, 3000]] == pytest.approx([0.75, 0.25])
    assert composition.together([(far, 2)], DELTA) == pytest.approx(6.0, abs=0.01)


def test_the_settings_of_one_comparison() -> None:
    """Poisson, everyone, adaptive clips and votes: all by loss distributions; equal rounds meet despite rounding."""
    runs = [
        run_of(plan_of(), "a"),
        run_of(plan_of(), "b", line={"std": plan_of().record(0, 0.2)["std"] * (1 + 1e-15)}),
        run_of(plan_of(adaptive=True), "c"),
        run_of(plan_of(noise_multiplier=3.0, cohort=500), "d"),
        run_of(plan_of(noise_multiplier=2.0, mechanism=VotesPlan(4, 20)), "e", line={"noise_multiplier": 2.0}),
    ]
    found = total(runs)
    steps = {Step("poisson", 0.1, 0.95): 60, Step("gaussian", 1.0, 3.0): 20, Step("poisson", 0.1, 1.0): 20}
    assert found.reasons == () and found.epsilon == pytest.approx(steps_epsilon(steps, DELTA), rel=1e-6)


def test_truncated_cohorts_compose() -> None:
    small = {"clients": 60, "cohort": 6, "sampling": "truncated", "rounds": 5}
    one = plan_of(max_cohort=12, **small)
    assert total([run_of(one, "a"), run_of(one, "b")]).epsilon == one.epsilon(10)
    never = plan_of(max_cohort=60, **small)
    both = total([run_of(one, "a"), run_of(never, "b")]).epsilon
    assert max(one.epsilon(), never.epsilon()) < both < one.epsilon() + never.epsilon()


def test_fixed_cohorts_compose_with_their_schedules_seen_or_added() -> None:
    one, other = plan_of(sampling="fixed"), plan_of(sampling="fixed", noise_multiplier=1.5)
    same = total([run_of(one, "a"), run_of(one, "b")])
    assert same.epsilon == one.epsilon(40) and same.relation == "replace-one"
    mixed = total([run_of(one, "a"), run_of(other, "b")])
    seen = {Step("known", 0.1, 0.475): 20, Step("known", 0.1, 0.75): 20}
    assert mixed.epsilon == pytest.approx(steps_epsilon(seen, DELTA)) and mixed.relation == "replace-one"
    assert mixed.epsilon > max(one.epsilon(), other.epsilon())
    both = total([run_of(one, "a"), run_of(plan_of(), "b")])
    assert both.relation == "add-remove" and "zero-out neighbours" in both.reasons[0]
    assert one.epsilon() < both.epsilon < one.epsilon() + plan_of().epsilon() + 1.0


def test_local_distributed_and_published_runs() -> None:
    local = plan_of(trust="local", max_participations=7)
    found = total([run_of(local, "a"), run_of(local, "b")])
    assert found.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(14) / 0.475, DELTA))
    shares = plan_of(trust="distributed")
    both = total([run_of(shares, "a"), run_of(shares, "b")])
    assert shares.epsilon(40) <= both.epsilon <= shares.epsilon(40) * 1.01
    fixed = plan_of(trust="distributed", sampling="fixed")
    assert total([run_of(fixed, "a"), run_of(fixed, "b")]).epsilon == pytest.approx(
        schedule_epsilon(40, 0.1, 0.475, DELTA)
    )
    facts: dict[str, Any] = {"clients": 500, "cohort": 50, "rounds": 20, "noise_multiplier": 0.95, "clip": 0.2}
    paper = published_plan("000", delta=DELTA, **facts)
    busiest = paper.sampler.busiest(20)  # type: ignore[attr-defined]
    assert total([run_of(paper, "a"), run_of(paper, "b")]).epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(2 * busiest) / (paper.mechanism.message_multiplier(paper) / 2), DELTA)  # type: ignore[union-attr]
    )
    messages = published_plan("004", delta=DELTA, **facts)
    sigma = messages.mechanism.message_multiplier(messages) / 2  # type: ignore[union-attr]
    assert total([run_of(messages, "a"), run_of(messages, "b")]).epsilon == pytest.approx(
        schedule_epsilon(40, 0.1, sigma, DELTA * 0.98)
    )


def test_the_discrete_gaussians_bounds_are_added_to_the_rest() -> None:
    made = plan_of(trust="distributed", rounds=10, mechanism=DDGaussPlan(dimension=100, clip=0.2))
    twice = total([run_of(made, "a"), run_of(made, "b")])
    assert twice.reasons == () and made.epsilon() < twice.epsilon < 2 * made.epsilon()
    mixed = total([run_of(made, "a"), run_of(plan_of(), "b")])
    assert "discrete Gaussian's bounds are added" in mixed.reasons[0]
    assert mixed.epsilon > made.epsilon() + plan_of().epsilon()
    torn = run_of(made, "a", line={"mechanism": "ddgauss"})
    lines = [{k: v for k, v in entry.items() if k != "granularity"} for entry in torn.entries]
    broken = total([Published("a", 3.0, DELTA, lines), run_of(plan_of(), "b")])
    assert broken.epsilon == math.inf and "no granularity" in broken.reasons[-1]


@pytest.mark.parametrize(
    "line", [{"sampling": "cyclic"}, {"mechanism": "toeplitz"}, {"bands": 4}], ids=["law", "mechanism", "field"]
)
def test_a_law_that_is_not_known_adds_what_it_states(line: dict[str, Any]) -> None:
    """Twin of a guess: correlated rounds taken for independent ones would be charged far too little."""
    known, other = run_of(plan_of(), "a"), run_of(plan_of(), "b", epsilon=4.0, line=line)
    found = total([known, other])
    assert found.epsilon == plan_of().epsilon() + 4.0 and found.delta == 2 * DELTA
    assert found.reasons == ("ε and δ of b are added as stated: no ledger whose law is composed here.",)
    stated = total([Published("a", 1.0, 1e-3), Published("b", 2.0, 1e-3)])
    assert (stated.epsilon, stated.delta) == (3.0, 2e-3)
    bare = [{k: v for k, v in entry.items() if k != "q"} for entry in run_of(plan_of(), "bare").entries]
    assert total([known, Published("c", 5.0, DELTA, bare)]).epsilon == plan_of().epsilon() + 5.0
    fixed = run_of(plan_of(sampling="fixed"), "d")
    assert total([fixed, run_of(plan_of(sampling="fixed"), "e")]).relation == "replace-one"
    assert total([fixed, Published("e", 1.0, 1e-3)]).relation == "add-remove"  # whose neighbours are not known
    two = [*run_of(plan_of(), "c").entries, *other.entries]
    assert total([known, Published("c", 5.0, DELTA, two)]).delta == 2 * DELTA  # two laws in one ledger


def test_runs_without_a_guarantee_are_named_apart() -> None:
    found = total([run_of(plan_of(), "a"), Published("fedavg", None, DELTA), Published("b", math.inf, DELTA)])
    assert found.unbounded == ("fedavg", "b") and found.runs == ("a",) and found.epsilon == plan_of().epsilon()
    assert total([Published("fedavg", None, DELTA)]).runs == ()
    wider = total([run_of(plan_of(), "a"), run_of(plan_of(delta=1e-3), "b")])
    assert wider.delta == DELTA and wider.epsilon == plan_of().epsilon(40)  # at the largest δ


def folder_of(path: Path, weight: float, loss: float = 1.0) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    save_file({"shared": np.array([weight, 2.0])}, path / "checkpoints" / "round-000020.safetensors")
    (path / "metrics.jsonl").write_text(json.dumps({"round": 19, "test_loss": loss, "seconds": weight}) + "\n")
    return path


def test_the_same_release_counts_once_and_shared_noise_has_no_total(tmp_path: Path) -> None:
    one, again = folder_of(tmp_path / "a", 1.0), folder_of(tmp_path / "b", 1.0)
    first = run_of(plan_of(), "a", "key", folder=one)
    found = total([first, run_of(plan_of(), "b", "key", folder=again)])
    assert found.epsilon == plan_of().epsilon() and "b is a again" in found.reasons[0]
    others = {
        "weights": run_of(plan_of(), "c", "key", folder=folder_of(tmp_path / "c", 1.0 + 1e-15)),
        "metrics": run_of(plan_of(), "c", "key", folder=folder_of(tmp_path / "d", 1.0, loss=1.1)),
        "events": run_of(plan_of(rounds=19), "c", "key", folder=again),
        "nothing kept": run_of(plan_of(), "c", "key", folder=tmp_path / "none"),
        "no folder": run_of(plan_of(), "c", "key"),
    }
    for what, other in others.items():
        shared = total([first, other])
        assert shared.epsilon == math.inf, what
        assert "a and c share a noise key but not what they released" in shared.reasons[0]
    assert total([first, run_of(plan_of(), "c", "another key")]).epsilon == plan_of().epsilon(40)


def test_a_folder_that_cannot_be_read_is_not_the_same_release(tmp_path: Path) -> None:
    broken = folder_of(tmp_path / "a", 1.0)
    assert release_digest(broken)
    (broken / "checkpoints" / "round-000020.safetensors").write_bytes(b"torn")
    assert release_digest(broken) is None is release_digest(None)
    (folder_of(tmp_path / "b", 1.0) / "metrics.jsonl").unlink()
    assert release_digest(tmp_path / "b") is None
