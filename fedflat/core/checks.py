"""Raise uniform errors: where, what was found, what is allowed, the nearest valid name."""

import contextlib
import difflib
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Something the user gave is wrong. The command line prints it as one line and exits with 2."""


class RunError(RuntimeError):
    """A run could not go on. The command line prints it as one line and exits with 1."""


def readable(text: str, instead: str = "") -> str:
    """Return the text without control characters and marks that turn the direction of what follows: they could write
    over other words. instead: what stands in their place.

    >>> readable("a\\x1b[2Kb", "?")
    'a?[2Kb'
    """
    steering = (c not in "\n\t" and (unicodedata.category(c) == "Cc" or c in TURNING) for c in text)
    return "".join(instead if steers else c for c, steers in zip(text, steering))


TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def wrong(where: str, found: Any, allowed: str, *, hint: str = "") -> InputError:
    """Return the one error sentence: ``where: found X; allowed: Y. hint``."""
    if isinstance(found, float):
        found = f"{found:.12g}"  # no digits of rounding, and 500.0 as it was meant
    text = (found or "nothing") if isinstance(found, str) else repr(found)
    return InputError(" ".join(f"{where}: found {text}; allowed: {allowed}. {hint}".split()))


def require(holds: bool, where: str, found: Any, allowed: str, *, hint: str = "") -> None:
    """Raise the error sentence of ``wrong`` unless a condition holds.

    >>> require(3 > 2, "cohort.size", 3, "more than 2")
    """
    if not holds:
        raise wrong(where, found, allowed, hint=hint)


def owners_only(path: Path, allowed: str, option: str = "") -> None:
    """Raise the error sentence where others than a file's owner may read it. option: stands before its path."""
    mode = path.stat().st_mode & 0o777
    require(not mode & 0o077, f"{option}{path}", f"mode {mode:04o}", allowed)


def placed(path: Path) -> str:
    """Return a path as a message shows it, which says so where nothing is there."""
    return f"{path}{'' if path.exists() else ', no such file or folder'}"


@contextlib.contextmanager
def gather(faults: list[InputError]) -> Iterator[None]:
    """Collect what is wrong in several places, so that one answer names all of it.

    >>> faults: list[InputError] = []
    >>> for age in (1, -1, -2):
    ...     with gather(faults):
    ...         _ = in_range("age", age, 0)
    >>> len(faults)
    2
    """
    try:
        yield
    except InputError as fault:
        faults.append(fault)


def raise_all(faults: list[InputError]) -> None:
    """Raise one error with every fault, if there is one."""
    if len(faults) > 1:
        listed = " ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
        raise InputError(f"{len(faults)} faults: {listed}")
    for fault in faults:
        raise fault


Kinds = type[Exception] | tuple[type[Exception], ...]


@contextlib.contextmanager
def becoming(make: Callable[[Any], Exception], kinds: Kinds = Exception, left: Kinds = ()) -> Iterator[None]:
    """Inside the block, raise what ``make`` makes of an error of these kinds in its place. left: kinds that stay."""
    try:
        yield
    except left:
        raise
    except kinds as cause:
        raise make(cause) from cause


def turning(kinds: Kinds, error: Exception) -> AbstractContextManager[None]:
    """Inside the block, raise ``error`` in the place of what is of these kinds."""
    return becoming(lambda cause: error, kinds)


def reading(where: object, found: str, allowed: str) -> AbstractContextManager[None]:
    """Turn what a file that is missing or damaged raises inside the block into the one error sentence.

    >>> with reading("task.json", "no task", "what fedflat deploy wrote"):
    ...     {}["form"]
    Traceback (most recent call last):
    fedflat.core.checks.InputError: task.json: found no task (without 'form'); allowed: what fedflat deploy wrote.
    """

    def sentence(error: Exception) -> InputError:
        why = f"without {error}" if isinstance(error, KeyError) else str(error)
        return wrong(str(where), f"{found} ({why})", allowed)

    damage = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    return becoming(sentence, damage, left=InputError)


def making(where: str, place: object, allowed: str = "a folder you may write to") -> AbstractContextManager[None]:
    """Turn what a disk refuses inside the block into the one error sentence on a place that the user gave."""
    return becoming(lambda error: wrong(where, f"{place} ({error.strerror})", allowed), OSError)


def writing(path: Path, failed: str = "cannot be written", then: str = "") -> AbstractContextManager[None]:
    """Turn what a disk refuses inside the block into one sentence, a RunError. then: what follows from it.

    >>> with writing(Path("ledger"), then="nothing was released"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    fedflat.core.checks.RunError: ledger: cannot be written (No space left on device); nothing was released
    """
    return becoming(lambda error: RunError(f"{path}: {failed} ({error.strerror})" + (then and f"; {then}")), OSError)


def users_code(where: str, allowed: str, during: str = "in a trial") -> AbstractContextManager[None]:
    """Let a user's code run, which may fail in its own way: what it raises becomes the one error sentence.

    >>> with users_code("loss", "a function that runs"):
    ...     {}["a"]
    Traceback (most recent call last):
    fedflat.core.checks.InputError: loss: found KeyError in a trial ('a'); allowed: a function that runs.
    """

    def sentence(error: Exception) -> InputError:
        return wrong(where, f"{type(error).__name__} {during} ({first_line(error)})", allowed)

    return becoming(sentence, left=InputError)


def insist(holds: bool, error: Exception) -> None:
    """Raise an error unless a condition holds."""
    if not holds:
        raise error


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, without its full stop; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def one_line(error: BaseException, width: int | None = 300) -> str:
    """Return an error's kind and the beginning of what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:width]


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 user``, ``2 users``, ``2 classes``.

    >>> counted(1, "user"), counted(0, "row"), counted(2, "class")
    ('1 user', '0 rows', '2 classes')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a sentence naming the closest valid spelling of ``name``, or the empty string where none is close.

    >>> nearest("best", ["last", "best-by-metric"]), nearest("image", ["age"])
    ('Did you mean best-by-metric?', '')
    """
    asked, known = str(name).casefold(), {str(spelling).casefold(): spelling for spelling in names}
    # A slip is rarely in the first letter.
    alike = [spelling for spelling in known if spelling[:1] == asked[:1]]
    close = difflib.get_close_matches(asked, known, 1, 0.8) or difflib.get_close_matches(asked, alike, 1, 0.6)
    close = close or [spelling for spelling in alike if len(asked) > 2 and spelling.startswith(asked)]
    return f"Did you mean {known[close[0]]}?" if close else ""


def one_of(where: str, value: Any, names: Iterable[str]) -> Any:
    """Return ``value`` if it is one of ``names``; otherwise raise with the nearest name."""
    allowed = list(names)
    if value not in allowed:
        raise wrong(where, value, ", ".join(allowed), hint=nearest(value, allowed))
    return value


def in_range(
    where: str, value: Any, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False,
    open_high: bool = False,
) -> float:  # fmt: skip
    """Return ``value`` if it is a finite number in the interval; otherwise raise."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > low if open_low else value >= low)
    ok = ok and (value < high if open_high else value <= high)
    if not ok:
        left = f"{'>' if open_low else '≥'} {low:g}" if low > -math.inf else ""
        right = f"{'<' if open_high else '≤'} {high:g}" if high < math.inf else ""
        limits = " and ".join(part for part in (left, right) if part)
        raise wrong(where, value, f"a number {limits}".strip())
    return value  # type: ignore[no-any-return]


def whole(where: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """Return ``value`` if it is a whole number in [low, high]; otherwise raise."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= (value if high is None else high):
        upper = f" and ≤ {high}" if high is not None else ""
        raise wrong(where, str(value), f"a whole number ≥ {low}{upper}")
    return int(value)
