"""Fill in templates, and write numbers as every table, page and command shows them."""

import functools
import html
import json
import math
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined, select_autoescape
from markupsafe import Markup

from fedflat.report.groups import Spread
from fedflat.report.metrics import epsilon_text, number


def text(template: str, **values: Any) -> str:
    """Return a template with ``values`` in it, which HTML and SVG escape."""
    return environment().get_template(template).render(values)


def filled(template: str, **values: Any) -> Markup:
    """Return a template of HTML or SVG with ``values`` in it, as markup that a page takes as it is."""
    return Markup(text(template, **values))


@functools.cache
def environment(package: str = "fedflat.report") -> Environment:
    """Return the environment that a package's templates are read from, with the filters that they call."""
    env = Environment(
        loader=PackageLoader(package), autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    env.filters |= {"px": "{:.1f}".format, "g": "{:g}".format, "g7": "{:.7g}".format, "markdown": _markdown}
    env.filters |= {"epsilon": epsilon_text, "percent": percent, "duration": duration}
    env.filters |= {"cell": lambda text: text.translate(CELL), "latex": lambda text: text.translate(LATEX)}
    env.filters |= {"quoted": functools.partial(json.dumps, ensure_ascii=False), "shell": shlex.quote}
    env.filters |= {"share_bound": share_bound, "measured": measured, "number": number}
    env.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    return env


def _markdown(text: str) -> str:
    """Return a text in one line whose marks Markdown and HTML do not read."""
    return " ".join(re.sub(r"[\\`*_\[\]|#]", r"\\\g<0>", html.escape(text, quote=False)).split())


def texts(name: str, values: Mapping[str, Any]) -> Any:
    """Return a YAML file of templates as a tree of plain texts, without those that are empty.

    A list has an item for each line. A value that is missing is an empty text.
    """
    return _filled_in(yaml.safe_load(asset(name)), values)


def _filled_in(tree: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(tree, Mapping):
        pairs = ((_filled_in(key, values), _filled_in(value, values)) for key, value in tree.items())
        return {key: value for key, value in pairs if value not in ("", [])}
    if isinstance(tree, list):
        return [line for item in tree for line in _filled_in(item, values).split("\n") if line]
    if not isinstance(tree, str):
        return tree
    lines = environment().overlay(autoescape=False, undefined=Undefined).from_string(tree).render(values).split("\n")
    return "\n".join(words for line in lines if (words := " ".join(line.split())))


CELL = str.maketrans({"\\": "\\\\", "|": "\\|", "\n": " ", "<": "&lt;"})
"""How a cell of a Markdown table writes marks."""
LATEX = str.maketrans({
    "\\": "\\textbackslash{}",
    **{mark: "\\" + mark for mark in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "ε": "$\\varepsilon$",
    "∞": "$\\infty$",
    "Δ": "$\\Delta$",
    "−": "$-$",
    "–": "--",
    "\n": " ",
})  # fmt: skip


def asset(name: str) -> str:
    """Return a style sheet or script of the package."""
    return resources.files("fedflat.report").joinpath(name).read_text(encoding="utf-8")


def percent(value: float | None) -> str:
    """Return a share as per cent with two decimals, without the sign."""
    return "–" if value is None else f"{100 * value:.2f}"


def percent_spread(value: Spread | None) -> str:
    """Return ``78.41 ± 0.32``, in per cent."""
    if value is None:
        return "–"
    return percent(value.mean) + ("" if value.sd is None else f" ± {percent(value.sd)}")


DAYS = 2 * 86_400
"""Seconds from which a duration is in days."""


def duration(value: float | None) -> str:
    """Return the seconds in the unit a reader wants: ``8.2 s``, ``3 min 05 s``, ``2 h 10 min``, ``40 d``."""
    if value is None:
        return "–"
    if value < 59.95:
        return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
    if value >= DAYS:
        return f"{value / 86_400:.0f} d"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def shortened(name: str, most: int = 20) -> str:
    """Return a name that is too long without its middle."""
    return name if len(name) <= most else name[: most // 2] + "…" + name[-(most - most // 2 - 1) :]


def measured(value: float) -> str:
    """Return a loss or another measured number with four digits, as every table, page and command prints it."""
    return f"{value:,.0f}" if 9_999.5 <= abs(value) < 1e12 else f"{value:.4g}"


def share_bound(value: float) -> str:
    """Return a share in per cent, rounded up in its third digit: it is a bound."""
    percent = 100 * value
    digits = max(0, 2 - math.floor(math.log10(percent))) if percent > 0 else 0
    # A bound must not be rounded down.
    return f"{min(math.ceil(percent * 10**digits - 1e-9) / 10**digits, 100):.{digits}f} %"
