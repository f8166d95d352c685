"""The sections of a recipe: frozen, checked values; each key's docstring is what ``fedflat explain`` says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedflat.core.checks import wrong

SERVER_LR = {"sgd": 1.0, "adam": 0.03, "yogi": 0.03}
"""``server.lr`` where a recipe gives none."""
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, and true is not the number 1."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false, which are numbers to Python, where a number is asked."""
        if isinstance(value, bool):
            asked = str(cls.model_fields[str(info.field_name)].annotation)
            if re.search("int|float", asked) and "bool" not in asked:
                raise PydanticCustomError("truth", "Input should be a number, not true or false")
        return value


def as_named(value: Any) -> Any:
    """``model: cnn`` is short for ``model: {name: cnn}``."""
    return {"name": value} if isinstance(value, str) else value


class Partition(Section):
    """How examples are given to clients."""

    kind: Literal["iid", "dirichlet", "classes", "natural"] = "iid"
    """iid: shuffled. dirichlet: each class spread with weights from Dirichlet(alpha). classes: per_client classes each.
    natural: by a column of the data. Change it to the split that your clients really have."""
    alpha: Positive | None = None
    """Dirichlet concentration of kind dirichlet: 0.1 is very uneven, 0.6 uneven, 10 nearly iid. Example: 0.6"""
    per_client: Annotated[int, Field(ge=1)] | None = None
    """Classes each client holds, of kind classes. Example: 2"""
    by: str | None = None
    """Column that names the client, of kind natural. Example: writer_id"""


class DataSection(Section):
    """Which examples, and how they are spread over clients."""

    dataset: str = "digits"
    """What is trained on: a name of fedflat list datasets, any hub id, or a file or folder of parquet with the hub's
    columns or of a table (parquet or CSV; found under FEDFLAT_DATA too). Example: cifar10"""
    partition: Annotated[Partition, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = Partition()
    """How examples are given to clients. Example: {kind: dirichlet, alpha: 0.6}"""
    clients: Annotated[int, Field(ge=1)] | None = None
    """M, the number of clients, a public number. None: as many as the natural partition has. More clients buy more
    privacy for the same noise. Example: 500"""
    client_test_fraction: Share = 0.0
    """Share of each client's examples held back for personal accuracy; they are never trained on. Needed by personal
    methods. Example: 0.2"""
    input: str | list[str] | None = None
    """Column or columns of the inputs. None: the data set's own. Example: image"""
    label: str | None = None
    """Column of the targets. None: the data set's own. Example: fine_label"""
    test_fraction: Share | None = None
    """Share of the training data held out as public test data where the data set has no test split. None: 0.2.
    Example: 0.1"""
    max_examples: Annotated[int, Field(ge=1)] | None = None
    """Train on at most so many examples, drawn by the seed before the partition; for quick trials. Example: 5000"""
    max_test: Annotated[int, Field(ge=1)] | None = None
    """Evaluate on at most so many test examples, the first ones. Example: 2000"""
    validation_fraction: Share = 0.0
    """Share of the public test examples that is set apart, by a public draw, for choosing settings; accuracies are
    those on the rest. fedflat tune sets it to 0.5 where it is 0. Example: 0.5"""
    tokenizer: str | None = None
    """Folder or hub id of a transformers tokenizer. None: words hashed to numbers. Example: models/roberta-base"""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a text beyond which it is cut. Example: 64"""
    vocabulary: Annotated[int, Field(ge=3, le=2**20)] | None = None
    """Numbers that words are hashed to, where no tokenizer is named. Example: 5000"""
    inputs: str | list[str] | None = None
    """Columns of a table (parquet or CSV) that are read as numbers: numbers, true and false, lists of numbers of one
    length, or text with data.categories. Example: [age, income]"""
    target: str | list[str] | None = None
    """Column of a table with the target; several for several targets. Example: bought"""
    by: str | None = None
    """Column that names the client of each row: short for partition: {kind: natural, by: …}. Example: user"""
    categories: dict[str, list[Any]] | None = None
    """For columns of text or codes, all values in a public order; they are never learnt from the rows. An input becomes
    a 0/1 feature for each value; a target, or the labels of texts and images, class numbers.
    Example: {colour: [red, green, blue]}"""
    scale: dict[str, tuple[float, Positive]] | None = None
    """Public (mean, std) of columns: (x - mean) / std is trained on. Example: {age: [40, 15]}"""
    max_per_client: Annotated[int, Field(ge=1)] | None = None
    """Public bound on each client's examples: the first so many of a draw by the seed. None: all. Example: 100"""

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """``by: user`` is the natural split by that column."""
        if not isinstance(given, Mapping) or given.get("by") is None:
            return given
        natural = {"kind": "natural", "by": given["by"]}
        asked = given.get("partition", natural)
        if asked not in (natural, {**natural, "alpha": None, "per_client": None}, "natural", {"kind": "natural"}):
            raise wrong("data.by", f"{given['by']} with another partition", "one of by and partition")
        return {**given, "partition": natural}


class NamedSection(Section):
    """A name and the options that its factory takes; they are checked by the factory's signature."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The section's keys other than the name: what its factory is called with."""
        return dict(self.model_extra or {})


class LocalSection(Section):
    """Local training; ``epochs`` becomes one public step count K = E·⌈n̄/batch⌉ for everybody."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """K, minibatch steps of every client in a round: one public number. None: one pass over the average client. Few
    steps drown less in noise a round, many move further. Example: 10"""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Instead of steps: E passes over the average client, turned into one public K = E·⌈n̄/batch⌉ for everybody.
    Example: 5"""
    batch_size: Annotated[int, Field(ge=1)] = 50
    """Examples of a minibatch. With at least a client's number of examples every step is a full-batch step.
    Example: 50"""
    lr: Positive = 0.1
    """Learning rate η of round 0. Change it first, together with the clip. Example: 0.1"""
    momentum: Share | None = None
    """Local momentum μ, starting at zero each round. None: the method's own (0.5; 0 for dp-fedpgn and dp-scaffold,
    which need it). Example: 0.5"""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Round t uses lr·lr_decay^t. Example: 0.998"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """What a local step does with its gradient. adam: Kingma and Ba 2015, with moments of the client's own that start
    at zero in each round (0.9, 0.999) and lr about a hundredth of what SGD takes; for transformers and adapters."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate over the planned rounds, besides lr_decay: constant, or down to zero after the last along half
    a cosine or a straight line."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """The learning rate grows in equal steps over this many first rounds. Example: 3"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Added to the loss gradient as weight_decay·w, before any mixing. Example: 0.0005"""
    max_grad_norm: Positive | None = None
    """Each minibatch gradient is scaled down to this L2 norm: a training aid, no privacy. Example: 10"""


class CohortSection(Section):
    """Who takes part in a round."""

    size: Annotated[float, Field(gt=0)]
    """m, the expected number of clients in a round, and the public constant that every sum is divided by. Larger
    cohorts drown less in noise; everybody in every round (size = clients) is often best. Example: 50"""
    sampling: Literal["poisson", "truncated", "fixed", "full", "min-separation", "cyclic-poisson"] = "poisson"
    """poisson: each client by its own secret coin. truncated: poisson with a largest cohort. fixed: exactly size
    clients, a much larger ε. Without a secret draw, best with correlated noise (privacy.noise): full: everybody in
    every round; min-separation: a public round-robin. cyclic-poisson: coins within groups that take turns."""
    separation: Annotated[int, Field(ge=1)] | None = None
    """b: rounds of one client are at least so many apart (min-separation), or so many groups take turns
    (cyclic-poisson). None: as many as clients/size allows. Example: 10"""
    max: Annotated[int, Field(ge=1)] | None = None
    """Largest cohort of sampling truncated. Example: 70"""
    min: Annotated[int, Field(ge=1)] | None = None
    """The minimum cohort of trust distributed: a round with fewer honest shares is aborted and stays charged. None:
    chosen so that aborts are rare. Example: 40"""
    max_participations: Annotated[int, Field(ge=1)] | None = None
    """Rounds that a client takes part in at most, of trust local. Example: 30"""
    colluders: Annotated[int, Field(ge=0)] = 0
    """f: that many clients may tell the server their noise shares (trust distributed). Example: 3"""


class ClipSection(Section):
    """A clip other than one constant."""

    kind: Literal["constant", "adaptive", "per-tensor", "median"]
    """constant: one C. adaptive: C follows a private quantile of the update norms. per-tensor: C_j for each tensor,
    counted as √ΣC_j². median: only in published procedures; it proves nothing."""
    value: Positive | None = None
    """C of kind constant. Example: 0.3"""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of updates that kind adaptive aims to leave unclipped. Example: 0.5"""
    initial: Positive | None = None
    """First C of kind adaptive. Example: 0.2"""
    count_noise: Positive | None = None
    """σ_b, std of the noise on the adaptive clip's count. None: m/20. Example: 5"""
    values: float | list[float] | None = None
    """Thresholds of kind per-tensor: one number, or one for each shared tensor. Example: 0.1"""


class NoiseSection(Section):
    """How the noise of different rounds is related."""

    kind: Literal["independent", "tree", "banded", "toeplitz"] = "independent"
    """independent: every round has its own. The others take most of a round's noise back in later rounds, and need
    cohort.sampling min-separation, cyclic-poisson or full: banded (the least noise, up to 512 rounds), toeplitz (nearly
    as little, up to 2048), tree (the classic, for comparison)."""
    bands: Annotated[int, Field(ge=1)] | None = None
    """Rounds over which noise is related, of kinds banded and toeplitz. None (auto): those with the least error of the
    released models under the server's momentum. Example: 10"""

    @model_validator(mode="before")
    @classmethod
    def _automatic(cls, given: Any) -> Any:
        """``bands: auto`` is None."""
        return {**given, "bands": None} if isinstance(given, Mapping) and given.get("bands") == "auto" else given


class SelectionSection(Section):
    """What a run was selected by among several; fedflat tune writes it."""

    mean: Positive
    """E[K], the mean number of trials. Example: 10"""
    eta: float | None = None
    """η of the truncated negative binomial that K was drawn from (1: geometric). None: Poisson. Example: 1"""
    beside: list[dict[str, float]] = []
    """The rounds, cohorts and noise multipliers that other trials may have had, where settings change them."""
    trial: str = ""
    """A random name, which makes the trial's noise its own. Example: 6f1c"""


class PrivacySection(Section):
    """The guarantee: exactly one of noise_multiplier and epsilon, unless the method is not private."""

    clip: float | ClipSection = 1.0
    """C: the L2 norm that no client's whole update exceeds. Smaller: less noise, more bias. Change it first; a good
    start lets about half of the updates through. Example: 0.3"""
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    """σ: std of the noise on the sum, over C. Give it, or epsilon. Example: 0.95"""
    epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Target ε of the whole run; σ is calibrated to it before round 0. Give it, or noise_multiplier. Example: 8"""
    budget: Positive | None = None
    """The run stops before a round after which ε would exceed this. None: epsilon where it is given. Example: 8"""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """δ, the chance that the guarantee fails. None: 0.1/clients; a larger one warns. Example: 0.0002"""
    trust: Literal["central", "distributed", "local"] | None = None
    """central: the server is trusted. distributed: clients add noise shares and only their sum is seen. local: the
    server sees each noised update. None: central, and distributed for ddgauss."""
    protocol: Literal["sound", "published"] = "sound"
    """sound: the guarantee is true. published: a paper's released procedure, its claimed ε shown beside what is
    proven."""
    published: Annotated[str | None, BeforeValidator(lambda v: f"{v:03d}" if type(v) is int else v)] = None
    """The paper whose procedure it is, where a method is in several: 000 (Shi et al. 2023a), 002 (Liu et al. 2025), 003
    (Shi et al. 2023b) or 004 (Cheng et al. 2022). Example: 002"""
    accountant: str = "pld"
    """How ε is worked out: pld (tight), rdp (looser, simpler) or fft (our own, an independent check)."""
    secure_rng: bool = False
    """true: noise and cohorts from the operating system's entropy, and noise on an exact grid that withstands
    floating-point attacks. For models that leave the house."""
    noise: Annotated[NoiseSection, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = NoiseSection()
    """independent, or {kind: tree | banded | toeplitz, bands: auto | b}: noise that later rounds partly take back, for
    rounds of a client that are known to lie apart. With it σ is that of the run as one Gaussian. Example: banded"""
    noise_cohort: Positive | None = None
    """Simulate the noise of a system with this larger cohort. ε proven is that of what ran; the larger system's is
    shown as simulated. Example: 5000"""
    selection: SelectionSection | None = None
    """Written by fedflat tune into its trials' recipes: ε is that of the selection among all of them. None: the
    settings were fixed beforehand."""


class StartSection(Section):
    """What round 0 is instead of the method's; its share of the budget is fixed before the run."""

    kind: Literal["class-statistics"] = "class-statistics"
    """class-statistics: one clipped release of sums of features by class, which the last layer starts from."""
    clip: Positive | None = None
    """C of that round: the L2 norm that no client's class sums exceed. None: privacy.clip. Example: 10"""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Its share of the budget: of the sum of 1/σ² over all rounds. Example: 0.2"""
    lr: Positive = 1.0
    """The last layer is this many times the noisy mean of the class sums. Example: 10"""


class ServerSection(Section):
    """What the server does with the noisy mean."""

    optimizer: Literal["sgd", "adam", "yogi"] | None = None
    """What the server does with the noisy mean: sgd adds it; adam and yogi adapt each coordinate. None: sgd, or the
    method's own (dp-fedadam, dp-disk), beside which another is refused. Example: adam"""
    lr: Positive | None = None
    """Server learning rate. None: 1.0 for sgd, 0.03 for adam and yogi, whose every step is about lr long in each
    coordinate; the method's own with its own optimizer. Example: 1.0"""
    momentum: Share = 0.0
    """Server momentum of sgd; costs no privacy. Example: 0.9"""
    beta1: Share = 0.9
    """First moment's decay of adam and yogi. Example: 0.9"""
    beta2: Share = 0.99
    """Second moment's decay of adam and yogi. Example: 0.99"""
    tau: Positive = 1e-3
    """Added to the root of the second moment: the larger, the less adaptive. Example: 0.001"""
    average: Literal["none", "tail", "ema"] = "none"
    """What is released: none: the last iterate. tail: the mean of the iterates of the second half of the planned
    rounds. ema: a moving average. Costs no privacy, takes noise off; training goes on from the last iterate.
    Example: tail"""
    decay: Share = 0.9
    """Share of the old average that average: ema keeps in a round. Example: 0.9"""
    weights: Literal["uniform", "samples"] = "uniform"
    """uniform: every client counts the same. samples: by numbers of examples, refused for private methods, whose
    sensitivity would follow the data."""

    def filled(self) -> ServerSection:
        """The same, with the optimizer and lr that stand for None where a method brings no optimizer of its own."""
        name = self.optimizer or "sgd"
        return self.model_copy(update={"optimizer": name, "lr": SERVER_LR[name] if self.lr is None else self.lr})


class EngineSection(Section):
    """Where and how it runs; none of it changes what is computed beyond floating-point rounding."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:1. auto takes a GPU where there is one that agrees with the processor. Example: cpu"""
    backend: str = "auto"
    """auto measures what is fastest here: sequential, workers, vectorized, vectorized-fp32, lowrank, ray. graphs, on
    a GPU, is experimental: never run on a real one by us. Example: workers"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the layers' arithmetic: auto is fp32. bf16 keeps float32 weights; lowrank and vectorized-fp32 compute in
    float32 all the same. Example: bf16"""
    block: Annotated[int, Field(ge=1)] | None = None
    """Clients trained at once by block back ends. None: what memory allows. Example: 32"""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Worker processes, threads, or streams of a GPU. None: one for each core. Example: 2"""
    compile: bool | None = None
    """Train the model compiled by torch.compile. None: no."""


class EvaluationSection(Section):
    """How often, in rounds, models are evaluated; the last round always is."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on public test data. Example: 5"""
    personal_every: Annotated[int, Field(ge=1)] | None = None
    """Rounds between evaluations of personal accuracy. None: about ten times in a run. Example: 10"""
    batch_size: Annotated[int, Field(ge=1)] = 500
    """Examples evaluated at once. Example: 500"""
    metrics: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """More to measure on the public test data, each as test_NAME: f1, auc, balanced_accuracy, top5 (classification),
    f1, auc (multilabel), perplexity (next-token), mae, rmse, r2 (regression). Example: [f1, auc]"""
