"""``fedflat explain``: what a recipe key means."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedflat.config.reference import Key

WIDTH = 80


def explain(
    key: Annotated[str, typer.Argument(help="A recipe key, or a section. Default: all keys, one line each.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """A recipe key: type, default, meaning, when to change it.

    Example: fedflat explain privacy.clip
    """
    from fedflat.config import reference

    found = reference.explain(key) if key else reference.recipe_keys()
    if as_json:
        print(json.dumps([asdict(each) for each in found], ensure_ascii=False, indent=2))
    elif key:
        print("\n\n".join(map(_paragraph, found)))
    else:
        for each in found:
            print(f"{each.path:31}{textwrap.shorten(each.meaning, WIDTH - 31, placeholder=' …')}")


def _paragraph(key: Key) -> str:
    lines = [f"{key.path}: {key.kind}; {key.default if key.default == 'required' else f'default {key.default}'}"]
    lines += textwrap.wrap(key.meaning, WIDTH - 2)
    if key.example:
        lines.append(f"-o {key.path}={key.example}" if " " not in key.example else f"-o '{key.path}={key.example}'")
    return "\n  ".join(line for piece in lines for line in textwrap.wrap(piece, WIDTH - 2, break_on_hyphens=False))
