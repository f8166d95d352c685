"""Set public examples apart from clients' data: ae-dpfl's queries, and what Fed-SMP's top_k mask is trained on."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import wrong
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData

HELD_OUT, TEST = "held-out", "test"


def public_examples(
    data: FederatedData, source: str, count: int, seed: int, dataset: str | None = None
) -> tuple[FederatedData, Tensor]:
    """Return the federation without the public examples, and the inputs ``(count, …)`` of those, in a seeded random
    order.

    source: ``held-out`` takes examples of the training set away from the clients that hold them, before anything is
    trained; so does the name of the recipe's own data set (``dataset``). ``test`` takes them from the public test set,
    which is evaluated without them. Any other name, hub id or path is a data set of its own.

    Raises:
        InputError: held-out examples of clients that were given in Python (``dataset`` None); fewer examples than
            ``count``, or examples of another shape.
    """
    if source in (dataset, HELD_OUT):
        if dataset is None:
            raise wrong("algorithm.public", source, f"{TEST} or a data set: the clients' own examples are not public")
        return _held_out(data, count, seed)
    return _from_test(data, count, seed) if source == TEST else (data, _elsewhere(data, source, count, seed))


def public_training(
    data: FederatedData, source: str, seed: int, dataset: str | None = None
) -> tuple[FederatedData, FederatedData]:
    """Return the federation without the public examples, and those, labelled, as one client (Fed-SMP's top_k).

    source: ``held-out`` takes a twentieth of the training examples away from the clients before training; any
    other name, hub id or path is a data set of its own. Raises InputError as ``public_examples`` does.
    """
    if source in (dataset, HELD_OUT):
        if dataset is None:
            raise wrong("algorithm.public", source, "a data set: the clients' own examples are not public")
        rows = np.sort(np.concatenate(data.parts))
        taken = np.sort(rows[_chosen(len(rows), max(1, len(rows) // 20), seed, "the training set")])
        kept = tuple(np.setdiff1d(part, taken) for part in data.parts)
        alone = dataclasses.replace(data, parts=(taken,), held_back=(taken[:0],), test_inputs=None, test_targets=None)
        return dataclasses.replace(data, parts=kept), alone
    from fedflat.data.sources import load

    found = load({"dataset": source, "clients": 1}, seed)
    _same_kind(found, data, source)
    return data, found


def _same_kind(found: FederatedData, data: FederatedData, source: str) -> None:
    same = found.input_shape == data.input_shape and found.inputs.dtype == data.inputs.dtype
    if not same:
        shape = f"examples of shape {found.input_shape}"
        raise wrong("algorithm.public", f"{source} ({shape})", f"examples of shape {data.input_shape} of the same kind")


def _chosen(total: int, count: int, seed: int, where: str) -> np.ndarray:
    if count > total:
        raise wrong("algorithm.queries", count, f"at most {total}, the examples that {where} can spare")
    return stream(seed, "public examples").permutation(total)[:count]


def _held_out(data: FederatedData, count: int, seed: int) -> tuple[FederatedData, Tensor]:
    rows = np.sort(np.concatenate(data.parts))
    if count > len(rows) // 2:
        raise wrong("algorithm.queries", count, f"at most {len(rows) // 2}, half of the training examples")
    taken = rows[_chosen(len(rows), count, seed, "the training set")]
    # A mask: looking each row up in a list would be quadratic.
    public = np.zeros(len(data.inputs), dtype=bool)
    public[taken] = True
    parts = tuple(part[~public[part]] for part in data.parts)
    return dataclasses.replace(data, parts=parts), data.inputs[torch.from_numpy(taken)]


def _from_test(data: FederatedData, count: int, seed: int) -> tuple[FederatedData, Tensor]:
    if data.test_inputs is None or data.test_targets is None:
        raise wrong("algorithm.public", TEST, "a data set: this federation has no public test set")
    taken = torch.from_numpy(_chosen(max(len(data.test_inputs) - 1, 0), count, seed, "the public test set"))
    kept = torch.ones(len(data.test_inputs), dtype=torch.bool)
    kept[taken] = False
    rest = dataclasses.replace(data, test_inputs=data.test_inputs[kept], test_targets=data.test_targets[kept])
    return rest, data.test_inputs[taken]


def _elsewhere(data: FederatedData, source: str, count: int, seed: int) -> Tensor:
    from fedflat.data.sources import load

    found = load({"dataset": source, "clients": 1}, seed)
    _same_kind(found, data, source)
    return found.inputs[torch.from_numpy(_chosen(len(found.inputs), count, seed, source))]
