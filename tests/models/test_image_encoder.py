"""Image encoders on tiny public networks: features by hand, what is trained, runs and their files, errors."""

import contextlib
import copy
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from blocks import check_gradients
from PIL import Image
from torch import nn
from torch.nn import functional as F

import fedflat
from fedflat.backends.features import computed
from fedflat.core.checks import InputError
from fedflat.models import build, networks, refuse_unclipped_state

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

PIXELS = {"mean": [0.5], "std": [0.25]}
OWN = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    last = nn.Flatten(), nn.Dropout(), nn.Linear(144, 5)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *last)
"""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    pytest.importorskip("peft")  # seconds of imports: not for a process that only collects


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved ViT with its processor, a saved ResNet with a classifier, and a module in a file."""
    folder = tmp_path_factory.mktemp("bodies")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = transformers.ViTModel(transformers.ViTConfig(image_size=12, patch_size=4, initializer_range=0.3, **sizes))
        small = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic", "num_labels": 7}
        resnet = transformers.ResNetForImageClassification(transformers.ResNetConfig(**small))
    vit.save_pretrained(folder / "vit")
    resnet.save_pretrained(folder / "resnet")
    transformers.ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(folder / "vit")
    transformers.ConvNextImageProcessorPil(size={"shortest_edge": 28}, crop_pct=0.875).save_pretrained(
        folder / "resnet"
    )
    (folder / "own.py").write_text(OWN)
    return {"vit": str(folder / "vit"), "resnet": str(folder / "resnet"), "own": f"{folder / 'own.py'}:small"}


def encoder(body: Any, side: int = 8, **options: Any) -> Any:
    return build("image-encoder", (3, side, side), 3, 0, body=body, pixels=PIXELS, **options)


def images(count: int = 3, side: int = 8) -> tuple[list[Image.Image], torch.Tensor]:
    """The same pictures for a processor, and as data prepare them."""
    pixels = np.random.default_rng(0).integers(60, 200, (count, side, side, 3), dtype=np.uint8)
    standard = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    return [Image.fromarray(one) for one in pixels], standard


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_features_are_those_of_the_networks_own_processor_and_model(bodies: dict[str, str], kind: str) -> None:
    pictures, standard = images(side=20)
    given = transformers.AutoImageProcessor.from_pretrained(bodies[kind])(pictures, return_tensors="pt")
    last = transformers.AutoModel.from_pretrained(bodies[kind]).eval()(**given).last_hidden_state
    feature = last[:, 0] if kind == "vit" else last.mean((2, 3))
    found = encoder(bodies[kind], side=20).features(standard)
    torch.testing.assert_close(found, F.normalize(feature - feature.mean(1, keepdim=True)), atol=0.02, rtol=0)
    assert found.norm(dim=1).allclose(torch.ones(3))


def test_layers_grids_mirror_images_and_several_bodies(bodies: dict[str, str]) -> None:
    _, x = images()
    assert encoder(bodies["vit"], cells=3).features(x).shape == (3, 9 * 16)
    assert encoder(bodies["vit"], size=24, cells=2).features(x).shape == (3, 4 * 16)
    assert encoder(bodies["own"], layers=["0", "2"], cells=2).features(x).shape == (3, 2 * 4 * 4)
    module = encoder(bodies["own"], layers="2", mirror=True)
    torch.testing.assert_close(module.features(x), module.features(x.flip(-1)))
    pair = [bodies["own"], {"kind": bodies["vit"], "cells": 3}]
    two = build("image-encoder", (3, 8, 8), 3, 0, bodies=pair, pixels=PIXELS)
    alone = encoder(bodies["own"]).features(x), encoder(bodies["vit"], cells=3).features(x)
    torch.testing.assert_close(two.features(x), torch.cat(alone, 1) / 2**0.5)
    grey = build("image-encoder", (1, 8, 8), 3, 0, body=bodies["vit"], pixels=PIXELS)
    colour = encoder(bodies["vit"])
    torch.testing.assert_close(grey.features(x[:, :1]), colour.features(x[:, :1].expand(-1, 3, -1, -1)))


def test_projections_are_of_public_numbers(bodies: dict[str, str]) -> None:
    _, x = images()
    module = encoder(bodies["resnet"], projection="classifier", dimension=4)
    kept = transformers.ResNetForImageClassification.from_pretrained(bodies["resnet"]).classifier[1].weight.double()
    directions = torch.linalg.svd(kept - kept.mean(0))[2][:4].float()
    found, wanted = module.features(x), F.normalize(module.body.bodies[0].maps(x)[..., 0] @ directions.T)
    torch.testing.assert_close(found.abs(), wanted.abs(), atol=1e-4, rtol=1e-3)
    patches = {"kind": "patches", "filters": 20, "size": 3, "dimension": 30, "images": 100}
    assert encoder(patches).prior == "random process"
    synthetic = encoder({"kind": bodies["vit"], "images": 100}, projection="synthetic", dimension=5)
    assert synthetic.features(x).shape == (3, 5)
    again = encoder({"kind": bodies["vit"], "images": 100}, projection="synthetic", dimension=5)
    assert torch.equal(synthetic.features(x), again.features(x))


@pytest.mark.parametrize("kind", ["vit", "resnet", "own"])
@pytest.mark.parametrize("train", ["head", "lora", "norms", "all"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_is_trained_and_clients_in_blocks_equal_single_ones(bodies: dict[str, str], kind: str, train: str) -> None:
    module = encoder(bodies[kind], train=train, rank=2).train()
    refuse_unclipped_state(module, torch.zeros(2, 3, 8, 8))
    free = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    body = [name for name in free if not name.startswith("classifier.")]
    assert module.frozen == (train == "head") == (not body)
    assert all("lora_" in name for name in body) or train != "lora"
    every = {name for name, _ in module.named_parameters()}
    assert free.keys() == every or train != "all"
    assert 0 < len(body) < len(every) - 2 or train != "norms"
    x, y = images(4)[1].reshape(2, 2, 3, 8, 8), torch.tensor([[0, 1], [2, 0]])
    module.classifier.weight.data.normal_()
    check_gradients(x, y, module)


def test_a_clients_features_have_the_same_bits_whoever_is_beside(bodies: dict[str, str]) -> None:
    module, (_, x) = encoder(bodies["vit"]), images(30)
    owned = [np.arange(0, 7), np.arange(7, 30)]
    beside = computed(module, x, owned=owned)
    other = x.clone()
    other[7:] = 0
    assert torch.equal(beside[:7], computed(module, other, owned=[owned[0], owned[1][:2]])[:7])
    assert torch.equal(beside[:7], computed(module, x[:7], owned=[owned[0]]))


def recipe_of(body: str, **model: Any) -> dict[str, Any]:
    return {
        "rounds": 2, "seed": 1, "algorithm": "dp-fedavg", "cohort": {"size": 10}, "local": {"steps": 1, "lr": 0.5},
        "data": {"dataset": "digits", "clients": 20}, "privacy": {"noise_multiplier": 1.0, "randomness": "secret"},
        "model": {"name": "image-encoder", "body": body, **model},
    }  # fmt: skip


@pytest.mark.long
def test_a_run_its_statement_its_export_and_its_body(bodies: dict[str, str], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    result = fedflat.run(recipe_of(bodies["resnet"], projection="classifier"), out=tmp_path / "run")
    assert "public natural data" in result.privacy["prior"] and "resnet (SHA-256 " in result.privacy["prior"]
    rows = torch.randn(4, 1, 8, 8)
    loaded = fedflat.load(tmp_path / "run")
    assert torch.equal(loaded.model(rows), result.model(rows))
    out = loaded.export(tmp_path / "out", program=True, onnx=True)
    (found,) = onnxruntime.InferenceSession(out / "model.onnx").run(None, {"inputs": rows.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), result.model(rows), atol=1e-4, rtol=1e-3)
    program = torch.export.load(out / "model.pt2").module()
    torch.testing.assert_close(program(rows), result.model(rows), atol=1e-5, rtol=1e-4)
    assert torch.equal(fedflat.load(out).model(rows), result.model(rows))
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["model"]["sha256"] == result.model.sha256
    weights = next(Path(bodies["resnet"]).glob("*.safetensors"))
    before = weights.read_bytes()
    try:  # another network in the same folder
        changed = copy.deepcopy(transformers.AutoModelForImageClassification.from_pretrained(bodies["resnet"]))
        nn.init.zeros_(changed.classifier[1].bias)
        changed.save_pretrained(bodies["resnet"])
        with pytest.raises(InputError, match=r"^model\.body: found .* with SHA-256"):
            fedflat.load(tmp_path / "run").model  # noqa: B018
    finally:
        weights.write_bytes(before)


def test_tuned_bodies_learn_under_every_choice(bodies: dict[str, str]) -> None:
    for train in ("lora", "norms", "all"):
        result = fedflat.run({**recipe_of(bodies["own"], train=train, rank=2), "rounds": 1})
        assert np.isfinite(result.history[0]["test_loss"])


@pytest.mark.parametrize("name", networks.LITE)
def test_packaged_networks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    module = encoder(name, size=32)
    assert module.body.bodies[0].digest == networks.LITE[name][1] and module.frozen
    assert module.features(images()[1]).shape == (3, 1280)
    adapted = encoder(name, size=32, train="lora", rank=2)
    torch.testing.assert_close(adapted.features(images()[1]), module.features(images()[1]))
    assert sum("lora_B" in key for key, _ in adapted.named_parameters()) > 30  # all its 1 × 1 convolutions
    assert not [key for key, _ in adapted.named_parameters() if "_fc" in key]
    monkeypatch.setitem(networks.LITE, name, (224, "0" * 64))
    with pytest.raises(InputError, match=rf"^model\.body: {name}: found weights with SHA-256"):
        encoder(name)


def test_what_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        InputError, match=r"efficientnet_lite_pytorch, which is not installed.*pip install '.*\[vision\]'"
    ):
        encoder("efficientnet-lite0")
    with pytest.raises(InputError, match=r"timm, which is not installed.*pip install timm"):
        encoder("timm:resnet10t")


def test_a_network_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for timm with its names: create_model, forward_features, resolve_model_data_config."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.fc = nn.Conv2d(3, 6, 3), nn.Linear(6, 9)

        def forward_features(self, x: torch.Tensor) -> torch.Tensor:
            return self.stem(x)

        def get_classifier(self) -> nn.Module:
            return self.fc

        def reset_classifier(self, classes: int) -> None:
            self.fc = nn.Identity()  # type: ignore[assignment]

    config: dict[str, Any] = {"input_size": (3, 12, 12), "crop_pct": 0.75, "interpolation": "bilinear"}
    config |= {"mean": (0.5,) * 3, "std": (1,) * 3}
    fake: Any = types.ModuleType("timm")
    fake.create_model = lambda name, pretrained: Net()
    fake.data = types.SimpleNamespace(resolve_model_data_config=lambda network: config)
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setattr(networks, "hub", contextlib.nullcontext)
    module = encoder("timm:net", projection="classifier", dimension=3)
    assert module.body.bodies[0].maps.prepare.rows.shape == (12, 8)
    assert module(images()[1]).shape == (3, 3) and module.prior.startswith("public natural data: timm:net")
    assert not [key for key, _ in module.named_parameters() if "fc." in key]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"body": "efficientnet-lite9"}, "Did you mean efficientnet-lite"),
        ({"body": "EMPTY"}, "without weights; allowed: a folder with model.safetensors"),
        ({"body": "PICKLED"}, "with pickled weights alone (pytorch_model.bin)"),
        ({"body": {"kind": "vit", "sha256": "0" * 64}}, "model.body.sha256"),
        ({"body": "vit", "layers": ["encoder.layer.7"]}, "model.layers: found"),
        ({"body": "vit", "cells": 9}, "model.cells"),
        ({"body": "own", "size": 40}, "fails on images of 40 × 40"),
        ({"body": "vit", "projection": "classifier"}, "model.projection"),
        ({"body": "vit", "train": "some"}, "model.train"),
        ({"body": {"kind": "vit", "cell": 2}}, "Did you mean cells"),
        ({"body": "vit", "interpolation": "lanczos"}, "bicubic, bilinear, nearest"),
        ({}, "model.body: found None"),
        ({"bodies": []}, "bodies: a list"),
    ],
)
def test_one_line_for_what_cannot_be(bodies: dict[str, str], tmp_path: Path, options: Any, said: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "PICKLED").mkdir()
    (tmp_path / "PICKLED" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    places = {**bodies, "EMPTY": str(tmp_path / "EMPTY"), "PICKLED": str(tmp_path / "PICKLED")}
    body = options.get("body")
    if isinstance(body, str):
        options = {**options, "body": places.get(body, body)}
    elif isinstance(body, dict):
        options = {**options, "body": {**body, "kind": places[body["kind"]]}}
    with pytest.raises(InputError) as error:
        build("image-encoder", (3, 8, 8), 3, 0, **options)
    assert said in str(error.value) and "\n" not in str(error.value)
