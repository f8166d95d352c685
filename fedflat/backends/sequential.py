"""Train one client after the other on one module: what every other back end must equal."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from torch import Tensor

from fedflat.core.checks import InputError, RunError, wrong
from fedflat.core.held import StateWatch, global_generators
from fedflat.core.params import ClientContext, PersonalState
from fedflat.core.process import using_threads
from fedflat.core.rng import seeded_torch, stream
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import FederatedData
from fedflat.engine.batches import ClientBatches, Order
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import sent
from fedflat.engine.isolated import Isolated, packaged, pieces_of
from fedflat.engine.problem import ModuleProblem, refuse_change
from fedflat.engine.reduce import Clipped, Trained, states_of

TRACEBACK = 2000
"""Characters of a traceback that another process sends back: its last calls and the error, which stand at the end."""


@dataclass
class Sequential:
    """Trains a cohort client by client.

    threads: cores that work on one client; another number may round differently.
    """

    algorithm: Algorithm
    problem: ModuleProblem
    local: Local
    data: FederatedData
    seed: int
    name: str = "sequential"
    threads: int = 1
    _pieces: StateWatch = field(init=False, repr=False)
    _own: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own = [piece for _, piece in pieces_of(self.algorithm) if not isinstance(piece, Isolated)]
        self._pieces = StateWatch((own, self.algorithm.finetune))
        self._own = not packaged(*own)

    def train(
        self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped
    ) -> Iterator[Trained]:
        """Train each client of the cohort (sorted ids), one after the other."""
        broadcast = sent(broadcast, self.problem.device)
        with using_threads(self.threads) if self.threads > 1 else contextlib.nullcontext():
            for client in cohort.tolist():
                result = None
                if len(self.data.parts[client]):
                    states = states_of(self.algorithm, kept, client, broadcast.shared)
                    result = self.one(client, broadcast, kept.whole(broadcast.shared, client), states)
                yield self._part(client, result, broadcast)
            refuse_change(self._pieces, "algorithm", everything=True)
            self.problem.restore_and_check(everything=True)

    def in_order(
        self, cohort: np.ndarray, broadcast: Broadcast, train: Callable[[list[int]], Iterator[LocalResult]]
    ) -> Iterator[Trained]:
        """Yield each client's part, in client order. train: gives the results of those with data, in that order."""
        results = train([client for client in cohort.tolist() if len(self.data.parts[client])])
        for client in cohort.tolist():
            yield self._part(client, next(results) if len(self.data.parts[client]) else None, broadcast)
        for _ in results:  # what it does after its last client
            pass
        refuse_change(self._pieces, "algorithm", everything=True)

    def _part(self, client: int, result: LocalResult | None, broadcast: Broadcast) -> Trained:
        """Return a client's result as a part of the round; zeros for a client without data (None)."""
        if result is None:
            return Trained.nothing(1, self.algorithm.vectors * broadcast.shared.numel())
        return Trained.of([client], [len(self.data.parts[client])], result)

    def one(
        self, client: int, broadcast: Broadcast, weights: Tensor, states: Mapping[str, Tensor] = MappingProxyType({})
    ) -> LocalResult:
        """Train one client that has data, from ``weights`` ``(D,)``, which is overwritten, wherever it lies.

        states: the client's own, by name, ``(d,)``.
        """
        rows, device = self.data.parts[client], self.problem.device
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        local_data = ClientBatches(self.data, client, order, rows)
        local, there, told = self.local.of(len(rows)), weights.to(device), sent(broadcast, device).for_one_client()
        try:
            with seeded_torch(self.seed, "dropout", broadcast.round, client):
                before = global_generators()
                there_too = {name: state.to(device, copy=True) for name, state in states.items()}
                own = ClientContext(there_too, stream(self.seed, "pieces", broadcast.round, client))
                result = train_client(self.algorithm, self.problem, told, local, local_data, there, own)
                # torch's own is seeded for each client; NumPy's and Python's would go on from one client to the next.
                if global_generators()[1:] != before[1:]:
                    allowed = "torch's own"
                    raise wrong("model or algorithm", "a draw from a global generator of NumPy or Python", allowed)
            self.problem.restore_and_check()
            refuse_change(self._pieces, "algorithm", everything=self._own)
        except (InputError, RunError):
            raise
        except Exception as error:  # a user's piece or module may fail in any way
            where = f"round {broadcast.round}, client {client}, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        if weights.device == device:
            return result
        # The caller's vector is the one that is overwritten, wherever training was.
        weights.copy_(there)
        return LocalResult(*(value.to(weights.device) for value in vars(result).values()))


def as_sent(error: Exception, where: str) -> Exception:
    """Return what another process raises of an error: our own as it is, any other by the end of its traceback."""
    if isinstance(error, InputError):
        return InputError(str(error))
    words = str(error) if isinstance(error, RunError) else "".join(traceback.format_exception(error))[-TRACEBACK:]
    return RunError(f"{where}: {words}")
