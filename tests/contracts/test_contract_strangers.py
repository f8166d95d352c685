"""Clients of a block are strangers: a message is, bit for bit, a function of its own data and the broadcast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import clients, module, recipe
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.assembly.jobs import prepare
from fedflat.backends.vectorized import Vectorized
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.personal import PersonalState
from fedflat.core.rng import seeded_torch
from fedflat.data.clients import from_pairs
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.batches import BlockBatches, Order
from fedflat.engine.factored import Factored
from fedflat.engine.round import broadcast_of

WATCHED = 2
"""The client whose data changes from world to world: the largest, so that widths would follow it."""
WORLDS = ("present", "empty", "huge", "not finite", "many more")


class Messages(Accumulator):
    """Keeps what clients with data send, in order."""

    def __init__(self, like: Any) -> None:
        super().__init__(like.clip, 1.0, like.layout.tensors("shared"), like.layout.dimension)
        self.kept: list[Tensor] = []

    def add(self, messages: Tensor, sizes: Any, stats: Any = None) -> None:
        whole = messages.dense() if isinstance(messages, Factored) else messages
        self.kept += [row.detach().clone() for row, size in zip(torch.atleast_2d(whole), sizes) if size]


def federation(world: str) -> list[tuple[Tensor, Tensor]]:
    found = clients()
    x, y = found[WATCHED]
    found[WATCHED] = {
        "present": (x, y),
        "empty": (x[:0], y[:0]),
        "huge": (x * 1e18, y),
        "not finite": (x * 1e38, y),  # infinite in the first layer
        "many more": (x.repeat(9, 1), y.repeat(9)),
    }[world]
    return found


class FunctionalDropout(nn.Module):
    """Dropout that no list of layers shows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        with seeded_torch(3, "weights"), torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(F.dropout(torch.relu(self.body(x)), 0.5, self.training))
        return found


def network(kind: str) -> nn.Module:
    if kind == "dropout":
        return FunctionalDropout()
    if kind == "dense":
        return module(hidden=17)
    layers = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )
    with seeded_torch(3, "weights"), torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layers


def messages(world: str, kind: str, method: str, change: Any = None, **engine: Any) -> dict[int, Tensor]:
    """Everybody's message in the first round."""
    changes = {"local": {"steps": 4, "batch_size": 5, "lr": 0.3}, "engine": engine}
    return messages_of(prepare(Recipe.of(recipe(method, changes)), network(kind), federation(world)), change)


def messages_of(made: Any, change: Any = None) -> dict[int, Tensor]:
    """Everybody's message in the first round of a job. change: made to its back end before."""
    parts, backend = made.parts, made.backend
    if change is not None:
        change(backend)
    broadcast = broadcast_of(parts, parts.first_state(made.first[: parts.layout.dimension], 1.0), made.seed)
    sink = Messages(parts)
    backend.train(np.arange(made.data.clients), broadcast, sink, PersonalState(made.first[parts.layout.dimension :]))
    if hasattr(backend, "close"):
        backend.close()
    present = [client for client in range(made.data.clients) if made.data.sizes[client]]
    assert len(sink.kept) == len(present)
    return dict(zip(present, sink.kept))


def strangers(kind: str, method: str, change: Any = None, **engine: Any) -> None:
    expected = messages("present", kind, method, change, **engine)
    for world in WORLDS[1:]:
        found = messages(world, kind, method, change, **engine)
        assert (WATCHED in found) == (world != "empty")
        for client in set(found) - {WATCHED}:
            assert torch.equal(found[client], expected[client]), (world, client)


ENGINES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("dense", {"backend": name, "block": block, "processes": threads})
        for name in ("vectorized", "lowrank")
        for block, threads in ((None, 1), (2, 2), (3, 1))
    ),
    ("dense", {"backend": "vectorized", "precision": "bf16"}),
    ("dense", {"backend": "sequential"}),
    ("convolution", {"backend": "vectorized"}),
    ("convolution", {"backend": "vectorized", "block": 2, "processes": 2}),
    ("dropout", {"backend": "vectorized"}),
    ("dropout", {"backend": "sequential"}),
    ("dropout", {"backend": "auto"}),
]


METHODS = ("dp-fedavg", "dp-fedsam", "dp-fedavg-blurs", "dp-fedpgn", "dp-fedprox", "dp-fednsam", "dp-disk")
CASES = [
    (kind, engine, method)
    for kind, engine in ENGINES
    for method in (METHODS if kind == "dense" and "precision" not in engine else METHODS[2:3])
]


@pytest.mark.parametrize(("kind", "engine", "method"), CASES)
def test_nobodys_message_depends_on_another_clients_data(kind: str, engine: dict[str, Any], method: str) -> None:
    strangers(kind, method, **engine)


def test_masks_are_those_of_the_client_alone_in_every_back_end() -> None:
    alone = messages("present", "dropout", "dp-fedsam", backend="sequential")
    for engine in ({"backend": "vectorized"}, {"backend": "vectorized", "block": 2}, {"backend": "auto"}):
        found = messages("present", "dropout", "dp-fedsam", **engine)
        assert all(torch.equal(found[client], message) for client, message in alone.items())


def test_a_block_that_draws_without_warning_is_trained_again_one_by_one() -> None:
    """Nobody said that the model is random: the block's outcome is thrown away."""

    def unknown(backend: Vectorized) -> None:
        assert backend.random
        backend.random = False

    strangers("dropout", "dp-fedavg", unknown, backend="vectorized")
    alone = messages("present", "dropout", "dp-fedavg", backend="sequential")
    found = messages("present", "dropout", "dp-fedavg", unknown, backend="vectorized")
    assert all(torch.equal(found[client], message) for client, message in alone.items())


# ---------------------------------------------------------------- broken twins


def _shared_masks(backend: Vectorized) -> None:
    """Blocks cut from those who have data, one generator for a block: as it was."""
    backend.random, backend.alone = False, None
    whole, sizes = backend.train, backend.data.sizes
    backend.train = lambda cohort, *rest: whole(cohort[sizes[cohort] > 0], *rest)  # type: ignore[method-assign]


def test_the_twin_with_one_generator_for_a_block_is_caught() -> None:
    with pytest.raises(AssertionError):
        strangers("dropout", "dp-fedavg", _shared_masks, backend="vectorized")


def shapes(world: str) -> list[Any]:
    """Of everything that a block computes on: minibatches, and the first piece of all of its data."""
    data = from_pairs(federation(world))
    local_data = BlockBatches(data, range(data.clients), Order(5, 0, 50), data.parts)
    some = [*local_data.batches(0, 2), next(iter(local_data.everything()))[0]]
    return [(b.inputs.shape, b.targets.shape, None if b.weights is None else b.weights.shape) for b in some]


def test_no_shape_depends_on_who_has_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(shapes(world) == shapes("present") for world in WORLDS)
    monkeypatch.setattr("fedflat.engine.batches.width_of", lambda data, batch: min(batch, int(data.sizes.max())))
    assert shapes("empty") != shapes("present"), "the twin: a width that follows the largest client"


def test_a_declared_most_is_the_width_and_is_kept() -> None:
    data = replace(from_pairs(clients()), most=15)
    batch = next(iter(BlockBatches(data, range(5), Order(5, 0, 50), data.parts).batches(0, 2)))
    assert batch.inputs.shape[:2] == (5, 15)
    with pytest.raises(InputError, match=r"data\.most: found 11"):
        replace(data, most=11)
