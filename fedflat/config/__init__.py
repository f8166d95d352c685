"""A recipe: its keys, their meaning, and the packaged ones.

Example::

    from fedflat.config.recipe import Recipe
    from fedflat.config.reference import explain

    recipe = Recipe.load("quick-start", ["rounds=10", "privacy.clip=0.5"])  # or Recipe.of({...}), or a YAML file
    explain("privacy.clip")                                                 # what ``fedflat explain`` prints

``sections`` declares each key once, with its limits and a docstring that the reference shows; ``reading`` takes YAML,
``extends`` and ``-o key=value``; ``recipe`` checks, and says in a line what is wrong; ``method`` makes the method that
a recipe names; ``reference`` has docs/recipe.md.
"""

__all__ = ["method", "reading", "recipe", "reference", "sections"]
