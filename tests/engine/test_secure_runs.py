"""Runs with `privacy.secure_rng`: the key outside the folder, killed and resumed with and without it."""

import os
import signal
from pathlib import Path

import pytest
from fork_server import CONTEXT

import fedflat
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.engine import train
from fedflat.privacy.ledger import read
from fedflat.records import keys
from fedflat.records.folder import read_lines
from fedflat.simulation import run as simulation
from fedflat.simulation.recomputed import Records, second_account

ROUNDS = 5
RECIPE = {
    "name": "secure", "rounds": ROUNDS, "data": {"dataset": "digits", "clients": 20, "max_examples": 200},
    "model": {"name": "linear"}, "algorithm": {"name": "dp-fedavg"}, "local": {"steps": 1, "batch_size": 4},
    "cohort": {"size": 10}, "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "secure_rng": True},
    "engine": {"backend": "sequential"},
}  # fmt: skip


def deadly(folder: Path, state: str, resume: bool, kill_at: int) -> None:
    os.environ["XDG_STATE_HOME"] = state
    save = train._save

    def kill(job, state, *rest):
        if state.round - 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(job, state, *rest)

    train._save = kill  # in a process of its own: nobody else's
    fedflat.run(RECIPE, out=folder, resume=resume)


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def start(folder: Path, kill_at: int = -1, resume: bool = False) -> int | None:
    """Run in a process of its own; ``kill_at``: kill -9 after that round was charged and before it is saved."""
    process = CONTEXT.Process(target=deadly, args=(folder, os.environ["XDG_STATE_HOME"], resume, kill_at))
    process.start()
    process.join(timeout=120)
    return process.exitcode


def released(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_lines(folder / "metrics.jsonl")]


def key_files(state: Path) -> list[Path]:
    return sorted((state / "fedflat" / "keys").glob("*"))


def mark_files(state: Path) -> list[Path]:
    return sorted(path for path in (state / "fedflat" / "marks").glob("*") if path.suffix != ".checkpoints")


@pytest.mark.long
def test_killed_and_resumed_with_the_key_ends_bit_for_bit(tmp_path, state_home):
    folder, twin = tmp_path / "run", tmp_path / "twin"
    assert start(folder, kill_at=2) == -signal.SIGKILL
    (key,) = key_files(state_home)
    assert key.stat().st_mode & 0o777 == 0o600 and key.parent.stat().st_mode & 0o077 == 0
    secret = key.read_bytes()
    assert len(secret) == 32
    # The run that was never killed: the same folder as it was started, the same key, and nothing it was used for.
    (twin / "private").mkdir(parents=True)
    for name in ("recipe.yaml", "private/run.json"):
        (twin / name).write_bytes((folder / name).read_bytes())
    (mark,) = mark_files(state_home)
    used = mark.read_bytes()
    mark.unlink()
    assert start(twin, resume=True) == 0
    assert not key_files(state_home), "the key is deleted at the end"
    key.write_bytes(secret)
    key.chmod(0o600)
    mark.write_bytes(used)
    assert start(folder, resume=True) == 0
    assert not key_files(state_home)
    assert released(folder) == released(twin) and len(released(folder)) == ROUNDS
    states = [sorted((f / "checkpoints").glob("*.safetensors"))[-1].read_bytes() for f in (folder, twin)]
    assert states[0] == states[1]
    assert [e["round"] for e in read(folder / "ledger.jsonl")] == list(range(ROUNDS))
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert secret not in content and secret.hex().encode() not in content, file


def charged_and_not_saved(recipe: dict, folder: Path) -> None:
    """Leave what a kill leaves after round 2 was charged and before it is saved."""
    seen: list[int] = []
    simulation.run(recipe, out=folder, on_round=lambda *_: seen.append(1), should_stop=lambda: len(seen) == 3)
    (folder / "checkpoints" / "round-000003.safetensors").unlink()


def test_resumed_without_the_key_the_open_round_is_charged_again(tmp_path, state_home):
    folder = tmp_path / "run"
    charged_and_not_saved(RECIPE, folder)
    first = released(folder)
    key_files(state_home)[0].unlink()
    result = simulation.run(Recipe.load(folder), out=folder, resume=True)
    entries = read(folder / "ledger.jsonl")
    assert [(e["round"], e.get("attempt", 1)) for e in entries] == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]
    assert len({e["key_id"] for e in entries}) == 2 and entries[2]["key_id"] != entries[3]["key_id"]
    assert released(folder)[:2] == first[:2]
    assert result.privacy["rounds_charged"] == ROUNDS + 1
    assert result.privacy["epsilon"] == pytest.approx(result.history[-1]["epsilon"])
    plain = simulation.run({**RECIPE, "rounds": ROUNDS + 1}).privacy["epsilon"]
    assert result.privacy["epsilon"] == pytest.approx(plain)
    assert second_account(Records(folder)).ok
    assert not key_files(state_home)


@pytest.mark.long
def test_killed_twice_the_second_resume_with_its_key_charges_no_more(tmp_path, state_home):
    folder = tmp_path / "run"
    assert start(folder, kill_at=1) == -signal.SIGKILL
    key_files(state_home)[0].unlink()
    assert start(folder, kill_at=1, resume=True) == -signal.SIGKILL
    assert start(folder, resume=True) == 0
    entries = read(folder / "ledger.jsonl")
    assert [(e["round"], e.get("attempt", 1)) for e in entries] == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1)]


def test_a_run_charged_twice_stops_within_its_budget(tmp_path, state_home):
    recipe = {**RECIPE, "privacy": {"clip": 0.5, "epsilon": 5.0, "secure_rng": True}}
    folder = tmp_path / "run"
    charged_and_not_saved(recipe, folder)
    assert len(key_files(state_home)) == 1, "an unfinished run keeps its key"
    key_files(state_home)[0].unlink()
    result = simulation.run(Recipe.load(folder), out=folder, resume=True)
    assert len(result.history) == ROUNDS - 1 and "exceed the budget" in result.stopped
    assert result.privacy["epsilon"] <= 5.0 and result.privacy["rounds_charged"] == ROUNDS
    assert not key_files(state_home)


def test_two_secure_runs_differ_and_say_where_their_noise_came_from(tmp_path):
    one, two = simulation.run(RECIPE), simulation.run(RECIPE)
    assert one.history[-1]["test_loss"] != two.history[-1]["test_loss"]
    assert "operating-system entropy" in one.privacy["noise_source"]
    assert "withstands" in one.privacy["floating_point"] and "rounded Gaussian" in one.privacy["mechanism"]
    asked = {"clip": 0.5, "noise_multiplier": 1.0, "randomness": "seeded"}
    seeded, again = (simulation.run({**RECIPE, "privacy": asked}) for _ in range(2))
    assert seeded.history[-1]["test_loss"] == again.history[-1]["test_loss"]
    assert seeded.privacy["noise_source"].startswith("simulation: noise reproducible from the seed")


def test_the_job_never_shows_its_key():
    job = prepare(Recipe.of(RECIPE))
    assert repr(job.key) not in repr(job) and "key=" not in repr(job)


def test_secure_without_noise_still_runs():
    result = simulation.run(
        {**RECIPE, "rounds": 1, "privacy": {"clip": 0.5, "noise_multiplier": 0, "secure_rng": True}}
    )
    assert result.privacy["epsilon"] is None


DDGAUSS = {"algorithm": {"name": "ddgauss"}}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"privacy": {"noise_multiplier": 1, "trust": "distributed", "secure_rng": True}}, "rounded Gaussian shares"),
        ({**DDGAUSS, "privacy": {"noise_multiplier": 1.0, "trust": "central"}}, "distributed for ddgauss"),
        ({**DDGAUSS, "privacy": {"noise_multiplier": 1.0, "noise_cohort": 50}}, "noise_cohort: found 50"),
        (
            {**DDGAUSS, "privacy": {"noise_multiplier": 1, "clip": {"kind": "adaptive", "initial": 1}}},
            "privacy.clip: found adaptive; allowed: one number",
        ),
        (
            {"algorithm": {"name": "ddgauss", "granularity": 1e-9}, "cohort": {"size": 18, "min": 2}},
            "algorithm.granularity: found 1e-09; allowed: none, or coarser: sums are modulo",
        ),
        (
            {"privacy": {"noise_multiplier": 2.0, "clip": {"kind": "adaptive", "initial": 1, "count_noise": 1.0}}},
            "privacy.clip.count_noise: found 1; allowed: more than noise_multiplier / 2 = 1",
        ),
    ],
)
def test_refusals_are_one_line(changes, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        simulation.run({**RECIPE, **changes})
    assert "\n" not in str(error.value)


def test_key_files(state_home, tmp_path, monkeypatch):
    key = keys.create("abc")
    assert keys.load("abc") == key and len(key) == 32
    with pytest.raises(RunError, match="cannot be written"):
        keys.create("abc")  # a key is never overwritten
    keys.path_of("abc").chmod(0o644)
    with pytest.raises(InputError, match="mode 0644; allowed: 0600"):
        keys.load("abc")
    keys.path_of("abc").chmod(0o600)
    keys.path_of("abc").write_bytes(b"torn")
    assert keys.load("abc") is None and keys.load("abc") is None
    with pytest.raises(InputError, match=r"versions\.run"):
        keys.path_of("../abc")
    (keys.folder() / "dir").mkdir(mode=0o700)
    with pytest.raises(InputError, match="cannot be read"):
        keys.load("dir")
    with pytest.raises(InputError, match="XDG_STATE_HOME"):
        keys.check_outside(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert keys.folder() == Path.home() / ".local" / "state" / "fedflat" / "keys"


def test_a_folder_that_lost_its_name_finds_its_key_all_the_same(tmp_path, state_home):
    folder = tmp_path / "run"
    simulation.run(RECIPE, out=folder, should_stop=lambda: True)
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text[: text.index("  run: ")])
    found = simulation.run(Recipe.load(folder), out=folder, resume=True)
    assert any("recipe.yaml is not as it was written" in note for note in found.notes)
    assert len(found.history) == ROUNDS and not key_files(state_home)
