"""A table's column of images as inputs: encoded bytes, Hugging Face's Image cells, or Pillow's objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedflat.core.checks import InputError, wrong
from fedflat.data.images import decode

ALLOWED = "an image, encoded or of Pillow"


def is_picture(value: Any) -> bool:
    """Whether a cell holds an image: bytes, ``{"bytes": …, "path": …}``, or one of Pillow."""
    from PIL import Image

    return isinstance(value, (bytes, Image.Image)) or (
        isinstance(value, dict) and {"bytes", "path"} & set(value) != set()
    )


def pictures(values: Sequence[Any], name: str, place: Callable[[int], str]) -> NDArray[np.float32]:
    """``(N, C, H, W)`` float32 in [0, 1], pixels over 255; C is 1 where the first image is grey, else 3.

    Raises InputError naming row, client and column of a cell that is no image, or of another size or kind.
    """
    rows: list[NDArray[np.uint8]] = []
    for row, value in enumerate(values):
        where = f"{place(row)}, column {name}"
        pixels = _pixels(value, where)
        if rows and pixels.shape != rows[0].shape:
            raise wrong(where, f"an image of shape {pixels.shape}", f"{rows[0].shape}, as in {place(0)}")
        rows.append(pixels)
    return np.stack(rows).astype(np.float32) / np.float32(255)


def _pixels(value: Any, where: str) -> NDArray[np.uint8]:
    """One image ``(C, H, W)`` uint8."""
    from PIL import Image

    if isinstance(value, Image.Image):
        grey = np.asarray(value.convert("L" if value.mode in ("L", "1") else "RGB"))
        return grey[None] if grey.ndim == 2 else grey.transpose(2, 0, 1)
    content = value.get("bytes") if isinstance(value, dict) else value
    try:
        if isinstance(value, dict) and not content and value.get("path"):
            content = Path(value["path"]).read_bytes()
        if not isinstance(content, bytes):
            raise wrong(where, "a missing value" if content is None else type(content).__name__, ALLOWED)
        return decode([content], where)[0].numpy()
    except OSError as error:
        raise wrong(where, f"{value['path']} ({error.strerror})", ALLOWED) from None
    except InputError as error:
        if str(error).startswith(f"{where}: found row 0"):  # decode counts within what it is given
            raise wrong(where, "bytes that are no image", "an image that Pillow can read") from None
        raise
