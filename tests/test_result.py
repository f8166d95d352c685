"""A model in hand: the result of a run, the same from its folder, and the warnings that both carry."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.report.html import render
from fedflat.report.metrics import read_run
from fedflat.report.summary import cautions, remarks
from fedflat.simulation.inspection import inspect_run
from fedflat.simulation.result import export

RECIPE: dict[str, Any] = {
    "rounds": 3, "algorithm": "dp-fedavg", "data": {"clients": 40, "max_examples": 400}, "model": "linear",
    "local": {"steps": 2, "batch_size": 10, "lr": 0.1}, "cohort": {"size": 20},
    "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.01, "budget": 20},
    "engine": {"backend": "sequential", "device": "cpu"},
}  # fmt: skip


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
    assert isinstance(frame := ran.to_frame(), pd.DataFrame)
    assert frame["test_accuracy"].tolist() == [r["test_accuracy"] for r in ran.history]
    assert not any("norm" in name for name in frame)
    assert [axes.get_title() for axes in ran.plot().axes] == ["test accuracy", "ε spent"]


def test_warnings_reach_the_report(ran: fedflat.Result) -> None:
    assert any("is larger than 0.1/M" in text for text in ran.warnings)
    assert "ε of more than 10 is a weak guarantee or none." in ran.warnings
    page = render([read_run(str(ran.folder))])
    assert page.index("<strong>Warnings</strong>") < page.index("Guarantee</h2>")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "ledger.jsonl", "privacy.json", "recipe.yaml", "checkpoints/round-000003.safetensors"]
)
def test_a_damaged_record_is_refused_by_name(ran: fedflat.Result, tmp_path: Path, name: str) -> None:
    shutil.copytree(ran.folder, tmp_path / "a")
    path = tmp_path / "a" / name
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    with pytest.raises(InputError) as error:
        fedflat.load(tmp_path / "a")
    assert path.name in str(error.value) and "\n" not in str(error.value)


def test_a_module_of_ones_own_is_given_again(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = flat(module).clone()
    without = {key: value for key, value in RECIPE.items() if key != "model"}
    ran = fedflat.run({**without, "rounds": 1}, model=module, out=tmp_path / "a")
    found = fedflat.load(tmp_path / "a")
    assert found.privacy["proven_epsilon"] == ran.privacy["proven_epsilon"], "all but the model is there"
    with pytest.raises(InputError, match="the run's was given in Python"):
        _ = found.model
    assert torch.equal(flat(fedflat.load(tmp_path / "a", model=module).model), flat(ran.model))
    assert torch.equal(flat(module), before)
    make = "from torch import nn\n\ndef make(classes, input_shape):\n    "
    (tmp_path / "my.py").write_text(make + "return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n")
    assert torch.equal(flat(fedflat.load(tmp_path / "a", model=f"{tmp_path}/my.py:make").model), flat(ran.model))
    named = nn.Sequential(nn.Flatten())
    named.prior = nn.Linear(64, 10)  # a part of that name stays one
    assert isinstance(fedflat.run({**without, "rounds": 1}, model=named).model.prior, nn.Linear)
    for other, says in ((nn.Linear(64, 10), "no such parameter"), (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), "9")):
        with pytest.raises(InputError, match=says):
            _ = fedflat.load(tmp_path / "a", model=other).model


def test_programs_give_what_the_module_gives_and_name_no_folder(ran: fedflat.Result, tmp_path: Path) -> None:
    from fedflat.simulation.inspection import check_sums
    from fedflat.simulation.recomputed import Records

    onnx = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    export(ran.folder, tmp_path / "out", program=True, onnx=True)
    files = [tmp_path / "out" / name for name in ("model.pt2", "model.onnx")]
    assert not any(str(Path(fedflat.__file__).parent).encode() in file.read_bytes() for file in files)
    program, graph = torch.export.load(files[0]).module(), onnx.ReferenceEvaluator(str(files[1]))
    for size in (1, 5):
        images = torch.linspace(-1, 1, size * 64).reshape(size, 1, 8, 8)
        assert torch.allclose(program(images), ran.model(images), atol=1e-6)
        (outputs,) = graph.run(None, {"inputs": images.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), ran.model(images), atol=1e-5)
    assert {check.verdict for check in check_sums(Records(tmp_path / "out"))} == {"ok"}


def people(seed: int, users: int) -> pd.DataFrame:
    draw, n = stream(seed, "people"), 6 * users
    frame = pd.DataFrame({"user\u200b ": np.arange(n) % users, "age": draw.normal(40, 15, n)})
    frame["plan"] = draw.choice(["free", "pro"], n)
    frame["bought"] = np.where(frame.age + 30 * (frame.plan == "pro") > 55, "yes", "no")
    frame.loc[::7, "age"] = np.nan
    return frame


def test_from_a_table_to_an_answer_and_to_onnx_with_the_steps_beside_it(tmp_path: Path) -> None:
    """The same rows by the result, its folder, an export, and ONNX with nothing but preparation.json."""
    onnx = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    clients = fedflat.clients(
        people(0, 30), by="user", inputs=["age", "plan"], target="bought", fill={"age": 40}, scale={"age": (40, 15)},
        categories={"plan": ["free", "pro"], "bought": ["no", "yes"]}, test_clients=6,
    )  # fmt: skip
    assert clients.clients == 24 and clients.left_out == 6 and len(clients.test_targets) == 36
    recipe = {"rounds": 3, "algorithm": "fedavg", "cohort": {"size": 24}, "local": {"steps": 9, "lr": 1.0}}
    ran = fedflat.run(recipe, model=nn.Linear(3, 2), clients=clients, out=tmp_path / "run")
    assert ran.privacy["facts"]["left_out"] == 6 and "The 6 clients left out" in " ".join(ran.privacy["not_covered"])
    assert not [check for check in inspect_run(tmp_path / "run") if check.verdict == "wrong"]
    rows = people(1, 10)
    expected = ran.predict(rows)
    assert set(expected) == {"no", "yes"} and (expected == rows.bought).mean() > 0.7 and ran.classes == ("no", "yes")
    shares = ran.predict_proba(rows)
    assert np.allclose(shares.sum(1), 1) and (shares.argmax(1) == (expected == "yes")).all()
    loaded = fedflat.load(tmp_path / "run", model=nn.Linear(3, 2))
    assert (loaded.predict(rows) == expected).all()
    with pytest.raises(InputError, match=r"given in Python.*load\(RUN, model=MODULE\)"):
        fedflat.export(tmp_path / "run", tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists(), "nothing is left that blocks the next try"
    loaded.export(tmp_path / "out", onnx=True)
    steps = json.loads((tmp_path / "out" / "preparation.json").read_text())
    how, sides = steps["encoding"], []
    for name in how["inputs"]:
        cells = [how["fill"].get(name) if value != value else value for value in rows[name].tolist()]
        if name in how["categories"]:
            sides.append(np.array([[value == each for each in how["categories"][name]] for value in cells]))
        else:
            mean, std = how["scale"].get(name, (0, 1))
            sides.append((np.array(cells)[:, None] - mean) / std)
    inputs = np.concatenate(sides, 1).astype(np.float32)
    (outputs,) = onnx.ReferenceEvaluator(str(tmp_path / "out" / "model.onnx")).run(None, {"inputs": inputs})
    assert [steps["names"][place] for place in outputs.argmax(1)] == expected.tolist()
    with pytest.raises(InputError, match="3 outputs; allowed: 2, one for each"):
        fedflat.run(recipe, model=nn.Linear(3, 3), clients=clients)
    with pytest.raises(InputError, match="classes: found 5; allowed: nothing, or 2, the"):
        fedflat.run({**recipe, "data": {"classes": 5}}, model=nn.Linear(3, 2), clients=clients)
    with pytest.raises(InputError, match="no column plan"):
        ran.predict(rows.drop(columns="plan"))
    with pytest.raises(InputError, match=r"row 0, column plan: found 'gold'; allowed: free, pro"):
        ran.predict(rows.assign(plan="gold"))
    with pytest.raises(InputError, match=r"predict: found ndarray; allowed: a table with columns "):
        ran.predict(inputs)


def test_tensors_numbers_and_labels_are_answered(tmp_path: Path) -> None:
    draw = torch.from_numpy(stream(2, "numbers").normal(size=(40, 3))).float()
    frame = pd.DataFrame(draw.numpy(), columns=["a", "b", "c"]).assign(u=np.arange(40) % 8, y=lambda f: 100 + 50 * f.a)
    recipe = {"rounds": 20, "algorithm": "fedavg", "cohort": {"size": 8}, "local": {"steps": 5, "lr": 0.2}}
    clients = fedflat.clients(frame, "u", ["a", "b", "c"], "y", scale={"y": (100, 50)})
    found = fedflat.run(recipe, model=nn.Linear(3, 1), clients=clients, task="regression")
    assert np.allclose(found.predict(frame), frame.y, atol=5), "in the target's own units"
    with pytest.raises(InputError, match="predict_proba: found task: regression"):
        found.predict_proba(frame)
    pairs = [(x, (x > 0).long()) for x in draw.split(5)]
    labels = fedflat.run({**recipe, "rounds": 1}, model=nn.Linear(3, 3), clients=pairs, task="multilabel")
    assert set(np.unique(labels.predict(draw))) <= {0, 1} and labels.predict_proba(draw.numpy()).shape == (40, 3)
    nan = (torch.tensor([[0.0] * 3, [torch.nan] * 3]), "predict: row 1: found a NaN")
    for rows, says in (nan, (torch.zeros(2, 4), "inputs of shape"), (frame, "found a table"), ("x", "found str")):
        with pytest.raises(InputError, match=says):
            labels.predict(rows)


def test_an_export_without_what_the_seed_drew_says_so(tmp_path: Path) -> None:
    ran = fedflat.run({**RECIPE, "rounds": 1, "algorithm": "dp2-fedsam", "model": "mlp"}, out=tmp_path / "a")
    assert torch.equal(flat(fedflat.load(tmp_path / "a").model), flat(ran.model))
    export(tmp_path / "a", tmp_path / "out")
    with pytest.raises(InputError, match="drawn by the run's seed"):
        _ = fedflat.load(tmp_path / "out").model


def test_what_is_no_ended_run(ran: fedflat.Result, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder of a run"):
        fedflat.load(tmp_path)
    for call, place in ((fedflat.load, "load"), (lambda given: fedflat.export(tmp_path, given), "export: out")):
        for given in (5, None):
            with pytest.raises(InputError, match=f"{place}: found {given}; allowed: the path of a folder"):
                call(given)  # type: ignore[operator]
    shutil.copytree(ran.folder, tmp_path / "a")
    (tmp_path / "a" / "privacy.json").unlink()
    with pytest.raises(InputError, match="--resume"):
        fedflat.load(tmp_path / "a")


GOOD = {"round": 0, "test_accuracy": 0.8, "test_loss": 0.5, "class_accuracy": [0.8, 0.8]}
POOR = {**GOOD, "test_accuracy": 0.56, "class_accuracy": [0.56, 0.56]}
QUIET = {"round": 0, "cohort": 5, "clipped_fraction": 0.5, "signal_to_noise": 1.0, "train_loss": 1.0}


@pytest.mark.parametrize(
    ("released", "private", "says"),
    [
        (GOOD, QUIET, None),
        ({"round": 0, "test_accuracy": None, "test_loss": None}, {}, None),
        ({**GOOD, "test_loss": float("nan")}, {}, "test loss is not finite from round 0"),
        ({**GOOD, "test_loss": None}, {}, "test loss is not finite"),
        ({**GOOD, "test_accuracy": 0.52, "class_accuracy": [0.3, 0.7]}, {}, "guessing among 2 classes"),
        ({**GOOD, "test_accuracy": 0.9, "class_accuracy": [0.99, 0.03]}, {}, "90.00 %, each class counted alike,"),
        ({**GOOD, "test_accuracy": 0.5, "class_accuracy": [1.0, 0.0, None]}, {}, "every test example the same class"),
        ({**GOOD, "test_accuracy": 0.01, "class_accuracy": []}, {}, None),
        (GOOD, {**QUIET, "train_loss": None}, "training loss is not finite in round 0"),
        (GOOD, {**QUIET, "train_loss": None, "cohort": 0}, None),
        (GOOD, {**QUIET, "clipped_fraction": 1.0, "update_norm_mean": 3.0}, "their mean length was 3"),
        (GOOD, {**QUIET, "clipped_fraction": 1.0, "cohort": 0}, None),
        (GOOD, {**QUIET, "signal_to_noise": 0.05}, None),  # it learnt: a remark, and no warning
        (POOR, {**QUIET, "signal_to_noise": 0.05}, "The noise is 20 times the signal"),
        (POOR, {**QUIET, "signal_to_noise": 0.0}, "The noise is more than 10,000 times the signal"),
    ],
)
def test_each_warning(released: dict[str, Any], private: dict[str, Any], says: str | None) -> None:
    found = cautions({}, [released], [private] if private else [])
    assert found == [] if says is None else len(found) == 1 and says in found[0]
    hidden = bool(found) and released in (GOOD, POOR)
    assert not found or found[0].endswith("not covered by the guarantee)") == hidden


def test_noise_above_the_signal_is_a_remark_where_the_model_learnt() -> None:
    loud = [{**QUIET, "signal_to_noise": 0.05}]
    (said,) = remarks([GOOD], loud)
    assert said.startswith("One round's noise is 20 times as long as its signal") and "learnt" in said
    assert remarks([POOR], loud) == remarks([GOOD], [QUIET]) == remarks([GOOD], [{**QUIET, "signal_to_noise": 0}]) == []
