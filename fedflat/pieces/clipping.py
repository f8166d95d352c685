"""Clip every message, and report the L2 bound that the clip earns; the plan turns it into a sensitivity.

``clip.factors(messages, threshold, tensors)`` takes messages ``(n, d)`` and gives their norms ``(n,)`` and the factors
that multiply them, ``(n,)``, or ``(n, L)`` where each of L tensors has its own.

>>> messages = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0]])
>>> norms, factors = whole_vector(1.0).factors(messages, 1.0, (slice(0, 2),))
>>> factors  # too long, short enough, broken
tensor([0.2000, 1.0000, 0.0000], dtype=torch.float64)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedflat.core import Clip, StateWatch, global_generators, in_range, rounding, wrong


def _factor(norms: Tensor, threshold: Tensor | float, wanted: Tensor | None = None) -> Tensor:
    """min(1, C/‖·‖), or ``wanted`` in place of 1; 0 where a number is not finite: a broken message counts as zero.

    One rounding, which ``core.rounding`` counts; a factor below float64's normal range, where it would be more, is 0.
    """
    tiny = torch.finfo(norms.dtype).tiny
    most = torch.as_tensor(threshold, dtype=norms.dtype) / norms.clamp_min(tiny)
    factors = torch.minimum(torch.ones_like(norms) if wanted is None else wanted, most)
    sound = torch.isfinite(norms) & torch.isfinite(factors) & (factors >= tiny)
    return torch.where(sound, factors, torch.zeros_like(norms))


def norms_of(messages: Tensor) -> Tensor:
    """L2 norms ``(n,)`` in float64 of messages ``(n, d)``; infinite where any entry is not finite.

    Squares are summed in float64, so that a huge but finite float32 message has a finite norm and is clipped.

    >>> norms_of(torch.tensor([[3.0, 4.0], [float("inf"), 0.0]]))
    tensor([5., inf], dtype=torch.float64)
    """
    by_pieces = isinstance(messages, Tensor) and messages.dim() == 2 and messages.device.type == "cpu"
    if by_pieces and messages.shape[1] > rounding.CACHED:
        norms = torch.stack([rounding.norm(m) for m in messages]) if len(messages) else messages.new_zeros(0).double()
    elif by_pieces and len(messages) > 1:
        # A float64 copy of the whole block would not fit a cache.
        pieces = torch.split(messages, max(1, rounding.CACHED // max(1, messages.shape[1])))
        norms = torch.cat([torch.linalg.vector_norm(m, dim=-1, dtype=torch.float64) for m in pieces])
    else:
        norms = torch.linalg.vector_norm(messages, dim=-1, dtype=torch.float64)
    return torch.where(torch.isfinite(norms), norms, torch.full_like(norms, math.inf))


def tensor_norms(messages: Tensor, tensors: tuple[slice, ...]) -> Tensor:
    """L2 norms ``(n, L)`` in float64 of each tensor of messages ``(n, d)``; infinite where an entry is not finite.

    >>> tensor_norms(torch.tensor([[3.0, 4.0, 2.0]]), (slice(0, 2), slice(2, 3)))
    tensor([[5., 2.]], dtype=torch.float64)
    """
    return torch.stack([norms_of(messages[:, where]) for where in tensors], dim=1)


class NormClip(Clip):
    """A clip whose factor follows from a message's norm."""

    by_norm = True

    def scale(self, norms: Tensor, threshold: float) -> Tensor:
        """Norms ``(n,)`` -> factors ``(n,)``."""
        return _factor(norms, threshold)

    def factors(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """Messages ``(n, d)`` -> norms ``(n,)``, factors ``(n,)``, both float64."""
        norms = norms_of(messages)
        return norms, self.scale(norms, threshold)


@dataclass(frozen=True)
class WholeVector(NormClip):
    """Clip the whole message: Δ ← Δ·min(1, C/‖Δ‖₂).

    | message | becomes |
    |---|---|
    | norm ≤ C | itself |
    | norm > C | norm C, up to rounding (``core.rounding``) |
    | any NaN or inf | zero |
    | C = inf | itself |
    """

    threshold: float


class _EachTensor(Clip):
    """Every tensor clipped by itself."""

    def limits(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> Tensor:
        """Return what each tensor's norm is clipped to, ``(L,)`` or for each message ``(n, 1)``: C, here."""
        return torch.full((len(messages), 1), threshold, dtype=torch.float64)

    def factors(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """Messages ``(n, d)`` -> norms ``(n,)`` of the whole message, factors ``(n, L)``, one per tensor."""
        norms, limits = norms_of(messages), self.limits(messages, threshold, tensors)
        return norms, _factor(tensor_norms(messages, tensors), limits) * torch.isfinite(norms)[:, None]


@dataclass(frozen=True)
class PerTensor(_EachTensor):
    """Clip tensor j to C_j; the message's bound, and C in std = σ·C, is √ΣC_j².

    values: one C_j for each tensor. tensors: L, their number.
    """

    values: tuple[float, ...]
    tensors: int

    @property
    def threshold(self) -> float:
        """C = √ΣC_j², the threshold of the whole message."""
        return math.sqrt(sum(v * v for v in self.values))

    def limits(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> Tensor:
        """Return C_j ``(L,)``."""
        return torch.tensor(self.values, dtype=torch.float64, device=messages.device)


@dataclass(frozen=True)
class PublishedPerTensor(_EachTensor):
    """Published item 1: every one of L tensors clipped to C on its own, so that a message's norm is up to C·√L.

    The noise of that procedure is σC all the same, so the clip is for ``privacy.protocol: published`` only.
    """

    tensors: int

    def bound(self, threshold: float) -> float:
        """C·√L, which is true, whatever the noise was made for."""
        return threshold * math.sqrt(self.tensors)


@dataclass(frozen=True)
class PublishedMedian(_EachTensor):
    """Published item 2: each tensor clipped to the median of the client's own tensor norms ("median clipping").

    The threshold follows the client's data, so nothing bounds a message: the bound is infinite, and no ε is proven.
    """

    def bound(self, threshold: float) -> float:
        """Infinite: nothing bounds a message."""
        return math.inf

    def limits(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> Tensor:
        """Return each message's own median ``(n, 1)``, the mean of the middle two if L is even; 0 if broken. Its noise
        is made for it.
        """
        pieces = tensor_norms(messages, tensors)
        median = torch.quantile(torch.nan_to_num(pieces, posinf=0.0), 0.5, dim=1, keepdim=True)
        return torch.where(torch.isfinite(pieces).all(1, keepdim=True), median, torch.zeros_like(median))


@dataclass(frozen=True)
class Adaptive(NormClip):
    """Private quantile clip (Andrew et al. 2021): C follows the ``quantile`` γ of the norms, its count noise paid for.

    C_{t+1} = C_t·exp(−rate·(b̃ − γ)), b̃ = ½ + (Σ(b_i − ½) + N(0, σ_b²))/m, b_i = 1[‖Δ_i‖ ≤ C_t].

    >>> Adaptive(1.0).next(1.0, noisy_bits=-10.0, divisor=20.0)  # most norms are above C: it grows
    1.1051709180756477
    """

    threshold: float
    quantile: float = 0.5
    rate: float = 0.2
    moves = True

    def next(self, threshold: float, noisy_bits: float, divisor: float) -> float:
        """C_{t+1} from the noisy centred count Σ(b_i − ½) + N(0, σ_b²) and the constant divisor m."""
        share = 0.5 + noisy_bits / divisor
        return threshold * math.exp(-self.rate * (share - self.quantile))


@dataclass(frozen=True)
class MethodScale(NormClip):
    """A method's own factor of a message's norm (``Algorithm.scale``), and the clip at C behind it.

    rule: (norms ``(n,)``, C) -> factors ``(n,)``. What it says beyond C/‖Δ‖ is cut, so the bound is C whatever it says;
    what is negative or not a number is 0. It is asked for one message at a time, given a copy of its norm, and nothing
    that it holds may change: one client's factor would follow from another's norm.
    """

    rule: Callable[[Tensor, float], Tensor]
    _watched: StateWatch = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_watched", StateWatch(self.rule))

    def scale(self, norms: Tensor, threshold: float) -> Tensor:
        """Norms ``(n,)`` -> factors ``(n,)``."""
        return _factor(norms, threshold, self._asked(norms, threshold))

    def _asked(self, norms: Tensor, threshold: float) -> Tensor:
        """Return the rule's factor for each norm ``(n,)``; raises InputError for another shape, a draw or a memory."""
        before, factors = global_generators(), torch.zeros_like(norms)
        for place in range(len(norms)):
            factor = self.rule(norms[place : place + 1].clone(), threshold)
            if not isinstance(factor, Tensor) or factor.shape != (1,):
                form = f"shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else type(factor).__name__
                raise wrong("algorithm.scale", f"{form} for norms (1,)", "one factor for each norm")
            factors[place : place + 1] = factor.detach()
        if global_generators() != before:
            raise wrong("algorithm.scale", "a draw of random numbers", "a function of a message's norm and C")
        if (changed := self._watched.changed(everything=True)) is not None:
            raise wrong("algorithm.scale", f"{changed or 'itself'}, which a call changed", "one that keeps nothing")
        return factors


@dataclass(frozen=True)
class SmoothedNormalisation:
    """Smoothed normalisation in place of a clip: Δ ← C·Δ/(α + ‖Δ‖), shorter than C (Shulgin et al. 2025a).

    alpha: α > 0, in units of the message's norm: far below it a message is multiplied by C/α, far above it has norm C.

    >>> SmoothedNormalisation(alpha=1.0)(torch.tensor([1.0, 3.0]), 2.0)  # norms (n,) -> factors (n,)
    tensor([1.0000, 0.5000])
    """

    alpha: float

    def __call__(self, norms: Tensor, threshold: float) -> Tensor:
        """Norms ``(n,)`` -> factors ``(n,)``."""
        return threshold / (self.alpha + norms)


def whole_vector(threshold: float) -> WholeVector:
    """Whole-vector clip at C > 0, ``inf`` for none; raises InputError.

    >>> whole_vector(0.5).bound(0.5)
    0.5
    """
    if not (isinstance(threshold, (int, float)) and threshold > 0 and not math.isnan(threshold)):
        raise wrong("privacy.clip", threshold, "a number > 0, or {kind: adaptive, …}, or {kind: per-tensor, values: …}")
    return WholeVector(float(threshold))


def per_tensor(values: float | list[float], tensors: int) -> PerTensor:
    """Per-tensor clip; one number is used for every tensor, a list needs one number per tensor. Raises InputError.

    >>> per_tensor([3.0, 4.0], tensors=2).threshold  # √(3² + 4²)
    5.0
    """
    numbers = [values] * tensors if isinstance(values, (int, float)) else list(values)
    if len(numbers) != tensors:
        allowed = f"one number, or {tensors} (one for each shared tensor)"
        raise wrong("privacy.clip.values", f"{len(numbers)} numbers", allowed)
    return PerTensor(tuple(float(in_range("privacy.clip.values", v, 0, open_low=True)) for v in numbers), tensors)
