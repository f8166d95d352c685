"""``fedflat plan``: before a minute is spent."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated, Any

import typer

from fedflat.cli.training import Json, Overrides

WIDTH = 80


def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="A packaged recipe's name or a YAML file. Default: the quick start.")
    ] = None,
    override: Overrides = None,
    no_trial: Annotated[bool, typer.Option("--no-trial", help="Do not time local training on made-up data.")] = False,
    as_json: Json = False,
) -> None:
    """Before a minute is spent: noise, ε by round, signal-to-noise at best, time, memory, and what would help.

    Nothing is trained on anybody's data: of the data only what the guarantee
    takes for public is used, and it is said what.

    Example: fedflat plan quick-start -o privacy.epsilon=2
    """
    from fedflat.config.reading import QUICK_START
    from fedflat.config.recipe import Recipe
    from fedflat.privacy.ledger import plain_json
    from fedflat.simulation.planning import forecast

    found = forecast(Recipe.load(recipe or QUICK_START, override or []), trial=not no_trial)
    if as_json:
        print(json.dumps(plain_json("plan", found.as_dict()), ensure_ascii=False, indent=2))
        return
    for line in text(found):
        print(line)


def text(found: Any) -> list[str]:
    """The forecast in at most 80 columns."""
    facts, plan_, bound = found.as_dict(), found.plan, found.attacker
    head = f"{found.recipe}: {found.algorithm}, {found.dimension:,} shared parameters, {facts['rounds']} rounds"
    law = f"about {facts['cohort']:g} of {facts['clients']} clients a round ({facts['sampling']})"
    rows = [("", f"{head}, {law}")]
    if plan_.private:
        begun = "" if plan_.first == 1 else f" (round 0: {plan_.at_round(0).noise_multiplier:.4g})"
        rows.append(
            ("noise", f"σ = {plan_.noise_multiplier:.4g}{begun} times the clip on the sum; trust {plan_.trust}")
        )
    if found.epsilons and not found.why_not:
        listed = ", ".join(f"{_short(value)} after {turn}" for turn, value in found.epsilons)
        rows.append(("ε", f"{listed} (δ = {facts['delta']:g})"))
    if found.stops < plan_.rounds:
        rows.append(("budget", f"the run stops after {found.stops} rounds"))
    if bound is not None:
        mu = "" if bound.mu is None else f"; Gaussian DP μ = {bound.mu:.3g}"
        mu += f" but for {bound.slack:g}" if bound.slack else ""
        share = f"{100 * bound.true_positives:.3g} % true positives at {100 * bound.false_positives:g} % false ones"
        rows.append(("attacker", f"at most {share}{mu}"))
    if found.best is not None:
        ratio = f"{found.best.round:.3g} in a round, {found.best.run:.3g} over the run"
        rows.append(("signal", f"to noise at best {ratio}; the mean's noise is {found.noise_over_clip:.3g} clips long"))
    if found.seconds_a_round is not None:
        whole = found.seconds_a_round * found.stops
        rows.append(("time", f"{_time(found.seconds_a_round)} a round, {_time(whole)} in all ({found.trial})"))
    else:
        rows.append(("time", found.trial))
    rows.append(("memory", ", ".join(f"{what} {_bytes(size)}" for what, size in found.memory.items() if size)))
    rows.append(("traffic", ", ".join(f"{what} {_bytes(size)}" for what, size in found.traffic.items())))
    rows.append(("read", f"{facts['read']['data']}: {_read(facts['read'])}; no example was trained on"))
    lines = [line for label, said in rows for line in _row(label, said)]
    lines += [line for said in found.says for line in _row("note", said)]
    if found.alternatives:
        lines += ["", "At the same ε and δ:"]
        lines += [line for other in found.alternatives for line in _row("  ", _alternative(other))]
    return lines


def _row(label: str, said: str) -> list[str]:
    lead = f"{label:9}" if label.strip() else "  " if label else ""
    after = " " * 9 if label.strip() else "    " if label else ""
    return textwrap.wrap(said, WIDTH, initial_indent=lead, subsequent_indent=after, break_on_hyphens=False)


def _alternative(other: Any) -> str:
    if other.best is None:
        return f"{other.what}: {other.note}"
    ratio = f"signal to noise at best {other.best.round:.3g} in a round, {other.best.run:.3g} over the run"
    return f"{other.what}: σ = {other.noise_multiplier:.4g}, {ratio}" + (f" ({other.note})" if other.note else "")


def _read(facts: dict[str, Any]) -> str:
    shape = "×".join(map(str, facts["input_shape"])) or "1"
    return (
        f"shape {shape}, {facts['classes']} classes, {facts['clients']} clients, "
        f"{facts['examples_per_client']} examples each on average"
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _time(seconds: float) -> str:
    from fedflat.report.tables import duration

    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"
