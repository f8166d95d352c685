"""Hold a federation's data: one set of tensors, and which rows are whose."""

import dataclasses
import functools
import hashlib
import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core import IGNORE, becoming, counted, in_range, nearest, require, stream, wrong
from fedflat.data.encoding import name_of
from fedflat.data.preparation import Preparation

GIVEN = "clients"
"""The name of a federation that was given in Python (``from_pairs``)."""
Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """All data of a federation, in memory once; a client is a set of row numbers.

    inputs: ``(N, ...)`` float32 (images, features) or int64 (token ids).
    targets: ``(N,)`` or ``(N, T)`` int64, in ``[0, classes)``.
    parts: training rows of every client; an empty array is a client without data. Of nobody: not given to clients yet.
    held_back: test rows of every client, never trained on (empty without ``client_test_fraction``, and if left out).
    test_inputs, test_targets: the public test set, or None.
    vocabulary: number of token ids of a text set, 0 otherwise; padding: the id that means "no token".
    most: the largest number of training examples a client may have, declared without looking at who has how many.
    names: whom each client stands for, where the data says it; never written down.
    preparation: the public steps from a row to an input, which travel with the model; None where tensors were given.
    left_out: clients whose examples are the public test data instead of being trained on.
    stated: whether the number of classes is a public constant; otherwise it follows from the largest label.
    compared: whether the users of the public test data are named, and none of them is a client.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    parts: tuple[Indices, ...] = ()
    held_back: tuple[Indices, ...] = ()
    test_inputs: torch.Tensor | None = None
    test_targets: torch.Tensor | None = None
    classes: int = 0
    name: str = GIVEN
    vocabulary: int = 0
    padding: int = 0
    most: int | None = None
    names: tuple[str, ...] = ()
    preparation: Preparation | None = None
    left_out: int = 0
    stated: bool = False
    compared: bool = False

    def __post_init__(self) -> None:
        if not self.held_back:
            object.__setattr__(self, "held_back", tuple(part[:0] for part in self.parts))
        # A bound that is stated must hold, or shapes would follow from who has how much.
        if self.most is not None and (largest := max(map(len, self.parts), default=0)) > self.most:
            raise wrong("data.most", self.most, f"at least {largest}, the examples of the largest client")

    def __repr__(self) -> str:
        test = 0 if self.test_targets is None else len(self.test_targets)
        counts = f"{counted(self.classes, 'class')}, {counted(test, 'public test example')}"
        return f"<{counted(self.clients, 'client')}, inputs {self.input_shape}, {counts}>"

    @property
    def clients(self) -> int:
        """Number of clients M, those without data included."""
        return len(self.parts)

    @property
    def unknown(self) -> bool:
        """Whether the public test data do not say whose they are."""
        return self.test_targets is not None and not (self.left_out or self.compared)

    def called(self, i: int) -> str:
        """Return the client ``i`` as messages name it."""
        return f"client {self.names[i]}" if self.names else f"clients[{i}]"

    @functools.cached_property
    def sizes(self) -> Indices:
        """Training examples of every client, ``(M,)``. Private: never a weight in a private mean."""
        counts = np.fromiter(map(len, self.parts), np.int64, len(self.parts))
        counts.flags.writeable = False
        return counts

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example, without the batch axis."""
        return tuple(self.inputs.shape[1:])

    @property
    def examples_per_client(self) -> int:
        """The public n̄ = ⌈N_train/M⌉ that turns epochs into one step count for everybody; at least 1."""
        return max(1, -(-int(self.sizes.sum()) // self.clients))

    def client(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the training data of client ``i``, in stored order: ``(n_i, ...)`` and ``(n_i,)`` or ``(n_i, T)``."""
        rows = torch.from_numpy(self.parts[i]).to(self.inputs.device)
        return self.inputs[rows], self.targets[rows]

    def fingerprint(self) -> str:
        """SHA-256 (hex) over every tensor, part and public constant: equal data, equal string. Computed once."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        bound = "" if self.most is None else f" {self.most}"
        total = hashlib.sha256(f"{self.name} {self.classes} {self.vocabulary} {self.padding}{bound}".encode())
        for value in (self.inputs, self.targets, self.test_inputs, self.test_targets, *self.parts, *self.held_back):
            if value is None:
                total.update(b"none")
                continue
            array = value.detach().cpu().contiguous().numpy() if isinstance(value, torch.Tensor) else value
            if array.dtype == np.int64 and array.ndim == 1:  # the same words, without the time a million dtypes take
                total.update(b"int64 (%d,)" % len(array))
            else:
                total.update(f"{array.dtype} {array.shape}".encode())
            total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return total.hexdigest()


def from_pairs(clients: Sequence[Any], test: Any = None, *, names: Sequence[str] = ()) -> FederatedData:
    """Return a federation from one ``(inputs, targets)`` pair per client.

    Tensors or arrays: inputs ``(n_i, ...)``, floating (kept as float32) or whole numbers (token ids, kept as
    int64), the same shape and kind at every client; targets ``(n_i,)`` or ``(n_i, T)`` whole numbers, kept as int64,
    or floating ones, kept as float32: a run's task says which of them it takes.
    A client may have no examples. ``test`` is an optional public pair of the same form. names: whose each pair is.
    Raises InputError, naming the client, for anything else.
    """
    if not isinstance(clients, Sequence):
        raise wrong("clients", type(clients).__name__, "a list of (inputs, targets) pairs, one per client")
    called = [f"client {name}" for name in names] or [f"clients[{i}]" for i in range(len(clients))]
    pairs = [_pair(where, pair) for where, pair in zip(called, clients)]
    require(bool(pairs), "clients", "no client", "at least one (inputs, targets) pair")
    public = None if test is None else _pair("test", test)
    if public is not None and any(x.numel() and x.data_ptr() == public[0].data_ptr() for x, _ in pairs):
        raise wrong("test", "a client's own tensor", "public rows, which are no client's", hint=PUBLIC)
    _same_form([(where, *pair) for where, pair in zip(called, pairs)])
    filled = [pair for pair in pairs if len(pair[0])] or pairs[:1]
    inputs, targets = (torch.cat([pair[side].to(filled[0][0].device) for pair in filled]) for side in (0, 1))
    ends = np.cumsum([0, *(len(x) for x, _ in pairs)], dtype=np.int64)
    parts = tuple(np.arange(a, b, dtype=np.int64) for a, b in itertools.pairwise(ends))
    data = FederatedData(inputs, targets, parts, classes=classes_of(targets), names=tuple(names))
    return with_test(data, public)


PUBLIC = "What is measured on test data is released without noise; test_clients leaves whole clients out."


def with_test(data: FederatedData, test: Any) -> FederatedData:
    """Return the federation with a public test pair, of the same form as its clients' data; None adds nothing."""
    if test is None:
        return data
    require(not data.left_out, "test", "test data and clients left out for it", "one of test= and test_clients")
    x, y = _pair("test", test)
    _same_form([("the clients' data", data.inputs, data.targets), ("test", x, y)])
    tested = dataclasses.replace(data, test_inputs=x, test_targets=y, classes=max(data.classes, classes_of(y)))
    refuse_private_test(tested)
    return tested


def leave_out(data: FederatedData, which: float | Sequence[str | int], where: str) -> FederatedData:
    """Return the federation without some whole clients, whose examples become the public test data.

    which: how many clients, a share of them below 1, or their names. where: the words for the setting in messages. A
    number is drawn by the clients' names alone: a client left out for one seed would be protected under another. A
    share is drawn for each client by its own name, so it comes out a little larger or smaller.

    Raises:
        InputError: there is other test data, a name that is no client's, or fewer than one client on either side.
    """
    require(data.test_targets is None, where, which, "nothing beside other public test data")
    if isinstance(which, Sequence) and not isinstance(which, str):
        numbers = {name: number for number, name in enumerate(data.names)}
        names = [name_of(name) for name in which]
        for name in names:
            if name not in numbers:
                raise wrong(where, name, "names of clients", hint=nearest(name.lstrip("0"), numbers))
        chosen = {numbers[name] for name in names}
    else:
        count = float(in_range(where, which, 0.0, open_low=True))
        allowed = "a share of the clients below 1, a whole number of them, or their names"
        require(count < 1 or count.is_integer(), where, which, allowed)
        require(count < max(1, data.clients), where, which, f"fewer than all {data.clients} clients")
        names = list(data.names) or list(map(str, range(data.clients)))
        places = [int.from_bytes(hashlib.sha256(f"left out {name}".encode()).digest()) / 2**256 for name in names]
        # By a share each client's own name decides, so that nobody is left out because somebody else has joined.
        most = count if count < 1 else sorted(places)[int(count) - 1]
        chosen = {i for i, place in enumerate(places) if (place < most if count < 1 else place <= most)}
    if not 0 < len(chosen) < data.clients:
        raise wrong(where, f"{len(chosen)} of {data.clients} clients", "at least one, and fewer than all")
    rows = torch.from_numpy(np.sort(np.concatenate([data.parts[i] for i in sorted(chosen)])))
    require(len(rows) > 0, where, "clients without examples", "clients with examples")
    stay = [i for i in range(data.clients) if i not in chosen]
    return dataclasses.replace(
        data, parts=tuple(data.parts[i] for i in stay), held_back=tuple(data.held_back[i] for i in stay),
        names=tuple(data.names[i] for i in stay) if data.names else (), test_inputs=data.inputs[rows],
        test_targets=data.targets[rows], left_out=len(chosen),
    )  # fmt: skip


def refuse_private_test(data: FederatedData) -> None:
    """Refuse public test data with clients' rows: what is measured on them would be released without noise.

    A row counts that exactly one client has. A stranger has such a row by chance no more often than clients have rows
    in common (Good and Turing count those of two; with few different rows these may all be of more), so that a single
    row is refused where no two clients have any.

    Raises:
        InputError: more such rows than three standard deviations above chance.
    """
    x, y = data.test_inputs, data.test_targets
    if x is None or y is None or data.left_out or not len(x):
        return
    parts = [np.concatenate(both) for both in zip(data.parts, data.held_back)]
    rows = torch.from_numpy(np.concatenate(parts))
    # Sorted by row and then by client, so that a row which one client has twice counts once.
    marks = _marks(data.inputs[rows], data.targets[rows])
    whose = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    order = np.lexsort((whose, marks))
    marks, whose = marks[order], whose[order]
    first = np.append(True, (marks[1:] != marks[:-1]) | (whose[1:] != whose[:-1]))[: len(marks)]
    distinct, holders = np.unique(marks[first], return_counts=True)
    asked = np.unique(_marks(x, y))
    shared = int(np.isin(asked, distinct[holders == 1]).sum())
    chance = min(1.0, 2 * int((holders > 1).sum()) / max(1, int(holders.sum())))
    if shared > chance * len(asked) + 3 * (chance * (1 - chance) * len(asked)) ** 0.5:
        overlap = f"{shared} of {len(asked)} different rows that one client has and no other"
        raise wrong("test", overlap, "public rows, which are no client's", hint=PUBLIC)


def refuse_users(clients: Iterable[Any], public: Iterable[Any], where: str) -> bool:
    """Refuse public test data of people who are clients, by their names in lower case without leading zeros (a
    table of numbers has lost them); return whether all are named.

    Raises:
        InputError: somebody is in both.
    """
    bare_names = {_bare(name_of(name)) for name in clients}
    users = set(map(name_of, public))
    both = sorted(name for name in users if _bare(name) in bare_names)
    if both:
        overlap = f"rows of {counted(len(both), 'client')}, such as {both[0]}"
        raise wrong(where, overlap, "public rows, which are no client's", hint=PUBLIC)
    return "" not in users


def _bare(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold().lstrip("0") or name[-1:]


def _marks(inputs: torch.Tensor, targets: torch.Tensor) -> Indices:
    """Return one number for each row, equal for equal rows."""
    # Adding 0 makes one zero of two.
    x, y = (((side.cpu() + 0).flatten(1) if side.ndim > 1 else side.cpu() + 0).numpy() for side in (inputs, targets))
    return np.fromiter((hash((a.tobytes(), b.tobytes())) for a, b in zip(x, y)), np.int64, len(x))


def classes_of(*targets: torch.Tensor | None) -> int:
    """Return one more than the largest class number."""
    labels = [t for t in targets if t is not None and t.numel() and not t.is_floating_point()]
    return 1 + max((int(t.max()) for t in labels), default=0)


def made_rows(data: FederatedData, rows: int, draw: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return made-up inputs and targets ``(rows, …)`` in the form of a federation's, of public numbers only."""

    def rows_like(like: torch.Tensor, below: int) -> torch.Tensor:
        shape = (rows, *like.shape[1:])
        values = draw.random(shape, dtype=np.float32) if like.is_floating_point() else draw.integers(0, below, shape)
        return torch.from_numpy(values).to(like.device, like.dtype)

    return rows_like(data.inputs, max(1, data.vocabulary)), rows_like(data.targets, max(1, data.classes))


def bounded(parts: Sequence[Indices], most: int, key: int | bytes) -> tuple[Indices, ...]:
    """At most so many rows of every client, sorted: the first of a draw by ``key``, its number and its size only."""
    rows = list(parts)
    for i, part in enumerate(parts):
        if len(part) > most:
            rows[i] = np.sort(part[stream(key, "bound on examples", i).permutation(len(part))[:most]])
    return tuple(rows)


def hold_back(
    parts: Sequence[Indices], fraction: float, key: int | bytes
) -> tuple[tuple[Indices, ...], tuple[Indices, ...]]:
    """Split every client's rows into (train, held back), both sorted; ``fraction`` in [0, 1), rounded to nearest.

    The draw of one client depends on ``key``, its number and its size only. A client keeps at least one
    example for training, so one that has a single example holds nothing back.
    """
    in_range("data.client_test_fraction", fraction, 0.0, 1.0, open_high=True)
    train, test = [], []
    for i, part in enumerate(parts):
        # One example at least stays for training.
        count = min(int(np.floor(fraction * len(part) + 0.5)), max(len(part) - 1, 0))
        mask = np.zeros(len(part), dtype=bool)
        if count:
            mask[stream(key, "held-back examples", i).permutation(len(part))[:count]] = True
        train.append(np.sort(part[~mask]).astype(np.int64))
        test.append(np.sort(part[mask]).astype(np.int64))
    return tuple(train), tuple(test)


def _pair(where: str, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one checked pair, each side as float32 or int64."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        hint = "fedflat.clients(…) takes tables and torch data sets too." if not isinstance(pair, (tuple, list)) else ""
        raise wrong(where, type(pair).__name__, "an (inputs, targets) pair", hint=hint)
    x, y = (_tensor(f"{where} {side}", value) for side, value in zip(("inputs", "targets"), pair))
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        shapes = f"inputs of shape {tuple(x.shape)}, targets of shape {tuple(y.shape)}"
        raise wrong(where, shapes, "as many targets as inputs")
    require(y.ndim <= 2, f"{where} targets", f"shape {tuple(y.shape)}", "(n,) or (n, T)")
    ignored = where == "test" and y.ndim == 2 and y.numel() and y.dtype == torch.int64 and bool((y == IGNORE).all())
    require(not ignored, "test targets", f"{IGNORE} alone, which does not count", "at least one that counts")
    # No targets, as torch.tensor([]), are of the kind float32: nothing can be wrong with them.
    return _finite(f"{where} inputs", x), _finite(f"{where} targets", y if len(y) else y.long())


def _finite(where: str, values: torch.Tensor) -> torch.Tensor:
    """As float32 or int64. Raises InputError, naming the row, for a number that is not finite as such."""
    require(not values.is_complex(), where, f"dtype {values.dtype}", "floating-point or whole numbers")
    if values.dtype == torch.uint64 and bool((values.view(torch.int64) < 0).any()):
        raise wrong(where, "a whole number of 2^63 or more", "whole numbers of 64 bits with a sign")
    values = values.to(torch.float32 if values.is_floating_point() else torch.int64)
    if not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).nonzero()[0, 0])
        raise wrong(f"{where}[{row}]", "a NaN or infinite value", "finite numbers")
    return values


def first_above(data: FederatedData, classes: int) -> str:
    """Whose target is the first that is not below ``classes``, and where: ``clients[3] targets[17] is 7``."""
    for i, part in enumerate(data.parts):
        high = data.targets[torch.from_numpy(part)] >= classes
        if bool(high.any()):
            row = int(high.nonzero()[0, 0])
            return f"clients[{i}] targets[{row}] is {int(data.targets[int(part[row])].max())}"
    return f"the data has {data.classes} classes"


def _tensor(where: str, value: Any) -> torch.Tensor:
    kinds, allowed = (TypeError, ValueError, RuntimeError), "a tensor or an array of numbers"
    with becoming(lambda _: wrong(where, type(value).__name__, allowed), kinds):
        return value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))


def _same_form(named: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Raise unless all non-empty pairs agree in shape and dtype."""
    filled = [item for item in named if len(item[1])]
    for where, *pair in filled[1:]:
        first, *wanted = filled[0]
        for side, a, b in zip(("inputs", "targets"), wanted, pair):
            if a.shape[1:] != b.shape[1:]:
                allowed = f"{tuple(a.shape[1:])} per example, as in {first}"
                raise wrong(f"{where} {side}", f"shape {tuple(b.shape[1:])} per example", allowed)
            require(a.dtype == b.dtype, f"{where} {side}", f"dtype {b.dtype}", f"{a.dtype}, as in {first}")
