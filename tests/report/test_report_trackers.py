"""TensorBoard and MLflow: off by default, released numbers only, private ones marked, missing packages in one line."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.report import progress

RELEASED = {
    "round": 4, "epsilon": 2.5, "claimed_epsilon": 1.0, "clip": 0.5, "test_accuracy": 0.75, "test_loss": None,
    "class_accuracy": [0.5, 1.0],
}  # fmt: skip
PRIVATE = {"round": 4, "cohort": 17, "update_norm_quantiles": {"0.5": 0.3, "max": math.inf}, "note": "text"}


class FakeWriter:
    """Stands in for ``SummaryWriter``."""

    made: ClassVar[list["FakeWriter"]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.open, self.flushed = folder, [], True, 0  # type: ignore[var-annotated]
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.open = False


class FakeClient:
    """Stands in for ``MlflowClient``."""

    made: ClassVar[list["FakeClient"]] = []
    broken = False

    def __init__(self, tracking_uri: str) -> None:
        self.uri, self.params, self.metrics, self.ended = tracking_uri, {}, [], ""  # type: ignore[var-annotated]
        FakeClient.made.append(self)

    def get_experiment_by_name(self, name: str) -> None:
        if self.broken:
            raise ConnectionError("no answer\nand a long story")

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.name, self.tags = run_name, tags
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_param(self, run: str, key: str, value: str) -> None:
        self.params[key] = value

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        if self.broken:
            raise ConnectionError("gone")
        self.metrics.append((key, value, step))

    def set_terminated(self, run: str, status: str) -> None:
        self.ended = status


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    board, flow = ModuleType("torch.utils.tensorboard"), ModuleType("mlflow")
    board.SummaryWriter, flow.MlflowClient = FakeWriter, FakeClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "mlflow", flow)
    monkeypatch.setattr(FakeWriter, "made", [])
    monkeypatch.setattr(FakeClient, "made", [])
    monkeypatch.setattr(FakeClient, "broken", False)


def test_released_numbers_only() -> None:
    assert progress.scalars(RELEASED) == {
        "epsilon": 2.5, "clip": 0.5, "test_accuracy": 0.75, "class_accuracy/0": 0.5, "class_accuracy/1": 1.0,
    }  # fmt: skip


def test_private_numbers_carry_the_mark() -> None:
    more = progress.scalars(RELEASED, PRIVATE).keys() - progress.scalars(RELEASED).keys()
    assert more == {"private_not_covered/cohort", "private_not_covered/update_norm_quantiles/0.5"}


@pytest.mark.parametrize("private", [False, True])
def test_both_trackers_take_the_same_numbers(fakes: None, private: bool) -> None:
    recipe = Recipe.load("quick-start")
    with progress.Trackers(recipe, tensorboard=Path("tb"), mlflow="http://there", private=private) as found:
        found.round(RELEASED, PRIVATE)
    writer, client = FakeWriter.made[0], FakeClient.made[0]
    assert writer.folder == "tb" and not writer.open and writer.flushed == 1
    assert client.uri == "http://there" and client.ended == "FINISHED" and client.name == "quick-start"
    assert writer.scalars == client.metrics and {step for _, _, step in writer.scalars} == {4}
    assert any(name.startswith("private_not_covered/") for name, _, _ in writer.scalars) == private
    assert "not covered" in client.tags["fedflat.private_not_covered"] or not private
    assert client.params["privacy.epsilon"] == "8.0" and client.params["seed"] == "0"


def test_a_run_that_fails_is_marked_failed(fakes: None) -> None:
    with pytest.raises(KeyboardInterrupt), progress.Trackers(Recipe.load("quick-start"), mlflow="x"):
        raise KeyboardInterrupt
    assert FakeClient.made[0].ended == "FAILED"


def test_a_tracker_that_stops_answering_is_one_line(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(RunError, match="MLflow could not record the numbers: gone"),
        progress.Trackers(Recipe.load("quick-start"), mlflow="x") as found,
    ):
        monkeypatch.setattr(FakeClient, "broken", True)
        found.round(RELEASED, PRIVATE)


def test_a_store_that_cannot_be_reached_is_bad_input(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "broken", True)
    with pytest.raises(InputError, match=r"--mlflow: found http://x \(no answer\)"):
        progress.Trackers(Recipe.load("quick-start"), mlflow="http://x")


@pytest.mark.parametrize(("option", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch, option: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"^--{option}: .*pip install '.*\[trackers\]'") as error:
        progress.Trackers(Recipe.load("quick-start"), **{option: "x"})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_private_without_a_tracker_is_refused() -> None:
    with pytest.raises(InputError, match="--track-private"):
        progress.Trackers(Recipe.load("quick-start"), private=True)


def test_nothing_is_written_unless_asked(fakes: None) -> None:
    with progress.Trackers(Recipe.load("quick-start")) as found:
        found.round(RELEASED, PRIVATE)
    assert not FakeWriter.made and not FakeClient.made


def test_a_real_run_writes_what_metrics_jsonl_holds(fakes: None, tmp_path: Path) -> None:
    import typer

    from fedflat.cli import as_command, training

    app = typer.Typer()
    for command in (training.run, training.compare):
        app.command(command.__name__)(as_command(command)[0])
    changes = ("rounds=2", "data.clients=20", "cohort.size=10", "privacy.accountant=rdp", "local.steps=1")
    words = ["run", "quick-start", *(word for change in changes for word in ("-o", change))]
    words += ["--out", str(tmp_path / "r"), "--tensorboard", str(tmp_path / "tb")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    expected = [(name, value, line["round"]) for line in lines for name, value in progress.scalars(line).items()]
    assert len(lines) == 2 and FakeWriter.made[0].scalars == expected
