"""TensorBoard and MLflow as further readers of a run's rounds; off unless asked for.

What a round released goes to them as it goes to metrics.jsonl. What is private to the simulation goes only where it is
asked for, under names that say so. A claimed ε is never sent: a chart could show it without the proven one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fedflat.core.checks import RunError, wrong
from fedflat.core.extras import missing
from fedflat.report.groups import flatten
from fedflat.report.metrics import number

PRIVATE = "private_not_covered"  # first part of every private name
MLFLOW_LIMIT = 500  # characters of a parameter's value


class Tracker(Protocol):
    """Takes the numbers of a round by name, and learns how the run ended."""

    def write(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, done: bool) -> None: ...


def scalars(released: Mapping[str, Any], private: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The finite numbers of a round by name; lists and mappings by place or key (``class_accuracy/3``).

    private: that record's numbers too, under ``private_not_covered/``; None leaves it out.
    """
    found = dict(_numbers("", {key: value for key, value in released.items() if key != "claimed_epsilon"}))
    if private is not None:
        found |= dict(_numbers(f"{PRIVATE}/", private))
    return found


def _numbers(prefix: str, record: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{key}/", value)
        elif (found := number(value)) is not None and (prefix + str(key)) not in ("round", f"{PRIVATE}/round"):
            yield prefix + str(key), found


class TensorBoard:
    """Event files in a folder. Raises InputError where tensorboard is not installed or the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("--tensorboard", "tensorboard", "trackers") from error
        try:
            self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
        except OSError as error:
            raise wrong("--tensorboard", f"{folder} ({error.strerror})", "a folder to write") from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        """One scalar for each name; on disk when this returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self, done: bool) -> None:
        """Write what is buffered and close the event file."""
        self._writer.close()  # type: ignore[no-untyped-call]


class MLflow:
    """One MLflow run in the experiment ``fedflat``; the recipe's keys are its parameters.

    Raises InputError where mlflow is not installed or the server does not answer.
    """

    EXPERIMENT = "fedflat"

    def __init__(self, uri: str, name: str, recipe: Mapping[str, Any], private: bool) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing("--mlflow", "mlflow", "trackers") from error
        try:
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(self.EXPERIMENT)
            place = self._client.create_experiment(self.EXPERIMENT) if found is None else found.experiment_id
            tags = {f"fedflat.{PRIVATE}": "written: not covered by the guarantee" if private else "not written"}
            self._run = self._client.create_run(place, run_name=name, tags=tags).info.run_id
            for key, value in (flatten(recipe) | {"seed": recipe.get("seed")}).items():
                self._client.log_param(self._run, key, str(value)[:MLFLOW_LIMIT])
        except Exception as error:  # mlflow's stores raise errors of many libraries
            raise wrong("--mlflow", f"{uri} ({_first_line(error)})", "the URI of an MLflow store") from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        """One metric for each name."""
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, done: bool) -> None:
        """End the MLflow run: finished, or failed."""
        self._client.set_terminated(self._run, "FINISHED" if done else "FAILED")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Trackers:
    """The trackers asked for, as a context manager and a callback of each round; does nothing without any.

    Raises RunError where a tracker stops taking numbers: the run can be resumed.
    """

    def __init__(
        self, recipe: Any, *, tensorboard: Path | None = None, mlflow: str | None = None, private: bool = False
    ) -> None:
        if private and tensorboard is None and mlflow is None:
            raise wrong("--track-private", "no tracker", "with --tensorboard DIR or --mlflow URI")
        self._private = private
        self._all: list[Tracker] = []
        if tensorboard is not None:
            self._all.append(TensorBoard(tensorboard))
        if mlflow is not None:
            self._all.append(MLflow(mlflow, recipe.name, recipe.dump(), private))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._all:
            with _asked_to_close(error):
                tracker.close(done=error is None)

    def round(self, released: Mapping[str, Any], private: Mapping[str, Any]) -> None:
        """A round's two records, as they are written to metrics.jsonl and private/private.jsonl."""
        if not self._all:
            return
        values = scalars(released, private if self._private else None)
        for tracker in self._all:
            try:
                tracker.write(values, int(released["round"]))
            except Exception as error:  # whatever the tracker's library raises
                name = type(tracker).__name__
                raise RunError(
                    f"{name} could not record the numbers: {_first_line(error)}. The run's files are whole."
                ) from error


@contextmanager
def _asked_to_close(already: BaseException | None) -> Iterator[None]:
    """A tracker that cannot be closed must not hide why the run ended."""
    try:
        yield
    except Exception as error:
        if already is None:
            raise RunError(f"the tracker could not be closed: {_first_line(error)}") from error
