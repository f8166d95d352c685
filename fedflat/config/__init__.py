"""A recipe: its keys, their meaning, and the packaged ones.

Example::

    recipe = Recipe.load("quick-start", ["rounds=10", "privacy.clip=0.5"])  # or Recipe.of({...}), or a YAML file
    explain("privacy.clip")                                                 # what ``fedflat explain`` prints

``sections`` declares each key once, with its limits and a docstring that the reference shows; ``reading`` takes YAML,
``extends`` and ``-o key=value``; ``recipe`` checks, and says in a line what is wrong; ``reference`` has docs/recipe.md.
"""

from __future__ import annotations

from typing import Any

from fedflat.core.imports import opened

_PLACES = {
    "Recipe": "recipe", "RecipeLike": "recipe", "ClipSection": "sections", "explain": "reference",
    "recipe_keys": "reference",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    return opened(__name__, _PLACES, name)
