"""``server.average``: what is released is the average, what training goes on from is not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.types import AVERAGE, Aggregate, RoundState
from fedflat.engine.job import Job
from fedflat.engine.round import _aborted, broadcast_of
from fedflat.engine.train import train
from fedflat.pieces.server import MovingAverage, TailAverage
from fedflat.records import checkpoint
from fedflat.simulation.result import Result, export

PRIVACY = {"clip": 0.5, "noise_multiplier": 1.0}


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 5, "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 20}, "cohort": {"size": 5},
        "privacy": PRIVACY, "engine": {"backend": "sequential"}, **changes,
    }  # fmt: skip


DRAW = torch.Generator().manual_seed(0)
MODEL = nn.Linear(4, 3)
CLIENTS = [(torch.randn(8, 4, generator=DRAW), torch.arange(8) % 3) for _ in range(10)]
TEST = (torch.randn(60, 4, generator=DRAW), torch.arange(60) % 3)


def job(**changes: Any) -> Job:
    return prepare(Recipe.of(recipe(**changes)), MODEL, CLIENTS)


def run(folder: Path, *, resume: bool = False, **changes: Any) -> Result:
    return fedflat.run(recipe(**changes), MODEL, CLIENTS, TEST, folder / "run", resume=resume)


def iterates(average: Any, count: int) -> list[Tensor | None]:
    found, now = list[Tensor | None](), None
    for round in range(1, count + 1):
        now = average(round, torch.tensor([float(round), -1.0]), now)
        found.append(now)
    return found


@pytest.mark.parametrize("rounds", [1, 2, 7, 8])
def test_tail_is_the_mean_of_the_planned_second_half(rounds: int) -> None:
    found = iterates(TailAverage(rounds), rounds)
    first = rounds // 2
    assert found[:first] == [None] * first
    for done in range(first + 1, rounds + 1):
        expected = sum(range(first + 1, done + 1)) / (done - first)
        torch.testing.assert_close(found[done - 1], torch.tensor([expected, -1.0]))


def test_moving_average_is_the_plain_mean_at_first() -> None:
    found = iterates(MovingAverage(0.75), 6)
    for done in range(1, 5):
        torch.testing.assert_close(found[done - 1], torch.tensor([(done + 1) / 2, -1.0]))
    torch.testing.assert_close(found[5], 0.75 * found[4] + 0.25 * torch.tensor([6.0, -1.0]))  # type: ignore[operator]
    assert iterates(MovingAverage(0.0), 3)[2].tolist() == [3.0, -1.0]  # type: ignore[union-attr]


def test_averages_never_share_memory_with_the_iterate() -> None:
    shared = torch.zeros(3)
    for average in (TailAverage(1), MovingAverage(0.5)):
        found = average(1, shared, None)
        assert found is not None and found.data_ptr() != shared.data_ptr()


@pytest.mark.parametrize("average", ["tail", "ema"])
def test_training_goes_on_from_the_last_iterate(average: str) -> None:
    """One key: the iterates are those of the run without, and only what is given back differs."""
    jobs = [job(server={"average": name}) for name in ("none", average)]
    for one in jobs:
        one.key = bytes(32)
    plain, averaged = (train(one).state for one in jobs)
    assert torch.equal(plain.shared, averaged.shared) and AVERAGE not in plain.slots
    assert torch.equal(plain.released, plain.shared) and not torch.equal(averaged.released, averaged.shared)


def test_a_broadcast_of_the_average_would_be_noticed() -> None:
    """The broken twin: clients that start from the average send other updates."""
    made = job(server={"average": "ema"})
    state = train(made).state
    sent = broadcast_of(made.parts, state, 0)
    broken = broadcast_of(made.parts, replace(state, shared=state.released), 0)
    assert torch.equal(sent.shared, state.shared) and not torch.equal(broken.shared, sent.shared)
    assert AVERAGE not in sent.vectors


def test_everything_that_is_given_back_is_the_average(tmp_path: Path) -> None:
    result = run(tmp_path, server={"average": "tail"})
    newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    state, _, _ = newest
    export(tmp_path / "run", tmp_path / "out")
    loaded = [fedflat.load(tmp_path / name, MODEL).model for name in ("run", "out")]
    for model in (result.model, *loaded):
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        assert torch.equal(flat, state.released) and not torch.equal(flat, state.shared)
    accuracy = float((result.model(TEST[0]).argmax(1) == TEST[1]).float().mean())
    assert result.history[-1]["test_accuracy"] == pytest.approx(accuracy)


@pytest.mark.usefixtures("noise_of_the_seed")
@pytest.mark.parametrize("server", [{"average": "tail"}, {"average": "ema", "decay": 0.6}])
def test_a_resumed_run_ends_bit_for_bit_the_same(server: dict[str, Any], tmp_path: Path) -> None:
    whole = run(tmp_path, server=server)
    for path in sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[1:]:
        path.unlink()
    again = run(tmp_path, server=server, resume=True)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_aborted_round_counts_as_the_same_iterate_once_more() -> None:
    parts = job(server={"average": "tail"}).parts
    shared = torch.ones(parts.layout.dimension)
    state = RoundState(3, shared, 0.5, {AVERAGE: 3 * shared})
    nothing = Aggregate(torch.zeros(0), 0, 0.0, torch.zeros(0), torch.zeros(0))
    after, _ = _aborted(parts, state, broadcast_of(parts, state, 0), nothing)
    assert after.round == 4 and torch.equal(after.released, 2 * shared)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"server": {"average": "mean"}}, "none, tail, ema"),
        ({"server": {"average": "tail", "decay": 0.5}}, "it is of ema"),
        ({"server": {"average": "ema", "decay": 1.0}}, "server.decay"),
        ({"server": {"average": "tail"}, "algorithm": {"name": "ae-dpfl", "queries": 20}}, "none for ae-dpfl"),
        (
            {"server": {"average": "tail"}, "algorithm": "dp-fedsam", "privacy": {**PRIVACY, "protocol": "published"}},
            "tail with privacy.protocol: published",
        ),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        job(**changes)
