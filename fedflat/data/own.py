"""Make a federation from whatever holds a user's data (``fedflat.clients``), one client for each owner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedflat.core import counted, one_of, require, turning, whole, wrong
from fedflat.data.clients import FederatedData, bounded, classes_of, from_pairs, leave_out, refuse_users, with_test
from fedflat.data.encoding import Encoding, check_columns, clean, clean_names, encoding_of, name_of, owners_of
from fedflat.data.preparation import Preparation

if TYPE_CHECKING:
    import pandas as pd

    from fedflat.data.clients import Indices

ALLOWED = (
    "a table with a column of users (pandas, Hugging Face, pyarrow) and by=, a dict user -> data, a list with one "
    "(inputs, targets) pair, torch Dataset or table per client, or one torch Dataset and by= an owner for each example"
)


def clients(
    source: Any, by: str | Sequence[Any] | None = None, inputs: str | Sequence[str] | None = None,
    target: str | Sequence[str] | None = None, *, categories: Mapping[str, Sequence[Any]] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None, fill: Mapping[str, Any] | None = None,
    max_length: int | None = None, vocabulary: int | None = None, tokenizer: str | None = None,
    max_examples: int | None = None, test: Any = None, test_clients: float | Sequence[str | int] | None = None,
    seed: int = 0,
) -> FederatedData:  # fmt: skip
    """Return a federation for ``fedflat.run(recipe, clients=...)``: every user one client, with all of its examples.

    source: a table (a pandas or Polars DataFrame, a Hugging Face Dataset, a pyarrow Table) with ``by`` the column that
    names the user; a dict user -> (inputs, targets), torch Dataset or table; a list of such, one per client; or one
    torch Dataset or pair with ``by`` a sequence, the user of each example.
    inputs, target: columns of tables; they must be numbers, true and false, or lists of numbers of one shape; an input
    may be images (Hugging Face's, encoded bytes, Pillow's), which become (C, H, W) with pixels over 255. With
    one of ``vocabulary``, ``tokenizer`` and ``max_length`` inputs are texts and become token ids: words hashed to so
    many numbers, or by a transformers tokenizer, cut at that length.
    categories: column -> all its values, for text and codes: a 0/1 feature for each, or the class number of a target.
    scale: column -> (mean, std), public constants. Nothing is ever learnt from the rows.
    fill: column -> the public value that stands for a missing one.
    max_examples: public bound on each client's examples: the first so many of a draw by ``seed``.
    test: public test data of the same form, of no client; what is measured on it is released without noise. A table is
    compared by user where it has the column ``by``.
    test_clients: instead, how many whole clients (a number, a share, or their names) are left out of training, so that
    their examples are the public test data; a number is drawn by their names, whatever the seed.
    Clients are in the order of their names. Raises InputError naming row, client and column of what cannot be used.

    >>> data = {"ann": (torch.zeros(3, 4), torch.tensor([0, 1, 1])), "bob": (torch.ones(2, 4), torch.tensor([1, 0]))}
    >>> federation = clients(data)
    >>> federation.clients, federation.sizes.tolist(), federation.classes
    (2, [3, 2], 2)
    """
    if type(source).__name__.endswith("DatasetDict"):
        raise wrong("clients", f"all splits ({', '.join(source)})", "one split, for example data['train']")
    options: dict[str, Any] = {"inputs": inputs, "target": target, "categories": categories, "scale": scale}
    options |= {"fill": fill, "max_length": max_length, "vocabulary": vocabulary, "tokenizer": tokenizer}

    def encoding(frame: pd.DataFrame) -> Encoding:
        return encoding_of("clients: ", [column for column in frame.columns if column != by], **options)

    by = clean(by) if isinstance(by, str) else by
    federation = _federation(source, by, encoding, test)
    for name, value in options.items() if federation.preparation is None else ():
        require(value is None, f"clients: {name}", value, "nothing beside clients that are no tables")
    if test_clients is not None:
        federation = leave_out(federation, test_clients, "clients: test_clients")
    if max_examples is None:
        return federation
    whole("max_examples", max_examples, 1)
    return replace(federation, parts=bounded(federation.parts, max_examples, seed), most=max_examples)


Rule = Callable[["pd.DataFrame"], Encoding]
"""What makes the encoding of a table."""


def _federation(source: Any, by: Any, encoding: Rule, test: Any) -> FederatedData:
    """Return the federation of a source of any kind."""
    if _is_table(source):
        return _table(source, by, encoding, test)
    names: list[str] = []
    if isinstance(source, Mapping):
        require(by is None, "clients: by", by, "none, since a dict has its users for keys")
        named = {name_of(user): data for user, data in source.items()}
        require(len(named) == len(source), "clients", "two users of one name, but for blanks around it", "each once")
        names = sorted(named)
        source = [named[name] for name in names]
    elif by is not None and not isinstance(by, str):
        names, source = _by_owner(source, by)
    elif not isinstance(source, Sequence) or isinstance(source, str):
        raise wrong("clients", type(source).__name__, ALLOWED)
    elif by is not None:
        raise wrong("clients: by", by, "none, since the list has one entry per client")
    if source and all(_is_table(entry) for entry in source):
        return _tables(source, names, encoding, test)
    called = [f"client {name}" for name in names] or [f"clients[{i}]" for i in range(len(source))]
    pairs = [_examples(where, entry) for where, entry in zip(called, source)]
    return from_pairs(pairs, None if test is None else _examples("test", test), names=names)


def _is_table(source: Any) -> bool:
    return hasattr(source, "to_pandas") or (hasattr(source, "iloc") and hasattr(source, "columns"))


def _frame(source: Any, where: str = "clients") -> pd.DataFrame:
    """Return any table as a pandas DataFrame with clean column names and rows numbered from 0."""
    frame = (source.to_pandas() if hasattr(source, "to_pandas") else source).reset_index(drop=True)
    return frame.set_axis(list(clean_names(list(frame.columns), "the table", where).values()), axis=1)


def _table(source: Any, by: Any, encoding: Rule, test: Any) -> FederatedData:
    """Return the federation of one table, whose users the column ``by`` names."""
    frame = _frame(source)
    allowed = f"the column that names the client: {', '.join(frame.columns)}"
    require(isinstance(by, str), "clients: by", "nothing" if by is None else type(by).__name__, allowed)
    owners = owners_of(frame[one_of("clients: by", by, frame.columns)].tolist(), f"column {by}")
    names, codes = np.unique(np.array(owners), return_inverse=True)
    return _encoded(frame, names.tolist(), codes.reshape(-1), encoding(frame), test, by)


def _tables(entries: Sequence[Any], names: list[str], encoding: Rule, test: Any) -> FederatedData:
    """Return the federation of one table for each client."""
    import pandas as pd

    frames = [_frame(entry) for entry in entries]
    labels = names or [str(i) for i in range(len(frames))]
    codes = np.repeat(np.arange(len(frames), dtype=np.int64), [len(frame) for frame in frames])
    rule = encoding(frames[0])
    for frame, name in zip(frames, labels):
        check_columns(f"client {name}", (*rule.inputs, *rule.target), frame.columns)
    return _encoded(pd.concat(frames, ignore_index=True), labels, codes, rule, test)


def _encoded(
    frame: pd.DataFrame, names: list[str], codes: Indices, encoding: Encoding, test: Any, by: str | None = None
) -> FederatedData:
    """Return one table whose row ``i`` belongs to client ``codes[i]``. by: the column of users, if there is one."""
    require(bool(names), "clients", "a table of 0 rows", "at least one client's row")
    # A client's rows stay in their order, and lie together.
    order = np.argsort(codes, kind="stable")
    frame, whose = frame.iloc[order], codes[order]

    def place(row: int) -> str:
        return f"row {order[row]}, client {names[whose[row]]}"

    public, compared = _public(test, names, encoding, by)
    x, y = encoding.examples_of(frame, place)
    ends = np.searchsorted(whose, np.arange(len(names) + 1))
    parts = tuple(np.arange(a, b, dtype=np.int64) for a, b in itertools.pairwise(ends))
    vocabulary, padding = encoding.tokens
    truth = len(encoding.target) == 1 and frame[encoding.target[0]].dtype == bool
    classes = encoding.names or ((False, True) if truth else ())
    federation = FederatedData(
        x, y, parts, classes=len(encoding.names) or classes_of(y), vocabulary=vocabulary, padding=padding,
        names=tuple(names), preparation=Preparation("table", encoding, names=classes), stated=bool(classes),
        compared=compared,
    )  # fmt: skip
    return with_test(federation, public)


def _public(test: Any, names: list[str], encoding: Encoding, by: str | None) -> tuple[Any, bool]:
    """Return the examples of a public test table, and whether it names its users, none of whom is a client."""
    if test is None:
        return None, False
    require(_is_table(test), "clients: test", type(test).__name__, "a table with the same columns")
    rows = _frame(test, "clients: test")
    check_columns("clients: test", (*encoding.inputs, *encoding.target), rows.columns)
    compared = by in rows.columns and refuse_users(names, rows[by].tolist(), "clients: test")
    return encoding.examples_of(rows, lambda row: f"test row {row}"), compared


def _examples(where: str, entry: Any) -> Any:
    """Return a pair as it is; a torch Dataset as the pair of its stacked examples."""
    if isinstance(entry, torch.utils.data.TensorDataset) and len(entry.tensors) == 2:
        return entry.tensors
    plain = (tuple, list, str, bytes, np.ndarray, torch.Tensor, Mapping)
    if isinstance(entry, plain) or not (hasattr(entry, "__getitem__") and hasattr(entry, "__len__")):
        return entry
    examples = [entry[i] for i in range(len(entry))]
    if not examples:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    for row, example in enumerate(examples):
        if not isinstance(example, (tuple, list)) or len(example) != 2:
            raise wrong(f"{where}, row {row}", type(example).__name__, "an (input, target) pair of tensors or numbers")
    return tuple(_stacked(f"{where} {part}", side) for part, side in zip(("inputs", "targets"), zip(*examples)))


def _stacked(where: str, values: Sequence[Any]) -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    for row, value in enumerate(values):
        try:
            tensors.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError):
            raise wrong(f"{where}, row {row}", type(value).__name__, "a tensor, an array or a number") from None
        form, expected = (f"shape {tuple(one.shape)} of {one.dtype}" for one in (tensors[row], tensors[0]))
        if form != expected:
            raise wrong(f"{where}, row {row}", form, f"{expected}, as in row 0")
    return torch.stack(tensors)


def _by_owner(source: Any, by: Any) -> tuple[list[str], list[Any]]:
    """Return the owners of a pair's or torch Dataset's examples, and the pair of each."""
    pair = _examples("data", source)
    require(isinstance(pair, (tuple, list)) and len(pair) == 2, "clients", type(source).__name__, ALLOWED)
    x, y = (side if isinstance(side, torch.Tensor) else np.asarray(side) for side in pair)
    owners = np.array(owners_of(by.tolist() if hasattr(by, "tolist") else by, "clients: by"))
    there = f"{counted(len(x), 'input')}, {counted(len(y), 'target')} and {counted(len(owners), 'owner')}"
    require(0 < len(x) == len(y) == len(owners), "clients", there, "as many of each, and at least one example")
    names, counts = np.unique(owners, return_counts=True)
    rows = np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])
    return names.tolist(), [(x[mine], y[mine]) for mine in rows]


def prepared(rows: Any, preparation: Preparation | None, facts: Mapping[str, Any]) -> torch.Tensor:
    """Return the inputs ``(N, ...)`` of rows to predict: a table's by the run's preparation, tensors as they are.

    facts: the ``input_shape`` and ``dtype`` that the model takes, where the run says them.

    Raises:
        InputError: rows that cannot be used, with row and column; or of another shape than those trained on.
    """
    if _is_table(rows):
        if preparation is None:
            raise wrong("predict", "a table", "a tensor or array of inputs, as the run was given")
        batch = preparation.inputs(_frame(rows, "predict"))
    else:
        if preparation is not None and preparation.kind == "table":  # whose scale and categories go by name
            raise wrong("predict", type(rows).__name__, f"a table with columns {', '.join(preparation.reads)}")
        odd = wrong("predict", type(rows).__name__, "a table, or a tensor or array of numbers")
        with turning((TypeError, ValueError, RuntimeError), odd):
            batch = torch.as_tensor(rows)
        batch = batch if facts.get("dtype", "float32") != "float32" else batch.float()
        if not batch.isfinite().all():
            row = int((~batch.isfinite()).reshape(len(batch), -1).any(1).to(torch.uint8).argmax()) if batch.dim() else 0
            raise wrong(f"predict: row {row}", "a NaN or infinite value", "finite numbers")
    shape = tuple(facts.get("input_shape", batch.shape[1:]))
    if batch.dim() == 0 or tuple(batch.shape[1:]) != shape or not len(batch):
        raise wrong("predict", f"inputs of shape {tuple(batch.shape)}", f"(N, {', '.join(map(str, shape))}), N ≥ 1")
    return batch
