"""Which Flower this works with: its own parts are used here, and they change from one minor version to the next."""

from __future__ import annotations

from importlib import metadata, resources

from fedflat.core.checks import wrong


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
        raise wrong("flwr", "none installed", f"{minor}.*: pip install 'fedflat[federation]'") from None
    if ".".join(found.split(".")[:2]) != minor:
        raise wrong("flwr", found, f"{minor}.*, whose inner parts are used: pip install 'flwr=={minor}.*'")
