"""What a run gives back, and what can be read of a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedflat.config.recipe import Recipe
from fedflat.engine.train import Record
from fedflat.report.cautions import cautions
from fedflat.report.endings import summary_rows
from fedflat.report.metrics import own_metrics

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Result:
    """A run: from ``fedflat.run``, or from its folder by ``fedflat.load``.

    history: one record per round, the keys of metrics.jsonl. private_history: the keys of private/private.jsonl.
    privacy: the statement. folder: the files', or None. stopped: why, if before the last round. heads: personal heads
    by client. stages: seconds by stage. notes: what was found on resuming, a sentence each.
    """

    history: list[Record]
    private_history: list[Record]
    privacy: dict[str, Any]
    recipe: Recipe
    folder: Path | None
    stopped: str
    heads: dict[int, torch.Tensor]
    stages: dict[str, float]
    made: Callable[[], nn.Module] = field(compare=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def model(self) -> nn.Module:
        """The module with the final shared weights, in eval mode (a personal head is w^0's).

        Raises InputError where it was given in Python and ``fedflat.load`` was not given it.
        """
        return self.made()

    @cached_property
    def warnings(self) -> list[str]:
        """What to look at twice, a sentence each: also in the terminal, the report and ``--json``."""
        return cautions(self.privacy, self.history, self.private_history)

    def to_frame(self, *, private: bool = False) -> pd.DataFrame:
        """The rounds as a table, one row per round. private: with what is private to the simulation, its columns
        called ``private.…``."""
        import pandas as pd

        frame = pd.DataFrame(self.history)
        if not private:
            return frame
        hidden = pd.DataFrame(self.private_history).drop(columns=["note"], errors="ignore").add_prefix("private.")
        return frame.join(hidden.drop(columns=["private.round"], errors="ignore"))

    def plot(self) -> Figure:
        """Accuracy or loss on public test data, and ε, over the rounds: a matplotlib figure."""
        from matplotlib.figure import Figure

        shown = [key for key in ("test_accuracy", "test_loss") if any(r.get(key) is not None for r in self.history)][:1]
        shown += [*own_metrics(self.history), "epsilon"]
        figure = Figure(figsize=(4.5 * len(shown), 3.2), layout="constrained")
        for axes, key in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
            points = [(r["round"] + 1, r[key]) for r in self.history if r.get(key) is not None]
            axes.plot(*(zip(*points) if points else ((), ())), marker="." if len(points) < 30 else "")
            axes.set_xlabel("round")
            axes.set_title("ε spent" if key == "epsilon" else key.replace("_", " "))
        return figure

    def __repr__(self) -> str:
        rows = summary_rows(self)
        facts = dict(rows)
        said = [
            self.recipe.algorithm.name,
            f"{facts['rounds']} rounds",
            f"{rows[2][0]} {rows[2][1].partition(';')[0]}",
            f"proven ε {facts['proven ε'].partition(':')[0]}",
            f"{len(self.warnings)} warning{'' if len(self.warnings) == 1 else 's'}",
        ]
        return f"<fedflat run: {', '.join(said)}>"

    def _repr_html_(self) -> str:
        from fedflat.report.pages import filled

        return filled("result.html", rows=summary_rows(self), warnings=self.warnings)
