"""What a run gives back, and ``fedflat.load``, which gives the same from its folder or from an exported one."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedflat.assembly.records import module_again
from fedflat.config.recipe import Recipe
from fedflat.core import contents_of, counted, placed, require, turning, whole, wrong
from fedflat.data.own import prepared
from fedflat.data.preparation import Preparation, answers, probabilities
from fedflat.engine.job import Record, marked_released
from fedflat.privacy.statement import is_seeded
from fedflat.records import checkpoint
from fedflat.records.folder import BODY, LOCKED, PRIVATE, RECIPE, STATEMENT, WITH_BODY, read_lines
from fedflat.report.metrics import own_metrics
from fedflat.report.summary import cautions, summary_rows
from fedflat.simulation.export import Exported, programs, write_export
from fedflat.simulation.inspection import refuse_damage
from fedflat.simulation.recomputed import MODEL, Records

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Result:
    """A run: from ``fedflat.run``, or from its folder by ``fedflat.load``.

    history: one record per round, the keys of metrics.jsonl. private_history: the keys of private/private.jsonl.
    privacy: the statement. folder: the files', or None. stopped: why, if before the last round. heads: personal heads
    by client. stages: seconds by stage. notes: what was found on resuming, a sentence each. made_for: what the model
    takes, see ``preparation``.
    """

    history: list[Record]
    private_history: list[Record]
    privacy: dict[str, Any]
    recipe: Recipe
    folder: Path | None
    stopped: str
    heads: dict[int, torch.Tensor]
    stages: dict[str, float]
    make_module: Callable[[], nn.Module] = field(compare=False)
    notes: tuple[str, ...] = ()
    made_for: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def model(self) -> nn.Module:
        """The module with the final shared weights, in eval mode (a personal head is w^0's).

        Raises InputError where it was given in Python and ``fedflat.load`` was not given it.
        """
        return marked_released(self.make_module())

    @cached_property
    def preparation(self) -> Preparation | None:
        """The public steps from a row to the model's input; None where the run was given tensors."""
        record = self.made_for.get("preparation")
        return None if record is None else Preparation.read(record)

    def predict(self, rows: Any, batch_size: int = 500) -> Any:
        """Return the model's answer for each row, as an array.

        Classes by their names where the run knows them, else by number; numbers in the target's own units; a 0 or 1
        for each of several labels; a token's number at each place.

        rows: a table with the input columns of the run (pandas, Polars, pyarrow, Hugging Face); or, where tensors
        were trained on, a tensor or array of inputs.
        Raises InputError for a column that is missing, a value that cannot be used, or rows of another shape.
        """
        return answers(self._outputs(rows, batch_size), self.recipe.task, self.preparation)

    def predict_proba(self, rows: Any, batch_size: int = 500) -> Any:
        """Return the probability of each class ``(N, classes)``, in the order of ``classes``, or of each label.

        rows: as in ``predict``. Raises InputError for a regression, which has none.
        """
        has, allowed = self.recipe.task != "regression", "classification, multilabel or next-token"
        require(has, "predict_proba", "task: regression", allowed, hint="Use predict.")
        return probabilities(self._outputs(rows, batch_size), self.recipe.task)

    @property
    def classes(self) -> tuple[Any, ...]:
        """Names of the classes in the order of the model's outputs; empty where they are numbers."""
        return () if self.preparation is None else self.preparation.names

    def export(self, out: str | Path, *, program: bool = False, onnx: bool = False) -> Path:
        """Write what the guarantee covers into the new folder ``out``; as ``fedflat.export``.

        Raises InputError where the run wrote no files.
        """
        return export(self, out, program=program, onnx=onnx).folder

    def _outputs(self, rows: Any, batch_size: int) -> torch.Tensor:
        """Return the model's outputs ``(N, ...)`` for rows."""
        inputs = prepared(rows, self.preparation, self.made_for)
        whole("batch_size", batch_size, 1)
        with torch.no_grad():
            return torch.cat([self.model(some) for some in inputs.split(batch_size)]).float()

    @cached_property
    def warnings(self) -> list[str]:
        """What to look at twice, a sentence each: also in the terminal, the report and ``--json``."""
        return cautions(self.privacy, self.history, self.private_history)

    def to_frame(self) -> pd.DataFrame:
        """Return the rounds as a table, one row per round."""
        import pandas as pd

        return pd.DataFrame(self.history)

    def plot(self) -> Figure:
        """Draw accuracy or loss on public test data, and ε, over the rounds: a matplotlib figure."""
        from matplotlib.figure import Figure

        scores = [key for key in ("test_accuracy", "test_loss") if any(r.get(key) is not None for r in self.history)]
        panels = [*scores[:1], *own_metrics(self.history), "epsilon"]
        figure = Figure(figsize=(4.5 * len(panels), 3.2), layout="constrained")
        for axes, key in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            points = [(r["round"] + 1, r[key]) for r in self.history if r.get(key) is not None]
            axes.plot(*(zip(*points) if points else ((), ())), marker="." if len(points) < 30 else "")
            axes.set_xlabel("round")
            spent = "ε of the mechanism" if is_seeded(self.privacy) else "ε spent"
            axes.set_title(spent if key == "epsilon" else key.replace("_", " "))
        return figure

    def __repr__(self) -> str:
        rows = summary_rows(self)
        facts = dict(rows)
        score, value = rows[2][:2]
        texts = [self.recipe.algorithm.name, f"{facts['rounds']} rounds", f"{score} {value.partition(';')[0]}"]
        texts += [f"{n} {facts[n].partition(':')[0]}" for n in ("proven ε", "ε of the mechanism") if n in facts]
        texts.append(counted(len(self.warnings), "warning"))
        return f"<fedflat run: {', '.join(texts)}>"

    def _repr_html_(self) -> str:
        from fedflat.report.wording import filled

        return filled("result.html", rows=summary_rows(self), warnings=self.warnings)


def load(path: str | Path, model: nn.Module | str | None = None) -> Result:
    """Return a run that ended, or an exported folder, with every record checked against its checksums.

    model: the module, or ``my_file.py:make`` as a recipe has it, where it was given in Python; its weights do not
    matter, and it is not changed. The weights are those after the last round. Nothing is trained, and no data are read.
    Raises InputError: no run, one that has not ended, a damaged record (named), a module that does not fit.

    >>> import tempfile
    >>> from fedflat.simulation.run import run
    >>> recipe = {"rounds": 1, "local": {"steps": 1, "lr": 0.1}, "cohort": {"size": 2}, "algorithm": "dp-fedavg"}
    >>> recipe["privacy"] = {"clip": 0.5, "noise_multiplier": 1.0}
    >>> pairs = [(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))] * 10
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run(recipe, model=nn.Linear(3, 2), clients=pairs, out=f"{folder}/first").folder.name
    ...     len(load(f"{folder}/first").history)
    'first'
    1
    """
    folder = _path("load", path)
    require((folder / RECIPE).is_file(), "load", placed(folder), "the folder of a run, or an exported one")
    hint = f"Go on with: fedflat run --resume {path}"
    require((folder / STATEMENT).is_file(), "load", f"{path} without {STATEMENT}", "a run that ended", hint=hint)
    run = refuse_damage(folder)
    recipe, history = run.parsed, run.metrics
    weights, facts, heads = _released(run)
    body = folder / BODY if recipe.model.name in WITH_BODY and (folder / BODY).is_file() else None
    seeded = "seed:" in (folder / RECIPE).read_text(encoding="utf-8")
    if run.locked:
        left = "private_history and personal parts are left out, and the seals that lie there were not compared"
        warnings.warn(f"{folder}: {LOCKED}: {left}", stacklevel=2)
    return Result(
        history=history, private_history=[] if run.locked else read_lines(folder / PRIVATE), recipe=recipe,
        privacy=run.statement or {}, folder=folder, heads=heads, stages={}, made_for=facts,
        stopped="" if len(history) >= recipe.rounds else f"stopped after {counted(len(history), 'round')}",
        make_module=functools.partial(module_again, recipe, weights, facts, model, body, seeded),
    )  # fmt: skip


def _path(where: str, given: Any) -> Path:
    """Return the path of a folder as a caller gives it."""
    with turning(TypeError, wrong(where, given, "the path of a folder")):
        return Path(given)


def _released(run: Records) -> tuple[dict[str, Tensor], Mapping[str, Any], dict[int, Tensor]]:
    """Return the last weights by parameter name, what the module was made for, and the personal heads there are."""
    folder = run.folder
    if (folder / MODEL).is_file():
        weights, metadata = contents_of(folder / MODEL)
        return weights, json.loads(metadata.get("made_for", "{}")), {}
    newest = checkpoint.newest(folder / "checkpoints", hidden=not run.locked)
    if newest is None:
        raise wrong("load", f"{folder} without a sound checkpoint", "a run with released weights")
    _, heads, facts = newest
    return checkpoint.named(newest), facts.get("made_for") or {}, dict(heads.kept)


def export(run: str | Path | Result, out: str | Path, *, program: bool = False, onnx: bool = False) -> Exported:
    """Copy what the guarantee covers of a run's folder into the new folder ``out``; where none is proven, it is said.

    Written: the weights under the module's parameter names, statement, ledger, recipe, metrics, a report without what
    is private to the simulation, how rows become inputs (``preparation.json``), and the checksums of all of them.
    Everything that was left is named, with the reason. Nothing is written before all is known to succeed.

    run: the folder of a run, or a result, which has the module that was given in Python. program, onnx: also the model
    as ``model.pt2`` for torch.export, and as ``model.onnx``.

    Raises:
        InputError: ``run`` is no run with a statement and a sound checkpoint; ``out`` is there already; or the program
            needs a module that was given in Python. RunError: the model has no such form.
    """
    folder = run.folder if isinstance(run, Result) else _path("export", run)
    target = _path("export: out", out)
    if folder is None:
        raise wrong("export", "a run without files", "fedflat.run(…, out=FOLDER)")
    if not (program or onnx):
        return write_export(folder, target)
    result = run if isinstance(run, Result) else None
    return write_export(folder, target, lambda: programs(result or load(folder), program=program, onnx=onnx))
