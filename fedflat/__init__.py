"""Federated learning under client-level differential privacy, with methods that look for flat minima.

``fedflat.run`` simulates a recipe, ``fedflat.Recipe`` holds one, ``fedflat.epsilon`` and ``fedflat.noise_multiplier``
answer privacy questions. Everything else is reached through its own module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.core.checks import InputError, RunError
    from fedflat.core.types import Algorithm, Phase
    from fedflat.privacy.accounting import epsilon, noise_multiplier
    from fedflat.recipe import Recipe
    from fedflat.simulation import Result, run

__version__ = "0.1.0"

_PLACES = {
    "Algorithm": "fedflat.core.types",
    "InputError": "fedflat.core.checks",
    "Phase": "fedflat.core.types",
    "Recipe": "fedflat.recipe",
    "Result": "fedflat.simulation",
    "RunError": "fedflat.core.checks",
    "epsilon": "fedflat.privacy.accounting",
    "noise_multiplier": "fedflat.privacy.accounting",
    "run": "fedflat.simulation",
}

__all__ = [
    "Algorithm",
    "InputError",
    "Phase",
    "Recipe",
    "Result",
    "RunError",
    "epsilon",
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
