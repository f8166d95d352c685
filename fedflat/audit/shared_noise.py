"""Whether two runs share noise: one subtracted from the other would then be the noiseless truth.

Noise of a run is read off it: the released mean with noise, less the one without, through ``simulation.run``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedflat.audit.hostile import Case, Maker, federation
from fedflat.audit.worlds import Engine, Recorder, Scenario, world_recipe
from fedflat.config.recipe import Recipe
from fedflat.engine.train import Job
from fedflat.simulation import run as simulation

ALIKE = 0.99
"""Cosine from which two noises are one; independent ones of a few entries stay below it."""
OTHER: Mapping[str, tuple[str, ...]] = {
    "local.lr": ("local.lr=0.0123",),
    "privacy.clip": ("privacy.clip=0.0321",),
    "server.lr": ("server.lr=0.5",),
    "seed": ("seed=987654",),
    "data": (),
}
"""What the second run has otherwise; its data is another federation's where it is ``data``."""


def shared_noise(stage: Scenario) -> tuple[str, ...]:
    """The settings in ``OTHER`` in which a second run of the stage still has the first one's noise.

    Raises InputError where the recipe cannot run, RunError where it stops.
    """
    first = _noise(stage, (), "ordinary")
    if _cosine(first, _noise(stage, (), "ordinary")) < ALIKE and not stage.recipe.privacy.secure_rng:
        return ("nothing at all (the same run twice has other noise)",)
    found = {
        name: _noise(stage, changes, "duplicated" if name == "data" else "ordinary")
        for name, changes in OTHER.items()
        if name != "server.lr" or stage.method.kind != "votes"
    }
    return tuple(name for name, noise in found.items() if _cosine(first, noise) >= ALIKE)


def _noise(stage: Scenario, changes: tuple[str, ...], data: str) -> Tensor:
    noisy, plain = (_mean(stage, changes, data, noise) for noise in (True, False))
    return noisy - plain


def _mean(stage: Scenario, changes: tuple[str, ...], kind: str, noise: bool) -> Tensor:
    maker, recorder = Maker(stage.template), Recorder()
    recipe = Recipe.of(
        world_recipe(stage.recipe, stage.clients, Engine("sequential"), 1, Case(kind, noise=noise)), changes
    )
    pairs = [maker.make(kind, client) for client in range(stage.clients)]

    def start(job: Job) -> None:
        if stage.change is not None:
            stage.change(job)
        method = job.parts.algorithm
        job.parts = replace(job.parts, algorithm=replace(method, server=(recorder, *method.server)))

    given: dict[str, Any] = {"algorithm": stage.algorithm, "data": federation(stage.template, pairs, maker.public())}
    simulation.run(recipe, stage.module, on_start=start, **given)
    return recorder.mean if recorder.mean is not None else torch.zeros(1)


def _cosine(a: Tensor, b: Tensor) -> float:
    found = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    return float(found)
