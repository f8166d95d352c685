"""Commands before a run: ``plan`` and ``tune``."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fedflat.cli import Json, Overrides, Processes, RecipeName, columns, filled, print_json, recipe_of
from fedflat.core.checks import one_of, wrong


def plan(
    recipe: RecipeName = None, *, override: Overrides = None, no_trial: bool = False, as_json: Json = False
) -> None:
    """Before a minute is spent: noise, ε by round, signal-to-noise at best, time, memory, and what would help.

    Nothing is trained on anybody's data: of the data only what the guarantee
    takes for public is used, and it is said what.

    Example: fedflat plan quick-start -o privacy.epsilon=2

    Args:
        no_trial: Do not time local training on made-up data.
    """
    parsed = recipe_of(recipe, override)  # before torch takes seconds to load
    from fedflat.privacy.ledger import plain_json
    from fedflat.simulation.planning import forecast

    facts, planned = forecast(parsed, trial=not no_trial)
    if as_json:
        print_json(plain_json("plan", facts))
        return
    print("\n".join(text(facts, planned)))


def text(facts: dict[str, Any], plan: Any) -> list[str]:
    """Return the forecast of a plan in at most 80 columns."""
    return filled("plan.txt", facts=facts, plan=plan, time=_time)


def _time(seconds: float) -> str:
    from fedflat.report.wording import duration

    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def tune(
    recipe: RecipeName = None,
    *,
    vary: Annotated[list[str] | None, Option(metavar="KEY=VALUES")] = None,
    override: Overrides = None,
    on: str = "clients",
    trials: float = 10,
    out: Path | None = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Choose settings with a proven total ε, or on a random process without cost; never on test data.

    On clients: a secret number of trials, each a whole private run whose
    settings are drawn from what --vary says; the best by public examples that
    are set apart is released, and its ε is that of the whole selection. After
    Ctrl-C or a failure the same command goes on. On a proxy: a table,
    and a recipe that fedflat run takes.

    Example: fedflat tune quick-start --vary local.lr=log:0.05:1 --vary privacy.clip=0.1,0.3,1

    Args:
        vary: A key to choose, once for each: a,b,c, or log:LOW:HIGH, uniform:LOW:HIGH, whole:LOW:HIGH.
        on: clients: private selection. proxy: a random process, which costs no privacy.
        trials: Mean number of trials; their number is secret. On a proxy: the number.
        out: Folder of the search. Default: runs/tune-NAME.
    """
    one_of("--on", on, ("clients", "proxy"))
    parsed = recipe_of(recipe, override)
    folder = out or Path("runs") / (f"tune-{parsed.name}" + ("-proxy" if on == "proxy" else ""))
    if on == "proxy":
        if not 1 <= trials <= 10_000 or trials != int(trials):
            raise wrong("--trials", trials, "a whole number from 1 to 10000 here")
        _proxy(parsed, vary or [], int(trials), folder, processes, as_json)
    else:
        _private(parsed, vary or [], trials, folder, processes, as_json)


def _private(recipe: Any, varied: list[str], mean: float, folder: Path, processes: int | None, as_json: bool) -> None:
    from fedflat.assembly.inputs import data_of
    from fedflat.privacy.tuning import Selection, alone
    from fedflat.report.progress import ExperimentProgress
    from fedflat.simulation.tuning import ask, tune

    asked = ask(recipe, varied, Selection(mean), recipe.data.clients or data_of(recipe, None, None).clients)
    if not as_json:
        print("\n".join(filled("selection.txt", asked=asked, alone=alone(asked.plan).epsilon(), selected=None)))
    with ExperimentProgress(quiet=as_json) as progress:
        selected = tune(asked, folder, processes, progress.update)
    if as_json:
        facts = {"folder": folder, "winner": selected.winner, "settings": selected.settings, "score": selected.score}
        print_json({**facts, "epsilon": asked.plan.epsilon(), "delta": asked.plan.delta})
    else:
        print("\n".join(filled("selection.txt", asked=asked, selected=selected)))


def _proxy(recipe: Any, varied: list[str], count: int, folder: Path, processes: int | None, as_json: bool) -> None:
    from fedflat.report.progress import ExperimentProgress
    from fedflat.simulation.tuning import tune_on_proxy

    with ExperimentProgress(quiet=as_json) as progress:
        search = tune_on_proxy(recipe, varied, count, folder, processes, progress.update)
    if as_json:
        rows = [{"settings": settings, "accuracy": accuracy} for settings, accuracy in search.rows]
        print_json({"folder": folder, "dataset": search.dataset, "chosen": search.chosen, "rows": rows})
        return
    heads = [*search.rows[0][0], "accuracy"]
    print("\n".join(columns([heads, *([*settings.values(), f"{best:.4f}"] for settings, best in search.rows)], left=0)))
    print("\n".join(filled("proxy.txt", search=search, folder=folder)))
