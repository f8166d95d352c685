"""A run as it travels to Ray's workers: large things are arrays, which workers of a machine share and read in place."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.backends.resident import shown, stored
from fedflat.backends.sequential import Sequential
from fedflat.core.checks import RunError
from fedflat.core.types import Algorithm, Local
from fedflat.data.clients import FederatedData
from fedflat.engine.problem import ModuleProblem

USER_FILES = "fedflat_user_"
"""How modules read from a user's file are named; other processes have no such modules."""
CONSTANTS = ("classes", "name", "vocabulary", "padding", "most")
"""What travels of a federation besides training examples: public constants."""


@dataclass(frozen=True)
class Package:
    """What a worker needs: method, local settings, an empty module and the training data.

    Neither test data nor examples held back for tests are in it, nor anything of cohorts and noise.
    problem: of a module whose trained parameters, and the frozen ones named in ``frozen``, have no entries.
    arrays: ``inputs`` as stored (``last``: ``(N, H, W, C)``), ``targets``, and the clients' rows, one after the other:
    client i's end at ``ends[i]``. versions: of what computes.
    """

    algorithm: Algorithm
    local: Local
    seed: int
    problem: partial[ModuleProblem]
    frozen: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]
    last: bool
    constants: dict[str, Any]
    versions: dict[str, str]

    def open(self) -> Sequential:
        """The sequential back end on this package's data. Raises RunError where other versions would compute it."""
        if (found := versions()) != self.versions:
            raise RunError(f"a machine of the Ray cluster has {_told(found)}, the driver {_told(self.versions)}")
        parameters = dict(self.problem.args[0].named_parameters())
        for name, values in self.frozen.items():
            parameters[name].data = view_of(values)
        inputs, targets = shown(view_of(self.arrays["inputs"]), self.last), view_of(self.arrays["targets"])
        parts = tuple(np.split(self.arrays["rows"], self.arrays["ends"][:-1]))
        data = FederatedData(inputs, targets, parts, (), None, None, **self.constants)
        return Sequential(self.algorithm, self.problem(), self.local, data, self.seed)


def packed(inner: Sequential) -> Package:
    """The package of a run. Classes from the user's own script or model file are sent along by value."""
    from ray import cloudpickle

    for name in [name for name in sys.modules if name.startswith(USER_FILES)]:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    data, own = inner.data, inner.problem
    inputs, last = stored(data.inputs)
    used, rows = np.unique(np.concatenate([*data.parts, np.empty(0, np.int64)]), return_inverse=True)
    arrays = {
        "inputs": array_of(inputs),
        "targets": array_of(data.targets),
        "rows": rows,
        "ends": np.cumsum(data.sizes),
    }
    if len(used) < len(inputs):
        arrays |= {name: arrays[name][used] for name in ("inputs", "targets")}
    module, frozen = _emptied(own)
    problem = partial(ModuleProblem, module, own.layout, own.precision, onednn=own.onednn, objective=own.objective)
    constants = {name: getattr(data, name) for name in CONSTANTS}
    return Package(inner.algorithm, inner.local, inner.seed, problem, frozen, arrays, last, constants, versions())


def versions() -> dict[str, str]:
    """What decides the numbers a worker computes."""
    return {name: str(sys.modules[name].__version__) for name in ("fedflat", "torch", "numpy")}


def array_of(value: Any) -> Any:
    """A tensor, or each in a dictionary, as an array of the same values (16-bit floats widened); others as they are."""
    if isinstance(value, dict):
        return {name: array_of(each) for name, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).contiguous().numpy()


def view_of(value: Any) -> Any:
    """The inverse, on an array's memory, which may be read-only: nothing in the engine writes to it."""
    if isinstance(value, dict):
        return {name: view_of(each) for name, each in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(value)


def _told(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


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
