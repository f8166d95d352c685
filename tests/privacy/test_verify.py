"""ε from the ledger alone: equal to the plan's by other means, and lower statements, edits and gaps are found."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedflat.core.checks import InputError
from fedflat.methods.published import Published, published_plan, with_tensors
from fedflat.privacy import verify as module
from fedflat.privacy.ledger import Ledger, run_of
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.verify import multiplier, participation, poisson, recompute, verify
from fedflat.simulation.recomputed import Records, second_account


def plan_of(**change: Any) -> Plan:
    facts = {"clients": 500, "cohort": 50, "rounds": 40, "noise_multiplier": 0.95, "delta": 1 / 500, **change}
    return build_plan(**facts)


def lines(plan: Plan, rounds: int | None = None) -> list[dict[str, Any]]:
    one = plan.record(0, 0.2)
    return [{**one, "round": index} for index in range(plan.rounds if rounds is None else rounds)]


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "poisson": ({}, "own integration"),
    "poisson, fft": ({"accountant": "fft", "noise_multiplier": 3.0}, "dp-accounting PLD"),
    "everyone": ({"cohort": 500}, "exact Gaussian"),
    "adaptive": ({"adaptive": True}, "own integration"),
    "adaptive, fixed": ({"adaptive": True, "sampling": "fixed"}, "schedule revealed"),
    "larger noise cohort": ({"noise_cohort": 100}, "own integration"),
    "truncated": (
        {"sampling": "truncated", "max_cohort": 12, "clients": 60, "cohort": 6, "noise_multiplier": 6.0},
        "dp-accounting PLD",
    ),
    "never truncated": ({"sampling": "truncated", "max_cohort": 500}, "own integration"),
    "fixed": ({"sampling": "fixed"}, "schedule revealed"),
    "distributed": ({"trust": "distributed"}, "mixture over participations"),
    "distributed, fixed": ({"trust": "distributed", "sampling": "fixed"}, "mixture over participations"),
    "distributed, colluders": ({"trust": "distributed", "colluders": 5}, "mixture over participations"),
    "local": ({"trust": "local"}, "exact Gaussian"),
    "local, capped": ({"trust": "local", "max_participations": 7}, "exact Gaussian"),
}


@functools.cache
def stated(name: str) -> tuple[Plan, float]:
    """A law's plan and its figure."""
    plan = plan_of(**PLANS[name][0])
    return plan, plan.epsilon()


@functools.cache
def recomputed(name: str) -> tuple[Any, Any]:
    """A law's figure from its lines, and as it is before the formula it was stated by has its say; some take seconds,
    and two tests look at each."""
    before: list[Any] = []
    honest = module._not_shortened
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_not_shortened", lambda found, *rest: before.append(found) or honest(found, *rest))
        found = recompute(lines(stated(name)[0]))
    return found, before[0] if before else found


@pytest.mark.parametrize("name", PLANS)
def test_every_law_is_recomputed_to_the_plans_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = PLANS[name][1]
    plan, epsilon = stated(name)
    recorded, once = lines(plan), recomputed(name)[0]
    monkeypatch.setattr(module, "recompute", lambda *_, **__: once)
    found = verify(recorded, epsilon, released=range(plan.rounds))
    assert found.ok and found.notes == () and method in found.method
    assert found.epsilon_recomputed == pytest.approx(epsilon, rel=1e-3)
    # A statement that leaves out five rounds, or a tenth of ε, is found.
    low = verify(recorded, plan.epsilon(plan.rounds - 5))
    assert low.ok == (name == "local, capped") and (low.ok or "the ledger's events give" in low.notes[0])
    assert not verify(recorded, 0.9 * epsilon).ok


@pytest.mark.parametrize("name", ["poisson", "poisson, fft", "truncated", "never truncated", "fixed", "everyone"])
def test_a_statement_half_a_percent_short_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to rounding, 1e-6. The twin knows only the second accountant's slack: fixed and truncated pass."""
    (plan, epsilon), (once, without) = stated(name), recomputed(name)
    recorded = lines(plan)
    monkeypatch.setattr(module, "recompute", lambda *_, **__: once)
    assert verify(recorded, epsilon).ok and verify(recorded, epsilon * (1 - 1e-7)).ok
    for share in (0.1, 0.005, 1e-5):
        short = verify(recorded, epsilon * (1 - share))
        assert not short.ok and "the ledger's events give" in short.notes[0]
    monkeypatch.setattr(module, "recompute", lambda *_, **__: without)
    assert verify(recorded, epsilon * (1 - 0.005)).ok == (name in ("truncated", "fixed", "poisson, fft"))


def test_a_tighter_statement_than_rdps_is_no_fault() -> None:
    plan = plan_of(accountant="rdp")
    found = verify(lines(plan), plan.epsilon())
    assert found.ok and found.epsilon_recomputed < 0.95 * found.epsilon_recorded
    assert verify(lines(plan), 0.99 * plan.epsilon()).ok
    assert not verify(lines(plan), 0.8 * plan.epsilon()).ok


@pytest.mark.parametrize("paper", ["000", "003", "004"])
def test_a_published_procedures_messages_are_recomputed(paper: str) -> None:
    """The proven figure, by the direct sum; the paper's own, smaller one is no statement that these lines bear out."""
    facts = {"clients": 500, "cohort": 50, "rounds": 20, "noise_multiplier": 0.95, "delta": 1 / 500, "clip": 0.2}
    plan = with_tensors(published_plan(paper, epochs=True, **facts), 8)  # type: ignore[arg-type]
    recorded = lines(plan)
    found = verify(recorded, plan.epsilon(), released=range(20))
    assert found.ok and found.notes == () and "a client's messages" in found.method
    assert found.epsilon_recomputed == pytest.approx(plan.epsilon(), rel=1e-3)
    assert isinstance(plan.mechanism, Published)
    claimed = verify(recorded, plan.mechanism.claimed(plan, 20))
    assert not claimed.ok and "the ledger's events give" in claimed.notes[0]
    assert not verify(recorded, 0.9 * plan.epsilon()).ok


def test_a_message_that_nothing_bounds_has_no_finite_figure() -> None:
    facts = {"clients": 500, "cohort": 50, "rounds": 3, "noise_multiplier": 0.95, "delta": 1 / 500}
    plan = published_plan("002", epochs=True, **facts)  # type: ignore[arg-type]
    assert recompute(lines(plan)).epsilon == math.inf
    assert verify(lines(plan), math.inf).ok and not verify(lines(plan), 100.0).ok


def test_the_pinned_figures_of_the_papers() -> None:
    assert poisson(0.1, 0.95, 300, 1 / 500).epsilon == pytest.approx(9.37, abs=0.006)
    assert participation(30, 1.0, 0.95, 1 / 500) == pytest.approx(32.4, abs=0.05)
    assert participation(30, 1.0, 0.475, 1 / 500) == pytest.approx(98.8, abs=0.05)
    assert participation(1, 1.0, 3.0, 1e-5) == pytest.approx(1.27, abs=0.005)


def test_next_to_no_noise_is_as_if_cohorts_were_seen() -> None:
    plan = plan_of(noise_multiplier=1e-4, rounds=2)
    found = verify(lines(plan), plan.epsilon())
    assert found.ok and found.method.startswith("schedule seen") and not verify(lines(plan), 0.9 * plan.epsilon()).ok


def test_no_noise_no_rounds_and_no_bound() -> None:
    for change in ({}, {"sampling": "fixed"}, {"sampling": "truncated", "max_cohort": 70}, {"trust": "local"}):
        silent = plan_of(noise_multiplier=0.0, **change)
        found = verify(lines(silent), None)
        assert found.ok and found.epsilon_recomputed == math.inf == found.epsilon_recorded
        assert not verify(lines(silent), 5.0).ok
    assert recompute([]).epsilon == 0 and verify([], 0.0).ok
    assert participation(10, 0.1, 1e9, 0.01) == 0.0 and participation(10, 0.1, 1.0, 0.0) == math.inf
    assert participation(3, 0.3, math.inf, 1e-3) == 0.0
    assert recompute([{**line, "cohort_min": 600} for line in lines(plan_of(trust="distributed"))]).epsilon == math.inf


def test_the_multiplier_comes_from_what_was_drawn() -> None:
    line = plan_of().record(0, 0.2)
    assert multiplier(line) == pytest.approx(0.95)
    assert multiplier({**line, "std": None}) == multiplier({**line, "sensitivity": None}) == 0.0
    assert multiplier({**line, "sensitivity": 0.0}) == math.inf
    assert multiplier({**line, "count_std": 0.0}) == 0.0
    adaptive = plan_of(adaptive=True).record(0, 0.2)
    assert adaptive["std"] / 0.2 > 0.95 and multiplier(adaptive) == pytest.approx(0.95)
    found = verify([{**line, "std": line["std"] / 2, "round": index} for index in range(40)], plan_of().epsilon())
    assert not found.ok and found.notes[0] == "round 0 accounts a noise multiplier of 0.95, but drew 0.475"
    assert len(found.notes) == 6 and "the ledger's events give" in found.notes[-1]


def test_a_sensitivity_without_the_rounding_that_a_line_names_is_found() -> None:
    """And a ledger of an earlier version, which names none, is read as before."""
    honest = lines(plan_of(sampling="fixed"), 2)
    assert verify(honest, math.inf).ok
    small = [{**e, "sensitivity": e["clip"] * 2, "std": e["clip"] * 0.95} for e in honest]
    found = verify(small, math.inf)
    assert not found.ok
    assert found.notes[0] == "round 0 accounts a sensitivity of 0.4; its clip, with rounding, is 0.400391"
    assert verify([{k: v for k, v in e.items() if k != "rounding"} for e in small], math.inf).ok


def test_two_laws_in_one_ledger_are_not_guessed_at() -> None:
    mixed = lines(plan_of(), 2) + lines(plan_of(sampling="fixed"), 2)
    with pytest.raises(
        InputError, match=r"ledger: found 2 mechanisms, cohort laws or trust models; allowed: one per run"
    ):
        recompute(mixed)
    assert not verify(mixed, 5.0).ok and verify(mixed, None).ok
    fixed = lines(plan_of(sampling="fixed"), 2)
    with pytest.raises(InputError, match="cohorts or clients that differ between lines"):
        recompute([fixed[0], fixed[1] | {"q": 1.0}])


def test_a_redone_ledger_with_other_things_than_numbers_is_wrong() -> None:
    for name, value in itertools.product(("std", "q", "selection", "separation"), ("x", [])):
        found = verify([{**line, name: value} for line in lines(plan_of(), 2)], 5.0)
        assert not found.ok and found.epsilon_recomputed == math.inf and found.notes
    alone = [{**line, "clients": 1, "sampling": "fixed"} for line in lines(plan_of(), 2)]  # dp-accounting asserts
    assert not verify(alone, 5.0).ok and run_of([{"run": "x"}]) == {}


def test_a_second_attempt_counts() -> None:
    plan = plan_of()
    twice = [*lines(plan), *({**line, "attempt": 2} for line in lines(plan, 10))]
    assert recompute(twice).epsilon == pytest.approx(plan.epsilon(50), rel=1e-3) and plan.epsilon(50) > plan.epsilon()


def test_ddgauss_is_recomputed_from_its_own_fields() -> None:
    from fedflat.methods.plans import DDGaussPlan

    plan = plan_of(trust="distributed", mechanism=DDGaussPlan(dimension=100, clip=0.2), rounds=20)
    found = verify(lines(plan), plan.epsilon())
    assert found.ok and found.epsilon_recomputed == pytest.approx(plan.epsilon(), rel=1e-9)
    assert not verify(lines(plan), 0.99 * plan.epsilon()).ok
    broken = [{key: value for key, value in line.items() if key != "granularity"} for line in lines(plan)]
    assert "no granularity" in verify(broken, 5.0).notes[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = plan_of()
    with Ledger.open(tmp_path / "ledger.jsonl") as ledger:
        for line in lines(plan):
            ledger.append(line)
    records = [json.dumps({"round": index, "epsilon": plan.epsilon(index + 1)}) for index in (0, 39)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    state(tmp_path, plan.epsilon())
    return tmp_path


def state(folder: Path, epsilon: float | None) -> None:
    (folder / "privacy.json").write_text(json.dumps({"proven_epsilon": epsilon, "delta": 1 / 500}))


def test_an_honest_run_verifies(run: Path) -> None:
    found = second_account(Records(run))
    assert found.ok and found.notes == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.ok = False  # type: ignore[misc]


def test_a_statement_lower_than_the_ledger_or_the_metrics_is_found(run: Path) -> None:
    state(run, 1.0)
    found = second_account(Records(run))
    assert not found.ok and "stated ε = 1, but the ledger's events give" in found.notes[0]
    assert "stated ε = 1, but metrics.jsonl ends at" in found.notes[1]


def test_a_released_round_without_a_line_is_found(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 40, "epsilon": null}\n')
    assert second_account(Records(run)).notes == ("released without a ledger line: round 40",)
    cut = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)[:39]
    (run / "ledger.jsonl").write_bytes(b"".join(cut))  # whole lines cut off the end leave the chain intact
    assert second_account(Records(run)).notes == ("released without a ledger line: round 39, 40",)


def test_an_edited_ledger_is_found(run: Path) -> None:
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"noise_multiplier":0.95', b'"noise_multiplier":0.96', 1))
    found = second_account(Records(run))
    assert not found.ok and "ledger.jsonl line 0: found a 'checksum'" in found.notes[0]
    assert found.epsilon_recomputed == math.inf
    state(run, None)
    assert not second_account(Records(run)).ok


def test_a_run_that_promises_nothing_needs_no_ledger(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    assert "No such file" in second_account(Records(run)).notes[0]
    state(run, None)
    (run / "metrics.jsonl").unlink()
    found = second_account(Records(run))
    assert found.ok and found.epsilon_recorded == math.inf


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("privacy.json", "{", "privacy.json: found a damaged record; allowed: the file as it was written"),
        ("privacy.json", "[]", "privacy.json: found a damaged record"),
        ("privacy.json", f'{{"proven_epsilon": {10**400}}}', "privacy.json: found 1000"),
        ("privacy.json", '{"proven_epsilon": NaN}', "privacy.json: found nan"),
        ("privacy.json", '{"proven_epsilon": "eight"}', "privacy.json: found eight"),
        ("metrics.jsonl", '{"round": Infinity}\n', "metrics.jsonl: found a damaged record"),
        ("metrics.jsonl", '{"round": 0, "epsilon": "1"}\n', "metrics.jsonl: found 1"),
        ("metrics.jsonl", '{"round": 0}\n[1]\n', "metrics.jsonl: found a damaged record"),
    ],
)
def test_unreadable_files_are_named(run: Path, name: str, text: str, sentence: str) -> None:
    (run / name).write_text(text)
    with pytest.raises(InputError, match=sentence):
        second_account(Records(run))
