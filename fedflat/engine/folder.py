"""The files of a run: what was released, what is private to the simulation; append-only or replaced whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.core.checks import InputError, RunError

METRICS, PRIVATE, LEDGER, RECIPE, STATEMENT = (
    "metrics.jsonl",
    "private/private.jsonl",
    "ledger.jsonl",
    "recipe.yaml",
    "privacy.json",
)
PRIVATE_NOTE = "private to the simulation: not covered by the privacy guarantee, never written by a deployment"


def plain(value: Any) -> Any:
    """A JSON value: NaN and infinities become null, tuples lists, numpy and torch scalars numbers."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. ``deployment`` never writes what is private to a simulation."""

    path: Path
    deployment: bool = False

    @classmethod
    def create(cls, path: Path, *, deployment: bool = False) -> RunFolder:
        """A new folder; one that already holds a run is never overwritten."""
        try:
            if (path / METRICS).exists() or (path / LEDGER).exists() or (path / RECIPE).exists():
                raise InputError(
                    f"--out: found {path}, which holds a run; allowed: a new folder, or --resume {path} to go on."
                )
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out: found {path}, which cannot be created ({error.strerror}); allowed: a folder you may write to."
            ) from error
        return cls(path, deployment)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints live."""
        return self.path / "checkpoints"

    def append(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, and one of private/private.jsonl unless this is a deployment."""
        self._line(METRICS, released)
        if not self.deployment:
            self._line(PRIVATE, {"note": PRIVATE_NOTE, **private} if private.get("round") == 0 else private)

    def _line(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            (self.path / name).parent.mkdir(mode=0o700, exist_ok=True)
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(record)) + "\n")
        except OSError as error:
            raise RunError(
                f"{self.path / name}: cannot be written ({error.strerror}); the run stops, resume it later."
            ) from error

    def keep_rounds(self, finished: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Drop metric lines of rounds the checkpoint has not seen (they will run again); return the kept ones."""
        return self._keep(METRICS, finished), self._keep(PRIVATE, finished)

    def _keep(self, name: str, finished: int) -> list[dict[str, Any]]:
        path = self.path / name
        kept = [r for r in read_lines(path) if r["round"] < finished]
        if path.exists():
            replace(path, "".join(json.dumps(record) + "\n" for record in kept))
        return kept


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; a torn last line is left out."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def replace(path: Path, text: str) -> None:
    """Write a whole file so that a kill leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
