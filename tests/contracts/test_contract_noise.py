"""Contracts 3 to 5: the noise is what the plan says and what the ledger is charged for, whoever takes part."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aggregations as agg
import numpy as np
import pytest
import torch
from scipy import optimize, stats
from small_federation import PRIVATE, SIZES, Fragile, at_the_sum, beginning, clients, job, module, recipe, weights
from torch import Tensor

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.core.cohorts import Poisson
from fedflat.core.rounding import ROUNDING
from fedflat.engine.job import Job
from fedflat.engine.round import accumulator_of, broadcast_of, finish_round
from fedflat.privacy.trust import round_event

WIDE = 1500  # hidden units: about 15,000 weights
RARE = 0.01  # expected cohort


def sums(made: Job, rounds: int, key: bytes = agg.KEY, members: int = 0) -> list[Tensor]:
    """The noisy sums of rounds in which ``members`` clients sent zero."""
    made = at_the_sum(made)
    parts, found, (state, _) = made.parts, [], beginning(made)
    for _ in range(rounds):
        broadcast = broadcast_of(parts, state, 3)
        accumulator = accumulator_of(parts, broadcast, key)
        for _ in range(members):
            accumulator.add(torch.zeros(parts.message_length), [0])
        state, _ = finish_round(parts, replace(state, clip=broadcast.clip), broadcast, accumulator.result(), key, print)
        drawn = parts.algorithm.server[0].mean.double() * parts.plan.divisor
        found.append(drawn if broadcast.mask is None else drawn[broadcast.mask])
        if broadcast.mask is not None:
            assert not bool((state.shared - broadcast.shared)[~broadcast.mask].any())
        state = replace(state, shared=torch.zeros_like(state.shared))
    return found


def fits(noise: Tensor, std: float) -> bool:
    """Kolmogorov–Smirnov: not told apart from N(0, std²) at level 10⁻⁶."""
    return bool(stats.kstest(noise.numpy(), "norm", args=(0.0, std)).pvalue > 1e-6)


@pytest.mark.parametrize("method", PRIVATE)
def test_the_drawn_noise_has_the_stated_std(method: str) -> None:
    made = job(method, network=module(WIDE))
    std = made.parts.plan.std(made.parts.clip.bound(made.threshold))
    assert std == pytest.approx(1.5 * 0.2 * (1 + ROUNDING), rel=1e-12)
    (noise,) = sums(made, 1)
    assert fits(noise, std)
    assert not fits(noise, std * 2 / 3)
    assert not fits(noise, std * 3 / 2)


@pytest.mark.parametrize(
    ("changes", "expected", "members"),
    [
        ({"privacy": {"clip": {"kind": "per-tensor", "values": 0.2}}}, 1.5 * 0.4, 0),
        ({"privacy": {"clip": {"kind": "adaptive", "initial": 0.3, "count_noise": 2.0}}}, None, 0),
        ({"privacy": {"noise_cohort": 20}}, 1.5 * 0.2 * 5 / 20, 0),
        ({"privacy": {"trust": "local"}}, 1.5 * 0.2 * math.sqrt(3), 3),
        ({"cohort": {"min": 4}, "privacy": {"trust": "distributed"}}, 1.5 * 0.2 * math.sqrt(5 / 4), 5),
        ({"cohort": {"sampling": "fixed"}}, 1.5 * 0.2, 5),
    ],
    ids=["per-tensor", "adaptive", "noise-cohort", "local", "distributed", "fixed"],
)
def test_the_std_of_other_clips_and_trust_models(changes: dict[str, Any], expected: float | None, members: int) -> None:
    if expected is None:  # σ_Δ = (σ⁻² − (2σ_b)⁻²)^(−1/2), Andrew et al. 2021
        expected = 0.3 * (1.5**-2 - 4.0**-2) ** -0.5
    (noise,) = sums(job("dp-fedavg", changes, module(WIDE)), 1, members=members)
    assert fits(noise, expected)
    assert not fits(noise, expected * 2 / 3)
    assert not fits(noise, expected * 3 / 2)


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedpgn", "fed-smp-randk"])
def test_rounds_coordinates_and_keys_are_independent(method: str) -> None:
    keep = {"keep": 1.0} if method == "fed-smp-randk" else {}
    first, second, third = sums(job(method, network=module(WIDE), **keep), 3)
    (other,) = sums(job(method, network=module(WIDE), **keep), 1, key=bytes(32))
    limit = 5 / math.sqrt(len(first))
    for a, b in ((first, second), (second, third), (first, third), (first, other), (first[1:], first[:-1])):
        assert abs(float(np.corrcoef(a, b)[0, 1])) < limit
        assert abs(float(np.corrcoef(a**2, b**2)[0, 1])) < limit
    assert fits((first + second) / math.sqrt(2), 0.3)
    assert torch.equal(first, sums(job(method, network=module(WIDE), **keep), 1)[0])  # and named: no hidden state


def _multiplier(event: Any) -> float:
    """The Gaussian's noise multiplier inside a dp-accounting event."""
    while not hasattr(event, "noise_multiplier"):
        event = event.event
    return float(event.noise_multiplier)


@pytest.mark.parametrize(("sampling", "factor"), [("poisson", 1), ("fixed", 2)])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("method", PRIVATE)
def test_event_times_sensitivity_is_the_std_drawn(method: str, size: int, sampling: str, factor: int) -> None:
    cohort, algorithm = {"size": size, "sampling": sampling}, ALGORITHMS[method]()
    if sampling == "fixed" and (algorithm.head is not None or algorithm.client_state):
        with pytest.raises(fedflat.InputError, match="independent coins only"):
            job(method, {"cohort": cohort})
        return
    plan = job(method, {"cohort": cohort}).parts.plan
    assert plan.relation == {"poisson": "add-remove", "fixed": "replace-one"}[sampling]
    assert plan.sensitivity(0.2) == pytest.approx(factor * 0.2 * (1 + ROUNDING))
    assert _multiplier(round_event(plan.params)) * plan.sensitivity(0.2) == pytest.approx(plan.std(0.2), rel=1e-12)
    line = plan.record(0, 0.2)
    assert line["std"] / line["sensitivity"] == pytest.approx(_multiplier(round_event(plan.params)), rel=1e-12)


@pytest.mark.parametrize(("sampling", "factor"), [("poisson", 1), ("fixed", 2)])
def test_the_std_drawn_is_the_std_of_the_event(sampling: str, factor: int) -> None:
    made = job("dp-fedsam", {"cohort": {"sampling": sampling}}, module(WIDE))
    expected, (noise,) = 0.2 * _multiplier(round_event(made.parts.plan.params)), sums(made, 1)
    assert fits(noise, expected * factor)
    assert not fits(noise, expected * (3 - factor))  # the other relation's sensitivity


def _gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Exact ε of one Gaussian (Balle and Wang 2018, Theorem 8), by root finding in scipy alone."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return float(stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b)) - delta)

    return float(optimize.brentq(excess, 0, 200, xtol=1e-10))


@pytest.mark.parametrize(("sampling", "factor"), [("poisson", 1), ("fixed", 2)])
def test_the_ledger_composes_to_the_plans_epsilon(tmp_path: Any, sampling: str, factor: int) -> None:
    """Everybody in every round: T Gaussians are one with σ/√T, whose ε is known exactly."""
    import json

    changes = {"rounds": 4, "cohort": {"sampling": sampling}}
    result = fedflat.run(recipe("dp-fedsam", changes), model=module(), clients=clients(), out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    events = [line for line in lines if "std" in line]
    assert [line["round"] for line in events] == [0, 1, 2, 3]
    composed = math.sqrt(1 / sum((line["sensitivity"] / line["std"]) ** 2 for line in events))
    exact = _gaussian_epsilon(composed, 1e-5)
    assert composed == pytest.approx(1.5 / factor / 2)
    assert result.history[-1]["epsilon"] == pytest.approx(exact, rel=2e-3)
    assert result.history[-1]["epsilon"] >= exact * (1 - 1e-9)
    assert result.privacy["proven_epsilon"] == pytest.approx(result.history[-1]["epsilon"], rel=1e-9)


def test_a_ledger_that_cannot_be_written_stops_the_release() -> None:
    """The event is charged before the new state exists."""

    def full_disk(line: dict[str, Any]) -> None:
        raise OSError("no space left")

    made = job("dp-fedavg")
    with pytest.raises(OSError, match="no space"):
        finish_round(made.parts, *beginning(made), agg.total_of(made, []), agg.KEY, full_disk)


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", PRIVATE)
def test_an_empty_cohort_is_noised_and_accounted(method: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisson, "select_at", lambda *_: np.zeros(0, dtype=np.int64))  # nobody comes
    changes = {"rounds": 3, "cohort": {"size": RARE}, "engine": {"backend": backend}}
    result = fedflat.run(recipe(method, changes), model=module(), clients=clients())
    assert [line["cohort"] for line in result.private_history] == [0, 0, 0]
    assert sorted(line["epsilon"] for line in result.history) == [line["epsilon"] for line in result.history]
    assert result.history[2]["epsilon"] > result.history[0]["epsilon"] > 0
    assert all(line["noise_norm"] > 0 for line in result.private_history)
    assert bool(torch.isfinite(weights(result.model)).all())
    assert not torch.equal(weights(result.model), weights(module()))


def test_an_empty_cohort_is_divided_by_the_same_constant() -> None:
    """m = qM is public and constant, however small: the noise of an empty round is not divided by one."""
    (noise,) = sums(job("dp-fedavg", {"cohort": {"size": 0.5}}, module(WIDE)), 1)
    assert fits(noise, 0.3)
    made = at_the_sum(job("dp-fedavg", {"cohort": {"size": 0.5}}, module(WIDE)))
    new, _ = finish_round(made.parts, *beginning(made), agg.total_of(made, []), agg.KEY, print)
    assert fits(new.shared.double(), 0.3 / 0.5)


def _one_failed(fail: Callable[[Tensor], Tensor], method: str, backend: str) -> Tensor:
    federation = clients()
    federation[2] = (fail(federation[2][0]), federation[2][1][: len(fail(federation[2][0]))])
    changes = {"privacy": {"noise_multiplier": 0.0}, "engine": {"backend": backend}}
    result = fedflat.run(recipe(method, changes), model=Fragile(), clients=federation)
    return weights(result.model)


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", [m for m in PRIVATE if m != "dp-scaffold"])  # it follows c where gradients are zero
def test_a_client_whose_training_breaks_counts_zero_and_the_denominator_stays(method: str, backend: str) -> None:
    broken = _one_failed(lambda x: x * 0 + 1e20, method, backend)
    torch.testing.assert_close(broken, _one_failed(lambda x: x[:0], method, backend), rtol=0, atol=1e-6)
    assert bool(torch.isfinite(broken).all())


def test_missing_clients_shrink_the_mean_instead_of_the_denominator() -> None:
    d = agg.dimension("dp-fedavg")[0]
    honest, twin = agg.honest("dp-fedavg"), agg.realised_denominator(d, ())
    member = agg.Member(torch.full((d,), 0.2 / math.sqrt(d)))
    for count in range(1, len(SIZES) + 1):
        length = float(torch.linalg.vector_norm(honest([member] * count, 0.0).shared))
        assert length == pytest.approx(count * 0.2 / len(SIZES), rel=1e-5)
    assert float(torch.linalg.vector_norm(twin([member], 0.0).shared)) == pytest.approx(0.2, rel=1e-5)
