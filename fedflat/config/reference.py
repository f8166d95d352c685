"""Read every recipe key's type, default and meaning off the schema (``fedflat explain``)."""

import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedflat.config.recipe import Recipe
from fedflat.config.sections import ClipSection, NamedSection, section_in
from fedflat.core import nearest, wrong

EXAMPLE = "Example: "
PLURALS: dict[type, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}
ALGORITHM_KEYS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("algorithm_keys.yaml").read_text("utf-8"))
"""What each option of the named methods means."""


@dataclass(frozen=True)
class Key:
    """One recipe key, as people write it. ``example`` is empty where the meaning says enough."""

    path: str
    kind: str
    default: str
    meaning: str
    example: str = ""


def recipe_keys() -> list[Key]:
    """Return every key of a recipe, in the recipe's order; the methods' own keys last."""
    return [*_keys_of(Recipe, ""), *_algorithm_keys()]


def explain(path: str) -> list[Key]:
    """Return the key at a path, and all keys below it.

    Raises:
        InputError: no such key, with the nearest; a key without its section names its places.
    """
    known = recipe_keys()
    named = [key for key in known if f"{key.path}.name" == path and key.kind.startswith("a name")]
    if keys := named or [key for key in known if f"{key.path}.".startswith(f"{path}.")]:
        return keys
    paths = [key.path for key in known]
    same = [candidate for candidate in paths if candidate.rpartition(".")[2] == path]
    hint = f"Did you mean {' or '.join(same)}?" if same else nearest(path, paths)
    raise wrong("explain", path, "a recipe key, for example privacy.clip (fedflat explain lists all)", hint=hint)


def _keys_of(model: type[BaseModel], before: str) -> Iterator[Key]:
    for name, info in model.model_fields.items():
        path = before + name
        inner = section_in(info.annotation)
        meaning, _, example = " ".join((info.description or "").split()).partition(EXAMPLE)
        single = inner is None or issubclass(inner, (NamedSection, ClipSection))
        if single or name in ("partition", "noise", "selection"):
            yield Key(path, _kind(info), _default(info), meaning.strip(), example)
        if inner is not None and not issubclass(inner, NamedSection):
            yield from _keys_of(inner, path + ".")


def _algorithm_keys() -> Iterator[Key]:
    from fedflat.algorithms import ALGORITHMS

    for name, meaning in ALGORITHM_KEYS.items():
        defaults: dict[str, list[str]] = {}
        for method, factory in ALGORITHMS.items():
            if taken := inspect.signature(factory).parameters.get(name):
                defaults.setdefault(_as_text(taken.default), []).append(method)
        default = "; ".join(f"{value} ({', '.join(methods)})" for value, methods in defaults.items())
        yield Key(f"algorithm.{name}", "of some methods", default, meaning)


def _kind(info: FieldInfo) -> str:
    union = typing.get_origin(info.annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(info.annotation) if union else (info.annotation,)
    return " or ".join(dict.fromkeys([_part(part, info.metadata) for part in parts if part is not type(None)]))


def _part(annotation: Any, metadata: list[Any]) -> str:
    """Return one alternative of a type, as people write it."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _part(inside[0], [m for f in inside[1:] for m in (getattr(f, "metadata", None) or [f])])
    if origin is typing.Literal:
        return ", ".join(map(str, inside))
    if origin is list:
        return f"a list of {PLURALS.get(inside[0], 'value')}s"
    if isinstance(annotation, type) and issubclass(annotation, NamedSection):
        return "a name, or {name: …, with its options}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{kind: …, with its keys}" if "kind" in annotation.model_fields else "a map of its keys"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{sign} {getattr(m, mark):g}" for m in metadata for mark, sign in signs.items() if hasattr(m, mark)]
    return " ".join([PLURALS.get(annotation, "value"), " and ".join(limits)]).strip()


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "required"
    if isinstance(info.default, NamedSection):
        return info.default.name
    if isinstance(info.default, BaseModel):
        return str(getattr(info.default, "kind", "as below"))
    return _as_text(info.default)


def _as_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
