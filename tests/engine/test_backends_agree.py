"""Every back end on every method; what decides which one is taken, and what happens when memory is short."""

import functools
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import filled, module, pairs, recipe, weights
from torch import Tensor, nn

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.backends.in_process import _in_order
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.core.rng import Streams, stream
from fedflat.data.clients import from_pairs
from fedflat.engine.batches import Order

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

METHODS = [name for name in ALGORITHMS if ALGORITHMS[name]().kind == "update"]
WRITTEN = [name for name in METHODS if ALGORITHMS[name]().head is not None or ALGORITHMS[name]().client_state]
"""Methods that the low-rank form does not serve."""
SIZES = (7, 3, 0, 12, 1, 5, 12)


clients = functools.partial(pairs, SIZES)


@functools.cache
def final(method: str, seed: int, **engine: Any) -> Tensor:
    """The weights at the end; several tests look at the same runs."""
    return trained(method, seed, **engine)


def trained(method: str, seed: int = 2, **engine: Any) -> Tensor:
    return weights(fedflat.run(recipe(method, engine, seed=seed), model=module(), clients=clients()).model)


@pytest.mark.parametrize("method", METHODS)
def test_every_back_end_agrees_on_every_method(method: str) -> None:
    expected = final(method, 2, backend="sequential")
    others: list[dict[str, Any]] = [{"backend": "vectorized"}]  # blocks of other sizes: contract 6
    if method not in WRITTEN:
        others += [{"backend": "lowrank"}, {"backend": "lowrank", "block": 2}]
    for engine in others:
        torch.testing.assert_close(final(method, 2, **engine), expected, rtol=2e-5, atol=2e-6)


def test_bf16_in_blocks_is_bf16_of_one_client() -> None:
    """As far from float32 as the sequential bf16 run is, and no farther from that run: layers do compute in bf16."""

    def ended(**engine: Any) -> Tensor:
        network = filled(nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3)))
        return weights(fedflat.run(recipe(engine=engine), model=network, clients=clients()).model)

    alone, exact = ended(backend="sequential", precision="bf16"), ended(backend="sequential")
    block = ended(backend="vectorized", precision="bf16")
    rounding = float((alone - exact).norm())
    assert rounding > 1e-4 and 0.3 * rounding < float((block - exact).norm()) < 3 * rounding
    assert float((block - alone).norm()) < 2 * rounding
    torch.testing.assert_close(ended(backend="vectorized"), exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_bf16_in_blocks_of_linear_layers_on_every_method(method: str) -> None:
    """Nearer to one client in bf16 than float32 is; and what is said to stay in float32 does, bit for bit.

    The median of three seeds, for rounding that moves an entry across a method's threshold counts as much as the rest.
    """
    to_one, to_exact = [], []
    for seed in range(1, 4):
        alone = final(method, seed, backend="sequential", precision="bf16")
        exact = final(method, seed, backend="sequential")
        found = final(method, seed, backend="vectorized", precision="bf16", block=2)
        rounding = float((alone - exact).norm())
        assert rounding > 5e-5
        to_one.append(float((found - alone).norm()) / rounding)
        to_exact.append(float((found - exact).norm()) / rounding)
    assert np.median(to_one) < 0.8 and np.median(to_exact) > 0.3
    same = {"vectorized-fp32": "vectorized"} | ({} if method in WRITTEN else {"lowrank": "lowrank"})
    for name, plain in same.items():
        assert torch.equal(final(method, 2, backend=name, precision="bf16"), final(method, 2, backend=plain))


@pytest.mark.parametrize(("rows", "kept"), [(4, "vectorized-fp32"), (120, "vectorized")])
def test_bf16_in_blocks_is_for_long_products(rows: int, kept: str, tmp_path: Path) -> None:
    """bf16 is no reason to be slower than float32 in blocks; what was chosen is in the folder for a resume."""
    asked = recipe(engine={"precision": "bf16", "processes": 2}, local={"batch_size": rows})
    found = fedflat.run(asked, model=module(), clients=clients(), out=tmp_path / "run")
    again = Recipe.load(tmp_path / "run" / "recipe.yaml")
    assert (again.engine.backend, again.engine.precision) == (kept, "bf16")
    plain = fedflat.run(
        asked | {"engine": {"backend": "vectorized", "precision": "bf16"}}, model=module(), clients=clients()
    )
    assert torch.equal(weights(found.model), weights(plain.model)) == (kept == "vectorized")


class Turns(nn.Module):
    """Does what vmap refuses, or answers wrongly in a block."""

    def __init__(self, refused: bool) -> None:
        super().__init__()
        self.layer, self.refused = nn.Linear(6, 3), refused

    def forward(self, x: Tensor) -> Tensor:
        inside = torch._C._functorch.is_functorch_wrapped_tensor(self.layer.weight)  # type: ignore[attr-defined]
        if self.refused:
            return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)
        return self.layer(2 * x if inside else x)


NORMED = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
NORMED_WIDE = nn.Sequential(nn.Linear(1000, 10), nn.LayerNorm(10))
IMAGES = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3))
WIDE = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 3))


@pytest.mark.parametrize(
    ("network", "cohort", "name"),
    [
        (nn.Linear(6, 3), 5, "vectorized"),
        (WIDE, 5, "lowrank"),
        (NORMED, 5, "vectorized"),
        (Turns(refused=True), 5, "sequential"),
        (Turns(refused=False), 5, "sequential"),
        (IMAGES, 5, "sequential"),
        (IMAGES, 300, "workers"),
    ],
)
def test_auto_follows_public_shapes(network: nn.Module, cohort: int, name: str) -> None:
    asked = recipe(engine={"processes": 2}, cohort={"size": cohort})
    rows = clients() * 60
    first = weights(network)
    job = prepare(Recipe.of(asked), network, rows)
    assert job.backend.name == name
    assert torch.equal(job.initial_weights, first)  # a check of a block leaves nothing behind
    again = prepare(Recipe.of(asked), network, [(1e3 * x, y) for x, y in rows[::-1]])
    assert again.backend.name == name, "chosen by what clients hold"


def test_a_block_of_few_weights_is_large_whatever_its_inputs_hold() -> None:
    """On a frozen body's features: blocks of 7 took 2.6 times as long as those of 64."""
    rows = [(torch.rand(20, 1000), torch.arange(20) % 10)] * 128
    asked = recipe(cohort={"size": 128})
    asked["local"] = {"steps": 1, "batch_size": 128, "lr": 1.0}
    assert prepare(Recipe.of(asked), nn.Linear(1000, 10), rows).backend.block == 64
    wide = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 10))
    assert prepare(Recipe.of(asked), wide, rows).backend.block == 1  # half a million weights a client
    asked["local"]["batch_size"] = 10**6  # each client's whole data, whatever it has: no block is padded to it
    assert [prepare(Recipe.of(asked), net, rows).backend.name for net in (wide, NORMED_WIDE)] == ["sequential"] * 2


@pytest.mark.long
def test_uneven_cohorts_of_large_models_get_all_cores_on_one_client() -> None:
    data = {"dataset": "random-process/3x32x32/10/50+10", "clients": 5}
    asked = recipe(engine={"processes": 2}, data=data, model="resnet10")
    assert [getattr(prepare(Recipe.of(asked)).backend, name) for name in ("name", "threads")] == ["sequential", 2]
    asked["cohort"] = {"size": 4}
    assert prepare(Recipe.of(asked)).backend.name == "workers"


@pytest.mark.parametrize("method", WRITTEN)
def test_the_low_rank_form_says_why_it_does_not_apply(method: str) -> None:
    with pytest.raises(InputError, match=r"engine\.backend: found lowrank with (a personal part|clients' state)"):
        trained(method, backend="lowrank")


@pytest.mark.parametrize("backend", ["vectorized", "lowrank"])
@pytest.mark.parametrize("method", ["dp-fedsam", "dp-fedavg-lus", "dp-fedpgn-ls"])
def test_blocks_on_several_cores_give_the_same_bits(method: str, backend: str) -> None:
    """The order of the sum is that of the blocks, whichever ends first; more threads than blocks, too."""
    alone = trained(method, backend=backend, block=2, processes=1)
    for threads in (2, 3, 16):
        assert torch.equal(trained(method, backend=backend, block=2, processes=threads), alone)
    assert not torch.equal(trained(method, backend=backend, block=3, processes=2), torch.zeros_like(alone))


def test_blocks_are_added_in_order_though_later_ones_end_first() -> None:
    ended: list[int] = []

    def work(block: np.ndarray) -> Any:
        time.sleep(0.05 if block[0] == 0 else 0.0)
        ended.append(int(block[0]))
        return int(block[0])

    assert [ready() for ready in _in_order(work, [np.array([i]) for i in range(5)], 2)] == [0, 1, 2, 3, 4]
    assert ended[0] != 0, "the twin: in the order of their ends they would be added wrongly"


def test_a_block_out_of_memory_is_halved_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(Recipe.of(recipe(engine={"backend": "vectorized"})), module(), clients())
    real, seen = type(job.backend).trained, []

    def short(self: Any, some: np.ndarray, *rest: Any) -> Any:
        seen.append(len(some))
        if len(some) > 2:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")
        return real(self, some, *rest)

    expected = trained("dp-fedavg", backend="vectorized", block=2)
    monkeypatch.setattr(type(job.backend), "trained", short)
    with pytest.warns(UserWarning, match=r"engine\.block: .* did not fit into memory; going on with"):
        found = trained("dp-fedavg", backend="vectorized")
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert max(seen) > 2 and seen[-1] <= 2


def test_one_client_that_does_not_fit_and_other_errors_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(Recipe.of(recipe(engine={"backend": "vectorized"})), module(), clients())

    def fails(*_: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(type(job.backend), "trained", fails)
    for text in ("not enough memory", "shapes cannot be multiplied"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RunError, match=text):
                trained("dp-fedavg", backend="vectorized")


def test_streams_and_plans_of_a_block_are_those_of_its_clients() -> None:
    draws = Streams(5, "batches", 2)
    for index in range(50):
        ours, theirs = next(draws.each([(index, 1)])), stream(5, "batches", 2, index, 1)
        assert (ours.permutation(9) == theirs.permutation(9)).all() and ours.random() == theirs.random()
    present = [pair for pair in clients() if len(pair[0])]
    data = from_pairs(present)
    for batch in (1, 4, 5, 12, 30):
        for steps in (1, 3, 7):
            order = Order(5, 2, batch)
            plan = order.indices(range(len(present)), data.sizes, 1, steps, 30)
            for client, size in enumerate(data.sizes):
                assert (plan[client] == order.indices([client], np.array([size]), 1, steps, 30)[0]).all()
