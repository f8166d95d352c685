"""Self-contained pages from templates, which escape whatever is put into them: no page refers to a network."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


class Section(NamedTuple):
    """A section of a page. part: the macro of ``parts.html`` that shows ``content``; one without is left out."""

    key: str
    heading: str
    part: str
    content: Any


@dataclass(frozen=True)
class Table:
    """A table; the first column heads its rows. left: columns with their text on the left, from the first."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


@dataclass(frozen=True)
class Facts:
    """Names and their values, in order. A value is a text, a list of values, or Facts."""

    pairs: tuple[tuple[str, Any], ...]


def page(title: str, lead: str, sections: Sequence[Section], version: str, extra: str = "") -> str:
    """A page as text. extra: name of a style sheet and a script that it has besides ``page.css`` and ``page.js``."""
    style, script = ("".join(asset(f"{name}.{kind}") for name in ("page", extra) if name) for kind in ("css", "js"))
    return filled(
        "page.html",
        title=title,
        lead=lead,
        sections=[section for section in sections if section.content],
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=version,
    )


def filled(template: str, **values: Any) -> Markup:
    """A template with ``values`` in it, escaped."""
    return Markup(_environment().get_template(template).render(values))


def write(text: str, target: Path) -> Path:
    """Write a page to the file ``target``, replaced in one step."""
    draft = target.with_name(f".{target.name}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)
    return target


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("fedflat.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"px": "{:.1f}".format, "g": "{:g}".format}
    found.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return found


def asset(name: str) -> str:
    """A style sheet or script of the package."""
    return resources.files("fedflat.report").joinpath(name).read_text(encoding="utf-8")
