"""The table of data sets known by a short name: where they are, which columns count, and their public constants."""

from __future__ import annotations

import dataclasses
from typing import Literal

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
