"""Turn columns of a table into tensors by stated public rules only; nothing is fitted to clients' rows."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core import InputError, nearest, one_of, require, turning, whole, wrong
from fedflat.data import decoding

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[Any]
Place = Callable[[int], str]
"""Row number -> the words that name it, with its client."""
NUMBERS = "a number"
MISSING = "a missing value"


@dataclasses.dataclass(frozen=True)
class Words:
    """How text becomes token ids: at most ``length`` of them, hashed to ``vocabulary`` numbers or by a tokenizer."""

    length: int = decoding.LENGTH
    vocabulary: int = decoding.VOCABULARY
    tokenizer: str | None = None

    def ids(self, texts: Sequence[Any]) -> tuple[torch.Tensor, int, int]:
        """Return token ids ``(N, length)``, the size of the vocabulary, and the id that means no token."""
        if self.tokenizer is not None:
            return decoding.pretrained(texts, self.tokenizer, self.length)
        return decoding.tokenize(texts, self.length, self.vocabulary), self.vocabulary, decoding.PADDING


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a table's columns become numbers.

    inputs: columns, in this order. target: one column, or several. categories: column -> its values in a public order;
    an input becomes one 0/1 feature for each, a target the place in the list. scale: column -> (mean, std), public
    constants: (x - mean) / std. fill: column -> the public value that stands for a missing one. words: the input is
    text, which becomes token ids; None for a table of numbers.
    """

    inputs: tuple[str, ...]
    target: tuple[str, ...]
    categories: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    scale: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    fill: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    words: Words | None = None

    @property
    def names(self) -> tuple[Any, ...]:
        """Names of the classes in order, where the target's categories give them."""
        return tuple(self.categories.get(self.target[0], ())) if len(self.target) == 1 else ()

    @property
    def tokens(self) -> tuple[int, int]:
        """The size of the vocabulary, and the id that means no token; zeros where the input is no text."""
        return (0, 0) if self.words is None else self.words.ids([])[1:]

    def examples_of(self, frame: pd.DataFrame, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a table's rows."""
        return self.inputs_of(frame, place), self.targets_of(frame, place)

    def inputs_of(self, frame: pd.DataFrame, place: Place) -> torch.Tensor:
        """Return the inputs ``(N, features)`` float32; of a single column of lists ``(N, ...)``, whole numbers as int64
        (token ids); of a single column of images ``(N, C, H, W)``, pixels over 255.

        Raises InputError naming row, client and column of a value that is missing, not finite, or of another kind.
        """
        require(not frame.empty, place(0), "a table of 0 rows", "at least one row")
        if self.words is not None:
            return self.words.ids(_sentences(frame, self.inputs, place))[0]
        arrays = [self._input(frame[name], name, place) for name in self.inputs]
        if len(arrays) == 1 and arrays[0].ndim > 1 and self.inputs[0] not in self.categories:
            return torch.from_numpy(np.array(arrays[0]))
        return _side_by_side(arrays, np.float32)

    def targets_of(self, frame: pd.DataFrame, place: Place) -> torch.Tensor:
        """Return the targets ``(N,)``, or ``(N, L)`` of several columns or a column of lists: int64 where they are
        whole numbers, categories or true and false, else float32.
        """
        arrays = [self._target(frame[name], name, place) for name in self.target]
        if len(arrays) == 1:
            return torch.from_numpy(np.array(arrays[0]))
        return _side_by_side(arrays, np.int64 if all(array.dtype.kind == "i" for array in arrays) else np.float32)

    def _input(self, column: pd.Series, name: str, place: Place) -> Array:
        listed = self.categories.get(name)
        if name in self.fill:
            column = column.astype(object)
            column = column.where(column.notna() & (column != ""), self.fill[name])
            column = column.infer_objects() if listed is None else column
        if listed is not None:
            return np.eye(len(listed), dtype=np.float32)[_codes(column, name, listed, place)]
        cells = column.tolist() if column.dtype == object else []
        if any(map(decoding.is_image, cells)):
            pixels = decoding.decode(cells, lambda row: f"{place(row)}, column {name}")
            return self._scaled(pixels.numpy().astype(np.float32) / np.float32(255), name, place)
        return self._scaled(_numbers(column, name, place, name in self.scale), name, place)

    def _target(self, column: pd.Series, name: str, place: Place) -> Array:
        if name in self.categories:
            return _codes(column, name, self.categories[name], place)
        return self._scaled(_numbers(column, name, place, name in self.scale), name, place)

    def _scaled(self, values: Array, name: str, place: Place) -> Array:
        """Return the values as float32, scaled where their column is; whole numbers that are not scaled as they are.
        Raises InputError for one that is too large."""
        scaled = values
        if name in self.scale:
            mean, std = self.scale[name]
            scaled = (values.astype(np.float64) - mean) / std
        elif values.dtype.kind == "i":
            return values
        # Overflow becomes infinite and is refused below, with its row.
        with np.errstate(over="ignore"):
            small = scaled.astype(np.float32)
        bad = ~np.isfinite(small).all(axis=tuple(range(1, small.ndim)))
        if bad.any():
            row = int(bad.argmax())
            raise _fault(place, row, name, values[row], "finite numbers (of float32)")
        return small


def encoding_of(
    where: str, columns: Iterable[str], inputs: str | Sequence[str] | None, target: str | Sequence[str] | None,
    categories: Mapping[str, Sequence[Any]] | None = None, scale: Mapping[str, Sequence[float]] | None = None,
    fill: Mapping[str, Any] | None = None, max_length: int | None = None, vocabulary: int | None = None,
    tokenizer: str | None = None,
) -> Encoding:  # fmt: skip
    """Return the encoding that is asked for, checked against the columns there are.

    where: the words before a key's name in messages, as ``data.``. What the inputs are never follows from the rows: one
    client's cell would decide it for everybody.

    Raises:
        InputError: a column that is not there or twice, a list of categories that is empty or says one twice, constants
            that are no (mean, std), a value for missing ones that cannot be used, keys of texts beside others.
    """
    there = list(columns)
    wanted, read = _columns(f"{where}target", target, there), _columns(f"{where}inputs", inputs, there)
    for column in wanted:
        require(column not in read, f"{where}inputs", f"{column}, which is the target", "columns other than the target")

    def checked(key: str, mapping: Any, allowed: Sequence[str], check: Callable[[str, Any], Any]) -> dict[str, Any]:
        named = {one_of(f"{where}{key}", clean(name), allowed): value for name, value in dict(mapping or {}).items()}
        return {column: check(f"{where}{key}.{column}", value) for column, value in named.items()}

    both = tuple(dict.fromkeys((*read, *wanted)))
    listed = checked("categories", categories, both, _category_values)
    scaled = checked("scale", scale, both, _constants)
    for column in scaled:
        require(column not in listed, f"{where}scale.{column}", "a column with categories", "columns of numbers")

    filled = checked("fill", fill, read, lambda _, value: value)
    for column, value in filled.items():
        fits = value in listed[column] if column in listed else _is_number(value, boolean=True) and math.isfinite(value)
        allowed = "a public number (or, of a column with categories, one of them)"
        require(fits, f"{where}fill.{column}", value, allowed)
    words, numeric = _words(where, max_length, vocabulary, tokenizer), {*listed, *scaled, *filled} & {*read}
    keys = f"{where}max_length, vocabulary, tokenizer"
    require(words is None or not numeric, keys, "keys of texts", f"nothing beside keys of {', '.join(sorted(numeric))}")
    return Encoding(read, wanted, listed, scaled, filled, words)


KEYS = ("inputs", "target", "tokenizer", "max_length", "vocabulary", "categories", "scale", "fill")
"""What a recipe's data section and ``fedflat.clients`` may say of columns, as ``encoding_of`` takes it."""


def clean(name: Any) -> str:
    """Return a column's name in one Unicode form, without blanks around it and characters that cannot be seen."""
    return " ".join(unicodedata.normalize("NFC", str(name)).translate(INVISIBLE).split())


def clean_names(columns: list[Any], where: object, key: str) -> dict[Any, str]:
    """Return every column's name as it is in a table -> its clean form. Raises InputError for a form that two have."""
    require(bool(columns), key, f"no columns in {where}", "a table")
    names = {name: clean(name) for name in columns}
    twice = [name for name, times in Counter(map(clean, columns)).items() if times > 1]
    if twice:
        raise wrong(key, f"two columns called {twice[0]} in {where}", "columns with different names")
    return names


def name_of(user: Any) -> str:
    """Return a user's name without blanks around it, or nothing; 7.0, as tables with gaps have it, is 7."""
    return "" if _missing(user) else clean(int(user) if isinstance(user, float) and user.is_integer() else user)


def check_columns(where: str, wanted: Sequence[str], there: Iterable[str]) -> None:
    """Raise InputError for a column that is not there."""
    there = list(there)
    for name in wanted:
        if name not in there:
            hint = nearest(name, there) or f"There are {', '.join(there)}."
            raise wrong(where, f"no column {name}", f"the columns {', '.join(wanted)}", hint=hint)


INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


def _words(where: str, length: int | None, vocabulary: int | None, tokenizer: str | None) -> Words | None:
    """Return how texts are read where anything is said of it; None where nothing is."""
    if length is None and vocabulary is None and tokenizer is None:
        return None
    if tokenizer is not None and vocabulary is not None:
        raise wrong(f"{where}vocabulary", vocabulary, "nothing with a tokenizer, which has its own")
    most = whole(f"{where}max_length", decoding.LENGTH if length is None else length, 1)
    size = decoding.VOCABULARY if vocabulary is None else vocabulary
    return Words(most, whole(f"{where}vocabulary", size, 3, decoding.MOST_WORDS), tokenizer)


def owners_of(users: Iterable[Any], where: str) -> list[str]:
    """Return the client of each row by name. where: what says so. Raises InputError for a row that is nobody's."""
    names = list(map(name_of, users))
    if "" in names:
        raise wrong(f"row {names.index('')}, {where}", MISSING, "the client that the row belongs to")
    return names


def _columns(where: str, columns: str | Sequence[str] | None, there: list[str]) -> tuple[str, ...]:
    if isinstance(columns, str):
        columns = [columns] if clean(columns) in there else columns.split(",")
    named = [clean(name) for name in columns or ()]
    require(bool(named), where, "nothing", f"one or more of the columns {', '.join(there)}")
    for place, name in enumerate(named):
        one_of(where, name, there)
        require(name not in named[:place], where, f"{name} twice", "each column once")
    return tuple(named)


def _category_values(where: str, values: Any) -> tuple[Any, ...]:
    listed = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
    try:
        different = len(set(listed)) == len(listed)
    except TypeError:
        different = False
    require(bool(listed) and different, where, values, "a list of different values, in a public order")
    return listed


def _constants(where: str, pair: Any) -> tuple[float, float]:
    listed = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
    if len(listed) != 2 or not all(_is_number(value) and math.isfinite(value) for value in listed) or listed[1] <= 0:
        raise wrong(where, pair, "[mean, std], two public numbers, std > 0")
    return float(listed[0]), float(listed[1])


def _side_by_side(arrays: list[Array], dtype: Any) -> torch.Tensor:
    flat = [array.reshape(len(array), -1).astype(dtype, copy=False) for array in arrays]
    return torch.from_numpy(np.concatenate(flat, axis=1))


def _sentences(frame: pd.DataFrame, columns: Sequence[str], place: Place) -> list[tuple[str, ...]]:
    """Return the texts of each row; a missing one is empty. Raises InputError for a cell that is no text."""
    cells = [["" if _missing(value) else value for value in frame[name].tolist()] for name in columns]
    for name, values in zip(columns, cells):
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise _fault(place, row, name, value, "a text")
    return list(zip(*cells))


def _codes(column: pd.Series, name: str, listed: tuple[Any, ...], place: Place) -> Array:
    code_of = {value: index for index, value in enumerate(listed)}
    codes = np.empty(len(column), dtype=np.int64)
    for row, value in enumerate(column.tolist()):
        # A table's file may keep an empty cell as a missing value: the listed "" stands for both.
        value = "" if _missing(value) else value
        try:
            codes[row] = code_of[value]
        except (KeyError, TypeError):
            raise _fault(place, row, name, value, ", ".join(map(str, listed)), _category_hint(value, listed)) from None
    return codes


def _category_hint(value: Any, listed: tuple[Any, ...]) -> str:
    """Return what to do about a value that is not listed."""
    if value == "":
        return "A public value may stand for it (fill); rows without a target can be left out; '' can be a category."
    if any(isinstance(entry, bool) for entry in listed) and str(value).lower() in ("yes", "on", "no", "off"):
        meant = "true" if value.lower() in ("yes", "on") else "false"
        return f"YAML reads {value} as {meant} where it is not quoted: write '{value}'."
    return nearest(str(value), map(str, listed))


def _numbers(column: pd.Series, name: str, place: Place, scaled: bool) -> Array:
    """Return a column as float64 or int64 ``(N,)``, or of lists ``(N, ...)``."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        hint = f"Their order must be public: categories={{'{name}': [...]}}."
        raise wrong(f"column {name}", "categories that come with the rows", "numbers, true and false", hint=hint)
    kind = getattr(column.dtype, "kind", "O")
    if kind in "biuf" and not column.hasnans and column.dtype != "uint64":
        return np.asarray(column.to_numpy(dtype=np.float64 if kind == "f" else np.int64))
    values = column.tolist()
    # By the majority: one odd cell is then named, instead of all the others.
    if 2 * sum(isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) for value in values) > len(values):
        return _lists(values, name, place, scaled)
    odd = [row for row, value in enumerate(values) if not _is_number(value, boolean=True) or _missing(value)]
    if odd:
        # A file's column is text as soon as one cell is: that cell is named, not the numbers beside it.
        row = next((row for row in odd if not is_numeral(values[row])), odd[0])
        raise _fault(place, row, name, values[row], NUMBERS, number_hint(values[row], name, values))
    integral = all(isinstance(value, numbers.Integral) for value in values)
    with turning(OverflowError, wrong(f"column {name}", "a whole number beyond 64 bits", NUMBERS)):
        return np.array(values, dtype=np.int64 if integral and values else np.float64)


DATES = "A date is no number: put in its place the days since a day that does not follow from the rows."
DECIMAL_COMMA = "Decimal commas: read the file by pandas.read_csv(…, decimal=','), and save it with points."


def number_hint(value: Any, name: str, values: Sequence[Any] = ()) -> str:
    """Return what to do about a cell where a number is needed. values: the whole column.

    >>> number_hint("3,50", "price") == DECIMAL_COMMA, number_hint("2026-11-24", "day") == DATES
    (True, True)
    """
    text = str(value).strip()
    if re.fullmatch(r"[-+]?(\d+|\d{1,3}([. ]\d{3})+),\d+", text):
        return DECIMAL_COMMA
    if re.match(r"\d{4}-\d\d?-\d\d?\b|\d\d?[./]\d\d?[./](\d\d){1,2}\b", text):
        return DATES
    if not isinstance(value, str) or not text:
        return ""
    there = sorted({other for other in values if isinstance(other, str)})
    if 2 * sum(_is_number(other) or is_numeral(other) for other in values) > len(values):
        return "" if is_numeral(value) else "Other cells of the column are numbers."
    listed = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
    return f"For words give all values in a public order: categories={{{name}: [{listed}]}}; for texts max_length."


def _lists(values: list[Any], name: str, place: Place, scaled: bool) -> Array:
    rows: list[Array] = []
    for row, value in enumerate(values):
        try:
            array = _dense(value)
        except (TypeError, ValueError, RuntimeError):
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise _fault(place, row, name, value, "a list of numbers, as in the other rows")
        if rows and array.shape != rows[0].shape:
            allowed = f"a list of shape {rows[0].shape}, as in {place(0)}"
            raise wrong(f"{place(row)}, column {name}", f"shape {array.shape}", allowed)
        rows.append(array)
    integral = [array.dtype.kind in "biu" for array in rows]
    if not scaled and True in integral and False in integral:  # else one client's row would decide everybody's kind
        row = integral.index(not integral[0])
        kinds = ("numbers with a fraction", "whole numbers")
        hint = f"scale={{'{name}': [0, 1]}} reads every row as numbers with a fraction."
        where, allowed = f"{place(row)}, column {name}", f"{kinds[integral[0]]}, as in {place(0)}"
        raise wrong(where, kinds[integral[row]], allowed, hint=hint)
    return np.stack(rows).astype(np.int64 if all(integral) else np.float64)


def _dense(value: Any) -> Array:
    """Return a list of numbers or of such lists, as one array; tables read from files have arrays of arrays."""
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return np.array([_dense(inner) for inner in value])
    return np.asarray(value)


def _missing(value: Any) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def _is_number(value: Any, *, boolean: bool = False) -> bool:
    return boolean if isinstance(value, (bool, np.bool_)) else isinstance(value, numbers.Real)


def is_numeral(value: Any) -> bool:
    """Return whether a value is a text that is a number."""
    return isinstance(value, str) and bool(re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", value))


def _fault(place: Place, row: int, column: str, value: Any, allowed: str, hint: str = "") -> InputError:
    """Return the error that names a cell and shows the beginning of its value."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    if _missing(value) or (isinstance(value, str) and not value):
        text = MISSING
    return wrong(f"{place(row)}, column {column}", text if len(text) <= 40 else text[:37] + "...", allowed, hint=hint)
