"""What was measured is what is released: how much rounding may add to a clip, in one place.

The principle: the array whose norm was taken is the array that is added, or a proven bound on their difference is part
of the factor. So one client moves a computed sum by at most C·(1 + ``ROUNDING``), and that is the plan's sensitivity.

Every sum before the noise is in float64 (unit roundoff u = 2⁻⁵³) over at most n = ``MOST`` messages, and
γ_k = k·u/(1 − k·u) bounds the relative error of k roundings in any order (Higham 2002, section 3.1). s = ``ROUNDING``:

| what rounds | at most | of s |
|---|---|---|
| additions, with and without the client: each sum by γ_{n+8}·Σ_j C ≤ 2⁻³³·2²⁰·C | 2·2⁻¹³·C | 1/4 |
| products of factors (engine/measured.py), of each client at most ``SHARE``·C | 2·n·s/(4n)·C | 1/2 |
| norm, factor and product of one message: γ_{d+4}·C for d < 2³⁹, and a cast to float32 | 2⁻¹³·C | 1/8 |

Whole-number sums (secure noise, ddgauss) round each message by itself, keep its norm within C, and add exactly.
"""

from __future__ import annotations

ROUNDING = 2.0**-10
"""s: what rounding may add to the clip C, as a share of it. A power of two, so that 1 + s is exact."""
MOST = 1 << 20
"""n: messages in one sum for which s is proven."""
SHARE = ROUNDING / (4 * MOST)
"""What one client's own products may be off by in the sum, as a share of C."""
_UNIT = 2.0**-53


def gamma(terms: int) -> float:
    """γ_k of float64 for k = ``terms`` < 2⁵² roundings."""
    return terms * _UNIT / (1 - terms * _UNIT)
