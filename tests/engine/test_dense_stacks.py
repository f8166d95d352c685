"""Stacks of linear layers: what is read off a module, and the written-out arithmetic against autograd."""

import pytest
import torch
from torch import Tensor, nn

from fedflat.core.params import Layout, flatten, layout_of
from fedflat.core.rng import seeded_torch
from fedflat.engine.mlp import FEW_CLASSES, DenseProblem, Linear, _log_softmax, layers_of
from fedflat.engine.problem import Batch, BlockProblem, ModuleProblem
from fedflat.models.vision import linear, mlp


class Hooked(nn.Module):
    """Lists plain layers, but computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def linear_layers(self) -> list[nn.Module]:
        return [self.layer]

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].bias.requires_grad_(False)
    return module


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


READ = {
    "linear": lambda: linear((2, 3), 3), "mlp": lambda: mlp((6,), 3, hidden=[5, 4]),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Identity(), nn.Linear(5, 3)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)),
    "no activation": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)),
}  # fmt: skip
DECLINED = {
    "another activation": lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)),
    "a norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
    "an activation first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 3)),
    "an activation last": lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU()), "a frozen parameter": frozen,
    "a layer used twice": shared, "a forward of its own": Hooked,
}  # fmt: skip


def block(
    name: str, head: tuple[str, ...] | None, seed: int
) -> tuple[nn.Module, Layout, tuple[Linear, ...], torch.Tensor, Batch]:
    """A readable stack and made-up clients of four; skips one layer alone with a personal head: nothing is shared."""
    with seeded_torch(seed, "test"):
        module = READ[name]()
        if head == () and sum(isinstance(m, nn.Linear) for m in module.modules()) == 1:
            pytest.skip("the only layer would be personal")
        layout = layout_of(module, head)
        layers = layers_of(module, layout)
        assert layers is not None
        weights = flatten(module, layout) + 0.3 * torch.randn(4, layout.size)
        inputs = torch.randn(4, 5, *((2, 3) if name == "linear" else (6,)))
        batch = Batch(inputs, torch.randint(0, 3, (4, 5)), torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2] * 2))
    return module, layout, layers, weights, batch


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("head", [None, ()])
def test_gradients_equal_vmap(name: str, head: tuple[str, ...] | None) -> None:
    module, layout, layers, weights, batch = block(name, head, 0)
    for part in ("all",) if head is None else ("shared", "personal"):
        for given in batch, Batch(batch.inputs, batch.targets):
            ours = DenseProblem(layout, layers).gradient(weights, part, given)
            theirs = BlockProblem(module, layout).gradient(weights, part, given)
            torch.testing.assert_close(ours.vector, theirs.vector, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours.loss, theirs.loss)
            assert torch.equal(ours.accuracy, theirs.accuracy)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("head", [None, ()])
def test_bf16_rounds_where_one_client_does(name: str, head: tuple[str, ...] | None) -> None:
    """Against autocast on one client; equal to the bit where both use the same kernels."""
    module, layout, layers, weights, batch = block(name, head, 1)
    alone = ModuleProblem(module, layout, "bf16")
    for part in ("all",) if head is None else ("shared", "personal"):
        given = [Batch(i, t, w) for i, t, w in zip(batch.inputs, batch.targets, batch.weights)]  # type: ignore[arg-type]
        each = [alone.gradient(w.clone(), part, b) for w, b in zip(weights, given)]
        theirs = torch.stack([found.vector for found in each])
        ours = DenseProblem(layout, layers, "bf16").gradient(weights, part, batch)
        exact = DenseProblem(layout, layers).gradient(weights, part, batch)
        assert ours.vector.dtype == ours.loss.dtype == torch.float32
        torch.testing.assert_close(ours.loss, torch.stack([found.loss for found in each]), rtol=1e-2, atol=1e-3)
        rounding = float((theirs - exact.vector).norm())
        assert rounding > 1e-3, "the twin: in float32 it would be this far away"
        off = ours.vector.bfloat16().float() - theirs  # biases' gradients, float32 here, are bf16 there
        assert float(off.norm()) < 0.1 * rounding


@pytest.mark.parametrize("name", DECLINED)
def test_anything_else_is_declined(name: str) -> None:
    module = DECLINED[name]()
    assert layers_of(module, layout_of(module)) is None


@pytest.mark.parametrize("classes", [2, 10, FEW_CLASSES, FEW_CLASSES + 1])
def test_log_softmax_along_examples_is_the_one_along_classes(classes: int) -> None:
    logits = torch.randn(7, 5, classes, generator=torch.Generator().manual_seed(1)) * 30
    logits[0, 0, 0], logits[1, 2] = float("inf"), -1e30
    found = _log_softmax(logits.clone())
    torch.testing.assert_close(found, torch.log_softmax(logits, -1), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert found.shape == logits.shape and found.is_contiguous()
