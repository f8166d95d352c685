"""Checkpoints in safetensors, sealed by SHA-256: what is released, and apart from it what is private.

``checkpoints/round-N.safetensors`` holds the released server state only. What clients keep (heads, states), and counts
of who took part, lie in ``private/heads/`` of the run, bound to their public half. A kill leaves the old one or the new
one; a checkpoint counts once its public half has its name, which comes last.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat.core import InputError, PersonalState, RoundState, reading
from fedflat.core.durable import contents_of, digest_of, flush, read_about, replace_tensors

KEPT = 3
PRIVATE_SLOTS = ("participations",)
"""Slots of the server's state that say who took part."""
_PATTERN = "round-*.safetensors"
Facts = dict[str, Any]


def private_half(path: Path) -> Path:
    """Return where the private half of a checkpoint lies."""
    return path.parent.parent / "private" / "heads" / path.name


def path_of(folder: Path, round: int) -> Path:
    """Return where the checkpoint after ``round`` finished rounds lies."""
    return folder / f"round-{round:06d}.safetensors"


def round_of(path: Path) -> int:
    """Return the number of finished rounds that a checkpoint's name says; -1 for another name."""
    number = path.name.removeprefix("round-").partition(".")[0]
    return int(number) if number.isdecimal() else -1


def rounds_named(folder: Path) -> list[int]:
    """Return the rounds that have a checkpoint by name: a damaged one still proves that its round was released, one
    that a kill left half-written does not.
    """
    return [round_of(path) for path in folder.glob(f"{_PATTERN}*") if path.suffix != ".part"]


def save(
    folder: Path, state: RoundState, heads: PersonalState, facts: Mapping[str, Any], note: Callable[[str], object]
) -> Path:
    """Write the state after ``state.round`` finished rounds; keep the newest few. note: gets its checksum first."""
    path = path_of(folder, state.round)
    tensors: dict[str, Tensor] = {"shared": state.shared, "heads.first": heads.first}
    hidden = heads.pack()
    for name, value in state.slots.items():
        (hidden if name in PRIVATE_SLOTS else tensors)[f"slot.{name}"] = value
    public = {"round": state.round, "clip": state.clip.hex(), "private_half": bool(hidden), **facts}
    public["sha256"] = _seal(tensors, public)
    if hidden:
        other = private_half(path)
        other.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        apart = {"round": state.round, "of": public["sha256"]}
        _write(other, hidden, {**apart, "sha256": _seal(hidden, apart)}, mode=0o600)
    note(public["sha256"])  # in tips.jsonl first: a checkpoint that no line names is refused
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, tensors, public)
    for old in sorted(folder.glob(_PATTERN))[:-KEPT]:
        old.unlink()
        private_half(old).unlink(missing_ok=True)
    return path


def _write(path: Path, tensors: Mapping[str, Tensor], facts: Facts, mode: int = 0o644) -> None:
    replace_tensors(path, tensors, {"state": json.dumps(facts)}, mode)
    flush(path.parent.parent)  # which has this folder's name since its first file


def _seal(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 over every tensor's name, type, shape and bytes and over the facts."""
    return digest_of(tensors, json.dumps(facts, sort_keys=True).encode(), end="")


def newest(
    folder: Path, damaged: Callable[[Path, str], object] | None = None, *, hidden: bool = True
) -> tuple[RoundState, PersonalState, Facts] | None:
    """Return the newest sound checkpoint of a run, or None if there is none.

    damaged: called with the path and the fault of each newer one. hidden: whether the private halves are read as well.
    """
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            return load(path, hidden=hidden)
        except InputError as error:
            if damaged is not None:
                damaged(path, str(error))
    return None


def named(loaded: tuple[RoundState, PersonalState, Facts]) -> dict[str, Tensor]:
    """Return the released weights of a checkpoint by the names of the module's parameters."""
    state, heads, facts = loaded
    return _by_name(torch.cat([state.released, heads.first]), facts["tensors"])


def released(state: RoundState, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the shared weights that a round released, by the names of the module's parameters."""
    return _by_name(state.released, facts["tensors"][: facts["shared_tensors"]])


def _by_name(flat: Tensor, listed: list[tuple[str, list[int]]]) -> dict[str, Tensor]:
    pieces = flat.split([math.prod(shape) for _, shape in listed])
    return {name: piece.reshape(shape).clone() for (name, shape), piece in zip(listed, pieces)}


def load(path: Path, *, hidden: bool = True) -> tuple[RoundState, PersonalState, Facts]:
    """Return state, heads and recorded facts of one checkpoint. hidden: whether to read the private half too.

    Raises:
        InputError: either half is missing, damaged, of another round or of another checkpoint.
    """
    tensors, facts = _read(path)
    secret: dict[str, Tensor] = {}
    if facts["private_half"] and hidden:
        other = private_half(path)
        secret, apart = _read(other)
        if apart["of"] != facts["sha256"]:
            raise InputError(f"{other}: found the private half of another checkpoint; allowed: that of {path.name}.")
    slots = {name.removeprefix("slot."): t for name, t in (tensors | secret).items() if name.startswith("slot.")}
    state = RoundState(int(facts["round"]), tensors["shared"], float.fromhex(facts["clip"]), slots)
    heads = PersonalState(tensors["heads.first"])
    heads.unpack(secret)
    return state, heads, facts


def facts_of(path: Path) -> Facts:
    """Return the facts beside a checkpoint's tensors, unchecked; {} where there are none to read."""
    try:
        facts = json.loads(read_about(path)["state"])
    except (KeyError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _read(path: Path) -> tuple[dict[str, Tensor], Facts]:
    with reading(path, "a checkpoint that cannot be read", "one written by fedflat"):
        tensors, metadata = contents_of(path)
        facts = json.loads(metadata["state"])
        sound = facts["sha256"] == _seal(tensors, {name: value for name, value in facts.items() if name != "sha256"})
    if not sound or facts["round"] != round_of(path):
        damage = "a checkpoint whose checksum does not match" if not sound else f"the one of round {facts['round']}"
        raise InputError(f"{path}: found {damage}; allowed: the file that was written.")
    return tensors, facts
