"""What a run is, written down before anything is drawn: ``private/run.json``, and its public half in the ledger.

A run is its settled recipe (without what cannot change a release: ``engine``, ``evaluation``, ``name``), its data, its
initial weights and layout, and its method. Whatever differs on a resume makes it another run. The digests are HMACs
under a secret of the run's own, so no file tells whose data it was, or which seed, to somebody who can guess.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedflat.core import durable
from fedflat.core.checks import InputError, wrong
from fedflat.core.rng import digest
from fedflat.records.folder import OPENING

FORMAT = 2
PARTS = ("recipe", "data", "model", "method")


@dataclass(frozen=True)
class Identity:
    """What a run is, as SHA-256 digests that stay in memory. method None: it cannot be told apart from others. noise:
    of what mixes one round's noise into others', "" where nothing does; for the key only, as the ledger names it."""

    recipe: str
    data: str = ""
    model: str = ""
    method: str | None = ""
    noise: str = ""

    @property
    def facts(self) -> tuple[str, ...]:
        """All of them, for the key of cohorts and noise."""
        four = (self.recipe, self.data, self.model, self.method)
        return (*("unknown" if part is None else part for part in four), *((self.noise,) if self.noise else ()))

    @property
    def fingerprint(self) -> str:
        """One digest of all parts: the same only for the same run."""
        return hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()


@dataclass(frozen=True)
class Opening:
    """private/run.json: whose files these are.

    run: public random-looking id. secret: keys the digests. attempt: counts fresh keys of this run. digests: of
    ``PARTS``, keyed. recipe_file: SHA-256 of recipe.yaml as written.
    software: what may change bits. key: the public name of the key that is in use, once there is one.
    """

    run: str
    secret: str
    attempt: int
    digests: Mapping[str, str | None]
    recipe_file: str
    software: Mapping[str, Any]
    key: str = ""
    format: int = FORMAT

    @classmethod
    def of(
        cls, identity: Identity, key: bytes, recipe_text: str, software: Mapping[str, Any], run: str | None = None
    ) -> Opening:
        """The opening of a new run. key: of a seeded run its noise key, so that equal runs have equal files; else fresh
        entropy. run: the name of the key file, if there is one."""
        secret, name = digest(key, "secret of a run").hex(), digest(key, "name of a run").hex()[:32]
        file = hashlib.sha256(recipe_text.encode()).hexdigest()
        return cls(run or name, secret, 1, keyed(identity, secret), file, dict(software))

    @property
    def public(self) -> dict[str, Any]:
        """What the ledger's lines carry."""
        found = {"format": self.format, "id": self.run, "attempt": self.attempt, **self.digests}
        return {**found, "software": dict(self.software)}

    def differing(self, identity: Identity) -> list[str]:
        """Which parts of a run are not those it was opened with."""
        here = keyed(identity, self.secret)
        return [part for part in PARTS if here[part] != self.digests.get(part)]

    def is_recipe(self, content: bytes) -> bool:
        """Whether these are recipe.yaml's bytes as they were written."""
        return hashlib.sha256(content).hexdigest() == self.recipe_file

    def write(self, folder: Path) -> None:
        """Write private/run.json, readable by its owner only; a kill leaves the old one or the new one."""
        body = {**vars(self), "digests": dict(self.digests), "software": dict(self.software)}
        (folder / OPENING).parent.mkdir(mode=0o700, exist_ok=True)
        durable.replace(
            folder / OPENING, json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n", mode=0o600
        )

    @classmethod
    def read(cls, folder: Path) -> Opening:
        """The opening of the run in a folder.

        Raises:
            InputError: there is none (a run of before 0.2), or it is damaged.
        """
        path = folder / OPENING
        try:
            body = json.loads(path.read_bytes())
            if body.pop("checksum") != _checksum(body):
                raise ValueError("its checksum does not match")
            return cls(**body)
        except FileNotFoundError as error:
            hint = "A run of fedflat 0.1 can be verified and reported, not resumed."
            raise wrong(str(path), "no such file", "the one this run was opened with", hint=hint) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{path}: found a damaged record; allowed: the file that was written at the start."
            ) from error


def keyed(identity: Identity, secret: str) -> dict[str, str | None]:
    """Digests for the disk: HMACs under the run's secret, the recipe's too, whose seed could be guessed from a hash."""
    found: dict[str, str | None] = {}
    for part in PARTS:
        value = getattr(identity, part)
        text = f"{part}:{value}".encode()
        found[part] = None if value is None else hmac.new(bytes.fromhex(secret), text, "sha256").hexdigest()
    return found


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def software(backend: Any = None, device: str = "cpu", compiled: bool = False) -> dict[str, Any]:
    """What may change the last bits of a result: versions, the engine that was chosen, the processor's instructions."""
    engine = {"backend": getattr(backend, "name", None), "block": getattr(backend, "block", None)}
    engine |= {"device": device.partition(":")[0], "compile": compiled}
    machine = {"machine": platform.machine(), "instructions": torch.backends.cpu.get_cpu_capability()}
    return {**engine, **machine, **versions(("fedflat", "torch", "numpy"))}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of packages."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a folder
            found[package] = "not installed"
    return found
