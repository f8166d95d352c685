"""What an audit found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class AuditResult:
    """One audit of one method or run.

    kind: worlds, mechanism, defect, canaries or one-run. claimed: ε the accounting claims for what was audited;
    proven: ε that is proven for it (inf where no bound exists). lower_bound: ε it has at least, except with probability
    1 − ``confidence``; None for an estimate, which bounds nothing and is in ``estimate``. canary, statistic: those
    that gave the number. runs: releases looked at, per world for a mechanism. violations: of the exact contract 2b
    (empty: it holds), and for worlds every pair further apart than C. details: of worlds, the greatest ``movement``
    over C, by back end and data in ``table``. assumptions: what the number rests on, one sentence each.
    """

    kind: str
    method: str
    claimed: float
    proven: float
    lower_bound: float | None
    confidence: float | None
    canary: str
    statistic: str
    runs: int
    seconds: float
    assumptions: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    estimate: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exceeds_proven(self) -> bool:
        """The proof or the code is wrong: more leaks than is proven to leak at most, or contract 2b is broken."""
        over = self.lower_bound is not None and self.lower_bound > self.proven
        return over or (self.kind != "defect" and bool(self.violations))

    @property
    def exceeds_claimed(self) -> bool:
        """The audit shows that the claimed ε does not hold."""
        return self.lower_bound is not None and self.lower_bound > self.claimed

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON; an infinite number becomes None."""
        facts = asdict(self) | {"exceeds_proven": self.exceeds_proven, "exceeds_claimed": self.exceeds_claimed}
        return {name: _plain(value) for name, value in facts.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
