"""A small network that was trained on images of a random process, without labels, and is read from its file.

Four convolutions, each followed by a group norm and a rectifier; of the last two, means over the cells of a grid. All
of it looks at one image at a time. ``examples/pretrain_body.py`` trains one and writes the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.checks import turning, whole, wrong
from fedflat.core.durable import digest_of, read_about, read_tensors

LAYERS = ((32, 5, 2), (64, 3, 1), (128, 3, 2), (256, 3, 1))
"""Channels, side and stride of each convolution."""
COLOURS = 3
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
