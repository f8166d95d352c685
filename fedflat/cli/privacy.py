"""``fedflat budget`` and ``fedflat calibrate``: what noise proves and what a target ε needs, before any training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedflat import report
from fedflat.cli import Json, Overrides, columns, print_json
from fedflat.core.checks import InputError, in_range, one_of, whole, wrong

if TYPE_CHECKING:
    from fedflat.config.recipe import Recipe
    from fedflat.privacy.plan import Plan

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """M, m, T, σ (std / clip), δ and the limits of the cohort laws and trust models; None where not given."""

    clients: Annotated[int | None, Option(metavar="M")] = None
    cohort: Annotated[float | None, Option(metavar="m")] = None
    rounds: Annotated[int | None, Option(metavar="T")] = None
    noise_multiplier: Annotated[float | None, Option(metavar="σ")] = None
    delta: Annotated[float | None, Option(metavar="δ")] = None
    max_cohort: int | None = None
    min_cohort: int | None = None
    max_participations: int | None = None
    noise_cohort: float | None = None


@dataclass(frozen=True, kw_only=True)
class Options(Numbers):
    """What both commands take: a recipe's numbers, changed by the options.

    Args:
        recipe: A recipe to take the numbers from; options change them.
        clients: Number of clients.
        cohort: Expected cohort.
        rounds: Rounds.
        noise_multiplier: Noise multiplier: noise std / clip.
        delta: Default: 0.1/M.
        max_cohort: Largest cohort (truncated).
        min_cohort: Minimum cohort: fewer shares abort a round (distributed).
        max_participations: Rounds a client takes part in at most (local).
        noise_cohort: Simulate the noise of a larger system with this cohort.
        sampling: Only poisson, truncated or fixed cohorts.
        trust: Only central, distributed or local.
        accountant: Only pld, rdp or fft (budget: also gdp, an approximation).
    """

    recipe: Annotated[str | None, Argument()] = None
    override: Overrides = None
    sampling: str | None = None
    trust: str | None = None
    accountant: str | None = None
    as_json: Json = False

    def only(self) -> dict[str, str]:
        """Return the names that the rows are limited to, checked."""
        from fedflat.core.cohorts import NAMES as SAMPLINGS
        from fedflat.privacy.accounting.curves import ACCOUNTANTS
        from fedflat.privacy.trust import TRUSTS

        allowed = {"trust": TRUSTS, "sampling": SAMPLINGS, "accountant": ACCOUNTANTS}
        given = {name: value for name in allowed if (value := getattr(self, name)) is not None}
        return {name: str(one_of(f"--{name}", value, allowed[name])) for name, value in given.items()}

    def numbers(self) -> dict[str, Any]:
        """Return the numbers given as options."""
        return {field.name: getattr(self, field.name) for field in fields(Numbers)}

    def load(self, only: Mapping[str, str], target: float | None) -> Recipe:
        """Return the recipe with the options, and a target ε, in the place of its own numbers."""
        from fedflat.config.recipe import Recipe

        # An approximation is shown but proves nothing, so no recipe may name it.
        names = {name: value for name, value in only.items() if value != "gdp"}
        changes = {**self.numbers(), **names}
        texts = [f"{KEYS[name]}={value}" for name, value in changes.items() if value is not None]
        if self.noise_multiplier is not None:
            texts.append("privacy.epsilon=null")
        elif target is not None:
            texts += ["privacy.noise_multiplier=null", f"privacy.epsilon={target!r}"]
        return Recipe.load(self.recipe or "", [*(self.override or []), *texts])


KEYS = {
    "clients": "data.clients", "cohort": "cohort.size", "rounds": "rounds",
    "noise_multiplier": "privacy.noise_multiplier", "delta": "privacy.delta", "max_cohort": "cohort.max",
    "min_cohort": "cohort.min", "max_participations": "cohort.max_participations",
    "noise_cohort": "privacy.noise_cohort", "trust": "privacy.trust", "sampling": "cohort.sampling",
    "accountant": "privacy.accountant",
}  # fmt: skip


def budget(options: Options) -> None:
    """ε for given noise, by every applicable trust model, cohort law and accountant.

    Example: fedflat budget --clients 500 --cohort 50 --rounds 300 --noise-multiplier 0.95 --delta 0.002

    Example: fedflat budget quick-start --rounds 100
    """
    only = options.only()
    plan = scheduled_plan(options, only)
    if plan is not None:
        _show_scheduled(plan, only, None, options)
        return
    setting = setting_of(options, only).needs("clients", "cohort", "rounds", "noise_multiplier")
    run, larger = setting.of_this_run(), setting.deployed()
    found: Row = {"setting": run.as_dict(), "rows": _answered(_budget_rows(run, only), only)}
    if larger is not None:
        found["deployed"] = {"setting": larger.as_dict(), "rows": _answered(_budget_rows(larger, only), only)}
    if options.as_json:
        _print_json(found)
        return
    _print_rows(
        run, found["rows"], EPSILON,
        "" if larger is None else "ε of this run: what is proven for the clients that take part in it",
    )  # fmt: skip
    if larger is not None:
        title = f"ε if deployed at population P = {larger.clients:,}: a projection, proven of no run"
        _print_rows(larger, found["deployed"]["rows"], EPSILON, title)


def calibrate(options: Options, *, epsilon: Annotated[float, Option(metavar="ε")], find: str | None = None) -> None:
    """What a target ε needs: the noise multiplier; with σ given, the most rounds, largest cohort or fewest clients.

    Example: fedflat calibrate --epsilon 8 --clients 500 --cohort 50 --rounds 300

    Example: fedflat calibrate --epsilon 8 --clients 500 --cohort 50 --noise-multiplier 0.95

    Args:
        epsilon: The target.
        find: noise-multiplier, rounds, cohort or clients. Default: what is left out, or σ.
    """
    from fedflat.privacy.accounting.curves import proving

    # A larger ε promises nothing.
    in_range("--epsilon", epsilon, 0, 1000, open_low=True)
    only = options.only()
    if "accountant" in only:
        proving(only["accountant"])
    plan = scheduled_plan(options, only, epsilon)
    if plan is not None:
        if find not in (None, "noise-multiplier") or options.noise_multiplier is not None:
            raise wrong("--find", find or "what σ buys", "noise-multiplier for a recipe whose rounds are not alike")
        _show_scheduled(plan, only, epsilon, options)
        return
    setting = setting_of(options, only, epsilon)
    wanted = _wanted(find, setting)
    setting = setting.needs(*(name for name in WANTED if name != wanted))
    larger = setting.deployed() or setting
    rows = _answered(_needed_rows(setting, larger, wanted, epsilon, only), only)
    if options.as_json:
        _print_json({"epsilon": epsilon, "find": wanted, "setting": setting.as_dict(wanted), "rows": rows})
        return
    shown = (wanted, *EPSILON, *(("run_epsilon",) if setting.noise_cohort else ()))
    _print_rows(setting, rows, shown, f"{WANTED[wanted]} for ε ≤ {epsilon:g}", leave=wanted)
    if setting.noise_cohort:
        print(f"ε: if deployed at population P = {larger.clients:,}, a projection. ε here: proven of this run.")


def _needed_rows(setting: Setting, larger: Setting, wanted: str, target: float, only: dict[str, str]) -> list[Row]:
    """Return what ``target`` needs of ``wanted``; larger: the simulated system, or the setting itself."""
    from fedflat.privacy.accounting.budget import calibrate_table, needed_table

    if wanted == "noise_multiplier":
        # With noise_cohort the target is that of the simulated system, as in a recipe.
        rows = calibrate_table(target=target, only=only, **larger.common())
        return [row | {"run_epsilon": _run_epsilon(setting, row)} for row in rows] if setting.noise_cohort else rows
    if setting.noise_cohort is not None:
        raise wrong("--noise-cohort", setting.noise_cohort, "nothing when --find is not noise-multiplier")
    sigma = float(setting.noise_multiplier or 0)
    return needed_table(find=wanted, target=target, noise_multiplier=sigma, **only, **setting.common())


EPSILON = ("epsilon",)
WANTED = {
    "clients": "Fewest clients M", "cohort": "Largest cohort m", "rounds": "Most rounds T",
    "noise_multiplier": "Least noise multiplier σ",
}  # fmt: skip
TITLES = {
    "epsilon": "ε", "run_epsilon": "ε here", "noise_multiplier": "σ", "rounds": "T", "cohort": "m", "clients": "M",
}  # fmt: skip


def _wanted(find: str | None, setting: Setting) -> str:
    if find is not None:
        return str(one_of("--find", find, [n.replace("_", "-") for n in WANTED])).replace("-", "_")
    missing = [name for name in ("clients", "cohort", "rounds") if getattr(setting, name) is None]
    return missing[0] if len(missing) == 1 and setting.noise_multiplier is not None else "noise_multiplier"


def _budget_rows(setting: Setting, only: dict[str, str]) -> list[Row]:
    from fedflat.privacy.accounting.budget import budget_table

    return budget_table(noise_multiplier=float(setting.noise_multiplier or 0.0), only=only, **setting.common())


def _show_scheduled(plan: Any, only: dict[str, str], target: float | None, options: Options) -> None:
    """Print ε, or the σ for a target, of a plan whose account is one of the whole run, by every accountant."""
    from fedflat.privacy.accounting.curves import PROVEN
    from fedflat.privacy.accounting.epsilon import calibrate

    rows: list[Row] = []
    for name in PROVEN if only.get("accountant") is None else (only["accountant"],):
        one = replace(plan, accountant=str(one_of("accountant", name, PROVEN)))
        if target is not None:
            found = calibrate(lambda s, at=one: at.at(s).epsilon(), target, one.noise_multiplier)  # type: ignore[misc]
            one = one.at(found)
        worst = max(one.guarantees(), key=lambda guarantee: guarantee.epsilon)
        rows.append(
            {"trust": one.trust, "sampling": one.sampler.name, "accountant": name, "adversary": worst.adversary,
             "relation": worst.relation, "epsilon": worst.epsilon, "delta": one.delta, "proven": True, "reason": "",
             "noise_multiplier": one.noise_multiplier}
        )  # fmt: skip
    setting = Setting.of(plan, noise_open=target is not None)
    said = plan.mechanism.sentence if plan.mechanism.kind != "independent" else ""
    about = {"setting": setting.as_dict() | plan.mechanism.record(plan), "rows": rows}
    if options.as_json:
        _print_json(about if target is None else {"epsilon": target, "find": "noise_multiplier", **about})
        return
    shown = EPSILON if target is None else ("noise_multiplier", *EPSILON)
    _print_rows(setting, rows, shown, said, leave="noise_multiplier")


def _run_epsilon(setting: Setting, row: Row) -> float | None:
    if row["noise_multiplier"] is None:
        return None
    run = replace(setting, noise_multiplier=row["noise_multiplier"]).of_this_run()
    own = {name: row[name] for name in ("trust", "sampling", "accountant")}
    return next((found["epsilon"] for found in _budget_rows(run, own)), None)


def _answered(rows: list[Row], only: dict[str, str]) -> list[Row]:
    """Return the rows. If none of them applies, the reason is the answer.

    Raises:
        InputError: nothing applies.
    """
    # A row for any sampling does not answer for one that was asked for.
    own = [row for row in rows if row["sampling"] == only.get("sampling")] or rows
    if not any(row["epsilon"] is not None for row in own):
        reason = next((row["reason"] for row in own if row["reason"]), "no such combination")
        asked = ", ".join(only.values()) or "every combination"
        raise InputError(f"{asked}: {reason.rstrip('.')}.")
    return rows


def _print_rows(setting: Setting, rows: list[Row], numbers: tuple[str, ...], title: str = "", leave: str = "") -> None:
    """Print a setting and a table of at most 80 columns; what does not apply is left out of it (``--json`` has the
    reasons)."""
    described = ("relation", "adversary") if any(row.get("relation") for row in rows) else ()
    heads = ["trust", "cohorts", "accountant", *("neighbours", "towards")[: len(described)]]
    notes: dict[str, None] = {}
    table = [[*heads, *(TITLES[name] for name in numbers)]]
    for row in rows:
        if row["epsilon"] is not None:
            words = [row["trust"], row["sampling"], _accountant(row, notes), *(row[name] or "" for name in described)]
            table.append([*words, *(_cell(row, name) for name in numbers)])
    said = [*([title] if title else []), setting.text(leave), ""]
    print("\n".join([*said, *columns(table, left=len(heads)), *notes]))


def _accountant(row: Row, notes: dict[str, None]) -> str:
    """Return what computed a row; the approximation gets its note."""
    if row["accountant"] == "gdp":
        mu = row["reason"].partition("(")[2].partition(")")[0]
        notes[f"≈ central limit of Gaussian DP ({mu}): an approximation, not proven."] = None
    return "exact" if row["reason"].startswith("exact") else str(row["accountant"])


def _cell(row: Row, name: str) -> str:
    value: Any = row[name]
    if value is None:
        return "–"
    if name == "noise_multiplier":
        return f"{value:.4f}"
    if "epsilon" not in name:
        return f"{value:,.0f}"
    return ("≈ " if row["accountant"] == "gdp" else "") + report.epsilon_text(value)


def _print_json(found: Row) -> None:
    from fedflat.privacy.ledger import plain_json

    print_json(plain_json("budget", found))


@dataclass(frozen=True, kw_only=True)
class Setting(Numbers):
    """Numbers of a run or of a larger system, and what a recipe adds to them."""

    colluders: int = 0
    source: str = ""

    @staticmethod
    def of(plan: Plan, noise_open: bool) -> Setting:
        """Return a plan's numbers, without its noise where that is to be found."""
        return Setting(
            clients=plan.sampler.clients, cohort=plan.sampler.size, rounds=plan.rounds, delta=plan.delta,
            noise_multiplier=None if noise_open else plan.noise_multiplier,
        )  # fmt: skip

    def needs(self, *names: str) -> Setting:
        """Return this setting, if it has all of ``names``; δ gets its default.

        Raises:
            InputError: one of them is missing, or a number is out of range.
        """
        for name in names:
            if getattr(self, name) is None:
                raise wrong(f"--{name.replace('_', '-')}", "nothing", "a number, or a recipe that has it")
        if self.rounds is not None:
            whole("--rounds", self.rounds)
        if self.clients is not None:
            whole("--clients", self.clients, 1)
        if self.noise_cohort is not None and self.cohort is not None:
            in_range("--noise-cohort", self.noise_cohort, self.cohort)
        if self.delta is None and self.clients is not None:
            from fedflat.privacy.accounting.epsilon import default_delta

            return replace(self, delta=default_delta(self.clients))
        return self

    def common(self) -> dict[str, Any]:
        """Return the arguments for the tables, without σ."""
        names = ("clients", "cohort", "rounds", "delta", "max_cohort", "min_cohort", "max_participations", "colluders")
        return {name: getattr(self, name) for name in names}

    def of_this_run(self) -> Setting:
        """Return the noise that really is added: σ·size/noise_cohort."""
        if self.noise_cohort is None or self.noise_multiplier is None or self.cohort is None:
            return self
        sigma = self.noise_multiplier * self.cohort / self.noise_cohort
        return replace(self, noise_multiplier=sigma, noise_cohort=None)

    def deployed(self) -> Setting | None:
        """Return the larger system that ``noise_cohort`` simulates: M' = M·noise_cohort/size, the same q, σ and δ."""
        if self.noise_cohort is None or self.clients is None or self.cohort is None:
            return None
        factor = self.noise_cohort / self.cohort
        clients = max(1, round(self.clients * factor))
        largest, least = (None if n is None else round(n * factor) for n in (self.max_cohort, self.min_cohort))
        cohort = self.cohort / self.clients * clients
        return replace(self, clients=clients, cohort=cohort, max_cohort=largest, min_cohort=least, noise_cohort=None)

    def as_dict(self, leave: str = "") -> dict[str, Any]:
        """Return the setting's numbers as plain values, for ``--json``."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "") and name != leave}

    def text(self, leave: str = "") -> str:
        """Return one line: M = 500, m = 50 (q = 0.1), T = 300, σ = 0.95, δ = 0.002."""
        shown = {
            "clients": f"M = {self.clients:,}" if self.clients else "",
            "cohort": f"m = {self.cohort:g}" if self.cohort else "",
            "rounds": f"T = {self.rounds:,}" if self.rounds is not None else "",
            "noise_multiplier": f"σ = {self.noise_multiplier:.5g}" if self.noise_multiplier is not None else "",
            "delta": f"δ = {self.delta:.4g}" if self.delta else "δ = 0.1/M",
        }
        if self.clients and self.cohort and leave not in ("clients", "cohort"):
            shown["cohort"] += f" (q = {self.cohort / self.clients:.4g})"
        return ", ".join(value for name, value in shown.items() if value and name != leave) + self.source


def setting_of(options: Options, only: Mapping[str, str], target: float | None = None) -> Setting:
    """Return the numbers given as options, or a recipe's with the options in their place.

    target: an ε that takes the place of the recipe's own noise.

    Raises:
        InputError: ``-o`` without a recipe, whatever is wrong in the recipe, a method without a Gaussian account.
    """
    name = options.recipe
    if name is None:
        if options.override:
            hint = "Use --clients, --cohort, --rounds and so on."
            raise wrong("-o", options.override[0], "only with a recipe", hint=hint)
        return Setting(**options.numbers())
    from fedflat.assembly.plans import algorithm_of, plan_of

    recipe = options.load(only, target)
    method = algorithm_of(recipe)
    if not method.private:
        raise wrong(name, method.name, "a method with privacy: this one neither clips nor adds noise")
    if method.kind == "ddgauss":
        raise wrong(name, method.name, "a method with Gaussian noise", hint="Its own account is in a run's statement.")
    if recipe.privacy.protocol != "sound":
        hint = "Its claimed and proven ε are in a run's statement."
        raise wrong(name, "privacy.protocol: published", "sound", hint=hint)
    if recipe.data.clients is None:
        raise wrong("--clients", "nothing", f"the number of clients: {name} takes it from its data")
    plan: Any = plan_of(recipe, method, recipe.data.clients)
    cohort = recipe.cohort
    found = replace(
        Setting.of(plan, noise_open=target is not None and options.noise_multiplier is None), max_cohort=cohort.max,
        min_cohort=cohort.min, max_participations=cohort.max_participations, noise_cohort=plan.noise_cohort,
        colluders=plan.colluders,
    )  # fmt: skip
    if method.kind != "votes":
        return found
    # Votes are Gaussian rounds: T counts cohort draws, and σ is per class, so σ/√Q is that of a draw.
    sigma = None if found.noise_multiplier is None else found.noise_multiplier / math.sqrt(plan.mechanism.labels)
    return replace(found, rounds=plan.mechanism.total, noise_multiplier=sigma, source=" (T: cohort draws, σ: per draw)")


def scheduled_plan(options: Options, only: Mapping[str, str], target: float | None = None) -> Plan | None:
    """Return the plan of a recipe whose rounds follow a schedule or share noise; else None.

    Raises:
        InputError: whatever is wrong in the recipe.
    """
    from fedflat.assembly.plans import algorithm_of, plan_of
    from fedflat.privacy.correlated import ScheduledPlan

    if options.recipe is None:
        return None
    recipe = options.load(only, target)
    if recipe.data.clients is None or recipe.cohort.sampling not in ("full", "min-separation", "cyclic-poisson"):
        return None
    plan = plan_of(recipe, algorithm_of(recipe), recipe.data.clients)
    return plan if isinstance(plan.mechanism, ScheduledPlan) else None
