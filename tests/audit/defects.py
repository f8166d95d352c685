"""Planted defects: each breaks the guarantee in a way that was published or is easy to write; the audit must see it.

A check that has never failed proves nothing. Each twin keeps everything of the real path but one line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.audit.bench import DELTA, SIGMA, AuditModel, Bench, Neighbours, bench_of, prepare_job
from fedflat.audit.bounds import bound_of
from fedflat.audit.mechanism import CONFIDENCE, audit_bench, contract_violations, outside_faults, pairs_of
from fedflat.backends.in_process import Sequential
from fedflat.core.params import flatten, layout_of
from fedflat.core.types import Aggregate, Broadcast, Clip, Mechanism
from fedflat.engine.job import Job
from fedflat.engine.problem import ModuleProblem
from fedflat.engine.reduce import Accumulator, PlainSum
from fedflat.privacy.accounting.curves import gaussian_epsilon


def largest_bound(runs: int, delta: float, failure: float) -> float:
    """Return what ``runs`` perfectly separated runs of each world show: half of them choose, half evaluate."""
    trials = runs - runs // 2
    return float(bound_of(trials, 0, trials, delta, failure))


@dataclass(frozen=True)
class EachTensorAlone(Clip):
    """Published item 1 (code of Shi et al. 2023a): each tensor clipped to C, and C reported for the whole vector."""

    real: Clip

    def bound(self, threshold: float) -> float:
        """What it reports; C·√L would be true."""
        return threshold

    def factors(self, messages: Tensor, threshold: float, tensors: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """One factor per tensor ``(n, L)``."""
        found = [self.real.factors(messages[:, where], threshold, ()) for where in tensors]
        return self.real.factors(messages, threshold, tensors)[0], torch.stack([factor for _, factor in found], 1)


class _MaskCount(Accumulator):
    """Counts at every coordinate how many clients' own top-k masks keep it."""

    keep = 0.4

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts = torch.zeros(self.dimension)

    def add(self, messages: Tensor, sizes: Sequence[int], stats: Any = None) -> Tensor:
        """Clip and sum what the masks keep."""
        if messages.shape[-1] == self.dimension:
            messages = messages.float()
            kept = torch.zeros_like(messages)
            for where in self.tensors:
                top = messages[:, where].abs().topk(math.ceil(self.keep * (where.stop - where.start)), dim=1)
                kept[:, where] = kept[:, where].scatter(1, top.indices, (top.values > 0).float())
            self.counts += kept.sum(0)
            messages = messages * kept
        return super().add(messages, sizes, stats)

    def result(self) -> Aggregate:
        """The aggregate, with the counts beside it."""
        found = super().result()
        return replace(found, stats={**found.stats, "kept": self.counts})  # type: ignore[dict-item]


@dataclass(frozen=True)
class _InItsPlace(Mechanism):
    """What stands in the real mechanism's place, and does as it does."""

    real: Any

    def noise(self, *arguments: Any) -> Tensor:
        """The real mechanism's noise, unchanged."""
        drawn: Tensor = self.real.noise(*arguments)
        return drawn

    def noisy_count(self, *arguments: Any) -> float:
        """The adaptive clip's count, as the real mechanism makes it."""
        return float(self.real.noisy_count(*arguments))


@dataclass(frozen=True)
class MaskAfterNoise(_InItsPlace):
    """Published item 3 (Shi et al. 2023b, Eq. 12): each client masks after its share of the noise, by its own top-k.

    In law: the sum's noise has variance σ²C²·(masks that keep the coordinate)/m there, and none where there is none.
    """

    clients: float

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """The round's sum, which counts how many masks kept each coordinate."""
        return _MaskCount(clip, broadcast.clip, tensors, tensors[-1].stop)

    def noise(self, key: bytes, round: int, broadcast: Broadcast, aggregate: Aggregate, bound: float) -> Tensor:
        """Real noise, scaled by the root of the share of masks that keep the coordinate."""
        drawn = super().noise(key, round, broadcast, aggregate, bound)
        scale = (torch.as_tensor(aggregate.stats["kept"]) / self.clients).sqrt()
        return drawn * scale.repeat(drawn.numel() // scale.numel())


class _Realised(PlainSum):
    """Divides by the clients that happened to come."""

    def result(self) -> Aggregate:
        """The aggregate, with the realised cohort, at least 1, as its divisor."""
        return replace(super().result(), divisor=float(max(len(self._present), 1)))


class RealisedDenominator(_InItsPlace):
    """The mean divides by the realised cohort instead of the constant m."""

    def accumulator(self, clip: Clip, broadcast: Broadcast, tensors: tuple[slice, ...], key: bytes) -> Accumulator:
        """The sum that reports its own divisor."""
        return _Realised(clip, broadcast.clip, tensors, tensors[-1].stop)


class LeakyModel(AuditModel):
    """A running mean of its inputs, as batch norm keeps one: state that leaves unclipped."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros_like(self.scale))

    def forward(self, inputs: Tensor) -> Tensor:
        """As the audit's model; training mode moves the running mean."""
        if self.training:
            self.seen.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return super().forward(inputs)


class KeepsBuffers(ModuleProblem):
    """Leaves the running mean as training left it; the real one puts w^0's back."""

    def bind(self, weights: Tensor) -> None:
        """As the real one, but for the buffer."""
        seen = self.module.seen.clone()  # type: ignore[operator]
        super().bind(weights)
        self.module.seen = seen

    def restore_and_check(self, *, everything: bool = False) -> None:
        """Nothing is put back, and nothing looked at."""

    def released(self, weights: Tensor) -> nn.Module:
        """The module that clients were trained on."""
        self.bind(weights)
        return self.module.eval()


def leaky_job(inputs: Tensor | None) -> Job:
    """A real job whose module was put in after the check that refuses it, and keeps its buffers."""
    job = prepare_job("dp-fedavg", inputs=inputs)
    module: nn.Module = LeakyModel()
    job.problem = KeepsBuffers(module, layout_of(module, None))
    job.initial_weights = flatten(module, job.parts.layout)
    job.backend = Sequential(job.parts.algorithm, job.problem, job.parts.local, job.data, job.seed)
    return job


def changed(bench: Bench, **parts: Any) -> Bench:
    """The same with other parts."""
    return replace(bench, parts=replace(bench.parts, **parts))


def plant(defect: str, bench: Bench) -> Bench:
    """The same federation with a defect of ``DEFECTS`` in its parts (not the unclipped buffer)."""
    parts = bench.parts
    if defect in ("per-tensor clip", "published clip"):
        return changed(bench, clip=EachTensorAlone(parts.clip))
    if defect == "weighted mean":
        return changed(bench, weighted=True)
    if defect == "mask after noise":
        return changed(bench, mechanism=MaskAfterNoise(parts.mechanism, parts.plan.divisor))
    return changed(bench, mechanism=RealisedDenominator(parts.mechanism))


DEFECTS: dict[str, tuple[int, ...]] = {
    "per-tensor clip": (1,), "published clip": (1,), "weighted mean": (2,), "mask after noise": (3,),
    "realised denominator": (4, 2), "unclipped buffer": (),
}  # fmt: skip
"""Each defect and the places of the pairs (of ``pairs_of``) that show it."""

METHODS = {"published clip": "dp-fedsam"}
"""The method a defect is planted in; the others in dp-fedavg."""


@dataclass(frozen=True)
class Caught:
    """What the audit found of a planted defect: its lower bound, the claim, and the broken contracts."""

    lower_bound: float
    claimed: float
    proven: float
    violations: tuple[str, ...]


def pairs_at(bench: Bench, *places: int) -> dict[str, Neighbours]:
    """Some of a method's pairs of neighbours."""
    every = [*pairs_of(bench).items()]
    return dict(every[place] for place in places)


def caught(name: str, runs: int) -> Caught:
    """Run the mechanism audit on a planted defect; the lower bound should exceed the claimed ε."""
    bench = bench_of(METHODS.get(name, "dp-fedavg"))
    if name == "unclipped buffer":
        bound, faults = _buffer_bound(runs)
    else:
        bench = plant(name, bench)
        best = audit_bench(bench, runs, CONFIDENCE, pairs_at(bench, *DEFECTS[name]))
        bound, faults = best.lower_bound, contract_violations(bench)
    tensors = len(bench.parts.layout.tensors("shared"))
    counted = name in ("per-tensor clip", "published clip")
    proven = gaussian_epsilon(math.sqrt(tensors) / SIGMA, DELTA) if counted else math.inf
    return Caught(bound, bench.parts.plan.epsilon(1), proven, tuple(faults))


def _buffer_bound(runs: int) -> tuple[float, tuple[str, ...]]:
    """The buffer after real rounds with and without inputs of 10⁶; no noise touches it, so the bound is the cap."""
    from fedflat.engine.train import final_module, train

    seen = []
    for inputs in (None, torch.full((len(AuditModel().blocks[0]),), 1e6)):
        values = []
        for key in (b"\1" * 32, b"\2" * 32):
            job = replace(leaky_job(inputs), key=key)
            values.append(float(final_module(job, train(job)).state_dict()["seen"].sum()))
        seen.append(values)
    separated = (seen[0][0] == seen[0][1] and seen[1][0] == seen[1][1]) and abs(seen[1][0] - seen[0][0]) > 0
    return (largest_bound(runs, DELTA, 1 - CONFIDENCE) if separated else 0.0), tuple(outside_faults(leaky_job))
