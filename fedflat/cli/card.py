"""``fedflat card``: what a run promises, on one page."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from fedflat.core.checks import wrong


def card(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or an exported one.")],
    others: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="RUN", help="A run on the same clients that is published too; may be repeated."),
    ] = None,
    about: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML with what no run knows: curators, contact, region, …")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write. Default: the run's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The privacy card: card.html, card.md and registry.yaml, an entry for the public registry of DP deployments.

    Example: fedflat card runs/quick-start --about about.yaml
    """
    from fedflat.report import card as making
    from fedflat.report.metrics import read_run
    from fedflat.report.registry import About, as_yaml, read_about

    target = out or run
    if (target / "SHA256SUMS").exists():
        raise wrong("--out", f"{target}, whose files are sealed", "another folder")
    found = making.card(
        read_run(run), [read_run(other) for other in others or []], read_about(about) if about else None
    )
    target.mkdir(parents=True, exist_ok=True)
    files = {"card.html": making.html(found), "card.md": making.markdown(found)}
    if found.epsilon is not None:
        files["registry.yaml"] = as_yaml(making.registry_entry(found))
    for name, content in files.items():
        (target / name).write_text(content, encoding="utf-8")
    missing = (found.about or About()).missing if found.epsilon is not None else []
    if as_json:
        sections = {title: dict(rows) for title, rows in found.sections}
        facts = {"folder": str(target), "files": list(files), "sentence": found.sentence, "sections": sections}
        print(json.dumps(facts | {"missing": missing}, ensure_ascii=False, indent=2))
        return
    print(textwrap.fill(found.sentence, 80))
    print(f"Written to {target}: {', '.join(files)}")
    if found.epsilon is None:
        print("No entry for the registry: no finite ε is proven.")
    if missing:
        print(textwrap.fill(f"registry.yaml is a draft. Nobody stated (--about FILE): {', '.join(missing)}", 80))


def add_to(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(card)
