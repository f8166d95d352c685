"""Gradient passes and bytes of a round, for the named methods."""

import pytest

from fedflat.algorithms import ALGORITHMS
from fedflat.landscape.statements import Cost, cost_of

PASSES = {"dp-fedavg": 1, "dp-fedsam": 2, "dp-fedpgn": 1, "dp-fedavg-blur": 1, "dp-fedsam-blur": 2, "dp-fednsam": 2}


@pytest.mark.parametrize(("name", "passes"), PASSES.items())
def test_passes_of_a_step_are_those_of_002_table_i(name: str, passes: int) -> None:
    found = cost_of(ALGORITHMS[name](), 100, 10)
    assert found.per_step == passes and found.passes == 10 * passes


def test_what_is_sent_and_received() -> None:
    plain = cost_of(ALGORITHMS["dp-fedavg"](), 100, 10)
    assert plain == Cost(1, 10, 400, 400)
    assert cost_of(ALGORITHMS["dp-fedpgn"](), 100, 10).down == 800  # the direction is broadcast
    assert cost_of(ALGORITHMS["dp-scaffold"](), 100, 10).up == 800  # two vectors in a message
    assert cost_of(ALGORITHMS["fed-smp-randk"](), 100, 10).down == 413  # and a bit for each coordinate of the mask


def test_full_gradients_and_two_phases() -> None:
    assert cost_of(ALGORITHMS["dp-fedavg-lus"](), 100, 10, batches=3).passes == 13
    found = cost_of(ALGORITHMS["dp2-fedsam"](head_steps=4), 100, 10)
    assert found.per_step == 2 and found.passes == 4 + 20


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_named_method_has_a_cost(name: str) -> None:
    least = 1 if name == "class-statistics" else 10  # which takes no local step
    assert cost_of(ALGORITHMS[name](), 100, 10).passes >= least
