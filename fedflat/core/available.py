"""What this machine has left."""

from __future__ import annotations

from pathlib import Path

GIB = 2**30


def memory() -> float | None:
    """Available bytes, as the kernel says, or as a container's limit leaves."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = float((group / "memory.max").read_text()) - float((group / "memory.current").read_text())
        return min(free, limit)
    except (OSError, ValueError):  # no limit is the word max
        return free
