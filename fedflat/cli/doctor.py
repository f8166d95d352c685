"""``fedflat doctor``: whether this machine and this installation can work, and what to do where not."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from fedflat.cli import Json, json_text, labelled
from fedflat.core import GIB, free_memory, install, one_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

SHOWN = ("torch", "numpy", "dp-accounting", "flwr")
"""Packages with a line of their own; the others appear only where something is wrong with them."""
TOO_LITTLE = GIB // 16
"""Free disk below which a run's checkpoints have no room."""


class Finding(NamedTuple):
    """One line. state: ok, note (it works, but look) or broken (a run fails). remedy: what to do, if anything."""

    what: str
    state: str
    found: str
    remedy: str = ""


def doctor(*, as_json: Json = False) -> None:
    """Check this machine and this installation: versions, extras, folders, disk, and whether torch loads.

    Exit status 1 if something that every run needs is broken. Nothing is changed, and no network is used.

    Example: fedflat doctor
    """
    findings = [finding for check in CHECKS for finding in _findings(check)]
    broken = sum(finding.state == "broken" for finding in findings)
    facts = {"ok": not broken, "findings": [finding._asdict() for finding in findings]}
    texts, width = [], max(len(finding.what) for finding in findings) + 2
    for finding in findings:
        texts += labelled(f"{finding.what:{width}}{finding.state}", finding.found, width + 8, fold=True)
        texts += labelled("", f"→ {finding.remedy}", width + 8, fold=True) if finding.remedy else []
    texts.append(f"{broken} broken: see above." if broken else "Nothing that a run needs is broken.")
    print(json_text(facts) if as_json else "\n".join(texts))
    if broken:
        raise typer.Exit(1)


def _findings(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings; one that needs a package that is missing or broken says so."""
    try:
        yield from check()
    except ImportError as error:
        yield Finding(check.__name__.strip("_"), "note", f"not checked ({error})", "mend what is broken above first")


def _python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    wanted = (metadata.metadata("fedflat").get_all("Requires-Python") or [">=3.11"])[0]
    fits = SpecifierSet(wanted).contains(platform.python_version())
    remedy = "" if fits else f"Python {wanted}: make PYTHON=python3.12, or another environment"
    version = f"{platform.python_version()} ({platform.machine()}, {platform.system()})"
    yield Finding("python", "ok" if fits else "broken", version, remedy)


def _packages() -> Iterator[Finding]:
    """Yield fedflat, what it requires (there and in its range), and each extra."""
    from packaging.requirements import Requirement

    from fedflat import __version__

    yield Finding("fedflat", "ok", f"{__version__}, from {Path(__file__).resolve().parents[1]}")
    missing: dict[str, list[str]] = {name: [] for name in metadata.metadata("fedflat").get_all("Provides-Extra") or []}
    for need in map(Requirement, metadata.requires("fedflat") or []):
        version, fits = _installed(need)
        always = need.marker is None or need.marker.evaluate({"extra": ""})
        if fits and need.name in SHOWN:
            yield Finding(need.name, "ok", version)
        if fits:
            continue
        fault = f"{version}; needs {need.specifier}" if need.specifier else version
        if always:
            yield Finding(need.name, "broken", fault, install())
        for extra, faults in missing.items():
            if need.marker is not None and not always and need.marker.evaluate({"extra": extra}):
                faults.append(f"{need.name} {fault}")
    for extra, faults in missing.items():
        remedy = f"if wanted: {install(extra)}" if faults else ""
        yield Finding(f"[{extra}]", "note" if faults else "ok", ", ".join(faults) or "installed", remedy)


def _installed(need: Requirement) -> tuple[str, bool]:
    """Return the version of a package, and whether it is one that is needed."""
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return "not installed", False
    return version, need.specifier.contains(version, prereleases=True)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", "ok", str(cores))
    if (free := free_memory()) is not None:
        remedy = "end other programs, or -o engine.backend=sequential" if free < GIB else ""
        yield Finding("memory", "note" if remedy else "ok", f"{free / GIB:.1f} GiB available", remedy)


def _computing() -> Iterator[Finding]:
    """Yield whether torch loads, and the GPU, if there is one."""
    try:
        import torch

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch can use"
    except Exception as error:
        # A broken binary may raise anything.
        yield Finding("torch", "broken", one_line(error), f"{install()}, into a new environment")
    else:
        yield Finding("GPU", "ok", gpu)


def _text() -> Iterator[Finding]:
    names = {"output": getattr(sys.stdout, "encoding", None) or "", "files": locale.getpreferredencoding(False)}
    other = {label: name for label, name in names.items() if name.lower().replace("_", "-") not in ("utf-8", "utf8")}
    odd = [f"{label} in {name or 'no encoding'}" for label, name in other.items()]
    if odd:
        yield Finding("text", "note", f"{', '.join(odd)}: ε is spelled eps", "export PYTHONUTF8=1, or LC_ALL=C.UTF-8")
    else:
        yield Finding("text", "ok", "UTF-8")


def _folders() -> Iterator[Finding]:
    """Yield where a run and the noise keys go: writable; keys for the owner only, and outside the run."""
    from fedflat.records import keys

    here, store = Path.cwd(), keys.folder()
    yield _writable("this folder", here, "go to a folder you may write to, or name one: --out")
    yield _writable("noise keys", store, "export XDG_STATE_HOME=a folder you may write to")
    mode = stat.S_IMODE(store.stat().st_mode) if store.exists() else 0
    if mode & 0o077:
        yield Finding("noise keys", "broken", f"{store}: mode {mode:04o}, others may look in", f"chmod 700 '{store}'")
    if store.resolve().is_relative_to(here.resolve() / "runs"):
        yield Finding("noise keys", "broken", f"{store} lies in runs/", "another XDG_STATE_HOME")
    free = shutil.disk_usage(here).free
    remedy = "make room" if free < TOO_LITTLE else ""
    yield Finding("disk", "broken" if remedy else "ok", f"{free / GIB:.1f} GiB free here", remedy)


def _writable(label: str, folder: Path, remedy: str) -> Finding:
    """Return whether a file can be made in a folder, or in the nearest one above that exists."""
    # Nothing is created by a check, so the nearest folder that exists is tried.
    place = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding(label, "broken", f"{folder} ({error.strerror})", remedy)
    return Finding(label, "ok", f"{folder}{'' if place == folder else ', not made yet'}")


CHECKS = (_python, _packages, _machine, _computing, _text, _folders)
