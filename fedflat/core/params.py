"""Hold a module's parameters as one flat vector: the shared part first, a client's personal part behind."""

import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.core.checks import nearest, require, wrong
from fedflat.core.rng import NO_GENERATOR
from fedflat.core.types import Part


def slices_of(lengths: Iterable[int]) -> tuple[slice, ...]:
    """Return where pieces of these lengths lie in one vector, one behind the other."""
    ends = [*itertools.accumulate(lengths, initial=0)]
    return tuple(map(slice, ends, ends[1:]))


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
        """Return the slice of the whole vector that a part occupies."""
        return slice(self.dimension if part == "personal" else 0, self.dimension if part == "shared" else self.size)

    def tensors(self, part: Part = "all") -> tuple[slice, ...]:
        """Return the slice of each tensor of a part, counted from the start of the whole vector."""
        slices = slices_of(self.lengths)
        return {"all": slices, "shared": slices[: self.shared], "personal": slices[self.shared :]}[part]

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Name and reshaped view of each tensor in ``vector`` of shape ``(…, D)``."""
        lead = vector.shape[:-1]
        for name, shape, where in zip(self.names, self.shapes, self.tensors()):
            yield name, vector[..., where].reshape(*lead, *shape)


def last_linear(module: nn.Module) -> str:
    """Name of the last linear layer: the default personal head."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    require(bool(linear), "algorithm.head", "a model without a linear layer", "patterns of parameters' names")
    return str(linear[-1])


def zero(module: nn.Module, layer: str) -> None:
    """Set a layer's parameters to zero."""
    with torch.no_grad():
        for parameter in module.get_submodule(layer).parameters():
            parameter.zero_()


def _is_personal(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) or name == p or name.startswith(p + ".") for p in patterns)


def layout_of(module: nn.Module, head: tuple[str, ...] | None = None) -> Layout:
    """Return the layout of a module's trainable parameters.

    head: None if everything is shared; patterns (shell style, or a layer's name) of the parameters that stay
    personal; an empty tuple for the last linear layer. Raises InputError if a pattern matches nothing or everything.
    """
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    require(bool(named), "model", "no trainable parameter", "a module with a parameter that requires a gradient")
    # None: nothing is personal; (): the last linear layer is.
    patterns = (last_linear(module),) if head == () else (head or ())
    names = [n for n, _ in named]
    for pattern in patterns:
        if not any(_is_personal(n, (pattern,)) for n in names):
            raise wrong("algorithm.head", pattern, "patterns of " + ", ".join(names[:12]), hint=nearest(pattern, names))
    shared = sum(not _is_personal(n, patterns) for n in names)
    require(shared > 0, "algorithm.head", ", ".join(patterns), "patterns that leave at least one shared parameter")
    # Sorting keeps the module's order within each part.
    ordered = sorted(named, key=lambda item: _is_personal(item[0], patterns))
    return Layout(tuple(n for n, _ in ordered), tuple(p.shape for _, p in ordered), shared)


def flatten(module: nn.Module, layout: Layout) -> Tensor:
    """Return a float32 copy of the trainable parameters as one vector ``(D,)``, on the CPU."""
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[n].detach().reshape(-1).to("cpu", torch.float32) for n in layout.names])


def put(module: nn.Module, weights: Mapping[str, Tensor], where: str, whose: str) -> None:
    """Set the module's parameters to copies of ``weights``, by name.

    Raises InputError, naming ``where`` and ``whose`` weights they are, for a parameter that it lacks or has otherwise.
    """
    parameters = dict(module.named_parameters())
    for name, value in weights.items():
        here = parameters.get(name)
        if here is None or here.shape != value.shape:
            actual = "no such parameter" if here is None else f"shape {tuple(here.shape)}"
            raise wrong(f"{where}: {name}", actual, f"shape {tuple(value.shape)}, as in {whose}")
        here.data = value.clone()


@dataclass(frozen=True)
class ClientContext:
    """What a client, or each client of a block, brings to its training besides its data and weights.

    state: its named vectors ``(…, d)``. generator: its own randomness of the round; a block has none.
    """

    state: Mapping[str, Tensor] = field(default_factory=dict)
    generator: np.random.Generator = NO_GENERATOR


NOTHING = ClientContext()


@dataclass
class PersonalState:
    """What clients keep: their personal parameters and their named states. A client never sampled has w^0's head and
    states of zeros.

    first: ``(D − d,)``. kept: client id -> head, only for clients that have trained. states: name -> client id -> (d,).
    """

    first: Tensor
    kept: dict[int, Tensor] = field(default_factory=dict)
    states: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def of(self, client: int) -> Tensor:
        """Return the head of a client ``(D − d,)``."""
        return self.kept.get(int(client), self.first)

    def keep(self, client: int, head: Tensor) -> None:
        """Store a client's head after local training; a head that is not finite is not kept."""
        if head.numel() and bool(torch.isfinite(head).all()):
            self.kept[int(client)] = head.detach().cpu().clone()

    def state(self, name: str, client: int, like: Tensor) -> Tensor:
        """Return a client's named state, shaped and placed as ``like`` ``(d,)``: a copy, which only ``remember``
        moves."""
        stored = self.states.get(name, {}).get(int(client))
        return torch.zeros_like(like) if stored is None else stored.to(like.device, copy=True)

    def remember(self, name: str, client: int, value: Tensor) -> None:
        """Store a client's new state; one that is not finite is not kept."""
        if bool(torch.isfinite(value).all()):
            self.states.setdefault(name, {})[int(client)] = value.detach().cpu().clone()

    def copy(self) -> "PersonalState":
        """Return the same vectors; what is stored later is not in it."""
        return PersonalState(self.first, dict(self.kept), {name: dict(state) for name, state in self.states.items()})

    def whole(self, shared: Tensor, client: int) -> Tensor:
        """Return a fresh vector ``(D,)``: the shared part with the client's own head behind it."""
        return torch.cat([shared, self.of(client).to(shared.device)])

    def pack(self) -> dict[str, Tensor]:
        """Return the heads and states as named tensors, for the private half of a checkpoint."""
        named = _packed("heads", self.kept, self.first.numel()) if self.first.numel() else {}
        for name, state in self.states.items():
            named |= _packed(STATE + name, state, 0)  # of nobody too: that there is a half tells nothing of who came
        return named

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what clients keep from a checkpoint."""
        self.kept = _unpacked("heads", tensors) if "heads.ids" in tensors else {}
        names = [name.removesuffix(".ids") for name in tensors if name.startswith(STATE) and name.endswith(".ids")]
        self.states = {name.removeprefix(STATE): _unpacked(name, tensors) for name in names}


STATE = "state."
"""Before the name of a client state in a checkpoint's private half."""


def _packed(name: str, vectors: Mapping[int, Tensor], width: int) -> dict[str, Tensor]:
    ids = sorted(vectors)
    stacked = torch.stack([vectors[i] for i in ids]) if ids else torch.zeros(0, width)
    return {f"{name}.ids": torch.tensor(ids, dtype=torch.int64), f"{name}.values": stacked}


def _unpacked(name: str, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    return {int(i): v.clone() for i, v in zip(tensors[f"{name}.ids"], tensors[f"{name}.values"])}


def looked_at(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return what the built-in convolutional networks look at of an image: they cannot cut oneDNN's tensors
    themselves."""
    seen = getattr(module, "seen", None)
    return inputs[..., : seen[0], : seen[1]] if isinstance(seen, tuple) else inputs
