"""What a budget buys: ε by every accountant, cohort law and trust model; the noise for a target."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fedflat.core.checks import InputError, one_of
from fedflat.core.cohorts import NAMES, SECRET
from fedflat.privacy.accounting.curves import ACCOUNTANTS, APPROXIMATIONS, gdp_mu
from fedflat.privacy.accounting.epsilon import (
    accounting_params,
    approximate_epsilon,
    clients_for,
    cohort_for,
    epsilon,
    noise_multiplier,
    rounds_for,
)
from fedflat.privacy.trust import guarantees

Row = dict[str, Any]


def _combinations(only: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(trust, sampling, accountant). Without amplification the accounts are exact, or do not depend on the cohort.

    only: as in :func:`budget_table`.
    """
    laws = SECRET if only.get("sampling") is None else NAMES
    central = [("central", sampling, accountant) for sampling in laws for accountant in ACCOUNTANTS]
    distributed = [("distributed", sampling, "pld") for sampling in laws]
    every = [*central, *distributed, ("local", "any", "pld"), ("local", "any", "rdp")]
    asked = [only.get(name) for name in ("trust", "sampling", "accountant")]
    return [one for one in every if all(want in (None, own) or own == "any" for want, own in zip(asked, one))]


def _own_setting(setting: Row, trust: str, sampling: str, accountant: str) -> Row:
    """The arguments that apply to one combination: a maximum only where the law has one, and so on."""
    law = "poisson" if sampling == "any" else sampling
    found = {**setting, "trust": trust, "sampling": law, "accountant": accountant}
    if sampling == "truncated" and found.get("max_cohort") is None:
        raise InputError("needs the largest cohort (max_cohort)")
    dropped = set() if sampling == "truncated" else {"max_cohort"}
    dropped |= set() if trust == "distributed" else {"min_cohort", "colluders"}
    dropped |= set() if trust == "local" else {"max_participations"}
    return {name: value for name, value in found.items() if name not in dropped}


def budget_table(*, only: Mapping[str, str] = MappingProxyType({}), **setting: Any) -> list[Row]:
    """ε for the given noise under every trust model × cohort law × accountant, or ``only`` some of them.

    only: the rows wanted, by ``trust``, ``sampling`` and ``accountant``; nothing else is computed. setting: the other
    arguments of :func:`fedflat.epsilon`.

    Each row has ``trust, sampling, accountant, adversary, relation, epsilon, delta, proven, reason``. ``epsilon`` is
    the largest over the adversaries (inf without noise), None where nothing applies, with the reason; ``proven`` is
    False where it is an approximation. ``sampling`` is "any" where the figure does not depend on it.

    Raises:
        InputError: a value out of range.
    """
    accounting_params(**_approximated(setting))
    return [_budget_row(setting, *combination) for combination in _combinations(only)]


def _budget_row(setting: Row, trust: str, sampling: str, accountant: str) -> Row:
    row: Row = {"trust": trust, "sampling": sampling, "accountant": accountant, "adversary": None, "relation": None,
                "epsilon": None, "delta": None, "proven": False, "reason": ""}  # fmt: skip
    approximation = accountant in APPROXIMATIONS
    if approximation and (trust, sampling) != ("central", "poisson"):
        return row | {"reason": f"{accountant} approximates Poisson sampling under trust: central only; use pld"}
    try:
        params = accounting_params(**_own_setting(setting, trust, sampling, "pld" if approximation else accountant))
        worst = max(guarantees(params), key=lambda found: found.epsilon)
    except InputError as error:
        return row | {"reason": str(error)}
    found = {name: getattr(worst, name) for name in ("adversary", "relation", "epsilon", "delta")}
    if approximation:
        mu = gdp_mu(setting["cohort"] / setting["clients"], setting["noise_multiplier"], setting["rounds"])
        reason = f"approximation (μ = {mu:.4g}), not a bound"
        return row | found | {"epsilon": approximate_epsilon(**_approximated(setting)), "reason": reason}
    how = "" if worst.accountant == accountant else worst.accountant
    return row | found | {"proven": math.isfinite(worst.epsilon), "reason": how}


def _approximated(setting: Row) -> Row:
    """What the approximation depends on."""
    names = ("clients", "cohort", "rounds", "noise_multiplier", "delta")
    return {name: setting[name] for name in names if name in setting}


def calibrate_table(
    *,
    target: float,
    clients: int,
    cohort: float,
    rounds: int,
    only: Mapping[str, str] = MappingProxyType({}),
    **setting: Any,
) -> list[Row]:
    """The noise multiplier that reaches ε = ``target`` for every trust model × cohort law × proving accountant.

    ``setting``: delta, max_cohort, min_cohort, max_participations, colluders. ``only``: as in :func:`budget_table`.
    Rows have ``trust, sampling, accountant, noise_multiplier, epsilon, reason``; noise_multiplier and epsilon are None
    where nothing applies.
    """
    base = {"clients": clients, "cohort": cohort, "rounds": rounds, **setting}
    names = [each for each in _combinations(only) if each[2] in ("pld", "rdp")]
    return [_solved_row("noise_multiplier", target, base, *each) for each in names]


def needed_table(
    *,
    find: str,
    target: float,
    trust: str = "central",
    sampling: str = "poisson",
    accountant: str | None = None,
    **setting: Any,
) -> list[Row]:
    """The most ``rounds``, the largest whole ``cohort`` or the least ``clients`` within ε = ``target``, σ being given.

    One row for each proving accountant, or for the one given, under one trust model and cohort law.

    find: rounds, cohort or clients; ``setting``: the others, noise_multiplier, and what else epsilon takes. Rows are as
    in :func:`calibrate_table`, with ``find`` for noise_multiplier; None where nothing applies or reaches the target.
    """
    one_of("find", find, [name for name in SOLVERS if name != "noise_multiplier"])
    base = {name: value for name, value in setting.items() if name != find}
    every = ("pld", "rdp") if trust != "distributed" else ("pld",)
    chosen = [(trust, sampling, name) for name in every if accountant in (None, name)]
    return [_solved_row(find, target, base, *names) for names in chosen]


SOLVERS: dict[str, Any] = {
    "noise_multiplier": noise_multiplier, "rounds": rounds_for, "cohort": cohort_for, "clients": clients_for,
}  # fmt: skip


def _solved_row(find: str, target: float, base: Row, trust: str, sampling: str, accountant: str) -> Row:
    row: Row = {"trust": trust, "sampling": sampling, "accountant": accountant, find: None, "epsilon": None}
    try:
        own = _own_setting(base, trust, sampling, accountant)
        found = SOLVERS[find](epsilon=target, **own)
        if not found:
            return row | {find: found, "reason": f"no number of {find} stays within ε = {target:g}"}
        return row | {find: found, "epsilon": epsilon(**{**own, find: found}), "reason": ""}
    except InputError as error:
        return row | {"reason": str(error)}
