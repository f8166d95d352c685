"""Every packaged recipe parses, says what it is, builds its plan and has the ε that its first line names."""

import re
from pathlib import Path

import pytest

from fedflat.assembly.plans import plan_of
from fedflat.config.method import algorithm_of
from fedflat.config.reading import FOLDER, names
from fedflat.config.recipe import Recipe
from fedflat.models import build

TABLES = {
    "cifar10-dp-fedsam": (9.37, 9.37), "cifar10-dp-fedpgn": (13.46, 13.46),
    "cifar10-dp-fedpgn-100-clients": (11.28, 11.28), "emnist-dp-fedsam": (7.30, 7.30),
    "cifar10-dp-fedsam-published": (10.83, None), "cifar10-dp-fedsam-topk-published": (10.83, None),
    "cifar10-dp-fedpgn-published": (15.90, None), "cifar10-dp-fedpgn-100-clients-published": (14.07, None),
    "emnist-dp-fedsam-published": (8.58, None),
}  # fmt: skip
"""Claimed ε, and the proven one where the formula is what runs (docs/specification.md, "Published procedures")."""

SCRATCH = sorted((FOLDER.parents[2] / "benchmarks" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", names())
def test_it_parses_and_builds_its_plan(name: str) -> None:
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# .{10,124}$", first), first
    recipe = Recipe.load(name)
    assert recipe.name == name
    plan = plan_of(recipe, algorithm_of(recipe), recipe.data.clients or 1000)
    assert plan.protocol == ("published" if name.endswith("-published") else "sound")
    if plan.protocol == "published":
        claimed, proven = plan.mechanism.claimed(plan, plan.rounds), plan.epsilon()  # type: ignore[union-attr]
        assert claimed < proven
        assert "claimed" in first
    else:
        claimed = proven = plan.epsilon()
    if name in TABLES:
        assert claimed == pytest.approx(TABLES[name][0], abs=0.006)
        assert TABLES[name][1] is None or proven == pytest.approx(TABLES[name][1], abs=0.006)
    elif recipe.privacy.epsilon and plan.private:
        assert claimed == pytest.approx(recipe.privacy.epsilon, rel=1e-3) and claimed <= recipe.privacy.epsilon


def test_the_tables_recipes_exist() -> None:
    assert set(TABLES) <= set(names())


@pytest.mark.parametrize("name", ["cnn-2-layers", "cnn", "cnn-3", "resnet18"])
def test_their_models_exist(name: str) -> None:
    assert build(name, (1, 28, 28) if name.startswith("cnn-2") or name == "cnn" else (3, 32, 32), 10, 0)


@pytest.mark.parametrize("source", ["quick-start", "quick-start-dp-fedsam"])
def test_a_method_named_on_the_command_line_has_its_advised_settings(source: str) -> None:
    found = Recipe.load(source, ["algorithm.name=dp-fedpgn-ls", "rounds=3"])
    advised = Recipe.load("quick-start-dp-fedpgn-ls")
    assert found.algorithm == advised.algorithm and found.name == source and found.rounds == 3
    assert Recipe.load(source, ["algorithm.name=dp-fedpgn-ls", "algorithm.beta=0.9"]).algorithm.options["beta"] == 0.9
    assert Recipe.load(source, ["algorithm.name=dp-fedprox"]).algorithm.name == "dp-fedprox"  # advised by nobody


@pytest.mark.parametrize("name", ["quick-start", "mnist-cnn"])
def test_a_short_name_is_the_best_private_method_measured(name: str) -> None:
    """docs/flatness.md: DP-FedPGN is first or level with its smoothed form on both."""
    assert Recipe.load(name).algorithm == Recipe.load(f"{name}-dp-fedpgn").algorithm


@pytest.mark.parametrize("path", SCRATCH, ids=lambda path: path.stem)
def test_networks_from_scratch_are_files_of_the_benchmarks(path: Path) -> None:
    """A linear model beats these at their ε (docs/start.md), so they are not packaged."""
    recipe = Recipe.load(path)
    assert recipe.name == path.stem and path.stem not in names()
    assert plan_of(recipe, algorithm_of(recipe), 500).private == ("-dp-" in path.stem or path.stem.endswith("-cnn"))
