"""One federation from the ``data`` section of a recipe: find it, read it, turn it into tensors, split it."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import in_range, one_of, whole, wrong
from fedflat.core.rng import stream
from fedflat.data import images as pictures
from fedflat.data.catalog import DATASETS, Kind, Source
from fedflat.data.clients import FederatedData, bounded, hold_back
from fedflat.data.columns import Options, guess_kind
from fedflat.data.locate import locate
from fedflat.data.partition import partition
from fedflat.data.tables import READERS, Meaning, Table
from fedflat.data.text import tokenize

_log = logging.getLogger(__name__)

USED: dict[Kind, tuple[str, ...]] = {
    "image": ("input", "label", "categories"),
    "text": ("input", "label", "categories", "tokenizer", "max_length", "vocabulary"),
    "chars": ("input", "max_length"),
    "table": ("categories", "scale"),
}
"""Keys of the data section that a data set of that kind may use, beside those that all do."""

__all__ = ["DATASETS", "Options", "Source", "load", "tokenize"]


def load(spec: Any, seed: int = 0) -> FederatedData:
    """The federation that a recipe's ``data`` section describes (a dict, or any object with those attributes).

    ``dataset`` is ``digits``, a short name of ``DATASETS``, a hub id ``owner/name``, or a path. Names are first
    looked up as a folder under ``$FEDFLAT_DATA``; the network is used only when that has none. Images become
    float32 ``(N, C, H, W)``, normalised with public constants; sentences int64 ``(N, max_length)``; Shakespeare
    int64 ``(N, 80)`` with targets ``(N, 80)``. Where there is no test split, a seeded share (0.2) is the test set.
    Raises InputError for what the recipe has wrong, RunError when the hub is needed and cannot be reached.
    """
    options = _options(spec)
    meaning, train, test, _ = _tables(options, seed)
    if options.max_examples is not None and options.max_examples < len(train.targets):
        chosen = stream(seed, "max_examples").permutation(len(train.targets))[: options.max_examples]
        train = train.take(np.sort(chosen).astype(np.int64))
    spec = {"kind": "natural", "by": options.by} if options.by else _partition_spec(options.partition)
    parts = partition(_one_label(train.targets, spec.get("kind")), spec, options.clients, seed, train.natural)
    if options.max_per_client is not None:
        parts = bounded(parts, options.max_per_client, seed)
    parts, held = hold_back(parts, options.client_test_fraction, seed)
    return FederatedData(
        inputs=_resident(train.inputs, meaning),
        targets=train.targets,
        parts=parts,
        held_back=held,
        test_inputs=_resident(test.inputs, meaning) if test else None,
        test_targets=test.targets if test else None,
        classes=meaning.classes,
        name=meaning.name,
        vocabulary=meaning.vocabulary,
        padding=meaning.padding,
        most=options.max_per_client,
    )


def load_validation(spec: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The public examples that ``validation_fraction`` sets apart: inputs and targets, as ``load`` makes them.

    Raises InputError: there is no public test data, or nothing is set apart.
    """
    options = _options(spec)
    meaning, _, _, apart = _tables(options, seed)
    if apart is None or not len(apart.targets):
        raise wrong("data.validation_fraction", options.validation_fraction, "a share that is some public examples")
    return _resident(apart.inputs, meaning), apart.targets


def _tables(options: Options, seed: int) -> tuple[Meaning, Table, Table | None, Table | None]:
    """Training rows, public test rows, and those of the test rows that are set apart."""
    meaning, train, own = _digits() if options.dataset == "digits" else _read(options)
    _refuse_unused(options, meaning, own is not None)
    if train.natural is not None and (options.by or _partition_spec(options.partition).get("kind") == "natural"):
        for row, owner in enumerate(train.natural):
            if owner is None or owner != owner or owner == "":
                raise wrong(f"data.by: row {row}", "a missing value", "the client that the row belongs to")
    train, test = _public_test(train, own, options, seed)
    share = in_range("data.validation_fraction", options.validation_fraction, 0.0, 1.0, open_high=True)
    if not share:
        return meaning, train, test, None
    if test is None:
        raise wrong("data.validation_fraction", share, f"0: {meaning.name} has no public test data to set apart")
    if own is None and train.natural is not None:
        allowed = f"0: the test examples of {meaning.name} are rows of its natural clients, and no public ones"
        raise wrong("data.validation_fraction", share, allowed, hint="Give it a test split of other people's data.")
    order = stream(seed, "validation split").permutation(len(test.targets))
    count = round(share * len(order))
    rest, apart = (test.take(np.sort(rows).astype(np.int64)) for rows in (order[count:], order[:count]))
    return meaning, train, rest, apart


def _options(spec: Any) -> Options:
    names = [field.name for field in dataclasses.fields(Options)]
    if isinstance(spec, dict):
        for key in spec:
            one_of("key of data", key, names)
        options = Options(**spec)
    else:
        options = Options(**{name: getattr(spec, name) for name in names if hasattr(spec, name)})
    if not isinstance(options.dataset, (str, os.PathLike)) or not str(options.dataset):
        raise wrong("data.dataset", options.dataset, "a name, a hub id or a path")
    for name in ("max_examples", "max_test", "max_length", "vocabulary", "max_per_client"):
        value = getattr(options, name)
        if value is not None:
            whole(f"data.{name}", value, 1)
    return dataclasses.replace(options, dataset=str(options.dataset))


def _partition_spec(spec: Any) -> dict[str, Any]:
    """A partition given as a dict, a bare kind, or an object with attributes (keys that are None do not count)."""
    if isinstance(spec, str):
        return {"kind": spec}
    given = spec if isinstance(spec, dict) else getattr(spec, "__dict__", None)
    if given is None:
        raise wrong("data.partition", spec, "a kind, or a mapping such as {kind: dirichlet, alpha: 0.6}")
    return {key: value for key, value in given.items() if value is not None}


def _refuse_unused(options: Options, meaning: Meaning, has_test: bool) -> None:
    """Refuse a key that this data set has no use for, rather than ignore it."""
    used = () if options.dataset == "digits" else USED[meaning.kind]
    for key in ("input", "label", "tokenizer", "max_length", "vocabulary", "categories", "scale"):
        if getattr(options, key) is not None and key not in used:
            raise wrong(f"data.{key}", getattr(options, key), f"nothing: {meaning.name} does not use it")
    if options.tokenizer and options.vocabulary:
        raise wrong("data.vocabulary", options.vocabulary, "nothing with data.tokenizer, which has its own")
    if has_test and options.test_fraction is not None:
        allowed = f"nothing: {meaning.name} has test data of its own (data.max_test takes fewer)"
        raise wrong("data.test_fraction", options.test_fraction, allowed)


def _digits() -> tuple[Meaning, Table, None]:
    from sklearn.datasets import load_digits

    source = DATASETS["digits"]
    bunch = load_digits()
    # pixels are 0..16; ×255/16 rounded would lose exactness, so they stay float32 in [0, 255]
    images = torch.from_numpy((bunch.images * (255.0 / 16.0)).astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(bunch.target.astype(np.int64))
    return Meaning("digits", "image", source.classes, source.mean, source.std), Table(images, targets), None


def _read(options: Options) -> tuple[Meaning, Table, Table | None]:
    name, source, splits = locate(options.dataset)
    known = source is not None and not options.tabular
    kind = source.kind if source and known else guess_kind(next(iter(splits.values())), options)
    wanted = [source.test] if source and source.test else ["test", "validation"]
    test_name = next((split for split in wanted if split in splits and "train" in splits), None)
    # a set of which only the evaluation split could be had is split like one without a test set
    if "train" not in splits:
        _log.warning("%s has no training split here: its %s split is used instead", name, next(iter(splits)))
    train_split = splits["train"] if "train" in splits else next(iter(splits.values()))
    test_split = splits[test_name] if test_name else None
    return READERS[kind](name, source, options, train_split, test_split)


def _public_test(train: Table, test: Table | None, options: Options, seed: int) -> tuple[Table, Table | None]:
    """Split off a public test set if there is none; keep the first ``max_test`` of it."""
    if test is None:
        fraction = 0.2 if options.test_fraction is None else options.test_fraction
        in_range("data.test_fraction", fraction, 0.0, 1.0, open_high=True)
        total = len(train.targets)
        order = stream(seed, "public test split").permutation(total)
        count = int(fraction * total)
        test = train.take(np.sort(order[:count]).astype(np.int64)) if count else None
        train = train.take(np.sort(order[count:]).astype(np.int64)) if count else train
    if test is not None and options.max_test is not None:
        test = Table(test.inputs[: options.max_test], test.targets[: options.max_test])
    return train, test


def _resident(inputs: torch.Tensor, meaning: Meaning) -> torch.Tensor:
    return pictures.normalise(inputs, meaning.mean, meaning.std) if meaning.kind == "image" else inputs


def _one_label(targets: torch.Tensor, kind: Any) -> npt.NDArray[np.int64]:
    """One number per example to partition by; of a target sequence, its last."""
    if targets.is_floating_point():
        if kind in ("dirichlet", "classes"):
            raise wrong("data.partition.kind", f"{kind} with targets that are no classes", "iid or natural")
        return np.zeros(len(targets), dtype=np.int64)
    return np.asarray((targets if targets.ndim == 1 else targets[:, -1]).numpy(), dtype=np.int64)
