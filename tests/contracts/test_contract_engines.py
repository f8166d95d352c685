"""Contract 6, first half: back ends, block sizes and the order of clients change nothing but rounding."""

import functools
from typing import Any

import pytest
import torch
from small_federation import UPDATES, Fragile, clients, module, recipe, weights
from torch import Tensor

import fedflat

pytestmark = pytest.mark.usefixtures("noise_of_any_engine")

ENGINES: list[dict[str, Any]] = [
    {"backend": "sequential"}, {"backend": "vectorized", "block": 2}, {"backend": "vectorized"},
    {"backend": "vectorized", "block": 1}, {"backend": "vectorized", "block": 3}, {"backend": "auto"},
]  # fmt: skip
IN_EVERY_WAY = ("dp-fedavg", "dp-fedsam-blur", "fed-smp-topk", "dp-fedpgn", "dp-scaffold", "dp2-fedsam")
"""On all of these: one of each form, a rule, a transform, a mask, a broadcast vector, a state, a head. The others on
the first three."""


def run(
    method: str, engine: dict[str, Any], *, noise: float = 1.5, batch: int = 4, order: list[int] | None = None
) -> Any:
    """Noise on, minibatches, a cohort that changes: everything but the engine is the same in each run."""
    changes = {
        "rounds": 3, "local": {"steps": 3, "batch_size": batch}, "cohort": {"size": 4.0} if order is None else {},
        "privacy": {"noise_multiplier": noise}, "engine": engine,
    }  # fmt: skip
    federation = clients()
    if order is not None:
        federation = [federation[i] for i in order]
    return fedflat.run(recipe(method, changes), model=module(), clients=federation)


@functools.cache
def once(method: str, number: int) -> Any:
    """The run of ``ENGINES[number]`` that two tests look at."""
    return run(method, ENGINES[number])


def heads(result: Any, order: list[int]) -> list[Tensor]:
    """Heads by the clients' original numbers."""
    return [result.heads[order.index(i)] for i in range(len(order)) if result.heads]


@pytest.mark.parametrize("method", UPDATES)
def test_every_engine_and_block_size_agrees(method: str) -> None:
    first, *others = (once(method, number) for number in range(len(ENGINES) if method in IN_EVERY_WAY else 3))
    for other in others:
        torch.testing.assert_close(weights(other.model), weights(first.model), rtol=2e-5, atol=2e-6)
        assert [r["cohort"] for r in other.private_history] == [r["cohort"] for r in first.private_history]
        assert [r.get("train_loss") or 0.0 for r in other.private_history] == pytest.approx(
            [r.get("train_loss") or 0.0 for r in first.private_history], rel=1e-4
        )
        assert sorted(other.heads) == sorted(first.heads)
        for client, head in first.heads.items():
            torch.testing.assert_close(other.heads[client], head, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", UPDATES)
def test_the_same_run_twice_is_the_same_bit_for_bit(method: str) -> None:
    for number in 0, 1:
        assert torch.equal(weights(run(method, ENGINES[number]).model), weights(once(method, number).model))


@pytest.mark.parametrize("method", UPDATES)
def test_the_order_of_clients_does_not_matter(method: str) -> None:
    """Everybody takes part with full batches; only a sum over clients is released, so their numbers mean nothing.

    Without noise: it follows the data, and other numbers are other data.
    """
    same, order = [0, 1, 2, 3, 4], [3, 0, 4, 2, 1]
    a = run(method, ENGINES[0], noise=0.0, batch=100, order=same)
    for engine in ENGINES[:2]:
        b = run(method, engine, noise=0.0, batch=100, order=order)
        torch.testing.assert_close(weights(a.model), weights(b.model), rtol=2e-5, atol=2e-6)
        for mine, theirs in zip(heads(a, same), heads(b, order)):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_a_run_changes_neither_the_callers_module_nor_torchs_generator() -> None:
    network = Fragile()
    before, state = {n: v.clone() for n, v in network.state_dict().items()}, torch.get_rng_state()
    for engine in ENGINES[:2]:
        fedflat.run(recipe("dp2-fedsam", {"engine": engine}), model=network, clients=clients())
    assert all(torch.equal(v, before[n]) for n, v in network.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
