"""Commands on a finished run: ``export``, ``card``, ``verify``, ``attest``, ``predict``; and an operator's ``keys``."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedflat.cli import Json, RunFolder, print_json
from fedflat.core.checks import wrong

if TYPE_CHECKING:
    import pandas as pd

    from fedflat.report.card import Card
    from fedflat.simulation.result import Result


def export(
    run: Annotated[Path, Argument(help="The folder of a run.")],
    out: Annotated[Path, Argument(help="A new folder.")],
    program: Annotated[
        bool, Option("--program", help="Also model.pt2, a torch.export program that runs without fedflat.")
    ] = False,
    onnx: Annotated[bool, Option("--onnx", help="Also model.onnx, for any ONNX runtime.")] = False,
    as_json: Json = False,
) -> None:
    """What the guarantee covers and nothing else: weights, statement, ledger, recipe, metrics, report.

    Example: fedflat export runs/quick-start handed-over
    """
    from fedflat.simulation.result import export as write_export

    found = write_export(run, out, program=program, onnx=onnx)
    if as_json:
        facts = {"folder": str(found.folder), "files": found.files, "left": dict(found.left)}
        print_json(facts | {"guaranteed": found.guaranteed})
        return
    print(textwrap.fill(f"{found.folder}: {', '.join(found.files)}", 80, subsequent_indent="  "))
    if not found.guaranteed:
        print("No finite ε is proven of this run: no guarantee covers what was exported.")
    print("Left out:")
    for name, why in found.left.items():
        print(f"  {name}: {why}")


def card(
    run: RunFolder,
    others: Annotated[
        list[Path] | None,
        Option("--with", metavar="RUN", help="A run on the same clients that is published too; may be repeated."),
    ] = None,
    about: Annotated[
        Path | None, Option(metavar="FILE", help="YAML with what no run knows: curators, contact, region, …")
    ] = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Where to write. Default: the run's folder.")] = None,
    as_json: Json = False,
) -> None:
    """The privacy card: card.html, card.md and registry.yaml, an entry for the public registry of DP deployments.

    Example: fedflat card runs/quick-start --about about.yaml
    """
    from fedflat.records.folder import check_unsealed
    from fedflat.report import card as making
    from fedflat.report import read_run
    from fedflat.report.registry import read_about
    from fedflat.simulation import refuse_damage

    target = out or run
    check_unsealed(target)
    if (run / "privacy.json").is_file() and (run / "ledger.jsonl").is_file():
        refuse_damage(run)
    found = making.card(
        read_run(run), [read_run(other) for other in others or []], read_about(about) if about else None
    )
    files = _card_files(found, target)
    missing = found.about.missing if "registry.yaml" in files else []
    if as_json:
        facts = {"folder": str(target), "files": files, "sentence": found.sentence, "sections": found.sections}
        print_json(facts | {"missing": missing})
        return
    print(textwrap.fill(found.sentence, 80))
    print(f"Written to {target}: {', '.join(files)}")
    if "registry.yaml" not in files:
        print("No entry for the registry: no finite ε is proven.")
    if missing:
        print(textwrap.fill(f"registry.yaml is a draft. Nobody stated (--about FILE): {', '.join(missing)}", 80))


def _card_files(found: Card, target: Path) -> list[str]:
    """Write the card's files and return their names."""
    from fedflat.report.card import html, markdown, registry_entry
    from fedflat.report.registry import as_yaml

    files = {"card.html": html(found), "card.md": markdown(found)}
    if found.epsilon is not None:
        files["registry.yaml"] = as_yaml(registry_entry(found))
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise wrong("--out", f"{target}, which cannot be written ({error.strerror})", "a folder to write") from error
    return list(files)


WORDS = {"ok": "ok", "wrong": "WRONG", "unchecked": "not checked"}


def verify(
    run: RunFolder,
    key: Annotated[
        Path | None, Option(metavar="PUB", help="The operator's public key, which must have signed the run.")
    ] = None,
    witness: Annotated[
        Path | None, Option(metavar="TIP", help="What a client of the deployment kept of the ledger.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Every record of a run checked, what could not be checked named; exit status 1 if anything is wrong.

    Example: fedflat verify runs/quick-start
    """
    from fedflat.simulation import inspect_run

    found = inspect_run(run, key, witness)
    bad = sum(check.verdict == "wrong" for check in found)
    if as_json:
        print_json({"ok": not bad, "checks": [check._asdict() for check in found]})
    else:
        for check in found:
            print(textwrap.fill(
                f"{WORDS[check.verdict]:12}{check.record}: {check.about}", 80, subsequent_indent=" " * 12
            ))  # fmt: skip
        open_ = sum(check.verdict == "unchecked" for check in found)
        outcome = f"{bad} {'record is' if bad == 1 else 'records are'} wrong" if bad else "nothing is wrong"
        print(f"{run}: {outcome}, {open_} could not be checked")
    if bad:
        raise typer.Exit(1)


def attest(
    run: Annotated[Path, Argument(help="The folder of a run that ended, or an exported one.")],
    out: Annotated[Path, Argument(help="A new folder.")],
    as_json: Json = False,
) -> None:
    """Write statement, ledger, signatures and an independent checker: python OUT/check.py prints ε, exits 0 or 1.

    The checker needs Python and numpy, not fedflat.

    Example: fedflat attest runs/quick-start for-review
    """
    from fedflat.simulation import attest as write

    files = write(run, out)
    if as_json:
        print_json({"folder": str(out), "files": files})
        return
    print(f"{out}: {', '.join(files)}")
    print(f"Check it: python {out / 'check.py'}")


def predict(
    run: RunFolder,
    file: Annotated[Path, Argument(help="Rows with the run's input columns: parquet, CSV, TSV, Excel or images.")],
    out: Annotated[
        Path | None, Option(help="Where to write them: .csv or .parquet. Default: to the terminal, as CSV.")
    ] = None,
    proba: Annotated[bool, Option("--proba", help="Also the probability of each class or label.")] = False,
    model: Annotated[str | None, Option(help="my_file.py:make, where the run's model was given in Python.")] = None,
    separator: Annotated[str | None, Option(help="What stands between two values of a CSV file.")] = None,
    encoding: Annotated[str | None, Option(help="Encoding of a CSV file, for example latin-1.")] = None,
    as_json: Json = False,
) -> None:
    """Answer new rows with a run's released model: their columns are prepared as those it was trained on.

    Example: fedflat predict runs/visits new-visitors.csv --out answers.csv
    """
    from fedflat.core.imports import imported
    from fedflat.data.locate import Written, locate
    from fedflat.simulation import load

    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise wrong("--out", str(out), "a name that ends in .csv or .parquet")
    if out is not None and (out.exists() or not out.parent.is_dir()):
        state = "which already exists" if out.exists() else "in a folder that does not exist"
        raise wrong("--out", f"{out}, {state}", "a new file in a folder that is there")
    result = load(run, model=None if model is None else imported("--model", model)())
    splits = locate(str(file), Written(separator, encoding), "FILE")[2]
    split = next(iter(splits.values()))
    reads = (
        list(split.features)
        if result.preparation is None
        else [c for c in result.preparation.reads if c in split.features]
    )
    rows = split.read(reads).to_pandas()
    found = _answers(result, rows)
    if proba:
        shares = result.predict_proba(rows)
        names = result.classes or range(shares.shape[1])
        found |= {f"p({name})": shares[:, place].tolist() for place, name in enumerate(names)}
    _write_answers(found, out, as_json)


def _answers(result: Result, rows: pd.DataFrame) -> dict[str, list[object]]:
    """Return the answers by column: one for each target, behind the files' names where rows are images."""
    predicted, preparation = result.predict(rows), result.preparation
    targets = () if preparation is None or preparation.encoding is None else preparation.encoding.target
    if predicted.ndim == 2 and len(targets) == predicted.shape[1]:
        found = {name: predicted[:, place].tolist() for place, name in enumerate(targets)}
    else:
        found = {"prediction": predicted.tolist()}
    pictures = rows.iloc[:, 0].tolist() if preparation is not None and preparation.kind == "image" else []
    names = [value.get("path") if isinstance(value, dict) else None for value in pictures]
    return {"file": names, **found} if any(names) else found


def _write_answers(found: dict[str, list[object]], out: Path | None, as_json: bool) -> None:
    import pandas as pd

    frame = pd.DataFrame(found)
    if out is not None:
        frame.to_parquet(out) if out.suffix == ".parquet" else frame.to_csv(out, index=False)
    if as_json:
        print(json.dumps({"rows": len(frame), "out": None if out is None else str(out), **({} if out else found)}))
    elif out is not None:
        print(f"{out}: {len(frame)} predictions")
    else:
        frame.to_csv(sys.stdout, index=False)


ACTIONS = ("new", "show")


def keys(
    action: Annotated[str, Argument(metavar="new|show", help="Make a key, or show the public half of one.")],
    path: Annotated[
        Path | None,
        Option("--key", metavar="FILE", help="The private key's file. Default: the usual place, outside runs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make or show the Ed25519 key that signs the records of your runs.

    With a key in the usual place every run is signed. Give the public half (.pub) to whoever is to check them.

    Example: fedflat keys new
    """
    from fedflat.records import signing
    from fedflat.records.signing import Operator

    if action not in ACTIONS:
        raise wrong("keys", action, "new or show")
    file = signing.place() if path is None else path
    if action == "show" and not file.exists():
        raise wrong("keys", f"no key in {file}", "fedflat keys new makes one")
    operator = Operator.create(file) if action == "new" else Operator.load(file)
    found = {"private": str(file), "public": str(signing.public_place(file)), "keyid": signing.keyid(operator.public)}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"private key: {found['private']} (keep it; nobody else may read it)")
    print(f"public key:  {found['public']}")
    print(f"key id:      {found['keyid']}")
    print(signing.pem(operator.public).decode(), end="")
