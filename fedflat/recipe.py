"""Recipes: YAML or a dict -> checked, frozen values. A mistake is one line: where, what, and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedflat.core.checks import InputError, nearest, wrong

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, no silent conversions of text to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


def _named(value: Any) -> Any:
    """``model: cnn`` is short for ``model: {name: cnn}``."""
    return {"name": value} if isinstance(value, str) else value


class Partition(Section):
    """How examples are given to clients."""

    kind: Literal["iid", "dirichlet", "classes", "natural"] = "iid"
    alpha: Positive | None = None
    per_client: Annotated[int, Field(ge=1)] | None = None
    by: str | None = None


class DataSection(Section):
    """Which examples, and how they are spread over clients."""

    dataset: str = "digits"
    partition: Annotated[Partition, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = Partition()
    clients: Annotated[int, Field(ge=1)] | None = None
    client_test_fraction: Share = 0.0
    input: str | list[str] | None = None
    label: str | None = None
    test_fraction: Share | None = None
    max_examples: Annotated[int, Field(ge=1)] | None = None
    max_test: Annotated[int, Field(ge=1)] | None = None
    tokenizer: str | None = None
    max_length: Annotated[int, Field(ge=1)] | None = None
    vocabulary: Annotated[int, Field(ge=3)] | None = None


class NamedSection(Section):
    """A name and the options that its factory takes; they are checked by the factory's signature."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class LocalSection(Section):
    """Local training; ``epochs`` becomes one public step count K = E·⌈n̄/batch⌉ for everybody."""

    steps: Annotated[int, Field(ge=1)] | None = None
    epochs: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 50
    lr: Positive = 0.1
    momentum: Share | None = None
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive | None = None


class CohortSection(Section):
    """Who takes part in a round."""

    size: Annotated[float, Field(gt=0)]
    sampling: Literal["poisson", "truncated", "fixed"] = "poisson"
    max: Annotated[int, Field(ge=1)] | None = None
    min: Annotated[int, Field(ge=1)] | None = None
    max_participations: Annotated[int, Field(ge=1)] | None = None
    colluders: Annotated[int, Field(ge=0)] = 0


class ClipSection(Section):
    """A clip other than one constant."""

    kind: Literal["constant", "adaptive", "per-tensor", "median"]
    value: Positive | None = None
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    initial: Positive | None = None
    count_noise: Positive | None = None
    values: float | list[float] | None = None


class PrivacySection(Section):
    """The guarantee: exactly one of noise_multiplier and epsilon, unless the method is not private.

    trust: None is central, and distributed for ddgauss.
    """

    clip: float | ClipSection = 1.0
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    epsilon: Positive | None = None
    budget: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    trust: Literal["central", "distributed", "local"] | None = None
    protocol: Literal["sound", "published"] = "sound"
    published: Annotated[str | None, BeforeValidator(lambda v: f"{v:03d}" if type(v) is int else v)] = None
    accountant: str = "pld"
    secure_rng: bool = False
    noise_cohort: Positive | None = None


class ServerSection(Section):
    """What the server does with the noisy mean."""

    optimizer: Literal["sgd", "adam", "yogi"] = "sgd"
    lr: Positive = 1.0
    momentum: Share = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.99
    tau: Positive = 1e-3
    weights: Literal["uniform", "samples"] = "uniform"


class EngineSection(Section):
    """Where and how it runs; none of it changes what is computed beyond floating-point rounding.

    precision: of the layers' arithmetic; auto is fp32. bf16 holds on every back end but ``lowrank`` and
    ``vectorized-fp32``, which compute in float32 and are tried by ``backend: auto`` all the same.
    device: auto takes a GPU where there is one that agrees with the processor. processes: worker processes, threads, or
    streams of a GPU. compile: the model by torch.compile (None: on a GPU, in long runs, if it is measured faster).
    """

    device: str = "auto"
    backend: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    block: Annotated[int, Field(ge=1)] | None = None
    processes: Annotated[int, Field(ge=1)] | None = None
    compile: bool | None = None


class EvaluationSection(Section):
    """How often, in rounds, models are evaluated; the last round always is."""

    every: Annotated[int, Field(ge=1)] = 1
    personal_every: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 500


class Recipe(Section):
    """Everything that defines a run. Load one with ``Recipe.load``, or build it from a dict with ``Recipe.of``."""

    name: str = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=1)]
    data: DataSection = DataSection()
    model: Annotated[NamedSection, BeforeValidator(_named)] = NamedSection(name="cnn")
    algorithm: Annotated[NamedSection, BeforeValidator(_named)]
    local: LocalSection = LocalSection()
    cohort: CohortSection
    privacy: PrivacySection = PrivacySection()
    server: ServerSection = ServerSection()
    engine: EngineSection = EngineSection()
    evaluation: EvaluationSection = EvaluationSection()

    @classmethod
    def load(cls, source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """A packaged recipe by name, or a YAML file by path; ``overrides`` are ``key.path=value`` strings."""
        return cls.of(read(source), overrides, where=str(source))

    @classmethod
    def of(
        cls, value: Recipe | Mapping[str, Any] | str | Path, overrides: Iterable[str] = (), where: str = "recipe"
    ) -> Recipe:
        """A recipe from a Recipe, a dict, a packaged name or a path."""
        if isinstance(value, (str, Path)):
            return cls.load(value, overrides)
        mapping = value.dump() if isinstance(value, Recipe) else dict(value)
        mapping.pop("versions", None)
        for text in overrides:
            mapping = override(mapping, text)
        try:
            recipe = cls.model_validate(mapping)
        except ValidationError as error:
            raise _sentence(error, where) from None
        recipe._check(where)
        return recipe

    def dump(self) -> dict[str, Any]:
        """A plain dict with every default resolved."""
        return self.model_dump(mode="json")

    def _check(self, where: str) -> None:
        local, clip = self.local, self.privacy.clip
        if local.steps is not None and local.epochs is not None:
            raise wrong(f"{where}: local", "both steps and epochs", "one of them")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.engine.device):
            raise wrong(f"{where}: engine.device", self.engine.device, "auto, cpu, cuda or one of cuda:0, cuda:1, …")
        if not isinstance(clip, ClipSection) and not (clip > 0 and math.isfinite(clip)):
            raise wrong(f"{where}: privacy.clip", clip, "a number > 0, or {kind: adaptive, quantile: 0.5, initial: …}")
        if self.privacy.noise_multiplier is not None and self.privacy.epsilon is not None:
            raise wrong(f"{where}: privacy", "both noise_multiplier and epsilon", "one of them (epsilon is calibrated)")


FOLDER = Path(__file__).parent / "recipes"
QUICK_START = "quick-start"


def names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(source: str | Path, depth: int = 0) -> dict[str, Any]:
    """The mapping in a packaged recipe, a YAML file or a run folder's recipe.yaml."""
    import yaml

    path = Path(source)
    if path.is_dir():
        path = path / "recipe.yaml"
    if not path.is_file():
        packaged = FOLDER / f"{source}.yaml"
        if not packaged.is_file():
            raise _not_found(path, str(source))
        path = packaged
    try:
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        raise wrong(f"{path}{place}", getattr(error, "problem", str(error)) or "no YAML", "valid YAML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(str(path), f"a file that cannot be read ({error})", "a YAML file") from None
    if not isinstance(mapping, dict):
        found = "an empty file" if mapping is None else "no mapping"
        raise wrong(str(path), found, "recipe keys with values, for example rounds: 60")
    return _extended(mapping, path, depth)


def _not_found(path: Path, source: str) -> InputError:
    if path.parent.is_dir() and path.name == "recipe.yaml" and path.parent == Path(source):
        return wrong("recipe", f"the folder {source} without a recipe.yaml", "a YAML file, or the folder of a run")
    beside = [str(found) for ending in ("*.yaml", "*.yml") for found in path.parent.glob(ending)]
    allowed = "a YAML file, or a packaged recipe (fedflat list recipes)"
    return wrong(
        "recipe", f"no file and no packaged recipe {source}", allowed, hint=nearest(source, [*names(), *beside])
    )


def _extended(mapping: dict[str, Any], path: Path, depth: int) -> dict[str, Any]:
    """``extends: NAME`` takes another recipe (beside this file, or packaged) and changes the sections given here.

    A section's keys are merged one by one; ``algorithm`` and ``model`` are replaced whole, as their options belong to
    their name.
    """
    parent = mapping.pop("extends", None)
    if parent is None:
        return mapping
    if not isinstance(parent, str) or depth > 8:
        raise wrong(f"{path}: extends", parent, "the name or path of one other recipe, without a circle")
    beside = path.parent / parent
    merged = read(beside if beside.is_file() else parent, depth + 1)
    for key, value in mapping.items():
        old = merged.get(key)
        whole = key in ("algorithm", "model") or not (isinstance(old, dict) and isinstance(value, dict))
        merged[key] = value if whole else {**old, **value}  # type: ignore[dict-item]
    return merged


def _loader() -> Any:
    """YAML 1.2's floats: ``1e-5`` is a number."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def parse_value(text: str) -> Any:
    """The value of ``-o key=value``, as YAML reads it."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError:
        return text


def override(mapping: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A copy of ``mapping`` with one ``key.path=value`` applied.

    Naming another algorithm keeps the options that it takes as well and drops the others; naming another model drops
    all options.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise wrong("-o", text, "key.path=value, for example -o privacy.clip=0.5")
    path, changed = key.strip().split("."), dict(mapping)
    place: dict[str, Any] = changed
    for index, part in enumerate(path[:-1]):
        inner = place.get(part)
        if part in ("model", "algorithm") and index == 0:
            inner = _named(inner)
        if inner is not None and not isinstance(inner, Mapping):
            inner = None
        place[part] = dict(inner or {})
        place = place[part]
    parsed = parse_value(value)
    if path[-1] == "name" and path[0] in ("algorithm", "model") and len(path) == 2 and place.get("name") != parsed:
        _drop_foreign_options(path[0], place, parsed)
    place[path[-1]] = parsed
    return changed


def _drop_foreign_options(section: str, options: dict[str, Any], name: Any) -> None:
    """Keep only the options that the newly named algorithm takes too; a model's options belong to the model."""
    import inspect

    from fedflat.algorithms import ALGORITHMS

    factory = ALGORITHMS.get(str(name)) if section == "algorithm" else None
    taken = inspect.signature(factory).parameters if factory else {}
    for key in [key for key in options if key not in taken]:
        del options[key]


def _sentence(error: ValidationError, where: str) -> InputError:
    """The first mistake of a pydantic error as the one error sentence."""
    mistakes = error.errors()
    first = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    path = [str(p) for p in first["loc"] if p not in ("float", "ClipSection", "int", "str")]
    path = [p for p in path if not p.startswith(("function-", "list["))]
    place = f"{where}: {'.'.join(path)}"
    if first["type"] == "extra_forbidden":
        allowed = _fields(path[:-1])
        return wrong(place, path[-1], ", ".join(allowed), hint=nearest(path[-1], allowed))
    if first["type"] == "missing":
        return wrong(place, "nothing", "a value; the key is required")
    found = first["input"]
    if first["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", str(first["ctx"]["expected"]))
        return wrong(place, found, ", ".join(choices), hint=nearest(str(found), choices))
    return wrong(place, found, _allowed(first["msg"]))


def _allowed(message: str) -> str:
    """Pydantic's ``Input should be greater than or equal to 1`` as ``a number ≥ 1``."""
    text = re.sub(r"^Input should be ", "", message)
    for words, mark in (
        ("greater than or equal to", "≥"),
        ("less than or equal to", "≤"),
        ("greater than", ">"),
        ("less than", "<"),
    ):
        text = re.sub(rf"^{words} ", f"a number {mark} ", text)
    return text.split(", unable to")[0]


def _fields(path: list[str]) -> list[str]:
    """The keys allowed at a path of the recipe."""
    model: Any = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        found = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        model = found[0] if found else model
    return list(model.model_fields)
