"""Train a head, adapters or norms on the features of public image networks (``model: {name: image-encoder}``).

A body is a function of its network, whose weights have a digest, of its options, and of the images' shape. What it
adds to the network, its projection, is made of public numbers alone: the network's own classifier and its answers to
synthetic images. A run keeps that part, and the digest of the network.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedflat.core import in_range, one_of, require, whole, wrong
from fedflat.models import representation
from fedflat.models.networks import BODIES, INTERPOLATIONS, Loaded, NetworkMaps, Prepare, loaded
from fedflat.models.pretrained import NATURAL, trainable
from fedflat.models.vision import image_shape

NAME = "image-encoder"
FORMAT = "fedflat-network-1"
PROJECTIONS = ("none", "classifier", "synthetic")


@dataclass(frozen=True)
class NetworkOptions:
    """How the features of a network are made. None: as the network's own preprocessing has it, or all.

    kind: the network. size: the side of the square that images are resized to. layers: ``last``, or names. cells: the
    grid's side; None: the class token, or the mean over the image. mirror: the mean with the mirror image's features.
    projection: onto the directions that the network's own classifier tells apart best, onto principal ones of synthetic
    images, or none. dimension, images: as ``representation`` has them. whitening: 1 makes all directions equally long,
    0 leaves each its singular value (``classifier``), or its deviation. sha256: of the network's weights.
    """

    kind: str
    size: int | None = None
    interpolation: str | None = None
    layers: str | Sequence[str] = "last"
    cells: int | None = None
    mirror: bool = False
    projection: str = "none"
    dimension: int | None = None
    whitening: float = 1.0
    images: int = 500
    seed: int = 0
    sha256: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("cells", 1), ("dimension", 1), ("images", 100), ("seed", 0)):
            if getattr(self, name) is not None:
                whole(f"model.{name}", getattr(self, name), least)
        one_of("model.projection", self.projection, PROJECTIONS)
        in_range("model.whitening", self.whitening, 0, 1)
        one_of("model.interpolation", self.interpolation or INTERPOLATIONS[0], INTERPOLATIONS)
        require(isinstance(self.mirror, bool), "model.mirror", self.mirror, "true or false")


class NetworkBody(representation.PublicBody):
    """Images (b, c, h, w) -> features (b, k) of length 1, of a public network.

    A run keeps the projection and the network's digest, not the network: whoever loads it needs the same one.
    """

    def __init__(self, source: Loaded, options: NetworkOptions, shape: tuple[int, int, int], pixels: Any) -> None:
        seen = source.preprocessing
        if options.size is not None:
            seen = seen._replace(size=(options.size,) * 2, crop=None)
        seen = seen._replace(interpolation=options.interpolation or seen.interpolation)
        layers = (options.layers,) if isinstance(options.layers, str) else tuple(options.layers)
        layers = () if layers == ("last",) else layers
        super().__init__(NetworkMaps(Prepare(shape, pixels, seen), source, layers, options.cells))
        if options.projection != "synthetic":
            self.projection = Directions(*cast(NetworkMaps, self.maps).form)
        self.flip, self.options, self.shape, self.digest = options.mirror, options, shape, source.digest
        self.prior = source.prior
        self.title = f"{options.kind.rstrip('/').rpartition('/')[2]} (SHA-256 {source.digest[:16]})"
        self.text = json.dumps([FORMAT, source.digest, shape, dataclasses.asdict(options), pixels, repr(seen)])

    def as_data(self, images: Tensor) -> Tensor:
        return cast(NetworkMaps, self.maps).prepare.as_data(images)

    def make_projection(self, classifier: Tensor | None) -> None:
        """Fill the projection, from the cache where it takes synthetic images."""
        options = self.options
        if isinstance(self.projection, Directions):
            self.projection.turn(classifier, options)
            return
        form = cast(NetworkMaps, self.maps).form
        width = options.dimension or form[0] * form[1]
        projection = representation.ProjectionOptions(width, options.whitening, options.images)
        self.make(self.text, self.shape, projection, options.seed)

    def saved(self) -> dict[str, Tensor]:
        digest = torch.frombuffer(bytearray.fromhex(self.digest), dtype=torch.uint8)
        return {"network": digest, **{f"projection.{k}": v for k, v in self.projection.state_dict().items()}}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the projection that a run kept. Raises InputError where it was made for another network."""
        mine = self.saved()
        if tensors.keys() != mine.keys():
            raise wrong("model.path", ", ".join(sorted(tensors)[:3]), "what a run with this body kept")
        if not torch.equal(tensors["network"], mine["network"]):
            digest = bytes(tensors["network"].tolist()).hex()
            raise wrong("model.body", f"{self.options.kind} with SHA-256 {self.digest}", f"{digest}, the run's own")
        for name in self.projection.state_dict():
            self.projection._buffers[name] = tensors[f"projection.{name}"].clone()


class Directions(nn.Module):
    """Maps (b, channels, positions) -> features (b, k) of length 1: some directions over channels, or the maps less
    their mean.
    """

    weight: Tensor

    def __init__(self, channels: int, positions: int) -> None:
        super().__init__()
        self.channels, self.positions = channels, positions
        self.register_buffer("weight", torch.zeros(0))

    @property
    def width(self) -> int:
        """Features."""
        return (len(self.weight) or self.channels) * self.positions

    def forward(self, *views: Tensor) -> Tensor:
        """views: maps of an image, and of its mirror image where features are of both."""
        maps = sum(views[1:], views[0])
        rows = (self.weight @ maps if self.weight.numel() else maps).flatten(1)
        return representation.unit(rows if self.weight.numel() else rows - rows.mean(1, keepdim=True))

    def turn(self, classifier: Tensor | None, options: NetworkOptions) -> None:
        """Take the directions that a classifier (classes, channels) tells apart best. Raises InputError."""
        if options.projection == "none":
            return
        if classifier is None or classifier.shape[1] != self.channels:
            problem = "nothing" if classifier is None else f"one of {classifier.shape[1]} features"
            allowed = f"a network whose classifier takes these {self.channels} features, or none, or synthetic"
            raise wrong("model.projection: classifier", problem, allowed)
        weights = classifier.double()
        _, strength, directions = torch.linalg.svd(weights - weights.mean(0), full_matrices=False)
        weighed = directions * (strength / strength[0]).pow(1 - options.whitening)[:, None]
        self.weight = weighed[: options.dimension].float().contiguous()


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


SHARED = ("size", "interpolation", "layers", "cells", "mirror", "projection", "dimension", "whitening")
"""Options of a network that the model may say for all its networks."""
TOGETHER = 16
"""Examples whose features are computed at once, few enough for a core's caches."""


def image_encoder(
    input_shape: Sequence[int], classes: int, *, body: str | Mapping[str, Any] | None = None,
    bodies: Sequence[str | Mapping[str, Any]] | None = None, head: str | Mapping[str, Any] = "linear",
    train: str = "head", rank: int = 8, pixels: Mapping[str, Any] | None = None, path: str | None = None,
    sha256: str | None = None, **shared: Any,
) -> nn.Module:  # fmt: skip
    """Return a public image network, or several side by side, with a new head.

    ``body``: a folder that save_pretrained wrote, ``timm:NAME``, ``file.py:callable``, ``efficientnet-lite0`` to ``2``
    (the extra ``vision``), or a body of ``representation`` (patches, scattering, contrastive); ``bodies``: a list of
    them. Each may be ``{kind: NAME, …}`` with options of its own; those of the model hold for all networks: ``size``
    (pixels), ``interpolation``, ``layers`` (last, or names), ``cells`` (side of the grid of means), ``mirror``,
    ``projection`` (none, classifier, synthetic), ``dimension``, ``whitening``. ``train``: head (the body is frozen, its
    features are computed once), lora (``rank``), norms or all. ``pixels``: the mean and std by which the data
    standardise pixels in [0, 1], which a recipe's data give. ``path``, ``sha256``: the file that a run kept of its
    body, and its digest. Raises InputError.
    """
    shape = image_shape(NAME, input_shape)
    for key in shared:
        one_of(f"model {NAME}: option", key, SHARED)
    listed = [body] if bodies is None else bodies
    if (body is not None and bodies is not None) or not isinstance(listed, list | tuple) or listed in ([], [None]):
        raise wrong("model.body", bodies if body is None else body, f"one of {', '.join(BODIES)}; or bodies: a list")
    tensors = representation.given_tensors(path, sha256)
    base = SideBySide([_body(setting, shared, shape, pixels, tensors is None) for setting in listed])
    if tensors is not None:
        base.fill(tensors)
    # The pixels' constants are kept too: a client of a deployment has them from nowhere else.
    constants = {} if pixels is None else {"pixels": {key: list(values) for key, values in pixels.items()}}
    module = representation.Representation(base, representation.head_of(head, base.width, classes), sha256, **constants)
    module.batch = TOGETHER
    return trainable(NAME, module, train, rank).train()  # adapters are new: the network's layers stay in their mode


def _body(
    setting: Any, shared: Mapping[str, Any], shape: representation.Shape, pixels: Any, new: bool
) -> representation.PublicBody:
    """Return one body. new: with a projection, or with that of a file that is read later."""
    options = representation.named("model.body", setting)
    if options.get("kind", "patches") in representation.KINDS:
        return representation.body_of(options, shape)
    chosen: NetworkOptions = representation.options_of({**shared, **options}, NetworkOptions)[0]
    source = loaded(chosen.kind, chosen.size)
    if chosen.sha256 not in (None, source.digest):
        raise wrong("model.body.sha256", f"{chosen.sha256} for {chosen.kind} with {source.digest}", "the body's digest")
    body = NetworkBody(source, chosen, shape, pixels)
    if new:
        body.make_projection(source.classifier)
    return body
