"""Read a privacy statement, and compare it with the one that its run's recipe, ledger and code give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedflat.core.checks import wrong

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


SEEDED = (
    "The noise of this run follows its seed: whoever knows or finds the seed can take the noise off, so the model "
    "protects nobody, and ε is that of the mechanism, as it would hold with secret noise."
)


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


def is_seeded(found: Mapping[str, Any]) -> bool:
    """Return whether a statement's noise follows the run's seed, so that its ε is only that of the mechanism."""
    old = found.get("proven_epsilon") is not None and str(found.get("noise_source")).startswith("simulation")
    return bool(found.get("caution")) or old


def refuse_seeded(where: str, found: Mapping[str, Any]) -> None:
    """Refuse to hand over a run on clients of one's own whose noise can be drawn again from its seed.

    Raises:
        InputError: it is one.
    """
    facts = found.get("facts") or {}
    # A path or a name with dots is a table of one's own; published names are plain words.
    named = (facts.get("data") or {}).get("dataset")  # 0.2 did not say whose clients they were
    published = isinstance(named, str) and named.replace("-", "").isalnum()
    if is_seeded(found) and facts.get("own_clients", not published):
        hint = "Its noise can be drawn again. Train once more with privacy.randomness: secret."
        raise wrong(where, "a run on clients of one's own with privacy.randomness: seeded", "a secret one", hint=hint)


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
