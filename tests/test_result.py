"""A model in hand: the result of a run, the same from its folder, and the warnings that both carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import fedflat
from fedflat.core.checks import InputError
from fedflat.report.cautions import cautions
from fedflat.report.html import render
from fedflat.report.metrics import read_run
from fedflat.simulation.export import export

RECIPE: dict[str, Any] = {
    "rounds": 3,
    "algorithm": "dp-fedavg",
    "data": {"clients": 40, "max_examples": 400},
    "model": "linear",
    "local": {"steps": 2, "batch_size": 10, "lr": 0.1},
    "cohort": {"size": 20},
    "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.01},
    "engine": {"backend": "sequential", "device": "cpu"},
}


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> fedflat.Result:
    return fedflat.run(RECIPE, out=tmp_path_factory.mktemp("runs") / "a")


def test_a_folder_gives_back_the_result(ran: fedflat.Result, tmp_path: Path) -> None:
    again = fedflat.load(str(ran.folder))
    assert torch.equal(flat(again.model), flat(ran.model)) and not again.model.training
    assert again.history == json.loads(json.dumps(ran.history)) and len(again.private_history) == 3
    assert again.privacy["proven_epsilon"] == ran.privacy["proven_epsilon"]
    assert again.warnings == ran.warnings and again.recipe.rounds == 3 and again.stopped == ""
    export(ran.folder, tmp_path / "out")
    handed = fedflat.load(tmp_path / "out")
    assert torch.equal(flat(handed.model), flat(ran.model)) and handed.private_history == []
    assert not any("private to the simulation" in text for text in handed.warnings)


def test_what_a_person_sees(ran: fedflat.Result) -> None:
    assert repr(ran).startswith("<fedflat run: dp-fedavg, 3 of 3 rounds, test accuracy ") and len(repr(ran)) < 140
    page = ran._repr_html_()
    assert "<table>" in page and "δ = 0.01 is larger than 0.1/M" in page
    frame = ran.to_frame()
    assert isinstance(frame, pd.DataFrame) and frame["test_accuracy"].tolist() == [
        r["test_accuracy"] for r in ran.history
    ]
    assert not any("norm" in name for name in frame) and "private.update_norm_mean" in ran.to_frame(private=True)
    assert [axes.get_title() for axes in ran.plot().axes] == ["test accuracy", "ε spent"]


def test_warnings_reach_the_report(ran: fedflat.Result) -> None:
    assert any("is larger than 0.1/M" in text for text in ran.warnings)
    page = render([read_run(str(ran.folder))])
    assert page.index("<strong>Warnings</strong>") < page.index("Privacy statement</h2>")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "privacy.json", "recipe.yaml", "checkpoint"])
def test_a_damaged_record_is_refused_by_name(tmp_path: Path, name: str) -> None:
    fedflat.run({**RECIPE, "rounds": 1}, out=tmp_path / "a")
    path = next((tmp_path / "a" / "checkpoints").iterdir()) if name == "checkpoint" else tmp_path / "a" / name
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    with pytest.raises(InputError) as error:
        fedflat.load(tmp_path / "a")
    assert path.name in str(error.value) and "\n" not in str(error.value)


def test_a_module_of_ones_own_is_given_again(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = flat(module).clone()
    ran = fedflat.run({**RECIPE, "rounds": 1}, model=module, out=tmp_path / "a")
    found = fedflat.load(tmp_path / "a")
    assert found.privacy["proven_epsilon"] == ran.privacy["proven_epsilon"], "all but the model is there"
    with pytest.raises(InputError, match="the run's was given in Python"):
        _ = found.model
    assert torch.equal(flat(fedflat.load(tmp_path / "a", model=module).model), flat(ran.model))
    assert torch.equal(flat(module), before)
    for other, says in ((nn.Linear(64, 10), "no such parameter"), (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), "9")):
        with pytest.raises(InputError, match=says):
            _ = fedflat.load(tmp_path / "a", model=other).model


def test_a_program_runs_without_the_package(ran: fedflat.Result, tmp_path: Path) -> None:
    from fedflat.simulation.inspection import check_sums
    from fedflat.simulation.program import write_program

    export(ran.folder, tmp_path / "out")
    path = write_program(ran.folder, tmp_path / "out")
    found = torch.export.load(path).module()
    for size in (1, 5):
        images = torch.linspace(-1, 1, size * 64).reshape(size, 1, 8, 8)
        assert torch.allclose(found(images), ran.model(images), atol=1e-6)
    assert {check.record: check.verdict for check in check_sums(tmp_path / "out")}["model.pt2"] == "ok"


@pytest.mark.parametrize("write", ["write_program", "write_onnx"])
def test_a_program_names_no_folder_of_this_machine(ran: fedflat.Result, tmp_path: Path, write: str) -> None:
    from fedflat.simulation import program

    if write == "write_onnx":
        pytest.importorskip("onnxscript")
    export(ran.folder, tmp_path / "out")
    assert (
        str(Path(fedflat.__file__).parent).encode()
        not in getattr(program, write)(ran.folder, tmp_path / "out").read_bytes()
    )


def test_an_onnx_model_gives_what_the_module_gives(ran: fedflat.Result, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    from fedflat.simulation.program import write_onnx

    export(ran.folder, tmp_path / "out")
    found = onnx.ReferenceEvaluator(str(write_onnx(ran.folder, tmp_path / "out")))
    for size in (1, 5):
        images = torch.linspace(-1, 1, size * 64).reshape(size, 1, 8, 8)
        (outputs,) = found.run(None, {"inputs": images.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), ran.model(images), atol=1e-5)


def test_an_export_without_what_the_seed_drew_says_so(tmp_path: Path) -> None:
    personal = {**RECIPE, "rounds": 1, "algorithm": "dp2-fedsam", "model": "mlp"}
    ran = fedflat.run(personal, out=tmp_path / "a")
    assert torch.equal(flat(fedflat.load(tmp_path / "a").model), flat(ran.model))
    export(tmp_path / "a", tmp_path / "out")
    with pytest.raises(InputError, match="drawn by the run's seed"):
        _ = fedflat.load(tmp_path / "out").model


def test_what_is_no_ended_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder of a run"):
        fedflat.load(tmp_path)
    fedflat.run({**RECIPE, "rounds": 1}, out=tmp_path / "a")
    (tmp_path / "a" / "privacy.json").unlink()
    with pytest.raises(InputError, match="--resume"):
        fedflat.load(tmp_path / "a")


GOOD = {"round": 0, "test_accuracy": 0.8, "test_loss": 0.5, "class_accuracy": [0.8, 0.8]}
QUIET = {"round": 0, "cohort": 5, "clipped_fraction": 0.5, "signal_to_noise": 1.0, "train_loss": 1.0}


@pytest.mark.parametrize(
    ("released", "private", "says"),
    [
        (GOOD, QUIET, None),
        ({"round": 0, "test_accuracy": None, "test_loss": None}, {}, None),
        ({**GOOD, "test_loss": float("nan")}, {}, "test loss is not finite from round 0"),
        ({**GOOD, "test_loss": None}, {}, "test loss is not finite"),
        ({**GOOD, "test_accuracy": 0.52, "class_accuracy": [0.3, 0.7]}, {}, "guessing among 2 classes"),
        ({**GOOD, "test_accuracy": 0.5, "class_accuracy": [1.0, 0.0, None]}, {}, "every test example the same class"),
        ({**GOOD, "test_accuracy": 0.01, "class_accuracy": []}, {}, None),
        (GOOD, {**QUIET, "train_loss": None}, "training loss is not finite in round 0"),
        (GOOD, {**QUIET, "train_loss": None, "cohort": 0}, None),
        (GOOD, {**QUIET, "clipped_fraction": 1.0, "update_norm_mean": 3.0}, "their mean length was 3"),
        (GOOD, {**QUIET, "clipped_fraction": 1.0, "cohort": 0}, None),
        (GOOD, {**QUIET, "signal_to_noise": 0.05}, "The noise is 20 times the signal"),
        (GOOD, {**QUIET, "signal_to_noise": 0.0}, "The noise is inf times the signal"),
    ],
)
def test_each_warning(released: dict[str, Any], private: dict[str, Any], says: str | None) -> None:
    found = cautions({}, [released], [private] if private else [])
    assert found == [] if says is None else len(found) == 1 and says in found[0]
    hidden = bool(found) and released == GOOD
    assert not found or found[0].endswith("not covered by the guarantee)") == hidden
