"""What a budget buys: ε by every accountant, cohort law and trust model; the noise for a target."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fedflat.core.checks import InputError
from fedflat.core.cohorts import NAMES, SECRET
from fedflat.privacy.accounting.curves import PROVEN
from fedflat.privacy.accounting.epsilon import accounting_params, epsilon, noise_multiplier
from fedflat.privacy.trust import guarantees

Row = dict[str, Any]
NAMED = ("trust", "sampling", "accountant")
ANY = MappingProxyType[str, str]({})
APPLIES = {
    "max_cohort": ("sampling", "truncated"), "min_cohort": ("trust", "distributed"),
    "colluders": ("trust", "distributed"), "max_participations": ("trust", "local"),
}  # fmt: skip
"""Arguments that only one cohort law or trust model takes."""


def _combinations(only: Mapping[str, str]) -> list[Row]:
    """Return trust, sampling and accountant of each row. Without amplification one accountant is enough, or the figure
    does not depend on the cohort (sampling: any). only: as in :func:`budget_table`.
    """
    laws = SECRET if only.get("sampling") is None else NAMES
    central = [("central", sampling, accountant) for sampling in laws for accountant in PROVEN]
    distributed = [("distributed", sampling, "pld") for sampling in laws]
    every = [*central, *distributed, ("local", "any", "pld"), ("local", "any", "rdp")]
    rows = [dict(zip(NAMED, combination)) for combination in every]
    return [
        row for row in rows if all(only.get(name) in (None, value) or value == "any" for name, value in row.items())
    ]


def _arguments(setting: Row, row: Row) -> Row:
    """Return the arguments that apply to a row."""
    if row["sampling"] == "truncated" and setting.get("max_cohort") is None:
        raise InputError("needs the largest cohort (max_cohort)")
    law = "poisson" if row["sampling"] == "any" else row["sampling"]
    asked = {
        name: value
        for name, value in setting.items()
        if name not in APPLIES or row[APPLIES[name][0]] == APPLIES[name][1]
    }
    return {**asked, **row, "sampling": law}


def budget_table(*, only: Mapping[str, str] = ANY, **setting: Any) -> list[Row]:
    """ε for the given noise under every trust model × cohort law × accountant, or ``only`` some of them.

    only: the rows wanted, by ``trust``, ``sampling`` and ``accountant``; nothing else is computed. setting: the other
    arguments of :func:`fedflat.epsilon`.

    Each row has ``trust, sampling, accountant, adversary, relation, epsilon, delta, proven, reason``. ``epsilon`` is
    the largest over the adversaries (inf without noise, and then not proven), None where nothing applies, with the
    reason. ``sampling`` is "any" where the figure does not depend on it.

    Raises:
        InputError: a value out of range.
    """
    names = ("clients", "cohort", "rounds", "noise_multiplier", "delta")
    accounting_params(**{name: setting[name] for name in names if name in setting})
    return [_budget_row(setting, row) for row in _combinations(only)]


def _budget_row(setting: Row, row: Row) -> Row:
    figures: Row = dict.fromkeys(("adversary", "relation", "epsilon", "delta"))
    try:
        worst = max(guarantees(accounting_params(**_arguments(setting, row))), key=lambda guarantee: guarantee.epsilon)
    except InputError as error:
        return row | figures | {"proven": False, "reason": str(error)}
    figures = {name: getattr(worst, name) for name in figures}
    how = "" if worst.accountant == row["accountant"] else worst.accountant
    return row | figures | {"proven": math.isfinite(worst.epsilon), "reason": how}


def calibrate_table(*, target: float, only: Mapping[str, str] = ANY, **setting: Any) -> list[Row]:
    """The noise multiplier that reaches ε = ``target`` for every trust model × cohort law × accountant.

    ``setting``: the other arguments of :func:`fedflat.noise_multiplier`. ``only``: as in :func:`budget_table`.
    Rows have ``trust, sampling, accountant, noise_multiplier, epsilon, reason``; noise_multiplier and epsilon are None
    where nothing applies.
    """
    rows = (row for row in _combinations(only) if row["accountant"] != "fft")
    return [_calibrated_row(target, setting, row) for row in rows]


def _calibrated_row(target: float, setting: Row, row: Row) -> Row:
    try:
        arguments = _arguments(setting, row)
        sigma = noise_multiplier(epsilon=target, **arguments)
        return row | {"noise_multiplier": sigma, "epsilon": epsilon(**arguments, noise_multiplier=sigma), "reason": ""}
    except InputError as error:
        return row | {"noise_multiplier": None, "epsilon": None, "reason": str(error)}
