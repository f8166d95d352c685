"""Define the values that travel through a round, and the protocols of the pieces an algorithm is made of.

Every client update is one flat vector of shape ``(d,)``; a block of n clients is ``(n, d)``. A piece works on the
last axis only, so the same piece serves one client, a block of clients and the server.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fedflat.core import rounding
from fedflat.core.checks import in_range, one_of, require, whole, wrong
from fedflat.core.factors import Factor
from fedflat.core.rng import NO_GENERATOR

Part = Literal["all", "shared", "personal"]

GradientFn = Callable[[Tensor], Tensor]
"""Weights ``(…, n)`` of the part being trained -> gradient of the minibatch loss there, same shape."""


@dataclass(frozen=True, kw_only=True)
class ClientView:
    """What a client's gradient rule, transform or state may read besides the numbers it is called with.

    steps, lr: the public K and η_t of the phase; for a transform or a state, of the phase that trained the shared part.
    broadcast: the server's named vectors ``(d,)`` that every client receives; none in a phase of the personal part.
    state: the client's own named vectors ``(…, d)`` before the round; none in a phase of the personal part.
    generator: the client's own randomness of the round, the same for every piece it runs, where clients train one at a
    time, as they do with pieces of a user's own. It follows the public seed, so it protects nothing.
    tensors: the slices of the flat vector in which each shared tensor lives; none in a phase of the personal part.

    For a gradient rule only, else None:
    start: weights ``(…, n)`` at which the local phase began (w^t for the shared part).
    clip: clipping threshold C of the round, in units of the update's L2 norm; ``inf`` if nothing is clipped.
    shares: K -> shares of the K classes ``(…, K)`` among the client's training examples, which the clip must follow.

    For a transform only, else None:
    gradient: () -> gradient ``(…, d)`` of the client's full local loss (no penalty, eval mode) at its final weights.
    examples: () -> the client's number of training examples ``(…, 1)``, which the clip must follow.
    """

    steps: int
    lr: float
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    generator: np.random.Generator = NO_GENERATOR
    tensors: tuple[slice, ...] = ()
    start: Tensor = None  # type: ignore[assignment]
    clip: float = None  # type: ignore[assignment]
    shares: Callable[[int], Tensor] = None  # type: ignore[assignment]
    gradient: Callable[[], Tensor] = None  # type: ignore[assignment]
    examples: Callable[[], Tensor] = None  # type: ignore[assignment]


GradientRule = Callable[[GradientFn, ClientView], GradientFn]
"""From a gradient function to a gradient function; rules compose (SAM over BLUR)."""


@dataclass(frozen=True)
class Phase:
    """One run of K local steps on one part of the weights. ``None`` means: as the recipe's ``local`` says."""

    part: Part = "all"
    rule: GradientRule | None = None
    steps: int | None = None
    lr: float | None = None
    momentum: float | None = None


Transform = Callable[[Tensor, ClientView], Tensor]
"""Update ``(…, d)`` -> message ``(…, d)``, on the client, before the clip; where a method's message consists of k
vectors, the last transform makes all of it, ``(…, k·d)``."""


@dataclass(frozen=True)
class ClientState:
    """A named vector ``(d,)`` that a client keeps between rounds, zero before it first takes part; it never leaves it.

    next: (what was sent, view) -> its new value ``(d,)``. What was sent is the message after the clip, times the very
    factor that multiplied it in the sum, float32 ``(k·d,)``; zero where the message was not finite.
    """

    name: str
    next: Callable[[Tensor, ClientView], Tensor]


@dataclass(frozen=True)
class MaskView:
    """What the server may use to draw a mask common to all clients: nothing that depends on this round's clients.

    shared, initial: w^t and w^0, ``(d,)``. generator: public randomness of the round.
    public_update: () -> an update ``(d,)`` trained on public data, or None when there is none.
    """

    shared: Tensor
    initial: Tensor
    generator: np.random.Generator
    public_update: Callable[[], Tensor] | None = None


CommonMask = Callable[[MaskView], Tensor]
"""-> boolean mask ``(d,)``; the update, the clip and the noise live where it is true."""


@dataclass(frozen=True)
class ServerView:
    """What server post-processing may read: released or public values only.

    slots: named vectors the server keeps between rounds (directions, optimiser moments, w^0).
    cohort, clients: m, by which the sum was divided, and M. Where each client keeps what it sent, the mean over all
    clients of what they keep moves by cohort/clients·mean.
    """

    round: int
    steps: int
    lr: float
    tensors: tuple[slice, ...]
    slots: Mapping[str, Tensor]
    cohort: float
    clients: int


class ServerStep(Protocol):
    """Post-processing of the noisy mean: spends nothing, keeps its memory in named slots.

    Where a method's message consists of k vectors, the first step takes the mean ``(k·d,)`` apart.
    """

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        """Return the slots before round 0, by name: by default zeros for what it broadcasts. shared: w^0 ``(d,)``."""
        return {name: torch.zeros_like(shared) for name in broadcast_by((self,))}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        """Noisy mean ``(d,)`` -> (processed mean ``(d,)``, changed slots)."""


def broadcast_by(pieces: Iterable[object]) -> tuple[str, ...]:
    """Return the slots that clients receive: those that server steps and optimisers name in ``broadcast``.

    Until such a slot is there, clients receive zeros.
    """
    return tuple(name for piece in pieces for name in getattr(piece, "broadcast", ()))


class Clip:
    """A clip bounds every message and *reports* the L2 bound it earns.

    by_norm: it asks nothing of a message but its norm (``scale``), so that messages need not be written out.
    moves: its threshold follows a noised count of the messages below it (``next``).
    """

    by_norm = False
    moves = False

    def bound(self, threshold: float) -> float:
        """Return the L2 norm no clipped message exceeds, given the round's threshold: the threshold itself."""
        return threshold

    def factors(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """Messages ``(n, d)`` -> (norms ``(n,)`` before the clip, factors ``(n,)`` or ``(n, L)`` to multiply by)."""
        raise NotImplementedError

    def scale(self, norms: Tensor, threshold: float) -> Tensor:
        """Norms ``(n,)`` float64 -> factors ``(n,)``, 0 where a norm is not finite."""
        raise NotImplementedError

    def next(self, threshold: float, noisy_bits: float, divisor: float) -> float:
        """C_{t+1} from the noisy centred count and the constant divisor m."""
        return threshold


@dataclass(frozen=True)
class Sampler:
    """How a cohort is chosen. Public facts are fields; the draw itself is secret.

    clients, size: M and m, the public divisor. maximum: the cap of a truncated law, None for any other.
    separation: two rounds of one client are at least so many apart, by a public rule.
    relation: add-remove, zero-out or replace-one, as the law earns it.

    Raises:
        InputError: unless 0 < size ≤ clients.
    """

    clients: int
    size: float

    name, maximum, separation = "", None, 1
    relation = "add-remove"

    def __post_init__(self) -> None:
        whole("clients", self.clients, 1)
        in_range("cohort.size", self.size, 0, self.clients, open_low=True)

    @property
    def q(self) -> float:
        """The share of the population in a cohort, on average."""
        return self.size / self.clients

    def select_at(self, round: int, generator: np.random.Generator) -> np.ndarray:
        """Return the cohort of a round: int64 ids, ascending, possibly none. generator: the round's secret stream."""
        raise NotImplementedError

    def event(self, multiplier: float) -> Any:
        """dp-accounting's event of one round, with noise ``multiplier`` × the sensitivity of ``relation``."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(multiplier)


@dataclass(frozen=True)
class Local:
    """Local training, the same public numbers for every client (recipe section ``local``).

    steps: K minibatch steps. lr: η of round 0; round t uses lr·lr_decay^t. momentum: μ, restarting at 0 each round.
    weight_decay and max_grad_norm act on the loss gradient before any mixing.
    optimizer: sgd or adam. schedule: constant, cosine or linear, over the planned ``rounds``; warmup: rounds.
    epochs: None, but for published procedures, in which each client's own steps follow its data size (item 6).
    """

    steps: int
    batch_size: int
    lr: float
    momentum: float = 0.5
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    epochs: int | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0
    rounds: int = 1

    def of(self, examples: int) -> "Local":
        """Return the training of a client with so many examples: the same for everybody, unless ``epochs`` is set."""
        steps = self.steps if self.epochs is None else self.epochs * math.ceil(examples / self.batch_size)
        return replace(self, steps=steps)

    def rate(self, round: int) -> float:
        """Learning rate factor of a round: lr_decay^t, times the schedule's and the warm-up's."""
        # A run that is made longer stays at the schedule's end.
        share = min(1.0, round / self.rounds)
        shape = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share}[self.schedule]
        return float(self.lr_decay**round) * shape * min(1.0, (round + 1) / (self.warmup + 1))


@dataclass(frozen=True)
class MeanView:
    """What a server optimiser may know of the noise in the round's mean: public numbers only.

    std: of the Gaussian noise in each coordinate of the mean, σC/m, of correlated noise this round's; 0 without noise.
    It is that of the mean as it is released: a server step may have changed it since, and outside a common mask there
    is none. Where clients bring the noise (trust distributed, local), that of the expected cohort m: the realised one
    is secret.
    clip: C, the L2 bound of the round's messages (``inf`` if nothing is clipped). divisor: m.
    """

    std: float
    clip: float
    divisor: float


Optimizer = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""(w^t, processed mean, slots) -> (w^{t+1}, changed slots)."""

Average = Callable[[int, Tensor, Tensor | None], Tensor | None]
"""(rounds done, w^t, average so far) -> the average now, None before it begins."""
AVERAGE = "released average"
"""The slot that the average is kept in."""

OptimizerFactory = Callable[[float, MeanView], Optimizer]
"""(``server.lr``, what is public of the round's noise) -> the server optimiser of that round."""


MOMENTUM = 0.5
"""Local momentum where neither the recipe nor the method names one."""


@dataclass(frozen=True)
class Algorithm:
    """A method as a frozen composition of pieces (../algorithms.py holds the named ones).

    phases: the local phases in order. transforms: applied to the shared update in order, before the clip.
    mask: common mask drawn by the server. server: post-processing of the noisy mean, before the server optimiser.
    head: parameter-name patterns that stay with the client; an empty tuple means "the last linear layer".
    finetune: a phase each client runs on the global model before it is evaluated (never sent).
    client_state: vectors that each client keeps between rounds.
    vectors: k, of how many vectors ``(d,)`` a message consists; they are clipped as one, and noise is on all of them.
    scale: the method's own factor in place of the clip's min(1, C/‖message‖): (norms ``(n,)`` float64, C) -> factors
    ``(n,)``. Whatever it says, no message is longer than C = ``privacy.clip``, one number, after it.
    zero_head: the last linear layer starts at zero.
    private: clip and noise. False only for the non-private twins.
    momentum: local momentum when the recipe gives none; None: ``MOMENTUM``, with a warning for a method of one's own.
    fixed_momentum: a reason, with which another value is refused.
    optimizer: a server optimiser of the method's own, in place of the recipe's; server_lr: ``server.lr`` for it when
    the recipe gives none.
    step: for methods whose message is no update (ae-dpfl): see methods/votes.py.
    """

    name: str
    phases: tuple[Phase, ...] = (Phase(),)
    transforms: tuple[Transform, ...] = ()
    mask: CommonMask | None = None
    server: tuple[ServerStep, ...] = ()
    head: tuple[str, ...] | None = None
    finetune: Phase | None = None
    client_state: tuple[ClientState, ...] = ()
    vectors: int = 1
    scale: Callable[[Tensor, float], Tensor] | None = None
    zero_head: bool = False
    private: bool = True
    momentum: float | None = None
    fixed_momentum: str = ""
    optimizer: OptimizerFactory | None = None
    server_lr: float = 1.0
    kind: Literal["update", "ddgauss", "votes"] = "update"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("phases", "transforms", "server", "client_state"):
            if not isinstance(pieces := getattr(self, name), (tuple, list)):
                raise wrong(f"algorithm.{name}", type(pieces).__name__, "a tuple: (piece,), with the comma, for one")
        for name, phase in [*(("phases", phase) for phase in self.phases), ("finetune", self.finetune or Phase())]:
            require(isinstance(phase, Phase), f"algorithm.{name}", type(phase).__name__, "Phase(…)")
            one_of(f"algorithm.{name}: part", phase.part, get_args(Part))
        parts = {phase.part for phase in self.phases}
        require(bool(parts - {"personal"}), "algorithm.phases", "none of a shared part", "a Phase of all or shared")
        for state in self.client_state:
            if not isinstance(state, ClientState) or not callable(state.next):
                raise wrong("algorithm.client_state", repr(state), "ClientState(name, function)")

    @property
    def shared_phase(self) -> Phase:
        """The phase that moves the shared part: its K and η enter PGN's direction."""
        return next(p for p in reversed(self.phases) if p.part in ("all", "shared"))


Factory = Callable[..., Algorithm]
"""Makes a method from the recipe's ``algorithm`` keys."""


@dataclass(frozen=True)
class Broadcast:
    """All a client receives at the start of a round.

    vectors: the server's slots ``(d,)`` that its steps and its optimiser broadcast, by name.
    draw: number of the cohort draw; the round's own, unless rounds are made of several (ae-dpfl).
    """

    round: int
    shared: Tensor
    clip: float
    rate: float
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    draw: int = 0

    def for_one_client(self) -> "Broadcast":
        """Return a copy for one client: what a piece writes into its vectors, or into the map of them, reaches neither
        the next client nor the server.
        """
        return replace(self, vectors={name: vector.clone() for name, vector in self.vectors.items()})


@dataclass(frozen=True)
class RoundState:
    """The server between rounds. Everything here has been released (or is public).

    shared: w^t, from which training goes on. released: what a run gives back after round t, which is w^t or, with
    ``server.average``, an average of iterates.
    """

    round: int
    shared: Tensor
    clip: float
    slots: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def released(self) -> Tensor:
        return self.slots.get(AVERAGE, self.shared)


@dataclass(frozen=True)
class Aggregate:
    """The clipped sum of a cohort's messages, and what is private about it.

    total: ``(d,)`` float64-accumulated sum of clipped messages. bits: Σ(b_i − ½), b_i = 1[‖Δ_i‖ ≤ C] (adaptive clip).
    norms: L2 norm of each message before the clip, in client order. factors: what each message was multiplied by.
    exact: the whole-number sum of a mechanism that encodes messages on a grid, int64; None for a plain sum.
    divisor: of the non-private sample-weighted mean and of published procedures; None: the plan's public constant m.
    """

    total: Tensor
    count: int
    bits: float
    norms: Tensor
    factors: Tensor
    stats: Mapping[str, float] = field(default_factory=dict)
    exact: np.ndarray | None = None
    divisor: float | None = None


Encode = Callable[[Tensor], np.ndarray]
"""Clipped messages ``(n, d)`` -> the sum of the whole numbers that they are encoded as, int64."""


class Mechanism:
    """The source of a round's noise. Each kind of noise overrides what it does in a way of its own.

    factor: C of noise that rounds share; None where each has its own.
    """

    factor: Factor | None = None

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the noise ``(d,)`` on the sum, for the L2 bound that the clip reports; none has an ``encoder``."""
        raise NotImplementedError

    def noisy_count(self, key: bytes, round: int, aggregate: Aggregate) -> float:
        """Return the adaptive clip's centred count with its noise; refused by noise that needs a constant clip."""
        raise wrong("privacy.clip", "adaptive", "one constant clip with this kind of noise")

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Any:
        """Return a round's sum of its own (votes, sums that clients have noised); None for the engine's.

        tensors: where each tensor is in a message.
        """
        return None

    def encoder(self, key: bytes, broadcast: Broadcast, bound: float, size: int) -> tuple[Encode, float | None] | None:
        """Return what makes whole numbers of one round's messages ``(n, size)``, whose sum is released itself (secure
        grid noise, ddgauss), and what one is in the update's units, None where only the plain clipped sum is readable.
        None for noise on a plain sum.
        """
        return None

    def drawn_ahead(self, key: bytes, round: int, size: int) -> "Mechanism":
        """Return the noise of one round, for ``(size,)``: what of it needs nobody's data may be drawn from now on."""
        return self

    def release(self, key: bytes, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Return the sum of clipped messages with its noise ``(d,)``."""
        return rounding.plus(aggregate.total, self.noise(key, broadcast.round, broadcast, aggregate, bound))

    def row_norm(self, round: int) -> float:
        """Return the std of a round's noise in units of the mechanism's: ‖row t of C⁻¹‖₂ where rounds share noise."""
        return 1.0 if self.factor is None else float(self.factor.row_norms[round])

    def total_std(self, bound: float, participants: float) -> float | None:
        """Return the std of all noise on the sum when so many clients take part; None: the plan's, whoever comes."""
        return None

    def longest(self, bound: float) -> float:
        """Return the L2 norm that no encoded message exceeds: on some grids a little more than the clip's bound."""
        return bound


@dataclass(frozen=True)
class RoundInfo:
    """What a round reports: ``released`` may be shown to anyone, ``private`` is for the simulation only."""

    released: Mapping[str, Any]
    private: Mapping[str, Any]


def l2(vector: Tensor) -> Tensor:
    """L2 norm over the last axis, in the vector's own precision: ``(…, n) -> (…, 1)``."""
    return torch.linalg.vector_norm(vector, dim=-1, keepdim=True)  # type: ignore[no-any-return]
