"""A method may bring its own server optimiser: what it is told of the noise is the plan's, and nothing else is set."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat import Algorithm, InputError
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.jobs import prepare
from fedflat.assembly.records import settled
from fedflat.config.method import server_of
from fedflat.config.recipe import Recipe
from fedflat.core.rounding import ROUNDING
from fedflat.core.types import MeanView, Optimizer

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

CLIENTS = 5


def recipe(method: str = "dp-fedadam", **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "rounds": 2, "algorithm": {"name": method}, "local": {"steps": 2, "batch_size": 4, "lr": 0.2},
        "cohort": {"size": 4.0}, "privacy": {"clip": 0.5, "noise_multiplier": 1.5, "delta": 1e-3},
        "engine": {"backend": "sequential"},
    }  # fmt: skip
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, Mapping) else values
    return base


def clients() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(CLIENTS)]


def seen(**sections: Any) -> list[tuple[float, MeanView]]:
    """What the optimiser of a method is told, round by round (the trial of pieces asks twice before)."""
    told: list[tuple[float, MeanView]] = []

    def spy(lr: float, view: MeanView) -> Optimizer:
        told.append((lr, view))
        return lambda w, mean, slots: (w + lr * mean, {})

    method = Algorithm("own", optimizer=spy, server_lr=0.25)
    result = fedflat.run(recipe(**sections), model=nn.Linear(4, 3), clients=clients(), algorithm=method)
    assert [r["clip"] for r in result.history] == [view.clip for _, view in told[2:]]
    return told[2:]


def test_it_is_told_the_plans_noise_over_the_constant_divisor() -> None:
    for lr, view in seen():
        assert lr == 0.25
        assert view == MeanView(1.5 * 0.5 * (1 + ROUNDING) / 4.0, 0.5, 4.0)
    assert [lr for lr, _ in seen(server={"lr": 2.0})] == [2.0, 2.0]
    assert [view.std for _, view in seen(privacy={"noise_multiplier": 0.0})] == [0.0, 0.0]


def test_with_an_adaptive_clip_it_is_told_each_rounds_own() -> None:
    clip = {"kind": "adaptive", "initial": 0.3, "count_noise": 2.0}
    first, second = (view for _, view in seen(privacy={"clip": clip}))
    assert first.clip == 0.3 != second.clip
    multiplier = (1.5**-2 - 4.0**-2) ** -0.5
    for view in (first, second):
        assert view.std == pytest.approx(multiplier * view.clip * (1 + ROUNDING) / 4.0, rel=1e-12)


@pytest.mark.parametrize(
    ("sections", "shares"),
    [
        ({"privacy": {"trust": "local"}}, 4.0),
        ({"privacy": {"trust": "distributed"}, "cohort": {"size": 5.0, "min": 2}}, 5.0 / 2),
        ({"privacy": {"secure_rng": True}}, 1.0),
        ({"privacy": {"secure_rng": True, "trust": "local"}}, 4.0),
    ],
)
def test_where_clients_bring_noise_it_is_that_of_the_expected_cohort(sections: dict[str, Any], shares: float) -> None:
    """Never the realised cohort's, which is secret: it is the same number in every round."""
    told = [view for _, view in seen(**sections)]
    expected = 1.5 * 0.5 * (1 + ROUNDING) / told[0].divisor * math.sqrt(shares)
    assert [view.std for view in told] == [pytest.approx(expected, rel=1e-12)] * len(told)


@pytest.mark.parametrize(("key", "value"), [("optimizer", "sgd"), ("optimizer", "yogi"), ("momentum", 0.5)])
def test_another_one_beside_it_is_refused_with_the_reason(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"server\.{key}: found .*dp-fedadam\. The method brings its own"):
        prepare(Recipe.of(recipe(server={key: value})), nn.Linear(4, 3), clients())


def test_keys_are_those_of_the_optimiser_that_stands_for_none() -> None:
    """Momentum is sgd's, with and without its name; the keys of adam are no one's beside it."""
    assert prepare(Recipe.of(recipe("dp-fedavg", server={"momentum": 0.5})), nn.Linear(4, 3), clients())
    with pytest.raises(InputError, match=r"server\.beta2: found 0\.9; allowed: nothing with optimizer: sgd"):
        Recipe.of(recipe("dp-fedavg", server={"beta2": 0.9}))
    with pytest.raises(InputError, match=r"server\.tau: found 0\.1"):
        Recipe.of(recipe(server={"tau": 0.1}))


def test_it_is_refused_where_it_could_not_know_the_noise() -> None:
    published = recipe(privacy={"protocol": "published", "published": "004"})
    with pytest.raises(InputError, match=r"privacy\.protocol: found published; .*sound for dp-fedadam"):
        prepare(Recipe.of(published), nn.Linear(4, 3), clients())
    discrete = Algorithm("own", kind="ddgauss", optimizer=ALGORITHMS["dp-fedadam"]().optimizer)
    with pytest.raises(InputError, match=r"algorithm\.optimizer: found .* ddgauss"):
        server_of(Recipe.of(recipe()), discrete)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda w, mean, slots: (w[1:], {}), r"algorithm\.optimizer .*: found shape"),
        (lambda w, mean, slots: w, r"algorithm\.optimizer .*: found Tensor returned"),
        (lambda w, mean, slots: (w / slots["none"], {}), r"algorithm\.optimizer .*: found KeyError"),
    ],
)
def test_it_is_tried_before_training(made: Optimizer, sentence: str) -> None:
    method = Algorithm("own", optimizer=lambda lr, view: made)
    with pytest.raises(InputError, match=sentence):
        prepare(Recipe.of(recipe()), nn.Linear(4, 3), clients(), algorithm=method)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ({}, ("sgd", 1.0)),
        ({"optimizer": "adam"}, ("adam", 0.03)),
        ({"optimizer": "yogi"}, ("yogi", 0.03)),
        ({"optimizer": "yogi", "lr": 1.0}, ("yogi", 1.0)),
        ({"optimizer": "sgd", "lr": 0.3}, ("sgd", 0.3)),
    ],
)
def test_every_optimiser_has_a_learning_rate_that_works(server: dict[str, Any], expected: tuple[str, float]) -> None:
    """And the recipe that is written down says which; settling it again changes nothing."""
    job = prepare(Recipe.of(recipe("dp-fedavg", server=server)), nn.Linear(4, 3), clients())
    found = settled(Recipe.of(recipe("dp-fedavg", server=server)), job.parts, CLIENTS)
    assert (found["server"]["optimizer"], found["server"]["lr"]) == expected
    assert settled(Recipe.of(found), job.parts, CLIENTS) == found
    assert job.parts.optimizer(MeanView(0.1, 1.0, 4.0)).lr == expected[1]  # type: ignore[attr-defined]


def test_a_settled_recipe_names_no_optimiser_that_is_not_used() -> None:
    job = prepare(Recipe.of(recipe()), nn.Linear(4, 3), clients())
    found = settled(Recipe.of(recipe()), job.parts, CLIENTS)
    assert found["server"]["optimizer"] is None
    assert found["server"]["lr"] == ALGORITHMS["dp-fedadam"]().server_lr
    assert settled(Recipe.of(found), job.parts, CLIENTS) == found


@pytest.mark.parametrize("method", ["dp-fedadam", "dp-fednsam", "dp-disk"])
def test_stopped_and_resumed_it_ends_as_if_never_stopped(method: str, tmp_path: Path) -> None:
    """The moments, the number of updates, the filter and the last move are in the checkpoint."""
    run = functools.partial(fedflat.run, recipe(method, rounds=4), model=nn.Linear(4, 3), clients=clients())
    whole, turns = run(out=tmp_path / "whole"), iter([False, False, True])
    run(out=tmp_path / "stopped", should_stop=lambda: next(turns))
    found = run(out=tmp_path / "stopped", resume=True)
    for a, b in zip(whole.model.parameters(), found.model.parameters()):
        assert torch.equal(a, b)
