"""Noise is used once: whose key a run draws with, restored folders, and two runs in one folder."""

from __future__ import annotations

import json
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat.algorithms import dp_fedavg
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError
from fedflat.core.types import Algorithm
from fedflat.privacy.ledger import extra_rounds, read
from fedflat.records import checkpoint, keys
from fedflat.records import opening as opening_module
from fedflat.records.folder import RunFolder
from fedflat.records.opening import Opening
from fedflat.simulation.run import run

RECIPE: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "linear"},
    "algorithm": {"name": "dp-fedavg"},
    "local": {"steps": 1, "batch_size": 4, "momentum": 0.0},
    "cohort": {"size": 4},
    "privacy": {"clip": 0.5, "noise_multiplier": 1.0},
    "engine": {"backend": "sequential"},
}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def clients(shift: float = 0.0, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 5, generator=made) + shift, torch.arange(6) % 3) for _ in range(count)]


def key(data: Any = None, module: Any = None, method: Any = None, **changes: Any) -> bytes:
    given = clients() if data is None else data
    return prepare(Recipe.of({**RECIPE, **changes}), module, given, algorithm=method).key


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.source = iter("abc")


def test_only_the_same_run_has_the_same_key() -> None:
    own, first = nn.Linear(5, 3), key()
    same = [key(), key(name="other"), key(evaluation={"every": 2}), key(engine={"backend": "vectorized"})]
    others = [
        key(seed=1), key(rounds=4), key(local={"steps": 2, "batch_size": 4}), key(clients(1.0)), key(clients(count=5)),
        key(algorithm={"name": "dp-fedsam"}), key(privacy={"clip": 0.5, "noise_multiplier": 2.0}), key(module=own),
    ]  # fmt: skip
    others.append(prepare(Recipe.of(RECIPE), None, clients(), algorithm=dp_fedavg()).key)
    assert set(same) == {first} and len({first, *others}) == len(others) + 1


def test_two_runs_of_one_seed_do_not_subtract_to_the_truth() -> None:
    """As every compare does: the difference of two runs holds two draws of the noise, not none."""
    still = {"local": {"steps": 1, "batch_size": 4, "momentum": 0.0, "lr": 1e-9}, "rounds": 1}
    one = run({**RECIPE, **still}, clients=clients())
    two = run({**RECIPE, **still, "algorithm": {"name": "dp-fedsam"}}, clients=clients())
    moved = torch.cat([(a - b).flatten() for a, b in zip(one.model.parameters(), two.model.parameters())])
    assert float(moved.detach().std()) == pytest.approx(0.5 / 4 * 2**0.5, rel=0.5)


def test_what_cannot_be_identified_gets_fresh_noise_and_says_so(tmp_path: Path) -> None:
    found = [run(RECIPE, Odd(), clients(), out=tmp_path / name) for name in ("one", "two")]
    assert "cannot be identified" in found[0].privacy["noise_source"]
    names = [{line["key_id"] for line in read(tmp_path / name / "ledger.jsonl")} for name in ("one", "two")]
    assert not names[0] & names[1] and not list((tmp_path / "state").glob("fedflat/keys/*"))
    seeded = run(RECIPE, nn.Linear(5, 3), clients())
    assert seeded.privacy["noise_source"] == "simulation: noise reproducible from the seed"


def stopped(folder: Path, rounds: int, resume: bool = False, secure: bool = True) -> Any:
    done: list[int] = []
    recipe = {**RECIPE, "privacy": {**RECIPE["privacy"], "secure_rng": secure}}
    stop = lambda: len(done) == rounds  # noqa: E731
    return run(
        recipe, clients=clients(), out=folder, resume=resume, on_round=lambda *_: done.append(1), should_stop=stop
    )


@pytest.mark.parametrize("complete", [False, True])
def test_a_restored_folder_is_charged_and_draws_anew(tmp_path: Path, complete: bool) -> None:
    folder = tmp_path / "run"
    stopped(folder, 1)
    shutil.copytree(folder, tmp_path / "backup")
    stopped(folder, 3 if complete else 1, resume=True)
    before = checkpoint.load_released(folder / "checkpoints" / "round-000002.safetensors")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    found = stopped(folder, 3, resume=True)
    after = checkpoint.load_released(folder / "checkpoints" / "round-000002.safetensors")
    assert float((before.shared - after.shared).std()) > 0.05
    lines = read(folder / "ledger.jsonl")
    assert len(lines) == 3 + (2 if complete else 1) and extra_rounds(lines) == len(lines) - 3
    assert found.privacy["rounds_charged"] == len(lines)
    assert found.privacy["epsilon"] == pytest.approx(found.history[-1]["epsilon"])
    assert any("behind the mark" in note for note in found.notes)
    assert any("behind the mark" in reason for reason in found.privacy["reasons"])


def test_another_software_charges_the_open_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    stopped(folder, 2, secure=False)
    (folder / "checkpoints" / "round-000002.safetensors").unlink()
    monkeypatch.setattr(opening_module, "versions", lambda packages: {"torch": "another"})
    found = stopped(folder, 3, resume=True, secure=False)
    lines = read(folder / "ledger.jsonl")
    assert [(line["round"], line.get("attempt", 1)) for line in lines] == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert lines[1]["key_id"] != lines[2]["key_id"] and lines[2]["run"]["software"]["torch"] == "another"
    assert any("torch" in note and "differ" in note for note in found.notes)


def test_without_an_open_round_other_software_is_only_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    stopped(folder, 2, secure=False)
    monkeypatch.setattr(opening_module, "versions", lambda packages: {"torch": "another"})
    found = stopped(folder, 3, resume=True, secure=False)
    assert [line.get("attempt", 1) for line in read(folder / "ledger.jsonl")] == [1, 1, 1] and len(found.notes) == 1


def test_the_ledgers_first_line_says_whose_it_is(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 2, secure=False)
    lines = read(tmp_path / "run" / "ledger.jsonl")
    opened = Opening.read(tmp_path / "run")
    assert lines[0]["run"] == opened.public and "run" not in lines[1]
    assert set(opened.public) == {"format", "id", "attempt", "recipe", "data", "model", "method", "software"}
    identity = prepare(Recipe.of(RECIPE), None, clients()).identity
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert identity.data.encode() not in content and identity.fingerprint.encode() not in content
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")}
    private = {path: mode for path, mode in modes.items() if "private" in path.relative_to(tmp_path / "run").parts}
    assert len(private) >= 4 and not any(mode & 0o077 for mode in private.values())


def test_checkpoints_hold_what_is_released_and_no_more(tmp_path: Path) -> None:
    from safetensors import safe_open

    run({**RECIPE, "algorithm": {"name": "dp2-fedsam"}, "model": {"name": "mlp", "hidden": 4}},
        clients=clients(), out=tmp_path / "run")  # fmt: skip
    newest = sorted((tmp_path / "run" / "checkpoints").glob("*"))[-1]
    with safe_open(newest, framework="pt") as file:
        assert set(file.keys()) <= {"shared", "heads.first", "slot.initial"}
        facts = json.loads(file.metadata()["state"])
    public = {"round", "clip", "private_half", "run", "ledger", "tensors", "shared_tensors", "sha256"}
    assert set(facts) == {*public, "made_for"}  # shapes that a named model's own tensors show
    assert set(facts["made_for"]) == {"input_shape", "dtype", "classes", "vocabulary", "padding"}
    run(RECIPE, model=torch.nn.Linear(5, 3), clients=clients(), out=tmp_path / "own")
    with safe_open(sorted((tmp_path / "own" / "checkpoints").glob("*"))[-1], framework="pt") as file:
        assert "made_for" not in json.loads(file.metadata()["state"]), "how many classes clients have stays with them"
    assert checkpoint.load(newest)[1].kept.keys() and facts["private_half"] is True


def test_a_run_of_before_is_refused_in_one_line(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 2, secure=False)
    (tmp_path / "run" / "private" / "run.json").unlink()
    with pytest.raises(InputError, match="can be verified and reported, not resumed") as error:
        stopped(tmp_path / "run", 3, resume=True, secure=False)
    assert "\n" not in str(error.value)


def test_one_of_two_runs_in_a_folder_is_refused(tmp_path: Path) -> None:
    entered, refused = threading.Event(), []
    with RunFolder.create(tmp_path / "run"):
        with pytest.raises(InputError, match="which holds a run"), RunFolder.create(tmp_path / "run"):
            entered.set()
        assert not entered.is_set()
    for _ in range(2):
        try:
            fedflat.run({**RECIPE, "rounds": 1}, clients=clients(), out=tmp_path / "run")
        except InputError as error:
            refused.append(str(error))
    assert len(refused) == 1 and "\n" not in refused[0]


def test_marks(tmp_path: Path) -> None:
    mark = keys.Mark("abc")
    assert mark.entries() is None
    with pytest.raises(OSError, match="No such file"):
        mark.append(b"line\n")
    mark.replace(b"")
    assert mark.entries() == [] and stat.S_IMODE(mark.path.stat().st_mode) == 0o600
    mark.path.write_bytes(b"no ledger line\nnor this\n")
    assert mark.entries() is None and mark.path.with_name("abc.damaged").exists()
    mark.path.mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        mark.entries()
    with pytest.raises(fedflat.core.checks.RunError, match="nothing was released"):
        mark.replace(b"")


def test_a_method_is_known_by_its_code() -> None:
    assert key(method=Algorithm("own")) == key(method=Algorithm("own")) != key(method=Algorithm("mine"))
