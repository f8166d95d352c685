"""Load the federation of a recipe's ``data`` section: find it, read it, turn it into tensors, split it."""

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
from fedflat.data import decoding as pictures
from fedflat.data.clients import FederatedData, bounded, hold_back, leave_out, refuse_private_test
from fedflat.data.columns import Options, kind_of
from fedflat.data.decoding import tokenize
from fedflat.data.locate import Split, Written, is_path, locate
from fedflat.data.partition import partition
from fedflat.data.preparation import DATASETS, Kind, Preparation, Source
from fedflat.data.tables import READERS, Meaning, Table

_log = logging.getLogger(__name__)

USED: dict[Kind, tuple[str, ...]] = {
    "image": ("inputs", "target", "categories"),
    "text": ("inputs", "target", "categories", "tokenizer", "max_length", "vocabulary"),
    "chars": ("inputs", "max_length"),
    "table": ("inputs", "target", "categories", "scale", "fill", "tokenizer", "max_length", "vocabulary"),
}
"""Keys of the data section that a data set of that kind may use, beside those that all do."""

__all__ = ["DATASETS", "Options", "Source", "load", "tokenize"]


def load(spec: Any, seed: int = 0) -> FederatedData:
    """Return the federation that a recipe's ``data`` section describes (a dict, or any object with those attributes).

    ``dataset`` is ``digits``, a short name of ``DATASETS``, a hub id ``owner/name``, or a path. Names are first
    looked up as a folder under ``$FEDFLAT_DATA``; the network is used only when that has none. Images become
    float32 ``(N, C, H, W)``, normalised with public constants; sentences int64 ``(N, max_length)``; Shakespeare
    int64 ``(N, 80)`` with targets ``(N, 80)``. Where a known data set has no test split, a seeded share (0.2) is the
    test set; other data have public test data only where the recipe names them.
    Raises InputError for what the recipe has wrong, RunError when the hub is needed and cannot be reached.
    """
    options = _options(spec)
    meaning, train, test, _ = _tables(options, seed)
    own = _is_own(options, meaning)
    if own and options.natural and options.max_examples is not None:  # one row more would give everybody other rows
        hint = "data.max_per_client bounds each client by itself."
        raise wrong("data.max_examples", options.max_examples, "nothing where every row is some client's", hint=hint)
    if options.max_examples is not None and options.max_examples < len(train.targets):
        chosen = stream(seed, "max_examples").permutation(len(train.targets))[: options.max_examples]
        train = train.take(np.sort(chosen).astype(np.int64))
    # Clients are counted after those left out for testing.
    number = None if options.test_clients is not None else options.clients
    label = _one_label(train.targets, options.partition.get("kind"))
    parts = partition(label, options.partition, number, seed, train.natural)
    found = FederatedData(
        inputs=_resident(train.inputs, meaning),
        targets=train.targets,
        parts=parts,
        held_back=tuple(part[:0] for part in parts),
        test_inputs=_resident(test.inputs, meaning) if test else None,
        test_targets=test.targets if test else None,
        classes=meaning.classes,
        name=meaning.name,
        vocabulary=meaning.vocabulary,
        padding=meaning.padding,
        preparation=meaning.preparation,
        stated=not own or bool(meaning.preparation and meaning.preparation.names),
    )
    if own:
        refuse_private_test(found)
    if options.test_clients is not None:
        found = _without_test_clients(found, train, options, seed)
        if options.validation_fraction:
            rest, _ = _set_apart(len(found.test_targets), options.validation_fraction, seed)  # type: ignore[arg-type]
            tests = found.test_inputs[rest], found.test_targets[rest]  # type: ignore[index]
            found = dataclasses.replace(found, test_inputs=tests[0], test_targets=tests[1])
    parts = found.parts if options.max_per_client is None else bounded(found.parts, options.max_per_client, seed)
    parts, held = hold_back(parts, options.client_test_fraction, seed)
    return dataclasses.replace(found, parts=parts, held_back=held, most=options.max_per_client)


def _without_test_clients(found: FederatedData, train: Table, options: Options, seed: int) -> FederatedData:
    """Return the federation without whole clients, whose rows become the public test data."""
    which: Any = options.test_clients
    if not isinstance(which, (int, float)):
        owners = np.array([str(value) for value in train.natural]) if train.natural is not None else np.empty(0, str)
        names = tuple(str(owners[part[0]]) for part in found.parts)
        found = leave_out(dataclasses.replace(found, names=names), which, seed, TEST_CLIENTS)
        found = dataclasses.replace(found, names=())
    else:
        found = leave_out(found, which, seed, TEST_CLIENTS)
    if options.clients is not None and options.clients != found.clients:
        allowed = f"{found.clients}, the clients that are left for training"
        raise wrong("data.clients", options.clients, allowed)
    return found


TEST_CLIENTS = "data.test_clients"


def load_validation(spec: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the public examples that ``validation_fraction`` sets apart: inputs and targets, as ``load`` makes them.

    Raises InputError: there is no public test data, or nothing is set apart.
    """
    options = _options(spec)
    if options.test_clients is not None and options.validation_fraction:
        whole = load(dataclasses.replace(options, validation_fraction=0.0), seed)
        _, taken = _set_apart(len(whole.test_targets), options.validation_fraction, seed)  # type: ignore[arg-type]
        return whole.test_inputs[taken], whole.test_targets[taken]  # type: ignore[index]
    meaning, _, _, apart = _tables(options, seed)
    if apart is None or not len(apart.targets):
        raise wrong("data.validation_fraction", options.validation_fraction, "a share that is some public examples")
    return _resident(apart.inputs, meaning), apart.targets


def _tables(options: Options, seed: int) -> tuple[Meaning, Table, Table | None, Table | None]:
    """Return the training rows, public test rows, and those of the test rows that are set apart."""
    meaning, train, own = _digits() if options.dataset == "digits" else _read(options)
    _refuse_unused(options, meaning, own is not None)
    if train.natural is not None and options.natural:
        for row, owner in enumerate(train.natural):
            if owner is None or owner != owner or owner == "":
                raise wrong(f"data.by: row {row}", "a missing value", "the client that the row belongs to")
    train, test = _public_test(train, own, options, seed, _is_own(options, meaning))
    share = in_range("data.validation_fraction", options.validation_fraction, 0.0, 1.0, open_high=True)
    if not share or (test is None and options.test_clients is not None):
        return meaning, train, test, None
    if test is None:
        raise wrong("data.validation_fraction", share, f"0: {meaning.name} has no public test data to set apart")
    if own is None and train.natural is not None:
        allowed = f"0: the test examples of {meaning.name} are rows of its natural clients, and no public ones"
        raise wrong("data.validation_fraction", share, allowed, hint="Give it a test split of other people's data.")
    rest, apart = (test.take(rows) for rows in _set_apart(len(test.targets), share, seed))
    return meaning, train, rest, apart


def _set_apart(rows: int, share: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the test rows that stay, and those that are set apart."""
    order = stream(seed, "validation split").permutation(rows)
    count = round(share * rows)
    return np.sort(order[count:]).astype(np.int64), np.sort(order[:count]).astype(np.int64)


def _is_own(options: Options, meaning: Meaning) -> bool:
    """Return whether the rows are somebody's own. A file called mnist.csv need not hold MNIST."""
    return meaning.name not in DATASETS or is_path(options.dataset)


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
    for old, new in (("input", "inputs"), ("label", "target")):
        if getattr(options, old) is not None:
            if getattr(options, new) is not None:
                raise wrong(f"data.{old}", getattr(options, old), f"nothing beside data.{new}, its new name")
            _log.warning("data.%s is now called data.%s", old, new)
            options = dataclasses.replace(options, **{new: getattr(options, old), old: None})
    spec = {"kind": "natural", "by": options.by} if options.by else _partition_spec(options.partition)
    return dataclasses.replace(options, dataset=str(options.dataset), partition=spec)


def _partition_spec(spec: Any) -> dict[str, Any]:
    """Return a partition given as a dict, a bare kind, or an object with attributes (keys that are None do not
    count)."""
    if isinstance(spec, str):
        return {"kind": spec}
    given = spec if isinstance(spec, dict) else getattr(spec, "__dict__", None)
    if given is None:
        raise wrong("data.partition", spec, "a kind, or a mapping such as {kind: dirichlet, alpha: 0.6}")
    return {key: value for key, value in given.items() if value is not None}


def _refuse_unused(options: Options, meaning: Meaning, has_test: bool) -> None:
    """Refuse a key that this data set has no use for, rather than ignore it."""
    used = () if options.dataset == "digits" else USED[meaning.kind]
    for key in ("inputs", "target", "tokenizer", "max_length", "vocabulary", "categories", "scale", "fill"):
        if getattr(options, key) is not None and key not in used:
            raise wrong(f"data.{key}", getattr(options, key), f"nothing: {meaning.name} does not use it")
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
    preparation = Preparation("image", columns=("image",), mean=source.mean, std=source.std)
    found = Meaning("digits", "image", source.classes, source.mean, source.std, preparation=preparation)
    return found, Table(images, targets), None


def _read(options: Options) -> tuple[Meaning, Table, Table | None]:
    written = Written(options.separator, options.encoding)
    name, source, splits = locate(options.dataset, written)
    kind = kind_of(next(iter(splits.values())), source, options)
    wanted = [source.test] if source and source.test else ["test", "validation"]
    # Only beside training rows: a lone test split is what there is to train on.
    test_name = next((split for split in wanted if split in splits and "train" in splits), None)
    # a set of which only the evaluation split could be had is split like one without a test set
    if "train" not in splits:
        _log.warning("%s has no training split here: its %s split is used instead", name, next(iter(splits)))
    train_split = splits["train"] if "train" in splits else next(iter(splits.values()))
    test_split = splits[test_name] if test_name else None
    if options.test is not None:
        test_split = _named_test(options, train_split, test_split, written)
    elif source is None and test_split is None:
        _refuse_private_fraction(options)
    return READERS[kind](name, source, options, train_split, test_split)


def _named_test(options: Options, train: Split, there: Split | None, written: Written) -> Split:
    """Return the public test data that the recipe names."""
    if there is not None:
        raise wrong("data.test", options.test, f"nothing: {options.dataset} has test data of its own")
    if options.test_fraction is not None:
        raise wrong("data.test_fraction", options.test_fraction, "nothing beside data.test")
    found = locate(str(options.test), written, "data.test")[2]
    split = found.get("test") or next(iter(found.values()))
    if {file.resolve() for file in split.files} & {file.resolve() for file in train.files}:
        hint = "Its rows are the clients'. data.test_clients leaves whole clients out."
        raise wrong("data.test", options.test, "another file than data.dataset, of public rows", hint=hint)
    return split


def _refuse_private_fraction(options: Options) -> None:
    """Refuse to call a share of the rows public where every row is some client's."""
    if options.test_fraction and options.natural:
        hint = "Name public rows (data.test), or leave whole clients out (data.test_clients)."
        raise wrong("data.test_fraction", options.test_fraction, "nothing: every row is a client's", hint=hint)


def _public_test(
    train: Table, test: Table | None, options: Options, seed: int, own: bool
) -> tuple[Table, Table | None]:
    """Split off a public test set if there is none, unless the rows are somebody's own; keep the first ``max_test``."""
    if test is None:
        fraction = (0.0 if own else 0.2) if options.test_fraction is None else options.test_fraction
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
    """Return one number per example to partition by; of a target sequence, its last."""
    if targets.is_floating_point():
        if kind in ("dirichlet", "classes"):
            raise wrong("data.partition.kind", f"{kind} with targets that are no classes", "iid or natural")
        return np.zeros(len(targets), dtype=np.int64)
    return np.asarray((targets if targets.ndim == 1 else targets[:, -1]).numpy(), dtype=np.int64)
