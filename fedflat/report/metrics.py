"""The records of a run folder, read back, and the headline numbers. (``records.folder`` writes them.)

A run folder holds ``recipe.yaml``, ``metrics.jsonl`` (released or public), ``private/private.jsonl`` (simulation only,
never covered by the guarantee), ``ledger.jsonl`` and ``privacy.json``. Everything but the folder itself may be missing:
a run may have been killed before its first round, and a deployment never writes ``private/``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, nearest, wrong

Record = dict[str, Any]
NO_STATEMENT = "the run folder holds no privacy statement (privacy.json)"
MARKS = ("metrics.jsonl", "recipe.yaml")


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
        found = section(self.recipe, "algorithm").get("name") or self.recipe.get("algorithm") or self.name
        return str(found)

    @property
    def seed(self) -> int | None:
        """The seed in the run's recipe."""
        found = self.recipe.get("seed")
        return found if isinstance(found, int) else None


def section(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """``record[key]`` if it is a mapping, otherwise an empty one."""
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def number(value: Any) -> float | None:
    """``value`` as a finite float, or ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """``value`` in JSON's types: non-finite floats to ``None``; arrays and tensors to lists; other objects to text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    return str(value)


def _parsed(line: bytes | str) -> Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # includes a character cut in half
        return None
    return plain(found) if isinstance(found, dict) else None


def read_records(path: Path) -> list[Record]:
    """The records of a ``.jsonl`` file; an absent file is empty, a torn last line is left out.

    Raises:
        InputError: a line before the last one is not a JSON object.
    """
    if not path.is_file():
        return []
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    records: list[Record] = []
    for place, line in enumerate(lines, start=1):
        found = _parsed(line)
        if found is not None:
            records.append(found)
        elif place < len(lines):
            raise wrong(f"{path}, line {place}", line[:40].decode(errors="replace"), "one JSON object per line")
    return records


def _by_round(records: list[Record]) -> list[Record]:
    """One record per round; where a round was written twice the later one counts."""
    latest: dict[Any, Record] = {}
    for place, record in enumerate(records):
        latest[record.get("round", f"line {place}")] = record
    return list(latest.values())


def _name(path: Path, recipe: dict[str, Any]) -> str:
    """The folder's name; a run of a comparison, in ``SETTING/seed-N``, goes by its recipe's name and its seed."""
    folder, named = path.resolve().name, str(recipe.get("name", "run"))
    return f"{named} {folder}" if folder.startswith("seed-") else folder or named


def read_run(folder: Path | str) -> Run:
    """Read a run folder.

    Raises:
        InputError: no such folder (with the nearest run beside it), not a run folder, or an unreadable file in it.
    """
    path = Path(folder)
    if not any((path / mark).is_file() for mark in MARKS):
        raise _no_run(path)
    recipe = _read_yaml(path / "recipe.yaml")
    return Run(
        path=path,
        name=_name(path, recipe),
        recipe=recipe,
        metrics=_by_round(read_records(path / "metrics.jsonl")),
        private=_by_round(read_records(path / "private" / "private.jsonl")),
        privacy=_read_json(path / "privacy.json"),
        audits=_audits(path / "audit.json"),
    )


def read_runs(folders: Iterable[Path | str]) -> list[Run]:
    """Read several runs; a folder that holds run folders (a comparison) stands for all of them, at any depth.

    Raises:
        InputError: as :func:`read_run`, or nothing was given.
    """
    runs: list[Run] = []
    for folder in map(Path, folders):
        inside = [] if any((folder / mark).is_file() for mark in MARKS) else _runs_under(folder)
        runs.extend(read_run(path) for path in inside or [folder])
    if not runs:
        raise wrong("report", "no run", "one or more run folders")
    return runs


def _runs_under(folder: Path) -> list[Path]:
    return sorted({path.parent for mark in MARKS for path in folder.rglob(mark)}) if folder.is_dir() else []


def _no_run(path: Path) -> InputError:
    if path.exists():
        return wrong(f"run folder {path}", "no metrics.jsonl or recipe.yaml in it", "a folder written by fedflat run")
    parent = path.parent
    beside = parent.iterdir() if parent.is_dir() and os.access(parent, os.R_OK | os.X_OK) else ()
    runs = sorted(found.name for found in beside if any(os.path.isfile(found / mark) for mark in MARKS))
    hint = nearest(path.name, runs) or (f"Runs in {parent}: {', '.join(runs[:8])}." if runs else "")
    return wrong(f"run folder {path}", "no such folder", "a folder written by fedflat run", hint=hint)


def _read_yaml(path: Path) -> Record:
    import yaml

    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise wrong(str(path), f"unreadable YAML ({error})", "the recipe written by the run") from error
    return plain(found) if isinstance(found, dict) else {}


def _read_json(path: Path, allowed: str = "the privacy statement written by the run") -> Record:
    if not path.is_file():
        return {}
    found = _parsed(path.read_bytes())
    if found is None:
        raise wrong(str(path), "not a JSON object", allowed)
    return found


def _audits(path: Path) -> list[Record]:
    allowed = "the file written by fedflat audit"
    found = _read_json(path, allowed).get("audits", [])
    if not isinstance(found, list) or not all(isinstance(audit, dict) for audit in found):
        raise wrong(f"{path}: audits", "something else", f"a list of audits, as in {allowed}")
    return found


def column(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """``(round, value)`` wherever ``key`` is a finite number; a record without a round counts from 0."""
    points: list[tuple[int, float]] = []
    for place, record in enumerate(records):
        value = number(record.get(key))
        if value is not None:
            points.append((turn(record, place), value))
    return points


def turn(record: Mapping[str, Any], place: int) -> int:
    """The record's round, or its ``place`` in the file where it names none."""
    found = number(record.get("round"))
    return place if found is None else int(found)


def own_metrics(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys of what else was measured on public test data: the user's own metrics, as ``test_NAME``."""
    known = {"test_loss", "test_accuracy"}
    return sorted({key for record in records for key in record if key.startswith("test_")} - known)


def final_accuracy(run: Run) -> float | None:
    """Test accuracy (0 to 1) of the shared model at the last evaluation; ``None`` if it was never evaluated."""
    points = column(run.metrics, "test_accuracy")
    return points[-1][1] if points else None


def best_accuracy(run: Run) -> float | None:
    """The highest test accuracy of any round: a choice made on test data, so reports say so.

    The last round's for a run that came to nothing (``fates.fate``), for which its best round must not stand.
    """
    found = best_point(run)
    return None if found is None else found[1]


def best_point(run: Run) -> tuple[int, float] | None:
    """(round, test accuracy) of the best round, of the last one where the run came to nothing; None without any."""
    from fedflat.report.fates import fate  # it reads records by this module

    points = column(run.metrics, "test_accuracy")
    if not points:
        return None
    return points[-1] if fate(run) else max(points, key=lambda point: point[1])


def personal_accuracy(run: Run) -> float | None:
    """Mean accuracy of the clients' own models at the last evaluation; private to the simulation."""
    points = column(run.private, "personal_accuracy")
    return points[-1][1] if points else None


def proven_epsilon(run: Run) -> float | None:
    """The ε that is proven for what ran; ``None`` means that none is (infinite)."""
    key = "proven_epsilon" if "proven_epsilon" in run.privacy else "epsilon"
    return number(run.privacy.get(key))


def claimed_epsilon(run: Run) -> float | None:
    """The ε that a paper's formula claims where it is not the proven one; never to be shown alone."""
    claimed = number(run.privacy.get("claimed_epsilon"))
    proven = proven_epsilon(run)
    same = claimed is not None and proven is not None and math.isclose(claimed, proven, rel_tol=1e-3)
    return None if same else claimed


def reasons(run: Run) -> list[str]:
    """Why the proven ε is what it is, in the statement's words."""
    found = run.privacy.get("reasons")
    if isinstance(found, str):
        return [found]
    listed = [item if isinstance(item, str) else json.dumps(item) for item in found] if isinstance(found, list) else []
    return listed or ([] if run.privacy else [NO_STATEMENT])


def spent(run: Run) -> list[tuple[int, float]]:
    """``(round, ε)`` where the recorded ε is the proven one; empty where no ε, or only a claimed one, was recorded."""
    if proven_epsilon(run) is None or claimed_epsilon(run) is not None:
        return []
    return column(run.metrics, "epsilon")


def seconds(run: Run) -> float:
    """Wall-clock seconds, the sum over the recorded rounds."""
    return sum(value for _, value in column(run.metrics, "seconds"))


def summary(run: Run) -> Record:
    """The headline numbers of a run, ready for JSON. Global and personal accuracy are separate keys."""
    accuracy = column(run.metrics, "test_accuracy")
    loss = column(run.metrics, "test_loss")
    best = best_point(run) or (None, None)
    return {
        "name": run.name,
        "recipe": run.recipe.get("name"),
        "algorithm": run.algorithm,
        "seed": run.seed,
        "rounds": len(run.metrics),
        "rounds_planned": run.recipe.get("rounds"),
        "final_accuracy": accuracy[-1][1] if accuracy else None,
        "best_accuracy": best[1],
        "best_round": best[0],
        "final_loss": loss[-1][1] if loss else None,
        "personal_accuracy": personal_accuracy(run),
        "proven_epsilon": proven_epsilon(run),
        "claimed_epsilon": number(run.privacy.get("claimed_epsilon")),
        "simulated_epsilon": number(run.privacy.get("simulated_epsilon")),
        "delta": number(run.privacy.get("delta")),
        "reasons": reasons(run),
        "seconds": seconds(run),
    }
