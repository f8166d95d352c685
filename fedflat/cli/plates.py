"""``--plates DIR``: the figures of a page as SVG, PNG and PDF besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedflat.report.figures import Figure

Plates = Annotated[
    Path | None, typer.Option("--plates", metavar="DIR", help="Each figure as SVG, PNG and PDF in this folder too.")
]


def print_plates(
    figures: Sequence[Figure], folder: Path, landscapes: Sequence[Mapping[str, Any]] = (), quiet: bool = False
) -> None:
    """Write the files and say where they are."""
    from fedflat.report.plates import KINDS, write_plates

    written = write_plates(figures, folder, landscapes)
    if not quiet:
        count = len(written) // len(KINDS)
        print(f"{count} figure{'s' if count != 1 else ''} as SVG, PNG and PDF: {folder}")
