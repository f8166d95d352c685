"""A method's pieces are tried before training: what breaks the guarantee, or trains for nothing, is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat import Algorithm, ClientView, GradientFn, InputError, Phase
from fedflat.algorithms import ALGORITHMS
from fedflat.assembly.piece_check import try_pieces
from fedflat.core.params import layout_of
from fedflat.core.rng import seeded_torch
from fedflat.core.types import AVERAGE, ServerView
from fedflat.engine.isolated import packaged, pieces_of

NETWORK = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
BIG = nn.Sequential(nn.Linear(90, 40), nn.ReLU(), nn.Linear(40, 3))


@pytest.mark.parametrize("network", [NETWORK, BIG], ids=["whole", "shortened"])
@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_packaged_method_passes(method: str, network: nn.Module) -> None:
    made = ALGORITHMS[method]()
    assert try_pieces(made, layout_of(network, made.head)) is False


class Remembers:
    """Adds the last client's update."""

    def __init__(self) -> None:
        self.last: Tensor | float = 0.0

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        found, self.last = update + self.last, update.mean()
        return found


def half(update: Tensor, view: ClientView) -> Tensor:
    return update[..., ::2]


def wide(update: Tensor, view: ClientView) -> Tensor:
    return update.double()


def looks(update: Tensor, view: ClientView) -> Tensor:
    return update[0] * torch.dot(update, update)


def listed(update: Tensor, view: ClientView) -> Any:
    return update.tolist()


def pythons(update: Tensor, view: ClientView) -> Tensor:
    import random

    return update * random.random()


def short_rule(gradient: GradientFn, view: ClientView) -> GradientFn:
    return lambda w: gradient(w)[..., :-1]


def short_mask(view: Any) -> Tensor:
    return torch.ones(view.shared.numel() - 1, dtype=torch.bool)


def float_mask(view: Any) -> Tensor:
    return torch.ones(view.shared.numel())


class ShortStep:
    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {}

    def __call__(self, mean: Tensor, view: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return mean[1:], {}


TRANSFORMS: list[tuple[Callable[..., Any], str]] = [
    (Remembers(), r"algorithm.transforms\[0\] \(Remembers\): found a piece whose result for a client changes"),
    (half, r"\(half\): found shape \(\d+,\) returned for \(\d+,\); allowed: the same shape"),
    (wide, r"\(wide\): found type torch.float64 returned for torch.float32"),
    (looks, r"\(looks\): found shape \(\) returned"), (listed, r"\(listed\): found list returned"),
    (pythons, r"\(pythons\): found a draw from a global generator"),
]  # fmt: skip
REST: list[tuple[Algorithm, str]] = [
    (Algorithm("own", phases=(Phase(rule=short_rule),)), r"phases\[0\].rule \(short_rule\): found shape"),
    (Algorithm("own", phases=(Phase(rule=short_mask),)), r"allowed: a piece that is called with \(gradient, view\)"),
    (Algorithm("own", finetune=Phase(rule=short_rule)), r"algorithm.finetune.rule \(short_rule\): found shape"),
    (Algorithm("own", mask=short_mask), r"algorithm.mask \(short_mask\): found shape"),
    (Algorithm("own", mask=float_mask), r"algorithm.mask \(float_mask\): found type torch.float32"),
    (Algorithm("own", server=(ShortStep(),)), r"algorithm.server\[0\] \(ShortStep\): found shape"),
]


@pytest.mark.parametrize("network", [NETWORK, BIG], ids=["whole", "shortened"])
@pytest.mark.parametrize(("piece", "words"), TRANSFORMS, ids=lambda v: getattr(v, "__name__", "") or None)
def test_a_transform_that_is_refused(piece: Any, words: str, network: nn.Module) -> None:
    with pytest.raises(InputError, match=words):
        try_pieces(Algorithm("own", transforms=(piece,)), layout_of(network, None))


@pytest.mark.parametrize(("method", "words"), REST)
def test_another_piece_that_is_refused(method: Algorithm, words: str) -> None:
    with pytest.raises(InputError, match=words):
        try_pieces(method, layout_of(NETWORK, None))


def test_what_is_not_finite_is_no_error_and_a_draw_is_told() -> None:
    def nothing(update: Tensor, view: ClientView) -> Tensor:
        return update / 0

    def drops(update: Tensor, view: ClientView) -> Tensor:
        return update * (torch.rand_like(update) > 0.5)

    layout = layout_of(NETWORK, None)
    assert try_pieces(Algorithm("own", transforms=(nothing,)), layout) is False
    assert try_pieces(Algorithm("own", transforms=(drops,)), layout) is True


def test_a_piece_made_for_one_length_is_tried_at_that_length() -> None:
    layout = layout_of(BIG, None)
    fixed = torch.rand(layout.dimension)
    assert try_pieces(Algorithm("own", transforms=(lambda update, view: update * fixed,)), layout) is False


@pytest.mark.parametrize("backend", ["sequential", "vectorized", "auto"])
def test_a_run_stops_before_training(backend: str) -> None:
    recipe = {
        "rounds": 1, "algorithm": "dp-fedavg", "privacy": {"noise_multiplier": 1.0}, "cohort": {"size": 2},
        "engine": {"backend": backend},
    }  # fmt: skip
    clients = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
    with pytest.raises(InputError, match=r"algorithm.transforms\[0\] \(half\)"):
        fedflat.run(recipe, model=NETWORK, clients=clients, algorithm=Algorithm("own", transforms=(half,)))


def _wakes(update: Tensor) -> bool:
    return bool(30 < float(update.abs().max()) < 1e3)  # between what the trial tries


def mixes_late(update: Tensor, view: ClientView) -> Tensor:
    return update.mean(0).expand_as(update).clone() if update.dim() == 2 and _wakes(update) else update


def column_late(update: Tensor, view: ClientView) -> Tensor:
    return update[..., None] if _wakes(update) else update


class RemembersLate:
    def __init__(self) -> None:
        self.seen = False

    def __call__(self, update: Tensor, view: ClientView) -> Tensor:
        self.seen = self.seen or _wakes(update)
        return -update if self.seen else update


def _release(transform: Any, backend: str, *, present: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(4, 6, generator=generator), torch.arange(4) % 3) for _ in range(4)]
    pairs[0] = (pairs[0][0] * 1e3, pairs[0][1]) if present else (torch.zeros(0, 6), torch.zeros(0).long())
    recipe = {
        "rounds": 1, "algorithm": "dp-fedavg", "local": {"steps": 1, "batch_size": 4, "lr": 0.3},
        "privacy": {"clip": 0.05, "noise_multiplier": 0, "delta": 1e-5}, "cohort": {"size": 4},
        "engine": {"backend": backend, "block": 4} if backend != "sequential" else {"backend": backend},
    }  # fmt: skip
    method = Algorithm("own", transforms=(transform,))
    found = fedflat.run(recipe, model=nn.Sequential(nn.Linear(6, 3)), clients=pairs, algorithm=method).model
    return torch.cat([p.detach().flatten().double() for p in found.parameters()])


def _moved(transform: Any, backend: str) -> float:
    with seeded_torch(0, "weights"):
        before = _release(transform, backend, present=False)
    with seeded_torch(0, "weights"):
        return float(4 * (_release(transform, backend, present=True) - before).norm() / 0.05)


def test_a_piece_that_mixes_rows_only_for_some_data_meets_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _moved(mixes_late, "vectorized") <= 1.002
    monkeypatch.setattr("fedflat.backends.choose.isolated", lambda algorithm, *form: algorithm)  # the twin's block
    assert _moved(mixes_late, "vectorized") > 1.1


@pytest.mark.filterwarnings("ignore:algorithm")
def test_a_piece_that_wakes_for_some_data_is_refused_in_its_round() -> None:
    with pytest.raises(InputError, match=r"algorithm: .*seen was changed by a client's training"):
        _moved(RemembersLate(), "sequential")
    with pytest.raises(InputError, match=r"algorithm.transforms\[0\]: found .* returned"):
        _moved(column_late, "sequential")


def test_packaged_pieces_are_known() -> None:
    for method in (make() for make in ALGORITHMS.values()):
        assert packaged(*(piece for _, piece in pieces_of(method)), method.finetune and method.finetune.rule)


def test_what_a_methods_author_needs_is_at_hand() -> None:
    views = ("ClientView", "ServerView", "MaskView", "MeanView")
    for name in (*views, "GradientRule", "Transform", "ServerStep", "Optimizer"):
        assert name in dir(fedflat) and getattr(fedflat, name) is not None


class Sum:
    """A server step whose memory is where no checkpoint sees it."""

    def __init__(self) -> None:
        self.m: Any = 0.0

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        self.m = self.m + mean
        return self.m, {}


@dataclass(frozen=True)
class Kept:
    """A server step with a slot; its memory is there, as it should be."""

    name: str = "sum"
    broadcast: Any = ()
    size: int = 0
    reads: str = ""

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {self.name: torch.zeros(self.size) if self.size else torch.zeros_like(shared)}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        return mean, {self.name: view.slots[self.reads or self.name] + (0 if self.size else mean)}


def test_a_server_that_remembers_outside_its_slots_is_refused() -> None:
    """A resumed run would differ from one that was not stopped."""
    with pytest.raises(InputError, match=r"algorithm.server\[0\] \(Sum\): found another result for the same mean"):
        try_pieces(Algorithm("mine", server=(Sum(),)), layout_of(NETWORK, None))
    hidden = Sum()

    def optimizer(lr: float, view: Any) -> Any:
        return lambda shared, mean, slots: (shared + hidden(mean, view)[0], {})

    def counting(lr: float, view: Any) -> Any:
        """Remembers where it is made, once a round, not where it is called."""
        hidden.m = hidden.m + lr
        rate = hidden.m
        return lambda shared, mean, slots: (shared + rate * mean, {})

    for made in (optimizer, counting):
        with pytest.raises(InputError, match=r"algorithm.optimizer .*: found another result for the same mean"):
            try_pieces(Algorithm("mine", optimizer=made), layout_of(NETWORK, None))
    try_pieces(Algorithm("mine", server=(Kept(), Kept("other", ("other",)))), layout_of(NETWORK, None))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((Kept(), Kept()), "found the slot 'sum' twice"),
        ((Kept(AVERAGE),), "found the slot 'released average' twice"),
        ((Kept("sum", "sum"),), r"found broadcast = 'sum'; allowed: a tuple of names: \('sum',\), with the comma"),
        ((Kept(reads="total"),), r"found KeyError in a trial \('total'\); allowed: a step that reads its own slots"),
        ((Kept("sum", ("sum",), 3),), r"found the broadcast slot 'sum' of shape \(3,\)"),
    ],
)
def test_slots_have_names_of_their_own_and_what_clients_receive_is_a_vector(steps: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        try_pieces(Algorithm("mine", server=steps), layout_of(NETWORK, None))


@pytest.mark.parametrize(("made", "words"), [
    *(({name: Kept()}, f"{name}: found .*; allowed: a tuple") for name in ("phases", "transforms", "server")),
    ({"client_state": Kept()}, "a tuple"), ({"client_state": ("e",)}, r"state: found .*; allowed: ClientState\(name, "),
    ({"phases": (Kept(),)}, "phases: found Kept; allowed: Phase"), ({"phases": ()}, "phases: found none of a shared"),
    ({"phases": (Phase(part="persnal"),)}, "part: found persnal; .*Did you mean personal"),  # type: ignore[arg-type]
])  # fmt: skip
def test_a_forgotten_comma_and_what_is_no_phase_or_state_is_one_line(made: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Algorithm("mine", **made)
