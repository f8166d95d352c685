"""The reference of recipe keys: complete, true to the schema, and on the page."""

import ast
import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn

import fedflat
from fedflat.algorithms import ALGORITHMS
from fedflat.config import reference
from fedflat.config.reading import dumped, override, parse_value
from fedflat.config.recipe import BESIDE_CLIENTS, Recipe
from fedflat.config.sections import DataSection, NamedSection, Only, section_in
from fedflat.core.checks import InputError

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == runpy.run_path(str(PAGE.with_name("recipe_page.py")))["markdown"]()


def test_every_key_of_a_recipe_has_a_meaning() -> None:
    dump = Recipe.of({"rounds": 1, "algorithm": "fedavg", "cohort": {"size": 1}, "privacy": {"clip": 1.0}}).dump()
    written = {f"{section}.{key}" for section, inside in dump.items() if isinstance(inside, dict) for key in inside}
    written -= {"model.name", "algorithm.name"}
    explained = {key.path for key in reference.recipe_keys()}
    assert written <= explained and all(key.meaning for key in reference.recipe_keys())


def test_every_key_of_a_method_has_a_meaning_and_no_other() -> None:
    taken = {name for factory in ALGORITHMS.values() for name in inspect.signature(factory).parameters}
    assert taken == reference.ALGORITHM_KEYS.keys()


def conditions(model: type[BaseModel] = Recipe, before: str = "") -> dict[str, list[Only]]:
    """Return every key of the schema, with the conditions that are declared beside it."""
    found: dict[str, list[Only]] = {}
    for name, info in model.model_fields.items():
        found[before + name] = [part for part in info.metadata if isinstance(part, Only)]
        inner = section_in(info.annotation)
        if inner is not None and not issubclass(inner, NamedSection):
            found |= conditions(inner, f"{before}{name}.")
    return found


BASE: dict[str, Any] = {"rounds": 3, "algorithm": "dp-fedavg", "cohort": {"size": 2}}
KEYS = {key.path: key for key in reference.recipe_keys()}


def test_every_key_is_read_and_has_an_effect_or_is_refused() -> None:
    """Each key's example is accepted where its condition holds, and refused by its name where it does not."""
    package = Path(reference.__file__).parents[1]
    trees = [ast.parse(file.read_text("utf-8")) for file in package.rglob("*.py") if file.parent.name != "config"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for path, only in conditions().items():
        assert path.rpartition(".")[2] in read | {"compile"}, f"{path} is read nowhere"
        example = KEYS[path].example if path in KEYS else ""
        if not example or path.startswith("privacy.selection."):
            continue
        if only and example == KEYS[path].default:  # a default is never refused
            example = str(float(example) / 2)
        fitting = override({**BASE, "data": {"client_test_fraction": 0.5}}, f"{path}={example}")
        for one in only:
            value = one.values[-1] if one.values else "true" if one.chooser == "evaluation.private" else 0.5
            if one.chooser != "privacy.clip.kind":
                with pytest.raises(InputError, match=rf"{path}: found .*; allowed: nothing with "):
                    Recipe.of(override(fitting, f"{one.chooser}={OTHER.get(path, FIRST[one.chooser])}"))
            fitting = override(fitting, f"{one.chooser}={value}")
        Recipe.of(fitting)


FIRST = {
    "cohort.sampling": "poisson", "data.client_test_fraction": "0", "evaluation.private": "false",
    "data.partition.kind": "iid", "privacy.noise.kind": "independent", "server.average": "none", "task": "regression",
    "server.optimizer": "sgd",
}  # fmt: skip
"""A value of each chooser beside which the keys that name it have no effect."""
OTHER = {"server.momentum": "adam"}


def test_no_key_of_the_data_is_ignored_beside_clients() -> None:
    pairs = [(torch.randn(3, 2), torch.tensor([0, 1, 1])) for _ in range(4)]
    for name in DataSection.model_fields:
        key = KEYS.get(f"data.{name}")
        recipe = {**BASE, "data": {name: parse_value(key.example) if key and key.example else "x"}}
        if name in BESIDE_CLIENTS:
            assert fedflat.run({**recipe, "privacy": {"noise_multiplier": 1.0}}, nn.Linear(2, 10), pairs).history
            continue
        with pytest.raises(InputError, match=rf"data\.{name}: found .*; allowed: nothing beside clients="):
            fedflat.run(recipe, nn.Linear(2, 2), pairs)
    with pytest.raises(InputError, match=r"2 faults: .*data\.scale.*\(2\) model: found mlp; .*beside model="):
        fedflat.run({**BASE, "model": "mlp", "data": {"scale": {"a": [0, 1]}}}, nn.Linear(2, 2), pairs)


def test_a_key_without_its_section_is_pointed_at() -> None:
    assert [key.path for key in reference.explain("model.name")] == ["model"]
    with pytest.raises(InputError, match=r"Did you mean privacy\.epsilon\?"):
        reference.explain("epsilon")


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({**BASE, "size": 3}, r"Did you mean cohort\.size\?"),
        (
            {**BASE, "algorithm": ALGORITHMS["dp-fedavg"]()},
            r"found Algorithm\(…\); .*: fedflat.run\(recipe, algorithm=…\)",
        ),
        ({"name": "x"}, "no rounds, no algorithm, no cohort"),
    ],
)
def test_what_is_no_recipe_is_told_where_it_belongs(recipe: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Recipe.of(recipe)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert parse_value(dumped("12e3")) == "12e3" != parse_value("12e3")
    (tmp_path / "twice.yaml").write_text("rounds: 3\nrounds: 4\n")
    with pytest.raises(InputError, match=r"line 2: found the key rounds twice"):
        Recipe.load(tmp_path / "twice.yaml")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("server.beta1=0.5", r"server\.beta1: found 0.5; allowed: nothing with optimizer: sgd \(it is of adam, yogi\)"),
        ("server={optimizer: adam, momentum: 0.5}", r"server\.momentum: found 0.5; .* adam \(it is of sgd\)"),
        ("privacy.clip={kind: constant, value: 1, quantile: 0.3}", r"privacy\.clip\.quantile: found 0.3"),
        ("privacy.clip={kind: adaptive, initial: 1, values: 2}", r"privacy\.clip\.values: found 2"),
        ("privacy.clip={kind: adaptve, initial: 1}", r"privacy\.clip\.kind: found adaptve; .*Did you mean adaptive\?"),
        ("privacy.clip={kind: adaptive, initial: 1, quantile: 1.5}", r"quantile: found 1.5; allowed: a number < 1"),
        ("privacy.clip={initial: 1}", r"found no privacy\.clip\.kind"),
    ],
)
def test_a_key_of_another_choice_is_refused_not_ignored(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Recipe.load("quick-start", [override])
