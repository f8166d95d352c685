"""Noise is used once: whose key a run draws with, restored folders, and two runs in one folder."""

import json
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedflat
from fedflat.algorithms import dp_fedavg
from fedflat.assembly.jobs import prepare
from fedflat.config.recipe import Recipe
from fedflat.config.sections import EngineSection
from fedflat.core.checks import InputError, RunError
from fedflat.core.types import Algorithm
from fedflat.models import build
from fedflat.privacy.ledger import extra_rounds, read
from fedflat.records import checkpoint, keys
from fedflat.records import opening as opening_module
from fedflat.records.folder import claimed
from fedflat.records.opening import Opening
from fedflat.simulation.result import export
from fedflat.simulation.run import run

RECIPE: dict[str, Any] = {
    "rounds": 3, "data": {"classes": 3}, "model": {"name": "linear"}, "algorithm": {"name": "dp-fedavg"},
    "local": {"steps": 1, "batch_size": 4, "momentum": 0.0}, "cohort": {"size": 4},
    "privacy": {"clip": 0.5, "noise_multiplier": 1.0}, "engine": {"backend": "sequential"},
}  # fmt: skip
WITHOUT_MODEL = {key: value for key, value in RECIPE.items() if key != "model"}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path / "state"
    torch.set_flush_denormal(False)


def clients(shift: float = 0.0, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 5, generator=made) + shift, torch.arange(6) % 3) for _ in range(count)]


SEEDED = {"randomness": "seeded", "benchmark": True}


def key(data: Any = None, module: Any = None, method: Any = None, **changes: Any) -> bytes:
    recipe = {**RECIPE, **changes}
    recipe["privacy"] = {**recipe["privacy"], **SEEDED}
    return prepare(Recipe.of(recipe), module, clients() if data is None else data, algorithm=method).key


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.source = iter("abc")


def test_only_the_same_run_has_the_same_key() -> None:
    own, first = nn.Linear(5, 3), key()
    same = [key(), key(name="other"), key(evaluation={"every": 2})]
    others = [
        key(seed=1), key(rounds=4), key(local={"steps": 2, "batch_size": 4}), key(clients(1.0)), key(clients(count=5)),
        key(algorithm={"name": "dp-fedsam"}), key(privacy={"clip": 0.5, "noise_multiplier": 2.0}), key(module=own),
    ]  # fmt: skip
    others += [key(method=dp_fedavg()), key(method=Algorithm("own")), key(method=Algorithm("mine"))]
    assert key(method=Algorithm("own")) == others[-2]
    assert set(same) == {first} and len({first, *others}) == len(others) + 1


def test_two_runs_of_one_seed_do_not_subtract_to_the_truth() -> None:
    """As every compare does: the difference of two runs holds two draws of the noise, not none."""
    still = {"local": {"steps": 1, "batch_size": 4, "momentum": 0.0, "lr": 1e-9}, "rounds": 1}
    both = ({**RECIPE, **still, "algorithm": {"name": name}} for name in ("dp-fedavg", "dp-fedsam"))
    one, two = (flat(run(recipe, clients=clients()).model.state_dict()) for recipe in both)
    assert float((one - two).std()) == pytest.approx(0.5 / 4 * 2**0.5, rel=0.5)


def test_what_cannot_be_identified_gets_fresh_noise_and_says_so(tmp_path: Path) -> None:
    found = [run(WITHOUT_MODEL, Odd(), clients(), out=tmp_path / name) for name in ("one", "two")]
    assert "cannot be identified" in found[0].privacy["noise_source"]
    names = [{line["key_id"] for line in read(tmp_path / name / "ledger.jsonl")} for name in ("one", "two")]
    assert not names[0] & names[1] and not list((tmp_path / "state").glob("fedflat/keys/*"))
    seeded = run({**WITHOUT_MODEL, "privacy": {**RECIPE["privacy"], **SEEDED}}, nn.Linear(5, 3), clients())
    assert seeded.privacy["noise_source"].startswith("simulation: noise reproducible from the seed")
    assert "protects nobody" in seeded.privacy["caution"] and "of the mechanism" in str(seeded)


def stopped(folder: Path, rounds: int, resume: bool = False, secure: bool = True) -> Any:
    done: list[int] = []
    recipe = {**RECIPE, "privacy": {**RECIPE["privacy"], **({} if secure else SEEDED)}}
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
    before = load_file(folder / "checkpoints" / "round-000002.safetensors")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    found, lines = stopped(folder, 3, resume=True), read(folder / "ledger.jsonl")
    after = load_file(folder / "checkpoints" / "round-000002.safetensors")
    assert float((before["shared"] - after["shared"]).std()) > 0.05
    assert len(lines) == 3 + (2 if complete else 1) and extra_rounds(lines) == len(lines) - 3
    assert found.privacy["rounds_charged"] == len(lines)
    assert found.privacy["epsilon"] == pytest.approx(found.history[-1]["epsilon"])
    assert any("behind the mark" in note for note in found.notes)
    assert any("behind the mark" in reason for reason in found.privacy["reasons"])


@pytest.mark.parametrize("locked", [True, False])
def test_two_copies_never_go_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    """Without the lock, the broken twin, both draw a round with one key, whatever each one's software."""
    stopped(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    if not locked:
        monkeypatch.setattr(keys, "alone", lambda *_: nullcontext())
    asked: list[Any] = []

    def meanwhile() -> bool:
        with pytest.raises(RunError, match="or a copy of its folder") if locked else nullcontext():
            asked.append(not asked and stopped(tmp_path / "copy", 1, resume=True))
        return len(asked) > 1

    run(RECIPE, clients=clients(), out=tmp_path / "run", resume=True, should_stop=meanwhile)
    one, two = (read(tmp_path / name / "ledger.jsonl") for name in ("run", "copy"))
    assert (len(two) == 1) if locked else one[1]["key_id"] == two[1]["key_id"]


ENGINES: dict[str, tuple[Any, Any]] = {
    "device": ("cpu", "auto"), "backend": ("sequential", "vectorized"), "precision": ("fp32", "bf16"), "block": (2, 3),
    "processes": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in EngineSection.model_fields if name != "compile"])
def test_seeded_runs_on_another_engine_never_share_noise(name: str) -> None:
    """Two sums that may round otherwise: under one noise, their difference would be free of noise."""
    one, other = (key(engine={**RECIPE["engine"], name: value}) for value in ENGINES[name])
    assert one != other and one == key(engine={**RECIPE["engine"], name: ENGINES[name][0]})


def test_the_key_follows_the_processor_with_clients_of_ones_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table on public data can be made again on another machine; nobody's data are behind it."""
    digits = {"data": {"dataset": "digits", "clients": 20, "max_examples": 100}}
    asked = Recipe.of({**RECIPE, **digits, "privacy": {**RECIPE["privacy"], "randomness": "seeded"}})
    before = key(), prepare(asked).key
    monkeypatch.setattr(opening_module, "processor", lambda: "another")
    after = key(), prepare(asked).key
    assert before[0] != after[0] and before[1] == after[1]
    monkeypatch.setattr("fedflat.assembly.records.metadata.version", lambda package: "another")
    assert prepare(asked).key != after[1]


def test_another_graphics_card_or_setting_of_its_libraries_is_other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for name in ("one", "two"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        said.append(opening_module.machine(torch.device("cuda")))
    assert said[0] != said[1] and "gpu" not in opening_module.machine(torch.device("cpu"))
    said.append(opening_module.processor.__wrapped__())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert opening_module.processor.__wrapped__() != said[2]


def test_seeded_noise_for_ones_own_clients_is_refused_unless_it_is_a_benchmark(tmp_path: Path) -> None:
    own = {**RECIPE, "privacy": {**RECIPE["privacy"], "randomness": "seeded"}}
    table = tmp_path / "own.csv"
    table.write_text("user,a,b,label\n" + "".join(f"{i},{i / 9},1,{i % 2}\n" for i in range(8)))
    section = {"dataset": str(table), "by": "user", "inputs": ["a", "b"], "target": "label"}
    for given in ({"clients": clients()}, {}):
        recipe = own if given else {**own, "data": section}
        with pytest.raises(InputError, match=r"privacy\.benchmark: true") as error:
            run(recipe, **given)
        assert "\n" not in str(error.value)
    with pytest.warns(UserWarning, match="privacy.published beside .* without effect"):
        run({**RECIPE, "privacy": {"clip": 0.5, "epsilon": 8, "published": "002"}}, clients=clients())
    ran = run({**RECIPE, "algorithm": "fedavg", "privacy": {"epsilon": 8, "budget": 3}}, clients=clients())
    assert "privacy: budget without effect, for fedavg has no privacy." in ran.privacy["warnings"]


PUBLIC: dict[str, Any] = {
    **RECIPE, "seed": 117, "rounds": 2, "cohort": {"size": 20},
    "data": {"dataset": "digits", "clients": 20, "max_examples": 200},
}  # fmt: skip


@pytest.mark.parametrize("randomness, alike", [("secret", False), ("seeded", True)])
def test_the_seed_that_an_export_gives_away_says_nothing_about_the_noise(
    tmp_path: Path, randomness: str, alike: bool
) -> None:
    """Released weights show whose initial ones they were; seeded noise, the broken twin, comes back with the seed."""
    privacy = {"clip": 0.1, "noise_multiplier": 1.0, "randomness": randomness}
    run({**PUBLIC, "privacy": privacy}, out=tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    released = flat(load_file(tmp_path / "out" / "model.safetensors"))
    first = [flat(build("linear", (1, 8, 8), 10, seed).state_dict()) for seed in range(300)]
    fits = [float(torch.cosine_similarity(released, weights, 0)) for weights in first]
    found = max(range(300), key=lambda seed: fits[seed])
    assert found == PUBLIC["seed"] and fits[found] > 1.5 * sorted(fits)[-2]
    again, still = (
        run({**PUBLIC, "seed": found, "privacy": {**privacy, **noise}}) for noise in ({}, {"noise_multiplier": 0})
    )
    truth = flat(still.model.state_dict())
    cosine = float(torch.cosine_similarity(released - truth, flat(again.model.state_dict()) - truth, 0))
    assert cosine == pytest.approx(1, abs=1e-6) if alike else abs(cosine) < 0.2


def flat(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([named[name].flatten() for name in sorted(named)])


def test_the_ledgers_first_line_says_whose_it_is(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 2, secure=False)
    lines, opened = read(tmp_path / "run" / "ledger.jsonl"), Opening.read(tmp_path / "run")
    assert lines[0]["run"] == opened.public and "run" not in lines[1]
    assert set(opened.public) == {"format", "id", "attempt", "recipe", "data", "model", "method", "software", "terms"}
    identity = prepare(Recipe.of(RECIPE), None, clients()).identity
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not any(part.encode() in content for part in (identity.recipe, identity.data, identity.model))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")}
    private = {path: mode for path, mode in modes.items() if "private" in path.relative_to(tmp_path / "run").parts}
    assert len(private) >= 4 and not any(mode & 0o077 for mode in private.values())
    (tmp_path / "run" / "private" / "run.json").unlink()
    with pytest.raises(InputError, match=r"run\.json: found no such file"):
        stopped(tmp_path / "run", 3, resume=True, secure=False)


def test_checkpoints_hold_what_is_released_and_no_more(tmp_path: Path) -> None:
    run({**RECIPE, "algorithm": {"name": "dp2-fedsam"}, "model": {"name": "mlp", "hidden": 4}},
        clients=clients(), out=tmp_path / "run")  # fmt: skip
    newest = sorted((tmp_path / "run" / "checkpoints").glob("*"))[-1]
    with safe_open(newest, framework="pt") as file:
        assert set(file.keys()) <= {"shared", "heads.first", "slot.initial"}
        facts = json.loads(file.metadata()["state"])
    public = {"round", "clip", "private_half", "run", "ledger", "tensors", "shared_tensors", "sha256"}
    assert set(facts) == {*public, "made_for"}  # shapes that a named model's own tensors show
    assert set(facts["made_for"]) == {"input_shape", "dtype", "classes", "vocabulary", "padding"}
    run(WITHOUT_MODEL, model=torch.nn.Linear(5, 3), clients=clients(), out=tmp_path / "own")
    with safe_open(sorted((tmp_path / "own" / "checkpoints").glob("*"))[-1], framework="pt") as file:
        made_for = json.loads(file.metadata()["state"])["made_for"]
    assert set(made_for) == {"input_shape", "dtype"}, "how many classes clients have stays with them"
    assert checkpoint.load(newest)[1].kept.keys() and facts["private_half"] is True


def test_one_of_two_runs_in_a_folder_is_refused(tmp_path: Path) -> None:
    given = {"recipe": {**RECIPE, "rounds": 1}, "clients": clients(), "out": tmp_path / "run"}
    with claimed(tmp_path / "run"), pytest.raises(InputError, match="which holds a run"):
        claimed(tmp_path / "run").__enter__()
    fedflat.run(**given)
    with pytest.raises(InputError, match=r"\A.*\Z"):
        fedflat.run(**given)


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


def test_the_quick_start_draws_the_noise_behind_the_readmes_figures() -> None:
    """Whoever changes a key of the recipe's schema, the data or the first weights meets this: give the key an entry in
    ``assembly.records.LATER``, or measure README's digits again."""
    what = prepare(Recipe.load("quick-start-dp-fedpgn")).identity
    digests = {"recipe": what.recipe[:12], "data": what.data[:12], "model": what.model[:12]}
    assert digests == {"recipe": "68b081973320", "data": "c012b39c5779", "model": "2abe5b8144ff"}
    assert what.method == what.noise == ""


BACKENDS: Any = torch.backends
SETTINGS: dict[str, tuple[Any, Any, Any]] = {
    "matmul": (torch.set_float32_matmul_precision, "medium", "highest"),
    "oneDNN": (BACKENDS.mkldnn.set_flags, False, True), "attention": (BACKENDS.cuda.enable_flash_sdp, False, True),
    "denormals": (torch.set_flush_denormal, True, False), "nnpack": (BACKENDS.nnpack.set_flags, False, True),
}  # fmt: skip
for part in filter(partial(hasattr, BACKENDS.mkldnn), ("conv", "matmul", "rnn")):  # since PyTorch 2.9
    SETTINGS[part] = partial(setattr, getattr(BACKENDS.mkldnn, part), "fp32_precision"), "bf16", "none"


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_torchs_settings_of_the_process_are_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str, recorded: bool
) -> None:
    """Seeded runs, and one that is killed and resumed: two sums that round otherwise never share noise. Without the
    settings in the record, the broken twin, they do, and the second release is not charged."""
    before, (change, value, usual) = key(), SETTINGS[name]
    request.addfinalizer(lambda: change(usual))
    if not recorded:
        monkeypatch.setattr(opening_module, "arithmetic", dict)
        before = key()
    stopped(tmp_path / "run", 2)
    stopped(tmp_path / "seeded", 2, secure=False)
    (tmp_path / "run" / "checkpoints" / "round-000002.safetensors").unlink()
    change(value)
    assert (key() == before) != recorded
    found, lines = stopped(tmp_path / "run", 3, resume=True), read(tmp_path / "run" / "ledger.jsonl")
    assert [line["round"] for line in lines] == ([0, 1, 1, 2] if recorded else [0, 1, 2])
    assert len({line["key_id"] for line in lines}) == (2 if recorded else 1) == found.privacy["rounds_charged"] - 2
    assert any("torch " in note and "differ" in note for note in found.notes) == recorded
    stopped(tmp_path / "seeded", 3, resume=True, secure=False)  # none is open, but a twin elsewhere has the first key
    assert len({line["key_id"] for line in read(tmp_path / "seeded" / "ledger.jsonl")}) == (2 if recorded else 1)


def test_settings_that_change_in_mid_run_are_noted_in_private(tmp_path: Path) -> None:
    """Whoever resumes gets another key. A round that was drawn under a key is not released again under changed
    settings: nobody would be charged. Resumed once more it gets a fresh key, under which they may change."""
    done: list[bool] = []
    change = lambda *_: done.append(torch.set_flush_denormal(True))  # noqa: E731
    found = run(RECIPE, clients=clients(), out=tmp_path / "a", on_round=change, should_stop=lambda: len(done) == 2)
    assert any("denormals differ" in note for note in found.notes)
    records = Opening.read(tmp_path / "a"), read(tmp_path / "a" / "ledger.jsonl")
    assert ["while the run went on" in str(record) for record in records] == [True, False]
    torch.set_flush_denormal(False)
    stopped(tmp_path / "b", 2)
    for name in "ab":
        (tmp_path / name / "checkpoints" / "round-000002.safetensors").unlink()
    assert stopped(tmp_path / "a", 3, resume=True).privacy["rounds_charged"] == 4
    changed = {"clients": clients(), "out": tmp_path / "b", "resume": True, "should_stop": lambda: change() is not None}
    with pytest.raises(RunError, match=r"^round 1: found another torch flushes denormals"):
        run(RECIPE, **changed)
    torch.set_flush_denormal(False)
    assert run(RECIPE, **changed).privacy["rounds_charged"] == 4
    torch.set_flush_denormal(False)
    assert len({line["key_id"] for line in read(tmp_path / "b" / "ledger.jsonl")}) == 2
