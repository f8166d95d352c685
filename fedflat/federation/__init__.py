"""The same recipe on a real Flower federation: its programs, and the two apps, which call the simulation's functions.

Example, a federation of real processes on this machine::

    fedflat deploy quick-start-dp-fedsam --nodes 4 -o cohort.size=4 --out fed  # a Flower project: keys, README.md, …
    python -m fedflat.federation.local fed                                     # start all programs, run, stop them

On real machines the programs are started one by one: ``superlink`` by the operator, ``supernode`` by each client,
``close`` to end a run for good, ``lock`` for a new operator's token, ``task`` for a client's new key.

The ServerApp is ``server`` (the simulation's loop) with ``transport`` as its back end; ``replies`` checks what comes
in, ``secagg`` adds under masks where the server is not trusted. The ClientApp is ``client`` with its disk, ``store``.
``wire`` and ``bounds`` say what a message looks like and how large it may be, ``doors`` who is heard at all.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "Project": "project",
    "check_flower": "processes",
    "client_app": "client",
    "server_app": "server",
    "write_examples": "store",
    "write_project": "project",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    # These modules import torch and flwr, which take seconds: only who asks for one of them waits.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
