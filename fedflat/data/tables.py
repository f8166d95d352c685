"""Turn splits of a data set into tensors: images, sentences, running text, or columns of a table.

Which columns are the input, the label and the client says the recipe, else the table of known data sets, else their
types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.config.sections import DataSection
from fedflat.core import InputError, one_of, require, wrong
from fedflat.data import decoding
from fedflat.data.clients import FederatedData, classes_of
from fedflat.data.encoding import KEYS, Encoding, Words, check_columns, clean, encoding_of, owners_of
from fedflat.data.locate import Split
from fedflat.data.preparation import Kind, Preparation, Source

LABELS = ("label", "labels", "target", "class", "y")  # tried when no column is a class label
Owners = npt.NDArray[Any] | None
"""Whose each row is, where a column says it."""
Rows = tuple[torch.Tensor, torch.Tensor, Owners]
USED: dict[str, tuple[str, ...]] = {
    "image": ("inputs", "target", "categories"),
    "text": ("inputs", "target", "categories", "tokenizer", "max_length", "vocabulary"),
    "chars": ("inputs", "max_length"),
    "table": KEYS,
}
"""Keys of the data section that a data set of that kind may use, beside those that all do."""


def read(
    name: str, source: Source | None, options: DataSection, train: Split, test: Split | None
) -> tuple[FederatedData, Owners, Owners]:
    """Return a data set that nobody holds yet: images as uint8, token ids as int64. Then whose each of its rows is, and
    each of its public test rows.

    Raises:
        InputError: columns that are not there or not clear, or a value that cannot be used, with its place.
    """
    kind = _kind_of(train, source, options)
    refuse_unused(name, kind, options)
    if kind == "chars":
        return _characters(name, source, options, train, test)
    owner = _natural_column(train, source, options)
    encoding = _encoding(kind, train, source, options, owner)
    x, y, owners = _rows(kind, train, encoding, owner)
    test_x, test_y, users = (None, None, None) if test is None else _rows(kind, test, encoding, None)
    if test is not None and owner in test.features:
        users = np.array(test.values(str(owner)), dtype=np.object_)
    label = train.features[encoding.target[0]] if len(encoding.target) == 1 else None
    names = encoding.names or tuple(getattr(label, "names", None) or ())
    names = names or ((False, True) if getattr(label, "dtype", "") == "bool" else ())
    classes = _classes(kind, encoding, label, source, y, test_y)
    # The labels' names stand apart: rows to predict have no labels.
    input_encoding = dataclasses.replace(encoding, categories={}) if kind == "text" and encoding.words else encoding
    preparation = Preparation(kind, input_encoding, names=names)
    if kind == "image":
        mean, std = (source.mean, source.std) if source else ((0.5,), (0.5,))
        if len(mean) not in (1, channels := x.shape[1]):
            allowed = f"the {len(mean)} channels of {name}"
            raise wrong("data.dataset", f"{train.where} with {channels} channels", allowed)
        preparation = Preparation(kind, columns=encoding.inputs, mean=mean, std=std, names=names)
    vocabulary, padding = encoding.tokens
    data = FederatedData(x, y, (), (), test_x, test_y, classes, name, vocabulary, padding, preparation=preparation)
    return data, owners, users


def refuse_unused(name: str, kind: str, options: DataSection) -> None:
    """Refuse a key that a data set of this kind has no use for, rather than ignore it."""
    for key in KEYS:
        if getattr(options, key) is not None and key not in USED.get(kind, ()):
            raise wrong(f"data.{key}", getattr(options, key), f"nothing: {name} does not use it")


def _encoding(kind: Kind, split: Split, source: Source | None, options: DataSection, owner: str | None) -> Encoding:
    """Return which columns are read, and how."""
    asked = {key: getattr(options, key) for key in KEYS}
    if kind != "table":
        asked["target"] = options.target or _label_column(split, source)
        asked["inputs"] = options.inputs or _input_columns(kind, split, source, (owner, str(asked["target"])))
    encoding = encoding_of("data.", [column for column in split.features if column != owner], **asked)
    listed = set(encoding.inputs) & set(encoding.categories)
    allowed = "one column without categories, where the input is an image"
    plain = len(encoding.inputs) == 1 and not listed
    require(kind != "image" or plain, "data.inputs", ", ".join(encoding.inputs), allowed)
    # What is text is said by the recipe or by the types of the training file; a test split cannot change it.
    return dataclasses.replace(encoding, words=encoding.words or Words()) if kind == "text" and not listed else encoding


def _rows(kind: Kind, split: Split, encoding: Encoding, owner: str | None) -> Rows:
    """Return the examples of one split, and whose each is if there is an owner column."""
    # Images are decoded apart.
    columns = [*encoding.target, *(() if kind == "image" else encoding.inputs), *([owner] if owner else [])]
    check_columns(split.where, columns, split.features)
    frame = split.frame(columns)
    owners = owners_of(frame[owner].tolist(), f"column {owner}") if owner else None

    def place(row: int) -> str:
        return f"row {row} of {split.where}" if owners is None else f"row {row}, client {owners[row]}"

    if kind == "image":
        column = encoding.inputs[0]
        inputs = decoding.cached(split.files, column, lambda: decoding.decode(split.values(column), place))
    else:
        inputs = encoding.inputs_of(frame, place)
    targets = encoding.targets_of(frame, place)
    return inputs, targets, None if owners is None else np.array(owners, dtype=object)


def _classes(kind: Kind, encoding: Encoding, label: Any, source: Source | None, *targets: torch.Tensor | None) -> int:
    """Return the number of classes: of the listed names, the label's type, the table of known data sets, else one more
    than the largest label.
    """
    if encoding.names:
        return len(encoding.names)
    where, largest = f"column {encoding.target[0]}", classes_of(*targets)
    numbers = [rows for rows in targets if rows is not None and rows.numel() and not rows.is_floating_point()]
    least = min((int(rows.min()) for rows in numbers), default=0)
    require(kind == "table" or least >= 0, where, f"label {least}", "class numbers ≥ 0 (is it unlabelled?)")
    classes = getattr(label, "num_classes", None) or (source.classes if source and kind != "table" else largest)
    require(largest <= classes, where, f"label {largest - 1}", f"class numbers below {classes}")
    return int(classes)


def _characters(
    name: str, source: Source | None, options: DataSection, train: Split, test: Split | None
) -> tuple[FederatedData, Owners, Owners]:
    natural = _natural_column(train, source, options)
    owner = natural or (source.natural if source else None)
    size = len(decoding.CHARACTERS) + 1
    length = options.max_length or decoding.WINDOW
    ready = {"x", "y"} <= set(train.features)
    column = "x" if ready else (_named(options) or _input_columns("chars", train, source, (natural,)))[0]
    one_of("data.inputs", column, train.features)

    def rows(split: Split) -> Rows:
        owners = split.values(owner) if owner and owner in split.features else [""] * split.read([]).num_rows
        if {"x", "y"} <= set(split.features):
            return *decoding.ready_windows(split.values("x"), split.values("y")), np.array(owners, dtype=object)
        return decoding.windows([value or "" for value in split.values(column)], owners, length)

    x, y, owners = rows(train)
    test_x, test_y, users = rows(test) if test else (None, None, None)
    preparation = Preparation("chars", columns=(column,), length=length, names=("", *decoding.CHARACTERS))
    data = FederatedData(x, y, (), (), test_x, test_y, size, name, size, preparation=preparation)
    return data, owners, users


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
