"""``fedflat tune``: what may vary, the charge before the first trial, going on, what stays secret; proxies."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fedflat.assembly import inputs as proxy
from fedflat.assembly.inputs import data_of
from fedflat.assembly.plans import plan_of
from fedflat.assembly.records import LATER, identity
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.config.sections import DataSection
from fedflat.core.checks import InputError, RunError
from fedflat.core.params import layout_of
from fedflat.core.rng import stream
from fedflat.data.sources import load, load_validation
from fedflat.privacy import tuning as account
from fedflat.privacy.ledger import CHAIN, read, seal
from fedflat.privacy.tuning import Selection
from fedflat.privacy.verify import verify
from fedflat.records import keys
from fedflat.records.opening import Opening
from fedflat.records.signing import Operator
from fedflat.report import card
from fedflat.report.metrics import read_run
from fedflat.simulation import run as simulation
from fedflat.simulation import tuning
from fedflat.simulation.experiment import Comparison, finished
from fedflat.simulation.inspection import inspect_run
from fedflat.simulation.settings import CHARGE, PUBLIC, WINNER, applied, axes, draw, expand, grid, tasks

SMALL = {
    "name": "small", "seed": 1, "rounds": 2, "data": {"dataset": "digits", "clients": 20},
    "model": {"name": "mlp", "hidden": 4}, "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 8, "lr": 0.3},
    "cohort": {"size": 20, "sampling": "full"}, "privacy": {"clip": 0.5, "epsilon": 8},
    "engine": {"backend": "sequential", "device": "cpu"},
}  # fmt: skip
TWO = Selection(1.5)
VARY = ["local.lr=log:0.05:1", "privacy.clip=0.1,0.5"]


def asked(vary: list[str] = VARY, **changes: Any) -> tuning.Asked:
    return tuning.ask(Recipe.of({**SMALL, **changes}), vary, TWO)


class Here:
    """``compare`` in this process, which notes what it finds in the folder, and stops before a trial when told to."""

    def __init__(self, stop_before: int = 1000) -> None:
        self.stop_before, self.seen, self.recipes = stop_before, [], []  # type: ignore[var-annotated]

    def __call__(self, recipes: Any, overrides: Any, seeds: int, folder: Path, *_: Any) -> Comparison:
        self.recipes = recipes
        every = tasks(folder, expand(recipes, overrides, seeds))
        data = data_of(recipes[0], None, None)
        for number, task in enumerate(every):
            tuned = folder.parent.parent
            files = (tuned / CHARGE, tuned / tuning.DRAW)
            self.seen.append([file.is_file() and file.read_text() for file in files])
            if number == self.stop_before:
                raise KeyboardInterrupt
            if not finished(task):
                simulation.run(task.recipe, out=task.folder, data=data)
        return Comparison(folder, None, None, (), {}, 0, len(every))


@pytest.fixture(scope="module", autouse=True)
def _two_trials() -> Iterator[None]:
    """Draw two trials: how many there are is secret otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selection, "draw", lambda *_: 2)
        yield


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ([], "--vary: found nothing"),
        (["local.lr"], "KEY=a,b,c or KEY=log:LOW:HIGH"),
        (["local.lr=0.1"], "two values or more"),
        (["local.lr=0.1,0.1"], "each once"),
        (["local.lr=0.1,,1"], "two values or more"),
        (["local.lr=log:0:1"], "0 < LOW < HIGH"),
        (["local.lr=log:1:0.1"], "0 < LOW < HIGH"),
        (["local.lr=uniform:1"], "two numbers, LOW < HIGH"),
        (["local.steps=whole:1:2.5"], "two whole numbers"),
        (["data.clients=10,20"], "It is public and fixed"),
        (["privacy.epsilon=1,2"], "keys of local"),
        (["sever.lr=1,2"], "Did you mean server"),
        (["local=1,2"], "keys of local"),
        (["rounds=2,5"], "It is public and fixed"),
        (["cohort.size=5,20"], "It is public and fixed"),
        (["local.lr=0.1,1", "local.lr=log:0.1:1"], "local.lr and local.lr"),
        (["privacy.clip=0.1,1", "privacy.clip.quantile=0.1,1"], "each key once"),
        (["local.lr=0.1,fast"], "--vary local.lr=fast: local.lr"),
        (["algorithm.rho=0.1,1"], "--vary algorithm.rho=0.1: algorithm.rho"),
        (["algorithm.name=dp-fedavg,fedavg"], "a private method"),
        (["algorithm.name=dp-fedavg,ddgauss"], "trust distributed"),
    ],
)
def test_what_cannot_vary_is_refused_before_anything_is_drawn(vary: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        asked(vary)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"privacy": {"clip": 1, "epsilon": 8, "budget": 4}}, "privacy.budget"),
        ({"privacy": {"clip": 1, "epsilon": 8, "selection": {"mean": 3}}}, "not a trial's"),
        ({"privacy": {"clip": 1, "noise_multiplier": 0}}, "without it nothing is proven"),
        ({"cohort": {"size": 10, "sampling": "truncated", "max": 12}}, "Rényi divergence has a bound"),
        ({"data": {"dataset": "digits"}}, "data.clients"),
        ({"privacy": {"clip": {"kind": "adaptive", "initial": 1, "count_noise": 0.6}, "epsilon": 1}}, "count_noise"),
    ],
)
def test_what_has_no_proven_selection_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        asked(**changes)


def test_settings_are_drawn_independently_within_their_ranges() -> None:
    every = axes(
        ["local.lr=log:0.01:1", "server.momentum=uniform:0:0.9", "local.steps=whole:1:3", "privacy.clip=1,2"],
        private=False,
    )
    drawn = [draw(every, stream(0, "settings", i)) for i in range(600)]
    rates = np.log10([float(one["local.lr"]) for one in drawn])
    assert rates.min() >= -2 and rates.max() <= 0 and rates.mean() == pytest.approx(-1, abs=0.1)
    assert np.mean([float(one["server.momentum"]) for one in drawn]) == pytest.approx(0.45, abs=0.05)
    assert {one["local.steps"] for one in drawn} == {"1", "2", "3"}
    both = np.mean([one["local.steps"] == "1" and one["privacy.clip"] == "2" for one in drawn])
    assert both == pytest.approx(1 / 6, abs=0.06)
    assert grid(every) is None and len(grid(axes(["local.lr=0.1,1", "rounds=1,2,3"], private=False)) or ()) == 6
    assert [axis.text for axis in every][:2] == ["local.lr=log:0.01:1", "server.momentum=uniform:0:0.9"]


def test_another_name_comes_before_its_options() -> None:
    found = applied(Recipe.of(SMALL), {"algorithm.rho": "0.2", "algorithm.name": "dp-fedsam"})
    assert found.algorithm.options == {"rho": 0.2}


def test_every_trials_plan_states_the_total() -> None:
    found = asked()
    total = found.plan.epsilon()
    assert 7.99 < total <= 8
    recipe = tuning.trial_recipe(found, {"name": "a" * 16, "settings": {"local.lr": "1", "privacy.clip": "0.1"}})
    plan = plan_of(recipe, algorithm_of(recipe), 20)
    assert plan.epsilon() == total == plan.epsilon(1)
    assert plan.rounds_within_budget() == plan.rounds  # the total is the budget
    assert account.alone(plan).epsilon() < total - 1


def test_given_noise_gives_the_total() -> None:
    one = {"clip": 0.5, "noise_multiplier": 3.0}
    found = asked(privacy=one)
    plain = plan_of(Recipe.of({**SMALL, "privacy": one}), algorithm_of(Recipe.of(SMALL)), 20)
    assert found.plan.noise_multiplier == 3 and found.plan.epsilon() > plain.epsilon() * 1.3
    trial = tuning.trial_recipe(found, {"name": "a" * 16, "settings": {}})
    assert "budget" not in one and trial.privacy.budget == pytest.approx(found.plan.epsilon())


def test_the_noise_of_two_trials_with_one_setting_is_their_own() -> None:
    found, settings = asked(), {"local.lr": "0.1", "privacy.clip": "0.5"}
    first, second = (tuning.trial_recipe(found, {"name": name * 16, "settings": settings}) for name in "ab")
    module = torch.nn.Linear(2, 2)
    digests = [identity(one.dump(), "", module, layout_of(module, None), ()).recipe for one in (first, second)]
    assert digests[0] != digests[1]


def test_a_run_that_is_not_selected_is_the_run_it_was_before_there_was_a_selection() -> None:
    module, now = torch.nn.Linear(2, 2), Recipe.of(SMALL).dump()
    before = {**now, **{section: dict(now[section]) for section in LATER}}
    for section, added in LATER.items():
        for key in added:
            del before[section][key]
    made = [identity(one, "", module, layout_of(module, None), ()) for one in (now, before)]
    assert made[0] == made[1]


def checks(folder: Path) -> list[str]:
    return [f"{check.record}: {check.about}" for check in inspect_run(folder) if check.verdict == "wrong"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Here, tuning.Selected]:
    """One selection that went through, and how it ran."""
    folder, ran = tmp_path_factory.mktemp("selection") / "tuned", Here()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "compare", ran)
        found = tuning.tune(asked(), folder)
    return folder, ran, found


def test_a_selection_is_charged_first_and_releases_one_trial_only(
    tuned: tuple[Path, Here, tuning.Selected], tmp_path: Path
) -> None:
    folder, ran, found = tuned
    drawn = json.loads((folder / tuning.DRAW).read_text())["trials"]
    assert len(drawn) == len(ran.recipes) > 1
    for charge, noted in ran.seen:  # before the first trial, and ever after
        assert json.loads(charge)["epsilon"] == found.asked.plan.epsilon()
        assert len(json.loads(noted)["trials"]) == len(drawn)
    best = max(drawn, key=lambda trial: (trial["score"], trial["name"]))
    assert (found.winner, found.settings, found.score) == (folder / WINNER, best["settings"], best["score"])
    assert not (folder / tuning.TRIALS).exists() and os.stat(folder / "private").st_mode & 0o077 == 0
    assert checks(folder) == []
    Operator.create(tmp_path / "operator.pem")
    assert ("winner/signature", "wrong") in {check[:2] for check in inspect_run(folder, tmp_path / "operator.pub")}, (
        "a key that was given has signed nothing"
    )

    said = json.loads((folder / WINNER / "privacy.json").read_text())
    assert said["proven_epsilon"] == found.asked.plan.epsilon() == read(folder / CHARGE)[0]["epsilon"]
    assert said["checklist"]["tuning"].startswith("Counted")
    page = card.markdown(card.card(read_run(folder / WINNER)))
    assert "Counted: the settings were chosen by private selection" in page and "Not counted" not in page
    public = [path for path in folder.rglob("*") if path.is_file() and "private" not in path.relative_to(folder).parts]
    assert {path.relative_to(folder).parts[0] for path in public} == {PUBLIC, CHARGE, "charge.lock", WINNER}
    loser = next(trial for trial in drawn if trial["name"] != best["name"])
    for path in public:  # nothing names a loser, and no time tells how long all of it took
        assert loser["name"] not in path.read_bytes().decode("utf-8", "replace")
        assert path.stat().st_mtime_ns == (folder / CHARGE).stat().st_mtime_ns
    assert tuning.tune(asked(), folder) == found  # done: nothing runs again


def test_a_killed_selection_goes_on_with_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tuned"
    monkeypatch.setattr(tuning, "compare", Here(stop_before=1))
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(asked(), folder)
    before, charge = (folder / tuning.DRAW).read_text(), (folder / CHARGE).read_bytes()
    with pytest.raises(InputError, match="another selection"):
        tuning.tune(asked(["local.lr=0.1,1"]), folder)
    monkeypatch.setattr(Selection, "draw", lambda *_: pytest.fail("drawn again"))
    shutil.copytree(folder, tmp_path / "lost")
    (tmp_path / "lost" / tuning.DRAW).unlink()
    with pytest.raises(InputError, match="another selection with a charge of its own"):
        tuning.tune(asked(), tmp_path / "lost")
    (tmp_path / "lost" / tuning.DRAW).write_text("{}")
    with pytest.raises(InputError, match="a damaged draw"):
        tuning.tune(asked(), tmp_path / "lost")
    monkeypatch.setattr(tuning, "compare", Here())
    found = tuning.tune(asked(), folder)
    after = json.loads((folder / tuning.DRAW).read_text())["trials"]
    assert [(trial["name"], trial["settings"]) for trial in after] == [
        (trial["name"], trial["settings"]) for trial in json.loads(before)["trials"]
    ]
    assert (folder / CHARGE).read_bytes() == charge and found.winner is not None and checks(folder) == []

    # Killed after the winner was noted, and with a loser half deleted: the end is made up for.
    shutil.copytree(folder / WINNER, folder / tuning.TRIALS / "half" / "seed-0")
    text = (folder / WINNER / "recipe.yaml").read_text()
    (folder / tuning.TRIALS / "half" / "seed-0" / "recipe.yaml").write_text(text.replace("trial: ", "trial: x"))
    (folder / tuning.TRIALS / "half" / "seed-0" / "private" / "run.json").unlink()
    assert tuning.tune(asked(), folder).winner == folder / WINNER and not (folder / tuning.TRIALS).exists()
    shutil.rmtree(folder / WINNER)
    with pytest.raises(RunError, match="winning trial's folder is gone"):
        tuning.tune(asked(), folder)


def test_losers_leave_no_key_and_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(keys.folder().parent.rglob("*"))
    monkeypatch.setattr(tuning, "compare", Here())
    found = tuning.tune(asked(privacy={"clip": 0.5, "epsilon": 8, "secure_rng": True}), tmp_path / "tuned")
    left = [path for path in set(keys.folder().parent.rglob("*")) - known if path.is_file()]
    winner = Opening.read(tmp_path / "tuned" / WINNER).run
    assert found.winner is not None and {path.name for path in left} == {winner, f"{winner}.checkpoints"}
    assert checks(tmp_path / "tuned") == []


def test_nothing_is_charged_where_there_are_no_data(tmp_path: Path) -> None:
    found = asked()
    nothing = found.recipe.data.model_copy(update={"dataset": str(tmp_path / "nowhere.csv")})
    gone = replace(found, recipe=found.recipe.model_copy(update={"data": nothing}))
    with pytest.raises((InputError, RunError), match="nowhere"):
        tuning.tune(gone, tmp_path / "tuned")
    assert (tmp_path / "tuned" / CHARGE).read_bytes() == b""


@pytest.mark.parametrize("place", ["file", "elsewhere"])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InputError, match="--out"):
        tuning.tune(asked(), tmp_path / "note.txt" if place == "file" else tmp_path)


def test_records_that_do_not_fit_are_found(tmp_path: Path, tuned: tuple[Path, Here, tuning.Selected]) -> None:
    folder, found = tmp_path / "tuned", asked()
    shutil.copytree(tuned[0], folder)
    path = folder / WINNER / "privacy.json"
    good, public, charge = path.read_bytes(), (folder / PUBLIC).read_text(), (folder / CHARGE).read_bytes()
    one = account.alone(found.plan).epsilon()
    assert not verify(read(folder / WINNER / "ledger.jsonl"), one).ok  # the statement of one trial
    path.write_text(json.dumps({**json.loads(good), "proven_epsilon": 9.0}))
    assert any("was charged" in fault for fault in checks(folder))
    path.write_bytes(good)
    (folder / PUBLIC).write_text(public.replace("log:0.05", "log:0.01"))
    assert any("not what was charged" in fault for fault in checks(folder))
    (folder / PUBLIC).write_text(public)
    (folder / CHARGE).write_bytes(charge.replace(b"selection", b"selectiom", 1))
    assert any("edited" in fault or "checksum" in fault for fault in checks(folder))
    line = json.loads(charge)
    for name, value in (("noise_multiplier", 50.0), ("delta", 1e-9), ("clients", 10**6), ("rounds", 1)):
        facts = {key: each for key, each in line.items() if key not in CHAIN}
        (folder / CHARGE).write_text(
            json.dumps(seal({**facts, name: value}, 0, line["previous"]), separators=(",", ":")) + "\n"
        )
        assert any(f"{CHARGE} has another {name}" in fault for fault in checks(folder))
    (folder / CHARGE).write_bytes(b"")
    assert any("0 lines" in fault for fault in checks(folder))
    (folder / CHARGE).write_bytes(charge)
    (folder / PUBLIC).unlink()
    assert any("cannot be read" in fault for fault in checks(folder))


def test_scores_are_of_public_examples_that_are_no_test_data() -> None:
    section = DataSection(dataset="digits", clients=20, validation_fraction=0.25)
    whole, rest = load(section.model_copy(update={"validation_fraction": 0.0}), 3), load(section, 3)
    inputs, targets = load_validation(section, 3)
    assert whole.test_inputs is not None and rest.test_inputs is not None and len(inputs) == len(targets)
    assert len(inputs) == round(0.25 * len(whole.test_inputs)) == len(whole.test_inputs) - len(rest.test_inputs)
    assert torch.equal(whole.inputs, rest.inputs)
    rows = [{row.numpy().tobytes() for row in some} for some in (inputs, rest.test_inputs, whole.test_inputs)]
    assert rows[0] | rows[1] == rows[2]
    assert len(rows[0] & rows[1]) <= len(rest.test_inputs) + len(inputs) - len(rows[2])  # but for equal images
    for wrong in ({"validation_fraction": 0.0}, {"test_fraction": 0.0}):
        with pytest.raises(InputError, match="validation_fraction"):
            load_validation(section.model_copy(update=wrong), 3)


def test_a_release_without_a_finite_score_never_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tuning.trial_recipe(asked(), {"name": "a" * 16, "settings": {}})
    module = torch.nn.Linear(3, 1)
    monkeypatch.setattr("fedflat.simulation.result.load", lambda path: type("Loaded", (), {"model": module}))
    regression, public = recipe.model_copy(update={"task": "regression"}), (torch.ones(7, 3), torch.zeros(7))
    assert -1e3 < tuning.score(tmp_path, regression, *public) <= 0
    torch.nn.init.constant_(module.weight, float("nan"))
    assert tuning.score(tmp_path, regression, *public) == -1e300


def test_a_random_process_has_the_form_of_the_data() -> None:
    recipe = Recipe.of({**SMALL, "data": {**SMALL["data"], "partition": {"kind": "dirichlet", "alpha": 0.6}}})  # type: ignore[dict-item]
    real = data_of(recipe, None, None)
    there = proxy.on_proxy(recipe, real)
    made, again = (data_of(there, None, None) for _ in range(2))
    assert made.input_shape == real.input_shape and (made.clients, made.classes) == (real.clients, real.classes)
    assert made.examples_per_client == real.examples_per_client and len(made.test_targets) == len(real.test_targets)  # type: ignore[arg-type]
    assert made.fingerprint() == again.fingerprint() and not torch.equal(made.inputs[0], made.inputs[1])
    assert made.inputs.std() == pytest.approx(1, abs=0.02) and len(set(made.sizes.tolist())) > 5
    assert there.data.partition.alpha == 0.6 and made.name == there.data.dataset
    natural = recipe.model_copy(update={"data": DataSection(dataset="digits", partition="natural", clients=20)})
    assert proxy.on_proxy(natural, replace(real, test_inputs=None, test_targets=None)).data.partition.kind == "iid"


def test_a_class_of_a_random_process_can_be_learnt() -> None:
    images, targets = proxy.examples((3, 12, 10), 4, 600 + 200)
    x, y = images.flatten(1).double(), torch.nn.functional.one_hot(targets, 4).double()
    weights = torch.linalg.solve(x[:600].T @ x[:600] + 30 * torch.eye(360), x[:600].T @ y[:600])
    right = ((x[600:] @ weights).argmax(1) == targets[600:]).double().mean()
    assert images.shape == (800, 3, 12, 10) and right > 0.7


@pytest.mark.parametrize(
    "name", ["random-process/1x8/10/5+5", "random-process/2x8x8/10/5+5", "random-process/1x8x8/0/5+5"]
)
def test_a_form_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="1 or 3 channels"):
        proxy.form_of(name)


def test_keys_that_a_random_process_does_not_use_are_refused() -> None:
    with pytest.raises(InputError, match=r"data.max_test"):
        proxy.federation(DataSection(dataset="random-process/1x8x8/3/50+5", clients=5, max_test=3), 0)
    bound = proxy.federation(DataSection(dataset="random-process/1x8x8/3/50+5", clients=5, max_per_client=3), 0)
    assert max(bound.sizes) == 3 and bound.most == 3
    text = replace(bound, inputs=torch.zeros(50, 7, dtype=torch.int64))
    with pytest.raises(InputError, match="found inputs of shape 7"):
        proxy.on_proxy(Recipe.of(SMALL), text)


def test_a_search_on_a_proxy_writes_a_recipe_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Here()
    monkeypatch.setattr(tuning, "compare", ran)
    found = tuning.tune_on_proxy(
        Recipe.of(SMALL), ["local.lr=0.01,1", "algorithm.name=dp-fedavg,dp-fedsam"], 9, tmp_path
    )
    assert len(found.rows) == 4 and found.rows[0][1] == max(accuracy for _, accuracy in found.rows)
    assert all(proxy.is_proxy(recipe.data.dataset) for recipe in ran.recipes) and found.chosen is not None
    best = Recipe.load(found.chosen)
    assert best.data.dataset == "digits" and best.name == "small"
    assert f"{best.local.lr:g}" == found.rows[0][0]["local.lr"]
    assert (tmp_path / "settings.csv").read_text().splitlines()[0] == "local.lr,algorithm.name,accuracy"
    assert yaml.safe_load(found.chosen.read_text())["privacy"]["epsilon"] == 8
    drawn = tuning.settings_to_try(axes(["local.lr=log:0.01:1"], private=False), 5, 0)
    assert len(drawn) == 5 and len(tuning.settings_to_try(axes(["local.steps=whole:1:3"], private=False), 9, 0)) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--on", "prox"], "Did you mean proxy"),
        (["--on", "proxy", "--trials", "2.5", "--vary", "local.lr=1,2"], "a whole number"),
        (["--trials", "0.5", "--vary", "local.lr=1,2"], "trials: found 0.5"),
        ([], "--vary: found nothing"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command: Callable[..., Any], words: list[str], says: str) -> None:
    said = command("tune", "quick-start", *words)
    assert said.status == 2 and said.err.count("\n") == 1 and says in said.err


@pytest.mark.usefixtures("quick_workers")
def test_the_command(command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "compare", Here())
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    words = ["tune", "small.yaml", "--vary", "local.lr=0.1,1", "--trials", "2"]
    said = command(*words)
    assert said.status == 0, said.err
    assert "Private selection, 2 trials in the mean: total ε = 8.00" in said.out and "for the whole" in said.out
    again = command(*words, "--json")
    assert json.loads(again.out)["winner"] == "runs/tune-small/winner" and json.loads(again.out)["epsilon"] <= 8
    assert command("verify", "runs/tune-small").status == 0
    said = command(*words, "--on", "proxy")
    assert said.status == 0 and "no ε is spent" in said.out
    assert "fedflat run runs/tune-small-proxy/chosen.yaml" in said.out
    assert len(json.loads(command(*words, "--on", "proxy", "--json").out)["rows"]) == 2


@pytest.mark.parametrize("on", ["clients", "proxy"])
def test_trials_that_are_left_or_fail_select_nothing_and_end_with_status_1(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    half = Comparison(tmp_path, None, None, (), {"a": "out of memory"}, 2, 5)
    monkeypatch.setattr(tuning, "compare", lambda *_: half)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    said = command("tune", "small.yaml", "--vary", "local.lr=0.1,1", "--trials", "2", "--on", on)
    assert said.status == 1 and "1 trials failed, 2 are left (out of memory); the same command goes on" in said.err
    if on == "clients":
        assert "winner" not in json.loads((tmp_path / "runs" / "tune-small" / tuning.DRAW).read_text())


def test_no_score_is_taken_on_rows_of_natural_clients(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("\n".join(["who,a,label", *(f"{i % 5},{i},{i % 2}" for i in range(40))]))
    of = {"dataset": str(tmp_path / "people.csv"), "target": "label", "validation_fraction": 0.5, "inputs": ["a"]}
    assert len(load_validation({**of, "clients": 5, "partition": {"kind": "iid"}, "test_fraction": 0.2})[1]) == 4
    with pytest.raises(InputError, match="people has no public test data to set apart"):
        load_validation({**of, "partition": {"kind": "natural", "by": "who"}})
