"""``fedflat plan``: figures against the accountant and by hand, what would help, and what it says before a run."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.assembly import planning
from fedflat.assembly.planning import alternatives, best, changes, drowned, drowning, forecast, made_up
from fedflat.cli import filled
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.cohorts import Fixed, Truncated
from fedflat.core.rounding import ROUNDING
from fedflat.data.clients import from_pairs
from fedflat.privacy.accounting.curves import gaussian_epsilon
from fedflat.privacy.plan import Plan, build_plan

RECIPE: dict[str, Any] = {
    "rounds": 6, "data": {"dataset": "digits", "clients": 40}, "model": {"name": "mlp", "hidden": 8},
    "algorithm": "dp-fedavg", "local": {"steps": 2, "batch_size": 8}, "cohort": {"size": 20},
    "privacy": {"clip": 0.5, "epsilon": 8},
}  # fmt: skip
DIMENSION = 64 * 8 + 8 + 8 * 10 + 10


def changed(**change: Any) -> Recipe:
    return Recipe.of({**RECIPE, **change})


def plan_of(**change: Any) -> Plan:
    return build_plan(**{"clients": 200, "cohort": 20, "rounds": 30, "epsilon": 4, "delta": 5e-4, **change})


def noise(plan: Plan) -> float:
    return plan.std(1.0) / plan.divisor


def test_the_figures() -> None:
    facts, _ = forecast(changed(), trial=False)
    sigma = fedflat.noise_multiplier(epsilon=8, clients=40, cohort=20, rounds=6)
    assert facts["noise_multiplier"] == pytest.approx(sigma, rel=1e-3)
    assert facts["sound"] and facts["delta"] == 0.0025 and facts["dimension"] == DIMENSION
    turns = facts["epsilon_by_round"]
    assert [turn["round"] for turn in turns] == [1, 2, 3, 4, 5, 6]
    for turn in turns:
        exact = fedflat.epsilon(clients=40, cohort=20, rounds=turn["round"], noise_multiplier=facts["noise_multiplier"])
        assert turn["epsilon"] == exact
    by_hand = 20 / (facts["noise_multiplier"] * (1 + ROUNDING) * math.sqrt(DIMENSION))
    assert facts["signal_to_noise_at_best"]["round"] == pytest.approx(by_hand)
    assert facts["signal_to_noise_at_best"]["run"] == pytest.approx(by_hand * math.sqrt(6))
    assert facts["noise_over_clip"] == pytest.approx(1 / by_hand)
    assert facts["traffic_bytes"] == {
        "to a client": 4 * DIMENSION, "from a client": 4 * DIMENSION, "a round": 160 * DIMENSION,
    }  # fmt: skip
    assert facts["seconds_a_round"] is None and facts["seconds"] is None
    assert facts["true_positives"] == 1.0 and facts["false_positives"] == 0.01  # e^8 in a hundred
    low, _ = forecast(changed(privacy={"clip": 0.5, "epsilon": 2}), trial=False)
    assert low["true_positives"] == 0.01 * math.exp(low["epsilon"]) + 0.0025
    assert facts["read"]["clients"] == 40 and facts["read"]["input_shape"] == [1, 8, 8]
    assert [other["what"] for other in facts["alternatives"]] == [
        "full participation", "twice the clients, twice the cohort", "a tenth of the parameters", "half the rounds",
        "correlated noise, clients in turns",
    ]  # fmt: skip


def test_a_trial_takes_time_and_nobodys_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = planning.prepare

    def spied(recipe: Recipe, **given: Any) -> Any:
        seen.append(given["data"])
        return real(recipe, **given)

    monkeypatch.setattr(planning, "prepare", spied)
    found, _ = forecast(changed(engine={"backend": "sequential"}))
    assert 0 < found["seconds_a_round"] < 60 and found["memory_bytes"]["model"]
    assert "16 clients, 2 of 2 local steps" in found["trial"]
    (data,) = seen
    digits = fedflat.data.sources.load({"dataset": "digits", "clients": 40})  # type: ignore[attr-defined]
    ours = {row.numpy().tobytes() for row in digits.inputs}
    assert not any(row.numpy().tobytes() in ours for row in data.inputs)


def test_long_steps_are_timed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = forecast(changed(local={"steps": 50, "batch_size": 8}, engine={"backend": "sequential"}))
    assert "16 clients, 4 of 50 local steps" in found["trial"]
    monkeypatch.setattr(planning, "seconds_per_client", lambda *given: math.inf)
    assert forecast(changed())[0]["seconds_a_round"] is None


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "fedavg", "privacy": {}}, "no differential privacy"),
    ({"privacy": {"clip": 0.5, "noise_multiplier": 0}}, "No ε is finite"),
    (
        {"algorithm": "dp-fedsam", "privacy": {"clip": 0.5, "noise_multiplier": 1, "protocol": "published"}},
        "no finite ε is proven of the procedure",
    ),
]


@pytest.mark.parametrize(("change", "said"), KINDS, ids=["plain", "no-noise", "published"])
def test_a_recipe_that_cannot_be_sound_says_so(change: dict[str, Any], said: str) -> None:
    facts, plan = forecast(changed(**change), trial=False)
    assert not facts["sound"] and facts["epsilon"] is None and facts["true_positives"] is None
    assert any(said in text for text in facts["says"]) and not facts["alternatives"]
    printed = " ".join(" ".join(filled("plan.txt", facts=facts, plan=plan)).split())
    assert said in printed and "inf after" not in printed


def test_what_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(InputError, match=r"cohort\.size"):
        forecast(changed(cohort={"size": 50}), trial=False)


@pytest.mark.parametrize("name", ["fed-smp-randk", "fed-smp-topk"])
def test_a_common_mask_carries_all_noise(name: str) -> None:
    whole, masked = (
        forecast(changed(algorithm=a), trial=False)[0]["signal_to_noise_at_best"]
        for a in ("dp-fedavg", {"name": name, "keep": 0.25})
    )
    assert masked["round"] == pytest.approx(2 * whole["round"], rel=0.01)


def test_noise_of_other_trust_models() -> None:
    central, local = (
        forecast(changed(privacy={"clip": 0.5, "noise_multiplier": 1, "trust": trust}), trial=False)[0]
        for trust in ("central", "local")
    )
    ratio = "signal_to_noise_at_best"
    assert central[ratio]["round"] == pytest.approx(local[ratio]["round"] * math.sqrt(20))
    votes, _ = forecast(changed(algorithm="ae-dpfl", rounds=2), trial=True)
    assert votes["signal_to_noise_at_best"] is None and "votes" in votes["trial"]


def test_made_up_examples_have_the_form_and_nothing_else() -> None:
    pairs = [(np.full((n, 3), 7.0, np.float32), np.full((n, 2), 1.0, np.float32)) for n in (1, 9)]
    found = made_up(from_pairs(pairs, pairs[0]), "multilabel", 5)
    assert found.clients == 2 and found.inputs.shape == (5, 3) and set(found.targets.unique().tolist()) <= {0.0, 1.0}
    assert found.test_inputs is not None and not bool((found.inputs == 7).any())
    tokens = from_pairs([(np.array([[1, 5]]), np.array([0])), (np.array([[2, 3]]), np.array([4]))])
    held = made_up(replace(tokens, held_back=tokens.parts), "classification", 2)
    assert held.inputs.dtype == torch.int64 and int(held.inputs.max()) <= 5 and len(held.held_back[0]) == 1
    assert int(held.targets.max()) <= 4 and made_up(tokens, "classification", 2).test_inputs is None


def test_every_alternative_has_its_own_noise() -> None:
    plan = plan_of()
    found = {other["what"]: other for other in alternatives(plan, 1000, noise)}
    assert len(found) == 6
    full = found["full participation"]["noise_multiplier"]
    assert full is not None and gaussian_epsilon(math.sqrt(30) / full, 5e-4) == pytest.approx(4, rel=1e-3)
    assert found["half the rounds"]["noise_multiplier"] == pytest.approx(plan_of(rounds=15).noise_multiplier, rel=2e-3)
    assert found["twice the cohort"]["noise_multiplier"] == pytest.approx(plan_of(cohort=40).noise_multiplier, rel=2e-3)
    same = best(plan, 1000, noise)
    ratios = {what: other["signal_to_noise_at_best"]["round"] for what, other in found.items()}
    assert ratios["a tenth of the parameters"] == pytest.approx(math.sqrt(10) * same["round"])
    assert ratios["twice the clients, twice the cohort"] == pytest.approx(2 * same["round"], rel=2e-3)


@pytest.mark.parametrize("law", [{"trust": "distributed"}, {"adaptive": True}], ids=["distributed", "adaptive"])
def test_other_laws_have_alternatives(law: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "changes", lambda *given: itertools.islice(changes(*given), 2))
    found = alternatives(plan_of(**law), 1000, noise)
    assert len(found) == 2 and all(other["signal_to_noise_at_best"] for other in found)


def test_other_cohorts_keep_their_law() -> None:
    def changed(name: str, **law: Any) -> Plan:
        plan = plan_of(**law, noise_multiplier=1, epsilon=None)
        return next(make() for what, make, _, _ in changes(plan, 10, None) if what == name)

    assert changed("full participation", sampling="fixed").sampler == Fixed(200, 200)
    assert changed("twice the cohort", sampling="truncated", max_cohort=30).sampler == Truncated(200, 40, 60)
    assert changed("full participation", trust="distributed").min_cohort == 200


def test_where_nothing_is_tried() -> None:
    without = {"epsilon": None}
    for other in ({"noise_cohort": 100.0}, {"private": False, **without}, {"noise_multiplier": 0, **without}):
        assert alternatives(plan_of(**other), 1000, noise) == []
    everybody = alternatives(plan_of(cohort=200, rounds=1), 1000, noise)
    twice, tenth = (other["what"] for other in everybody)
    assert (twice, tenth) == ("twice the clients, twice the cohort", "a tenth of the parameters")


def test_a_way_that_is_not_possible_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    ways = [("fewer", lambda: plan, 250, "a quarter"), ("no rounds", lambda: replace(plan, rounds=0), 1000, "")]
    monkeypatch.setattr(planning, "changes", lambda *given: ways)
    one, other = alternatives(plan, 1000, noise)
    same = best(plan, 1000, noise)
    assert one["signal_to_noise_at_best"]["run"] == pytest.approx(2 * same["run"])
    assert other["signal_to_noise_at_best"] == {} and "not possible" in other["note"]


def test_drowning() -> None:
    assert drowning({}) == "" and drowning({"round": 0.5, "run": 3.0}) == ""
    said = drowning({"round": 0.01, "run": 0.1})
    assert "100 times as long as a round's" in said and "10 times as long as all" in said
    assert best(plan_of(), 1000, lambda plan: math.inf) == {}
    assert best(plan_of(noise_multiplier=0, epsilon=None), 1000, noise) == {}


def test_the_command(command: Any) -> None:
    words = ["plan", "quick-start", "-o", "rounds=4", "-o", "cohort.size=200", "--no-trial"]
    found = command(*words)
    assert found.status == 0, found.err
    assert all(len(line) <= 80 for line in found.out.splitlines())
    for said in ("signal", "At the same ε and δ:", "half the rounds: σ =", "no example was trained on"):
        assert said in found.out
    facts = json.loads(command(*words, "--json").out)
    assert facts["rounds"] == 4 and facts["epsilon"] <= 8


def test_a_network_from_scratch_that_drowns_is_shown_a_public_body_first() -> None:
    noisy = {"clip": 0.5, "noise_multiplier": 50.0}
    found, _ = forecast(changed(model={"name": "mlp", "hidden": 400}, privacy=noisy), trial=False)
    first, ratio = found["alternatives"][0], "signal_to_noise_at_best"
    assert first["what"] == "a linear head on a public network" and first[ratio]["round"] > found[ratio]["round"]
    linear, _ = forecast(changed(model="linear", privacy=noisy), trial=False)
    assert linear["alternatives"][0]["what"] != first["what"]


def test_a_drowned_run_says_so_before_it_starts(command: Any) -> None:
    words = ["quick-start", "-o", "rounds=2", "-o", "cohort.size=200", "-o", "engine.backend=sequential"]
    words += ["-o", "privacy.epsilon=0.01", "-o", "local.steps=1"]
    text = " ".join(command("plan", *words, "--no-trial", "-o", "privacy.budget=0.009").out.split())
    for said in ("stops after", "The noise drowns the signal", "A larger clip changes no figure"):
        assert said in text
    warned = command("run", *words, "--out", "run").err
    assert "The noise drowns the signal" in warned and "fedflat plan says" in warned


def test_a_job_with_enough_signal_says_nothing() -> None:
    from fedflat.assembly.jobs import prepare

    recipe = changed(engine={"backend": "sequential"})
    assert drowned(recipe, prepare(recipe)) == []
