"""Training on oneDNN's own tensors: the gradients of plain ones, and only of modules that were found to run on them."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import recipe, weights
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.params import flatten, layout_of
from fedflat.engine.device import at_fault, serves
from fedflat.engine.problem import LEAST, Batch, ModuleProblem
from fedflat.models import build

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"),
    pytest.mark.usefixtures("noise_of_the_seed"),
]


def images(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    drawn = np.random.default_rng(seed).standard_normal((count, *shape))
    return torch.from_numpy(drawn).float().contiguous(memory_format=torch.channels_last)


def sequential() -> nn.Module:
    """A user's network: nothing in it knows of these tensors."""
    layers = [nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * 6 * 6, 7), nn.ReLU(), nn.Linear(7, 4))


def trained(module: nn.Module, x: Tensor, *, onednn: bool, at: Tensor | None = None) -> Tensor:
    layout = layout_of(module)
    weights = flatten(module, layout) if at is None else at
    problem = ModuleProblem(module, layout, "fp32", onednn=onednn)
    return problem.gradient(weights, "all", Batch(x, torch.arange(len(x)) % 4)).vector


def exact(module: nn.Module, x: Tensor) -> Tensor:
    """The gradient in float64 on plain, contiguous tensors."""
    module = module.double()
    loss = F.cross_entropy(module(x.double().contiguous()), torch.arange(len(x)) % 4)
    found = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])
    module.float()
    return found


@pytest.mark.parametrize("count", [1, LEAST - 1, LEAST, 13])
@pytest.mark.parametrize("name", ["cnn", "cnn-2-layers", "cnn-3", "sequential"])
def test_gradients_are_those_of_exact_arithmetic(name: str, count: int) -> None:
    shape = {"cnn-3": (3, 23, 23), "sequential": (1, 16, 16)}.get(name, (1, 20, 20))  # of cnn-3's, 22 rows are seen
    module = sequential() if name == "sequential" else build(name, shape, 4, 0)
    x = images(count, shape)
    assert serves(module, layout_of(module), "fp32", x)
    expected = exact(module, x)
    for onednn in (True, False):
        assert float((trained(module, x, onednn=onednn).double() - expected).norm()) <= 1e-5 * float(expected.norm())


def test_ties_in_a_pooling_go_to_the_first_as_in_plain_torch() -> None:
    """A blank image makes all four entries of every pooling equal; the gradient of one position depends on which."""
    x = torch.randint(0, 3, (6, 4, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    x[0] = 1.0
    pooled = []
    for own in (True, False):
        at = x.clone().requires_grad_()
        y = F.max_pool2d(at.to_mkldnn(), 2, 2).to_dense() if own else F.max_pool2d(at, 2, 2)
        pooled.append(torch.autograd.grad(y, at, torch.arange(float(y.numel())).reshape(y.shape))[0])
    assert torch.equal(*pooled)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_image_that_is_not_finite_reaches_the_gradient(value: float) -> None:
    """oneDNN's ReLU makes 0 of NaN; the client's message must be found out all the same."""
    module, x = build("cnn", (1, 20, 20), 4, 0), images(LEAST, (1, 20, 20))
    x[1, 0, 7, 7] = value
    for onednn in (True, False):
        assert not bool(torch.isfinite(trained(module, x, onednn=onednn)).all())


@pytest.mark.parametrize("lr", [1e3, 1e12, 1e30])
def test_training_that_diverges_is_found_out(lr: float) -> None:
    module, x = build("cnn", (1, 20, 20), 4, 0), images(LEAST, (1, 20, 20))
    for onednn in (True, False):
        weights = flatten(module, layout_of(module)).clone()
        for _ in range(4):
            weights -= lr * trained(module, x, onednn=onednn, at=weights)
        assert not bool(torch.isfinite(weights).all())
        module = build("cnn", (1, 20, 20), 4, 0)


class Branch(nn.Module):
    """A convolution and what ``change`` makes of the logits, but only where the tensors are oneDNN's own."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Conv2d(1, 3, 3), change
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        own = y.is_mkldnn
        y = (y.to_dense() if own else y).flatten(2).square().mean(-1)
        return self.change(y) if own else y


@pytest.mark.parametrize(
    ("change", "believed"),
    [
        (lambda y: y, True),
        (lambda y: 1.01 * y, False),
        (lambda y: y * float("nan"), False),
        (lambda y: y.detach(), False),
        (lambda y: y * (1 + torch.randn(())), False),
    ],
)
def test_a_module_that_differs_is_trained_on_plain_ones(change: Callable[[Tensor], Tensor], believed: bool) -> None:
    """The broken twins: other logits, NaN, no gradient, chance."""
    module = Branch(change)
    before, state = flatten(module, layout_of(module)), torch.random.get_rng_state()
    assert serves(module, layout_of(module), "fp32", images(2, (1, 5, 5))) == believed
    assert torch.equal(flatten(module, layout_of(module)), before)
    assert float(module.calls) == 0, "a buffer is as it was"
    assert torch.equal(torch.random.get_rng_state(), state), "nothing is drawn from torch's own generator"


def test_layers_numbers_and_inputs_they_are_not_for() -> None:
    x = images(5, (1, 16, 16))
    module = sequential()
    layout = layout_of(module)
    assert not serves(module, layout, "bf16", x)
    assert not serves(module, layout, "fp32", x.flatten(1))
    assert not serves(module, layout, "fp32", x.double())
    group = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 4))
    chance = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 14 * 14, 4))
    for other in (group, chance, nn.Sequential(nn.Flatten(), nn.Linear(256, 4))):
        assert not serves(other, layout_of(other), "fp32", x)


def test_evaluation_mode_stays_on_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """LUS's gradient and every score: what a module does in evaluation mode was not tried."""
    seen: list[bool] = []  # held by torch's own class for the test's time: a module that held it would be refused
    module, forward = sequential(), nn.Flatten.forward
    monkeypatch.setattr(nn.Flatten, "forward", lambda self, x: seen.append(x.is_mkldnn) or forward(self, x))
    layout = layout_of(module)
    problem, x = ModuleProblem(module, layout, "fp32", onednn=True), images(LEAST, (1, 16, 16))
    batch, weights = Batch(x, torch.arange(LEAST) % 4), flatten(module, layout)
    problem.gradient(weights, "all", batch)
    with problem.evaluating():
        problem.gradient(weights, "all", batch)
    problem.logits(x)
    assert seen == [True, False, False]


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.long
def test_one_run_in_every_back_end() -> None:
    """``workers`` bit for bit, blocks up to rounding, and the tensors were in use."""
    clients = [(images(n, (1, 16, 16), n), torch.arange(n) % 4) for n in (9, 5, 14, 1)]
    # One thread each, as the workers have: some processors' products of two threads round otherwise.
    engines = {"sequential": {"backend": "sequential", "processes": 1}}
    engines |= {name: {"backend": name, "processes": 2} for name in ("workers", "vectorized")}
    found = {}
    for name, engine in engines.items():
        module = build("cnn", (1, 16, 16), 4, 0)
        asked = recipe(engine=engine, local={"batch_size": 6, "lr": 0.1}, cohort={"size": 3})
        assert prepare(Recipe.of(asked), module, clients).problem.onednn
        found[name] = weights(fedflat.run(asked, model=module, clients=clients).model)
    assert torch.equal(found["workers"], found["sequential"])
    assert torch.allclose(found["vectorized"], found["sequential"], atol=1e-5)


class Strided(nn.Module):
    """The convolution whose kernel is at fault, in channels-last images if asked for; or one that crashes anyhow."""

    def __init__(self, last: bool = False, aborts: bool = False) -> None:
        super().__init__()
        self.first, self.strided, self.last, self.aborts = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1, 2), last, aborts

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.strided(x.contiguous(memory_format=torch.channels_last) if self.last else x)
        if self.aborts and x.requires_grad:
            x.register_hook(lambda _: os.abort())
        return x.mean((2, 3))


def _images(network: nn.Module, **changes: Any) -> Any:
    drawn = torch.from_numpy(np.random.default_rng(1).standard_normal((48, 3, 32, 32))).float()
    pairs = [(drawn[i : i + 16], torch.arange(16) % 8) for i in (0, 16, 32)]
    recipe = {"rounds": 1, "algorithm": "dp-fedavg", "local": {"steps": 2, "batch_size": 16}, "cohort": {"size": 3}}
    recipe |= {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}, "engine": {"backend": "sequential"}} | changes
    return prepare(Recipe.of(recipe), network, clients=pairs)


def test_the_kernel_at_fault_is_never_met() -> None:
    job = _images(Strided())
    assert job.data.inputs.is_contiguous() and not job.problem.onednn
    assert not _images(
        nn.Sequential(nn.Conv2d(3, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    ).data.inputs.is_contiguous()
    resnet = build("resnet10", (3, 32, 32), 10, 0, width=4, groups=2)
    assert not at_fault(resnet) and at_fault(Strided())
    assert "blocks.1.shortcut.0.weight" in resnet.state_dict()


def test_a_crash_in_compiled_code_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^model: found a module whose first gradient crashes .*SIGABRT.*[^\n]*$"):
        _images(Strided(aborts=True))
