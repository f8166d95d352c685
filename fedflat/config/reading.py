"""Read recipes, packaged ones or YAML files, with ``extends`` and ``-o key.path=value``; recipe.py checks them."""

import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedflat.config.sections import as_named
from fedflat.core import InputError, nearest, require, wrong

FOLDER = Path(__file__).parent / "recipes"
QUICK_START = "quick-start"
GIVEN = "given in Python"
"""In a run's recipe.yaml: the data set, or the model, that no name stands for; whoever needs it gives it again."""
NOT_HELD = (
    "the same model=… and clients=… given again in Python, for example fedflat.run(recipe, model, clients, out=…, "
    "resume=True)"
)


def names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(source: str | Path, depth: int = 0) -> dict[str, Any]:
    """Return the mapping in a packaged recipe, a YAML file or a run folder's recipe.yaml."""
    asked = Path(source, "recipe.yaml") if Path(source).is_dir() else Path(source)
    path = asked if asked.is_file() else FOLDER / f"{source}.yaml"
    if not path.is_file():
        raise _not_found(asked, str(source))
    if path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv", ".parquet", ".xlsx")):
        raise wrong(str(path), "a table", f"a recipe, which fedflat data {path} drafts")
    try:
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        place = f" line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        problem = (getattr(error, "problem", str(error)) or "no YAML").removeprefix("found ")
        raise wrong(f"{path}{place}", problem, "valid YAML") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(str(path), f"a file that cannot be read ({error})", "a YAML file") from None
    if not isinstance(mapping, dict):
        content = "an empty file" if mapping is None else "no mapping"
        raise wrong(str(path), content, "recipe keys with values, for example rounds: 60")
    return _extended(mapping, path, depth)


def advised(source: str | Path, mapping: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the packaged recipe of the method that an override names, under this one's name; else ``mapping``."""
    asked = [text.partition("=")[2].strip() for text in overrides if re.match(r"\s*algorithm(\.name)?\s*=", text)]
    # A file says what it means; only packaged recipes have advice for other methods.
    if not asked or Path(source).exists():
        return mapping
    method = as_named(mapping.get("algorithm"))
    family = str(source).removesuffix(f"-{method.get('name')}") if isinstance(method, Mapping) else str(source)
    if not (FOLDER / f"{family}-{asked[-1]}.yaml").is_file():
        return mapping
    return {**read(f"{family}-{asked[-1]}"), "name": mapping.get("name", str(source))}


def _not_found(path: Path, source: str) -> InputError:
    if path.parent.is_dir() and path.name == "recipe.yaml" and path.parent == Path(source):
        return wrong("recipe", f"the folder {source} without a recipe.yaml", "a YAML file, or the folder of a run")
    beside = [str(file) for ending in ("*.yaml", "*.yml") for file in path.parent.glob(ending)]
    allowed = "a YAML file, or a packaged recipe (fedflat list recipes)"
    of_data = [name for name in names() if name.startswith(f"{source}-")]
    hint = f"Of this data set there are {', '.join(of_data[:4])}." if of_data else ""
    hint = hint or nearest(source, [*names(), *{name.partition("-")[0] for name in names()}, *beside])
    return wrong("recipe", f"no file and no packaged recipe {source}", allowed, hint=hint)


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
        replaced = key in ("algorithm", "model") or not (isinstance(old, dict) and isinstance(value, dict))
        merged[key] = value if replaced else {**old, **value}  # type: ignore[dict-item]
    return merged


_FLOATS = (
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)  # fmt: skip
"""YAML 1.2's floats: ``1e-5`` is a number."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


_Loader.add_implicit_resolver(*_FLOATS)
_Dumper.add_implicit_resolver(*_FLOATS)


def dumped(values: Any, **form: Any) -> str:
    """Return values as YAML that ``read`` takes as they were: a text such as 12e3 in quotes. form: as in yaml.dump."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **form))


def parse_value(text: str) -> Any:
    """Return the value of ``-o key=value``, as YAML reads it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        require(text.strip()[:1] not in ("[", "{"), "-o", text, "YAML: put names with ? : # or , in quotes")
        return text


def override(mapping: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a copy of ``mapping`` with one ``key.path=value`` applied.

    Naming another algorithm keeps the options that it takes as well and drops the others; naming another model drops
    all options.
    """
    key, equals, value = text.partition("=")
    require(bool(equals and key.strip()), "-o", text, "key.path=value, for example -o privacy.clip=0.5")
    path, changed = key.strip().split("."), dict(mapping)
    place: dict[str, Any] = changed
    for index, part in enumerate(path[:-1]):
        inner = as_named(place.get(part)) if part in ("model", "algorithm") and index == 0 else place.get(part)
        place[part] = dict(inner) if isinstance(inner, Mapping) else {}
        place = place[part]
    parsed = parse_value(value)
    if path[-1] == "name" and path[0] in ("algorithm", "model") and len(path) == 2 and place.get("name") != parsed:
        _drop_foreign_options(path[0], place, parsed)
    place[path[-1]] = parsed
    return changed


def _drop_foreign_options(section: str, options: dict[str, Any], name: Any) -> None:
    """Keep only the options that the newly named algorithm takes too; a model's options belong to the model."""
    from fedflat.algorithms import ALGORITHMS

    factory = ALGORITHMS.get(str(name)) if section == "algorithm" else None
    taken = inspect.signature(factory).parameters if factory else {}
    for key in [key for key in options if key not in taken]:
        del options[key]
