"""Who spoilt a secure aggregation, by number, and when the server stops asking them, or stops altogether.

What counts is what no honest client does, whatever its data and its network: a message of another form, a false deal,
complaint, signature or share. Silence is none of these, and nobody is put off for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedflat.core import durable
from fedflat.core.checks import RunError


@dataclass
class Culprits:
    """The record of one run.

    path: one line for each round with an exclusion, in the operator's own folder; it survives restarts. limit: a client
    that was excluded from so many rounds is asked no more. aborts: charged rounds in a row without a result, for
    another reason than a small draw, after which the run stops; counted from the start of this server.
    """

    path: Path
    limit: int = 3
    aborts: int = 3
    strikes: Counter[int] = field(init=False)
    _in_vain: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = self.path.read_bytes() if self.path.exists() else b""
        if last := text.rpartition(b"\n")[2]:  # a kill in ``note``: half a line goes, a whole one gets its end
            text = text + b"\n" if last.endswith(b"}}") else text.removesuffix(last)
            durable.replace(self.path, text)
        try:
            self.strikes = Counter(int(client) for line in text.splitlines() for client in json.loads(line)["excluded"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.path}: cannot be read ({error}); mend or delete the line, and start again"
            ) from error

    @property
    def off(self) -> set[int]:
        """Clients that are asked no more in this run."""
        return {client for client, count in self.strikes.items() if count >= self.limit}

    def note(self, round: int, excluded: Mapping[int, str]) -> set[int]:
        """Add one round's exclusions, durably; the clients that are put off from now on."""
        if not excluded:
            return set()
        before = self.off
        line = json.dumps({"round": round, "excluded": {str(client): excluded[client] for client in sorted(excluded)}})
        durable.append(self.path, line.encode() + b"\n")
        self.strikes.update(excluded.keys())
        return self.off - before

    def came_to(self, round: int, fault: str) -> None:
        """How a round ended: why it was aborted, or nothing."""
        self._in_vain = [*self._in_vain, f"round {round}: {fault}"] if fault else []

    def stop_if_in_vain(self) -> None:
        """Raise RunError before another round is spent, if the last ones came to nothing."""
        if len(self._in_vain) >= self.aborts:
            seen = f"{len(self._in_vain)} charged rounds in a row were aborted ({'; '.join(self._in_vain)})"
            raise RunError(
                f"the run stops: {seen}; nothing is lost, start it again when the cause is mended; "
                f"{self.path.parent} has the counts"
            )
