"""Find which columns are the input, the label and the client: by recipe, by table, else by type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedflat.core.checks import InputError, nearest, wrong
from fedflat.data.encoding import clean
from fedflat.data.locate import Split
from fedflat.data.preparation import Kind, Source

LABELS = ("label", "labels", "target", "class", "y")  # tried when no column is a class label


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``load`` reads of the recipe's ``data`` section; further attributes of a given object are not looked at.

    test: the public test data, a file or folder. test_clients: clients left out of training as public test data.
    test_fraction: share of the examples that becomes the public test set where there is no test split.
    max_examples: at most so many training examples, a seeded choice before the partition. max_test: at most
    the first so many public test examples. validation_fraction: share of those that is set apart.
    inputs, target, by, categories, scale, fill: columns and public constants, see ``encoding.py``. input, label: old
    names of inputs and target. separator, encoding: of CSV files.
    tokenizer: folder or hub id of a transformers tokenizer; max_length, vocabulary: of the hashing one.
    max_per_client: public bound.
    """

    dataset: str = "digits"
    partition: Any = dataclasses.field(default_factory=lambda: {"kind": "iid"})
    clients: int | None = None
    client_test_fraction: float = 0.0
    input: str | Sequence[str] | None = None
    label: str | None = None
    test_fraction: float | None = None
    max_examples: int | None = None
    max_test: int | None = None
    validation_fraction: float = 0.0
    tokenizer: str | None = None
    max_length: int | None = None
    vocabulary: int | None = None
    inputs: str | Sequence[str] | None = None
    target: str | Sequence[str] | None = None
    by: str | None = None
    categories: Mapping[str, Sequence[Any]] | None = None
    scale: Mapping[str, Sequence[float]] | None = None
    fill: Mapping[str, Any] | None = None
    max_per_client: int | None = None
    test: str | None = None
    test_clients: float | Sequence[str] | None = None
    separator: str | None = None
    encoding: str | None = None

    @property
    def natural(self) -> bool:
        """Whether a column of the data says whose each row is."""
        return bool(self.partition.get("kind") == "natural")


def kind_of(split: Split, source: Source | None, options: Options) -> Kind:
    """Return what a data set is: as the table of known ones says, or by the types of its input columns."""
    columns = [column for column in named(options) if column in split.features]
    if source is not None and set(named(options)) <= set(source.inputs):
        return source.kind
    of_text = any((options.vocabulary, options.tokenizer, options.max_length))
    plain = columns and not set(columns) & set(options.categories or {}) and not options.scale and not options.fill
    if plain and all(is_text(split.features[column]) for column in columns):
        return "text"
    if len(columns) == 1 and plain and is_image(split.features[columns[0]]):
        return "image"
    if columns or (split.csv and not of_text):
        return "table"
    images = any(is_image(feature) for feature in split.features.values())
    return "image" if images else "table" if options.target and not of_text else "text"


def named(options: Options) -> tuple[str, ...]:
    """Return the input columns the recipe names: a list, or one text with commas."""
    given = options.inputs or ()
    return tuple(clean(name) for name in (given.split(",") if isinstance(given, str) else given))


def is_image(feature: Any) -> bool:
    """An Image feature, encoded bytes, or the struct such a feature is stored as."""
    from datasets import Image

    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def image_column(split: Split, source: Source | None, options: Options) -> str:
    """Return the column with the images. Raises InputError, listing the columns, when there is none or more than
    one."""
    if options.inputs:
        columns = named(options)
        if len(columns) != 1:
            raise wrong("data.inputs", ", ".join(columns), "one column, where the input is an image")
        return chosen(split, "data.inputs", columns[0])
    if source and source.inputs[0] in split.features:
        return source.inputs[0]
    return _only(split, "data.inputs", "an image column", [c for c in split.features if is_image(split.features[c])])


def text_columns(split: Split, source: Source | None, options: Options, label: str) -> tuple[str, ...]:
    """Return the text columns, in the order in which they are read: one sentence, or a pair."""
    if options.inputs:
        columns = tuple(chosen(split, "data.inputs", name) for name in named(options))
        for column in columns:
            if not is_text(split.features[column]):
                kind = getattr(split.features[column], "dtype", "another type")
                raise wrong("data.inputs", f"{column} of {split.where} ({kind})", "a column of texts")
        return columns
    if source and all(column in split.features for column in source.inputs):
        return source.inputs
    owner = natural_column(split, source, options)
    found = [column for column in split.features if is_text(split.features[column]) and column not in (label, owner)]
    return (_only(split, "data.inputs", "a text column", found),)


def label_column(split: Split, source: Source | None, options: Options) -> str:
    """Return the column with the class numbers."""
    from datasets import ClassLabel

    if options.target:
        wanted = options.target if isinstance(options.target, str) else ", ".join(options.target)
        return chosen(split, "data.target", clean(wanted))
    if source and source.label in split.features:
        return source.label
    typed = [column for column, feature in split.features.items() if isinstance(feature, ClassLabel)]
    named = [column for column in split.features if column.lower() in LABELS]
    return _only(split, "data.target", "a label column", typed or named[:1])


def natural_column(split: Split, source: Source | None, options: Options) -> str | None:
    """Return the column that names the client, when the partition is a natural one."""
    if not options.natural:
        return None
    by = options.partition.get("by") or (source.natural if source else None)
    by = clean(by) if by else None
    if by is None:
        raise wrong("data.partition.by", "nothing", f"one of the columns {', '.join(split.features)}")
    return chosen(split, "data.by" if options.by else "data.partition.by", by)


def chosen(split: Split, where: str, column: str) -> str:
    """``column`` if the data has it; else InputError with the columns there are."""
    if column not in split.features:
        allowed = f"one of the columns {', '.join(split.features)}"
        raise wrong(where, column, allowed, hint=nearest(column, split.features))
    return column


def _only(split: Split, where: str, what: str, found: list[str]) -> str:
    if len(found) != 1:
        state = f"{len(found)} candidates ({', '.join(found)})" if found else "none"
        listed = ", ".join(split.features)
        said = f"{what} is needed and {state} found in {split.where}"
        raise InputError(f"{where}: {said}; set {where} to one of: {listed}.")
    return found[0]
