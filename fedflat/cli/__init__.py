"""The command line: one function for each command, whose parameters are the command's arguments and options.

Example: ``fedflat run quick-start -o privacy.epsilon=4`` calls ``training.run``. ``main`` collects the commands, and
turns errors into one line and an exit status. This file has what several commands share: how a function becomes a
command, options, and how they print.

A parameter is an argument, one behind the ``*`` an option. What ``--help`` says of it stands in the docstring's Args; a
parameter whose type is a dataclass stands for all of its fields.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from typer import Argument, Option
from typer.models import ParameterInfo

from fedflat.core import counted, making, readable

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe

WIDTH = 80
ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
"""A parameter and what a docstring's Args section says of it."""
OVERRIDE = "Change one key of the recipe, for example -o privacy.epsilon=4."
Overrides = Annotated[list[str] | None, Option("-o", "--override", metavar="KEY=VALUE", help=OVERRIDE)]
NAMED = "A packaged recipe, a YAML file or a data set's name. Default: the quick start."
RecipeName = Annotated[str | None, Argument(help=NAMED)]
RunFolder = Annotated[Path, Argument(help="The folder of a run, or an exported one.")]
Processes = Annotated[int | None, Option(min=1, help="Runs at a time. Default: the number of cores.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Plates = Annotated[Path | None, Option(metavar="DIR", help="Each figure as SVG, PNG and PDF in this folder too.")]
Folder = Annotated[Path | None, Option(metavar="DIR")]
File = Annotated[Path | None, Option(metavar="FILE")]
Count = Annotated[int | None, Option(min=1)]


def as_command(function: Callable[..., None]) -> tuple[Callable[..., None], str]:
    """Return the function as typer reads a command, and what the command's help says of it."""
    groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(function).items() if is_dataclass(kind)}

    @functools.wraps(function)
    def grouped(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    # Without groups the function itself, so that a call has no frame more.
    command: Any = grouped if groups else function
    command.__signature__ = inspect.Signature([*_parameters(function)])
    description = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")[0]
    # Line breaks inside a paragraph would break again, raggedly, in a narrower terminal.
    return command, re.sub(r"(?<!\n)\n(?!\n)", " ", description)


def _parameters(source: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function or a dataclass, each with what typer is to know of it."""
    written = (inspect.getdoc(source) or "").partition("Args:\n")[2]
    helps = {name: " ".join(text.split()) for name, text in ARGUMENT.findall(written)}
    hints = get_type_hints(source, include_extras=True)
    for parameter in inspect.signature(source).parameters.values():
        kind: Any = hints[parameter.name]
        if is_dataclass(kind):
            yield from _parameters(kind)
            continue
        infos = [info for info in get_args(kind) if isinstance(info, ParameterInfo)]
        info = copy.copy(infos[0]) if infos else Option() if parameter.kind is parameter.KEYWORD_ONLY else Argument()
        info.help = info.help or helps.get(parameter.name)
        kind = get_args(kind)[0] if infos else kind
        if kind is bool and info.default is ...:
            # A flag is off by default: nobody needs its --no- form.
            info.param_decls = (f"--{parameter.name.replace('_', '-')}",)
        yield parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


def recipe_of(name: str | Path | None, override: list[str] | None) -> Recipe:
    """Return the recipe of that name, file or run folder, the best one for a data set's name, or the quick start."""
    from fedflat.config.reading import QUICK_START, names
    from fedflat.config.recipe import Recipe

    if name is not None and name not in names() and not Path(name).exists():
        from fedflat.papers.board import recipe_for

        if best := recipe_for(str(name)):
            name, sentence = best
            print("\n".join(wrapped(sentence)), file=sys.stderr)
    return Recipe.load(name or QUICK_START, override or [])


def wrapped(text: str, first: str = "", later: str = "  ", *, fold: bool = False) -> list[str]:
    """Return the text in lines of at most 80 columns, which start with ``first`` and then with ``later``.

    fold: whether to break long words, which are paths and commands: broken, they cannot be copied.
    """
    return textwrap.wrap(
        readable(text, "\ufffd"), WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=fold,
        break_on_hyphens=False,
    )  # fmt: skip


def labelled(label: str, text: str, width: int, *, fold: bool = False) -> list[str]:
    """Return the text in lines of at most 80 columns, behind a label of that width. fold: as in ``wrapped``."""
    return wrapped(text, f"{label:{width}}", " " * width, fold=fold)


def filled(template: str, **values: Any) -> list[str]:
    """Return the lines of a text template of at most 80 columns: ``label| text`` is a labelled line."""
    from fedflat.report.wording import environment

    lines: list[str] = []
    for line in environment("fedflat.cli").get_template(template).render(values).splitlines():
        if parts := re.match(r"(\w+)\| (.*)", line):
            lines += labelled(parts[1], parts[2], 9)
        else:
            indent = " " * (len(line) - len(line.lstrip()))
            lines += wrapped(line.strip(), indent, f"{indent}  ") or [""]
    return lines


def say(text: str, later: str = "  ") -> None:
    """Print the text in lines of at most 80 columns."""
    print("\n".join(wrapped(text, later=later)))


def json_text(values: Any) -> str:
    """Return values as indented JSON."""
    return json.dumps(values, ensure_ascii=False, indent=2, default=str)


def columns(rows: Iterable[Sequence[str]], left: int | None = 1, gap: str = "  ") -> list[str]:
    """Return rows of texts as lines, without wrapping any.

    left: columns aligned to the left, None for all; the others end at the same place.
    """
    from rich.cells import cell_len

    listed = list(rows)
    widths = [max(map(cell_len, column)) for column in zip(*listed)]
    lines = []
    for row in listed:
        spaced = enumerate((text, " " * (width - cell_len(text))) for text, width in zip(row, widths))
        cells = [text + space if left is None or at < left else space + text for at, (text, space) in spaced]
        lines.append(gap.join(cells).rstrip())
    return lines


def print_plates(figures: Any, folder: Path, landscapes: Any = (), quiet: bool = False) -> None:
    """Write each figure as SVG, PNG and PDF, and say where they are."""
    from fedflat.report.plates import KINDS, write_plates

    write_files(folder, {}, "--plates")
    count = len(write_plates(figures, folder, landscapes)) // len(KINDS)
    if not quiet:
        print(f"{counted(count, 'figure')} as SVG, PNG and PDF: {folder}")


def write_files(folder: Path, files: Mapping[str, str], option: str = "--out") -> None:
    """Write texts by name into a folder that may be new. Raises InputError where it cannot be written."""
    with making(option, f"{folder}, which cannot be written", "a folder to write"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
