"""Read what runs leave behind, and show it: in the terminal, as tables for a paper, as pages of one HTML file.

Example: the page of a run, or the comparison of several::

    from fedflat.report.html import write_report
    from fedflat.report.metrics import proven_epsilon, read_runs

    write_report(["runs/quick-start"], "report.html")
    for run in read_runs(["runs/compare"]):
        print(run.name, run.seed, proven_epsilon(run))

``metrics`` reads a run folder; ``groups`` puts seeds of one setting together and ``tables`` compares settings;
``figures`` holds the values of charts, which ``pages`` draws for a page and ``plates`` for a file. ``wording`` writes
numbers and fills in templates; what is said stands in ``templates/`` and in the YAML files beside it. ``html`` is the
page of runs, ``flatness`` that of landscapes, ``live`` the one that follows a run, ``card`` the privacy card.
A proven and a claimed ε never share a name, and a claimed one never stands alone.
"""

__all__ = [
    "card", "figures", "flatness", "groups", "html", "live", "metrics", "pages", "plates", "progress", "statement",
    "summary", "tables", "wording",
]  # fmt: skip
