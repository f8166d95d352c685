"""Contract 2, driven through the real path: one client's data, however hostile, moves a release by C at most.

Every method, on every back end, on hostile data; every planted defect must be caught by the same pairs of worlds.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import planted
import pytest
import torch
from planted import PLANTED, SEED_ONLY, planted_scenario, scenario, violations_of
from small_federation import PRIVATE
from torch import nn

from fedflat.algorithms import ALGORITHMS
from fedflat.audit.movements import shared_noise
from fedflat.audit.worlds import SLACK, Case, Engine, Scenario, Worlds
from fedflat.config.recipe import Recipe
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm

EVERY = [*PRIVATE, "ddgauss", "ae-dpfl"]
SHORT = [
    Case("ordinary"), Case("cancelling 1e6", start="even"), Case("no gradient", start="even"),
    Case("no gradient", others="constant", start="even", last=True), Case("pixels", others="pixels", start="even"),
    Case("ordinary", others="opposite 1e6"), Case("ordinary", others="cancelling 1e6"),
    Case("ordinary", others="cancelling 1e6", start="even"), Case("huge 1e14"), Case("huge 1e6", start="later"),
]  # fmt: skip
FEW = [*SHORT[1:6:2], *SHORT[-3:-1]]
"""For each method: all of them one by one, and some by each other back end, so that every pair is met."""
MODELS: dict[str, tuple[int, int, Any]] = {
    "linear 12": (12, 2, lambda: [nn.Linear(12, 2)]), "linear 64": (64, 10, lambda: [nn.Linear(64, 10)]),
    "relu": (12, 2, lambda: [nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)]),
    "dropout": (12, 2, lambda: [nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 2)]),
}  # fmt: skip
ENGINES = (Engine("sequential"), Engine("vectorized"), Engine("vectorized", {"block": 2}), Engine("lowrank"))


def stage(method: str, model: str = "relu", **changes: Any) -> Scenario:
    inputs, classes, layers = MODELS[model]
    with seeded_torch(0, "worlds"):
        return scenario(method, layers(), (torch.randn(40, inputs), torch.arange(40) % classes), **changes)


def too_far(of: Scenario, engine: Engine, cases: Sequence[Case]) -> list[str]:
    """The pairs of worlds that are further apart than C; none where the back end refuses the combination."""
    worlds, found = Worlds(of), []
    for case in cases:
        moved = worlds.movement(engine, case)
        if moved.refused:
            return []
        if moved.over:
            found.append(f"{case.name}: {moved.value:.6g} {moved.stopped}")
    return found


def named(engine: Engine) -> str:
    return f"{engine.name}{engine.settings.get('block', '')}"


@pytest.mark.parametrize("engine", ENGINES, ids=named)
@pytest.mark.parametrize("model", MODELS)
def test_dp_fedavg_on_every_model(model: str, engine: Engine) -> None:
    cases = SHORT if engine is ENGINES[0] or model == "relu" else FEW
    assert too_far(stage("dp-fedavg", model), engine, cases) == []


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1], ENGINES[3]], ids=named)
@pytest.mark.parametrize("method", EVERY)
def test_every_method_on_every_back_end(method: str, engine: Engine) -> None:
    made = stage(method, "relu" if ALGORITHMS[method]().head is not None else "linear 12")
    few = {"sequential": FEW, "vectorized": FEW[::2], "lowrank": FEW[1::2]}[engine.name]
    cases = few if made.method.head is None else [Case("ordinary"), Case("huge 1e6"), Case("cancelling 1e6")]
    later = (
        [Case("cancelling 1e6", start="later"), Case("huge 1e6", start="later")]
        if any(name in method for name in ("pgn", "nsam", "disk"))
        else []
    )
    assert too_far(made, engine, [*cases, *later]) == []


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1]], ids=named)
def test_local_adam(engine: Engine) -> None:
    made = stage("dp-fedsam")
    adam = Recipe.of({**made.recipe.dump(), "local": {"steps": 2, "batch_size": 3, "lr": 0.3, "optimizer": "adam"}})
    assert too_far(replace(made, recipe=adam), engine, FEW) == []


def test_the_harness_is_no_formality() -> None:
    """A client at the clip moves the release by C, not less; the weights agree with the mean."""
    moved = Worlds(stage("dp-fedavg")).movement(ENGINES[0], Case("ordinary"))
    assert moved.total == pytest.approx(1, abs=1e-5)
    assert moved.weights == pytest.approx(1, abs=1e-5 + moved.floor)
    assert moved.floor < SLACK / 4


MODULES = [planted.RunningMean, planted.CodeBook, planted.InADict, planted.InAList]


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_model_that_remembers_is_refused_or_restored(kind: Any) -> None:
    made = stage("dp-fedavg", "linear 12")
    with seeded_torch(0, "worlds"):
        made = Scenario(made.recipe, kind(12, 2), made.template)
    assert too_far(made, ENGINES[0], [Case("ordinary"), Case("huge 1e6")]) == []


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1], ENGINES[3]], ids=lambda engine: engine.name)
@pytest.mark.parametrize("transform", ["mixes", "remembers", "shortens"])
def test_a_users_transform_is_refused_or_harmless(transform: str, engine: Engine) -> None:
    own = {"mixes": planted.mixes, "remembers": planted.Remembers(), "shortens": planted.shortens}[transform]
    made = stage("dp-fedavg", "linear 12", algorithm=Algorithm("own", transforms=(own,)))
    assert too_far(made, engine, [Case("ordinary"), Case("huge 1e6")]) == []


def test_two_runs_share_noise_only_where_recipe_data_and_seed_are_the_same() -> None:
    assert shared_noise(stage("dp-fedavg", "linear 64")) == ()


@pytest.mark.parametrize("name", [*PLANTED, SEED_ONLY])
def test_every_planted_defect_is_caught(name: str) -> None:
    assert violations_of(name)


@pytest.mark.parametrize("model", ["linear", "dropout"])
def test_without_the_defect_the_same_worlds_are_within_c(model: str) -> None:
    cases = tuple(dict.fromkeys(case for twin in PLANTED.values() if twin.model == model for case in twin.cases))
    name = next(name for name, twin in PLANTED.items() if twin.model == model)
    made = planted_scenario(name)
    assert too_far(Scenario(made.recipe, made.module, made.template), ENGINES[0], cases) == []
