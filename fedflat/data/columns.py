"""Which columns of a data set are the input, the label and the client: by recipe, by table, else by type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedflat.core.checks import InputError, nearest, wrong
from fedflat.data.catalog import Kind, Source
from fedflat.data.locate import Split

LABELS = ("label", "labels", "target", "class", "y")  # tried when no column is a class label


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``load`` reads of the recipe's ``data`` section; further attributes of a given object are not looked at.

    test_fraction: share of the examples that becomes the public test set where there is no test split.
    max_examples: at most so many training examples, a seeded choice before the partition. max_test: at most
    the first so many public test examples. validation_fraction: share of those that is set apart.
    input, label: column names, where they cannot be guessed.
    tokenizer: folder or hub id of a transformers tokenizer; max_length, vocabulary: of the hashing one.
    inputs, target, by, categories, scale: the columns of a table, see ``encoding.py``. max_per_client: public bound.
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
    max_per_client: int | None = None

    @property
    def tabular(self) -> bool:
        """Whether columns of a table are asked for."""
        return self.inputs is not None or self.target is not None


def guess_kind(split: Split, options: Options) -> Kind:
    texts = any((options.input, options.vocabulary, options.tokenizer, options.max_length))
    if options.tabular or (split.files[:1] and split.files[0].suffix == ".csv" and not texts):
        return "table"
    columns = [c for c in named(options) if c in split.features] or list(split.features)
    return "image" if any(is_image(split.features[column]) for column in columns) else "text"


def named(options: Options) -> tuple[str, ...]:
    """The input columns the recipe names: a list, or one text with commas."""
    given = options.input or ()
    return tuple(name.strip() for name in (given.split(",") if isinstance(given, str) else given))


def is_image(feature: Any) -> bool:
    """An Image feature, encoded bytes, or the struct such a feature is stored as."""
    from datasets import Image

    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def image_column(split: Split, source: Source | None, options: Options) -> str:
    """The column with the images. Raises InputError, listing the columns, when there is none or more than one."""
    if options.input:
        columns = named(options)
        if len(columns) != 1:
            raise wrong("data.input", ", ".join(columns), "one column, where the input is an image")
        return chosen(split, "data.input", columns[0])
    if source and source.inputs[0] in split.features:
        return source.inputs[0]
    return _only(split, "data.input", "an image column", [c for c in split.features if is_image(split.features[c])])


def text_columns(split: Split, source: Source | None, options: Options, label: str) -> tuple[str, ...]:
    """The text columns, in the order in which they are read: one sentence, or a pair."""
    if options.input:
        columns = tuple(chosen(split, "data.input", name) for name in named(options))
        for column in columns:
            if not is_text(split.features[column]):
                kind = getattr(split.features[column], "dtype", "another type")
                hint = "Columns of a table are data.inputs and data.target."
                raise wrong("data.input", f"{column} of {split.where} ({kind})", "a column of texts", hint=hint)
        return columns
    if source and all(column in split.features for column in source.inputs):
        return source.inputs
    owner = natural_column(split, source, options)
    return (
        _only(
            split,
            "data.input",
            "a text column",
            [c for c in split.features if is_text(split.features[c]) and c not in (label, owner)],
        ),
    )


def label_column(split: Split, source: Source | None, options: Options) -> str:
    """The column with the class numbers."""
    from datasets import ClassLabel

    if options.label:
        return chosen(split, "data.label", options.label)
    if source and source.label in split.features:
        return source.label
    typed = [column for column, feature in split.features.items() if isinstance(feature, ClassLabel)]
    named = [column for column in split.features if column.lower() in LABELS]
    return _only(split, "data.label", "a label column", typed or named[:1])


def natural_column(split: Split, source: Source | None, options: Options) -> str | None:
    """The column that names the client, when the partition is a natural one."""
    spec = options.partition
    kind, by = (
        (spec.get("kind"), spec.get("by"))
        if isinstance(spec, dict)
        else ((spec, None) if isinstance(spec, str) else (getattr(spec, "kind", None), getattr(spec, "by", None)))
    )
    if kind != "natural" and options.by is None:
        return None
    by = options.by or by or (source.natural if source else None)
    if by is None:
        raise wrong("data.partition.by", "nothing", f"one of the columns {', '.join(split.features)}")
    return chosen(split, "data.by" if options.by else "data.partition.by", by)


def chosen(split: Split, where: str, column: str) -> str:
    """``column`` if the data has it; else InputError with the columns there are."""
    if column not in split.features:
        raise wrong(
            where, column, f"one of the columns {', '.join(split.features)}", hint=nearest(column, split.features)
        )
    return column


def _only(split: Split, where: str, what: str, found: list[str]) -> str:
    if len(found) != 1:
        state = f"{len(found)} candidates ({', '.join(found)})" if found else "none"
        listed = ", ".join(split.features)
        raise InputError(
            f"{where}: {what} is needed and {state} found in {split.where}; set {where} to one of: {listed}."
        )
    return found[0]
