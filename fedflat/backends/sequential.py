"""The sequential back end: one client after the other on one module; what every other back end must equal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from fedflat.core.checks import InputError, RunError, wrong
from fedflat.core.held import StateWatch, global_generators
from fedflat.core.personal import ClientContext, PersonalState
from fedflat.core.rng import seeded_torch, stream
from fedflat.core.threads import using_threads
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import FederatedData
from fedflat.engine.accumulate import Accumulator
from fedflat.engine.batches import ClientBatches, Order
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import sent
from fedflat.engine.kept import add_trained, states_of
from fedflat.engine.problem import ModuleProblem, refuse_change

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

    def __post_init__(self) -> None:
        method = self.algorithm
        self._pieces = StateWatch((method.phases, method.transforms, method.finetune, method.client_state))

    def train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        """Train each client of the cohort (sorted ids) and add its message to the accumulator."""
        if self.threads > 1:
            with using_threads(self.threads):
                self._train(cohort, broadcast, accumulator, heads)
        else:
            self._train(cohort, broadcast, accumulator, heads)

    def _train(self, cohort: np.ndarray, broadcast: Broadcast, accumulator: Accumulator, heads: PersonalState) -> None:
        broadcast = sent(broadcast, self.problem.device)

        def results(clients: list[int]) -> Iterator[LocalResult]:
            for client in clients:
                states = states_of(self.algorithm, heads, client, broadcast.shared)
                yield self.one(client, broadcast, heads.whole(broadcast.shared, client), states)

        self.add_all(cohort, broadcast, accumulator, heads, results)
        self.problem.settle(everything=True)

    def add_all(
        self,
        cohort: np.ndarray,
        broadcast: Broadcast,
        accumulator: Accumulator,
        heads: PersonalState,
        train: Callable[[list[int]], Iterator[LocalResult]],
    ) -> None:
        """Add each client's message, in client order: as ``train`` gives them of clients with data, zeros of others."""
        clients = cohort.tolist()
        results = train([client for client in clients if len(self.data.parts[client])])
        for client in clients:
            if len(self.data.parts[client]):
                self.keep(accumulator, heads, broadcast, client, next(results))
            else:
                accumulator.add(torch.zeros(1, self.algorithm.vectors * broadcast.shared.numel()), [0])
        for _ in results:  # what it does after its last client
            pass
        refuse_change(self._pieces, "algorithm", everything=True)

    def settle(self) -> None:
        """Before a round is released: raise InputError, by name, where the module or a piece is not as it was."""
        self.problem.settle(everything=True)
        refuse_change(self._pieces, "algorithm", everything=True)

    def keep(
        self, accumulator: Accumulator, heads: PersonalState, broadcast: Broadcast, client: int, result: LocalResult
    ) -> None:
        """Add a trained client's message, and keep what stays with it."""
        size = len(self.data.parts[client])
        add_trained(accumulator, heads, self.algorithm, self.local, broadcast, client, size, result)

    def one(
        self, client: int, broadcast: Broadcast, weights: Tensor, states: Mapping[str, Tensor] = MappingProxyType({})
    ) -> LocalResult:
        """Train one client that has data, from ``weights`` ``(D,)``, which is overwritten, wherever it lies.

        states: the client's own, by name, ``(d,)``.
        """
        rows, device = self.data.parts[client], self.problem.device
        order = Order(self.seed, broadcast.round, self.local.batch_size)
        local_data = ClientBatches(self.data, client, order, rows)
        local, there, told = self.local.of(len(rows)), weights.to(device), sent(broadcast, device).own()
        try:
            with seeded_torch(self.seed, "dropout", broadcast.round, client):
                before = global_generators()
                there_too = {name: state.to(device, copy=True) for name, state in states.items()}
                own = ClientContext(there_too, stream(self.seed, "pieces", broadcast.round, client))
                result = train_client(self.algorithm, self.problem, told, local, local_data, there, own)
                if global_generators()[1:] != before[1:]:
                    raise wrong(
                        "model or algorithm", "a draw from a global generator of NumPy or Python", "torch's own"
                    )
            self.problem.settle()
            refuse_change(self._pieces, "algorithm")
        except (InputError, RunError):
            raise
        except Exception as error:  # a user's piece or module may fail in any way
            where = f"round {broadcast.round}, client {client}, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        if weights.device == device:
            return result
        weights.copy_(there)
        return LocalResult(*(value.to(weights.device) for value in vars(result).values()))


def words_of(error: Exception) -> str:
    """What another process says of an error: our own as it is, any other by the end of its traceback."""
    return str(error) if isinstance(error, RunError) else "".join(traceback.format_exception(error))[-TRACEBACK:]
