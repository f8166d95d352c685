"""How many of n entries a share is: one rule for every mask."""

from __future__ import annotations

import math
from fractions import Fraction


def count_of(share: float, size: int) -> int:
    """⌈share·size⌉ for the number that was meant: 0.3 of 10 is 3, although 1 − 0.7 is 0.30000000000000004.

    share: in [0, 1], read as the nearest fraction with a denominator up to 10⁹. A positive share keeps at least one
    entry; the result is at most ``size``.
    """
    if share <= 0 or size <= 0:
        return 0
    return min(size, max(1, math.ceil(Fraction(share).limit_denominator(10**9) * size)))
