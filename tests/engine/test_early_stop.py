"""``on_round`` reads the released model and may end a run by it: the whole plan is charged, private values may not."""

from pathlib import Path

import pytest
import torch
from small_runs import module, pairs, weights
from small_runs import recipe as small

import fedflat
from fedflat.core import process
from fedflat.engine.job import NOT_RUN
from fedflat.privacy.accounting.epsilon import epsilon
from fedflat.privacy.ledger import read
from fedflat.simulation.recomputed import Records, second_account

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

ROUNDS = 6


def recipe(**privacy: object) -> dict[str, object]:
    return small(rounds=ROUNDS, cohort={"size": 4}, privacy={"delta": 0.01, **privacy})


def given() -> dict[str, object]:
    return {"model": module(), "clients": pairs([6] * 8)}


def whole_plan() -> float:
    return epsilon(clients=8, cohort=4, rounds=ROUNDS, noise_multiplier=1.0, delta=0.01)


def end_after(rounds: int):
    return lambda record, state: state.round == rounds


def test_the_released_model_can_be_read_and_not_be_changed(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def look(record: dict[str, object], state: fedflat.RoundResult) -> None:
        copy = state.model()
        assert not copy.training and state.round == record["round"] + 1
        seen.append(weights(copy))
        assert torch.equal(seen[-1], state.weights)
        for parameter in copy.parameters():
            parameter.data.zero_()
        state.weights.zero_()

    watched = fedflat.run(recipe(), **given(), on_round=look)
    plain = fedflat.run(recipe(), **given())
    assert len(seen) == ROUNDS and torch.equal(weights(watched.model), weights(plain.model))


def test_an_early_end_costs_the_whole_plan(tmp_path: Path) -> None:
    result = fedflat.run(recipe(), **given(), out=tmp_path / "run", on_round=end_after(2))
    assert result.stopped == "ended early after 2 rounds by what was released" and len(result.history) == 2
    assert result.privacy["proven_epsilon"] == pytest.approx(whole_plan(), rel=1e-6)
    assert any(NOT_RUN in reason for reason in result.privacy["reasons"])
    assert second_account(Records(tmp_path / "run")).ok
    in_memory = fedflat.run(recipe(), **given(), on_round=end_after(2))
    assert in_memory.privacy["proven_epsilon"] == result.privacy["proven_epsilon"]


def test_what_was_charged_is_there_to_go_on_with(tmp_path: Path) -> None:
    fedflat.run(recipe(), **given(), out=tmp_path / "run", on_round=end_after(2))
    went_on = fedflat.run(recipe(), **given(), out=tmp_path / "run", resume=True)
    assert len(went_on.history) == ROUNDS and not went_on.stopped
    assert len(read(tmp_path / "run" / "ledger.jsonl")) == ROUNDS  # no event is charged twice
    assert went_on.privacy["proven_epsilon"] == pytest.approx(whole_plan(), rel=1e-6)
    straight = fedflat.run(recipe(), **given())
    assert torch.equal(weights(went_on.model), weights(straight.model))


def test_with_correlated_noise_the_planned_run_is_stated_anyway() -> None:
    made = recipe(noise={"kind": "banded"})
    made["cohort"] = {"size": 4, "sampling": "min-separation"}
    early = fedflat.run(made, **given(), on_round=end_after(2))
    assert early.privacy["proven_epsilon"] == fedflat.run(made, **given()).privacy["proven_epsilon"]


def test_an_end_that_private_values_may_have_decided_is_refused() -> None:
    def peek(record: dict[str, object], state: fedflat.RoundResult) -> bool:
        return state.private["cohort"] > 0

    with pytest.raises(fedflat.InputError, match=r"on_round: found a run ended by .* read state\.private"):
        fedflat.run(recipe(), **given(), on_round=peek)


@pytest.mark.parametrize("returned", [None, 1, "yes"])
def test_only_true_ends_a_run(returned: object) -> None:
    assert len(fedflat.run(recipe(), **given(), on_round=lambda record, state: returned).history) == ROUNDS


def test_true_after_the_last_round_is_no_early_end() -> None:
    assert fedflat.run(recipe(), **given(), on_round=end_after(ROUNDS)).stopped == ""


def test_a_method_without_privacy_has_nothing_to_charge() -> None:
    made = recipe() | {"algorithm": "fedavg", "privacy": {}}
    assert fedflat.run(made, **given(), on_round=end_after(2)).privacy["proven_epsilon"] is None


def test_an_interruption_says_under_what_condition_its_epsilon_holds() -> None:
    asked = iter((False, False, True))
    cut = fedflat.run(recipe(), **given(), should_stop=lambda: next(asked)).privacy
    (said,) = [reason for reason in cut["reasons"] if "unless what was released decided" in reason]
    assert cut["proven_epsilon"] < whole_plan() and f"ε = {whole_plan():.4g}" in said and "2 rounds, of 6" in said
    for ended in (fedflat.run(recipe(), **given()), fedflat.run(recipe(), **given(), on_round=end_after(2))):
        assert not any("decided when to stop" in reason for reason in ended.privacy["reasons"])


def test_an_end_after_private_values_were_read_is_warned_of() -> None:
    seen: list[object] = []
    looks = lambda record, state: seen.append(state.private) or False  # type: ignore[func-returns-value]  # noqa: E731
    counts = lambda record, state: seen.append(record) or False  # type: ignore[func-returns-value]  # noqa: E731
    for on_round, warned in ((looks, True), (counts, False)):
        seen.clear()
        cut = fedflat.run(recipe(), **given(), on_round=on_round, should_stop=lambda: len(seen) == 2)
        assert len(cut.history) == 2 and any("no ε covers it" in said for said in cut.warnings) is warned
    process._asked.append(2)  # by Ctrl-C: the command line shows private values, and they decide nothing
    try:
        seen.clear()
        cut = fedflat.run(recipe(), **given(), on_round=looks, should_stop=lambda: len(seen) == 2)
    finally:
        process.forget_signals()
    assert len(cut.history) == 2 and not any("no ε covers it" in said for said in cut.warnings)


def test_what_cannot_be_called_is_told_before_anything_is_trained() -> None:
    for name in ("on_round", "on_start", "should_stop"):
        with pytest.raises(fedflat.InputError, match=f"{name}: found 3; allowed: a function, or None"):
            fedflat.run("no such recipe", **{name: 3})  # type: ignore[arg-type]
