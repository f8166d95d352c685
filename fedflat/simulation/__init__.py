"""One run or a whole experiment on this machine, and everything that is done with what a run left on disk.

Example::

    import fedflat
    from fedflat.simulation.experiment import compare
    from fedflat.simulation.inspection import inspect_run

    if __name__ == "__main__":  # compare starts processes, which read this file again
        fedflat.run("quick-start", out="runs/first")  # recipe, ledger, metrics and statement lie there afterwards
        assert all(check.verdict != "wrong" for check in inspect_run("runs/first"))
        fedflat.load("runs/first").model  # the module with the weights after the last round
        compare(["quick-start"], ["algorithm=dp-fedavg,dp-fedsam"])  # settings × seeds, and a table of them

``run`` gives a ``result``; ``experiment`` runs many and compares them; ``tuning`` chooses settings and pays for that;
``settings`` says which. ``inspection`` checks every record against every other, with what ``recomputed`` makes again
from the others; ``export`` makes folders to hand over.
"""

__all__ = ["experiment", "export", "inspection", "result", "run", "settings", "tuning"]
