"""Commands before a run: ``plan`` and ``tune``; ``budget`` and ``calibrate``, what noise proves and an ε needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fedflat.cli import Json, Overrides, Processes, RecipeName, columns, filled, json_text, recipe_of
from fedflat.core import InputError, in_range, one_of, wrong

Row = dict[str, Any]


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
    from fedflat.assembly.planning import forecast
    from fedflat.privacy.ledger import plain_json

    facts, planned = forecast(parsed, trial=not no_trial)
    texts = filled("plan.txt", facts=facts, plan=planned)
    print(json_text(plain_json("plan", facts)) if as_json else "\n".join(texts))


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
    search = _proxy if on == "proxy" else _private
    search(parsed, vary or [], trials, folder, processes, as_json)


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
    facts = {"folder": folder, "winner": selected.winner, "settings": selected.settings, "score": selected.score}
    facts |= {"epsilon": asked.plan.epsilon(), "delta": asked.plan.delta}
    print(json_text(facts) if as_json else "\n".join(filled("selection.txt", asked=asked, selected=selected)))


def _proxy(recipe: Any, varied: list[str], count: float, folder: Path, processes: int | None, as_json: bool) -> None:
    if not 1 <= count <= 10_000 or count != int(count):
        raise wrong("--trials", count, "a whole number from 1 to 10000 here")
    from fedflat.report.progress import ExperimentProgress
    from fedflat.simulation.tuning import tune_on_proxy

    with ExperimentProgress(quiet=as_json) as progress:
        search = tune_on_proxy(recipe, varied, int(count), folder, processes, progress.update)
    rows = [{"settings": settings, "accuracy": accuracy} for settings, accuracy in search.rows]
    facts = {"folder": folder, "dataset": search.dataset, "chosen": search.chosen, "rows": rows}
    heads = [*search.rows[0][0], "accuracy"]
    table = columns([heads, *([*settings.values(), f"{best:.4f}"] for settings, best in search.rows)], left=0)
    texts = [*table, *filled("proxy.txt", search=search, folder=folder)]
    print(json_text(facts) if as_json else "\n".join(texts))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands take.

    Args:
        clients: Number of clients.
        cohort: Expected cohort.
        rounds: Rounds.
        delta: Default: 0.1/M.
        max_cohort: Largest cohort (truncated).
        min_cohort: Minimum cohort: fewer shares abort a round (distributed).
        max_participations: Rounds a client takes part in at most (local).
        sampling: Only this cohort law: poisson, truncated, fixed, full, …
        trust: Only central, distributed or local.
        accountant: Only pld, rdp or fft (budget: also gdp, an approximation).
    """

    clients: Annotated[int, Option(metavar="M", min=1)]
    cohort: Annotated[float, Option(metavar="m")]
    rounds: Annotated[int, Option(metavar="T", min=0)]
    delta: Annotated[float | None, Option(metavar="δ")] = None
    max_cohort: int | None = None
    min_cohort: int | None = None
    max_participations: int | None = None
    sampling: str | None = None
    trust: str | None = None
    accountant: str | None = None
    as_json: Json = False

    def setting(self) -> Row:
        """Return the numbers that are given, as ``fedflat.epsilon`` names them, and δ."""
        from fedflat.privacy.accounting.epsilon import default_delta

        names = ("clients", "cohort", "rounds", "max_cohort", "min_cohort", "max_participations")
        numbers = {name: value for name in names if (value := getattr(self, name)) is not None}
        return numbers | {"delta": default_delta(self.clients) if self.delta is None else self.delta}

    def only(self) -> dict[str, str]:
        """Return the names that the rows are limited to, checked."""
        from fedflat.core import NAMES as SAMPLINGS
        from fedflat.privacy.accounting.curves import ACCOUNTANTS
        from fedflat.privacy.trust import TRUSTS

        allowed = {"trust": TRUSTS, "sampling": SAMPLINGS, "accountant": ACCOUNTANTS}
        limits = {name: value for name in allowed if (value := getattr(self, name)) is not None}
        return {name: str(one_of(f"--{name}", value, allowed[name])) for name, value in limits.items()}


def budget(
    options: Options,
    *,
    noise_multiplier: Annotated[float, Option(metavar="σ", help="Noise multiplier: noise std / clip.")],
) -> None:
    """ε for given noise, by every applicable trust model, cohort law and accountant. Of a recipe: fedflat plan.

    Example: fedflat budget --clients 500 --cohort 50 --rounds 300 --noise-multiplier 0.95 --delta 0.002
    """
    from fedflat.privacy.accounting.budget import budget_table

    setting = options.setting() | {"noise_multiplier": noise_multiplier}
    _answer(options, setting, budget_table(only=options.only(), **setting))


def calibrate(options: Options, *, epsilon: Annotated[float, Option(metavar="ε", help="The target.")]) -> None:
    """The least noise multiplier σ for a target ε, by every applicable trust model, cohort law and accountant.

    Example: fedflat calibrate --epsilon 8 --clients 500 --cohort 50 --rounds 300
    """
    from fedflat.privacy.accounting.budget import calibrate_table
    from fedflat.privacy.accounting.curves import PROVEN

    # A larger ε promises nothing.
    in_range("--epsilon", epsilon, 0, 1000, open_low=True)
    only, setting = options.only(), options.setting()
    one_of("--accountant", only.get("accountant", "pld"), PROVEN)
    _answer(options, setting, calibrate_table(target=epsilon, only=only, **setting), epsilon)


def _answer(options: Options, setting: Row, rows: list[Row], target: float | None = None) -> None:
    """Print what σ proves, or the least σ for a target ε: the setting, and a table of at most 80 columns.

    What does not apply is left out of it (``--json`` has the reasons, and what was asked for).

    Raises:
        InputError: nothing applies, for the reason that it says.
    """
    from fedflat.privacy.ledger import plain_json
    from fedflat.report.metrics import epsilon_text

    # A row for any sampling does not answer for one that was asked for.
    relevant = [row for row in rows if row["sampling"] == options.sampling] or rows
    if not any(row["epsilon"] is not None for row in relevant):
        reason = next((row["reason"] for row in relevant if row["reason"]), "no such combination")
        raise InputError(f"{', '.join(options.only().values()) or 'every combination'}: {reason.rstrip('.')}.")
    if options.as_json:
        asked = {} if target is None else {"epsilon": target}
        print(json_text(plain_json("budget", {**asked, "setting": setting, "rows": rows})))
        return
    clients, cohort, sigma = setting["clients"], setting["cohort"], setting.get("noise_multiplier")
    numbers = [f"M = {clients:,}", f"m = {cohort:g} (q = {cohort / clients:.4g})", f"T = {setting['rounds']:,}"]
    numbers += [] if sigma is None else [f"σ = {sigma:.5g}"]
    heads = {"trust": "trust", "sampling": "cohorts", "accountant": "accountant"}
    heads |= {"relation": "neighbours", "adversary": "towards"} if target is None else {}
    table = [[*heads.values(), *([] if target is None else ["σ"]), "ε"]]
    for row in rows:
        if row["epsilon"] is not None:
            how = "exact" if row["reason"].startswith("exact") else row["accountant"]
            sign = "≈ " if row["accountant"] == "gdp" else ""
            least = [] if target is None else [f"{row['noise_multiplier']:.4f}"]
            cells = [str((row | {"accountant": how})[key] or "") for key in heads]
            table.append([*cells, *least, f"{sign}{epsilon_text(row['epsilon'])}"])
    if target is not None:
        print(f"Least noise multiplier σ for ε ≤ {target:g}")
    print(f"{', '.join(numbers)}, δ = {setting['delta']:.4g}\n", *columns(table, left=len(heads)), sep="\n")
    if approximation := next((row["reason"] for row in rows if row["accountant"] == "gdp" and row["epsilon"]), ""):
        mu = approximation.partition("(")[2].partition(")")[0]
        print(f"≈ central limit of Gaussian DP ({mu}): an approximation, not proven.")
