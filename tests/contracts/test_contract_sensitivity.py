"""Contract 2: what one client, however hostile, can change — and that the checks catch the published mistakes."""

import math
from collections.abc import Callable
from typing import Any

import aggregations as agg
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federation import PRIVATE, Fragile, at_the_sum, beginning, clients, job, module, recipe, trained_sum, weights
from torch import Tensor

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.rounding import ROUNDING
from fedflat.engine.reduce import Accumulator
from fedflat.engine.round import finish_round
from fedflat.methods.votes import VoteClip


@pytest.mark.parametrize("method", PRIVATE)
def test_every_method_holds(method: str) -> None:
    """Of the rest of the state this path knows nothing: below it is held end to end."""
    honest, size = agg.honest(method), agg.dimension(method)
    agg.sensitivity_holds(honest, *size)
    agg.noise_is_the_same(honest, *size)


@pytest.mark.parametrize("method", ["dp-fedsam", "fed-smp-randk"])
def test_replacing_one_client(method: str) -> None:
    d, tensors = agg.dimension(method)
    agg.replacement_holds(agg.honest(method, cohort={"sampling": "fixed"}), d, tensors)
    with pytest.raises(AssertionError):
        agg.replacement_holds(agg.per_tensor_clip(d, tensors), d, tensors)


BROKEN = [(twin, rule) for twin, rules in agg.TWINS.items() for rule in rules]


@pytest.mark.parametrize(("twin", "rule"), BROKEN, ids=lambda f: f.__name__)
def test_every_broken_twin_is_caught(twin: Callable[..., agg.Aggregation], rule: Callable[..., None]) -> None:
    d, tensors = agg.dimension("dp-fedavg")
    with pytest.raises(AssertionError):
        rule(twin(d, tensors), d, tensors)


def test_every_rule_has_a_twin_that_breaks_it() -> None:
    assert {rule for _, rule in BROKEN} == set(agg.RULES)


def test_per_tensor_clips_earn_the_root_of_their_squares() -> None:
    """C_j on each tensor: the reported bound √ΣC_j² is reached, and never passed."""
    bound = math.sqrt(sum(v * v for v in VALUES))
    made = job("dp-fedavg", {"privacy": {"clip": {"kind": "per-tensor", "values": VALUES}, "noise_multiplier": 2.0}})
    parts = made.parts
    assert parts.clip.bound(made.threshold) == pytest.approx(bound, rel=1e-12)
    assert parts.plan.std(parts.clip.bound(made.threshold)) == pytest.approx(2 * bound * (1 + ROUNDING), rel=1e-12)
    members = agg.canaries(parts.layout.dimension, parts.layout.tensors("shared")).values()
    lengths = [float(torch.linalg.vector_norm(agg.total_of(made, [member]).total)) for member in members]
    assert max(lengths) == pytest.approx(bound, rel=1e-6)
    assert max(lengths) <= bound * (1 + 1e-9)


def test_the_adaptive_clips_count_moves_by_one_half() -> None:
    clip = {"kind": "adaptive", "initial": agg.CLIP, "quantile": 0.5, "count_noise": 5.0}
    made = job("dp-fedsam", {"privacy": {"clip": clip}})
    moved = {
        name: agg.total_of(made, with_it).bits - agg.total_of(made, without).bits
        for name, with_it, without in agg.neighbours(*agg.dimension("dp-fedsam"))
    }
    assert {name: by for name, by in moved.items() if abs(by) not in (0.0, 0.5)} == {}
    assert any(moved.values())
    assert agg.total_of(job("dp-fedsam"), []).bits == 0.0


def _after_a_moving_clip(present: bool, engine: dict[str, Any]) -> float:
    """C after a round without count noise, as the count of messages below C moves it, in units of that count."""
    changes = {
        "rounds": 2, "local": {"steps": 2, "batch_size": 5, "lr": 30.0},
        "privacy": {"clip": {"kind": "adaptive", "initial": 0.01, "count_noise": 1e-9}, "noise_multiplier": 0.0},
        "cohort": {"size": 5}, "engine": engine,
    }  # fmt: skip
    data = clients()
    data[2] = data[2] if present else (data[2][0][:0], data[2][1][:0])
    found = [record["clip"] for record in fedflat.run(recipe("dp-fedavg", changes), module(), data).history]
    return -math.log(found[1] / found[0]) * 5 / 0.2


@pytest.mark.parametrize("engine", [{"backend": "sequential"}, {"backend": "vectorized", "block": 2}])
def test_a_client_without_data_is_not_in_the_adaptive_clips_count(engine: dict[str, Any]) -> None:
    apart = _after_a_moving_clip(True, engine) - _after_a_moving_clip(False, engine)
    assert abs(apart) == pytest.approx(0.5, abs=1e-3)


def test_a_count_of_clients_without_data_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: a zero message is below C, and the count moved by 1."""
    real = Accumulator.add
    monkeypatch.setattr(
        Accumulator, "add", lambda self, messages, sizes, *rest: real(self, messages, [1] * len(sizes), *rest)
    )
    assert abs(_after_a_moving_clip(True, {}) - _after_a_moving_clip(False, {})) == pytest.approx(1.0, abs=1e-3)


def test_a_message_outside_the_common_mask_is_not_released() -> None:
    """Noise lives on the mask, so nothing else may leave, whatever a client sends."""
    made = at_the_sum(job("fed-smp-randk", keep=0.3))
    state, broadcast = beginning(made)
    total = agg.total_of(made, [agg.Member(torch.ones(made.parts.layout.dimension))])
    new, _ = finish_round(made.parts, state, broadcast, total, agg.KEY, lambda line: None)
    assert broadcast.mask is not None
    assert not bool(new.shared[~broadcast.mask].any())
    assert bool((new.shared[broadcast.mask] != 0).all())


VALUES = [0.05, 0.1, 0.02, 0.2]
GRIDS: list[tuple[str, dict[str, Any]]] = [
    ("dp-fedavg", {"privacy": {"secure_rng": True}}), ("fed-smp-randk", {"privacy": {"secure_rng": True}}),
    ("dp-scaffold", {"privacy": {"secure_rng": True}}),
    ("dp-fedsam", {"privacy": {"secure_rng": True, "clip": {"kind": "per-tensor", "values": VALUES}}}),
    ("ddgauss", {"cohort": {"min": 4}, "privacy": {"trust": "distributed"}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "changes"),
    GRIDS,
    ids=["secure", "secure and masked", "secure, two vectors", "secure per tensor", "ddgauss"],
)
def test_sums_on_a_grid_hold_too(method: str, changes: dict[str, Any]) -> None:
    """Rounded to the grid, no message is longer than the sensitivity that the ledger is charged for."""
    made = job(method, changes)
    parts = made.parts
    allowed = (
        getattr(parts.plan.mechanism, "l2_sensitivity", None) or parts.plan.record(0, made.threshold)["sensitivity"]
    )
    moved = [
        (float(torch.linalg.vector_norm(agg.total_of(made, with_it).total - agg.total_of(made, without).total)), name)
        for name, with_it, without in agg.neighbours(parts.message_length, parts.message_tensors)
    ]
    assert max(moved)[0] <= allowed * (1 + 1e-6), max(moved)
    assert max(moved)[0] >= 0.99 * made.threshold  # and the bound is reached, so the check has something to see


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(st.floats(width=32, allow_nan=True), min_size=12, max_size=12))
def test_votes_are_bounded_whatever_is_sent(labels: int, entries: list[float]) -> None:
    """√Q against nothing, √(2Q) against any other ballot (ae-dpfl)."""
    clip = VoteClip(labels)
    ballots = torch.tensor(entries, dtype=torch.float32).reshape(2, 6)
    _, factors = clip.factors(ballots, math.sqrt(labels), ())
    counted = torch.where(factors[:, None] > 0, ballots.double(), 0.0) * factors[:, None]
    assert bool((torch.linalg.vector_norm(counted, dim=1) <= math.sqrt(labels) * (1 + 1e-9)).all())
    assert float(torch.linalg.vector_norm(counted[0] - counted[1])) <= math.sqrt(2 * labels) * (1 + 1e-9)


def _poisoned(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Client 2's data made hostile, or taken away."""
    federation = clients()
    x, y = federation[2]
    one_huge = torch.cat([x[:-1], torch.full((1, 6), 1e20)])
    federation[2] = {
        "huge inputs": (torch.full_like(x, 1e20), y), "large inputs": (x * 1e6, y), "one huge example": (one_huge, y),
        "gone": (x[:0], y[:0]), "as it was": (x, y),
    }[kind]  # fmt: skip
    return federation


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", PRIVATE)
def test_a_poisoned_client_moves_the_sum_by_at_most_the_clip(method: str, backend: str) -> None:
    """The noiseless sum of one round through the real back end."""

    def total(kind: str, network: torch.nn.Module) -> Tensor:
        made = prepare(Recipe.of(recipe(method, {"engine": {"backend": backend}})), network, _poisoned(kind))
        return trained_sum(made, np.arange(5))[0].result().total

    for network in (module(), Fragile()):
        without = total("gone", network)
        assert bool(torch.isfinite(without).all())
        kinds = ("one huge example", "huge inputs")
        if not isinstance(network, Fragile):  # which takes the others as it does
            kinds = ("large inputs", "as it was", *kinds)
        sums = {kind: total(kind, network) for kind in kinds}
        for kind, found in sums.items():
            moved = float(torch.linalg.vector_norm(found - without))
            assert moved <= 0.2 * (1 + 1e-6), (kind, moved)
    # Fragile's, the last network
    torch.testing.assert_close(sums["huge inputs"], without, rtol=0, atol=0 if backend == "sequential" else 1e-7)


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", PRIVATE)
def test_the_rest_of_the_released_state_is_the_first(method: str, backend: str) -> None:
    """Buffers and personal heads leave as they came, although a hostile client changed its own copy."""
    network = Fragile()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    result = fedflat.run(
        recipe(method, {"engine": {"backend": backend}}), model=network, clients=_poisoned("huge inputs")
    )
    after = result.model.state_dict()
    assert list(after) == list(before)
    shared = {f"body.{n}" for n, _ in network.body.named_parameters()}
    if method in ("centaur", "dp2-fedsam"):
        shared -= {"body.2.weight", "body.2.bias"}
    if method == "dp-fedavg-la":  # holds the last bias
        shared -= {"body.2.bias"}
    for name, value in after.items():
        assert torch.equal(value, before[name]) != (name in shared), name
    assert torch.equal(weights(network), torch.cat([v.reshape(-1) for n, v in before.items() if n != "seen"]))


def test_the_public_metrics_do_not_see_a_clients_buffer() -> None:
    """Evaluation between rounds uses w^0's buffers too: otherwise test metrics would release a client's statistics."""

    class Shifted(Fragile):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.seen.sum() * torch.tensor([1.0, 0.0, 0.0])

    test, silent = clients(sizes=(40,), seed=9)[0], {"privacy": {"noise_multiplier": 0.0}}  # noise follows the data
    found = [
        fedflat.run(recipe("dp-fedavg", silent), model=Shifted(), clients=_poisoned(kind), test=test).history
        for kind in ("huge inputs", "gone")
    ]
    for poisoned, clean in zip(*found):
        assert poisoned["test_loss"] == pytest.approx(clean["test_loss"], rel=1e-6)
