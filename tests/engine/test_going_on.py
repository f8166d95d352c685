"""A run that goes on from another one's released model, under a budget for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fedflat
from fedflat.privacy.ledger import read
from fedflat.privacy.together import Published, total
from fedflat.privacy.verify import verify_run


def recipe(**more: object) -> dict[str, object]:
    privacy = {"clip": 0.5, "noise_multiplier": 2.0, "delta": 0.01}
    local = {"steps": 1, "batch_size": 4, "lr": 0.1}
    return {"rounds": 4, "algorithm": "dp-fedavg", "cohort": {"size": 4}, "local": local, "privacy": privacy, **more}


def on(folder: Path, epsilon: float, **more: object) -> dict[str, object]:
    return recipe(after=str(folder), privacy={"clip": 0.5, "epsilon": epsilon, "delta": 0.01}, **more)


def given() -> dict[str, object]:
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)) for _ in range(8)]
    module = nn.Linear(5, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return {"model": module, "clients": pairs}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    fedflat.run(recipe(), **given(), out=folder)
    return folder


def together(*folders: Path) -> float:
    stated = [(folder, fedflat.load(folder, nn.Linear(5, 3)).privacy) for folder in folders]
    runs = [Published(f.name, p["proven_epsilon"], p["delta"], read(f / "ledger.jsonl"), f) for f, p in stated]
    return total(runs).epsilon


def test_it_starts_at_the_released_model_and_both_cost_what_was_asked(first: Path, tmp_path: Path) -> None:
    before = fedflat.load(first, nn.Linear(5, 3))
    spent = before.privacy["proven_epsilon"]
    starts: list[torch.Tensor] = []
    result = fedflat.run(
        on(first, 2 * spent), **given(), out=tmp_path / "second", on_start=lambda job: starts.append(job.first)
    )
    assert torch.equal(starts[0], torch.cat([p.detach().reshape(-1) for p in before.model.parameters()]))
    both = together(first, tmp_path / "second")
    assert 2 * spent * 0.999 < both <= 2 * spent and result.privacy["proven_epsilon"] < 2 * spent
    assert f"ε = {both:.4g} at δ = 0.01" in result.warnings[0] and "earlier run" in result.privacy["prior"]
    assert verify_run(tmp_path / "second").ok


def test_a_stopped_one_goes_on_bit_for_bit(first: Path, tmp_path: Path) -> None:
    made = on(first, 30.0)
    asked = iter((False, False, True))
    fedflat.run(made, **given(), out=tmp_path / "cut", should_stop=lambda: next(asked))
    cut = fedflat.run(made, **given(), out=tmp_path / "cut", resume=True)
    straight = fedflat.run(made, **given())
    assert all(torch.equal(a, b) for a, b in zip(cut.model.parameters(), straight.model.parameters(), strict=True))


def test_a_third_counts_both_before_it(first: Path, tmp_path: Path) -> None:
    spent = together(first)
    fedflat.run(on(first, 2 * spent), **given(), out=tmp_path / "second")
    fedflat.run(on(tmp_path / "second", 3 * spent), **given(), out=tmp_path / "third")
    assert 3 * spent * 0.999 < together(first, tmp_path / "second", tmp_path / "third") <= 3 * spent


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"after": "nowhere"},
            "after: found nowhere without a sound checkpoint; allowed",
        ),
        ({"privacy": {"clip": 0.5, "epsilon": 0.1, "delta": 0.01}}, "first costs ε = "),
        ({"cohort": {"size": 4, "sampling": "min-separation"}}, "a private method with independent Gaussian noise"),
    ],
)
def test_what_cannot_be_is_a_line(first: Path, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(fedflat.InputError, match=sentence.replace("(", r"\(")):
        fedflat.run(on(first, 10.0) | change, **given())


def test_another_model_is_a_line(first: Path) -> None:
    found = r"after: model: weight: found shape \(4, 5\); allowed: shape \(3, 5\)"
    with pytest.raises(fedflat.InputError, match=found):
        fedflat.run(on(first, 30.0), model=nn.Linear(5, 4), clients=given()["clients"])


def test_the_given_module_is_not_changed(first: Path) -> None:
    mine = given()
    fedflat.run(on(first, 30.0), **mine)
    assert not any(parameter.any() for parameter in mine["model"].parameters())


def test_recipes_without_it_are_what_they_were() -> None:
    assert "after" not in fedflat.Recipe.of(recipe()).dump()
