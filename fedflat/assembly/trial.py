"""What the trials of pieces and of server steps share: made-up numbers, and the one line that refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.core.types import Phase

ON_CLIENTS = "a piece that works on the last axis, of one client's vector (k,) and of a block's (n, k)"
ON_SERVER = "a step that reads its own slots and returns a vector (d,) and its slots"
"""What a piece that failed should be."""


@dataclass(frozen=True)
class Form:
    """Where the tensors of a tried vector lie; entries of the shared part, and of the personal one behind it."""

    tensors: tuple[slice, ...]
    shared: int
    personal: int

    def size(self, phase: Phase) -> int:
        """Entries of the part that a phase trains."""
        return {"all": self.shared + self.personal, "shared": self.shared, "personal": self.personal}[phase.part]


Vectors = Mapping[str, Tensor]


class Fault(Exception):
    """What a trial found wrong: (found, allowed)."""


class refusing:
    """Inside, whatever goes wrong becomes an InputError about a piece; ``allowed``: what one is that does not fail."""

    def __init__(self, name: str, piece: object = None, allowed: str = ON_CLIENTS) -> None:
        self.name = name if piece is None else told(name, piece)
        self.allowed = allowed

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Fault):
            raise InputError(f"{self.name}: found {error.args[0]}; allowed: {error.args[1]}.") from error
        if isinstance(error, Exception) and not isinstance(error, InputError):
            line = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{self.name}: found {type(error).__name__} in a trial ({line}); allowed: {self.allowed}."
            ) from error


def as_expected(found: object, like: Tensor) -> None:
    """Raise Fault for what is no tensor of ``like``'s shape and type."""
    shape = tuple(like.shape)
    if not isinstance(found, Tensor):
        raise Fault(f"{type(found).__name__} returned", f"a tensor of shape {shape}")
    if found.shape != like.shape:
        raise Fault(f"shape {tuple(found.shape)} returned for {shape}", "the same shape")
    if found.dtype != like.dtype:
        raise Fault(f"{found.dtype} returned for {like.dtype}", "the same type")


def numbers(purpose: str, *shape: int) -> Tensor:
    """Normal numbers that are the same for a purpose, always."""
    return torch.from_numpy(stream(0, purpose).standard_normal(shape).astype("float32"))


def told(name: str, piece: object) -> str:
    """Where a piece stands in its method, and what it is called."""
    own = getattr(piece, "__qualname__", None) or type(piece).__qualname__
    return f"{name} ({own.replace('.<locals>', '')})"


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors are equal; NaN is NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
