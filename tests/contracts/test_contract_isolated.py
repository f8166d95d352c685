"""A user's pieces run on clients' data as recorded tensor operations: their own code never sees a number of it."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import clients, module, recipe, weights
from torch import Tensor

import fedflat
from fedflat.core.checks import InputError
from fedflat.core.params import layout_of
from fedflat.core.types import Algorithm, ClientState, ClientView, Local, Phase
from fedflat.engine.isolated import Isolated, IsolatedRule, Refused, isolated, pieces_of

LAYOUT, LOCAL = layout_of(module()), Local(2, 5, 0.1)
SEEN: list[Tensor] = []
KEPT = torch.ones(LAYOUT.size)
_wave = torch.sin


def rule(body: Callable[[Tensor, Tensor, ClientView], Tensor]) -> Algorithm:
    """A method whose rule changes the gradient by ``body(gradient, weights, view)``."""
    return Algorithm("own", phases=(Phase(rule=lambda g, view: lambda w: body(g(w), w, view)),))


def hides(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
    SEEN.append(w)
    return g


def unwraps(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
    return g + torch._C._functorch.get_unwrapped(w).mean(0)  # type: ignore[attr-defined]


def unwraps_one(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
    """Only the last client's row reaches the others, and only the second's."""
    inside = torch._C._functorch  # type: ignore[attr-defined]
    rows, level = inside.get_unwrapped(w), inside.maybe_get_level(w)
    return g + inside._add_batch_dim(torch.cat([rows[:1] * 0, rows[-1:], rows[2:] * 0]), 0, level)


def large(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
    return g * (torch._C._functorch.get_unwrapped(w).abs() > 50).any().float()  # type: ignore[attr-defined]


def adds_up(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
    KEPT.add_(1)
    return g + KEPT


REFUSED: dict[str, tuple[Any, str]] = {
    "branch": (lambda g, w, view: g if w.sum() > 0 else -g, "branches on a client's numbers"),
    "item": (lambda g, w, view: g * w.norm().item(), "reads a client's numbers into Python"),
    "array": (lambda g, w, view: g * float(w.numpy().sum()), "reads a client's numbers into Python"),
    "list": (lambda g, w, view: g * len(w.tolist()), "reads a client's numbers into Python"),
    "torch's generator": (lambda g, w, view: g + torch.randn_like(w), "draws random numbers"),
    "numpy's generator": (lambda g, w, view: g * np.random.rand(), "draws from a global generator"),  # noqa: NPY002
    "its own generator": (lambda g, w, view: g * view.generator.random(), "draws from view.generator"),
    "the block": (unwraps, "mixes the clients of a block"),
    "one of the block": (unwraps_one, "mixes the clients of a block"),
    "large numbers of the block": (large, "mixes the clients of a block"),
    "no finite numbers": (lambda g, w, view: g * torch.histc(w, 4).max(), "fails on some numbers"),
    "later": (lambda g, w, view: unwraps(g, w, view) if view.lr > 0.1 else g, "mixes the clients of a block"),
    "a counter": (adds_up, "writes into a tensor that it was given or keeps"),
    "a memory": (lambda g, w, view: g + KEPT.add_(w), "cannot run under torch.func.vmap"),
    "its input": (lambda g, w, view: g + w.mul_(2), "writes into a tensor that it was given or keeps"),
    "data": (lambda g, w, view: g + w.data, "cannot run under torch.func.vmap"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_follow_the_numbers_is_refused_by_name(name: str) -> None:
    body, words = REFUSED[name]
    with pytest.raises(Refused, match=rf"algorithm\.phases\[0\]\.rule: rule\.<lambda> {words}"):
        made = isolated(rule(body), LAYOUT, LOCAL).phases[0].rule
        made(lambda at: at, ClientView(start=KEPT, clip=1.0, steps=2, lr=0.2))(KEPT)  # type: ignore[misc]


def trained(method: Algorithm, backend: str, others: float = 1.0) -> Tensor:
    """The released model; ``others`` multiplies everybody's data but the first client's."""
    pairs = [(x * (others if place else 1.0), y) for place, (x, y) in enumerate(clients())]
    changes = {"engine": {"backend": backend, "block": 3 if backend == "vectorized" else None}}
    found = fedflat.run(recipe("dp-fedavg", changes), module(), pairs, algorithm=method)
    return weights(found.model)


def sharp(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
    return g + 0.1 * (w - view.start) + 0.5 * view.lr * _wave(w) * g.norm().clamp(max=1.0)


OWN = Algorithm(
    "own", phases=(Phase(rule=lambda g, view: lambda w: g(w + 0.1 * sharp(g(w), w, view)) * view.shares(3).max()),),
    transforms=(lambda update, view: update * (1 - 0.1 * view.gradient().sign()) / view.examples().sqrt(),),
    client_state=(ClientState("kept", lambda sent, view: 0.5 * view.state["kept"] + sent),),
)  # fmt: skip


@pytest.mark.usefixtures("noise_of_any_engine")
def test_blocks_of_a_users_method_are_one_client_after_the_other_up_to_rounding() -> None:
    torch.testing.assert_close(trained(OWN, "vectorized"), trained(OWN, "sequential"), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("noise_of_any_engine")
def test_a_users_linear_algebra_runs_on_factors() -> None:
    method = replace(rule(lambda g, w, view: g + 0.1 * (w - view.start) / g.norm()), transforms=OWN.transforms)
    torch.testing.assert_close(trained(method, "lowrank"), trained(method, "sequential"), rtol=1e-4, atol=1e-6)


def test_a_recording_is_for_any_number_of_clients_unless_its_steps_tell_it() -> None:
    calls = itertools.count()

    def longer(g: Tensor, w: Tensor, view: ClientView) -> Tensor:
        return g if next(calls) % 2 else g + w

    for body, rows in (
        (lambda g, w, view: g / g.norm(), 0),
        (lambda g, w, view: g * float(next(calls)), 5),
        (longer, 5),
    ):
        found = IsolatedRule(rule(body).phases[0].rule, "rule")
        view = ClientView(start=torch.zeros(5, 4), clip=1.0, steps=1, lr=0.1)
        assert found(lambda at: at, view)(torch.ones(5, 4)).shape == (5, 4)
        assert [made.rows for made in found._recordings.values()] == [rows]


class Ruled(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor) -> Tensor:  # type: ignore[override]
        return w / w.nan_to_num().abs().max().clamp_min(1e9)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, dims: Any, w: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
        return Ruled.apply(w), dims[0]  # type: ignore[no-untyped-call]


def test_a_vmap_rule_of_a_users_own_trains_one_by_one() -> None:
    """It sees the whole block, and the trial's numbers need not show it."""
    with pytest.raises(InputError, match="Ruled, which has a vmap rule of its own"):
        trained(Algorithm("own", transforms=(lambda update, view: Ruled.apply(update),)), "vectorized")


@torch.library.custom_op("fedflat_tests::remembers", mutates_args=())
def remembers(update: Tensor) -> Tensor:
    SEEN.append(update.clone())
    return update.clone()


def test_an_operation_of_a_users_own_is_not_recorded() -> None:
    """Its Python would run on clients' numbers; one by one, the watch sees what it keeps, by whatever name it is."""
    SEEN.clear()
    for transform in (lambda u, view: remembers(u), lambda u, view: torch.ops.fedflat_tests.remembers(u)):
        own = Algorithm("own", transforms=(transform,))
        with pytest.raises(InputError, match="calls an operation that is not torch's own"):
            trained(own, "vectorized")
        with pytest.raises(InputError, match=r"SEEN.* was changed by a client's training"):
            trained(own, "sequential")


def plain(w: Tensor) -> Tensor:
    """All rows of what escaped from a block."""
    inside = torch._C._functorch  # type: ignore[attr-defined]
    return inside.get_unwrapped(w) if inside.is_batchedtensor(w) else w


def test_what_escapes_is_made_up() -> None:
    found = []
    for others in (1.0, 3.0):
        SEEN.clear()
        found.append((trained(rule(hides), "vectorized", others), [plain(w) for w in SEEN]))
    (one, first), (other, again) = found
    assert not torch.equal(one, other)
    assert len(first) == len(again) and all(map(torch.equal, first, again)), "the same whatever the clients have"


def test_the_twin_that_runs_on_clients_numbers_lets_them_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.backends.choose.isolated", lambda algorithm, *form: algorithm)
    kept = []
    for others in (1.0, 3.0):
        SEEN.clear()
        trained(rule(hides), "vectorized", others)
        kept.append([w.clone() for w in SEEN])
    assert not all(map(torch.equal, *kept))


def test_a_block_is_refused_for_what_cannot_be_recorded_and_one_line_says_why() -> None:
    method = rule(REFUSED["branch"][0])
    with pytest.warns(UserWarning, match="branches on a client's numbers, so clients train one by one"):
        trained(method, "auto")
    with pytest.warns(UserWarning), pytest.raises(InputError, match="found vectorized with a piece that trains"):
        trained(method, "vectorized")
    with pytest.raises(InputError, match=r"found lowrank with clients' state"):
        trained(OWN, "lowrank")
    with pytest.raises(InputError, match=r"found lowrank with a piece of one's own that needs its vectors' entries"):
        trained(rule(lambda g, w, view: g * g.sign()), "lowrank")


def test_packaged_pieces_stay_as_they_are() -> None:
    made = isolated(fedflat.algorithms.ALGORITHMS["dp-fedsam"](), LAYOUT, LOCAL)
    assert not any(isinstance(piece, Isolated) for _, piece in pieces_of(made))
