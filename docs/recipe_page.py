"""Write docs/recipe.md, the list of recipe keys, from the schema.

Run it: python docs/recipe_page.py > docs/recipe.md
"""

import re

from fedflat.config.recipe import UNLISTED
from fedflat.config.reference import Key, recipe_keys


def markdown() -> str:
    """Return docs/recipe.md: a list for each section, with what a key means in short."""
    lines = [
        "# Recipe keys",
        "",
        "Find the key to change here, then ask for its type, limits, whole meaning and an example:",
        "",
        "```sh",
        "fedflat explain privacy.clip",
        "```",
        "",
        "In brackets: the default, then the other values to choose from. A key is written in YAML, in a dict, or as",
        "`-o KEY=VALUE`. Made from the schema by `python docs/recipe_page.py > docs/recipe.md`.",
    ]
    sections: dict[str, list[Key]] = {}
    for key in recipe_keys():
        if not key.path.startswith(UNLISTED) or key.path == "data.inputs":
            sections.setdefault(key.path.rpartition(".")[0], []).append(key)
    for name, inside in sections.items():
        lines += ["", f"## {name or 'The recipe'}", ""]
        lines += [f"- `{key.path}`{_in_brackets(key)}: {_short(key)}" for key in inside]
    return "\n".join(lines) + "\n"


def _in_brackets(key: Key) -> str:
    """Return the values that a key chooses from, its default first, or its default alone."""
    default = [] if key.default in ("none", "", "()") else [key.default]
    found = ", ".join([*default, *(choice for choice in _choices(key) if choice not in default)])
    return f" ({found})" if found else ""


def _choices(key: Key) -> list[str]:
    return key.kind.split(", ") if re.fullmatch(r"[\w-]+(, [\w-]+)+", key.kind) else []


def _short(key: Key) -> str:
    """Return the first sentence of a key's meaning, and those on None and on each value to choose."""
    first, *rest = re.split(r"(?<=(?<!et al)[.]) (?=[^\W\d])", key.meaning)
    kept = {"None", *_choices(key)}
    return " ".join([first, *(said for said in rest if said.partition(":")[0].partition(" (")[0] in kept)])


if __name__ == "__main__":
    print(markdown(), end="")
