"""Write files that outlive a power cut, and keep on this machine what is computed once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedflat.core.checks import becoming

if TYPE_CHECKING:
    from torch import Tensor


def plain(value: Any) -> Any:
    """``value`` in JSON's types: non-finite floats to ``None``; arrays and tensors to lists; other objects to text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    # NumPy scalars and arrays, and torch tensors.
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def append(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Add to a file's end, or begin it; durable, its name too, before this returns."""
    _write(path, content, os.O_APPEND, mode)
    flush(path.parent)


def create(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that is not there yet; durable, its name too, before this returns."""
    _write(path, content, os.O_EXCL, mode)
    flush(path.parent)


def replace(path: Path, content: bytes | str, mode: int = 0o600) -> None:
    """Write a whole file so that a kill leaves the old one or the new one; durable before this returns."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    try:
        _write(part, content.encode() if isinstance(content, str) else content, os.O_EXCL, mode)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    flush(path.parent)


def replace_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str], mode: int = 0o600) -> None:
    """Write tensors as a whole file, as ``replace`` does. facts: what the file says of itself."""
    from safetensors.torch import save

    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    replace(path, save(apart, dict(facts)), mode)


def _write(path: Path, content: bytes, how: int, mode: int) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # what a full disk says names no file
        raise


def flush(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path, taken: Exception | None = None, mode: int = 0o600) -> IO[bytes]:
    """Return the lock file, locked for this process until it is closed. taken: is raised where another has it locked;
    None waits for that one."""
    import fcntl

    file = open(os.open(path, os.O_RDWR | os.O_CREAT, mode), "rb+")  # noqa: SIM115  # its holder closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX if taken is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if taken is not None and isinstance(error, BlockingIOError):
            raise taken from error
        raise
    return file


KEPT = 4 << 30
"""Bytes of one kind that are kept, of the files used last."""


def cache_folder() -> Path:
    """``$FEDFLAT_CACHE`` or ``~/.cache/fedflat``."""
    chosen = os.environ.get("FEDFLAT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fedflat"


def digest_of(tensors: Mapping[str, Tensor], first: bytes = b"", end: str = "\n") -> str:
    """SHA-256 (hex) over ``first`` and the tensors' names, types, shapes, ``end`` and bytes, in the order of names."""
    import torch

    total = hashlib.sha256(first)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}{end}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors in a file, as they were written; None where there is none, or where it is damaged.

    A file of the cache that is read counts as used now.
    """
    try:
        tensors, metadata = contents_of(path)
    except ValueError:
        return None
    if path.parent == cache_folder():
        with contextlib.suppress(OSError):
            os.utime(path)
    return tensors if metadata.get("sha256") == digest_of(tensors) else None


def contents_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in a file, and what it says of itself. Raises ValueError where it cannot be read."""
    from safetensors import SafetensorError, safe_open

    unreadable = becoming(lambda error: ValueError(" ".join(str(error).split())), (SafetensorError, OSError))
    with unreadable, safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def read_about(path: Path) -> dict[str, str]:
    """Return what a file of tensors says of itself; {} where there is none to read."""
    from safetensors import SafetensorError, safe_open

    # As NumPy: reports read this, and torch takes seconds to load.
    with contextlib.suppress(SafetensorError, OSError), safe_open(path, framework="np") as file:
        return dict(file.metadata() or {})
    return {}


def keep(kind: str, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``KIND-NAME.safetensors`` into the cache, and delete what was used longest ago, beyond ``KEPT`` bytes of
    its kind (a body that somebody put there has a longer name); a cache that cannot be written keeps nothing."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        write_tensors(folder / f"{kind}-{name}.safetensors", tensors, metadata)
        files = [file for file in folder.glob(f"{kind}-*.safetensors") if len(file.stem) == len(f"{kind}-{name}")]
        used = 0
        for place, file in enumerate(sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)):
            used += file.stat().st_size
            # The newest stays, however large it is.
            if place and used > KEPT:
                file.unlink()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write beside and rename: another process never sees half a file. Raises OSError."""
    from safetensors.torch import save_file

    arrays = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(arrays, name, metadata={**(metadata or {}), "sha256": digest_of(arrays)})
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes; "" where there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def digest_of_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value: with its keys in order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
