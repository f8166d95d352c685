"""Experiments: which runs there are, where they go, and that what is done, killed or wrong is treated as it should."""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fork_server import CONTEXT, quick_processes

from fedflat.cli import main as cli
from fedflat.core.checks import InputError
from fedflat.report.metrics import read_run
from fedflat.report.progress import RunEvent
from fedflat.simulation import experiment
from fedflat.simulation.experiment import Comparison, compare
from fedflat.simulation.settings import axis, check_folders, claim, expand, split_top, tasks

TINY: dict[str, Any] = {
    "name": "tiny", "rounds": 3,
    "data": {"dataset": "digits", "clients": 20, "max_examples": 400, "partition": {"kind": "dirichlet", "alpha": 0.6}},
    "model": {"name": "mlp", "hidden": 8}, "algorithm": {"name": "dp-fedavg"}, "local": {"steps": 3, "batch_size": 16},
    "cohort": {"size": 8}, "privacy": {"noise_multiplier": 1.0, "accountant": "rdp", "randomness": "seeded"},
}  # fmt: skip
METHODS = ["algorithm.name=dp-fedavg,dp-fedsam"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("2", ["2"]),
        ("2,8", ["2", "8"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{kind: dirichlet, alpha: 1},iid", ["{kind: dirichlet, alpha: 1}", "iid"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b', c", ["'a,b'", "c"]),
        ("a,", ["a", ""]),
    ],
)
def test_values_are_cut_at_top_level_commas_only(text: str, parts: list[str]) -> None:
    assert split_top(text) == parts


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("privacy.epsilon=2,,8", "values between all commas"),
        ("privacy.epsilon=2,2", "each value once"),
        ("seed=1,2", "--seeds"),
    ],
)
def test_an_axis_that_makes_no_sense_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        axis(override)


def test_the_grid_is_recipes_times_values() -> None:
    found = expand([TINY, {**TINY, "name": "other"}], [*METHODS, "local.lr=0.1,0.2", "rounds=5"], 2)
    assert len(found) == 8 and len({setting.slug for setting in found}) == 8
    assert found[0].slug == "tiny_dp-fedavg_lr-0.1" and found[-1].slug == "other_dp-fedsam_lr-0.2"
    assert found[1].label == "dp-fedavg (lr=0.2), tiny" and found[5].label == "dp-fedavg (lr=0.2), other"
    assert {setting.recipe.rounds for setting in found} == {5}
    assert found[3].recipe.algorithm.name == "dp-fedsam" and found[3].recipe.local.lr == 0.2


def test_a_list_in_brackets_is_one_value() -> None:
    found = expand([TINY], ["privacy.clip={kind: per-tensor, values: [1, 2, 3, 4]}"], 1)
    assert len(found) == 1 and found[0].recipe.dump()["privacy"]["clip"]["values"] == [1, 2, 3, 4]


def test_a_settings_folder_does_not_depend_on_the_others() -> None:
    alone = expand([TINY], ["algorithm.name=dp-fedavg"], 1)[0]
    among = expand([{**TINY, "name": "x"}, TINY], ["algorithm.name=dp-fedsam,dp-fedavg"], 1)
    assert alone.slug in {setting.slug for setting in among}


def test_names_that_are_paths_stay_inside_the_folder() -> None:
    slug = expand([{**TINY, "name": "../../etc/ x"}], ["data.partition=iid,{kind: classes}"], 1)[1].slug
    assert "/" not in slug and not slug.startswith(".")


def test_the_same_setting_twice_is_refused() -> None:
    for other in (TINY, {**TINY, "rounds": 4}):
        with pytest.raises(InputError, match="two settings named"):
            expand([TINY, other], [], 1)


def test_a_typo_in_the_third_method_stops_before_anything(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dp-fedpng.*Did you mean dp-fedpgn"):
        compare([TINY], ["algorithm.name=dp-fedavg,dp-fedsam,dp-fedpng"], 1, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_seeds_count_up_from_the_recipes_and_share_what_they_load() -> None:
    found = tasks(Path("x"), expand([{**TINY, "seed": 5}], METHODS, 2))
    assert [task.recipe.seed for task in found] == [5, 5, 6, 6]
    assert found[0].folder == Path("x/tiny_dp-fedavg/seed-5") and found[0].name == "tiny_dp-fedavg/seed-5"


def test_a_folder_of_another_recipe_is_refused_with_the_key_that_differs(tmp_path: Path) -> None:
    claim(tmp_path, expand([TINY], METHODS, 2))
    check_folders(tmp_path, expand([TINY], METHODS, 4))  # more seeds, another machine: the same settings
    check_folders(tmp_path, expand([{**TINY, "engine": {"backend": "sequential"}, "seed": 9}], METHODS, 1))
    other = {**TINY, "local": {"steps": 4, "batch_size": 16}}
    with pytest.raises(InputError, match=r"local.steps = 3 where this one has 4; allowed: the same recipe") as caught:
        check_folders(tmp_path, expand([other], METHODS, 2))
    assert "\n" not in str(caught.value)
    nearly = {**TINY, "privacy": {**TINY["privacy"], "noise_multiplier": 1.0000001}}  # no rounding: this is asked anew
    with pytest.raises(InputError, match=r"privacy.noise_multiplier = 1.0 where this one has 1.0000001"):
        check_folders(tmp_path, expand([nearly], METHODS, 2))


def test_runs_of_something_else_are_never_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "tiny_dp-fedavg" / "seed-0"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("rounds: 1\n")
    with pytest.raises(InputError, match="runs of something else"):
        check_folders(tmp_path, expand([TINY], METHODS, 1))


def test_data_are_kept_for_the_next_run_of_the_same_seed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "_DATA", {})
    first, second = expand([TINY], METHODS, 1)
    kept = experiment.data_for(first.recipe)
    assert experiment.data_for(second.recipe) is kept
    other = experiment.data_for(first.recipe.model_copy(update={"seed": 1}))
    assert other is not kept and len(experiment._DATA) == 1
    assert other.fingerprint() != kept.fingerprint()


@pytest.fixture(scope="module", autouse=True)
def _quick_workers() -> Iterator[None]:
    """The experiment that the real command starts has a spawned one."""
    with quick_processes():
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[RunEvent]]:
    """Two methods, two seeds, run without interruption in one worker."""
    events: list[RunEvent] = []
    return compare([TINY], METHODS, 2, (tmp_path_factory.mktemp("experiment") / "done"), 1, events.append), events


def test_an_experiment_leaves_every_file(done: tuple[Comparison, list[RunEvent]]) -> None:
    found, events = done
    assert found.complete and found.total == 4 and found.notes == ()
    for name in ("tiny_dp-fedavg/seed-0", "tiny_dp-fedavg/seed-1", "tiny_dp-fedsam/seed-0", "tiny_dp-fedsam/seed-1"):
        run = found.folder / name
        records = ("recipe.yaml", "metrics.jsonl", "private/private.jsonl", "ledger.jsonl")
        for file in (*records, "privacy.json", "report.html"):
            assert (run / file).is_file()
        assert [e.state for e in events if e.run == name] == ["waiting", *["running"] * 4, "done"]
    for file in ("table.md", "table.json", "table.tex", "report.html"):
        assert (found.folder / file).stat().st_size > 100 < (found.folder / "private" / file).stat().st_size
    rows, hidden = (
        json.loads((found.folder / name).read_text())["rows"] for name in ("table.json", "private/table.json")
    )
    assert all(row["seconds"] is row["gap"] is None for row in rows)
    assert all(row["seconds"] and row["gap"] for row in hidden)
    assert (found.folder / "private").stat().st_mode & 0o077 == 0


def test_the_table_is_that_of_the_runs(done: tuple[Comparison, list[RunEvent]]) -> None:
    found, _ = done
    first, second = found.as_dict()["rows"]
    assert (first["method"], second["method"]) == ("dp-fedavg", "dp-fedsam")

    def final(method: str, seed: int) -> float:
        return float(read_run(found.folder / f"tiny_{method}" / f"seed-{seed}").metrics[-1]["test_accuracy"])

    finals = [final("dp-fedsam", seed) for seed in (0, 1)]
    assert second["seeds"] == 2 and second["final"]["mean"] == pytest.approx(sum(finals) / 2)
    gaps = [final("dp-fedsam", seed) - final("dp-fedavg", seed) for seed in (0, 1)]
    assert second["difference"]["mean"] == pytest.approx(sum(gaps) / 2) and second["difference"]["pairs"] == 2
    assert first["difference"] is None and first["personal"] is None
    assert first["proven_epsilon"] == second["proven_epsilon"] > 0 and first["delta"] == pytest.approx(0.1 / 20)
    assert first["seconds"]["mean"] > 0 and first["best"]["mean"] >= first["final"]["mean"]


def test_seeds_change_partition_weights_and_noise(done: tuple[Comparison, list[RunEvent]]) -> None:
    paths = [done[0].folder / "tiny_dp-fedavg" / f"seed-{seed}" / "private/private.jsonl" for seed in (0, 1)]
    lines = [json.loads(path.read_text().splitlines()[0]) for path in paths]
    for key in ("train_loss", "update_norm_mean", "noise_norm"):
        assert lines[0][key] != lines[1][key]


def test_done_runs_stay_and_a_broken_one_fails_alone(done: tuple[Comparison, list[RunEvent]], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(done[0].folder, folder)
    broken = folder / "tiny_dp-fedsam" / "seed-1"
    before = (folder / "tiny_dp-fedavg" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    (broken / "privacy.json").unlink()
    ledger = broken / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"round":0', '"round":7', 1))  # an edited ledger
    events: list[RunEvent] = []
    found = compare([TINY], METHODS, 2, folder, 1, events.append)
    assert list(found.failed) == ["tiny_dp-fedsam/seed-1"] and not found.complete
    assert "ledger.jsonl line 0" in found.failed["tiny_dp-fedsam/seed-1"]
    assert "\n" not in found.failed["tiny_dp-fedsam/seed-1"]
    assert found.notes == ("Missing runs: dp-fedsam (1 of 2).",)
    kept = "tiny_dp-fedavg/seed-0 tiny_dp-fedsam/seed-0 tiny_dp-fedavg/seed-1"
    assert [e.run for e in events if e.state == "skipped"] == kept.split()
    assert (folder / "tiny_dp-fedavg" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert found.as_dict()["rows"][1]["seeds"] == 1
    assert compare([TINY], METHODS, 1, folder, 1).notes == ()


def wait_for(what: Any, seconds: float = 300.0) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, "the experiment did not come that far"
        time.sleep(0.01)


def words_of(folder: Path, recipe: dict[str, Any]) -> list[str]:
    """The command that writes into ``folder``; the recipe's file lies beside it."""
    file = folder.with_name("tiny.yaml")
    file.write_text(yaml.safe_dump(recipe))
    words = ["fedflat", "compare", str(file), "--seeds", "2", "--processes", "1"]
    return [*words, "-o", METHODS[0], "--out", str(folder)]


def be_the_command(words: list[str], said: list[Path], surroundings: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(surroundings)
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    fork = multiprocessing.get_context("fork")
    experiment.multiprocessing = SimpleNamespace(get_context=lambda how: fork)  # type: ignore[attr-defined]
    cli.main()


def forked(folder: Path, recipe: dict[str, Any]) -> tuple[Any, list[Path]]:
    """The command from a server that has loaded it, its worker forked in turn, after a round; and what they say."""
    said = [folder.with_name(name) for name in ("out", "err")]
    process = CONTEXT.Process(target=be_the_command, args=(words_of(folder, recipe), said, dict(os.environ)))
    process.start()
    wait_for(lambda: any(folder.glob("*/seed-*/metrics.jsonl")) or not process.is_alive())
    return process, said


def let_go(lock: Path) -> bool:
    """Whether nobody writes the ledger."""
    with lock.open() as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.long
def test_a_killed_experiment_ends_with_the_table_of_one_that_was_not(
    done: tuple[Comparison, list[RunEvent]], tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    process, said = forked(folder, TINY)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, [path.read_text() for path in said]
    wait_for(lambda: all(map(let_go, folder.glob("*/seed-*/ledger.lock"))))  # a worker dies a moment after its parent
    assert len(list(folder.glob("*/seed-*/privacy.json"))) < 4
    assert compare([tmp_path / "tiny.yaml"], METHODS, 2, folder, 1).complete
    whole = done[0].folder
    rows, expected = (json.loads((place / "table.json").read_text())["rows"] for place in (folder, whole))
    assert rows == expected
    for name in ("tiny_dp-fedavg/seed-0", "tiny_dp-fedsam/seed-1"):
        assert (folder / name / "ledger.jsonl").read_bytes() == (whole / name / "ledger.jsonl").read_bytes()


def says_how_to_go_on(status: int | None, number: int, out: str, err: str, folder: Path) -> None:
    assert status == 128 + number, err
    assert "Traceback" not in out + err and "Stopping after the running rounds" in err
    assert "4 of 4 runs unfinished; the same command goes on" in out
    assert not list(folder.glob("table.*"))


ENDLESS = {**TINY, "rounds": 100_000, "privacy": {"noise_multiplier": 1e3}}


@pytest.mark.long
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", *words_of(folder, ENDLESS)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, start_new_session=True, stdout=pipe, stderr=pipe, text=True)
    wait_for(lambda: any(folder.glob("*/seed-*/metrics.jsonl")) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    says_how_to_go_on(process.returncode, signal.SIGINT, out, err, folder)


def test_so_does_an_order_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    process, said = forked(folder, ENDLESS)
    os.killpg(process.pid, signal.SIGTERM)
    process.join(60)
    out, err = (path.read_text() for path in said)
    says_how_to_go_on(process.exitcode, signal.SIGTERM, out, err, folder)
