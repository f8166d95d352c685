"""What runs beside the clients' training: noise, ε, the last checkpoint, several batches of an evaluation."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import pairs, recipe, weights
from torch import Tensor, nn

import fedflat
from fedflat.core.checks import RunError
from fedflat.core.params import layout_of
from fedflat.core.process import in_background
from fedflat.core.rng import stream
from fedflat.engine import train
from fedflat.engine.evaluate import scores
from fedflat.engine.problem import ModuleProblem
from fedflat.pieces.mechanisms import GaussianNoise
from fedflat.records import checkpoint

pytestmark = pytest.mark.usefixtures("noise_of_the_seed")


def model() -> nn.Module:
    return nn.Linear(6, 3)


def test_what_was_found_or_raised_comes_back_when_asked_for() -> None:
    go = threading.Event()
    slow = in_background(lambda: go.wait(60) and 7)  # done by this thread, it would wait in vain
    go.set()
    assert slow() == slow() == 7

    def fails() -> None:
        raise OSError("disk full")

    broken = in_background(fails)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            broken()


@pytest.mark.parametrize("trust", ["central", "distributed", "local"])
def test_noise_drawn_ahead_is_the_same_noise(trust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {k: v.clone() for k, v in model().state_dict().items()}
    found = []
    for least in (10**9, 0):
        monkeypatch.setattr(train, "LARGE", least)
        network = model()
        network.load_state_dict(first)
        asked = recipe(privacy={"trust": trust})
        if trust == "distributed":
            asked["cohort"] = {"size": 18, "min": 4}
        found.append(fedflat.run(asked, model=network, clients=pairs([5] * 20)))
    assert torch.equal(weights(found[0].model), weights(found[1].model))
    assert [r["epsilon"] for r in found[0].history] == [r["epsilon"] for r in found[1].history]


def test_noise_ahead_is_of_its_own_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken twin: one unit vector for all rounds would let the noise be subtracted."""
    asked: list[int] = []
    real = GaussianNoise.unit
    monkeypatch.setattr(train, "LARGE", 0)
    monkeypatch.setattr(GaussianNoise, "unit", lambda self, key, r, size: asked.append(r) or real(self, key, r, size))
    fedflat.run(recipe(rounds=3), model=model(), clients=pairs([5] * 6))
    assert sorted(asked) == [0, 1, 2]
    noise = GaussianNoise(lambda bound: bound)
    drawn = [real(noise, b"k", r, 9) for r in range(3)]
    assert torch.equal(drawn[1], torch.from_numpy(stream(b"k", "noise", 1).standard_normal(9, dtype=np.float32)))
    assert not torch.equal(drawn[0], drawn[1])


def test_a_round_is_charged_only_after_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    save, finish = checkpoint.save, train.finish_round

    def slow(folder: Path, state: Any, *rest: Any) -> Path:
        time.sleep(0.05)
        path = save(folder, state, *rest)
        events.append(("saved", state.round))
        return path

    def noted(parts: Any, state: Any, *rest: Any, **more: Any) -> Any:
        events.append(("finishes", state.round))
        return finish(parts, state, *rest, **more)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(train, "finish_round", noted)
    fedflat.run(recipe(rounds=3), model=model(), clients=pairs([5] * 6), out=tmp_path / "run")
    assert events == [("finishes", 0), ("saved", 1), ("finishes", 1), ("saved", 2), ("finishes", 2), ("saved", 3)]


def test_a_checkpoint_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(RunError, match=r"cannot be written \(No space left on device\); the run stops"):
        fedflat.run(recipe(rounds=3), model=model(), clients=pairs([5] * 6), out=tmp_path / "run")
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 1


class Remembers(nn.Module):
    """Keeps its input on itself while a pass lasts, as some models do: two threads cannot share it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        time.sleep(0.002)
        found, self.seen = self.layer(self.seen), None
        return found  # type: ignore[no-any-return]


class Alone(Remembers):
    """Refuses to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one only")


@pytest.mark.parametrize("kind", [Remembers, Alone])
def test_an_evaluation_by_several_threads_has_the_same_numbers(kind: type[nn.Module]) -> None:
    module = kind()
    problem = ModuleProblem(module, layout_of(module))
    vector, inputs, targets = (
        torch.randn(15, generator=torch.Generator().manual_seed(0)), torch.randn(47, 4),
        torch.zeros(47, dtype=torch.int64),
    )  # fmt: skip
    alone = scores(problem, vector, inputs, targets, 5)
    for threads in (2, 3, 50):
        together = scores(problem, vector, inputs, targets, 5, threads)
        assert all(map(torch.equal, together, alone))
    assert module.training and len(problem.twins(3)) == (3 if kind is Remembers else 1)
    other = scores(problem, vector + 1, inputs, targets, 5, 3)
    torch.testing.assert_close(other[0], scores(problem, vector + 1, inputs, targets)[0])
