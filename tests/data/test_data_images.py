"""Decoding, normalisation and the cache on disk."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.data.decoding import cached, decode, normalise

PIXELS = stream(0, "pixels").integers(0, 256, (5, 6, 4, 3)).astype(np.uint8)


def place(row: int) -> str:
    return f"here: row {row}"


def png(array: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind)
    return out.getvalue()


def test_decode_is_exact_for_lossless_images() -> None:
    colour = decode([{"bytes": png(p), "path": None} for p in PIXELS], place)
    assert colour.shape == (5, 3, 6, 4) and colour.dtype == torch.uint8 and colour.is_contiguous()
    assert np.array_equal(colour.permute(0, 2, 3, 1).numpy(), PIXELS)
    grey = decode([png(p[..., 0]) for p in PIXELS], place)
    assert grey.shape == (5, 1, 6, 4) and np.array_equal(grey[:, 0].numpy(), PIXELS[..., 0])
    alpha = np.concatenate([PIXELS, np.full((5, 6, 4, 1), 255, np.uint8)], axis=3)
    assert np.array_equal(decode([png(p) for p in alpha], place).numpy(), colour.numpy()), "transparency is dropped"
    assert len(decode([], place)) == 0


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([png(PIXELS[0]), b"not an image"], "row 1"),
        ([png(PIXELS[0]), png(PIXELS[0])[:40]], "row 1"),
        ([{"bytes": None, "path": "a.png"}], "a.png (No such file or directory)"),
        ([png(PIXELS[0]), png(PIXELS[0][:3])], "one size for all images, 6 × 4 as in here: row 0"),
    ],
)
def test_bad_images_are_one_sentence(cells: list[Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        decode(cells, place)
    assert says in str(error.value) and str(error.value).startswith("here: ") and "\n" not in str(error.value)


def test_normalise_is_the_formula() -> None:
    images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.75)
    out = normalise(images, mean, std)
    expected = (PIXELS.astype(np.float64) / 255 - np.array(mean)) / np.array(std)
    assert out.dtype == torch.float32 and out.is_contiguous()
    assert np.allclose(out.permute(0, 2, 3, 1).numpy(), expected, atol=1e-6)
    assert torch.equal(normalise(images, (0.5,), (0.5,)), normalise(images, (0.5,) * 3, (0.5,) * 3))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


IMAGES = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).contiguous()


def built() -> torch.Tensor:
    return IMAGES.clone()


def not_again() -> torch.Tensor:
    raise AssertionError("the cache should have answered")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.parquet").write_bytes(b"one")
    return tmp_path / "a.parquet"


def test_second_read_is_from_the_cache(cache: Path, file: Path) -> None:
    assert torch.equal(cached([file], "img", built), IMAGES)
    assert torch.equal(cached([file], "img", not_again), IMAGES)
    assert len(list(cache.iterdir())) == 1, "no half-written file stays"
    with pytest.raises(AssertionError):
        cached([file], "image", not_again)
    file.write_bytes(b"three")
    with pytest.raises(AssertionError):
        cached([file], "img", not_again)
    assert torch.equal(cached([], "img", built), IMAGES) and len(list(cache.iterdir())) == 1, "no file, nothing kept"


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "text", "folder"])
def test_damaged_cache_is_built_anew(cache: Path, file: Path, damage: str) -> None:
    cached([file], "img", built)
    kept = next(cache.iterdir())
    content = bytearray(kept.read_bytes())
    if damage == "one bit":
        content[-1] ^= 1  # safetensors itself would not notice: the checksum does
    kept.write_bytes({"truncated": content[:-9], "one bit": content, "empty": b"", "text": b"hello"}.get(damage, b""))
    if damage == "folder":
        kept.unlink()
        kept.mkdir()
    assert torch.equal(cached([file], "img", built), IMAGES)
    if damage != "folder":
        assert torch.equal(cached([file], "img", not_again), IMAGES), "and is sound again"


def test_no_cache_is_no_failure(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDFLAT_CACHE", str(tmp_path / "file" / "cache"))
    assert torch.equal(cached([file], "img", built), IMAGES)
