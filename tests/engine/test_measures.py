"""Measures by name: their values on small cases worked by hand, in the history, and refused where they do not fit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.assembly.tasks import MEASURES
from fedflat.core.checks import InputError
from fedflat.core.loss import IGNORE

LOGITS = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2], [2, 0, 0]])
CLASSES = torch.tensor([0, 1, 1, 0])
VALUES = torch.tensor([[1.0], [2.0], [4.0]])


def value(name: str, outputs: Tensor, targets: Tensor) -> float:
    return MEASURES[name][0](outputs, targets)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("f1", LOGITS, CLASSES, (1 + 2 / 3 + 0) / 3),
        ("balanced_accuracy", LOGITS, CLASSES, (1 + 0.5) / 2),
        ("top5", LOGITS, CLASSES, 1.0),
        ("top5", torch.diag(torch.tensor([-1.0, 1, 1, 1, 1, 1])), torch.arange(6), 5 / 6),
        ("auc", torch.tensor([[0.0, 1], [0, 2], [0, 3], [0, 0]]), torch.tensor([0, 1, 1, 1]), 2 / 3),
        ("auc", LOGITS, torch.tensor([0, 1, 2, 0]), 1.0),
        ("auc", LOGITS, torch.zeros(4, dtype=torch.long), math.nan),
        ("auc", torch.tensor([[1.0, -1], [-1, 1]]), torch.tensor([[1.0, 1], [0, 0]]), 0.5),
        ("f1", torch.tensor([[1.0, -1], [-1, -1]]), torch.tensor([[1.0, 1], [0, 0]]), 0.5),
        ("mae", VALUES, torch.tensor([1.0, 1, 1]), 4 / 3),
        ("rmse", VALUES, torch.tensor([1.0, 1, 1]), math.sqrt(10 / 3)),
        ("r2", VALUES, torch.tensor([1.0, 2, 4]), 1.0),
        ("perplexity", torch.zeros(2, 3, 7), torch.tensor([[1, 2, IGNORE], [0, IGNORE, IGNORE]]), 7.0),
    ],
)
def test_by_hand(name: str, outputs: Tensor, targets: Tensor, expected: float) -> None:
    assert value(name, outputs, targets) == pytest.approx(expected, nan_ok=True)


def test_every_measure_is_for_a_task() -> None:
    assert {task for _, tasks in MEASURES.values() for task in tasks} == {
        "classification", "multilabel", "next-token", "regression",
    }  # fmt: skip


def trained(**more: Any) -> fedflat.Result:
    pairs = [(torch.eye(3), torch.tensor([0, 1, 0])) for _ in range(4)]
    recipe = {"rounds": 1, "algorithm": "dp-fedavg", "cohort": {"size": 2}, **more.pop("recipe", {})}
    recipe |= {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}, "local": {"steps": 1}}
    return fedflat.run(
        recipe, model=nn.Linear(3, 2), clients=pairs, test=tuple(side.clone() for side in pairs[0]), **more
    )


def test_in_the_history_by_recipe_and_by_call() -> None:
    found = trained(recipe={"evaluation": {"metrics": "f1"}}, metrics=["auc"]).history[-1]
    assert {"test_f1", "test_auc"} <= set(found)
    assert "test_f1" in trained(metrics="f1").history[-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"metrics": ["mae"]}, "metrics: found mae, which is for regression; allowed: for task classification: f1"),
        ({"recipe": {"evaluation": {"metrics": ["f11"]}}}, r"evaluation\.metrics: found f11; .*Did you mean f1"),
    ],
)
def test_what_does_not_fit_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trained(**more)
