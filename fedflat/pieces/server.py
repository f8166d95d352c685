"""Process the noisy mean on the server and average released models; all of it is free post-processing.

A server step is called as ``step(mean, view)``: noisy mean ``(d,)`` -> processed mean ``(d,)`` and the slots it
changes. An optimiser is called as ``optimizer(w, mean, slots)``: -> new weights ``(d,)`` and the slots it changes.

>>> Sgd(lr=0.5)(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.0]), {})
(tensor([3., 2.]), {})

Training goes on from the last iterate; only what is released, and evaluated, is the average. Which one is fixed before
the run: by the planned rounds or a stated decay, never by how the rounds went.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.core import MeanView, Optimizer, ServerStep, ServerView, in_range, one_of


@dataclass(frozen=True)
class LaplacianSmoothing(ServerStep):
    """A⁻¹v with A = I − σ_ls·Lap, Lap the 1-D periodic discrete Laplacian (Liang et al. 2024).

    By FFT: v̂_j / (1 + 2σ_ls(1 − cos(2πj/n))). scope: ``tensor`` smooths each flattened tensor, ``vector`` the whole
    vector. At σ_ls = 0.01 98 % of the noise's standard deviation stays. In DP-FedPGN-LS: Liu et al. 2025, Alg. 1, line
    17.
    """

    smoothing: float
    scope: str = "tensor"

    def smooth(self, vector: Tensor, tensors: tuple[slice, ...]) -> Tensor:
        """Return the smoothed vector ``(d,)``. tensors: where each shared tensor is in it."""
        spans = tensors if self.scope == "tensor" else (slice(0, vector.shape[-1]),)
        return torch.cat([self._solve(vector[span]) for span in spans])

    def _solve(self, v: Tensor) -> Tensor:
        n = v.shape[-1]
        wave = torch.arange(n // 2 + 1, dtype=torch.float64, device=v.device) * (2 * math.pi / n)
        divisor = 1 + 2 * self.smoothing * (1 - torch.cos(wave))
        return torch.fft.irfft(torch.fft.rfft(v.double()) / divisor, n=n).to(v.dtype)  # type: ignore[no-any-return]

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        return self.smooth(mean, view.tensors), {}


@dataclass(frozen=True)
class PgnDirection(ServerStep):
    """DP-FedPGN's server step (Liu et al. 2025, Alg. 1; the signs of its Eq. 12 and 15 are misprinted).

    From the noisy mean S/m of Δ̄: Δ = S/m − (1−β)Kη_t g̃^t, g̃^{t+1} = −Δ/(η_t K), smoothed here for -ls. It hands
    −η_tK·g̃^{t+1} to the server optimiser, so that with SGD w^{t+1} = w^t − server.lr·η_t·K·g̃^{t+1}.

    >>> view = ServerView(0, 10, 0.1, (slice(0, 1),), {"direction": torch.tensor([2.0])}, cohort=5.0, clients=50)
    >>> PgnDirection(beta=0.5)(torch.tensor([0.5]), view)  # K·η_t = 1, so Δ = 0.5 − 0.5·2
    (tensor([-0.5000]), {'direction': tensor([0.5000])})
    """

    beta: float
    smoothing: LaplacianSmoothing | None = None
    broadcast: ClassVar[tuple[str, ...]] = ("direction",)

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        reach = view.steps * view.lr
        update = mean - (1 - self.beta) * reach * view.slots["direction"]
        direction = -update / reach
        if self.smoothing is not None:
            direction = self.smoothing.smooth(direction, view.tensors)
        return -reach * direction, {"direction": direction}


@dataclass(frozen=True)
class KeepInitial:
    """Remembers w^0, for masks that look at |w^t − w^0| (Fed-SMP's top-k without public data); hands the mean on.

    >>> KeepInitial().initial(torch.tensor([1.0, 2.0]))
    {'initial': tensor([1., 2.])}
    """

    def initial(self, shared: Tensor) -> dict[str, Tensor]:
        return {"initial": shared.clone()}

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        return mean, {}


@dataclass(frozen=True)
class Velocity(ServerStep):
    """The server's momentum, broadcast to the clients: v ← γ·v + (1−γ)·mean, and v is what the optimiser receives.

    gamma: γ in [0, 1). The published servers of Nesterov's kind take v ← γ·v + mean, which under noise multiplies what
    the noise adds up to over the rounds by 1/(1−γ); with 1−γ it adds up to that of the plain mean.

    >>> view = ServerView(1, 10, 0.1, (slice(0, 1),), {"nesterov": torch.tensor([4.0])}, cohort=5.0, clients=50)
    >>> Velocity(0.5)(torch.tensor([2.0]), view)
    (tensor([3.]), {'nesterov': tensor([3.])})
    """

    gamma: float
    broadcast: ClassVar[tuple[str, ...]] = ("nesterov",)

    def __call__(self, mean: Tensor, view: ServerView) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.gamma * view.slots["nesterov"] + (1 - self.gamma) * mean
        return velocity, {"nesterov": velocity}


@dataclass(frozen=True)
class Sgd:
    """w ← w + lr·buf, buf ← momentum·buf + mean: FedAvg's server at lr = 1, momentum = 0 (Reddi et al. 2021).

    >>> Sgd(lr=1.0, momentum=0.5)(torch.tensor([0.0]), torch.tensor([2.0]), {"velocity": torch.tensor([4.0])})
    (tensor([4.]), {'velocity': tensor([4.])})
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __call__(self, w: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.momentum == 0:
            return torch.add(w, mean, alpha=self.lr), {}
        velocity = self.momentum * slots.get("velocity", torch.zeros_like(w)) + mean
        return torch.add(w, velocity, alpha=self.lr), {"velocity": velocity}


@dataclass(frozen=True)
class Adaptive:
    """FedAdam and FedYogi (Reddi et al. 2021, Alg. 2): m ← β₁m + (1−β₁)Δ, v by ``kind``, w ← w + lr·m/(√v + τ)."""

    kind: str
    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __call__(self, w: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        first = self.beta1 * slots.get("first", torch.zeros_like(w)) + (1 - self.beta1) * mean
        second = slots.get("second", torch.full_like(w, self.tau**2))
        square = mean * mean
        if self.kind == "adam":
            second = self.beta2 * second + (1 - self.beta2) * square
        else:
            second = second - (1 - self.beta2) * square * torch.sign(second - square)
        return w + self.lr * first / (second.sqrt() + self.tau), {"first": first, "second": second}


TINY = 1e-6
"""Least second moment that is divided by where no floor is given: the square of Reddi et al.'s τ."""


@dataclass(frozen=True)
class CorrectedAdam:
    """Adam on the noisy mean Δ_t, the noise's own variance φ_t = (σC_t/m)² taken off its second moment.

    FedAdam (Reddi et al. 2021) with bias correction and the subtraction of DP-AdamBC (Tang et al. 2024):
    m ← β₁m + (1−β₁)Δ_t, s ← β₂s + (1−β₂)(Δ_t² − φ_t), w ← w + lr·m̂/√max(ŝ, floor), m̂ = m/(1−β₁ᵗ), ŝ = s/(1−β₂ᵗ).
    At a constant clip ŝ is Adam's v̂ − (σC/m)²; with an adaptive one every round's own C is taken off. Without noise
    it is Adam with its ε under the root. t counts updates, so an aborted round is none.

    beta1, beta2: in [0, 1). floor: in squared units of the mean, > 0; None: φ_t, at least ``TINY``, for what is less
    than the noise's own variance is not told from none.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    floor: float | None = None

    def __call__(self, lr: float, view: MeanView) -> Optimizer:
        noise = view.std**2
        floor = max(noise, TINY) if self.floor is None else self.floor

        def step(w: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            # A slot, not the round's number: an aborted round is no update.
            count = slots.get("updates", torch.zeros((), dtype=torch.float64, device=w.device)) + 1
            first = self.beta1 * slots.get("first", torch.zeros_like(w)) + (1 - self.beta1) * mean
            second = self.beta2 * slots.get("second", torch.zeros_like(w)) + (1 - self.beta2) * (mean * mean - noise)
            root = (second / (1 - self.beta2**count).to(w.dtype)).clamp_min(floor).sqrt()
            move = first / (1 - self.beta1**count).to(w.dtype) / root
            return w + lr * move, {"first": first, "second": second, "updates": count}

        return step


def corrected_adam(beta1: float = 0.9, beta2: float = 0.99, floor: float | None = None) -> CorrectedAdam:
    """Adam whose second moment is freed of the noise; ``beta1``, ``beta2`` in [0, 1), ``floor`` > 0 or None.

    Raises InputError.

    >>> step = corrected_adam()(0.1, MeanView(std=0.5, clip=1.0, divisor=10.0))
    >>> step(torch.tensor([0.0]), torch.tensor([1.0]), {})[0]  # 0.1·1/√(1 − 0.5²)
    tensor([0.1155])
    """
    in_range("algorithm.beta1", beta1, 0, 1, open_high=True)
    in_range("algorithm.beta2", beta2, 0, 1, open_high=True)
    if floor is not None:
        in_range("algorithm.floor", floor, 0, open_low=True)
    return CorrectedAdam(beta1, beta2, floor)


def laplacian_smoothing(smoothing: float = 0.01, scope: str = "tensor") -> LaplacianSmoothing:
    """Laplacian smoothing of strength ``smoothing`` ≥ 0 over ``scope`` tensor or vector; raises InputError.

    >>> laplacian_smoothing(0.5).smooth(torch.tensor([1.0, -1.0, 1.0, -1.0]), (slice(0, 4),))  # the highest frequency
    tensor([ 0.3333, -0.3333,  0.3333, -0.3333])
    """
    one_of("algorithm.scope", scope, ("tensor", "vector"))
    return LaplacianSmoothing(in_range("algorithm.smoothing", smoothing, 0), scope)


@dataclass(frozen=True)
class TailAverage:
    """The mean of the iterates after the first ⌊T/2⌋ of T planned rounds; the last iterate until then.

    Under SGD without momentum the mean of k iterates whose steps have independent noise keeps about a third of the
    noise that those k steps add to the last one.

    >>> tail, first = TailAverage(rounds=4), torch.tensor([1.0])
    >>> tail(2, first, None) is None, tail(4, torch.tensor([3.0]), tail(3, first, None))
    (True, tensor([2.]))
    """

    rounds: int

    def __call__(self, round: int, shared: Tensor, average: Tensor | None) -> Tensor | None:
        """After ``round`` ≥ 1 rounds: w^t ``(d,)`` and the average so far -> the average now, None before it begins."""
        counted = round - self.rounds // 2
        if counted < 1:
            return None
        return shared.clone() if average is None else torch.lerp(average, shared, 1 / counted)


@dataclass(frozen=True)
class MovingAverage:
    """a ← decay·a + (1 − decay)·w^t; the plain mean while fewer than 1/(1 − decay) rounds are done.

    >>> MovingAverage(decay=0.9)(2, torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """

    decay: float

    def __call__(self, round: int, shared: Tensor, average: Tensor | None) -> Tensor | None:
        """As ``TailAverage``."""
        return shared.clone() if average is None else torch.lerp(average, shared, max(1 - self.decay, 1 / round))
