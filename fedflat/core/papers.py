"""How the five reproduced papers are cited, by the number that recipes and ``fedflat reproduce`` know them by.

Their full titles are in docs/bibliography.md.
"""

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
