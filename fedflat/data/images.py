"""Encoded images to resident tensors, decoded once and kept on disk as uint8."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedflat.core.cache import cache_folder, read_tensors, write_tensors
from fedflat.core.checks import wrong

FORMAT = "fedflat-images-1"


def decode(column: Sequence[Any], where: str) -> torch.Tensor:
    """``(N, C, H, W)`` uint8 from encoded images (bytes, or ``{"bytes": …}``); C is 1 for grey images, else 3.

    The first image decides size and channels. Raises InputError for an unreadable image or another size.
    """
    from PIL import Image, UnidentifiedImageError

    out: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    mode = "RGB"
    for row, cell in enumerate(column):
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        try:
            if not content:
                raise ValueError("no image bytes in the file")
            with Image.open(io.BytesIO(content)) as image:
                if out is None:
                    mode = "L" if image.mode in ("L", "1") else "RGB"
                pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise wrong(where, f"row {row}: {error}", "images that pillow can read") from None
        if out is None:
            out = np.empty((len(column), *pixels.shape), dtype=np.uint8)
        if pixels.shape != out.shape[1:]:
            sizes = f"row {row} of size {pixels.shape[:2]}"
            raise wrong(where, sizes, f"one size for all images, {out.shape[1:3]} as in row 0")
        out[row] = pixels
    if out is None:
        return torch.empty((0, 1, 1, 1), dtype=torch.uint8)
    stacked = torch.from_numpy(out)
    return (stacked.unsqueeze(1) if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2)).contiguous()


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """``(x/255 − mean)/std`` per channel: float32, contiguous NCHW. A single constant serves all channels."""
    shape = (1, -1, 1, 1)
    scale = 255.0 * torch.tensor(std, dtype=torch.float32)
    shift = torch.tensor(mean, dtype=torch.float32) / torch.tensor(std, dtype=torch.float32)
    return images.to(torch.float32).div_(scale.view(shape)).sub_(shift.view(shape)).contiguous()


def fingerprint(files: Iterable[Path], *columns: str) -> str | None:
    """Cache key of a split: path, size and modification time of its files, and the columns read.

    None, which ``cached`` takes as "do not keep", for a split that has no files of its own.
    """
    files = list(files)
    if not files:
        return None
    parts = [FORMAT, *columns]
    for file in files:
        state = file.stat()
        parts.append(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cached(key: str | None, build: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The uint8 tensor under ``key`` in the cache, else ``build()``, which is then kept there.

    The cache is ``$FEDFLAT_CACHE`` or ``~/.cache/fedflat``. A file that is damaged (unreadable, or its checksum
    differs) is built anew; a cache that cannot be written is done without.
    """
    if key is None:
        return build()
    path = cache_folder() / f"{key}.safetensors"
    found = (read_tensors(path) or {}).get("images")
    if found is not None:
        return found
    images = build()
    with contextlib.suppress(OSError):
        write_tensors(path, {"images": images})
    return images
