"""Text to whole numbers, with public vocabularies only: nothing here is fitted to the clients' data."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import whole, wrong
from fedflat.core.hub import hub

# The 80 characters LEAF uses for Shakespeare. Id 0 stands for every other character, 1..80 for these.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80  # characters an input has, as in LEAF

PADDING, SEPARATOR, FIRST_WORD = 0, 1, 2
LENGTH, VOCABULARY = 64, 8192
MOST_WORDS = 2**20  # a model has weights for each, though no language needs more

Text = str | Sequence[str]


def encode(text: str) -> npt.NDArray[np.int64]:
    """Character ids ``(len(text),)`` in [0, 80]."""
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
    for owner, own in by_owner.items():
        codes = encode("\n".join(own))
        count = max(len(codes) - 1, 0) // length
        inputs.append(codes[: count * length].reshape(count, length))
        targets.append(codes[1 : count * length + 1].reshape(count, length))
        ids += [str(owner)] * count
    x, y = (np.concatenate(side) if side else np.empty((0, length), dtype=np.int64) for side in (inputs, targets))
    return torch.from_numpy(x), torch.from_numpy(y), np.array(ids, dtype=str)


def ready_windows(x: Sequence[str], y: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The hub's ready-made form (80 characters ``x``, the next one ``y``) as ids and shifted ids, ``(N, T)`` each."""
    lengths = {len(text) for text in x}
    if len(lengths) > 1 or any(len(following) != 1 for following in y):
        raise wrong(
            "data.dataset", f"windows of {sorted(lengths)} characters", "x of one length and y of one character"
        )
    codes = encode("".join(a + b for a, b in zip(x, y))).reshape(len(x), -1)
    return torch.from_numpy(codes[:, :-1].copy()), torch.from_numpy(codes[:, 1:].copy())


def tokenize(texts: Sequence[Text], length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids ``(N, length)`` int64 of lower-cased words by CRC-32; 0 is padding, 1 separates a pair of sentences.

    Punctuation counts as words of its own. The hash is a public constant: no download, nothing learnt from data.
    An element may be one text or a sequence of texts. Longer ones are cut.
    """
    whole("data.max_length", length, 1)
    whole("data.vocabulary", vocabulary, FIRST_WORD + 1, MOST_WORDS)
    import re

    word = re.compile(r"\w+|[^\w\s]")
    known: dict[str, int] = {}
    ids = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in enumerate(texts):
        sentences = (text,) if isinstance(text, str) else tuple(text)
        tokens: list[int] = []
        for i, sentence in enumerate(sentences):
            tokens += [SEPARATOR] if i else []
            for found in word.findall(sentence.lower()):
                if found not in known:
                    known[found] = FIRST_WORD + zlib.crc32(found.encode()) % (vocabulary - FIRST_WORD)
                tokens.append(known[found])
        ids[row, : len(tokens)] = tokens[:length]
    return torch.from_numpy(ids)


def pretrained(texts: Sequence[Text], tokenizer: str, length: int = LENGTH) -> tuple[torch.Tensor, int, int]:
    """``(ids (N, length), vocabulary, padding id)`` by a transformers tokenizer: a folder or a hub id.

    Raises InputError when it cannot be loaded (not there, no network, transformers not installed).
    """
    try:
        from transformers import AutoTokenizer

        with hub():
            tool = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the hub client raises many unrelated types
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        allowed = "a folder with a transformers tokenizer, or a hub id that can be reached or is in HF_HOME's cache"
        raise wrong("data.tokenizer", tokenizer, allowed, hint=f"({reason})") from None
    if tool.pad_token_id is None:
        raise wrong("data.tokenizer", tokenizer, "a tokenizer with a padding token")
    columns = list(zip(*[(text,) if isinstance(text, str) else tuple(text) for text in texts]))
    if not columns:
        return torch.empty((0, length), dtype=torch.int64), len(tool), int(tool.pad_token_id)
    sides = [list(column) for column in columns]
    coded = tool(*sides, padding="max_length", truncation=True, max_length=length, return_tensors="np")
    return torch.from_numpy(coded["input_ids"].astype(np.int64)), len(tool), int(tool.pad_token_id)
