"""The command line: one function for each command, whose parameters are the command's arguments and options.

Example: ``fedflat run quick-start -o privacy.epsilon=4`` calls ``training.run``. ``main`` collects the commands, and
turns errors into one line and an exit status. This file has what several commands share: options, and how they print.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe

WIDTH = 80
OVERRIDE = "Change one key of the recipe, for example -o privacy.epsilon=4."
Overrides = Annotated[list[str] | None, Option("-o", "--override", metavar="KEY=VALUE", help=OVERRIDE)]
RecipeName = Annotated[
    str | None, Argument(help="A packaged recipe, a YAML file or a data set's name. Default: the quick start.")
]
RunFolder = Annotated[Path, Argument(help="The folder of a run, or an exported one.")]
Processes = Annotated[int | None, Option(min=1, help="Runs at a time. Default: the number of cores.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]


def recipe_of(name: str | Path | None, override: list[str] | None) -> Recipe:
    """Return the recipe of that name, file or run folder, the best one for a data set's name, or the quick start."""
    from fedflat.config.reading import QUICK_START, names
    from fedflat.config.recipe import Recipe

    if name is not None and name not in names() and not Path(name).exists():
        from fedflat.papers.board import recipe_for

        if found := recipe_for(str(name)):
            name, said = found
            print(said, file=sys.stderr)
    return Recipe.load(name or QUICK_START, override or [])


def wrapped(text: str, first: str = "", later: str = "  ") -> list[str]:
    """Return the text in lines of at most 80 columns, which start with ``first`` and then with ``later``."""
    # Long words are paths and commands: broken, they could not be copied.
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def say(text: str, later: str = "  ") -> None:
    """Print the text in lines of at most 80 columns."""
    print("\n".join(wrapped(text, later=later)))


def print_json(values: Any) -> None:
    """Print values as indented JSON."""
    print(json.dumps(values, ensure_ascii=False, indent=2))


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of texts as columns, without wrapping any; on a terminal the first column is cut at its beginning
    where a row would be too long."""
    from rich.cells import cell_len

    listed = list(rows)
    widths = [max(map(cell_len, column)) for column in zip(*listed)]
    if sys.stdout.isatty():
        rest = sum(widths[1:]) + 2 * len(widths[1:])
        widths[0] = min(widths[0], max(12, shutil.get_terminal_size().columns - rest))
    for first, *others in listed:
        cut = first
        while cell_len(cut) > widths[0]:
            cut = "…" + cut.removeprefix("…")[1:]
        texts = [(cut, widths[0]), *zip(others, widths[1:])]
        print("  ".join(text + " " * (width - cell_len(text)) for text, width in texts).rstrip())
