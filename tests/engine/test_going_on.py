"""A run that goes on from another one's released model, under a budget for both."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_early_stop import given
from torch import nn

import fedflat
from fedflat.assembly import going_on
from fedflat.assembly.going_on import earlier
from fedflat.privacy.ledger import CHAIN, Ledger, read
from fedflat.privacy.together import Published, total
from fedflat.privacy.verify import verify_run

SEEDED = {"randomness": "seeded", "benchmark": True}


def recipe(**more: object) -> dict[str, object]:
    privacy = {"clip": 0.5, "noise_multiplier": 2.0, "delta": 0.01, **SEEDED}
    local = {"steps": 1, "batch_size": 4, "lr": 0.1}
    return {"rounds": 4, "algorithm": "dp-fedavg", "cohort": {"size": 4}, "local": local, "privacy": privacy, **more}


def on(folder: Path, epsilon: float, **more: object) -> dict[str, object]:
    return recipe(after=str(folder), privacy={"clip": 0.5, "epsilon": epsilon, "delta": 0.01, **SEEDED}, **more)


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
        on(first, 2 * spent),
        **given(),
        out=tmp_path / "second",
        on_start=lambda job: starts.append(job.initial_weights),
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
        ({"after": "nowhere"}, "after: found nowhere without a sound checkpoint; allowed"),
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


def test_an_adaptive_clip_s_count_is_counted(first: Path, tmp_path: Path) -> None:
    made = on(first, 40.0, cohort={"size": 8, "sampling": "full"})
    clip = {"kind": "adaptive", "initial": 0.5, "count_noise": 20.0}
    made["privacy"] = {**made["privacy"], "clip": clip}  # type: ignore[dict-item]
    fedflat.run(made, **given(), out=tmp_path / "second")
    assert 39.9 < together(first, tmp_path / "second") <= 40


def test_noise_is_made_for_replaced_clients_where_they_are_the_neighbours(first: Path, tmp_path: Path) -> None:
    made = on(first, 40.0)
    made["privacy"] = {**made["privacy"], "trust": "local"}  # type: ignore[dict-item]
    fedflat.run(made, **given(), out=tmp_path / "second")
    assert 39.9 < together(first, tmp_path / "second") <= 40


def test_a_round_charged_twice_takes_the_place_of_another(first: Path, tmp_path: Path) -> None:
    target, out = 2 * together(first), tmp_path / "second"
    asked = iter((False, False, True))
    fedflat.run(on(first, target), **given(), out=out, should_stop=lambda: next(asked))
    with Ledger.open(out / "ledger.jsonl") as ledger:
        ledger.charge_open({k: v for k, v in ledger.entries[-1].items() if k not in CHAIN}, "drawn again")
    result = fedflat.run(on(first, target), **given(), out=out, resume=True)
    assert "it would exceed the budget" in result.stopped and together(first, out) <= target
    own = on(first, target)
    own["privacy"] = {**own["privacy"], "budget": result.privacy["proven_epsilon"] / 2}  # type: ignore[dict-item]
    assert "it would exceed the budget" in fedflat.run(own, **given()).stopped


@pytest.mark.parametrize("file", ["privacy.json", "recipe.yaml"])
def test_a_damaged_record_of_the_first_is_a_line(first: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(first, tmp_path / "first")
    (tmp_path / "first" / file).write_text("{")
    with pytest.raises(fedflat.InputError, match=r"with a damaged privacy\.json or recipe\.yaml"):
        earlier(fedflat.Recipe.of(on(tmp_path / "first", 30.0)))
    (tmp_path / "first" / file).unlink()
    with pytest.raises(fedflat.InputError, match="allowed: the folder of a run that ended"):
        earlier(fedflat.Recipe.of(on(tmp_path / "first", 30.0)))


def test_one_without_a_proof_or_that_went_on_since_or_after_itself_is_a_line(first: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    shutil.copytree(first, folder)
    made, path = fedflat.Recipe.of(on(folder, 30.0)), folder / "privacy.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "proven_epsilon": None}))
    with pytest.raises(fedflat.InputError, match="of which no ε is proven"):
        earlier(made)
    path.write_text(json.dumps({**said, "rounds": 2, "rounds_charged": 2}))
    with pytest.raises(fedflat.InputError, match="charged 4 rounds and states 2"):
        earlier(made)
    path.write_text(json.dumps(said))
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + f"after: {folder}\n")
    with pytest.raises(fedflat.InputError, match="goes on from itself"):
        earlier(made)


@pytest.mark.parametrize("selection", [{"mean": 3.0}, {"mean": 3.0, "eta": 1.0}])
def test_a_selection_is_no_law_that_composes(first: Path, selection: dict[str, float]) -> None:
    made = on(first, 30.0)
    made["privacy"] = {**made["privacy"], "accountant": "rdp", "selection": selection}  # type: ignore[dict-item]
    with pytest.raises(fedflat.InputError, match="a private method with independent Gaussian noise"):
        fedflat.run(made, **given())


def test_a_law_that_totals_only_add_is_refused(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_on, "curve", lambda runs: None)
    with pytest.raises(fedflat.InputError, match="a law that composes with other runs"):
        fedflat.run(on(first, 30.0), **given())
