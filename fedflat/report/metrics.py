"""Read a run folder back: its records, its headline numbers, how it ended, and what publishing several costs.

A run folder holds ``recipe.yaml``, ``metrics.jsonl`` (released or public), ``private/private.jsonl`` (simulation only,
never covered by the guarantee), ``ledger.jsonl`` and ``privacy.json``. Everything but the folder itself may be missing:
a run may have been killed before its first round, and a deployment never writes ``private/``.
"""

import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from fedflat.core import InputError, becoming, nearest, plain, read_about, require, wrong
from fedflat.privacy.ledger import read
from fedflat.privacy.statement import is_seeded, rounds_charged
from fedflat.privacy.together import Published, Total, total

Record = dict[str, Any]
NO_STATEMENT = "the run folder holds no privacy statement (privacy.json)"
NO_EPSILON = "∞ (none)"
RUN_FILES = ("metrics.jsonl", "recipe.yaml")


@dataclass(frozen=True)
class Run:
    """One run folder in memory. Non-finite numbers are ``None`` in every record.

    Attributes:
        path: the folder.
        name: the folder's name, or the recipe's where the folder has none.
        recipe: ``recipe.yaml`` with its defaults resolved.
        metrics: one record per round of what was released or is public, ordered as written.
        private: one record per round of what is private to the simulation; empty for a deployment.
        privacy: the privacy statement; empty where there is none.
        audits: what ``fedflat audit`` found, from ``audit.json``; empty where nobody audited the run.
    """

    path: Path
    name: str
    recipe: Record
    metrics: list[Record]
    private: list[Record]
    privacy: Record
    audits: list[Record] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """The method's name, or the run's where the recipe has none."""
        return str(section(self.recipe, "algorithm").get("name") or self.recipe.get("algorithm") or self.name)

    @property
    def seed(self) -> int | None:
        """The seed in the run's recipe."""
        seed = self.recipe.get("seed")
        return seed if isinstance(seed, int) else None


def section(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return ``record[key]`` if it is a mapping, otherwise an empty one."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def listed(record: Mapping[str, Any], key: str) -> list[Any]:
    """Return ``record[key]`` if it is a list, otherwise an empty one."""
    value = record.get(key)
    return value if isinstance(value, list) else []


def preparation(run: Path) -> Record:
    """Return how rows become inputs (public constants), as an export or the last checkpoint says; empty without."""
    # It may be being written or be damaged; whoever loads the run gets the error.
    with contextlib.suppress(OSError, ValueError):
        if (run / "preparation.json").is_file():
            constants = json.loads((run / "preparation.json").read_bytes())
        else:
            newest = max((run / "checkpoints").glob("round-*.safetensors"), default=None)
            state = json.loads(read_about(newest).get("state", "{}")) if newest else {}
            constants = section(state, "made_for").get("preparation")
        return constants if isinstance(constants, dict) else {}
    return {}


def number(value: Any) -> float | None:
    """Return ``value`` as a finite float, or ``None`` for anything else, whole numbers beyond all floats too."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if real else None


def _parsed(line: bytes | str) -> Record | None:
    # A torn last line can end in half a character.
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        return plain(record) if isinstance(record, dict) else None
    return None


def read_records(path: Path) -> list[Record]:
    """Return the records of a ``.jsonl`` file; an absent file is empty, a torn last line is left out.

    Raises:
        InputError: a line is not a JSON object, and is no beginning of one at the file's end.
    """
    if not path.is_file():
        return []
    lines, records = path.read_bytes().split(b"\n"), list[Record]()
    for place, line in enumerate(lines, start=1):
        parsed = _parsed(line)
        if parsed is not None:
            records.append(parsed)
        elif line.strip() and (place < len(lines) or not line.startswith(b"{")):
            # A process that was killed can only have torn the last line, whose end comes last.
            # Not what the line says: it may be private, and the page of a run that goes on is not.
            raise wrong(f"{path}, line {place}", "a damaged line", "one JSON object per line")
    return records


def _by_round(records: list[Record]) -> list[Record]:
    """Return one record per round; where a round was written twice the later one counts. What names none is left
    out."""
    # A run that is resumed writes the round in which it was killed a second time.
    latest = {record["round"]: record for record in records if isinstance(record.get("round"), int)}
    return list(latest.values())


def read_run(folder: Path | str) -> Run:
    """Read a run folder.

    Raises:
        InputError: no such folder (with the nearest run beside it), not a run folder, or an unreadable file in it.
    """
    path = Path(folder)
    if not any((path / mark).is_file() for mark in RUN_FILES):
        raise _no_run(path)
    recipe = _read(path / "recipe.yaml", yaml.safe_load, "the recipe written by the run")
    privacy = _read(path / "privacy.json", json.loads, "the privacy statement written by the run")
    place, named = path.resolve().name, str(recipe.get("name", "run"))
    # A run of a comparison, in SETTING/seed-N, goes by its recipe's name and its seed.
    name = f"{named} {place}" if place.startswith("seed-") else place or named
    released, private = _by_round(read_records(path / "metrics.jsonl")), list[Record]()
    # An account that may not read what is private to the simulation goes without.
    with contextlib.suppress(PermissionError):
        private = _by_round(read_records(path / "private" / "private.jsonl"))
    return Run(path, name, recipe, released, private, privacy, _audits(path / "audit.json"))


def read_runs(folders: Iterable[Path | str]) -> list[Run]:
    """Read several runs; a folder that holds run folders (a comparison) stands for all of them, at any depth.

    Raises:
        InputError: as :func:`read_run`, or nothing was given.
    """
    runs = [read_run(path) for folder in map(Path, folders) for path in run_folders(folder) or [folder]]
    require(bool(runs), "report", "no run", "one or more run folders")
    return runs


def run_folders(folder: Path) -> list[Path]:
    """Return a run's folder itself, or those of every run in a folder, at any depth."""
    if any((folder / mark).is_file() for mark in RUN_FILES):
        return [folder]
    folders = {path.parent for mark in RUN_FILES for path in folder.rglob(mark)} if folder.is_dir() else ()
    # The app of a federation has a recipe too.
    return sorted(path for path in folders if not (path / "roster.json").exists())


def _no_run(path: Path) -> InputError:
    if path.exists():
        return wrong(f"run folder {path}", "no metrics.jsonl or recipe.yaml in it", "a folder written by fedflat run")
    parent = path.parent
    beside = parent.iterdir() if parent.is_dir() and os.access(parent, os.R_OK | os.X_OK) else ()
    runs = sorted(other.name for other in beside if any(os.path.isfile(other / mark) for mark in RUN_FILES))
    hint = nearest(path.name, runs) or (f"Runs in {parent}: {', '.join(runs[:8])}." if runs else "")
    return wrong(f"run folder {path}", "no such folder", "a folder written by fedflat run", hint=hint)


def _read(path: Path, parse: Callable[[str], Any], allowed: str) -> Record:
    """Return the mapping that a file holds; an empty one where there is no file."""
    if not path.is_file():
        return {}
    kinds = (ValueError, RecursionError, yaml.YAMLError)
    with becoming(lambda error: wrong(str(path), f"what cannot be read ({error})", allowed), kinds):
        record = parse(path.read_text(encoding="utf-8"))
    require(isinstance(record, dict), str(path), "no mapping", allowed)
    return cast(Record, plain(record))


def _audits(path: Path) -> list[Record]:
    allowed = "the file written by fedflat audit"
    audits: list[Record] = _read(path, json.loads, allowed).get("audits", [])
    sound = isinstance(audits, list) and all(isinstance(audit, dict) for audit in audits)
    require(sound, f"{path}: audits", "something else", f"a list of audits, as in {allowed}")
    return audits


def column(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return ``(round, value)`` wherever ``key`` is a finite number."""
    return [(record["round"], value) for record in records if (value := number(record.get(key))) is not None]


def values(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the finite numbers under ``key``."""
    return [value for record in records if (value := number(record.get(key))) is not None]


def own_metrics(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of what else was released: the user's own metrics on public test data, as ``test_NAME``, and the
    private evaluation's accuracy."""
    keys = {key for record in records for key in record if key.startswith("test_") or key == "private_accuracy"}
    return sorted(keys - {"test_loss", "test_accuracy"})


def last(records: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Return the last finite number under ``key``; None where there is none."""
    return next(reversed(values(records, key)), None)


def final_accuracy(run: Run) -> float | None:
    """Return the test accuracy (0 to 1) of the shared model at the last evaluation; None if it was never evaluated."""
    return last(run.metrics, "test_accuracy")


def personal_accuracy(run: Run) -> float | None:
    """Return the mean accuracy of the clients' own models at the last evaluation; private to the simulation."""
    return last(run.private, "personal_accuracy")


def proven_epsilon(run: Run) -> float | None:
    """Return the ε that is proven for what ran; ``None`` means that none is (infinite)."""
    return number(run.privacy.get("proven_epsilon" if "proven_epsilon" in run.privacy else "epsilon"))


def bound(run: Run) -> float:
    """Return the ε that is proven for what ran; infinite where none is."""
    return math.inf if (epsilon := proven_epsilon(run)) is None else epsilon


def seeded(run: Run) -> bool:
    """Return whether the run's noise follows its seed, so that its ε is only that of the mechanism."""
    return is_seeded(run.privacy) if run.privacy else section(run.recipe, "privacy").get("randomness") == "seeded"


def epsilon_name(run: Run) -> str:
    """Return what the proven ε of a run is called."""
    return "ε of the mechanism" if seeded(run) else "Proven ε"


def claimed_epsilon(run: Run) -> float | None:
    """Return the ε that a paper's formula claims where it is not the proven one; never to be shown alone."""
    claimed = number(run.privacy.get("claimed_epsilon"))
    proven = proven_epsilon(run)
    # Calibration stops about 1e-4 from its target, so figures this close are the same one.
    same = claimed is not None and proven is not None and math.isclose(claimed, proven, rel_tol=1e-3)
    return None if same else claimed


def reasons(run: Run) -> list[str]:
    """Return why the proven ε is what it is, in the statement's words."""
    return [str(item) for item in listed(run.privacy, "reasons")] or ([] if run.privacy else [NO_STATEMENT])


def spent(run: Run) -> list[tuple[int, float]]:
    """``(round, ε)`` where the recorded ε is the proven one; empty where no ε, or only a claimed one, was recorded."""
    # A claimed ε by round must not be drawn as if it were proven.
    if proven_epsilon(run) is None or claimed_epsilon(run) is not None:
        return []
    return column(run.metrics, "epsilon")


def seconds(run: Run) -> float:
    """Return wall-clock seconds, the sum over the recorded rounds; 0 where they are not known, since they are private.

    Runs of fedflat 0.2 have them in their metrics.
    """
    return sum(values([*run.metrics, *run.private], "seconds"))


def epsilon_text(value: float | None, missing: str = NO_EPSILON, *, round_up: bool = True) -> str:
    """Return ε with three or more significant digits, as every table, page and command prints it.

    missing: the text for None; ``∞ (none)`` where it says that no finite ε is proven. round_up: never print less than
    the value, as a guarantee needs; lower bounds go to the nearest.
    """
    if value is None:
        return missing
    if math.isinf(value):
        return "∞"
    places = 0 if value >= 1000 else 2 if value >= 1 or value <= 0 else 2 - math.floor(math.log10(value))
    if round_up:
        # 1e-9: a value that is already round must not be pushed up by its own rounding error.
        value = math.ceil(value * 10.0**places - 1e-9) / 10.0**places
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def rounds_to(run: Run, target: float) -> float | None:
    """Rounds until the shared model's test accuracy (0 to 1) was first at least ``target``; inf if it never was, None
    without an evaluation.

    Read at the rounds that were evaluated (Liu et al. 2025, Tables II and III).
    """
    points = column(run.metrics, "test_accuracy")
    return next((turn + 1.0 for turn, value in points if value >= target), math.inf) if points else None


def shown_round(run: Run, measure: str = "final", personal: bool = False) -> tuple[int, float] | None:
    """Return (round, accuracy) of the ``best`` or the ``final`` evaluated round; None if none was evaluated. personal:
    of the clients' own models, private to the simulation.

    The best is a choice made on test data, so reports say so. Where the run came to nothing (``fate``) the last round
    stands for it: its best round must not.
    """
    points = column(run.private, "personal_accuracy") if personal else column(run.metrics, "test_accuracy")
    if measure == "best" and points and not fate(run):
        return max(points, key=lambda point: point[1])
    return points[-1] if points else None


def train_accuracy(run: Run, round: int) -> float | None:
    """Return the mean accuracy of a round's minibatches while they were trained on; private to the simulation.

    round: or the last before it in which somebody took part.
    """
    accuracies = column(run.private, "train_accuracy")
    return next((value for turn, value in reversed(accuracies) if turn <= round), None)


def generalisation_gap(run: Run, measure: str = "final") -> float | None:
    """Return the training minus test accuracy at the ``best`` or ``final`` round (Shi et al. 2023a, Table 3);
    private."""
    tested = shown_round(run, measure)
    trained = None if tested is None else train_accuracy(run, tested[0])
    return None if tested is None or trained is None else trained - tested[1]


def finished_rounds(run: Run) -> int:
    """Return how many rounds were finished: by the statement where a line of the metrics was lost."""
    return max(int(number(run.privacy.get("rounds")) or 0), len(run.metrics))


def lost_rounds(stated: object, released: Sequence[Record]) -> list[int]:
    """Return the first rounds, of those that a statement counts, without a line: five at most."""
    there = {record.get("round") for record in released}
    return list(itertools.islice((round for round in range(int(number(stated) or 0)) if round not in there), 5))


def summary(run: Run) -> Record:
    """Return the headline numbers of a run, ready for JSON. Global and personal accuracy are separate keys."""
    best = shown_round(run, "best") or (None, None)
    return {
        "name": run.name, "recipe": run.recipe.get("name"), "algorithm": run.algorithm, "seed": run.seed,
        "rounds": finished_rounds(run), "rounds_planned": run.recipe.get("rounds"), "best_round": best[0],
        "best_accuracy": best[1], "final_accuracy": final_accuracy(run), "final_loss": last(run.metrics, "test_loss"),
        "personal_accuracy": personal_accuracy(run), "proven_epsilon": proven_epsilon(run),
        "randomness": "seeded" if seeded(run) else "secret",
        "claimed_epsilon": number(run.privacy.get("claimed_epsilon")),
        "simulated_epsilon": number(run.privacy.get("simulated_epsilon")), "delta": number(run.privacy.get("delta")),
        "reasons": reasons(run), "seconds": seconds(run),
    }  # fmt: skip


def stated(run: Run) -> Record:
    """Return what templates may say of a run: sections of its recipe and statement, and what is proven and claimed."""
    recipe = {key: section(run.recipe, key) for key in ("algorithm", "data", "model", "cohort", "versions")}
    return {
        **recipe, **{key: section(run.privacy, key) for key in ("checklist", "facts")}, "run": run,
        "epsilon": proven_epsilon(run), "claimed": claimed_epsilon(run), "delta": number(run.privacy.get("delta")),
        "reasons": reasons(run), "seeded": seeded(run), "epsilon_name": epsilon_name(run),
    }  # fmt: skip


FATES = {"diverged": "left finite numbers", "chance": "ended at the accuracy of guessing"}
"""How a run can come to nothing, in words."""
MARKS = {"diverged": "!", "chance": "?"}
"""How its numbers are marked in tables."""
CHANCE, FEW, CHANCE_OF_FEW = 1.25, 4, 1.1
"""Accuracy over that of guessing up to which nothing was learnt, and the same for fewer than ``FEW`` classes."""


@dataclass(frozen=True)
class Guess:
    """The last evaluated model, where it guesses: its accuracy (0 to 1), among how many classes, all as one or not."""

    accuracy: float
    classes: int
    one_class: bool


def fate(run: Run) -> str:
    """Return a key of FATES for a run whose best round must not stand for it; the empty string for any other.

    It diverged if the test loss of an evaluated round, or the last cohort's training loss, is not finite.
    """
    trained = [record["train_loss"] for record in run.private if record.get("cohort") and "train_loss" in record]
    if first_lost(run.metrics) is not None or (trained and number(trained[-1]) is None):
        return "diverged"
    # A method with personal models may never train the shared model's own head: it is not held against guessing.
    return "" if personal_accuracy(run) is not None or guess(run.metrics) is None else "chance"


def first_lost(released: Sequence[Record]) -> Record | None:
    """Return the first record in which an evaluated model's test loss is not finite."""
    evaluated = (r for r in released if "test_loss" in r and number(r.get("test_accuracy")) is not None)
    return next((record for record in evaluated if number(record["test_loss"]) is None), None)


def tested_classes(record: Record) -> list[float]:
    """Return the accuracy of each class that the public test data have."""
    return [accuracy for value in record.get("class_accuracy") or [] if (accuracy := number(value)) is not None]


def guess(released: Sequence[Record]) -> Guess | None:
    """Return the last evaluated model, if it gives one class to everything or is no better than a class at random.

    Each class counts alike too: where most examples are of one class, naming nearly always that one has learnt nothing.
    """
    last = next((r for r in reversed(released) if number(r.get("test_accuracy")) is not None), {})
    by_class = tested_classes(last)
    if len(by_class) < 2:
        return None
    model = Guess(float(last["test_accuracy"]), len(by_class), sorted(by_class) == [0.0] * (len(by_class) - 1) + [1.0])
    most = (CHANCE if model.classes >= FEW else CHANCE_OF_FEW) / model.classes
    return model if model.one_class or min(model.accuracy, sum(by_class) / len(by_class)) <= most else None


@dataclass(frozen=True)
class Cost:
    """The total over the runs on one data set. same_clients: whether their clients are the same in every run."""

    dataset: str
    total: Total
    same_clients: bool


def costs(runs: Sequence[Run]) -> tuple[Cost, ...]:
    """Return what publishing all of ``runs`` costs, for each data set they were trained on; nothing for a single run.

    A run whose ledger charges more than its statement counts has no guarantee there.
    """
    if len(runs) < 2:
        return ()
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(str(section(run.recipe, "data").get("dataset")), []).append(run)
    return tuple(
        Cost(name, total(published(mine)), len(set(map(_clients, mine))) == 1) for name, mine in members.items()
    )


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names, with a number behind each that comes more than once."""
    numbered = [f"{name} #{names[:place].count(name)}" for place, name in enumerate(names, 1)]
    return [name if names.count(name) == 1 else long for name, long in zip(names, numbered, strict=True)]


def published(runs: Sequence[Run]) -> list[Published]:
    """Return runs as their folders state them. Of one name, they are told apart by a number: a path is not public."""
    return list(map(_published, runs, distinct([run.name for run in runs])))


def _published(run: Run, name: str) -> Published:
    entries = []
    with contextlib.suppress(InputError):
        entries = read(run.path / "ledger.jsonl")
    # Without its ledger nobody sees what a run charged, nor whether its noise was used twice.
    unread = not entries and number(run.privacy.get("rounds_charged"))
    epsilon = None if unread or uncounted(run.privacy, entries) else proven_epsilon(run)
    weights = run.privacy.get("weights")
    released = None if weights is None else (weights, run.metrics)
    return Published(name, epsilon, number(run.privacy.get("delta")) or 0.0, entries, released)


def uncounted(statement: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> int:
    """Rounds that the ledger charges and the statement does not: of a run resumed after its end, and then killed."""
    stated = number(statement.get("rounds_charged"))
    return 0 if stated is None else max(0, rounds_charged(0, entries) - int(stated))


def _clients(run: Run) -> str:
    """Return what decides who the clients are: the data's keys, and the seed unless the data say by themselves."""
    data = section(run.recipe, "data")
    # Where the data say whose a row is, the seed does not decide who the clients are.
    natural = section(data, "partition").get("kind") == "natural"
    return json.dumps([data, None if natural else run.seed], sort_keys=True)
