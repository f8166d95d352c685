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

from fedflat.core.checks import RunError, in_range, require, turning, whole, wrong
from fedflat.core.params import Layout
from fedflat.core.rng import KEY_BYTES, digest, fresh_key
from fedflat.core.types import Algorithm, Local, Mechanism, RoundState
from fedflat.engine.round import RoundParts, accumulator_of, broadcast_of, finish_round, select_cohort
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
GIVEN = "a key that the caller gave: whoever knows it can remove the noise"

_used: set[str] = set()
"""Public names of the keys that guards of this process draw with."""


class Guard(AbstractContextManager["Guard"]):
    """Charges, clips, adds noise once, divides by m: one release a round, and a statement of what it cost.

    Args:
        ledger: file of the durable record; a file that is there is gone on with.
        clip: C, the L2 norm that no client's vector exceeds in the sum.
        plan: what a round spends; or the numbers it is made of, named as in ``fedflat.epsilon``: clients M, cohort m
            (default: everybody), rounds T, epsilon or noise_multiplier, delta (default 0.1/M), sampling, max_cohort.
        dimension: d, needed only where a round may have no vector at all before the first one with some.
        secure: noise on an exact grid that withstands attacks on floating-point arithmetic.
        key: 32 bytes that cohorts and noise are drawn from, for simulations; by default fresh entropy at each start.

    A round is released once, whatever happens: one that was charged and lost in a crash is not drawn again.
    The server is trusted. Amplification holds only if the cohorts are ``cohort(round)`` and stay secret; a framework
    that chooses clients by itself needs cohort = clients.

    Raises:
        InputError: numbers out of range, a plan of another mechanism, a ledger of another plan, a key used before.
        RunError: another process writes this ledger.
    """

    def __init__(
        self, ledger: str | Path, clip: float, plan: Plan | None = None, *, clients: int | None = None,
        cohort: float | None = None, rounds: int | None = None, epsilon: float | None = None,
        noise_multiplier: float | None = None, delta: float | None = None, sampling: str = "poisson",
        max_cohort: int | None = None, dimension: int | None = None, secure: bool = True, key: bytes | None = None,
    ) -> None:  # fmt: skip
        numbers = {"clients": clients, "rounds": rounds, "epsilon": epsilon, "noise_multiplier": noise_multiplier}
        numbers |= {"delta": delta, "cohort": cohort, "max_cohort": max_cohort}
        self.plan = _plan_of(numbers, sampling) if plan is None else _served(plan, numbers)
        self.clip, self.secure = whole_vector(clip), secure
        in_range("clip", self.clip.threshold, *CLIPS)
        if secure and self.plan.event_multiplier > 0:
            in_range("noise_multiplier with secure noise", self.plan.std(1.0), *SECURE)
        self._dimension = None if dimension is None else whole("dimension", dimension, 1)
        self._key_given = key is not None
        self._key = _key(key)
        self._name = digest(self._key, "public name of a guard's key").hex()[:32]
        self._lock, self._process = threading.Lock(), os.getpid()
        self._ledger = Ledger.open(ledger, key_id=self._name)
        try:
            _refuse_other_plan(self._ledger, self.plan, self.clip.threshold)
            if self._name in _used or any(line.get("key_id") == self._name for line in self._ledger.entries):
                raise wrong("key", "one that was drawn with before", "none, or 32 bytes that were never used")
        except Exception:
            self._ledger.close()
            raise
        _used.add(self._name)
        self._ledger.describe({"secure": self.secure, "given_key": self._key_given})
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
        given_key = any(run["given_key"] for run in runs) or self._key_given
        report = statement(
            self.plan, rounds_run=len(self._ledger.rounds_recorded()), algorithm=name, key_source="os-entropy",
            facts={"clip": self.clip.threshold, "secure": secure, "simulation": False}, entries=entries,
        )  # fmt: skip
        report["noise_source"] = GIVEN if given_key else SOURCE
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
        if round in self._gone:
            raise wrong("round", round, f"{self.next_round} or later", hint="Each round is released once.")
        if round < self.next_round or round >= self.plan.rounds:
            raise wrong("round", round, f"from {self.next_round} to {self.plan.rounds - 1}, as planned")

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
        kind = "" if row.layout == torch.strided else ", sparse"
        found = f"shape {tuple(row.shape)}, {str(row.dtype).removeprefix('torch.')}{', meta' if row.is_meta else kind}"
        raise wrong(f"vectors[{client}]", found, "one flat vector (d,) of floating-point numbers of 16 to 64 bits")
    return row


def _plan_of(numbers: dict[str, Any], sampling: str) -> Plan:
    """Return the plan of the numbers given; everybody takes part where no cohort is named."""
    for name in ("clients", "rounds"):
        require(numbers[name] is not None, name, "nothing", "a whole number ≥ 1, or a plan")
    cohort = numbers.pop("cohort")
    return build_plan(cohort=numbers["clients"] if cohort is None else cohort, sampling=sampling, **numbers)


def _served(plan: Plan, numbers: Mapping[str, Any]) -> Plan:
    """Return a plan given instead of numbers, if it is of the Gaussian sum under a trusted server."""
    require(all(value is None for value in numbers.values()), "plan", "a plan and numbers", "one of both")
    if not isinstance(plan, Plan):
        raise wrong("plan", type(plan).__name__, "a plan of fedflat.privacy.plan, or the numbers by their names")
    other = plan.mechanism is not None or plan.noise_cohort is not None or plan.count_std is not None
    if other or not plan.private or plan.trust != "central" or plan.protocol != "sound":
        raise wrong("plan", "another mechanism or trust model", "Gaussian noise on one clip, trust central, sound")
    return plan


def _key(key: bytes | None) -> bytes:
    if key is None:
        return fresh_key()
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise wrong("key", "another value", f"{KEY_BYTES} bytes, or none for fresh entropy")
    return key


def _refuse_other_plan(ledger: Ledger, plan: Plan, clip: float) -> None:
    planned = plan.record(0, clip)
    for entry in ledger.entries:
        for name in planned:
            if name not in CHANGING and entry.get(name) != planned[name]:
                raise wrong(f"{ledger.path}: {name}", entry.get(name), f"{planned[name]!r}, as in this guard's plan")
