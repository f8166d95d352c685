"""``fedflat landscape`` on tiny runs: files, table, JSON, local models, one-line errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.engine.evaluate import scores
from fedflat.landscape import flatness
from fedflat.landscape.objective import Objective
from fedflat.records import checkpoint
from fedflat.report.metrics import read_run, read_runs

TINY: dict[str, Any] = {
    "name": "tiny", "rounds": 2, "data": {"dataset": "digits", "clients": 20, "max_examples": 400},
    "model": {"name": "mlp", "hidden": 8}, "algorithm": {"name": "dp-fedsam", "rho": 0.05},
    "local": {"steps": 3, "batch_size": 16}, "cohort": {"size": 8},
    "privacy": {"noise_multiplier": 1.0, "accountant": "rdp"},
}  # fmt: skip
FAST = ("--points", "5", "--draws", "2", "--curvature-examples", "60", "--threads", "1")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds each, and one with personal heads."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("dp-fedsam", "dp-fedavg"):
        for seed in (0, 1):
            chosen = {"name": name, "rho": 0.05} if name == "dp-fedsam" else {"name": name}
            fedflat.run({**TINY, "seed": seed, "algorithm": chosen}, out=folder / "both" / f"{name}-{seed}")
    fedflat.run({**TINY, "algorithm": {"name": "dp2-fedsam"}}, out=folder / "heads")
    return folder


def test_a_comparison_in_eighty_columns(runs: Path, command: Call, tmp_path: Path) -> None:
    status, out, err = command("landscape", str(runs / "both"), *FAST, "--clients", "3", "--out", str(tmp_path / "new"))
    assert status == 0, err
    assert max(map(len, out.split("\n\n/")[0].splitlines())) <= 80
    assert "± sd of 2 seeds" in out and "dp-fedsam, client 3" in out and "private to the simulation" in out
    assert "Traceback" not in err and "25 points" in err
    page = (tmp_path / "new" / "landscape.html").read_text(encoding="utf-8")
    assert page.count("<canvas") == 4 and len(page) < 5_000_000
    found = json.loads((tmp_path / "new" / "landscape.json").read_text(encoding="utf-8"))
    assert len(found["groups"]) == 4 and len(found["models"]) == 8 and found["notes"] == []
    first = found["groups"][0]
    assert ("ε of the mechanism" in page) == first["seeded"] != ("ε proven" in page)
    own = [each for each in found["models"] if each["group"] == first["label"] and each["model"] == "global"]
    for key, value in first["numbers"].items():
        numbers = [each["numbers"][key] for each in own]
        assert [value["mean"], value["sd"]] == pytest.approx([np.mean(numbers), np.std(numbers, ddof=1)])
    assert [each["surface"] is not None for each in own if "surface" in each] == [True]


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(runs: Path, command: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words in (("--out", str(tmp_path / "file")), ("--out", str(tmp_path / "file" / "below"))):
        status, _, err = command("landscape", str(runs / "heads"), *FAST, *words)
        assert status == 2 and "cannot be written" in err and "points" not in err
    assert command("landscape", str(tmp_path / "misspelt"), *FAST)[0] == 2 and not (tmp_path / "misspelt").exists()


def test_json_is_one_document_and_only_that(runs: Path, command: Call, tmp_path: Path) -> None:
    words = (str(runs / "both" / "dp-fedsam-0"), *FAST, "--directions", "1", "--json", "--out", str(tmp_path))
    status, out, err = command("landscape", *words)
    found = json.loads(out)
    assert status == 0 and err == "" and found["groups"][0]["surface"] is None
    # The model itself lies in the middle of the line, and is what the run recorded.
    model = found["models"][0]
    run = read_run(runs / "both" / "dp-fedsam-0")
    assert model["line"]["loss"][2] == pytest.approx(run.metrics[-1]["test_loss"], rel=1e-5)
    assert model["numbers"]["accuracy"] == pytest.approx(run.metrics[-1]["test_accuracy"], abs=1e-6)
    assert model["private"] is False and model["spectrum"]["top"][0] > 0


@pytest.mark.parametrize("where", ["both/dp-fedsam-0", "heads"])
def test_a_local_model_is_the_clients_after_training(runs: Path, where: str) -> None:
    """Local training lowers the loss on the client's own data and starts from the run's newest weights."""
    run = read_run(runs / where)
    state, heads, _ = checkpoint.newest(run.path / "checkpoints") or pytest.fail("no checkpoint")
    job = prepare(fedflat.Recipe.of(run.recipe))
    everyone, local = (flatness.weights_of(job, state, heads, client) for client in (None, 3))
    assert torch.equal(everyone, torch.cat([state.shared, heads.first]))
    settings, rows = flatness.Settings(on="train"), torch.from_numpy(job.data.parts[3])
    all_rows, (inputs, targets) = (flatness._data(job, client, settings) for client in (None, 3))
    assert torch.equal(targets, job.data.targets[rows]) and len(all_rows[0]) == sum(job.data.sizes)
    before, after = (
        scores(job.problem, each, inputs, targets)[0].mean().item() for each in (heads.whole(state.shared, 3), local)
    )
    assert after < before
    found = Objective(job.problem.module, job.parts.layout, inputs, targets).value(local)
    assert found[0] == pytest.approx(after, rel=1e-5)


def test_training_data_is_marked_private(runs: Path) -> None:
    settings = flatness.Settings(points=3, directions=1, draws=1, trace_draws=2, on="train", examples=50, threads=1)
    found = flatness.measure([runs / "heads"], settings)
    assert found["models"][0]["private"] and found["models"][0]["examples"] == 50
    assert "personal head" in found["notes"][0]


def test_any_number_of_threads_gives_the_same_numbers(runs: Path) -> None:
    found = []
    for threads in (1, 2):
        settings = flatness.Settings(points=5, draws=2, trace_draws=3, threads=threads)
        measured = flatness.measure([runs / "both" / "dp-fedavg-0"], settings)["models"][0]
        found.append({key: value for key, value in measured.items() if key != "seconds"})
    assert found[0] == found[1]


def test_a_wrong_record_is_reported(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs / "both" / "dp-fedavg-0", other)
    lines = (other / "metrics.jsonl").read_text().splitlines()
    last = {**json.loads(lines[-1]), "test_accuracy": 0.999}
    later = {**last, "round": last["round"] + 1, "test_accuracy": 0.111}  # killed before its checkpoint was written
    (other / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last), json.dumps(later)]) + "\n")
    (other / "recipe.yaml").write_text((other / "recipe.yaml").read_text().replace("lr: 0.1", "lr: 0.2"))
    settings = flatness.Settings(points=3, directions=1, draws=1, trace_draws=1, threads=1)
    assert any("recorded a test accuracy of 99.90 %" in note for note in flatness.measure([other], settings)["notes"])
    assert len(read_runs([other])) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--points", "2"), "--points: found 2; allowed: a whole number ≥ 3"),
        (("--noise", "a"), "--noise: found a; allowed: numbers with commas"),
        (("--noise", ","), "--noise: found nothing"),
        (("--clients", "99"), "--clients: found 99; allowed: a whole number ≥ 0 and ≤ 19"),
        (("--on", "tests"), "Did you mean test?"),
        (("--rho", "0"), "--rho: found 0"),
        (("--directions", "3"), "--directions: found 3"),
        (("--span", "-1"), "--span: found -1"),
    ],
)
def test_mistakes_are_one_line(runs: Path, command: Call, words: tuple[str, ...], said: str) -> None:
    status, out, err = command("landscape", str(runs / "both" / "dp-fedsam-0"), *words)
    last = err.strip().splitlines()[-1]
    assert status == 2 and out == "" and last.startswith("fedflat: ") and said in last


def test_a_folder_without_a_run(command: Call, tmp_path: Path) -> None:
    status, _, err = command("landscape", str(tmp_path))
    assert status == 2 and "allowed: a folder written by fedflat run" in err
    (tmp_path / "recipe.yaml").write_text("name: x\nrounds: 1\n")
    status, _, err = command("landscape", str(tmp_path))
    assert status == 2 and "no readable checkpoint" in err
