"""Resident data and local batches, against a plain re-statement of what they promise."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.rng import stream
from fedflat.data.clients import FederatedData, from_pairs, hold_back
from fedflat.engine.batches import Order


def pairs(sizes: list[int], classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = stream(0, "test pairs")
    return [
        (
            torch.from_numpy(draw.normal(size=(n, 2, 3)).astype(np.float32)),
            torch.from_numpy(draw.integers(0, classes, n)),
        )
        for n in sizes
    ]


def of_others(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = pairs([size])[0]
    return x + 1, y


def batch_indices(size: int, steps: int, batch: int, seed: int = 1) -> np.ndarray:
    return Order(seed, 0, batch).indices([3], np.array([size]), 0, steps, min(batch, size))[0]


@given(size=st.integers(1, 40), steps=st.integers(1, 30), batch=st.integers(1, 50), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=150)
def test_every_epoch_sees_every_example_once(size: int, steps: int, batch: int, seed: int) -> None:
    rows = batch_indices(size, steps, batch, seed)
    assert rows.shape == (steps, min(batch, size)) and rows.dtype == np.int64
    per_epoch = -(-size // batch)
    for start in range(0, steps - per_epoch + 1, per_epoch):
        epoch = rows[start : start + per_epoch]
        assert sorted(epoch[epoch >= 0]) == list(range(size))
    for row in rows:
        used = row[row >= 0]
        assert len(used) >= 1 and len(set(used)) == len(used)
        assert (row[: len(used)] >= 0).all() and (row[len(used) :] == -1).all(), "padding is at the end"
    counts = (rows >= 0).sum(1)
    last = size - (per_epoch - 1) * min(batch, size)
    assert all(c == (last if i % per_epoch == per_epoch - 1 else min(batch, size)) for i, c in enumerate(counts))


def test_full_batch_is_stored_order_whatever_the_seed() -> None:
    for batch in (5, 6, 1000):
        assert (batch_indices(5, 3, batch) == np.arange(5)).all()
    assert batch_indices(0, 4, 8).shape == (4, 0)
    assert batch_indices(9, 0, 4).shape == (0, 4)


def test_batches_are_reshuffled_seeded_and_prefix_stable() -> None:
    rows = batch_indices(50, 20, 10)
    assert not np.array_equal(rows[:5], rows[5:10]), "a new order every epoch"
    assert np.array_equal(rows, batch_indices(50, 20, 10))
    assert not np.array_equal(rows, batch_indices(50, 20, 10, 2))
    assert np.array_equal(rows[:7], batch_indices(50, 7, 10))


def test_first_positions_are_uniform() -> None:
    counts = np.bincount([batch_indices(8, 1, 2, i)[0, 0] for i in range(4000)], minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_pairs_become_parts() -> None:
    given_pairs = pairs([4, 0, 7])
    data = from_pairs(given_pairs, test=of_others(5))
    assert data.clients == 3 and data.sizes.tolist() == [4, 0, 7] and data.input_shape == (2, 3)
    assert data.examples_per_client == 4 and data.classes == 3
    for i, (x, y) in enumerate(given_pairs):
        got_x, got_y = data.client(i)
        assert torch.equal(got_x, x) and torch.equal(got_y, y)
    assert data.test_inputs is not None and len(data.test_inputs) == 5
    assert all(len(rows) == 0 for rows in data.held_back)


def test_pairs_accept_arrays_double_precision_tokens_and_all_empty() -> None:
    data = from_pairs([(np.zeros((2, 5)), np.array([0, 1], dtype=np.uint8))])
    assert data.inputs.dtype == torch.float32 and data.targets.dtype == torch.int64
    tokens = from_pairs([(np.array([[1, 2], [3, 4]], dtype=np.int32), np.array([[1, 2], [3, 9]]))])
    assert tokens.inputs.dtype == torch.int64 and tokens.targets.shape == (2, 2) and tokens.classes == 10
    empty = from_pairs([(torch.empty(0, 3), torch.empty(0))] * 2)
    assert empty.sizes.tolist() == [0, 0] and empty.examples_per_client == 1 and empty.classes == 1
    mixed = from_pairs([(torch.tensor([]), torch.tensor([])), *pairs([3])])
    assert mixed.input_shape == (2, 3) and len(mixed.client(0)[0]) == 0


GOOD = (torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ([], "at least one (inputs, targets) pair"),
        (
            [GOOD, (torch.zeros(2, 3), torch.tensor([1]))],
            "clients[1]: found inputs of shape (2, 3), targets of shape (1,); allowed: as many",
        ),
        ([GOOD, (torch.zeros(2, 4), torch.tensor([0, 1]))], "clients[1] inputs: found shape (4,) per example"),
        (
            [GOOD, (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1]))],
            "clients[1] inputs: found dtype torch.int64",
        ),
        ([GOOD, (torch.zeros(2, 3), torch.tensor([[0], [1]]))], "clients[1] targets: found shape (1,) per example"),
        ([(torch.tensor([[1.0], [torch.nan]]), torch.tensor([0, 1]))], "clients[0] inputs[1]: found a NaN or infinite"),
        ([(torch.tensor([[1.0], [-torch.inf]]), torch.tensor([0, 1]))], "finite numbers"),
        ([(np.array([[1e300]]), torch.tensor([0]))], "finite numbers"),
        ([(torch.zeros(1, 3), torch.tensor([0.5])), GOOD], "clients[1] targets: found dtype torch.int64"),
        ([(torch.zeros(1, 3), torch.zeros(1, 1, 1, dtype=torch.int64))], "(n,) or (n, T)"),
        ([torch.zeros(2, 3)], "clients[0]: found Tensor"),
        (iter([GOOD]), "a list of (inputs, targets) pairs"),
        ({0: GOOD}, "clients: found dict"),
        ([GOOD[0:1]], "clients[0]: found tuple"),
        ([("abc", torch.tensor([0]))], "clients[0] inputs"),
        ([(torch.tensor(1.0), torch.tensor(1))], "as many targets as inputs"),
    ],
)
def test_bad_pairs_are_one_sentence(clients: list, says: str) -> None:
    with pytest.raises(InputError) as error:
        from_pairs(clients)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_test_pair_is_checked_against_the_clients() -> None:
    with pytest.raises(InputError, match=r"test inputs: found shape \(9,\)"):
        from_pairs([GOOD], test=(torch.zeros(1, 9), torch.tensor([0])))
    assert from_pairs([GOOD], test=(torch.zeros(1, 3), torch.tensor([6]))).classes == 7


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), fraction=st.floats(0, 0.99), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=80)
def test_hold_back_splits_without_loss(sizes: list[int], fraction: float, seed: int) -> None:
    parts = [np.arange(a, b) for a, b in itertools.pairwise(np.cumsum([0, *sizes]))]
    train, held = hold_back(parts, fraction, seed)
    for part, kept, out in zip(parts, train, held):
        assert np.array_equal(np.sort(np.concatenate([kept, out])), part)
        assert (np.diff(kept) > 0).all() and (np.diff(out) > 0).all()
        assert len(kept) >= min(len(part), 1)
        assert len(out) == min(int(fraction * len(part) + 0.5), max(len(part) - 1, 0))


def test_hold_back_of_a_client_depends_on_itself_only() -> None:
    parts = [np.arange(10), np.arange(10, 30)]
    both, alone = hold_back(parts, 0.3, 5)[1], hold_back([np.arange(4), parts[1]], 0.3, 5)[1]
    assert np.array_equal(both[1], alone[1])
    assert not np.array_equal(both[1], hold_back(parts, 0.3, 6)[1][1])
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="client_test_fraction"):
            hold_back(parts, wrong, 0)


def changed(data: FederatedData, **what: object) -> str:
    return dataclasses.replace(data, **what).fingerprint()  # type: ignore[arg-type]


def test_fingerprint_sees_every_field() -> None:
    data = from_pairs(pairs([4, 3]), test=of_others(2))
    same = from_pairs(pairs([4, 3]), test=of_others(2))
    assert data.fingerprint() == same.fingerprint() and len(data.fingerprint()) == 64
    moved = (np.arange(3), np.arange(3, 7))
    touched = data.inputs.clone()
    touched[0, 0, 0] += 1e-6
    others = {
        changed(data, parts=moved), changed(data, held_back=(np.array([1]), np.array([], dtype=np.int64))),
        changed(data, inputs=touched), changed(data, targets=data.targets.flip(0)), changed(data, classes=4),
        changed(data, test_inputs=None, test_targets=None), changed(data, name="x"),
    }  # fmt: skip
    assert len(others) == 7 and data.fingerprint() not in others


def test_a_recipe_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match=r"^recipe: found NoneType; allowed: a packaged name, a path"):
        fedflat.run(None)  # type: ignore[arg-type]
