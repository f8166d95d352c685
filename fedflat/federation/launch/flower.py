"""Which Flower this works with: its own parts are used here, and they change from one minor version to the next."""

from __future__ import annotations

import random
from importlib import metadata, resources

from fedflat.core.checks import wrong
from fedflat.core.extras import missing


def check_flower() -> None:
    """Refuse another Flower than the one that the tests ran with (``fedflat/tested.txt``); its patches are welcome.

    Raises:
        InputError: no Flower, or another minor version.
    """
    lines = resources.files("fedflat").joinpath("tested.txt").read_text(encoding="ascii").splitlines()
    minor = ".".join(dict(line.split("==") for line in lines)["flwr"].split(".")[:2])
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise missing("deploy", f"flwr {minor}.*", "federation") from None
    if ".".join(found.split(".")[:2]) != minor:
        raise wrong("flwr", found, f"{minor}.*, whose inner parts are used: pip install 'flwr=={minor}.*'")


def draw_apart() -> None:
    """Let Flower draw its waits from a generator that nobody else has.

    Each task's process sends signs of life from a thread, with waits from Python's global generator; and local training
    during which that generator moves is refused, since its draws could tell clients of each other.
    """
    from flwr.supercore import heartbeat
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.supercore.retry import retry_invoker

    for module in (heartbeat, inflatable_utils, retry_invoker):
        module.random = random.SystemRandom()
