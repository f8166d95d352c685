"""What is installed beside the package where it is wanted: one sentence for what is not, with the command for it."""

from __future__ import annotations

import sys
from pathlib import Path

from fedflat.core.checks import InputError, wrong


def install(extra: str = "") -> str:
    """The command that installs fedflat, or an extra, from the checkout if this is one.

    >>> install("onnx").endswith("[onnx]'")
    True
    """
    root, part = Path(__file__).resolve().parents[2], f"[{extra}]" if extra else ""
    where = str(root) if (root / "pyproject.toml").is_file() else "fedflat"
    return f"{Path(sys.executable).name} -m pip install '{where}{part}'"


def missing(where: str, package: str, extra: str = "") -> InputError:
    """The error for something asked for that needs ``package``, which ``extra`` brings."""
    return wrong(where, f"{package}, which is not installed", f"an installation with it: {install(extra)}")
