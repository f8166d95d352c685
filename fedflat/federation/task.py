"""What all parties of a deployment hold alike: recipe, public form of the data, roster, and a hash of them, the pin.

The population M is the roster, fixed before round 0: each client's number, and the public key with which its SuperNode
authenticates. The server draws cohorts from it, whether a client is connected or not, so who happens to be online
changes neither q nor the denominator.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedflat.assembly.records import DataSpec
from fedflat.config.method import algorithm_of
from fedflat.config.recipe import Recipe
from fedflat.core import durable, reading, require, turning, wrong
from fedflat.federation.bounds import Limit, Limits
from fedflat.federation.processes import program
from fedflat.federation.wire import PROTOCOL
from fedflat.methods.noise import trust_of

RECIPE, TASK, ROSTER = "recipe.yaml", "task.json", "roster.json"


@dataclass(frozen=True)
class Roster:
    """Public keys in client order, in OpenSSH form without a comment (``ecdsa-sha2-nistp384 AAAA…``)."""

    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise wrong("roster.json", "the same public key for two clients", "one key for each client")

    @cached_property
    def loaded(self) -> dict[int, EllipticCurvePublicKey]:
        """Client number -> its key, which authenticates its SuperNode, and signs; InputError if one is no key."""
        return {client: load_key(key) for client, key in enumerate(self.keys)}

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """A key as Flower has it (PEM) -> the number of its client."""
        form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return {key.public_bytes(*form): client for client, key in self.loaded.items()}

    def connected(self, nodes: Iterable[Any]) -> dict[int, int]:
        """Return client number -> Flower node id, for the nodes whose authenticated key is in the roster.

        Of two nodes with one key (which Flower refuses to register) none counts.
        """
        pairs = [(self.numbers[bytes(n.public_key)], n.node_id) for n in nodes if bytes(n.public_key) in self.numbers]
        count = Counter(client for client, _ in pairs)
        return {client: node for client, node in pairs if count[client] == 1}

    @classmethod
    def read(cls, path: Path) -> Roster:
        """Return the roster in a JSON file; InputError if it is none."""
        with reading(path, "no roster", "the file that fedflat deploy wrote"):
            value = json.loads(path.read_text(encoding="utf-8"))
            keys = tuple(str(entry["public_key"]) for entry in value["clients"])
            ordered = [entry["client"] for entry in value["clients"]] == list(range(len(keys)))
        require(ordered, str(path), "client numbers with gaps or in another order", "0, 1, 2, …")
        roster = cls(keys)
        _ = roster.loaded  # checks them all
        return roster


def load_key(text: str) -> EllipticCurvePublicKey:
    """Return a public key in OpenSSH form; InputError if it is no elliptic-curve key."""
    fault = wrong("roster.json: public_key", text[:24], "an elliptic-curve public key in OpenSSH form")
    with turning((ValueError, UnsupportedAlgorithm), fault):
        key = load_ssh_public_key(text.encode())
    if not isinstance(key, EllipticCurvePublicKey):
        raise fault
    return key


@dataclass(frozen=True)
class Task:
    """One deployment's recipe, data form and roster. limits: how large its messages may be.

    pin: the same hash over all three at every party. identity: over recipe and form only, so that a run goes on when a
    client's key was rotated.
    """

    recipe: Recipe
    form: DataSpec
    roster: Roster
    limits: Limits
    pin: str = ""
    identity: str = ""

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Return the task in an app's folder; InputError if a file is missing or damaged."""
        roster = Roster.read(folder / ROSTER)
        allowed = "the folder that fedflat deploy of this version wrote; a run of another version is ended with that"
        with reading(folder, "no task", allowed):
            content = json.loads((folder / TASK).read_text(encoding="utf-8"))
            form = DataSpec(**{**content["form"], "input_shape": tuple(content["form"]["input_shape"])})
            limits = Limits(**{name: Limit(*map(int, pair)) for name, pair in content["bytes"].items()})
            texts = [(folder / name).read_bytes() for name in (RECIPE, TASK, ROSTER)]
        spoken, allowed = content.get("protocol"), f"{PROTOCOL}, as this version of fedflat speaks"
        require(spoken == PROTOCOL, f"{folder / TASK}: protocol", spoken, allowed)
        clients = len(roster.keys)
        require(clients == form.clients, str(folder / ROSTER), f"{clients} clients", f"{form.clients}, as in {TASK}")
        return cls(Recipe.load(folder / RECIPE), form, roster, limits, pin_of(texts), pin_of(texts[:2]))

    def write(self, folder: Path) -> None:
        """Write task.json and roster.json beside the recipe."""
        value = {"protocol": PROTOCOL, "form": asdict(self.form), "bytes": asdict(self.limits)}
        roster = {"clients": [{"client": i, "public_key": key} for i, key in enumerate(self.roster.keys)]}
        for name, part in ((TASK, value), (ROSTER, roster)):  # a full disk leaves the file that was there
            durable.replace(folder / name, json.dumps(part, indent=1) + "\n", mode=0o644)


def pin_of(texts: list[bytes]) -> str:
    """Return the SHA-256 (hex) of files, unambiguously joined."""
    return hashlib.sha256(b"".join(len(text).to_bytes(8, "big") + text for text in texts)).hexdigest()


def check_deployable(recipe: Recipe) -> None:
    """Refuse what has no sound form on real machines, with the reason."""
    method = algorithm_of(recipe)
    trust = trust_of(recipe, method)
    privacy, simulate = recipe.privacy, "Simulate it: fedflat run."
    hint = "A published procedure without a proof is for reproducing tables, not for people's data."
    require(privacy.protocol != "published", "privacy.protocol", "published", "sound", hint=hint)
    require(privacy.randomness != "seeded", "privacy.randomness", "seeded", "secret in a deployment")
    task = recipe.task if recipe.loss is None else f"{recipe.task} with a loss of one's own"
    require(task in ("classification", "next-token"), "task", task, "classification or next-token", hint=simulate)
    require(not recipe.evaluation.private, "evaluation.private", True, "false in a deployment", hint=simulate)
    hint = "A deployment has the clients it has."
    require(privacy.noise_cohort is None, "privacy.noise_cohort", privacy.noise_cohort, "nothing", hint=hint)
    require(method.kind != "votes", "algorithm.name", method.name, "a method whose message is an update", hint=simulate)
    algorithm, hint = f"{method.name} with trust: distributed", "Only whole-number messages can be added under masks."
    summed = trust != "distributed" or method.kind == "ddgauss"
    require(summed, "algorithm.name", algorithm, "ddgauss, or trust: central", hint=hint)


def replace_key(app: Path, client: str, key: Path) -> str:
    """Put a public key (OpenSSH form) in the place of a client's in the roster; return the app's new pin.

    Raises:
        InputError: no such client, no elliptic-curve key, or a key that the roster has already.
    """
    task = Task.read(app)
    if not re.fullmatch(r"\d{1,9}", client) or int(client) >= task.form.clients:
        raise wrong("CLIENT", client[:20], f"0 to {task.form.clients - 1}")
    with reading(key, "no key", "the client's auth.pub"):
        text = " ".join(key.read_text(encoding="ascii").split()[:2])
    load_key(text)
    keys = list(task.roster.keys)
    keys[int(client)] = text
    replace(task, roster=Roster(tuple(keys))).write(app)
    return Task.read(app).pin


@program("task APP [CLIENT AUTH.PUB]")
def main(app: str, client: str | None = None, key: str = "") -> None:
    """Print the pin of an app, for the clients' node config; with a client's number and auth.pub, after a new key."""
    print(Task.read(Path(app)).pin if client is None else replace_key(Path(app), client, Path(key)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
