"""Vectors kept as factors: their arithmetic, norms and sums against the vectors written out, hostile cases included."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedflat.core.params import flatten, layout_of
from fedflat.core.rng import seeded_torch
from fedflat.core.types import ClientView, GradientFn
from fedflat.engine.factored import Declined, Factored, LowRankProblem
from fedflat.engine.isolated import IsolatedRule, packaged
from fedflat.engine.mlp import DenseProblem, layers_of
from fedflat.engine.problem import Batch
from fedflat.engine.reduce import PlainSum
from fedflat.pieces.clipping import norms_of, per_tensor, whole_vector
from fedflat.pieces.gradients import blur, compose, pgn, sam

CLIENTS = 4


def problems() -> tuple[LowRankProblem, DenseProblem, Tensor]:
    with seeded_torch(3, "test"):
        module = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    layout = layout_of(module)
    layers = layers_of(module, layout)
    assert layers is not None
    return LowRankProblem(layout, layers), DenseProblem(layout, layers), flatten(module, layout)


def batch(seed: int, scale: float = 1.0) -> Batch:
    with seeded_torch(seed, "test batch"):
        return Batch(scale * torch.randn(CLIENTS, 5, 7), torch.randint(0, 3, (CLIENTS, 5)))


def own(gradient: GradientFn, view: ClientView) -> GradientFn:
    """What a user may write: recorded, it is torch's operations on factors."""

    def rule(w: Tensor) -> Tensor:
        g = gradient(w)
        g = torch.where(g.norm() > 0.1, -g / -g.norm(), g.lerp(gradient(w - 0.1 * g), 0.5))
        g.mul_(view.broadcast["direction"].norm()).add_(view.start, alpha=0.1).sub_(w, alpha=0.1)
        return gradient(w + g.detach().clone() / 2.0) - torch.zeros_like(g)

    return rule


def test_a_vector_beside_the_factors_is_never_written_into() -> None:
    """They keep it as it is: a write would change weights that were made before."""
    low, _, first = problems()
    w = low.start(first, CLIENTS)
    view = ClientView(start=w.clone(), clip=1.0, steps=1, lr=0.3, broadcast={"direction": torch.ones(len(first))})

    def rule(gradient: GradientFn, view: ClientView) -> GradientFn:
        offset = view.broadcast["direction"] * 0.5
        return lambda w: gradient(w + offset) + gradient(w + offset.neg_())

    with pytest.raises(Declined, match="written into"):
        IsolatedRule(rule, "own")(lambda at: at, view)(w)


@pytest.mark.parametrize(
    "rule",
    [sam(0.5), blur(0.7), compose(sam(0.3), blur(0.7)), pgn(0.2, 0.3), compose(sam(0.3), pgn(0.2, 0.3)), own],
    ids=lambda rule: type(rule).__name__,
)
def test_every_rule_is_the_same_on_factors(rule: object) -> None:
    low, dense, first = problems()
    rule = rule if packaged(rule) else IsolatedRule(rule, "own")
    direction = torch.linspace(-1, 1, len(first))
    w, v = low.start(first, CLIENTS), first.repeat(CLIENTS, 1)
    starts = w.clone(), v.clone()
    for seed in range(3):
        minibatch = batch(seed)
        for at, problem, start in (w, low, starts[0]), (v, dense, starts[1]):
            view = ClientView(start=start, clip=0.05, steps=1, lr=0.3, broadcast={"direction": direction})

            def gradient(x: object, problem: object = problem, minibatch: Batch = minibatch) -> object:
                return problem.gradient(x, "all", minibatch).vector  # type: ignore[attr-defined]

            step = rule(gradient, view)(at)  # type: ignore[operator]
            at.sub_(step.mul(1.0).add(at, alpha=0.01), alpha=0.3)
    torch.testing.assert_close(w.dense(), v, rtol=1e-5, atol=1e-6)
    update = w - first
    assert isinstance(update, Factored)
    torch.testing.assert_close(update.norms(), norms_of(v - first), rtol=1e-5, atol=1e-7)
    sink = PlainSum(whole_vector(0.5), 0.5, low.layout.tensors("shared"), low.layout.size)
    sink.add(update, [1] * CLIENTS)
    found = sink.result()
    torch.testing.assert_close(found.norms, norms_of(v - first), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.total, found.factors @ (v - first).double(), rtol=1e-4, atol=1e-6)


def test_norms_of_parts_that_cancel_are_those_of_the_vector() -> None:
    """Big gradients that cancel: Gram matrices alone would give a norm of 0 or worse, and the clip would be fooled."""
    low, _, first = problems()
    w = low.start(first, CLIENTS)
    g, h = (low.gradient(w, "all", batch(5, 1 + 1e-5 * i)).vector for i in range(2))
    update = (g - h) * 1e3
    assert isinstance(update, Factored)
    true = norms_of(update.dense())
    torch.testing.assert_close(update.norms(), true, rtol=1e-9, atol=0.0)
    assert float(true.min()) > 0


def test_a_clip_that_needs_coordinates_gets_them_and_a_transform_is_declined() -> None:
    low, _, first = problems()
    w = low.start(first, CLIENTS)
    w.sub_(low.gradient(w, "all", batch(1)).vector)
    update = w - first
    tensors = low.layout.tensors("shared")
    clip = per_tensor([0.1, 0.2, 0.3, 0.4], 4)
    sinks = [PlainSum(clip, clip.threshold, tensors, low.layout.size) for _ in range(2)]
    sinks[0].add(update, [5] * CLIENTS)
    sinks[1].add(update.dense(), [5] * CLIENTS)
    torch.testing.assert_close(sinks[0].result().total, sinks[1].result().total)
    mask = torch.ones(low.layout.size, dtype=torch.bool)
    for needs in (lambda: update.abs(), lambda: torch.sign(update), lambda: update * mask, lambda: update[0]):
        with pytest.raises(Declined):
            needs()


def test_what_factors_cannot_hold_is_declined() -> None:
    low, _, first = problems()
    w = low.start(first, CLIENTS)
    with pytest.raises(Declined):
        w.sub_(torch.ones(CLIENTS, low.layout.size))
    aten, g = torch.ops.aten, low.gradient(w, "all", batch(0)).vector
    mask = torch.ones(CLIENTS, low.layout.size, dtype=torch.bool)
    cases: list[tuple[Any, Any]] = [
        (lambda: w.clamp_(0.0, 1.0), ()), (aten.linalg_vector_norm.default, (g, 2, [1, 0])),
        (aten.permute.default, (g, [1, 0])), (aten.div.Tensor, (g.norms()[:, None], g)),
        (aten.where.self, (mask, g, w)), (aten.where.self, (mask[:, :1], g, first[0])), (aten.mul.Tensor, (g, w)),
    ]  # fmt: skip
    for call, args in cases:
        with pytest.raises(Declined):
            call(*args)
    with pytest.raises(Declined):
        low.gradient(w.dense(), "all", batch(0))  # type: ignore[arg-type]
