"""The page on one's own data shows what its program prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fedflat.config.recipe import Recipe

PAGE = (Path(__file__).parents[1] / "docs" / "own.md").read_text(encoding="utf-8")


def test_the_program_for_a_table_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "own.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    accuracy = r"test accuracy ([\d.]+) %"
    here, there = (float(re.findall(accuracy, text)[0]) for text in (printed, shown))
    assert abs(here - there) < 1, "another processor may round differently"
    assert re.sub(accuracy, "", printed) == re.sub(accuracy, "", shown)


def test_the_recipe_for_a_table_is_one() -> None:
    recipe = Recipe.of(yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]))
    assert recipe.data.partition.by == "user" and recipe.data.max_per_client == 10


def test_the_program_that_ends_early_and_goes_on_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = PAGE[PAGE.index("## Watch a run") : PAGE.index("## Data sets from the hub")]
    program, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", part, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "own.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    count = r"after \d+ rounds"  # another processor may round differently
    assert re.sub(count, "", printed) == re.sub(count, "", shown)
