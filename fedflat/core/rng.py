"""Draw from named random streams: (key, purpose, round, client) names each. Of global generators only torch's
is used, by what a user's module draws; ``seeded_torch`` sets it and puts it back.

Two keys exist. The *seed* drives everything public or harmless (partition, initial weights, batches, public
masks). Cohorts and noise come from the *noise key*: 256 bits of OS entropy or, with ``privacy.randomness: seeded``, a
hash of the seed, the settled recipe, the data, the initial weights, the method and the engine.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedflat.core.checks import RunError

KEY_BYTES = 32


def _encoded(*parts: bytes) -> bytes:
    """Return the parts in one, each behind its length, so that no two lists of parts give the same."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _stream_name(key: int | bytes, purpose: str, index: Iterable[int]) -> bytes:
    head = key if isinstance(key, bytes) else f"seed:{int(key)}".encode()
    return _encoded(head, purpose.encode(), *(b"%d" % int(i) for i in index))


def digest(key: int | bytes, purpose: str, *index: int) -> bytes:
    """32 bytes that depend on every argument and on nothing else (SHA-256 of an unambiguous encoding)."""
    return hashlib.sha256(_stream_name(key, purpose, index)).digest()


def stream(key: int | bytes, purpose: str, *index: int) -> np.random.Generator:
    """Return a NumPy generator (Philox, 128-bit key) for one named purpose, usually ``(round, client)``."""
    words = np.frombuffer(digest(key, purpose, *index), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words[:2], counter=np.append(words[2:], [0, 0]).astype(np.uint64)))


class _NoGenerator:
    """Placeholder for a generator that raises when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and comparisons ask for
            raise AttributeError(name)
        raise RunError("algorithm: view.generator is for clients that train alone; set engine.backend=sequential")

    def __repr__(self) -> str:
        return "NO_GENERATOR"


NO_GENERATOR = cast(np.random.Generator, _NoGenerator())
"""The generator of a block of clients, which has none: what is drawn for one must not depend on the others."""


class Streams:
    """``stream(key, purpose, *first, *last)`` for many ``last``, without building a generator for each.

    ``each`` gives bit for bit what ``stream`` gives.
    """

    def __init__(self, key: int | bytes, purpose: str, *first: int) -> None:
        self._start = hashlib.sha256(_stream_name(key, purpose, first))
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._fresh: Any = self._philox.state

    def each(self, many: Iterable[tuple[int, ...]]) -> Iterator[np.random.Generator]:
        """Yield the generators of many streams, one after the other; each is good until the next is asked for."""
        words = np.frombuffer(b"".join(map(self._name, many)), dtype=np.uint64).reshape(-1, 4)
        # np.append in ``stream`` goes through float64; every recorded run depends on what comes out.
        keys, starts = words[:, :2], words[:, 2:].astype(np.float64).astype(np.uint64)
        state = self._fresh["state"]
        state["counter"][2:] = 0
        for state["key"][:], state["counter"][:2] in zip(keys, starts):
            self._philox.state = self._fresh
            yield self._generator

    def _name(self, last: tuple[int, ...]) -> bytes:
        name = self._start.copy()
        name.update(_encoded(*(b"%d" % i for i in last)))
        return name.digest()


@dataclass(frozen=True)
class Identity:
    """What a run is, as SHA-256 digests that stay in memory. method None: it cannot be told apart from others. noise:
    of what mixes one round's noise into others', "" where nothing does; engine: where and how it is computed. Both are
    for the key only, and no part of what the run is."""

    recipe: str
    data: str = ""
    model: str = ""
    method: str | None = ""
    noise: str = ""
    engine: str = ""

    @property
    def facts(self) -> tuple[str, ...]:
        """All of the digests, for the key of cohorts and noise."""
        four = (self.recipe, self.data, self.model, self.method)
        return (*("unknown" if part is None else part for part in four), *filter(None, (self.noise, self.engine)))


def noise_key(root: int | bytes, *facts: str, attempt: int = 1) -> bytes:
    """Return the key of cohorts and noise: a hash of the root and of everything that makes a run the run it is.

    root: a simulation's seed, or 256 bits of entropy. facts: digests of the settled recipe, data, initial weights and
    method. So two runs share noise only if they are the same run, and then they release the same; a further attempt
    at rounds that may have been released already has noise of its own.
    """
    return hashlib.sha256(_encoded(digest(root, "noise key", attempt), *map(str.encode, facts))).digest()


def fresh_key() -> bytes:
    """256 bits of operating-system entropy."""
    return secrets.token_bytes(KEY_BYTES)


class PortableDraws(TorchDispatchMode):
    """Fill tensors in torch's ``uniform_`` and ``normal_`` from a named stream, with the same bits on every processor.

    torch's own kernels compute these draws with the processor's vector instructions and round differently on each.
    NumPy draws them one by one in float64, and only then are they rounded to the tensor's precision.
    """

    def __init__(self, key: int | bytes, purpose: str, *index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = stream(key, purpose, *index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        uniform, drawn = func is torch.ops.aten.uniform_.default, self._generator
        if not uniform and func is not torch.ops.aten.normal_.default:
            return func(*args, **(kwargs or {}))
        target, a, b = (*args, 0.0, 1.0)[:3] if len(args) != 2 else (*args, 1.0)  # from a to b, or mean and deviation
        values = drawn.random(tuple(target.shape)) if uniform else drawn.standard_normal(tuple(target.shape))
        values = a + (b - a if uniform else b) * values
        return target.copy_(torch.as_tensor(values).to(target.dtype))


@contextlib.contextmanager
def seeded_torch(key: int | bytes, purpose: str, *index: int) -> Iterator[None]:
    """Run a block whose torch code can only draw from torch's own generator (module init, dropout).

    The generator's state is set from the named stream and put back afterwards, so nothing leaks in or out.
    """
    # 63 bits: torch takes signed seeds.
    number = int.from_bytes(digest(key, purpose, *index)[:8], "big") >> 1
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices, device_type="cuda"):
        # torch.manual_seed would seed a GPU that is first used later, and takes thirty times as long.
        torch.default_generator.manual_seed(number)
        if devices:
            torch.cuda.manual_seed_all(number)
        yield
