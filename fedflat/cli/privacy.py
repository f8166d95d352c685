"""``fedflat budget`` and ``fedflat calibrate``: what noise proves and what a target ε needs, before any training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from fedflat.cli import Json, columns, print_json
from fedflat.core.checks import InputError, in_range, one_of

Row = dict[str, Any]


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
        from fedflat.core.cohorts import NAMES as SAMPLINGS
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
    from fedflat.privacy.accounting.curves import proving

    # A larger ε promises nothing.
    in_range("--epsilon", epsilon, 0, 1000, open_low=True)
    only, setting = options.only(), options.setting()
    proving(only.get("accountant", "pld"))
    _answer(options, setting, calibrate_table(target=epsilon, only=only, **setting), epsilon)


def _answer(options: Options, setting: Row, rows: list[Row], target: float | None = None) -> None:
    """Print what σ proves, or the least σ for a target ε: the setting, and a table of at most 80 columns.

    What does not apply is left out of it (``--json`` has the reasons, and what was asked for).

    Raises:
        InputError: nothing applies, for the reason that it says.
    """
    from fedflat.privacy.ledger import plain_json

    # A row for any sampling does not answer for one that was asked for.
    relevant = [row for row in rows if row["sampling"] == options.sampling] or rows
    if not any(row["epsilon"] is not None for row in relevant):
        reason = next((row["reason"] for row in relevant if row["reason"]), "no such combination")
        raise InputError(f"{', '.join(options.only().values()) or 'every combination'}: {reason.rstrip('.')}.")
    if options.as_json:
        asked = {} if target is None else {"epsilon": target}
        print_json(plain_json("budget", {**asked, "setting": setting, "rows": rows}))
        return
    clients, cohort, sigma = setting["clients"], setting["cohort"], setting.get("noise_multiplier")
    numbers = [f"M = {clients:,}", f"m = {cohort:g} (q = {cohort / clients:.4g})", f"T = {setting['rounds']:,}"]
    numbers += [] if sigma is None else [f"σ = {sigma:.5g}"]
    words = ["trust", "sampling", "accountant", *(("relation", "adversary") if target is None else ())]
    heads = {"sampling": "cohorts", "relation": "neighbours", "adversary": "towards"}
    table = [[*(heads.get(word, word) for word in words), *([] if target is None else ["σ"]), "ε"]]
    for row in rows:
        if row["epsilon"] is not None:
            how = "exact" if row["reason"].startswith("exact") else row["accountant"]
            least = [] if target is None else [f"{row['noise_multiplier']:.4f}"]
            table.append([*(str((row | {"accountant": how})[word] or "") for word in words), *least, _epsilon(row)])
    if target is not None:
        print(f"Least noise multiplier σ for ε ≤ {target:g}")
    print(f"{', '.join(numbers)}, δ = {setting['delta']:.4g}\n", *columns(table, left=len(words)), sep="\n")
    if approximation := next((row["reason"] for row in rows if row["accountant"] == "gdp" and row["epsilon"]), ""):
        mu = approximation.partition("(")[2].partition(")")[0]
        print(f"≈ central limit of Gaussian DP ({mu}): an approximation, not proven.")


def _epsilon(row: Row) -> str:
    from fedflat.report.metrics import epsilon_text

    return ("≈ " if row["accountant"] == "gdp" else "") + epsilon_text(row["epsilon"])
