"""Commands on a finished run: ``export``, ``card``, ``verify``, ``attest``, ``predict``; and an operator's ``keys``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedflat.cli import Folder, Json, RunFolder, json_text, labelled, say, write_files
from fedflat.core import counted, require

if TYPE_CHECKING:
    import pandas as pd

    from fedflat.simulation.result import Result


def export(run: Path, out: Path, *, program: bool = False, onnx: bool = False) -> None:
    """What the guarantee covers and nothing else: weights, statement, ledger, recipe, metrics, report.

    Example: fedflat export runs/quick-start handed-over

    Args:
        run: The folder of a run.
        out: A new folder.
        program: Also model.pt2, a torch.export program that runs without fedflat.
        onnx: Also model.onnx, for any ONNX runtime.
    """
    from fedflat.simulation.result import export as write_export

    done = write_export(run, out, program=program, onnx=onnx)
    say(f"{done.folder}: {', '.join(done.files)}")
    if not done.guaranteed:
        print("No finite ε is proven of this run: no guarantee covers what was exported.")
    print("\n".join(["Left out:", *(f"  {name}: {why}" for name, why in done.left.items())]))


def card(
    run: RunFolder, *, others: Annotated[list[Path] | None, Option("--with", metavar="RUN")] = None, out: Folder = None
) -> None:
    """The privacy card: card.html, card.md and registry.yaml, an entry for the public registry of DP deployments.

    Example: fedflat card runs/quick-start

    Args:
        others: A run on the same clients that is published too; may be repeated.
        out: Where to write. Default: the run's folder.
    """
    from fedflat.records.folder import check_unsealed
    from fedflat.report import card as making
    from fedflat.report.metrics import read_run
    from fedflat.simulation.inspection import refuse_damage

    target = out or run
    check_unsealed(target)
    for folder in (run, *(others or [])):
        if (folder / "privacy.json").is_file() and (folder != run or (folder / "ledger.jsonl").is_file()):
            refuse_damage(folder)
    content = making.card(read_run(run), [read_run(other) for other in others or []])
    founded = content.epsilon is None or (run / "ledger.jsonl").is_file()
    require(founded, "card", f"{run} without ledger.jsonl", "a run with its ledger")
    files = {"card.html": making.html(content), "card.md": making.markdown(content)}
    if content.epsilon is not None:
        files["registry.yaml"] = making.as_yaml(making.registry_entry(content))
    write_files(target, files)
    say(content.sentence, "")
    if together := content.sections["Composition"].get("All together"):
        say(f"All {1 + len(others or ())} runs together: {together}", "")
    print(f"Written to {target}: {', '.join(files)}")
    draft = 'registry.yaml is a draft: write what no run knows in the place of "not stated".'
    print("No entry for the registry: no finite ε is proven." if content.epsilon is None else draft)


WORDS = {"ok": "ok", "wrong": "WRONG", "unchecked": "not checked"}


def verify(
    run: RunFolder,
    *,
    key: Annotated[Path | None, Option(metavar="PUB")] = None,
    witness: Annotated[Path | None, Option(metavar="TIP")] = None,
    as_json: Json = False,
) -> None:
    """Every record of a run checked, what could not be checked named; exit status 1 if anything is wrong.

    Example: fedflat verify runs/quick-start

    Args:
        key: The operator's public key, which must have signed the run.
        witness: What a client of the deployment kept of the ledger.
    """
    from fedflat.simulation.inspection import inspect_run

    checks = inspect_run(run, key, witness)
    verdicts = Counter(check.verdict for check in checks)
    bad = verdicts["wrong"]
    outcome = f"{bad} {'record is' if bad == 1 else 'records are'} wrong" if bad else "nothing is wrong"
    words = ((WORDS[check.verdict], f"{check.record}: {check.about}") for check in checks)
    texts = [line for verdict, text in words for line in labelled(verdict, text, 12)]
    texts.append(f"{run}: {outcome}, {verdicts['unchecked']} could not be checked")
    facts = {"ok": not bad, "checks": [check._asdict() for check in checks]}
    print(json_text(facts) if as_json else "\n".join(texts))
    if bad:
        raise typer.Exit(1)


def attest(run: Path, out: Path) -> None:
    """Write statement, ledger, signatures and an independent checker: python OUT/check.py prints ε, exits 0 or 1.

    The checker needs Python and numpy, not fedflat.

    Example: fedflat attest runs/quick-start for-review

    Args:
        run: The folder of a run that ended, or an exported one.
        out: A new folder.
    """
    from fedflat.simulation.export import attest as write

    print(f"{out}: {', '.join(write(run, out))}\nCheck it: python {out / 'check.py'}")


def predict(
    run: RunFolder,
    file: Path,
    *,
    out: Path | None = None,
    proba: bool = False,
    model: str | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    as_json: Json = False,
) -> None:
    """Answer new rows with a run's released model: their columns are prepared as those it was trained on.

    Example: fedflat predict runs/visits new-visitors.csv --out answers.csv

    Args:
        file: Rows with the run's input columns: parquet, CSV, TSV, Excel or images.
        out: Where to write them: .csv or .parquet. Default: to the terminal, as CSV.
        proba: Also the probability of each class or label.
        model: my_file.py:make, where the run's model was given in Python; called as a recipe's model is.
        separator: What stands between two values of a CSV file. Default: as in the run's own data.
        encoding: Encoding of a CSV file, for example latin-1. Default: that of the run's own data.
    """
    import pandas as pd

    from fedflat.core import durable
    from fedflat.data.encoding import check_columns
    from fedflat.data.locate import COMMAS, Written, ending_of, locate
    from fedflat.simulation.result import load

    if out is not None:
        require(out.suffix in (".csv", ".parquet"), "--out", str(out), "a name that ends in .csv or .parquet")
        state = "which already exists" if out.exists() else "in a folder that does not exist"
        new = out.parent.is_dir() and not out.exists()
        require(new, "--out", f"{out}, {state}", "a new file in a folder that is there")
    result = load(run, model=model)
    if ending_of(file) in COMMAS:  # read as the training table was, unless an option says otherwise
        separator, encoding = separator or result.recipe.data.separator, encoding or result.recipe.data.encoding
    split = next(iter(locate(str(file), Written(separator, encoding), "FILE", owned=False)[2].values()))
    names = list(split.features)
    if result.preparation is not None:
        check_columns("FILE", result.preparation.reads, names)
        names = list(result.preparation.reads)
    rows = split.frame(names)
    answers = _answers(result, rows)
    if proba:
        shares = result.predict_proba(rows)
        classes = result.classes or range(shares.shape[1])
        answers |= {f"p({name})": shares[:, place].tolist() for place, name in enumerate(classes)}
    frame = pd.DataFrame(answers)
    if out is not None:
        durable.replace(out, frame.to_parquet() if out.suffix == ".parquet" else frame.to_csv(index=False), 0o644)
    if as_json:
        print(json_text({"rows": len(frame), "out": out, **({} if out else answers)}))
    elif out is not None:
        print(f"{out}: {counted(len(frame), 'prediction')}")
    else:
        frame.to_csv(sys.stdout, index=False)


def _answers(result: Result, rows: pd.DataFrame) -> dict[str, list[object]]:
    """Return the answers by column: one for each target, behind the files' names where rows are images."""
    predicted, preparation = result.predict(rows), result.preparation
    targets = () if preparation is None or preparation.encoding is None else preparation.encoding.target
    if predicted.ndim == 2 and len(targets) == predicted.shape[1]:
        columns = {name: predicted[:, place].tolist() for place, name in enumerate(targets)}
    else:
        columns = {"prediction": predicted.tolist()}
    names = [value.get("path") if isinstance(value, dict) else None for value in rows.iloc[:, 0]]
    return {"file": names, **columns} if any(names) else columns


def keys(
    action: Annotated[str, Argument(metavar="new|show")],
    *,
    path: Annotated[Path | None, Option("--key", metavar="FILE")] = None,
) -> None:
    """Make or show the Ed25519 key that signs the records of your runs.

    With a key in the usual place every run is signed. Give the public half (.pub) to whoever is to check them.

    Example: fedflat keys new

    Args:
        action: Make a key, or show the public half of one.
        path: The private key's file. Default: the usual place, outside runs.
    """
    from fedflat.records import signing

    require(action in ("new", "show"), "keys", action, "new or show")
    file = signing.place() if path is None else path
    require(action == "new" or file.exists(), "keys", f"no key in {file}", "fedflat keys new makes one")
    operator = signing.Operator.create(file) if action == "new" else signing.Operator.load(file)
    print(f"private key: {file} (keep it; nobody else may read it)\npublic key:  {signing.public_place(file)}")
    print(f"key id:      {signing.keyid(operator.public)}\n{signing.pem(operator.public).decode()}", end="")
