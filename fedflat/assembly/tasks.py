"""Set up what is trained for: the recipe's task, a user's own loss, targets that suit them, and metrics.

Metrics of the public test set have names (``evaluation.metrics``), computed by scikit-learn where it has them, or are
the user's own.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.config.reading import GIVEN, NOT_HELD
from fedflat.config.recipe import Recipe
from fedflat.core import StateWatch, imported, one_of, require, seeded_torch, stream, users_code, wrong
from fedflat.core.loss import IGNORE, CustomLoss, Objective, squared_by_class
from fedflat.data.clients import FederatedData, classes_of, first_above, made_rows
from fedflat.data.preparation import Preparation, in_own_units
from fedflat.engine.evaluate import measured
from fedflat.engine.job import Metric

TRIED = 4
"""Made-up examples that a loss is tried on."""
RESERVED = ("loss", "accuracy")
SQUARED = "squared"
"""The ``loss`` of a recipe that is a squared loss for classes."""


def objective_of(recipe: Recipe, loss: CustomLoss | None) -> Objective:
    """Return the loss of a recipe: its task's, one by import path, or a function given in Python."""
    if loss is None and recipe.loss == GIVEN:
        raise wrong("loss", f"{GIVEN}: the run's folder does not hold the function", NOT_HELD)
    if loss is None and recipe.loss == SQUARED:
        one_of(f"task with loss: {SQUARED}", recipe.task, ["classification"])
        return Objective(recipe.task, squared_by_class)
    custom = imported("loss", recipe.loss) if loss is None and recipe.loss is not None else loss
    if custom is not None and not callable(custom):
        raise wrong("loss", type(custom).__name__, "a function (outputs, targets) -> loss of each example (b,)")
    return Objective(recipe.task, custom)


def refuse_other_tasks(where: str, recipe: Recipe) -> None:
    """Raise InputError where only cross-entropy is served."""
    if not Objective(recipe.task).cross_entropy or recipe.loss is not None:
        problem = recipe.task if recipe.loss is None else f"{recipe.task} with a loss of one's own"
        raise wrong(f"{where}: task", problem, "classification or next-token")


def suited(data: FederatedData, task: str) -> FederatedData:
    """Return the federation with targets as the task takes them.

    Raises InputError, naming client and row, for targets of another kind.
    """
    preparation = data.preparation
    if task == "regression" and preparation is not None:
        encoding = preparation.encoding
        several = () if encoding is None else encoding.categories.keys() & encoding.target
        if names := preparation.names or sorted(f"of {name}" for name in several):
            problem = f"regression of the classes {', '.join(map(str, names[:8]))}"
            raise wrong("task", problem, "classification, or a target of numbers")
    _check_targets(data, task, data.targets, lambda row: _whose(data, row))
    if data.test_targets is not None:
        _check_targets(data, task, data.test_targets, lambda row: f"test, row {row}")
    if task in ("classification", "next-token"):
        return data
    tests = None if data.test_targets is None else data.test_targets.float()
    outputs = 1 if data.targets.dim() == 1 else data.targets.shape[1]
    return replace(data, targets=data.targets.float(), test_targets=tests, classes=outputs)


def with_public_classes(recipe: Recipe, data: FederatedData, private: bool, named: bool) -> FederatedData:
    """Return the federation with a number of classes that is public: the recipe's, or that of the public test data.

    Classes by their names, of published data and in a deployment are stated already. private: whether the method gives
    a guarantee. named: whether the model is built for that number.

    Raises:
        InputError: a model is to be built and nothing public says how many classes there are; or a client has more.
    """
    if recipe.task not in ("classification", "next-token"):
        return data
    count, needed = recipe.data.classes, private and named and not data.stated
    if count is None and needed and data.test_targets is not None:
        count = classes_of(data.test_targets)
    if count is None and needed:
        hint = "The largest label of somebody would show in the shape of what is released."
        raise wrong("data.classes", "nothing", "the number of classes, a public number; or public test data", hint=hint)
    names = () if data.preparation is None or recipe.task != "classification" else data.preparation.names
    if count is not None and names and count != len(names):
        raise wrong("data.classes", count, f"nothing, or {len(names)}, the named classes: {', '.join(map(str, names))}")
    if count is not None and data.classes > count:
        hint = "data.classes says how many there are."
        raise wrong("clients", first_above(data, count), f"class numbers below {count}", hint=hint)
    return data if count is None else replace(data, classes=count, stated=True)


def _whose(data: FederatedData, row: int) -> str:
    for i in range(data.clients):
        for rows in (data.parts[i], data.held_back[i] if data.held_back else data.parts[i][:0]):
            if len(places := np.flatnonzero(rows == row)):
                return f"{data.called(i)}, row {places[0]}"
    return f"row {row}"


def _check_targets(data: FederatedData, task: str, targets: Tensor, place: Callable[[int], str]) -> None:
    if task == "regression":
        return  # any finite numbers, which is checked where they are read
    if task == "multilabel":
        if targets.dim() != 2:
            shape = f"shape {tuple(targets.shape[1:])} per example"
            raise wrong(f"{place(0)}, target", shape, "(L,), one 0 or 1 for each label, for task: multilabel")
        _first_bad(targets, (targets < 0) | (targets > 1), place, "0 or 1 (or between) for each label")
        return
    if targets.is_floating_point() and targets.numel():
        hint = "For numbers to be predicted: task: regression; for several labels: task: multilabel."
        allowed = f"whole numbers (class numbers from 0), for task: {task}"
        fractional = (targets != targets.round()).reshape(len(targets), -1).any(1).to(torch.uint8)
        row = int(fractional.argmax())
        problem = f"{targets[row].flatten()[0]:g}" + ("" if fractional[row] else f" of type {targets.dtype}")
        raise wrong(f"{place(row)}, target", problem, allowed, hint=hint)
    if task == "next-token" and targets.dim() != 2:
        shape = f"shape {tuple(targets.shape[1:])} per example"
        raise wrong(f"{place(0)}, target", shape, "(T,), a token id for each place, for task: next-token")
    bad = targets < 0
    if targets.dim() > 1:
        bad &= targets != IGNORE  # a token that does not count
    _first_bad(targets, bad, place, "class numbers from 0" if targets.dim() == 1 else "token ids, or -100")


def _first_bad(targets: Tensor, bad: Tensor, place: Callable[[int], str], allowed: str) -> None:
    if bool(bad.any()):
        row = int(bad.reshape(len(bad), -1).any(1).int().argmax())
        faulty = targets[row][bad[row]] if targets.dim() > 1 else targets[row : row + 1]
        raise wrong(f"{place(row)}, target", f"{faulty.flatten()[0].item():g}", allowed)


def check_outputs(module: nn.Module, example: Tensor, data: FederatedData, objective: Objective) -> int:
    """Return how many outputs a module has. Raises InputError where they do not fit the task. example: made up."""
    with torch.no_grad():
        out = copy.deepcopy(module).eval()(example)
    if not isinstance(out, Tensor):
        raise wrong("model", f"an output of type {type(out).__name__}", "a tensor")
    if objective.own is not None:
        return data.classes
    shape, task, n = tuple(out.shape[1:]), objective.task, data.classes
    if task in ("classification", "next-token"):
        wanted = (len(example), *data.targets.shape[1:])
        if tuple(out.shape[:-1]) != wanted:
            expected = ", ".join(map(str, (*wanted, "classes")))
            raise wrong("model", f"an output of shape {tuple(out.shape)} for {len(example)} examples", f"({expected})")
        if out.shape[-1] < n:
            raise wrong("model", f"{out.shape[-1]} outputs", f"at least {n} ({first_above(data, out.shape[-1])})")
        names = () if data.preparation is None or task != "classification" else data.preparation.names
        if names and out.shape[-1] > len(names):
            raise wrong("model", f"{out.shape[-1]} outputs", f"{n}, one for each class: {', '.join(map(str, names))}")
        return int(out.shape[-1])
    wanted = tuple(data.targets.shape[1:])
    if shape != wanted and not (task == "regression" and wanted == () and shape == (1,)):
        allowed = f"{wanted} per example, as the targets of task: {task}" if wanted else "() or (1,) per example"
        raise wrong("model", f"outputs of shape {shape} per example", allowed)
    return data.classes


def try_loss(objective: Objective, module: nn.Module, example: Tensor, data: FederatedData) -> None:
    """A loss of the user's own on two made-up batches: finite, ``(b,)``, with a gradient, the same again, and nothing
    kept from one to the other. Raises InputError."""
    loss = objective.own
    if loss is None:
        return
    # A loss may keep what it saw in places that its results do not show at once.
    watched = StateWatch(loss)
    with torch.no_grad(), seeded_torch(0, "outputs to try a loss on"):
        shape = copy.deepcopy(module).eval()(example).shape[1:]
        batches = [torch.randn(count, *shape) for count in (TRIED, TRIED - 1)]
    _, targets = made_rows(data, TRIED, stream(0, "targets to try a loss on"))
    targets = targets.round() if objective.task == "multilabel" else targets
    losses = [_tried(loss, outputs, targets[: len(outputs)]) for outputs in batches]
    if not torch.equal(losses[0], _tried(loss, batches[0], targets)):
        allowed = "a function without memory and without chance"
        raise wrong("loss", "other numbers for the same examples once others came before", allowed)
    changed = watched.changed(everything=True)
    allowed = "a function that keeps nothing from one call to the next"
    require(changed is None, "loss", f"{changed}, which a call changed", allowed)


def _tried(loss: CustomLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs.clone().requires_grad_()
    where = f"loss, on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    allowed = f"a floating-point tensor ({len(outputs)},): the loss of each example, with its gradient"
    with users_code(where, allowed):
        losses = loss(outputs, targets)
    if not isinstance(losses, Tensor) or losses.shape != (len(outputs),):
        form = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        # The commonest mistake: torch's losses take the mean unless they are told not to.
        hint = "Leave out the mean: reduction='none'." if isinstance(losses, Tensor) and losses.dim() == 0 else ""
        raise wrong(where, form, allowed, hint=hint)
    require(losses.is_floating_point() and losses.requires_grad, where, f"{losses.dtype} without a gradient", allowed)
    require(bool(torch.isfinite(losses).all()), where, "a loss that is not finite", allowed)
    return losses.detach()


# ---------------------------------------------------------------------------------------------------- metrics


def _right_side(outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    """Predicted and true class numbers, or labels."""
    if targets.dim() == 1:
        return targets.numpy(), outputs.argmax(-1).numpy()
    return (targets > 0.5).numpy(), (outputs > 0).numpy()


def f1(outputs: Tensor, targets: Tensor) -> float:
    """F1 score of each class, or label, averaged without weights (macro)."""
    from sklearn.metrics import f1_score

    return float(f1_score(*_right_side(outputs, targets), average="macro", zero_division=0))


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share right of each class of the test set, averaged without weights."""
    from sklearn.metrics import recall_score

    return float(recall_score(*_right_side(outputs, targets), average="macro", labels=targets.unique().numpy()))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve: of class 1 among two, of each class against the rest or of each label (mean of those
    for which the test set has both kinds of examples)."""
    from sklearn.metrics import roc_auc_score

    if targets.dim() > 1:
        chances, truth = outputs.double(), (targets > 0.5)
    else:
        chances, truth = outputs.double().softmax(-1), F.one_hot(targets, outputs.shape[-1]).bool()
        if outputs.shape[-1] == 2:
            chances, truth = chances[:, 1:], truth[:, 1:]
    # A class that is everywhere or nowhere in the test set has no curve.
    both = truth.any(0) & ~truth.all(0)
    if not bool(both.any()):
        return math.nan
    areas = [roc_auc_score(truth[:, i].numpy(), chances[:, i].numpy()) for i in both.nonzero().flatten().tolist()]
    return float(sum(areas) / len(areas))


def top5(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose class is among the five likeliest."""
    return float((outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices == targets[:, None]).any(-1).double().mean())


def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """exp of the mean cross-entropy over every token that counts."""
    return float(torch.exp(F.cross_entropy(outputs.flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORE)))


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.reshape(targets.shape).double() - targets.double()


def mae(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error."""
    return float(_errors(outputs, targets).abs().mean())


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error."""
    return float(_errors(outputs, targets).square().mean().sqrt())


def r2(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that is explained; mean over several targets."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets.numpy(), outputs.reshape(targets.shape).numpy()))


CLASSES, LABELS, TOKENS, NUMBERS = "classification", "multilabel", "next-token", "regression"
MEASURES: dict[str, tuple[Callable[[Tensor, Tensor], float], tuple[str, ...]]] = {
    "f1": (f1, (CLASSES, LABELS)), "auc": (auc, (CLASSES, LABELS)),
    "balanced_accuracy": (balanced_accuracy, (CLASSES,)), "top5": (top5, (CLASSES,)),
    "perplexity": (perplexity, (TOKENS,)), "mae": (mae, (NUMBERS,)), "rmse": (rmse, (NUMBERS,)), "r2": (r2, (NUMBERS,)),
}  # fmt: skip
"""Each measure by name: (outputs, targets) of the whole test set -> the number; and the tasks it is for."""


def named(where: str, names: tuple[str, ...], task: str) -> dict[str, Callable[[Tensor, Tensor], float]]:
    """Return the measures of these names. Raises InputError for a name that is not here or not of the task."""
    fitting = ", ".join(name for name, (_, tasks) in MEASURES.items() if task in tasks)
    for name in names:
        _, tasks = MEASURES[one_of(where, name, MEASURES)]
        require(task in tasks, where, f"{name}, which is for {' and '.join(tasks)}", f"for task {task}: {fitting}")
    return {name: MEASURES[name][0] for name in names}


def metrics_of(
    requested: Mapping[str, Metric] | Sequence[str] | None, recipe: Recipe, data: FederatedData
) -> dict[str, Metric]:
    """Return the recipe's measures by name, then the user's own.

    Raises InputError for a name that cannot be a key or is not of the task, for what is no metric, and for metrics
    without test data.
    """
    metrics: dict[str, Metric] = dict(named("evaluation.metrics", recipe.evaluation.metrics, recipe.task))
    if requested is not None and not isinstance(requested, Mapping):
        metrics |= named("metrics", (requested,) if isinstance(requested, str) else tuple(requested), recipe.task)
        requested = None
    if recipe.task == "regression":
        metrics = {name: functools.partial(_in_own_units, metric, data.preparation) for name, metric in metrics.items()}
    metrics |= requested or {}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise wrong("metrics", repr(name), f"names as variables have, other than {' and '.join(RESERVED)}")
        if not callable(metric) and not hasattr(metric, "compute"):
            allowed = "a function (outputs, targets) -> number, or an object with update and compute"
            raise wrong(f"metrics.{name}", type(metric).__name__, allowed)
    if metrics and data.test_inputs is None:
        problem = f"{', '.join(metrics)} without test data"
        raise wrong("metrics", problem, "test=(inputs, targets), which must be public")
    return metrics


def _in_own_units(metric: Metric, preparation: Preparation | None, outputs: Tensor, targets: Tensor) -> float:
    """Return a metric by name of numbers in the target's own units, however its column was scaled for training."""
    return measured(metric, in_own_units(outputs, preparation), in_own_units(targets, preparation))


def try_metrics(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> None:
    """Raise InputError for a metric that fails on the public test set."""
    for name, metric in metrics.items():
        where = f"metrics.{name}, on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        with users_code(where, "a function that gives one number"):
            measured(metric, outputs, targets)
