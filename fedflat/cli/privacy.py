"""``fedflat budget`` and ``fedflat calibrate``: what noise proves and what a target ε needs, before any training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedflat.cli import Json, Overrides, columns, print_json
from fedflat.core.checks import InputError, in_range, one_of, require, whole, wrong

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe
    from fedflat.privacy.plan import Plan

Row = dict[str, Any]
Sigma = Annotated[float | None, Option(metavar="σ", help="Noise multiplier: noise std / clip.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands take: a recipe's numbers, changed by the options; None where not given.

    Args:
        recipe: A recipe to take the numbers from; options change them.
        clients: Number of clients.
        cohort: Expected cohort.
        rounds: Rounds.
        delta: Default: 0.1/M.
        max_cohort: Largest cohort (truncated).
        min_cohort: Minimum cohort: fewer shares abort a round (distributed).
        max_participations: Rounds a client takes part in at most (local).
        sampling: Only this cohort law: poisson, truncated, fixed, full, …
        trust: Only central, distributed or local.
        accountant: Only pld, rdp or fft.
    """

    clients: Annotated[int | None, Option(metavar="M")] = None
    cohort: Annotated[float | None, Option(metavar="m")] = None
    rounds: Annotated[int | None, Option(metavar="T")] = None
    delta: Annotated[float | None, Option(metavar="δ")] = None
    max_cohort: int | None = None
    min_cohort: int | None = None
    max_participations: int | None = None
    recipe: Annotated[str | None, Argument()] = None
    override: Overrides = None
    sampling: str | None = None
    trust: str | None = None
    accountant: str | None = None
    as_json: Json = False

    def only(self) -> dict[str, str]:
        """Return the names that the rows are limited to, checked."""
        from fedflat.core.cohorts import NAMES as SAMPLINGS
        from fedflat.privacy.accounting.curves import PROVEN
        from fedflat.privacy.trust import TRUSTS

        allowed = {"trust": TRUSTS, "sampling": SAMPLINGS, "accountant": PROVEN}
        limits = {name: value for name in allowed if (value := getattr(self, name)) is not None}
        return {name: str(one_of(f"--{name}", value, allowed[name])) for name, value in limits.items()}

    def load(self, noise: Mapping[str, float | None]) -> Recipe:
        """Return the recipe with the options in the place of its own numbers, and with this noise, if it is given."""
        from fedflat.config.recipe import Recipe

        # An approximation is shown but proves nothing, so no recipe may name it.
        given = {key: getattr(self, name) for name, key in KEYS.items()}
        changes = {key: value for key, value in given.items() if value not in (None, "gdp")}
        if any(value is not None for value in noise.values()):
            changes |= {f"privacy.{name}": "null" if value is None else repr(value) for name, value in noise.items()}
        texts = [f"{key}={value}" for key, value in changes.items()]
        return Recipe.load(self.recipe or "", [*(self.override or []), *texts])


KEYS = {
    "clients": "data.clients", "cohort": "cohort.size", "rounds": "rounds", "delta": "privacy.delta",
    "max_cohort": "cohort.max", "min_cohort": "cohort.min", "max_participations": "cohort.max_participations",
    "trust": "privacy.trust", "sampling": "cohort.sampling",
    "accountant": "privacy.accountant",
}  # fmt: skip
"""Each option's key in a recipe."""
NUMBERS = tuple(KEYS)[:7]
"""Those of ``KEYS`` that are numbers."""


def budget(options: Options, *, noise_multiplier: Sigma = None) -> None:
    """ε for given noise, by every applicable trust model, cohort law and accountant.

    Example: fedflat budget --clients 500 --cohort 50 --rounds 300 --noise-multiplier 0.95 --delta 0.002

    Example: fedflat budget quick-start --rounds 100
    """
    _answer(options, sigma=noise_multiplier)


def calibrate(options: Options, *, epsilon: Annotated[float, Option(metavar="ε", help="The target.")]) -> None:
    """The least noise multiplier σ for a target ε, by every applicable trust model, cohort law and accountant.

    Example: fedflat calibrate --epsilon 8 --clients 500 --cohort 50 --rounds 300
    """
    # A larger ε promises nothing.
    in_range("--epsilon", epsilon, 0, 1000, open_low=True)
    _answer(options, target=epsilon)


def _answer(options: Options, sigma: float | None = None, target: float | None = None) -> None:
    """Print what σ proves, or the least σ for a target ε: the setting, and a table of at most 80 columns.

    What does not apply is left out of it (``--json`` has the reasons, and what was asked for).
    """
    from fedflat.privacy.accounting.curves import proving
    from fedflat.privacy.ledger import plain_json

    only = options.only()
    if target is not None and "accountant" in only:
        proving(only["accountant"])
    setting = setting_of(options, sigma, target)
    rows = _answered(setting.rows(only, target), only)
    if options.as_json:
        asked = {} if target is None else {"epsilon": target}
        print_json(plain_json("budget", {**asked, "setting": setting.as_dict(), "rows": rows}))
        return
    described = ("relation", "adversary") if any(row.get("relation") for row in rows) else ()
    words = ["trust", "cohorts", "accountant", *("neighbours", "towards")[: len(described)]]
    notes: dict[str, None] = {}
    table = [[*words, *([] if target is None else ["σ"]), "ε"]]
    for row in rows:
        if row["epsilon"] is not None:
            cells = [row["trust"], row["sampling"], _accountant(row, notes), *(row[name] or "" for name in described)]
            least = [] if target is None else [f"{row['noise_multiplier']:.4f}"]
            table.append([*cells, *least, _epsilon(row)])
    title = "" if target is None else f"Least noise multiplier σ for ε ≤ {target:g}"
    header = [line for line in (title, setting.sentence) if line]
    print("\n".join([*header, setting.text(), "", *columns(table, left=len(words)), *notes]))


def _answered(rows: list[Row], only: dict[str, str]) -> list[Row]:
    """Return the rows. If none of them applies, the reason is the answer.

    Raises:
        InputError: nothing applies.
    """
    # A row for any sampling does not answer for one that was asked for.
    relevant = [row for row in rows if row["sampling"] == only.get("sampling")] or rows
    if not any(row["epsilon"] is not None for row in relevant):
        reason = next((row["reason"] for row in relevant if row["reason"]), "no such combination")
        raise InputError(f"{', '.join(only.values()) or 'every combination'}: {reason.rstrip('.')}.")
    return rows


def _accountant(row: Row, notes: dict[str, None]) -> str:
    """Return what computed a row; the approximation gets its note."""
    if row["accountant"] == "gdp":
        mu = row["reason"].partition("(")[2].partition(")")[0]
        notes[f"≈ central limit of Gaussian DP ({mu}): an approximation, not proven."] = None
    return "exact" if row["reason"].startswith("exact") else str(row["accountant"])


def _epsilon(row: Row) -> str:
    from fedflat.report.metrics import epsilon_text

    return ("≈ " if row["accountant"] == "gdp" else "") + epsilon_text(row["epsilon"])


@dataclass(frozen=True)
class Setting:
    """Numbers of a run, and what a recipe adds to them.

    numbers: M, m, T, δ, σ and the limits of the cohort laws and trust models, as ``fedflat.epsilon`` names them; no σ
    where it is to be found. source: behind the numbers. sentence: one more to print. plan: of a recipe whose rounds
    follow a schedule or share noise, which answers for the whole run.
    """

    numbers: Row
    source: str = ""
    sentence: str = ""
    plan: Plan | None = None

    def rows(self, only: dict[str, str], target: float | None = None) -> list[Row]:
        """Return ε, or with a target the least σ, of every combination that ``only`` allows."""
        from fedflat.privacy.accounting.budget import budget_table, calibrate_table

        if self.plan is not None:
            return _rows_of(self.plan, only, target)
        if target is not None:
            return calibrate_table(target=target, only=only, **self.numbers)
        return budget_table(only=only, **self.numbers)

    def as_dict(self) -> Row:
        """Return the setting's numbers as plain values, for ``--json``."""
        named = self.numbers | {"source": self.source or None}
        account = {} if self.plan is None else self.plan.account.record(self.plan)
        return {name: value for name, value in named.items() if value is not None} | account

    def text(self) -> str:
        """Return one line: M = 500, m = 50 (q = 0.1), T = 300, σ = 0.95, δ = 0.002."""
        clients, cohort, rounds, delta = (self.numbers[name] for name in ("clients", "cohort", "rounds", "delta"))
        sigma = f", σ = {self.numbers['noise_multiplier']:.5g}" if "noise_multiplier" in self.numbers else ""
        share = f"m = {cohort:g} (q = {cohort / clients:.4g})"
        return f"M = {clients:,}, {share}, T = {rounds:,}{sigma}, δ = {delta:.4g}{self.source}"


def _rows_of(plan: Plan, only: dict[str, str], target: float | None) -> list[Row]:
    """Return ε, or the σ for a target, of a plan whose account is one of the whole run, by every accountant."""
    from fedflat.privacy.accounting.curves import PROVEN
    from fedflat.privacy.accounting.epsilon import calibrate as least

    rows: list[Row] = []
    for name in PROVEN if only.get("accountant") is None else (only["accountant"],):
        one = replace(plan, accountant=str(one_of("accountant", name, PROVEN)))
        if target is not None:
            one = one.at(least(lambda s, at=one: at.at(s).epsilon(), target, one.noise_multiplier))  # type: ignore[misc]
        worst = max(one.guarantees(), key=lambda guarantee: guarantee.epsilon)
        rows.append(
            {"trust": one.trust, "sampling": one.sampler.name, "accountant": name, "adversary": worst.adversary,
             "relation": worst.relation, "epsilon": worst.epsilon, "delta": one.delta, "proven": True, "reason": "",
             "noise_multiplier": one.noise_multiplier}
        )  # fmt: skip
    return rows


def setting_of(options: Options, sigma: float | None = None, target: float | None = None) -> Setting:
    """Return the numbers given as options, or a recipe's with the options in their place.

    sigma, target: take the place of the recipe's own noise; with a target, σ is left open.

    Raises:
        InputError: ``-o`` without a recipe, a number that is missing or out of range, whatever is wrong in the recipe,
            a method without a Gaussian account.
    """
    name = options.recipe
    if name is None:
        if options.override:
            hint = "Use --clients, --cohort, --rounds and so on."
            raise wrong("-o", options.override[0], "only with a recipe", hint=hint)
        return Setting(_given(options, {} if target is not None else {"noise_multiplier": sigma}))
    from fedflat.methods.plans import VotesPlan
    from fedflat.privacy.correlated import ScheduledPlan

    recipe = options.load({"noise_multiplier": sigma, "epsilon": target})
    plan = _plan_of(name, recipe)
    cohort, account = recipe.cohort, plan.mechanism
    votes = account if isinstance(account, VotesPlan) else None
    # Votes are Gaussian rounds: T counts cohort draws, and σ is per class, so σ/√Q is that of a draw.
    drawn = plan.noise_multiplier / math.sqrt(votes.labels if votes else 1)
    numbers = {
        "clients": plan.sampler.clients, "cohort": plan.sampler.size, "rounds": votes.total if votes else plan.rounds,
        "delta": plan.delta, "max_cohort": cohort.max, "min_cohort": cohort.min,
        "max_participations": cohort.max_participations, **({} if target is not None else {"noise_multiplier": drawn}),
        "colluders": plan.colluders,
    }  # fmt: skip
    if isinstance(account, ScheduledPlan):
        return Setting(numbers, sentence=account.sentence if account.kind != "independent" else "", plan=plan)
    return Setting(numbers, source=" (T: cohort draws, σ: per draw)" if votes else "")


def _given(options: Options, noise: Row) -> Row:
    """Return the numbers given as options, with δ's default. noise: σ, unless it is to be found.

    Raises:
        InputError: one that is needed is missing, or out of range.
    """
    from fedflat.privacy.accounting.epsilon import default_delta

    numbers = {name: getattr(options, name) for name in NUMBERS} | noise | {"colluders": 0}
    for name in ("clients", "cohort", "rounds", *noise):
        if numbers[name] is None:
            raise wrong(f"--{name.replace('_', '-')}", "nothing", "a number, or a recipe that has it")
    whole("--rounds", numbers["rounds"])
    clients = whole("--clients", numbers["clients"], 1)
    return numbers | {"delta": default_delta(clients) if options.delta is None else options.delta}


def _plan_of(name: str, recipe: Recipe) -> Plan:
    """Return the plan of a recipe. Raises InputError where the Gaussian account does not answer for it."""
    from fedflat.assembly.plans import algorithm_of, plan_of

    method = algorithm_of(recipe)
    require(method.private, name, method.name, "a method with privacy: this one neither clips nor adds noise")
    hint = "Its own account is in a run's statement."
    require(method.kind != "ddgauss", name, method.name, "a method with Gaussian noise", hint=hint)
    hint = "Its claimed and proven ε are in a run's statement."
    require(recipe.privacy.protocol == "sound", name, "privacy.protocol: published", "sound", hint=hint)
    hint = "fedflat plan has the ε of a recipe whose settings were chosen in private."
    require(recipe.privacy.selection is None, name, "privacy.selection", "a recipe without it", hint=hint)
    if recipe.data.clients is None:
        raise wrong("--clients", "nothing", f"the number of clients: {name} takes it from its data")
    if (larger := recipe.privacy.noise_cohort) is not None:
        options = f"--cohort {larger:g} --clients {round(recipe.data.clients * larger / recipe.cohort.size)}"
        hint = f"It simulates a larger system, whose own table is that of -o privacy.noise_cohort=null {options}."
        raise wrong(name, f"privacy.noise_cohort: {larger:g}", "null", hint=hint)
    return plan_of(recipe, method, recipe.data.clients)
