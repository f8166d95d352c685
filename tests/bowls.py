"""A record of landscapes, as ``landscape.flatness.measure`` gives it: each loss is a bowl."""

from typing import Any

import numpy as np

SIDE = 11


def bowl(steepness: float) -> dict[str, Any]:
    """A surface that rises with the squared distance from its middle."""
    steps = np.linspace(-1, 1, SIDE)
    loss = 0.1 + steepness * (steps[:, None] ** 2 + steps[None] ** 2)
    return {"steps": steps.tolist(), "loss": loss.tolist(), "accuracy": (1 / (1 + loss)).tolist()}


def group(label: str, style: int, model: str = "global", surface: bool = True, seeds: int = 2) -> dict[str, Any]:
    """One method's landscape; that of one seed has no spread, and here no ε either."""
    grid, many = bowl(1.0 + style), seeds > 1
    spread = [0.1] * SIDE if many else None
    curve = {"loss": [row[SIDE // 2] for row in grid["loss"]], "loss_sd": spread}
    curve |= {"accuracy": [0.9] * SIDE, "accuracy_sd": spread}
    half = {"mean": 0.5, "sd": 0.1 if many else None, "count": seeds}
    names = ("loss", "accuracy", "eigenvalue", "trace", "one_step", "ascent", "noise_loss", "noise_accuracy", "norm")
    gap = {"mean": -0.5, "low": -0.8, "high": -0.2, "pairs": 2}
    return {
        "label": label, "model": model, "style": style, "seeds": [*range(seeds)],
        "epsilon": half | {"mean": 8.0} if many else None, "private": model != "global",
        "numbers": dict.fromkeys(names, half),
        "differences": dict.fromkeys(names, gap) if style and many else {},
        "line": {"steps": grid["steps"]} | curve, "noise": {"levels": grid["steps"]} | curve,
        "surface": grid if surface else None,
    }  # fmt: skip


def found(*groups: dict[str, Any]) -> dict[str, Any]:
    """The record of all of them."""
    model = {"run": "a", "examples": 100, "curvature_examples": 50}
    settings = {"on": "test", "seed": 0, "noise": [0.1, 0.2, 0.3], "rho": 0.05}
    return {"settings": settings, "groups": list(groups), "models": [model], "notes": ["<note>"]}
