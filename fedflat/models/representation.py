"""Train a head on the features of a frozen body that has seen no client's data.

A body is a function of its options, its shape and its own seed, and of a network's file, which has a digest. Linear
algebra differs in last bits from machine to machine, and principal directions by more: so what was used is kept
(cache, run folder, export), and has a digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedflat.core.checks import nearest, one_of, whole, wrong
from fedflat.core.durable import cache_folder, digest_of, keep, read_tensors, write_tensors
from fedflat.core.process import using_threads
from fedflat.models.patches import Patches, PatchOptions, dead_leaves
from fedflat.models.pretraining import ContrastiveOptions, Network
from fedflat.models.scattering import Projection, ProjectionOptions, Scattering, ScatteringOptions, fitted_maps
from fedflat.models.vision import image_shape


class Headed(nn.Module):
    """``head(features(inputs))``; a matrix of floats (b, n) is taken for features already computed.

    ``trained``: the beginning of the names of the head's parameters. ``prior``: what shaped the weights before any
    client's data, as the privacy statement names it.
    """

    trained = "body.classifier."
    prior = "none"

    def features(self, inputs: Tensor) -> Tensor:
        """Inputs (b, …) -> features (b, n)."""
        raise NotImplementedError

    def head(self, features: Tensor) -> Tensor:
        """Features (b, n) -> logits (b, classes)."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        known = inputs.is_floating_point() and inputs.dim() == 2
        return self.head(inputs if known else self.features(inputs))

    @property
    def frozen(self) -> bool:
        """Whether the features of an input stay the same while the module is trained: head only, and no dropout."""
        free = (name for name, p in self.named_parameters() if p.requires_grad)
        still = all(name.startswith(self.trained) for name in free)
        return still and not any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in self.modules())


__all__ = ["FILE", "NAME", "Representation", "representation", "write_body"]


FORMAT = "fedflat-body-1"
KINDS: dict[str, tuple[Any, Any]] = {
    "patches": (PatchOptions, Patches),
    "scattering": (ScatteringOptions, Scattering),
    "contrastive": (ContrastiveOptions, Network),
}
"""Each kind of body: its options, and what makes an image's maps."""
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class BodyOptions:
    """What a body is a function of, besides the images' shape. seed: of the random process, not of the run."""

    kind: str
    seed: int
    maps: Any
    projection: ProjectionOptions

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> BodyOptions:
        """``patches``, or ``{kind: patches, filters: 400, …}``. Raises InputError."""
        found = named("model.body", given)
        kind, seed = one_of("model.body.kind", found.pop("kind", "patches"), KINDS), found.pop("seed", 0)
        maps, shared = KINDS[kind][0], ProjectionOptions
        names = [field.name for of in (maps, shared) for field in dataclasses.fields(of)]
        for key in found:
            if key not in names:
                raise wrong(f"model.body.{key}", key, f"for {kind}: seed, {', '.join(names)}", hint=nearest(key, names))
        own, rest = (
            {f.name: found[f.name] for f in dataclasses.fields(of) if f.name in found} for of in (maps, shared)
        )
        return cls(kind, whole("model.body.seed", seed), maps(**own), shared(**rest))

    def text(self, shape: Shape) -> str:
        """Return all of it in one line."""
        facts = dataclasses.asdict(self)
        facts["maps"].pop("network", None)  # where it lies is nothing to its digest
        return json.dumps([FORMAT, list(shape), facts], sort_keys=True)


def named(where: str, given: Any) -> dict[str, Any]:
    """Return a kind by its name, or with options, as a dictionary of its own. Raises InputError."""
    if not isinstance(given, (str, Mapping)):
        raise wrong(where, given, "a name, or a name with options: {kind: …, …}")
    return {"kind": given} if isinstance(given, str) else dict(given)


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
        found: Tensor = self.projection(*(self.maps(view) for view in self.views(images)))
        return found

    def kept(self) -> dict[str, Tensor]:
        """Return what a run keeps of the body: what makes it again, bit for bit."""
        return dict(self.state_dict())

    def views(self, images: Tensor) -> list[Tensor]:
        """Return the images, and their mirror images where features are of both."""
        return [images, images.flip(-1)] if self.flip else [images]


def body_of(
    options: BodyOptions, shape: Shape, path: str | Path | None = None, sha256: str | None = None
) -> tuple[PublicBody, str]:
    """Return the body, and the digest of what is in it: from ``path``, from the cache, or made now (minutes) and kept
    there.

    Raises InputError where its digest is not ``sha256``, or where the file at ``path`` holds another body.
    """
    body = PublicBody(_maps(options, shape), options.projection.flip)
    tensors = given_tensors(path, sha256)
    if tensors is not None:
        body.prior = "unknown"
    if tensors is None and isinstance(options.maps, ContrastiveOptions):
        options, body.prior = replace(options, maps=options.maps.known()), options.maps.prior
    tensors = tensors or read_tensors(_kept(options, shape)) or _made(body, options, shape)
    found = checked(tensors, sha256)
    fill(body, tensors)
    return body, found


def checked(tensors: Mapping[str, Tensor], sha256: str | None) -> str:
    """Return the digest of what is in a body. Raises InputError where another one was asked for."""
    found = digest_of(tensors)
    if sha256 not in (None, found):
        kept = cache_folder() / f"body-{sha256}.safetensors"
        hint = f"This machine makes another one from the same seed; copy the run's own ({FILE}) to {kept}."
        raise wrong("model.sha256", f"{sha256} for a body of {found}", "the body that the run was made with", hint=hint)
    return found


FILE = "body.safetensors"
"""In a run's folder, and in an exported one."""


def write_body(body: PublicBody, path: Path) -> None:
    """Keep a body beside what was trained on it."""
    write_tensors(path, body.kept())


def given_tensors(path: str | Path | None, sha256: str | None) -> dict[str, Tensor] | None:
    """Return a body that somebody put at ``path``, or into the cache under its digest."""
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise wrong("model.sha256", sha256, "64 hexadecimal digits in quotes")
    if path is not None:
        found = read_tensors(Path(path)) if isinstance(path, (str, Path)) else None
        if found is None:
            raise wrong("model.path", path, f"a sound {FILE} of a run or an export")
        return found
    return None if sha256 is None else read_tensors(cache_folder() / f"body-{sha256}.safetensors")


def _kept(options: BodyOptions, shape: Shape) -> Path:
    return cache_folder() / f"body-{_key(options, shape)}.safetensors"


def _key(options: BodyOptions, shape: Shape) -> str:
    return hashlib.sha256(options.text(shape).encode()).hexdigest()[:32]


def _made(body: PublicBody, options: BodyOptions, shape: Shape) -> dict[str, Tensor]:
    """Fill the body from its seed, and keep it in the cache if that can be written."""
    with torch.no_grad(), using_threads(torch.get_num_threads()):
        images = dead_leaves(options.projection.images, shape, options.seed)
        if isinstance(body.maps, Patches | Network):
            body.maps.fit(images, options.seed)
        views = [fitted_maps(body.maps, view) for view in body.views(images)]
        body.projection.fit(views, options.projection)
    tensors = body.kept()
    keep("body", _key(options, shape), tensors, {"made_of": options.text(shape)})
    return tensors


def fill(body: PublicBody, tensors: Mapping[str, Tensor]) -> None:
    """Put stored tensors into a body's buffers; those of the projection have the stored shapes."""
    for name, value in body.named_buffers():
        here = tensors.get(name)
        fits = here is not None and (name.startswith("projection.") or here.shape == value.shape)
        if not fits or len(tensors) != len(body.state_dict()):
            found = "nothing" if here is None else f"shape {tuple(here.shape)}"
            raise wrong(f"model.path: {name}", found, f"a body of these options and images ({tuple(value.shape)})")
    for name, value in tensors.items():
        owner = body.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = value.clone()


def _maps(options: BodyOptions, shape: Shape) -> nn.Module:
    made: nn.Module = KINDS[options.kind][1](shape, options.maps)
    return made


NAME = "representation"
KEPT = (NAME, "image-encoder")
"""Models whose runs keep ``FILE``."""
HEADS = ("linear", "mlp")


class Representation(Headed):
    """Images (b, c, h, w), standardised -> logits (b, classes).

    body: images -> features (b, k). sha256: the digest of what is in it. prior: what it was made from.
    """

    trained = "classifier."

    body: PublicBody

    def __init__(self, body: PublicBody, sha256: str, classifier: nn.Module) -> None:
        super().__init__()
        self.body, self.sha256, self.classifier = body, sha256, classifier
        self.prior = body.prior

    @property
    def settled(self) -> dict[str, Any]:
        """The options that make the same module again on another machine, as a recipe takes them."""
        return {"sha256": self.sha256}

    def features(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.body(inputs))

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(features))

    def linear_layers(self) -> list[nn.Module]:
        """Return the head as plain layers, for back ends that write the arithmetic out: they see features only."""
        return list(self.classifier) if isinstance(self.classifier, nn.Sequential) else [self.classifier]


def representation(
    input_shape: Sequence[int],
    classes: int,
    *,
    body: str | Mapping[str, Any] = "patches",
    head: str | Mapping[str, Any] = "linear",
    path: str | None = None,
    sha256: str | None = None,
) -> nn.Module:
    """Return a frozen body of public or synthetic origin, and a head that is trained.

    ``body``: ``patches`` or ``{kind: patches, filters: 800, size: 6, stride: 1, cells: 3, threshold: 0.25, dimension:
    2000, whitening: 0.8, images: 4000, flip: false, seed: 0}``, a dictionary made from random-process images, of which
    no one's data is a part; ``scattering``, with ``scales: 2, angles: 8, order: 2, cells: null`` and the keys from
    ``dimension`` on; or ``{kind: contrastive, network: FILE, sha256: …, cells: 2, …}``, a network that ``fedflat
    pretrain`` trained on such images. ``head``: ``linear`` (starts at zero) or ``{kind: mlp, hidden: 64}``. ``path``:
    a file with the body, the ``body.safetensors`` of a run; ``sha256``: the digest that it must have. Raises
    InputError.
    """
    shape = image_shape(NAME, input_shape)
    made, found = body_of(BodyOptions.of(body), shape, path, sha256)
    return Representation(made, found, head_of(head, made.width, classes))


def head_of(given: str | Mapping[str, Any], features: int, classes: int) -> nn.Module:
    options = named("model.head", given)
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
