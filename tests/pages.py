"""The documentation's pages and their fenced blocks.

What a fence's language means: ``python`` is a program; ``sh`` are commands; ``yaml`` is a recipe; ``console`` (lines
with $) needs hours, data, several machines or names that the reader fills in; ``text`` is what a program prints.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LANGUAGES = {"python", "sh", "yaml", "console", "text", "{toctree}", "{eval-rst}"}


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def fences(page: Path) -> list[str]:
    """Return what follows each opening fence of a page."""
    return re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]


def programs(page: Path) -> list[tuple[str, str]]:
    """Return the programs of a page, each with the text that the page shows as its output (or "")."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL)
    return [(code, shown) for code, shown in found]


def commands(page: Path) -> list[str]:
    """Return the lines of a page's ``sh`` blocks, those that go on after a backslash as one."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
