"""What several runs on the same clients cost when all of them are published: their events composed, from the ledgers.

Rounds of all runs are one composition. Each direction of neighbours (a client leaves, a client joins) is convolved on
its own and the larger ε counts: a client that leaves one run leaves them all, so directions never mix. Laws without a
loss distribution here add their (ε, δ), which is said. Where runs differ in their neighbours the total is zero-out's:
a slot that is emptied is one way of replacing a client's data, so a replace-one account bounds it too; and beside a run
whose turns stay, only emptied ones are covered.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError
from fedflat.privacy.accounting.curves import Step, alone, alone_by_delta, gaussians_in_one, step, steps_epsilon
from fedflat.privacy.accounting.gaussian import gaussian_distance, gaussian_epsilon
from fedflat.privacy.ledger import CHAIN, REASONS, event
from fedflat.privacy.schedules import OWN, gaussians
from fedflat.privacy.verify import drawn, multiplier, recompute, too_few

Entry = Mapping[str, Any]

FIELDS = {
    *CHAIN, *REASONS, "key_id", "round", "draw", "mechanism", "sampling", "relation", "trust", "clients", "cohort", "q",
    "clip", "sensitivity", "std", "noise_multiplier", "delta", "accountant", "epsilon", "cohort_max", "cohort_min",
    "max_participations", "colluders", "noise_cohort", "count_std", "update_multiplier", "evaluation",
    "labels_per_draw", "rounding", "run",
}  # fmt: skip
"""What lines of independent Gaussian noise hold. A line with more is of a law that is not composed here, but added."""


FAULTS = (LookupError, TypeError, ValueError, ZeroDivisionError)
"""What reading lines raises that nobody wrote: a field missing, of another type, or impossible."""


@dataclass(frozen=True)
class Published:
    """One run as its folder states it. epsilon: the proven one, None where none is. folder: to compare releases."""

    name: str
    epsilon: float | None
    delta: float
    entries: Sequence[Entry] = ()
    folder: Path | None = None


@dataclass(frozen=True)
class Total:
    """ε (inf where none is finite) at δ of publishing ``runs`` together; ``unbounded``: those without a guarantee.

    reasons: how it was computed where that is not plain composition, or why there is no finite total.
    """

    runs: tuple[str, ...]
    unbounded: tuple[str, ...]
    epsilon: float
    delta: float
    relation: str
    reasons: tuple[str, ...] = ()


@dataclass
class _Spent:
    """Events of all runs: laws with their rounds, ddgauss lines by their parameters, chances that are taken from δ."""

    steps: Counter[Step] = field(default_factory=Counter)
    discrete: dict[str, list[Entry]] = field(default_factory=dict)
    lost: float = 0.0

    def add(self, run: Published) -> bool:
        """Add a run's lines; False, and nothing is added, where they are none, or not of a law that is known here."""
        try:
            return bool(run.entries) and self._add(run)
        except FAULTS:
            return False

    def _add(self, run: Published) -> bool:
        entries = run.entries
        laws = {(e.get("mechanism"), e.get("sampling"), e.get("trust"), e.get("relation")) for e in entries}
        # A ledger of several laws is none that this program writes, so nothing is concluded from it.
        if len(laws) != 1:
            return False
        ((mechanism, sampling, trust, _),) = laws
        if mechanism == "ddgauss":
            changing = ("round", "epsilon", "key_id", "run", "delta", *CHAIN, *REASONS)
            for e in entries:
                named = json.dumps({k: v for k, v in e.items() if k not in changing}, sort_keys=True)
                self.discrete.setdefault(named, []).append(e)
            return True
        if str(mechanism).startswith("published-"):
            return self._add_messages(entries, sampling == "round-number")
        if entries[0].get("separation") is not None:
            return self._add_turns(run)
        if mechanism not in ("gaussian", "votes") or any(set(e) - FIELDS for e in entries):
            return False
        if trust == "local":
            # A client takes part in so many rounds at most; those with the least noise are assumed.
            most = min(len(entries), entries[0].get("max_participations") or len(entries))
            self.steps.update(Step("gaussian", 1.0, sigma) for sigma in sorted(map(_sigma, entries))[:most])
            return True
        if sampling not in ("poisson", "truncated", "fixed", "full"):
            return False
        kind = "known" if trust == "distributed" else str(sampling)
        rounds = [_step(kind, e) for e in entries]
        # The plan takes the chance of any aborted round out of δ.
        lost = min(1.0, len(entries) * too_few(entries[0])) if trust == "distributed" else 0.0
        self.steps.update(rounds)
        self.lost += lost
        return True

    def _add_turns(self, run: Published) -> bool:
        """Rounds that follow a schedule. A public one's are one Gaussian: what was stated counts planned rounds too."""
        entries, first = run.entries, run.entries[0]
        if any(set(e) - FIELDS - OWN for e in entries) or (run.epsilon or 0.0) < 0 or not 0 < run.delta < 1:
            return False
        sigma, turns = gaussians(entries, drawn(entries))
        if first.get("chance") is None:
            # What was stated counts planned rounds too, so it may say more than the lines do.
            least = 1 / gaussian_distance(run.epsilon or 0.0, run.delta)
            self.steps[Step("gaussian", 1.0, min(sigma, least))] += turns
            return True
        chance = float(first["chance"])
        if {int(e["round"]) for e in entries} != set(range(int(first["rounds"]))) or not 0 < chance <= 1:
            return False
        self.steps[step("poisson", chance, sigma, int(first["clients"]), 0)] += turns
        return True

    def _add_messages(self, entries: Sequence[Entry], scheduled: bool) -> bool:
        """A published procedure's lines are single messages: the busiest client's, or those of Bin(T, q) rounds."""
        first, sigma = entries[0], min(map(_sigma, entries))
        if scheduled:
            from fedflat.core.cohorts import FromRound

            most = FromRound(int(first["clients"]), float(first["cohort"])).busiest(len(entries))
            self.steps[Step("gaussian", 1.0, sigma)] += int(most)
        else:  # a cohort larger than the noise was shared for costs δ/100 (``Published.shares``)
            q, lost = float(first["q"]), float(first["delta"]) / 100
            self.steps[Step("known", q, sigma)] += len(entries)
            self.lost += lost
        return True


def _sigma(entry: Entry) -> float:
    """std / sensitivity: the accounted number where it is the drawn one but for rounding, so that equal rounds meet."""
    drawn = multiplier(entry)
    said = float(entry.get("noise_multiplier") or 0.0) / (2 if entry.get("relation") == "replace-one" else 1)
    return said if math.isclose(said, drawn, rel_tol=1e-9) else drawn


def _step(kind: str, entry: Entry) -> Step:
    q, sigma = float(entry["q"]), _sigma(entry)
    if kind == "known":
        return Step("gaussian", 1.0, sigma) if q >= 1 else Step(kind, q, sigma)
    limit = entry["cohort_max"] if kind == "truncated" else entry["cohort"]
    return step(kind, q, sigma, int(entry["clients"]), int(limit))


def total(runs: Sequence[Published]) -> Total:
    """What publishing all of ``runs`` costs somebody who is the same client in each; see the module.

    The total stands at the largest δ of the runs; runs whose law is not known here add their own ε and δ to it.
    """
    private = [run for run in runs if run.epsilon is not None and math.isfinite(run.epsilon)]
    unbounded = tuple(run.name for run in runs if run not in private)
    names = tuple(run.name for run in private)
    relations = {str(e.get("relation")) for run in private for e in run.entries}
    stricter = relations == {"replace-one"} and all(run.entries for run in private)
    relation = "replace-one" if stricter else "zero-out" if "zero-out" in relations else "add-remove"
    delta = max((run.delta for run in private), default=0.0)
    counted, reasons, broken = _without_repeats(private)
    if broken:
        return Total(names, unbounded, math.inf, delta, relation, (broken,))
    if len(relations) > 1 and "replace-one" in relations:
        reasons.append("Runs with replace-one accounts count for zero-out neighbours, which those accounts bound too.")
    spent = _Spent()
    added = [run for run in counted if not spent.add(run)]
    found = _composed(spent, delta, reasons) if len(added) < len(counted) else 0.0
    at = delta if len(added) < len(counted) else 0.0
    if added:
        shown = ", ".join(run.name for run in added)
        reasons.append(f"ε and δ of {shown} are added as stated: no ledger whose law is composed here.")
    epsilon = found + math.fsum(run.epsilon or 0.0 for run in added)
    return Total(names, unbounded, epsilon, at + math.fsum(run.delta for run in added), relation, tuple(reasons))


@dataclass(frozen=True)
class Curve:
    """What is proven of runs together at every δ. epsilon_of: δ -> ε. mu: where they amount to one Gaussian, its μ."""

    epsilon_of: Callable[[float], float]
    mu: float | None = None


def curve(runs: Sequence[Published]) -> Curve | None:
    """ε of publishing all of ``runs`` as a function of δ, from their ledgers; None where only stated figures are known.

    So it is where one has no guarantee, no line, a round without noise or a law that is not composed here, or where
    noise was used twice.
    """
    counted, _, broken = _without_repeats(runs)
    spent = _Spent()
    if broken or not counted:
        return None
    if not all(run.epsilon is not None and math.isfinite(run.epsilon) and spent.add(run) for run in counted):
        return None
    if any(step.sigma == 0 for step in spent.steps):
        return None
    if spent.discrete or spent.lost:
        return Curve(lambda delta: _composed(spent, delta, []))
    merged = gaussians_in_one(spent.steps)
    if len(merged) > 1:
        return Curve(lambda delta: steps_epsilon(spent.steps, delta))
    ((only, count),) = merged.items()
    if only.kind == "gaussian":
        mu = math.sqrt(count) / only.sigma
        return Curve(lambda delta: gaussian_epsilon(mu, delta), mu)
    return Curve(alone_by_delta(only, count))


def _composed(spent: _Spent, delta: float, reasons: list[str]) -> float:
    """ε at ``delta`` of what is known: loss distributions convolved, and bounds that are only (ε, δ) added to them."""
    summed = len(spent.discrete)
    if summed + bool(spent.steps) > 1:
        reasons.append(
            "The discrete Gaussian's bounds are added, δ being shared: no loss distribution is known for it."
        )
    # δ is one number for all parts, so each gets a share of it.
    share = delta / max(1, summed + bool(spent.steps))
    try:
        discrete = math.fsum(recompute(lines, delta=share).epsilon for lines in spent.discrete.values())
    except InputError as error:
        reasons.append(str(error))
        return math.inf
    return discrete + _least(spent.steps, share - spent.lost)


def _least(steps: Counter[Step], delta: float) -> float:
    """The smaller of two bounds where cohorts of fixed size meet others: their schedules seen, or their own ε added."""
    fixed = {step: n for step, n in steps.items() if step.kind == "fixed"}
    found = steps_epsilon(steps, delta)
    if not fixed or len(steps) == 1 or not math.isfinite(found):
        return found
    rest = {step: n for step, n in steps.items() if step.kind != "fixed"}
    share = delta / (len(fixed) + bool(rest))
    return min(found, steps_epsilon(rest, share) + math.fsum(alone(step, n, share) for step, n in fixed.items()))


def _without_repeats(runs: Sequence[Published]) -> tuple[list[Published], list[str], str]:
    """The runs that count, what to say of repeats, and why there is no total where noise was used twice.

    Runs that share a noise key are one release if all that was released is the same; otherwise their difference is
    free of noise.
    """
    counted: list[Published] = []
    reasons: list[str] = []
    for run in runs:
        # The same key is the same noise: two sums under it would subtract to a sum without noise.
        twin = next((other for other in counted if _keys(run) & _keys(other)), None)
        if twin is None:
            counted.append(run)
        elif _same_release(run, twin):
            reasons.append(f"{run.name} is {twin.name} again (same noise key, same weights): it counts once.")
        else:
            why = "share a noise key but not what they released: their difference is free of noise"
            return counted, reasons, f"{twin.name} and {run.name} {why}, so no total is finite."
    return counted, reasons, ""


def _keys(run: Published) -> set[str]:
    return {str(entry["key_id"]) for entry in run.entries if entry.get("key_id")}


def _same_release(run: Published, other: Published) -> bool:
    """Whether events, released metrics and the weights of the checkpoints are the same, bit for bit."""
    if [event(e) for e in run.entries] != [event(e) for e in other.entries]:
        return False
    found = release_digest(run.folder)
    return found is not None and found == release_digest(other.folder)


def release_digest(folder: Path | None) -> str | None:
    """Of what a run's folder holds of its release: shared weights, and metrics but their times. None without them."""
    from safetensors import SafetensorError, safe_open

    digest, paths = hashlib.sha256(), sorted((folder / "checkpoints").glob("round-*.safetensors")) if folder else []
    if not paths or folder is None:
        return None
    try:
        for path in paths:
            with safe_open(path, framework="np") as file:
                digest.update(path.name.encode() + file.get_tensor("shared").tobytes())
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = {key: value for key, value in json.loads(line).items() if key != "seconds"}
            digest.update(json.dumps(record, sort_keys=True).encode())
    except (OSError, ValueError, SafetensorError):
        return None
    return digest.hexdigest()
