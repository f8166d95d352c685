"""Import a callable by its path, and say what is not installed, with the command that installs it.

Another process cannot import a user's file by a name. It is sent the text of each file that was read here, and makes
the same modules of it before anything else of a run is unpacked (``user_files``, ``load_files``).
"""

import hashlib
import importlib
import importlib.util
import inspect
import io
import linecache
import os
import platform
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedflat.core.checks import InputError, RunError, becoming, nearest, require, wrong
from fedflat.core.process import set_meanwhile

USER_FILES = "fedflat_user_"
"""Before the names of modules that are read from a user's file."""
_INSTALLED = ("site-packages", "dist-packages", "<frozen", f"{Path(__file__).parents[1]}{os.sep}")
"""In the paths of files that are no user's own."""
DIGEST = "@"
"""In such a name, before the digest of the file's path and text: two files may have one stem."""
_read: dict[str, tuple[str, str]] = {}
"""Of each module that was read from a user's file: the path and the text."""


def imported(where: str, path: str) -> Callable[..., Any]:
    """Return the callable at ``path``; ``where`` names the recipe key in error sentences. Raises InputError."""
    module_name, _, attribute = path.rpartition(":")
    require(bool(module_name), where, path, "path/to/file.py:callable, or package.module:callable")
    module = _file(where, Path(module_name)) if module_name.endswith(".py") else _package(where, module_name)
    target = getattr(module, attribute, None)
    if not callable(target):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise wrong(where, attribute, f"a callable of {module_name}", hint=nearest(attribute, public))
    return target  # type: ignore[no-any-return]


@contextmanager
def calling(where: str) -> Iterator[None]:
    """Let a user's own function run: what it raises becomes one line that names the function's place.

    What no code of the user's raised is no mistake of the user's, and is left as it is.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not any(name in frame.filename for name in _INSTALLED)]
        # A TypeError of the call itself, without a frame below it: the arguments do not fit.
        if not user_frames and not (isinstance(error, TypeError) and len(frames) == 2):
            raise
        place = f" at line {user_frames[-1].lineno} of {Path(user_frames[-1].filename).name}" if user_frames else ""
        failure = f"{type(error).__name__}{place} ({error})"
        raise wrong(where, failure, "a function that runs with these arguments", hint=_meant(error)) from error


def _meant(error: Exception) -> str:
    """Return the nearest name of what a class takes, where it was given another; "" for any other error."""
    last = deque(traceback.walk_tb(error.__traceback__), maxlen=1)[0][0]
    words = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    kind = words and {**last.f_globals, **last.f_locals}.get(words[1])
    return nearest(words[2], inspect.signature(kind).parameters) if words and isinstance(kind, type) else ""


def _package(where: str, name: str) -> ModuleType:
    allowed = "package.module:callable"
    with becoming(lambda error: wrong(where, f"no importable module {name} ({error})", allowed), ImportError):
        return importlib.import_module(name)


def _file(where: str, path: Path) -> ModuleType:
    here = "" if path.is_absolute() else f" in {Path.cwd()}"
    require(path.is_file(), where, f"no file {path}{here}", "path/to/file.py:callable")
    failed = f"while reading {path}"
    with becoming(lambda e: wrong(where, f"{type(e).__name__} {failed} ({e})", "a Python file"), left=InputError):
        return _module_of(str(path.resolve()), importlib.util.decode_source(path.read_bytes()))


def _module_of(place: str, text: str) -> ModuleType:
    """Return the module of a file's text; the same one as before where place and text are the same."""
    digest = hashlib.sha256(f"{place}\0{text}".encode()).hexdigest()[:16]
    name = f"{USER_FILES}{Path(place).stem}{DIGEST}{digest}"
    # The same file twice, or in a forked process: pickles must find one class, not two.
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__, module.__package__, module.__spec__ = place, "", ModuleSpec(name, None, origin=place)
    # Tracebacks and inspect.getsource show the text that ran, whatever the file holds by then. Lines end where the
    # compiler ends them: str.splitlines would also cut at a page break.
    linecache.cache[place] = (len(text), None, io.StringIO(text).readlines(), place)
    sys.modules[name] = module  # dataclasses of the file look their module up while they are made
    try:
        exec(compile(text, place, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _read[name] = (place, text)
    return module


def user_files() -> list[tuple[str, str]]:
    """Return path and text of each user's file that was read here, in that order: what another process needs first."""
    return list(_read.values())


def load_files(files: list[tuple[str, str]]) -> None:
    """Make the modules of files that were read in another process."""
    for place, text in files:
        _module_of(place, text)


class Made:
    """Travels to another process as a call: what arrives is what ``make(*arguments)`` gives there."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self.call = make, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def install(extra: str = "") -> str:
    """Return the command that installs fedflat, or an extra, from the checkout if this is one.

    >>> install("onnx").endswith("[onnx]'")
    True
    """
    root, part = Path(__file__).resolve().parents[2], f"[{extra}]" if extra else ""
    where = str(root) if (root / "pyproject.toml").is_file() else "fedflat"
    return f"{Path(sys.executable).name} -m pip install '{where}{part}'"


def missing(where: str, package: str, extra: str = "") -> InputError:
    """Return the error for something asked for that needs ``package``, which ``extra`` brings."""
    return wrong(where, f"{package}, which is not installed", f"an installation with it: {install(extra)}")


def hub() -> AbstractContextManager[None]:
    """Inside the block the hub's client asks the network only if somebody answers there; else its own cache alone.

    It does not change what is found, only how long nothing takes: the client tries an unreachable host six times
    for every file. Needs the package huggingface_hub (part of ``datasets`` and ``transformers``).
    """
    from huggingface_hub import constants

    name, before = "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE
    offline = before or not _reachable(constants.ENDPOINT)
    return set_meanwhile(lambda: before, partial(setattr, constants, name), offline)


def _reachable(url: str, seconds: float = 5.0) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True  # somebody answered
    except (OSError, ValueError):
        return False


@cache
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return versions of Python and of packages."""
    from importlib import metadata

    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a folder
            installed[package] = "not installed"
    return installed
