"""Turn splits of a data set into tensors: images, sentences, running text, or columns of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import InputError, gather, nearest, wrong
from fedflat.data import decoding
from fedflat.data import decoding as pictures
from fedflat.data.clients import classes_of
from fedflat.data.columns import Options, image_column, label_column, natural_column, text_columns
from fedflat.data.encoding import (
    Encoding,
    Words,
    encoding_of,
    inputs_of,
    names_of,
    numbered,
    targets_of,
    with_words,
    words_of,
)
from fedflat.data.locate import Split
from fedflat.data.preparation import Kind, Preparation, Source


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
    preparation: Preparation | None = None


def _images(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    column, label = image_column(train, source, options), label_column(train, source, options)
    natural = natural_column(train, source, options)

    def table(split: Split, owner: str | None) -> Table:
        key = pictures.fingerprint(split.files, column)
        pixels = pictures.cached(key, lambda: pictures.decode(split.values(column), f"data.dataset: {split.where}"))
        return Table(pixels, _labels(split, label, options), _owners(split, owner))

    tables = table(train, natural), table(test, None) if test else None
    classes = _classes(train, label, source, options, *tables)
    mean, std = (source.mean, source.std) if source else ((0.5,), (0.5,))
    channels = tables[0].inputs.shape[1]
    if len(mean) not in (1, channels):
        raise wrong("data.dataset", f"{train.where} with {channels} channels", f"the {len(mean)} channels of {name}")
    preparation = Preparation("image", columns=(column,), mean=mean, std=std, names=_names(train, label, options))
    return Meaning(name, "image", classes, mean, std, preparation=preparation), *tables


def _sentences(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    label = label_column(train, source, options)
    columns = text_columns(train, source, options, label)
    natural = natural_column(train, source, options)
    words = words_of("data.", options.max_length, options.vocabulary, options.tokenizer) or Words()
    vocabulary = padding = 0

    def table(split: Split, owner: str | None) -> Table:
        nonlocal vocabulary, padding
        rows = list(zip(*[[value or "" for value in split.values(column)] for column in columns]))
        ids, vocabulary, padding = words.ids(rows)
        return Table(ids, _labels(split, label, options), _owners(split, owner))

    tables = table(train, natural), table(test, None) if test else None
    classes = _classes(train, label, source, options, *tables)
    encoding = Encoding(columns, (label,), words=words)
    preparation = Preparation("text", encoding, names=_names(train, label, options))
    return Meaning(name, "text", classes, vocabulary=vocabulary, padding=padding, preparation=preparation), *tables


def _characters(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    owner = natural_column(train, source, options) or (source.natural if source else None)
    size = len(decoding.CHARACTERS) + 1
    length = options.max_length or decoding.WINDOW

    ready = "x" in train.features and "y" in train.features
    columns = ("x",) if ready else text_columns(train, source, options, "")[:1]

    def table(split: Split) -> Table:
        owners = split.values(owner) if owner and owner in split.features else [""] * split.read([]).num_rows
        if "x" in split.features and "y" in split.features:
            x, y = decoding.ready_windows(split.values("x"), split.values("y"))
            return Table(x, y, np.array(owners, dtype=object))
        column = columns[0]
        return Table(*decoding.windows([value or "" for value in split.values(column)], owners, length))

    preparation = Preparation("chars", columns=columns, length=length, names=("", *decoding.CHARACTERS))
    found = Meaning(name, "chars", size, vocabulary=size, preparation=preparation)
    return found, table(train), table(test) if test else None


def _columns(
    name: str, source: Source | None, options: Options, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    owner = natural_column(train, source, options)
    there = [column for column in train.features if column != owner]
    words = words_of("data.", options.max_length, options.vocabulary, options.tokenizer)
    asked = (options.inputs, options.target, options.categories, options.scale, options.fill)
    encoding = encoding_of("data.", there, *asked)
    names: tuple[Any, ...] = ()
    vocabulary = padding = 0

    def table(split: Split, by: str | None) -> Table:
        nonlocal encoding, names, vocabulary, padding
        frame = split.read([*encoding.inputs, *encoding.target, *([by] if by else [])]).to_pandas()
        # What is text is decided on the training rows; a test split cannot change it.
        if split is train:
            encoding = with_words("data.", frame, encoding, words)
            names = names_of(frame, encoding)
            _, vocabulary, padding = ([], 0, 0) if encoding.words is None else encoding.words.ids([])
        owners = frame[by].tolist() if by else []

        def place(row: int) -> str:
            return f"row {row}, client {owners[row]}" if by else f"row {row} of {split.where}"

        if by and frame[by].isna().any():
            row = int(frame[by].isna().to_numpy(dtype=bool).argmax())
            raise wrong(f"row {row}, column {by}", "a missing value", "the client that the row belongs to")
        natural = np.array(owners, dtype=object) if by else None
        faults: list[InputError] = []
        with gather(faults):
            inputs = inputs_of(frame, encoding, place)
        with gather(faults):
            targets = targets_of(frame, encoding, place)
        gather.raised(faults)
        return Table(inputs, targets, natural)

    tables = table(train, owner), table(test, None) if test else None
    classes = encoding.classes or classes_of(*(found.targets for found in tables if found is not None))
    preparation = Preparation("table", encoding, names=names)
    return Meaning(name, "table", classes, (), (), vocabulary, padding, preparation), *tables


def _owners(split: Split, owner: str | None) -> npt.NDArray[Any] | None:
    return np.array(split.values(owner), dtype=object) if owner else None


def _names(split: Split, label: str, options: Options) -> tuple[Any, ...]:
    """Return the names of the classes in order: those listed, or those that the label's type brings."""
    listed = (options.categories or {}).get(label)
    return tuple(listed or getattr(split.features[label], "names", None) or ())


def _labels(split: Split, column: str, options: Options) -> torch.Tensor:
    """Return the class numbers ``(n,)``, by ``data.categories`` where they are names; raises InputError for missing,
    fractional or negative ones, and names that are not listed.
    """
    for other in options.categories or {}:
        if other != column:
            raise wrong("data.categories", other, f"the column of labels, {column}", hint=nearest(other, [column]))
    if options.categories:
        found = split.read([column]).to_pandas()[column]
        place = f"row {{}} of {split.where}".format
        return torch.from_numpy(numbered(found, column, options.categories[column], place))
    import pyarrow as pa

    values = split.read([column]).column(column)
    numbers = values.to_numpy() if values.null_count == 0 else None
    if numbers is None or numbers.dtype.kind not in "iu":
        kind = "missing values" if numbers is None else str(values.type)
        hint = "" if numbers is None else f"Names of classes: data.categories={{{column}: [...]}}, in a public order."
        if numbers is not None and values.type in (pa.string(), pa.large_string()):
            there = sorted(set(values.to_pylist()))
            hint = hint.replace("...", ", ".join(there[:8]) + (", …" if len(there) > 8 else ""))
        raise wrong(f"column {column} of {split.where}", kind, "whole numbers (class numbers from 0)", hint=hint)
    if len(numbers) and numbers.min() < 0:
        allowed = "class numbers ≥ 0 (is it unlabelled?)"
        raise wrong(f"column {column} of {split.where}", f"label {numbers.min()}", allowed)
    return torch.from_numpy(numbers.astype(np.int64))


def _classes(
    split: Split, label: str, source: Source | None, options: Options, train: Table, test: Table | None
) -> int:
    """Return the number of classes: of the listed names, the label feature, the table, else one more than the largest
    label.
    """
    if options.categories:
        return len(options.categories[label])
    tables = [t for t in (train, test) if t is not None and len(t.targets) and len(train.targets)]
    largest = max((int(t.targets.max()) for t in tables), default=0)
    known = getattr(split.features[label], "num_classes", None) or (source.classes if source else largest + 1)
    if largest >= known:
        raise wrong(f"column {label} of {split.where}", f"label {largest}", f"class numbers below {known}")
    return int(known)


Reader = Callable[[str, Source | None, Options, Split, Split | None], tuple[Meaning, Table, Table | None]]
READERS: dict[Kind, Reader] = {"image": _images, "text": _sentences, "chars": _characters, "table": _columns}
