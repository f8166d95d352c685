"""Turn columns of a table into tensors by stated public rules only; nothing is fitted to clients' rows."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedflat.core.checks import InputError, gather, nearest, one_of, whole, wrong
from fedflat.data import decoding
from fedflat.data.decoding import is_picture, pictures

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
    def classes(self) -> int | None:
        """Number of classes, where the target's categories say it."""
        return len(self.names) or None

    @property
    def names(self) -> tuple[Any, ...]:
        """Names of the classes in order, where the target's categories give them."""
        return tuple(self.categories.get(self.target[0], ())) if len(self.target) == 1 else ()

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Encoding:
        """Return the encoding that ``dataclasses.asdict`` and JSON made plain values of."""
        categories = {name: tuple(values) for name, values in found.get("categories", {}).items()}
        scale = {name: (float(mean), float(std)) for name, (mean, std) in found.get("scale", {}).items()}
        words = None if found.get("words") is None else Words(**found["words"])
        given = dict(found.get("fill", {}))
        return cls(tuple(found["inputs"]), tuple(found["target"]), categories, scale, given, words)


def encoding_of(
    where: str,
    columns: Iterable[str],
    inputs: str | Sequence[str] | None,
    target: str | Sequence[str] | None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None,
    fill: Mapping[str, Any] | None = None,
    words: Words | None = None,
) -> Encoding:
    """Return the encoding that is asked for, checked against the columns there are.

    where: the words before a key's name in messages, as ``data.``. words: the inputs are text.

    Raises:
        InputError: with every fault in one line: a column that is not there or twice, a list of categories that is
            empty or says one twice, constants that are no (mean, std), a value for missing ones that cannot be used.
    """
    there = list(columns)
    faults: list[InputError] = []
    with gather(faults):
        read = _columns(f"{where}inputs", inputs, there)
    with gather(faults):
        wanted = _columns(f"{where}target", target, there)
    gather.raised(faults)
    for column in wanted:
        if column in read:
            faults.append(wrong(f"{where}inputs", f"{column}, which is the target", "columns other than the target"))
    lists, constants, filled = (
        {clean(k): v for k, v in dict(given or {}).items()} for given in (categories, scale, fill)
    )
    both = [*read, *wanted]
    for key, given, of in (("categories", lists, both), ("scale", constants, both), ("fill", filled, [*read])):
        for column in given:
            if column not in of:
                allowed = f"one of the inputs{'' if key == 'fill' else ' or the target'} ({', '.join(of)})"
                faults.append(wrong(f"{where}{key}", column, allowed, hint=nearest(column, of)))
    named, scaled = dict[str, tuple[Any, ...]](), dict[str, tuple[float, float]]()
    for column, values in lists.items():
        with gather(faults):
            named[column] = _values(f"{where}categories.{column}", values)
    for column, pair in constants.items():
        with gather(faults):
            scaled[column] = _constants(f"{where}scale.{column}", pair)
    for column, value in filled.items():
        with gather(faults):
            _filling(f"{where}fill.{column}", value, named.get(column))
    gather.raised(faults)
    return Encoding(read, wanted, named, scaled, filled, words)


def clean(name: Any) -> str:
    """Return a column's name without blanks around it and without characters that cannot be seen."""
    return " ".join(str(name).translate(INVISIBLE).split())


INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


def words_of(where: str, length: int | None, vocabulary: int | None, tokenizer: str | None) -> Words | None:
    """Return how texts are read where anything is said of it; None where nothing is."""
    if length is None and vocabulary is None and tokenizer is None:
        return None
    if tokenizer is not None and vocabulary is not None:
        raise wrong(f"{where}vocabulary", vocabulary, "nothing with a tokenizer, which has its own")
    whole(f"{where}max_length", decoding.LENGTH if length is None else length, 1)
    size = whole(
        f"{where}vocabulary", decoding.VOCABULARY if vocabulary is None else vocabulary, 3, decoding.MOST_WORDS
    )
    return Words(length or decoding.LENGTH, size, tokenizer)


def with_words(where: str, frame: pd.DataFrame, encoding: Encoding, words: Words | None) -> Encoding:
    """Return the encoding as it is, or as one of texts where every input is a column of free text.

    Raises:
        InputError: keys of texts are given (``words``), and the inputs are none.
    """
    plain = [name for name in encoding.inputs if name not in encoding.categories]
    texts = [name for name in plain if _free_text(frame[name])]
    if len(texts) == len(encoding.inputs):
        return dataclasses.replace(encoding, words=words or Words())
    if words is not None:
        raise wrong(f"{where}max_length, vocabulary, tokenizer", "keys of texts", "nothing: the inputs are no texts")
    return encoding


def names_of(frame: pd.DataFrame, encoding: Encoding) -> tuple[Any, ...]:
    """Return the names of the classes: of the listed categories, or of a column of true and false."""
    if len(encoding.target) == 1 and not encoding.names and frame[encoding.target[0]].dtype == bool:
        return (False, True)
    return encoding.names


def _free_text(column: pd.Series) -> bool:
    import pandas as pd

    cells = [value for value in column.tolist()[:1000] if not _missing(value)]
    if not cells or not all(isinstance(value, str) for value in cells):
        return False
    return bool(pd.to_numeric(pd.Series(cells), errors="coerce").isna().mean() > 0.5)


def _filling(where: str, value: Any, listed: tuple[Any, ...] | None) -> None:
    if listed is not None:
        one_of(where, value, listed)
    elif not _is_number(value, boolean=True) or not math.isfinite(value):
        raise wrong(where, value, "a public number (or, of a column with categories, one of them)")


def _columns(where: str, given: str | Sequence[str] | None, there: list[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        named = [clean(given)] if clean(given) in there else [clean(name) for name in given.split(",")]
    else:
        named = [clean(name) for name in given or ()]
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
    """Return the inputs ``(N, features)`` float32; of a single column of lists ``(N, ...)``, whole numbers as int64
    (token ids); of a single column of images ``(N, C, H, W)``, pixels over 255.

    Raises InputError naming row, client and column of a value that is missing, not finite, or of another kind.
    """
    if frame.empty:
        raise wrong("data", "a table without rows", "at least one example")
    if encoding.words is not None:
        return encoding.words.ids(sentences_of(frame, encoding.inputs, place))[0]
    found: list[Array] = []
    faults: list[InputError] = []
    for name in encoding.inputs:
        with gather(faults):
            found.append(_input(frame[name], name, encoding, place))
    gather.raised(faults)
    if len(found) == 1 and found[0].ndim > 1 and encoding.inputs[0] not in encoding.categories:
        return torch.from_numpy(np.array(found[0]))
    flat = [array.reshape(len(frame), -1).astype(np.float32, copy=False) for array in found]
    return torch.from_numpy(np.concatenate(flat, axis=1))


def targets_of(frame: pd.DataFrame, encoding: Encoding, place: Place) -> torch.Tensor:
    """Return the targets ``(N,)``, or ``(N, L)`` of several columns or a column of lists: int64 where they are whole
    numbers, categories or true and false, else float32.
    """
    found = [_target(frame[name], name, encoding, place) for name in encoding.target]
    if len(found) == 1:
        return torch.from_numpy(np.array(found[0]))
    whole = all(array.dtype.kind == "i" for array in found)
    flat = [array.reshape(len(frame), -1).astype(np.int64 if whole else np.float32) for array in found]
    return torch.from_numpy(np.concatenate(flat, axis=1))


def sentences_of(frame: pd.DataFrame, columns: Sequence[str], place: Place) -> list[tuple[str, ...]]:
    """Return the texts of each row; a missing one is empty. Raises InputError for a cell that is no text."""
    for name in columns:
        for row, value in enumerate(frame[name].tolist()):
            if not isinstance(value, str) and not _missing(value):
                raise _bad(place, row, name, _shown(value), "a text")
    cells = [[value if isinstance(value, str) else "" for value in frame[name].tolist()] for name in columns]
    return list(zip(*cells))


def _input(column: pd.Series, name: str, encoding: Encoding, place: Place) -> Array:
    if name in encoding.fill:
        column = column.astype(object)
        column = column.where(column.notna() & (column != ""), encoding.fill[name])
        column = column.infer_objects() if name not in encoding.categories else column
    listed = encoding.categories.get(name)
    if listed is not None:
        codes = _codes(column, name, listed, place)
        return np.eye(len(listed), dtype=np.float32)[codes]
    cells = column.tolist() if column.dtype == object else []
    scaled, pictured = name in encoding.scale, any(map(is_picture, cells))
    values: Array = pictures(cells, name, place) if pictured else _numbers(column, name, place, scaled)
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
    values = _numbers(column, name, place, name in encoding.scale)
    if name in encoding.scale:
        mean, std = encoding.scale[name]
        values = (values.astype(np.float64) - mean) / std
    return values if values.dtype.kind == "i" else _float32(values, name, place)


def _float32(values: Array, name: str, place: Place) -> Array:
    # Overflow becomes infinite and is refused below, with its row.
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
            allowed, shown = ", ".join(map(str, listed)), MISSING if _missing(value) or value == "" else _shown(value)
            raise _bad(place, row, name, shown, allowed, _quoting(value, listed)) from None
    return codes


def _quoting(value: Any, listed: tuple[Any, ...]) -> str:
    """Return a hint where YAML read a word of the list, such as no, as true or false."""
    words = [entry for entry in listed if isinstance(entry, bool)]
    if words and isinstance(value, str):
        return f"YAML reads {value} as {str(words[0]).lower()} where it is not quoted: write '{value}'."
    return "Give a value for it: fill." if _missing(value) or value == "" else nearest(str(value), map(str, listed))


def numbered(column: pd.Series, name: str, values: Any, place: Place) -> Array:
    """Return the class numbers ``(N,)`` int64 of a column by its values in a public order. Raises InputError for any
    other.
    """
    return _codes(column, name, _values(f"data.categories.{name}", values), place)


def _numbers(column: pd.Series, name: str, place: Place, scaled: bool = False) -> Array:
    """Return a column as float64 or int64 ``(N,)``, or of lists ``(N, ...)``."""
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
    # By the majority: one odd cell is then named, instead of all the others.
    if 2 * sum(isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) for value in values) > len(values):
        return _lists(values, name, place, scaled)
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


def _lists(values: list[Any], name: str, place: Place, scaled: bool) -> Array:
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
    whole = [array.dtype.kind in "biu" for array in rows]
    if not scaled and True in whole and False in whole:  # else one client's row would decide everybody's kind
        row = whole.index(not whole[0])
        kinds = ("numbers with a fraction", "whole numbers")
        hint = f"scale={{'{name}': [0, 1]}} reads every row as numbers with a fraction."
        raise _bad(place, row, name, kinds[whole[row]], f"{kinds[whole[0]]}, as in {place(0)}", hint)
    return np.stack(rows).astype(np.int64 if all(whole) else np.float64)


def _dense(value: Any) -> Array:
    """Return a list of numbers or of such lists, as one array; tables read from files have arrays of arrays."""
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
    """Return a value in a few characters."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def _bad(place: Place, row: int, column: str, found: str, allowed: str, hint: str = "") -> InputError:
    return wrong(f"{place(row)}, column {column}", found, allowed, hint=hint)
