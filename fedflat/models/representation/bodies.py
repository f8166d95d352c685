"""Frozen bodies by kind: what makes one from its options, and how it is kept and found again.

A body is a function of its options, its shape and its own seed, and of a network's file, which has a digest. Linear
algebra differs in last bits from machine to machine, and principal directions by more: so what was used is kept
(cache, run folder, export), and has a digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.core.cache import cache_folder, digest_of, keep, read_tensors, write_tensors
from fedflat.core.checks import nearest, one_of, whole, wrong
from fedflat.core.threads import using_threads
from fedflat.models.representation.contrastive import ContrastiveOptions, Network
from fedflat.models.representation.leaves import dead_leaves
from fedflat.models.representation.patches import Patches, PatchOptions
from fedflat.models.representation.projection import Projection, ProjectionOptions, fitted_maps
from fedflat.models.representation.scattering import Scattering, ScatteringOptions

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
        """All of it in one line."""
        facts = dataclasses.asdict(self)
        facts["maps"].pop("network", None)  # where it lies is nothing to its digest
        return json.dumps([FORMAT, list(shape), facts], sort_keys=True)


def named(where: str, given: Any) -> dict[str, Any]:
    """A kind by its name, or with options, as a dictionary of its own. Raises InputError."""
    if not isinstance(given, (str, Mapping)):
        raise wrong(where, given, "a name, or a name with options: {kind: …, …}")
    return {"kind": given} if isinstance(given, str) else dict(given)


class PublicBody(nn.Module):
    """Images (b, c, h, w) -> features (b, k) of length 1: maps, then their public projection. Buffers only.

    prior: what it was made from, as the statement names it; a body from a file may be anything.
    """

    prior = "random process"

    def __init__(self, maps: nn.Module, flip: bool = False) -> None:
        super().__init__()
        self.maps, self.projection, self.flip = maps, Projection(), flip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.projection(*(self.maps(view) for view in self.views(images)))
        return found

    def views(self, images: Tensor) -> list[Tensor]:
        """The images, and their mirror images where features are of both."""
        return [images, images.flip(-1)] if self.flip else [images]


def body_of(
    options: BodyOptions, shape: Shape, path: str | Path | None = None, sha256: str | None = None
) -> tuple[PublicBody, str]:
    """The body, and the digest of what is in it: from ``path``, from the cache, or made now (minutes) and kept there.

    Raises InputError where its digest is not ``sha256``, or where the file at ``path`` holds another body.
    """
    body = PublicBody(_maps(options, shape), options.projection.flip)
    tensors = _given(path, sha256)
    if tensors is not None:
        body.prior = "unknown"
    if tensors is None and isinstance(options.maps, ContrastiveOptions):
        options, body.prior = replace(options, maps=options.maps.known()), options.maps.prior
    tensors = tensors or read_tensors(_kept(options, shape)) or _made(body, options, shape)
    found = digest_of(tensors)
    if sha256 not in (None, found):
        kept = cache_folder() / f"body-{sha256}.safetensors"
        hint = f"This machine makes another one from the same seed; copy the run's own ({FILE}) to {kept}."
        raise wrong("model.sha256", f"{sha256} for a body of {found}", "the body that the run was made with", hint=hint)
    _fill(body, tensors)
    return body, found


FILE = "body.safetensors"
"""In a run's folder, and in an exported one."""


def write_body(body: nn.Module, path: Path) -> None:
    """Keep a body beside what was trained on it."""
    write_tensors(path, body.state_dict())


def _given(path: str | Path | None, sha256: str | None) -> dict[str, Tensor] | None:
    """A body that somebody put at ``path``, or into the cache under its digest."""
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
    tensors = dict(body.state_dict())
    keep("body", _key(options, shape), tensors, {"made_of": options.text(shape)})
    return tensors


def _fill(body: PublicBody, tensors: Mapping[str, Tensor]) -> None:
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
