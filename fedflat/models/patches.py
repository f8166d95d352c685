"""Make images of a random process (dead leaves), and maps of images: by their whitened patches, by wavelets, or by a
small network that was trained on such images.

Opaque ellipses and rectangles of power-law sizes fall on one another until nothing is seen between them (Matheron
1968; Lee, Mumford and Huang 2001: many statistics of natural images follow); with shading inside them and 1/f texture
over them. Nothing here has seen a photograph: the only prior is the process and its seed.

A patch p of the image is normalised (mean 0, contrast 1), and its inner products z with the filters are taken in the
whitened space; max(z − a, 0) and max(−z − a, 0) are averaged over the cells of a grid. The filters come from dead
leaves, so that the body has seen nobody's data; it looks at one image at a time.

Scattering takes the filters of kymatio (Andreux et al. 2020). Its own transform goes path by path through a block of
images; here it is one image and all angles at once, so that no image's bits follow from another's.

The network was trained without labels and is read from its file: four convolutions, each followed by a group norm and a
rectifier; of the last two, means over the cells of a grid. ``examples/pretrain_body.py`` trains one.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import digest_of, in_range, read_about, read_tensors, require, stream, turning, whole, wrong

LEAVES = 60
CHUNK = 250
"""Images made at once, each chunk from a stream of its own: the first images do not depend on how many follow."""
SMALLEST, LARGEST = 0.06, 0.7
"""Radii, as shares of the longer side."""


def dead_leaves(count: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """``count`` images ``(count, c, h, w)`` float32, standardised as images of a data set are.

    shape: channels (1 or 3; others get independent colours), height, width. seed: the process's own.
    """
    chunks = (_chunk(shape, stream(seed, "dead leaves", number)) for number in range(math.ceil(count / CHUNK)))
    images = torch.cat(list(chunks))[:count]
    return (images - images.mean()) / images.std()


def _chunk(shape: tuple[int, int, int], draw: np.random.Generator) -> Tensor:
    """``(CHUNK, c, h, w)`` in [0, 1]."""
    channels, height, width = shape
    side = max(height, width)
    rows = torch.arange(height, dtype=torch.float32)[None, :, None]
    columns = torch.arange(width, dtype=torch.float32)[None, None, :]
    base = _tensor(draw.uniform(0, 1, (CHUNK, 1)) + draw.normal(0, 0.15, (CHUNK, channels)))
    images = base[:, :, None, None].expand(-1, -1, height, width).clone()
    for _ in range(LEAVES):
        across, along, inside = _leaf(draw, rows, columns, side)
        # luminance varies more than colour does, and a third of the leaves are shaded
        colour = base + _tensor(draw.normal(0, 0.25, (CHUNK, 1)) + draw.normal(0, 0.08, (CHUNK, channels)))
        slope = _tensor(draw.normal(0, 0.3, (CHUNK, 2)) * (draw.random((CHUNK, 1)) < 1 / 3)) / side
        shading = slope[:, 0, None, None] * across + slope[:, 1, None, None] * along
        images = torch.where(inside[:, None], colour[:, :, None, None] + shading[:, None], images)
    strength = _tensor(draw.random((CHUNK, 1, 1)) ** 2 * 0.15)
    return (images + (strength * _texture(draw, height, width))[:, None]).clamp(0, 1)


def _leaf(draw: np.random.Generator, rows: Tensor, columns: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return one leaf of every image: coordinates along its two axes ``(CHUNK, h, w)``, and where it is."""
    ratio = (SMALLEST / LARGEST) ** 2
    radius = SMALLEST * side / np.sqrt(ratio + (1 - ratio) * draw.random(CHUNK))  # density ∝ r⁻³
    flat, angle = draw.uniform(0.2, 1.0, CHUNK), draw.uniform(0, math.pi, CHUNK)
    y, x = draw.uniform(-0.2 * side, 1.2 * side, (2, CHUNK))
    numbers = (np.cos(angle), np.sin(angle), y, x, radius, flat)
    cos, sin, up, right, long, thin = (_tensor(values)[:, None, None] for values in numbers)
    across = (columns - right) * cos + (rows - up) * sin
    along = (rows - up) * cos - (columns - right) * sin
    u, v = across.abs() / long, along.abs() / (long * thin)
    round_ones = torch.from_numpy(draw.random(CHUNK) < 0.5)[:, None, None]
    return across, along, torch.where(round_ones, u * u + v * v, torch.maximum(u, v)) < 1


def _texture(draw: np.random.Generator, height: int, width: int) -> Tensor:
    """Gaussian noise with spectrum 1/f^γ, γ in [0.5, 1.5], of variance 1: ``(CHUNK, h, w)``."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1 / max(height, width)
    waves = np.fft.rfft2(draw.standard_normal((CHUNK, height, width)))
    noise = np.fft.irfft2(waves / frequency ** draw.uniform(0.5, 1.5, (CHUNK, 1, 1)), s=(height, width))
    return _tensor(noise / noise.std(axis=(1, 2), keepdims=True))


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


FLOOR = 0.02
"""Added to a patch's variance before the root, in squared units of standardised images: flat patches stay small."""
RIDGE = 0.1
"""Added to the eigenvalues of normalised patches' covariance before whitening."""
FLATTEST = 0.08
"""Patches of a smaller standard deviation are no filters."""
TOGETHER = 100
"""Filters whose answers to one image are held at once."""


@dataclass(frozen=True)
class PatchOptions:
    """filters: F. size: a patch's side. stride: pixels between patches. cells: the grid's side. threshold: a."""

    filters: int = 800
    size: int = 6
    stride: int = 1
    cells: int = 3
    threshold: float = 0.25

    def __post_init__(self) -> None:
        for name in ("filters", "size", "stride", "cells"):
            whole(f"model.body.{name}", getattr(self, name), 1)
        in_range("model.body.threshold", self.threshold, 0)


class Patches(nn.Module):
    """Images (b, c, h, w) -> maps (b, 2F, cells²)."""

    filters: Tensor
    shift: Tensor
    pool: Tensor

    def __init__(self, shape: tuple[int, int, int], options: PatchOptions) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < (least := options.size + options.cells - 1):
            raise wrong("model.body", f"images of {height} × {width}", f"at least {least} × {least}, or a smaller size")
        self.size, self.stride, self.threshold = options.size, options.stride, options.threshold
        self.register_buffer("filters", torch.zeros(options.filters, channels * options.size**2))
        self.register_buffer("shift", torch.zeros(options.filters, 1))
        rows, columns = ((side - options.size) // options.stride + 1 for side in (height, width))
        self.register_buffer("pool", pooling(rows, columns, options.cells))

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._maps(image) for image in images.unsqueeze(1)])

    def _maps(self, image: Tensor) -> Tensor:
        """Of one image (1, c, h, w): what stays in a core's caches, and no image's bits follow from another's."""
        patches = normalised(F.unfold(image, self.size, stride=self.stride))[0]
        maps = []
        for filters, shift in zip(self.filters.split(TOGETHER), self.shift.split(TOGETHER)):
            beyond = F.softshrink(torch.addmm(shift, filters, patches, beta=-1), self.threshold)
            signed, absolute = beyond @ self.pool, beyond.abs_() @ self.pool
            maps.append(torch.stack([absolute + signed, absolute - signed], dim=1).flatten(0, 1) / 2)
        return torch.cat(maps)

    def fit(self, images: Tensor, seed: int) -> None:
        """Fill the filters with whitened patches of ``images`` (n, c, h, w)."""
        draw = stream(seed, "dictionary")
        patches = F.unfold(images, self.size, stride=max(self.size - 1, 1))
        patches = patches.transpose(1, 2).reshape(-1, self.filters.shape[1])
        patches = patches[patches.std(1) > FLATTEST]
        patches = patches[torch.from_numpy(draw.permutation(len(patches))[:100_000])]
        samples = normalised(patches[..., None])[..., 0].double()
        mean = samples.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov((samples - mean).T))
        white = vectors @ torch.diag((values.clamp_min(0) + RIDGE).rsqrt()) @ vectors.T
        chosen = (samples[: len(self.filters)] - mean) @ white
        if len(chosen) < len(self.filters):
            raise wrong("model.body.filters", len(self.filters), f"at most {len(chosen)}, the patches there are")
        chosen = chosen / torch.linalg.vector_norm(chosen, dim=1, keepdim=True)
        self.filters.copy_(chosen @ white)
        self.shift.copy_((chosen @ white @ mean)[:, None])


def normalised(patches: Tensor) -> Tensor:
    """Return the patches (b, n, L) as columns, each with mean 0 and contrast 1."""
    centred = patches - patches.mean(1, keepdim=True)
    return centred * (centred.square().mean(1, keepdim=True) + FLOOR).rsqrt()


def pooling(rows: int, columns: int, cells: int) -> Tensor:
    """Return the means over a grid of ``cells`` × ``cells`` nearly equal cells: ``(rows·columns, cells²)``."""
    return torch.einsum("ra,cb->rcab", _cells(rows, cells), _cells(columns, cells)).reshape(rows * columns, cells**2)


def _cells(places: int, cells: int) -> Tensor:
    """Return the means over ``cells`` stretches of ``places``, nearly equal ones: ``(places, cells)``."""
    member = F.one_hot(torch.arange(places) * cells // places, cells).float()
    return member / member.sum(0)


# Not kymatio.torch: it imports the 3-D transform too, which asks for a function that SciPy has no more.
BANK = "kymatio.scattering2d.filter_bank"


@dataclass(frozen=True)
class ScatteringOptions:
    """scales: J; means are over about 2^J pixels. angles: L. order: 1 or 2 moduli."""

    scales: int = 2
    angles: int = 8
    order: int = 2

    def __post_init__(self) -> None:
        for name in ("scales", "angles", "order"):
            whole(f"model.body.{name}", getattr(self, name), 1, 2 if name == "order" else None)


class Scattering(nn.Module):
    """Images (b, c, h, w) -> maps (b, c·P, positions), P = 1 + J·L + L²·J(J − 1)/2 paths of order 2. Buffers only."""

    def __init__(self, shape: tuple[int, int, int], options: ScatteringOptions) -> None:
        super().__init__()
        self.scales, self.order = options.scales, options.order
        step, sides = 2**options.scales, shape[1:]
        allowed = f"at least {step + 1} × {step + 1}, or fewer scales"
        require(min(sides) > step, "model.body", f"images of {sides[0]} × {sides[1]}", allowed)
        padded = [(side // step + 2) * step for side in sides]
        margins = [((to - side) // 2, (to - side + 1) // 2) for side, to in zip(sides, padded)]
        self.around = [*margins[1], *margins[0]]
        bank = importlib.import_module(BANK).filter_bank(*padded, options.scales, options.angles)
        for at, level in enumerate(bank["phi"]["levels"]):
            self.register_buffer(f"mean{at}", _filters([level], options.scales - at))
        for j in range(options.scales):
            for at, levels in enumerate(zip(*[one["levels"] for one in bank["psi"] if one["j"] == j])):
                self.register_buffer(f"wave{j}_{at}", _filters(levels, j - at))

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._maps(image) for image in images])

    def _maps(self, image: Tensor) -> Tensor:
        """Of one image (c, h, w): its means by path, ``(c·P, positions)``."""
        spectrum = torch.fft.fft2(F.pad(image[None], self.around, mode="reflect")[0])[:, None]
        means = [self._means(spectrum, 0)]
        for j in range(self.scales):
            first = _modulus(spectrum, getattr(self, f"wave{j}_0"), 2**j)
            means.append(self._means(first, j))
            for k in range(j + 1, self.scales if self.order == 2 else 0):
                second = _modulus(first[:, :, None], getattr(self, f"wave{k}_{j}"), 2 ** (k - j))
                means.append(self._means(second.flatten(1, 2), k))
        return torch.cat(means, 1).flatten(0, 1)

    def _means(self, spectrum: Tensor, level: int) -> Tensor:
        """Return the means, at a level, of what has this spectrum (c, paths, …): (c, paths, positions)."""
        smooth = _thinned(spectrum * getattr(self, f"mean{level}"), 2 ** (self.scales - level))
        return cast(Tensor, torch.fft.ifft2(smooth).real[..., 1:-1, 1:-1].flatten(-2))


def _modulus(spectrum: Tensor, waves: Tensor, step: int) -> Tensor:
    """Return the spectrum of |x ∗ ψ| for every wavelet, at every ``step``-th pixel."""
    return cast(Tensor, torch.fft.fft2(torch.fft.ifft2(_thinned(spectrum * waves, step)).abs()))


def _thinned(spectrum: Tensor, step: int) -> Tensor:
    """Return the spectrum of every ``step``-th pixel, where its filter is divided by step²."""
    for axis in (-1, -2):
        spectrum = functools.reduce(torch.add, spectrum.chunk(step, axis))
    return spectrum


def _filters(levels: Sequence[Any], thinned: int) -> Tensor:
    """Return the filters in Fourier space (n, rows, columns), after which every 2^thinned-th pixel is kept."""
    return cast(Tensor, torch.stack([torch.from_numpy(level) for level in levels]).float() / 4**thinned)


COLOURS = 3
LAYERS = ((32, 5, 2), (64, 3, 1), (128, 3, 2), (256, 3, 1))
"""Channels, side and stride of each convolution."""
GROUPS = 8


@dataclass(frozen=True)
class ContrastiveOptions:
    """network: the file of a network. sha256: the digest it must have. cells: the grid's side."""

    network: str | None = None
    sha256: str | None = None
    cells: int = 2

    def __post_init__(self) -> None:
        whole("model.body.cells", self.cells, 1)

    def with_digest(self) -> ContrastiveOptions:
        """Return them with the digest of the network in the file. Raises InputError where another was asked for."""
        digest = digest_of(self.tensors())
        if self.sha256 not in (None, digest):
            raise wrong("model.body.sha256", f"{self.sha256} for a network of {digest}", "the digest of the network")
        return replace(self, sha256=digest)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is in the file. Raises InputError."""
        tensors = read_tensors(Path(self.network)) if isinstance(self.network, str) else None
        if tensors is None:
            raise wrong("model.body.network", self.network, "a sound file that examples/pretrain_body.py wrote")
        return tensors

    @property
    def prior(self) -> str:
        """What the network was made from, as its file says."""
        # The value that the command of 0.2 wrote; the example still writes it.
        return "random process" if "fedflat pretrain" in read_about(Path(str(self.network))).values() else "unknown"


class Network(nn.Module):
    """Images (b, c, h, w), c of 1 or 3 -> maps (b, 384, cells²). Buffers only; grey is three equal colours."""

    def __init__(self, shape: tuple[int, int, int], options: ContrastiveOptions) -> None:
        super().__init__()
        if shape[0] not in (1, COLOURS) or min(shape[1:]) < 4 * options.cells:
            least = 4 * options.cells
            raise wrong("model.body", f"images of {shape}", f"1 or {COLOURS} channels, at least {least} × {least}")
        self.cells, self.options, before = options.cells, options, COLOURS
        for number, (channels, side, _) in enumerate(LAYERS):
            self.register_buffer(f"filters{number}", torch.zeros(channels, before, side, side))
            self.register_buffer(f"gain{number}", torch.ones(channels))
            self.register_buffer(f"shift{number}", torch.zeros(channels))
            before = channels

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self._maps(image) for image in images.split(1)])

    def _maps(self, image: Tensor) -> Tensor:
        pooled = [F.adaptive_avg_pool2d(layer, self.cells).flatten(2) for layer in self.layers(image)[-2:]]
        return torch.cat(pooled, dim=1)

    def layers(self, images: Tensor) -> list[Tensor]:
        """Return what each layer makes of images (b, c, h, w)."""
        maps = [images.expand(-1, COLOURS, -1, -1)]
        for number, (_, side, stride) in enumerate(LAYERS):
            filters, gain, shift = (self.get_buffer(f"{name}{number}") for name in ("filters", "gain", "shift"))
            answers = F.conv2d(maps[-1], filters, stride=stride, padding=side // 2)
            maps.append(F.group_norm(answers, GROUPS, gain, shift).relu())
        return maps[1:]

    def fit(self, images: Tensor, seed: int) -> None:
        """Fill it from its file; it was trained before, on images of its own."""
        tensors = self.options.tensors()
        names = ", ".join(sorted(tensors)[:3])
        # Names or shapes may be those of another network.
        with turning(RuntimeError, wrong("model.body.network", names, "a file that examples/pretrain_body.py wrote")):
            self.load_state_dict(tensors)
