"""``fedflat COMMAND``. Thin: it parses, calls the library, prints. Status 0 done, 1 failed, 2 bad input; stopped
before it was done: 130 by Ctrl-C, 143 by SIGTERM."""

import codecs
import errno
import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer
from typer import Option

from fedflat import __version__
from fedflat.cli import as_command
from fedflat.core import InputError, RunError, nearest, process, readable, require

app = typer.Typer(
    name="fedflat",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning under client-level differential privacy, with methods that look for flat minima.\n\n"
    "Start with: fedflat run. Then: fedflat list algorithms, and fedflat compare quick-start "
    "-o algorithm.name=dp-fedavg,dp-fedsam. What a guarantee costs: fedflat budget. "
    "Each command's --help has examples.",
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"fedflat {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@cache
def _assemble() -> None:
    """Add every command to the app, once in a process."""
    from fedflat.cli import audit, catalogue, doctor, finished, planning, reproduce, training

    commands: dict[str, Callable[..., None]] = {
        "run": training.run, "compare": training.compare, "plan": planning.plan, "tune": planning.tune,
        "budget": planning.budget, "calibrate": planning.calibrate, "audit": audit.audit,
        "deploy": training.deploy, "landscape": audit.landscape, "reproduce": reproduce.reproduce,
        "leaderboard": reproduce.leaderboard, "bounds": audit.bounds, "list": catalogue.list_names,
        "report": catalogue.report, "explain": catalogue.explain, "predict": finished.predict, "data": catalogue.data,
        "export": finished.export, "card": finished.card, "verify": finished.verify, "attest": finished.attest,
        "keys": finished.keys, "watch": catalogue.watch, "runs": catalogue.runs, "doctor": doctor.doctor,
    }  # fmt: skip
    for name, command in commands.items():
        function, description = as_command(command)
        app.command(name, help=description)(function)


SPELLED = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "eps", "η": "eta", "λ": "lambda", "μ": "mu", "ρ": "rho",
    "σ": "sigma", "Δ": "delta", "Σ": "sum", "√": "sqrt", "∞": "inf", "±": "+-", "≤": "<=", "≥": ">=", "≈": "~",
    "×": "x", "·": "*", "−": "-", "–": "-", "—": "-", "→": "->", "─": "-", "━": "=", "’": "'",
}  # fmt: skip
"""For an output that has no such letters: an ε that became a ? would be no statement at all."""


def main() -> None:
    """Run the ``fedflat`` command: errors become one line and an exit status."""
    _assemble()
    process.forget_signals()
    process.warn_in_a_line()
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        # An encoding without ε gets it spelled out instead of an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")
    try:
        _check_words(sys.argv[1:])
        sys.exit(_status(app(standalone_mode=False) or 0))
    except InputError as error:
        _complain(str(error), 2)
    except RunError as error:
        _complain(str(error), _status(1))
    except KeyboardInterrupt:
        _complain("stopped at once", _status(130))
    except BrokenPipeError:
        # Python flushes stdout at its end, which would fail on the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if refused := _refused(error):
            _complain(*refused)
        if isinstance(error, (MemoryError, RuntimeError)):
            from fedflat.engine.device import out_of_memory

            if out_of_memory(error):
                _complain("memory was short: a smaller model, or fewer or shorter examples, need less", 1)
        _usage(error)


def _check_words(words: list[str]) -> None:
    """Raise InputError for an empty word: an empty path would be this folder. Warn of a key given twice."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    seen = set()
    for before, word in zip(["fedflat", *words], words):
        require(bool(word.strip()), before if before[0] == "-" else f"the word after {before}", "nothing", "a value")
        if before in ("-o", "--override"):
            key = word.partition("=")[0]
            if key in seen:
                print(f"Warning: -o {key} is given twice, and only the last counts, {word}", file=sys.stderr)
            seen.add(key)


def _status(status: int) -> int:
    """Return the exit status: of what a signal left undone, 128 and the signal's number, as shells have it."""
    return 128 + number if status and (number := process.stop_signal()) else status


def _refused(error: Exception) -> tuple[str, int] | None:
    """Return one line and the exit status for a disk or a quota that is full, wherever it was met, and for a file that
    this account may not read or write; None for anything else.
    """
    number = error.errno if isinstance(error, OSError) else None
    # Libraries in Rust put the number into the message.
    if number is None and (match := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(match[1])
    path = getattr(error, "filename", None)
    if number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"{path or 'a file'}: cannot be written ({os.strerror(number)}); what was written before is kept", 1
    # ENOENT: in /proc no file can be made.
    odd = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR)
    if path and number in odd:
        return f"{path}: found {os.strerror(number)}; allowed: what this account may read or write.", 2
    return None


def _usage(error: Exception) -> None:
    """Print a mistake that the argument parser found as one line; anything else is a bug and is raised."""
    message = getattr(error, "format_message", None)
    if type(error).__name__ in ("Exit", "Abort"):
        sys.exit(getattr(error, "exit_code", 1))
    if message is None:
        raise error
    # Some parsers say twice what was meant.
    text = re.sub(r"(Did you mean [^?]*\?) \(?Did you mean .*", r"\1", message().replace("\n", " "))
    if odd := re.match(r"^Invalid value for '(\S+)': '?(.*?)'? is not a valid (int|float)[\w ]*\.$", text):
        text = f"{odd[1]}: found {odd[2]}; allowed: {'a whole number' if odd[3] == 'int' else 'a number'}."
    # Without a command the help was shown.
    if not text:
        sys.exit(2)
    if (context := getattr(error, "ctx", None)) and type(error).__name__ == "MissingParameter":
        text += f" {context.get_usage()}"
    option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    names = [parameter.name for parameter in context.command.params] if option and context else []
    if "override" in names and not nearest(option, names):
        from fedflat.config.recipe import elsewhere

        if hint := elsewhere(option) or nearest(option, ("rounds", "seed", "task")):
            key = hint.removeprefix("Did you mean ").removesuffix("?")
            text = f"{text.partition(' Did you mean ')[0]} A recipe's key is changed with -o {key}=VALUE."
    _complain(text, 2)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Return what an encoding lacks, in letters that every encoding has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(letter: str) -> str:
    return SPELLED.get(letter) or unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"


def _complain(text: str, status: int) -> None:
    print(f"fedflat: {readable(text, '?')}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
