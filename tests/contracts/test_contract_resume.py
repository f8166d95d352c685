"""Contract 6, second half: killed at any moment and resumed, a run ends bit for bit as the run never killed."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import after, weights

import fedflat
from fedflat.core import durable
from fedflat.engine import resume
from fedflat.privacy.ledger import Ledger
from fedflat.records import checkpoint, keys
from fedflat.records import folder as folder_module
from fedflat.records.folder import RunFolder, plain
from fedflat.records.opening import Opening

ROUNDS = 12
FORK = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on imports for every kill


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported() -> None:
    fedflat.run(recipe("dp-fedavg") | {"rounds": 1})


SERVER = {"dp-fedpgn-ls": {"optimizer": "adam", "lr": 0.02}}


def recipe(method: str) -> dict[str, Any]:
    personal = {"data": {"dataset": "digits", "clients": 10, "client_test_fraction": 0.2}}
    plain = {"data": {"dataset": "digits", "clients": 10}}
    return {
        "seed": 3, "rounds": ROUNDS, **(personal if method == "dp2-fedsam" else plain),
        "model": {"name": "mlp"}, "algorithm": {"name": method},
        "local": {"steps": 3, "batch_size": 10, "lr": 0.1, "lr_decay": 0.99},
        "cohort": {"size": 4},
        "privacy": {
            "clip": {"kind": "adaptive", "initial": 0.3, "count_noise": 2.0} if method == "dp-fedsam" else 0.3,
            "noise_multiplier": 1.0,
            "randomness": "seeded",
        },
        "server": SERVER.get(method, {"momentum": 0.5}), "engine": {"backend": "sequential"},
    }  # fmt: skip


def start(method: str, folder: Path, resume: bool) -> BaseProcess:
    process = FORK.Process(target=fedflat.run, args=(recipe(method),), kwargs={"out": folder, "resume": resume})
    process.start()
    return process


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a torn last one is not yet written."""
    return [json.loads(line) for line in (path.read_text() if path.exists() else "").split("\n")[:-1]]


def rounds_of(folder: Path) -> int:
    return len(lines(folder / "metrics.jsonl"))


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def nothing_unpaid(folder: Path) -> None:
    """Whatever a killed run left behind, every released round is in the ledger."""
    charged = {line["round"] for line in lines(folder / "ledger.jsonl") if "round" in line}
    released = {line["round"] for line in lines(folder / "metrics.jsonl")}
    saved = {int(path.stem.split("-")[1]) - 1 for path in (folder / "checkpoints").glob("round-*.safetensors")}
    assert released <= charged
    assert saved <= charged


def kill_after(method: str, folder: Path, resume: bool, rounds: int, wait: float) -> bool:
    """Start or resume, and SIGKILL a random moment after ``rounds`` rounds are done. Whether it was still running."""
    process = start(method, folder, resume)
    limit = time.monotonic() + 120
    while process.is_alive() and rounds_of(folder) < rounds:
        assert time.monotonic() < limit
        time.sleep(0.002)
    time.sleep(wait)
    running = process.is_alive()
    process.kill()
    process.join()
    nothing_unpaid(folder)
    return running


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-fedsam", "dp-fedpgn-ls", "dp2-fedsam", "fed-smp-topk"])
def test_kill_and_resume_is_bit_for_bit(method: str, tmp_path: Path) -> None:
    moments = random.Random(method)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = start(method, whole, False)
    kills = 0
    for attempt, rounds in enumerate((1, 4, 7)):
        kills += kill_after(method, killed, attempt > 0, rounds, moments.random() * 0.03)
    assert kills >= 2
    for process in (reference, start(method, killed, True)):
        process.join(timeout=200)
        assert process.exitcode == 0

    ends_alike(whole, killed, ROUNDS)
    assert [line["round"] for line in lines(killed / "ledger.jsonl") if "round" in line] == list(range(ROUNDS))
    assert (whole / "recipe.yaml").read_bytes() == (killed / "recipe.yaml").read_bytes()
    one, two = (json.loads((folder / "privacy.json").read_text()) for folder in (whole, killed))
    assert one["proven_epsilon"] == two["proven_epsilon"]


def ends_alike(whole: Path, killed: Path, rounds: int) -> None:
    """The last checkpoint, the ledger and, but for seconds, the records are the same bytes."""
    for name in (f"checkpoints/round-{rounds:06d}.safetensors", "ledger.jsonl"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    for name in ("metrics.jsonl", "private/private.jsonl"):
        assert without_seconds(lines(whole / name)) == without_seconds(lines(killed / name)), name


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    small = recipe("dp-fedavg") | {"rounds": 2}
    first = fedflat.run(small, out=tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "privacy.json"]
    before = {path: path.read_bytes() for path in files}
    again = fedflat.run(small, out=tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in files} == before
    assert without_seconds(again.history) == without_seconds(first.history)
    assert torch.equal(weights(first.model), weights(again.model))


def test_another_recipe_cannot_resume_a_run(tmp_path: Path) -> None:
    fedflat.run(recipe("dp-fedavg") | {"rounds": 1}, out=tmp_path / "run")
    other = recipe("dp-fedavg") | {"rounds": 1, "seed": 4}
    with pytest.raises(fedflat.InputError, match="--resume"):
        fedflat.run(other, out=tmp_path / "run", resume=True)
    with pytest.raises(fedflat.InputError, match="--out"):
        fedflat.run(recipe("dp-fedavg"), out=tmp_path / "run")


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """A torn file costs rounds, never the run: the checkpoint before it is used, and the end is the same."""
    small = recipe("dp-fedpgn-ls") | {"rounds": 4}
    whole = fedflat.run(small, out=tmp_path / "whole")
    fedflat.run(small, out=tmp_path / "torn", should_stop=after(3))
    newest = sorted((tmp_path / "torn" / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:200])
    newest.with_name("round-000004.safetensors.part").write_bytes(b"")  # half-written: it proves no release
    found = fedflat.run(small, out=tmp_path / "torn", resume=True)
    assert without_seconds(found.history) == without_seconds(whole.history)
    assert torch.equal(weights(whole.model), weights(found.model))
    charged = [line["round"] for line in lines(tmp_path / "torn" / "ledger.jsonl") if "round" in line]
    assert set(charged) == set(range(4))


def forge(path: Path) -> None:
    """Other weights with a checksum that fits, as whoever may write to the folder would make them."""
    tensors, facts = checkpoint._read(path)
    tensors["shared"], facts = tensors["shared"] + 1, {k: v for k, v in facts.items() if k != "sha256"}
    checkpoint._write(path, tensors, {**facts, "sha256": checkpoint._seal(tensors, facts)})


def test_a_newest_checkpoint_that_the_run_did_not_write_is_refused(tmp_path: Path) -> None:
    """As verify does: its checksum must be that in tips.jsonl, and its round that of its name."""
    small = recipe("dp-fedavg") | {"rounds": 4}
    fedflat.run(small, out=tmp_path / "run", should_stop=after(3))
    for name in ("forged", "renamed", "unnamed", "twin"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    newest = "checkpoints/round-000003.safetensors"
    forge(tmp_path / "forged" / newest)
    (tmp_path / "unnamed" / "tips.jsonl").unlink()
    for name in ("forged", "unnamed"):
        with pytest.raises(fedflat.InputError, match=r"round-000003.*that tips\.jsonl does not name"):
            fedflat.run(small, out=tmp_path / name, resume=True)
    shutil.copyfile(tmp_path / "run/checkpoints/round-000002.safetensors", tmp_path / "renamed" / newest)
    found = fedflat.run(small, out=tmp_path / "renamed", resume=True)  # set aside, and gone on from the one before
    assert any("found the one of round 2" in note for note in found.notes)
    forge(tmp_path / "twin" / newest)
    with pytest.MonkeyPatch.context() as patch:  # broken twin: nothing compares
        patch.setattr(resume, "_check_noted", lambda *_: None)
        fedflat.run(small, out=tmp_path / "twin", resume=True)


def _renamed_in_tips(folder: Path, round: int) -> None:
    seal = checkpoint.facts_of(folder / f"checkpoints/round-{round:06d}.safetensors")["sha256"]
    new = [line | {"checkpoint": seal} if line["round"] == round else line for line in lines(folder / "tips.jsonl")]
    (folder / "tips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in new))


def test_a_round_is_drawn_again_from_the_checkpoint_that_it_was_drawn_from(tmp_path: Path) -> None:
    """The mark beside a secret key names it: whoever may write to the folder alone cannot have noise used twice."""
    small = recipe("dp-fedavg") | {"rounds": 4, "privacy": SECRET}
    fedflat.run(small, out=tmp_path / "run", should_stop=after(3))
    (tmp_path / "run/checkpoints/round-000003.safetensors").unlink()
    forge(tmp_path / "run/checkpoints/round-000002.safetensors")
    _renamed_in_tips(tmp_path / "run", 2)
    with pytest.raises(fedflat.InputError, match=r"round-000002.*that the run's mark does not name"):
        fedflat.run(small, out=tmp_path / "run", resume=True)
    with pytest.MonkeyPatch.context() as patch:  # broken twin: the mark is not asked
        patch.setattr(keys.Mark, "checkpoints", lambda self, round: [])
        fedflat.run(small, out=tmp_path / "run", resume=True)
        assert len({line["key_id"] for line in lines(tmp_path / "run" / "ledger.jsonl") if "key_id" in line}) == 1


def test_a_checkpoint_that_was_written_anew_since_gets_a_fresh_key(tmp_path: Path) -> None:
    small = recipe("dp-fedavg") | {"rounds": 4, "privacy": SECRET}
    fedflat.run(small, out=tmp_path / "run", should_stop=after(3))
    (tmp_path / "run/checkpoints/round-000003.safetensors").unlink()
    keys.Mark(Opening.read(tmp_path / "run").run).note_checkpoint(2, "0" * 64)
    found = fedflat.run(small, out=tmp_path / "run", resume=True)
    assert any("does not say that these rounds were drawn from this checkpoint" in note for note in found.notes)
    assert [line.get("round") for line in lines(tmp_path / "run" / "ledger.jsonl")].count(2) == 2


def test_a_run_of_0_2_says_which_version_resumes_it(tmp_path: Path) -> None:
    small = recipe("dp-fedavg") | {"rounds": 2}
    fedflat.run(small, out=tmp_path / "run", should_stop=after(1))
    replace(Opening.read(tmp_path / "run"), terms={}).write(tmp_path / "run")
    with pytest.raises(fedflat.InputError, match=r"have no terms: of fedflat 0\.1 or 0\.2"):
        fedflat.run(small, out=tmp_path / "run", resume=True)


SHORT = 5
SECRET = {"clip": 0.3, "noise_multiplier": 1.0}


def _killing(call: Any, after: bool, count: int) -> Any:
    """``call``, with a SIGKILL just before or after its ``count``-th use."""
    used = 0

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal used
        used += 1
        if used == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*args, **kwargs)
        if used == count and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return killed


WRITE_LINE, WHOLE = RunFolder._line, iter(range(9))


def _torn_line(folder: RunFolder, name: str, record: Any) -> None:
    if next(WHOLE) < 4:
        WRITE_LINE(folder, name, record)
        return
    with (folder.path / name).open("a") as file:
        file.write(json.dumps(plain(record))[:-4])
    os.kill(os.getpid(), signal.SIGKILL)


POINTS: dict[str, Any] = {
    "before the ledger line": (Ledger, "append", _killing(Ledger.append, False, 3)),
    "after the ledger line": (Ledger, "append", _killing(Ledger.append, True, 3)),
    "between the metric files": (RunFolder, "_line", _killing(RunFolder._line, True, 5)),
    "inside a metric line": (RunFolder, "_line", _torn_line),
    "before the checkpoint": (checkpoint, "save", _killing(checkpoint.save, False, 3)),
    "before the checkpoint has its name": (os, "replace", _killing(os.replace, False, 5)),
    "after the checkpoint": (checkpoint, "save", _killing(checkpoint.save, True, 3)),
}


def _in_the_child(point: str, folder: Path) -> None:
    setattr(*POINTS[point])
    fedflat.run(recipe("dp-fedpgn-ls") | {"rounds": SHORT}, out=folder)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    fedflat.run(recipe("dp-fedpgn-ls") | {"rounds": SHORT}, out=folder)
    return folder


@pytest.mark.parametrize("point", POINTS)
def test_killed_between_any_two_writes(point: str, tmp_path: Path, whole_run: Path) -> None:
    folder = tmp_path / "run"
    process = FORK.Process(target=_in_the_child, args=(point, folder))
    process.start()
    process.join(timeout=100)
    assert process.exitcode == -signal.SIGKILL
    nothing_unpaid(folder)
    fedflat.run(recipe("dp-fedpgn-ls") | {"rounds": SHORT}, out=folder, resume=True)
    ends_alike(whole_run, folder, SHORT)


def test_a_record_s_name_is_on_disk_with_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may take a new file's name away as long as its folder was not flushed after it was made."""
    order: list[str] = []
    for module in (folder_module, durable, checkpoint):
        monkeypatch.setattr(module, "flush", lambda path: order.append(str(path.relative_to(tmp_path))))
    fedflat.run(recipe("dp2-fedsam") | {"rounds": 1}, out=tmp_path / "run")
    for name in ("metrics.jsonl", "private/private.jsonl", "private/private.seals", "checkpoints", "private/heads"):
        assert str(Path("run", name).parent) in order[order.index(f"run/{name}") :], name
