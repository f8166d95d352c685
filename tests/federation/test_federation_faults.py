"""Servers killed at every stage of a round, full disks, two servers, slow clients: with real processes (forked).

What left a server is written down by the grid, outside the run's folder: a hash of every model that was broadcast, with
the ledger's lines at that moment.
"""

import hashlib
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message
from safetensors.torch import load_file
from stand_in import client_at, deployed, final_shared, grid_of, honest, put_back, rows, settings, small

from fedflat.core.checks import InputError, RunError
from fedflat.core.types import Broadcast
from fedflat.engine import resume
from fedflat.federation import close
from fedflat.federation.client import Client
from fedflat.federation.project import PACKAGE
from fedflat.federation.secagg.rounds import SecureFlower
from fedflat.federation.server import run_id, serve
from fedflat.federation.store import Store
from fedflat.federation.task import Task
from fedflat.federation.transport import Flower, ReplyTracker
from fedflat.privacy import ledger as ledger_module
from fedflat.privacy.ledger import Ledger
from fedflat.privacy.ledger import read as read_ledger
from fedflat.records import checkpoint, keys
from fedflat.records.folder import RunFolder

FORK = multiprocessing.get_context("fork")
ROUNDS = 3


@pytest.fixture
def federation(tmp_path: Path) -> tuple[Path, Task]:
    task, _ = deployed(tmp_path / "fed", small(rounds=ROUNDS, privacy={"noise_multiplier": 1.0}))
    return tmp_path / "fed", task


def watching(folder: Path, task: Task) -> Any:
    """A grid that notes what leaves the server: round, hash of w, and the rounds that the ledger holds by then."""
    grid = grid_of(task, [client_at(folder, task, number) for number in range(4)])
    push = grid.push_messages

    def noted(messages: Any) -> Any:
        for message in messages[:1]:
            if "shared" not in message.content["arrays"]:
                continue  # a step of secure aggregation that carries no model
            held = hashlib.sha256(message.content["arrays"]["shared"].data).hexdigest()
            path = folder / "run" / "ledger.jsonl"
            lines = [entry["round"] for entry in read_ledger(path)] if path.exists() else []
            with (folder / "left.jsonl").open("a") as file:
                file.write(json.dumps({"round": message.content["facts"]["round"], "w": held, "ledger": lines}) + "\n")
        return push(messages)

    grid.push_messages = noted
    return grid


def serve_in_a_process(
    folder: Path, task: Task, spoil: Callable[[], None] = lambda: None, away: int | None = None
) -> int | None:
    """Serve in a forked process; its exit status (−9: it killed itself). away: a client that answers with an error."""
    grid = watching(folder, task)
    if away is not None:
        grid.handlers[away] = lambda message: Message(Error(code=0, reason="away"), reply_to=message)

    def work() -> None:
        spoil()
        try:
            serve(grid, task, settings(folder))
        except (RunError, OSError):
            os._exit(3)
        os._exit(0)

    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert not process.is_alive()
    return process.exitcode


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, *, before: bool = False, after: bool = False, when: int = 1) -> None:
    """Die before or after the ``when``-th call (from 0) of a function."""
    original, calls = getattr(owner, name), Counter[str]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if before and calls[name] == when + 1:
            die()
        found = original(*args, **kwargs)
        if after and calls[name] == when + 1:
            die()
        return found

    setattr(owner, name, wrapped)


def torn_line() -> None:
    """Die with half of the second ledger line on disk."""
    original, calls = ledger_module._write_all, Counter[str]()

    def half(descriptor: int, data: bytes) -> None:
        calls["lines"] += data.startswith(b'{"line"')
        if calls["lines"] == 2:
            os.write(descriptor, data[: len(data) // 2])
            os.fsync(descriptor)
            die()
        original(descriptor, data)

    ledger_module._write_all = half


def unnamed_checkpoint() -> None:
    """Die with all of the second checkpoint on disk, but not under its name."""
    original = os.replace
    os.replace = lambda part, path: die() if "round-000002" in str(path) else original(part, path)


STAGES: dict[str, Callable[[], None]] = {
    "before the broadcast": lambda: around(Flower, "_ask", before=True),
    "after the broadcast": lambda: around(Flower, "_ask", after=True),
    "while answers come": lambda: around(ReplyTracker, "take", after=True, when=5),
    "before the ledger line": lambda: around(Ledger, "append", before=True),
    "in the ledger line": torn_line,
    "after the ledger line": lambda: around(Ledger, "append", after=True),
    "before the metrics": lambda: around(RunFolder, "append", before=True),
    "before the checkpoint": lambda: around(checkpoint, "save", before=True),
    "in the checkpoint": unnamed_checkpoint,
    "after the checkpoint": lambda: around(checkpoint, "save", after=True),
}  # fmt: skip


def check_books(folder: Path, charged_again: int) -> None:
    """Every model that left was in the ledger before, and each different one of a round was charged on its own."""
    left = rows(folder / "left.jsonl")
    releases: dict[int, set[str]] = defaultdict(set)
    for row in left:
        if row["round"]:
            assert row["round"] - 1 in row["ledger"]
            releases[row["round"] - 1].add(row["w"])
            assert Counter(row["ledger"])[row["round"] - 1] >= len(releases[row["round"] - 1])
    charged = Counter(entry["round"] for entry in read_ledger(folder / "run" / "ledger.jsonl"))
    assert set(charged) == set(range(ROUNDS)) and sum(charged.values()) == ROUNDS + charged_again
    facts = json.loads((folder / "run" / "privacy.json").read_text())
    assert facts["rounds"] == ROUNDS and facts["rounds_charged"] == ROUNDS + charged_again
    shown = rows(folder / "run" / "metrics.jsonl")
    assert [row["round"] for row in shown] == list(range(ROUNDS))
    assert shown[-1]["epsilon"] == pytest.approx(facts["epsilon"])
    assert list(keys.folder().iterdir()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_server_killed_at_any_stage_goes_on(stage: str, federation: tuple[Path, Task]) -> None:
    folder, task = federation
    assert serve_in_a_process(folder, task, STAGES[stage]) == -signal.SIGKILL
    before = [entry["round"] for entry in read_ledger(folder / "run" / "ledger.jsonl")]
    finished = checkpoint.newest(folder / "run" / "checkpoints")
    assert finished is not None
    open_rounds = [round for round in before if round >= finished[0].round]
    held = {path.name: path.read_bytes() for path in keys.folder().iterdir()}
    assert serve_in_a_process(folder, task) == 0
    check_books(folder, len(open_rounds))
    assert len(open_rounds) == (stage not in _NOTHING_OPEN)
    assert len(held) == 1
    used = {entry["key_id"] for entry in read_ledger(folder / "run" / "ledger.jsonl")}
    assert len(open_rounds) < len(used) <= 2  # a key for each start: the same noise never goes on two sums


_NOTHING_OPEN = (
    "before the broadcast", "after the broadcast", "while answers come", "before the ledger line", "in the ledger line",
    "after the checkpoint",
)  # fmt: skip


@pytest.mark.parametrize("stage", ["before the ledger line", "before the checkpoint", "after the checkpoint"])
def test_a_run_ended_for_good_states_what_its_ledger_says(
    stage: str, federation: tuple[Path, Task], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server killed in its second round and never started again: an uncertain release counts in the statement."""
    folder, task = federation
    words = [str(folder / "app" / PACKAGE), str(folder / "run")]
    assert close.main(words) == 2 and "a run of this app" in capsys.readouterr().err
    assert serve_in_a_process(folder, task, STAGES[stage]) == -signal.SIGKILL
    assert len(list(keys.folder().iterdir())) == 1
    assert close.main(words) == 0 and "; key deleted\n" in capsys.readouterr().out
    facts = json.loads((folder / "run" / "privacy.json").read_text())
    lines = read_ledger(folder / "run" / "ledger.jsonl")
    assert (facts["rounds"], facts["rounds_charged"]) == ((2 if stage == "after the checkpoint" else 1), len(lines))
    assert len(lines) == 1 + (stage != "before the ledger line")
    assert facts["epsilon"] == pytest.approx(lines[-1]["epsilon"]) and not list(keys.folder().iterdir())
    assert close.main(words) == 0 and "; key deleted before\n" in capsys.readouterr().out
    assert read_ledger(folder / "run" / "ledger.jsonl") == lines
    with pytest.raises(InputError, match="ended for good"):  # no server goes on, and none makes a key for it
        serve(grid_of(task, []), task, settings(folder))
    assert not list(keys.folder().iterdir())


def test_a_key_in_another_account_is_not_called_deleted(
    federation: tuple[Path, Task], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, task = federation
    words = [str(folder / "app" / PACKAGE), str(folder / "run")]
    assert serve_in_a_process(folder, task, STAGES["before the ledger line"]) == -signal.SIGKILL
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        for _ in range(2):
            assert close.main(words) == 1
            shown = capsys.readouterr()
            assert "KEY NOT DELETED" in shown.out and str(tmp_path / "another") in shown.err
    assert len(list(keys.folder().iterdir())) == 1
    assert close.main(words) == 0 and "; key deleted\n" in capsys.readouterr().out


DISTRUSTED: dict[str, dict[str, Any]] = {
    "local": {"privacy": {"trust": "local", "noise_multiplier": 1.0}},
    "distributed": {"algorithm": "ddgauss", "cohort": {"min": 2}, "privacy": {"noise_multiplier": 1.0}},
}


@pytest.mark.parametrize("trust", DISTRUSTED)
def test_a_run_ended_under_a_distrusted_server_is_charged_a_round_that_may_be_open(trust: str, tmp_path: Path) -> None:
    """Killed with the round's updates (or their sum) in its memory and no line for them: the close writes it, once."""
    folder = tmp_path / "fed"
    task, clients = deployed(folder, small(rounds=3, **DISTRUSTED[trust]))
    assert serve_in_a_process(folder, task, STAGES["before the ledger line"]) == -signal.SIGKILL
    assert [entry["round"] for entry in read_ledger(folder / "run" / "ledger.jsonl")] == [0]
    for key in ("deleted", "gone"):
        facts, found = close.close(task, folder / "run")
        lines = read_ledger(folder / "run" / "ledger.jsonl")
        assert [entry["round"] for entry in lines] == [0, 1] and "may have reached" in lines[1]["reason"]
        assert (facts["rounds"], facts["rounds_charged"], found) == (1, 2, key)
    plan = clients[0].job.parts.plan
    wanted = (
        plan.epsilon(3) if trust == "local" else plan.mechanism.account(plan).epsilon(3, "server", amplification=False)
    )
    found = facts["facts"]["epsilon_cohort_chosen"]  # a client answers T times, whatever the server writes down
    assert found == (wanted if math.isfinite(wanted) else None)
    if math.isfinite(wanted):
        assert f"ε = {wanted:.4g}" in " ".join(facts["warnings"])


def test_a_complete_run_needs_no_key_and_no_clients(federation: tuple[Path, Task]) -> None:
    """Started once more: its statement again, no wait and no fresh key; ended: nothing is charged."""
    folder, task = federation
    assert serve_in_a_process(folder, task) == 0
    statement = (folder / "run" / "privacy.json").read_bytes()
    facts = serve(grid_of(task, []), task, settings(folder, wait_for_nodes=4))  # would wait for four clients, and fail
    assert (folder / "run" / "privacy.json").read_bytes() == statement and not list(keys.folder().iterdir())
    assert close.close(task, folder / "run") == (facts, "gone")
    recipe, opening = folder / "run" / "recipe.yaml", (folder / "run" / "private" / "run.json").read_bytes()
    recipe.write_bytes(recipe.read_bytes().replace(run_id(folder / "run").encode(), b"b" * 32))
    with pytest.raises(InputError, match=f"ledger.jsonl: found the ledger of run .*; allowed: that of run {'b' * 32}"):
        close.close(task, folder / "run")
    for text, said in {b"\xff": "cannot be read", b"a: [": "recipe.yaml line 1", b"": "an empty file"}.items():
        recipe.write_bytes(text)
        for work in (lambda: close.close(task, folder / "run"), lambda: serve(None, task, settings(folder))):
            with pytest.raises(InputError, match=said):
                work()
    recipe.unlink()
    with pytest.raises(InputError, match=r"without its recipe\.yaml"):  # it is no new run's folder
        serve(None, task, settings(folder))
    assert (folder / "run" / "private" / "run.json").read_bytes() == opening


def test_broken_twin_that_keeps_the_key_of_an_open_round_is_found(
    federation: tuple[Path, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the old key, an open round that other clients answer is a second release under the same noise, uncharged."""
    folder, task = federation
    monkeypatch.setattr(resume, "fresh_key", lambda: bytes(32))
    assert serve_in_a_process(folder, task, STAGES["before the checkpoint"]) == -signal.SIGKILL
    monkeypatch.setattr(resume, "reasons", lambda *where: ([], []))
    assert serve_in_a_process(folder, task) == 0
    with pytest.raises(AssertionError):
        check_books(folder, 1)


def full_disk(owner: Any, name: str, room: Callable[[], int]) -> Callable[[], None]:
    """From the second call of a function on, the kernel lets no file grow beyond ``room`` bytes."""

    def spoil() -> None:
        original, calls = getattr(owner, name), Counter[str]()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # here: what saves may be a thread, which sets no signals

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if calls[name] == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room(), resource.RLIM_INFINITY))
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    return spoil


@pytest.mark.parametrize("place", ["ledger", "checkpoint", "metrics"])
def test_a_full_disk_releases_nothing_more(place: str, federation: tuple[Path, Task]) -> None:
    folder, task = federation
    ledger = folder / "run" / "ledger.jsonl"
    spoil = {
        "ledger": full_disk(Ledger, "append", lambda: ledger.stat().st_size + 100),
        "checkpoint": full_disk(checkpoint, "save", lambda: 100),
        "metrics": full_disk(RunFolder, "append", lambda: (folder / "run" / "metrics.jsonl").stat().st_size + 10),
    }[place]
    assert serve_in_a_process(folder, task, spoil) == 3
    asked = [row["round"] for row in rows(folder / "left.jsonl")]
    assert asked == [0, 1]  # w² never left
    assert serve_in_a_process(folder, task) == 0
    check_books(folder, int(place != "ledger"))


def test_two_servers_on_one_run(federation: tuple[Path, Task]) -> None:
    """The second is refused before it touches key, ledger or clients; the first is not disturbed."""
    folder, task = federation
    refused, take = FORK.Event(), ReplyTracker.take

    def waiting() -> None:
        ReplyTracker.take = lambda self, reply: (refused.wait(60), take(self, reply))[1]  # type: ignore[method-assign]

    first = FORK.Process(
        target=lambda: (waiting(), serve(watching(folder, task), task, settings(folder, answer_seconds=60)))
    )
    first.start()
    until = time.monotonic() + 30
    while not (folder / "left.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.02)
    held = {path.name: path.read_bytes() for path in keys.folder().iterdir()}
    with pytest.raises(RunError, match="another process"):
        serve(grid_of(task, []), task, settings(folder))
    assert {path.name: path.read_bytes() for path in keys.folder().iterdir()} == held
    refused.set()
    first.join(60)
    assert first.exitcode == 0
    check_books(folder, 0)


def test_slow_clients_are_zero_in_their_round_and_late_in_the_next(federation: tuple[Path, Task]) -> None:
    folder, task = federation
    clients = [client_at(folder, task, number) for number in range(4)]
    grid = grid_of(task, clients)
    kept: list[Any] = []

    def slow(client: Client) -> Callable[[Any], Any]:
        def handle(message: Any) -> Any:
            ready, kept[:] = list(kept), [honest(client)(message)]
            return ready  # the answer to the round before

        return handle

    grid.handlers[0] = slow(clients[0])
    serve(grid, task, settings(folder, answer_seconds=0.3))
    operator = next((keys.folder().parent / "operator").glob("*.jsonl"))
    assert rows(operator) == [
        {"round": 0, "missing": 1},
        {"round": 1, "missing": 1, "too late": 1},
        {"round": 2, "missing": 1, "too late": 1},
    ]


def test_a_client_killed_after_training_starts_again_from_the_same_head(tmp_path: Path) -> None:
    """Killed between keeping its head and answering: asked again, it gives the same answer."""
    task, clients = deployed(tmp_path / "fed", small(algorithm="dp2-fedsam"))
    job = clients[0].job
    ask = Broadcast(0, job.initial_weights[: job.parts.layout.dimension], job.threshold, 1.0)

    def work() -> None:
        around(Store, "keep_personal", after=True, when=0)
        clients[0].update(ask)

    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and (clients[0].store.folder / "head.safetensors").exists()
    again = client_at(tmp_path / "fed", task, 0).update(ask)[0]
    assert (again == Client(task, 0, clients[0].data, Store(tmp_path / "fresh"), task.pin).update(ask)[0]).all()


@pytest.mark.parametrize("step", ["_keys", "_shares", "_vectors", "_consents", "_reveals"])
def test_a_server_killed_in_secure_aggregation_learns_no_second_sum(step: str, tmp_path: Path) -> None:
    """Once a masked vector has left, clients refuse the round: it is aborted and charged. Before, it is done again."""
    task, _ = deployed(tmp_path / "fed", small(rounds=2, **DISTRUSTED["distributed"]))
    killed = serve_in_a_process(tmp_path / "fed", task, lambda: around(SecureFlower, step, before=True, when=0))
    assert killed == -signal.SIGKILL and not (tmp_path / "fed" / "run" / "ledger.jsonl").read_text()
    assert serve_in_a_process(tmp_path / "fed", task) == 0
    shown = rows(tmp_path / "fed" / "run" / "metrics.jsonl")
    assert [row["aborted"] for row in shown] == [step in ("_consents", "_reveals"), False]
    assert [entry["round"] for entry in read_ledger(tmp_path / "fed" / "run" / "ledger.jsonl")] == [0, 1]


@pytest.mark.parametrize("trust", DISTRUSTED)
def test_a_client_whose_disk_is_full_sends_nothing(trust: str, tmp_path: Path) -> None:
    """What it must remember it cannot: so no noised update and no masked vector leaves; the round goes on without."""
    task, clients = deployed(tmp_path / "fed", small(rounds=1, **DISTRUSTED[trust]))
    grid = grid_of(task, clients)

    def full(message: Any) -> Any:
        """The client in a process of its own that may write no file."""
        if message.content["facts"].get("stage") == "end":
            return None  # nothing is asked with it
        ours, theirs = FORK.Pipe()

        def work() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            try:
                clients[0].answer(message.content)
                theirs.send("answered")
            except (RunError, OSError) as error:
                theirs.send(str(error))
            os._exit(0)

        process = FORK.Process(target=work)
        process.start()
        said.append(ours.recv())
        process.join(60)
        return Message(Error(code=0, reason="no answer"), reply_to=message)

    said: list[str] = []
    grid.handlers[0] = full
    serve(grid, task, settings(tmp_path / "fed"))
    assert said and "answered" not in said and ("nothing is sent" in said[0] or ".part" in said[0])
    operator = next((keys.folder().parent / "operator").glob("*.jsonl"))
    assert json.loads(operator.read_text()) == {"round": 0, "failed": 1}
    assert len(read_ledger(tmp_path / "fed" / "run" / "ledger.jsonl")) == 1


def _restored(folder: Path, task: Task, *others: Path) -> float:
    """Round 1 is released; run/ is restored from a backup of before; the round is released again without one client.

    others: folders that are restored with it.

    Returns the norm of the difference of the two models, in units of the clip over m.
    """

    def after_one() -> None:
        around(checkpoint, "save", after=True, when=0)

    assert serve_in_a_process(folder, task, after_one) == -signal.SIGKILL
    places = (folder / "run", *others)
    for number, place in enumerate(places):
        shutil.copytree(place, folder / f"backup-{number}")
    assert serve_in_a_process(folder, task, after_one) == -signal.SIGKILL
    first = final_shared(folder / "run")
    for number, place in enumerate(places):
        put_back(folder / f"backup-{number}", place)
    assert serve_in_a_process(folder, task, away=2) == 0
    second = load_file(folder / "run" / "checkpoints" / "round-000002.safetensors")["shared"]
    return float((second - first).norm()) / (0.1 / 4)


def test_a_restored_backup_meets_fresh_noise_and_is_charged(federation: tuple[Path, Task]) -> None:
    """The key remembers how far it was used, whatever happens to the run's folder."""
    folder, task = federation
    assert _restored(folder, task) > 5
    check_books(folder, 1)
    lines = read_ledger(folder / "run" / "ledger.jsonl")
    assert [(line["round"], line.get("attempt", 1)) for line in lines] == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert "other clients may answer" in lines[2]["reason"]  # the line that clients were shown stays, from the mark
    assert "other clients may answer" in " ".join(json.loads((folder / "run" / "privacy.json").read_text())["reasons"])


@pytest.mark.parametrize("kept", [False, True])
def test_a_machine_put_back_with_its_keys_and_marks_meets_fresh_noise(
    federation: tuple[Path, Task], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Nothing on disk tells; half of a server's key was never there. The twin keeps all of it on disk."""
    folder, task = federation
    if kept:
        monkeypatch.setattr(resume, "fresh_key", lambda: bytes(32))
    moved = _restored(folder, task, keys.folder().parent)
    assert moved <= 1.001 if kept else moved > 5


def test_broken_twin_that_forgets_how_far_the_key_was_used(
    federation: tuple[Path, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two releases of one round under one noise: their difference is one client's clipped update, and no more."""
    folder, task = federation
    monkeypatch.setattr(resume, "reasons", lambda *where: ([], []))
    monkeypatch.setattr(resume, "fresh_key", lambda: bytes(32))
    assert _restored(folder, task) <= 1.001
    with pytest.raises(AssertionError):
        check_books(folder, 1)
