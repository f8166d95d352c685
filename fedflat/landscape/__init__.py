"""Look at loss surfaces, and evaluate what the papers prove.

Example: how flat the models of two finished runs are::

    from fedflat.landscape import Settings, measure

    found = measure(["runs/dp-fedavg", "runs/dp-fedsam"], Settings(points=21))
    print([(group["label"], group["numbers"]["eigenvalue"]) for group in found["groups"]])

``objective`` computes mean loss and accuracy as a function of flat weights, ``surfaces`` its shape and curvature
around a point, ``flatness`` measures finished runs. ``bounds`` has the papers' formulas, each with its equation, and
``statements`` evaluates them for a recipe. Nothing here enters a privacy statement.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.landscape.bounds import Facts
    from fedflat.landscape.flatness import Settings, measure
    from fedflat.landscape.statements import Setting, Statement, cost_of, statements

__all__ = [
    "Facts", "Setting", "Settings", "Statement", "cost_of", "measure", "statements",
]  # fmt: skip
_MODULES = {
    "bounds": "Facts",
    "flatness": "Settings measure",
    "statements": "Setting Statement cost_of statements",
}


def __getattr__(name: str) -> Any:
    # A table of bounds should not wait for what measures landscapes.
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
