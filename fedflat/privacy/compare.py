"""Read a privacy statement, and compare it with the one that its run's recipe, ledger and code give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

APART = ("run", "weights", "checksum")
"""Fields that say whose statement it is; each has a check of its own."""
CLOSE = 1e-6
"""By how much of itself a number may differ: what another machine's arithmetic changes."""
WORDS = (
    "trust_model", "mechanism", "prior", "reasons", "not_covered", "noise_source", "floating_point", "warnings",
    "paper_items", "checklist", "facts",
)  # fmt: skip
"""Fields whose sentences may be worded otherwise by another version of fedflat, whose numbers are compared all the
same."""


class Difference(NamedTuple):
    """Where a statement differs, and what it says there and should say."""

    field: str
    stated: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.field} says {_short(self.stated)}, and the run gives {_short(self.found)}"


def differences(stated: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """Every place where a stated figure or sentence is not the one that was found."""
    return list(_within("", _without(stated), _without(found)))


def unsaid(difference: Difference) -> bool:
    """Whether the statement has no such field at all, as one of an earlier version may not."""
    return difference.stated is _NOTHING


def worded(difference: Difference) -> bool:
    """Whether only words differ, in a field that versions word differently."""
    # A number is never a matter of wording, whatever field it stands in.
    numbers = any(isinstance(value, (int, float)) for value in (difference.stated, difference.found))
    return difference.field.partition(".")[0].partition("[")[0] in WORDS and not numbers


def _without(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in APART}


def _within(place: str, stated: Any, found: Any) -> Iterator[Difference]:
    if isinstance(stated, Mapping) and isinstance(found, Mapping):
        for key in (*stated, *(key for key in found if key not in stated)):
            where = f"{place}.{key}" if place else str(key)
            yield from _within(where, stated.get(key, _NOTHING), found.get(key, _NOTHING))
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        for number, (one, other) in enumerate(zip(stated, found)):
            yield from _within(f"{place}[{number}]", one, other)
    elif not _same(stated, found):
        yield Difference(place, stated, found)


def _same(stated: Any, found: Any) -> bool:
    both = (stated, found)
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in both):
        return math.isclose(stated, found, rel_tol=CLOSE, abs_tol=1e-12)
    return type(stated) is type(found) and bool(stated == found)


_NOTHING = "nothing"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
