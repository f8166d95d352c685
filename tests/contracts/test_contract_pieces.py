"""No piece of a user's own carries one client to another: by what all read, a factor, or a hidden write."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_federation import clients, recipe, weights
from torch import Tensor, nn

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, ClientState, Phase, ServerView
from fedflat.pieces.clipping import MethodScale

C = 0.05


def module() -> nn.Module:
    """Without an activation that bounds a gradient, so that one client's update is far longer than the others'."""
    with seeded_torch(3, "weights"):
        return nn.Sequential(nn.Linear(6, 3))


BACKENDS = ("sequential", "vectorized", "lowrank")
METHODS: dict[str, Callable[[], Algorithm]] = {}


def method(make: Callable[[], Algorithm]) -> Callable[[], Algorithm]:
    METHODS[make.__name__] = make
    return make


class Told:
    """A server step that broadcasts a vector and adds it to the mean."""

    broadcast = ("told",)

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {"told": torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        return mean + view.slots["told"], {}


def wrote(view: Any, vector: Tensor) -> Tensor:
    """A write that the trial of pieces, which takes two steps, does not see."""
    if view.steps == 3:
        view.broadcast["told"].add_(vector)
    return vector


@method
def rule_writes_into_the_broadcast() -> Algorithm:
    def rule(gradient: Any, view: Any) -> Any:
        return lambda w: wrote(view, gradient(w))

    return Algorithm("own", phases=(Phase(rule=rule),), server=(Told(),))


@method
def transform_writes_into_the_broadcast() -> Algorithm:
    return Algorithm("own", transforms=(lambda update, view: wrote(view, update),), server=(Told(),))


@method
def state_writes_into_the_broadcast() -> Algorithm:
    following = ClientState("kept", lambda sent, view: wrote(view, 1e3 * sent))
    return Algorithm("own", client_state=(following,), server=(Told(),))


@method
def transform_hides_what_it_saw() -> Algorithm:
    seen = torch.zeros(1)

    def transform(update: Tensor, view: Any) -> Tensor:
        if view.steps != 3:
            return update
        found = update * (1 - 2 * (seen > 0).float())
        seen.data.add_((update.norm() > 50).float())  # no counter of writes moves
        return found

    return Algorithm("own", transforms=(transform,))


@method
def factor_of_the_whole_block() -> Algorithm:
    return Algorithm("own", scale=lambda norms, c: c / norms.max().expand_as(norms))


@method
def factor_that_shortens_the_norms() -> Algorithm:
    return Algorithm("own", scale=lambda norms, c: torch.ones_like(norms.fill_(1e-12)))


@method
def factor_that_remembers() -> Algorithm:
    seen: list[float] = []

    def scale(norms: Tensor, c: float) -> Tensor:
        seen.extend(norms[norms > 50].tolist())
        return 0 * norms if seen else c / norms

    return Algorithm("own", scale=scale)


def released(make: Callable[[], Algorithm], backend: str, present: bool) -> Tensor:
    data = clients()
    x, y = data[0]
    data[0] = (x * 1e3, y) if present else (x[:0], y[:0])
    changes = {
        "rounds": 1, "local": {"steps": 3, "batch_size": 3, "lr": 0.3}, "cohort": {"size": len(data)},
        "privacy": {"clip": C, "noise_multiplier": 0.0}, "engine": {"backend": backend},
    }  # fmt: skip
    found = fedflat.run(recipe("dp-fedavg", changes), module(), data, algorithm=make()).model
    return weights(found).double()


def movement(make: Callable[[], Algorithm], backend: str) -> float:
    """How far one client moves a release, over C; 0 where the run is refused."""
    try:
        apart = released(make, backend, present=True) - released(make, backend, present=False)
    except InputError as error:
        assert str(error).startswith(("algorithm", "engine.backend"))
        return 0.0
    return float(apart.norm()) * len(clients()) / C


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_no_piece_carries_a_client_to_another(name: str, backend: str) -> None:
    assert movement(METHODS[name], backend) <= 1.002


def _as_it_was(self: MethodScale, norms: Tensor, threshold: float) -> Tensor:
    return self.rule(norms, threshold).to(norms)


TWINS: dict[str, tuple[Any, ...]] = {
    "rule_writes_into_the_broadcast": (Broadcast, "for_one_client", lambda self: self),
    "transform_writes_into_the_broadcast": (Broadcast, "for_one_client", lambda self: self),
    "state_writes_into_the_broadcast": (Broadcast, "for_one_client", lambda self: self),
    "transform_hides_what_it_saw": ("fedflat.backends.in_process.refuse_change", lambda *_, **how: None),
    "factor_of_the_whole_block": (MethodScale, "_asked", _as_it_was),
    "factor_that_shortens_the_norms": (MethodScale, "_asked", _as_it_was),
    "factor_that_remembers": (MethodScale, "_asked", _as_it_was),
}


@pytest.mark.parametrize("name", METHODS)
def test_as_it_was_it_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*TWINS[name])
    monkeypatch.setattr("fedflat.assembly.piece_check._try_scale", lambda rule: None)
    assert movement(METHODS[name], "vectorized" if name.startswith("factor") else "sequential") > 1.002


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lambda norms, c: norms.sum(), "shape"),
        (lambda norms, c: c, "float"),
        (lambda norms, c: -c / norms, "no factor above 0"),
        (lambda norms, c: c * torch.rand(1), "random"),
        (lambda norms, c: norms / math.inf if norms else 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_factor_that_is_none_is_refused(rule: Any, found: str) -> None:
    with pytest.raises(InputError, match=f"algorithm.scale.*{found}"):
        released(lambda: Algorithm("own", scale=rule), "vectorized", present=True)


def test_a_state_is_moved_by_what_was_sent_alone() -> None:
    """A rule that writes into its own state changes no number that is kept."""

    def rule(gradient: Any, view: Any) -> Any:
        def found(w: Tensor) -> Tensor:
            view.state["kept"].add_(1.0)
            return gradient(w)

        return found

    def kept(rule: Any) -> Tensor:
        state = ClientState("kept", lambda sent, view: view.state["kept"] + sent)
        method = Algorithm("own", phases=(Phase(rule=rule),), client_state=(state,))
        changes = {"rounds": 2, "cohort": {"size": 5}, "privacy": {"noise_multiplier": 0.0}}
        found = fedflat.run(recipe("dp-fedavg", changes), module(), clients(), algorithm=method).model
        return weights(found)

    assert torch.equal(kept(rule), kept(None))
