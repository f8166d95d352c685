"""No damage to a run's files goes unseen: a resume refuses it in one line, says it, or ends bit for bit the same."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fedflat
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError, RunError
from fedflat.engine import resume
from fedflat.records import checkpoint
from fedflat.records.folder import RunFolder
from fedflat.records.opening import Opening
from fedflat.simulation.run import run

ROUNDS = 4


def recipe(secure: bool) -> dict[str, Any]:
    return {
        "rounds": ROUNDS,
        "data": {"classes": 3},
        "model": {"name": "mlp", "hidden": 4},
        "algorithm": {"name": "dp-fedavg" if secure else "dp2-fedsam"},
        "local": {"steps": 1, "batch_size": 4, "momentum": 0.0},
        "cohort": {"size": 2},
        "privacy": {"clip": 0.5, "noise_multiplier": 1.0, "secure_rng": secure}
        | ({} if secure else {"randomness": "seeded", "benchmark": True}),
        "engine": {"backend": "sequential"},
    }


def clients(shift: float = 0.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 5, generator=made) + shift, torch.arange(6) % 3) for _ in range(3)]


class World:
    """A run stopped before its last round, in a folder, with the state home that its key lies in."""

    def __init__(self, place: Path, secure: bool) -> None:
        self.place, self.folder, self.home = place, place / "run", place / "home"
        self.secure = secure

    def start(self) -> "World":
        done: list[int] = []
        with self.at_home():
            run(recipe(self.secure), clients=clients(), out=self.folder, on_round=lambda *_: done.append(1),
                should_stop=lambda: len(done) == ROUNDS - 1)  # fmt: skip
        return self

    @contextmanager
    def at_home(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(self.home))
            yield

    def resume(self, data: Any = None, own: bool = False, **changes: Any) -> Any:
        with self.at_home():
            given = Recipe.load(self.folder).dump() if own else recipe(self.secure)
            return run({**given, **changes}, clients=clients() if data is None else data, out=self.folder, resume=True)

    def copy(self, place: Path) -> "World":
        shutil.copytree(self.place, place)
        return World(place, self.secure)

    def file(self, name: str) -> Path:
        found = sorted(self.place.glob(name))
        assert found, name
        return found[-1]

    def end(self) -> tuple[Any, ...]:
        """What must be bit for bit the same: weights, heads, released records, ledger, statement."""
        newest = self.folder / "checkpoints" / f"round-{ROUNDS:06d}.safetensors"
        heads = checkpoint.private_half(newest)
        records = [
            [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]
            for path in (self.folder / "metrics.jsonl", self.folder / "private" / "private.jsonl")
        ]
        files = [newest, heads, self.folder / "ledger.jsonl", self.folder / "privacy.json"]
        return (*(path.read_bytes() for path in files if path.exists()), records)


@pytest.fixture(scope="module", params=[False, True], ids=["seeded", "secure"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, tuple[Any, ...]]:
    return stopped_and_ended(tmp_path_factory.mktemp("world"), request.param)


def stopped_and_ended(place: Path, secure: bool) -> tuple[World, tuple[Any, ...]]:
    """A stopped run, and how it ends if it is resumed untouched."""
    stopped = World(place / "stopped", secure).start()
    whole = stopped.copy(place / "whole")
    whole.resume()
    return stopped, whole.end()


def flip(share: float) -> Callable[[Path], None]:
    """One bit of the byte at this share of the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1
        path.write_bytes(bytes(content))

    return damage


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)]) and None


def cut_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def double_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1]]))


def swap_lines(path: Path) -> None:
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([second, first, *rest]))


def garbage(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\x00\xffgarbage\n")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_middle(path: Path) -> None:
    content = path.read_bytes()
    third = len(content) // 3
    path.write_bytes(content[:third] + bytes(third) + content[2 * third :])


def older(path: Path) -> None:
    """The newest of several files of one kind takes the content of the one before."""
    path.write_bytes(sorted(path.parent.glob("*" + path.suffix))[-2].read_bytes())


WHOLE: dict[str, Callable[[Path], None]] = {
    "flip 0": flip(0), "flip 0.2": flip(0.2), "flip 0.5": flip(0.5), "flip 0.9": flip(0.9), "cut": cut(0.6),
    "empty": cut(0), "delete": Path.unlink, "garbage": garbage, "zeros": zeros, "zero middle": zero_middle,
}  # fmt: skip
LINES = WHOLE | {"cut line": cut_line, "double line": double_line, "swap lines": swap_lines}
MATRIX: dict[str, dict[str, Callable[[Path], None]]] = {
    "run/recipe.yaml": WHOLE, "run/metrics.jsonl": LINES, "run/metrics.seals": LINES, "run/ledger.jsonl": LINES,
    "run/privacy.json": WHOLE, "run/private/run.json": WHOLE, "run/private/private.jsonl": LINES,
    "run/private/private.seals": LINES, "run/private/heads/*": WHOLE | {"older": older},
    "run/checkpoints/*": WHOLE | {"older": older}, "home/fedflat/keys/*": WHOLE, "home/fedflat/marks/*": LINES,
}  # fmt: skip
CASES = [(file, name) for file, kinds in MATRIX.items() for name in kinds]
SECURE = ("run/ledger.jsonl", "run/private/run.json", "home/")
"""What the secure run is damaged in; the seeded one in every file that it has."""


def outcome(stopped: World, whole: tuple[Any, ...], place: Path, file: str, damage: Callable[[Path], None]) -> str:
    """refused, said, same, or silent."""
    copy = stopped.copy(place)
    damage(copy.file(file))
    try:
        found = copy.resume(own=file == "run/recipe.yaml")
    except (InputError, RunError) as error:
        assert "\n" not in str(error) and str(error)
        return "refused"
    if found.notes:
        return "said"
    return "same" if copy.end() == whole else "silent"


def results(
    world: tuple[World, tuple[Any, ...]], place: Path, files: tuple[str, ...] = ("",)
) -> dict[tuple[str, str], str]:
    """Every case of the matrix that fits the run and whose file's name starts so, with what became of it."""
    stopped, whole = world
    found = {}
    for number, (file, name) in enumerate(CASES):
        if file.startswith(files) and (file.startswith(SECURE) if stopped.secure else not file.startswith("home/")):
            found[file, name] = outcome(stopped, whole, place / str(number), file, MATRIX[file][name])
    return found


def test_no_damage_goes_unseen(world: tuple[World, tuple[Any, ...]], tmp_path: Path) -> None:
    found = results(world, tmp_path)
    assert len(found) >= (40 if world[0].secure else 85)
    assert [case for case, what in found.items() if what == "silent"] == []
    assert {"refused", "said", "same"} <= set(found.values())


BLIND = {
    "checkpoints": "run/checkpoints", "records": "run/metrics.jsonl", "opening": "run/recipe.yaml",
    "mark": "home/fedflat/keys",
}  # fmt: skip
"""What a twin does not check, and the files whose damage it then leaves silent."""


@pytest.mark.parametrize("blind", BLIND)
def test_broken_twins_without_the_checks_are_found(blind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if blind == "checkpoints":
        monkeypatch.setattr(checkpoint, "_seal", lambda tensors, facts: "x")
    elif blind == "records":
        monkeypatch.setattr(RunFolder, "_seal", lambda folder, name, line: "x")
    stopped, end = stopped_and_ended(tmp_path, blind == "mark")
    if blind == "mark":
        monkeypatch.setattr(resume, "reasons", lambda *where: ([], []))
    elif blind == "opening":
        monkeypatch.setattr(Opening, "differing", lambda opening, identity: [])
        monkeypatch.setattr(Opening, "is_recipe", lambda opening, content: True)
        monkeypatch.setattr(resume, "_check_ledger", lambda job, ledger: None)
    found = results((stopped, end), tmp_path, (BLIND[blind],))
    if blind == "opening":
        found["data", "other"] = "said" if stopped.copy(tmp_path / "data").resume(data=clients(1.0)).notes else "silent"
    assert "silent" in found.values()


@pytest.mark.parametrize(
    ("what", "changes", "shift"),
    [
        ("data", {}, 1.0),
        ("recipe", {"local": {"steps": 1, "batch_size": 4, "momentum": 0.0, "lr": 0.9}}, 0.0),
        ("recipe", {"privacy": {"clip": 0.5, "noise_multiplier": 9.0}}, 0.0),
    ],
)
@pytest.mark.parametrize("without", ["nothing", "checkpoints"])
def test_another_run_is_refused_by_name(
    what: str, changes: dict[str, Any], shift: float, without: str, tmp_path: Path
) -> None:
    stopped = World(tmp_path / "run", False).start()
    if without == "checkpoints":
        shutil.rmtree(stopped.folder / "checkpoints")
    before = {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"another {what} than it was started with"):
        stopped.resume(clients(shift), **changes)
    assert {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()} == before


def test_without_checkpoints_every_round_is_charged_again(tmp_path: Path) -> None:
    stopped = World(tmp_path / "run", False).start()
    shutil.rmtree(stopped.folder / "checkpoints")
    found = stopped.resume()
    lines = [json.loads(line) for line in (stopped.folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 0, 1, 2, 3]
    assert len({line["key_id"] for line in lines[:3]} & {line["key_id"] for line in lines[3:]}) == 0
    assert any("no checkpoint is left" in note and "charged again" in note for note in found.notes)
    assert found.privacy["rounds_charged"] == 7
    assert found.privacy["epsilon"] == pytest.approx(found.history[-1]["epsilon"])
    assert "no checkpoint is left" in " ".join(found.privacy["reasons"])
    longer = fedflat.run({**recipe(False), "rounds": 7}, clients=clients())
    assert found.privacy["epsilon"] == pytest.approx(longer.privacy["epsilon"])
