"""Check an entry for the public registry of differential privacy deployments before it is written.

OpenDP announced the registry in November 2025; its entries and schema are in
https://github.com/opendp/deployments-registry-data, ``schemas/deployments-schema.yaml``. ``registry.yaml`` says in our
own words what that schema allowed in commit 3e9c812 of 15 July 2026: the same names, the same values, nothing else. A
later schema may differ; entries are always drafts, for somebody to read and hand in.
"""

from __future__ import annotations

import datetime
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from fedflat.core.checks import InputError, nearest, wrong
from fedflat.report.wording import asset

SECTORS = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]
UNSAID = "not stated"


def _date(text: str) -> str:
    """Return ``text`` if it is a day as YYYY-MM-DD."""
    try:
        if datetime.date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise ValueError("a day as YYYY-MM-DD")


Day = Annotated[str, AfterValidator(_date)]
Names = Annotated[list[str], Field(min_length=1)]


class _Part(BaseModel):
    """A mapping of the schema: no other names, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


KINDS_OF_VALUES: dict[str, Any] = {
    "text": (str, ...),
    "texts": (Names, ...),
    "day": (Day, ...),
    "number": (float, ...),
    "sector": (SECTORS | None, None),
}


def _schema(said: Any) -> Any:
    """Return the type and default of a part of ``registry.yaml``: a kind, a list of what is allowed, or parts."""
    if isinstance(said, str):
        return KINDS_OF_VALUES[said]
    if isinstance(said, list):
        return (Literal[tuple(said)], ...)
    return (create_model("Part", __base__=_Part, **{name: _schema(part) for name, part in said.items()}), ...)


Entry = _schema(yaml.safe_load(asset("registry.yaml")))[0]
"""One file of the registry."""


def readable(text: str) -> str:
    """Return the text without control characters and marks that turn the direction of what follows."""
    return "".join(c for c in text if c in "\n\t" or (unicodedata.category(c) != "Cc" and c not in TURNING))


# With these marks a reader could be shown another text than the file holds.
TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class About(_Part):
    """What no run knows of itself, from the file given with ``--about``; all of it may be missing."""

    @field_validator("*", mode="before")
    @classmethod
    def _readable(cls, given: Any) -> Any:
        if isinstance(given, list):
            return [readable(one) if isinstance(one, str) else one for one in given]
        return readable(given) if isinstance(given, str) else given

    name: str | None = None
    curators: Names | None = None
    description: str | None = None
    intended_use: str | None = None
    region: str | None = None
    sector: SECTORS | None = None
    publication_date: Day | None = None
    contact: str | None = None
    authors: Names | None = None
    sources: str | None = None
    justification: str | None = None

    @property
    def missing(self) -> list[str]:
        """What an entry in the registry has to say, and nobody said."""
        asked = ("curators", "description", "intended_use", "region", "publication_date", "authors")
        return [name for name in asked if getattr(self, name) is None]


def read_about(path: Path) -> About:
    """Return the file given with ``--about``: YAML.

    Raises:
        InputError: it cannot be read, or a name or a value in it is not known.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise wrong("--about", f"{path} ({type(error).__name__})", "a YAML file of names and texts") from error
    if not isinstance(found, dict):
        raise wrong("--about", f"{path}, which holds no names", f"some of {', '.join(About.model_fields)}")
    given = {str(name): str(v) if isinstance(v, datetime.date) else v for name, v in found.items()}
    for name in given:
        if name not in About.model_fields:
            raise wrong(f"--about: {name}", name, ", ".join(About.model_fields), hint=nearest(name, About.model_fields))
    try:
        return About.model_validate(given)
    except ValidationError as error:
        raise _first_fault("--about", error) from error


KINDS = {"string_type": "a text", "list_type": "a list of texts, as [A, B]", "too_short": "at least one text"}
"""What is allowed where the kind of a value is wrong, by the validator's name for it."""


def _first_fault(where: str, error: ValidationError) -> InputError:
    fault: Any = error.errors()[0]
    allowed = fault.get("ctx", {}).get("expected") or KINDS.get(fault["type"])
    place = ".".join(map(str, fault["loc"]))
    return wrong(f"{where}: {place}", str(fault["input"]), str(allowed or fault["msg"]).removeprefix("Value error, "))


def checked(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry as the schema takes it, in its order, without what nobody gave.

    Raises:
        InputError: a name or a value that the schema does not know.
    """
    try:
        found: dict[str, Any] = Entry.model_validate(entry).model_dump(exclude_none=True)
        return found
    except ValidationError as error:
        raise _first_fault("registry entry", error) from error


def as_yaml(entry: dict[str, Any]) -> str:
    """Return the checked entry as text; dates stay text, no text is folded."""
    return yaml.safe_dump(checked(entry), sort_keys=False, allow_unicode=True, width=10**6)
