"""A method, a model and a loss from a user's file run in every kind of process; one that dies says how and why."""

import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import pairs, recipe, weights

import fedflat
from fedflat.backends import workers
from fedflat.core.checks import InputError, RunError
from fedflat.core.imports import imported
from fedflat.core.process import how_it_ended

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")

FILE = """
from dataclasses import dataclass
import os, signal, sys
import torch
from torch import nn
from fedflat import Algorithm, Phase

@dataclass(frozen=True)
class Signed:
    def __call__(self, gradient, view):
        return lambda w: torch.sign(gradient(w))

def method() -> Algorithm:
    return Algorithm("signed", phases=(Phase(rule=Signed()),))

class Net(nn.Module):
    def __init__(self, fatal=0):
        super().__init__()
        self.line, self.fatal, self.home = nn.Linear(6, 3), fatal, os.getpid()

    def forward(self, x):
        if self.fatal and os.getpid() != self.home:
            os.kill(os.getpid(), self.fatal)
        return self.line(x)

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none") + 0.01 * outputs.square().sum(-1)
"""


def _ran(folder: Path, engine: dict[str, Any], **model: Any) -> torch.Tensor:
    file = f"{folder}/mine.py"
    made = recipe(
        f"{file}:method", engine, model={"name": f"{file}:Net", **model}, loss=f"{file}:loss",
        cohort={"size": 6, "sampling": "full"},
        privacy={"noise_multiplier": 0},  # code that asks for its process gets fresh noise
    )  # fmt: skip
    return weights(fedflat.run(made, clients=pairs([4] * 6)).model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    return tmp_path


@pytest.mark.long
def test_a_method_a_model_and_a_loss_of_one_file_run_in_workers_and_on_ray(folder: Path) -> None:
    expected = _ran(folder, {"backend": "sequential"})
    assert torch.equal(_ran(folder, {"backend": "workers", "processes": 2}), expected)
    pytest.importorskip("ray")
    assert torch.equal(_ran(folder, {"backend": "ray", "processes": 1}), expected)


def test_a_file_that_is_gone_still_shows_the_text_that_ran(folder: Path) -> None:
    (folder / "mine.py").write_text(f"\x0c{FILE}", encoding="utf-8")  # a page break ends no line
    signed = imported("algorithm.name", f"{folder}/mine.py:Signed")
    (folder / "mine.py").unlink()
    assert "torch.sign(gradient(w))" in inspect.getsource(signed)
    assert pickle.loads(pickle.dumps(signed())) == signed()


@pytest.mark.parametrize(("number", "words"), [(6, "its compiled code crashed (SIGABRT)"), (9, "killed by SIGKILL")])
@pytest.mark.usefixtures("quick_workers")
def test_a_worker_that_dies_says_how(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    monkeypatch.setattr(workers, "WAIT", 0.2)
    with pytest.raises(RunError) as told:
        _ran(folder, {"backend": "workers", "processes": 1}, fatal=number)
    assert words in str(told.value) and "\n" not in str(told.value)
    assert ("memory is short" in str(told.value)) == (number == 9)
    assert how_it_ended(3) == "it ended with status 3" and how_it_ended(None) == "it was killed or crashed"


RAY = """
import numpy as np, torch, fedflat
from fedflat.core.checks import InputError, RunError
from failing import Net
pairs = [(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)) for _ in range(9)]
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.engine.train import train
recipe = Recipe.of({
    "rounds": 1, "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 4}, "cohort": {"size": 9},
    "privacy": {"clip": 0.2, "noise_multiplier": 1.0, "delta": 1e-5},
    "engine": {"backend": "ray", "processes": 2, "block": 1},
})
refused = 0
job = prepare(recipe, Net(), clients=pairs)  # once: each run of one's own code gets new worker processes
for _ in range(200):
    try:
        train(job)
    except RunError as error:
        assert "sizes do not fit" in str(error)
        refused += 1
print("refused", refused)
"""
FAILING = """
import os
from torch import nn

class Net(nn.Linear):
    home = os.getpid()

    def __init__(self):
        super().__init__(6, 3)
        self.home = os.getpid()

    def forward(self, x):
        if os.getpid() != self.home:
            raise ValueError("sizes do not fit")
        return super().forward(x)
"""


@pytest.mark.long
def test_two_hundred_clients_that_raise_on_ray_do_not_end_this_process(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    (tmp_path / "plain.py").write_text(RAY, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stdout.strip()) == (0, "refused 200"), done.stderr[-2000:]


def test_auto_takes_a_back_end_that_torchs_own_lstm_runs_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = torch.nn.LSTM(2, 3, batch_first=True), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.cell(x)[0][:, -1])

    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path))
    recipe = {"rounds": 1, "algorithm": "dp-scaffold", "local": {"steps": 2, "lr": 0.1}, "cohort": {"size": 4}}
    recipe["privacy"] = {"clip": 0.2, "noise_multiplier": 1.0}
    pairs = [(torch.randn(4, 3, 2), torch.arange(4) % 2) for _ in range(6)]
    assert len(fedflat.run(recipe, model=Last(), clients=pairs).history) == 1
    with pytest.raises(InputError, match=r"found vectorized with torch's own recurrent layers; allowed: sequential"):
        fedflat.run(recipe | {"engine": {"backend": "vectorized"}}, model=Last(), clients=pairs)


def test_a_back_end_that_dies_in_an_audit_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedflat.audit import movements, worlds

    def dies(*_: object) -> None:
        raise RunError("a worker process died")

    monkeypatch.setattr(worlds.Worlds, "__init__", lambda self, stage: setattr(self, "stage", stage))
    monkeypatch.setattr(worlds.Worlds, "_without", dies)
    found = worlds.Worlds(None).movement(worlds.Engine("workers"), worlds.Case("ordinary"))  # type: ignore[arg-type]
    assert found.over and movements.faults([found]) == (
        "workers, ordinary: neither world ends (a worker process died)",
    )
