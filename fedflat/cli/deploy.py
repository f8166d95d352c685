"""``fedflat deploy``: the same recipe on a real Flower federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def deploy(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe's name or a YAML file.")],
    out: Annotated[Path, typer.Option(help="New folder for the Flower project.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of clients M. Default: the recipe's data.clients.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change one key of the recipe.")
    ] = None,
    host: Annotated[str, typer.Option(help="Name or address under which clients reach the SuperLink.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=1, max=65534, help="The SuperLink's port; orders come through the next one, on 127.0.0.1."),
    ] = 8443,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make a Flower project of a recipe: app, test certificates, one folder for each client, README with every command.

    Example: fedflat deploy quick-start --out federation --nodes 3 -o cohort.size=2
    """
    from fedflat.config.recipe import Recipe
    from fedflat.federation.launch.flower import check_flower
    from fedflat.federation.launch.project import write_project

    check_flower()
    made = write_project(Recipe.load(recipe, override or []), out, nodes, port, host)
    if as_json:
        facts = {"folder": str(made.folder), "clients": made.clients, "epsilon": made.epsilon, "delta": made.delta}
        facts |= {"note": made.note} if made.note else {}
        print(json.dumps(facts))
        return
    shown = "no finite ε" if made.epsilon is None else f"proven ε = {made.epsilon:.4g} at δ = {made.delta:g}"
    print(f"{made.folder}: a Flower project for {made.clients} clients, {shown} for the whole run.")
    if made.note:
        print(made.note)
    print(f"Try it here: python -m fedflat.federation.local {made.folder}")
    print(f"Every command: {made.folder / 'README.md'}")
    print(f"The operator's token, to be kept secret: {made.folder / 'flower' / 'credentials.yaml'}")
