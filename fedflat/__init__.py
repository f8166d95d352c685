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
    from fedflat.core import Algorithm, ClientState, ClientView, CommonMask, GradientFn, InputError, Local, RunError
    from fedflat.core.types import GradientRule, MaskView, MeanView, Optimizer, Phase, ServerStep, ServerView, Transform
    from fedflat.data.own import clients
    from fedflat.engine.job import RoundResult
    from fedflat.estimator import PrivateClassifier, PrivateRegressor
    from fedflat.guard import Guard
    from fedflat.privacy.accounting.epsilon import epsilon, noise_multiplier
    from fedflat.simulation.result import Result, export, load
    from fedflat.simulation.run import run

__version__ = "1.0.0.dev0"

__all__ = [
    "Algorithm", "ClientState", "ClientView", "CommonMask", "GradientFn", "GradientRule", "Guard", "InputError",
    "Local", "MaskView", "MeanView", "Optimizer", "Phase", "PrivateClassifier", "PrivateRegressor", "Recipe",
    "Result", "RoundResult", "RunError", "ServerStep", "ServerView", "Transform", "clients", "epsilon", "export",
    "load", "noise_multiplier", "run",
]  # fmt: skip

_PLACES = dict.fromkeys(__all__, "fedflat.core.types") | {
    "RoundResult": "fedflat.engine.job", "Guard": "fedflat.guard", "InputError": "fedflat.core.checks",
    "PrivateClassifier": "fedflat.estimator", "PrivateRegressor": "fedflat.estimator",
    "Recipe": "fedflat.config.recipe", "Result": "fedflat.simulation.result", "RunError": "fedflat.core.checks",
    "clients": "fedflat.data.own", "epsilon": "fedflat.privacy.accounting.epsilon",
    "export": "fedflat.simulation.result", "load": "fedflat.simulation.result",
    "noise_multiplier": "fedflat.privacy.accounting.epsilon", "run": "fedflat.simulation.run",
}  # fmt: skip
_RENAMED = dict.fromkeys(("LocalView", "UpdateView", "StateView"), "ClientView") | {"After": "RoundResult"}
"""Names of 0.2 that users import."""


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that ``import fedflat`` stays fast."""
    name = _RENAMED.get(name, name)
    if name not in _PLACES:
        raise AttributeError(f"module 'fedflat' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
