"""Tasks, losses and metrics of one's own: the right numbers, on every back end, and one sentence for what is wrong."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from small_runs import weights
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.loss import CROSS_ENTROPY, IGNORE, Objective
from fedflat.core.rng import stream
from fedflat.report.html import render
from fedflat.report.metrics import read_run

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

RECIPE: dict[str, Any] = {
    "rounds": 2, "algorithm": "dp-fedavg", "local": {"steps": 3, "batch_size": 4, "lr": 0.1}, "cohort": {"size": 6},
    "privacy": {"clip": 0.5, "noise_multiplier": 1.0}, "engine": {"backend": "sequential", "device": "cpu"},
}  # fmt: skip
SIZES = (5, 4, 0, 7, 3, 1, 6, 2)


def inputs(n: int, number: int) -> Tensor:
    return torch.from_numpy(stream(0, "inputs of a task", number).normal(size=(n, 3))).float()


def targets(task: str, x: Tensor) -> Tensor:
    if task == "multilabel":
        return (x[:, :2] > 0).float()
    return (x @ torch.tensor([1.0, -2.0, 0.5])) if task == "regression" else (x[:, 0] > 0).long()


def clients(task: str) -> list[tuple[Tensor, Tensor]]:
    return [(x, targets(task, x)) for x in (inputs(n, i) for i, n in enumerate(SIZES))]


def public(task: str) -> tuple[Tensor, Tensor]:
    return inputs(5, 99), targets(task, inputs(5, 99))


def module(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def huber(outputs: Tensor, wanted: Tensor) -> Tensor:
    return F.huber_loss(outputs.squeeze(-1), wanted, reduction="none")


def mae(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - wanted).abs().mean()


def trained(task: str, outputs: int, /, **more: Any) -> fedflat.Result:
    recipe = {**RECIPE, **more.pop("recipe", {})}
    given = {"model": module(outputs), "clients": clients(task), "test": public(task), "task": task}
    return fedflat.run(recipe, **{**given, **more})


def test_losses_are_the_textbooks() -> None:
    outputs, labels = inputs(5, 90), torch.tensor([[0.0, 1, 1]] * 5)
    loss, score = Objective("multilabel")(outputs, labels)
    p = torch.sigmoid(outputs)
    assert torch.allclose(loss, -(labels * p.log() + (1 - labels) * (1 - p).log()).mean(1), atol=1e-6)
    assert torch.allclose(score, ((outputs > 0) == (labels > 0.5)).float().mean(1))
    for wanted in (inputs(5, 91), inputs(5, 91)[:, :1]):
        loss, score = Objective("regression")(outputs[:, : wanted.shape[1]], wanted)
        assert torch.allclose(loss, ((outputs[:, : wanted.shape[1]] - wanted) ** 2).mean(1)) and score.isnan().all()
    column = Objective("regression")(outputs[:, :1], wanted[:, 0])[0]
    assert column.shape == (5,) and torch.allclose(column, (outputs[:, 0] - wanted[:, 0]) ** 2)
    assert torch.equal(Objective("regression")(outputs[:, 0], wanted[:, 0])[0], column)
    logits, tokens = torch.randn(2, 4, 6), torch.tensor([[1, 2, IGNORE, 3], [IGNORE] * 4])
    for one, other in zip(Objective("next-token")(logits, tokens), CROSS_ENTROPY(logits, tokens)):
        assert torch.equal(one, other) and one[1] == 0
    own = Objective("next-token", lambda o, y: o.flatten(1).sum(1))
    assert torch.equal(own(logits, tokens)[1], CROSS_ENTROPY(logits, tokens)[1])
    assert Objective("classification", lambda o, y: o.sum(1))(outputs, torch.zeros(5))[1].shape == (5,)
    assert Objective("multilabel", lambda o, y: o.sum(1))(outputs, torch.zeros(5))[1].isnan().all()


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(("task", "outputs"), [("multilabel", 2), ("regression", 1), ("classification", 2)])
def test_every_back_end_trains_the_same(task: str, outputs: int) -> None:
    expected = weights(trained(task, outputs).model)
    for engine in ({"backend": "vectorized", "block": 3}, {"backend": "workers", "processes": 2}):
        found = weights(trained(task, outputs, recipe={"engine": {**engine, "device": "cpu"}}).model)
        assert torch.allclose(found, expected, atol=1e-6), engine
    if task != "classification":
        with pytest.raises(InputError, match="lowrank with a loss other than cross-entropy"):
            trained(task, outputs, recipe={"engine": {"backend": "lowrank", "device": "cpu"}})
    chosen = trained(task, outputs, recipe={"engine": {"device": "cpu"}})
    assert torch.allclose(weights(chosen.model), expected, atol=1e-6)


def test_one_step_is_the_gradient_of_the_loss() -> None:
    start = module(1)
    recipe = {**RECIPE, "rounds": 1, "local": {"steps": 1, "batch_size": 9, "lr": 0.1, "momentum": 0}}
    recipe |= {"cohort": {"size": 1}, "privacy": {"clip": 1e6, "noise_multiplier": 0}}
    x, y = clients("regression")[3]
    for loss, mean in ((None, ((start(x)[:, 0] - y) ** 2).mean()), (huber, huber(start(x), y).mean())):
        found = fedflat.run(recipe, model=start, clients=[(x, y)], task="regression", loss=loss)
        wanted = weights(start) - 0.1 * torch.cat([g.flatten() for g in torch.autograd.grad(mean, start.parameters())])
        assert torch.allclose(weights(found.model), wanted, atol=1e-6)


def test_squared_loss_for_classes_begins_with_the_class_sums() -> None:
    """One full step from zero is the sum of features by class over n; the broken twin does not centre its targets."""
    x, y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    start = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(start.weight)
    torch.nn.init.zeros_(start.bias)
    recipe = {
        "rounds": 1, "algorithm": "fedavg", "cohort": {"size": 1}, "loss": "squared",
        "local": {"steps": 1, "batch_size": 9, "lr": 1.0, "momentum": 0.0},
    }  # fmt: skip
    found = fedflat.run(recipe, model=start, clients=[(x, y)]).model
    targets = F.one_hot(y, 3).float()
    torch.testing.assert_close(found.weight, (targets - 1 / 3).T @ x / 9, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.bias, (targets - 1 / 3).mean(0), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found.weight, targets.T @ x / 9, atol=1e-3)
    with pytest.raises(InputError, match="task with loss: squared: found regression; allowed: classification"):
        fedflat.run(recipe | {"task": "regression"}, model=start, clients=[(x, y)])


def test_task_and_loss_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    def key(task: str = "regression", loss: Any = None) -> bytes:
        recipe = Recipe.of({**RECIPE, "task": task})
        data = [(x, (y > 0).float()[:, None]) for x, y in clients("regression")]
        return prepare(recipe, module(1), data, loss=loss).key

    def other(outputs: Tensor, wanted: Tensor) -> Tensor:
        return huber(outputs, wanted[:, 0]) * 2

    def column(outputs: Tensor, wanted: Tensor) -> Tensor:
        return huber(outputs, wanted[:, 0])

    assert len({key(), key("multilabel"), key(loss=column), key(loss=other)}) == 4
    assert key(loss=column) == key(loss=column)
    trained("regression", 1, loss=huber, out=tmp_path / "a")
    again = {"model": module(1), "clients": clients("regression"), "test": public("regression")}
    for loss, says in ((None, "does not hold the function"), (mean_of_three, "another method")):
        with pytest.raises(InputError, match=says):
            fedflat.run(tmp_path / "a", out=tmp_path / "a", resume=True, loss=loss, **again)
    done = fedflat.run(tmp_path / "a", out=tmp_path / "a", resume=True, loss=huber, **again)
    assert len(done.history) == 2 and done.recipe.task == "regression"


def mean_of_three(outputs: Tensor, wanted: Tensor) -> Tensor:
    return huber(outputs, wanted) * 3


class Running:
    """A metric as torchmetrics has them."""

    def reset(self) -> None:
        self.total = 0.0

    def update(self, outputs: Tensor, wanted: Tensor) -> None:
        self.total += float(mae(outputs, wanted))

    def compute(self) -> float:
        return self.total


def test_metrics_are_shown_wherever_figures_are(tmp_path: Path) -> None:
    found = trained("regression", 1, metrics={"mae": mae, "running": Running()}, out=tmp_path / "a")
    x, y = public("regression")
    last = found.history[-1]
    assert math.isclose(last["test_mae"], float(mae(found.model(x).detach(), y)), rel_tol=1e-5)
    assert last["test_mae"] == last["test_running"] and last["test_accuracy"] is None and "class_accuracy" not in last
    assert math.isclose(last["test_loss"], float(((found.model(x)[:, 0] - y) ** 2).mean()), rel_tol=1e-5)
    assert f"test loss {last['test_loss']:.4g}" in repr(found) and "test mae" in found._repr_html_()
    assert [axes.get_title() for axes in found.plot().axes] == [
        "test loss",
        "test mae",
        "test running",
        "ε of the mechanism",
    ]
    page = render([read_run(tmp_path / "a")])
    assert "Test loss" in page and "Test mae" in page and "never evaluated" not in page
    assert torch.equal(weights(fedflat.load(tmp_path / "a", model=module(1)).model), weights(found.model))


def test_held_back_examples_have_a_loss_where_there_is_no_accuracy() -> None:
    recipe = {"data": {"client_test_fraction": 0.5}, "evaluation": {"personal_every": 1}}
    hidden = trained("regression", 1, recipe=recipe).private_history[-1]
    assert hidden["client_loss"] > 0 and "client_loss_quantiles" in hidden and "client_accuracy" not in hidden


def test_a_loss_by_import_path_and_a_loss_that_is_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(o, y):\n    return (o.squeeze(-1) - y).abs()\n", encoding="utf-8")
    named = trained("regression", 1, recipe={"loss": f"{tmp_path / 'mine.py'}:loss"})
    given = trained("regression", 1, loss=Absolute())
    assert named.history[-1]["test_loss"] > 0 and given.recipe.loss == "given in Python"


class Absolute(nn.Module):
    def forward(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - wanted).abs()


def test_next_token_leaves_out_what_is_marked() -> None:
    draw = stream(0, "tokens")
    pairs = [
        (torch.from_numpy(draw.integers(0, 7, (4, 5))), torch.from_numpy(draw.integers(0, 7, (4, 5)))) for _ in SIZES
    ]
    pairs[0][1][0, :3] = IGNORE
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    found = fedflat.run(
        RECIPE, model=model, clients=pairs, test=tuple(side[:4].flip(1) for side in pairs[1]), task="next-token"
    )
    assert 0 <= found.history[-1]["test_accuracy"] <= 1


remembered: list[int] = []


def remembering(outputs: Tensor, wanted: Tensor) -> Tensor:
    remembered.append(len(outputs))
    return huber(outputs, wanted)


def with_target(value: Any) -> list[tuple[Tensor, Tensor]]:
    pairs = clients("classification")
    pairs[3][1][2] = value
    return pairs


FLOATS = fedflat.clients(clients("regression"))
NEGATIVE = fedflat.clients(with_target(-1))
TWO = [(inputs(2, 1), torch.tensor([[0.0, 1], [0, 2]]))]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"task": "regresion"}, "Did you mean regression?"),
        ({"task": "multilabel"}, "clients[0], row 0, target: found shape () per example"),
        ({"task": "classification"}, "For numbers to be predicted: task: regression"),
        ({"task": "classification", "clients": FLOATS, "test": None}, ", target: found -"),
        ({"task": "classification", "clients": NEGATIVE, "test": None}, "clients[3], row 2, target: found -1"),
        ({"task": "multilabel", "clients": TWO, "test": None}, "clients[0], row 1, target: found 2"),
        ({"task": "next-token", "clients": clients("classification"), "test": None}, "(T,), a token id for each place"),
        ({"test": (inputs(2, 1), torch.tensor([[1.0], [2.0]]))}, "test targets: found shape (1,)"),
        ({"model": module(2)}, "model: found outputs of shape (2,) per example; allowed: () or (1,)"),
        ({"loss": 3}, "loss: found int"),
        ({"loss": lambda o, y: huber(o, y).mean()}, "reduction='none'"),
        ({"loss": lambda o, y: o - y}, "found shape (4, 4)"),
        ({"loss": lambda o, y: None}, "found NoneType"),
        ({"loss": lambda o, y: y}, "without a gradient"),
        ({"loss": lambda o, y: o[:, 0] / 0}, "not finite"),
        ({"loss": lambda o: o}, "TypeError"),
        ({"loss": lambda o, y: huber(o, y) * torch.rand(())}, "without chance"),
        ({"loss": remembering}, "which a call changed"),
        ({"loss": huber, "recipe": {"engine": {"backend": "vectorized"}}}, "vectorized with a loss of one's own"),
        ({"recipe": {"loss": "given in Python"}}, "does not hold the function"),
        ({"metrics": {"loss": mae}}, "metrics: found 'loss'"),
        ({"metrics": {"a b": mae}}, "metrics: found 'a b'"),
        ({"metrics": {"mae": 3}}, "metrics.mae: found int"),
        ({"metrics": {"mae": mae}, "test": None}, "mae without test data"),
        ({"metrics": {"mae": lambda o, y: o}}, "metrics.mae, on outputs (5, 1) and targets (5,)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_before_training(more: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        trained("regression", 1, **more)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_memory_that_shows_only_in_training_ends_the_run() -> None:
    kept: dict[str, int] = {}

    def sleeper(outputs: Tensor, wanted: Tensor) -> Tensor:
        if len(wanted) < 3:  # not the trial's
            kept["seen"] = len(wanted)
        return huber(outputs, wanted)

    with pytest.raises(InputError, match="was changed by a client's training"):
        trained("regression", 1, loss=sleeper)


def test_other_commands_decline(tmp_path: Path) -> None:
    from fedflat.audit import audit_run

    with pytest.raises(InputError, match="audit: task: found regression"):
        audit_run({**RECIPE, "task": "regression"})


def test_released_metrics_do_not_tell_which_classes_clients_have() -> None:
    pairs = clients("classification")
    pairs[3] = (pairs[3][0], pairs[3][1] + 6)
    assert len(trained("classification", 9, clients=pairs).history[-1]["class_accuracy"]) == 2


def test_errors_by_name_are_in_the_target_s_own_units() -> None:
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"u": draw.integers(0, 9, 200), "x": draw.normal(0, 1, 200)})
    rows["price"] = 5000 + 1000 * rows.x
    public = pd.DataFrame({"x": draw.normal(0, 1, 50)})
    public["price"] = 5000 + 1000 * public.x
    clients = fedflat.clients(rows, "u", "x", "price", scale={"price": (5000, 1000)}, test=public)
    recipe = {**RECIPE, "task": "regression", "evaluation": {"metrics": ["mae", "r2"]}}
    found = fedflat.run(recipe, model=torch.nn.Linear(1, 1), clients=clients)
    off = np.abs(found.predict(public) - public.price).mean()
    assert math.isclose(found.history[-1]["test_mae"], off, rel_tol=1e-4)
