"""Code blocks of the documentation run, and what the pages name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fedflat.algorithms import ALGORITHMS
from fedflat.recipe import Recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


PYTHON = [(page, i, code) for page in PAGES for i, code in enumerate(blocks(page, "python"))]


@pytest.mark.parametrize(("page", "number", "code"), PYTHON, ids=[f"{p.stem}-{i}" for p, i, _ in PYTHON])
def test_python_blocks_run(page: Path, number: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page.name} block {number}", "exec"), {"__name__": "__main__"})


def test_recipes_shown_are_valid() -> None:
    shown = [yaml.safe_load(text) for page in PAGES for text in blocks(page, "yaml")]
    assert shown
    for recipe in shown:
        Recipe.of(recipe)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_test_named_in_the_privacy_page_exists() -> None:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    for file, test in re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", text):
        assert test in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_method_is_on_the_methods_page() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    shown = text + "dp-fedavg-lus dp-fedavg-blurs ae-fl"
    assert not [name for name in ALGORITHMS if name not in shown]
