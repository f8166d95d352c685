"""Measure the package's size and shape: ``python -m tests.house`` prints each measure beside the target of 1.0.

Example: ``python -m tests.house`` ends with status 1 if a measure is worse than its limit below. The limits only ever
tighten: whoever improves a measure lowers its limit here.
"""

import ast
import contextlib
import io
import os
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

HERE = Path(__file__).parents[1]
PACKAGE = HERE / "fedflat"


class Limit(NamedTuple):
    """The limit a measure must keep today, and the target of release 1.0 (None: there is none)."""

    today: float
    target: float | None = None
    least: bool = False
    """The measure must be at least this large; others must be at most."""


LIMITS = {
    "code lines of the package": Limit(26_000, 26_000), "files of the package": Limit(192, 200),
    "circles of files": Limit(0, 0), "frames from the command to a step's gradient": Limit(10, 10),
    "comment lines per 60 code lines": Limit(1, 1, least=True), "words of the docs": Limit(50_000, 50_000),
    "words of the README": Limit(850, 900), "files of more than 300 lines": Limit(36),
    "functions of more than 40 lines": Limit(8), "names that say nothing": Limit(56),
    "lines of the tests": Limit(36_400),
}  # fmt: skip
"""The only place where limits are kept. They are today's values: nothing may grow."""
SAYING_NOTHING = (
    "found", "own", "told", "shown", "said", "kept", "made", "what", "thing", "each", "standing", "ahead", "alone",
    "about", "whole",
)  # fmt: skip


def sources(root: Path = PACKAGE) -> dict[str, str]:
    """Return the text of every Python file under ``root`` by its module name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def documented(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield the docstrings of a tree, those that stand below a field or a constant too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def lines(text: str) -> tuple[int, int]:
    """Return the numbers of code lines (no blank lines, comments, docstrings) and of lines that are comments."""
    code: set[int] = set()
    comments = 0
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += token.line.strip().startswith("#")
        elif token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in documented(ast.parse(text)):
        code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code), comments


def imports(name: str, text: str, names: set[str]) -> set[str]:
    """Return the modules of ``names`` that module ``name`` imports, under ``TYPE_CHECKING`` or in a function too."""
    found: set[str] = set()

    def add(module: str) -> None:
        while module and module not in names:
            module = module.rpartition(".")[0]
        found.add(module)

    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                add(f"{node.module}.{alias.name}")
        todo += ast.iter_child_nodes(node)
    return found - {"", name}


def circles(files: dict[str, str]) -> list[list[str]]:
    """Return the groups of files that import each other in a circle."""
    graph = {name: imports(name, text, set(files)) for name, text in files.items()}
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen: set[str] = set()
        todo = [*graph[name]]
        while todo:
            if (other := todo.pop()) not in seen:
                seen.add(other)
                todo += graph[other]
        reached[name] = seen
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(group) for group in sorted(groups)]


def long_functions(text: str) -> int:
    """Return the number of functions of more than 40 lines, their docstrings not counted."""
    found = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.body[0]
            spoken = 0
            if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
                spoken = (said.end_lineno or said.lineno) - said.lineno + 1
            found += (node.end_lineno or node.lineno) - node.lineno + 1 - spoken > 40
    return found


def empty_names(text: str) -> int:
    """Return how many variables and arguments bear one of the names in ``SAYING_NOTHING``."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return sum(name in SAYING_NOTHING for name in [*names, *(node.arg for node in nodes if isinstance(node, ast.arg))])


def frames() -> list[str]:
    """Run one round by the command with the sequential back end; return the package's frames at its last gradient."""
    import torch

    from fedflat.cli import main as cli

    command = "fedflat run quick-start -o rounds=1 -o data.clients=10 -o cohort.size=5 -o engine.backend=sequential"
    real, stack = torch.autograd.grad, []

    def grad(*given: Any, **more: Any) -> Any:
        stack.clear()
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(str(PACKAGE)):
                stack.append(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}: {frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        return real(*given, **more)

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch.dict(os.environ, XDG_STATE_HOME=folder, XDG_CACHE_HOME=folder),
        mock.patch.object(torch.autograd, "grad", grad),
        mock.patch.object(sys, "argv", command.split()),
    ):
        try:
            cli.main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{command}: {said.getvalue()}") from None
    return stack[::-1]


def words(paths: Iterable[Path]) -> int:
    """Return how many words the files have."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def measures() -> dict[str, float]:
    """Return every measure by its name in ``LIMITS``."""
    files = sources()
    code, comments = (sum(column) for column in zip(*[lines(text) for text in files.values()]))
    found = (
        code, len(files), len(circles(files)), len(frames()), round(60 * comments / code, 2),
        words((HERE / "docs").glob("*.md")), words([HERE / "README.md"]),
        sum(text.count("\n") > 300 for text in files.values()), sum(map(long_functions, files.values())),
        sum(map(empty_names, files.values())),
        sum(path.read_text(encoding="utf-8").count("\n") for path in (HERE / "tests").rglob("*.py")),
    )  # fmt: skip
    return dict(zip(LIMITS, found, strict=True))


def broken(name: str, value: float) -> bool:
    """Return whether a measure is worse than its limit of today."""
    limit = LIMITS[name]
    return value < limit.today if limit.least else value > limit.today


def main() -> int:
    """Print the measures; return 1 if one is worse than its limit."""
    found = measures()
    print(f"{'measure':46}{'now':>10}{'limit':>10}{'1.0':>10}")
    for name, value in found.items():
        limit = LIMITS[name]
        target = "" if limit.target is None else f"{limit.target:,}"
        worse = "  worse than its limit" if broken(name, value) else ""
        print(f"{name:46}{value:>10,}{limit.today:>10,}{target:>10}{worse}")
    for group in circles(sources()):
        print("circle:", ", ".join(name.removeprefix("fedflat.") for name in group))
    return int(any(broken(name, value) for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
