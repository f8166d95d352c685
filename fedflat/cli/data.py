"""``fedflat data``: a look at a table of one's own before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedflat.cli import Json, print_json
from fedflat.core.checks import nearest, wrong

if TYPE_CHECKING:
    import pandas as pd

FEW = 20
"""Different values up to which a column of text is taken for categories."""
USERS = ("user", "user_id", "userid", "client", "client_id", "patient", "patient_id", "customer", "customer_id")
PRIVATE = "What stands here is about your clients: keep it to yourself. The guarantee covers none of it."
READ_OFF = (
    "# categories, scale and fill were read off private rows and become public: put in what is known without them."
)


def data(
    file: Path,
    *,
    by: str | None = None,
    target: str | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    as_json: Json = False,
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
    import yaml

    from fedflat.data.encoding import clean
    from fedflat.data.locate import Written, locate

    split = next(iter(locate(str(file), Written(separator, encoding), "FILE")[2].values()))
    names = list(split.features)
    for option, name in (("--by", by), ("--target", target)):
        if name is not None and clean(name) not in names:
            raise wrong(option, name, f"one of the columns {', '.join(names)}", hint=nearest(name, names))
    by = clean(by) if by else next((name for name in names if name.lower() in USERS), None)
    rows = split.read(names).to_pandas()
    looked = {name: _column(rows[name], split.features[name]) for name in names if name != by}
    target = clean(target) if target else _target(looked)
    found = _facts(rows, by, target, looked)
    written = {"separator": separator, "encoding": encoding}
    recipe = _recipe(file, found, {key: value for key, value in written.items() if value is not None})
    if as_json:
        print_json({**found, "recipe": recipe, "note": PRIVATE})
        return
    about = [PRIVATE, f"{file}: {found['rows']} rows, {found['users'] or 'no'} users" + _spread(found)]
    for name, one in looked.items():
        role = "target" if name == target else one["becomes"]
        about.append(f"  {name}: {one['type']}, {one['values']} values, {one['missing']} missing → {role}")
    about += [f"Fault: {fault}" for fault in found["faults"]] or ["No faults."]
    # Written to a file, what is said of the table stands in comments, so that the whole is a recipe.
    mark = "# " if recipe is not None and not sys.stdout.isatty() else ""
    print("\n".join(mark + line for line in about))
    if recipe is not None:
        print(f"\n{READ_OFF}\n{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)}", end="")


def _spread(found: dict[str, Any]) -> str:
    each = found["rows_a_user"]
    if each and each["least"] == each["most"]:
        return f", {each['least']} rows each"
    return f", {each['least']} to {each['most']} rows a user, half of them at most {each['median']:g}" if each else ""


def _column(values: pd.Series, feature: Any) -> dict[str, Any]:
    """Return what a column holds and what it would become as an input."""
    from fedflat.data.tables import is_image, is_text

    missing = int(values.isna().sum())
    if is_image(feature):
        return {"type": "image", "values": len(values), "missing": missing, "becomes": "an image"}
    present = values.dropna()
    try:
        distinct = sorted(present.unique().tolist(), key=str)
    except TypeError:
        # The values are lists, which cannot be compared.
        return {"type": "list", "values": len(present), "missing": missing, "becomes": "its numbers"}
    found: dict[str, Any] = {"type": str(values.dtype), "values": len(distinct), "missing": missing}
    if is_text(feature) or values.dtype == object:
        words = present.astype(str).str.split().str.len().mean() if len(present) else 0
        found["type"] = "text"
        if len(distinct) <= FEW:
            return {**found, "becomes": "a 0/1 feature for each value (categories)", "categories": distinct}
        kind = "text" if words >= 3 else "nothing: list its values in data.categories"
        return {**found, "becomes": "token ids, alone" if kind == "text" else kind, "free": kind == "text"}
    if values.dtype.kind in "mM":
        return {**found, "becomes": "nothing: make it a number"}
    if values.dtype.kind == "b":
        return {**found, "becomes": "0 or 1", "number": True}
    numbers = present.astype(float)
    mean, std = (float(numbers.mean()), float(numbers.std(ddof=0))) if len(numbers) else (0.0, 1.0)
    found |= {"number": True, "scale": [_round(mean), _round(std) or 1.0], "whole": bool((numbers % 1 == 0).all())}
    # Inputs far from 1 make training diverge at the usual rates.
    unscaled = abs(mean) > 3 or std > 3
    return {**found, "becomes": "a number" + (", scaled (data.scale); unscaled it makes training diverge" * unscaled)}


def _round(value: float) -> float:
    """Return two digits of a value: more would say more about the rows."""
    return float(f"{value:.2g}")


def _target(looked: dict[str, dict[str, Any]]) -> str | None:
    from fedflat.data.tables import LABELS

    named = [name for name in looked if name.lower() in LABELS]
    return named[0] if named else next(reversed(looked), None)


def _facts(rows: pd.DataFrame, by: str | None, target: str | None, looked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what a table holds, with all its faults."""
    faults = []
    sizes = None if by is None else rows[by].value_counts()
    if by is None:
        faults.append("no column says whose each row is; name it with --by")
    elif rows[by].isna().any():
        faults.append(f"column {by}: {int(rows[by].isna().sum())} rows belong to nobody")
    for name, one in looked.items():
        if one["missing"]:
            way = "no target can be missing" if name == target else f"data.fill.{name}, or leave the column out"
            faults.append(f"column {name}: {one['missing']} missing values; {way}")
        if one["values"] <= 1:
            faults.append(f"column {name}: one value in all rows, from which nothing is learnt")
    each = None if sizes is None or not len(sizes) else {
        "least": int(sizes.min()), "median": float(sizes.median()), "most": int(sizes.max())}  # fmt: skip
    users = None if sizes is None else len(sizes)
    return {"rows": len(rows), "by": by, "users": users, "rows_a_user": each, "target": target, "columns": looked,
            "faults": faults}  # fmt: skip


def _recipe(file: Path, found: dict[str, Any], written: dict[str, str]) -> dict[str, Any] | None:
    """Return a recipe to start from; None where it is not known whose each row is."""
    looked, target, users = found["columns"], found["target"], found["users"] or 0
    if users < 3 or target is None:
        return None
    others = {name: one for name, one in looked.items() if name != target}
    alone = [name for name, one in others.items() if one.get("free") or one["type"] == "image"][:1]
    usable = [name for name, one in others.items() if one.get("number") or "categories" in one or one["type"] == "list"]
    inputs = usable or alone
    if not inputs or not (looked[target].get("number") or "categories" in looked[target]):
        return None
    goal, of = looked[target], {name: others[name] for name in inputs}
    regression = bool(goal.get("number")) and (goal["values"] > FEW or not goal.get("whole", True))
    lists = {name: one["categories"] for name, one in {**of, target: goal}.items() if "categories" in one}
    scaled = {name: one["scale"] for name, one in {**of, **({target: goal} if regression else {})}.items()
              if "scale" in one}  # fmt: skip
    fill = {name: one.get("scale", one.get("categories"))[0] for name, one in of.items()
            if one["missing"] and ("scale" in one or "categories" in one)}  # fmt: skip
    section = {"dataset": str(file), "by": found["by"], "inputs": inputs, "target": target, "categories": lists,
               "scale": scaled, "fill": fill, "max_per_client": 20, "test_clients": 0.1, **written}  # fmt: skip
    image = bool(not usable and alone and others[alone[0]]["type"] == "image")
    return {
        "rounds": 20, "data": {key: value for key, value in section.items() if value not in ({}, None)},
        "model": "linear" if usable else "cnn" if image else "bow-linear",
        **({"task": "regression"} if regression else {}), "algorithm": "dp-fedavg",
        "local": {"steps": 4, "batch_size": 10, "lr": 0.1 if regression else 0.3},
        "cohort": {"size": max(1, users // 3)}, "privacy": {"clip": 0.5, "epsilon": 8},
    }  # fmt: skip
