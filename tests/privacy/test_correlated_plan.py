"""The account of rounds that follow a schedule: known figures, both accountants, spans, ledger, verification."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedflat.core.checks import InputError
from fedflat.core.cohorts import SECRET, FromRound
from fedflat.privacy.accounting.budget import budget_table
from fedflat.privacy.accounting.curves import gaussian_epsilon, schedule_epsilon
from fedflat.privacy.accounting.epsilon import accounting_params, epsilon
from fedflat.privacy.accounting.factorisation import noise_in_model
from fedflat.privacy.correlated import ScheduledPlan
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.statement import rounds_charged, statement
from fedflat.privacy.trust import headline
from fedflat.privacy.verify import recompute, verify

BASE: dict[str, Any] = {
    "clients": 40, "cohort": 8, "rounds": 12, "sampling": "min-separation", "noise_multiplier": 0.9, "delta": 1e-3
}  # fmt: skip


def plan_of(**changes: Any) -> Plan:
    return build_plan(**{**BASE, **changes})


def mechanism(plan: Plan) -> ScheduledPlan:
    assert isinstance(plan.mechanism, ScheduledPlan)
    return plan.mechanism


def lines(plan: Plan, rounds: int, key: str = "a", start: int = 0) -> list[dict[str, Any]]:
    return [{**plan.record(t, 0.5), "key_id": key} for t in range(start, rounds)]


@pytest.mark.parametrize(
    ("target", "rounds", "bands", "secret", "full"),
    [(8, 60, 0.056, 0.073, 0.039), (8, 300, 0.226, 0.253, 0.196), (2, 60, 0.165, 0.146, 0.116)],
)
def test_known_figures(target: float, rounds: int, bands: float, secret: float, full: float) -> None:
    """Noise on the running sum, root mean square over the rounds, in units of C, for M = 500 and δ = 1/500."""

    def noise(size: int, **changes: Any) -> float:
        plan = build_plan(clients=500, cohort=size, rounds=rounds, epsilon=target, delta=1 / 500, **changes)
        own = isinstance(plan.mechanism, ScheduledPlan)
        each = noise_in_model(mechanism(plan).factor)[0] if own else math.sqrt((rounds + 1) / 2)
        return plan.std(1.0) / plan.divisor * each

    public = noise(50, sampling="min-separation", noise="toeplitz", bands=10)
    assert public == pytest.approx(bands, rel=0.01)
    assert noise(50) == pytest.approx(secret, rel=0.01)
    assert noise(500, sampling="full") == pytest.approx(full, rel=0.01)
    assert 2.2 < noise(50, sampling="min-separation") / public < 2.8


@pytest.mark.parametrize("kind", ["independent", "toeplitz", "banded", "tree"])
def test_one_gaussian_is_the_run(kind: str) -> None:
    plan = plan_of(noise=kind)
    own = mechanism(plan)
    k = math.sqrt(3)  # twelve rounds, five apart
    mu = k / 0.9 if kind == "independent" else 1 / 0.9
    assert plan.epsilon() == pytest.approx(gaussian_epsilon(mu, 1e-3), rel=1e-6)
    assert (own.record(plan)["participations"], own.separation, plan.relation) == (3, 5, "zero-out")
    assert plan.epsilon(0) == 0
    assert all(plan.epsilon(t) <= plan.epsilon(t + 1) for t in range(12))
    assert plan.epsilon(99) == plan.epsilon()
    assert plan_of(noise=kind, noise_multiplier=0).epsilon() == math.inf
    assert plan_of(noise=kind, noise_multiplier=0).std(1.0) == 0
    assert plan.std(2.0) == pytest.approx(0.9 * plan.sensitivity(2.0))
    assert plan.epsilon() < plan_of(noise=kind, accountant="rdp").epsilon() < plan.epsilon() * 1.3
    assert plan_of(noise=kind, noise_multiplier=None, epsilon=3.0).epsilon() == pytest.approx(3.0, rel=1e-3)
    assert own.epsilon(plan, 12, moved=2.0) == pytest.approx(gaussian_epsilon(2 * mu, 1e-3), rel=1e-6)


@pytest.mark.parametrize("kind", ["independent", "toeplitz", "banded"])
def test_cyclic_poisson_is_so_many_sampled_gaussians(kind: str) -> None:
    plan = plan_of(sampling="cyclic-poisson", cohort=4, separation=5, noise=kind, delta=1e-5)
    assert mechanism(plan).chance == 0.5
    assert plan.relation == "add-remove"
    same = build_plan(clients=40, cohort=20, rounds=3, noise_multiplier=0.9, delta=1e-5)
    assert plan.epsilon() == pytest.approx(same.epsilon())
    assert plan.epsilon(5) == pytest.approx(same.epsilon(1))
    certain = plan_of(sampling="cyclic-poisson", noise=kind, delta=1e-5)
    assert certain.epsilon() == pytest.approx(gaussian_epsilon(math.sqrt(3) / 0.9, 1e-5), rel=1e-6)


def test_budget_stops_in_time() -> None:
    plan = replace(plan_of(noise="toeplitz"), budget=plan_of(noise="toeplitz").epsilon(6))
    assert plan.rounds_within_budget() == 10  # the third turns begin with round 10


def test_another_key_is_another_span() -> None:
    plan = plan_of(noise="banded")
    entries = lines(plan, 7) + [{**e, "attempt": 2, "reason": "r"} for e in lines(plan, 7, "b", 6)]
    going_on = plan.standing(entries, "b", 6)
    assert mechanism(going_on).spans == ((0, 7),)
    assert mechanism(going_on).start == 6
    assert plan.again(entries) == 0
    assert going_on.epsilon() > plan.epsilon()
    own = mechanism(plan)
    moved = own.factor.sensitivity(5, 0, 7) ** 2 + own.factor.sensitivity(5, 6, 12) ** 2
    assert going_on.epsilon() == pytest.approx(gaussian_epsilon(math.sqrt(moved) / (0.9 * own.scale), 1e-3))
    entries += lines(going_on, 12, "b", 7)
    assert mechanism(plan.standing(entries)).start == 6
    assert mechanism(plan.standing(lines(plan, 3), "new", 3)).spans == ((0, 3),)
    assert recompute(entries).epsilon == pytest.approx(going_on.epsilon(), rel=1e-6)
    plain = build_plan(clients=9, cohort=3, rounds=2, noise_multiplier=1.0)
    assert plain.standing(entries).mechanism is None
    assert (plain.again(entries), plain.again(entries, 3, "b")) == (1, 3)  # rounds 4 and 5 are yet to be drawn again
    lost = [{**e, "reason": "lost"} for e in lines(plan, 9, "lost", 6)]  # charged after the first lines of b
    late = plan.standing([*lines(plan, 6), *lines(plan, 7, "b", 6), *lost, *lines(plan, 8, "b", 7)])
    assert mechanism(late).spans == ((0, 6), (6, 9))
    doubled = plan_of(sampling="cyclic-poisson", noise="banded")
    twice = doubled.standing(lines(doubled, 12), "b", 0)
    assert twice.epsilon() == pytest.approx(gaussian_epsilon(math.sqrt(6) / 0.9, 1e-3), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "bands", "sampling"),
    [
        *itertools.product(["independent", "toeplitz", "banded"], [None], ["min-separation", "cyclic-poisson"]),
        ("tree", None, "min-separation"), ("toeplitz", 8, "min-separation"), ("toeplitz", 3, "full"),
    ],
)  # fmt: skip
def test_the_ledger_alone_gives_epsilon(kind: str, bands: int | None, sampling: str) -> None:
    size = 40 if sampling == "full" else 4
    plan = plan_of(noise=kind, bands=bands, sampling=sampling, cohort=size, separation=None if size == 40 else 5)
    entries = lines(plan, 12)
    found = verify(entries, plan.epsilon())
    assert found.ok
    assert found.epsilon_recomputed == pytest.approx(plan.epsilon(), rel=2e-3)
    assert not verify(entries, plan.epsilon() * 0.98).ok
    assert not verify(entries, plan.epsilon(11) * 0.98).ok


def test_a_column_that_says_less_is_seen() -> None:
    plan = plan_of(noise="banded")
    honest = lines(plan, 12)
    assert not verify([{**e, "column": [2 * c for c in e["column"]]} for e in honest], plan.epsilon()).ok
    assert not verify([{**e, "std": e["std"] / 2} for e in honest], plan.epsilon()).ok
    assert not verify([{**e, "separation": 3} for e in honest], plan.epsilon()).ok
    without = [{k: v for k, v in e.items() if k != "column"} for e in honest]
    assert any("every parameter" in note for note in verify(without, plan.epsilon()).notes)
    assert verify([{**e, "std": 0.0} for e in honest], None).epsilon_recomputed == math.inf
    mixed = [{**e, "column": [1.0, -0.5, 0.2, 0.1, 0.3, 0.2]} for e in honest]  # wider than the gaps, and of any sign
    assert recompute(mixed).epsilon > 0
    assert any("no C has such columns" in note for note in verify(mixed, None).notes)


@pytest.mark.parametrize(
    ("sampling", "kind", "field", "value"),
    [
        ("min-separation", "banded", "separation", 12), ("cyclic-poisson", "banded", "chance", 0.05),
        ("min-separation", "tree", "noise", "independent"), ("cyclic-poisson", "toeplitz", "participations", 1),
        ("min-separation", "banded", "factor", "0" * 64), ("min-separation", "banded", "row_norm", 0.1),
        ("min-separation", "toeplitz", "column", [0.5, 0, 0, 0, 0]), ("min-separation", "tree", "rounds", 6),
        ("min-separation", "tree", "factor", "0" * 64), ("min-separation", "tree", "row_norm", 0.1),
        ("cyclic-poisson", "banded", "separation", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", [slice(0, 1), slice(5, 6), slice(0, 12)])
def test_a_line_that_says_anything_else_is_seen(sampling: str, kind: str, field: str, value: Any, where: slice) -> None:
    """Whoever writes the chain anew: every ε that is stated is at least what the lines give, so only notes can tell."""
    plan = plan_of(sampling=sampling, noise=kind, cohort=4, separation=5)
    honest = lines(plan, 12)
    assert verify(honest, plan.epsilon()).ok
    assert not verify([{**e, field: value} if e in honest[where] else e for e in honest], plan.epsilon()).ok


def test_the_tree_of_an_ended_run_is_checked_too() -> None:
    """It follows from the number of rounds; of other factors the columns that are there contradict nothing."""
    for kind in ("banded", "tree"):
        plan = plan_of(noise=kind)
        entries = lines(plan, 5)
        assert verify(entries, plan.epsilon()).ok
    assert not verify([line | {"factor": "0" * 64} for line in entries], plan.epsilon()).ok


def test_statement_says_what_is_and_what_is_not() -> None:
    plan = plan_of(noise="banded")
    entries = lines(plan, 12)
    arguments: dict[str, Any] = {"algorithm": "dp-fedavg", "facts": {"clip": 0.5}, "seeded": True}
    found = statement(plan, rounds_run=12, entries=entries, **arguments)
    assert found["epsilon"] == pytest.approx(plan.epsilon())
    assert "zero-out in place" in found["adjacency"]
    assert any("exchanging its data" in text for text in found["not_covered"])
    early = statement(plan, rounds_run=3, entries=entries[:3], **arguments)
    assert early["epsilon"] == pytest.approx(plan.epsilon())
    assert any("12 planned rounds" in reason for reason in early["reasons"])
    in_time = statement(replace(plan, budget=plan.epsilon(6)), rounds_run=10, entries=entries[:10], **arguments)
    assert in_time["epsilon"] == pytest.approx(plan.epsilon(10))
    two = statement(plan, rounds_run=12, entries=[*entries[:7], *lines(plan, 12, "b", 6)], **arguments)
    assert two["epsilon"] > found["epsilon"]
    assert any("2 noise keys" in reason for reason in two["reasons"])
    cyclic = plan_of(sampling="cyclic-poisson", noise="banded")
    text = statement(cyclic, rounds_run=12, entries=lines(cyclic, 12), **arguments)
    assert not any("exchanging its data" in item for item in text["not_covered"])


def test_sentences() -> None:
    assert "one Gaussian mechanism" in mechanism(plan_of(noise="banded")).sentence
    assert "one Gaussian mechanism" in mechanism(plan_of(noise="tree")).sentence
    cyclic = mechanism(plan_of(sampling="cyclic-poisson", noise="banded"))
    assert "one Poisson-sampled" in cyclic.sentence
    assert "row_norm" not in cyclic.by_round(plan_of(), 12)


def test_a_round_that_is_drawn_again_has_one_line_more(tmp_path: Path) -> None:
    """ε of the lines follows the spans, which a new key changes; the event is the same one."""
    plan = plan_of(noise="banded")
    with Ledger.open(tmp_path / "ledger.jsonl", key_id="a") as ledger:
        for t in range(7):
            ledger.append(plan.record(t, 0.5))
        for key in ("b", "c"):
            ledger.use_key(key)
            ledger.charge_again("the key is gone", round=6)
            ledger.append(plan.standing(ledger.entries, key, 6).record(6, 0.5))
        assert [entry["key_id"] for entry in ledger.entries if entry["round"] == 6] == ["a", "b", "c"]
        assert rounds_charged(7, ledger.entries) == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": "poisson", "noise": "banded"}, "full, min-separation or cyclic-poisson"),
        ({"sampling": "fixed", "noise": "tree"}, "full, min-separation or cyclic-poisson"),
        ({"sampling": "cyclic-poisson", "noise": "tree"}, "banded or toeplitz"),
        ({"trust": "local", "noise": "banded"}, "central with banded noise"),
        ({"trust": "distributed"}, "trust: central only"),
        ({"noise": "banded", "adaptive": True}, "one constant clip"),
        ({"noise_cohort": 80.0}, "nothing with a schedule"),
        ({"bands": 3, "sampling": "poisson"}, "nothing with kind: independent"),
        ({"noise": "banded", "bands": 6}, "at most 5"),
    ],
)
def test_what_is_not_proven_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan_of(**changes)


def test_a_method_with_noise_of_its_own_is_refused() -> None:
    class ClientContext:
        name = "ae-dpfl"

    with pytest.raises(InputError, match="plain Gaussian"):
        plan_of(mechanism=ClientContext())
    assert FromRound(4, 2).separation == 1


def test_an_adaptive_clip_keeps_its_count_with_independent_noise() -> None:
    plan = plan_of(adaptive=True, count_noise=2.0)
    assert verify(lines(plan, 12), plan.epsilon()).ok
    assert not verify(lines(plan, 12), plan.epsilon() * 0.9).ok


def test_known_cohorts_cost_more_than_secret_coins() -> None:
    plan = plan_of(sampling="cyclic-poisson", cohort=4, separation=5, noise="banded", delta=1e-5)
    assert mechanism(plan).known_epsilon(plan, 12) == schedule_epsilon(3, 0.5, 0.9, 1e-5) > plan.epsilon()
    assert mechanism(plan).known_epsilon(plan, 0) == 0


def test_plain_accounts_count_a_clients_own_turns() -> None:
    """`fedflat.epsilon` with a schedule and independent noise: the plan's figure, and no binomial of public turns."""
    setting: dict[str, Any] = {"clients": 40, "cohort": 8, "rounds": 12, "noise_multiplier": 0.9, "delta": 1e-3}
    assert epsilon(**setting, sampling="min-separation") == pytest.approx(plan_of().epsilon(), rel=1e-6)
    one = epsilon(**{**setting, "cohort": 40}, sampling="full")
    assert one == pytest.approx(gaussian_epsilon(math.sqrt(12) / 0.9, 1e-3), rel=1e-6)
    with pytest.raises(InputError, match="trust: central only"):
        epsilon(**setting, sampling="min-separation", trust="distributed")
    made = accounting_params(**setting, sampling="cyclic-poisson")
    assert plan_of(sampling="cyclic-poisson").epsilon() == pytest.approx(headline(made), rel=1e-6)
    rows = budget_table(**setting, only={"sampling": "min-separation", "trust": "central"})
    assert rows[0]["epsilon"] == pytest.approx(plan_of().epsilon(), rel=1e-6)
    assert {row["sampling"] for row in budget_table(**setting, only={"accountant": "gdp"})} <= {*SECRET, "any"}
