"""``fedflat card``: what a run promises, on one page."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedflat.core.checks import wrong

if TYPE_CHECKING:
    from fedflat.report.card import Card


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
    from fedflat.records.folder import check_unsealed
    from fedflat.report import card as making
    from fedflat.report.metrics import read_run
    from fedflat.report.registry import read_about

    target = out or run
    check_unsealed(target)
    found = making.card(
        read_run(run), [read_run(other) for other in others or []], read_about(about) if about else None
    )
    files = _written(found, target)
    missing = found.about.missing if "registry.yaml" in files else []
    if as_json:
        sections = {title: dict(rows) for title, rows in found.sections}
        facts = {"folder": str(target), "files": files, "sentence": found.sentence, "sections": sections}
        print(json.dumps(facts | {"missing": missing}, ensure_ascii=False, indent=2))
        return
    print(textwrap.fill(found.sentence, 80))
    print(f"Written to {target}: {', '.join(files)}")
    if "registry.yaml" not in files:
        print("No entry for the registry: no finite ε is proven.")
    if missing:
        print(textwrap.fill(f"registry.yaml is a draft. Nobody stated (--about FILE): {', '.join(missing)}", 80))


def _written(found: Card, target: Path) -> list[str]:
    """Write the card's files and return their names."""
    from fedflat.report.card import html, markdown
    from fedflat.report.entry import registry_entry
    from fedflat.report.registry import as_yaml

    files = {"card.html": html(found), "card.md": markdown(found)}
    if found.epsilon is not None:
        files["registry.yaml"] = as_yaml(registry_entry(found))
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise wrong("--out", f"{target}, which cannot be written ({error.strerror})", "a folder to write") from error
    return list(files)
