"""Keep the steps from a user's rows to inputs and from outputs to answers, and the data sets known by name.

A preparation holds public constants only. It is kept with the released weights, so that whoever has the model can use
it on new rows.

>>> import pandas as pd
>>> from fedflat.data.encoding import encoding_of
>>> prepared = Preparation("table", encoding_of("", ["age", "bought"], "age", "bought", scale={"age": (40, 10)}))
>>> prepared.inputs(pd.DataFrame({"age": [50.0, 40.0]})).tolist()
[[1.0], [0.0]]
>>> Preparation.read(prepared.record()) == prepared
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import yaml
from pydantic import TypeAdapter

from fedflat.core import becoming, require, wrong
from fedflat.data import decoding
from fedflat.data.encoding import Encoding, check_columns

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["image", "text", "chars", "table"]


@dataclass(frozen=True)
class Source:
    """One known data set.

    hub, config: its id and configuration on the Hugging Face hub ("" when bundled, or None for no configuration).
    inputs, label: column names. test: the split that is the public test set ("" when there is none).
    natural: the column that names the client of an example. mean, std: per-channel constants of the
    published data set, after scaling to [0, 1]; they are never computed from the clients' data.
    """

    about: str
    kind: Kind
    hub: str
    classes: int
    inputs: tuple[str, ...]
    label: str = "label"
    config: str | None = None
    test: str = "test"
    natural: str | None = None
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


_LISTED = Path(__file__).with_name("datasets.yaml").read_text(encoding="utf-8")
DATASETS = TypeAdapter(dict[str, Source]).validate_python(yaml.safe_load(_LISTED))


FORMAT = 1


@dataclass(frozen=True)
class Preparation:
    """The steps from a row to a model's input.

    kind: table, text, chars or image. encoding: the columns of a table or of texts, and the public constants for them.
    columns: the column of images or of running text. length: characters of running text. mean, std: constants of
    images. names: the classes in the order of the model's outputs; empty where classes are numbers.
    """

    kind: Kind
    encoding: Encoding | None = None
    columns: tuple[str, ...] = ()
    length: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    names: tuple[Any, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that a table to predict must have."""
        return self.columns if self.encoding is None else self.encoding.inputs

    def inputs(self, frame: pd.DataFrame) -> torch.Tensor:
        """Return the inputs ``(N, ...)`` of a table's rows.

        Raises:
            InputError: a column is missing, or a value cannot be used; row and column are named.
        """
        check_columns("predict", self.reads, frame.columns)
        require(not frame.empty, "predict", "a table of 0 rows", "at least one row")
        if self.encoding is not None:
            return self.encoding.inputs_of(frame, lambda row: f"row {row}")
        if self.kind == "chars":
            texts = (str(value)[-self.length :] for value in frame[self.columns[0]])
            return torch.stack([torch.from_numpy(decoding.encode(text)) for text in texts])
        pixels = decoding.decode(frame[self.columns[0]].tolist(), lambda row: f"predict: row {row}")
        return decoding.normalise(pixels, self.mean, self.std)

    def record(self) -> dict[str, Any]:
        """Return the same as plain values for JSON."""
        values = {"format": FORMAT, **asdict(self)}
        return {key: value for key, value in values.items() if value not in (None, (), 0, "")}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Preparation:
        """Return the preparation that ``record`` wrote.

        Raises:
            InputError: it is of a later version of fedflat, or damaged.
        """
        if record.get("format") != FORMAT:
            raise wrong("preparation", record.get("format"), f"format {FORMAT}, of this version of fedflat")
        with becoming(lambda e: wrong("preparation", f"a damaged record ({e})", "the record of a run"), ValueError):
            return TypeAdapter(cls).validate_python({key: value for key, value in record.items() if key != "format"})


def answers(outputs: torch.Tensor, task: str, preparation: Preparation | None) -> Any:
    """Return what outputs ``(N, ...)`` mean for a task, as an array: classes by their names, numbers, or labels 0/1."""
    if task == "multilabel":
        return (outputs > 0).to(torch.int64).numpy()
    if task == "regression":
        values = outputs.squeeze(-1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs
        return in_own_units(values.double(), preparation).numpy()
    chosen = outputs.argmax(-1).numpy()
    names: Sequence[Any] = () if preparation is None else preparation.names
    if not names or task != "classification":
        return chosen
    return (np.array(names) if len({type(name) for name in names}) == 1 else np.array(names, dtype=object))[chosen]


def in_own_units(values: torch.Tensor, preparation: Preparation | None) -> torch.Tensor:
    """Return predicted or true numbers ``(N,)`` or ``(N, k)`` in the target's own units, where its columns were scaled
    for training.
    """
    encoding = None if preparation is None else preparation.encoding
    if encoding is None or not any(name in encoding.scale for name in encoding.target):
        return values
    scale = values.new_tensor([encoding.scale.get(name, (0.0, 1.0)) for name in encoding.target])
    return values * scale[:, 1] + scale[:, 0]


def probabilities(outputs: torch.Tensor, task: str) -> Any:
    """Return the probability of each class or label ``(N, K)``."""
    return outputs.sigmoid().numpy() if task == "multilabel" else outputs.softmax(-1).numpy()
