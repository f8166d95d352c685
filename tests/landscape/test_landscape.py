"""Surfaces against direct evaluation, filter normalisation, and results that do not depend on the number of threads."""

import numpy as np
import pytest
import torch
from quadratics import drawn, plain, small
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import InputError
from fedflat.core.params import Layout, flatten, layout_of
from fedflat.landscape.objective import Objective, weights_at
from fedflat.landscape.surfaces import directions, steps_of, surface
from fedflat.models import build

EXAMPLES = 237  # whole batches and a part of one
SHAPES = {"mlp": (1, 5, 5), "cnn": (1, 20, 20), "cnn-2-layers": (1, 20, 20), "cnn-3": (3, 23, 23)}
"""Of each network's images; cnn-3 leaves out their last row and column."""


def built(name: str, threads: int = 1) -> tuple[Objective, Tensor, Layout, nn.Module]:
    """A built-in network on images, channels last as in a run, or a number of examples for the small one."""
    if name not in SHAPES:
        return small(threads, int(name.removeprefix("small-")))
    module = build(name, SHAPES[name], 4, 0)
    layout = layout_of(module)
    x = drawn(EXAMPLES, *SHAPES[name]).float().contiguous(memory_format=torch.channels_last)
    objective = Objective(module, layout, x, torch.arange(EXAMPLES) % 4, threads=threads)
    return objective, flatten(module, layout), layout, module


def test_a_direction_has_the_norm_of_each_filter() -> None:
    _, weights, layout, _ = small()
    found = directions(weights, layout, 0, 1)[0]
    views, own = dict(layout.views(found)), dict(layout.views(weights))
    for name in ("conv.weight", "head.weight"):
        assert torch.allclose(views[name].flatten(1).norm(dim=1), own[name].flatten(1).norm(dim=1), rtol=1e-5)
    for name in ("conv.bias", "norm.weight", "norm.bias", "head.bias"):
        assert not views[name].any()


def test_filters_of_zeros_stay_and_scale_invariance_holds() -> None:
    _, weights, layout, _ = small()
    weights = weights.clone()
    weights[:9] = 0  # the first filter of the convolution
    found = directions(weights, layout, 0, 1)[0]
    assert not found[:9].any() and bool(torch.isfinite(found).all())
    assert torch.allclose(directions(7 * weights, layout, 0, 1)[0], 7 * found, rtol=1e-5)


def test_directions_are_the_same_for_every_run_before_normalising() -> None:
    _, weights, layout, _ = small()
    first, other = directions(weights, layout, 5, 2), directions(weights + 1, layout, 5, 2)
    span = layout.tensors()[layout.names.index("head.weight")]
    for a, b in zip(first, other, strict=True):
        assert torch.allclose(*[F.normalize(each[span].reshape(3, -1), dim=1) for each in (a, b)], atol=1e-6)
    assert torch.equal(first, directions(weights, layout, 5, 2))
    assert not torch.allclose(first, directions(weights, layout, 6, 2))
    assert abs(float(F.cosine_similarity(first[0], first[1], dim=0))) < 0.5


@pytest.mark.parametrize("name", ["small-130", *SHAPES])
def test_surface_and_line_equal_direct_evaluation(name: str) -> None:
    objective, weights, layout, module = built(name)
    assert objective.dense == (name == "mlp")  # evaluated by vmap
    pair, steps = directions(weights, layout, 0, 2), steps_of(3, 0.8)
    rel, slack = (1e-4, 1 / EXAMPLES) if "cnn" in name else (2e-5, 1e-6)  # sums in another order
    plane, along = (surface(objective, weights, each, steps) for each in (pair, pair[:1]))
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            at = weights + float(a) * pair[0] + float(b) * pair[1]
            loss, accuracy = plain(module, layout, at, objective.inputs, objective.targets)
            assert plane["loss"][i][j] == pytest.approx(loss, rel=rel)
            assert plane["accuracy"][i][j] == pytest.approx(accuracy, abs=slack)
    # The line is the surface's middle column; the middle is the model itself.
    assert np.allclose(along["loss"], [row[1] for row in plane["loss"]], rtol=1e-6)
    assert plane["loss"][1][1] == objective.value(weights)[0]


@pytest.mark.parametrize("name", ["small-7", "small-130", "cnn"])
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    found = []
    for threads in (1, 2, 3):
        objective, weights, layout, _ = built(name, threads)
        pair = directions(weights, layout, 0, 2)
        grid = surface(objective, weights, pair, steps_of(3, 1.0))
        _, gradient = objective.gradient(weights)
        found.append((grid["loss"], grid["accuracy"], gradient.numpy(), objective.product(weights)(pair[0]).numpy()))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert torch.get_num_threads() == 1  # the tests' own setting, put back


def test_the_module_given_is_left_as_it_was() -> None:
    objective, weights, layout, module = small()
    before, training = flatten(module, layout), module.training
    surface(objective, weights, directions(weights, layout, 0, 1), steps_of(3, 1.0))
    assert torch.equal(flatten(module, layout), before) and module.training == training


def test_progress_counts_every_point() -> None:
    objective, weights, layout, _ = small()
    done: list[int] = []
    surface(objective, weights, directions(weights, layout, 0, 2), steps_of(4, 1.0), on_points=done.append)
    assert sum(done) == 16


def test_points_do_not_depend_on_chunks() -> None:
    base, pair = drawn(50).float(), drawn(2, 50, seed=1).float()
    amounts = drawn(7, 2, seed=2)
    assert torch.equal(weights_at(base, pair, amounts)[3:5], weights_at(base, pair, amounts[3:5]))


def test_a_single_example_and_no_example() -> None:
    objective, weights, layout, module = small(examples=1)
    loss, _ = plain(module, layout, weights, objective.inputs, objective.targets)
    assert objective.value(weights)[0] == pytest.approx(loss, rel=1e-5)
    with pytest.raises(InputError, match="at least one"):
        Objective(module, layout, objective.inputs[:0], objective.targets[:0])


@pytest.mark.parametrize(("points", "span"), [(2, 1.0), (41, 0.0), (41, float("nan"))])
def test_impossible_grids_are_refused(points: int, span: float) -> None:
    with pytest.raises(InputError, match="allowed"):
        steps_of(points, span)
