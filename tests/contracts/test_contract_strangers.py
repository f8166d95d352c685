"""Clients of a block are strangers: a message is, bit for bit, a function of its own data and the broadcast."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import clients, drawn, module, recipe, trained_sum
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.assembly.jobs import prepare
from fedflat.backends.in_process import placed_in_blocks
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.types import Algorithm, ClientView, GradientFn, Phase
from fedflat.data.clients import from_pairs
from fedflat.engine.batches import BlockBatches, Order
from fedflat.engine.factored import Factored
from fedflat.engine.mlp import DenseProblem
from fedflat.engine.reduce import EMPTY, Accumulator

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

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(F.dropout(torch.relu(self.body(x)), 0.5, self.training))
        return found


def network(kind: str) -> nn.Module:
    if kind == "dropout":
        return drawn(FunctionalDropout())
    if kind == "dense":
        return module(hidden=17)
    return drawn(
        nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
        )
    )


def messages(world: str, kind: str, method: str, **engine: Any) -> dict[int, Tensor]:
    """Everybody's message in the first round."""
    changes = {"local": {"steps": 4, "batch_size": 5, "lr": 0.3}, "engine": engine}
    return messages_of(prepare(Recipe.of(recipe(method, changes)), network(kind), federation(world)))


def messages_of(made: Any) -> dict[int, Tensor]:
    """Everybody's message in the first round of a job."""
    found = sent_by(made, np.arange(made.data.clients))
    if hasattr(made.backend, "close"):
        made.backend.close()
    return found


def sent_by(made: Any, cohort: np.ndarray) -> dict[int, Tensor]:
    """The message of everybody of the cohort who has data, added in one world."""
    sink = Messages(made.parts)
    trained_sum(made, cohort, sink)
    return dict(zip(cohort[made.data.sizes[cohort] > 0].tolist(), sink.kept, strict=True))


def strangers(kind: str, method: str, **engine: Any) -> None:
    same_but_for_the_watched(lambda world: messages(world, kind, method, **engine), WORLDS[1:])


def same_but_for_the_watched(messages: Callable[[str], dict[int, Tensor]], worlds: Sequence[str]) -> None:
    """Nobody else's message moves from world to world."""
    expected = messages("present")
    for world in worlds:
        found = messages(world)
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


def test_what_draws_random_numbers_is_refused_in_blocks() -> None:
    with pytest.raises(InputError, match=r"engine.backend: found vectorized with training that draws random numbers"):
        messages("present", "dropout", "dp-fedsam", backend="vectorized")


# ------------------------------------------------------- with training that makes another rounding another message


BLOCKS = [(name, block) for name in ("vectorized", "lowrank") for block in (None, 7, 16, 32)]
THERE = np.array([0, 3, 4, 5, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21, 23])


def steep(gradient: GradientFn, view: ClientView) -> GradientFn:
    """A user's own SAM."""

    def rule(w: Tensor) -> Tensor:
        g = gradient(w)
        return gradient(w + 5.0 * g / g.norm().clamp_min(1e-12))

    return rule


def chaotic(backend: str, block: int | None, own: bool = False, steps: int = 10) -> Any:
    """SAM with a large radius on contradictory labels: a difference in the last bit becomes one of the clip's size."""
    draw = np.random.default_rng(1)
    rows = (draw.standard_normal((6, 24), dtype=np.float32) for _ in range(24 if own else 32))
    inputs = [torch.from_numpy(2 * row).repeat(2, 1) for row in rows]
    labels = torch.arange(6).repeat(2).add(torch.arange(2).repeat_interleave(6)) % 3
    network = drawn(nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 3)))
    changes = {
        "algorithm": {"name": "dp-fedsam", "rho": 5.0}, "cohort": {"size": 12},
        "local": {"steps": steps, "batch_size": 5, "lr": 1.0, "momentum": 0.0},
        "engine": {"backend": backend, "block": block, "processes": 2},
    }  # fmt: skip
    method = Algorithm("own", phases=(Phase(rule=steep),), momentum=0.0) if own else None
    made = Recipe.of(recipe("dp-fedsam", changes))
    return prepare(made, network, [(x, labels) for x in inputs], algorithm=method)


def moved_by_a_coin(made: Any) -> int:
    """How many messages are not the same bits, whoever else is in the cohort."""
    whole, worlds = sent_by(made, THERE), [THERE[1:], np.delete(THERE, [2, 3]), THERE[::2], THERE[:1]]
    found = [(client, message) for world in worlds for client, message in sent_by(made, world).items()]
    return sum(not torch.equal(whole[client], message) for client, message in found)


@pytest.mark.parametrize(("backend", "block", "own"), [*((*b, False) for b in BLOCKS), ("lowrank", 7, True)])
def test_a_coin_of_one_client_moves_no_other_clients_message(backend: str, block: int | None, own: bool) -> None:
    made = chaotic(backend, block, own)
    assert moved_by_a_coin(made) == 0
    assert made.backend.factors is not None or backend == "vectorized"
    assert made.backend.lanes in ({1, 16} if block == 32 else {None, 1, 16})


@pytest.mark.long
@pytest.mark.parametrize("block", [7, 32])
def test_nor_where_factors_have_four_times_as_many_rows(block: int) -> None:
    assert moved_by_a_coin(chaotic("lowrank", block, steps=40)) == 0


def other_places(monkeypatch: pytest.MonkeyPatch, places: slice) -> Any:
    """A job whose gradients are a little longer in these places of a block."""
    plain = DenseProblem.gradient

    def other(self: DenseProblem, weights: Tensor, part: Any, batch: Any) -> Any:
        found = plain(self, weights, part, batch)
        found.vector[places] *= 1 + 2.0**-20
        return found

    monkeypatch.setattr(DenseProblem, "gradient", other)
    return chaotic("vectorized", 32)


def test_places_that_compute_in_another_way_are_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    made = other_places(monkeypatch, slice(0, None, 2))
    assert moved_by_a_coin(made) == 0
    assert made.backend.lanes == 16


@pytest.mark.parametrize("believed", [False, True])
def test_blocks_whose_halves_compute_in_two_ways_have_no_lanes(believed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if believed:  # the twin: no trial
        monkeypatch.setattr("fedflat.backends.choose._lanes", lambda *_: 16)
    made = other_places(monkeypatch, slice(16, None))
    assert (moved_by_a_coin(made) > 0) == believed
    assert made.backend.lanes == (16 if believed else None)


def test_places_whose_clip_is_another_are_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.pieces.clipping.norms_of", lambda m: m.norm(dim=1) + 2.0**-20 * torch.arange(len(m)))
    assert sent_by(made := chaotic("vectorized", 32), THERE)
    assert made.backend.lanes is None


def in_order(clients: np.ndarray, size: int, lanes: int | None) -> np.ndarray:
    """Blocks cut from the cohort as it comes, so that a coin moves the places of all behind it: as it was."""
    return np.concatenate([clients, np.full(-len(clients) % size, EMPTY)]).reshape(-1, size)


@pytest.mark.parametrize("block", [5, 7])
def test_the_twin_with_places_that_follow_the_cohort_is_caught(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.backends.in_process.placed_in_blocks", in_order)
    assert moved_by_a_coin(chaotic("vectorized", block)) > 0


def test_a_place_follows_from_the_clients_number_alone() -> None:
    assert placed_in_blocks(np.array([1, 4, 6, 7, 9]), 3).tolist() == [[6, 1, EMPTY], [9, 4, EMPTY], [EMPTY, 7, EMPTY]]
    assert placed_in_blocks(np.array([1, 3, 5, 7, 9]), 4, 2).tolist() == [
        [EMPTY, 1, EMPTY, 3],
        [EMPTY, 5, EMPTY, 7],
        [EMPTY, 9, EMPTY, EMPTY],
    ]
    assert placed_in_blocks(np.arange(6), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert placed_in_blocks(np.array([], dtype=np.int64), 3).shape == (0, 3)


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
