"""Reproduce the papers' tables and figures: what they print, what runs here, and whether methods rank alike.

Example: a row of a table at a small scale, with what is claimed of the paper's setting and proven of ours::

    from pathlib import Path
    from fedflat.papers.rows import dry, fill
    from fedflat.papers.tables import find

    table = find("000", "table-1").only(["CIFAR-10, IID"], ["DP-FedSAM"])
    print([(row.cell.published, row.claimed, row.proven) for row in dry(table).rows])
    print(fill(dry(table, "smoke"), Path("runs/table-1")).rows[0].ours)

A YAML file for each table (``tables``) and one for all figures (``figures``) say what the papers print and from which
recipe. ``scales`` makes recipes smaller, ``rows`` plans and trains them, ``outcome`` says whether ours rank as printed.
``board`` is the leaderboard. What measures its rows and writes its page is in ``benchmarks/`` of the repository, as are
the records of the papers' tables and what tunes their methods.
"""

__all__ = ["board", "figures", "outcome", "rows", "scales", "tables"]
