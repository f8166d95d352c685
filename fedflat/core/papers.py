"""Cite the five reproduced papers by the number that recipes and ``fedflat reproduce`` know them by.

Their full titles are in docs/bibliography.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedflat.core.checks import nearest, wrong

CITED = {
    "000": "Shi et al. 2023a",
    "001": "Zhang et al. 2024",
    "002": "Liu et al. 2025",
    "003": "Shi et al. 2023b",
    "004": "Cheng et al. 2022",
}


def number_of(paper: str) -> str:
    """``000`` for ``000``, for ``0`` and for ``Shi et al. 2023a`` in any case and spacing; else what was given.

    >>> number_of("shi et al. 2023b"), number_of("4")
    ('003', '004')
    """
    plain = "".join(paper.lower().split())
    cited = {"".join(name.lower().split()): number for number, name in CITED.items()}
    return cited.get(plain, plain.zfill(3) if plain.isdigit() else paper)


def paper_of(paper: str, have: Iterable[str]) -> str:
    """``number_of`` a paper that is among ``have``; else InputError, with how those are cited."""
    number, known = number_of(paper), list(dict.fromkeys(have))
    if number not in known:
        names = {one: CITED.get(one, one) for one in known}
        allowed = ", ".join(f"{one} ({name})" for one, name in names.items())
        raise wrong("reproduce PAPER", paper, allowed, hint=nearest(paper, names.values()))
    return number
