"""Train clients in this process: one after the other, which every other back end must equal, or in blocks at once.

A block runs the same local loop on weights ``(n, D)``, written out or as factors.
"""

import contextlib
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.core import StateWatch, global_generators, seeded_torch, set_meanwhile, stream, using_threads
from fedflat.core.checks import InputError, RunError, becoming, require
from fedflat.core.params import NOTHING, ClientContext, PersonalState
from fedflat.core.types import Algorithm, Broadcast, Local
from fedflat.data.clients import FederatedData
from fedflat.engine.batches import BlockBatches, ClientBatches, Order
from fedflat.engine.client import LocalResult, train_client
from fedflat.engine.device import out_of_memory, sent
from fedflat.engine.factored import Declined, LowRankProblem
from fedflat.engine.isolated import Isolated, packaged, pieces_of
from fedflat.engine.mlp import DenseProblem
from fedflat.engine.problem import BlockProblem, ModuleProblem, refuse_change
from fedflat.engine.reduce import EMPTY, Clipped, Part, Trained, states_of

TRACEBACK = 2000
"""Characters of a traceback that another process sends back: its last calls and the error, which stand at the end."""
SWITCH_SECONDS = 2e-4
"""How long a thread that comes back from arithmetic waits for the interpreter (Python: 5 ms). Well below the time
a small block takes, and long beside the switch itself (microseconds)."""
LANES, WHOLE = (1, 16), 32
"""Numbers of lanes that are tried, in this order, in a block of a multiple of ``WHOLE`` clients. With one, all places
are alike. Places 16 apart are aligned alike whatever a row's length, for 16 float32 fill a line of the cache."""
_NO_ROWS = np.zeros(0, np.int64)


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
    _own_pieces: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pieces = [piece for _, piece in pieces_of(self.algorithm) if not isinstance(piece, Isolated)]
        self._pieces = StateWatch((pieces, self.algorithm.finetune))
        self._own_pieces = not packaged(*pieces)

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
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
        deque(results, maxlen=0)  # what it does after its last client
        refuse_change(self._pieces, "algorithm", everything=True)

    def _part(self, client: int, result: LocalResult | None, broadcast: Broadcast) -> Trained:
        """Return a client's result as a part of the round; zeros for a client without data (None)."""
        if result is None:
            return Trained.nothing(1, self.algorithm.vectors * broadcast.shared.numel())
        return Trained.of([client], [len(self.data.parts[client])], result)

    def one(
        self, client: int, broadcast: Broadcast, weights: Tensor, states: Mapping[str, Tensor] = NOTHING.state
    ) -> LocalResult:
        """Train one client that has data, from ``weights`` ``(D,)``, which is overwritten, wherever it lies.

        states: the client's own, by name, ``(d,)``.
        """
        rows, device = self.data.parts[client], self.problem.device
        local_data = ClientBatches(self.data, client, Order(self.seed, broadcast.round, self.local.batch_size), rows)
        local, there, received = self.local.of(len(rows)), weights.to(device), sent(broadcast, device).for_one_client()
        where = f"round {broadcast.round}, client {client}, local training"
        # a user's piece or module may fail in any way
        failed = becoming(lambda e: RunError(f"{where}: {e or type(e).__name__}"), left=(InputError, RunError))
        with failed, seeded_torch(self.seed, "dropout", broadcast.round, client):
            before = global_generators()
            moved = {name: state.to(device, copy=True) for name, state in states.items()}
            context = ClientContext(moved, stream(self.seed, "pieces", broadcast.round, client))
            result = train_client(self.algorithm, self.problem, received, local, local_data, there, context)
            # torch's own is seeded for each client; NumPy's and Python's would go on from one client to the next.
            found = "a draw from a global generator of NumPy or Python"
            require(global_generators()[1:] == before[1:], "model or algorithm", found, "torch's own")
            self.problem.restore_and_check()
            refuse_change(self._pieces, "algorithm", everything=self._own_pieces)
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


def placed_in_blocks(clients: np.ndarray, size: int, lanes: int | None = None) -> np.ndarray:
    """Return blocks ``(k, size)`` in which client i has a place of lane i mod ``lanes``; ``EMPTY`` where nobody is.

    lanes: places so many apart do the same arithmetic, and are one lane; ``size`` unless given. A client's lane follows
    from its number alone. Of several in one lane, the first fill the first block.
    """
    lanes = lanes or size
    lane, deep = clients % lanes, size // lanes
    order = np.argsort(lane, kind="stable")
    counts = np.bincount(lane, minlength=lanes)
    turn = np.empty(len(clients), np.int64)
    turn[order] = np.arange(len(clients)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.full((-(-int(counts.max(initial=0)) // deep), size), EMPTY, np.int64)
    blocks[turn // deep, lane + lanes * (turn % deep)] = clients
    return blocks


@dataclass
class Vectorized:
    """Trains a cohort block by block; memory is O(block), not O(cohort).

    A message is, bit for bit, a function of its client alone: all blocks have one public shape, a client has a place in
    the lane that follows from its number, and an operation does the same arithmetic in a lane whatever is elsewhere
    (docs/specification.md, "What was measured is what is released"). Places without a client compute on zeros, and are
    left out of the sum.
    inner: the same training, one client at a time. problem: works on weights written out. factors: the low-rank form,
    or None; a method that it declines is trained on
    weights written out. A block that does not fit into memory is halved and tried again.
    threads: cores. apart: each core takes a block of its own, and numbers do not depend on how many there are (for
    problems that touch no module); otherwise they work on one block together, and another number may round differently.
    lanes: as of ``placed_in_blocks``; None where no trial showed that places are alike. trial: asked once, before the
    first block, in how many lanes they are.
    """

    inner: Sequential
    problem: BlockProblem | DenseProblem
    block: int
    factors: LowRankProblem | None = None
    threads: int = 1
    apart: bool = False
    name: str = "vectorized"
    lanes: int | None = None
    trial: "Callable[[Vectorized], int | None] | None" = None

    def train(self, cohort: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped) -> Iterator[Part]:
        """Train the cohort in blocks; zeros for clients without data."""
        if self.trial is not None:
            self.lanes, self.trial = self.trial(self), None
        broadcast = sent(broadcast, self.inner.data.inputs.device)
        left = cohort[self.inner.data.sizes[cohort] > 0]
        if len(left) < len(cohort):
            yield Trained.nothing(len(cohort) - len(left), self.inner.algorithm.vectors * self.problem.layout.dimension)
        # Where messages are added one by one, in client order, parts of single clients wait for their turn.
        turns, waiting, before = deque(left.tolist()), dict[int, Trained](), global_generators()
        with using_threads(1 if self.apart else self.threads):
            # Again from the start of what is left where memory was short and blocks became smaller.
            while len(left):
                for block, part in self._blocks(left, broadcast, kept, clipped):
                    left = np.setdiff1d(left, block, assume_unique=True)
                    if not isinstance(part, Trained):
                        yield part
                        continue
                    # Copies: the block itself need not wait.
                    waiting |= {client: part.row(row) for row, client in enumerate(part.clients) if client != EMPTY}
                    while turns and turns[0] in waiting:
                        yield waiting.pop(turns.popleft())
        self.problem.restore_and_check(everything=True)
        found = f"{self.inner.algorithm.name}, which draws random numbers while blocks of clients train"
        require(before == global_generators(), "algorithm", found, "engine.backend=sequential")

    def _blocks(
        self, clients: np.ndarray, broadcast: Broadcast, kept: PersonalState, clipped: Clipped
    ) -> Iterator[tuple[np.ndarray, Part]]:
        """Train blocks, and give each one's clients and part; end early where memory was short."""
        size = self.block if self.inner.local.epochs is None else 1  # a block steps together
        blocks = placed_in_blocks(clients, size, self.lanes)

        def work(block: np.ndarray) -> Part:
            sizes = np.where(block == EMPTY, EMPTY, self.inner.data.sizes[block]).tolist()
            # In the block's own thread: the round then only merges d numbers.
            return clipped(Trained.of(block.tolist(), sizes, self.trained(block, broadcast, kept)))

        with contextlib.closing(_in_order(work, list(blocks), self.threads if self.apart else 1)) as outcomes:
            for block, ready in zip(blocks, outcomes):
                try:
                    part = ready()
                except (InputError, RunError):
                    raise
                except Exception as error:  # a user's module may fail in any way
                    self._halve(error, size, broadcast)
                    return
                yield block[block != EMPTY], part

    def _halve(self, error: Exception, size: int, broadcast: Broadcast) -> None:
        """Half the block where memory was short; anything else, or one client that does not fit, ends the run."""
        if not out_of_memory(error) or (size == 1 and not (self.apart and self.threads > 1)):
            where = f"round {broadcast.round}, a block of {size} clients, local training"
            raise RunError(f"{where}: {error or type(error).__name__}") from error
        if self.apart and self.threads > 1:  # fewer blocks at a time change no number
            self.threads = 1
            note = f"engine.processes: blocks of {size} clients do not fit into memory side by side; going on with one"
        else:
            self.block, self.lanes = max(1, size // 2), None  # nobody tried the lanes of smaller blocks
            note = f"engine.block: {size} clients did not fit into memory; going on with {self.block}"
        warnings.warn(note, stacklevel=2)

    def trained(self, clients: np.ndarray, broadcast: Broadcast, kept: PersonalState) -> LocalResult:
        """Return what the clients of one block send ``(n, …)``; places with ``EMPTY`` train on zeros."""
        inner, ids = self.inner, clients.tolist()
        rows = [_NO_ROWS if client == EMPTY else inner.data.parts[client] for client in ids]
        order = Order(inner.seed, broadcast.round, inner.local.batch_size)
        data, local = BlockBatches(inner.data, ids, order, rows), inner.local.of(len(rows[0]))
        states = [states_of(inner.algorithm, kept, client, broadcast.shared) for client in ids]
        names = [state.name for state in inner.algorithm.client_state]
        context = ClientContext({name: torch.stack([values[name] for values in states]) for name in names})
        factors = self.factors  # another block's thread may decline in between
        if factors is not None:
            try:
                start: Any = factors.start(broadcast.shared, len(ids))
                return train_client(inner.algorithm, factors, broadcast, local, data, start, context)
            except Declined:
                self.factors = None
        if kept.first.numel():
            weights = torch.stack([kept.whole(broadcast.shared, client) for client in ids])
        else:
            weights = broadcast.shared.repeat(len(ids), 1)
        result = train_client(inner.algorithm, self.problem, broadcast, local, data, weights, context)
        self.problem.restore_and_check()
        return result


def _in_order(
    work: Callable[[np.ndarray], Part], blocks: list[np.ndarray], threads: int
) -> Generator[Callable[[], Part], None, None]:
    """Yield, for each block in order, a function that gives its part; ``threads`` blocks are under way at a time."""
    if threads == 1 or len(blocks) == 1:
        yield from (partial(work, block) for block in blocks)
        return
    left = deque(blocks)
    switching = set_meanwhile(sys.getswitchinterval, sys.setswitchinterval, SWITCH_SECONDS)
    with switching, ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[Future[Part]] = deque()
        try:
            while left or waiting:
                while left and len(waiting) <= threads:  # one more than cores: a core need not wait for the sum
                    waiting.append(pool.submit(work, left.popleft()))
                yield waiting.popleft().result
        finally:
            for future in waiting:
                future.cancel()
