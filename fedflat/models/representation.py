"""Train a head on the features of a frozen body that has seen no client's data.

A body is a function of its options, its shape and its own seed, and of a network's file, which has a digest. Linear
algebra differs in last bits from machine to machine, and principal directions by more: so what was used is kept
(cache, run folder, export), and has a digest.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedflat.core import cache_folder, digest_of, keep, read_tensors, report_progress, using_threads
from fedflat.core.checks import in_range, one_of, require, whole, wrong
from fedflat.models import patches
from fedflat.models.vision import image_shape


class Headed(nn.Module):
    """``head(features(inputs))``; a matrix of floats (b, n) is taken for features already computed.

    ``trained``: the beginning of the names of the head's parameters. ``prior``: what shaped the weights before any
    client's data, as the privacy statement names it.
    """

    trained = "classifier."
    prior = "none"

    def features(self, inputs: Tensor) -> Tensor:
        """Inputs (b, …) -> features (b, n)."""
        raise NotImplementedError

    def head(self, features: Tensor) -> Tensor:
        """Features (b, n) -> logits (b, classes)."""
        return cast(Tensor, self.get_submodule(self.trained.rstrip("."))(features))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs if inputs.is_floating_point() and inputs.dim() == 2 else self.features(inputs))

    @property
    def frozen(self) -> bool:
        """Whether the features of an input stay the same while the module is trained: head only, and no dropout."""
        still = all(name.startswith(self.trained) for name, p in self.named_parameters() if p.requires_grad)
        return still and not any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in self.modules())


FLATTEST = 1e-3
"""Added to a map entry's standard deviation before the division."""
SHRUNK = 0.5
"""Of the least variance kept, added to all variances before whitening."""
BLOCK = 50
"""Synthetic images whose maps are computed at once."""


@dataclass(frozen=True)
class ProjectionOptions:
    """dimension: features k. whitening: w of (variance)^(−w/2), 0 none, 1 all. images: how many to fit on.

    flip: an image's directions are the mean over it and its mirror image, so that both have the same features.
    """

    dimension: int = 2000
    whitening: float = 0.8
    images: int = 4000
    flip: bool = False

    def __post_init__(self) -> None:
        whole("model.body.dimension", self.dimension, 1)
        whole("model.body.images", self.images, 100)
        in_range("model.body.whitening", self.whitening, 0, 1)
        require(isinstance(self.flip, bool), "model.body.flip", self.flip, "true or false")


class Projection(nn.Module):
    """Maps (b, channels, positions) -> features (b, k) of length 1. Its buffers are empty until it is fitted."""

    mean: Tensor
    scale: Tensor
    channels: Tensor
    positions: Tensor
    chosen: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "scale", "channels", "positions", "chosen", "weight"):
            self.register_buffer(name, torch.zeros(0))

    def forward(self, *views: Tensor) -> Tensor:
        """views: maps of an image, and of its mirror image where features are of both."""
        return unit(self._mean(views)[:, self.chosen] * self.weight)

    def _mean(self, views: Sequence[Tensor]) -> Tensor:
        return cast(Tensor, sum(self._directions(maps) for maps in views)) / len(views)

    def _standard(self, maps: Tensor) -> Tensor:
        return unit(((maps - self.mean) * self.scale).flatten(1)).view_as(maps)

    def _directions(self, maps: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(self.channels, self._standard(maps)), self.positions).flatten(1)

    def fit(self, views: Sequence[Tensor], options: ProjectionOptions) -> None:
        """Fit on maps (n, channels, positions) of synthetic images; a second entry: of their mirror images."""
        maps = views[0]
        self.mean = maps.mean(0)
        self.scale = 1 / (maps.std(0) + FLATTEST)
        parts = maps.split(BLOCK)
        centre = sum(self._standard(part).sum(0) for part in parts) / len(maps)
        among, places = (
            _products((self._standard(part) - centre).transpose(1, 2 if over else 1).flatten(0, 1) for part in parts)
            for over in (True, False)
        )
        across, along = torch.linalg.eigh(among)[1], torch.linalg.eigh(places)[1]
        self.channels, self.positions = _signed(across).T.float().contiguous(), _signed(along).float().contiguous()
        pairs = list(zip(*(view.split(BLOCK) for view in views)))
        shift = self._mean(pairs[0]).mean(0)  # for the sake of the subtraction's accuracy
        sums = cast(Tensor, sum(_sums(self._mean(pair) - shift) for pair in pairs)) / len(maps)
        variance, order = (sums[1] - sums[0].square()).float().clamp_min(0).sort(descending=True)
        leading = order[: options.dimension]
        used, rows = torch.unique(leading // maps.shape[2], return_inverse=True)
        self.channels, self.chosen = self.channels[used].contiguous(), rows * maps.shape[2] + leading % maps.shape[2]
        variance = variance[: options.dimension]
        self.weight = (variance + SHRUNK * variance[-1]).pow(-options.whitening / 2)


def fitted_maps(body: nn.Module, images: Tensor) -> Tensor:
    """Return the maps of synthetic images (n, channels, positions), in blocks."""
    few = body(images[:1])
    maps: Tensor = few.new_empty(len(images), *few.shape[1:])
    for start in range(0, len(images), BLOCK):
        report_progress("making the dictionary, random image", start, len(images))
        maps[start : start + BLOCK] = body(images[start : start + BLOCK])
    report_progress("making the dictionary, random image", len(images), len(images))
    return maps


def unit(rows: Tensor) -> Tensor:
    """Return the rows (b, n) of length 1."""
    return cast(Tensor, rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-9))


def _products(parts: Iterable[Tensor]) -> Tensor:
    """Σ xᵀx of matrices x (n, d), in float64."""
    return cast(Tensor, sum(part.T.double() @ part.double() for part in parts))


def _sums(rows: Tensor) -> Tensor:
    """Return the sums of rows (n, d) and of their squares, float64 ``(2, d)``."""
    return torch.stack([rows.double().sum(0), rows.double().square().sum(0)])


def _signed(vectors: Tensor) -> Tensor:
    """Eigenvectors as columns, from the largest eigenvalue on, each with its largest entry positive."""
    vectors = vectors.flip(1)
    return vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()


FORMAT = "fedflat-body-1"
KINDS: dict[str, tuple[Any, Any]] = {
    "patches": (patches.PatchOptions, patches.Patches),
    "scattering": (patches.ScatteringOptions, patches.Scattering),
    "contrastive": (patches.ContrastiveOptions, patches.Network),
}
"""Each kind of body: its options, and what makes an image's maps."""
Shape = tuple[int, int, int]


def named(where: str, setting: Any) -> dict[str, Any]:
    """Return a kind by its name, or with options, as a dictionary of its own. Raises InputError."""
    require(isinstance(setting, (str, Mapping)), where, setting, "a name, or a name with options: {kind: …, …}")
    return {"kind": setting} if isinstance(setting, str) else dict(setting)


def options_of(options: Mapping[str, Any], *kinds: Any) -> list[Any]:
    """Return one object of each kind, made of the keys that are its fields. Raises InputError for a key of none."""
    names = [[field.name for field in dataclasses.fields(kind)] for kind in kinds]
    for key in options:
        one_of(f"model.body.{key}", key, ["seed", *itertools.chain(*names)])
    return [kind(**{key: options[key] for key in fields if key in options}) for kind, fields in zip(kinds, names)]


class PublicBody(nn.Module):
    """Images (b, c, h, w) -> features (b, k) of length 1: maps, then their public projection. Buffers only.

    prior: what it was made from, as the statement names it; a body from a file may be anything.
    """

    prior = "random process"
    projection: Any

    def __init__(self, maps: nn.Module, flip: bool = False) -> None:
        super().__init__()
        self.maps, self.projection, self.flip = maps, Projection(), flip

    @property
    def width(self) -> int:
        """Features."""
        return int(getattr(self.projection, "width", 0)) or len(self.projection.weight)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.projection(*(self.maps(view) for view in self.views(images))))

    def views(self, images: Tensor) -> list[Tensor]:
        """Return the images, and their mirror images where features are of both."""
        return [images, images.flip(-1)] if self.flip else [images]

    def as_data(self, images: Tensor) -> Tensor:
        """Return standardised synthetic images as if the data had prepared them."""
        return images

    def make(self, made_of: str, shape: Shape, options: ProjectionOptions, seed: int) -> None:
        """Fill the body from the cache, or from synthetic images (minutes), and keep it there if that can be written.

        made_of: all that the body is a function of, in one line.
        """
        key = hashlib.sha256(made_of.encode()).hexdigest()[:32]
        tensors = read_tensors(cache_folder() / f"body-{key}.safetensors")
        if tensors is None:
            with torch.no_grad(), using_threads(torch.get_num_threads()):
                images = self.as_data(patches.dead_leaves(options.images, shape, seed))
                if isinstance(self.maps, patches.Patches | patches.Network):
                    self.maps.fit(images, seed)
                self.projection.fit([fitted_maps(self.maps, view) for view in self.views(images)], options)
            tensors = self.saved()
            keep("body", key, tensors, {"made_of": made_of})
        self.fill(tensors)

    def saved(self) -> dict[str, Tensor]:
        """Return what a run keeps of the body: what makes it again, bit for bit."""
        return dict(self.state_dict())

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what a run kept; tensors of the projection have the stored shapes. Raises InputError for another
        body's.
        """
        for name, value in self.named_buffers():
            here = tensors.get(name)
            fits = here is not None and (name.startswith("projection.") or here.shape == value.shape)
            if not fits or len(tensors) != len(self.state_dict()):
                form = "nothing" if here is None else f"shape {tuple(here.shape)}"
                raise wrong(f"model.path: {name}", form, f"a body of these options and images ({tuple(value.shape)})")
        for name, value in tensors.items():
            owner, _, key = name.rpartition(".")
            self.get_submodule(owner)._buffers[key] = value.clone()


def body_of(
    setting: str | Mapping[str, Any], shape: Shape, path: str | Path | None = None, sha256: str | None = None
) -> PublicBody:
    """Return the body of a setting, ``patches`` or ``{kind: patches, filters: 400, …}``: from ``path``, from the cache,
    or made now. Its ``seed`` is that of the random process, not of the run.

    Raises InputError where its digest is not ``sha256``, or where the file at ``path`` holds another body.
    """
    options = named("model.body", setting)
    kind, seed = one_of("model.body.kind", options.pop("kind", "patches"), KINDS), options.pop("seed", 0)
    maps, projection = options_of(options, KINDS[kind][0], ProjectionOptions)
    body = PublicBody(KINDS[kind][1](shape, maps), projection.flip)
    tensors = given_tensors(path, sha256)
    if tensors is not None:
        body.prior = "unknown"
        body.fill(tensors)
        return body
    if isinstance(maps, patches.ContrastiveOptions):
        maps, body.prior = maps.with_digest(), maps.prior
    facts = {"kind": kind, "seed": whole("model.body.seed", seed), "projection": dataclasses.asdict(projection)}
    # Where a network lies is nothing to its digest.
    facts["maps"] = {key: value for key, value in dataclasses.asdict(maps).items() if key != "network"}
    body.make(json.dumps([FORMAT, list(shape), facts], sort_keys=True), shape, projection, seed)
    return body


def given_tensors(path: str | Path | None, sha256: str | None) -> dict[str, Tensor] | None:
    """Return a body that somebody put at ``path``, or into the cache under its digest."""
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise wrong("model.sha256", sha256, "64 hexadecimal digits in quotes")
    if path is None:
        return None if sha256 is None else read_tensors(cache_folder() / f"body-{sha256}.safetensors")
    tensors = read_tensors(Path(path)) if isinstance(path, (str, Path)) else None
    require(tensors is not None, "model.path", path, "a sound body.safetensors of a run or an export")
    return tensors


NAME = "representation"
HEADS = ("linear", "mlp")


class Representation(Headed):
    """Images (b, c, h, w), standardised -> logits (b, classes).

    body: images -> features (b, k). sha256: the digest that what is in it must have. settled: the options that make the
    same module again on another machine, as a recipe takes them, ``constants`` of the data among them. batch: examples
    whose features are computed at once.
    """

    body: PublicBody
    batch = 64

    def __init__(self, body: PublicBody, classifier: nn.Module, sha256: str | None, **constants: Any) -> None:
        super().__init__()
        self.body, self.classifier, self.prior = body, classifier, body.prior
        self.sha256 = digest_of(body.saved())
        if sha256 not in (None, self.sha256):
            place = cache_folder() / f"body-{sha256}.safetensors"
            hint = f"This machine makes another from the same seed; copy the run's own (body.safetensors) to {place}."
            problem = f"{sha256} for a body of {self.sha256}"
            raise wrong("model.sha256", problem, "the body that the run was made with", hint=hint)
        self.settled = {"sha256": self.sha256, **constants}

    def features(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.body(inputs))

    def linear_layers(self) -> list[nn.Module]:
        """Return the head as plain layers, for back ends that write the arithmetic out: they see features only."""
        return list(self.classifier) if isinstance(self.classifier, nn.Sequential) else [self.classifier]


def representation(
    input_shape: Sequence[int], classes: int, *, body: str | Mapping[str, Any] = "patches",
    head: str | Mapping[str, Any] = "linear", path: str | None = None, sha256: str | None = None,
) -> nn.Module:  # fmt: skip
    """Return a frozen body of public or synthetic origin, and a head that is trained.

    ``body``: ``patches`` or ``{kind: patches, filters: 800, size: 6, stride: 1, cells: 3, threshold: 0.25, dimension:
    2000, whitening: 0.8, images: 4000, flip: false, seed: 0}``, a dictionary made from random-process images, of which
    no one's data is a part; ``scattering``, with ``scales: 2, angles: 8, order: 2`` and the keys from
    ``dimension`` on; or ``{kind: contrastive, network: FILE, sha256: …, cells: 2, …}``, a network that
    ``examples/pretrain_body.py`` trained on such images. ``head``: ``linear`` (starts at zero) or ``{kind: mlp, hidden:
    64}``. ``path``: a file with the body, the ``body.safetensors`` of a run; ``sha256``: the digest that it must have.
    Raises InputError.
    """
    frozen = body_of(body, image_shape(NAME, input_shape), path, sha256)
    return Representation(frozen, head_of(head, frozen.width, classes), sha256)


def head_of(setting: str | Mapping[str, Any], features: int, classes: int) -> nn.Module:
    options = named("model.head", setting)
    kind = one_of("model.head.kind", options.pop("kind", HEADS[0]), HEADS)
    hidden = whole("model.head.hidden", options.pop("hidden", 64), 1) if kind == "mlp" else 0
    for key in options:
        raise wrong(f"model.head.{key}", key, "kind and hidden" if kind == "mlp" else "kind alone, for linear")
    if kind == "mlp":
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    linear = nn.Linear(features, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
