"""Guard a server loop of one's own (``fedflat.Guard``): plan, ledger, clip and noise for any transport.

A guard is given each client's vector and gives back the noisy mean: the round is charged durably first, then clipped
vectors are added in float64, noise is added once, and the public constant m divides. All of it is the engine's own
server path (``engine.round.finish_round``) with an optimiser that takes the mean as it is.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.core import Algorithm, Layout, Local, Mechanism, RoundState, digest, fresh_key
from fedflat.core.checks import RunError, in_range, require, turning, whole, wrong
from fedflat.engine.job import RoundParts
from fedflat.engine.round import accumulator_of, broadcast_of, finish_round, select_cohort
from fedflat.pieces.clipping import whole_vector
from fedflat.pieces.mechanisms import GaussianNoise, GridNoise
from fedflat.privacy.ledger import RUN, Ledger
from fedflat.privacy.plan import Plan, build_plan
from fedflat.privacy.statement import rounds_charged, statement

CHANGING = ("round", "epsilon", "clip", "sensitivity", "std")
"""Fields of a ledger's line that may differ between rounds of one plan."""
CLIPS = (1e-30, 1e30)
"""Clips whose noise, and whose mean, float32 holds."""
SECURE = (2.0**-20, 2.0**20)
"""Noise multipliers for which there is a grid (``pieces.mechanisms``)."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SOURCE = "256 bits of operating-system entropy at every start, never stored"


class Guard(AbstractContextManager["Guard"]):
    """Charges, clips, adds noise once, divides by m: one release a round, and a statement of what it cost.

    Args:
        ledger: file of the durable record; a file that is there is gone on with.
        clip: C, the L2 norm that no client's vector exceeds in the sum.
        clients, …: the plan's numbers, named as in ``fedflat.epsilon``: clients M, cohort m (default: everybody),
            rounds T, epsilon or noise_multiplier, delta (default 0.1/M), sampling, max_cohort.
        dimension: d, needed only where a round may have no vector at all before the first one with some.
        secure: noise on an exact grid that withstands attacks on floating-point arithmetic.

    A round is released once, whatever happens: one that was charged and lost in a crash is not drawn again.
    The server is trusted. Amplification holds only if the cohorts are ``cohort(round)`` and stay secret; a framework
    that chooses clients by itself needs cohort = clients.

    Raises:
        InputError: numbers out of range, a ledger of another plan.
        RunError: another process writes this ledger.
    """

    def __init__(
        self, ledger: str | Path, clip: float, *, clients: int, rounds: int, cohort: float | None = None,
        epsilon: float | None = None, noise_multiplier: float | None = None, delta: float | None = None,
        sampling: str = "poisson", max_cohort: int | None = None, dimension: int | None = None, secure: bool = True,
    ) -> None:  # fmt: skip
        self.plan = build_plan(
            clients=clients, cohort=clients if cohort is None else cohort, rounds=rounds, epsilon=epsilon,
            noise_multiplier=noise_multiplier, delta=delta, sampling=sampling, max_cohort=max_cohort,
        )  # fmt: skip
        self.clip, self.secure = whole_vector(clip), secure
        in_range("clip", self.clip.threshold, *CLIPS)
        if secure and self.plan.event_multiplier > 0:
            in_range("noise_multiplier with secure noise", self.plan.std(1.0), *SECURE)
        self._dimension = None if dimension is None else whole("dimension", dimension, 1)
        self._key = fresh_key()
        self._lock, self._process = threading.Lock(), os.getpid()
        self._ledger = Ledger.open(ledger, key_id=digest(self._key, "public name of a guard's key").hex()[:32])
        try:
            _refuse_other_plan(self._ledger, self.plan, self.clip.threshold)
        except Exception:
            self._ledger.close()
            raise
        self._ledger.describe({"secure": self.secure, "given_key": False})
        self._gone = self._ledger.rounds_recorded()

    @property
    def next_round(self) -> int:
        """The first round that may still be released."""
        return max(self._gone, default=-1) + 1

    @property
    def epsilon(self) -> float:
        """Proven ε of all that is charged so far."""
        entries = self._ledger.entries
        plan = self.plan.standing(entries)
        if plan is not self.plan:  # a client's turns follow rounds' numbers: those left out bring them no closer
            return plan.epsilon(self.next_round)
        return self.plan.epsilon(rounds_charged(0, entries))

    def cohort(self, round: int) -> NDArray[np.int64]:
        """Return the secret cohort of a round: sorted ids in [0, M). Nobody but the server may learn it."""
        return select_cohort(self._parts(1), self._key, whole("round", _plain(round)))

    def release(self, round: int, vectors: Mapping[int, Any]) -> NDArray[np.float32]:
        """Return the noisy mean ``(d,)`` of a round, charged before it exists.

        vectors: client's id -> its update ``(d,)``, floating; a client that is not there counts as zero, and so does
        one whose vector is not finite. Anything refused below is refused before the round is charged.

        Raises:
            InputError: a round that is over or not planned, ids that are not in the cohort, another shape or type.
            RunError: the ledger could not be written; the round counts as gone.
        """
        round = _plain(round)
        with self._lock:
            self._check_round(round)
            rows = self._checked(round, vectors)
            self._gone.add(round)  # the round's noise exists once: no second call may draw it
            parts = self._parts(self._dimension or 1)
            state = RoundState(round, torch.zeros(self._dimension or 1), self.clip.threshold, {})
            broadcast = broadcast_of(parts, state, 0)
            total = accumulator_of(parts, broadcast, self._key)
            for row in rows:
                total.add(row[None], [1])
            after, _ = finish_round(parts, state, broadcast, total.result(), self._key, self._ledger.append)
            return after.shared.numpy()

    def statement(self, name: str = "guard") -> dict[str, Any]:
        """Return the privacy statement of what was released so far (``fedflat.privacy.statement`` renders it)."""
        entries = self._ledger.entries
        runs = [line[RUN] for line in entries if RUN in line]  # by guards of the same ledger, this one among them
        secure = all(run["secure"] for run in runs) and self.secure
        report = statement(
            self.plan, rounds_run=len(self._ledger.rounds_recorded()), algorithm=name, seeded=False,
            facts={"clip": self.clip.threshold, "secure": secure, "simulation": False}, entries=entries,
        )  # fmt: skip
        report["noise_source"] = SOURCE
        report["not_covered"] += [
            "What else the server sends or shows: only the vectors that the guard gave back are covered.",
            *([] if self.plan.sampler.q >= 1 else ["Cohorts other than the guard's own, or ones that become known."]),
        ]
        return report

    def close(self) -> None:
        """Give the ledger back; nothing can be released afterwards."""
        self._ledger.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise wrong("guard", "a copy", "the guard itself", hint="A second one would draw the same noise.")

    def _parts(self, dimension: int) -> RoundParts:
        plan = self.plan
        noisy = self.secure and plan.event_multiplier > 0
        mechanism: Mechanism = GridNoise(plan.std) if noisy else GaussianNoise(plan.std)
        layout = Layout(("vector",), (torch.Size([dimension]),), 1)
        return RoundParts(Algorithm("guard"), plan, self.clip, mechanism, lambda view: _as_it_is, _LOCAL, layout)

    def _check_round(self, round: int) -> None:
        whole("round", round)
        if os.getpid() != self._process:
            raise RunError("guard: a copy in another process would draw the same noise; make one there")
        after, last = self.next_round, self.plan.rounds - 1
        left = f"from {after} to {last}, as planned" if after <= last else f"none more: all {last + 1} are released"
        require(after <= round <= last, "round", round, left, hint="Each round is released once.")

    def _checked(self, round: int, vectors: Mapping[int, Any]) -> list[Tensor]:
        """Return the vectors as they will be measured, in the order of ids: each id once, and copies of our own."""
        require(isinstance(vectors, Mapping), "vectors", type(vectors).__name__, "a mapping: client's id -> vector")
        vectors = dict(vectors)  # whatever else a mapping may yield twice, or differently the second time
        cohort = set(self.cohort(round).tolist())
        for client in vectors:
            whole_number = isinstance(client, (int, np.integer)) and not isinstance(client, bool)
            if not whole_number or client not in cohort:
                raise wrong("vectors", f"client {client!r}", f"clients of guard.cohort({round}), as whole numbers")
        rows = [_row(client, vectors[client]) for client in sorted(vectors)]
        require(bool(rows) or self._dimension is not None, "vectors", "none", "at least one, or Guard(…, dimension=d)")
        wanted = len(rows[0]) if self._dimension is None else self._dimension
        for client, row in zip(sorted(vectors), rows):
            require(len(row) == wanted, f"vectors[{client}]", f"{len(row)} entries", f"{wanted}, as in every vector")
        self._dimension = wanted
        return rows


_LOCAL = Local(steps=1, batch_size=1, lr=1.0)
"""Nothing is trained here."""


def _plain(round: int | np.integer[Any]) -> int:
    """Return a whole number of numpy as Python's; anything else as it is."""
    return int(round) if isinstance(round, np.integer) else round


def _as_it_is(shared: Tensor, mean: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return shared + mean, {}


def _row(client: int, vector: Any) -> Tensor:
    """Return a vector ``(d,)`` as a tensor of its own type, which nobody else can write to between norm and sum."""
    no_vector = wrong(f"vectors[{client}]", type(vector).__name__, "one vector of numbers")
    with turning((TypeError, ValueError), no_vector):
        row = vector.detach().clone() if isinstance(vector, Tensor) else torch.from_numpy(np.array(vector))
    if row.dim() != 1 or not len(row) or row.dtype not in FLOATS or row.layout != torch.strided or row.is_meta:
        found = f"shape {tuple(row.shape)}, {row.dtype}, on {row.device}"
        raise wrong(
            f"vectors[{client}]", found, "one flat, dense vector (d,) of floating-point numbers of 16 to 64 bits"
        )
    return row


def _refuse_other_plan(ledger: Ledger, plan: Plan, clip: float) -> None:
    planned = plan.record(0, clip)
    for entry in ledger.entries:
        given = entry.get(RUN, {}).get("given_key", False)
        require(not given, str(ledger.path), "rounds that were drawn with a key of the caller's", "another file")
        for name in planned:
            if name not in CHANGING and entry.get(name) != planned[name]:
                raise wrong(f"{ledger.path}: {name}", entry.get(name), f"{planned[name]!r}, as in this guard's plan")
