"""The reference of recipe keys: complete, true to the schema, and on the page."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fedflat.algorithms import ALGORITHMS
from fedflat.config import reference
from fedflat.config.reading import override
from fedflat.config.recipe import Recipe
from fedflat.core.checks import InputError

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.markdown()


def test_every_key_of_a_recipe_has_a_meaning() -> None:
    dump = Recipe.of({"rounds": 1, "algorithm": "fedavg", "cohort": {"size": 1}, "privacy": {"clip": 1.0}}).dump()
    written = {f"{section}.{key}" for section, inside in dump.items() if isinstance(inside, dict) for key in inside}
    written -= {"model.name", "algorithm.name"}
    explained = {key.path for key in reference.recipe_keys()}
    assert written <= explained and all(key.meaning for key in reference.recipe_keys())


def test_every_key_of_a_method_has_a_meaning_and_no_other() -> None:
    taken = {name for factory in ALGORITHMS.values() for name in inspect.signature(factory).parameters}
    assert taken == reference.ALGORITHM_KEYS.keys()


@pytest.mark.parametrize("key", [key for key in reference.recipe_keys() if key.example and key.path.count(".") == 1])
def test_an_example_is_accepted(key: reference.Key) -> None:
    """As ``-o KEY=EXAMPLE`` of a recipe that has what the key needs beside it."""
    base = {"rounds": 2, "algorithm": "dp-fedavg", "cohort": {"size": 2}}
    Recipe.of(override(base, f"{key.path}={key.example}"))


def test_a_key_without_its_section_is_pointed_at() -> None:
    with pytest.raises(InputError, match=r"Did you mean privacy\.epsilon\?"):
        reference.explain("epsilon")
    with pytest.raises(InputError, match=r"Did you mean cohort\.size\?"):
        Recipe.of(override({"rounds": 1, "algorithm": "dp-fedavg", "cohort": {"size": 1}}, "size=3"))


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(InputError, match="no rounds, no algorithm, no cohort"):
        Recipe.of({"name": "x"})


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("rounds: 3\nrounds: 4\n")
    with pytest.raises(InputError, match=r"line 2: found the key rounds twice"):
        Recipe.load(tmp_path / "twice.yaml")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("server.beta1=0.5", r"server\.beta1: found 0.5; allowed: nothing with optimizer: sgd \(it is of adam, yogi\)"),
        (
            "server={optimizer: adam, momentum: 0.5}",
            r"server\.momentum: found 0.5; .* optimizer: adam \(it is of sgd\)",
        ),
        ("privacy.clip={kind: constant, value: 1, quantile: 0.3}", r"privacy\.clip\.quantile: found 0.3"),
        ("privacy.clip={kind: adaptive, initial: 1, values: 2}", r"privacy\.clip\.values: found 2.0"),
    ],
)
def test_a_key_of_another_choice_is_refused_not_ignored(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Recipe.load("quick-start", [override])
