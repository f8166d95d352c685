"""Columns of images as inputs: Hugging Face's, encoded bytes, Pillow's; what is none is named with its row."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedflat


def pixels(count: int = 6, shape: tuple[int, ...] = (4, 5)) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def encoded(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def federation(cells: list[object], **more: object):
    frame = pd.DataFrame({"user": list("baabab"), "picture": pd.Series(cells, dtype=object), "y": [0, 1, 0, 1, 1, 0]})
    return fedflat.clients(frame, by="user", inputs="picture", target="y", **more)


@pytest.mark.parametrize("kind", ["bytes", "cell", "pillow"])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
def test_images_become_channels_of_pixels_over_255(kind: str, shape: tuple[int, ...]) -> None:
    arrays = pixels(shape=shape)
    made = {"bytes": encoded, "cell": lambda array: {"bytes": encoded(array), "path": None}, "pillow": Image.fromarray}[
        kind
    ]
    found = federation([made(array) for array in arrays])
    first = torch.from_numpy(arrays[1]).float() / 255  # the first row of user a
    wanted = first[None] if first.ndim == 2 else first.permute(2, 0, 1)
    assert found.inputs.shape == (6, 3 if len(shape) == 3 else 1, 4, 5) and torch.equal(found.inputs[0], wanted)
    scaled = federation([made(array) for array in arrays], scale={"picture": (0.5, 0.25)})
    assert torch.allclose(scaled.inputs[0], (wanted - 0.5) / 0.25)


def test_a_hugging_face_image_feature_trains() -> None:
    import datasets

    rows = {"user": list("baabab"), "picture": [Image.fromarray(a) for a in pixels()], "y": [0, 1, 0, 1, 1, 0]}
    made = datasets.Dataset.from_dict(rows).cast_column("picture", datasets.Image())
    found = fedflat.clients(made, by="user", inputs="picture", target="y")
    recipe = {"rounds": 1, "algorithm": "dp-fedavg", "local": {"steps": 1, "lr": 0.1}, "cohort": {"size": 1}}
    recipe["privacy"] = {"clip": 0.5, "noise_multiplier": 1.0}
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, 2))
    assert len(fedflat.run(recipe, model=module, clients=found).history) == 1


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (None, "a missing value"),
        (b"no image", "bytes that are no image"),
        ({"bytes": None, "path": "/nowhere.png"}, r"/nowhere.png \(No such file or directory\)"),
        (encoded(np.zeros((4, 4), dtype=np.uint8)), r"an image of 4 × 4 pixels; allowed: one size for all"),
        (3.5, "float"),
    ],
)
def test_what_is_no_image_is_named_with_its_place(bad: object, found: str) -> None:
    cells: list[object] = [encoded(array) for array in pixels()]
    cells[3] = bad
    with pytest.raises(fedflat.InputError, match=rf"row 3, client b, column picture[^:]*: found {found}"):
        federation(cells)
