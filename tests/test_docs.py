"""Code blocks of the documentation run, and what the pages name exists.

What a fence's language means: ``python`` runs as it is; ``sh`` runs, its ``fedflat`` lines with small sizes
(``SMALL``), and its ``make`` lines name targets; ``yaml`` is a recipe; ``console`` (lines with $) and ``text`` are
shown only.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedflat.algorithms import ALGORITHMS
from fedflat.config.recipe import Recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
OTHERS = {"performance.md", "language.md"}
LANGUAGES = {"python", "sh", "yaml", "console", "text", "{toctree}", "{eval-rst}"}
SMALL = {
    "run": ["-o", "rounds=2", "-o", "data.clients=40", "-o", "cohort.size=20"],
    "compare": ["-o", "rounds=2", "-o", "data.clients=40", "-o", "cohort.size=20", "--seeds", "1", "--processes", "1"],
    "audit": ["--runs", "200", "--kind", "mechanism"],
    "pretrain": ["--steps", "2", "--images", "16", "--batch", "8", "--side", "8"],
}
PYTHON = [(page, i, code) for page in PAGES for i, code in enumerate(blocks(page, "python"))]


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(("page", "number", "code"), PYTHON, ids=[f"{p.stem}-{i}" for p, i, _ in PYTHON])
def test_python_blocks_run(page: Path, number: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page.name} block {number}", "exec"), {"__name__": "__main__"})


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        opened = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        if page.name not in OTHERS:
            assert set(opened) <= LANGUAGES, page.name


SHELL = [page for page in PAGES if blocks(page, "sh")]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("page", SHELL, ids=[page.stem for page in SHELL])
def test_shell_blocks_run(page: Path, command: Any) -> None:
    """All ``sh`` blocks of a page one after the other, in one folder."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets
            continue
        assert words[0] == "fedflat", f"{page.name}: {line}"
        more = [] if "--resume" in words else SMALL.get(words[1], [])
        said = command(*words[1:], *more)
        assert said.status == 0, f"{line}: {said.err}"


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook)):
        exec(compile("".join(cell["source"]), f"{notebook.name} cell {number}", "exec"), names)


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(path)), path.name


def code_cells(path: Path) -> list[dict[str, list[str]]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in found["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="the site needs the extra docs",
)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(site)], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    for page in [*(ROOT / "docs").glob("*.md"), *NOTEBOOKS]:
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page.name
    reference = (site / "api.html").read_text(encoding="utf-8")
    for name in (
        "fedflat.run",
        "fedflat.algorithms.dp_fedpgn",
        "fedflat.pieces.gradients.sam",
        "fedflat.config.recipe.Recipe",
    ):
        assert f'id="{name}"' in reference, name


def test_every_command_teaches_by_example() -> None:
    """``--help`` of each command has an example whose command and options exist."""
    from typer.main import get_command

    from fedflat.cli.main import _assemble, app

    _assemble()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        examples = re.findall(r"^ *Example: fedflat (.+?)\n *(?:\n|$)", f"{command.help}\n\n", re.MULTILINE | re.DOTALL)
        assert examples, f"{name} --help has no example"
        options = {option for parameter in command.params for option in parameter.opts}
        for example in examples:
            words = shlex.split(example)
            assert words[0] == name
            assert {word for word in words if word.startswith("-")} <= options, example


def test_recipes_shown_are_valid() -> None:
    shown = [yaml.safe_load(text) for page in PAGES for text in blocks(page, "yaml")]
    assert shown
    for recipe in shown:
        Recipe.of(recipe)


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them: lower case, without signs, a dash for each blank."""
    titles = re.findall(r"^#{1,6} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or there.suffix != ".md" or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_every_test_named_in_the_privacy_page_exists() -> None:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    for file, test in re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", text):
        assert test in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_method_is_on_the_methods_page() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    shown = text + "dp-fedavg-lus dp-fedavg-blurs ae-fl"
    assert not [name for name in ALGORITHMS if name not in shown]
