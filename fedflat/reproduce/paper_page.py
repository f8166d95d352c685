"""The page of a paper's figure: its drawings with what differs from the paper."""

from __future__ import annotations

from pathlib import Path

from fedflat.core.checks import wrong
from fedflat.core.papers import CITED
from fedflat.report import flatness, html, pages
from fedflat.report.pages import Section
from fedflat.reproduce.drawn import Drawn


def write_pages(found: Drawn, folder: Path, source: str = "") -> list[Path]:
    """``NAME.html`` with the drawings, ``landscape-N.html`` for each landscape. source: where the numbers are from."""
    figure = found.of
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise wrong("--out", f"{folder}: {error.strerror}", "a folder that can be made and written to") from None
    written = [
        flatness.write_page(record, folder / f"landscape-{place}.html") for place, record in enumerate(found.landscapes)
    ]
    if found.figures:
        title = f"{CITED[figure.paper]}, {figure.name.replace('-', ' ')}"
        cards = html.cards(list(found.figures))
        differs = Section("notes", "What differs", "prose", notes(found, source))
        sections = [Section("drawings", "", "cards", cards), differs]
        page = pages.page(title, figure.about, sections, "fedflat")
        written.append(pages.write(page, folder / f"{figure.name}.html"))
    return written


def notes(found: Drawn, source: str = "") -> list[str]:
    """What differs from the paper's figure, in sentences."""
    scale = [] if found.scale == "full" else [f"Scale {found.scale}: not comparable with the paper's drawing."]
    notes = [f"{text[:1].upper()}{text[1:]}." for text in found.of.notes]
    missing = [f"Missing: {text}" for text in found.missing]
    return [*scale, *found.remarks, *notes, *missing, *([source] if source else [])]
