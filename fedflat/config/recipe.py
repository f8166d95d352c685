"""Check recipes: from YAML or a dict to frozen values; a mistake is one line: where, what, what is allowed."""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from fedflat.config import sections
from fedflat.config.reading import GIVEN, advised, override, read
from fedflat.config.sections import Only, Section, as_named, section_in
from fedflat.core import InputError, nearest, raise_all, require, wrong


class Recipe(Section):
    """Everything that defines a run. Load one with ``Recipe.load``, or build it from a dict with ``Recipe.of``."""

    name: str = "run"
    """What the run is called; the folder's name where none is given. Example: mine"""
    seed: Annotated[int, Field(ge=0)] = 0
    """Drives what is public: partition, first weights, batches and public masks. With privacy.randomness: seeded it
    drives cohorts and noise too. Example: 1"""
    rounds: Annotated[int, Field(ge=1)]
    """T, the number of rounds. More rounds need more noise for the same ε. Example: 60"""
    data: sections.DataSection = sections.DataSection()
    """Which examples, and how they are spread over clients."""
    model: Annotated[sections.NamedSection, BeforeValidator(as_named)] = sections.NamedSection(name="cnn")
    """A name of fedflat list models with its options, or an import path. Example: {name: mlp, hidden: 32}"""
    task: Literal["classification", "multilabel", "regression", "next-token"] = "classification"
    """What is learnt, which decides the loss and what targets must be: class numbers (cross-entropy), a 0 or 1 for each
    label (binary cross-entropy), numbers (squared error), or the next token at each place. Example: regression"""
    loss: str | None = None
    """A loss of one's own, my_file.py:my_loss: (outputs, targets) -> loss of each example. None: the task's.
    Example: my_file.py:my_loss"""
    algorithm: Annotated[sections.NamedSection, BeforeValidator(as_named)]
    """A name of fedflat list algorithms with its options, or my_file.py:my_method. Example: {name: dp-fedsam, rho:
    0.05}"""
    local: sections.LocalSection = sections.LocalSection()
    """Local training, the same public numbers for every client."""
    cohort: sections.CohortSection
    """Who takes part in a round."""
    privacy: sections.PrivacySection = sections.PrivacySection()
    """The guarantee: exactly one of noise_multiplier and epsilon, unless the method is not private."""
    server: sections.ServerSection = sections.ServerSection()
    """What the server does with the noisy mean."""
    engine: sections.EngineSection = sections.EngineSection()
    """Where and how it runs; none of it changes what is computed beyond rounding."""
    evaluation: sections.EvaluationSection = sections.EvaluationSection()
    """How often models are evaluated; the last round always is."""

    @classmethod
    def load(cls, source: str | Path, overrides: Iterable[str] = ()) -> "Recipe":
        """Return a packaged recipe by name, or a YAML file by path; ``overrides`` are ``key.path=value`` strings.

        An override that names another method takes what the packaged recipe NAME-METHOD advises, if there is one.
        """
        overrides = list(overrides)
        return cls.of(advised(source, read(source), overrides), overrides, where=str(source))

    @classmethod
    def of(
        cls, value: "Recipe | Mapping[str, Any] | str | Path", overrides: Iterable[str] = (), where: str = "recipe"
    ) -> "Recipe":
        """Return a recipe from a Recipe, a dict, a packaged name or a path."""
        if isinstance(value, (str, Path)):
            return cls.load(value, overrides)
        if not isinstance(value, (Recipe, Mapping)):
            raise wrong(where, type(value).__name__, "a packaged name, a path, a dict or a Recipe")
        mapping = value.dump() if isinstance(value, Recipe) else dict(value)
        mapping.pop("versions", None)
        for text in overrides:
            mapping = override(mapping, text)
        try:
            recipe = cls.model_validate(_texts(mapping))
        except ValidationError as error:
            raise _sentence(error, where) from None
        recipe._check(where)
        return recipe

    def dump(self) -> dict[str, Any]:
        """Return a plain dict with every default resolved."""
        return self.model_dump(mode="json")

    def _check(self, where: str) -> None:
        local, clip = self.local, self.privacy.clip
        require(None in (local.steps, local.epochs), f"{where}: local", "both steps and epochs", "one of them")
        if local.warmup > self.rounds:
            raise wrong(f"{where}: local.warmup", local.warmup, f"at most {self.rounds}, the number of rounds")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.engine.device):
            raise wrong(f"{where}: engine.device", self.engine.device, "auto, cpu, cuda or one of cuda:0, cuda:1, …")
        if not isinstance(clip, sections.ClipSection) and not (clip > 0 and math.isfinite(clip)):
            raise wrong(f"{where}: privacy.clip", clip, "a number > 0, or {kind: adaptive, quantile: 0.5, initial: …}")
        # With the server's defaults filled in: ``momentum`` needs sgd, which None may stand for.
        filled = self.model_copy(update={"server": self.server.filled()})
        for key, value, only, chosen in _without_effect(filled, filled, ""):
            why = f"nothing with {only.chooser.rpartition('.')[2]}: {chosen}"
            hint = "" if only.values else f"Set {only.chooser} too."
            of = f" (it is of {', '.join(only.values)})" if only.values else ""
            raise wrong(f"{where}: {key}", value, why + of, hint=hint)
        if self.privacy.noise_multiplier is not None and self.privacy.epsilon is not None:
            raise wrong(f"{where}: privacy", "both noise_multiplier and epsilon", "one of them (epsilon is calibrated)")


RecipeLike = Recipe | Mapping[str, Any] | str | Path
"""A recipe, its mapping, the name of one that comes with fedflat, or a file's path."""


def _without_effect(recipe: Recipe, section: Section, before: str) -> Iterator[tuple[str, Any, Only, Any]]:
    """Yield every key that differs from its default and whose condition (``Only``) the recipe does not fulfil, with
    the value that the condition is about."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _without_effect(recipe, value, f"{before}{name}.")
            continue
        for only in (item for item in info.metadata if isinstance(item, Only)):
            chosen = functools.reduce(getattr, only.chooser.split("."), recipe)
            if value != info.default and not only.holds(chosen):
                yield f"{before}{name}", value, only, chosen


def refuse_beside(recipe: Recipe, given: Mapping[str, bool], written: Iterable[str] = ()) -> None:
    """Refuse keys that have no effect because something else was given in Python in their place.

    given: the argument's name -> whether it was given. written: keys of the data section that are refused with their
    defaults too. Keys that fedflat wrote into a run's recipe pass.

    Raises:
        InputError: with every such key in one line.
    """
    keys: list[tuple[str, str, Any]] = []
    if recipe.data.dataset != GIVEN:
        for name, info in type(recipe.data).model_fields.items():
            value = getattr(recipe.data, name)
            if name not in BESIDE_CLIENTS and (name in written or value != info.default):
                plain = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
                keys.append(("clients", f"data.{name}", plain))
    if recipe.model.name != GIVEN and recipe.model != Recipe.model_fields["model"].default:
        keys.append(("model", "model", recipe.model.name))
    if recipe.loss not in (None, GIVEN):
        keys.append(("loss", "loss", recipe.loss))
    refused = [(key, value, argument) for argument, key, value in keys if given.get(argument)]
    allowed = "nothing beside {}=, which takes its place"
    raise_all([wrong(key, value, allowed.format(name), hint=HINTS.get(name, "")) for key, value, name in refused])


BESIDE_CLIENTS = ("client_test_fraction", "examples_per_client", "classes")
"""Keys of the data section that have an effect beside ``clients=``."""
HINTS = {"clients": "Leave it out of the recipe; fedflat.clients(table, …) takes what is said of a table."}


def _sentence(error: ValidationError, where: str) -> InputError:
    """Return the first mistake of a pydantic error as the one error sentence."""
    mistakes = error.errors()
    # Where a number or a section may stand and a section was given, its own mistake is meant.
    scalar = [{*m["loc"][-1:]} < {"float", "int", "str"} and isinstance(m["input"], Mapping | list) for m in mistakes]
    mistakes = [m for m, other in zip(mistakes, scalar) if not other] or mistakes
    # A key that is not known first: others may be wrong because of its name.
    first = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    if first["type"] == "value_error" and isinstance(first["ctx"]["error"], InputError):
        return InputError(f"{where}: {first['ctx']['error']}")
    path = _path(first)
    place = f"{where}: {'.'.join(path)}"
    if first["type"] == "extra_forbidden":
        allowed = _fields(path[:-1])
        return wrong(place, path[-1], ", ".join(allowed), hint=(elsewhere(path[-1]) or nearest(path[-1], allowed)))
    value = first["input"]
    if path[:2] == ["data", "scale"] and path[2:]:
        return wrong(f"{where}: {'.'.join(path[:3])}", value, "[mean, std], two public numbers, std > 0")
    if first["type"] == "missing":
        missing = [".".join(_path(m)) for m in mistakes if m["type"] == "missing" and "scale" not in m["loc"]]
        example = "a value for each; for example rounds: 60, cohort: {size: 50}"
        return wrong(where, f"no {', no '.join(missing)}", example)
    if first["type"] == "model_type":
        wanted, hint = f"a section with some of {', '.join(_fields(path))}", ""
        if not isinstance(value, str | int | float | list | None):
            value, hint = f"{type(value).__name__}(…)", f"Beside the recipe: fedflat.run(recipe, {path[0]}=…)."
        return wrong(place, value, wanted, hint=hint)
    if first["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", str(first["ctx"]["expected"]))
        return wrong(place, value, ", ".join(choices) or first["ctx"]["expected"], hint=nearest(str(value), choices))
    return wrong(place, value, _allowed(first["msg"]))


def _path(mistake: Mapping[str, Any]) -> list[str]:
    """Return the keys that lead to a mistake, without pydantic's names of the types that were tried."""
    path = [str(p) for p in mistake["loc"] if p not in ("float", "ClipSection", "int", "str")]
    return [p for p in path if not p.startswith(("function-", "list["))]


def _texts(value: Any) -> Any:
    """Return the same with a pathlib path, as ``data.dataset`` may be in Python, as text."""
    if isinstance(value, Mapping):
        return {key: _texts(inside) for key, inside in value.items()}
    return str(value) if isinstance(value, Path) else value


def elsewhere(name: str) -> str:
    """Return a sentence naming the keys of that name inside sections, or the empty string."""
    inside = {section: section_in(info.annotation) for section, info in Recipe.model_fields.items()}
    places = [f"{section}.{name}" for section, model in inside.items() if model and name in model.model_fields]
    return f"Did you mean {' or '.join(places)}?" if places else ""


def _allowed(message: str) -> str:
    """Pydantic's ``Input should be greater than or equal to 1`` as ``a number ≥ 1``."""
    text = re.sub(r"^Input should be ", "", message).replace("a valid integer", "a whole number")
    text = text.replace("a valid boolean", "true or false").replace("a valid ", "a ")
    signs = {"greater than or equal to": "≥", "less than or equal to": "≤", "greater than": ">", "less than": "<"}
    for words, mark in signs.items():
        text = re.sub(rf"^{words} ", f"a number {mark} ", text)
    return text.split(", unable to")[0].split(", got a")[0]


def _fields(path: list[str]) -> list[str]:
    """Return the keys allowed at a path of the recipe."""
    model: type[BaseModel] = Recipe
    for part in path:
        model = section_in(model.model_fields[part].annotation) or model
    return [name for name in model.model_fields if ".".join([*path, name]) not in UNLISTED]


UNLISTED = ("data.input", "data.label", "privacy.selection", "engine.compile")
"""Old keys, and those that ``fedflat tune`` writes: ``fedflat explain`` knows them; docs and messages list none."""
