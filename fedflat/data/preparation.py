"""Keep the steps from a user's rows to inputs and from outputs to answers, and the data sets known by name.

A preparation holds public constants only. It is kept with the released weights, so that whoever has the model can use
it on new rows.

>>> import pandas as pd
>>> from fedflat.data.encoding import encoding_of
>>> found = Preparation("table", encoding_of("", ["age", "bought"], "age", "bought", scale={"age": (40, 10)}))
>>> found.inputs(pd.DataFrame({"age": [50.0, 40.0]})).tolist()
[[1.0], [0.0]]
>>> Preparation.read(found.record()) == found
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedflat.core.checks import nearest, wrong
from fedflat.data import decoding
from fedflat.data.encoding import Encoding, inputs_of

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["image", "text", "chars", "table"]


@dataclasses.dataclass(frozen=True)
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


def _glue(config: str, inputs: tuple[str, ...], about: str) -> Source:
    # GLUE's own test splits have no public labels
    return Source(about, "text", "nyu-mll/glue", 2, inputs, config=config, test="validation")


def _letters(hub: str, classes: int, about: str, mean: float, std: float) -> Source:
    return Source(about, "image", hub, classes, ("image",), mean=(mean,), std=(std,))


DATASETS: dict[str, Source] = {
    "digits": Source(
        "1,797 digits 8×8, bundled", "image", "", 10, ("image",), mean=(0.3053,), std=(0.3760,), test=""
    ),
    "mnist": _letters("ylecun/mnist", 10, "70,000 digits 28×28", 0.1307, 0.3081),
    "fashion_mnist": _letters("zalando-datasets/fashion_mnist", 10, "70,000 clothes 28×28", 0.2860, 0.3530),
    "emnist": _letters("tanganke/emnist_letters", 26, "145,600 handwritten letters 28×28", 0.1722, 0.3309),
    "femnist": Source(
        "814,277 characters 28×28 by 3,597 writers",
        "image", "flwrlabs/femnist", 62, ("image",), "character",
        test="", natural="writer_id", mean=(0.9637,), std=(0.1592,),
    ),
    "cifar10": Source(
        "60,000 photographs 32×32",
        "image", "uoft-cs/cifar10", 10, ("img",),
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Source(
        "60,000 photographs 32×32, 100 classes",
        "image", "uoft-cs/cifar100", 100, ("img",), "fine_label",
        mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762),
    ),
    "shakespeare": Source(
        "next character in the plays, one client per speaker",
        "chars", "flwrlabs/shakespeare", 81, ("text",), "",
        test="", natural="character_id",
    ),
    "sst2": _glue("sst2", ("sentence",), "sentiment of film reviews"),
    "cola": _glue("cola", ("sentence",), "is the sentence grammatical"),
    "mrpc": _glue("mrpc", ("sentence1", "sentence2"), "do two sentences mean the same"),
    "rte": _glue("rte", ("sentence1", "sentence2"), "does one sentence follow from the other"),
    "qnli": _glue("qnli", ("question", "sentence"), "does the sentence answer the question"),
    "qqp": _glue("qqp", ("question1", "question2"), "are two questions duplicates"),
}  # fmt: skip


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
        for name in self.reads:
            if name not in frame.columns:
                there = [str(column) for column in frame.columns]
                raise wrong("predict", f"no column {name}", f"the columns {', '.join(self.reads)}",
                            hint=nearest(name, there) or f"There are {', '.join(there)}.")  # fmt: skip
        if self.encoding is not None:
            return inputs_of(frame, self.encoding, lambda row: f"row {row}")
        if self.kind == "chars":
            found = [decoding.encode(str(value)[-self.length :]) for value in frame[self.columns[0]]]
            return torch.stack([torch.from_numpy(ids) for ids in found])
        pixels = decoding.decode(frame[self.columns[0]].tolist(), "predict")
        return decoding.normalise(pixels, self.mean, self.std)

    def record(self) -> dict[str, Any]:
        """Return the same as plain values for JSON."""
        found = {"format": FORMAT, **asdict(self)}
        return {key: value for key, value in found.items() if value not in (None, (), 0, "")}

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Preparation:
        """Return the preparation that ``record`` wrote.

        Raises:
            InputError: it is of a later version of fedflat, or damaged.
        """
        values: dict[str, Any] = dict(found)
        if values.pop("format", None) != FORMAT:
            raise wrong("preparation", found.get("format"), f"format {FORMAT}, of this version of fedflat")
        try:
            if "encoding" in values:
                values["encoding"] = Encoding.read(values["encoding"])
            lists: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
            return cls(**lists)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise wrong("preparation", f"a damaged record ({error})", "the record of a run") from None


def answers(outputs: torch.Tensor, task: str, preparation: Preparation | None) -> Any:
    """Return what outputs ``(N, ...)`` mean for a task, as an array: classes by their names, numbers, or labels 0/1."""
    import numpy as np

    if task == "multilabel":
        return (outputs > 0).to(torch.int64).numpy()
    if task == "regression":
        return _unscaled(outputs.squeeze(-1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs, preparation)
    chosen = outputs.argmax(-1).numpy()
    names: Sequence[Any] = () if preparation is None else preparation.names
    if not names or task != "classification":
        return chosen
    table = np.array(names) if len({type(name) for name in names}) == 1 else np.array(names, dtype=object)
    return table[chosen]


def _unscaled(values: torch.Tensor, preparation: Preparation | None) -> Any:
    """Return numbers in the target's own units, where its column was scaled for training."""
    found = values.double().numpy()
    encoding = None if preparation is None else preparation.encoding
    if encoding is None or not (scaled := {n: encoding.scale[n] for n in encoding.target if n in encoding.scale}):
        return found
    if len(encoding.target) == 1:
        mean, std = scaled[encoding.target[0]]
        return found * std + mean
    for column, name in enumerate(encoding.target):
        mean, std = scaled.get(name, (0.0, 1.0))
        found[:, column] = found[:, column] * std + mean
    return found


def check_probable(task: str) -> None:
    """Raise InputError for a task whose answers have no probabilities."""
    if task == "regression":
        raise wrong("predict_proba", f"task: {task}", "classification, multilabel or next-token", hint="Use predict.")


def probabilities(outputs: torch.Tensor, task: str) -> Any:
    """Return the probability of each class or label ``(N, K)``."""
    return outputs.sigmoid().numpy() if task == "multilabel" else outputs.softmax(-1).numpy()
