"""What publishing all runs of a comparison costs together, in words and as a record; a claim beside every table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from fedflat.core.checks import InputError
from fedflat.privacy.ledger import read
from fedflat.privacy.statement import rounds_charged
from fedflat.privacy.together import Published, Total, total
from fedflat.report import metrics
from fedflat.report.metrics import Run, section

NAMED = 3
"""So many runs are named in a sentence; of more, the number."""


@dataclass(frozen=True)
class Cost:
    """The total over the runs on one data set. same_clients: whether their clients are the same in every run."""

    dataset: str
    total: Total
    same_clients: bool


def costs(runs: Sequence[Run]) -> tuple[Cost, ...]:
    """What publishing all of ``runs`` costs, for each data set they were trained on; nothing for a single run.

    Reads each run's ledger; where there is none that verifies, the stated ε and δ count.
    """
    if len(runs) < 2:
        return ()
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(str(section(run.recipe, "data").get("dataset")), []).append(run)
    return tuple(
        Cost(name, _total(tuple(published(run, names) for run in mine)), len({_clients(run) for run in mine}) == 1)
        for name, mine in members.items()
        for names in [_names(mine)]
    )


def _total(runs: tuple[Published, ...]) -> Total:
    """Kept: a page asks twice, and writing several files asks again."""
    kept = tuple((run.name, run.epsilon, run.delta, json.dumps(list(run.entries)), run.folder) for run in runs)
    return _kept_total(kept)


@lru_cache(maxsize=8)
def _kept_total(kept: tuple[tuple[Any, ...], ...]) -> Total:
    return total([Published(n, epsilon, delta, json.loads(lines), at) for n, epsilon, delta, lines, at in kept])


def _names(runs: Sequence[Run]) -> Mapping[str, str]:
    """Path -> the run's name, with its method and seed where two runs have the same name."""
    plain = [run.name for run in runs]
    shown = [r.name if plain.count(r.name) == 1 else f"{r.algorithm} seed {r.seed}" for r in runs]
    return {str(r.path): s if shown.count(s) == 1 else str(r.path) for r, s in zip(runs, shown)}


def published(run: Run, names: Mapping[str, str]) -> Published:
    """A run as its folder states it. names: path -> what it is called."""
    try:
        entries = read(run.path / "ledger.jsonl")
    except InputError:
        entries = []
    delta = metrics.number(run.privacy.get("delta")) or 0.0
    return Published(names[str(run.path)], metrics.proven_epsilon(run), delta, entries, run.path)


def uncounted(run: Run, entries: Sequence[Mapping[str, Any]]) -> int:
    """Rounds that the ledger charges and the statement does not: of a run resumed after its end, and then killed."""
    stated = metrics.number(run.privacy.get("rounds_charged"))
    return 0 if stated is None else max(0, rounds_charged(0, entries) - int(stated))


def _clients(run: Run) -> str:
    """What decides who the clients are: the data's keys, and the seed unless the data say by themselves."""
    data = section(run.recipe, "data")
    natural = section(data, "partition").get("kind") == "natural"
    return json.dumps([data, None if natural else run.seed], sort_keys=True)


def cost_sentences(found: Sequence[Cost]) -> list[str]:
    """One or a few sentences for each data set."""
    return [sentence for cost in found for sentence in _sentences(cost, len(found) > 1)]


def _sentences(cost: Cost, several: bool) -> list[str]:
    whole, where = cost.total, f" on {cost.dataset}" if several else ""
    listed = []
    if len(whole.runs) > 1:
        listed.append(f"All {len(whole.runs)} private runs{where} published together: {_figure(whole)}.")
    elif whole.runs and several:
        listed.append(f"The one private run{where}: {_figure(whole)}.")
    listed += list(whole.reasons) if len(whole.runs) > 1 else []
    if whole.unbounded and whole.runs:
        listed.append(f"With {_few(whole.unbounded)}{where} published too, there is no guarantee.")
    if len(whole.runs) > 1 and math.isfinite(whole.epsilon) and not cost.same_clients:
        listed.append(
            "These runs split the data into clients differently (by seed or setting). The total supposes that a client "
            "is the same in all of them; for a client of one split the runs on other splits are not in it."
        )
    return listed


def _figure(whole: Total) -> str:
    if not math.isfinite(whole.epsilon):
        return "no finite ε"
    shown = f"{whole.epsilon:,.0f}" if whole.epsilon >= 1000 else f"{whole.epsilon:.3g}" if whole.epsilon < 1 else ""
    return f"ε = {shown or f'{whole.epsilon:.2f}'} at δ = {whole.delta:.3g} ({whole.relation})"


def _few(names: Sequence[str]) -> str:
    if len(names) > NAMED:
        return f"{len(names)} runs without a finite ε"
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def cost_record(cost: Cost) -> dict[str, Any]:
    """Plain values: the total's fields beside ``dataset`` and ``same_clients``."""
    return {"dataset": cost.dataset, "same_clients": cost.same_clients, **asdict(cost.total)}
