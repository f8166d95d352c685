"""Define the sections of a recipe: frozen, checked values; ``fedflat explain`` shows each key's docstring."""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedflat.core import wrong

SERVER_LR = {"sgd": 1.0, "adam": 0.03, "yogi": 0.03}
"""``server.lr`` where a recipe gives none."""
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Only:
    """The condition under which a key has an effect: the recipe's key ``chooser`` has one of ``values``.

    values: empty where any value other than None and zero will do.
    """

    chooser: str
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Return whether the key has an effect beside that value of the chooser."""
        return value in self.values if self.values else bool(value)


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
            # Pydantic takes true for the number 1.
            asked = str(cls.model_fields[str(info.field_name)].annotation)
            if re.search("int|float", asked) and "bool" not in asked:
                raise PydanticCustomError("truth", "Input should be a number, not true or false")
        return value


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key's type is, or may be; None where there is none."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def as_named(value: Any) -> Any:
    """``model: cnn`` is short for ``model: {name: cnn}``."""
    return {"name": value} if isinstance(value, str) else value


class Partition(Section):
    """How examples are given to clients."""

    kind: Literal["iid", "dirichlet", "classes", "natural"] = "iid"
    """iid: shuffled. dirichlet: each class spread with weights from Dirichlet(alpha). classes: per_client classes each.
    natural: by a column of the data. Change it to the split that your clients really have."""
    alpha: Annotated[Positive | None, Only("data.partition.kind", ("dirichlet",))] = None
    """Dirichlet concentration of kind dirichlet: 0.1 is very uneven, 0.6 uneven, 10 nearly iid. Example: 0.6"""
    per_client: Annotated[int | None, Field(ge=1), Only("data.partition.kind", ("classes",))] = None
    """Classes each client holds, of kind classes. Example: 2"""
    by: Annotated[str | None, Only("data.partition.kind", ("natural",))] = None
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
    """Old name of data.inputs. Example: image"""
    label: str | None = None
    """Old name of data.target. Example: fine_label"""
    test: str | None = None
    """File or folder of public test data, in the form of the clients' own but without their rows: what is measured on
    it is released without noise. Example: agreed.csv"""
    test_clients: float | list[str | int] | None = None
    """Clients left out of training, whose examples are the public test data: how many, a share below 1, or their names.
    No guarantee covers them. Example: 0.1"""
    test_fraction: Share | None = None
    """Share of the examples held out as public test data where a data set has no test split. None: 0.2 for data sets of
    fedflat list datasets, else nothing. Refused where every row is some client's. Example: 0.1"""
    max_examples: Annotated[int, Field(ge=1)] | None = None
    """Train on at most so many examples, drawn by the seed before the partition; for quick trials. Refused where every
    row is some client's. Example: 5000"""
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
    """Columns that are trained on: numbers, true and false, lists of numbers of one length, words with data.categories,
    free text, or images. None: the data set's own. Example: [age, income]"""
    target: str | list[str] | None = None
    """Column of the target; several for several targets. None: the data set's own. Example: bought"""
    by: str | None = None
    """Column that names the client of each row: short for partition: {kind: natural, by: …}. Example: user"""
    categories: dict[str, list[Any]] | None = None
    """For columns of text or codes, all values in a public order; they are never learnt from the rows. An input becomes
    a 0/1 feature for each value; a target, or the labels of texts and images, class numbers.
    Example: {colour: [red, green, blue]}"""
    scale: dict[str, tuple[float, Positive]] | None = None
    """Public (mean, std) of columns: (x - mean) / std is trained on. Example: {age: [40, 15]}"""
    fill: dict[str, Any] | None = None
    """Public values that stand for missing ones, by column. Without one, a missing value is refused; a missing text is
    empty. Example: {age: 40}"""
    separator: str | None = None
    """What stands between two values of a CSV file. None: a comma, or a tab in .tsv files. Example: ;"""
    encoding: str | None = None
    """Encoding of a CSV file. None: UTF-8. Example: latin-1"""
    max_per_client: Annotated[int, Field(ge=1)] | None = None
    """Public bound on each client's examples: the first so many of a draw by the seed. None: all. Example: 100"""
    examples_per_client: Annotated[int, Field(ge=1)] | None = None
    """n̄, a public number that turns passes over a client's examples into steps, the same for everybody. None: of data
    sets of fedflat list datasets their average, of others max_per_client. Example: 60"""
    classes: Annotated[int | None, Field(ge=1), Only("task", ("classification", "next-token"))] = None
    """Number of classes, a public number. None: of the listed categories, of a data set of fedflat list datasets, or
    one more than the largest label of the public test data; never the largest label of a client. Example: 10"""

    @property
    def natural(self) -> bool:
        """Whether a column of the data says whose each row is."""
        return self.partition.kind == "natural"

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: Any) -> Any:
        """``by: user`` is the natural split by that column."""
        if not isinstance(values, Mapping) or values.get("by") is None:
            return values
        natural = {"kind": "natural", "by": values["by"]}
        asked = values.get("partition", natural)
        if asked not in (natural, {**natural, "alpha": None, "per_client": None}, "natural", {"kind": "natural"}):
            raise wrong("data.by", f"{values['by']} with another partition", "one of by and partition")
        return {**values, "partition": natural}


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
    """K, minibatch steps of every client in a round: one public number. None: one pass over a client's public number of
    examples (data.examples_per_client), or 10 steps where there is none. Few steps drown less in noise a round, many
    move further. Example: 10"""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Instead of steps: E passes over a client's public number of examples n̄ (data.examples_per_client), turned into
    one K = E·⌈n̄/batch⌉ for everybody. Example: 5"""
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
    separation: Annotated[int | None, Field(ge=1), Only("cohort.sampling", ("min-separation", "cyclic-poisson"))] = None
    """b: rounds of one client are at least so many apart (min-separation), or so many groups take turns
    (cyclic-poisson). None: as many as clients/size allows. Example: 10"""
    max: Annotated[int | None, Field(ge=1), Only("cohort.sampling", ("truncated",))] = None
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
    value: Annotated[Positive | None, Only("privacy.clip.kind", ("constant",))] = None
    """C of kind constant. Example: 0.3"""
    quantile: Annotated[float, Field(gt=0, lt=1), Only("privacy.clip.kind", ("adaptive",))] = 0.5
    """Share of updates that kind adaptive aims to leave unclipped. Example: 0.5"""
    initial: Annotated[Positive | None, Only("privacy.clip.kind", ("adaptive",))] = None
    """First C of kind adaptive. Example: 0.2"""
    count_noise: Annotated[Positive | None, Only("privacy.clip.kind", ("adaptive",))] = None
    """σ_b, std of the noise on the adaptive clip's count. None: m/20. Example: 5"""
    values: Annotated[float | list[float] | None, Only("privacy.clip.kind", ("per-tensor",))] = None
    """Thresholds of kind per-tensor: one number, or one for each shared tensor. Example: 0.1"""


class NoiseSection(Section):
    """How the noise of different rounds is related."""

    kind: Literal["independent", "tree", "banded", "toeplitz"] = "independent"
    """independent: every round has its own. The others take most of a round's noise back in later rounds, and need
    cohort.sampling min-separation, cyclic-poisson or full: banded (the least noise, up to 512 rounds), toeplitz (nearly
    as little, up to 2048), tree (the classic, for comparison)."""
    bands: Annotated[int | None, Field(ge=1), Only("privacy.noise.kind", ("banded", "toeplitz"))] = None
    """Rounds over which noise is related, of kinds banded and toeplitz. None (auto): those with the least error of the
    released models under the server's momentum. Example: 10"""

    @model_validator(mode="before")
    @classmethod
    def _automatic(cls, values: Any) -> Any:
        """``bands: auto`` is None."""
        return {**values, "bands": None} if isinstance(values, Mapping) and values.get("bands") == "auto" else values


class SelectionSection(Section):
    """What a run was selected by among several; fedflat tune writes it."""

    mean: Positive
    """E[K], the mean number of trials. Example: 10"""
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
    randomness: Literal["secret", "seeded"] = "secret"
    """Where cohorts and noise come from. secret: operating-system entropy, which nobody can draw again. seeded: the
    seed, so that a table on public data can be made again; such a model protects nobody, and its ε is only that of the
    mechanism. Example: seeded"""
    benchmark: bool = False
    """true: allow randomness: seeded with clients of one's own, to measure with. Such a run is never exported."""
    secure_rng: bool = False
    """true: noise on an exact grid that withstands attacks on floating-point arithmetic. For models that leave the
    house."""
    noise: Annotated[NoiseSection, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = NoiseSection()
    """independent, or {kind: tree | banded | toeplitz, bands: auto | b}: noise that later rounds partly take back, for
    rounds of a client that are known to lie apart. With it σ is that of the run as one Gaussian. Example: banded"""
    noise_cohort: Positive | None = None
    """Simulate the noise of a system with this larger cohort. ε proven is that of what ran; the larger system's is
    shown as simulated. Example: 5000"""
    selection: SelectionSection | None = None
    """Written by fedflat tune into its trials' recipes: ε is that of the selection among all of them. None: the
    settings were fixed beforehand."""

    @property
    def clipping(self) -> ClipSection:
        """The clip as a section, also where it is one number."""
        return self.clip if isinstance(self.clip, ClipSection) else ClipSection(kind="constant", value=self.clip)


class ServerSection(Section):
    """What the server does with the noisy mean."""

    optimizer: Literal["sgd", "adam", "yogi"] | None = None
    """What the server does with the noisy mean: sgd adds it; adam and yogi adapt each coordinate. None: sgd, or the
    method's own (dp-fedadam, dp-disk), beside which another is refused. Example: adam"""
    lr: Positive | None = None
    """Server learning rate. None: 1.0 for sgd, 0.03 for adam and yogi, whose every step is about lr long in each
    coordinate; the method's own with its own optimizer. Example: 1.0"""
    momentum: Annotated[Share, Only("server.optimizer", ("sgd",))] = 0.0
    """Server momentum of sgd; costs no privacy. Example: 0.9"""
    beta1: Annotated[Share, Only("server.optimizer", ("adam", "yogi"))] = 0.9
    """First moment's decay of adam and yogi. Example: 0.9"""
    beta2: Annotated[Share, Only("server.optimizer", ("adam", "yogi"))] = 0.99
    """Second moment's decay of adam and yogi. Example: 0.99"""
    tau: Annotated[Positive, Only("server.optimizer", ("adam", "yogi"))] = 1e-3
    """Added to the root of the second moment: the larger, the less adaptive. Example: 0.001"""
    average: Literal["none", "tail", "ema"] = "none"
    """What is released: none: the last iterate. tail: the mean of the iterates of the second half of the planned
    rounds. ema: a moving average. Costs no privacy, takes noise off; training goes on from the last iterate.
    Example: tail"""
    decay: Annotated[Share, Only("server.average", ("ema",))] = 0.9
    """Share of the old average that average: ema keeps in a round. Example: 0.9"""
    weights: Literal["uniform", "samples"] = "uniform"
    """uniform: every client counts the same. samples: by numbers of examples, refused for private methods, whose
    sensitivity would follow the data."""

    def filled(self) -> "ServerSection":
        """Return the same, with the optimizer and lr that stand for None where a method brings no optimizer of its
        own."""
        name = self.optimizer or "sgd"
        return self.model_copy(update={"optimizer": name, "lr": SERVER_LR[name] if self.lr is None else self.lr})


class EngineSection(Section):
    """Where and how it runs; none of it changes what is computed beyond floating-point rounding."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:1. auto takes a GPU where there is one that agrees with the processor. Example: cpu"""
    backend: str = "auto"
    """auto decides by public shapes and cores: sequential, workers, vectorized, vectorized-fp32, lowrank, ray.
    Example: workers"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the layers' arithmetic: auto is fp32. bf16 keeps float32 weights; lowrank and vectorized-fp32 compute in
    float32 all the same. Example: bf16"""
    block: Annotated[int, Field(ge=1)] | None = None
    """Clients trained at once by block back ends. None: what memory and the cohort allow. Example: 32"""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Worker processes or threads. None: one for each core. Example: 2"""
    compile: Literal[False] | None = None
    """Not served any more: after some shapes torch.compile goes on without compiling, so that one client's arithmetic
    followed from which others came before."""


class EvaluationSection(Section):
    """How often, in rounds, models are evaluated; the last round always is."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on public test data. Example: 5"""
    personal_every: Annotated[int | None, Field(ge=1), Only("data.client_test_fraction")] = None
    """Rounds between evaluations of personal accuracy. None: about ten times in a run. Example: 10"""
    batch_size: Annotated[int, Field(ge=1)] = 500
    """Examples evaluated at once. Example: 500"""
    metrics: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """More to measure on the public test data, each as test_NAME: f1, auc, balanced_accuracy, top5 (classification),
    f1, auc (multilabel), perplexity (next-token), mae, rmse, r2 (regression). Example: [f1, auc]"""
    keep: Literal["last", "best-by-public-metric"] = "last"
    """Which round's weights the run's model, checkpoint and export hold. The best is by test accuracy (or test loss), a
    figure that is then chosen on the test data; ε is that of all rounds. Example: best-by-public-metric"""
    private: Annotated[bool, Only("data.client_test_fraction")] = False
    """Whether each round also releases, with noise of its own, the cohort's accuracy on the examples that clients hold
    back: of the model that the round begins with, as private_accuracy. It is paid from the run's ε. Example: true"""
    share: Annotated[float, Field(gt=0, lt=1), Only("evaluation.private")] = 0.05
    """Share of a round's privacy (of 1/σ²) that evaluation.private takes from the update. Example: 0.1"""
