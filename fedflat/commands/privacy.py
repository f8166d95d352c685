"""``fedflat budget`` and ``fedflat calibrate``: what noise proves, and what a target ε needs, before anything is trained."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from fedflat.privacy.budget import Row, budget_table, calibrate_table

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Clients = Annotated[int, typer.Option(help="Population M.")]
Cohort = Annotated[float, typer.Option(help="Expected cohort m.")]
Rounds = Annotated[int, typer.Option(help="Rounds T.")]
Delta = Annotated[float | None, typer.Option(help="δ. Default: 0.1/M.")]


def budget(
    clients: Clients,
    cohort: Cohort,
    rounds: Rounds,
    noise_multiplier: Annotated[float, typer.Option(help="σ = noise std / clip.")],
    delta: Delta = None,
    as_json: Json = False,
) -> None:
    """ε by every trust model, cohort law and accountant."""
    _show(budget_table(clients=clients, cohort=cohort, rounds=rounds, noise_multiplier=noise_multiplier, delta=delta), as_json)


def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target ε.")],
    clients: Clients,
    cohort: Cohort,
    rounds: Rounds,
    delta: Delta = None,
    as_json: Json = False,
) -> None:
    """The noise multiplier that a target ε needs."""
    _show(calibrate_table(target=epsilon, clients=clients, cohort=cohort, rounds=rounds, delta=delta), as_json)


def _show(rows: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for row in rows:
        cells: list[Any] = [row["trust"], row["sampling"], row["accountant"], row.get("noise_multiplier"), row["epsilon"]]
        print("  ".join(str(cell) for cell in cells if cell is not None), row["reason"])


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command()(budget)
    app.command()(calibrate)
