"""Splits of a data set to tensors: images, sentences, running text, or columns of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import nearest, wrong
from fedflat.data import images as pictures
from fedflat.data import text
from fedflat.data.catalog import Kind, Source
from fedflat.data.clients import classes_of
from fedflat.data.columns import Options, image_column, label_column, natural_column, text_columns
from fedflat.data.encoding import encoding_of, inputs_of, numbered, targets_of
from fedflat.data.locate import Split


@dataclasses.dataclass(frozen=True)
class Table:
    """Examples as tensors, still of one owner: images uint8, token ids int64."""

    inputs: torch.Tensor
    targets: torch.Tensor
    natural: npt.NDArray[Any] | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> Table:
        index = torch.from_numpy(rows)
        return Table(self.inputs[index], self.targets[index], None if self.natural is None else self.natural[rows])


@dataclasses.dataclass(frozen=True)
class Meaning:
    """How the tables are to be understood."""

    name: str
    kind: Kind
    classes: int
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    vocabulary: int = 0
    padding: int = 0


def _images(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    column, label = image_column(train, source, options), label_column(train, source, options)
    natural = natural_column(train, source, options)

    def table(split: Split, owner: str | None) -> Table:
        key = pictures.fingerprint(split.files, column)
        pixels = pictures.cached(key, lambda: pictures.decode(split.values(column), f"data.dataset: {split.where}"))
        return Table(
            pixels, _labels(split, label, options), np.array(split.values(owner), dtype=object) if owner else None
        )

    tables = table(train, natural), table(test, None) if test else None
    classes = _classes(train, label, source, options, *tables)
    mean, std = (source.mean, source.std) if source else ((0.5,), (0.5,))
    channels = tables[0].inputs.shape[1]
    if len(mean) not in (1, channels):
        raise wrong("data.dataset", f"{train.where} with {channels} channels", f"the {len(mean)} channels of {name}")
    return Meaning(name, "image", classes, mean, std), *tables


def _sentences(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    label = label_column(train, source, options)
    columns = text_columns(train, source, options, label)
    natural = natural_column(train, source, options)
    length = options.max_length or text.LENGTH
    vocabulary, padding = options.vocabulary or text.VOCABULARY, text.PADDING

    def table(split: Split, owner: str | None) -> Table:
        nonlocal vocabulary, padding
        rows = list(zip(*[[value or "" for value in split.values(column)] for column in columns]))
        if options.tokenizer:
            ids, vocabulary, padding = text.pretrained(rows, options.tokenizer, length)
        else:
            ids = text.tokenize(rows, length, vocabulary)
        return Table(
            ids, _labels(split, label, options), np.array(split.values(owner), dtype=object) if owner else None
        )

    tables = table(train, natural), table(test, None) if test else None
    classes = _classes(train, label, source, options, *tables)
    return Meaning(name, "text", classes, vocabulary=vocabulary, padding=padding), *tables


def _characters(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    owner = natural_column(train, source, options) or (source.natural if source else None)
    size = len(text.CHARACTERS) + 1
    length = options.max_length or text.WINDOW

    def table(split: Split) -> Table:
        owners = split.values(owner) if owner and owner in split.features else [""] * split.read([]).num_rows
        if "x" in split.features and "y" in split.features:
            x, y = text.ready_windows(split.values("x"), split.values("y"))
            return Table(x, y, np.array(owners, dtype=object))
        column = text_columns(split, source, options, "")[0]
        return Table(*text.windows([value or "" for value in split.values(column)], owners, length))

    return Meaning(name, "chars", size, vocabulary=size), table(train), table(test) if test else None


def _columns(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    owner = natural_column(train, source, options)
    there = [column for column in train.features if column != owner]
    encoding = encoding_of("data.", there, options.inputs, options.target, options.categories, options.scale)

    def table(split: Split, by: str | None) -> Table:
        frame = split.read([*encoding.inputs, *encoding.target, *([by] if by else [])]).to_pandas()
        owners = frame[by].tolist() if by else []

        def place(row: int) -> str:
            return f"row {row}, client {owners[row]}" if by else f"row {row} of {split.where}"

        if by and frame[by].isna().any():
            row = int(frame[by].isna().to_numpy(dtype=bool).argmax())
            raise wrong(f"row {row}, column {by}", "a missing value", "the client that the row belongs to")
        natural = np.array(owners, dtype=object) if by else None
        return Table(inputs_of(frame, encoding, place), targets_of(frame, encoding, place), natural)

    tables = table(train, owner), table(test, None) if test else None
    classes = encoding.classes or classes_of(*(found.targets for found in tables if found is not None))
    return Meaning(name, "table", classes), *tables


def _labels(split: Split, column: str, options: Options) -> torch.Tensor:
    """Class numbers ``(n,)``, by ``data.categories`` where they are names; raises InputError for missing, fractional or
    negative ones, and names that are not listed."""
    for other in options.categories or {}:
        if other != column:
            raise wrong("data.categories", other, f"the column of labels, {column}", hint=nearest(other, [column]))
    if options.categories:
        found = split.read([column]).to_pandas()[column]
        return torch.from_numpy(
            numbered(found, column, options.categories[column], lambda row: f"row {row} of {split.where}")
        )
    values = split.read([column]).column(column)
    numbers = values.to_numpy() if values.null_count == 0 else None
    if numbers is None or numbers.dtype.kind not in "iu":
        kind = "missing values" if numbers is None else str(values.type)
        hint = "" if numbers is None else f"Names of classes: data.categories={{{column}: [...]}}, in a public order."
        raise wrong(f"column {column} of {split.where}", kind, "whole numbers (class numbers from 0)", hint=hint)
    if len(numbers) and numbers.min() < 0:
        raise wrong(
            f"column {column} of {split.where}", f"label {numbers.min()}", "class numbers ≥ 0 (is it unlabelled?)"
        )
    return torch.from_numpy(numbers.astype(np.int64))


def _classes(
    split: Split, label: str, source: Source | None, options: Options, train: Table, test: Table | None
) -> int:
    """Number of classes: of the listed names, the label feature, the table, else one more than the largest label."""
    if options.categories:
        return len(options.categories[label])
    largest = (
        max(int(t.targets.max()) for t in (train, test) if t is not None and len(t.targets))
        if len(train.targets)
        else 0
    )
    known = getattr(split.features[label], "num_classes", None) or (source.classes if source else largest + 1)
    if largest >= known:
        raise wrong(f"column {label} of {split.where}", f"label {largest}", f"class numbers below {known}")
    return int(known)


Reader = Callable[[str, Source | None, Options, Split, Split | None], tuple[Meaning, Table, Table | None]]
READERS: dict[Kind, Reader] = {"image": _images, "text": _sentences, "chars": _characters, "table": _columns}
