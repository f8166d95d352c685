"""Every packaged recipe becomes a project or is refused in one line with exit status 2; no process is started."""

import sys
from pathlib import Path

import pytest
from stand_in import settings

from fedflat.cli import main as cli
from fedflat.config.method import algorithm_of
from fedflat.config.reading import names
from fedflat.config.recipe import Recipe
from fedflat.core.types import Algorithm
from fedflat.federation.project import PACKAGE, write_project
from fedflat.federation.server import job_of
from fedflat.federation.task import Task

CLIENTS = 6


def reason(recipe: Recipe, method: Algorithm) -> str | None:
    """What the recipe's own words say about why it has no sound form on real machines."""
    if recipe.privacy.protocol == "published":
        return "privacy.protocol: found published"
    if method.kind == "votes":
        return "algorithm.name: found ae-dpfl"
    return None


def small_form(recipe: Recipe) -> Recipe:
    """The recipe's method, privacy, cohort scheme and local training on six clients' digits with a tiny model.

    ddgauss as it is: its ε has no form for six clients, and its digits are packaged.
    """
    if algorithm_of(recipe).kind == "ddgauss":
        return recipe
    found = recipe.dump()
    found["data"] = {
        "dataset": "digits", "partition": {"kind": "iid"}, "clients": CLIENTS, "max_examples": 60, "max_test": 30,
        "client_test_fraction": recipe.data.client_test_fraction,
    }  # fmt: skip
    found["model"] = {"name": "mlp", "hidden": 4}
    found["cohort"] |= {"size": CLIENTS, "max": None, "min": None}
    found["local"] |= {"epochs": None, "steps": 2, "batch_size": 4}
    return Recipe.of(found)


@pytest.mark.parametrize("name", names())
def test_a_packaged_recipe_is_deployed_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = Recipe.load(name), tmp_path / "fed"
    expected = reason(recipe, algorithm_of(recipe))
    if expected is None:
        form = small_form(recipe)
        write_project(form, out)
        task = Task.read(out / "app" / PACKAGE)
        job = job_of(task, settings(out))  # the server's side of it stands
        assert task.form.clients == form.data.clients and job.parts.algorithm.name == algorithm_of(recipe).name
        return
    monkeypatch.setattr(sys, "argv", ["fedflat", "deploy", name, "--out", str(out)])
    with pytest.raises(SystemExit) as found:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert found.value.code == 2 and not out.exists()
    assert said.startswith(f"fedflat: {expected}; allowed: ") and "\n" not in said


def test_some_recipes_are_of_each_kind() -> None:
    found = {name: reason(Recipe.load(name), algorithm_of(Recipe.load(name))) for name in names()}
    assert found["mnist-ae-dpfl"] and found["cifar10-dp-fedsam-published"] and found["quick-start-ddgauss"] is None
    assert sum(reason is None for reason in found.values()) > len(found) / 2
