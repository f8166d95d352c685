"""What all parties of a deployment hold alike: the recipe, the public form of the data, and a hash over both (the
pin).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, wrong
from fedflat.core.types import Algorithm
from fedflat.data.clients import FederatedData
from fedflat.federation.roster import Roster
from fedflat.federation.wire import PROTOCOL

RECIPE, TASK, ROSTER = "recipe.yaml", "task.json", "roster.json"


@dataclass(frozen=True)
class DataSpec:
    """The public form of the data: shape and type of one example, number of classes and clients."""

    name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    clients: int
    vocabulary: int = 0
    padding: int = 0

    @classmethod
    def of(cls, data: FederatedData) -> DataSpec:
        """The form of a federation's data."""
        kind = str(data.inputs.dtype).removeprefix("torch.")
        return cls(data.name, data.input_shape, kind, data.classes, data.clients, data.vocabulary, data.padding)

    def empty(self) -> Tensor:
        """Inputs ``(0, …)`` of this form: a client without an example."""
        return torch.zeros(0, *self.input_shape, dtype=getattr(torch, self.input_dtype))

    def federation(
        self,
        client: int | None = None,
        own: tuple[Tensor, Tensor] | None = None,
        test: tuple[Tensor, Tensor] | None = None,
    ) -> FederatedData:
        """What one party sees of the federation: its own examples if it is a client, the public test set if it has
        one.
        """
        inputs, targets = own if own is not None else (self.empty(), torch.zeros(0, dtype=torch.int64))
        nothing = np.empty(0, dtype=np.int64)
        parts = [nothing] * self.clients
        if client is not None:
            parts[client] = np.arange(len(inputs), dtype=np.int64)
        held = (nothing,) * self.clients
        shown, answers = test if test is not None else (None, None)
        return FederatedData(
            inputs, targets, tuple(parts), held, shown, answers, self.classes, self.name, self.vocabulary, self.padding
        )

    def check(self, where: str, inputs: Tensor, targets: Tensor) -> None:
        """Raise InputError unless a party's examples have this form."""
        if tuple(inputs.shape[1:]) != tuple(self.input_shape):
            raise wrong(
                f"{where}: inputs", f"shape {tuple(inputs.shape[1:])} per example", str(tuple(self.input_shape))
            )
        if str(inputs.dtype) != f"torch.{self.input_dtype}":
            raise wrong(f"{where}: inputs", str(inputs.dtype), self.input_dtype)
        if targets.dtype != torch.int64 or len(targets) != len(inputs):
            raise wrong(f"{where}: targets", f"{len(targets)} of {targets.dtype}", f"{len(inputs)} of torch.int64")
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < self.classes:
            raise wrong(
                f"{where}: targets", f"{int(targets.min())} to {int(targets.max())}", f"0 to {self.classes - 1}"
            )


@dataclass(frozen=True)
class Task:
    """One deployment's recipe, data form and roster.

    pin: the same hash over all three at every party. identity: over recipe and form only, so that a run goes on when a
    client's key was rotated.
    """

    recipe: Recipe
    form: DataSpec
    roster: Roster
    pin: str
    identity: str = ""

    @classmethod
    def read(cls, folder: Path) -> Task:
        """The task in an app's folder; InputError if a file is missing or damaged."""
        roster = Roster.read(folder / ROSTER)
        try:
            found = json.loads((folder / TASK).read_text(encoding="utf-8"))
            form = DataSpec(**{**found["form"], "input_shape": tuple(found["form"]["input_shape"])})
            texts = [(folder / name).read_bytes() for name in (RECIPE, TASK, ROSTER)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{folder}: found no task ({error}); allowed: the folder that fedflat deploy wrote."
            ) from error
        if found.get("protocol") != PROTOCOL:
            raise wrong(
                f"{folder / TASK}: protocol", found.get("protocol"), f"{PROTOCOL}, as this version of fedflat speaks"
            )
        if roster.clients != form.clients:
            raise wrong(str(folder / ROSTER), f"{roster.clients} clients", f"{form.clients}, as in {TASK}")
        return cls(Recipe.load(folder / RECIPE), form, roster, pin_of(texts), pin_of(texts[:2]))

    def write(self, folder: Path) -> None:
        """Write task.json and roster.json beside the recipe."""
        write_form(folder, self.form)
        (folder / ROSTER).write_text(json.dumps(self.roster.dump(), indent=1) + "\n", encoding="utf-8")


def write_form(folder: Path, form: DataSpec) -> None:
    """Write the public form of the data to ``task.json`` in the folder."""
    value: Mapping[str, Any] = {"protocol": PROTOCOL, "form": asdict(form)}
    (folder / TASK).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def pin_of(texts: list[bytes]) -> str:
    """SHA-256 (hex) of files, unambiguously joined."""
    return hashlib.sha256(b"".join(len(text).to_bytes(8, "big") + text for text in texts)).hexdigest()


def check_deployable(recipe: Recipe, method: Algorithm, trust: str) -> None:
    """Refuse what has no sound form on real machines, with the reason."""
    privacy = recipe.privacy
    if privacy.protocol == "published":
        hint = "A published procedure without a proof is for reproducing tables, not for people's data."
        raise wrong("privacy.protocol", "published", "sound", hint=hint)
    if recipe.after is not None:
        raise wrong("after", recipe.after, "nothing in a deployment", hint="Simulate it: fedflat run.")
    if recipe.task not in ("classification", "next-token") or recipe.loss is not None:
        found = recipe.task if recipe.loss is None else f"{recipe.task} with a loss of one's own"
        raise wrong("task", found, "classification or next-token", hint="Simulate it: fedflat run.")
    if privacy.noise_cohort is not None:
        raise wrong(
            "privacy.noise_cohort", privacy.noise_cohort, "nothing", hint="A deployment has the clients it has."
        )
    if recipe.start is not None and (method.vectors > 1 or method.client_state):
        hint = "Its messages, or what clients keep, are others in round 0. Simulate it: fedflat run."
        raise wrong("start", f"{recipe.start.kind} with {method.name}", "nothing in a deployment", hint=hint)
    if method.kind == "votes":
        raise wrong(
            "algorithm.name", method.name, "a method whose message is an update", hint="Simulate it: fedflat run."
        )
    if trust == "distributed" and method.kind != "ddgauss":
        hint = "Only whole-number messages can be added under masks."
        raise wrong("algorithm.name", f"{method.name} with trust: distributed", "ddgauss, or trust: central", hint=hint)


if __name__ == "__main__":  # python -m fedflat.federation.task APP: the pin of an app, for a client's node config
    print(Task.read(Path(sys.argv[1])).pin)
