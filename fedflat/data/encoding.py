"""Columns of a table to tensors, by stated public rules only: nothing is fitted to the clients' rows."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import InputError, nearest, wrong
from fedflat.data.pictures import is_picture, pictures

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[Any]
Place = Callable[[int], str]
"""Row number -> the words that name it, with its client."""
NUMBERS = "a number"
MISSING = "a missing value"


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a table's columns become numbers.

    inputs: columns, in this order. target: one column, or several. categories: column -> its values in a public order;
    an input becomes one 0/1 feature for each, a target the place in the list. scale: column -> (mean, std), public
    constants: (x - mean) / std.
    """

    inputs: tuple[str, ...]
    target: tuple[str, ...]
    categories: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    scale: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def classes(self) -> int | None:
        """Number of classes, where the target's categories say it."""
        listed = self.categories.get(self.target[0]) if len(self.target) == 1 else None
        return None if listed is None else len(listed)


def encoding_of(
    where: str,
    columns: Iterable[str],
    inputs: str | Sequence[str] | None,
    target: str | Sequence[str] | None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None,
) -> Encoding:
    """The encoding that is asked for, checked against the columns there are. where: what names the keys, as ``data.``.

    Raises InputError for a column that is not there or twice, a list of categories that is empty or says one twice, and
    constants that are no (mean, std).
    """
    there = list(columns)
    read = _columns(f"{where}inputs", inputs, there)
    wanted = _columns(f"{where}target", target, there)
    for column in wanted:
        if column in read:
            raise wrong(f"{where}inputs", f"{column}, which is the target", "columns other than the target")
    lists, constants = dict(categories or {}), dict(scale or {})
    for key, given in (("categories", lists), ("scale", constants)):
        for column in given:
            if column not in (*read, *wanted):
                allowed = f"one of the inputs or the target ({', '.join([*read, *wanted])})"
                raise wrong(f"{where}{key}", column, allowed, hint=nearest(column, [*read, *wanted]))
    return Encoding(
        read,
        wanted,
        {column: _values(f"{where}categories.{column}", values) for column, values in lists.items()},
        {column: _constants(f"{where}scale.{column}", pair) for column, pair in constants.items()},
    )


def _columns(where: str, given: str | Sequence[str] | None, there: list[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        named = [given] if given in there else [name.strip() for name in given.split(",")]
    else:
        named = list(given or ())
    if not named:
        hint = "A column of texts is data.input, its class data.label." if where == "data.inputs" else ""
        raise wrong(where, "nothing", f"one or more of the columns {', '.join(map(str, there))}", hint=hint)
    for place, name in enumerate(named):
        if name not in there:
            listed = ", ".join(map(str, there))
            raise wrong(where, name, f"columns of the data: {listed}", hint=nearest(name, map(str, there)))
        if name in named[:place]:
            raise wrong(where, f"{name} twice", "each column once")
    return tuple(named)


def _values(where: str, values: Any) -> tuple[Any, ...]:
    listed = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
    try:
        different = len(set(listed)) == len(listed)
    except TypeError:
        different = False
    if not listed or not different:
        raise wrong(where, values, "a list of different values, in a public order")
    return listed


def _constants(where: str, pair: Any) -> tuple[float, float]:
    listed = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
    if len(listed) != 2 or not all(_is_number(value) and math.isfinite(value) for value in listed) or listed[1] <= 0:
        raise wrong(where, pair, "[mean, std], two public numbers, std > 0")
    return float(listed[0]), float(listed[1])


def inputs_of(frame: pd.DataFrame, encoding: Encoding, place: Place) -> torch.Tensor:
    """Inputs ``(N, features)`` float32; of a single column of lists ``(N, ...)``, whole numbers as int64 (token ids);
    of a single column of images ``(N, C, H, W)``, pixels over 255.

    Raises InputError naming row, client and column of a value that is missing, not finite, or of another kind.
    """
    if frame.empty:
        raise wrong("data", "a table without rows", "at least one example")
    found = [_input(frame[name], name, encoding, place) for name in encoding.inputs]
    if len(found) == 1 and found[0].ndim > 1 and encoding.inputs[0] not in encoding.categories:
        return torch.from_numpy(np.array(found[0]))
    flat = [array.reshape(len(frame), -1).astype(np.float32, copy=False) for array in found]
    return torch.from_numpy(np.concatenate(flat, axis=1))


def targets_of(frame: pd.DataFrame, encoding: Encoding, place: Place) -> torch.Tensor:
    """Targets ``(N,)``, or ``(N, L)`` of several columns or a column of lists: int64 where they are whole numbers,
    categories or true and false, else float32."""
    found = [_target(frame[name], name, encoding, place) for name in encoding.target]
    if len(found) == 1:
        return torch.from_numpy(np.array(found[0]))
    whole = all(array.dtype.kind == "i" for array in found)
    flat = [array.reshape(len(frame), -1).astype(np.int64 if whole else np.float32) for array in found]
    return torch.from_numpy(np.concatenate(flat, axis=1))


def _input(column: pd.Series, name: str, encoding: Encoding, place: Place) -> Array:
    listed = encoding.categories.get(name)
    if listed is not None:
        codes = _codes(column, name, listed, place)
        return np.eye(len(listed), dtype=np.float32)[codes]
    cells = column.tolist() if column.dtype == object else []
    values = pictures(cells, name, place) if any(map(is_picture, cells)) else _numbers(column, name, place)
    if name in encoding.scale:
        mean, std = encoding.scale[name]
        values = (values.astype(np.float64) - mean) / std
    elif values.ndim > 1 and values.dtype.kind == "i":
        return values
    return _float32(values, name, place)


def _target(column: pd.Series, name: str, encoding: Encoding, place: Place) -> Array:
    listed = encoding.categories.get(name)
    if listed is not None:
        return _codes(column, name, listed, place)
    values = _numbers(column, name, place)
    if name in encoding.scale:
        mean, std = encoding.scale[name]
        values = (values.astype(np.float64) - mean) / std
    return values if values.dtype.kind == "i" else _float32(values, name, place)


def _float32(values: Array, name: str, place: Place) -> Array:
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    bad = ~np.isfinite(small.reshape(len(small), -1)).all(1) if len(small) else np.zeros(0, dtype=bool)
    if bad.any():
        row = int(bad.argmax())
        raise _bad(place, row, name, _shown(values[row]), "finite numbers (of float32)")
    return small


def _codes(column: pd.Series, name: str, listed: tuple[Any, ...], place: Place) -> Array:
    known = {value: index for index, value in enumerate(listed)}
    codes = np.empty(len(column), dtype=np.int64)
    for row, value in enumerate(column.tolist()):
        try:
            codes[row] = known[value]
        except (KeyError, TypeError):
            allowed = ", ".join(map(str, listed))
            raise _bad(place, row, name, MISSING if _missing(value) else _shown(value), allowed) from None
    return codes


def numbered(column: pd.Series, name: str, values: Any, place: Place) -> Array:
    """Class numbers ``(N,)`` int64 of a column by its values in a public order. Raises InputError for any other."""
    return _codes(column, name, _values(f"data.categories.{name}", values), place)


def _numbers(column: pd.Series, name: str, place: Place) -> Array:
    """A column as float64 or int64 ``(N,)``, or of lists ``(N, ...)``."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        hint = f"Their order must be public: categories={{'{name}': [...]}}."
        raise wrong(f"column {name}", "categories that come with the rows", "numbers, true and false", hint=hint)
    kind = getattr(column.dtype, "kind", "O")
    if kind in "mMc":
        raise wrong(f"column {name}", str(column.dtype), "numbers, true and false, lists of numbers")
    if kind in "biuf":
        missing = column.isna().to_numpy(dtype=bool)
        if missing.any():
            raise _bad(place, int(missing.argmax()), name, MISSING, NUMBERS)
        if kind == "u" and len(column) and int(column.max()) > np.iinfo(np.int64).max:
            raise _bad(place, int(column.argmax()), name, str(column.max()), f"{NUMBERS} of at most 64 bits with sign")
        return np.asarray(column.to_numpy(dtype=np.float64 if kind == "f" else np.int64))
    values = column.tolist()
    if 2 * sum(isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) for value in values) > len(values):
        return _lists(values, name, place)
    for row, value in enumerate(values):
        if _missing(value):
            raise _bad(place, row, name, MISSING, NUMBERS)
        if not _is_number(value, boolean=True):
            text = f"{NUMBERS}; for text give its categories, {{{name}: [...]}}" if isinstance(value, str) else NUMBERS
            raise _bad(place, row, name, _shown(value), text)
    whole = all(isinstance(value, numbers.Integral) for value in values)
    try:
        return np.array(values, dtype=np.int64 if whole and values else np.float64)
    except OverflowError:
        raise wrong(f"column {name}", "a whole number beyond 64 bits", NUMBERS) from None


def _lists(values: list[Any], name: str, place: Place) -> Array:
    rows: list[Array] = []
    for row, value in enumerate(values):
        try:
            array = _dense(value)
        except (TypeError, ValueError, RuntimeError):
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            found = MISSING if _missing(value) else _shown(value)
            raise _bad(place, row, name, found, "a list of numbers, as in the other rows")
        if rows and array.shape != rows[0].shape:
            raise _bad(place, row, name, f"shape {array.shape}", f"{rows[0].shape}, as in {place(0)}")
        rows.append(array)
    whole = all(array.dtype.kind in "biu" for array in rows)
    return np.stack(rows).astype(np.int64 if whole else np.float64)


def _dense(value: Any) -> Array:
    """A list of numbers or of such lists, as one array; tables read from files have arrays of arrays."""
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return np.array([_dense(inner) for inner in value])
    return np.asarray(value)


def _missing(value: Any) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def _is_number(value: Any, *, boolean: bool = False) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return boolean
    return isinstance(value, numbers.Real)


def _shown(value: Any) -> str:
    """A value in a few characters."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def _bad(place: Place, row: int, column: str, found: str, allowed: str) -> InputError:
    return wrong(f"{place(row)}, column {column}", found, allowed)
