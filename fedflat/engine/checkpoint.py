"""Checkpoints in safetensors: server state and personal heads; a kill leaves the old one or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.types import RoundState
from fedflat.engine.heads import Heads

KEPT = 3
_PATTERN = "round-*.safetensors"


def save(folder: Path, state: RoundState, heads: Heads, facts: Mapping[str, Any]) -> Path:
    """Write the state after ``state.round`` finished rounds; keep the newest few."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {"shared": state.shared.contiguous(), "heads.first": heads.first.contiguous()}
    tensors |= {f"slot.{name}": value.contiguous() for name, value in state.slots.items()}
    tensors |= heads.pack()
    path = folder / f"round-{state.round:06d}.safetensors"
    part = path.with_suffix(".part")
    metadata = {"state": json.dumps({"round": state.round, "clip": state.clip.hex(), **facts})}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, part, metadata=metadata)
    _flush(part)
    os.replace(part, path)
    _flush(folder)
    for old in sorted(folder.glob(_PATTERN))[:-KEPT]:
        old.unlink()
    return path


def newest(folder: Path) -> tuple[RoundState, Heads, dict[str, Any]] | None:
    """The newest readable checkpoint of a run, or None if there is none yet. An unreadable one is passed over."""
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            return load(path)
        except InputError:
            continue
    return None


def load(path: Path) -> tuple[RoundState, Heads, dict[str, Any]]:
    """State, heads and recorded facts of one checkpoint; InputError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(file.metadata()["state"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: found a checkpoint that cannot be read ({error}); allowed: one written by fedflat."
        ) from error
    slots = {name.removeprefix("slot."): t for name, t in tensors.items() if name.startswith("slot.")}
    state = RoundState(int(facts["round"]), tensors["shared"], float.fromhex(facts["clip"]), slots)
    heads = Heads(tensors["heads.first"])
    heads.unpack(tensors)
    return state, heads, facts


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
