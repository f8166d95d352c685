"""Recompute ε from the ledger alone, by another way than the accountant that wrote it, and compare with what is stated.

Each line says what was drawn (std, sensitivity, cohort law); nothing is taken from the plan. The rounds of a run have
one noise multiplier; of an edited ledger the least counts. Poisson-subsampled Gaussian rounds are recomputed by
``independent``, this project's own integration, those of the accountant ``fft`` by dp-accounting; the other laws as
their functions say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedflat.core import InputError, becoming, one_line, require, turning, wrong
from fedflat.privacy import tuning
from fedflat.privacy.accounting.curves import LITTLE, compose_epsilon
from fedflat.privacy.schedules import contradictions, gaussians

Entries = Sequence[Mapping[str, Any]]

LIBRARY_SLACK = 0.01  # dp-accounting's discretisation may lie this share above the exact ε
ROUNDING = 1e-6  # the only share by which a stated ε may lie below the formula that it was stated by


class Recomputed(NamedTuple):
    """``epsilon``: the figure found; ``at_least``: less must not be stated.

    That is the larger of what the exact ε surely reaches by the second accountant, and of the same formula that the
    ledger names, recomputed from the lines: an upper bound is all there is for some laws, and none may be shortened.
    """

    epsilon: float
    at_least: float
    method: str


ONCE = ("q", "clients", "cohort", "cohort_min", "cohort_max", "colluders", "max_participations")
"""Fields of a ledger's lines that a run has one value of."""


@dataclass(frozen=True)
class Verification:
    """What is stated against what the ledger gives; ``epsilon`` fields are inf where nothing is proven or stated.

    ok: every released round is in an unedited ledger whose ε is not above the stated one.
    """

    epsilon_recorded: float
    epsilon_recomputed: float
    method: str
    ok: bool
    notes: tuple[str, ...] = ()


def multiplier(entry: Mapping[str, Any]) -> float:
    """std / sensitivity of a line under its relation, the adaptive clip's count included; 0 where it bounds nothing."""
    std, bound = entry.get("std"), entry.get("sensitivity")
    if not std or bound is None:
        return 0.0
    if not bound:
        return math.inf
    ratio = float(std) / float(bound)
    if entry.get("count_std") is None:
        return ratio
    # Centred bits have sensitivity 1/2 under add-remove and 1 under replace-one (Andrew et al. 2021).
    count = entry["count_std"] * (1 if entry["relation"] == "replace-one" else 2)
    return (ratio**-2 + count**-2) ** -0.5 if count > 0 else 0.0


def recompute(entries: Entries, *, delta: float | None = None) -> Recomputed:
    """ε at ``delta`` (default: the ledger's smallest) of all events of a ledger.

    The accountant that the ledger names is never used to check itself.
    Raises ``InputError`` for lines that name no known mechanism, or mix cohort laws or trust models.
    """
    if not entries:
        return Recomputed(0.0, 0.0, "no event in the ledger")
    laws = {(e.get("mechanism"), e.get("sampling"), e.get("trust")) for e in entries}
    require(len(laws) == 1, "ledger", f"{len(laws)} mechanisms, cohort laws or trust models", "one per run")
    ((mechanism, sampling, trust),) = laws
    # Of Poisson cohorts the largest chance counts; the others' laws are told by the first line.
    alike = (sampling, trust) == ("poisson", "central") or len({tuple(map(e.get, ONCE)) for e in entries}) == 1
    require(alike, "ledger", "cohorts or clients that differ between lines", "the same numbers in every line")
    spent = min(float(e["delta"]) for e in entries) if delta is None else delta
    # To twelve digits, so that rounds whose clips differ still are one law.
    sigma = float(f"{min(map(multiplier, entries)):.12g}")
    if sigma == 0 and mechanism != "ddgauss":
        return Recomputed(math.inf, math.inf, "a round without noise")
    if any(e.get("selection") is not None for e in entries):
        library, ours = tuning.recomputed(entries, spent, sigma)
        return Recomputed(library, ours * (1 - ROUNDING), "private selection, dp-accounting RDP and our own formula")
    ways = {
        _ddgauss: mechanism == "ddgauss",
        _scheduled: entries[0].get("separation") is not None,
        _published: str(mechanism).startswith("published-"),
        _distributed: trust == "distributed",
        _local: trust == "local",
        _fixed: sampling == "fixed",
        _truncated: sampling == "truncated",
    }
    return next((way for way, holds in ways.items() if holds), _poisson)(entries, sigma, spent)


def _not_shortened(figure: Recomputed, event: Any, rounds: int, delta: float, accountant: str = "pld") -> Recomputed:
    """Return the figure with ``at_least`` no smaller than what the formula gives that it was stated by.

    What rdp states is more than is needed, so that less is no fault as long as the second accountant bears it out.
    """
    if accountant not in ("pld", "fft"):
        return figure
    return figure._replace(at_least=max(figure.at_least, compose_epsilon(event, rounds, delta, accountant)))


def poisson(q: float, sigma: float, rounds: int, delta: float, *, accountant: str = "pld") -> Recomputed:
    """Poisson-subsampled Gaussian rounds under add-remove, each with multiplier ``sigma`` > 0."""
    if q == 1:
        epsilon = participation(rounds, 1.0, sigma, delta)
        return Recomputed(epsilon, epsilon, "exact Gaussian composition")
    if sigma < LITTLE:
        # No grid holds such losses, and a hidden cohort spares next to nothing.
        epsilon = participation(rounds, q, sigma, delta)
        return Recomputed(epsilon, epsilon * (1 - LIBRARY_SLACK), "schedule seen, next to no noise")
    if accountant == "fft":
        return _library(_sampled(q, sigma), rounds, delta)
    from fedflat.privacy.accounting.independent import epsilon_bounds

    low, high = epsilon_bounds(q, sigma, rounds, delta)
    return Recomputed((low + high) / 2, low, "own integration of the privacy loss")


def _sampled(q: float, sigma: float) -> Any:
    import dp_accounting as dp

    return dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))


def _library(event: Any, rounds: int, delta: float) -> Recomputed:
    """dp-accounting's own composition of its loss distributions."""
    from dp_accounting import pld

    accountant = pld.PLDAccountant()
    accountant.compose(event, rounds)
    epsilon = float(accountant.get_epsilon(delta))
    return Recomputed(epsilon, epsilon * (1 - LIBRARY_SLACK), "dp-accounting PLD")


def participation(rounds: int, q: float, sigma: float, delta: float) -> float:
    """ε towards someone who sees who takes part: δ(ε) = Σ_n Bin(T, q)(n)·δ_Gauss(ε; √n/σ), summed as it stands.

    q = 1 is the plain composition of ``rounds`` Gaussians with std / sensitivity σ. Terms of chance below 1e-20 are
    left out: the figure is no larger for it.
    """
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import log_ndtr
    from scipy.stats import binom

    if delta <= 0 or sigma == 0:
        return math.inf
    n = np.arange(1, rounds + 1)  # without a participation there is no loss
    weight = np.asarray(binom.pmf(n, rounds, q), dtype=np.float64)
    likely = weight > 1e-20
    if not likely.any() or math.isinf(sigma):
        return 0.0
    weight, mu = weight[likely], np.sqrt(n[likely]) / sigma

    def excess(e: float) -> float:
        moved, base = log_ndtr(mu / 2 - e / mu), e + log_ndtr(-mu / 2 - e / mu)
        return float(weight @ (np.exp(moved) * -np.expm1(np.minimum(base - moved, 0)))) - delta

    if excess(0.0) <= 0:
        return 0.0
    top = float(mu.max())
    return float(brentq(excess, 0.0, top**2 / 2 + top * math.sqrt(2 * math.log(1 / delta)) + 1, xtol=1e-10))


def _distributed(entries: Entries, sigma: float, delta: float) -> Recomputed:
    """Towards the server, which knows the cohorts; the chance of an aborted round is taken from δ."""
    short = too_few(entries[0])
    left = delta + math.expm1(len(entries) * math.log1p(-short)) if short < 1 else 0.0
    epsilon = participation(len(entries), float(entries[0]["q"]), sigma, left)
    return Recomputed(epsilon, epsilon, "mixture over participations, direct sum")


def too_few(entry: Mapping[str, Any]) -> float:
    """Return the chance that a round of trust distributed has fewer honest shares than its minimum cohort."""
    from scipy.stats import binom

    minimum = entry.get("cohort_min")
    if minimum is None or entry["sampling"] == "fixed":
        return 0.0
    return float(binom.cdf(minimum - 1, entry["clients"] - int(entry.get("colluders") or 0), entry["q"]))


def _local(entries: Entries, sigma: float, delta: float) -> Recomputed:
    """Towards the server, which sees each update: the plain composition of the participations allowed."""
    most = min(len(entries), entries[0].get("max_participations") or len(entries))
    epsilon = participation(most, 1.0, sigma, delta)
    return Recomputed(epsilon, epsilon, "exact Gaussian composition")


def _published(entries: Entries, sigma: float, delta: float) -> Recomputed:
    """A published procedure: lines are single messages; its busiest client's in a public schedule, else Bin(T, q)."""
    first, rounds = entries[0], len(entries)
    if first["sampling"] == "round-number":
        from fedflat.core import FromRound

        most = FromRound(int(first["clients"]), float(first["cohort"])).busiest(rounds)
        epsilon = participation(most, 1.0, sigma, delta)
    else:
        epsilon = participation(rounds, float(first["q"]), sigma, delta * 0.99)
    return Recomputed(epsilon, epsilon, "exact Gaussian composition of a client's messages")


def _fixed(entries: Entries, sigma: float, delta: float) -> Recomputed:
    """Fixed cohorts, replace-one: the smaller of dp-accounting's RDP and the bound with the schedule revealed."""
    import dp_accounting
    from dp_accounting import rdp

    first, rounds = entries[0], len(entries)
    revealed = participation(rounds, float(first["q"]), sigma, delta)
    sampled, sizes = dp_accounting.SampledWithoutReplacementDpEvent, (int(first["clients"]), int(first["cohort"]))
    event = sampled(*sizes, dp_accounting.GaussianDpEvent(sigma))
    accountant = rdp.RdpAccountant([1.5, *range(2, 65), 80, 96, 128], dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, rounds)
    least = min(float(accountant.get_epsilon(delta)), revealed)
    checked = Recomputed(least, least * (1 - LIBRARY_SLACK), "dp-accounting RDP, or the schedule revealed if smaller")
    return _not_shortened(checked, event, rounds, delta)


def _poisson(entries: Entries, sigma: float, delta: float, accountant: str = "") -> Recomputed:
    """Poisson cohorts, add-remove. accountant: by default the one that the first line names."""
    accountant = accountant or str(entries[0].get("accountant"))
    q, rounds = max(float(e["q"]) for e in entries), len(entries)
    figure = poisson(q, sigma, rounds, delta, accountant=accountant)
    return _not_shortened(figure, _sampled(q, sigma), rounds, delta, accountant)


def _truncated(entries: Entries, sigma: float, delta: float) -> Recomputed:
    import dp_accounting

    first, rounds = entries[0], len(entries)
    if first["cohort_max"] >= first["clients"]:
        return _poisson(entries, sigma, delta, "pld")
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(first["clients"], first["q"], first["cohort_max"], sigma)
    return _not_shortened(_library(event, rounds, delta), event, rounds, delta)


def _scheduled(entries: Entries, sigma: float, delta: float) -> Recomputed:
    """Rounds that follow a schedule, by the columns in their lines (``schedules.gaussians``)."""
    first, incomplete = entries[0], (LookupError, TypeError, ZeroDivisionError)
    with turning(incomplete, wrong("ledger line 0", "not all of a schedule", "every parameter of its rounds")):
        # The least std of the noise that the lines show, over the clip; of correlated noise that of Z.
        least = min(multiplier(e) * e["sensitivity"] / (e["clip"] * (1 + e.get("rounding", 0.0))) for e in entries)
        sigma, turns = gaussians(entries, float(least))
    if first.get("chance") is not None:
        return poisson(float(first["chance"]), sigma, turns, delta, accountant=str(first["accountant"]))
    epsilon = participation(1, 1.0, sigma, delta)
    return Recomputed(epsilon, epsilon * (1 - ROUNDING), "exact Gaussian over the schedule, from the lines' columns")


def _ddgauss(entries: Entries, sigma: float, delta: float) -> Recomputed:
    """By the published bound from the line's own fields: no second library knows this mechanism."""
    from fedflat.privacy.accounting.discrete import DDGaussAccount

    e = entries[0]
    with becoming(lambda e: wrong("ledger line 0", f"no {e.args[0]}", "every parameter of ddgauss"), KeyError):
        numbers = {name: e[name] for name in ("clients", "cohort", "clip", "granularity", "dimension", "beta", "bits")}
        least = min(x["noise_multiplier"] for x in entries)
        shares = {"n_max": e["n_max"], "colluders": e.get("colluders") or 0, "min_cohort": e["cohort_min"]}
        account = DDGaussAccount(**numbers, **shares, noise_multiplier=least, delta=delta)
    epsilon = max(account.epsilon(len(entries), "recipients"), account.epsilon(len(entries), "server"))
    return Recomputed(epsilon, epsilon * (1 - ROUNDING), "distributed discrete Gaussian, same formulas")


def verify(
    entries: Entries, epsilon: float | None, *, delta: float | None = None, released: Sequence[int] = ()
) -> Verification:
    """Compare a stated ``epsilon`` (None: none is stated) at ``delta`` with the ledger's events.

    released: the rounds whose results were released; each must have its line.
    """
    stated = math.inf if epsilon is None else float(epsilon)
    notes: list[str] = []
    try:
        notes += [*_line_notes(entries), *contradictions(entries)]
        figure = recompute(entries, delta=delta)
    except InputError as error:
        return Verification(stated, math.inf, "none", stated == math.inf, (*notes, str(error)))
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
        # Whoever edits can redo the checksums; dp-accounting asserts.
        reason = f"the ledger's lines are none that fedflat writes ({one_line(error, 120)})"
        return Verification(stated, math.inf, "none", False, (*notes, reason))
    # A released round without a line is the one thing that a ledger must never show.
    missing = sorted(set(released) - {e["round"] for e in entries})
    if missing and stated < math.inf:
        notes.append(f"released without a ledger line: round {', '.join(map(str, missing[:5]))}")
    if stated < figure.at_least * (1 - ROUNDING):
        notes.append(f"stated ε = {stated:.6g}, but the ledger's events give {figure.epsilon:.6g} ({figure.method})")
    return Verification(stated, figure.epsilon, figure.method, not notes, tuple(notes))


def _line_notes(entries: Entries) -> list[str]:
    """Lines whose own figures contradict each other.

    They account for more noise than they drew, or for less than the clip and the rounding that they name (a ledger of
    an earlier version names none).
    """
    notes = []
    for e in entries:
        factor = 2 if e.get("relation") == "replace-one" else 1
        drawn, accounted = multiplier(e) * factor, e.get("noise_multiplier") or 0.0
        if e.get("mechanism") in ("gaussian", "correlated") and accounted > drawn * (1 + ROUNDING):
            notes.append(f"round {e['round']} accounts a noise multiplier of {accounted:.6g}, but drew {drawn:.6g}")
        least = factor * float(e.get("clip") or 0.0) * (1 + float(e.get("rounding") or 0.0))
        stated = e.get("sensitivity")
        if e.get("mechanism") == "gaussian" and stated is not None and stated < least * (1 - ROUNDING):
            notes.append(
                f"round {e['round']} accounts a sensitivity of {stated:.6g}; its clip, with rounding, is {least:.6g}"
            )
    return notes[:5]
