"""Contract: what was measured is what is released. One client moves the computed sum by at most C·(1 + s).

Data is plain and finite; what makes it hostile is that gradients cancel, or that a vector of huge parts is zero. The
broken twins are what the low-rank back end once did: norms from float32 Gram matrices, one float32 product of all.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federation import drawn, recipe, trained_sum
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.params import flatten, layout_of
from fedflat.core.rng import seeded_torch
from fedflat.core.rounding import MOST, ROUNDING, SHARE, gamma
from fedflat.core.types import Aggregate
from fedflat.engine import measured, reduce
from fedflat.engine.factored import Factored, LowRankProblem, Trace
from fedflat.engine.mlp import Linear, layers_of
from fedflat.engine.problem import Batch
from fedflat.engine.reduce import PlainSum
from fedflat.pieces.clipping import Adaptive, PerTensor, WholeVector, norms_of
from fedflat.privacy.plan import build_plan

WIDTH, CLASSES, EXAMPLES = 12, 3, 6
Data = tuple[Tensor, Tensor]


def ordinary(count: int, width: int = WIDTH) -> list[Data]:
    with seeded_torch(7, "measured"):
        return [(torch.randn(EXAMPLES, width), torch.randint(0, CLASSES, (EXAMPLES,))) for _ in range(count)]


def opposite(scale: float) -> Data:
    """Nearly equal inputs with opposite labels: two huge gradients that cancel but for the last bits."""
    x = torch.full((EXAMPLES, WIDTH), scale)
    x[1::2] = torch.nextafter(x[1::2], torch.tensor(math.inf))
    return x, torch.arange(EXAMPLES) % 2


def pixels() -> Data:
    with seeded_torch(8, "pixels"):
        return torch.randint(0, 256, (EXAMPLES, WIDTH)).float(), torch.arange(EXAMPLES) % CLASSES


def duplicated() -> Data:
    x, y = pixels()
    return x[:1].repeat(EXAMPLES, 1), y


HOSTILE: dict[str, tuple[Data, float]] = {
    "opposite labels": (opposite(1.0), 1.0), "opposite labels, 1e6": (opposite(1e6), 1.0),
    "opposite labels, 1e14": (opposite(1e14), 1.0), "raw pixels": (pixels(), 0.05),
    "one row many times": (duplicated(), 0.05), "tiny inputs": ((ordinary(1)[0][0] * 1e-30, ordinary(1)[0][1]), 1e-30),
    "tiny clip": (pixels(), 1e-30), "huge inputs": ((ordinary(1)[0][0] * 1e18, ordinary(1)[0][1]), 1.0),
    "no clip reached": (ordinary(1)[0], 1e3),
}  # fmt: skip


def train(backend: str, clients: list[Data], clip: float, hidden: bool) -> Tensor:
    """The noiseless sum of one round of everybody through the real back end."""
    layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)] if hidden else [nn.Linear(WIDTH, CLASSES)]
    network = drawn(nn.Sequential(*layers), scale=0.3 if hidden else 0.0)
    changes = {
        "engine": {"backend": backend, "processes": 1},
        "local": {"steps": 3, "batch_size": 4, "lr": 1.0, "weight_decay": 0.0}, "cohort": {"size": len(clients)},
        "privacy": {"clip": clip},
    }  # fmt: skip
    made = prepare(Recipe.of(recipe("dp-fedavg", changes)), network, clients)
    return trained_sum(made, np.arange(len(clients)))[0].result().total


@pytest.mark.parametrize("hidden", [False, True], ids=["linear", "two layers"])
@pytest.mark.parametrize("backend", ["lowrank", "vectorized", "sequential"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_one_client_moves_the_sum_by_at_most_the_plans_sensitivity(kind: str, backend: str, hidden: bool) -> None:
    others, (hostile, clip) = ordinary(5), HOSTILE[kind]
    gone = (hostile[0][:0], hostile[1][:0])
    worlds = [train(backend, [*others[:2], one, *others[2:]], clip, hidden) for one in (gone, hostile)]
    moved = float((worlds[1] - worlds[0]).norm())
    assert moved <= clip * (1 + ROUNDING)
    assert moved > 0 or "inputs" in kind or "opposite" in kind


def factors(deltas: Tensor, inputs: Tensor) -> Factored:
    """Σ_r δ_r x_rᵀ of one layer without bias: ``(n, R, outputs)``, ``(n, R, inputs)``."""
    n, _, outputs = deltas.shape
    layers = (Linear(inputs.shape[2], outputs, slice(0, outputs * inputs.shape[2]), None, "none"),)
    trace = Trace(layers, n, outputs * inputs.shape[2])
    trace.record([trace.slot(0, inputs)], [deltas])
    return Factored(trace, [], {0: 1.0})


Add = Callable[..., tuple[Tensor, Tensor]]


def float32_norm(total: Tensor, vectors: Factored, scale: Any, bound: float, weights: Any = None) -> Any:
    """Twin: the norm that clips from float32 Gram matrices, nothing said of their error; the sum in float64."""
    [(slot, u)] = vectors.trace.mixed(0, vectors.steps).items()
    x = vectors.trace.acts[0][slot]
    square = (torch.bmm(x, x.transpose(1, 2)) * torch.bmm(u, u.transpose(1, 2))).sum((1, 2), dtype=torch.float64)
    norms = square.clamp_min(0).sqrt()
    chosen = scale(norms)
    total += ((u.double() * chosen[:, None, None]).flatten(0, 1).T @ x.double().flatten(0, 1)).flatten()
    return norms, chosen


def float32_product(total: Tensor, vectors: Factored, scale: Any, bound: float, weights: Any = None) -> Any:
    """Twin: true norms, but everybody in one float32 product."""
    [(slot, u)] = vectors.trace.mixed(0, vectors.steps).items()
    x = vectors.trace.acts[0][slot]
    norms = norms_of(torch.bmm(u.double().transpose(1, 2), x.double()).flatten(1))
    chosen = scale(norms)
    total += ((u * chosen.float()[:, None, None]).flatten(0, 1).T @ x.flatten(0, 1)).flatten()
    return norms, chosen


def canceller(scale: float) -> tuple[Tensor, Tensor]:
    """Rows whose Gram norm is lost in float32, though the vector is about ``scale``·1e-7 long."""
    x = torch.full((1, 4, 5), scale)
    x[:, 1::2] = torch.nextafter(x[:, 1::2], torch.tensor(math.inf))
    return torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None].repeat(1, 1, 2), x


def exactly_zero(scale: float) -> tuple[Tensor, Tensor]:
    """A message that is exactly zero, of huge parts."""
    return torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None].repeat(1, 1, 2) * scale, torch.full((1, 4, 5), scale)


def rows(count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Rows of that many ordinary clients."""
    with seeded_torch(seed, "others"):
        return torch.randn(count, 4, 2), torch.randn(count, 4, 5)


def measured_by(add: Add, vectors: Factored, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped sum, and everybody's norm and factor."""
    total = torch.zeros(vectors.shape[1], dtype=torch.float64)
    return total, *add(total, vectors, lambda norms: WholeVector(clip).scale(norms, clip), clip)


def added(vectors: Factored, sizes: list[int], weighted: bool = False) -> Aggregate:
    """What the accumulator holds of them, at C = 1."""
    sink = PlainSum(WholeVector(1.0), 1.0, (slice(0, 10),), 10, weighted)
    sink.add(vectors, sizes)  # type: ignore[arg-type]
    return sink.result()


def moved_in(total: Callable[[Factored], Tensor], hostile: tuple[Tensor, Tensor]) -> float:
    """How far one client moves the sum of it and some ordinary ones."""
    u, x = rows(6)
    with_it = factors(torch.cat([u[:3], hostile[0], u[3:]]), torch.cat([x[:3], hostile[1], x[3:]]))
    return float((total(with_it) - total(factors(u, x))).norm())


def moved(add: Add, hostile: tuple[Tensor, Tensor], clip: float) -> float:
    return moved_in(lambda vectors: measured_by(add, vectors, clip)[0], hostile)


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e14])
@pytest.mark.parametrize("make", [canceller, exactly_zero])
def test_cancelling_factors_move_the_sum_by_at_most_the_clip(make: Any, scale: float) -> None:
    for clip in (1.0, 0.05, 1e-30):
        assert moved(measured.add_clipped, make(scale), clip) <= clip * (1 + ROUNDING)


@pytest.mark.parametrize(
    ("twin", "hostile"),
    [(float32_norm, canceller(1e9)), (float32_product, exactly_zero(1e9)), (float32_product, exactly_zero(1e14))],
)
def test_the_broken_twins_are_caught(twin: Add, hostile: Any) -> None:
    assert moved(twin, hostile, 1.0) > 1.1  # how far follows from how the processor rounds: 1.16 was seen


@pytest.mark.parametrize("twin", [float32_norm, float32_product])
def test_a_twin_in_the_accumulators_place_is_caught_as_well(twin: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    def through(add: Add) -> float:
        monkeypatch.setattr(reduce, "add_clipped", add)
        return moved_in(lambda vectors: added(vectors, [1] * vectors.trace.clients).total, hostile)

    hostile = canceller(1e9) if twin is float32_norm else exactly_zero(1e14)
    assert through(measured.add_clipped) <= 1 + ROUNDING
    assert through(twin) > 1.1


_SIZES = st.sampled_from([0.0, 1e-38, 1e-20, 1e-3, 1.0, 255.0, 1e9, 1e19, 3e38])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(_SIZES, _SIZES, st.sampled_from([-1.0, 1.0]), st.integers(0, 3)), min_size=4, max_size=4),
    st.sampled_from([1e-30, 0.05, 1.0, 1e6]),
)
def test_whatever_the_factors_are(parts: list[tuple[float, float, float, int]], clip: float) -> None:
    x = torch.tensor([[b * (1 + j * 2.0**-23 * k) for k in range(5)] for _, b, _, j in parts])
    u = torch.tensor([[a * sign, a] for a, _, sign, _ in parts])
    assert moved(measured.add_clipped, (u[None], x[None]), clip) <= clip * (1 + ROUNDING)


def test_ordinary_clients_stay_in_factors_and_hostile_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is that of vectors written out, and so are norms and factors; the bound on the norm costs nothing."""
    alone: list[int] = []
    real = measured._Rows.written
    monkeypatch.setattr(measured._Rows, "written", lambda rows, place: alone.append(place) or real(rows, place))
    u, x = rows(40)
    u[35:36], x[35:36] = canceller(1e9)
    total, norms, chosen = measured_by(measured.add_clipped, factors(u, x), 0.7)
    dense = torch.bmm(u.double().transpose(1, 2), x.double()).flatten(1)
    assert alone == [35 - measured.TOGETHER]
    torch.testing.assert_close(norms, norms_of(dense), rtol=1e-7, atol=0)
    expected = WholeVector(0.7).factors(dense, 0.7, ())[1]
    torch.testing.assert_close(chosen, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(total, expected @ dense, rtol=1e-7, atol=1e-9)


def test_a_client_is_treated_alike_whoever_else_is_there() -> None:
    """Norm and factor of a client, bit for bit, alone and among others, at any place."""
    u, x = rows(70)
    _, norms, chosen = measured_by(measured.add_clipped, factors(u, x), 0.7)
    for place in (0, 31, 32, 69):
        alone = factors(u[place : place + 1], x[place : place + 1])
        _, norm, factor = measured_by(measured.add_clipped, alone, 0.7)
        assert torch.equal(norm[0], norms[place]), place
        assert torch.equal(factor[0], chosen[place]), place


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_finite_counts_as_zero(bad: float, weighted: bool) -> None:
    (u, x), rest = rows(6), [0, 1, 3, 4, 5]
    x[2, 0, 0] = bad
    found = added(factors(u, x), [3] * 6, weighted)
    expected = added(factors(u[rest], x[rest]), [3] * 5, weighted)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-12, atol=1e-14)
    assert bool(torch.isinf(found.norms[2]))
    assert float(found.factors[2]) == 0


def test_float64_holds_products_of_any_float32_numbers() -> None:
    """So a client whose norm is finite has a finite vector when it is written out."""
    u, x = canceller(3e38)
    taken = measured._Rows(factors(u * 3e38, x))
    taken.take(0)
    norms, sizes = taken.measured()
    assert math.isfinite(float(norms[0])) and float(sizes[0]) > 1e77
    assert bool(torch.isfinite(taken.written(0)).all())


@pytest.mark.parametrize("clip", [WholeVector(1.0), Adaptive(1.0, 0.5), PerTensor((0.6, 0.8), 2)])
def test_a_dense_message_of_any_size_moves_the_sum_by_at_most_the_clip(clip: Any) -> None:
    tensors = (slice(0, 4), slice(4, 9))
    for threshold in (1e-30, 1.0, 1e30):
        made = PerTensor((0.6 * threshold, 0.8 * threshold), 2) if isinstance(clip, PerTensor) else clip
        for size in (3e38, 1.0, 1e-38, 1e-45):
            for kind in (torch.float32, torch.float64):
                sink = PlainSum(made, threshold, tensors, 9)
                sink.add(torch.full((9,), size, dtype=kind), [1])
                assert float(sink.result().total.norm()) <= threshold * (1 + ROUNDING)
    free = PlainSum(WholeVector(math.inf), math.inf, tensors, 9)
    free.add(torch.full((9,), 3.0), [1])
    assert torch.equal(free.result().total, torch.full((9,), 3.0, dtype=torch.float64))


def test_a_factor_below_the_normal_range_is_zero() -> None:
    whole = WholeVector(1e-300)
    assert whole.scale(torch.tensor([1e10], dtype=torch.float64), 1e-300).tolist() == [0.0]
    assert whole.scale(torch.tensor([0.0, 1e-300], dtype=torch.float64), 1e-300).tolist() == [1.0, 1.0]


def test_vectors_with_dense_parts_and_two_layers_are_measured_whole() -> None:
    """Weight decay and a memory leave dense parts in an update, one with a coefficient for each client."""
    module = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))
    layout = layout_of(module)
    layers = layers_of(module, layout)
    assert layers is not None
    low, first = LowRankProblem(layout, layers), flatten(module, layout)
    with seeded_torch(4, "batch"):
        batch = Batch(torch.randn(3, 5, 7), torch.randint(0, 3, (3, 5)))
    w = low.start(first, 3)
    for _ in range(2):
        w.sub_(low.gradient(w, "all", batch).vector.add(w, alpha=0.1), alpha=0.5)
    memory = torch.linspace(-1, 1, layout.size)
    update = (w - first).add(Factored(w.trace, [(memory, torch.tensor([[0.1], [0.2], [0.3]]))], {}))
    for vectors in (w - first, update, w - w):
        total, norms, chosen = measured_by(measured.add_clipped, vectors, 0.5)
        dense = vectors.dense().double()
        torch.testing.assert_close(norms, norms_of(dense), rtol=1e-6, atol=0)
        torch.testing.assert_close(total, chosen @ dense, rtol=1e-5, atol=1e-6)


def test_the_constants_leave_room_for_every_term() -> None:
    """The table of ``core.rounding``: additions, products of factors and a message's own rounding are less than s."""
    additions = 2 * gamma(MOST + 8) * MOST * (1 + ROUNDING)
    products = 2 * MOST * SHARE
    own = gamma(2**39)
    assert additions <= 1.01 * ROUNDING / 4 and products == ROUNDING / 2 and own <= 1.01 * ROUNDING / 16
    assert additions + products + own + 2**-24 < ROUNDING
    assert gamma(MOST) <= ROUNDING / (2 * MOST) and MOST >= 10**6
    assert gamma(2 * MOST) * 2 * MOST > ROUNDING / 2  # and not for twice as many


def test_more_messages_than_are_accounted_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedflat.core.checks import InputError, RunError

    monkeypatch.setattr(reduce, "MOST", 3)
    for clip, refused in ((1.0, True), (math.inf, False)):
        sink = PlainSum(WholeVector(clip), clip, (slice(0, 2),), 2)
        sink.add(torch.ones(4, 2), [1] * 4)
        if refused:
            with pytest.raises(RunError, match="cohort: 4 messages in one sum; rounding is accounted for 3 at most"):
                sink.result()
        else:
            assert sink.result().count == 4
    common: dict[str, Any] = {"rounds": 1, "noise_multiplier": 1.0}
    assert build_plan(clients=MOST, cohort=MOST, **common).rounding == ROUNDING
    assert build_plan(clients=10**9, cohort=1000, **common).rounding == ROUNDING
    assert build_plan(clients=10**9, cohort=MOST, sampling="fixed", **common).rounding == ROUNDING
    assert build_plan(clients=10**9, cohort=10, sampling="truncated", max_cohort=MOST, **common)
    for size, more in (
        (MOST, {}),
        (MOST + 1, {"sampling": "fixed"}),
        (9, {"sampling": "truncated", "max_cohort": MOST + 1}),
    ):
        with pytest.raises(InputError, match=r"cohort\.size: found .* allowed: cohorts of at most 1048576 clients"):
            build_plan(clients=10**9, cohort=size, **common, **more)


@pytest.mark.parametrize(
    "more", [{}, {"sampling": "fixed"}, {"trust": "local"}, {"adaptive": True}, {"noise_cohort": 40}]
)
def test_the_accounted_multiplier_does_not_move(more: dict[str, Any]) -> None:
    """std and sensitivity both carry 1 + s, and the ledger says so."""
    plan = build_plan(clients=100, cohort=20, rounds=3, noise_multiplier=0.9, **more)
    factor = 2 if plan.relation == "replace-one" else 1
    assert plan.sensitivity(0.3) == factor * 0.3 * (1 + ROUNDING)
    assert plan.std(0.3) / plan.sensitivity(0.3) == pytest.approx(plan.effective_multiplier / factor, rel=1e-15)
    assert plan.record(0, 0.3)["rounding"] == ROUNDING
