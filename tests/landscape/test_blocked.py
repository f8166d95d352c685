"""oneDNN's own tensors give the numbers of plain evaluation, and modules they do not serve never see them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from quadratics import drawn, small
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.params import Layout, flatten, layout_of, usable
from fedflat.landscape import objective as blocked
from fedflat.landscape.objective import MANY, Objective, Points
from fedflat.landscape.surfaces import directions, line, steps_of, surface
from fedflat.models import build

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
EXAMPLES = blocked.BATCH + 37  # a whole batch and a part of one


def images(name: str, seed: int = 0) -> tuple[nn.Module, Layout, Tensor, Tensor, Tensor]:
    """A built-in network on images, channels last as in a run: module, layout, weights, inputs, targets."""
    shape = (3, 23, 23) if name == "cnn-3" else (1, 20, 20)  # cnn-3 leaves out the last row and column
    module = build(name, shape, 4, seed)
    layout = layout_of(module)
    x = drawn(EXAMPLES, *shape, seed=seed).float().contiguous(memory_format=torch.channels_last)
    return module, layout, flatten(module, layout), x, torch.arange(EXAMPLES) % 4


def plain(module: nn.Module, layout: Layout, at: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss and accuracy by one call of the module on all examples."""
    with torch.no_grad():
        logits = torch.func.functional_call(module.eval(), dict(layout.views(at)), (x,))
    return float(F.cross_entropy(logits, y)), float((logits.argmax(-1) == y).double().mean())


@pytest.mark.parametrize("name", ["cnn", "cnn-2-layers", "cnn-3"])
def test_every_point_of_a_surface_equals_the_plain_evaluation(name: str) -> None:
    module, layout, weights, x, y = images(name)
    assert blocked.batches(module, layout, weights, x) is not None, "the built-in networks run on these tensors"
    pair, steps = directions(weights, layout, 0, 2), steps_of(3, 1.0)
    assert len(steps) ** 2 >= MANY
    plane = surface(Objective(module, layout, x, y, threads=1), weights, pair, steps)
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            loss, accuracy = plain(module, layout, weights + float(a) * pair[0] + float(b) * pair[1], x, y)
            assert plane.loss[i, j] == pytest.approx(loss, rel=1e-4)
            assert abs(plane.accuracy[i, j] - accuracy) <= 1 / EXAMPLES


def test_any_number_of_threads_gives_the_same_bits() -> None:
    module, layout, weights, x, y = images("cnn")
    direction, steps = directions(weights, layout, 0, 1)[0], steps_of(MANY + 1, 1.0)
    found = [line(Objective(module, layout, x, y, threads=n), weights, direction, steps).loss for n in (1, 2, 3)]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


class Branch(nn.Module):
    """A convolution whose logits depend on how its input is stored: a module that must not be believed."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Conv2d(1, 3, 3), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y.to_dense() if y.is_mkldnn else y
        y = y.flatten(2).mean(-1)
        return self.change(y).to_mkldnn() if x.is_mkldnn else y


@pytest.mark.parametrize(
    ("change", "believed"),
    [
        (lambda y: y, True),
        (lambda y: 1.01 * y, False),
        (lambda y: y * float("nan"), False),
        (lambda y: y[:, :2], False),
    ],
)
def test_a_module_that_differs_on_them_gets_plain_tensors(change: Callable[[Tensor], Tensor], believed: bool) -> None:
    """The broken twins: other logits, NaN, another shape. None of them reaches a surface."""
    module = Branch(change)
    layout = layout_of(module)
    weights, x, y = flatten(module, layout), drawn(50, 1, 5, 5).float(), torch.arange(50) % 3
    assert (blocked.batches(module, layout, weights, x) is not None) == believed
    direction, steps = directions(weights, layout, 0, 1)[0], steps_of(MANY + 1, 0.5)
    found = line(Objective(module, layout, x, y, threads=1), weights, direction, steps)
    expected = [plain(module, layout, weights + float(a) * direction, x, y)[0] for a in steps]
    assert np.allclose(found.loss, expected, rtol=1e-5)


def test_layers_and_inputs_that_onednn_does_not_have() -> None:
    objective, weights, layout, module = small()  # group norm
    assert blocked.batches(module, layout, weights, objective.inputs) is None
    assert not usable(drawn(4, 1, 5, 5)), "float64"
    assert not usable(torch.zeros(4, 7, dtype=torch.int64))
    few = Points(weights, weights[None], torch.zeros(MANY - 1, 1))
    assert not objective._batched(few, objective.inputs)[0].is_mkldnn
