"""Turn images into maps of a public network: its own preprocessing, the layers asked for, means over a grid."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import nearest, one_of, wrong
from fedflat.models.networks import COLOURS, INTERPOLATIONS, Loaded, Preprocessing
from fedflat.models.patches import pooling

PREFIXES = 8
"""At most so many tokens, a class token first, stand before those of the image."""
_SEEN: ContextVar[dict[str, Tensor] | None] = ContextVar("answers of tapped layers", default=None)


class Tap(nn.Module):
    """A layer whose answer the network that it belongs to reads; several threads may run it at once."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, *given: Any, **named: Any) -> Any:
        answer, seen = self.inner(*given, **named), _SEEN.get()
        if seen is not None:
            seen[self.name] = answer[0] if isinstance(answer, tuple) else answer
        return answer


def resizing(side: int, to: int, kept: int, interpolation: str) -> Tensor:
    """Return the matrix (kept, side) that resizes a side of an image to ``to`` pixels and keeps those of its middle.

    As Pillow does it: with the filter widened where an image shrinks.
    """
    smooth = interpolation != "nearest"
    more: dict[str, Any] = {"align_corners": False, "antialias": True} if smooth else {}
    mode = interpolation if smooth else "nearest-exact"
    found = F.interpolate(torch.eye(side)[None, None], size=(to, side), mode=mode, **more)
    start = (to - kept) // 2
    return found[0, 0, start : start + kept].clone()


class Prepare(nn.Module):
    """Images (b, c, h, w) as the data prepare them, c of 1 or 3 -> images (b, 3, H, W) as a network takes them.

    pixels: the mean and std by which the data standardise pixels in [0, 1]; None: the images are such pixels.
    """

    rows: Tensor
    columns: Tensor
    mean: Tensor
    std: Tensor
    less: Tensor
    over: Tensor

    def __init__(self, shape: tuple[int, int, int], pixels: Mapping[str, Any] | None, seen: Preprocessing) -> None:
        super().__init__()
        to = seen.resized(*shape[1:])
        crop = seen.crop or to
        one_of("model.interpolation", seen.interpolation, INTERPOLATIONS)
        if shape[0] not in (1, COLOURS) or crop[0] > to[0] or crop[1] > to[1]:
            found = f"images of shape {shape}, resized to {to[0]} × {to[1]}"
            raise wrong("model.body", found, f"1 or {COLOURS} channels, at least {crop[0]} × {crop[1]} (model.size)")
        self.known = pixels is not None
        given = pixels or {"mean": (0.0,), "std": (1.0,)}
        constants = {"mean": given["mean"], "std": given["std"], "less": seen.mean, "over": seen.std}
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1))
        self.register_buffer("rows", resizing(shape[1], to[0], crop[0], seen.interpolation))
        self.register_buffer("columns", resizing(shape[2], to[1], crop[1], seen.interpolation).T.contiguous())

    def forward(self, images: Tensor) -> Tensor:
        found = self.rows @ (images * self.std + self.mean) @ self.columns
        if self.known:  # a resized image may overshoot; tensors of a user's own need not be pixels
            found = found.clamp(0, 1)
        return (found.expand(-1, COLOURS, -1, -1) - self.less) / self.over

    def as_data(self, images: Tensor) -> Tensor:
        """Return standardised images as if the data had prepared them, with pixels of mean 1/2 and deviation 1/4."""
        return ((images / 4 + 0.5).clamp(0, 1) - self.mean) / self.std


class NetworkMaps(nn.Module):
    """Images (b, c, h, w) -> maps (b, channels, positions): of each layer the class token, or means over a grid.

    layers: names of the network's layers; none: its last features. cells: the grid's side; None: the class token where
    there is one, else the mean over the image. form: channels and positions. It is always in evaluation mode.
    """

    def __init__(self, prepare: Prepare, found: Loaded, layers: tuple[str, ...], cells: int | None) -> None:
        super().__init__()
        self.prepare, self.network, self.call, self.layers = prepare, found.network, found.call, layers
        known = [name for name, _ in self.network.named_modules() if name]
        for name in layers:
            if name not in known:
                hint = nearest(name, known) or f"The last ones are {', '.join(known[-4:])}."
                raise wrong("model.layers", name, "last, or names of the network's layers", hint=hint)
        for name in sorted(layers, key=len, reverse=True):  # what is inside another layer first
            above, _, key = name.rpartition(".")
            self.network.get_submodule(above)._modules[key] = Tap(self.network.get_submodule(name), name)
        side = (len(prepare.rows), prepare.columns.shape[1])
        own = getattr(getattr(self.network, "config", None), "image_size", None)
        takes = "interpolate_pos_encoding" in inspect.signature(self.network.forward).parameters
        self.resampled = takes and own not in (None, side[0], side)
        answers = self._tried(torch.zeros(1, COLOURS, *side))
        for at, answer in enumerate(answers):
            self.register_buffer(f"pool{at}", pool(answer, cells))
        self.form = (sum(flat(answer).shape[1] for answer in answers), self.get_buffer("pool0").shape[1])
        self.eval()

    def train(self, mode: bool = True) -> NetworkMaps:
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        answers = self._answers(self.prepare(images))
        return torch.cat([flat(answer) @ self.get_buffer(f"pool{at}") for at, answer in enumerate(answers)], dim=1)

    def _tried(self, images: Tensor) -> list[Tensor]:
        try:
            with torch.no_grad():
                return self._answers(images)
        except Exception as error:  # a network refuses a size in its own way
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            found = f"a network that fails on images of {images.shape[2]} × {images.shape[3]}"
            raise wrong("model.body", found, "a model.size that it takes", hint=f"({reason})") from error

    def _answers(self, images: Tensor) -> list[Tensor]:
        """Return what each layer answers."""
        method = self.network if self.call in ("", "last_hidden_state") else getattr(self.network, self.call)
        seen: dict[str, Tensor] = {}
        mark = _SEEN.set(seen)
        try:
            out = method(images, interpolate_pos_encoding=True) if self.resampled else method(images)
        finally:
            _SEEN.reset(mark)
        last = out.last_hidden_state if self.call == "last_hidden_state" else out
        return [seen[name] for name in self.layers] or [last]


def flat(answer: Tensor) -> Tensor:
    """Return a map (b, c, h, w), tokens (b, T, c) or a vector (b, c) as (b, c, positions)."""
    return answer.flatten(2) if answer.dim() == 4 else answer.mT if answer.dim() == 3 else answer[..., None]


def pool(answer: Tensor, cells: int | None) -> Tensor:
    """Return the matrix (positions, cells²) that ``flat(answer)`` is multiplied by."""
    if not isinstance(answer, Tensor) or answer.dim() not in (2, 3, 4):
        raise wrong("model.layers", "an answer that is no map, tokens or vector", "another layer")
    tokens = flat(answer).shape[2]
    if answer.dim() == 4 and min(answer.shape[2:]) >= (cells or 1):
        return pooling(answer.shape[2], answer.shape[3], cells or 1)
    before = next((p for p in range(PREFIXES) if p < tokens and math.isqrt(tokens - p) ** 2 == tokens - p), None)
    if cells is None and before:
        return F.one_hot(torch.zeros(1, dtype=torch.int64), tokens).T.float()
    if before is None or (side := math.isqrt(tokens - before)) < (cells or 1) or answer.dim() == 4:
        raise wrong("model.cells", cells, f"null, or a smaller number: the layer has {tokens} positions")
    return torch.cat([torch.zeros(before, (cells or 1) ** 2), pooling(side, side, cells or 1)])
