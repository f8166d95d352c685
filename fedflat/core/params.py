"""A module's trainable parameters as one flat vector: shared part first, personal part (the head) last."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedflat.core.checks import InputError, nearest, wrong
from fedflat.core.types import Part


@dataclass(frozen=True)
class Layout:
    """Where each trainable tensor lives in the flat vector of length ``size``.

    names, shapes: in flat order. shared: number of tensors that are sent; the rest are personal.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    shared: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of entries of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Entries of the whole vector D."""
        return sum(self.lengths)

    @property
    def dimension(self) -> int:
        """Entries of the shared part d: the length of a client's message."""
        return sum(self.lengths[: self.shared])

    def span(self, part: Part) -> slice:
        """The slice of the whole vector that a part occupies."""
        return {
            "all": slice(0, self.size),
            "shared": slice(0, self.dimension),
            "personal": slice(self.dimension, self.size),
        }[part]

    def tensors(self, part: Part = "all") -> tuple[slice, ...]:
        """The slice of each tensor of a part, counted from the start of the whole vector."""
        ends, slices = 0, []
        for length in self.lengths:
            slices.append(slice(ends, ends + length))
            ends += length
        chosen = {"all": slices, "shared": slices[: self.shared], "personal": slices[self.shared :]}[part]
        return tuple(chosen)

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Name and reshaped view of each tensor in ``vector`` of shape ``(…, D)``."""
        lead = vector.shape[:-1]
        for name, shape, where in zip(self.names, self.shapes, self.tensors()):
            yield name, vector[..., where].reshape(*lead, *shape)


def last_linear(module: nn.Module) -> str:
    """Name of the last linear layer: the default personal head."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise InputError(
            "algorithm.head: found a model without a linear layer; allowed: parameter-name patterns. "
            "Name them in algorithm.head."
        )
    return str(linear[-1])


def zero(module: nn.Module, layer: str) -> None:
    """Set a layer's parameters to zero."""
    with torch.no_grad():
        for parameter in module.get_submodule(layer).parameters():
            parameter.zero_()


def _is_personal(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) or name == p or name.startswith(p + ".") for p in patterns)


def layout_of(module: nn.Module, head: tuple[str, ...] | None = None) -> Layout:
    """The layout of a module's trainable parameters.

    head: None if everything is shared; patterns (shell style, or a layer's name) of the parameters that stay
    personal; an empty tuple for the last linear layer. Raises InputError if a pattern matches nothing or everything.
    """
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise InputError(
            "model: found no trainable parameter; allowed: a module with a parameter that requires a gradient."
        )
    patterns = (last_linear(module),) if head == () else (head or ())
    names = [n for n, _ in named]
    for pattern in patterns:
        if not any(_is_personal(n, (pattern,)) for n in names):
            raise wrong("algorithm.head", pattern, "patterns of " + ", ".join(names[:12]), hint=nearest(pattern, names))
    shared = [(n, p.shape) for n, p in named if not _is_personal(n, patterns)]
    personal = [(n, p.shape) for n, p in named if _is_personal(n, patterns)]
    if not shared:
        raise wrong("algorithm.head", ", ".join(patterns), "patterns that leave at least one shared parameter")
    ordered = shared + personal
    return Layout(tuple(n for n, _ in ordered), tuple(s for _, s in ordered), len(shared))


def flatten(module: nn.Module, layout: Layout) -> Tensor:
    """A float32 copy of the trainable parameters as one vector ``(D,)``, on the CPU."""
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[n].detach().reshape(-1).to("cpu", torch.float32) for n in layout.names])


def load(module: nn.Module, layout: Layout, vector: Tensor) -> None:
    """Write a vector ``(D,)``, or its shared part ``(d,)``, into the module's parameters."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, shape, where in zip(layout.names, layout.shapes, layout.tensors()):
            if where.stop <= vector.numel():
                parameters[name].copy_(vector[where].reshape(shape))


def put(module: nn.Module, weights: Mapping[str, Tensor], where: str, whose: str) -> None:
    """Set the module's parameters to copies of ``weights``, by name.

    Raises InputError, naming ``where`` and ``whose`` weights they are, for a parameter that it lacks or has otherwise.
    """
    own = dict(module.named_parameters())
    for name, value in weights.items():
        here = own.get(name)
        if here is None or here.shape != value.shape:
            found = "no such parameter" if here is None else f"shape {tuple(here.shape)}"
            raise wrong(f"{where}: {name}", found, f"shape {tuple(value.shape)}, as in {whose}")
        here.data = value.clone()
