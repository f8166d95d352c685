"""Turn splits of a data set into tensors: images, sentences, running text, or columns of a table.

Which columns are the input, the label and the client says the recipe, else the table of known data sets, else their
types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import InputError, one_of, require, wrong
from fedflat.data import decoding
from fedflat.data.clients import classes_of
from fedflat.data.encoding import Encoding, Words, check_columns, clean, encoding_of, owners_of, words_of
from fedflat.data.locate import Split
from fedflat.data.preparation import Kind, Preparation, Source

if TYPE_CHECKING:
    import pandas as pd

    from fedflat.config.sections import DataSection

LABELS = ("label", "labels", "target", "class", "y")  # tried when no column is a class label


@dataclasses.dataclass(frozen=True)
class Table:
    """Examples as tensors, still of one owner: images uint8, token ids int64."""

    inputs: torch.Tensor
    targets: torch.Tensor
    natural: npt.NDArray[Any] | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> Table:
        """Return some of the rows, in stored order."""
        rows = np.sort(rows).astype(np.int64)
        index = torch.from_numpy(rows)
        return Table(self.inputs[index], self.targets[index], None if self.natural is None else self.natural[rows])


@dataclasses.dataclass(frozen=True)
class Meaning:
    """How the tables are to be understood. vocabulary: number of token ids, 0 where there are none."""

    name: str
    classes: int
    preparation: Preparation
    vocabulary: int = 0
    padding: int = 0


def read(
    name: str, source: Source | None, options: DataSection, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    """Return what a data set means, its training rows, and its public test rows if it has some.

    Raises:
        InputError: columns that are not there or not clear, or a value that cannot be used, with its place.
    """
    kind = _kind_of(train, source, options)
    if kind == "chars":
        return _characters(name, source, options, train, test)
    owner = _natural_column(train, source, options)
    encoding = _encoding(kind, train, source, options, owner)
    frame = _frame(kind, train, encoding, owner)
    if kind != "image":
        # What is text is said by the recipe or by the types of the training file; a test split cannot change it.
        words = words_of("data.", options.max_length, options.vocabulary, options.tokenizer)
        if kind == "text" and not set(encoding.inputs) & set(encoding.categories):
            encoding = dataclasses.replace(encoding, words=words or Words())
        else:
            encoding = encoding.for_texts("data.", words)
    _, vocabulary, padding = ((), 0, 0) if encoding.words is None else encoding.words.ids([])
    tables = [_table(kind, train, frame, encoding, owner)]
    if test is not None:
        test_table = _table(kind, test, _frame(kind, test, encoding, None), encoding, None)
        users = np.array(test.values(owner), dtype=np.object_) if owner and owner in test.features else None
        tables.append(dataclasses.replace(test_table, natural=users))
    label = train.features[encoding.target[0]] if len(encoding.target) == 1 else None
    names = encoding.class_names(frame) or tuple(getattr(label, "names", None) or ())
    classes = _classes(kind, encoding, label, source, tables)
    # The labels' names stand apart: rows to predict have no labels.
    input_encoding = dataclasses.replace(encoding, categories={}) if kind == "text" and encoding.words else encoding
    preparation = Preparation(kind, input_encoding, names=names)
    if kind == "image":
        mean, std = (source.mean, source.std) if source else ((0.5,), (0.5,))
        if len(mean) not in (1, channels := tables[0].inputs.shape[1]):
            allowed = f"the {len(mean)} channels of {name}"
            raise wrong("data.dataset", f"{train.where} with {channels} channels", allowed)
        preparation = Preparation(kind, columns=encoding.inputs, mean=mean, std=std, names=names)
    return Meaning(name, classes, preparation, vocabulary, padding), tables[0], tables[1] if test else None


def _encoding(kind: Kind, split: Split, source: Source | None, options: DataSection, owner: str | None) -> Encoding:
    """Return which columns are read, and how."""
    inputs: str | Sequence[str] | None = options.inputs
    target = options.target
    if kind != "table":
        target = target or _label_column(split, source)
        inputs = inputs or _input_columns(kind, split, source, (owner, str(target)))
    there = [column for column in split.features if column != owner]
    encoding = encoding_of("data.", there, inputs, target, options.categories, options.scale, options.fill)
    plain = len(encoding.inputs) == 1 and encoding.inputs[0] not in encoding.categories
    allowed = "one column without categories, where the input is an image"
    require(kind != "image" or plain, "data.inputs", ", ".join(encoding.inputs), allowed)
    return encoding


def _frame(kind: Kind, split: Split, encoding: Encoding, owner: str | None) -> pd.DataFrame:
    """Return the columns of a split that are read row by row: images are decoded apart."""
    columns = [*encoding.target, *(() if kind == "image" else encoding.inputs), *([owner] if owner else [])]
    check_columns(split.where, columns, split.features)
    return split.frame(columns)


def _table(kind: Kind, split: Split, frame: pd.DataFrame, encoding: Encoding, owner: str | None) -> Table:
    """Return the tensors of one split, as training rows if it has an owner column."""
    owners = owners_of(frame[owner].tolist(), f"column {owner}") if owner else None

    def place(row: int) -> str:
        return f"row {row} of {split.where}" if owners is None else f"row {row}, client {owners[row]}"

    if kind == "image":
        column = encoding.inputs[0]
        inputs = decoding.cached(split.files, column, lambda: decoding.decode(split.values(column), place))
        targets = encoding.targets_of(frame, place)
    else:
        inputs, targets = encoding.examples_of(frame, place)
    return Table(inputs, targets, None if owners is None else np.array(owners, dtype=object))


def _classes(kind: Kind, encoding: Encoding, label: Any, source: Source | None, tables: list[Table]) -> int:
    """Return the number of classes: of the listed names, the label's type, the table of known data sets, else one more
    than the largest label.
    """
    if encoding.names:
        return len(encoding.names)
    targets = [table.targets for table in tables]
    where, largest = f"column {encoding.target[0]}", classes_of(*targets)
    least = min((int(rows.min()) for rows in targets if rows.numel() and not rows.is_floating_point()), default=0)
    require(kind == "table" or least >= 0, where, f"label {least}", "class numbers ≥ 0 (is it unlabelled?)")
    classes = getattr(label, "num_classes", None) or (source.classes if source and kind != "table" else largest)
    require(largest <= classes, where, f"label {largest - 1}", f"class numbers below {classes}")
    return int(classes)


def _characters(
    name: str, source: Source | None, options: DataSection, train: Split, test: Split | None
) -> tuple[Meaning, Table, Table | None]:
    natural = _natural_column(train, source, options)
    owner = natural or (source.natural if source else None)
    size = len(decoding.CHARACTERS) + 1
    length = options.max_length or decoding.WINDOW
    ready = {"x", "y"} <= set(train.features)
    column = "x" if ready else (_named(options) or _input_columns("chars", train, source, (natural,)))[0]
    one_of("data.inputs", column, train.features)

    def table(split: Split) -> Table:
        owners = split.values(owner) if owner and owner in split.features else [""] * split.read([]).num_rows
        if {"x", "y"} <= set(split.features):
            x, y = decoding.ready_windows(split.values("x"), split.values("y"))
            return Table(x, y, np.array(owners, dtype=object))
        return Table(*decoding.windows([value or "" for value in split.values(column)], owners, length))

    preparation = Preparation("chars", columns=(column,), length=length, names=("", *decoding.CHARACTERS))
    return Meaning(name, size, preparation, size), table(train), table(test) if test else None


def _kind_of(split: Split, source: Source | None, options: DataSection) -> Kind:
    """Return what a data set is: as the table of known ones says, or by the types of its input columns."""
    columns = [column for column in _named(options) if column in split.features]
    if source is not None and set(_named(options)) <= set(source.inputs):
        return source.kind
    of_text = any((options.vocabulary, options.tokenizer, options.max_length))
    plain = columns and not set(columns) & set(options.categories or {}) and not options.scale and not options.fill
    # A table without types of its own has those of its cells, and one client's would decide everybody's.
    if plain and (of_text or not split.csv) and all(is_text_feature(split.features[column]) for column in columns):
        return "text"
    if len(columns) == 1 and plain and is_image_feature(split.features[columns[0]]):
        return "image"
    if columns or (split.csv and not of_text):
        return "table"
    images = any(is_image_feature(feature) for feature in split.features.values())
    return "image" if images else "table" if options.target and not of_text else "text"


def _named(options: DataSection) -> tuple[str, ...]:
    """Return the input columns the recipe names: a list, or one text with commas."""
    columns = options.inputs or ()
    return tuple(clean(name) for name in (columns.split(",") if isinstance(columns, str) else columns))


def is_image_feature(feature: Any) -> bool:
    """An Image feature, encoded bytes, or the struct such a feature is stored as."""
    from datasets import Image

    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def is_text_feature(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _input_columns(kind: Kind, split: Split, source: Source | None, others: Sequence[str | None]) -> tuple[str, ...]:
    """Return the column of images, or those of texts, where the recipe names none."""
    if source and set(source.inputs) <= set(split.features):
        return source.inputs
    fits, wanted = (is_image_feature, "an image column") if kind == "image" else (is_text_feature, "a text column")
    return (_only(split, "data.inputs", wanted, [c for c, f in split.features.items() if fits(f) and c not in others]),)


def _label_column(split: Split, source: Source | None) -> str:
    """Return the column with the class numbers, where the recipe names none."""
    from datasets import ClassLabel

    if source and source.label in split.features:
        return source.label
    typed = [column for column, feature in split.features.items() if isinstance(feature, ClassLabel)]
    called = [column for column in split.features if column.lower() in LABELS]
    return _only(split, "data.target", "a label column", typed or called[:1])


def _natural_column(split: Split, source: Source | None, options: DataSection) -> str | None:
    """Return the column that names the client, when the partition is a natural one."""
    if not options.natural:
        return None
    by = options.partition.by or (source.natural if source else None)
    require(by is not None, "data.partition.by", "nothing", f"one of the columns {', '.join(split.features)}")
    return str(one_of("data.by" if options.by else "data.partition.by", clean(by), split.features))


def _only(split: Split, where: str, wanted: str, candidates: list[str]) -> str:
    if len(candidates) != 1:
        state = f"{len(candidates)} candidates ({', '.join(candidates)})" if candidates else "none"
        problem = f"{wanted} is needed and {state} found in {split.where}"
        raise InputError(f"{where}: {problem}; set {where} to one of: {', '.join(split.features)}.")
    return candidates[0]
