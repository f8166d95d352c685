"""Labelled public examples for a common top-k mask."""

import dataclasses

import numpy as np
import pytest
import torch

import fedflat
from fedflat.data.clients import from_pairs
from fedflat.data.sources import public_examples, public_training


def _federation() -> object:
    return from_pairs([(torch.randn(20, 4), torch.randint(3, (20,))) for _ in range(5)])


def test_held_out_examples_leave_the_clients() -> None:
    data = _federation()
    rest, public = public_training(data, "held-out", 0, dataset="digits")
    taken = public.parts[0]
    assert len(taken) == 5
    assert not set(taken) & set(np.concatenate(rest.parts))
    assert len(np.concatenate(rest.parts)) == 95
    assert np.array_equal(taken, public_training(data, "held-out", 0, dataset="digits")[1].parts[0])


def test_clients_given_in_python_are_never_made_public() -> None:
    with pytest.raises(fedflat.InputError, match="not public"):
        public_training(_federation(), "held-out", 0)


@pytest.mark.parametrize("source", ["held-out", "mine.csv"])
def test_clients_own_rows_are_never_made_public(source: str) -> None:
    """One row more of one client's would change which rows all others keep; the twin that calls them published does."""
    with pytest.raises(fedflat.InputError, match="not public"):
        public_training(_federation(), source, 0, "mine.csv", own=True)
    with pytest.raises(fedflat.InputError, match="not public"):
        public_examples(_federation(), source, 5, 0, "mine.csv", own=True)
    data = _federation()
    less = dataclasses.replace(data, parts=(data.parts[0][:-1], *data.parts[1:]))
    kept = [public_training(world, source, 0, "mine.csv")[0].parts for world in (data, less)]
    assert any(list(a) != list(b) for a, b in zip(kept[0][1:], kept[1][1:]))


def test_another_shape_is_refused() -> None:
    with pytest.raises(fedflat.InputError, match="of the same kind"):
        public_training(_federation(), "digits", 0)


def test_the_mask_follows_public_data() -> None:
    recipe = {
        "rounds": 2, "data": {"dataset": "digits", "clients": 20}, "model": "linear",
        "algorithm": {"name": "fed-smp-topk", "public": "held-out", "keep": 0.2},
        "local": {"steps": 3, "batch_size": 8}, "cohort": {"size": 10},
        "privacy": {"clip": 1.0, "noise_multiplier": 1.0},
    }  # fmt: skip
    first = fedflat.run(recipe)
    assert first.history[-1]["round"] == 1
    other = fedflat.run({**recipe, "algorithm": {"name": "fed-smp-topk", "keep": 0.2}})
    assert not torch.equal(*(next(r.model.parameters()) for r in (first, other)))
