"""Turn text and images into tensors, by public vocabularies and decoders only."""

import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core import becoming, cache_folder, first_line, hub, keep, read_tensors, wrong

# The 80 characters LEAF uses for Shakespeare. Id 0 stands for every other character, 1..80 for these.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80  # characters an input has, as in LEAF

PADDING, SEPARATOR, FIRST_WORD = 0, 1, 2
LENGTH, VOCABULARY = 64, 8192
MOST_WORDS = 2**20  # a model has weights for each, though no language needs more

Text = str | Sequence[str]


def encode(text: str) -> npt.NDArray[np.int64]:
    """Character ids ``(len(text),)`` in [0, 80]."""
    # Four bytes a character: a table look-up instead of a loop in Python.
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    table = np.zeros(128, dtype=np.int64)
    table[[ord(c) for c in CHARACTERS]] = np.arange(1, len(CHARACTERS) + 1)
    return np.where(points < 128, table[np.minimum(points, 127)], 0).astype(np.int64)


def windows(
    texts: Sequence[str], owners: Sequence[Any], length: int = WINDOW
) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[Any]]:
    """Next-character examples: inputs ``(N, length)``, targets ``(N, length)`` shifted by one, owner of each ``(N,)``.

    The texts of one owner are joined by line ends, in stored order, and cut into windows that do not overlap
    (a random test split then shares no target with the training data). The rest shorter than a window is
    left out, so an owner with at most ``length`` characters has no example.
    """
    by_owner: dict[Any, list[str]] = {}
    for text, owner in zip(texts, owners):
        by_owner.setdefault(owner, []).append(text)
    inputs, targets, ids = [], [], []
    for owner, owner_texts in by_owner.items():
        codes = encode("\n".join(owner_texts))
        count = max(len(codes) - 1, 0) // length
        inputs.append(codes[: count * length].reshape(count, length))
        targets.append(codes[1 : count * length + 1].reshape(count, length))
        ids += [str(owner)] * count
    x, y = (np.concatenate(side) if side else np.empty((0, length), dtype=np.int64) for side in (inputs, targets))
    return torch.from_numpy(x), torch.from_numpy(y), np.array(ids, dtype=str)


def ready_windows(x: Sequence[str], y: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hub's ready-made form (80 characters ``x``, the next one ``y``) as ids and shifted ids, ``(N, T)``
    each.
    """
    lengths = {len(text) for text in x}
    if len(lengths) > 1 or any(len(following) != 1 for following in y):
        allowed = "x of one length and y of one character"
        raise wrong("data.dataset", f"windows of {sorted(lengths)} characters", allowed)
    codes = encode("".join(a + b for a, b in zip(x, y))).reshape(len(x), -1)
    return torch.from_numpy(codes[:, :-1].copy()), torch.from_numpy(codes[:, 1:].copy())


def tokenize(texts: Sequence[Text], length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Return the token ids ``(N, length)`` int64 of lower-cased words by CRC-32; 0 is padding, 1 separates a pair of
    sentences.

    Punctuation counts as words of its own. The hash is a public constant: no download, nothing learnt from data.
    An element may be one text or a sequence of texts. Longer ones are cut.
    """
    word = re.compile(r"\w+|[^\w\s]")
    word_ids: dict[str, int] = {}
    ids = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in enumerate(texts):
        tokens: list[int] = []
        for i, sentence in enumerate((text,) if isinstance(text, str) else text):
            tokens += [SEPARATOR] if i else []
            for token in word.findall(sentence.lower()):
                if token not in word_ids:
                    word_ids[token] = FIRST_WORD + zlib.crc32(token.encode()) % (vocabulary - FIRST_WORD)
                tokens.append(word_ids[token])
        ids[row, : len(tokens)] = tokens[:length]
    return torch.from_numpy(ids)


def pretrained(texts: Sequence[Text], tokenizer: str, length: int = LENGTH) -> tuple[torch.Tensor, int, int]:
    """``(ids (N, length), vocabulary, padding id)`` by a transformers tokenizer: a folder or a hub id.

    Raises InputError when it cannot be loaded (not there, no network, transformers not installed).
    """
    allowed = "a folder with a transformers tokenizer, or a hub id that can be reached or is in HF_HOME's cache"
    # The hub client raises many unrelated types.
    with becoming(lambda e: wrong("data.tokenizer", tokenizer, allowed, hint=f"({first_line(e)})")), hub():
        from transformers import AutoTokenizer

        tool = AutoTokenizer.from_pretrained(tokenizer)
    if tool.pad_token_id is None:
        raise wrong("data.tokenizer", tokenizer, "a tokenizer with a padding token")
    sides = list(map(list, zip(*[(text,) if isinstance(text, str) else tuple(text) for text in texts])))
    if not sides:
        return torch.empty((0, length), dtype=torch.int64), len(tool), int(tool.pad_token_id)
    coded = tool(*sides, padding="max_length", truncation=True, max_length=length, return_tensors="np")
    return torch.from_numpy(coded["input_ids"].astype(np.int64)), len(tool), int(tool.pad_token_id)


def is_image(value: Any) -> bool:
    """Return whether a cell holds an image: bytes, ``{"bytes": …, "path": …}``, or one of Pillow."""
    from PIL import Image

    return (isinstance(value, dict) and bool({"bytes", "path"} & set(value))) or isinstance(value, (bytes, Image.Image))


def decode(cells: Sequence[Any], place: Callable[[int], str]) -> torch.Tensor:
    """Return images ``(N, C, H, W)`` uint8; the first one decides the size, and C, 1 where it is grey, else 3.

    cells: images as ``is_image`` has them. Raises InputError, naming its place, for a cell that is no image that Pillow
    can read, or one of another size.
    """
    from PIL import Image

    out: npt.NDArray[np.uint8] | None = None
    mode = "RGB"
    for row, cell in enumerate(cells):
        try:
            image = cell if isinstance(cell, Image.Image) else Image.open(io.BytesIO(_content(cell)))
            if out is None:
                mode = "L" if image.mode in ("L", "1") else "RGB"
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise wrong(f"{place(row)}{_file(cell)}", _fault(error), "an image, encoded or of Pillow") from None
        if out is None:
            out = np.empty((len(cells), *pixels.shape), dtype=np.uint8)
        if pixels.shape != out.shape[1:]:
            size, first = (" × ".join(map(str, shape[:2])) for shape in (pixels.shape, out.shape[1:]))
            allowed = f"one size for all images, {first} as in {place(0)}"
            raise wrong(f"{place(row)}{_file(cell)}", f"an image of {size} pixels", allowed)
        out[row] = pixels
    if out is None:
        return torch.empty((0, 1, 1, 1), dtype=torch.uint8)
    stacked = torch.from_numpy(out)
    return (stacked.unsqueeze(1) if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2)).contiguous()


def _file(cell: Any) -> str:
    return f", {cell['path']}" if isinstance(cell, dict) and cell.get("path") else ""


def _content(cell: Any) -> bytes:
    """Return the bytes of an encoded image. Raises OSError or ValueError."""
    content = cell
    if isinstance(cell, dict):
        content = cell.get("bytes") or (Path(cell["path"]).read_bytes() if cell.get("path") else None)
    if not isinstance(content, bytes):
        raise ValueError("a missing value" if (content is None or content != content) else type(content).__name__)
    return content


def _fault(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "bytes that are no image"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} ({error.strerror})"
    return str(error)


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """``(x/255 − mean)/std`` per channel: float32, contiguous NCHW. A single constant serves all channels."""
    shape = (1, -1, 1, 1)
    scale = 255.0 * torch.tensor(std, dtype=torch.float32)
    shift = torch.tensor(mean, dtype=torch.float32) / torch.tensor(std, dtype=torch.float32)
    return images.to(torch.float32).div_(scale.view(shape)).sub_(shift.view(shape)).contiguous()


def cached(files: Iterable[Path], column: str, build: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the images of a column of these files from the cache, else from ``build()``, and keep them there.

    A file of the cache that is damaged is built anew; rows without files of their own are not kept.
    """
    parts = ["fedflat-images-1", column]
    for file in files:
        state = file.stat()
        parts.append(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}")
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    stored = read_tensors(cache_folder() / f"images-{key}.safetensors") if len(parts) > 2 else None
    images = build() if stored is None else stored["images"]
    if stored is None and len(parts) > 2:
        keep("images", key, {"images": images})
    return images
