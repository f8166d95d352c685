"""Make a federation from whatever holds a user's data (``fedflat.clients``), one client for each owner."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedflat.core.checks import nearest, whole, wrong
from fedflat.data.clients import (
    GIVEN,
    PUBLIC,
    FederatedData,
    Indices,
    bounded,
    classes_of,
    from_pairs,
    leave_out,
    refuse_private_test,
)
from fedflat.data.encoding import (
    Encoding,
    Words,
    clean,
    encoding_of,
    inputs_of,
    names_of,
    targets_of,
    with_words,
    words_of,
)
from fedflat.data.preparation import Preparation

if TYPE_CHECKING:
    import pandas as pd

ALLOWED = (
    "a table with a column of users (pandas, Hugging Face, pyarrow) and by=, a dict user -> data, a list with one "
    "(inputs, targets) pair, torch Dataset or table per client, or one torch Dataset and by= an owner for each example"
)


def clients(
    source: Any,
    by: str | Sequence[Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    *,
    categories: Mapping[str, Sequence[Any]] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None,
    fill: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    vocabulary: int | None = None,
    tokenizer: str | None = None,
    max_examples: int | None = None,
    test: Any = None,
    test_clients: float | Sequence[str] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Return a federation for ``fedflat.run(recipe, clients=...)``: every user one client, with all of its examples.

    source: a table (a pandas or Polars DataFrame, a Hugging Face Dataset, a pyarrow Table) with ``by`` the column that
    names the user; a dict user -> (inputs, targets), torch Dataset or table; a list of such, one per client; or one
    torch Dataset or pair with ``by`` a sequence, the user of each example.
    inputs, target: columns of tables; they must be numbers, true and false, or lists of numbers of one shape; an input
    may be images (Hugging Face's, encoded bytes, Pillow's), which become (C, H, W) with pixels over 255. A column of
    free text alone (or several) becomes token ids: words hashed to ``vocabulary`` numbers, or by a transformers
    ``tokenizer``, cut at ``max_length``.
    categories: column -> all its values, for text and codes: a 0/1 feature for each, or the class number of a target.
    scale: column -> (mean, std), public constants. Nothing is ever learnt from the rows.
    fill: column -> the public value that stands for a missing one.
    max_examples: public bound on each client's examples: the first so many of a draw by ``seed``.
    test: public test data of the same form, without users; what is measured on it is released without noise.
    test_clients: instead, how many whole clients (a number, a share, or their names) are left out of training, so that
    their examples are the public test data.
    Clients are in the order of their names. Raises InputError naming row, client and column of what cannot be used.

    >>> data = {"ann": (torch.zeros(3, 4), torch.tensor([0, 1, 1])), "bob": (torch.ones(2, 4), torch.tensor([1, 0]))}
    >>> found = clients(data)
    >>> found.clients, found.sizes.tolist(), found.classes
    (2, [3, 2], 2)
    """
    if type(source).__name__.endswith("DatasetDict"):
        raise wrong("clients", f"all splits ({', '.join(source)})", "one split, for example data['train']")
    if test is not None and test is source:
        raise wrong("test", "the clients' own data", "public rows, which are no client's", hint=PUBLIC)
    words = words_of("clients: ", max_length, vocabulary, tokenizer)
    columns: dict[str, Any] = {"inputs": inputs, "target": target, "categories": categories}
    columns |= {"scale": scale, "fill": fill}
    asked = functools.partial(_encoding, words=words, **columns)
    found = _found(source, by, asked, test)
    if test_clients is not None:
        found = leave_out(found, test_clients, seed, "clients: test_clients")
    if max_examples is None:
        return found
    whole("max_examples", max_examples, 1)
    return replace(found, parts=bounded(found.parts, max_examples, seed), most=max_examples)


def _found(source: Any, by: Any, asked: Any, test: Any) -> FederatedData:
    """Return the federation of a source of any kind. asked: a table's encoding."""
    if isinstance(source, Mapping):
        named = sorted(((str(user), data) for user, data in source.items()), key=lambda pair: pair[0])
        _refuse(by, "a dict has its users for keys")
        return _several([data for _, data in named], [user for user, _ in named], asked, test)
    if _is_table(source):
        return _table(source, by, asked, test)
    if by is not None and not isinstance(by, str):
        return _whole(source, by, test)
    if not isinstance(source, Sequence) or isinstance(source, str):
        raise wrong("clients", type(source).__name__, ALLOWED)
    _refuse(by, "the list has one entry per client")
    return _several(list(source), [], asked, test)


def _refuse(by: Any, why: str) -> None:
    if by is not None:
        raise wrong("clients: by", by, f"none, since {why}")


def _encoding(frame: pd.DataFrame, by: str | None = None, words: Words | None = None, **asked: Any) -> Encoding:
    columns = [str(column) for column in frame.columns if column != by]
    found = encoding_of("clients: ", columns, **asked)
    return with_words("clients: ", frame, found, words)


def _is_table(source: Any) -> bool:
    return hasattr(source, "to_pandas") or (hasattr(source, "iloc") and hasattr(source, "columns"))


def frame_of(source: Any) -> pd.DataFrame:
    """Return any table as a pandas DataFrame with clean column names and rows numbered from 0."""
    found = source.to_pandas() if hasattr(source, "to_pandas") else source
    found = found.reset_index(drop=True)
    found = found.set_axis([clean(column) for column in found.columns], axis=1)
    twice = found.columns[found.columns.duplicated()]
    if len(twice):
        raise wrong("clients", f"two columns called {twice[0]}", "columns with different names")
    return found


def _table(source: Any, by: Any, asked: Any, test: Any) -> FederatedData:
    frame = frame_of(source)
    if not isinstance(by, str):
        if by is None:
            raise wrong("clients: by", "nothing", f"the column that names the client: {_listed(frame)}")
        frame, by = frame.assign(**{"by=": _each(by, len(frame))}), "by="
    by = clean(by)
    if by not in frame.columns:
        allowed = f"one of the columns {_listed(frame)}"
        raise wrong("clients: by", by, allowed, hint=nearest(by, map(str, frame.columns)))
    missing = frame[by].isna().to_numpy(dtype=bool)
    if missing.any():
        allowed = "the client that the row belongs to"
        raise wrong(f"row {int(missing.argmax())}, column {by}", "a missing value", allowed)
    names, codes = np.unique(np.array([str(value) for value in frame[by].tolist()]), return_inverse=True)
    codes = codes.reshape(-1)
    return _encoded(frame, names.tolist(), codes, asked(frame, by), test)


def _listed(frame: pd.DataFrame) -> str:
    return ", ".join(map(str, frame.columns))


def _encoded(frame: pd.DataFrame, names: list[str], codes: Indices, encoding: Encoding, test: Any) -> FederatedData:
    """Return one table whose row ``i`` belongs to client ``codes[i]``."""
    if not names:
        raise wrong("clients", "a table without rows", "at least one client's example")
    # A client's rows stay in their order, and lie together.
    order = np.argsort(codes, kind="stable")
    frame, whose = frame.iloc[order], codes[order]

    def place(row: int) -> str:
        return f"row {order[row]}, client {names[whose[row]]}"

    ends = np.searchsorted(whose, np.arange(len(names) + 1))
    parts = tuple(np.arange(a, b, dtype=np.int64) for a, b in itertools.pairwise(ends))
    public = None if test is None else _public(test, encoding)
    x, y = inputs_of(frame, encoding, place), targets_of(frame, encoding, place)
    _same_shape(public, x, y)
    empty = tuple(np.empty(0, dtype=np.int64) for _ in parts)
    test_x, test_y = public or (None, None)
    classes = encoding.classes or classes_of(y, test_y)
    found = FederatedData(x, y, parts, empty, test_x, test_y, classes, GIVEN, names=tuple(names))
    refuse_private_test(found)
    words = encoding.words
    if words is not None:
        _, vocabulary, padding = words.ids([])
        found = replace(found, vocabulary=vocabulary, padding=padding)
    preparation = Preparation("table", encoding, names=names_of(frame, encoding))
    return replace(found, preparation=preparation, stated=bool(preparation.names))


def _public(test: Any, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    if not _is_table(test):
        raise wrong("clients: test", type(test).__name__, "a table with the same columns")
    frame = frame_of(test)
    for name in (*encoding.inputs, *encoding.target):
        if name not in frame.columns:
            raise wrong("clients: test", f"no column {name}", f"the columns of the clients; there are {_listed(frame)}")

    def place(row: int) -> str:
        return f"test row {row}"

    return inputs_of(frame, encoding, place), targets_of(frame, encoding, place)


def _same_shape(public: tuple[torch.Tensor, torch.Tensor] | None, x: torch.Tensor, y: torch.Tensor) -> None:
    for side, here, there in zip(("inputs", "targets"), public or (), (x, y)):
        if here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
            allowed = f"{tuple(there.shape[1:])} of {there.dtype} per example, as at the clients"
            raise wrong(f"test {side}", f"shape {tuple(here.shape[1:])} of {here.dtype} per example", allowed)


def _several(data: list[Any], names: list[str], asked: Any, test: Any) -> FederatedData:
    """Return one entry per client: pairs, torch Datasets, or tables."""
    if data and all(_is_table(entry) for entry in data):
        import pandas as pd

        frames = [frame_of(entry) for entry in data]
        shown = names or [str(i) for i in range(len(data))]
        codes = np.repeat(np.arange(len(frames), dtype=np.int64), [len(frame) for frame in frames])
        encoding = asked(frames[0])
        for frame, name in zip(frames, shown):
            for column in (*encoding.inputs, *encoding.target):
                if column not in frame.columns:
                    raise wrong(f"client {name}", f"no column {column}", f"the columns {_listed(frames[0])}")
        return _encoded(pd.concat(frames, ignore_index=True), shown, codes, encoding, test)
    called = [f"client {name}" for name in names] or [f"clients[{i}]" for i in range(len(data))]
    pairs = [_examples(where, entry) for where, entry in zip(called, data)]
    public = None if test is None else _examples("test", test)
    return from_pairs(pairs, public, fractions=True, names=names)


def _examples(where: str, entry: Any) -> Any:
    """Return a pair as it is; a torch Dataset as the pair of its stacked examples."""
    if isinstance(entry, (tuple, list)) or not (hasattr(entry, "__getitem__") and hasattr(entry, "__len__")):
        return entry
    if isinstance(entry, torch.utils.data.TensorDataset) and len(entry.tensors) == 2:
        return entry.tensors
    if isinstance(entry, (str, bytes, np.ndarray, torch.Tensor, Mapping)):
        return entry
    examples = [entry[i] for i in range(len(entry))]
    if not examples:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    for row, example in enumerate(examples):
        if not isinstance(example, (tuple, list)) or len(example) != 2:
            raise wrong(f"{where}, row {row}", type(example).__name__, "an (input, target) pair of tensors or numbers")
    return tuple(_stacked(where, side, [example[side] for example in examples]) for side in (0, 1))


def _stacked(where: str, side: int, values: list[Any]) -> torch.Tensor:
    part = ("inputs", "targets")[side]
    tensors = []
    for row, value in enumerate(values):
        try:
            tensors.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError):
            raise wrong(f"{where} {part}, row {row}", type(value).__name__, "a tensor, an array or a number") from None
        if tensors[row].shape != tensors[0].shape or tensors[row].dtype != tensors[0].dtype:
            found = f"shape {tuple(tensors[row].shape)} of {tensors[row].dtype}"
            allowed = f"shape {tuple(tensors[0].shape)} of {tensors[0].dtype}, as in row 0"
            raise wrong(f"{where} {part}, row {row}", found, allowed)
    return torch.stack(tensors)


def _each(by: Any, rows: int) -> list[Any]:
    """Return the owner of every example, as a list."""
    owners = by.tolist() if hasattr(by, "tolist") else list(by)
    if len(owners) != rows:
        raise wrong("clients: by", f"{len(owners)} owners", f"one for each of the {rows} examples")
    return owners


def _whole(source: Any, by: Any, test: Any) -> FederatedData:
    """Return one pair or torch Dataset whose examples belong to the owners in ``by``."""
    pair = _examples("data", source)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise wrong("clients", type(source).__name__, ALLOWED)
    x, y = (side if isinstance(side, torch.Tensor) else np.asarray(side) for side in pair)
    owners = np.array([str(value) for value in _each(by, len(x))])
    if len(y) != len(x):
        raise wrong("clients", f"{len(x)} inputs and {len(y)} targets", "as many targets as inputs")
    if not len(owners):
        raise wrong("clients", "no examples", "at least one client's example")
    names, counts = np.unique(owners, return_counts=True)
    rows = np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])
    public = None if test is None else _examples("test", test)
    return from_pairs([(x[own], y[own]) for own in rows], public, fractions=True, names=names.tolist())


def prepared(rows: Any, preparation: Preparation | None, known: Mapping[str, Any]) -> torch.Tensor:
    """Return the inputs ``(N, ...)`` of rows to predict: a table's by the run's preparation, tensors as they are.

    known: the ``input_shape`` and ``dtype`` that the model takes, where the run says them.

    Raises:
        InputError: rows that cannot be used, with row and column; or of another shape than those trained on.
    """
    if _is_table(rows):
        if preparation is None:
            raise wrong("predict", "a table", "a tensor or array of inputs, as the run was given")
        found = preparation.inputs(frame_of(rows))
    else:
        try:
            found = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            raise wrong("predict", type(rows).__name__, "a table, or a tensor or array of inputs") from None
        found = found if known.get("dtype", "float32") != "float32" else found.float()
    shape = tuple(known.get("input_shape", found.shape[1:]))
    if found.dim() == 0 or tuple(found.shape[1:]) != shape or not len(found):
        raise wrong("predict", f"inputs of shape {tuple(found.shape)}", f"(N, {', '.join(map(str, shape))}), N ≥ 1")
    return found
