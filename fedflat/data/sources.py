"""Load the federation of a recipe's ``data`` section: find it, read it, turn it into tensors, split it.

Public examples may be set apart from it: ae-dpfl's queries, and what Fed-SMP's top_k mask is trained on.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedflat.config.sections import DataSection
from fedflat.core import InputError, becoming, require, stream, wrong
from fedflat.data.clients import FederatedData, bounded, hold_back, leave_out, refuse_private_test, refuse_users
from fedflat.data.decoding import normalise
from fedflat.data.locate import Split, Written, is_path, locate
from fedflat.data.partition import partition
from fedflat.data.preparation import DATASETS, Preparation
from fedflat.data.tables import Owners, read, refuse_unused

_log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]


def load(spec: DataSection | Mapping[str, Any], seed: int = 0) -> FederatedData:
    """Return the federation that a recipe's ``data`` section describes.

    ``dataset`` is ``digits``, a short name of ``DATASETS``, a hub id ``owner/name``, or a path. Names are first
    looked up as a folder under ``$FEDFLAT_DATA``; the network is used only when that has none. Images become
    float32 ``(N, C, H, W)``, normalised with public constants; sentences int64 ``(N, max_length)``; Shakespeare
    int64 ``(N, 80)`` with targets ``(N, 80)``. Where a known data set has no test split, a seeded share (0.2) is the
    test set; other data have public test data only where the recipe names them.
    Raises InputError for what the recipe has wrong, RunError when the hub is needed and cannot be reached.
    """
    return _loaded(_options(spec), seed)[0]


def load_validation(spec: DataSection | Mapping[str, Any], seed: int = 0) -> Pair:
    """Return the public examples that ``validation_fraction`` sets apart: inputs and targets, as ``load`` makes them.

    Raises InputError: there is no public test data, or nothing is set apart.
    """
    options = _options(spec)
    apart = _loaded(options, seed)[1]
    if apart is None or not len(apart[1]):
        raise wrong("data.validation_fraction", options.validation_fraction, "a share that is some public examples")
    return apart


def _loaded(options: DataSection, seed: int) -> tuple[FederatedData, Pair | None]:
    """Return the federation, and the public examples that are set apart from its test data."""
    data, owners, users = _digits(options) if options.dataset == "digits" else _read(options)
    tested = data.test_targets is not None
    if tested and options.test_fraction is not None:
        allowed = f"nothing: {data.name} has test data of its own (data.max_test takes fewer)"
        raise wrong("data.test_fraction", options.test_fraction, allowed)
    # A file called mnist.csv need not hold MNIST.
    unlisted = data.name not in DATASETS or is_path(options.dataset)
    data, owners = _divided(data, owners, options, seed, unlisted)
    # Clients are counted after those left out for testing.
    number = None if options.test_clients is not None else options.clients
    parts = partition(_one_label(data.targets, options.partition.kind), options.partition, number, seed, owners)
    data = dataclasses.replace(
        _normalised(data), parts=parts, stated=not unlisted or bool(data.preparation and data.preparation.names),
        compared=unlisted and owners is not None and users is not None and refuse_users(owners, users, "data.test"),
    )  # fmt: skip
    if unlisted:
        refuse_private_test(data)
    if options.test_clients is not None:
        data = _without_test_clients(data, owners, options, options.test_clients)
    elif options.validation_fraction and data.test_targets is not None and not tested and owners is not None:
        allowed = f"0: the test examples of {data.name} are rows of its natural clients, and no public ones"
        hint = "Give it a test split of other people's data."
        raise wrong("data.validation_fraction", options.validation_fraction, allowed, hint=hint)
    data, apart = _set_apart(data, options.validation_fraction, seed)
    parts = data.parts if options.max_per_client is None else bounded(data.parts, options.max_per_client, seed)
    parts, held = hold_back(parts, options.client_test_fraction, seed)
    return dataclasses.replace(data, parts=parts, held_back=held, most=options.max_per_client), apart


def _taken(data: FederatedData, owners: Owners, rows: npt.NDArray[np.int64]) -> tuple[FederatedData, Owners]:
    """Return some of the training rows, in stored order, and their owners."""
    rows = np.sort(rows).astype(np.int64)
    index = torch.from_numpy(rows)
    fewer = dataclasses.replace(data, inputs=data.inputs[index], targets=data.targets[index])
    return fewer, None if owners is None else owners[rows]


def _without_test_clients(
    data: FederatedData, owners: Owners, options: DataSection, which: float | Sequence[str | int]
) -> FederatedData:
    """Return the federation without whole clients, whose rows become the public test data."""
    names = () if owners is None or not options.natural else tuple(str(owners[part[0]]) for part in data.parts)
    data = leave_out(dataclasses.replace(data, names=names), which, "data.test_clients")
    if options.clients is not None and options.clients != data.clients:
        raise wrong("data.clients", options.clients, f"{data.clients}, the clients that are left for training")
    return dataclasses.replace(data, names=())


def _set_apart(data: FederatedData, share: float, seed: int) -> tuple[FederatedData, Pair | None]:
    """Return the federation without a share of its test rows, and those rows."""
    if not share:
        return data, None
    if data.test_targets is None:
        raise wrong("data.validation_fraction", share, f"0: {data.name} has no public test data to set apart")
    order = stream(seed, "validation split").permutation(len(data.test_targets))
    return _without_tests(data, np.sort(order[: round(share * len(order))]))


def _without_tests(data: FederatedData, taken: npt.NDArray[np.int64]) -> tuple[FederatedData, Pair]:
    """Return the federation without some rows of its public test data, and those rows, in this order."""
    x, y = cast(Tensor, data.test_inputs), cast(Tensor, data.test_targets)
    rest = torch.from_numpy(np.setdiff1d(np.arange(len(y)), taken, assume_unique=True))
    index = torch.from_numpy(taken)
    return dataclasses.replace(data, test_inputs=x[rest], test_targets=y[rest]), (x[index], y[index])


def _options(spec: DataSection | Mapping[str, Any]) -> DataSection:
    """Return the section with its columns under their new names."""
    section = DataSection.model_validate(spec)
    require(section.dataset != "", "data.dataset", section.dataset, "a name, a hub id or a path")
    for old, new in (("input", "inputs"), ("label", "target")):
        if (column := getattr(section, old)) is not None:
            require(getattr(section, new) is None, f"data.{old}", column, f"nothing beside data.{new}, its new name")
            _log.warning("data.%s is now called data.%s", old, new)
            section = section.model_copy(update={new: column, old: None})
    return section


def _digits(options: DataSection) -> tuple[FederatedData, Owners, Owners]:
    from sklearn.datasets import load_digits

    refuse_unused("digits", "bundled", options)
    source = DATASETS["digits"]
    bunch = load_digits()
    # pixels are 0..16; ×255/16 rounded would lose exactness, so they stay float32 in [0, 255]
    images = torch.from_numpy((bunch.images * (255.0 / 16.0)).astype(np.float32)).unsqueeze(1)
    targets = torch.from_numpy(bunch.target.astype(np.int64))
    preparation = Preparation("image", columns=("image",), mean=source.mean, std=source.std)
    return FederatedData(images, targets, classes=source.classes, name="digits", preparation=preparation), None, None


def _read(options: DataSection) -> tuple[FederatedData, Owners, Owners]:
    written = Written(options.separator, options.encoding, options.by)
    name, source, splits = locate(options.dataset, written)
    wanted = [source.test] if source and source.test else ["test", "validation"]
    # Only beside training rows: a lone test split is what there is to train on.
    test_split = next((splits[split] for split in wanted if split in splits and "train" in splits), None)
    # a set of which only the evaluation split could be had is split like one without a test set
    if "train" not in splits:
        _log.warning("%s has no training split here: its %s split is used instead", name, next(iter(splits)))
    train_split = splits["train"] if "train" in splits else next(iter(splits.values()))
    if options.test is not None:
        test_split = _named_test(options, train_split, test_split, written)
    elif source is None and test_split is None and options.test_fraction and options.natural:
        hint = "Name public rows (data.test), or leave whole clients out (data.test_clients)."
        raise wrong("data.test_fraction", options.test_fraction, "nothing: every row is a client's", hint=hint)
    return read(name, source, options, train_split, test_split)


def _named_test(options: DataSection, train: Split, there: Split | None, written: Written) -> Split:
    """Return the public test data that the recipe names."""
    require(there is None, "data.test", options.test, f"nothing: {options.dataset} has test data of its own")
    require(options.test_fraction is None, "data.test_fraction", options.test_fraction, "nothing beside data.test")
    splits = locate(str(options.test), written, "data.test")[2]
    split = splits.get("test") or next(iter(splits.values()))
    if {file.resolve() for file in split.files} & {file.resolve() for file in train.files}:
        hint = "Its rows are the clients'. data.test_clients leaves whole clients out."
        raise wrong("data.test", options.test, "another file than data.dataset, of public rows", hint=hint)
    return split


def _divided(
    data: FederatedData, owners: Owners, options: DataSection, seed: int, unlisted: bool
) -> tuple[FederatedData, Owners]:
    """Split off a public test set if there is none, unless the rows are somebody's own; keep the first ``max_test`` of
    it, and ``max_examples`` of the others.
    """
    x, y = data.test_inputs, data.test_targets
    if y is None:
        fraction = (0.0 if unlisted else 0.2) if options.test_fraction is None else options.test_fraction
        order = stream(seed, "public test split").permutation(len(data.targets))
        if count := int(fraction * len(order)):
            test, _ = _taken(data, owners, order[:count])
            data, owners = _taken(data, owners, order[count:])
            x, y = test.inputs, test.targets
    if x is not None and y is not None:
        data = dataclasses.replace(data, test_inputs=x[: options.max_test], test_targets=y[: options.max_test])
    if options.max_examples is None:
        return data, owners
    if unlisted and options.natural:  # one row more would give everybody other rows
        hint = "data.max_per_client bounds each client by itself."
        raise wrong("data.max_examples", options.max_examples, "nothing where every row is some client's", hint=hint)
    return _taken(data, owners, stream(seed, "max_examples").permutation(len(data.targets))[: options.max_examples])


def _normalised(data: FederatedData) -> FederatedData:
    """Return the federation with its images standardised."""
    preparation = data.preparation
    if preparation is None or preparation.kind != "image":
        return data
    mean, std, test = preparation.mean, preparation.std, data.test_inputs
    test = None if test is None else normalise(test, mean, std)
    return dataclasses.replace(data, inputs=normalise(data.inputs, mean, std), test_inputs=test)


def _one_label(targets: torch.Tensor, kind: Any) -> npt.NDArray[np.int64]:
    """Return one number per example to partition by; of a target sequence, its last."""
    if targets.is_floating_point():
        if kind in ("dirichlet", "classes"):
            raise wrong("data.partition.kind", f"{kind} with targets that are no classes", "iid or natural")
        return np.zeros(len(targets), dtype=np.int64)
    return np.asarray((targets if targets.ndim == 1 else targets[:, -1]).numpy(), dtype=np.int64)


HELD_OUT, TEST = "held-out", "test"
"""Names of public examples: those taken from the training set before anything is trained, and those of the test set."""


def public_examples(
    data: FederatedData, source: str, count: int, seed: int, dataset: str | None = None, *, own: bool = False
) -> tuple[FederatedData, Tensor]:
    """Return the federation without the public examples, and the inputs ``(count, …)`` of those, in a seeded random
    order.

    source: ``held-out`` takes examples of the training set away from the clients that hold them, before anything is
    trained; so does the name of the recipe's own data set (``dataset``). ``test`` takes them from the public test set,
    which is evaluated without them. Any other name, hub id or path is a data set of its own. own: whether the clients'
    examples are their own and of no published data set: one more of one client's would change which the others keep.

    Raises:
        InputError: held-out examples of clients that were given in Python (``dataset`` None) or have data of their
            own; fewer examples than ``count``, or examples of another shape.
    """
    if source in (dataset, HELD_OUT):
        rows = sum(map(len, data.parts))
        if dataset is not None and not own and count > rows // 2:
            raise wrong("algorithm.queries", count, f"at most {rows // 2}, half of the training examples")
        data, taken = _held_out(data, count, seed, None if own else dataset, f"{TEST} or a data set")
        return data, data.inputs[torch.from_numpy(taken)]
    if source != TEST:
        other = _elsewhere(data, source, seed)
        return data, other.inputs[torch.from_numpy(_chosen(len(other.inputs), count, seed, source))]
    if data.test_inputs is None:
        raise wrong("algorithm.public", TEST, "a data set: this federation has no public test set")
    taken = _chosen(max(len(data.test_inputs) - 1, 0), count, seed, "the public test set")
    without, (queries, _) = _without_tests(data, taken)
    return without, queries


def public_training(
    data: FederatedData, source: str, seed: int, dataset: str | None = None, *, own: bool = False
) -> tuple[FederatedData, FederatedData]:
    """Return the federation without the public examples, and those, labelled, as one client (Fed-SMP's top_k).

    source: ``held-out`` takes a twentieth of the training examples away from the clients before training; any
    other name, hub id or path is a data set of its own. Raises InputError as ``public_examples`` does.
    """
    if source not in (dataset, HELD_OUT):
        return data, _elsewhere(data, source, seed)
    rest, taken = _held_out(data, max(1, sum(map(len, data.parts)) // 20), seed, None if own else dataset, "a data set")
    taken = np.sort(taken)
    return rest, dataclasses.replace(data, parts=(taken,), held_back=(taken[:0],), test_inputs=None, test_targets=None)


def _held_out(
    data: FederatedData, count: int, seed: int, dataset: str | None, others: str
) -> tuple[FederatedData, npt.NDArray[np.int64]]:
    """Return the federation without ``count`` training rows, and those rows in a seeded random order."""
    require(dataset is not None, "algorithm.public", HELD_OUT, f"{others}: the clients' own examples are not public")
    rows = np.sort(np.concatenate(data.parts))
    taken = rows[_chosen(len(rows), count, seed, "the training set")]
    # A mask: looking each row up in a list would be quadratic.
    public = np.zeros(len(data.inputs), dtype=bool)
    public[taken] = True
    return dataclasses.replace(data, parts=tuple(part[~public[part]] for part in data.parts)), taken


def _elsewhere(data: FederatedData, source: str, seed: int) -> FederatedData:
    """Return another data set as one client. Raises InputError for examples of another form."""
    allowed = f"examples of shape {data.input_shape} of the same kind, which are read without further keys"
    with becoming(lambda e: wrong("algorithm.public", f"{source} ({str(e).rstrip('.')})", allowed), InputError):
        other = load({"dataset": source, "clients": 1}, seed)
    if other.input_shape != data.input_shape or other.inputs.dtype != data.inputs.dtype:
        raise wrong("algorithm.public", f"{source} (examples of shape {other.input_shape})", allowed)
    return other


def _chosen(total: int, count: int, seed: int, where: str) -> npt.NDArray[np.int64]:
    require(count <= total, "algorithm.queries", count, f"at most {total}, the examples that {where} can spare")
    return stream(seed, "public examples").permutation(total)[:count]
