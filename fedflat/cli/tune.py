"""``fedflat tune``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from fedflat.cli.training import Json, Overrides
from fedflat.core.checks import RunError, one_of, wrong

WIDTH = 80


def tune(
    recipe: Annotated[
        str | None, typer.Argument(help="A packaged recipe's name or a YAML file. Default: the quick start.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=VALUES",
            help="A key to choose, once for each: a,b,c, or log:LOW:HIGH, uniform:LOW:HIGH, whole:LOW:HIGH.",
        ),
    ] = None,
    override: Overrides = None,
    on: Annotated[
        str, typer.Option("--on", help="clients: private selection. proxy: a random process, which costs no privacy.")
    ] = "clients",
    trials: Annotated[
        float, typer.Option(help="Mean number of trials; their number is secret. On a proxy: the number.")
    ] = 10,
    law: Annotated[
        str | None,
        typer.Option(help="Of the number of trials: geometric (default), logarithmic, poisson, or η from -0.9 to 10."),
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Only say what it would cost, and what a grid would.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the search. Default: runs/tune-NAME.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time. Default: the number of cores.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose settings with a proven total ε, or on a random process without cost; never on test data.

    On clients: a secret number of trials, each a whole private run whose
    settings are drawn from what --vary says; the best by public examples that
    are set apart is released, and its ε is that of the whole selection. After
    Ctrl-C or a failure the same command goes on. On a proxy: a table, a
    picture, and a recipe that fedflat run takes.

    Example: fedflat tune quick-start --vary local.lr=log:0.05:1 --vary privacy.clip=0.1,0.3,1 --cost
    """
    from fedflat.config.reading import QUICK_START
    from fedflat.config.recipe import Recipe

    one_of("--on", on, ("clients", "proxy"))
    parsed = Recipe.load(recipe or QUICK_START, override or [])
    name = f"tune-{parsed.name}" + ("-proxy" if on == "proxy" else "")
    folder = out or Path("runs") / name
    if cost:
        _cost(parsed, vary or [], _count(trials), as_json)
    elif on == "proxy":
        if law is not None:
            raise wrong("--law", law, "nothing with --on proxy, whose number of trials is no secret")
        _proxy(parsed, vary or [], _count(trials), folder, processes, as_json)
    else:
        _private(parsed, vary or [], trials, law or "geometric", folder, processes, as_json)


def _count(trials: float) -> int:
    if trials < 1 or trials != int(trials) or trials > 10_000:
        raise wrong("--trials", trials, "a whole number from 1 to 10000 here")
    return int(trials)


def _clients(recipe: Any) -> int:
    """M: the recipe's, or of its data."""
    from fedflat.assembly.inputs import data_of

    return int(recipe.data.clients or data_of(recipe, None, None).clients)


def _cost(recipe: Any, varied: list[str], count: int, as_json: bool) -> None:
    from dataclasses import asdict

    from fedflat.privacy.ledger import plain_json
    from fedflat.simulation.tuning_cost import costs_of

    if count < 2:
        raise wrong("--trials", count, "2 or more: one run is no choice")
    found = costs_of(recipe, varied, count, _clients(recipe))
    if as_json:
        print(json.dumps(plain_json("costs", [asdict(one) for one in found]), ensure_ascii=False, indent=2))
        return
    print(f"{recipe.name}: what trying {count} settings costs (δ as in one run)\n")
    print(f"{'':50}{'ε at':>9}{'σ for':>11}{'only one':>10}")
    print(f"{'':50}{'σ of one':>9}{'ε of one':>11}{'trial':>10}")
    for one in found:
        needed = "none" if one.needed is None else f"{one.needed:.3f}"
        chance = "" if one.chance_of_one is None else f"{100 * one.chance_of_one:.0f} %"
        print(f"{one.what:50}{_figure(one.epsilon):>9}{needed:>11}{chance:>10}")
    _say(
        "A grid shows every run's result to whoever chooses, so all its runs are charged. A private selection shows "
        "one, and hides how many there were. On a random process (--on proxy) settings cost nothing."
    )


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e9 else "∞"


def _private(
    recipe: Any, varied: list[str], mean: float, law: str, folder: Path, processes: int | None, as_json: bool
) -> None:
    from fedflat.privacy import tuning as account
    from fedflat.privacy.accounting.selection import Trials
    from fedflat.privacy.accounting.selection import law as law_of
    from fedflat.report.progress import ExperimentProgress
    from fedflat.simulation.tuning import ask, tune

    asked = ask(recipe, varied, Trials(mean, law_of(law)), _clients(recipe))
    if not as_json:
        alone = max(account.alone(plan).epsilon() for plan in asked.plans)
        _say(
            f"Private selection, {asked.trials.name}, {mean:g} trials in the mean: total ε = "
            f"{asked.plan.epsilon():.4g} at δ = {asked.plan.delta:g}; one trial alone would have {alone:.4g}. "
            f"Scored on {100 * asked.recipe.data.validation_fraction:g} % of the public test examples, which leave the "
            "test data."
        )
    with ExperimentProgress(quiet=as_json) as progress:
        found = tune(asked, folder, processes, progress.update)
    if found.failed or found.left:
        _unfinished(found.failed, found.left)
    if as_json:
        facts: dict[str, Any] = {"folder": str(folder), "winner": str(found.winner) if found.winner else None}
        facts |= {"settings": found.settings, "score": found.score}
        print(json.dumps({**facts, "epsilon": asked.plan.epsilon(), "delta": asked.plan.delta}))
    elif found.winner is not None:
        settings = ", ".join(f"{key} = {value}" for key, value in found.settings.items())
        _say(f"Chosen: {settings} (score {found.score:.4g})")
        _say(f"Released: {found.winner}; proven ε = {asked.plan.epsilon():.4g} for the whole selection.")
        _say(f"Next: fedflat card {found.winner}, fedflat verify {folder}, fedflat export {found.winner} OUT")
    if found.winner is None:
        why = "no trial was drawn, as a Poisson number may be 0"
        raise RunError(f"{folder}: {why}; its ε is spent, and a new folder spends more")


def _proxy(recipe: Any, varied: list[str], count: int, folder: Path, processes: int | None, as_json: bool) -> None:
    from fedflat.report.progress import ExperimentProgress
    from fedflat.simulation.tuning_proxy import PICTURE, tune_on_proxy

    with ExperimentProgress(quiet=as_json) as progress:
        found = tune_on_proxy(recipe, varied, count, folder, processes, progress.update)
    if found.chosen is None:
        _unfinished(found.failed, found.left)
    if as_json:
        rows = [{"settings": settings, "accuracy": accuracy} for settings, accuracy in found.rows]
        print(json.dumps({"folder": str(folder), "dataset": found.dataset, "chosen": str(found.chosen), "rows": rows}))
        return
    keys = list(found.rows[0][0])
    print("".join(f"{key:>18}" for key in [*keys, "accuracy"]))
    for settings, accuracy in found.rows:
        print("".join(f"{settings[key]:>18}" for key in keys) + f"{accuracy:>18.4f}")
    picture = folder / PICTURE
    _say(f"On {found.dataset}, which holds nobody's data: no ε is spent. All runs: {folder}/report.html"
         + (f"; picture: {picture}" if picture.is_file() else "; no picture, for want of matplotlib"))  # fmt: skip
    _say(f"Next: fedflat run {found.chosen}")


def _unfinished(failed: Any, left: int) -> None:
    why = next(iter(failed.values()), "stopped as asked")
    raise RunError(f"{len(failed)} trials failed, {left} are left ({why}); the same command goes on")


def _say(text: str) -> None:
    print(textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False))
