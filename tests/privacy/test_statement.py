"""The statement says what is promised, to whom, and what is not; and never a claimed figure alone."""

import dataclasses
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import norm

from fedflat.core.checks import InputError, RunError
from fedflat.methods.plans import DDGaussPlan, VotesPlan
from fedflat.privacy import statement as module
from fedflat.privacy.accounting.curves import gaussian_epsilon
from fedflat.privacy.plan import Guarantee, Plan, build_plan
from fedflat.privacy.statement import headline, rounds_charged, statement, true_positives, write
from fedflat.privacy.trust import Accounted
from fedflat.privacy.verify import verify


def plan_of(**change: Any) -> Plan:
    facts = {"clients": 500, "cohort": 50, "rounds": 10, "noise_multiplier": 2.0, "delta": 0.002, **change}
    return build_plan(**facts)


DISCRETE: dict[str, Any] = {"trust": "distributed", "mechanism": DDGaussPlan(dimension=8, clip=1.0)}


class Mine(Accounted):
    """A mechanism of one's own, whose adversaries have different neighbours."""

    name = "mine"
    relation = "add-remove"
    kinds = ("add-remove", "replace_one", "add_remove", "odd")

    def guarantees(self, plan: Plan, rounds: int) -> tuple[Guarantee, ...]:
        (one,) = super().guarantees(plan, rounds)
        return tuple(dataclasses.replace(one, relation=kind) for kind in self.kinds)


def make(plan: Plan | None = None, **more: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "rounds_run": 10, "algorithm": "dp-fedsam", "facts": {}, "seeded": False, **more,
    }  # fmt: skip
    return statement(plan or plan_of(), **arguments)


CONTRACT = [
    "unit", "adjacency", "trust", "adversaries", "sampling", "mechanism", "epsilon", "delta", "claimed_epsilon",
    "proven_epsilon", "simulated_epsilon", "reasons", "not_covered",
]  # fmt: skip


def test_the_contracts_keys_and_the_figures_of_a_sound_run() -> None:
    found = make(facts={"clip": 0.2, "rounds": 10})
    assert not [key for key in CONTRACT if key not in found]
    assert found["epsilon"] == found["claimed_epsilon"] == found["proven_epsilon"] == plan_of().epsilon()
    assert found["epsilon_at_1e-5"] == plan_of(delta=1e-5).epsilon() and found["simulated_epsilon"] is None
    assert found["unit"].startswith("client") and found["adjacency"].startswith("add-remove")
    assert found["adversaries"][0]["adversary"] == "recipients" and found["reasons"] == []
    assert found["adversaries"][0]["epsilon"] == found["epsilon"] and found["warnings"]
    assert "Poisson" in found["sampling"] and "q = 0.1" in found["sampling"]
    assert "σ = 2" in found["mechanism"] and "clip 0.2" in found["mechanism"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_reporting_items_are_all_there() -> None:
    assert list(make()["checklist"]) == [
        "dp_setting", "data_accesses", "final_output", "unit_of_privacy", "adjacency", "accounting_type",
        "accounting_assumptions", "formal_statement", "tuning", "verifiability",
    ]  # fmt: skip
    assert all(text and isinstance(text, str) for text in make()["checklist"].values())


def test_what_an_infinite_or_missing_epsilon_is() -> None:
    silent = make(plan_of(noise_multiplier=0.0))
    assert silent["epsilon"] is None and silent["proven_epsilon"] is None
    assert "noise multiplier is 0" in silent["reasons"][0]
    plain = make(plan_of(private=False))
    assert plain["epsilon"] is None and plain["adversaries"] == [] and plain["adjacency"] == "none proven"
    assert "no differential privacy" in plain["reasons"][0] and plain["mechanism"].startswith("None")
    assert plain["epsilon_at_1e-5"] is None
    far = make(plan_of(trust="distributed", mechanism=DDGaussPlan(dimension=8, clip=1.0, granularity=1e6)))
    assert far["epsilon"] is None and "no finite ε" in far["reasons"][0]


def test_the_rounding_that_the_sensitivity_allows_for() -> None:
    assert make()["rounding"] == 2**-10
    assert "noise std / clip·(1 + 0.000977), which allows for rounding" in make()["mechanism"]
    whole_numbers = plan_of(**DISCRETE)
    assert make(whole_numbers)["rounding"] is None and "noise std / clip)" in make(whole_numbers)["mechanism"]
    assert make(whole_numbers, entries=[{"round": 0, "rounding": 0.5}, {"round": 1}])["rounding"] == 0.5
    assert make(plan_of(private=False), entries=[{"round": 0, "rounding": 0.5}])["rounding"] is None


def test_what_a_seeded_key_and_held_out_examples_do_not_cover() -> None:
    seeded, secure = make(seeded=True)["not_covered"], make(seeded=False)["not_covered"]
    assert any("high entropy" in line for line in seeded) and any("bit for bit" in line for line in seeded)
    assert not any("seed repeats the noise" in line for line in secure)
    assert any("they are clients' own" in line for line in make(facts={"held_out": True})["not_covered"])
    assert not any("they are clients' own" in line for line in make(facts={"held_out": False})["not_covered"])
    assert any("The 7 clients left out of training" in line for line in make(facts={"left_out": 7})["not_covered"])


@pytest.mark.parametrize(
    ("name", "options", "loaded", "found"),
    [
        ("ae-dpfl", {}, "digits", True),
        ("ae-dpfl", {}, "clients", False),
        ("ae-dpfl", {"public": "test"}, "digits", False),
        ("ae-dpfl", {"public": "digits"}, "digits", True),
        ("ae-dpfl", {"public": "digits"}, "clients", False),
        ("fed-smp-topk", {"public": "held-out"}, "digits", True),
        ("fed-smp-topk", {"public": "mnist"}, "digits", False),
        ("fed-smp-topk", {}, "digits", False),
        ("dp-fedavg", {}, "digits", False),
    ],
)
def test_examples_taken_from_clients_are_known_from_the_recipe(
    name: str, options: dict[str, Any], loaded: str, found: bool
) -> None:
    from fedflat.algorithms import ALGORITHMS
    from fedflat.assembly.stating import held_out

    assert held_out(ALGORITHMS[name](**options), "digits", loaded) == found


def test_published_shows_claimed_and_proven_together() -> None:
    plan = dataclasses.replace(plan_of(), protocol="published")
    found = make(plan, claimed=9.37, proven=1466.0, reasons=["per-tensor clip"], facts={"paper_items": [1, 5]})
    assert (found["claimed_epsilon"], found["proven_epsilon"], found["epsilon"]) == (9.37, 1466.0, 1466.0)
    assert found["reasons"] == ["per-tensor clip"] and [item["item"] for item in found["paper_items"]] == [1, 5]
    assert headline(found) == "claimed ε = 9.37 at δ = 0.002, proven ε = 1,466 (published procedure)"
    assert found["epsilon_at_1e-5"] is None and found["adversaries"] == []
    none = make(plan, claimed=9.37, reasons=["median clipping bounds nothing"])
    assert none["epsilon"] is None and none["proven_epsilon"] is None and len(none["reasons"]) == 2
    assert "proven ε = none" in headline(none)
    assert make(plan, claimed=9.37, proven=math.inf)["proven_epsilon"] is None


@pytest.mark.parametrize("proven", [None, 1466.0])
def test_no_sentence_gives_the_claimed_figure_without_the_proven_one(proven: float | None) -> None:
    plan = dataclasses.replace(plan_of(), protocol="published")
    found = make(plan, claimed=9.3719, proven=proven, reasons=["item 1"])
    for text in (headline(found), "\n".join(found["checklist"].values())):
        hits = [line for line in text.splitlines() if "9.37" in line]
        assert hits and all("proven ε = " in line for line in hits)


def test_a_simulated_population_is_named_and_is_not_the_proven_figure() -> None:
    plan = plan_of(noise_cohort=100)
    found = make(plan)
    assert found["simulated_epsilon"] == plan.simulated_epsilon() < found["proven_epsilon"] == plan.epsilon()
    proven, simulated = f"{plan.epsilon():.4g}", f"{plan.simulated_epsilon():.4g}"
    assert headline(found) == f"proven ε = {proven} at δ = 0.002; ε = {simulated} for the simulated larger population"
    assert any("noise_cohort" in reason for reason in found["reasons"])


def test_rounds_charged_counts_open_rounds_and_repeated_attempts() -> None:
    lines = [{"round": 0}, {"round": 1}, {"round": 1, "attempt": 2}, {"round": 2}]
    assert rounds_charged(2, lines) == 4 and rounds_charged(3, []) == 3
    found = make(rounds_run=2, entries=lines)
    assert found["rounds"] == 2 and found["rounds_charged"] == 4 and found["epsilon"] == plan_of().epsilon(4)
    assert any("2 events beyond the rounds run" in reason for reason in found["reasons"])


def test_events_with_less_noise_than_the_plans_are_not_stated_with_the_plans() -> None:
    """Forty-five events, thirty of them drawn with a smaller multiplier: all count as if they had the smaller one."""
    plan = build_plan(clients=100, cohort=10, rounds=15, noise_multiplier=4.0, delta=1e-3)
    lines = [{**plan.record(r, 1.0), "noise_multiplier": s} for s in (1.0, 1.0, 4.0) for r in range(15)]
    found = statement(plan, rounds_run=15, algorithm="a", facts={}, seeded=True, entries=lines)
    weaker = build_plan(clients=100, cohort=10, rounds=45, noise_multiplier=1.0, delta=1e-3)
    assert found["rounds_charged"] == 45 and found["epsilon"] == weaker.epsilon(45)
    assert found["epsilon"] < found["epsilon_at_1e-5"] and "σ = 1 = noise std" in found["mechanism"]
    alike = statement(plan, rounds_run=15, algorithm="a", facts={}, seeded=True, entries=lines[30:])
    assert alike["rounds_charged"] == 15 and alike["epsilon"] == pytest.approx(plan.epsilon(15))
    more = statement(plan, rounds_run=20, algorithm="a", facts={}, seeded=True, entries=lines[:15])
    assert more["rounds_charged"] == 20 and more["epsilon"] == weaker.epsilon(20)  # no line: as little noise as any


MIXED: dict[str, dict[str, Any]] = {
    "poisson": {}, "fixed": {"sampling": "fixed"}, "local": {"trust": "local", "max_participations": 4},
    "distributed": {"trust": "distributed", "cohort": 50}, "everyone": {"cohort": 100},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_lines_that_differ_in_their_noise_all_have_the_least(name: str) -> None:
    """No run of this program writes such a ledger; statement and verification bound it alike."""
    setting: dict[str, Any] = {"clients": 100, "cohort": 10, "rounds": 6, "delta": 1e-3, **MIXED[name]}
    plans = {sigma: build_plan(noise_multiplier=sigma, **setting) for sigma in (1.5, 3.0)}
    lines = [plans[1.5 if r < 3 else 3.0].record(r, 1.0) for r in range(6)]
    found = statement(plans[3.0], rounds_run=6, algorithm="a", facts={}, seeded=True, entries=lines)
    assert found["epsilon"] == plans[1.5].epsilon(6) > plans[3.0].epsilon(6)
    assert verify(lines, found["epsilon"]).ok and not verify(lines, 0.9 * found["epsilon"]).ok


def test_a_mechanism_with_its_own_account_is_bounded_by_the_least_noise() -> None:
    votes = VotesPlan(labels=1, total=10)
    setting: dict[str, Any] = {"clients": 100, "cohort": 10, "rounds": 5, "delta": 1e-3, "mechanism": votes}
    plan, weaker = (build_plan(noise_multiplier=sigma, **setting) for sigma in (4.0, 2.0))
    lines = [line for r in range(5) for line in (plan if r else weaker).records(r, 1.0)]
    found = statement(plan, rounds_run=5, algorithm="a", facts={}, seeded=True, entries=lines)
    assert len(lines) == 10 and found["epsilon"] == weaker.epsilon(5)


def test_next_to_no_noise_beside_other_noise_is_bounded_by_the_least() -> None:
    setting: dict[str, Any] = {"clients": 100, "cohort": 10, "rounds": 2, "delta": 1e-3}
    plan, weaker = (build_plan(noise_multiplier=sigma, **setting) for sigma in (1.0, 1e-4))
    lines = [plan.record(0, 1.0), weaker.record(1, 1.0)]
    found = statement(plan, rounds_run=2, algorithm="a", facts={}, seeded=True, entries=lines)
    assert found["epsilon"] == weaker.epsilon(2) and verify(lines, found["epsilon"]).ok
    assert not verify(lines, weaker.epsilon(1) * 0.9).ok


def test_what_is_not_covered_follows_from_what_ran() -> None:
    simulated = " ".join(make(seeded=True)["not_covered"])
    for word in ("hyper-parameters", "timing", "test data", "reproducible from the seed", "floating-point"):
        assert word in simulated, word
    assert "private/private.jsonl" in simulated
    assert "Personal parts" not in simulated and "server itself" in simulated
    deployed = make(
        plan_of(trust="distributed", min_cohort=28), facts={"simulation": False, "secure": True, "personal": True},
        seeded=False,
    )  # fmt: skip
    text = " ".join(deployed["not_covered"])
    assert "Personal parts" in text and "secure aggregation" in text and "private/private.jsonl" not in text
    assert "whoever knows the seed" not in text and "floating-point" not in text
    assert "operating-system entropy" in deployed["noise_source"] and "withstands" in deployed["floating_point"]
    assert deployed["epsilon_at_1e-5"] is None  # the chance of an abort alone exceeds it
    topped_up = " ".join(make(plan_of(**DISCRETE))["not_covered"])
    assert "Whether a client answers at all" in text and "Whether a client answers at all" not in topped_up
    assert "breaks secure aggregation" in topped_up
    local = " ".join(make(plan_of(trust="local"), facts={"finetuned": True})["not_covered"])
    assert "server itself" not in local and "secure aggregation" not in local and "fine-tuned" in local
    assert make(seeded=True)["noise_source"].startswith("simulation: noise reproducible from the seed")
    unknown = make(facts={"unidentified": True, "prior": "public natural data", "client_state": True})
    assert "never stored: the method or model given in Python" in unknown["noise_source"]
    text = " ".join(unknown["not_covered"])
    assert "The people in the data that the model was pretrained on" in text and "Clients' states" in text


def test_every_relation_of_the_guarantees_is_named() -> None:
    both = make(plan_of(mechanism=Mine()))
    assert [part.split(" ")[0].rstrip(":") for part in both["adjacency"].split("; ")] == [
        "add-remove", "replace-one", "add-remove", "odd",
    ]  # fmt: skip


def test_write_is_atomic_and_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privacy.json"
    found = make()
    os.umask(0o022)  # put back after each test
    write(path, found)
    found = {**found, "checksum": module.checksum(found)}
    assert json.loads(path.read_text(encoding="utf-8")) == found and "ε" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o644

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"privacy.json: the privacy statement could not be written \(No space left"):
        write(path, make(rounds_run=99))
    monkeypatch.undo()
    assert json.loads(path.read_text(encoding="utf-8")) == found and os.listdir(tmp_path) == ["privacy.json"]
    before = os.umask(0o077)  # a deployment's: its files are its own account's
    write(path, make())
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RunError, match="No such file"):
        write(tmp_path / "none" / "privacy.json", found)


def test_a_broken_statement_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text("{")
    assert not module.is_whole(tmp_path / "privacy.json")
    write(tmp_path / "privacy.json", make())
    assert module.is_whole(tmp_path / "privacy.json")


def test_charges_that_use_up_delta_leave_nothing_proven_and_say_why() -> None:
    again = [{"round": r % 10, "attempt": 1 + r // 10} for r in range(100)]
    found = make(plan_of(trust="distributed", min_cohort=28), entries=again)
    assert found["proven_epsilon"] is None and found["adversaries"] == []
    assert "an aborted round has chance" in found["reasons"][0] and "proven ε = none" in headline(found)


def test_the_mechanism_that_ran_is_named() -> None:
    assert "Gaussian noise on the sum" in make()["mechanism"]
    assert make(plan_of(**DISCRETE))["mechanism"].startswith("Discrete Gaussian shares")
    assert make(plan_of(mechanism=Mine()))["mechanism"].startswith("mine (")
    assert make(facts={"mechanism": "Votes."})["mechanism"].startswith("Votes. (")


def test_a_seeded_run_of_ones_own_clients_is_not_handed_over() -> None:
    """One on published data may be: nobody is behind it. One that the records say nothing of is taken as one's own."""
    module.refuse_seeded("export", {"caution": ""})
    module.refuse_seeded("export", {"caution": "seeded", "facts": {"own_clients": False}})
    for facts in ({}, {"facts": None}, {"facts": {"own_clients": True}}):
        with pytest.raises(InputError, match=r"export: found a run on clients of one's own with privacy\.randomness"):
            module.refuse_seeded("export", {"caution": "seeded", **facts})


def test_no_attacker_has_more_true_positives() -> None:
    """0.01·e^ε + δ; the Gaussian of that ε, whose best attacker is known, has fewer."""
    assert true_positives(0.0, 0.0) == 0.01 and true_positives(1000.0, 1e-5) == 1.0
    for mu in (0.1, 0.5, 1.0):
        assert float(norm.cdf(norm.ppf(0.01) + mu)) <= true_positives(gaussian_epsilon(mu, 1e-3), 1e-3)
