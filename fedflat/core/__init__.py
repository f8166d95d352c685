"""Values that travel through a round, flat vectors, named random streams, and one-line errors.

Example::

    >>> from fedflat.core import in_range, stream
    >>> in_range("privacy.clip", 0.5, 0, open_low=True)  # or: privacy.clip: found -1; allowed: a number > 0.
    0.5
    >>> bool(stream(7, "batches", 3, 12).random() == stream(7, "batches", 3, 12).random())  # round 3, client 12
    True

``types`` has what every room speaks of: ``Algorithm`` and its pieces, ``Broadcast``, ``RoundState``, ``Aggregate``, and
the kinds of clip, cohort law and noise. ``params`` lays a module out as one vector, ``rounding`` adds long vectors and
bounds what that may cost, ``discrete`` draws whole-number noise exactly, ``factors`` has the matrices of correlated
noise. ``held`` and ``identity`` look into objects of a user's own: has one changed, and which one is it.

Other rooms import what they use from here; a name's file is imported when the name is first asked for, so that commands
which need no torch start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.core.checks import *
    from fedflat.core.cohorts import *
    from fedflat.core.durable import *
    from fedflat.core.held import *
    from fedflat.core.imports import *
    from fedflat.core.loss import *
    from fedflat.core.params import *
    from fedflat.core.process import *
    from fedflat.core.rng import *
    from fedflat.core.rounding import *
    from fedflat.core.types import *

_FILES = (
    "checks", "durable", "imports", "process", "rng", "types", "params", "cohorts", "loss", "rounding", "held",
    "factors", "discrete", "identity",
)  # fmt: skip
"""In the order in which a name is looked for: first those that need neither NumPy nor torch."""


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return import_module(f"fedflat.core.{name}")
    for file in () if name.startswith("_") else _FILES:
        if hasattr(module := import_module(f"fedflat.core.{file}"), name):
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'fedflat.core' has no attribute {name!r}")
