"""Which colour and dash a method has: the same on every page, so that two reports can be read side by side."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

COLOURS, DASHES = 7, 4
"""Kinds of lines that the style sheet has; coprime, so that one number names a pair."""
EVERY = COLOURS * DASHES

# A method's place gives its colour first, then its dash: the first seven are told apart by colour alone. A method of
# one's own gets a place from its name. Adding a name at the end leaves all others as they are.
HOMES = (
    *("fedavg", "dp-fedavg", "dp-fedsam", "dp-fedpgn", "dp-fedpgn-ls", "dp-fedadam", "dp-disk"),
    *("fedsam", "dp-fedavg-ls", "dp-fedsam-topk", "dp-fednsam", "dp-fedprox", "dp-scaffold", "class-statistics"),
    *("ddgauss", "dp-fedavg-blur", "dp-fedsam-blur", "fed-smp-randk", "fed-smp-topk", "fed-normec", "dp-fedavg-lus"),
    *("ae-dpfl", "dp-fedavg-blurs", "dp2-fedsam", "centaur", "dp-fedavg-ft", "dp-fedsam-ft", "p-fedsam"),
)


def style_of(method: str) -> int:
    """The number of a method's line: colour ``style % COLOURS``, dash ``style % DASHES``."""
    place = HOMES.index(method) if method in HOMES else zlib.crc32(method.encode()) % EVERY
    return _number(place % COLOURS, place // COLOURS)


def dashed(style: int, more: int) -> int:
    """The style with the same colour whose dash is ``more`` places on."""
    return _number(style % COLOURS, style % DASHES + more)


def styles(methods: Sequence[str]) -> list[int]:
    """A style for each line of a page, given its method; no two alike.

    Settings of one method share its colour and differ in their dash. Where all lines are of one method, or a method
    has more settings than there are dashes, colours tell its lines apart.
    """
    several = len(set(methods)) > 1
    found: list[int] = []
    homes = {style_of(method) for method in methods}
    for method in methods:
        own = style_of(method)
        dashes = [dashed(own, more) for more in range(DASHES)]
        colours = [_number(own % COLOURS + more, own % DASHES) for more in range(COLOURS)]
        others = [style for style in (*(dashes if several else colours), *range(EVERY)) if style not in homes]
        found.append(next((style for style in (own, *others) if style not in found), len(found) + EVERY))
    return found


def _number(colour: int, dash: int) -> int:
    """The number below ``EVERY`` with this colour and this dash (the Chinese remainder of both)."""
    return next(n for n in range(EVERY) if n % COLOURS == colour % COLOURS and n % DASHES == dash % DASHES)
