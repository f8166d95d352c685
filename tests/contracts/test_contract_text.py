"""Text models without pretrained weights: a client's update is the same bits whatever another client wrote."""

from typing import Any

import numpy as np
import pytest
import torch
from small_federation import SIZES, drawn, recipe
from test_contract_strangers import WATCHED, messages_of, same_but_for_the_watched
from torch import Tensor, nn

from fedflat.assembly.jobs import prepare
from fedflat.audit.worlds import Engine, Scenario, Worlds
from fedflat.backends import features
from fedflat.config.recipe import Recipe
from fedflat.data.clients import FederatedData, from_pairs
from fedflat.models import BUILDERS, build
from fedflat.models.text import WordCounts

LENGTH, IDS = 12, 30
MODELS: dict[str, dict[str, Any]] = {"bow-linear": {"vocabulary": IDS}, "bow-overlap": {}, "char-linear": {}}
WORLDS = ("empty", "largest id", "padding alone", "separators alone", "many more")
ENGINES = ({"backend": "sequential"}, {"backend": "vectorized", "block": 3})


def module_of(name: str) -> nn.Module:
    return drawn(build(name, (LENGTH,), IDS if name == "char-linear" else 2, 0, **MODELS[name]), 0, 0.1)


def federation(name: str, world: str) -> FederatedData:
    draw, pairs = np.random.default_rng(0), []
    for client, n in enumerate(SIZES):
        ids = torch.from_numpy(draw.integers(1, IDS, (n, LENGTH)))
        ids[torch.arange(LENGTH) >= torch.from_numpy(draw.integers(1, LENGTH + 1, (n, 1)))] = 0
        y = torch.from_numpy(draw.integers(0, IDS, (n, LENGTH)) if name == "char-linear" else draw.integers(0, 2, n))
        if client == WATCHED:
            single = {"largest id": IDS - 1, "padding alone": 0, "separators alone": 1}.get(world)
            ids = ids if single is None else torch.full_like(ids, single)
            again = {"empty": 0, "many more": 9}.get(world, 1)
            ids, y = torch.cat([ids, ids[:0], *[ids] * 8])[: n * again], torch.cat([y, *[y] * 8])[: n * again]
        pairs.append((ids, y))
    test = (
        torch.full((1, LENGTH), IDS - 1).index_fill(1, torch.tensor([0]), 1),  # no row of a client's
        torch.full((1, LENGTH), IDS - 1) if name == "char-linear" else torch.ones(1).long(),
    )
    return from_pairs(pairs, test)


def made_recipe(name: str, engine: dict[str, Any]) -> Recipe:
    task = {"task": "next-token"} if name == "char-linear" else {}
    return Recipe.of(recipe("dp-fedavg", {"local": {"steps": 3, "batch_size": 5, "lr": 0.3}, "engine": engine, **task}))


def messages(name: str, world: str, engine: dict[str, Any]) -> dict[int, Tensor]:
    return messages_of(prepare(made_recipe(name, engine), module_of(name), data=federation(name, world)))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["backend"])
@pytest.mark.parametrize("name", MODELS)
def test_clients_are_strangers(name: str, engine: dict[str, Any]) -> None:
    sent = {world: messages(name, world, engine) for world in ("present", *WORLDS)}
    same_but_for_the_watched(sent.__getitem__, WORLDS)
    assert all(message.any() for message in sent["present"].values())
    # The comparison sees a difference where there is one.
    assert not torch.equal(sent["padding alone"][WATCHED], sent["present"][WATCHED])


class Together(WordCounts):
    """Counts whose size follows from who shares a batch."""

    def features(self, inputs: Tensor) -> Tensor:
        found = super().features(inputs)
        return found / found.norm().clamp(min=1.0)


def test_a_twin_with_two_clients_in_one_batch_of_features_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch is one client's, such a body is its own affair."""

    def one_batch(module: nn.Module, inputs: Tensor, precision: str, owned: Any = None) -> Tensor:
        return computed(module, inputs, precision)

    monkeypatch.setitem(BUILDERS, "bow-linear", Together)
    computed = features.computed
    for twin in (False, True):
        if twin:
            monkeypatch.setattr(features, "computed", one_batch)
        expected, found = (messages("bow-linear", world, ENGINES[0]) for world in ("present", "largest id"))
        assert all(torch.equal(found[client], expected[client]) for client in (set(found) - {WATCHED})) != twin


@pytest.mark.parametrize("engine", [Engine("sequential"), Engine("vectorized")], ids=lambda engine: engine.name)
@pytest.mark.parametrize("name", MODELS)
def test_a_text_moves_a_release_by_the_clip_at_most(name: str, engine: Engine) -> None:
    scenario = Scenario(made_recipe(name, {}), module_of(name), federation(name, "present"))
    worlds = Worlds(scenario)
    for case in scenario.cases:
        moved = worlds.movement(engine, case)
        assert not moved.over and not moved.stopped, (case.name, moved.value, moved.stopped)
