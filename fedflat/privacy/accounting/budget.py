"""What a budget buys: ε by every accountant, cohort law and trust model; the noise for a target."""

import math
from collections.abc import Mapping
from typing import Any

from fedflat.core import NAMES, SECRET, InputError
from fedflat.privacy.accounting.curves import ACCOUNTANTS, APPROXIMATIONS, gaussian_epsilon, gdp_mu
from fedflat.privacy.accounting.epsilon import accounting_params, epsilon, noise_multiplier
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
    return [one for one in every if all(want in (None, value) or value == "any" for want, value in zip(asked, one))]


def _arguments(setting: Row, trust: str, sampling: str, accountant: str) -> Row:
    """The arguments that apply to one combination: a maximum only where the law has one, and so on."""
    law = "poisson" if sampling == "any" else sampling
    arguments = {**setting, "trust": trust, "sampling": law, "accountant": accountant}
    if sampling == "truncated" and arguments.get("max_cohort") is None:
        raise InputError("needs the largest cohort (max_cohort)")
    distributed = trust == "distributed"
    applies = {"max_cohort": sampling == "truncated", "min_cohort": distributed, "colluders": distributed,
               "max_participations": trust == "local"}  # fmt: skip
    return {name: value for name, value in arguments.items() if applies.get(name, True)}


def budget_table(*, only: Mapping[str, str], **setting: Any) -> list[Row]:
    """ε for the given noise under every trust model × cohort law × accountant, or ``only`` some of them.

    only: the rows wanted, by ``trust``, ``sampling`` and ``accountant``; nothing else is computed. setting: the other
    arguments of :func:`fedflat.epsilon`.

    Each row has ``trust, sampling, accountant, adversary, relation, epsilon, delta, proven, reason``. ``epsilon`` is
    the largest over the adversaries (inf without noise), None where nothing applies, with the reason; ``proven`` is
    False where it is an approximation. ``sampling`` is "any" where the figure does not depend on it.

    Raises:
        InputError: a value out of range.
    """
    public = ("clients", "cohort", "rounds", "noise_multiplier", "delta")
    accounting_params(**{name: setting[name] for name in public if name in setting})
    return [_budget_row(setting, *combination) for combination in _combinations(only)]


def _budget_row(setting: Row, trust: str, sampling: str, accountant: str) -> Row:
    row: Row = {"trust": trust, "sampling": sampling, "accountant": accountant, "adversary": None, "relation": None,
                "epsilon": None, "delta": None, "proven": False, "reason": ""}  # fmt: skip
    approximation = accountant in APPROXIMATIONS
    if approximation and (trust, sampling) != ("central", "poisson"):
        return row | {"reason": f"{accountant} approximates Poisson sampling under trust: central only; use pld"}
    try:
        params = accounting_params(**_arguments(setting, trust, sampling, "pld" if approximation else accountant))
        worst = max(guarantees(params), key=lambda guarantee: guarantee.epsilon)
    except InputError as error:
        return row | {"reason": str(error)}
    figures = {name: getattr(worst, name) for name in ("adversary", "relation", "epsilon", "delta")}
    if approximation:
        mu = gdp_mu(setting["cohort"] / setting["clients"], setting["noise_multiplier"], setting["rounds"])
        reason = f"approximation (μ = {mu:.4g}), not a bound"
        return row | figures | {"epsilon": gaussian_epsilon(mu, params.delta), "reason": reason}
    how = "" if worst.accountant == accountant else worst.accountant
    return row | figures | {"proven": math.isfinite(worst.epsilon), "reason": how}


def calibrate_table(*, target: float, only: Mapping[str, str], **setting: Any) -> list[Row]:
    """The noise multiplier that reaches ε = ``target`` for every trust model × cohort law × proving accountant.

    ``setting``: the other arguments of :func:`fedflat.noise_multiplier`. ``only``: as in :func:`budget_table`.
    Rows have ``trust, sampling, accountant, noise_multiplier, epsilon, reason``; noise_multiplier and epsilon are None
    where nothing applies.
    """
    return [_calibrated_row(target, setting, *row) for row in _combinations(only) if row[2] in ("pld", "rdp")]


def _calibrated_row(target: float, setting: Row, trust: str, sampling: str, accountant: str) -> Row:
    row: Row = {"trust": trust, "sampling": sampling, "accountant": accountant}
    try:
        arguments = _arguments(setting, trust, sampling, accountant)
        sigma = noise_multiplier(epsilon=target, **arguments)
        return row | {"noise_multiplier": sigma, "epsilon": epsilon(**arguments, noise_multiplier=sigma), "reason": ""}
    except InputError as error:
        return row | {"noise_multiplier": None, "epsilon": None, "reason": str(error)}
