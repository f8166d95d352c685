"""Convolutional networks, whose images come in small batches: the numbers are those of plain evaluation."""

import pytest
import torch
from quadratics import drawn, plain
from torch import Tensor, nn

from fedflat.core.params import Layout, flatten, layout_of
from fedflat.landscape.objective import Objective
from fedflat.landscape.surfaces import directions, steps_of, surface
from fedflat.models import build

EXAMPLES = 237  # whole batches and a part of one


def images(name: str, seed: int = 0) -> tuple[nn.Module, Layout, Tensor, Tensor, Tensor]:
    """A built-in network on images, channels last as in a run: module, layout, weights, inputs, targets."""
    shape = (3, 23, 23) if name == "cnn-3" else (1, 20, 20)  # cnn-3 leaves out the last row and column
    module = build(name, shape, 4, seed)
    layout = layout_of(module)
    x = drawn(EXAMPLES, *shape, seed=seed).float().contiguous(memory_format=torch.channels_last)
    return module, layout, flatten(module, layout), x, torch.arange(EXAMPLES) % 4


@pytest.mark.parametrize("name", ["cnn", "cnn-2-layers", "cnn-3"])
def test_every_point_of_a_surface_equals_the_plain_evaluation(name: str) -> None:
    module, layout, weights, x, y = images(name)
    pair, steps = directions(weights, layout, 0, 2), steps_of(3, 1.0)
    plane = surface(Objective(module, layout, x, y, threads=1), weights, pair, steps)
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            loss, accuracy = plain(module, layout, weights + float(a) * pair[0] + float(b) * pair[1], x, y)
            assert plane["loss"][i][j] == pytest.approx(loss, rel=1e-4)
            assert abs(plane["accuracy"][i][j] - accuracy) <= 1 / EXAMPLES


def test_any_number_of_threads_gives_the_same_bits() -> None:
    module, layout, weights, x, y = images("cnn")
    direction, steps = directions(weights, layout, 0, 1), steps_of(9, 1.0)
    found = [surface(Objective(module, layout, x, y, threads=n), weights, direction, steps) for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
