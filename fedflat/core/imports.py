"""A callable by import path: ``package.module:callable`` or ``path/to/file.py:callable``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedflat.core.checks import InputError, nearest, wrong

USER_FILES = "fedflat_user_"
"""Before the names of modules read from a user's file; other processes have no such modules."""


def imported(where: str, path: str) -> Callable[..., Any]:
    """The callable at ``path``; ``where`` names the recipe key in error sentences. Raises InputError."""
    module_name, _, attribute = path.rpartition(":")
    module = _file(where, Path(module_name)) if module_name.endswith(".py") else _package(where, module_name)
    found = getattr(module, attribute, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise wrong(where, attribute, f"a callable of {module_name}", hint=nearest(attribute, public))
    return found  # type: ignore[no-any-return]


def _package(where: str, name: str) -> ModuleType:
    if not name:
        raise wrong(where, "no module name before the colon", "package.module:callable")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise wrong(where, f"no importable module {name} ({error})", "package.module:callable") from error


def _file(where: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise wrong(where, f"no file {path}", "path/to/file.py:callable")
    name = f"{USER_FILES}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise wrong(where, f"{path}, which cannot be imported", "a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look their module up while they are made
    try:
        spec.loader.exec_module(module)
    except InputError:
        raise
    except Exception as error:
        raise wrong(where, f"{type(error).__name__} while reading {path} ({error})", "a Python file") from error
    return module
