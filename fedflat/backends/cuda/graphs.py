"""Local training on a GPU as recorded CUDA graphs: a client's, or a block's, whole local training is one replay.

A GPU finishes a client's small kernels faster than Python can ask for them. What ``train_client`` asks for is therefore
recorded once, on fixed memory, and replayed for every client with that client's rows; several streams do so at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedflat.backends.cuda.batches import Shape, StaticBatches, shape_of
from fedflat.backends.cuda.streams import CudaStream, Stream
from fedflat.core.checks import RunError, wrong
from fedflat.core.held import StateWatch
from fedflat.core.personal import PersonalState
from fedflat.core.rng import seeded_torch
from fedflat.core.types import Algorithm, Broadcast, Local, PartedSum
from fedflat.data.clients import FederatedData
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.client import LocalResult, steps_of, train_client
from fedflat.engine.device import out_of_memory, sent
from fedflat.engine.problem import BlockProblem, ModuleProblem, Problem, refuse_change

KEPT = 16
"""Recordings that a stream keeps, one for each number of steps (only published procedures have several)."""


@dataclass(frozen=True)
class _Recording:
    """A recorded local training: what it reads, what replays it, what it leaves."""

    local_data: StaticBatches
    head: Tensor
    replay: Callable[[], None]
    result: LocalResult


@dataclass
class _Track:
    """A stream and its recordings, by the phases' steps."""

    stream: Stream
    recordings: dict[tuple[int, ...], _Recording] = field(default_factory=dict)


@dataclass(frozen=True)
class _Started:
    """Clients in training."""

    clients: np.ndarray
    track: _Track
    recording: _Recording


@dataclass
class Graphs:
    """Trains a cohort by replaying recorded local training, ``block`` clients at a time on each of ``threads`` streams.

    problem: one client's (block 1), or a block's. Clients are added in their order, so the sum does not depend on the
    number of streams. Memory is O(block · threads). Streams, and then the block, become fewer
    where memory is short. A model that draws random numbers has one stream: all replays share a generator.
    """

    algorithm: Algorithm
    problem: Problem
    local: Local
    data: FederatedData
    seed: int
    block: int = 1
    threads: int = 4
    name: str = "graphs"
    _tracks: list[_Track] = field(default_factory=list)
    _static: Broadcast | None = None
    _pieces: StateWatch = field(init=False, repr=False)
    _random: bool | None = None

    def __post_init__(self) -> None:
        method = self.algorithm
        self._pieces = StateWatch((method.phases, method.transforms))

    @property
    def device(self) -> torch.device:
        """Where the examples are, and so the training."""
        return self.data.inputs.device

    @cached_property
    def _shape(self) -> Shape:
        single = isinstance(self.problem, ModuleProblem)
        return shape_of(self.data, self.local.batch_size, bool(self.algorithm.transforms), single)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Train the cohort (sorted ids) and add the messages to the accumulator, in client order."""
        sizes = self.data.sizes[cohort]
        empty, dimension = int((sizes == 0).sum()), self.algorithm.vectors * broadcast.shared.numel()
        if empty:
            accumulator.add(torch.zeros(1, dimension).expand(empty, dimension), [0] * empty)
        static = self._receive(broadcast)
        # Blocks are cut from the cohort, so that nobody's place in one depends on who has data.
        placed, done, started = cohort if self._together > 1 else cohort[sizes > 0], 0, deque[_Started]()
        whole = accumulator if isinstance(accumulator, PartedSum) else None
        into = accumulator if whole is None else whole.part(self.device)
        while done < len(placed):
            clients = placed[done : done + self._together]
            if not self.data.sizes[clients].any():
                done += len(clients)
                continue
            track = self._free(clients, started, into, heads)
            try:
                started.append(self._start(track, clients, static, heads))
                done += len(clients)
            except (RuntimeError, MemoryError) as error:  # of these clients nothing has been added
                self._collect(started, 0, into, heads)
                self._make_room(error, len(clients), broadcast)
        self._collect(started, 0, into, heads)
        if isinstance(self.problem, ModuleProblem | BlockProblem):
            self.problem.settle(everything=True)
        self._refuse_memory(static, broadcast)
        if whole is not None:
            whole.merge(into)

    def _refuse_memory(self, static: Broadcast, broadcast: Broadcast) -> None:
        """Raise InputError where a replay wrote to a piece, or to a vector that all clients read; a replay moves no
        counter of writes, so the numbers are looked at."""
        refuse_change(self._pieces, "algorithm", everything=True)
        for name, vector in sent(broadcast, self.device).vectors.items():
            if not torch.equal(static.vectors[name].view(torch.int32), vector.view(torch.int32)):
                raise wrong("algorithm", f"a piece that writes into broadcast[{name!r}]", "one that only reads it")

    @property
    def _together(self) -> int:
        """Clients per replay; a block takes its steps together."""
        return self.block if self.local.epochs is None else 1

    def _receive(self, broadcast: Broadcast) -> Broadcast:
        """The round's broadcast where recordings read it: the same memory in every round, numbers included."""
        there = sent(broadcast, self.device)
        rate, clip = (torch.tensor(float(number), device=self.device) for number in (broadcast.rate, broadcast.clip))
        values = {"shared": there.shared, "mask": there.mask, "rate": rate, "clip": clip}
        if self._static is None:
            copies = {name: None if value is None else value.clone() for name, value in values.items()}
            vectors = {name: vector.clone() for name, vector in there.vectors.items()}
            self._static = replace(there, **copies, vectors=vectors)  # type: ignore[arg-type]
        for name, value in values.items():
            if value is not None:
                getattr(self._static, name).copy_(value)
        for name, vector in there.vectors.items():
            self._static.vectors[name].copy_(vector)
        return replace(self._static, round=broadcast.round)

    def _free(self, clients: np.ndarray, started: deque[_Started], into: Accumulator, heads: PersonalState) -> _Track:
        """A track at rest, after the oldest outcome was added: one that knows these steps, if there is one."""
        self._collect(started, max(1, self.threads) - 1, into, heads)
        busy, steps = [id(one.track) for one in started], self._steps(clients)[1]
        rest = [track for track in self._tracks if id(track) not in busy]
        if not rest:
            rest.append(_Track(CudaStream(self.device)))
            self._tracks += rest
        return next((track for track in rest if steps in track.recordings), rest[0])

    def _steps(self, clients: np.ndarray) -> tuple[Local, tuple[int, ...]]:
        """Local training of these clients, and the steps of its phases."""
        local = self.local.of(len(self.data.parts[clients[0]]))
        return local, tuple(steps_of(phase, local) for phase in self.algorithm.phases)

    def _start(self, track: _Track, clients: np.ndarray, static: Broadcast, heads: PersonalState) -> _Started:
        """Write a block's rows and heads where its recording reads them, and replay it.

        A block that is not full is filled up with its last client again, whose further messages are dropped.
        """
        filled = np.concatenate([clients, np.repeat(clients[-1:], self._together - len(clients))]).tolist()
        local, steps = self._steps(clients)
        known = track.recordings.pop(steps, None)
        if known is None:
            local_data = StaticBatches.room(self.data, self._shape, len(filled), steps)
            head = torch.zeros(len(filled), heads.first.numel(), device=self.device)
        else:
            local_data, head = known.local_data, known.head
        local_data.write(filled, self.seed, static.round, steps, track.stream.put)
        if head.numel():
            track.stream.put(head, torch.stack([heads.of(c) for c in filled]))
        if known is None:
            with seeded_torch(self.seed, "recording"):  # puts the generator back
                known = self._record(track, local_data, head, local, static)
            if len(track.recordings) >= KEPT:
                del track.recordings[next(iter(track.recordings))]
        track.recordings[steps] = known  # the one used last is the last to go
        seeded = seeded_torch(self.seed, "dropout", static.round, filled[0])
        with seeded if self._random else contextlib.nullcontext():
            track.stream.start(known.replay)
        return _Started(clients, track, known)

    def _record(
        self, track: _Track, local_data: StaticBatches, head: Tensor, local: Local, static: Broadcast
    ) -> _Recording:
        """Record the local loop on fixed memory."""

        def step() -> LocalResult:
            if local_data.shape.single:
                weights = torch.cat([static.shared, head[0]])
            else:
                weights = torch.cat([static.shared.expand(len(head), -1), head], 1)
            return train_client(self.algorithm, self.problem, static, local, local_data, weights)

        if self._random is None:
            self._random = track.stream.examine(step)
            if self._random and self._together > 1:
                raise wrong("engine.block", f"{self.block} with a model or method that draws random numbers", "1")
            self.threads = 1 if self._random else self.threads
        replay, result = track.stream.record(step)
        if isinstance(self.problem, ModuleProblem | BlockProblem) and self.problem.writes_buffers:
            raise RunError(
                "engine.backend: found graphs with a model that writes into its buffers; allowed: sequential."
            )
        return _Recording(local_data, head, replay, result)

    def _collect(self, started: deque[_Started], left: int, into: Accumulator, heads: PersonalState) -> None:
        """Add the oldest blocks' messages behind their training until ``left`` are in training.

        The host waits for none of it, but for personal heads.
        """
        while len(started) > left:
            one = started.popleft()
            one.track.stream.finish()
            clients, found = one.clients, one.recording.result
            single = self._shape.single
            there = self.data.sizes[clients] > 0
            result = LocalResult(*(v[None] if single else v[: len(clients)] for v in vars(found).values()))
            if not there.all():
                rows = torch.from_numpy(np.flatnonzero(there)).to(self.device)
                clients, result = clients[there], LocalResult(*(v[rows] for v in vars(result).values()))
            for client, head in zip(clients.tolist(), result.personal if heads.first.numel() else ()):
                heads.keep(client, head)
            facts = {"train_loss": result.loss, "train_accuracy": result.accuracy}
            try:
                into.add(result.message, self.data.sizes[clients].tolist(), facts)
            except RuntimeError as error:  # half of it may be noted already, so that nothing can be tried again
                raise RunError(f"clients {clients.tolist()}, clip and sum on {self.device}: {error}") from error

    def _make_room(self, error: Exception, clients: int, broadcast: Broadcast) -> None:
        """Fewer streams, then half the block, where memory was short; anything else ends the run."""
        if isinstance(error, RunError):
            raise error
        if not out_of_memory(error) or (self._together == 1 and self.threads == 1):
            where = f"round {broadcast.round}, {clients} clients, local training as a CUDA graph"
            raise RunError(f"{where}: {error}") from error
        torch.cuda.synchronize(self.device)
        error.__traceback__ = None  # it holds what was being recorded
        if self.threads > 1:
            self.threads = max(1, len(self._tracks) - 1)
            line = f"engine.processes: memory is short; going on with {self.threads} streams"
        else:
            whole, self.block = self.block, max(1, self.block // 2)
            line = f"engine.block: {whole} clients did not fit into memory; going on with {self.block}"
        warnings.warn(line, stacklevel=3)
        del self._tracks[self.threads :]  # streams are kept: each has workspaces of its own, which PyTorch never frees
        for track in self._tracks:
            track.recordings.clear()
            track.stream.forget()
        torch.cuda.empty_cache()
