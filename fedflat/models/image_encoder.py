"""Train a head, adapters or norms on the features of public image networks (``model: {name: image-encoder}``).

A body is a function of its network, whose weights have a digest, of the size of its images, and of their shape. A run
keeps the digest of the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedflat.core.checks import whole, wrong
from fedflat.models import representation
from fedflat.models.networks import BODIES, Loaded, NetworkMaps, Prepare, loaded
from fedflat.models.pretrained import NATURAL, trainable
from fedflat.models.vision import image_shape

NAME = "image-encoder"


@dataclass(frozen=True)
class NetworkOptions:
    """kind: the network. size: the side of the square that images are resized to; None: as the network's own
    preprocessing has it. sha256: of the network's weights.
    """

    kind: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            whole("model.size", self.size, 1)


class Centred(nn.Module):
    """Maps (b, channels, 1) -> features (b, channels) of mean 0 and length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(0))  # empty, but a run's identity and its files have had it

    def forward(self, maps: Tensor) -> Tensor:
        rows = maps.flatten(1)
        return representation.unit(rows - rows.mean(1, keepdim=True))


class NetworkBody(representation.PublicBody):
    """Images (b, c, h, w) -> features (b, k) of length 1, of a public network.

    A run keeps the network's digest, not the network: whoever loads it needs the same one.
    """

    def __init__(self, source: Loaded, options: NetworkOptions, shape: tuple[int, int, int], pixels: Any) -> None:
        seen = source.preprocessing
        if options.size is not None:
            seen = replace(seen, size=(options.size,) * 2, crop=None)
        super().__init__(NetworkMaps(Prepare(shape, pixels, seen), source))
        self.projection, self.options, self.digest, self.prior = Centred(), options, source.digest, source.prior
        self.title = f"{options.kind.rstrip('/').rpartition('/')[2]} (SHA-256 {source.digest[:16]})"

    @property
    def width(self) -> int:
        """Features."""
        return cast(NetworkMaps, self.maps).channels

    def saved(self) -> dict[str, Tensor]:
        digest = torch.frombuffer(bytearray.fromhex(self.digest), dtype=torch.uint8)
        return {"network": digest, "projection.weight": self.projection.weight}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Look at what a run kept. Raises InputError where it was made with another network, or otherwise."""
        mine = self.saved()
        if {name: value.shape for name, value in tensors.items()} != {name: mine[name].shape for name in mine}:
            raise wrong("model.path", ", ".join(sorted(tensors)[:3]), "what a run with this body kept")
        if not torch.equal(tensors["network"], mine["network"]):
            digest = bytes(tensors["network"].tolist()).hex()
            raise wrong("model.body", f"{self.options.kind} with SHA-256 {self.digest}", f"{digest}, the run's own")


class SideBySide(representation.PublicBody):
    """Several bodies: images (b, c, h, w) -> the features of each, one after the other, of length 1 together."""

    def __init__(self, bodies: Sequence[representation.PublicBody]) -> None:
        nn.Module.__init__(self)
        self.bodies = cast(Sequence[representation.PublicBody], nn.ModuleList(bodies))
        titles = [str(getattr(body, "title", body.prior)) for body in bodies]
        priors = {body.prior for body in bodies}
        natural = f"{NATURAL}: {', '.join(titles)}" if NATURAL in priors else "random process"
        self.prior = natural if priors <= {NATURAL, "random process"} else "unknown"

    @property
    def width(self) -> int:
        """Features."""
        return sum(body.width for body in self.bodies)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, torch.cat([body(images) for body in self.bodies], dim=1) / len(self.bodies) ** 0.5)

    def saved(self) -> dict[str, Tensor]:
        return {f"{at}.{name}": value for at, body in enumerate(self.bodies) for name, value in body.saved().items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what a run kept of each body. Raises InputError where it was made of others."""
        for at, body in enumerate(self.bodies):
            parts = ((name.partition("."), value) for name, value in tensors.items())
            body.fill({name: value for (place, _, name), value in parts if place == str(at)})


TOGETHER = 16
"""Examples whose features are computed at once, few enough for a core's caches."""


def image_encoder(
    input_shape: Sequence[int], classes: int, *, body: str | Mapping[str, Any] | None = None,
    bodies: Sequence[str | Mapping[str, Any]] | None = None, head: str | Mapping[str, Any] = "linear",
    train: str = "head", rank: int = 8, size: int | None = None, pixels: Mapping[str, Any] | None = None,
    path: str | None = None, sha256: str | None = None,
) -> nn.Module:  # fmt: skip
    """Return a public image network, or several side by side, with a new head.

    ``body``: a folder that save_pretrained wrote, ``timm:NAME``, ``file.py:callable``, ``efficientnet-lite0`` to ``2``
    (the extra ``vision``), or a body of ``representation`` (patches, scattering, contrastive); ``bodies``: a list of
    them. Each may be ``{kind: NAME, …}`` with options of its own. ``size``: the side in pixels of all networks' images.
    ``train``: head (the body is frozen, its features are computed once), lora (``rank``), norms or all. ``pixels``: the
    mean and std by which the data standardise pixels in [0, 1], which a recipe's data give. ``path``, ``sha256``: the
    file that a run kept of its body, and its digest. Raises InputError.
    """
    shape = image_shape(NAME, input_shape)
    listed = [body] if bodies is None else bodies
    if (body is not None and bodies is not None) or not isinstance(listed, list | tuple) or listed in ([], [None]):
        raise wrong("model.body", bodies if body is None else body, f"one of {', '.join(BODIES)}; or bodies: a list")
    tensors = representation.given_tensors(path, sha256)
    base = SideBySide([_body(setting, size, shape, pixels) for setting in listed])
    if tensors is not None:
        base.fill(tensors)
    # The pixels' constants are kept too: a client of a deployment has them from nowhere else.
    constants = {} if pixels is None else {"pixels": {key: list(values) for key, values in pixels.items()}}
    module = representation.Representation(base, representation.head_of(head, base.width, classes), sha256, **constants)
    module.batch = TOGETHER
    return trainable(NAME, module, train, rank).train()  # adapters are new: the network's layers stay in their mode


def _body(setting: Any, size: int | None, shape: representation.Shape, pixels: Any) -> representation.PublicBody:
    options = representation.named("model.body", setting)
    if options.get("kind", "patches") in representation.KINDS:
        return representation.body_of(representation.BodyOptions.of(options), shape)
    chosen: NetworkOptions = representation.options_of({"size": size, **options}, NetworkOptions)[0]
    source = loaded(chosen.kind, chosen.size)
    if chosen.sha256 not in (None, source.digest):
        raise wrong("model.body.sha256", f"{chosen.sha256} for {chosen.kind} with {source.digest}", "the body's digest")
    return NetworkBody(source, chosen, shape, pixels)
