"""Federated learning under client-level differential privacy, with methods that look for flat minima.

``fedflat.run`` simulates a recipe, ``fedflat.Recipe`` holds one, ``fedflat.epsilon`` and ``fedflat.noise_multiplier``
answer privacy questions. ``fedflat.Algorithm``, ``fedflat.Phase`` and the views and protocols beside them are what a
method of one's own is written with. Everything else is reached through its own module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe
    from fedflat.core.checks import InputError, RunError
    from fedflat.core.types import (
        Algorithm,
        ClientState,
        CommonMask,
        GradientFn,
        GradientRule,
        Local,
        LocalView,
        MaskView,
        MeanView,
        Optimizer,
        Phase,
        ServerStep,
        ServerView,
        StateView,
        Transform,
        UpdateView,
    )
    from fedflat.data.own import clients
    from fedflat.engine.early import After
    from fedflat.guard import Guard
    from fedflat.privacy.accounting.epsilon import epsilon, noise_multiplier
    from fedflat.simulation.load import load
    from fedflat.simulation.result import Result
    from fedflat.simulation.run import run

__version__ = "0.2.0"

_PLACES = {
    "After": "fedflat.engine.early",
    "Algorithm": "fedflat.core.types",
    "ClientState": "fedflat.core.types",
    "CommonMask": "fedflat.core.types",
    "GradientFn": "fedflat.core.types",
    "GradientRule": "fedflat.core.types",
    "Guard": "fedflat.guard",
    "InputError": "fedflat.core.checks",
    "Local": "fedflat.core.types",
    "LocalView": "fedflat.core.types",
    "MaskView": "fedflat.core.types",
    "MeanView": "fedflat.core.types",
    "Optimizer": "fedflat.core.types",
    "Phase": "fedflat.core.types",
    "Recipe": "fedflat.config.recipe",
    "Result": "fedflat.simulation.result",
    "RunError": "fedflat.core.checks",
    "ServerStep": "fedflat.core.types",
    "ServerView": "fedflat.core.types",
    "StateView": "fedflat.core.types",
    "Transform": "fedflat.core.types",
    "UpdateView": "fedflat.core.types",
    "clients": "fedflat.data.own",
    "epsilon": "fedflat.privacy.accounting.epsilon",
    "load": "fedflat.simulation.load",
    "noise_multiplier": "fedflat.privacy.accounting.epsilon",
    "run": "fedflat.simulation.run",
}

__all__ = [
    "After",
    "Algorithm",
    "ClientState",
    "CommonMask",
    "GradientFn",
    "GradientRule",
    "Guard",
    "InputError",
    "Local",
    "LocalView",
    "MaskView",
    "MeanView",
    "Optimizer",
    "Phase",
    "Recipe",
    "Result",
    "RunError",
    "ServerStep",
    "ServerView",
    "StateView",
    "Transform",
    "UpdateView",
    "clients",
    "epsilon",
    "load",
    "noise_multiplier",
    "run",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that ``import fedflat`` stays fast."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedflat' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
