"""Public files of a run and of its export tell nothing of one client's data: pairs of worlds with the noise held fixed.

docs/privacy.md lists every public field. What it calls constant is equal in both worlds; no field is missing there.
"""

import ast
import functools
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from small_federation import module

import fedflat
from fedflat.assembly import jobs, plans
from fedflat.backends import choose
from fedflat.config.reference import recipe_keys
from fedflat.core.loss import CROSS_ENTROPY
from fedflat.core.params import PersonalState
from fedflat.core.rng import stream
from fedflat.data import sources
from fedflat.engine import device, evaluate, resume
from fedflat.engine.device import difference
from fedflat.report.html import write_report

ROOT = Path(__file__).parents[2]
Pair = tuple[np.ndarray, np.ndarray]


def table() -> list[tuple[str, str, str]]:
    """File, field and kind of each row of docs/privacy.md."""
    text = (ROOT / "docs/privacy.md").read_text("utf-8")
    part = text.partition("## What stands in public files")[2].partition("## The statement")[0]
    rows = [line.split("|")[1:4] for line in part.splitlines() if line.startswith("| `")]
    return [
        (file, field, kind.strip())
        for files, fields, kind in rows
        for file in re.findall(r"`([^`]+)`", files)
        for field in re.findall(r"`([^`]+)`", fields) or [""]
    ]


TABLE = table()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Names of fields, joined by dots, with their values; places in lists do not count as names."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


def fields_of(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            facts = {k: json.loads(v) if v[:1] in "{[" else v for k, v in sorted(opened.metadata().items())}
            yield from leaves(facts.pop("state")) if "state" in facts else ()
            yield from leaves(facts) if facts else ()
            for name in sorted(opened.offset_keys()):
                tensor = opened.get_tensor(name)
                place = f"tensor.{name}" if file.name == "model.safetensors" else name
                yield place, (tuple(tensor.shape), str(tensor.dtype), tensor.double().sum().item())
    elif file.suffix == ".jsonl":
        for line in file.read_text().splitlines():
            yield from leaves(json.loads(line))
    elif file.suffix == ".json":
        yield from leaves(json.loads(file.read_text()))
    elif file.suffix == ".yaml":
        yield from leaves(yaml.load(file.read_text(), yaml.CSafeLoader))
    else:
        yield "", file.read_text("utf-8")


def public_fields(folder: Path) -> dict[str, list[tuple[str, Any]]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    shown = {str(path.relative_to(folder)): path for path in files}
    return {name: list(fields_of(path)) for name, path in shown.items() if not name.startswith("private/")}


@functools.cache
def kinds(file: str, field: str) -> set[str]:
    return {kind for name, pattern, kind in TABLE if fnmatchcase(file, name) and fnmatchcase(field, pattern)}


def moved(one: Path, other: Path) -> list[str]:
    """Fields that are not in the table, and constants that differ between two folders."""
    here, there = public_fields(one), public_fields(other)
    found = [] if here.keys() == there.keys() else [f"files: {sorted(here.keys() ^ there.keys())}"]
    for file in here.keys() & there.keys():
        unknown = {field for field, _ in [*here[file], *there[file]] if not kinds(file, field)}
        found += [f"{file}: {field} is not in the table" for field in sorted(unknown)]
        if [field for field, _ in here[file]] != [field for field, _ in there[file]]:
            found.append(f"{file}: other fields")
        for (field, mine), (_, theirs) in zip(here[file], there[file]):
            if "constant" in kinds(file, field) and mine != theirs:
                found.append(f"{file}: {field} {mine} / {theirs}")
    return found


DRAW = np.random.default_rng(3)
CLIENTS: list[Pair] = [
    (DRAW.normal(size=(size, 6)).astype(np.float32), DRAW.integers(0, 2, size)) for size in (4, 3, 6, 1, 5, 4, 3, 2)
]
TEST: Pair = (DRAW.normal(size=(9, 6)).astype(np.float32), np.arange(9) % 3)
LAST: Pair = (CLIENTS[4][0], np.full(5, 2))  # the only one with the third class
WORLDS: dict[str, Pair] = {
    "no data": (np.zeros((0, 6), np.float32), np.zeros(0, np.int64)),
    "one example more": (np.vstack([LAST[0], LAST[0][:1]]), np.full(6, 2)),
    "other labels": (LAST[0], np.zeros(5, np.int64)), "other values": (LAST[0] * np.float32(1e30), LAST[1]),
    "many": (np.tile(LAST[0], (100, 1)), np.full(500, 2)),
}  # fmt: skip
NAMED: dict[str, Any] = {
    "rounds": 2, "algorithm": "dp-fedavg", "data": {"examples_per_client": 4}, "model": {"name": "mlp", "hidden": 4},
    "local": {"epochs": 2, "batch_size": 3}, "cohort": {"size": 6},
    "privacy": {"clip": {"kind": "adaptive", "initial": 0.5, "count_noise": 3.0}, "noise_multiplier": 1.0},
    "engine": {"backend": "vectorized"},
}  # fmt: skip
GIVEN: dict[str, Any] = {key: NAMED[key] for key in ("rounds", "cohort")} | {
    "algorithm": "dp-scaffold", "privacy": {"clip": 0.5, "noise_multiplier": 1.0}, "engine": {"backend": "sequential"},
}  # fmt: skip
AUTO: dict[str, Any] = NAMED | {"local": {"steps": 2, "batch_size": 50}, "engine": {"backend": "auto"}}


@pytest.fixture(scope="module", autouse=True)
def fixed_noise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The same key, secret and name for every run, though the key of a real run is fresh and follows the data too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "noise_key", lambda root, *facts, attempt=1: root)
        patch.setattr(secrets, "token_bytes", lambda count=32: b"7" * count)
        patch.setattr(secrets, "token_hex", lambda count=32: "7" * 2 * count)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def made(recipe: dict[str, Any], whose: Pair, out: Path) -> Path:
    """A run's folder with its report, whose fifth client has the given data."""
    os.environ["XDG_STATE_HOME"] = str(out.parent / f"{out.name}-state")  # no mark of another run of the same name
    pairs = [*CLIENTS[:4], whose, *CLIENTS[5:]]
    fedflat.run(recipe, clients=pairs, test=TEST, out=out, **({} if "model" in recipe else {"model": module()}))
    write_report([out], out)
    fedflat.export(out, out / "private" / "export")
    return out


def both_moved(one: Path, other: Path) -> list[str]:
    return [*moved(one, other), *moved(one / "private/export", other / "private/export")]


RECIPES = {"named": NAMED, "given": GIVEN, "auto": AUTO}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of one recipe's run in one world (``last``: the base), for tests that change nothing in it."""

    @functools.cache
    def once(recipe: str, world: str) -> Path:
        whose = LAST if world == "last" else WORLDS[world]
        return made(RECIPES[recipe], whose, tmp_path_factory.mktemp(recipe) / "run")

    return once


@pytest.mark.parametrize("recipe", RECIPES)
def test_public_files_are_equal_but_for_the_noise(recipe: str, folder: Callable[[str, str], Path]) -> None:
    for world in WORLDS:
        found = both_moved(folder(recipe, "last"), folder(recipe, world))
        assert found == [], "\n".join([world, *found[:40]])


def test_a_checkpoint_does_not_tell_whether_anybody_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has data. The broken twin writes a private half only where there is a client's state."""
    monkeypatch.setattr(sys.modules[__name__], "CLIENTS", [WORLDS["no data"]] * 8)
    base, pack = made(GIVEN, LAST, tmp_path / "base" / "run"), PersonalState.pack
    assert both_moved(base, made(GIVEN, WORLDS["no data"], tmp_path / "none" / "run")) == []
    monkeypatch.setattr(PersonalState, "pack", lambda self: pack(self) if any(self.states.values()) else {})
    assert "private_half" in str(moved(base, made(GIVEN, WORLDS["no data"], tmp_path / "twin" / "run")))


def test_the_noise_is_held_fixed_and_the_data_move_what_is_noised(
    tmp_path: Path, folder: Callable[[str, str], Path]
) -> None:
    """Else the worlds above would be equal for nothing."""
    folders = folder("given", "last"), made(GIVEN, LAST, tmp_path / "run"), folder("given", "other labels")
    first, again, other = (public_fields(run / "private/export")["model.safetensors"] for run in folders)
    assert first == again != other


def test_a_private_size_in_a_record_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Callable[[str, str], Path]
) -> None:
    """Twin: the size of the largest client in metrics.jsonl, as a field of its own and in place of a constant."""
    base = shutil.copytree(folder("given", "last"), tmp_path / "base")
    (base / "metrics.jsonl").write_text((base / "metrics.jsonl").read_text().replace('"round"', '"largest"'))
    assert any(text.startswith("metrics.jsonl: largest") for text in moved(base, folder("given", "many")))
    tested = evaluate.evaluate_round
    # The run's own check finds each, before anything is exported.
    for field, said in {"largest": ", which no line of this run has", "claimed_epsilon": r" says \d+, .* None"}.items():

        def leaking(job: Any, state: Any, heads: Any, field: str = field) -> Any:
            found = tested(job, state, heads)
            return found[0] | {field: float(job.data.sizes.max())}, found[1]

        monkeypatch.setattr(evaluate, "evaluate_round", leaking)
        with pytest.raises(fedflat.InputError, match=field + said):
            made(GIVEN, LAST, tmp_path / field)


TWINS: dict[str, tuple[str, Any, str, Any]] = {
    "local.steps": ("named", plans, "public_examples", lambda recipe, data: data.examples_per_client),
    "engine.backend": ("auto", choose, "width_of", lambda data, batch_size: 100 * int(data.sizes.max())),
}
"""What would follow the clients: steps, as 0.2 counted them from everybody's data, and a back end, with minibatches as
wide as the largest client needs them."""


@pytest.mark.parametrize("key", TWINS)
def test_a_recipe_that_follows_the_clients_is_caught(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, room, name, twin = TWINS[key]
    monkeypatch.setattr(room, name, twin)
    base, many = (made(RECIPES[recipe], whose, tmp_path / str(len(whose[1]))) for whose in (LAST, WORLDS["many"]))
    assert any(text.startswith(f"recipe.yaml: {key}") for text in moved(base, many))


def test_the_table_has_no_wildcard_for_keys_that_no_recipe_has(folder: Callable[[str, str], Path]) -> None:
    known = {key.path for key in recipe_keys()} | {"model.name", "algorithm.name"}
    written = yaml.safe_load((folder("given", "last") / "recipe.yaml").read_text())
    written.pop("versions")
    assert [path for path, _ in leaves(written) if path not in known] == []


def test_every_fact_of_an_event_is_listed() -> None:
    text = (ROOT / "docs/privacy.md").read_text("utf-8").partition("Events of a deployment")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", text))
    for path in (ROOT / "fedflat/federation").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "told":
                assert {word.arg for word in node.keywords if word.arg} <= named, path
    assert '"seconds"' not in (ROOT / "fedflat/federation/server.py").read_text("utf-8")


def test_passes_over_private_data_need_a_public_number() -> None:
    recipe = {**NAMED, "data": {}}
    with pytest.raises(fedflat.InputError, match=r"local.epochs: found 2; allowed: .*data.examples_per_client"):
        fedflat.run(recipe, clients=CLIENTS, test=TEST)
    bounded = fedflat.clients(CLIENTS, max_examples=4, test=TEST)
    assert fedflat.run(recipe, clients=bounded).privacy["facts"]["local"]["steps"] == 4  # 2 passes of ⌈4/3⌉
    assert fedflat.run({**recipe, "local": {}}, clients=CLIENTS, test=TEST).privacy["facts"]["local"]["steps"] == 10


def test_a_model_by_name_needs_a_public_number_of_classes() -> None:
    recipe = {**NAMED, "local": {"steps": 1}}
    with pytest.raises(fedflat.InputError, match=r"data.classes: found nothing"):
        fedflat.run(recipe, clients=CLIENTS)
    few = {**recipe, "data": {"classes": 2}}
    with pytest.raises(fedflat.InputError, match=r"clients\[4\] targets\[0\] is 2"):
        fedflat.run(few, clients=[*CLIENTS[:4], LAST])
    assert fedflat.run({**recipe, "data": {"classes": 5}}, clients=CLIENTS).model(torch.zeros(1, 6)).shape == (1, 5)


def test_a_device_is_tried_on_made_up_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(device, "Batch", lambda x, y: seen.append(x) or (_ for _ in ()).throw(RuntimeError))
    data = fedflat.clients(CLIENTS)
    with pytest.raises(RuntimeError):
        difference(
            module(), fedflat.core.params.layout_of(module(), None), data, "fp32", torch.device("cpu"), CROSS_ENTROPY
        )
    assert all(bool((seen[0][row] != data.inputs).any(1).all()) for row in range(len(seen[0])))


def test_lists_of_two_kinds_are_refused() -> None:
    """Else one client's fraction would make numbers of everybody's token ids."""
    frame = pytest.importorskip("pandas").DataFrame({"x": [[1, 2], [0.5, 1.0]], "y": [0, 1], "by": ["a", "b"]})
    with pytest.raises(fedflat.InputError, match=r"row 1, client b, column x.*numbers with a fraction"):
        fedflat.clients(frame, by="by", inputs="x", target="y")
    assert fedflat.clients(frame, by="by", inputs="x", target="y", scale={"x": (0, 1)}).inputs.dtype == torch.float32


def test_a_client_s_rows_do_not_follow_from_the_number_of_anothers(tmp_path: Path) -> None:
    """Twin: rows drawn from all rows, which data.max_examples does, and which is refused where rows are clients'."""

    def parts(more: int, bound: int | None, draw: int | None) -> list[set[float]]:
        rows = [(user, 100 * user + k, k % 2) for user in range(6) for k in range(8 + (more if user == 0 else 0))]
        (tmp_path / "own.csv").write_text("\n".join(["user,a,y", *(",".join(map(str, row)) for row in rows)]))
        spec = {"dataset": str(tmp_path / "own.csv"), "by": "user", "inputs": "a", "target": "y"}
        found = sources.load({**spec, "max_per_client": bound})
        if draw is not None:
            kept = set(stream(0, "max_examples").permutation(len(rows))[:draw].tolist())
            found = replace(found, parts=tuple(part[np.isin(part, list(kept))] for part in found.parts))
        return [set(found.inputs[torch.from_numpy(part)].flatten().tolist()) for part in found.parts]

    for bound in (None, 4):
        assert sum(a != b for a, b in zip(parts(0, bound, None), parts(1, bound, None))) <= 1
    assert sum(a != b for a, b in zip(parts(0, None, 20), parts(1, None, 20))) > 1  # the twin
    spec = {"dataset": str(tmp_path / "own.csv"), "by": "user", "inputs": "a", "target": "y"}
    with pytest.raises(fedflat.InputError, match=r"data\.max_examples: found 20; allowed: nothing where every row"):
        sources.load({**spec, "max_examples": 20})


def test_data_too_large_for_a_device_choose_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the size of one client's data would decide everybody's arithmetic."""

    def full(module: Any, where: torch.device) -> Any:
        raise fedflat.RunError(f"engine.device: 200 GiB of data do not go on {where}")

    monkeypatch.setattr(jobs, "device_for", lambda *_: torch.device("cuda:0"))
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(fedflat.RunError, match="do not go on cuda:0"):
        jobs.prepare(fedflat.Recipe.of(GIVEN), module(), CLIENTS)
