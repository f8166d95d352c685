"""Whose turn it is, where clients come as they can: those who are connected, whose last turn is far enough back.

Of them the ones that have waited longest are asked, at most m. Each ask is on disk before it is sent, in the operator's
own file beside the noise keys: no restart and no backup of the run's folder brings anybody back earlier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedflat.core import durable
from fedflat.core.checks import RunError
from fedflat.core.schedules import NEVER, Ids, MinSeparation
from fedflat.core.types import RoundState


@dataclass
class CheckIns:
    """Chooses the cohorts of a deployment under ``min-separation``.

    present: who is connected. path: the file of asks. charged: rounds that have a line in the ledger, or in the mark
    beside the noise key: what was asked in another round was never added up, and does not count.

    Raises:
        RunError: the file is not as it was written, or the disk refuses.
    """

    sampler: MinSeparation
    present: Callable[[], Iterable[int]]
    path: Path
    charged: frozenset[int] = frozenset()
    _last: Ids = field(init=False)

    def __post_init__(self) -> None:
        self._last = np.full(self.sampler.clients, NEVER, dtype=np.int64)
        for round, clients in self._asked():
            if round in self.charged:
                self._last[clients] = np.maximum(self._last[clients], round)

    def cohort(self, state: RoundState) -> Ids:
        """The clients to ask in a round, ascending; they are written down before this returns."""
        chosen = self.sampler.next_of(np.array(sorted(self.present()), dtype=np.int64), self._last, state.round)
        line = json.dumps({"round": state.round, "clients": chosen.tolist()}) + "\n"
        try:
            durable.append(self.path, line.encode())
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); nobody was asked") from error
        self._last[chosen] = state.round
        return chosen

    def _asked(self) -> list[tuple[int, list[int]]]:
        """The asks on disk; a last line that a crash tore asked nobody."""
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            *lines, torn = data.split(b"\n")
            if torn:
                os.truncate(self.path, len(data) - len(torn))
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror}), so nobody's last turn is known") from error
        try:
            found = [json.loads(line) for line in lines]
            asked = [(int(one["round"]), [int(client) for client in one["clients"]]) for one in found]
            if any(not 0 <= client < self.sampler.clients for _, clients in asked for client in clients):
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise RunError(f"{self.path}: not as it was written, so nobody's last turn is known") from error
        return asked
