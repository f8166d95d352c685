"""Processes for tests, from a server that has loaded torch and the rest: a fresh one begins with seconds of imports.

They are handed their work by pickle, as spawned ones are, and unlike a fork of the test's own process they share no
thread, lock or Ray session with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.multiprocessing as multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "dp_accounting.pld.privacy_loss_distribution", "scipy.stats", "sklearn.datasets", "flwr_datasets",
    "fedflat.simulation.run", "fedflat.federation.server", "fedflat.federation.client",
    "flwr.cli.app", "flwr.superlink.main", "flwr.superlink.runtime", "flwr.supernode.cli.flower_supernode",
])  # fmt: skip


@contextmanager
def quick_processes() -> Iterator[None]:
    """Workers of the ``workers`` back end and of experiments come from the server."""
    served = SimpleNamespace(get_context=lambda how: CONTEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", served.get_context)
        patch.setattr("fedflat.simulation.experiment.multiprocessing", served)
        yield
