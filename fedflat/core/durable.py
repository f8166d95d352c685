"""What is written outlives a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def append(path: Path, content: bytes) -> None:
    """Add to a file's end, or begin it, readable by its owner only; durable, its name too, before this returns."""
    _write(path, content, os.O_APPEND, 0o600)
    flush(path.parent)


def create(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, readable by its owner only; durable, its name too, before this returns."""
    _write(path, content, os.O_EXCL, 0o600)
    flush(path.parent)


def replace(path: Path, content: bytes | str, mode: int = 0o600) -> None:
    """Write a whole file so that a kill leaves the old one or the new one; durable before this returns."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    _write(part, content.encode() if isinstance(content, str) else content, os.O_EXCL, mode)
    os.replace(part, path)
    flush(path.parent)


def _write(path: Path, content: bytes, how: int, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | how, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
