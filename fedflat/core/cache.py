"""What is computed once and kept on this machine: the folder, and tensors under a name, each file with its digest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

KEPT = 4 << 30
"""Bytes of one kind that are kept, of the files used last."""


def cache_folder() -> Path:
    """``$FEDFLAT_CACHE`` or ``~/.cache/fedflat``."""
    chosen = os.environ.get("FEDFLAT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fedflat"


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over the tensors' names, types, shapes and bytes, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor] | None:
    """The tensors in a file, as they were written; None where there is none, or where it is damaged.

    A file of the cache that is read counts as used now.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            sound = (file.metadata() or {}).get("sha256") == digest_of(found)
    except (OSError, SafetensorError, ValueError, AttributeError):
        return None
    if path.parent == cache_folder():
        with contextlib.suppress(OSError):
            os.utime(path)
    return found if sound else None


def read_about(path: Path) -> dict[str, str]:
    """What a sound file of tensors says of itself."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def keep(kind: str, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write ``KIND-NAME.safetensors`` into the cache, and delete what was used longest ago, beyond ``KEPT`` bytes of
    its kind (a body that somebody put there has a longer name); a cache that cannot be written keeps nothing."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        write_tensors(folder / f"{kind}-{name}.safetensors", tensors, about)
        made = [file for file in folder.glob(f"{kind}-*.safetensors") if len(file.stem) == len(f"{kind}-{name}")]
        used = 0
        for place, file in enumerate(sorted(made, key=lambda file: file.stat().st_mtime_ns, reverse=True)):
            used += file.stat().st_size
            if place and used > KEPT:
                file.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write beside and rename: another process never sees half a file. Raises OSError."""
    from safetensors.torch import save_file

    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(whole, name, metadata={**(about or {}), "sha256": digest_of(whole)})
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
