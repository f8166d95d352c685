"""One run or a whole experiment on this machine, and everything that is done with what a run left on disk.

Example::

    import fedflat
    from fedflat.simulation import compare, inspect_run, load

    fedflat.run("quick-start", out="runs/first")  # recipe, ledger, metrics and statement lie in the folder afterwards
    compare(["quick-start"], ["algorithm=dp-fedavg,dp-fedsam"])  # settings × seeds, and a table of them
    assert all(check.verdict != "wrong" for check in inspect_run("runs/first"))
    load("runs/first").predict(rows)

``run`` gives a ``result``; ``experiment`` runs many and compares them; ``tuning`` chooses settings and pays for that;
``planning`` says what a recipe will cost before it is run. ``inspection`` checks every record against
every other, with what ``recomputed`` makes again from the others; ``export`` makes folders to hand over.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "Result": "result", "attest": "export", "compare": "experiment", "data_for": "experiment",
    "drowned": "planning", "expand": "settings", "figures": "inspection", "forecast": "planning",
    "inspect_run": "inspection", "load": "result", "refuse_damage": "inspection", "tune": "tuning",
    "tune_on_proxy": "tuning", "write_ending": "run",
}  # fmt: skip
"""What other rooms use, and its module. ``run`` and ``export`` are modules here; the functions are fedflat's own."""


def __getattr__(name: str) -> Any:
    # A run's modules load torch, which takes seconds: nobody waits for what he does not use.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
