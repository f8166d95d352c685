"""Read what runs leave behind, and show it: in the terminal, as tables for a paper, as pages of one HTML file.

Example: the page of a run, or the comparison of several::

    from fedflat.report import read_runs, write_report

    write_report(["runs/quick-start"], "report.html")
    for run in read_runs(["runs/compare"]):
        print(run.name, run.seed, proven_epsilon(run))

``metrics`` reads a run folder; ``groups`` puts seeds of one setting together and ``tables`` compares settings;
``figures`` holds the values of charts, which ``pages`` draws for a page and ``plates`` for a file. ``wording`` writes
numbers and fills in templates; what is said stands in ``templates/`` and in the YAML files beside it. ``html`` is the
page of runs, ``flatness`` that of landscapes, ``live`` the one that follows a run, ``card`` the privacy card.
A proven and a claimed ε never share a name, and a claimed one never stands alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.report.figures import figures_of_groups
    from fedflat.report.groups import Group
    from fedflat.report.html import public, render, write_report
    from fedflat.report.metrics import (
        Run,
        epsilon_text,
        own_metrics,
        proven_epsilon,
        read_run,
        read_runs,
        uncounted,
    )
    from fedflat.report.plates import write_figure
    from fedflat.report.progress import ASKED, Bars, ExperimentProgress, Progress, RunEvent, State, waiting_text
    from fedflat.report.summary import DivergenceWatch, cautions, print_comparison, print_summary, summary_rows
    from fedflat.report.wording import duration, filled

__all__ = [
    "ASKED", "Bars", "DivergenceWatch", "ExperimentProgress", "Group", "Progress", "Run", "RunEvent", "State",
    "cautions", "duration", "epsilon_text", "figures_of_groups", "filled",
    "own_metrics", "print_comparison", "print_summary", "proven_epsilon", "public", "read_run",
    "read_runs", "render", "summary_rows", "uncounted", "waiting_text", "write_figure", "write_report",
]  # fmt: skip
_MODULES = ("metrics", "wording", "progress", "groups", "figures", "summary", "plates", "html")


def __getattr__(name: str) -> Any:
    # The command line imports this room for every command: --help and --version wait for no page, table or torch. So
    # what is quick to import is asked first.
    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_module(f"{__name__}.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
