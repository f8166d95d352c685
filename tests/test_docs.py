"""What the pages name exists: recipes, commands, options, links, tests, methods. (What they show runs:
``documented/test_documented.py``.)"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import LANGUAGES, NOTEBOOKS, PAGES, ROOT, blocks, fences, make_targets
from typer.main import get_command

from fedflat.algorithms import ALGORITHMS
from fedflat.cli.main import _assemble, app
from fedflat.config.recipe import Recipe

OTHERS = {"performance.md", "language.md"}


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        if page.name not in OTHERS:
            assert set(fences(page)) <= LANGUAGES, page.name


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path.name


@pytest.mark.long
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="the site needs the extra docs",
)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, str(ROOT / "docs"), str(site)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in [*(ROOT / "docs").glob("*.md"), *NOTEBOOKS]:
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page.name
    reference = (site / "api.html").read_text(encoding="utf-8")
    for name in ("run", "algorithms.dp_fedpgn", "pieces.gradients.sam", "config.recipe.Recipe"):
        assert f'id="fedflat.{name}"' in reference, name


def known_commands() -> dict[str, Any]:
    _assemble()
    return get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def test_every_command_teaches_by_example() -> None:
    """``--help`` of each command has an example whose command and options exist."""
    for name, command in known_commands().items():
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


def test_commands_that_are_shown_only_are_right() -> None:
    """Those of ``console`` blocks take hours or data: their words, options, recipes and keys exist."""
    known = known_commands()
    shown = "".join(text for page in PAGES for text in blocks(page, "console")).replace("\\\n", " ")
    lines = re.findall(r"^\$ fedflat (.+)", shown, re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
        if name == "run" and words[0] != "RECIPE":
            Recipe.load(words[0], [value for option, value in pairwise(words) if option == "-o"])


def test_every_target_named_is_one_of_the_makefile() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= make_targets(), page.name


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
    shown = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8") + "dp-fedavg-lus dp-fedavg-blurs ae-fl"
    assert not [name for name in ALGORITHMS if name not in shown]
