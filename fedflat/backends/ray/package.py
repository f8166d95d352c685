"""A run as it travels to Ray's workers: large things are arrays, which workers of a machine share and read in place."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.backends.sequential import Sequential
from fedflat.core.checks import RunError
from fedflat.core.loss import Objective
from fedflat.core.params import Layout
from fedflat.core.types import Algorithm, Local
from fedflat.data.clients import Federated, Indices
from fedflat.engine.problem import ModuleProblem

USER_FILES = "fedflat_user_"
"""How modules read from a user's file are named; other processes have no such modules."""

ROWS = {"inputs", "targets", "parts", "held_back", "test_inputs", "test_targets", "names"}
"""Fields of a federation that hold examples, or whose they are; the others are public constants."""


@dataclass(frozen=True)
class Rows:
    """Each client's row numbers, one after the other: a million small arrays would take seconds to unpack."""

    rows: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, client: int) -> Indices:
        if not 0 <= client < len(self):
            raise IndexError(client)
        return cast(Indices, self.rows[self.ends[client] : self.ends[client + 1]])


@dataclass(frozen=True)
class Package:
    """What a worker needs: method, local settings, an empty module and the training data.

    Neither test data nor examples held back for tests are in it, nor anything of cohorts and noise.
    module: its trained parameters, and the frozen ones named in ``frozen``, have no entries.
    inputs: as stored; ``last`` says that it is ``(N, H, W, C)``. versions: of what computes.
    """

    algorithm: Algorithm
    module: nn.Module
    layout: Layout
    precision: str
    onednn: bool
    objective: Objective
    local: Local
    seed: int
    frozen: dict[str, np.ndarray]
    inputs: np.ndarray
    last: bool
    targets: np.ndarray
    parts: Rows
    facts: dict[str, Any]
    versions: dict[str, str]

    def open(self) -> Sequential:
        """The sequential back end on this package's data. Raises RunError where other versions would compute it."""
        found = versions()
        if found != self.versions:
            raise RunError(f"a machine of the Ray cluster has {_told(found)}, the driver {_told(self.versions)}")
        parameters = dict(self.module.named_parameters())
        for name, values in self.frozen.items():
            parameters[name].data = view_of(values)
        inputs = view_of(self.inputs)
        data = Federated(
            inputs=inputs.permute(0, 3, 1, 2) if self.last else inputs,
            targets=view_of(self.targets),
            parts=cast("tuple[Indices, ...]", self.parts),
            held_back=(),
            test_inputs=None,
            test_targets=None,
            **self.facts,
        )
        problem = ModuleProblem(self.module, self.layout, self.precision, onednn=self.onednn, objective=self.objective)
        return Sequential(self.algorithm, problem, self.local, data, self.seed)


def packed(inner: Sequential) -> Package:
    """The package of a run. Classes from the user's own script or model file are sent along by value."""
    _send_user_files()
    module, frozen = _emptied(inner.problem)
    data = inner.data
    rows = np.concatenate([*data.parts, np.empty(0, np.int64)])
    ends = np.concatenate([[0], np.cumsum(data.sizes)])
    inputs, last = _stored(data.inputs)
    targets = array_of(data.targets)
    used = np.unique(rows)
    if len(used) < len(inputs):
        rows, inputs, targets = np.searchsorted(used, rows), inputs[used], targets[used]
    return Package(
        algorithm=inner.algorithm,
        module=module,
        layout=inner.problem.layout,
        precision=inner.problem.precision,
        onednn=inner.problem.onednn,
        objective=inner.problem.objective,
        local=inner.local,
        seed=inner.seed,
        frozen=frozen,
        inputs=inputs,
        last=last,
        targets=targets,
        parts=Rows(rows, ends),
        facts={f.name: getattr(data, f.name) for f in fields(data) if f.name not in ROWS},
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """What decides the numbers a worker computes."""
    return {name: str(sys.modules[name].__version__) for name in ("fedflat", "torch", "numpy")}


def array_of(value: Any) -> Any:
    """A tensor as an array with the same values (16-bit floats widened); anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    return value.contiguous().numpy()


def view_of(array: np.ndarray) -> Tensor:
    """A tensor on an array's memory, which may be read-only: nothing in the engine writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _told(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _stored(inputs: Tensor) -> tuple[np.ndarray, bool]:
    """Inputs as they lie in memory: images that are channels-last stay so."""
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()
    return array_of(inputs.permute(0, 2, 3, 1) if last else inputs), last


def _emptied(problem: ModuleProblem) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """A copy of the module without its trained parameters, which are bound to the round's vector, and without frozen
    ones, which come back as arrays."""
    module, frozen = copy.deepcopy(problem.module), {}
    for name, parameter in module.named_parameters():
        if name not in problem.layout.names:
            if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                continue
            frozen[name] = array_of(parameter)
        parameter.data = torch.empty(0)
    return module, frozen


def _send_user_files() -> None:
    from ray import cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith(USER_FILES):
            cloudpickle.register_pickle_by_value(module)
